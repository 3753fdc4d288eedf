//! Marks in the trace of the kernel, among what other tools record there.
//!
//! Linux writes each line that comes to `trace_marker` (tracefs) into its own trace, with the time and the thread, by the clock
//! that `perf` can use too. Perfetto shows such lines as slices: `B|PID|name` begins one, `E|PID` ends the last one that this
//! thread has begun. A mark is one system call. Source: the kernel's documentation of ftrace; the form
//! of the lines is Android's atrace.

use std::fmt::Display;
use std::fs::File;
use std::io::Write;

/// Where the kernel takes marks; the second one on older systems.
pub const TRACE_MARKERS: [&str; 2] =
    ["/sys/kernel/tracing/trace_marker", "/sys/kernel/debug/tracing/trace_marker"];

/// The most bytes of a mark. A longer name is cut.
const MOST_BYTES: usize = 128;

/// Writes marks.
#[derive(Debug)]
pub struct Markers {
    file: File,
    process: u32,
}

impl Markers {
    /// Marks go to this file, one of [`TRACE_MARKERS`].
    pub fn new(file: File) -> Self {
        Self { file, process: std::process::id() }
    }

    /// Begins a slice.
    pub fn begin(&self, name: impl Display) {
        self.write(format_args!("B|{}|{name}", self.process));
    }

    /// Ends the slice that this thread has begun last.
    pub fn end(&self) {
        self.write(format_args!("E|{}", self.process));
    }

    fn write(&self, words: std::fmt::Arguments) {
        // The kernel takes a mark as one write, so it is put together first.
        let mut line = [0; MOST_BYTES];
        let mut rest = &mut line[..];
        // A name that is too long is cut.
        let _ = rest.write_fmt(words);
        let left = rest.len();
        // A mark that the kernel refuses is lost, and nothing else.
        let _ = (&self.file).write(&line[..MOST_BYTES - left]);
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek};

    use super::*;

    #[test]
    fn marks_are_whole_writes_of_a_bounded_length() {
        let mut file = tempfile::tempfile().unwrap();
        let markers = Markers::new(file.try_clone().unwrap());
        markers.begin("forward");
        markers.end();
        markers.begin("x".repeat(1000));
        file.rewind().unwrap();
        let mut text = String::new();
        file.read_to_string(&mut text).unwrap();
        let process = std::process::id();
        let begin = format!("B|{process}|forwardE|{process}B|{process}|xxx");
        assert!(text.starts_with(&begin), "{text}");
        assert_eq!(text.len(), format!("B|{process}|forwardE|{process}").len() + MOST_BYTES);
    }
}
