//! Collective operations between the ranks of one host.
//!
//! In go typed ranges of memory (or plain slices) and the ranks that share them; out comes the
//! agreed result on every rank, with the four moments of each operation: submitted, started, all
//! peers present, finished. It moves and reduces numbers and knows nothing of layers or models.
//!
//! | operation | steps | bytes touched per rank (S = message) | order of summation |
//! |---|---|---|---|
//! | all-reduce | 2 gates | reads S, writes S | rank 0, 1, 2, ... for each element |
//! | broadcast | 2 gates | writes S (root reads it) | - |
//! | gather | 2 gates | root reads and writes `world` x S | - |
//! | barrier | 1 gate | 0 | - |
//!
//! Two transports share one algorithm: `thread` (ranks are threads of one process) and `shm` (ranks
//! are processes; memory is anonymous files passed over an authenticated socket). Both sum in rank
//! order, so both give the same bits.
//!
//! ```
//! use paceline_collectives::{Group, ReduceOp};
//!
//! let sums: Vec<f32> = std::thread::scope(|scope| {
//!     let ranks = Group::threads(2).into_iter().map(|group| {
//!         scope.spawn(move || {
//!             let mut mine = vec![group.rank() as f32 + 1.0; 3];
//!             group.all_reduce_slice(&mut mine, ReduceOp::Sum).unwrap();
//!             mine[0]
//!         })
//!     });
//!     ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect()
//! });
//! assert_eq!(sums, [3.0, 3.0]);
//! ```

mod all_reduce;
mod barrier;
mod broadcast;
mod control;
mod error;
mod gather;
mod group;
mod meeting;
mod record;
mod reduce;
mod round;
mod segment;
mod shm;
mod worker;

pub use control::MAX_RANKS;
pub use error::CollectiveError;
pub use group::{Group, GroupOptions, Transport};
pub use meeting::{Meeting, MeetingPoint};
pub use record::{OpKind, OpRecord, OpTimes};
pub use reduce::{ReduceElement, ReduceOp};
pub use worker::Work;
