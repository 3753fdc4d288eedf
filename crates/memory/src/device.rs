//! Where memory lies, and where the work on it runs.
//!
//! This module does not know the work. Code that works on memory matches on its device without a wildcard, so a new device
//! is an error of the compiler wherever it has no arm yet.

use std::fmt;

/// A place with memory of its own that computes on this memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Device {
    /// The host's processor and memory.
    #[default]
    Cpu,
    /// No memory at all: buffers have sizes and are counted, and operations on them check shapes and compute nothing.
    /// A pass on this device shows how much memory the same pass needs on the host. PyTorch has a device of this name.
    Meta,
    /// An accelerator with memory of its own, emulated on the processor: see [`Accelerator`](crate::Accelerator).
    Sim,
    /// A card of NVIDIA's.
    Cuda,
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Device::Cpu => "cpu",
            Device::Meta => "meta",
            Device::Sim => "sim",
            Device::Cuda => "cuda",
        })
    }
}
