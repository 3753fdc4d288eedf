//! Why the ranks of a pipeline of PyTorch are idle: the ledger of idle time that paceline's own pipelines have, from traces.
//!
//! Input: the timelines of all ranks, their clocks and collectives. Output: a [`PipelineLedger`]. `passes` reads the passes and messages
//! of a rank; the rehearsals are those of `paceline-schedule`. A step lasts from the collectives before its first pass to those
//! before the first pass of the next step.

mod passes;

use std::collections::BTreeMap;

use paceline_schedule::{
    Costs, Entry, IdleLedger, Measured, MeasuredStep, Placement, Plan, RankAccount,
    Timeline as Rehearsal, Usual, fill_arrivals, messages, named, usual,
};

use super::clock::{Clocks, RankClock, rank_of};
use super::matched::{Arrival, MatchedCollectives};
use crate::hta::Chosen;
use crate::steps::Step;
use crate::timeline::{TimeRange, Timeline};
use passes::{HostEvents, Pass, within};

/// The idle time of a pipeline. Times are in milliseconds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PipelineLedger {
    /// The accounts of the ranks, in rank order: means over the steps.
    pub ranks: Vec<RankAccount>,
    /// How many steps these are.
    pub num_steps: usize,
    /// The largest part of a step of a rank that no cause explains, in percent.
    pub most_rest_pct: f64,
    /// The messages from rank to rank.
    pub routes: Vec<Messages>,
    /// The step by rehearsal, and in the fastest of PyTorch's other schedules.
    pub now: StepCourse,
    /// The fastest other one, with its class in PyTorch.
    pub other: Option<(&'static str, StepCourse)>,
}

/// A rehearsed step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepCourse {
    /// Its length.
    pub step_ms: f64,
    /// The most micro-batches in flight on a rank.
    pub in_flight: f64,
}

/// Messages from one rank to another. Numbers are means over the steps.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Messages {
    /// The ranks.
    pub ranks: (usize, usize),
    /// How many messages.
    pub messages: f64,
    /// Their bytes, if the traces have shapes.
    pub bytes: Option<f64>,
    /// How long the receiver waited for passes of the sender.
    pub waited_ms: f64,
    /// How long it waited while messages moved.
    pub moved_ms: f64,
}

/// A step of a rank, on the reference clock.
struct RankStep {
    /// Its passes and messages, in order.
    row: Vec<Entry>,
    passes: Vec<Pass>,
    begin_ns: i64,
    end_ns: i64,
    /// The waits for other ranks after the last pass: until its own messages have left, and in collectives.
    barrier_ns: i64,
}

/// The classes of PyTorch, by the names of schedules.
const CLASSES: [(&str, &str); 7] = [
    ("gpipe", "ScheduleGPipe"),
    ("1f1b", "Schedule1F1B"),
    ("looped_bfs", "ScheduleLoopedBFS"),
    ("interleaved_1f1b", "ScheduleInterleaved1F1B"),
    ("interleaved_zb", "ScheduleInterleavedZeroBubble"),
    ("zbv", "ScheduleZBVZeroBubble"),
    ("dualpipev", "ScheduleDualPipeV"),
];

