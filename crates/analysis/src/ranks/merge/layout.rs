//! Assigns each event of a file to a track.
//!
//! Input: a trace file. Output: its rows with their names, and for each complete event and each end of an
//! arrow a track of its row. A row of the file becomes one track, or several if its events overlap without
//! nesting. The events of one track nest or do not overlap.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::io::Read;
use std::path::Path;

use super::event::Taken;
use crate::TraceError;
use crate::json::{JsonError, Pull, lossy};
use crate::read::{self, Event};
use crate::timeline::TimeRange;

/// The largest depth of nested events on a track. Perfetto gives up at 512.
const MAX_NESTING: usize = 500;

/// The largest number of tracks of a row. Nobody looks through more. Events that would need another track are
/// left out.
const MAX_TRACKS: usize = 256;

/// In [`Layout::tracks`], marks an event that is left out.
pub(super) const NO_TRACK: u16 = u16::MAX;

/// The row of a collective by its key, see [`Event::row`], and its time.
pub(super) type Point = (Vec<u8>, TimeRange);

/// A process of a file.
#[derive(Debug, Default)]
pub(super) struct Process {
    pub(super) name: Option<String>,
    pub(super) labels: Option<String>,
}

/// A row of a file: a thread of the host, or a stream of a device.
#[derive(Debug, Default)]
pub(super) struct Row {
    /// `pid` and `tid` as written.
    pub(super) written: (String, String),
    /// Index of the process.
    pub(super) process: usize,
    pub(super) name: Option<String>,
    /// Its first track, numbered across the file.
    pub(super) first_track: u32,
    /// The number of its tracks: one, or more if events overlap without nesting.
    pub(super) num_tracks: u32,
}

/// An end of an arrow, placed within an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FlowEnd {
    pub(super) track: u32,
    pub(super) at_ns: i64,
    /// The index of its arrow among those with the same identity.
    pub(super) generation: u32,
}

/// Where the events of a file are placed.
#[derive(Debug, Default)]
pub(super) struct Layout {
    pub(super) processes: Vec<Process>,
    pub(super) rows: Vec<Row>,
    pub(super) row_ids: HashMap<Vec<u8>, u32>,
    /// For each complete event or begin event (`B`), in the order of the file: its track within its row, or
    /// [`NO_TRACK`].
    pub(super) tracks: Vec<u16>,
    /// For each begin event, in the order of the file: its duration.
    pub(super) begun_ns: Vec<i64>,
    /// For each end of an arrow, in the order of the file: its place, or `None` if it leads nowhere.
    pub(super) flows: Vec<Option<FlowEnd>>,
    /// The time of each collective, and its track, numbered across the file.
    pub(super) tracks_of_points: Vec<(TimeRange, u32)>,
    /// The earliest time of the file.
    pub(super) first_ns: Option<i64>,
}

/// A complete event.
struct Slice {
    row: u32,
    time: TimeRange,
    /// Index into [`Layout::begun_ns`], if the file has it as a begin and an end event.
    begin: Option<u32>,
}

/// An end of an arrow as the file gives it.
#[derive(Clone, Copy)]
struct Flow {
    row: u32,
    at_ns: i64,
    /// Whether it ends in the next event of the row instead of the event around it.
    binds_next: bool,
    generation: Option<u32>,
}

#[derive(Default)]
struct Scan {
    layout: Layout,
    process_ids: HashMap<Vec<u8>, usize>,
    slices: Vec<Slice>,
    /// Indices of the begin events without an end, per row.
    open: HashMap<u32, Vec<usize>>,
    flows: Vec<Flow>,
    /// How many arrows have begun with each identity.
    begun: HashMap<(Vec<u8>, Vec<u8>, u64), u32>,
    last_ns: i64,
}

impl Layout {
    /// Reads a trace file. The tracks of `points` are wanted in [`Layout::tracks_of_points`].
    pub(super) fn read(path: &Path, points: &[Point]) -> Result<Self, TraceError> {
        read::with_json(path, |input| {
            let mut scan = Scan::default();
            let (mut event, mut row) = (Taken::default(), Vec::new());
            each_event(&mut Pull::new(input), &mut event, None, |event| {
                scan.add(event, &mut row);
            })?;
            Ok(scan.finish(points))
        })
    }

    /// The number of tracks beyond one per row.
    pub(super) fn num_split(&self) -> usize {
        self.rows.iter().map(|row| row.num_tracks as usize - 1).sum()
    }
}

/// Passes the events of a trace to `act`, one by one.
pub(super) fn each_event<R: Read>(
    pull: &mut Pull<R>,
    event: &mut Taken,
    place: Option<usize>,
    mut act: impl FnMut(&mut Taken),
) -> Result<(), JsonError> {
    read::each_list(pull, |pull| {
        pull.begin_array()?;
        while pull.next_item()? {
            if pull.at_object()? {
                event.take(pull, place)?;
                act(event);
            } else {
                pull.skip()?;
            }
        }
        Ok(false)
    })?;
    pull.end()
}

