//! Notes for the readers of the figures. Each note is written once, with all ranks to which it applies.

use std::collections::BTreeMap;

use super::Source;
use super::steps::Window;
use super::work::Work;

/// A peculiarity of the trace of a rank that readers should know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Note {
    Operators,
    NoSteps,
    OneStep,
    Unlaunched,
    Stray,
    Circular,
}

impl Note {
    fn sentence(self) -> &'static str {
        match self {
            Self::Operators => {
                "The trace has no kernels of a device, as PyTorch's profiler writes it on a CPU, and was \
                 analyzed from its operators: computation is the time in which a thread ran an operator \
                 that is no collective, and durations are those of operators without the ones they call. Where \
                 a report says kernels, it means these operators."
            }
            Self::NoSteps => "The trace names no steps, and was analyzed as a whole.",
            Self::OneStep => {
                "The trace has a single step; everything in it was analyzed, also what lies outside of \
                 the step."
            }
            Self::Unlaunched => {
                "No kernel could be traced to the call that launched it, so kernels were chosen by their \
                 own begin."
            }
            Self::Stray => {
                "Some kernels could not be traced to the calls that launched them, for instance because \
                 these came before the profiler, and were left out."
            }
            Self::Circular => {
                "There is no critical path, because work waits for itself: the times of host and \
                 device do not fit together."
            }
        }
    }
}

/// Notes with the ranks to which they apply.
#[derive(Debug, Default)]
pub(super) struct Notes {
    ranks: BTreeMap<Note, Vec<usize>>,
}

impl Notes {
    pub(super) fn add(&mut self, note: Note, rank: usize) {
        self.ranks.entry(note).or_default().push(rank);
    }

    pub(super) fn sentences(self) -> Vec<String> {
        let sentence = |(note, ranks): (Note, Vec<usize>)| {
            let numbers: Vec<String> = ranks.iter().map(usize::to_string).collect();
            let ranks = if ranks.len() == 1 { "Rank" } else { "Ranks" };
            format!("{ranks} {}: {}", numbers.join(", "), note.sentence())
        };
        self.ranks.into_iter().map(sentence).collect()
    }
}

/// The notes on how the work of a rank was chosen.
pub(super) fn of_work(work: &Work) -> Vec<Note> {
    let no_steps = work.window == Window::All && work.steps.found == 0;
    let one_step = work.window == Window::All && work.steps.found == 1;
    let all = [
        (Note::Operators, work.source == Source::Operators),
        (Note::NoSteps, no_steps),
        (Note::OneStep, one_step),
        (Note::Unlaunched, work.unlaunched),
        (Note::Stray, work.stray > 0),
    ];
    all.into_iter().filter(|(_, is_so)| *is_so).map(|(note, _)| note).collect()
}
