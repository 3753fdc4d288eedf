//! Writes the merged file, one rank after the other.
//!
//! Input: trace files, their layouts and clocks. Output: JSON.

use std::io::{self, Write};
use std::path::Path;

use super::LeftOut;
use super::event::{Taken, distinct};
use super::layout::{FlowEnd, Layout, NO_TRACK, each_event};
use crate::TraceError;
use crate::json::{Pull, lossy};
use crate::kineto::text::Text;
use crate::ranks::clock::{ClockSource, Clocks, RankClock};
use crate::read::{self, Event, MERGED_RANKS};

/// An end of an arrow through a collective.
pub(super) struct Arrow {
    /// The number of the collective.
    pub(super) id: u64,
    /// Numbered across the file of its rank.
    pub(super) track: u32,
    /// The time on the reference clock.
    pub(super) at_ns: i64,
    /// `s` at its start, `f` at its end, `t` between.
    pub(super) phase: u8,
}

pub(super) struct Writer<'a> {
    out: &'a mut dyn Write,
    clocks: &'a Clocks,
    zero_ns: i64,
    text: Text,
    is_first: bool,
    /// The last number given to a process or thread. Each gets a number of its own.
    last_number: u32,
    num_events: u64,
    left_out: LeftOut,
}

/// The process and the thread of each track of a rank in the merged file.
type Numbers = Vec<(u32, u32)>;

impl<'a> Writer<'a> {
    /// Writes the part before the events.
    pub(super) fn begin(
        out: &'a mut dyn Write,
        clocks: &'a Clocks,
        base_ns: Option<i64>,
        zero_ns: i64,
    ) -> io::Result<Self> {
        let mut text = Text::default();
        text.raw("{\n\"schemaVersion\": 1,\n");
        if let Some(base_ns) = base_ns {
            text.raw("\"baseTimeNanoseconds\": ").int(base_ns).raw(",\n");
        }
        text.raw("\"paceline\": {\"version\": ").string(env!("CARGO_PKG_VERSION"));
        let ranks: Vec<String> = clocks.ranks.iter().map(|clock| clock.rank.to_string()).collect();
        text.raw(", ").string(MERGED_RANKS).raw(": ").string(&ranks.join(", "));
        text.raw(", \"clock_of_rank\": ").string(&clocks.reference.to_string());
        for clock in &clocks.ranks {
            text.raw(", ").string(&format!("clock_{}", clock.rank)).raw(": ");
            text.string(&words(clock));
        }
        text.raw("},\n\"traceEvents\": [\n");
        let (is_first, last_number, num_events) = (true, 0, 0);
        let left_out = LeftOut::default();
        Ok(Self { out, clocks, zero_ns, text, is_first, last_number, num_events, left_out })
    }

    /// Writes the events of a rank.
    pub(super) fn rank(
        &mut self,
        path: &Path,
        place: usize,
        layout: &Layout,
        arrows: &[Arrow],
    ) -> Result<(), TraceError> {
        let clock = &self.clocks.ranks[place];
        let numbers = self.names(clock.rank, layout)?;
        let mut copier = Copier {
            writer: self,
            layout,
            numbers: &numbers,
            clock,
            place,
            row: Vec::new(),
            next_slice: 0,
            next_begin: 0,
            next_flow: 0,
        };
        let mut outcome = Ok(());
        read::with_json(path, |input| {
            let mut event = Taken::default();
            each_event(&mut Pull::new(input), &mut event, Some(place), |event| {
                // Only the first error is reported, so the rest of the file is skipped.
                if outcome.is_ok() {
                    outcome = copier.copy(event);
                }
            })
        })?;
        outcome?;
        Ok(arrows.iter().try_for_each(|arrow| self.arrow(arrow, &numbers))?)
    }

    /// Closes the file. Returns the number of events written, and those left out.
    pub(super) fn end(mut self) -> io::Result<(u64, LeftOut)> {
        self.text.raw("\n]\n}\n");
        self.hand_over()?;
        Ok((self.num_events, self.left_out))
    }

