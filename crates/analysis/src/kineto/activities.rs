//! Writes what the vendor's profiler has recorded of a card: calls of the driver, kernels, copies and fills.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io::{self, Write};

use paceline_trace::{ActivityKind, ActivityRecord, Span};

use super::events::{DEVICE, Events, name_of_copy};

/// The stream with most work.
pub(super) fn busiest_stream(activities: &[ActivityRecord]) -> Option<u32> {
    let mut busy = BTreeMap::<u32, u64>::new();
    for of in activities {
        if let Some(stream) = of.kind.stream() {
            *busy.entry(stream).or_default() += of.span.len_ns();
        }
    }
    busy.into_iter().max_by_key(|(_, ns)| *ns).map(|(stream, _)| stream)
}

/// When kernels of NCCL ran within this span of an operation; `None` if there are none.
pub(super) fn on_card(activities: &[ActivityRecord], span: Span) -> Option<Span> {
    let within =
        |of: &ActivityRecord| span.start_ns <= of.span.start_ns && of.span.end_ns <= span.end_ns;
    let kernels = activities.iter().filter(|of| is_of_nccl(of) && within(of));
    kernels.map(|of| of.span).reduce(|all, of| Span {
        start_ns: all.start_ns.min(of.start_ns),
        end_ns: all.end_ns.max(of.end_ns),
    })
}

/// Whether this is a kernel of NCCL, which the operation stands for that it is a part of.
fn is_of_nccl(of: &ActivityRecord) -> bool {
    matches!(&of.kind, ActivityKind::Kernel { name, .. } if name.starts_with("nccl"))
}

impl<W: Write> Events<'_, W> {
    /// Writes the activities, calls with the operator that made them.
    pub(super) fn activities(&mut self) -> io::Result<()> {
        let activities = &self.header.activities;
        self.operators.sort_by_key(|(span, _)| span.start_ns);
        let mut threads = BTreeMap::<u32, usize>::new();
        for of in activities {
            if let ActivityKind::Call { thread, .. } = of.kind {
                *threads.entry(thread).or_default() += 1;
            }
        }
        // The main thread makes most calls.
        let main = threads.into_iter().max_by_key(|(_, calls)| *calls).map(|(thread, _)| thread);
        let mut operators = HashMap::<u32, u64>::new();
        for of in activities {
            if let ActivityKind::Call { name, thread } = of.kind {
                let operator = self.operator_at(of.span.start_ns).filter(|_| Some(thread) == main);
                operators.extend(operator.map(|id| (of.correlation, id)));
                self.driver_call(of, name, (Some(thread) != main).then_some(thread), operator)?;
            }
        }
        // No operation stands for those within a graph.
        let by_graph = activities.iter().filter(|of| match of.kind {
            ActivityKind::Call { name, .. } => name == "cuGraphLaunch",
            _ => false,
        });
        let by_graph: HashSet<u32> = by_graph.map(|of| of.correlation).collect();
        let is_shown = |of: &&ActivityRecord| !is_of_nccl(of) || by_graph.contains(&of.correlation);
        for of in activities.iter().filter(is_shown) {
            if let Some(stream) = of.kind.stream() {
                self.work(of, stream, operators.get(&of.correlation).copied())?;
            }
        }
        Ok(())
    }

    /// The number of the operator that the main thread submitted then.
    fn operator_at(&self, at_ns: u64) -> Option<u64> {
        let after = self.operators.partition_point(|(span, _)| span.start_ns <= at_ns);
        let (span, id) = self.operators.get(after.checked_sub(1)?)?;
        (at_ns <= span.end_ns).then_some(*id)
    }

    /// Writes a call of the driver, by the main thread or by another one.
    fn driver_call(
        &mut self,
        of: &ActivityRecord,
        name: &str,
        other: Option<u32>,
        operator: Option<u64>,
    ) -> io::Result<()> {
        let (pid, correlation) = (self.header.pid, u64::from(of.correlation));
        let tid = other.unwrap_or(pid);
        self.complete("cuda_driver", name, pid, tid, of.span);
        self.numbers(correlation, operator).raw("}");
        self.close()?;
        if name.ends_with("Synchronize") {
            return Ok(());
        }
        self.arrow("s", pid, tid, of.span.start_ns, correlation);
        self.close()
    }

    /// Writes a kernel, a copy or a fill, and the end of the arrow from its call.
    fn work(&mut self, of: &ActivityRecord, stream: u32, operator: Option<u64>) -> io::Result<()> {
        let correlation = u64::from(of.correlation);
        match &of.kind {
            ActivityKind::Call { .. } => return Ok(()),
            ActivityKind::Kernel { name, grid, block, registers, shared_bytes, .. } => {
                self.complete("kernel", name, DEVICE, stream, of.span);
                self.device_args(stream, correlation, operator).raw(",\"registers per thread\":");
                self.text.int(*registers).raw(",\"shared memory\":").int(*shared_bytes);
                for (key, sizes) in [("grid", grid), ("block", block)] {
                    let [x, y, z] = *sizes;
                    self.text.raw(",\"").raw(key).raw("\":[").int(x).raw(",").int(y).raw(",");
                    self.text.int(z).raw("]");
                }
            }
            ActivityKind::Copy { bytes, places, .. } => {
                self.complete("gpu_memcpy", &name_of_copy(*places), DEVICE, stream, of.span);
                self.device_args(stream, correlation, operator);
                self.bytes(*bytes, of.span);
            }
            ActivityKind::Fill { bytes, .. } => {
                self.complete("gpu_memset", "Memset (Device)", DEVICE, stream, of.span);
                self.device_args(stream, correlation, operator);
                self.bytes(*bytes, of.span);
            }
        }
        self.text.raw("}");
        self.close()?;
        self.arrow("f", DEVICE, stream, of.span.start_ns, correlation).raw(",\"bp\":\"e\"");
        self.close()
    }
}
