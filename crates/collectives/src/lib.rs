//! Collective operations between ranks: threads of a process, processes of a host, or hosts.
//!
//! Input: tensors or slices, and the ranks that share them. Output: the same result on
//! every rank, with four times for each operation: submitted, started, all ranks present, finished.
//! This crate moves and reduces numbers. It knows nothing of layers or models.
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
//! [`Group::from_env`] reads the ranks from the environment, so any of these commands starts it:
//!
//! ```text
//! paceline launch -n 2 -- ./program
//! torchrun --no-python --nproc-per-node 2 ./program
//! mpirun -n 2 ./program
//! srun -n 2 ./program
//! ```
//!
//! Without a launcher, the program is a group of one. By default, ranks of one host share memory, and ranks of different
//! hosts are connected by sockets; PACELINE_TRANSPORT overrides that choice. [`Group::shm`], [`Group::tcp`] and
//! [`Group::hybrid`] take rank, world size and [`Rendezvous`] from the program instead.
//!
//! Ranks can also be threads of one process:
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
//! `S` is the size of the message in bytes: the longer of what a rank sends and what it receives. `n` is the number of
//! ranks; `h` is the number of hosts, with `k` ranks each. Shares and blocks may differ in length, and may be empty.
//!
//! **`thread` and `shm`**: bytes that a rank reads and writes in memory. The ranks share a barrier. Its first *phase*
//! completes when all ranks have arrived, the second when all ranks have done their work.
//!
//! | operation | steps | bytes per rank |
//! |---|---|---|
//! | all-reduce | 2 phases | reads `S`, writes `S` |
//! | reduce | 2 phases | reads `S`, writes `S/n` |
//! | reduce-scatter | 2 phases | reads `S`, writes its share |
//! | all-gather | 2 phases | reads and writes `S`; in place `(n-1)/n S` |
//! | broadcast | 2 phases | all but the root read and write `S` |
//! | gather | 2 phases | the root reads and writes `S` |
//! | scatter | 2 phases | reads and writes its share |
//! | all-to-all | 2 phases | reads and writes what it receives |
//! | send, recv, send-recv | the two ranks meet | the receiver reads and writes `S` |
//! | barrier | 1 phase | 0 |
//!
//! **`tcp`**: bytes through the busiest rank in its busier direction. Before a collective operation, every rank sends
//! every other rank a header of 88 bytes, which is one more step. In an all-to-all, two counts of 8 bytes per rank
//! follow. The header of a send travels with its data. The table leaves out headers and counts; [`Cost`] includes them.
//!
//! | operation | steps | bytes |
//! |---|---|---|
//! | all-reduce, direct | 2 | `2 (n-1)/n S` |
//! | all-reduce, ring | `2 (n-1)` | `2 (n-1)/n S`, to one neighbor |
//! | reduce | 2 | `2 (n-1)/n S` into the root |
//! | broadcast | 2 | `2 (n-1)/n S` out of the root |
//! | reduce-scatter | 1 | `(n-1)/n S` |
//! | all-gather, all-to-all | 1 | `(n-1)/n S` |
//! | gather, scatter | 1 | `(n-1)/n S` at the root |
//! | send, recv, send-recv | 1 | `S` |
//! | barrier | the headers | 0 |
//!
//! **`hybrid`**: steps and bytes between hosts. Ranks with the same local rank on their hosts form a
//! *rail*. Within a host everything goes through shared memory.
//!
//! | operation | steps | bytes |
//! |---|---|---|
//! | all-reduce | 2, overlapping in blocks | `(p + 1) (h-1)/h S/k` out of and into each rank |
//! | reduce | 2, overlapping in blocks | `p (h-1)/h S/k` out of and into each rank, and `(h-1)/h S/k` into each of the root's host |
//! | reduce-scatter | 1 | `p (h-1)/h S/k` out of and into each rank |
//! | broadcast | 1 | `S` from the root's host to each other |
//! | all-gather | 1 | each rank's share once to each other host |
//! | gather, scatter, all-to-all, send, recv, send-recv | 1 | each block straight from rank to rank |
//! | barrier | the headers | 0 |
//!
//! In the reductions of `hybrid`, a host sends `p` partial sums: one for each node that its ranks have in the
//! tree of the sum. `p` is 1 if `k` is a power of two, and at most `2 log2(k)` otherwise (2 for 3 or 6
//! ranks, 3 for 5 or 7). Partial sums of 16-bit floats travel as f32. [`Cost::between_hosts`] computes the bytes.
//!
//! [`Group::gather_object`], [`Group::all_gather_object`] and [`Group::broadcast_object`] exchange objects
//! that can be serialized.
//!
//! # The same bits
//!
//! | transport | order of summation of an element | same bits |
//! |---|---|---|
//! | `thread`, `shm`, `tcp` (direct), `hybrid` | a balanced tree over ranks 0, 1, 2, ... | as each other |
//! | `tcp` with [`Algorithm::Ring`] | share `j` of `n`: rank `j`, `j+1`, ..., `j-1` | in every run with `n` ranks, not those of the others |
//! | `mpi` | chosen by the library | as far as the library promises |
//!
//! The left half of the tree has the largest power of two below `n` ranks: `(x0 + x1) + x2`, `(x0 + x1) + (x2 + x3)`,
//! `((x0 + x1) + (x2 + x3)) + x4`, and so on. So a group of `n` ranks, where each rank holds the sum of
//! ranks `2 i` and `2 i + 1` of a group of `2 n`, gives the same bits as that group.
//!
//! f16 and bf16 are summed in f32 and rounded once (the ring rounds at every step), and a mean is the sum divided once.
//! Operations that only move data give the same bits everywhere, as do minimum, maximum and sums of integers.
//! [`Algorithm::Auto`] promises no more than the ring.
//!
//! # Memory that peers can reach
//!
//! [`Group::allocate`] gives memory that the ranks of a host share: `shm` and `hybrid` work on it in
//! place, with the bytes of the table. Operations on private memory are staged: each rank copies half a megabyte
//! per rank (4 MB at most) at a time to one half of a staging area that all ranks can reach, while the peers work on the other half. An all-reduce
//! of two ranks then reads and writes `S` once more, an all-reduce of more than two ranks twice more. Threads,
//! and ranks connected by `tcp`, work on either kind of memory in place.
//!
//! An operation on a slice copies its data to private memory and its result back. For large data, use tensors in memory
//! from [`Group::allocate`].
//!
//! # Work in the background
//!
//! All-reduce, reduce-scatter, all-gather, send and receive of tensors have an asynchronous form, whose name ends in `_async`
//! and which returns [`Work`]. Operations of one group run in the order of submission, on the group's own
//! communication thread. Each operation claims its memory until it is finished: touching that memory earlier is an error,
//! not a race. The end of the operation is an event ([`Work::event`]), which gives the claims back even if no thread waits
//! for the work. [`OpTimes`] separates the time in the queue, the wait for the slowest rank, and the time in which data
//! moved. See `examples/overlap.rs`.
//!
//! # Memory and stores of other programs
//!
//! [`Group::run_raw`] and [`Group::start_raw`] work on memory for which the caller vouches, with an element type that is known at run
//! time. [`Group::from_store`] forms a group through the store of another program, with a [`Mailbox`] for messages that have
//! tags, and a [`SharedHeap`] to which memory of others moves so that operations use it in place. The backend of `torch.distributed` in `python/` is made of these.
//!
//! # Failures
//!
//! No failure is a hang:
//!
//! - Every wait ends at [`GroupOptions::timeout`], with an error that names the missing ranks.
//! - If a peer dies, every rank that still needs it gets an error with the peer's rank, the operation, its
//!   sequence number and its bytes.
//! - Every rank shows the others its call before data move. Calls that differ in operation, type, counts
//!   or order are an error on every rank. The error names both calls.
//! - After an error the group is broken: later operations fail at once with the first cause. Errors name ranks by their
//!   numbers in the outermost group. Memory that the failed operation had claimed stays claimed, because a peer may
//!   still write there.
//!
//! PACELINE_COMM_LOG=info writes a line to standard error for every finished operation; `trace` also
//! writes a line when an operation starts. The same lines, and those of groups that form, are events of the crate
//! `tracing`, at the levels `debug` and `trace`. Each rank remembers the last 1,000 operations of all its groups, and writes
//! them as JSON lines to the folder PACELINE_DUMP_FOLDER, if set, when the group fails.
//! [`Group::dumper`] writes them on demand. [`write_error_file`] reports to torchrun why a rank failed.
//!
//! # Groups within groups
//!
//! [`Group::split`] makes one sub-group of all ranks that pass the same color, with its own
//! queue and sequence of operations. See `examples/sub_groups.rs`.
//!
//! [`Mesh`] arranges the ranks of a group in a grid with named axes and forms a group for each axis.
//!
//! A group and all groups that descend from it share this rank's record of operations ([`Group::fresh_records`]) and its
//! emulated network card. The groups split from a group use its memory in place. The failures of groups are separate: an
//! error breaks the group in which it happens, and the others go on as long as they have all their ranks.
//!
//! # Emulated links
//!
//! With [`GroupOptions::link`] or [`Group::emulate`], every operation takes as long as it would on a
//! [`Link`] of a given bandwidth and latency, computed from the steps and bytes of `tcp` ([`Cost`]). A group and its
//! sub-groups share one emulated network card per rank: messages that they send at the same time go out one after the
//! other. The thread that executes the operation sleeps meanwhile, so computation goes on. A link that is not at least 1.25
//! times as slow as the transport below it is refused. Ranks that are threads ignore the option; each of them calls
//! [`Group::emulate`] instead.
//!
//! # Limits
//!
//! Linux only. At most [`MAX_RANKS`] ranks in a group. `hybrid` needs the same number of ranks on every
//! host, and consecutive rank numbers within each host. `tcp` opens a connection between any two ranks. It
//! is neither encrypted nor protected against an attacker who can read or change the traffic: the secret of
//! the run, which never travels, only keeps strangers out. After a failure, a group cannot go on with the remaining ranks.

