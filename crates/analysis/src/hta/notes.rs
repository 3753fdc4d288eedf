//! Notes for the readers of the figures. Each note is written once, with all ranks to which it applies.

use std::borrow::Cow;
use std::collections::BTreeMap;

use super::steps::Window;
use super::work::Work;
use super::{Rules, Source};

/// The notes on the trace of a rank, in the order in which they are shown. The last one is that the graph of the critical path is
/// circular.
const NOTES: [&str; 10] = [
    "The trace has no kernels of a device, as PyTorch's profiler writes it on a CPU, and was analyzed from its operators: \
     computation is the time in which a thread ran an operator that is no collective, and durations are those of operators \
     without the ones they call. Where a report says kernels, it means these operators.",
    "The trace has calls that launch kernels, and no kernels: CUPTI (ROCTracer for AMD) recorded none. Another profiler had it \
     (Nsight, DCGM), the user has no right to it (NVreg_RestrictProfilingToAdminUsers, or a container without SYS_ADMIN), WSL or the \
     driver does not support it, or ProfilerActivity.CUDA was missing. The figures are those of operators of the host.",
    "The trace has metrics of kernels in the place of kernels (profiler_metrics in its experimental_config): record without them. The \
     figures are those of operators of the host.",
    "The trace names a card or NCCL, and has no kernels: the program computed on the processor, or ProfilerActivity.CUDA was missing.",
    "The trace names no steps, and was analyzed as a whole.",
    "The trace has a single step; everything in it was analyzed, also what lies outside of the step.",
    "No kernel could be traced to the call that launched it, so kernels were chosen by their own begin.",
    "Some kernels could not be traced to the calls that launched them, for instance because these came before the profiler, and \
     were left out.",
    "The trace has changes of memory without totals. Allocated memory is their sum, with what was allocated before the recording \
     only as far as it was freed in it; reserved memory is not recorded.",
    "There is no critical path, because work waits for itself: the times of host and device do not fit together.",
];

/// The notes that apply to a rank, each with its place among all of them.
pub(super) type Applies = Vec<(usize, Cow<'static, str>)>;

pub(super) fn of_rank(work: &Work, is_circular: bool) -> Applies {
    let steps = if work.window == Window(None) { Some(work.steps.found) } else { None };
    let lost = work.timeline.lost_kernels();
    let has_metrics = work.timeline.skipped.contains_key("cuda_profiler_range");
    let applies = [
        work.source == Source::Operators && !lost,
        lost && !has_metrics && !work.timeline.is_cut_off(),
        lost && has_metrics,
        work.source == Source::Operators && !lost && work.timeline.names_a_card(),
        steps == Some(0),
        steps == Some(1),
        work.unlaunched,
        work.stray > 0,
        work.timeline.has_summed_memory,
        is_circular,
    ];
    let notes = NOTES.into_iter().enumerate().filter(|(at, _)| applies[*at]);
    let notes = notes.map(|(at, text)| (at, Cow::Borrowed(text)));
    let words = work.timeline.found.as_ref().map(|found| match work.options.rules {
        Rules::Steps => found.words.clone(),
        _ => format!("Advice is by steps that HTA does not know. {}", found.words),
    });
    notes.chain(words.map(|words| (NOTES.len(), Cow::Owned(words)))).collect()
}

/// The notes that apply to some of these ranks, each with its ranks.
pub(super) fn sentences(ranks: &[(usize, Applies)]) -> Vec<String> {
    let mut notes: BTreeMap<&(usize, Cow<'_, str>), Vec<String>> = BTreeMap::new();
    for (rank, applies) in ranks {
        applies.iter().for_each(|note| notes.entry(note).or_default().push(rank.to_string()));
    }
    let sentence = |((_, text), numbers): (&(usize, Cow<'_, str>), Vec<String>)| {
        let ranks = if numbers.len() == 1 { "Rank" } else { "Ranks" };
        format!("{ranks} {}: {text}", numbers.join(", "))
    };
    notes.into_iter().map(sentence).collect()
}
