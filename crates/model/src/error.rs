//! What can go wrong with a model.

use std::path::PathBuf;

use paceline_kernels::KernelError;
use paceline_memory::MemoryError;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The sizes of a model make no sense.
    #[error("{0}")]
    Config(String),
    /// A layer's saved tensors are not the ones it stored.
    #[error("a layer expected {expected} saved tensors, found {found}")]
    Saved {
        /// How many it stored.
        expected: usize,
        /// How many there are.
        found: usize,
    },
    /// A layer announces gradients otherwise than its layout says.
    #[error("the gradient of {name} was announced {problem}; a layer must announce each use once")]
    Announcement {
        /// The parameter.
        name: String,
        /// How often instead.
        problem: &'static str,
    },
    /// Whoever was told that a gradient is ready failed.
    #[error("{0}")]
    Hook(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// A weight file cannot be read or written.
    #[error("{}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// A weight file belongs to another model.
    #[error("{}: {reason}", path.display())]
    OtherModel {
        /// The file.
        path: PathBuf,
        /// The first parameter that differs, and how.
        reason: String,
    },
    /// A kernel refused its operands.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// Memory was refused.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}
