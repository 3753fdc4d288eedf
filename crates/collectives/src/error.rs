//! What can go wrong between ranks.

use std::time::Duration;

use paceline_memory::MemoryError;
use paceline_rendezvous::{EnvironmentError, RendezvousError};

/// An error of a collective operation, or of forming a group.
#[derive(Clone, Debug, thiserror::Error)]
pub enum CollectiveError {
    /// A peer ended without leaving the group in order.
    #[error(
        "rank {rank}: rank {peer} died during {op} #{seq} ({bytes} bytes); noticed after {waited:?}"
    )]
    PeerLost {
        /// Who reports.
        rank: usize,
        /// Who died.
        peer: usize,
        /// The operation that was waiting.
        op: &'static str,
        /// Its sequence number in the group.
        seq: u32,
        /// Its size.
        bytes: usize,
        /// How long it had waited.
        waited: Duration,
    },
    /// A peer left the group while this rank still had operations to do with it.
    #[error("rank {rank}: rank {peer} left the group, but {op} #{seq} ({bytes} bytes) needs it")]
    PeerLeft {
        /// Who reports.
        rank: usize,
        /// Who left.
        peer: usize,
        /// The operation that was waiting.
        op: &'static str,
        /// Its sequence number in the group.
        seq: u32,
        /// Its size.
        bytes: usize,
    },
    /// Not all ranks arrived, or not all finished, within the time limit.
    #[error(
        "rank {rank}: {op} #{seq} ({bytes} bytes) timed out after {waited:?}, waiting for ranks {missing:?}"
    )]
    TimedOut {
        /// Who reports.
        rank: usize,
        /// Ranks that had not arrived; empty if all had, but some did not finish.
        missing: Vec<usize>,
        /// The operation that was waiting.
        op: &'static str,
        /// Its sequence number in the group.
        seq: u32,
        /// Its size.
        bytes: usize,
        /// How long it had waited.
        waited: Duration,
    },
    /// An asynchronous operation panicked on the group's communication thread: a defect of this crate.
    #[error(
        "rank {rank}: {op} #{seq} ({bytes} bytes) panicked on the communication thread: {reason}"
    )]
    Panicked {
        /// Who reports.
        rank: usize,
        /// The operation.
        op: &'static str,
        /// Its sequence number in the group.
        seq: u32,
        /// Its size.
        bytes: usize,
        /// What the panic said.
        reason: String,
    },
    /// Two ranks called operations that do not fit together.
    #[error(
        "the ranks disagree: rank {rank} called {ours} as #{seq}, rank {peer} called {theirs} as \
         #{peer_seq}"
    )]
    Mismatch {
        /// One of them; the one that reports, where it is involved.
        rank: usize,
        /// The other.
        peer: usize,
        /// The place of the call in the first rank's sequence.
        seq: u32,
        /// The place of the other call in the other rank's sequence.
        peer_seq: u32,
        /// What the first called.
        ours: String,
        /// What the other called.
        theirs: String,
    },
    /// All ranks called the same operation, but their counts do not add up.
    #[error("rank {rank}: the counts of {call} #{seq} do not add up: {reason}")]
    Counts {
        /// Who reports.
        rank: usize,
        /// What it called.
        call: String,
        /// Its place in the sequence.
        seq: u32,
        /// What is wrong.
        reason: String,
    },
    /// A rank that does not exist.
    #[error("there is no rank {rank} in a group of {world_size}")]
    NoSuchRank {
        /// The rank that was named.
        rank: usize,
        /// Ranks in the group.
        world_size: usize,
    },
    /// A buffer that the operation needs on this rank is missing, or is of the wrong kind or size.
    #[error("rank {rank}: {op} {reason}")]
    Buffers {
        /// Who reports.
        rank: usize,
        /// The operation.
        op: &'static str,
        /// What is wrong.
        reason: String,
    },
    /// The link to be emulated is not slower than what lies beneath it.
    #[error(
        "cannot emulate a link of {link}: an all-reduce of {bytes} bytes would take {emulated:?} on it \
         and takes {measured:?} on this transport; a link must be at least 1.25 times as slow"
    )]
    Link {
        /// The link.
        link: String,
        /// The size for which it is too fast.
        bytes: usize,
        /// The time of the link.
        emulated: Duration,
        /// The time of the transport.
        measured: Duration,
    },
    /// There can be no such link as was to be emulated.
    #[error(
        "rank {rank}: cannot emulate a link of {link}: its bandwidth must be above zero, its latency zero \
         or more, and both must be finite"
    )]
    ImpossibleLink {
        /// Who reports.
        rank: usize,
        /// The link.
        link: String,
    },
    /// An earlier operation of this group failed, so its ranks no longer agree.
    #[error("rank {rank}: the group is broken by an earlier error: {cause}")]
    Broken {
        /// Who reports.
        rank: usize,
        /// The first error.
        cause: String,
    },
    /// The ranks could not find each other.
    #[error(transparent)]
    Rendezvous(#[from] RendezvousError),
    /// The ranks have met, but could not set up what they share.
    #[error("rank {rank} of {world_size} could not set up {what}: {reason}")]
    Setup {
        /// The rank that reports.
        rank: usize,
        /// How many ranks there are.
        world_size: usize,
        /// What was to be set up.
        what: &'static str,
        /// Why it was not.
        reason: String,
    },
    /// The environment names a transport that does not exist, or that cannot connect these ranks.
    #[error("PACELINE_TRANSPORT={value:?} in the environment: {advice}")]
    TransportVariable {
        /// The variable's value.
        value: String,
        /// What is wrong, and what to do.
        advice: String,
    },
    /// The MPI library refused, or failed.
    #[error("rank {rank}: the MPI library failed in {op} #{seq}: {reason}")]
    Mpi {
        /// Who reports; 0 before it has a number.
        rank: usize,
        /// The operation, or `init` or `split`.
        op: &'static str,
        /// Its place in the sequence.
        seq: u32,
        /// What the library says.
        reason: String,
    },
    /// An object could not be turned into bytes, or back.
    #[error("cannot turn this object into bytes or back: {0}")]
    Object(String),
    /// Memory was refused.
    #[error(transparent)]
    Memory(#[from] std::sync::Arc<MemoryError>),
}

impl From<MemoryError> for CollectiveError {
    fn from(error: MemoryError) -> Self {
        CollectiveError::Memory(std::sync::Arc::new(error))
    }
}

impl From<EnvironmentError> for CollectiveError {
    fn from(error: EnvironmentError) -> Self {
        CollectiveError::Rendezvous(error.into())
    }
}

impl CollectiveError {
    /// Whether this error only reports that some other rank failed.
    pub fn is_consequence(&self) -> bool {
        matches!(
            self,
            CollectiveError::PeerLost { .. }
                | CollectiveError::PeerLeft { .. }
                | CollectiveError::Broken { .. }
        )
    }
}
