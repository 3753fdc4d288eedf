//! Faults of the card: the class that decides the CUDA error code, and a message.

use std::fmt;

/// The classes of faults that a CUDA card tells apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// An access outside every live allocation: `CUDA_ERROR_ILLEGAL_ADDRESS`.
    IllegalAddress,
    /// An access that is not aligned to its size: `CUDA_ERROR_MISALIGNED_ADDRESS`.
    Misaligned,
    /// A kernel that ran longer than the limit: `CUDA_ERROR_LAUNCH_TIMEOUT`.
    Timeout,
    /// Everything else, races and uninitialized reads included: `CUDA_ERROR_LAUNCH_FAILED`.
    LaunchFailed,
}

impl FaultKind {
    /// The status of the driver interface.
    pub fn code(self) -> u32 {
        match self {
            Self::IllegalAddress => 700,
            Self::Timeout => 702,
            Self::Misaligned => 716,
            Self::LaunchFailed => 719,
        }
    }
}

/// A fault: its class, and a message that says where it happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The class.
    pub kind: FaultKind,
    /// A description.
    pub message: String,
}

impl Fault {
    /// An access outside every live allocation.
    pub fn illegal(message: impl Into<String>) -> Self {
        Self { kind: FaultKind::IllegalAddress, message: message.into() }
    }

    /// An address that is not a multiple of the size of its access.
    pub fn misaligned(address: u64, bytes: usize) -> Self {
        let message = format!("address {address:#x} is not aligned to {bytes} bytes");
        Self { kind: FaultKind::Misaligned, message }
    }

    /// A fault without a code of its own.
    pub fn failed(message: impl Into<String>) -> Self {
        Self { kind: FaultKind::LaunchFailed, message: message.into() }
    }

    /// The same fault, with its location in front of its message.
    pub fn at(self, place: impl fmt::Display) -> Self {
        Self { message: format!("{place}: {}", self.message), ..self }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Fault {}
