//! Notes for the readers of the figures. Each note is written once, with all ranks to which it applies.

use super::Source;
use super::steps::Window;
use super::work::Work;

/// The notes on the trace of a rank, in the order in which they are shown. The last one is that the graph of the critical path is
/// circular.
const NOTES: [&str; 8] = [
    "The trace has no kernels of a device, as PyTorch's profiler writes it on a CPU, and was analyzed from its operators: \
     computation is the time in which a thread ran an operator that is no collective, and durations are those of operators \
     without the ones they call. Where a report says kernels, it means these operators.",
    "The trace has calls that launch kernels, and no kernels: CUPTI (ROCTracer for AMD) recorded none. Another profiler had it \
     (Nsight, DCGM), the user has no right to it (NVreg_RestrictProfilingToAdminUsers, or a container without SYS_ADMIN), WSL or the \
     driver does not support it, or ProfilerActivity.CUDA was missing. The figures are those of operators of the host.",
    "The trace names no steps, and was analyzed as a whole.",
    "The trace has a single step; everything in it was analyzed, also what lies outside of the step.",
    "No kernel could be traced to the call that launched it, so kernels were chosen by their own begin.",
    "Some kernels could not be traced to the calls that launched them, for instance because these came before the profiler, and \
     were left out.",
    "The trace has changes of memory without totals. Allocated memory is their sum, with what was allocated before the recording \
     only as far as it was freed in it; reserved memory is not recorded.",
    "There is no critical path, because work waits for itself: the times of host and device do not fit together.",
];

/// Which of the notes apply to a rank.
pub(super) type Applies = [bool; NOTES.len()];

pub(super) fn of_rank(work: &Work, is_circular: bool) -> Applies {
    let steps = if work.window == Window(None) { Some(work.steps.found) } else { None };
    [
        work.source == Source::Operators && !work.timeline.lost_kernels(),
        work.timeline.lost_kernels(),
        steps == Some(0),
        steps == Some(1),
        work.unlaunched,
        work.stray > 0,
        work.timeline.has_summed_memory,
        is_circular,
    ]
}

/// The notes that apply to some of these ranks, each with its ranks.
pub(super) fn sentences(ranks: &[(usize, Applies)]) -> Vec<String> {
    let sentence = |(note, text): (usize, &str)| {
        let with_note = ranks.iter().filter(|(_, applies)| applies[note]);
        let numbers: Vec<String> = with_note.map(|(rank, _)| rank.to_string()).collect();
        let ranks = if numbers.len() == 1 { "Rank" } else { "Ranks" };
        (!numbers.is_empty()).then(|| format!("{ranks} {}: {text}", numbers.join(", ")))
    };
    NOTES.into_iter().enumerate().filter_map(sentence).collect()
}
