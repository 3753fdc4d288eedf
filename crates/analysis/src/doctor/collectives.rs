//! Collectives judged by their bus bandwidth.
//!
//! Input: timelines. Output: for collectives whose sizes are recorded, bytes and bus bandwidth, against a stated link if there is
//! one. The worst come first: those that lose most time to that bound.

use std::collections::BTreeMap;

use super::together::Together;
use crate::hta::{CollectiveKind, collective_kind};
use crate::timeline::Timeline;

/// How many are kept.
pub const WORST: usize = 10;

/// All collectives of a kind and size.
#[derive(Clone, Debug, PartialEq)]
pub struct Collective {
    /// The kind, by PyTorch's name.
    pub name: String,
    /// The ranks of its group.
    pub ranks: u64,
    /// The bytes of a rank's larger buffer.
    pub bytes: u64,
    /// How often, over all ranks.
    pub calls: u64,
    /// How long data moved, in nanoseconds: without the wait for the last rank where the traces of several ranks tell it.
    pub time_ns: i64,
    /// The bus bandwidth, as nccl-tests defines it, in bytes per second.
    pub busbw: f64,
    /// The part of the stated link; `None` without one.
    pub part: Option<f64>,
}

/// The bytes of an element, by the names of PyTorch and c10d.
pub(crate) fn elem_bytes(dtype: &str) -> Option<u64> {
    Some(match dtype {
        "Float" | "float" | "Int" | "int" => 4,
        "Half" | "c10::Half" | "BFloat16" | "c10::BFloat16" | "Short" => 2,
        "Double" | "double" | "Long" | "long int" => 8,
        "Byte" | "Char" | "Bool" | "unsigned char" | "signed char" | "bool" => 1,
        _ => return None,
    })
}

/// The bytes on the busiest wire as a part of a rank's larger buffer, as nccl-tests counts them.
pub(super) fn bus_factor(kind: CollectiveKind, ranks: f64) -> Option<f64> {
    Some(match kind {
        CollectiveKind::AllReduce => 2.0 * (ranks - 1.0) / ranks,
        CollectiveKind::AllGather | CollectiveKind::ReduceScatter | CollectiveKind::AllToAll => {
            (ranks - 1.0) / ranks
        }
        CollectiveKind::Broadcast | CollectiveKind::Reduce => 1.0,
        _ => return None,
    })
}

/// The worst collectives of a run. A link carries `link` bytes per second in each direction.
pub(super) fn collectives(
    timelines: &[Timeline],
    together: &Together,
    link: Option<f64>,
) -> Vec<Collective> {
    let mut all: BTreeMap<(&'static str, u64, u64), (CollectiveKind, u64, i64)> = BTreeMap::new();
    for timeline in timelines {
        let world = timeline.world_size.map(|ranks| ranks as u64);
        for kernel in &timeline.kernels {
            let of = kernel.collective.map(|at| &timeline.collectives[at as usize]);
            let Some(of) = of else { continue };
            let Some(kind) = collective_kind(&of.name) else { continue };
            let elems = of.in_elems.max(of.out_elems);
            let elem = of.dtype.as_deref().and_then(elem_bytes);
            let bytes = elems.zip(elem).and_then(|(elems, bytes)| elems.checked_mul(bytes));
            let (Some(bytes), Some(ranks)) = (bytes, of.group_size.or(world)) else { continue };
            if ranks < 2 || bytes == 0 {
                continue;
            }
            let rank = timeline.rank.unwrap_or(0);
            let wait_ns = together.wait_ns(rank, kernel.time.start_ns);
            let time_ns = (kernel.time.dur_ns - wait_ns).max(0);
            let of = all.entry((kind.name(), ranks, bytes)).or_insert((kind, 0, 0));
            *of = (kind, of.1 + 1, of.2.saturating_add(time_ns));
        }
    }
    let judged = all.into_iter().filter_map(|((name, ranks, bytes), (kind, calls, time_ns))| {
        let factor = bus_factor(kind, ranks as f64)?;
        let busbw = bytes as f64 * factor * calls as f64 / (time_ns.max(1) as f64 / 1e9);
        let part = link.map(|link| busbw / link);
        Some(Collective { name: name.to_owned(), ranks, bytes, calls, time_ns, busbw, part })
    });
    let mut judged: Vec<Collective> = judged.collect();
    let lost = |of: &Collective| of.time_ns as f64 * (1.0 - of.part.unwrap_or(0.0)).max(0.0);
    judged.sort_by(|a, b| lost(b).total_cmp(&lost(a)));
    judged.truncate(WORST);
    judged
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::read::parse;

    fn trace(events: &str) -> Timeline {
        let text = format!(
            "{{\"deviceProperties\": [{{\"name\": \"NVIDIA A100-SXM4-40GB\"}}], \
             \"distributedInfo\": {{\"rank\": 0, \"world_size\": 4}}, \"traceEvents\": [{events}]}}"
        );
        parse(text.as_bytes()).unwrap()
    }

    #[test]
    fn a_collective_is_judged_by_its_bus_bandwidth() {
        let event = "{\"ph\":\"X\",\"cat\":\"kernel\",\"name\":\"ncclDevKernel_AllReduce\",\"pid\":0,\"tid\":20,\"ts\":0,\
             \"dur\":1000,\"args\":{\"stream\":20,\"correlation\":1,\"Collective name\":\"allreduce\",\
             \"In msg nelems\":1000000,\"Out msg nelems\":1000000,\"dtype\":\"Float\",\"Group size\":4}}";
        let judged = collectives(&[trace(event)], &Together::default(), Some(12e9));
        // 4 MB, three quarters of it twice, in 1 ms: 6 GB/s.
        assert_eq!((judged[0].bytes, judged[0].busbw), (4_000_000, 6e9));
        assert_eq!(judged[0].part, Some(0.5));
        assert_eq!(collectives(&[trace(event)], &Together::default(), None)[0].part, None);
    }
}
