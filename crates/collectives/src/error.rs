//! What can go wrong between ranks.

use std::path::PathBuf;
use std::time::Duration;

use paceline_memory::MemoryError;

/// An error of a collective operation, or of meeting the other ranks.
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
    /// Two ranks called different operations at the same place of the sequence.
    #[error("operation #{seq} differs: rank {rank} called {ours}, rank {peer} called {theirs}")]
    Mismatch {
        /// Who reports.
        rank: usize,
        /// The first rank that called something else.
        peer: usize,
        /// Its place in the sequence.
        seq: u32,
        /// What this rank called.
        ours: String,
        /// What the peer called.
        theirs: String,
    },
    /// A rank that does not exist.
    #[error("there is no rank {rank} in a group of {world_size}")]
    NoSuchRank {
        /// The rank that was named.
        rank: usize,
        /// Ranks in the group.
        world_size: usize,
    },
    /// The root of a gather has no room for what comes, or room of another kind.
    #[error(
        "the root of this gather needs a tensor of {expected} elements of {dtype}, got {}",
        got.as_deref().unwrap_or("none")
    )]
    GatherSize {
        /// Elements that come.
        expected: usize,
        /// Their type.
        dtype: paceline_memory::DType,
        /// What the root passed.
        got: Option<String>,
    },
    /// The element type cannot be reduced.
    #[error("cannot reduce elements of type {0}; use f32 or f64")]
    NotReducible(paceline_memory::DType),
    /// An earlier operation of this group failed, so its ranks no longer agree.
    #[error("rank {rank}: the group is broken by an earlier error: {cause}")]
    Broken {
        /// Who reports.
        rank: usize,
        /// The first error.
        cause: String,
    },
    /// The ranks could not meet.
    #[error("rank {rank} of {world_size} could not meet the others at {place}: {reason}")]
    Meeting {
        /// Who reports.
        rank: usize,
        /// How many ranks were to meet.
        world_size: usize,
        /// Where.
        place: String,
        /// Why not.
        reason: String,
    },
    /// The meeting file cannot be used.
    #[error("cannot meet through the file {}: {reason}", path.display())]
    MeetingFile {
        /// The file.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// An object could not be turned into bytes, or back.
    #[error("cannot gather this object: {0}")]
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