    /// Numbers and names the processes and tracks of a rank, and writes the names.
    fn names(&mut self, rank: usize, layout: &Layout) -> io::Result<Numbers> {
        let mut pids = Vec::with_capacity(layout.processes.len());
        for process in &layout.processes {
            let pid = self.fresh();
            pids.push(pid);
            let of_rank = format!("rank {rank}");
            let mut name = of_rank.clone();
            for more in [&process.name, &process.labels].into_iter().flatten() {
                if !more.is_empty() && *more != of_rank {
                    let separator = if name == of_rank { ": " } else { ", " };
                    name.push_str(separator);
                    name.push_str(more);
                }
            }
            self.name("process_name", pid, pid, |text| _ = text.raw("\"name\":").string(&name))?;
            self.name("process_sort_index", pid, pid, |text| {
                text.raw("\"sort_index\":").int(pid);
            })?;
        }
        let mut numbers = Numbers::new();
        for row in &layout.rows {
            let pid = pids[row.process];
            for track in 0..row.num_tracks {
                let tid = self.fresh();
                numbers.push((pid, tid));
                let mut name = row.name.clone().unwrap_or_else(|| match &row.written {
                    (_, tid) if !tid.is_empty() => tid.clone(),
                    (pid, _) => pid.clone(),
                });
                if track > 0 {
                    name.push_str(&format!(" ({})", track + 1));
                }
                self.name("thread_name", pid, tid, |text| _ = text.raw("\"name\":").string(&name))?;
                self.name("thread_sort_index", pid, tid, |text| {
                    text.raw("\"sort_index\":").int(tid);
                })?;
            }
        }
        Ok(numbers)
    }

    fn fresh(&mut self) -> u32 {
        self.last_number += 1;
        self.last_number
    }

    fn name(
        &mut self,
        what: &str,
        pid: u32,
        tid: u32,
        args: impl FnOnce(&mut Text),
    ) -> io::Result<()> {
        self.open(b'M', pid, tid).raw(",\"name\":").string(what).raw(",\"args\":{");
        args(&mut self.text);
        self.text.raw("}}");
        self.hand_over()
    }

    fn arrow(&mut self, arrow: &Arrow, numbers: &Numbers) -> io::Result<()> {
        let (pid, tid) = numbers[arrow.track as usize];
        self.open(arrow.phase, pid, tid)
            .raw(",\"cat\":\"across_ranks\",\"name\":\"collective\",\"id\":");
        self.text.int(arrow.id).raw(",\"ts\":");
        self.text.us_for_floats(arrow.at_ns.saturating_sub(self.zero_ns));
        self.text.raw(if arrow.phase == b'f' { ",\"bp\":\"e\"}" } else { "}" });
        self.count()
    }

    /// Writes the beginning of an event.
    fn open(&mut self, phase: u8, pid: u32, tid: u32) -> &mut Text {
        let separator = if std::mem::take(&mut self.is_first) { "" } else { ",\n" };
        self.text.raw(separator).raw("{\"ph\":").string(&lossy(&[phase]));
        self.text.raw(",\"pid\":").int(pid).raw(",\"tid\":").int(tid)
    }

    fn count(&mut self) -> io::Result<()> {
        self.num_events += 1;
        self.hand_over()
    }

    fn hand_over(&mut self) -> io::Result<()> {
        self.out.write_all(&self.text.bytes)?;
        self.text.bytes.clear();
        Ok(())
    }
}

/// Counts an event that is left out.
fn leave(count: &mut u64) -> io::Result<()> {
    *count += 1;
    Ok(())
}

/// Copies the events of one rank.
struct Copier<'w, 'a> {
    writer: &'w mut Writer<'a>,
    layout: &'w Layout,
    numbers: &'w Numbers,
    clock: &'w RankClock,
    place: usize,
    row: Vec<u8>,
    next_slice: usize,
    next_begin: usize,
    next_flow: usize,
}

