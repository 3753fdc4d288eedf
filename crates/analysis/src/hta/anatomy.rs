//! The parts of a step, from the spans that the program named.

use std::collections::{BTreeMap, BTreeSet};

use super::Step;
use super::collectives::CollectiveKind;
use super::kernels::KernelKind;
use super::nesting::{Nested, innermost};
use super::work::Work;
use crate::backward;
use crate::timeline::{Annotation, TimeRange, Timeline};
use paceline_trace::{IntervalSet, Span};

/// A part of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Part {
    /// Waiting for a batch.
    DataWait,
    /// Bringing the batch to the device.
    ToDevice,
    /// The forward pass.
    Forward,
    /// The backward pass.
    Backward,
    /// Making the gradients equal on all ranks, during or after the backward pass.
    GradSync,
    /// The thread was blocked on communication, if the program records that, or at the end of PyTorch's backward pass.
    Exposed,
    /// Reducing each gradient to the rank that owns it.
    ReduceScatter,
    /// The optimizer's update.
    OptimizerStep,
    /// The owners send out updated parameters.
    ParamBroadcast,
    /// The ranks collect all parts of the parameters.
    Gather,
    /// Time that no span covers.
    Rest,
}

impl Part {
    /// The name of its spans.
    pub fn name(self) -> &'static str {
        match self {
            Self::DataWait => "data wait",
            Self::ToDevice => "to_device",
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::GradSync => "grad_sync",
            Self::Exposed => "exposed",
            Self::ReduceScatter => "reduce-scatter",
            Self::OptimizerStep => "optimizer_step",
            Self::ParamBroadcast => "param broadcast",
            Self::Gather => "gather",
            Self::Rest => "rest",
        }
    }
}

/// The parts of one step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepAnatomy {
    /// The step.
    pub step: Step,
    /// The parts that occur in it, including the rest, in the order of [`Part`], with their times on the main thread in nanoseconds.
    /// Only the innermost of nested spans counts, so parts do not overlap, and add up to the length of the step.
    pub parts: Vec<(Part, i64)>,
    /// Time of communication, launched by this step, during which nothing was computed. It can fall within
    /// any part and can reach beyond the step, so it does not belong to the sum of the parts.
    pub exposed_ns: i64,
}

/// When the parts of one step ran, and its communication.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepLine {
    /// The step, whose length is the median.
    pub step: Step,
    /// The pieces of time of the main thread, in order and without overlap; the rest is left out.
    pub parts: Vec<(Part, TimeRange)>,
    /// The communication that the step launched, in order of start.
    pub communication: Vec<(CollectiveKind, TimeRange)>,
}

/// The parts of all steps.
#[derive(Clone, Debug, PartialEq)]
pub struct Anatomy {
    /// Every analyzed step, in order.
    pub steps: Vec<StepAnatomy>,
    /// Mean over steps of each part, in nanoseconds, in the order of [`Part`].
    pub mean_ns: Vec<(Part, f64)>,
    /// Mean length of a step, in nanoseconds.
    pub step_mean_ns: f64,
    /// The step of median length.
    pub line: Option<StepLine>,
}

/// A span is cut at the boundaries of at most this many steps; the rest of it belongs to no step.
const MOST_STEPS: usize = 64;

/// The part to which a span belongs, by its name. Known are the names of paceline, of PyTorch's data parallel and
/// sharded wrappers, optimizers and loaders, and common spellings of each.
fn part_of(name: &str) -> Option<Part> {
    if name.starts_with("Optimizer.") {
        return Some(Part::OptimizerStep);
    }
    let words = name.to_ascii_lowercase().replace(['_', '-'], " ");
    Some(match words.trim() {
        "data wait" | "data" | "data loading" | "dataloader" => Part::DataWait,
        "to device" | "copy to device" => Part::ToDevice,
        "forward" | "distributeddataparallel.forward" | "fullyshardeddataparallel.forward" => {
            Part::Forward
        }
        "backward" => Part::Backward,
        "grad sync" | "gradient sync" | "all reduce grads" => Part::GradSync,
        "exposed" => Part::Exposed,
        "reduce scatter" | "fsdp::post backward reduce" => Part::ReduceScatter,
        "optimizer step" | "optimizer" => Part::OptimizerStep,
        "param broadcast" | "parameter broadcast" => Part::ParamBroadcast,
        "gather" | "all gather" | "param gather" | "fsdp::all gather" => Part::Gather,
        words if words.starts_with("enumerate(dataloader)") => Part::DataWait,
        _ => return None,
    })
}

/// Whether the program named spans that only sharded training has. Data parallel programs also broadcast
/// parameters and gather figures, but they do not reduce-scatter gradients.
pub(super) fn has_sharding(timeline: &Timeline) -> bool {
    let parts: Vec<Option<Part>> = timeline.names.iter().map(part_of).collect();
    timeline.annotations.iter().any(|annotation| {
        let part = parts[annotation.name.0 as usize];
        part == Some(Part::ReduceScatter)
    })
}

