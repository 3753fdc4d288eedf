//! The errors of collective operations and of forming a group.

use std::fmt;
use std::time::Duration;

use paceline_memory::MemoryError;
use paceline_rendezvous::{EnvironmentError, RendezvousError};

/// The result of an operation, or of forming a group.
pub type Result<T, E = CollectiveError> = std::result::Result<T, E>;

/// An error of a collective operation or of forming a group.
///
/// Fields of most variants: `rank` reports the error, `op` is the name of the operation, `seq` its sequence number in the
/// group, and `bytes` its message size. Ranks are numbered as in the group from which the failing group descends.
#[derive(Clone, thiserror::Error)]
pub enum CollectiveError {
    /// A peer ended without leaving the group in order.
    #[error(
        "rank {rank}: rank {peer} died during {op} #{seq} ({bytes} bytes); noticed after {waited:?}"
    )]
    PeerLost {
        /// The rank that reports.
        rank: usize,
        /// The rank that died.
        peer: usize,
        /// The operation.
        op: &'static str,
        /// Its sequence number.
        seq: u32,
        /// Its message size in bytes.
        bytes: usize,
        /// How long the operation had waited.
        waited: Duration,
    },
    /// A peer left the group while this rank still had operations to do with it.
    #[error("rank {rank}: rank {peer} left the group, but {op} #{seq} ({bytes} bytes) needs it")]
    PeerLeft {
        /// The rank that reports.
        rank: usize,
        /// The rank that left.
        peer: usize,
        /// The operation.
        op: &'static str,
        /// Its sequence number.
        seq: u32,
        /// Its message size in bytes.
        bytes: usize,
    },
    /// Not all ranks arrived, or not all finished, within the time limit.
    #[error(
        "rank {rank}: {op} #{seq} ({bytes} bytes) timed out after {waited:?}, waiting for ranks {missing:?}"
    )]
    TimedOut {
        /// The rank that reports.
        rank: usize,
        /// Ranks that had not arrived; empty if all had, but some did not finish.
        missing: Vec<usize>,
        /// The operation.
        op: &'static str,
        /// Its sequence number.
        seq: u32,
        /// Its message size in bytes.
        bytes: usize,
        /// How long the operation had waited.
        waited: Duration,
    },
    /// An asynchronous operation panicked on the group's communication thread: a defect of this crate.
    #[error(
        "rank {rank}: {op} #{seq} ({bytes} bytes) panicked on the communication thread: {reason}"
    )]
    Panicked {
        /// The rank that reports.
        rank: usize,
        /// The operation.
        op: &'static str,
        /// Its sequence number.
        seq: u32,
        /// Its message size in bytes.
        bytes: usize,
        /// The panic's message.
        reason: String,
    },
    /// The system refused a thread for asynchronous operations.
    #[error(
        "rank {rank}: the system refuses a thread for asynchronous operations ({reason}); allow more \
         processes (ulimit -u, or pids.max of the control group)"
    )]
    NoThread {
        /// The rank that reports.
        rank: usize,
        /// The system's error.
        reason: String,
    },
    /// The calls of two ranks do not match.
    #[error(
        "the ranks disagree: rank {rank} called {ours} as #{seq}, rank {peer} called {theirs} as \
         #{peer_seq}"
    )]
    Mismatch {
        /// One of the two ranks: the one that reports, if it is involved.
        rank: usize,
        /// The other rank.
        peer: usize,
        /// The sequence number of the call on `rank`.
        seq: u32,
        /// The sequence number of the call on `peer`.
        peer_seq: u32,
        /// The call of `rank`, in words.
        ours: String,
        /// The call of `peer`, in words.
        theirs: String,
    },
    /// All ranks called the same operation, but their counts do not add up.
    #[error("rank {rank}: the counts of {call} #{seq} do not add up: {reason}")]
    Counts {
        /// The rank that reports.
        rank: usize,
        /// This rank's call, in words.
        call: String,
        /// Its sequence number.
        seq: u32,
        /// The mistake.
        reason: String,
    },
    /// The ranks cannot be arranged as a mesh.
    #[error(transparent)]
    Mesh(#[from] crate::mesh::MeshError),
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
        /// The rank that reports.
        rank: usize,
        /// The operation.
        op: &'static str,
        /// The mistake.
        reason: String,
    },
    /// The link to be emulated is not slower than the transport below it.
    #[error(
        "cannot emulate a link of {link}: an all-reduce of {bytes} bytes would take {emulated:?} on it \
         and takes {measured:?} on this transport; a link must be at least 1.25 times as slow"
    )]
    Link {
        /// The link.
        link: String,
        /// The message size, in bytes, for which the link is too fast.
        bytes: usize,
        /// The time on the link.
        emulated: Duration,
        /// The time on the transport.
        measured: Duration,
    },
    /// The link to be emulated cannot exist: see [`Link::is_possible`](crate::Link::is_possible).
    #[error(
        "rank {rank}: cannot emulate a link of {link}: its bandwidth must be above zero, its latency zero \
         or more, and both must be finite"
    )]
    ImpossibleLink {
        /// The rank that reports.
        rank: usize,
        /// The link.
        link: String,
    },
    /// Ranks may still write to the memory of operations that have failed.
    #[error(
        "rank {rank}: the memory of failed operations cannot be given back: after {waited:?}, ranks {peers:?} have not left \
         the group and may still write there"
    )]
    StillThere {
        /// The rank that reports.
        rank: usize,
        /// The ranks that have not left, by their numbers on this host; empty if an MPI library or NCCL may write.
        peers: Vec<usize>,
        /// How long the rank has waited.
        waited: Duration,
    },
    /// An earlier operation of this group failed, so the group can no longer be used.
    #[error("rank {rank}: the group is broken by an earlier error: {cause}")]
    Broken {
        /// The rank that reports.
        rank: usize,
        /// The first error.
        cause: String,
        /// The ranks that the first error is about; see [`CollectiveError::culprits`].
        culprits: Vec<usize>,
    },
    /// The ranks could not find each other.
    #[error(transparent)]
    Rendezvous(#[from] RendezvousError),
    /// The first rank of this host passed no memory on: it has ended, or it waits for ranks of other hosts.
    #[error(
        "rank {rank} of the {world_size} ranks of this host: rank 0 of this host passed no shared memory on: {reason}"
    )]
    NoMemory {
        /// The rank within this host that reports.
        rank: usize,
        /// Ranks of this host.
        world_size: usize,
        /// The answer of rank 0, if any.
        reason: String,
    },
    /// The ranks have met, but could not set up what they share.
    #[error("rank {rank} of {world_size} could not set up {what}: {reason}")]
    Setup {
        /// The rank that reports.
        rank: usize,
        /// How many ranks there are.
        world_size: usize,
        /// The thing that could not be set up.
        what: &'static str,
        /// Why not.
        reason: String,
    },
    /// The environment names a transport that does not exist, or that cannot connect these ranks.
    #[error("PACELINE_TRANSPORT={value:?} in the environment: {advice}")]
    TransportVariable {
        /// The variable's value.
        value: String,
        /// The mistake, and how to correct it.
        advice: String,
    },
    /// The MPI library refused a call, or failed.
    #[error("rank {rank}: the MPI library failed in {op} #{seq}: {reason}")]
    Mpi {
        /// The rank that reports; 0 if it does not know its rank yet.
        rank: usize,
        /// The operation, or `init` or `split`.
        op: &'static str,
        /// Its sequence number.
        seq: u32,
        /// The library's message.
        reason: String,
    },
    /// A card has failed during an operation, or NCCL.
    #[error("rank {rank}: {op} #{seq} ({bytes} bytes) has failed: {reason}")]
    Card {
        /// The rank that reports.
        rank: usize,
        /// The operation.
        op: &'static str,
        /// Its sequence number.
        seq: u32,
        /// Its message size in bytes.
        bytes: usize,
        /// The error of the driver or of NCCL.
        reason: String,
    },
    /// An object could not be turned into bytes, or back.
    #[error("cannot turn this object into bytes or back: {0}")]
    Object(String),
    /// A buffer could not be allocated or claimed.
    #[error(transparent)]
    Memory(#[from] std::sync::Arc<MemoryError>),
}

