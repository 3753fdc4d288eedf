//! Changes that would shorten the step of a pipeline: another schedule, another cut, or more micro-batches.
//!
//! Input: the times of actions in the measured steps, and the arithmetic of each block, by which the time of a stage is divided among its blocks.
//! Each change is rehearsed, as the step itself is. Changes that would keep more than `--pipeline-memory` are left out.
//! Output: advice. This module does not know how a rehearsal works.

use paceline_analysis::advice::gain::{Gain, best};
use paceline_analysis::advice::{Account, Means, Told};
use paceline_model::BlockCost;
use paceline_settings::config::TrainConfig;
use paceline_settings::pipeline::PipelineConfig;
use paceline_strategies::AccumulationOrder;
use paceline_strategies::schedule::{
    BlockCosts, CutChoice, IdlePart, Kind, SCHEDULES, best_cut, named,
};

use crate::insight::pipeline::PipelineFacts;

/// A change, its gain, and its cost.
struct Change {
    words: String,
    gain: Gain,
    /// The most bytes of micro-batches in flight on a rank.
    kept: f64,
    /// By how much these are more than now.
    more: f64,
}

/// Advice for a pipeline. `flops` is the arithmetic and memory of each block for a sample, `name` the unit of a block. `None` if there are too few steps
/// to tell.
pub fn advise(
    facts: &PipelineFacts,
    config: &TrainConfig,
    means: &Means,
    flops: &[BlockCost],
    name: impl Fn(usize) -> String,
) -> Option<Told> {
    let now = config.pipeline.as_ref()?;
    let mean = facts.mean();
    let idle = mean.step - mean.busy;
    let parts = IdlePart::all(&facts.ranks).into_iter();
    let most = parts.max_by(|a, b| a.of(&mean).total_cmp(&b.of(&mean)))?;
    let mut head = format!("Ranks are idle for {idle:.2} ms of a step");
    // Causes that cancel each other explain nothing.
    if !most.name().contains('+') {
        head += &format!(", most of it {} ({:.2} ms)", most.name(), most.of(&mean));
    }
    let changes = changes(facts, config, now, &blocks(facts, config, now, flops), name)?;
    let chosen = best(changes, |change| change.gain, means.least_ms());
    let account = Account {
        exposed_ms: means.exposed_ms,
        waiting_ms: means.exposed_wait_ms.min(means.exposed_ms),
        remedy: chosen.as_ref().map(|change| change.words.clone()),
        gain: chosen.as_ref().map(|change| change.gain),
        apart_ms: means.apart_ms,
        ..Account::default()
    };
    let tail = match &chosen {
        Some(Change { words, gain, kept, more }) => {
            let memory = if *more > 0.0 {
                format!(
                    ". A rank would keep up to {:.2} MB of micro-batches in flight, {:.2} MB more",
                    kept / 1e6,
                    more / 1e6
                )
            } else {
                String::new()
            };
            format!("With {words} the step would take {}{memory}", gain.words("less"))
        }
        None => format!(
            "No other schedule, cut or number of micro-batches would gain more than {:.2} ms by rehearsal",
            means.least_ms()
        ),
    };
    Some(Told { text: format!("{head}. {tail}"), account })
}

