//! Which collective a kernel or an operator is, and the time in each.

use std::collections::BTreeMap;

use super::kernels::KernelKind;
use super::work::Work;

/// A collective operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CollectiveKind {
    /// Every rank gets the sum.
    AllReduce,
    /// Every rank gets all parts.
    AllGather,
    /// Every rank gets its part of the sum.
    ReduceScatter,
    /// Every rank gets one rank's data.
    Broadcast,
    /// Every rank gets a part from each.
    AllToAll,
    /// One rank gets the sum.
    Reduce,
    /// One rank gets all parts.
    Gather,
    /// Every rank gets a part of one rank's data.
    Scatter,
    /// Messages between two ranks.
    PointToPoint,
    /// The ranks meet; no data moves.
    Barrier,
    /// Communication that neither arguments nor a name identify.
    Unknown,
}

impl CollectiveKind {
    /// PyTorch's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::Broadcast => "broadcast",
            Self::AllToAll => "all_to_all",
            Self::Reduce => "reduce",
            Self::Gather => "gather",
            Self::Scatter => "scatter",
            Self::PointToPoint => "point_to_point",
            Self::Barrier => "barrier",
            Self::Unknown => "unknown",
        }
    }
}

/// Calls and durations of communication, by kind of collective.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CollectiveTimes {
    /// Kind, number of calls and the sum of their durations in nanoseconds, for the kinds that occur, longest
    /// first.
    pub by_kind: Vec<(CollectiveKind, u64, i64)>,
}

impl CollectiveTimes {
    /// Number of calls of one kind.
    pub fn calls(&self, kind: CollectiveKind) -> u64 {
        self.by_kind.iter().find(|of| of.0 == kind).map_or(0, |of| of.1)
    }

    /// Sum of the durations of one kind, in nanoseconds.
    pub fn time_ns(&self, kind: CollectiveKind) -> i64 {
        self.by_kind.iter().find(|of| of.0 == kind).map_or(0, |of| of.2)
    }

    /// Number of calls of all kinds, and the sum of their durations in nanoseconds.
    pub fn all(&self) -> (u64, i64) {
        self.by_kind.iter().fold((0, 0), |sum, of| (sum.0 + of.1, sum.1 + of.2))
    }

    pub(super) fn of(work: &Work) -> Self {
        let mut kinds: BTreeMap<CollectiveKind, (u64, i64)> = BTreeMap::new();
        for item in work.of_kind(KernelKind::Communication) {
            let of = kinds.entry(work.collective_kind(item)).or_default();
            *of = (of.0 + 1, of.1 + item.dur_ns);
        }
        let mut by_kind: Vec<_> =
            kinds.into_iter().map(|(kind, (calls, time_ns))| (kind, calls, time_ns)).collect();
        by_kind.sort_by_key(|of| std::cmp::Reverse(of.2));
        Self { by_kind }
    }
}

/// The collective that a name means, in any of these spellings: `allreduce`, `_allgather_base`,
/// `ncclDevKernel_ReduceScatter_Sum_f32_RING_LL`, `gloo:all_reduce`, `c10d::broadcast_`. `None` for any other
/// name.
pub fn kind_of(name: &str) -> Option<CollectiveKind> {
    use CollectiveKind::*;
    let letters = name.chars().filter(char::is_ascii_alphabetic);
    let letters: String = letters.map(|letter| letter.to_ascii_lowercase()).collect();
    // The order matters: a word that is part of a longer one comes after it.
    let words = [
        ("deepep", AllToAll),
        ("epinternode", AllToAll),
        ("epintranode", AllToAll),
        ("crossdevicereduce", AllReduce),
        ("quickreduce", AllReduce),
        ("allreduce", AllReduce),
        ("reducescatter", ReduceScatter),
        ("allgather", AllGather),
        ("alltoall", AllToAll),
        ("broadcast", Broadcast),
        ("barrier", Barrier),
        ("sendrecv", PointToPoint),
        ("send", PointToPoint),
        ("recv", PointToPoint),
        ("gather", Gather),
        ("scatter", Scatter),
        ("reduce", Reduce),
    ];
    words.into_iter().find(|(word, _)| letters.contains(word)).map(|(_, kind)| kind)
}

/// The library that wrote an annotation on its own thread, such as `gloo` for `gloo:all_reduce`.
pub(crate) fn backend_of(annotation: &str) -> Option<&str> {
    // The bindings of oneCCL write `oneccl_bindings_for_pytorch::allreduce`, and older ones `torch_ccl::allreduce`.
    let of_ccl = ["oneccl_bindings_for_pytorch::", "torch_ccl::"];
    if of_ccl.iter().any(|begin| annotation.starts_with(begin)) {
        return Some("ccl");
    }
    let (backend, operation) = annotation.split_once(':')?;
    let is_known = ["gloo", "nccl", "mpi", "ucc", "xccl", "hccl", "ccl"].contains(&backend);
    (is_known && !operation.starts_with(':')).then_some(backend)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn collectives_are_known_by_any_of_their_names() {
        use CollectiveKind::*;
        for (name, kind) in [
            ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)", Some(AllReduce)),
            ("ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclWorkElem)", Some(AllGather)),
            ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_SIMPLE", Some(ReduceScatter)),
            ("ncclKernel_Reduce_RING_LL_Sum_float", Some(Reduce)),
            ("_allgather_base", Some(AllGather)),
            ("reduce_scatter_tensor_coalesced", Some(ReduceScatter)),
            ("gloo:all_reduce", Some(AllReduce)),
            ("c10d::broadcast_", Some(Broadcast)),
            ("all_to_allv", Some(AllToAll)),
            ("ncclDevKernel_SendRecv", Some(PointToPoint)),
            ("c10d::gather_", Some(Gather)),
            ("ncclDevKernel_Generic", None),
            ("void deep_ep::internode::dispatch<false, 8>(int4*)", Some(AllToAll)),
            ("void vllm::cross_device_reduce_1stage<half, 8>()", Some(AllReduce)),
            ("multimem_all_reduce_kernel<c10::BFloat16, 16>", Some(AllReduce)),
            ("oneccl_bindings_for_pytorch::allreduce", Some(AllReduce)),
        ] {
            assert_eq!(kind_of(name), kind, "{name}");
        }
    }

    #[test]
    fn annotations_of_libraries_are_told_from_others() {
        assert_eq!(backend_of("gloo:all_reduce"), Some("gloo"));
        assert_eq!(backend_of("torch_ccl::allreduce"), Some("ccl"));
        assert_eq!(backend_of("nccl::all_reduce"), None);
        assert_eq!(backend_of("forward: gloo"), None);
    }
}
