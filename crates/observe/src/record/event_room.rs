//! The room that a rank has for the events of a profile: per track of a recorded step, and in bytes for the prediction of
//! memory. This file records nothing.

use paceline_settings::profile::ProfileConfig;
use paceline_trace::Track;

/// Room for events per recorded step, by track: several times the number that a step of the largest model
/// here records.
pub(crate) const MAIN_EVENTS: u64 = 1 << 11;
pub(crate) const KERNEL_EVENTS: u64 = 1 << 12;
pub(crate) const COMMUNICATION_EVENTS: u64 = 1 << 10;
pub(crate) const COPY_EVENTS: u64 = 1 << 10;
pub(crate) const LOADER_EVENTS: u64 = 1 << 6;
pub(crate) const MEMORY_EVENTS: u64 = 1 << 13;
pub(crate) const THREAD_EVENTS: u64 = 1 << 13;

/// The largest number of events in all tracks together, however many steps are recorded: about 130 MB.
pub(crate) const MAX_EVENTS: u64 = 1 << 20;

/// The threads of a pool that are recorded. With a single thread there is no pool.
pub(crate) fn num_recorded(num_threads: usize) -> usize {
    Some(num_threads).filter(|count| *count > 1).unwrap_or(0)
}

/// The streams of a device that copy: batches on the first one, buffers of collective operations on the others.
pub(crate) const COPY_STREAMS: [&str; 3] = ["copy", "from device", "to device"];

/// The events for which there is room in each recorded step.
fn events_of_step(num_recorded: usize, has_streams: bool) -> u64 {
    let of_rank = MAIN_EVENTS + KERNEL_EVENTS + COMMUNICATION_EVENTS + LOADER_EVENTS;
    let num_streams = if has_streams { COPY_STREAMS.len() as u64 } else { 0 };
    of_rank + MEMORY_EVENTS + THREAD_EVENTS * num_recorded as u64 + COPY_EVENTS * num_streams
}

/// The steps of the window that are recorded: all of them, or as many as there is room for.
pub(crate) fn num_steps_with_room(
    config: &ProfileConfig,
    num_recorded: usize,
    has_streams: bool,
) -> u64 {
    config.active.min(MAX_EVENTS / events_of_step(num_recorded, has_streams))
}

/// The memory that the events of a rank with `num_threads` compute threads take, in bytes. `has_streams` if its device has.
pub fn events_bytes(config: &ProfileConfig, num_threads: usize, has_streams: bool) -> usize {
    let num_recorded = num_recorded(num_threads);
    let num_steps = num_steps_with_room(config, num_recorded, has_streams);
    Track::bytes_of((events_of_step(num_recorded, has_streams) * num_steps) as usize)
}