/// The pipeline in these traces; `None` if they have none, or if the order of passes is not one of a pipeline.
pub(super) fn pipeline(
    timelines: &[Timeline],
    clocks: &Clocks,
    chosen: &[Chosen],
    collectives: &MatchedCollectives,
) -> Option<PipelineLedger> {
    let mut places: Vec<usize> = (0..timelines.len()).collect();
    places.sort_by_key(|place| rank_of(timelines, *place));
    let line = Placement::line(places.len());
    let of_rank = |(stage, place): (usize, &usize)| {
        let clock = &clocks.ranks[*place];
        let host = HostEvents::of(&timelines[*place], clock)?;
        let own = collectives.all.iter().flat_map(|of| &of.arrivals);
        let mut own: Vec<Arrival> = own.filter(|of| of.place == *place).copied().collect();
        own.sort_by_key(|of| of.start_ns);
        Some(rank_steps(&host, &chosen[*place].steps, clock, &own, (&line, stage)))
    };
    let of_ranks: Vec<BTreeMap<u64, RankStep>> =
        places.iter().enumerate().map(of_rank).collect::<Option<_>>()?;
    let in_all =
        |number: u64| of_ranks.iter().map(|of| of.get(&number)).collect::<Option<Vec<&RankStep>>>();
    let all: Vec<Vec<&RankStep>> = of_ranks.first()?.keys().copied().filter_map(in_all).collect();
    let rows = |step: &Vec<&RankStep>| step.iter().map(|of| of.row.clone()).collect::<Vec<_>>();
    let planned = |step: &Vec<&RankStep>| Some((Plan::of_rows(&rows(step)).ok()?, rows(step)));
    let (plan, planned) = all.iter().find_map(planned)?;
    let all: Vec<&Vec<&RankStep>> = all.iter().filter(|step| rows(step) == planned).collect();
    let mut steps: Vec<Vec<MeasuredStep>> = all.iter().map(|step| measured(step)).collect();
    fill_arrivals(&plan, &mut steps);
    let usual = usual(&plan, steps.iter().map(Vec::as_slice));
    let ledger = |step: &Vec<MeasuredStep>| IdleLedger::of(&plan, step, &usual).ok();
    let ledgers: Vec<IdleLedger> = steps.iter().map(ledger).collect::<Option<_>>()?;
    let rest = |of: &RankAccount| 100.0 * (of.rest / of.step).abs();
    let mean = |at: usize| RankAccount::mean(ledgers.iter().map(|ledger| &ledger.ranks[at]));
    let (now, other) = schedules(&plan, &usual)?;
    Some(PipelineLedger {
        ranks: (0..places.len()).map(mean).collect(),
        num_steps: steps.len(),
        most_rest_pct: ledgers.iter().flat_map(|of| &of.ranks).map(rest).fold(0.0, f64::max),
        routes: routes(&plan, &steps, &all),
        now,
        other,
    })
}

/// The steps of a rank that have passes, by their numbers.
fn rank_steps(
    host: &HostEvents,
    steps: &[Step],
    clock: &RankClock,
    collectives: &[Arrival],
    place: (&Placement, usize),
) -> BTreeMap<u64, RankStep> {
    let start_of = |of: &Arrival| of.start_ns;
    let mut found: Vec<(u64, RankStep)> = Vec::new();
    for step in steps {
        let [begin_ns, end_ns] = [step.time.start_ns, step.time.end_ns()].map(|ns| clock.align(ns));
        let (row, mut passes, barrier_ns) =
            host.passes(TimeRange::between(begin_ns, end_ns), place);
        let Some(first) = passes.first_mut() else { continue };
        let before = within(collectives, TimeRange::between(begin_ns, first.first_ns), start_of);
        let before = before.iter().map(|of| of.end_ns).filter(|of| *of <= first.first_ns).max();
        let begin_ns = before.unwrap_or(begin_ns);
        first.asked_ns = first.asked_ns.max(begin_ns);
        first.start_ns = first.start_ns.max(begin_ns);
        if let Some((_, last)) = found.last_mut().filter(|of| of.0 + 1 == step.number) {
            last.end_ns = begin_ns;
        }
        found.push((step.number, RankStep { row, passes, begin_ns, end_ns, barrier_ns }));
    }
    for (_, step) in &mut found {
        let done_ns = step.passes.last().map_or(step.begin_ns, |of| of.end_ns);
        step.end_ns = step.end_ns.max(done_ns);
        let after = within(collectives, TimeRange::between(done_ns, step.end_ns), start_of);
        let waits = after.iter().filter(|of| of.end_ns <= step.end_ns).map(|of| of.wait_ns);
        step.barrier_ns =
            waits.fold(step.barrier_ns, i64::saturating_add).min(step.end_ns - done_ns);
    }
    found.into_iter().collect()
}

