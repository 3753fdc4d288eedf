//! The time of a step in a layout: passes, idle stages, and the communication that nothing hides.
//!
//! Input: the work of a micro-batch, a layout, and hardware. Output: the step in parts. A pipeline is rehearsed with its schedule
//! ([`Timeline`]). The reductions of `ddp` are replayed as `paceline predict` does it ([`Step`]), and the gathers and reductions of shards as in the
//! advice of a run ([`Uses`]). Exchanges within layers hide nothing and are hidden by nothing.

use std::collections::HashMap;

use paceline_collectives::{Algorithm, OpKind};
use paceline_failure::{Failure, Result};
use paceline_host::resources;
use paceline_model::{BlockCost, UnitId};
use paceline_observe::insight::anatomy::ReadyLine;
use paceline_observe::insight::gathers::{Use, Uses};
use paceline_strategies::schedule::{
    BlockCosts, Costs, OneFOneB, Plan, Schedule, Timeline, cut, named,
};
use paceline_strategies::{BucketCaps, ShardOptions};
use serde::Serialize;

use super::flags::RankHardware;
use super::layouts::StepLayout;
use super::work::{BlockWork, HostSpeed};
use crate::predict::model::{Calibration, Step};
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
    /// How fast this host is, if it runs here.
    pub host: Option<HostSpeed>,
    /// The sizes of buckets.
    pub caps: BucketCaps,
}

