//! Memory of the ranks: its peaks, and its course over time.

use super::shared::{COUNT, MIB, label};
use crate::alive::{self, Alive};
use crate::hta::Analysis;
use crate::report::chart::{Color, Row, Series, Stroke};
use crate::report::{Body, Panel, Section, Width};
use crate::table::Columns;
use crate::timeline::Timeline;

const NO_SAMPLES: &str = "The traces hold no samples of memory.";
/// The most rows of a table.
const ROWS: usize = 100;

/// Peak and steady memory of a sharded run.
pub(super) fn peaks(analysis: &Analysis) -> Section {
    let panel = |id: &str, title: &str, definition: &str, of: [(&str, &str, Color); 2]| {
        let columns: Vec<_> = crate::hta::columns(analysis.kind).collect();
        let bars = analysis.ranks.iter().flat_map(|rank| {
            of.iter().map(|(name, words, color)| {
                let column = columns.iter().find(|c| c.head.key == *name);
                let value = column.and_then(|c| c.cell(rank).number());
                Row::bar(format!("{}, {words}", label(rank)), value, *color)
            })
        });
        Panel::new(id, title, "MiB", definition, Body::bars("MiB", bars).or(NO_SAMPLES))
            .wide(Width::Half)
    };
    let peak = panel(
        "peak-memory",
        "Peak memory",
        "The most memory at one moment: alive (allocated), and taken from the system (reserved).",
        [
            ("peak_allocated_mb", "allocated", Color::Memory),
            ("peak_reserved_mb", "reserved", Color::Other),
        ],
    );
    let steady = panel(
        "steady-memory",
        "Steady memory",
        "Memory alive: the median over samples, and at the last sample. The median over samples is not \
         a median over time.",
        [
            ("p50_allocated_mb", "median", Color::Memory),
            ("final_allocated_mb", "final", Color::Other),
        ],
    );
    Section::new(
        "peaks",
        "Memory",
        "What sharding is for: the memory that each rank needs.",
        vec![peak, steady],
    )
}

/// The memory that is in use when most is, of the first rank whose trace tells.
fn at_peak(timelines: &[Timeline]) -> Panel {
    let alive = timelines.iter().map(alive::at_peak).find(|of| !of.is_empty()).unwrap_or_default();
    let definition = "Memory that is allocated at the moment when most is, of the first rank: of its device, or of the host if the trace has none of a device.";
    alive_at_peak(&alive, definition)
}

/// The table of this memory.
#[rustfmt::skip]
pub(crate) fn alive_at_peak(alive: &[Alive], definition: &str) -> Panel {
    let columns = Columns::<&Alive>::new()
        .add("operator", "allocated by", COUNT, "The outermost operator around the allocation, or the innermost line of the program.", |of| of.operator.clone())
        .add("part", "in", COUNT, "The part of the step, or before the recording, when nobody is known.", |of| of.part)
        .add("mib", "in use", ("MiB", 2), "Bytes in 2^20.", |of| of.bytes as f64 / MIB)
        .add("allocations", "allocations", COUNT, "How many.", |of| of.allocations);
    Panel::table("memory-at-peak", "Memory at the peak", definition, columns.table(alive.iter().take(ROWS)), NO_SAMPLES)
}

/// Memory over time, of every rank that has samples.
pub(super) fn over_time(analysis: &Analysis, timelines: &[Timeline]) -> Section {
    let lines = analysis.ranks.iter().filter_map(|rank| {
        let memory = rank.memory.as_ref()?;
        let begin = memory.series.first()?.at_ns;
        let points = memory.series.iter();
        let points = points.map(|p| ((p.at_ns - begin) as f64 / 1e6, p.value / MIB));
        Some(Series::line(label(rank), points).stroke(Stroke::Steps).look(rank.rank))
    });
    let body = Body::over_time("MiB", lines).or(NO_SAMPLES);
    let definition = "Bytes alive after each change, in MiB of 2^20 bytes. Time counts from the first sample of \
         the rank. Each of many equal ranges of time shows its highest and its last value.";
    let panel = Panel::new("memory", "Memory over time", "MiB", definition, body);
    Section::new("memory-section", "Memory in use", "", vec![panel, at_peak(timelines)])
}
