//! Parameters that several stages of a pipeline use.
//!
//! Input: a model whose root units are used by blocks, or an objective, of several stages. Output: the ranks that have a copy of
//! each unit, and copies that stay equal: the ranks add up their gradients at the end of a step. Each rank does so for the part
//! that it owns, which is the same on all of these ranks, whatever the strategy. This file knows no schedules.

use paceline_collectives::{Group, Purpose, ReduceOp};
use paceline_model::{Layout, Model, ParamId, Storage, UnitId};

use crate::pipeline::Pipeline;
use crate::{Replica, Result, StepContext, StrategyError, span};

impl Pipeline {
    /// For each unit that this rank shares with others, the group of these ranks. Every rank calls this. Errors if it is
    /// not known which stages use a parameter.
    pub(crate) fn tie(&self, model: &Model) -> Result<Vec<(UnitId, Group)>> {
        let mut tied = Vec::new();
        for (at, unit) in model.layout.units().iter().enumerate() {
            let ranks = self.ranks_of(model, UnitId(at));
            if unit.is_root || ranks.len() > 1 {
                self.check_uses(model, UnitId(at))?;
            }
            if let Some(all) = self.ranks.as_ref().filter(|_| ranks.len() > 1) {
                let is_here = ranks.contains(&self.rank);
                let group = all.split(is_here.then_some(0))?;
                tied.extend(group.map(|group| (UnitId(at), group)));
            }
        }
        Ok(tied)
    }

    /// Errors unless all uses of a unit's parameters are those of its own blocks and of the objective.
    fn check_uses(&self, model: &Model, unit: UnitId) -> Result<()> {
        for (at, param) in model.layout.params().iter().enumerate() {
            let known = self.uses(model, unit, self.is_of_objective(model, ParamId(at))).len();
            if param.unit == unit && known != param.num_uses as usize {
                return Err(StrategyError::Setting(format!(
                    "{} cannot be in a pipeline: {} layers use it, and {known} of them are blocks of its unit, or the objective, \
                     if that names it as tied",
                    param.name, param.num_uses
                )));
            }
        }
        Ok(())
    }

    /// The stages that use a unit, in order, once for each block, and the last one once more if the objective uses it.
    fn uses(&self, model: &Model, unit: UnitId, is_of_objective: bool) -> Vec<usize> {
        let stages = self.placement.stages();
        let mut uses = Vec::new();
        for stage in 0..stages {
            let blocks = &model.blocks[self.blocks_of(stage).clone()];
            uses.extend(blocks.iter().filter(|block| block.unit == unit).map(|_| stage));
        }
        uses.extend(is_of_objective.then_some(stages - 1));
        uses
    }

    fn is_of_objective(&self, model: &Model, id: ParamId) -> bool {
        let (objective, param) = (&model.objective, model.layout.param(id));
        // All parts of a divided parameter are tied.
        let is_tied = |tied: ParamId| model.layout.param(tied).name == param.name;
        objective.tied().is_some_and(is_tied) || objective.unit() == Some(param.unit)
    }

    /// The units to which the objective writes gradients.
    pub(crate) fn units_of_objective(&self, model: &Model) -> Vec<UnitId> {
        let tied = model.objective.tied().map(|id| model.layout.param(id).unit);
        model.objective.unit().into_iter().chain(tied).collect()
    }

    /// The ranks that have a unit, on the axis `pp`, in the order of their first stages. Unused units belong to the last stage.
    pub(crate) fn ranks_of(&self, model: &Model, unit: UnitId) -> Vec<usize> {
        let is_of_objective = self.units_of_objective(model).contains(&unit);
        let mut ranks = Vec::new();
        for stage in self.uses(model, unit, is_of_objective) {
            let rank = self.placement.rank(stage);
            if !ranks.contains(&rank) {
                ranks.push(rank);
            }
        }
        if ranks.is_empty() {
            ranks.push(self.placement.rank(self.placement.stages() - 1));
        }
        ranks
    }

    /// How many layers of a rank's stages use a parameter in a pass.
    pub(crate) fn num_uses(&self, model: &Model, id: ParamId, rank: usize) -> u32 {
        let param = model.layout.param(id);
        if !model.layout.unit(param.unit).is_root {
            return param.num_uses;
        }
        let uses = self.uses(model, param.unit, self.is_of_objective(model, id));
        uses.into_iter().map(|stage| u32::from(self.placement.rank(stage) == rank)).sum()
    }

    /// How many times a micro-batch comes to the gradients of a unit on this rank: in each stage, and with the loss.
    pub(crate) fn num_visits(&self, model: &Model, unit: UnitId) -> usize {
        let mut stages = self.uses(model, unit, false);
        stages.retain(|stage| self.placement.rank(*stage) == self.rank);
        stages.dedup();
        let last = self.placement.stages() - 1;
        let has_loss = self.placement.rank(last) == self.rank;
        let is_of_objective = has_loss && self.units_of_objective(model).contains(&unit);
        stages.len() + usize::from(is_of_objective)
    }

    /// Whether this rank's copy of a unit counts: that of the first rank does.
    pub(crate) fn counts_unit(&self, model: &Model, unit: UnitId) -> bool {
        self.ranks_of(model, unit)[0] == self.rank
    }

    /// Gives all copies the same values: hosts with other mathematical libraries may compute other initial values.
    pub(crate) fn share_tied(&self, layout: &Layout, storage: &Storage) -> Result<()> {
        for (unit, group) in &self.tied {
            for (_, values) in storage.values().within(&layout.unit(*unit).range)? {
                group.broadcast(&values, 0)?;
            }
        }
        Ok(())
    }

    /// Adds up the gradients of all copies, as a tree over their ranks, and gives each the sum.
    pub(crate) fn sum_tied(&self, cx: &mut StepContext) -> Result<()> {
        let Replica { model, storage, owned, .. } = cx.replica;
        for (unit, group) in &self.tied {
            let whole = &model.layout.unit(*unit).range;
            for range in &owned.grads {
                let own = range.start.max(whole.start)..range.end.min(whole.end);
                if !own.is_empty() {
                    let grads = storage.grads().slice(own)?;
                    let group = group.for_purpose(Purpose::Bucket(unit.0));
                    cx.track.record(span::EXPOSED, || group.all_reduce(&grads, ReduceOp::Sum))?;
                }
            }
        }
        Ok(())
    }
}
