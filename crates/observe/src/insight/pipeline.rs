//! Where the idle time of a pipeline comes from, and changes that would shorten its step.
//!
//! From the steps that all ranks have kept: the ledger of each rank, the step as planned and as run, and advice.

use paceline_collectives::Axis;
use paceline_settings::config::TrainConfig;
use paceline_strategies::schedule::{
    Costs, Gap, IdleLedger, Measured, MeasuredStep, Plan, RankAccount, Timeline, Usual, as_run,
    named, on_one_clock, usual,
};

use crate::insight::observed::{ONE_CLOCK_MS, between, common};
use crate::record::rank_report::RankReport;
use crate::record::samples::StepSample;

/// The facts about the idle time of a pipeline. Times are in milliseconds.
#[derive(Clone, Debug)]
pub struct PipelineFacts {
    /// The actions of the ranks in a full step.
    pub plan: Plan,
    /// Number of steps that the means are taken over.
    pub num_steps: usize,
    /// The accounts of all ranks, in rank order: means over the steps.
    pub ranks: Vec<RankAccount>,
    /// The largest part of a step of a rank that no cause explains, in percent.
    pub most_rest_pct: f64,
    /// The usual durations of actions and messages.
    pub usual: Usual,
    /// The longest step of a rank, step by step.
    pub lengths: Vec<f64>,
    /// The step as planned: with usual durations, and messages that take no time.
    pub planned: Timeline,
    /// The first pipeline in the step whose duration is the median.
    pub run: Timeline,
    /// Its idle intervals.
    pub gaps: Vec<Vec<Gap>>,
}

impl PipelineFacts {
    /// From the ranks' reports. `None` without a pipeline, or a step in which all ranks followed the plan.
    pub fn new(config: &TrainConfig, reports: &[RankReport]) -> Option<Self> {
        let pipeline = config.pipeline.as_ref()?;
        let (schedule, mesh) = (named(pipeline.schedule)?, &config.mesh);
        let micro_batches = config.micro_batches_per_step();
        let even = |of: &_| Costs::even(of, 1.0, 1.0, 1.0);
        let costs = |of: &_| pipeline.costs.clone().unwrap_or_else(|| even(of));
        let plan = Plan::new(schedule, mesh.size(Axis::Pp), micro_batches, costs).ok()?;
        let is_first = |rank: &usize| mesh.coordinate(Axis::Pp, *rank) == 0;
        let mut ranks = vec![RankAccount::default(); reports.len()];
        let (mut shown, mut most_rest_pct) = (None, 0.0f64);
        for first in (0..reports.len()).filter(is_first) {
            let members = mesh.along(Axis::Pp, first);
            let of_pipeline: Vec<&RankReport> =
                members.iter().map(|rank| &reports[*rank]).collect();
            let steps = steps(&plan, &of_pipeline);
            let usual = usual(&plan, steps.iter().map(Vec::as_slice));
            let ledgers = steps.iter().map(|step| IdleLedger::of(&plan, step, &usual).ok());
            let ledgers = ledgers.collect::<Option<Vec<IdleLedger>>>()?;
            for of in ledgers.iter().flat_map(|ledger| &ledger.ranks) {
                most_rest_pct = most_rest_pct.max(100.0 * (of.rest / of.step).abs());
            }
            for (at, rank) in members.iter().enumerate() {
                ranks[*rank] = RankAccount::mean(ledgers.iter().map(|ledger| &ledger.ranks[at]));
            }
            if shown.is_none() && !steps.is_empty() {
                shown = Some((steps, ledgers, usual));
            }
        }
        let (steps, ledgers, usual) = shown?;
        let mut by_length: Vec<usize> = (0..steps.len()).collect();
        let length = |at: &usize| ledgers[*at].ranks.iter().map(|of| of.step).fold(0.0, f64::max);
        by_length.sort_by(|a, b| length(a).total_cmp(&length(b)));
        let median = by_length[steps.len() / 2];
        let planned = Timeline::of(&plan, &usual.costs(&plan)).ok()?;
        let run = as_run(&plan, &steps[median]);
        let begin = steps[median].iter().map(|of| of.begin).fold(f64::INFINITY, f64::min);
        let mut gaps = ledgers[median].gaps.clone();
        for gap in gaps.iter_mut().flatten() {
            *gap = Gap { start: gap.start - begin, end: gap.end - begin, ..*gap };
        }
        let lengths = (0..steps.len()).map(|at| length(&at)).collect();
        let num_steps = steps.len();
        Some(Self { plan, num_steps, ranks, most_rest_pct, usual, lengths, planned, run, gaps })
    }

    /// The mean over the ranks.
    pub fn mean(&self) -> RankAccount {
        RankAccount::mean(&self.ranks)
    }
}

/// The steps that all these ranks have kept and in which they followed the plan, each on one clock.
fn steps(plan: &Plan, reports: &[&RankReport]) -> Vec<Vec<MeasuredStep>> {
    let planned = |rank: usize| plan.list(rank).iter().flat_map(|entry| entry.actions()).count();
    let planned: Vec<usize> = (0..reports.len()).map(planned).collect();
    let fits = |(sample, planned): (&&StepSample, &usize)| {
        sample.staged.as_ref().is_some_and(|staged| staged.actions.len() == *planned)
    };
    let on_plan = |step: &Vec<&StepSample>| step.iter().zip(&planned).all(fits);
    let of_step = |samples: Vec<&StepSample>| {
        let ranks = samples.iter().map(|sample| rank_step(sample, samples[0]));
        let mut step: Vec<MeasuredStep> = ranks.collect::<Option<_>>()?;
        on_one_clock(plan, &mut step, ONE_CLOCK_MS);
        Some(step)
    };
    let common = common(reports.iter().copied()).into_iter();
    common.filter(on_plan).filter_map(of_step).collect()
}

/// A rank's step, in milliseconds since rank 0 began it, each on its own clock.
fn rank_step(sample: &StepSample, first: &StepSample) -> Option<MeasuredStep> {
    let staged = sample.staged.as_ref()?;
    let begin = between(sample, first);
    let at = |ms: f32| begin + f64::from(ms);
    let action = |&[asked, start, end, posted, arrived]: &[f32; 5]| Measured {
        asked: at(asked),
        start: at(start),
        end: at(end),
        message: (at(posted), at(if arrived > asked { start } else { arrived })),
        held: 0.0,
    };
    Some(MeasuredStep {
        asked: begin - f64::from(staged.data),
        begin,
        actions: staged.actions.iter().map(action).collect(),
        barrier: f64::from(staged.barrier),
        end: at(staged.step),
    })
}
