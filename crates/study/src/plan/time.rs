//! The time of a step in a layout: passes, idle stages, and the communication that nothing hides.
//!
//! Input: the work of a micro-batch, a layout, and hardware. Output: the step in parts. A pipeline is rehearsed with its schedule
//! ([`Timeline`]). The reductions of `ddp` are replayed as `paceline predict` does it ([`Step`]), and the gathers and reductions of shards as in the
//! advice of a run ([`Uses`]). Exchanges within layers hide nothing and are hidden by nothing.

use std::collections::HashMap;

use paceline_analysis::advice::replay::Backward;
use paceline_collectives::{Algorithm, OpKind};
use paceline_failure::{Failure, Result};
use paceline_model::{BlockCost, Layout, UnitId};
use paceline_observe::insight::buckets::LOSS_BYTES;
use paceline_observe::insight::gathers::{Use, Uses};
use paceline_strategies::schedule::{
    BlockCosts, OneFOneB, Plan, PlanError, Schedule, Timeline, cut, named,
};
use paceline_strategies::{BucketCaps, ShardOptions};
use serde::Serialize;

use super::flags::RankHardware;
use super::layouts::StepLayout;
use super::work::{BlockWork, RankSpeed};
use crate::predict::model::Step;
use crate::predict::network::Network;

/// A step in milliseconds, of the rank that ends last.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepTimes {
    /// All of it.
    pub step_ms: f64,
    /// The passes and the optimizer.
    pub compute_ms: f64,
    /// Waits for other stages, and for messages from them.
    pub idle_ms: f64,
    /// Communication along the axes `dp` and `shard` that nothing hides.
    pub exposed_ms: f64,
    /// Exchanges within layers.
    pub exchange_ms: f64,
    /// FLOP of the step over what the published peaks of the cards allow, in percent; `None` on this host.
    pub mfu_pct: Option<f64>,
    /// The part that is largest: `compute`, `memory`, `idle`, or the name of a link.
    pub limit: String,
}

/// The passes of a block for a micro-batch, in milliseconds.
#[derive(Clone, Copy, Debug)]
struct BlockPass {
    unit: UnitId,
    forward: f64,
    backward: f64,
}

/// A layout on hardware.
pub struct Case<'a> {
    /// The layout.
    pub layout: &'a StepLayout,
    /// The work of its micro-batch.
    pub work: &'a BlockWork,
    /// Where it runs.
    pub hardware: &'a RankHardware,
    /// How fast that is.
    pub speed: RankSpeed,
    /// The sizes of buckets.
    pub caps: BucketCaps,
}

