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
//! Processes meet at a [`Store`] of keys and values, which rank 0 hosts or torchrun's agent serves;
//! [`Placement`] reads from the environment who they are and where, for every usual launcher.
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

mod call;
mod core;
mod cost;
mod door;
mod engine;
mod environment;
mod error;
mod group;
mod hybrid;
mod meeting;
mod objects;
mod ops;
mod options;
mod pace;
mod record;
mod reduce;
mod shared;
mod slices;
mod store;
mod tcp;
mod warning;
mod watch;
mod worker;

pub use cost::{Algorithm, Cost, Link, NAMED_LINKS};
pub use environment::{
    EnvironmentError, Launcher, Placement, write_consequence_file, write_error_file,
};
pub use error::CollectiveError;
pub use group::{Dumper, Group, MAX_RANKS};
pub use meeting::{Meeting, MeetingPoint};
pub use options::{GroupOptions, Transport};
pub use record::{OpKind, OpRecord, OpTimes};
pub use reduce::{ReduceElement, ReduceOp};
pub use store::Store;
pub use watch::{COMM_LOG, CommLog, DUMP_FOLDER};
pub use worker::Work;