impl Scan {
    fn add(&mut self, taken: &mut Taken, key: &mut Vec<u8>) {
        if taken.phase() == b'M' {
            return self.name(taken, key);
        }
        let event = &taken.event;
        let Some(at_ns) = event.ts_ns else { return };
        self.layout.first_ns = Some(self.layout.first_ns.map_or(at_ns, |first| first.min(at_ns)));
        let row = self.row(event, key);
        let dur_ns = event.dur_ns.unwrap_or(0).max(0);
        self.last_ns = self.last_ns.max(at_ns.saturating_add(dur_ns));
        match taken.phase() {
            b'X' => {
                let time = TimeRange { start_ns: at_ns, dur_ns };
                self.slices.push(Slice { row, time, begin: None });
            }
            b'B' => {
                let begin = Some(self.layout.begun_ns.len() as u32);
                self.layout.begun_ns.push(0);
                self.open.entry(row).or_default().push(self.slices.len());
                let time = TimeRange { start_ns: at_ns, dur_ns: -1 };
                self.slices.push(Slice { row, time, begin });
            }
            b'E' => {
                if let Some(slice) = self.open.get_mut(&row).and_then(Vec::pop) {
                    let time = &mut self.slices[slice].time;
                    time.dur_ns = at_ns.saturating_sub(time.start_ns).max(0);
                }
            }
            b's' | b't' | b'f' => self.flow(taken, row, at_ns),
            _ => {}
        }
    }

    fn flow(&mut self, taken: &Taken, row: u32, at_ns: i64) {
        let event = &taken.event;
        let identity = (event.category.clone(), event.name.clone(), taken.flow_id());
        let generation = if taken.phase() == b's' {
            let begun = self.begun.entry(identity).or_insert(0);
            *begun += 1;
            Some(*begun - 1)
        } else {
            // An arrow that has not begun yet begins later in the file.
            Some(self.begun.get(&identity).map_or(0, |begun| begun - 1))
        };
        let binds_next = taken.phase() == b'f' && !event.binds_enclosing;
        let has_id = !event.id.is_empty();
        let generation = generation.filter(|_| has_id);
        self.flows.push(Flow { row, at_ns, binds_next, generation });
    }

    /// The row of an event, which is new if it was never seen.
    fn row(&mut self, event: &Event, key: &mut Vec<u8>) -> u32 {
        event.row(key);
        if let Some(&row) = self.layout.row_ids.get(key.as_slice()) {
            return row;
        }
        let process = self.process(event);
        let row = self.layout.rows.len() as u32;
        let written = (lossy(&event.pid).into_owned(), lossy(&event.tid).into_owned());
        self.layout.rows.push(Row { written, process, num_tracks: 1, ..Row::default() });
        self.layout.row_ids.insert(key.clone(), row);
        row
    }

    fn process(&mut self, event: &Event) -> usize {
        if let Some(&process) = self.process_ids.get(&event.pid) {
            return process;
        }
        self.layout.processes.push(Process::default());
        let process = self.layout.processes.len() - 1;
        self.process_ids.insert(event.pid.clone(), process);
        process
    }

    fn name(&mut self, taken: &mut Taken, key: &mut Vec<u8>) {
        let Some(words) = taken.words.take() else { return };
        let event = &taken.event;
        match event.name.as_slice() {
            b"process_name" => {
                let process = self.process(event);
                self.layout.processes[process].name = Some(words);
            }
            b"process_labels" => {
                let process = self.process(event);
                self.layout.processes[process].labels = Some(words);
            }
            b"thread_name" => {
                let row = self.row(event, key);
                self.layout.rows[row as usize].name = Some(words);
            }
            _ => {}
        }
    }