#![deny(missing_docs)]
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

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
mod from_store;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
#[path = "../../../fuzz/checks/collectives.rs"]
pub mod fuzzing;
mod group;
mod header;
mod hybrid;
mod mailbox;
mod meet;
mod mesh;
#[cfg(feature = "mpi")]
mod mpi;
mod nccl;
mod objects;
mod ops;
mod options;
mod raw;
mod record;
mod reduce;
mod shared;
mod slices;
mod staging;
mod tcp;
mod warning;
mod worker;

pub use call::MAX_RANKS;
pub use clock::{ClockOffset, RoundTrip, measure_clock};
pub use cost::{Algorithm, Cost, Link, NAMED_LINKS, parse_seconds};
pub use error::{CollectiveError, Result};
pub use flight_recorder::{COMM_LOG, CommLog, DUMP_FOLDER};
pub use from_env::TRANSPORT;
pub use from_store::{Meeting, Member};
pub use group::{Dumper, Fence, Group, SharedHeap};
pub use header::HEADER_BYTES;
pub use mailbox::{Mailbox, Message};
pub use mesh::{Axis, Mesh, MeshError, MeshShape};
pub use nccl::NcclOrder;
pub use options::{GroupOptions, Transport};
pub use raw::{RawCall, RawMemory};
pub use record::{OpKind, OpRecord, OpTimes, Purpose};
pub use reduce::{ReduceElement, ReduceOp};
pub use worker::Work;

// The names that a program needs when it forms a group. `paceline-rendezvous` has the complete interface.
pub use paceline_rendezvous::{
    EnvironmentError, Launcher, Placement, Rendezvous, RendezvousError, RendezvousPoint,
    write_consequence_file, write_error_file,
};
