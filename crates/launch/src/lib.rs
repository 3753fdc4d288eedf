//! Starting the ranks of a command on this host, watching them, and ending them together; and how a rank joins its
//! group: its place, its transport, how ranks talk to each other.
//!
//! This crate knows nothing of models or runs: the caller decides what the ranks do.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

pub mod comm;
pub mod connect;
pub mod device;
pub mod environment;
pub mod launcher;
pub mod pinning;
pub mod stop;
pub mod threads;
pub mod transport;

mod comm_args;
mod launch_args;
mod start_flags;

pub use comm_args::CommArgs;
pub use launch_args::LaunchArgs;
pub use start_flags::StartFlags;
pub use transport::TransportName;
