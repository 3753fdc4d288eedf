//! The errors of this crate.

use std::fmt;
use std::ops::Range;

use crate::{Category, DType, Device, Shape};

/// The result of this crate.
pub type Result<T, E = MemoryError> = std::result::Result<T, E>;

/// An error of this crate.
#[derive(thiserror::Error)]
pub enum MemoryError {
    /// The host has no memory left for this request.
    #[error("out of memory: could not allocate {bytes} bytes for {category}")]
    OutOfMemory {
        /// Size of the request in bytes.
        bytes: usize,
        /// The intended use of the memory.
        category: Category,
    },
    /// The range is in use in a way that excludes the new use.
    #[error("bytes {}..{} are claimed for {holder}, so they cannot be used for {wanted}", range.start, range.end)]
    Claimed {
        /// The requested byte range.
        range: Range<usize>,
        /// The holder of the conflicting claim.
        holder: &'static str,
        /// The holder of the refused claim.
        wanted: &'static str,
    },
    /// Queued work uses the range, and the new use is not ordered after it.
    #[error(
        "bytes {}..{} are {how} by {op} on the stream {on}, and {wanted}{} does not wait for it: {}",
        range.start, range.end, on_stream(by),
        match by {
            Some(_) => format!("let its stream wait for the event of {op}"),
            None => format!("wait for its event before {wanted}"),
        }
    )]
    Unordered {
        /// The requested byte range.
        range: Range<usize>,
        /// Whether the work reads or writes, as a participle.
        how: &'static str,
        /// The queued work.
        op: &'static str,
        /// Its stream.
        on: String,
        /// The refused use.
        wanted: &'static str,
        /// The stream of the refused use; `None` for the host.
        by: Option<String>,
    },
    /// Work that has failed may still write to the range.
    #[error(
        "bytes {}..{} may still be written by {op} on the stream {on}, which has failed, so they cannot be used for {wanted}",
        range.start, range.end
    )]
    Fenced {
        /// The requested byte range.
        range: Range<usize>,
        /// The work that has failed.
        op: &'static str,
        /// Its stream.
        on: String,
        /// The refused use.
        wanted: &'static str,
    },
    /// The range reaches past the end.
    #[error("bytes {}..{} lie outside a buffer of {len} bytes", range.start, range.end)]
    OutOfRange {
        /// The requested byte range.
        range: Range<usize>,
        /// Size of the buffer in bytes.
        len: usize,
    },
    /// The memory has a size, but no contents that could be read or written.
    #[error(
        "a tensor on the device {0} has a size but no contents, so they cannot be read or written"
    )]
    NoContents(Device),
    /// The memory is that of an accelerator.
    #[error(
        "a tensor on the device {0} cannot be read or written by the host; copy it to the host first"
    )]
    NotReachable(Device),
    /// Work of a device has failed, so no later work runs on it.
    #[error("work on the device has failed: {0}")]
    DeviceFailed(String),
    /// A card has no memory left for this request.
    #[error("{refusal}, for {category}")]
    CardMemory {
        /// The intended use of the memory.
        category: Category,
        /// The driver's error.
        refusal: paceline_cuda::CudaError,
    },
    /// A card or its driver refuses.
    #[error(transparent)]
    Card(#[from] paceline_cuda::CudaError),
    /// Something cannot be a part of a graph.
    #[error("this cannot be a part of a graph of a card: {0}")]
    NotCaptured(String),
    /// The system refused a thread that runs the work of a stream.
    #[error("the system refuses a thread for a stream of the device: {0}")]
    NoThread(std::io::Error),
    /// The memory does not lie on the host.
    #[error(
        "a mapping is memory of the host, but the allocator hands out memory of the device {0}"
    )]
    NotHost(Device),
    /// The tensor has a different type.
    #[error("expected elements of type {expected}, got {got}")]
    WrongType {
        /// The requested type.
        expected: DType,
        /// The tensor's type.
        got: DType,
    },
    /// The new shape has another number of elements.
    #[error("cannot view shape {from} as {to}: the number of elements differs")]
    WrongShape {
        /// The tensor's shape.
        from: Shape,
        /// The requested shape.
        to: Shape,
    },
    /// The operating system refused a shared mapping.
    #[error("cannot share {bytes} bytes between processes: {source}")]
    Mapping {
        /// Size of the mapping in bytes.
        bytes: usize,
        /// The reason that the system gave.
        source: std::io::Error,
    },
}

impl fmt::Debug for MemoryError {
    /// The message, because `main` and `unwrap` print this form.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The words for a stream; empty for the host.
fn on_stream(by: &Option<String>) -> String {
    by.as_ref().map_or(String::new(), |stream| format!(" on the stream {stream}"))
}