impl Case<'_> {
    /// Predicts the step.
    pub fn times(&self) -> Result<StepTimes> {
        let Self { layout, work, hardware, .. } = self;
        let failed =
            |error: paceline_strategies::schedule::PlanError| Failure::Usage(error.to_string());
        let (blocks, exchange) = self.blocks();
        let schedule: &dyn Schedule = layout.schedule.and_then(named).unwrap_or(&OneFOneB);
        let placement = schedule.placement(layout.pp);
        let too_few = || {
            Failure::Usage(format!(
                "{} stages, and {} blocks",
                placement.stages(),
                blocks.forward.len()
            ))
        };
        let begins = cut(&work.counted, placement.stages()).ok_or_else(too_few)?;
        let costs: Costs = blocks.costs(&begins);
        let plan =
            Plan::new(schedule, layout.pp, layout.accumulate, |_| costs.clone()).map_err(failed)?;
        let timeline = Timeline::of(&plan, &costs).map_err(failed)?;
        let busy: f64 =
            (0..layout.pp).map(|rank| timeline.busy(rank)).sum::<f64>() / layout.pp as f64;
        let bounds: Vec<usize> =
            std::iter::once(0).chain(begins).chain([blocks.forward.len()]).collect();
        let mut last: Option<StepTimes> = None;
        for rank in 0..layout.pp {
            let own = (0..placement.stages()).filter(|stage| placement.rank(*stage) == rank);
            let own: Vec<usize> = own.flat_map(|stage| bounds[stage]..bounds[stage + 1]).collect();
            let end = timeline.ranks[rank].last().map_or(0.0, |ran| ran.end);
            let times = self.of_rank(&own, &blocks, exchange, [timeline.busy(rank), end, busy])?;
            if last.as_ref().is_none_or(|last| times.step_ms > last.step_ms) {
                last = Some(times);
            }
        }
        let mut times = last.ok_or_else(|| Failure::Usage("no ranks".into()))?;
        times.limit = self.limit(&times);
        times.mfu_pct = hardware.on.card.and_then(|card| {
            let peak = RankHardware::flop_per_s(&card, layout.precision, false, 1.0)?;
            // Ranks along tp have a part of each layer, and those along pp some of the layers.
            Some(
                100.0 * work.flops * layout.accumulate as f64
                    / layout.pp as f64
                    / (times.step_ms * 1e-3)
                    / peak,
            )
        });
        Ok(times)
    }

    /// The step of a rank with these blocks, whose passes take `own_busy` and end at `end`. The ranks' mean is `busy`.
    fn of_rank(
        &self,
        own: &[usize],
        blocks: &BlockCosts,
        exchange: f64,
        [own_busy, end, busy]: [f64; 3],
    ) -> Result<StepTimes> {
        // Ranks that wait leave their cores to others.
        let sharing = self.sharing();
        let exchange_ms = exchange * self.layout.accumulate as f64 * own.len() as f64;
        let passes = end.max((busy - exchange_ms).max(0.0) * sharing + exchange_ms);
        let optimizer = self.optimizer_ms(own);
        let exposed_ms = self.exposed_ms(own, blocks, optimizer)? + self.tied_ms(own);
        let own_passes = (own_busy - exchange_ms) * sharing;
        let compute_ms = own_passes.min(passes - exchange_ms) + optimizer;
        let idle_ms = (passes + optimizer - compute_ms - exchange_ms).max(0.0);
        let (step_ms, mfu_pct, limit) = (passes + optimizer + exposed_ms, None, String::new());
        Ok(StepTimes { step_ms, compute_ms, idle_ms, exposed_ms, exchange_ms, mfu_pct, limit })
    }

    /// How many ranks share a core of this host; 1 where each has its own.
    fn sharing(&self) -> f64 {
        let here = (self.hardware.on.ranks as f64 / resources::num_cores() as f64).max(1.0);
        self.host.map_or(1.0, |_| here)
    }

    /// The passes of each block while a rank has a core to itself, and the part of each that is an exchange within layers.
    fn blocks(&self) -> (BlockCosts, f64) {
        let Self { layout, work, hardware, host, .. } = self;
        let scale = host.map_or(1.0, |host| host.scale) / self.sharing();
        let (count, bytes) = work.exchanged;
        let (network, _) = hardware.network(layout.tp, 1);
        let one = network.all_gather_ms(bytes.checked_div(count).unwrap_or(0));
        let exchange =
            if layout.tp > 1 { one * count as f64 / work.costs.len() as f64 } else { 0.0 };
        let each = |part: &dyn Fn(&BlockCost) -> f64, exchange: f64| {
            work.costs.iter().map(|of| part(of) * scale + exchange).collect()
        };
        let message = if layout.pp > 1 {
            let stride = layout.dp * layout.tp;
            let (network, _) = hardware.network(layout.pp, stride);
            let bytes = work.costs.iter().map(|of| of.output_bytes).max().unwrap_or(0);
            network.link.time(OpKind::Send, Algorithm::Direct, 2, bytes).as_secs_f64() * 1e3
        } else {
            0.0
        };
        let blocks = BlockCosts {
            forward: each(&|of| of.forward, exchange / 2.0),
            backward_input: each(&|of| of.backward_input + of.loss, exchange / 2.0),
            backward_weight: each(&|of| of.backward_weight + of.loss_weight, 0.0),
            kept: vec![0.0; work.costs.len()],
            message,
            has_barrier: false,
        };
        (blocks, exchange)
    }

    /// The sum of the gradients of a weight that the first and the last stage share, if these are on two ranks.
    fn tied_ms(&self, own: &[usize]) -> f64 {
        let model = &self.work.model;
        let Some(id) = model.objective.tied() else { return 0.0 };
        let unit = model.layout.param(id).unit;
        let mut uses = (0..model.blocks.len())
            .filter(|at| model.blocks[*at].unit == unit || *at + 1 == model.blocks.len());
        let num_own = uses.clone().filter(|at| own.contains(at)).count();
        if num_own == 0 || uses.all(|at| own.contains(&at)) {
            return 0.0;
        }
        let shares = if self.layout.strategy.starts_with("sharded") { self.layout.dp } else { 1 };
        let bytes = model.layout.unit(unit).range.len() * size_of::<f32>() / shares;
        let (network, _) = self.hardware.network(2, self.layout.dp * self.layout.tp);
        network.all_reduce_ms(bytes as u64)
    }

    fn optimizer_ms(&self, own: &[usize]) -> f64 {
        let shares = if self.layout.strategy.starts_with("sharded") { self.layout.dp } else { 1 };
        let bytes =
            self.work.part(own).trained_len() as f64 / shares as f64 * self.work.optimizer_bytes;
        let per_s = match (self.host, self.hardware.on.card) {
            (Some(host), _) => host.optimizer_bytes_per_s,
            (None, Some(card)) => card.bytes_per_s,
            (None, None) => f64::INFINITY,
        };
        1e3 * bytes / per_s
    }

    /// The communication of gradients and shards that the passes of these blocks do not hide.
    fn exposed_ms(&self, own: &[usize], blocks: &BlockCosts, optimizer: f64) -> Result<f64> {
        let Self { layout, work, hardware, .. } = self;
        if layout.dp == 1 {
            return Ok(0.0);
        }
        let sharing = self.sharing();
        let pass = |at: &usize| BlockPass {
            unit: work.model.blocks[*at].unit,
            forward: blocks.forward[*at] * sharing,
            backward: (blocks.backward_input[*at] + blocks.backward_weight[*at]) * sharing,
        };
        let passes: Vec<BlockPass> = own.iter().map(pass).collect();
        let (network, _) = hardware.network(layout.dp, layout.tp);
        if layout.strategy.starts_with("sharded") {
            return Ok(self.shards_ms(own, &passes, &network));
        }
        let part = work.part(own);
        let [forward, backward] = [|of: &BlockPass| of.forward, |of: &BlockPass| of.backward]
            .map(|of| passes.iter().map(of).sum::<f64>());
        let begin = forward + (layout.accumulate - 1) as f64 * (forward + backward);
        let mut at = begin;
        let mut ready: HashMap<UnitId, f64> = HashMap::new();
        for pass in passes.iter().rev() {
            at += pass.backward;
            ready.insert(pass.unit, at);
        }
        let objective = work.model.objective.unit();
        let ready = part.params().iter().map(|param| {
            let of_objective = (objective == Some(param.unit)).then_some(begin);
            let ready_ms = ready.get(&param.unit).copied().or(of_objective).unwrap_or(at);
            ReadyLine { param: param.name.clone(), ready_ms }
        });
        let mut ready: Vec<ReadyLine> = ready.collect();
        ready.sort_by(|a, b| a.ready_ms.total_cmp(&b.ready_ms));
        let calibration = Calibration {
            ranks: layout.dp,
            step_ms: at + optimizer,
            compute_ms: at + optimizer,
            backward_begin_ms: begin,
            backward_end_ms: at,
            by_bucket_ms: if layout.pp == 1 { optimizer } else { 0.0 },
            ready,
            ..Calibration::default()
        };
        let step = Step::new(&calibration, &part, self.caps)?;
        Ok(step.on(&network) - step.alone_ms)
    }

    /// The same for shards, which are gathered before passes and reduced after them.
    fn shards_ms(&self, own: &[usize], passes: &[BlockPass], network: &Network) -> f64 {
        let layout = self.work.part(own);
        let options = ShardOptions::default();
        let gathers_each = self.layout.strategy == "sharded3";
        let mut passes = passes.to_vec();
        for (at, unit) in
            layout.units().iter().enumerate().filter(|(_, unit)| !unit.range.is_empty())
        {
            let extra = BlockPass { unit: UnitId(at), forward: 0.0, backward: 0.0 };
            if !passes.iter().any(|pass| pass.unit == extra.unit) {
                // Units that several blocks use are needed first, and that of the objective last.
                let place = if unit.is_root { 0 } else { passes.len() };
                passes.insert(place, extra);
            }
        }
        let cost = |pass: &BlockPass| {
            let bytes = layout.unit(pass.unit).range.len() * size_of::<f32>();
            network.all_gather_ms(bytes as u64)
        };
        let (number, mut uses) = (self.layout.accumulate, Vec::new());
        for at in 0..number {
            let (is_first, is_last) = (at == 0, at + 1 == number);
            if !gathers_each && !is_first && !is_last {
                continue;
            }
            // Between the first and the last micro-batch, stages 1 and 2 send nothing.
            let between = if gathers_each || !is_last { 0 } else { number.saturating_sub(2) };
            let all: f64 = passes.iter().map(|pass| pass.forward + pass.backward).sum();
            uses.push(Use { gather: None, compute: between as f64 * all, reduce: 0.0 });
            for pass in &passes {
                let gather = (gathers_each || is_first).then(|| cost(pass));
                uses.push(Use { gather, compute: pass.forward, reduce: 0.0 });
            }
            for (place, pass) in passes.iter().rev().enumerate() {
                let gathers = gathers_each && place >= options.keep_after_forward;
                let reduce = if is_last { cost(pass) } else { 0.0 };
                let gather = gathers.then(|| cost(pass));
                uses.push(Use { gather, compute: pass.backward, reduce });
            }
        }
        // After the optimizer all units are gathered, or the first ones.
        let prefetch = if gathers_each { options.prefetch } else { passes.len() + 1 };
        let (waited, left) = Uses { uses, lead: 0.0 }.played(prefetch);
        waited + left
    }

    /// The part of the step that is largest.
    fn limit(&self, times: &StepTimes) -> String {
        let Self { layout, work, hardware, .. } = self;
        let link = |ranks, stride| hardware.network(ranks, stride).1.to_owned();
        let compute =
            if work.by_memory.is_some_and(|part| part > 0.5) { "memory" } else { "compute" };
        let parts = [
            (times.compute_ms, compute.to_owned()),
            (times.idle_ms, "idle".to_owned()),
            (times.exposed_ms, link(layout.dp, layout.tp)),
            (times.exchange_ms, link(layout.tp, 1)),
        ];
        parts.into_iter().max_by(|a, b| a.0.total_cmp(&b.0)).map_or(String::new(), |(_, name)| name)
    }
}