    /// Assigns every event to a track.
    fn finish(mut self, points: &[Point]) -> Layout {
        self.end_all();
        let Self { mut layout, slices, flows, .. } = self;
        let row_of = |(row, time): &Point| Some(((*layout.row_ids.get(row)?, *time), None));
        let mut of_points: HashMap<(u32, TimeRange), Option<u32>> =
            points.iter().filter_map(row_of).collect();
        // At the same time, events come before arrows, because arrows are meant to begin and end in them.
        let key = |&(is_flow, i): &(bool, u32)| {
            let (row, time) = if is_flow {
                let Flow { row, at_ns, .. } = flows[i as usize];
                (row, TimeRange { start_ns: at_ns, dur_ns: 0 })
            } else {
                (slices[i as usize].row, slices[i as usize].time)
            };
            (row, time.start_ns, is_flow, Reverse(time.dur_ns), i)
        };
        let numbered = |is_flow, count: usize| (0..count as u32).map(move |i| (is_flow, i));
        let mut order: Vec<(bool, u32)> =
            numbered(false, slices.len()).chain(numbered(true, flows.len())).collect();
        order.sort_unstable_by_key(key);
        layout.tracks = vec![NO_TRACK; slices.len()];
        layout.flows = vec![None; flows.len()];
        let (mut rest, mut first_track) = (order.as_slice(), 0);
        for (row, of) in (0..).zip(&mut layout.rows) {
            let (of_row, after) = rest.split_at(rest.partition_point(|at| key(at).0 == row));
            rest = after;
            let mut tracks = Tracks::default();
            // Ends of arrows that bind to the next event of the row.
            let mut waiting: Vec<usize> = Vec::new();
            for &(is_flow, i) in of_row {
                let i = i as usize;
                if is_flow {
                    let Flow { at_ns, binds_next, generation, .. } = flows[i];
                    let Some(generation) = generation else { continue };
                    match tracks.around(at_ns, binds_next) {
                        Some((track, at_ns)) => {
                            let track = first_track + track;
                            layout.flows[i] = Some(FlowEnd { track, at_ns, generation });
                        }
                        None if binds_next => waiting.push(i),
                        None => {}
                    }
                } else if let Some(track) = tracks.put(slices[i].time) {
                    layout.tracks[i] = track;
                    let (time, track) = (slices[i].time, first_track + u32::from(track));
                    of_points.entry((row, time)).and_modify(|of| *of = Some(track));
                    for i in waiting.drain(..) {
                        let generation = flows[i].generation.unwrap_or_default();
                        let at_ns = time.start_ns.saturating_add(1);
                        layout.flows[i] = Some(FlowEnd { track, at_ns, generation });
                    }
                }
            }
            (of.first_track, of.num_tracks) = (first_track, tracks.0.len().max(1) as u32);
            first_track += of.num_tracks;
        }
        let placed = of_points.into_iter().map(|((_, time), track)| Some((time, track?)));
        layout.tracks_of_points = placed.flatten().collect();
        layout
    }

    /// Sets the durations of begin events. One without an end lasts until the end of the file.
    fn end_all(&mut self) {
        for slice in &mut self.slices {
            if slice.time.dur_ns < 0 {
                slice.time.dur_ns = self.last_ns.saturating_sub(slice.time.start_ns).max(0);
            }
            if let Some(begin) = slice.begin {
                self.layout.begun_ns[begin as usize] = slice.time.dur_ns;
            }
        }
    }
}

/// The tracks of a row. Each track has a stack of the events that are open, from the outermost to the
/// innermost.
#[derive(Default)]
struct Tracks(Vec<Vec<TimeRange>>);

impl Tracks {
    /// Puts the next event on the first track where it nests; `None` if it fits on no track. Events must come
    /// in order of starts, and among equal starts the longest first.
    fn put(&mut self, time: TimeRange) -> Option<u16> {
        for (i, open) in self.0.iter_mut().enumerate() {
            while open.last().is_some_and(|last| has_ended(*last, time)) {
                open.pop();
            }
            let nests = open.last().is_none_or(|last| time.end_ns() <= last.end_ns());
            if nests && open.len() < MAX_NESTING {
                open.push(time);
                return Some(i as u16);
            }
        }
        if self.0.len() == MAX_TRACKS {
            return None;
        }
        self.0.push(vec![time]);
        Some((self.0.len() - 1) as u16)
    }

    /// The track of the innermost event around `at_ns`, and a time within that event. If the event begins at
    /// `at_ns`, the returned time is just after it, because readers may take simultaneous events in any
    /// order. With `must_begin`, `None` if the event began earlier.
    fn around(&self, at_ns: i64, must_begin: bool) -> Option<(u32, i64)> {
        let inner = |open: &Vec<TimeRange>| {
            open.iter().rev().find(|time| at_ns <= time.end_ns()).map(|time| time.start_ns)
        };
        let tracks = self.0.iter().enumerate();
        let (i, start_ns) = tracks
            .filter_map(|(i, open)| Some((i, inner(open)?)))
            .max_by_key(|&(i, start_ns)| (start_ns, Reverse(i)))?;
        if must_begin && start_ns < at_ns {
            return None;
        }
        Some((i as u32, if start_ns == at_ns { at_ns.saturating_add(1) } else { at_ns }))
    }
}

/// Whether `last` is over when `next` begins. Two events without duration at the same time nest.
fn has_ended(last: TimeRange, next: TimeRange) -> bool {
    let both_moments = last.dur_ns == 0 && next.dur_ns == 0;
    last.end_ns() < next.start_ns || (last.end_ns() == next.start_ns && !both_moments)
}