impl Case<'_> {
    /// Predicts the step.
    pub fn times(&self) -> Result<StepTimes> {
        let Self { layout, work, .. } = self;
        let (ranks, blocks) = (layout.pp, self.blocks());
        let schedule: &dyn Schedule = layout.schedule.and_then(named).unwrap_or(&OneFOneB);
        let placement = schedule.placement(ranks);
        let (stages, num_blocks) = (placement.stages(), blocks.forward.len());
        let begins = cut(&work.counted, stages);
        let begins = begins.ok_or_else(|| format!("{stages} stages, and {num_blocks} blocks"));
        let begins = begins.map_err(Failure::Usage)?;
        let costs = blocks.costs(&begins);
        let refused = |error: PlanError| Failure::Usage(error.to_string());
        let plan = Plan::new(schedule, ranks, layout.accumulate, |_| costs.clone());
        let timeline: Timeline =
            plan.and_then(|plan| Timeline::of(&plan, &costs)).map_err(refused)?;
        let busy = (0..ranks).map(|rank| timeline.busy(rank)).sum::<f64>() / ranks as f64;
        let of_rank = |rank: usize| {
            let stage = |at: usize| begins.partition_point(|begin| *begin <= at);
            let own = (0..num_blocks).filter(|at| placement.rank(stage(*at)) == rank);
            let end = timeline.ranks[rank].last().map_or(0.0, |ran| ran.end);
            self.of_rank(&own.collect::<Vec<_>>(), &blocks, [timeline.busy(rank), end, busy])
        };
        let later =
            |last: StepTimes, of: StepTimes| if of.step_ms > last.step_ms { of } else { last };
        Ok((1..ranks).map(of_rank).fold(of_rank(0), later))
    }

    /// The step of a rank with these blocks, whose passes take `own_busy` and end at `end`. The ranks' mean is `busy`.
    fn of_rank(
        &self,
        own: &[usize],
        blocks: &BlockCosts,
        [own_busy, end, busy]: [f64; 3],
    ) -> StepTimes {
        let Self { layout, work, hardware, speed, .. } = self;
        let exchange_ms = self.exchange_ms() * layout.accumulate as f64 * own.len() as f64;
        // Ranks that wait leave their cores to others.
        let passes = end.max((busy - exchange_ms).max(0.0) * speed.sharing + exchange_ms);
        let part = work.part(own);
        let state = part.trained_len() as f64 / layout.shares() as f64 * work.optimizer_bytes;
        let optimizer = 1e3 * state / speed.optimizer_bytes_per_s;
        let exposed_ms = self.exposed_ms(own, &part, blocks, optimizer) + self.tied_ms(own);
        let own_passes = (own_busy - exchange_ms) * speed.sharing;
        let compute_ms = own_passes.min(passes - exchange_ms) + optimizer;
        let idle_ms = (passes + optimizer - compute_ms - exchange_ms).max(0.0);
        let step_ms = passes + optimizer + exposed_ms;
        // Ranks along tp have a part of each layer, and those along pp some of the layers.
        let flops = 100.0 * work.flops * layout.accumulate as f64 / layout.pp as f64;
        let peak = hardware.peak(layout.precision, false);
        let parts = [
            (compute_ms, if work.is_by_memory { "memory" } else { "compute" }),
            (idle_ms, "idle"),
            (exposed_ms, hardware.network(layout.dp, layout.tp).1),
            (exchange_ms, hardware.network(layout.tp, 1).1),
        ];
        let limit = parts.into_iter().max_by(|a, b| a.0.total_cmp(&b.0));
        StepTimes {
            step_ms,
            compute_ms,
            idle_ms,
            exposed_ms,
            exchange_ms,
            mfu_pct: peak.map(|peak| flops / (step_ms * 1e-3) / peak),
            limit: limit.map_or("", |(_, name)| name).to_owned(),
        }
    }

    /// The part of a block's passes that is an exchange within its layers.
    fn exchange_ms(&self) -> f64 {
        let (count, bytes) = self.work.exchanged;
        let (network, _) = self.hardware.network(self.layout.tp, 1);
        let bytes = bytes.checked_div(count).unwrap_or(0);
        network.all_gather_ms(bytes) * count as f64 / self.work.costs.len() as f64
    }

    /// The passes of each block while a rank has a core to itself.
    fn blocks(&self) -> BlockCosts {
        let Self { layout, work, hardware, speed, .. } = self;
        let half = self.exchange_ms() / 2.0;
        let each = |part: &dyn Fn(&BlockCost) -> f64, exchange: f64| {
            work.costs.iter().map(|of| part(of) * speed.scale + exchange).collect()
        };
        let bytes = work.costs.iter().map(|of| of.output_bytes).max().unwrap_or(0);
        let (network, _) = hardware.network(layout.pp, layout.dp * layout.tp);
        let message = network.link.time(OpKind::Send, Algorithm::Direct, 2, bytes);
        BlockCosts {
            forward: each(&|of| of.forward, half),
            backward_input: each(&|of| of.backward_input + of.loss, half),
            backward_weight: each(&|of| of.backward_weight + of.loss_weight, 0.0),
            kept: vec![0.0; work.costs.len()],
            message: if layout.pp > 1 { message.as_secs_f64() * 1e3 } else { 0.0 },
            has_barrier: false,
        }
    }

    /// The sum of the gradients of a weight that the first and the last stage share, if these are on two ranks.
    fn tied_ms(&self, own: &[usize]) -> f64 {
        let model = &self.work.model;
        let Some(id) = model.objective.tied() else { return 0.0 };
        let unit = model.layout.param(id).unit;
        let last = model.blocks.len() - 1;
        let uses = |at: &usize| model.blocks[*at].unit == unit || *at == last;
        let num_own = own.iter().filter(|at| uses(at)).count();
        if num_own == 0 || num_own == (0..=last).filter(uses).count() {
            return 0.0;
        }
        let elems = model.layout.unit(unit).range.len();
        let bytes = elems * size_of::<f32>() / self.layout.shares();
        let (network, _) = self.hardware.network(2, self.layout.dp * self.layout.tp);
        network.all_reduce_ms(bytes as u64)
    }

    /// The communication of gradients and shards that the passes of these blocks, with this part of the model, do not hide.
    fn exposed_ms(&self, own: &[usize], part: &Layout, blocks: &BlockCosts, optimizer: f64) -> f64 {
        let Self { layout, work, hardware, speed, caps } = self;
        if layout.dp == 1 {
            return 0.0;
        }
        let pass = |at: &usize| BlockPass {
            unit: work.model.blocks[*at].unit,
            forward: blocks.forward[*at] * speed.sharing,
            backward: (blocks.backward_input[*at] + blocks.backward_weight[*at]) * speed.sharing,
        };
        let passes: Vec<BlockPass> = own.iter().map(pass).collect();
        let (network, _) = hardware.network(layout.dp, layout.tp);
        if layout.shares() > 1 {
            return self.shards_ms(part, passes, &network);
        }
        let forward: f64 = passes.iter().map(|of| of.forward).sum();
        let backward: f64 = passes.iter().map(|of| of.backward).sum();
        let begin = forward + (layout.accumulate - 1) as f64 * (forward + backward);
        let mut at = begin;
        let objective = work.model.objective.unit().map(|unit| (unit, begin));
        let mut ready: HashMap<UnitId, f64> = objective.into_iter().collect();
        for pass in passes.iter().rev() {
            at += pass.backward;
            ready.insert(pass.unit, at);
        }
        let ready = part.params().iter().map(|of| ready.get(&of.unit).copied().unwrap_or(at));
        let backward = Backward::new(ready.collect(), [begin, at], Some(LOSS_BYTES), &[]);
        let by_bucket = if layout.pp == 1 { optimizer } else { 0.0 };
        let step = Step::of(backward, [at + optimizer, by_bucket], part, *caps);
        step.on(&network) - step.alone_ms
    }

    /// The same for shards, which are gathered before passes and reduced after them.
    fn shards_ms(&self, part: &Layout, mut passes: Vec<BlockPass>, network: &Network) -> f64 {
        let options = ShardOptions::default();
        let gathers_each = self.layout.strategy == "sharded3";
        for (at, unit) in part.units().iter().enumerate() {
            let unused = BlockPass { unit: UnitId(at), forward: 0.0, backward: 0.0 };
            if !unit.range.is_empty() && passes.iter().all(|pass| pass.unit != unused.unit) {
                // Units that several blocks use are needed first, and that of the objective last.
                passes.insert(if unit.is_root { 0 } else { passes.len() }, unused);
            }
        }
        let cost = |pass: &BlockPass| {
            let bytes = part.unit(pass.unit).range.len() * size_of::<f32>();
            network.all_gather_ms(bytes as u64)
        };
        let all: f64 = passes.iter().map(|pass| pass.forward + pass.backward).sum();
        let (number, mut uses) = (self.layout.accumulate, Vec::new());
        for at in 0..number {
            let (is_first, is_last) = (at == 0, at + 1 == number);
            // Between the first and the last micro-batch, stages 1 and 2 send nothing.
            let is_silent = !gathers_each && !is_first && !is_last;
            let compute = if is_silent { all } else { 0.0 };
            uses.push(Use { gather: None, compute, reduce: 0.0 });
            if is_silent {
                continue;
            }
            for pass in &passes {
                let gather = (gathers_each || is_first).then(|| cost(pass));
                uses.push(Use { gather, compute: pass.forward, reduce: 0.0 });
            }
            for (place, pass) in passes.iter().rev().enumerate() {
                let gathers = gathers_each && place >= options.keep_after_forward;
                let (gather, reduce) =
                    (gathers.then(|| cost(pass)), if is_last { cost(pass) } else { 0.0 });
                uses.push(Use { gather, compute: pass.backward, reduce });
            }
        }
        // After the optimizer all units are gathered, or the first ones.
        let prefetch = if gathers_each { options.prefetch } else { passes.len() + 1 };
        let (waited, left) = Uses { uses, lead: 0.0 }.played(prefetch);
        waited + left
    }
}
