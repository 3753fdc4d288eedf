//! Writes the trace file of one rank in the format of PyTorch's profiler (its Kineto library).
//!
//! Input: the tracks of a [`Recorder`](paceline_trace::Recorder) and a [`Header`]. Output: the contents of a file that
//! Perfetto, `chrome://tracing` and Holistic Trace Analysis open. These tools look for the streams of a
//! device. The computation of a rank is therefore written as kernels of stream 7, each launched when it
//! began. Its communication is written as kernels of stream 20, launched when they were submitted and named
//! as NCCL names its kernels. The `paceline` section of the file tells its readers what these kernels really
//! are. Where the vendor's profiler has recorded a card, its kernels, copies and calls are written instead, and
//! ours are the operators around them.

mod activities;
pub(crate) mod compress;
mod events;
pub(crate) mod text;

use std::io::{self, Write};

use compress::compressed;
use events::Events;
use paceline_trace::{ActivityRecord, Span, Track};

/// The name of the fact that says for how much of the recorded steps a rank had no core, in percent.
pub const CPU_WAIT_PCT: &str = "cpu_wait_pct";

/// The facts in a trace file before its events.
#[derive(Clone, Debug)]
pub struct Header {
    /// The rank.
    pub rank: usize,
    /// The number of ranks.
    pub world_size: usize,
    /// An id that is the same for all traces that belong together, and different for all others.
    pub run_id: String,
    /// The transport between the ranks: `shm`, `tcp`, ...
    pub transport: String,
    /// The name of the device that computed.
    pub device: String,
    /// Where the work ran.
    pub ran_on: RanOn,
    /// The number of the process in the file.
    pub pid: u32,
    /// Time of day, in nanoseconds since 1970, at the zero of the clock.
    pub base_ns: u64,
    /// More facts about the run, for the `paceline` section.
    pub run_facts: Vec<(String, String)>,
    /// The steps that were recorded, with their numbers since the run began.
    pub steps: Vec<(u64, Span)>,
    /// The work of the card as the vendor's profiler has recorded it; empty without it, or without a card.
    pub activities: Vec<ActivityRecord>,
}

/// Where the work of a trace ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RanOn {
    /// On threads of the processor.
    Host,
    /// On an accelerator that is emulated on the processor.
    Emulated,
    /// On a card.
    Card,
}

/// Writes the compressed JSON of a trace and returns how many events it has. Memory does not grow with the number of
/// events.
pub fn write_compressed(
    out: &mut (dyn Write + Send),
    header: &Header,
    tracks: &[&Track],
) -> io::Result<u64> {
    compressed(out, |mut text| write(&mut text, header, tracks))
}

/// Writes the JSON of a trace and returns how many events it has.
pub fn write(out: &mut impl Write, header: &Header, tracks: &[&Track]) -> io::Result<u64> {
    let mut events = Events::begin(out, header, tracks)?;
    events.names_of_lanes(tracks)?;
    for (number, span) in &header.steps {
        events.step(*number, *span)?;
    }
    for (thread, track) in tracks.iter().enumerate() {
        for event in track.events() {
            events.add(thread, event)?;
        }
    }
    events.activities()?;
    events.end()
}
