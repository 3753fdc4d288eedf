//! The values that flags of every run can name: transports, devices, learning rate schedules.
//!
//! This file does not know what they mean.

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
        }
    }
}

/// Where to compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Device {
    /// The processor
    Cpu,
}

/// The course of the learning rate after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Course {
    /// No change
    Constant,
    /// Down to --min-lr on a straight line
    Linear,
    /// Down to --min-lr on half a cosine
    Cosine,
}

impl Course {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Course::Constant => "constant",
            Course::Linear => "linear",
            Course::Cosine => "cosine",
        }
    }
}
