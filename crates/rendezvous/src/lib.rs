//! How the ranks of a run find each other.
//!
//! Input: the variables that a launcher has set in the environment, or a rendezvous that the program names.
//! Output: this process's place among the ranks, a store that all ranks can read and write, and one
//! authenticated connection to each rank that the caller asks for. This crate knows nothing of operations, groups or
//! tensors.
//!
//! | file | purpose |
//! |---|---|
//! | `environment/` | reads the variables of each launcher; reports to torchrun why a rank failed |
//! | `rendezvous.rs` | names the place where ranks meet, and makes secrets |
//! | `store/` | meets the other ranks at that place, and exchanges keys and values |
//! | `membership/` | who belongs to a run whose ranks come and go |
//! | `peers.rs` | listens for other ranks, and connects to them |
//! | `route.rs` | finds the address by which other hosts reach this one |
//! | `hello.rs` | the first bytes of each connection, with which both sides prove that they belong to the run |
//! | `key.rs` | the keys of these proofs |
//! | `launch.rs` | the launcher of a host: a second one for the same host is turned away |
//! | `address.rs`, `socket.rs` | listening, connecting, and whole messages with a time limit |
//!
//! A rank of a program uses the crate in this order:
//!
//! ```no_run
//! use std::time::Duration;
//! use paceline_rendezvous::{Placement, RendezvousError, Store};
//!
//! fn main() -> Result<(), RendezvousError> {
//!     let placement = Placement::from_env()?.expect("a launcher started this program");
//!     let (rank, world_size) = (placement.rank, placement.world_size);
//!     let limit = Duration::from_secs(60);
//!     let store = Store::open(placement.rendezvous()?, rank, world_size, limit)?;
//!     let names: Vec<String> = store.exchange("name", &format!("I am rank {rank}"))?;
//!     println!("{names:?}");
//!     Ok(())
//! }
//! ```

#![deny(missing_docs)]
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]
#![forbid(unsafe_code)]

mod address;
mod deadline;
mod environment;
mod error;
mod hello;
#[cfg(test)]
mod hello_tests;
mod key;
mod launch;
mod membership;
mod peers;
#[cfg(test)]
mod peers_tests;
mod rendezvous;
mod route;
mod socket;
mod store;
mod warning;

pub use deadline::LONGEST_SLEEP;
pub use environment::{
    ERROR_FILE, EnvironmentError, LAUNCH, Launcher, Placement, SECRET, read_culprits,
    write_consequence_file, write_error_file,
};
pub use error::RendezvousError;
pub use key::RunKey;
pub use membership::{GenerationPlace, MemberEvent, Members, RunMember, Terms};
pub use peers::{PeerAddress, PeerListener, SocketKind};
pub use rendezvous::{MAX_SECRET_BYTES, Rendezvous, RendezvousPoint};
pub use route::HostRoute;
pub use store::Store;

/// The readers of what comes from outside, for the fuzzer.
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing {
    pub use crate::membership::fuzzing::membership;
    pub use crate::store::fuzzing::{hello, store_wire};
}
