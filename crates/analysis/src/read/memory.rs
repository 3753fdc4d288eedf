//! Adds the samples of memory of a trace to a timeline.

use std::collections::BTreeMap;

use super::events::Reader;
use crate::timeline::{MemoryChange, MemorySample};

impl Reader {
    pub(super) fn memory(&mut self) {
        let Some(at_ns) = self.event.ts_ns else {
            return self.odd("a memory sample without a ts");
        };
        self.last_end_ns = self.last_end_ns.max(Some(at_ns));
        let device_type = self.args.device_type.unwrap_or(0);
        if let (Some(addr), Some(bytes)) = (self.args.addr, self.args.change_bytes) {
            let lane = self.lane();
            let block = MemoryChange { at_ns, lane, device_type, addr, bytes };
            self.timeline.allocations.push(block);
        }
        let args = &self.args;
        match (args.allocated_bytes, args.change_bytes) {
            (Some(allocated_bytes), _) => self.timeline.memory.push(MemorySample {
                at_ns,
                allocated_bytes,
                reserved_bytes: args.reserved_bytes.unwrap_or(0),
                device_type,
            }),
            (None, Some(bytes)) => self.changes.push((at_ns, device_type, bytes)),
            (None, None) => self.odd("a memory sample without a total"),
        }
    }

    /// Adds up the changes of memory without totals, as PyTorch 1.8 wrote them. Memory that was allocated before the recording is not
    /// known; at least as much was there as was freed.
    pub(super) fn add_up_changes(&mut self) {
        self.changes.sort_by_key(|change| change.0);
        let timeline = &mut self.timeline;
        timeline.has_summed_memory = !self.changes.is_empty();
        let mut sums: BTreeMap<i64, (i64, i64)> = BTreeMap::new();
        for (_, device_type, bytes) in &self.changes {
            let (sum, least) = sums.entry(*device_type).or_default();
            *sum = sum.saturating_add(*bytes);
            *least = (*least).min(*sum);
        }
        sums.values_mut().for_each(|of| of.0 = of.1.saturating_neg());
        for (at_ns, device_type, bytes) in self.changes.drain(..) {
            let sum = sums.entry(device_type).or_default();
            sum.0 = sum.0.saturating_add(bytes);
            let allocated_bytes = u64::try_from(sum.0).unwrap_or(0);
            timeline.memory.push(MemorySample {
                at_ns,
                allocated_bytes,
                reserved_bytes: 0,
                device_type,
            });
        }
    }
}
