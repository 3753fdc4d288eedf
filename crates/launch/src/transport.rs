//! The names of the transports, as flags have them.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// The transports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TransportName {
    /// Ranks are threads of one process
    Thread,
    /// Ranks are processes of one host that share memory
    Shm,
    /// Ranks are processes anywhere that use sockets
    Tcp,
    /// Shared memory within a host, sockets between hosts
    Hybrid,
    /// An MPI library carries the bytes
    Mpi,
    /// Cards send to each other by NCCL; the rest goes through shared memory, or sockets between hosts
    Nccl,
}

impl TransportName {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            TransportName::Thread => "thread",
            TransportName::Shm => "shm",
            TransportName::Tcp => "tcp",
            TransportName::Hybrid => "hybrid",
            TransportName::Mpi => "mpi",
            TransportName::Nccl => "nccl",
        }
    }
}
