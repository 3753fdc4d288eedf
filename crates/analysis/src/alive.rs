//! The memory that is in use when most is: who allocated it, and in which part of a step.
//!
//! A timeline goes in, whose file has the addresses of memory that is given out and back (`profile_memory=True`). Bytes by the outermost operator around each
//! allocation come out. Memory from before the recording has no allocation, and is the rest.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use foldhash::HashMap;

use crate::backward;
use crate::timeline::{MemoryChange, NameId, TimeRange, Timeline, TrackId};

/// PyTorch's number for the host.
pub(crate) const HOST: i64 = 0;

/// Memory that is in use at the peak.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Alive {
    /// The outermost operator that allocated it; empty outside of operators.
    pub(crate) operator: String,
    /// `forward`, `backward`, `optimizer`, or `before the recording`.
    pub(crate) part: &'static str,
    pub(crate) bytes: u64,
    pub(crate) allocations: u64,
}

/// The memory at the moment when most of the device's is allocated, or of the host's without a device. Those with most bytes come first.
pub(crate) fn at_peak(timeline: &Timeline) -> Vec<Alive> {
    let types = || timeline.allocations.iter().map(|of| of.device_type);
    let device_type = types().find(|of| *of != HOST).unwrap_or(HOST);
    let samples = timeline.memory.iter().filter(|of| of.device_type == device_type);
    let Some(peak) = samples.max_by_key(|of| (of.allocated_bytes, Reverse(of.at_ns))) else {
        return Vec::new();
    };
    let mut changes: Vec<&MemoryChange> =
        timeline.allocations.iter().filter(|of| of.device_type == device_type).collect();
    changes.sort_by_key(|of| of.at_ns);
    let mut blocks: HashMap<u64, &MemoryChange> = HashMap::default();
    for change in changes.into_iter().take_while(|of| of.at_ns <= peak.at_ns) {
        if change.bytes > 0 {
            blocks.insert(change.addr, change);
        } else {
            blocks.remove(&change.addr);
        }
    }
    let (operators, parts) = (outermost(timeline), parts(timeline));
    let mut sums: BTreeMap<(Option<NameId>, &'static str), (u64, u64)> = BTreeMap::new();
    for block in blocks.values() {
        let holds = |time: &TimeRange| (time.start_ns..time.end_ns()).contains(&block.at_ns);
        let begun =
            operators.partition_point(|of| (of.0, of.1.start_ns) <= (block.lane, block.at_ns));
        let operator = begun
            .checked_sub(1)
            .map(|at| operators[at])
            .filter(|of| of.0 == block.lane && holds(&of.1));
        let part = parts.iter().find(|(_, time)| holds(time)).map_or("forward", |(part, _)| part);
        let sum = sums.entry((operator.map(|of| of.2), part)).or_default();
        *sum = (sum.0.saturating_add(block.bytes.unsigned_abs()), sum.1 + 1);
    }
    let of = |((operator, part), (bytes, allocations)): ((Option<NameId>, _), _)| {
        let operator = operator.map_or("", |of| timeline.names.text(of)).to_owned();
        Alive { operator, part, bytes, allocations }
    };
    let mut alive: Vec<Alive> = sums.into_iter().map(of).collect();
    let seen = alive.iter().fold(0u64, |sum, of| sum.saturating_add(of.bytes));
    let before = peak.allocated_bytes.saturating_sub(seen);
    if before > 0 && !alive.is_empty() {
        let part = "before the recording";
        alive.push(Alive { operator: String::new(), part, bytes: before, allocations: 0 });
    }
    alive.sort_by_key(|of| Reverse(of.bytes));
    alive
}

/// The parts of steps that are not the forward pass.
fn parts(timeline: &Timeline) -> Vec<(&'static str, TimeRange)> {
    let passes = backward::passes(timeline).into_iter().map(|of| ("backward", of.time));
    let spans = timeline.annotations.iter().filter(|of| !of.is_device).map(|of| (of.name, of.time));
    let spans = spans.chain(timeline.operators.iter().map(|of| (of.name, of.time)));
    let updates = spans.filter(|of| timeline.names.text(of.0).starts_with("Optimizer.step"));
    passes.chain(updates.map(|of| ("optimizer", of.1))).collect()
}

/// The outermost operators of each row, in order.
fn outermost(timeline: &Timeline) -> Vec<(TrackId, TimeRange, NameId)> {
    let mut all: Vec<_> = timeline.operators.iter().map(|of| (of.lane, of.time, of.name)).collect();
    all.retain(|of| !timeline.names.text(of.2).starts_with("Optimizer."));
    all.sort_by_key(|of| (of.0, of.1.start_ns, Reverse(of.1.end_ns())));
    let mut covered = None;
    all.retain(|(lane, time, _)| {
        let is_inner = covered.is_some_and(|(of, end_ns)| of == *lane && time.end_ns() <= end_ns);
        if !is_inner {
            covered = Some((*lane, time.end_ns()));
        }
        !is_inner
    });
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::read::parse;

    #[test]
    fn what_is_alive_at_the_peak_is_known_by_who_allocated_it() {
        let operator = |name: &str, ts: u64, dur: u64| {
            format!(
                "{{\"ph\":\"X\",\"cat\":\"cpu_op\",\"name\":\"{name}\",\"pid\":1,\"tid\":1,\"ts\":{ts},\"dur\":{dur},\"args\":{{}}}}"
            )
        };
        let change = |ts: u64, addr: u64, bytes: i64, total: i64| {
            format!(
                "{{\"ph\":\"i\",\"cat\":\"cpu_instant_event\",\"name\":\"[memory]\",\"pid\":1,\"tid\":1,\"ts\":{ts},\"s\":\"t\",\"args\":\
                 {{\"Addr\":{addr},\"Bytes\":{bytes},\"Device Type\":1,\"Total Allocated\":{total},\"Total Reserved\":4096}}}}"
            )
        };
        let events = [
            operator("aten::linear", 10, 20),
            operator("aten::addmm", 12, 10),
            operator("Optimizer.step#AdamW.step", 100, 50),
            operator("aten::zeros_like", 110, 10),
            change(15, 7, 100, 1100),
            change(16, 8, 50, 1150),
            change(40, 8, -50, 1100),
            change(115, 9, 300, 1400),
            change(160, 9, -300, 1100),
        ];
        let timeline =
            parse(format!("{{\"traceEvents\": [{}]}}", events.join(",")).as_bytes()).unwrap();
        let found: Vec<_> = at_peak(&timeline)
            .into_iter()
            .map(|of| (of.operator, of.part, of.bytes, of.allocations))
            .collect();
        let expected = [
            (String::new(), "before the recording", 1000, 0),
            ("aten::zeros_like".to_owned(), "optimizer", 300, 1),
            ("aten::linear".to_owned(), "forward", 100, 1),
        ];
        assert_eq!(found, expected);
    }
}
