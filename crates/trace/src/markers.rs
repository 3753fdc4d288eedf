//! Slices that other tools show, while they run.
//!
//! This file has the marks of one such tool, the trace of the kernel.
//! Linux writes each line that comes to `trace_marker` (tracefs) into its own trace, with time and thread, by the clock
//! that `perf` can use too. Perfetto shows such lines as slices: `B|PID|name` begins one, `E|PID` ends the last one of the
//! thread. A mark is one system call. Source: the kernel's documentation of ftrace; the form
//! of the lines is Android's atrace.

use std::fmt::{self, Debug};
use std::fs::File;
use std::io::Write;

/// Where the kernel takes marks; the second one on older systems.
pub const TRACE_MARKERS: [&str; 2] =
    ["/sys/kernel/tracing/trace_marker", "/sys/kernel/debug/tracing/trace_marker"];

/// The most bytes of a mark. A longer name is cut.
const MOST_BYTES: usize = 128;

/// Something that marks slices for other tools.
pub trait Markers: Debug + Send {
    /// Begins a slice of this thread.
    fn begin(&self, name: fmt::Arguments);

    /// Ends the slice that this thread has begun last.
    fn end(&self);
}

/// Writes marks into the trace of the kernel.
#[derive(Debug)]
pub struct KernelMarkers {
    file: File,
    process: u32,
}

impl KernelMarkers {
    /// Marks go to this file, one of [`TRACE_MARKERS`].
    pub fn new(file: File) -> Self {
        Self { file, process: std::process::id() }
    }

    fn write(&self, words: fmt::Arguments) {
        // The kernel takes a mark as one write, so it is put together first.
        let mut line = [0; MOST_BYTES];
        let mut rest = &mut line[..];
        let _ = rest.write_fmt(words);
        let left = rest.len();
        // A mark that the kernel refuses is lost, and nothing else.
        let _ = (&self.file).write(&line[..MOST_BYTES - left]);
    }
}

impl Markers for KernelMarkers {
    fn begin(&self, name: fmt::Arguments) {
        self.write(format_args!("B|{}|{name}", self.process));
    }

    fn end(&self) {
        self.write(format_args!("E|{}", self.process));
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek};

    use super::*;

    #[test]
    fn marks_are_whole_writes_of_a_bounded_length() {
        let mut file = tempfile::tempfile().unwrap();
        let markers = KernelMarkers::new(file.try_clone().unwrap());
        markers.begin(format_args!("forward"));
        markers.end();
        markers.begin(format_args!("{}", "x".repeat(1000)));
        file.rewind().unwrap();
        let mut text = String::new();
        file.read_to_string(&mut text).unwrap();
        let process = std::process::id();
        let begin = format!("B|{process}|forwardE|{process}B|{process}|xxx");
        assert!(text.starts_with(&begin), "{text}");
        assert_eq!(text.len(), format!("B|{process}|forwardE|{process}").len() + MOST_BYTES);
    }
}
