//! Collective operations between ranks: threads of a process, processes of a host, or hosts.
//!
//! In go slices or typed ranges of memory and the ranks that share them; out comes the agreed result
//! on every rank, with the four moments of each operation: submitted, started, all ranks present,
//! finished. This crate moves and reduces numbers and knows nothing of layers or models.
//!
//! # A program
//!
//! An all-reduce of a `Vec<f32>` between processes (`examples/blocking.rs`):
//!
//! ```no_run
//! use paceline_collectives::{CollectiveError, Group, ReduceOp};
//!
//! fn main() -> Result<(), CollectiveError> {
//!     let group = Group::from_env(None)?;
//!     let mut data = vec![group.rank() as f32 + 1.0; 1_000_000];
//!     group.all_reduce_slice(&mut data, ReduceOp::Sum)?;
//!     println!("rank {} of {}: {}", group.rank(), group.world_size(), data[0]);
//!     Ok(())
//! }
//! ```
//!
//! [`Group::from_env`] reads who the ranks are from the environment, so any of these starts it:
//!
//! ```text
//! paceline launch -n 2 -- ./program
//! torchrun --no-python --nproc-per-node 2 ./program
//! mpirun -n 2 ./program
//! srun -n 2 ./program
//! ```
//!
//! Started alone it is a group of one. Ranks of one host share memory; others are connected by
//! sockets. PACELINE_TRANSPORT chooses otherwise. [`Group::shm`], [`Group::tcp`] and
//! [`Group::hybrid`] take rank, world size and [`Rendezvous`] from the program instead.
//!
//! Ranks can also be threads of one process, and the rest stays the same:
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
//!
//! # Operations
//!
//! `S` is the longer of what a rank sends and what it receives, in bytes; `n` ranks; `h` hosts of `k`
//! ranks each. Shares and blocks may differ in length, and may be empty.
//!
//! **`thread` and `shm`**: bytes that a rank reads and writes in memory. A *gate* is where all ranks
//! meet.
//!
//! | operation | steps | bytes per rank |
//! |---|---|---|
//! | all-reduce | 2 gates | reads `S`, writes `S` |
//! | reduce | 2 gates | reads `S`, writes `S/n` |
//! | reduce-scatter | 2 gates | reads `S`, writes its share |
//! | all-gather | 2 gates | reads and writes `S`; in place `(n-1)/n S` |
//! | broadcast | 2 gates | all but the root read and write `S` |
//! | gather | 2 gates | the root reads and writes `S` |
//! | scatter | 2 gates | reads and writes its share |
//! | all-to-all | 2 gates | reads and writes what it receives |
//! | send, recv, send-recv | the two ranks meet | the receiver reads and writes `S` |
//! | barrier | 1 gate | 0 |
//!
//! **`tcp`**: bytes through the busiest rank in its busier direction. Before the steps of an operation
//! between all ranks, each sends each a header of 88 bytes, which is one more step, and in an all-to-all
//! then two counts of 8 bytes for each rank; the header of a send goes with its data. The table leaves
//! headers and counts out; the cost model ([`Cost`]) has them.
//!
//! | operation | steps | bytes |
//! |---|---|---|
//! | all-reduce, direct | 2 | `2 (n-1)/n S` |
//! | all-reduce, ring | `2 (n-1)` | `2 (n-1)/n S`, to one neighbour |
//! | reduce | 2 | `2 (n-1)/n S` into the root |
//! | broadcast | 2 | `2 (n-1)/n S` out of the root |
//! | reduce-scatter | 1 | `(n-1)/n S` |
//! | all-gather, all-to-all | 1 | `(n-1)/n S` |
//! | gather, scatter | 1 | `(n-1)/n S` at the root |
//! | send, recv, send-recv | 1 | `S` |
//! | barrier | the headers | 0 |
//!
//! **`hybrid`**: steps and bytes between hosts. Ranks with the same place on their hosts form a rail;
//! within a host everything goes through shared memory.
//!
//! | operation | steps | bytes |
//! |---|---|---|
//! | all-reduce | `2 (h-1)`, overlapping in chunks | `S` from each host to the next, and back |
//! | reduce, reduce-scatter | `h-1`, overlapping in chunks, and 1 | `S` from each host to the next; then each rank's part from the last host |
//! | broadcast | 1 | `S` from the root's host to each other |
//! | all-gather | 1 | each rank's share once to each other host |
//! | gather, scatter, all-to-all, send, recv, send-recv | 1 | each block straight from rank to rank |
//! | barrier | the headers | 0 |
//!
//! In the reductions of `hybrid`, 16-bit floats travel forward as f32, so twice as many bytes.
//!
//! Objects that can be serialised have [`Group::gather_object`], [`Group::all_gather_object`] and
//! [`Group::broadcast_object`].
//!
//! # The same bits
//!
//! | transport | order of summation of an element | same bits |
//! |---|---|---|
//! | `thread`, `shm`, `tcp` (direct), `hybrid` | rank 0, 1, 2, ... | as each other |
//! | `tcp` with [`Algorithm::Ring`] | share `j` of `n`: rank `j`, `j+1`, ..., `j-1` | in every run with `n` ranks, not those of the others |
//! | `mpi` | the library's | as the library has it |
//!
//! This holds for reduction as a whole: f16 and bf16 are summed in f32 and rounded once (by the ring
//! at every step), and a mean is the sum divided once. Whatever only moves data, and minimum, maximum
//! and sums of integers, give the same bits everywhere. [`Algorithm::Auto`] may take the ring for some
//! sizes, so it promises no more than the ring.
//!
//! # Memory that peers can reach
//!
//! [`Group::allocate`] gives memory that the ranks of a host share: `shm` and `hybrid` work on it in
//! place, with the bytes of the table. A `Vec` of another process can be reached by nobody else, so the
//! operations on slices are staged: each rank copies a quarter of a megabyte at a time to a place that all
//! can reach, while the peers work on the half before. An all-reduce of two ranks then reads and
//! writes `S` once more, and of more than two ranks twice. Threads, and ranks connected by `tcp`, use
//! either kind of memory directly.
//!
//! # Work in the background
//!
//! The operations on tensors have a form that ends in `_async` and returns [`Work`]. Operations of one
//! group run in the order in which they were submitted, on a thread of the group's own. Each claims
//! what it reads and writes until it is finished: touching that memory earlier is an error, and not a
//! race. [`OpTimes`] tells apart the time in the queue, the wait for the slowest rank, and the time in
//! which data moved. See `examples/overlap.rs`.
//!
//! # Failures
//!
//! No failure is a hang:
//!
//! - Every wait ends at [`GroupOptions::timeout`], and names the ranks that did not come.
//! - A peer that dies is named by all that still need it, with operation, sequence number and bytes.
//! - Every rank shows what it calls before data move. Calls that differ in operation, type, counts or
//!   order are an error on every rank, which names both.
//! - After an error the group is broken: later operations fail at once with the first cause, and what
//!   was claimed stays claimed, because a peer may still write there.
//!
//! PACELINE_COMM_LOG=info writes a line to standard error for every operation, `trace` also one at its
//! start. Each rank remembers its last 1,000 operations and, if PACELINE_DUMP_FOLDER names a folder,
//! writes them there as JSON lines when the group fails; [`Group::dumper`] does it on demand.
//! [`write_error_file`] tells torchrun why a rank failed.
//!
//! # Groups within groups
//!
//! [`Group::split`] makes one sub-group of all ranks that name the same colour. It has a queue and a
//! sequence of its own. See `examples/sub_groups.rs`.
//!
//! # Emulated links
//!
//! With [`GroupOptions::link`] or [`Group::emulate`], every operation takes as long as it would on a
//! [`Link`] of that bandwidth and latency, by the steps and bytes of [`Cost`], which are those of `tcp`.
//! A group and the sub-groups split from it share one emulated network card per rank: what they send at the
//! same time goes out one after the other. The thread that executes the operation sleeps meanwhile, so
//! computation goes on. A link that is not at least 1.25 times as slow as the transport beneath it is
//! refused. Threads call [`Group::emulate`] themselves.
//!
//! # Limits
//!
//! Linux only. At most [`MAX_RANKS`] ranks in a group. `hybrid` needs the same number of ranks on every
//! host, counted host by host. `tcp` opens a connection between any two ranks and is neither encrypted
//! nor protected against those who can read the network: the secret of the run keeps strangers
//! out and no more. There is no way to go on with the ranks that are left after a failure.

