//! Kernels by kind and by name.

use super::work::Work;

/// The kind of a kernel, judged by its name, as in HTA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum KernelKind {
    /// Every other kernel.
    Computation,
    /// `nccl...Kernel...`.
    Communication,
    /// `Memcpy...`, `Memset...`, `dma...`.
    Memory,
    /// Waits for a stream, an event or the device.
    Other,
}

impl KernelKind {
    /// Applies HTA's rules in this order: `^nccl.*Kernel` is communication; `^Memcpy|^Memset|^dma` is memory;
    /// a name with `Memcpy` or `Sync` anywhere is other; everything else is computation.
    /// So a `Stream Wait Event`, which profilers record only on request, counts as computation.
    pub fn of_name(name: &str) -> Self {
        if name.starts_with("nccl") && name.contains("Kernel") {
            Self::Communication
        } else if ["Memcpy", "Memset", "dma"].iter().any(|begin| name.starts_with(begin)) {
            Self::Memory
        } else if name.contains("Memcpy") || name.contains("Sync") {
            Self::Other
        } else {
            Self::Computation
        }
    }

    /// The same, but kernels of other libraries than NCCL communicate too. HTA counts these as computation.
    pub fn of_kernel(name: &str) -> Self {
        match Self::of_name(name) {
            Self::Computation if LIBRARIES.iter().any(|part| name.contains(part)) => {
                Self::Communication
            }
            kind => kind,
        }
    }

    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Computation => "computation",
            Self::Communication => "communication",
            Self::Memory => "memory",
            Self::Other => "other",
        }
    }
}

/// Parts of the names of kernels that communicate without NCCL: those of DeepEP, NVSHMEM, PyTorch's symmetric memory, vLLM, SGLang,
/// TensorRT-LLM, FlashInfer, MSCCL++ and oneCCL.
const LIBRARIES: [&str; 14] = [
    "deep_ep::",
    "::ep::internode::",
    "::ep::intranode::",
    "nvshmem",
    "multimem_",
    "one_shot_all_reduce",
    "two_shot_all_reduce",
    "cross_device_reduce",
    "oneShotAllReduce",
    "twoShotAllReduce",
    "allreduce_fusion",
    "quick_reduce",
    "mscclpp",
    "oneccl",
];

/// All calls of one kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelStats {
    /// Its name, or `others` for several kernels that were combined.
    pub name: String,
    /// The kind of the kernel.
    pub kind: KernelKind,
    /// How often it ran, at least 1.
    pub calls: u64,
    /// Sum of its durations.
    pub sum_ns: i64,
    /// Mean duration.
    pub mean_ns: f64,
    /// Sample standard deviation, with the divisor `calls - 1`; 0 for a single call.
    pub std_ns: f64,
    /// Shortest duration.
    pub min_ns: i64,
    /// Longest duration.
    pub max_ns: i64,
}

/// The `limit` kernels with the largest sums, and all others combined into one named `others`. `kind`
/// restricts them to one kind. `kernels` must be sorted as in [`RankAnalysis::kernels`](super::RankAnalysis).
pub fn top(kernels: &[KernelStats], kind: Option<KernelKind>, limit: usize) -> Vec<KernelStats> {
    let mut chosen: Vec<&KernelStats> =
        kernels.iter().filter(|kernel| kind.is_none_or(|kind| kind == kernel.kind)).collect();
    let rest = chosen.split_off(limit.min(chosen.len()));
    let mut top: Vec<KernelStats> = chosen.into_iter().cloned().collect();
    top.extend(together(&rest));
    top
}