impl Copier<'_, '_> {
    fn copy(&mut self, taken: &Taken) -> io::Result<()> {
        let (event, mut phase) = (&taken.event, taken.phase());
        if phase == b'M' {
            return Ok(());
        }
        event.row(&mut self.row);
        let (Some(at_ns), Some(&row)) = (event.ts_ns, self.layout.row_ids.get(&self.row)) else {
            return leave(&mut self.writer.left_out.without_time);
        };
        let mut track = self.layout.rows[row as usize].first_track;
        let mut dur_ns = None;
        match phase {
            b'X' | b'B' => {
                let within = self.layout.tracks[self.next_slice];
                self.next_slice += 1;
                track += u32::from(within);
                dur_ns = Some(event.dur_ns.unwrap_or(0).max(0));
                if phase == b'B' {
                    dur_ns = Some(self.layout.begun_ns[self.next_begin]);
                    self.next_begin += 1;
                    phase = b'X';
                }
                if within == NO_TRACK {
                    return leave(&mut self.writer.left_out.crowded);
                }
            }
            // Its begin event was written as the complete event.
            b'E' => return Ok(()),
            b's' | b't' | b'f' => {
                let end = self.layout.flows[self.next_flow];
                self.next_flow += 1;
                return match end {
                    Some(end) => self.flow(taken, end),
                    None => leave(&mut self.writer.left_out.loose_arrows),
                };
            }
            0 | b'C' if phase == 0 || taken.args.bytes.is_empty() => {
                return leave(&mut self.writer.left_out.without_meaning);
            }
            _ => {}
        }
        let start_ns = self.open(event, phase, track, at_ns);
        let text = &mut self.writer.text;
        if let Some(dur_ns) = dur_ns {
            text.raw(",\"dur\":");
            let end_ns = self.clock.align(at_ns.saturating_add(dur_ns));
            text.us_for_floats(end_ns.saturating_sub(start_ns).max(0));
        }
        if !event.scope.is_empty() {
            text.raw(",\"s\":").string(&lossy(&event.scope));
        }
        if !event.id.is_empty() && phase != b'X' {
            text.raw(",\"id\":").string(&format!("{}:{}", self.place, lossy(&event.id)));
        }
        if !taken.args.bytes.is_empty() {
            text.raw(",\"args\":").bytes.extend_from_slice(&taken.args.bytes);
        }
        text.raw("}");
        self.writer.count()
    }

    fn flow(&mut self, taken: &Taken, end: FlowEnd) -> io::Result<()> {
        let phase = taken.phase();
        self.open(&taken.event, phase, end.track, end.at_ns);
        // A large step tells apart the arrows that share an identity. It is odd, so that no value repeats.
        let step = u64::from(end.generation).wrapping_mul(0x9e_3779_b97f);
        let id = taken.flow_id().wrapping_add(step);
        let text = self.writer.text.raw(",\"id\":").int(distinct(id, self.place));
        text.raw(if phase == b'f' { ",\"bp\":\"e\"}" } else { "}" });
        self.writer.count()
    }

    /// Writes the beginning of an event, including its time. Returns that time on the reference clock.
    fn open(&mut self, event: &Event, phase: u8, track: u32, at_ns: i64) -> i64 {
        let zero_ns = self.writer.zero_ns;
        let (pid, tid) = self.numbers[track as usize];
        let text = self.writer.open(phase, pid, tid);
        if !event.category.is_empty() {
            text.raw(",\"cat\":").string(&lossy(&event.category));
        }
        if !event.name.is_empty() {
            text.raw(",\"name\":").string(&lossy(&event.name));
        }
        text.raw(",\"ts\":");
        let start_ns = self.clock.align(at_ns);
        text.us_for_floats(start_ns.saturating_sub(zero_ns));
        start_ns
    }
}

/// Describes a clock in words.
fn words(clock: &RankClock) -> String {
    let within = clock.error_ns.map_or(String::new(), |ns| format!(", within {ns} ns"));
    let offset =
        format!("{} ns at its begin, {} ns at its end", clock.offset_begin_ns, clock.offset_end_ns);
    match clock.source {
        ClockSource::Reference => "the clock of this file".into(),
        ClockSource::Measured => format!("measured: {offset}{within}"),
        ClockSource::Estimated { num_collectives } => {
            format!("estimated from {num_collectives} collectives: {offset}{within}")
        }
        ClockSource::AsWritten => format!("as written{within}"),
    }
}
