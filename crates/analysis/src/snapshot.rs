//! Files of `torch.cuda.memory._dump_snapshot`: the memory of a card by state, who allocated it, and what was alive at the peak.
//!
//! A path goes in, and a [`Report`] comes out. Nothing in the file is run. Format: `torch/cuda/memory.py`, `torch/cuda/_memory_viz.py`.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::path::Path;

use foldhash::{HashMap, HashMapExt};
use paceline_files::Printable;

use crate::TraceError;
use crate::alive::Alive;
use crate::hang::dump::line;
use crate::hang::pickle::{Id, PlainValues};
use crate::report::panels::{COUNT, MIB, alive_at_peak};
use crate::report::{Body, Panel, Report, Section, Weight};
use crate::table::Columns;

/// The largest file that is read, and the most values in it. 100,000 events take about 10 MB, with few stacks.
const MAX_BYTES: u64 = 512 << 20;
const MOST_VALUES: usize = 16 << 20;
/// The most blocks in the table of the largest.
const LARGEST: usize = 20;

/// Memory in one state: its name, bytes, blocks, and the largest block.
type InState = (&'static str, [u64; 3]);

/// The states of memory. The first two are parts of blocks that are allocated.
const STATES: [&str; 5] = [
    "allocated",
    "rounding of sizes",
    "freed, in use by another stream",
    "free, between blocks in use",
    "free, in segments without blocks in use",
];

/// Memory that is alive: its requested size, and the frames that allocated it, if the file has them.
#[derive(Clone, Copy)]
struct Block {
    bytes: u64,
    frames: Option<Id>,
}

/// The values of a file, and the events of a card.
struct CardMemory {
    values: PlainValues,
    /// The events of the allocator, in order.
    events: Vec<Id>,
}

/// The report of a file: of the card that has the largest segment.
///
/// # Errors
///
/// If it is no snapshot of a card's memory.
pub fn report(path: &Path) -> Result<Report, TraceError> {
    let bytes = paceline_files::read(path, MAX_BYTES)
        .map_err(|source| TraceError::Io { path: path.to_owned(), source })?;
    let unfit = |fault: String| {
        let path = path.printable();
        TraceError::Unfit(format!("{path}: no snapshot of PyTorch's memory: {fault}"))
    };
    let (values, root) = PlainValues::parse(&bytes, MOST_VALUES).map_err(unfit)?;
    let list = |key: &str| values.get(root, key).map_or(Vec::new(), |of| values.list(of).to_vec());
    let (segments, traces) = (list("segments"), list("device_traces"));
    let file = CardMemory { values, events: Vec::new() };
    let largest = segments.iter().max_by_key(|of| file.int(**of, "total_size"));
    let largest = *largest.ok_or_else(|| unfit("it has no segments of memory".to_owned()))?;
    let card = file.int(largest, "device").unwrap_or(0);
    let events = usize::try_from(card).ok().and_then(|card| traces.get(card).copied());
    let events = events.map_or(Vec::new(), |of| file.values.list(of).to_vec());
    let is_own = |of: &Id| file.int(*of, "device").unwrap_or(0) == card;
    let segments: Vec<Id> = segments.iter().copied().filter(is_own).collect();
    let (title, subtitle) = (path.printable().to_string(), format!("memory of card {card}"));
    let report = Report { title, subtitle, ..Report::default() };
    Ok(CardMemory { events, ..file }.fill(report, &segments))
}

impl CardMemory {
    fn int(&self, of: Id, key: &str) -> Option<u64> {
        self.values.get(of, key).and_then(|of| self.values.int(of))?.try_into().ok()
    }

    fn text(&self, of: Id, key: &str) -> &str {
        self.values.get(of, key).and_then(|of| self.values.text(of)).unwrap_or("")
    }

    /// The memory of these segments by state, and the blocks that are allocated, by address.
    fn states(&self, segments: &[Id]) -> (Vec<InState>, HashMap<u64, Block>) {
        let (mut states, mut alive) = (STATES.map(|name| (name, [0u64; 3])), HashMap::new());
        for segment in segments {
            let blocks =
                self.values.get(*segment, "blocks").map_or(&[][..], |of| self.values.list(of));
            let is_used = blocks.iter().any(|of| self.text(*of, "state") != "inactive");
            let mut addr = self.int(*segment, "address").unwrap_or(0);
            for block in blocks {
                let size = self.int(*block, "size").unwrap_or(0);
                let bytes = self.int(*block, "requested_size").unwrap_or(size).min(size);
                let parts = match self.text(*block, "state") {
                    "active_allocated" => {
                        let frames = self.values.get(*block, "frames");
                        let frames = frames.filter(|of| !self.values.list(*of).is_empty());
                        alive.insert(addr, Block { bytes, frames });
                        [(0, bytes), (1, size - bytes)]
                    }
                    "inactive" if is_used => [(3, size), (3, 0)],
                    "inactive" => [(4, size), (4, 0)],
                    _ => [(2, size), (2, 0)],
                };
                for (at, bytes) in parts.into_iter().filter(|of| of.1 > 0) {
                    let [sum, blocks, largest] = states[at].1;
                    states[at].1 = [sum.saturating_add(bytes), blocks + 1, largest.max(bytes)];
                }
                addr = addr.saturating_add(size);
            }
        }
        (states.into_iter().filter(|of| of.1[1] > 0).collect(), alive)
    }

    /// An address, its block, and whether it is given out or back.
    fn change(&self, event: Id) -> Option<(u64, Block, bool)> {
        let is_new = match self.text(event, "action") {
            "alloc" => true,
            "free_requested" => false,
            _ => return None,
        };
        let (bytes, frames) = (self.int(event, "size")?, self.values.get(event, "frames"));
        Some((self.int(event, "addr")?, Block { bytes, frames: frames.filter(|_| is_new) }, is_new))
    }

    /// Goes back from the blocks at the end of the file, which may have only the last events, to the moment when most is allocated.
    fn at_peak(&self, mut alive: HashMap<u64, Block>) -> Vec<Block> {
        let (mut now, mut peak, mut at) = (0, 0, self.events.len());
        for (place, event) in self.events.iter().enumerate().rev() {
            let Some((_, block, is_new)) = self.change(*event) else { continue };
            now += i128::from(block.bytes) * if is_new { -1 } else { 1 };
            if now > peak {
                (peak, at) = (now, place);
            }
        }
        for (addr, block, is_new) in
            self.events[at..].iter().rev().filter_map(|of| self.change(*of))
        {
            if is_new {
                alive.remove(&addr);
            } else {
                alive.insert(addr, block);
            }
        }
        for (addr, block, _) in
            self.events[..at].iter().filter_map(|of| self.change(*of)).filter(|of| of.2)
        {
            alive.entry(addr).and_modify(|of| of.frames = block.frames);
        }
        let mut alive: Vec<Block> = alive.into_values().collect();
        alive.sort_unstable_by_key(|of| (Reverse(of.bytes), of.frames));
        alive
    }

    /// The line of the program that allocated a block, and the part of the step.
    fn site(&self, block: &Block) -> (String, &'static str) {
        let Some(frames) = block.frames else { return (String::new(), "before the recording") };
        let has = |part: &str| {
            let frames = self.values.list(frames).iter();
            frames.map(|of| self.text(*of, "filename")).any(|file| file.contains(part))
        };
        // Autograd's own threads run no Python.
        let parts =
            [("torch/optim/", "optimizer"), ("torch/autograd/", "backward"), (".py", "forward")];
        let part = parts.iter().find(|of| has(of.0)).map_or("without Python", |of| of.1);
        (line(&self.values, frames).unwrap_or_default(), part)
    }

    /// Adds the tables and notes.
    #[rustfmt::skip]
    fn fill(&self, mut report: Report, segments: &[Id]) -> Report {
        let reserved = segments.iter().fold(0u64, |sum, of| sum.saturating_add(self.int(*of, "total_size").unwrap_or(0))) as f64;
        let (states, alive) = self.states(segments);
        let end = alive.values().fold(0u64, |sum, of| sum.saturating_add(of.bytes)) as f64;
        let alive: Vec<((String, &str), u64)> = self.at_peak(alive).iter().map(|of| (self.site(of), of.bytes)).collect();
        let peak = alive.iter().fold(0u64, |sum, of| sum.saturating_add(of.1)) as f64;
        let states = Columns::<InState>::new()
            .add("state", "state", COUNT, "The use of the memory.", |of| of.0)
            .add("mib", "bytes", ("MiB", 2), "Bytes in 2^20.", |of| of.1[0] as f64 / MIB)
            .add("share_pct", "of reserved", ("%", 1), "Its part of the memory that PyTorch has taken from the card.", move |of| 100.0 * of.1[0] as f64 / reserved)
            .add("blocks", "blocks", COUNT, "How many.", |of| of.1[1])
            .add("largest_mib", "largest", ("MiB", 2), "The largest block: of free memory, the most that can be allocated at once without more from the card.", |of| of.1[2] as f64 / MIB)
            .table(states);
        let largest = Columns::<((String, &str), u64)>::new()
            .add("operator", "allocated by", COUNT, "The innermost line of the program.", |of| of.0.0.clone())
            .add("part", "in", COUNT, "The part of the step.", |of| of.0.1)
            .add("mib", "bytes", ("MiB", 2), "Bytes in 2^20.", |of| of.1 as f64 / MIB)
            .table(&alive[..alive.len().min(LARGEST)]);
        let mut sums: BTreeMap<&(String, &'static str), [u64; 2]> = BTreeMap::new();
        for (site, bytes) in &alive {
            let [sum, allocations] = sums.entry(site).or_default();
            (*sum, *allocations) = (sum.saturating_add(*bytes), *allocations + 1);
        }
        let mut sums: Vec<Alive> = sums.into_iter().map(|((operator, part), [bytes, allocations])| Alive { operator: operator.clone(), part, bytes, allocations }).collect();
        sums.sort_by_key(|of| Reverse(of.bytes));
        let panels = vec![
            Panel::table("memory-by-state", "Memory of the card", "Memory that PyTorch had taken from the card when the file was written, in segments.", states, ""),
            alive_at_peak(&sums, "Memory that is allocated when most is. The events of the file are followed back from its end."),
            Panel::table("largest-blocks", "Largest blocks", "The largest at that moment.", largest, ""),
        ];
        let lead = format!("{:.2} MiB are allocated at the peak, and {:.2} of {:.2} MiB reserved at the end.", peak / MIB, end / MIB, reserved / MIB);
        report.sections = vec![Section::new("memory-section", "Memory", &lead, panels)];
        report.sections[0].panels.retain(|panel| !matches!(panel.body, Body::Nothing(_)));
        report.csv_table = "memory-at-peak".to_owned();
        for event in self.events.iter().filter(|of| self.text(**of, "action") == "oom").take(3) {
            let [asked, free] = ["size", "device_free"].map(|key| self.int(*event, key).unwrap_or(0) as f64 / MIB);
            let place = self.values.get(*event, "frames").and_then(|of| line(&self.values, of)).map_or(String::new(), |of| format!(", at {of}"));
            report.note(Weight::Warning, format!("An allocation of {asked:.2} MiB failed with {free:.2} MiB free on the card{place}."));
        }
        report
    }
}