/// A step in milliseconds since the first rank began it.
fn measured(step: &[&RankStep]) -> Vec<MeasuredStep> {
    let origin_ns = step[0].begin_ns;
    let at = |ns: i64| (ns - origin_ns) as f64 / 1e6;
    let pass = |of: &Pass| Measured {
        asked: at(of.asked_ns.saturating_sub(of.held_ns)),
        start: at(of.start_ns),
        end: at(of.end_ns),
        message: (at(of.posted_ns), of.arrived_ns.map_or(f64::NAN, at)),
        held: of.held_ns as f64 / 1e6,
    };
    let rank = |of: &&RankStep| MeasuredStep {
        asked: at(of.begin_ns),
        begin: at(of.begin_ns),
        actions: of.passes.iter().map(pass).collect(),
        barrier: of.barrier_ns as f64 / 1e6,
        end: at(of.end_ns),
    };
    step.iter().map(rank).collect()
}

/// The messages from rank to rank, and what their receivers waited for.
fn routes(plan: &Plan, steps: &[Vec<MeasuredStep>], all: &[&Vec<&RankStep>]) -> Vec<Messages> {
    let mut routes: BTreeMap<(usize, usize), Messages> = BTreeMap::new();
    let num_steps = steps.len() as f64;
    for (step, own) in steps.iter().zip(all) {
        for of in messages(plan, step) {
            let route = routes.entry((of.from, of.to)).or_default();
            let pass = &step[of.to].actions[of.at];
            let asked = (pass.asked + pass.held).min(pass.start);
            let sent = of.sent.clamp(asked, pass.start);
            route.ranks = (of.from, of.to);
            route.messages += 1.0 / num_steps;
            route.waited_ms += (sent - asked) / num_steps;
            route.moved_ms += (pass.start - sent) / num_steps;
            let bytes = own[of.to].passes[of.at].bytes;
            route.bytes = bytes.map(|bytes| route.bytes.unwrap_or(0.0) + bytes as f64 / num_steps);
        }
    }
    routes.into_values().collect()
}

/// The step by rehearsal, and in the fastest of PyTorch's schedules, with the same stages or their halves.
fn schedules(
    plan: &Plan,
    usual: &Usual,
) -> Option<(StepCourse, Option<(&'static str, StepCourse)>)> {
    let shape = plan.shape();
    let ranks = shape.placement.ranks();
    let own = Costs { message: usual.message, ..usual.costs(plan) };
    let rehearsed = |plan: &Plan, costs: &Costs| {
        let in_flight = (0..ranks).map(|rank| plan.in_flight(rank)).fold(0.0, f64::max);
        Some(StepCourse { step_ms: Rehearsal::of(plan, costs).ok()?.makespan, in_flight })
    };
    let other = |(name, class): (&str, &'static str)| {
        let costs = |placement: &Placement| own.resampled(placement.stages());
        let schedule = named(name)?;
        let plan = Plan::new(schedule, ranks, shape.micro_batches, costs).ok()?;
        // With messages where PyTorch has them.
        let lists: Vec<Vec<Entry>> = (0..ranks).map(|rank| plan.list(rank).to_vec()).collect();
        let (plan, costs) = (Plan::of_rows(&lists).ok()?, costs(&plan.shape().placement));
        Some((class, rehearsed(&plan, &costs)?))
    };
    let now = rehearsed(plan, &own)?;
    let others = CLASSES.into_iter().filter_map(other);
    let best = others.min_by(|a, b| a.1.step_ms.total_cmp(&b.1.step_ms));
    Some((now, best.filter(|of| of.1.step_ms < LEAST_GAIN * now.step_ms)))
}

/// A schedule must shorten the step to this part of it to be named.
const LEAST_GAIN: f64 = 0.98;