impl Anatomy {
    pub(super) fn of(work: &Work) -> Option<Self> {
        let chosen = &work.steps.chosen;
        if chosen.is_empty() {
            return None;
        }
        let mut parts = vec![BTreeMap::<Part, i64>::new(); chosen.len()];
        let mut by_length: Vec<usize> = (0..chosen.len()).collect();
        by_length.sort_by_key(|at| chosen[*at].time.dur_ns);
        let typical = by_length[by_length.len() / 2];
        let mut of_typical = Vec::new();
        innermost(&mut spans(work), |piece| {
            let middle_ns = piece.start_ns.midpoint(piece.end_ns);
            if let Some(step) = work.steps.at(middle_ns) {
                let dur_ns = piece.end_ns - piece.start_ns;
                *parts[step].entry(piece.what).or_default() += dur_ns;
                if step == typical && piece.what != Part::Rest {
                    of_typical.push((piece.what, TimeRange { start_ns: piece.start_ns, dur_ns }));
                }
            }
        });
        let launched = work.of_kind(KernelKind::Communication);
        let launched = launched.filter(|item| work.step_of(item) == Some(typical)).map(|item| {
            let time = TimeRange { start_ns: item.start_ns, dur_ns: item.end_ns - item.start_ns };
            (work.collective_kind(item), time)
        });
        let mut communication: Vec<_> = launched.collect();
        communication.sort_by_key(|(_, time)| time.start_ns);
        let line = StepLine { step: chosen[typical], parts: of_typical, communication };
        let exposed = exposed(work);
        let steps = chosen.iter().zip(parts).zip(exposed).map(|((&step, parts), exposed_ns)| {
            StepAnatomy { step, parts: parts.into_iter().collect(), exposed_ns }
        });
        Some(Self { line: Some(line), ..Self::mean(steps.collect()) })
    }

    fn mean(steps: Vec<StepAnatomy>) -> Self {
        let count = steps.len() as f64;
        let mut sums: BTreeMap<Part, i64> = BTreeMap::new();
        for (part, time_ns) in steps.iter().flat_map(|step| &step.parts) {
            *sums.entry(*part).or_default() += time_ns;
        }
        let mean_ns = sums.into_iter().map(|(part, sum)| (part, sum as f64 / count)).collect();
        let total: i64 = steps.iter().map(|step| step.step.time.dur_ns).sum();
        Self { steps, mean_ns, step_mean_ns: total as f64 / count, line: None }
    }
}

/// The chosen steps as [`Part::Rest`], and the named spans and backward passes of the thread that runs the steps, cut at the
/// boundaries of steps. If a device has spans of a part, these count: the thread was only launching it.
fn spans(work: &Work) -> Vec<Nested<Part>> {
    let timeline = work.timeline;
    let parts: Vec<Option<Part>> = timeline.names.iter().map(part_of).collect();
    let main = crate::steps::lane(timeline);
    let mut spans: Vec<Nested<Part>> = Vec::new();
    for step in &work.steps.chosen {
        let (start_ns, end_ns) = (step.time.start_ns, step.time.end_ns());
        spans.push(Nested { start_ns, end_ns, what: Part::Rest });
    }
    let part = |annotation: &Annotation| parts[annotation.name.0 as usize];
    let on_device = timeline.annotations.iter().filter(|annotation| annotation.is_device);
    let on_device: BTreeSet<Part> = on_device.filter_map(part).collect();
    let named = timeline.annotations.iter().filter_map(|annotation| {
        let part = part(annotation)?;
        let counts = if annotation.is_device {
            true
        } else {
            Some(annotation.lane) == main && !on_device.contains(&part)
        };
        counts.then_some((part, annotation.time))
    });
    let passes = backward::passes(timeline);
    let passes =
        passes.iter().flat_map(|pass| [(Part::Backward, pass.time), (Part::Exposed, pass.wait)]);
    for (part, time) in named.chain(passes) {
        let time = work.rounded(time);
        let (start_ns, end_ns) = (time.start_ns, time.end_ns());
        let steps = &work.steps.chosen;
        let first = steps.partition_point(|step| step.time.end_ns() <= start_ns);
        let within = steps[first..].iter().take_while(|step| step.time.start_ns < end_ns);
        for step in within.take(MOST_STEPS) {
            let start_ns = start_ns.max(step.time.start_ns);
            let end_ns = end_ns.min(step.time.end_ns());
            spans.push(Nested { start_ns, end_ns, what: part });
        }
    }
    spans
}

/// For each chosen step: time of communication that it launched, during which nothing was computed.
fn exposed(work: &Work) -> Vec<i64> {
    let mut spans: Vec<Vec<Span>> = vec![Vec::new(); work.steps.chosen.len()];
    for item in work.of_kind(KernelKind::Communication) {
        if let Some(step) = work.step_of(item) {
            spans[step].push(TimeRange::between(item.start_ns, item.end_ns).since(work.origin_ns));
        }
    }
    let exposed = spans.into_iter().map(|spans| {
        IntervalSet::union(spans).difference(work.times(KernelKind::Computation)).len_ns() as i64
    });
    exposed.collect()
}