#![deny(missing_docs)]

mod call;
mod clock;
mod context;
mod core;
mod cost;
mod emulator;
mod engine;
mod error;
mod flight_recorder;
mod from_env;
mod group;
mod header;
mod hybrid;
mod meet;
#[cfg(feature = "mpi")]
mod mpi;
mod objects;
mod ops;
mod options;
mod record;
mod reduce;
mod shared;
mod slices;
mod tcp;
mod warning;
mod worker;

pub use call::MAX_RANKS;
pub use clock::{ClockOffset, Exchange, measure_clock};
pub use cost::{Algorithm, Cost, Link, NAMED_LINKS};
pub use error::CollectiveError;
pub use flight_recorder::{COMM_LOG, CommLog, DUMP_FOLDER};
pub use from_env::TRANSPORT;
pub use group::{Dumper, Group};
pub use options::{GroupOptions, Transport};
pub use record::{OpKind, OpRecord, OpTimes};
pub use reduce::{ReduceElement, ReduceOp};
pub use worker::Work;

// What a program names when it forms a group. The whole of it is in `paceline-rendezvous`.
pub use paceline_rendezvous::{
    EnvironmentError, Launcher, Placement, Rendezvous, RendezvousError, RendezvousPoint,
    write_consequence_file, write_error_file,
};
