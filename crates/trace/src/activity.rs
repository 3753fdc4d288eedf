//! The work of a card, and the calls that asked for it, as the vendor's profiler reports them.

use crate::{Place, Span};

/// A piece of work of a card, or a call of its driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ActivityRecord {
    /// Its kind.
    pub kind: ActivityKind,
    /// When, in nanoseconds of [`now_ns`](crate::now_ns).
    pub span: Span,
    /// The number of the call: work has that of the call that asked for it.
    pub correlation: u32,
}

/// The kinds of activities.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ActivityKind {
    /// A thread of the host called a function of the driver.
    Call {
        /// The function.
        name: &'static str,
        /// The system's number of the thread.
        thread: u32,
    },
    /// A kernel ran.
    Kernel {
        /// Its name, as the compiler wrote it.
        name: String,
        /// The number of its stream.
        stream: u32,
        /// Blocks of the grid.
        grid: [u32; 3],
        /// Threads of a block.
        block: [u32; 3],
        /// Registers of a thread.
        registers: u16,
        /// Bytes of shared memory of a block.
        shared_bytes: u32,
    },
    /// Bytes were copied.
    Copy {
        /// The number of its stream.
        stream: u32,
        /// How many.
        bytes: u64,
        /// Where they came from, and where they went.
        places: (Place, Place),
    },
    /// Bytes were set to one value.
    Fill {
        /// The number of its stream.
        stream: u32,
        /// How many.
        bytes: u64,
    },
}

impl ActivityKind {
    /// The stream; `None` for a call.
    pub fn stream(&self) -> Option<u32> {
        match *self {
            Self::Call { .. } => None,
            Self::Kernel { stream, .. } | Self::Copy { stream, .. } | Self::Fill { stream, .. } => {
                Some(stream)
            }
        }
    }
}
