//! The trace file of one rank, in the form that PyTorch's profiler (its Kineto library) writes.
//!
//! The tracks of a [`Recorder`](paceline_trace::Recorder) and a [`Header`] go in. A file that Perfetto,
//! `chrome://tracing` and Holistic Trace Analysis open comes out. These tools look for the streams of a device, so
//! what a rank computes is written as kernels of stream 7, each launched at the moment at which it began,
//! and what it communicates as kernels of stream 20, launched when they were submitted and named as NCCL
//! names its own: a reader of the file finds in its `paceline` section what they truly were.

pub(crate) mod compress;
mod events;
pub(crate) mod text;

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use compress::Compressor;
use events::Events;
use paceline_trace::{Span, Track};

/// What a trace file says before its events.
#[derive(Clone, Debug)]
pub struct Header {
    /// The rank.
    pub rank: usize,
    /// How many there are.
    pub world_size: usize,
    /// The same for all traces that belong together, and for no others.
    pub run_id: String,
    /// What carried the bytes between ranks: `shm`, `tcp`, ...
    pub transport: String,
    /// What computed.
    pub device: String,
    /// Identifies the process in the file.
    pub pid: u32,
    /// Time of the day, in nanoseconds since 1970, at the zero of the clock.
    pub base_ns: u64,
    /// More that is to be known, for the `paceline` section.
    pub run_facts: Vec<(String, String)>,
    /// The steps that were recorded, with their numbers since the run began.
    pub steps: Vec<(u64, Span)>,
}

/// Writes a compressed trace file and returns how many events it has. Appears under its name only when
/// it is complete; memory does not grow with the number of events.
pub fn write_file(path: &Path, header: &Header, tracks: &[&Track]) -> io::Result<u64> {
    let partial = path.with_extension("partial");
    let written = Compressor::start(File::create(&partial)?).and_then(|mut file| {
        let count = write(&mut file, header, tracks)?;
        file.finish()?;
        Ok(count)
    });
    match written {
        Ok(count) => std::fs::rename(&partial, path).map(|()| count),
        Err(error) => {
            // The error that is being reported matters more.
            let _ = std::fs::remove_file(&partial);
            Err(error)
        }
    }
}

/// Writes the JSON of a trace and returns how many events it has.
pub fn write(out: &mut impl Write, header: &Header, tracks: &[&Track]) -> io::Result<u64> {
    let mut events = Events::begin(out, header)?;
    events.names_of_lanes(tracks)?;
    for (number, span) in &header.steps {
        events.step(*number, *span)?;
    }
    for (thread, track) in tracks.iter().enumerate() {
        for event in track.events() {
            events.add(thread, event)?;
        }
    }
    events.end()
}

#[cfg(test)]
mod tests;
