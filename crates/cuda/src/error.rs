//! The errors of this crate.

use std::fmt;

/// An error of this crate.
#[derive(Clone, thiserror::Error)]
pub enum CudaError {
    /// A library is not there.
    #[error("{library} was not found; sought: {sought}; {hint}")]
    Missing {
        /// Its file.
        library: &'static str,
        /// Where it was sought.
        sought: String,
        /// The fix.
        hint: &'static str,
    },
    /// A library lacks a function.
    #[error("{path} has no function {function}: it is too old; {hint}")]
    TooOld {
        /// Where the library was found.
        path: String,
        /// The function.
        function: &'static str,
        /// The fix.
        hint: &'static str,
    },
    /// The driver is too old for this program.
    #[error(
        "the NVIDIA driver supports CUDA {major}.{minor}, and at least 12.0 is needed; install driver 525 or newer"
    )]
    OldDriver {
        /// The version that the driver supports.
        major: i32,
        /// Its second number.
        minor: i32,
    },
    /// There is no card of this number.
    #[error("there is no card {index}: the driver sees {}", match count { 0 => "none".to_owned(), 1 => "one, number 0".to_owned(), n => format!("{n}, from 0") })]
    NoCard {
        /// The number that was asked for.
        index: usize,
        /// How many there are.
        count: usize,
    },
    /// The card has no memory left for this request.
    #[error("{on} is out of memory: {bytes} bytes were asked for, {free} of {total} are free")]
    OutOfMemory {
        /// The card, or the host's pinned memory.
        on: String,
        /// Size of the request in bytes.
        bytes: usize,
        /// Free bytes of the card.
        free: usize,
        /// All bytes of the card.
        total: usize,
    },
    /// A function of a library has failed.
    #[error("{function} has failed: {name} ({status}): {text}")]
    Failed {
        /// The function.
        function: &'static str,
        /// Its status.
        status: u32,
        /// The name of the status.
        name: String,
        /// The status in words.
        text: String,
    },
    /// A library is still not done with a call.
    #[error("{function} was not done within {limit:?}: other ranks did not answer")]
    Late {
        /// The function.
        function: &'static str,
        /// The time limit.
        limit: std::time::Duration,
    },
    /// A kernel is launched with other arguments than it has parameters.
    #[error("{kernel} takes ({stated}), and is launched with ({given})")]
    Arguments {
        /// The kernel.
        kernel: String,
        /// The types of its parameters.
        stated: String,
        /// The types of the arguments.
        given: String,
    },
    /// A source cannot be compiled.
    #[error("{file} cannot be compiled: {log}")]
    Compile {
        /// The source.
        file: &'static str,
        /// The compiler's messages.
        log: String,
    },
}

impl fmt::Debug for CudaError {
    /// The message, because `main` and `unwrap` print this form.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
