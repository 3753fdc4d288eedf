//! Lengths of launch queues and bandwidth of memory copies, over time.

use std::collections::BTreeMap;

use super::kernels::KernelKind;
use super::work::{Item, Work};
use super::{Source, Summary};
use crate::timeline::LAUNCHES;

/// A value that holds until the time of the next point.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// When the value changed to this one.
    pub at_ns: i64,
    /// The value.
    pub value: f64,
}

/// The queue of one stream, as HTA counts it: a launch adds one, a kernel that starts removes one.
#[derive(Clone, Debug, PartialEq)]
pub struct StreamQueue {
    /// The number of the stream in the file.
    pub stream: i64,
    /// Statistics of the length after each change, not weighted by time.
    pub length: Summary,
    /// Time at 1024 launches or more, which block the thread that launches, in nanoseconds.
    pub full_ns: i64,
    /// The length over time. Of each of many equal time ranges, only the highest and the last point are kept, at most 1000 in all.
    pub series: Vec<Point>,
}

/// Bandwidth of one kind of copy.
#[derive(Clone, Debug, PartialEq)]
pub struct CopyBandwidth {
    /// `Memcpy HtoD`, `Memcpy DtoH`, `Memcpy DtoD`, `Memset`, ...
    pub name: String,
    /// Number of copies.
    pub copies: u64,
    /// Sum of the bytes of the copies for which the file gives them.
    pub bytes: u64,
    /// Sum of their durations, in nanoseconds.
    pub time_ns: i64,
    /// Statistics of the total bandwidth of all running copies, in GB/s (1e9 bytes per second), after each
    /// change that leaves it above zero, as in HTA. `None` if the file gives no bandwidth.
    pub gb_per_s: Option<Summary>,
}

/// The largest number of points in a series.
const SERIES: usize = 1000;

/// The queues of all streams, in order of streams.
pub(super) fn queues(work: &Work) -> Vec<StreamQueue> {
    if work.source == Source::Operators {
        return Vec::new();
    }
    changes(work).iter().filter_map(|(stream, changes)| of_stream(*stream, changes)).collect()
}

/// A change of the length of a queue: when, by how much, and the index of the item.
type Change = (i64, i8, usize);

/// The changes of each stream in order. At the same time, additions come before removals.
fn changes(work: &Work) -> BTreeMap<i64, Vec<Change>> {
    let mut streams: BTreeMap<i64, Vec<Change>> = BTreeMap::new();
    for (place, enqueued_ns) in enqueued(work) {
        let item = &work.items[place];
        let changes = streams.entry(item.stream).or_default();
        changes.extend([(enqueued_ns, 1, place), (item.start_ns, -1, place)]);
    }
    for changes in streams.values_mut() {
        changes.sort_by_key(|&(at_ns, change, _)| (at_ns, -change));
    }
    streams
}

/// For each item that was put into a queue: its index among the items, and when that happened.
pub(super) fn enqueued(work: &Work) -> impl Iterator<Item = (usize, i64)> {
    let names = &work.timeline.names;
    let counts: Vec<bool> = names.iter().map(|name| LAUNCHES.contains(&name)).collect();
    work.items.iter().enumerate().filter_map(move |(place, item)| {
        let launch = &work.timeline.launches[item.launch? as usize];
        counts[launch.name.0 as usize].then(|| (place, work.rounded(launch.time).start_ns))
    })
}

fn of_stream(stream: i64, changes: &[Change]) -> Option<StreamQueue> {
    let mut length = 0i64;
    let points = changes.iter().map(|&(at_ns, change, _)| {
        length += i64::from(change);
        Point { at_ns, value: length as f64 }
    });
    let points: Vec<Point> = points.collect();
    let full_ns = points.windows(2).filter(|pair| pair[0].value >= 1024.0);
    let full_ns = full_ns.map(|pair| pair[1].at_ns - pair[0].at_ns).sum();
    let length = Summary::of(points.iter().map(|point| point.value).collect())?;
    Some(StreamQueue { stream, length, full_ns, series: thinned(&points) })
}