/// Combines several kernels into one. Its standard deviation is that of all their calls.
fn together(rest: &[&KernelStats]) -> Option<KernelStats> {
    let kind = rest.first()?.kind;
    let kind = if rest.iter().all(|of| of.kind == kind) { kind } else { KernelKind::Other };
    let (calls, sum_ns) = rest.iter().fold((0, 0), |sum, of| (sum.0 + of.calls, sum.1 + of.sum_ns));
    let mean_ns = sum_ns as f64 / calls as f64;
    let squares: f64 = rest
        .iter()
        .map(|of| {
            let within = of.std_ns.powi(2) * (of.calls - 1) as f64;
            within + (of.mean_ns - mean_ns).powi(2) * of.calls as f64
        })
        .sum();
    let std_ns = if calls < 2 { 0.0 } else { (squares / (calls - 1) as f64).sqrt() };
    let min_ns = rest.iter().map(|of| of.min_ns).min()?;
    let max_ns = rest.iter().map(|of| of.max_ns).max()?;
    Some(KernelStats {
        name: "others".into(),
        kind,
        calls,
        sum_ns,
        mean_ns,
        std_ns,
        min_ns,
        max_ns,
    })
}

/// Statistics by name, largest sum first.
pub(super) fn by_name(work: &Work) -> Vec<KernelStats> {
    // Each name has one kind, so the name's index is enough. The running mean and sum of squares are
    // Welford's.
    let mut places: Vec<Option<(KernelStats, f64)>> = vec![None; work.timeline.names.count()];
    for item in work.items.iter().filter(|item| item.counts(work.timeline, work.options)) {
        let (stats, squares) = places[item.name.0 as usize].get_or_insert_with(|| {
            let name = work.timeline.names.text(item.name).to_owned();
            let (min_ns, max_ns) = (i64::MAX, i64::MIN);
            let (mean_ns, std_ns) = (0.0, 0.0);
            let kind = item.kind;
            (KernelStats { name, kind, calls: 0, sum_ns: 0, mean_ns, std_ns, min_ns, max_ns }, 0.0)
        });
        stats.calls += 1;
        stats.sum_ns += item.dur_ns;
        stats.min_ns = stats.min_ns.min(item.dur_ns);
        stats.max_ns = stats.max_ns.max(item.dur_ns);
        let off = item.dur_ns as f64 - stats.mean_ns;
        stats.mean_ns += off / stats.calls as f64;
        *squares += off * (item.dur_ns as f64 - stats.mean_ns);
    }
    let mut all: Vec<KernelStats> = places
        .into_iter()
        .flatten()
        .map(|(mut stats, squares)| {
            stats.mean_ns = stats.sum_ns as f64 / stats.calls as f64;
            stats.std_ns = match stats.calls {
                1 => 0.0,
                calls => (squares / (calls - 1) as f64).sqrt(),
            };
            stats
        })
        .collect();
    all.sort_by(|a, b| b.sum_ns.cmp(&a.sum_ns).then_with(|| a.name.cmp(&b.name)));
    all
}

/// The time of every combination of kinds that ran at the same time, longest first.
pub(super) fn by_kind(work: &Work) -> Vec<(Vec<KernelKind>, i64)> {
    use KernelKind::{Communication, Computation, Memory};
    let sets = [Computation, Communication, Memory].map(|kind| (kind, work.times(kind)));
    let mut times = Vec::new();
    for mask in 1u32..8 {
        let is_in = |place: usize| mask & (1 << place) != 0;
        let inside = sets.iter().enumerate().filter(|(place, _)| is_in(*place));
        let inside: Vec<_> = inside.map(|(_, set)| set).collect();
        let all = inside[1..].iter().fold(inside[0].1.clone(), |all, set| all.intersection(set.1));
        let outside = sets.iter().enumerate().filter(|(place, _)| !is_in(*place));
        let only = outside.fold(all, |only, (_, set)| only.difference(set.1));
        let time_ns = only.len_ns() as i64;
        if time_ns > 0 {
            times.push((inside.iter().map(|set| set.0).collect(), time_ns));
        }
    }
    times.sort_by_key(|of: &(_, i64)| std::cmp::Reverse(of.1));
    times
}