/// The changes, with as much as each step would gain.
fn changes(
    facts: &PipelineFacts,
    config: &TrainConfig,
    now: &PipelineConfig,
    blocks: &BlockCosts,
    name: impl Fn(usize) -> String,
) -> Option<Vec<Change>> {
    let shape = facts.plan.shape();
    let (ranks, micro_batches) = (shape.placement.ranks(), shape.micro_batches);
    let cut = Some(now.begins_at.as_slice());
    let own = named(now.schedule)?;
    let as_is = best_cut(own, ranks, micro_batches, blocks, (None, cut)).ok()??;
    let limit = now.memory_bytes.map(|bytes| bytes as f64);
    let change = |words: String, choice: &CutChoice| {
        let share = 1.0 - choice.step / as_is.step;
        let gain = Gain::of(facts.lengths.iter().map(|step| step * share))?;
        Some(Change { words, gain, kept: choice.kept, more: choice.kept - as_is.kept })
    };
    let is_tree = config.strategy.options.accumulation != AccumulationOrder::Sequential;
    let mut changes = Vec::new();
    for schedule in SCHEDULES.into_iter().filter(|of| is_tree || of.name() != "looped_bfs") {
        let found = best_cut(schedule, ranks, micro_batches, blocks, (limit, None));
        let Ok(Some(choice)) = found else { continue };
        let begins: Vec<String> = choice.cut.iter().map(|at| name(*at)).collect();
        let mut words = Vec::new();
        if schedule.name() != now.schedule {
            words.push(format!("--schedule {}", schedule.name()));
        }
        if choice.cut != now.begins_at {
            words.push(format!("--stages {}", begins.join(",")));
        }
        if !words.is_empty() {
            changes.push(change(format!("`{}`", words.join(" ")), &choice)?);
        }
    }
    // The user has chosen the micro-batches.
    let may_halve = config.micro_batches.is_none();
    if may_halve && config.batch_size > 1 && config.batch_size.is_multiple_of(2) {
        let half = |of: &[f64]| of.iter().map(|cost| cost / 2.0).collect();
        let blocks = BlockCosts {
            forward: half(&blocks.forward),
            backward_input: half(&blocks.backward_input),
            backward_weight: half(&blocks.backward_weight),
            kept: half(&blocks.kept),
            message: blocks.message / 2.0,
            ..blocks.clone()
        };
        if let Ok(Some(choice)) = best_cut(own, ranks, 2 * micro_batches, &blocks, (limit, cut)) {
            let words = format!(
                "`--accumulate {} --global-batch-size {}`, if half a micro-batch takes half as long,",
                2 * micro_batches,
                config.global_batch_size / 2
            );
            changes.push(change(words, &choice)?);
        }
    }
    Some(changes)
}

/// The times of the blocks: the time of each stage, divided among its blocks in proportion to their arithmetic, and the memory of a rank's
/// micro-batch.
fn blocks(
    facts: &PipelineFacts,
    config: &TrainConfig,
    now: &PipelineConfig,
    flops: &[BlockCost],
) -> BlockCosts {
    let ends = now.begins_at.iter().copied().chain([flops.len()]);
    let begins = std::iter::once(0).chain(now.begins_at.iter().copied());
    let loss_weight = |of: &BlockCost| if now.head_at_once { 0.0 } else { of.loss_weight };
    let weight = |of: &BlockCost| of.backward_weight + loss_weight(of);
    let input = |of: &BlockCost| of.backward_input + of.loss + of.loss_weight - loss_weight(of);
    let loss_kept = |of: &BlockCost| if now.head_at_once { 0 } else { of.loss_kept_bytes };
    // The memory has been counted for one sample.
    let kept = |of: &BlockCost| config.batch_size as f64 * (of.kept_bytes + loss_kept(of)) as f64;
    let mut blocks = BlockCosts {
        message: facts.usual.message,
        has_barrier: config.takes_grad_norm(),
        kept: flops.iter().map(kept).collect(),
        ..BlockCosts::default()
    };
    for (stage, range) in begins.zip(ends).map(|(begin, end)| begin..end).enumerate() {
        let of = &flops[range];
        let sum = |part: &dyn Fn(&BlockCost) -> f64| of.iter().map(part).sum::<f64>();
        let share =
            |part: f64, whole: f64| if whole > 0.0 { part / whole } else { 1.0 / of.len() as f64 };
        let usual = |kind| facts.usual.of(stage, kind);
        let (forwards, inputs, weights) = (sum(&|of| of.forward), sum(&input), sum(&weight));
        // Where both halves ran at once, the ratio of their arithmetic divides the time.
        let whole = usual(Kind::Backward);
        let of_inputs = share(inputs, inputs + weights);
        let first = usual(Kind::BackwardInput) + whole * of_inputs;
        let second = usual(Kind::BackwardWeight) + whole * (1.0 - of_inputs);
        for own in of {
            blocks.forward.push(usual(Kind::Forward) * share(own.forward, forwards));
            blocks.backward_input.push(first * share(input(own), inputs));
            blocks.backward_weight.push(second * share(weight(own), weights));
        }
    }
    blocks
}