/// For each item, by index: the length of its queue right after it was added, and right after it started. The
/// first length counts the item, the second does not. `None` for an item that was in no queue.
pub(super) fn lengths(work: &Work) -> Vec<Option<(i64, i64)>> {
    let mut lengths = vec![None; work.items.len()];
    for changes in changes(work).values() {
        let mut length = 0;
        for &(_, change, place) in changes {
            length += i64::from(change);
            let of_item: &mut (i64, i64) = lengths[place].get_or_insert((0, 0));
            if change > 0 { of_item.0 = length } else { of_item.1 = length }
        }
    }
    lengths
}

/// Copies by kind, in order of names.
pub(super) fn copies(work: &Work) -> Vec<CopyBandwidth> {
    let mut kinds: BTreeMap<&str, Vec<&Item>> = BTreeMap::new();
    for item in work.of_kind(KernelKind::Memory) {
        kinds.entry(copy_kind(work.timeline.names.text(item.name))).or_default().push(item);
    }
    kinds.into_iter().map(|(name, items)| of_copies(work, name, &items)).collect()
}

/// The kind of copy. For example, `Memcpy HtoD (Pinned -> Device)` is a `Memcpy HtoD`.
fn copy_kind(name: &str) -> &str {
    if name.starts_with("Memset") {
        "Memset"
    } else if name.starts_with("Memcpy") {
        name.get(.."Memcpy DtoH".len()).unwrap_or(name)
    } else {
        "Memcpy Unknown"
    }
}

fn of_copies(work: &Work, name: &str, items: &[&Item]) -> CopyBandwidth {
    let kernels = &work.timeline.kernels;
    let of_file = |item: &Item| kernels.get(item.kernel as usize);
    let bytes = items.iter().filter_map(|item| of_file(item)?.bytes).fold(0, u64::saturating_add);
    let mut changes = Vec::with_capacity(2 * items.len());
    for item in items {
        let Some(gb_s) = of_file(item).and_then(|kernel| kernel.bandwidth_gb_s) else { continue };
        let gb_s = f64::from(gb_s);
        // Like HTA, treats a copy with a duration of zero as one of a microsecond.
        let dur_ns = if item.dur_ns == 0 { 1000 } else { item.dur_ns };
        changes.push((item.start_ns, 1i32, gb_s));
        changes.push((item.start_ns + dur_ns, -1, gb_s));
    }
    changes.sort_by_key(|&(at_ns, ..)| at_ns);
    let (mut running, mut sum) = (0, 0.0);
    let sums = changes.iter().map(|&(_, change, gb_s)| {
        running += change;
        // Reset to zero when nothing runs, so that rounding errors do not remain in the sum.
        sum = if running == 0 { 0.0 } else { sum + f64::from(change) * gb_s };
        sum
    });
    CopyBandwidth {
        name: name.to_owned(),
        copies: items.len() as u64,
        bytes,
        time_ns: items.iter().map(|item| item.dur_ns).sum(),
        gb_per_s: Summary::of(sums.filter(|&sum| sum > 0.0).collect()),
    }
}

/// At most [`SERIES`] of the points, which must be in order of time. The time is divided into equal bins. The
/// result has the highest point of each bin, and its last one, which holds until the next bin with points.
pub(super) fn thinned(points: &[Point]) -> Vec<Point> {
    let (Some(first), Some(last)) = (points.first(), points.last()) else { return Vec::new() };
    if points.len() <= SERIES {
        return points.to_vec();
    }
    let bin_ns = (last.at_ns - first.at_ns) / (SERIES as i64 / 2 - 1) + 1;
    let bin = |point: &Point| (point.at_ns - first.at_ns) / bin_ns;
    let of_bin = |of: &[Point]| {
        let last = of.len() - 1;
        let highest = (0..=last).max_by(|a, b| of[*a].value.total_cmp(&of[*b].value));
        let highest = highest.filter(|at| *at < last);
        highest.into_iter().chain([last]).map(|at| of[at]).collect::<Vec<_>>()
    };
    points.chunk_by(|a, b| bin(a) == bin(b)).flat_map(of_bin).collect()
}