impl fmt::Debug for CollectiveError {
    /// The message, because `main` and `unwrap` print this form.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
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
    /// Whether this error only reports that another rank failed.
    pub fn is_consequence(&self) -> bool {
        matches!(
            self,
            CollectiveError::PeerLost { .. }
                | CollectiveError::PeerLeft { .. }
                | CollectiveError::Broken { .. }
                | CollectiveError::NoMemory { .. }
                | CollectiveError::Rendezvous(RendezvousError::Overtaken { .. })
        )
    }

    /// The error with the ranks of a sub-group renamed: rank `i` becomes `members[i]`. Other ranks keep their numbers.
    #[cold]
    pub(crate) fn named_by(mut self, members: &[usize]) -> Self {
        use CollectiveError::*;
        let named = |number: &mut usize| *number = members.get(*number).copied().unwrap_or(*number);
        match &mut self {
            PeerLost { rank, peer, .. }
            | PeerLeft { rank, peer, .. }
            | Mismatch { rank, peer, .. } => {
                [rank, peer].into_iter().for_each(named);
            }
            TimedOut { rank, missing, .. } => {
                named(rank);
                missing.iter_mut().for_each(named);
            }
            Broken { rank, culprits, .. } => {
                named(rank);
                culprits.iter_mut().for_each(named);
            }
            Rendezvous(RendezvousError::Failed { missing, .. }) => {
                missing.iter_mut().for_each(named)
            }
            Panicked { rank, .. }
            | NoThread { rank, .. }
            | Counts { rank, .. }
            | Buffers { rank, .. }
            | Card { rank, .. }
            | Mpi { rank, .. } => named(rank),
            // These name no rank, or count ranks in their own way.
            NoSuchRank { .. }
            | Link { .. }
            | ImpossibleLink { .. }
            | Rendezvous(_)
            | NoMemory { .. }
            | StillThere { .. }
            | Setup { .. }
            | TransportVariable { .. }
            | Mesh(_)
            | Object(_)
            | Memory(_) => {}
        }
        self
    }

    /// The ranks that this error is about: those that have ended, and those that did not come. Empty if the error is about this
    /// rank itself.
    pub fn culprits(&self) -> Vec<usize> {
        match self {
            CollectiveError::PeerLost { peer, .. } | CollectiveError::PeerLeft { peer, .. } => {
                vec![*peer]
            }
            CollectiveError::TimedOut { missing, .. } => missing.clone(),
            CollectiveError::Broken { culprits, .. } => culprits.clone(),
            CollectiveError::Rendezvous(RendezvousError::Failed { missing, .. }) => missing.clone(),
            _ => Vec::new(),
        }
    }
}
