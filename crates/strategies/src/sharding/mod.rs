//! The parts that the sharded strategies share: who owns what, and memory for open units.
//!
//! [`place`] divides a layout among the ranks. [`arena`] puts units into as little memory as possible. [`gathers`] brings
//! the values of a unit together, and [`reductions`] reduces its gradients to even shards. [`owners`] does both where
//! ranks own whole parameters. A strategy decides when that happens.

pub(crate) mod arena;
pub(crate) mod gathers;
pub(crate) mod owners;
pub(crate) mod place;
pub(crate) mod reductions;

use paceline_collectives::{Axis, Group, MeshShape};
use paceline_model::{Layout, Model, Owned, Precision, Unit, UnitId};

use self::arena::UnitArena;
use self::place::{ShardPlace, num_elems};
use self::reductions::GradArena;
use crate::footprint::buffer_bytes;
use crate::{Exactness, Footprint, Replica, Result};

/// The stages of ZeRO: how much of a model is divided among the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ZeroStage {
    /// The optimizer's state.
    One,
    /// The gradients too.
    Two,
    /// The parameters too.
    Three,
}

/// How the sharded strategies work, apart from what they shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardOptions {
    /// The units that are gathered ahead of the unit in use.
    pub prefetch: usize,
    /// The last units of the forward pass that stay gathered until their backward pass.
    pub keep_after_forward: usize,
    /// The most micro-batches that a step has.
    pub max_micro_batches: usize,
    /// How the gradients of several micro-batches are added up.
    pub accumulation: ShardAccumulation,
    /// Whether values travel in bf16, and a pass works with values rounded to it. The owners keep all digits, as with the mixed
    /// precision of PyTorch's `fully_shard`. Only the third stage can.
    pub gathers_bf16: bool,
}

impl Default for ShardOptions {
    /// One micro-batch, one unit ahead, and the last unit stays gathered, since its backward pass comes next.
    fn default() -> Self {
        Self {
            prefetch: 1,
            keep_after_forward: 1,
            max_micro_batches: 1,
            accumulation: ShardAccumulation::Whole,
            gathers_bf16: false,
        }
    }
}

impl ShardOptions {
    /// The number of units that a forward pass of a model gathers: the most that can be gathered ahead, or stay gathered.
    pub fn num_gathered(model: &Model) -> usize {
        forward_order(model).len()
    }

    /// The same in a stage: the first holds whole gradients, of any number of micro-batches.
    pub(crate) fn of_stage(self, stage: ZeroStage) -> Self {
        match stage {
            ZeroStage::One => Self {
                max_micro_batches: usize::MAX,
                accumulation: ShardAccumulation::Whole,
                ..self
            },
            ZeroStage::Two | ZeroStage::Three => self,
        }
    }

    /// Whether a rank holds whole gradients, to add up those of several micro-batches.
    pub(crate) fn holds_whole_gradients(&self) -> bool {
        self.max_micro_batches > 1 && self.accumulation == ShardAccumulation::Whole
    }

    /// The guarantee of a strategy with these options on such a mesh.
    pub(crate) fn exactness(&self, mesh: &MeshShape) -> Exactness {
        if self.gathers_bf16 {
            return Exactness::Lossy(format!(
                "sharded3 that gathers in bf16, with {self:?} on {mesh}"
            ));
        }
        match (self.adds_shards(), sums_like_one_tree(mesh)) {
            (false, true) => Exactness::Exact,
            (false, false) => Exactness::Lossy(format!("any that shards on the mesh {mesh}")),
            (true, true) => {
                Exactness::Lossy("any that adds up the shards of micro-batches".to_owned())
            }
            (true, false) => Exactness::Lossy(format!(
                "any that adds up the shards of micro-batches on the mesh {mesh}"
            )),
        }
    }

    /// The ranges for which a rank that owns `owned` has memory between two units.
    pub(crate) fn held(&self, model: &Model, owned: Owned) -> Owned {
        let whole = self.holds_whole_gradients().then(|| Owned::everything(model).grads);
        Owned { grads: whole.unwrap_or(owned.grads), ..owned }
    }

    /// The memory of a rank that owns `owned`, plus `unsharded` bytes for open units.
    pub(crate) fn footprint(
        &self,
        model: &Model,
        precision: Precision,
        owned: Owned,
        unsharded: usize,
    ) -> Footprint {
        let Owned { values, grads, .. } = self.held(model, owned);
        let values = num_elems(&values) * precision.master.size_bytes();
        Footprint {
            parameters: values + buffer_bytes(&model.layout, precision),
            gradients: num_elems(&grads) * precision.grads.size_bytes(),
            unsharded,
            communication: 0,
        }
    }

    /// Memory for the gradients of open units, unless the rank holds whole gradients.
    pub(crate) fn grad_arena(&self, replica: &Replica) -> Result<Option<GradArena>> {
        let is_needed = !self.holds_whole_gradients();
        is_needed.then(|| GradArena::new(replica, self.adds_shards())).transpose()
    }

    /// The bytes of that memory.
    pub(crate) fn grad_arena_bytes(
        &self,
        model: &Model,
        precision: Precision,
        place: ShardPlace,
    ) -> usize {
        if self.holds_whole_gradients() {
            return 0;
        }
        let len = plan_backward(model, true, 1).len();
        let shards = if self.adds_shards() { len / place.count } else { 0 };
        (len + shards) * precision.grads.size_bytes()
    }

    /// Whether gradients are reduced after each micro-batch, so that the sum is taken in another order.
    pub(crate) fn adds_shards(&self) -> bool {
        self.max_micro_batches > 1 && self.accumulation == ShardAccumulation::Shards
    }
}

/// How sharded strategies add up the gradients of several micro-batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShardAccumulation {
    /// Each rank adds up whole gradients, and reduces them once. Bits and memory for gradients are those of replicas.
    Whole,
    /// Gradients are reduced after each micro-batch, and each rank adds up its shard. This needs less memory, more
    /// communication, and gives other bits: the sum over the ranks comes before the sum over micro-batches.
    Shards,
}

/// The ranks of a sharded strategy on a mesh.
#[derive(Clone, Debug)]
pub(crate) struct ShardRanks {
    /// The ranks among which it divides a unit: all ranks, if the mesh has no axis `shard`.
    pub(crate) shard: Group,
    /// The ranks that hold the same shard, if the mesh has the axis `dp` too.
    pub(crate) replicas: Option<Group>,
    /// This rank's place among the ranks that divide a unit.
    pub(crate) place: ShardPlace,
}

impl ShardRanks {
    pub(crate) fn of(replica: &Replica) -> Self {
        let (mesh, place) = (&replica.mesh, ShardPlace::of(replica));
        match mesh.group(Axis::Shard) {
            Some(shard) => {
                let replicas = mesh.group(Axis::Dp).filter(|group| group.world_size() > 1);
                Self { shard: shard.clone(), replicas: replicas.cloned(), place }
            }
            None => Self { shard: mesh.world().clone(), replicas: None, place },
        }
    }
}

/// Whether sums over the ranks that divide a unit, and then over the ranks that hold the same shard, have the order of the
/// tree over all ranks. The ranks that divide a unit must be a node of this tree: neighbors, and a power of two of them,
/// by which division is exact. Any other order would move whole gradients instead of shards over the axis `dp`.
fn sums_like_one_tree(mesh: &MeshShape) -> bool {
    let shards = mesh.size(Axis::Shard);
    let are_neighbors = mesh.along(Axis::Shard, 0).last() == Some(&(shards - 1));
    let is_one_sum = shards == 1 || mesh.size(Axis::Dp) == 1;
    is_one_sum || (shards.is_power_of_two() && are_neighbors)
}

pub(crate) fn units_of(layout: &Layout, is_meant: impl Fn(&Unit) -> bool) -> Vec<UnitId> {
    let all = (0..).map(UnitId).zip(layout.units());
    all.filter(|(_, unit)| is_meant(unit)).map(|(id, _)| id).collect()
}

/// Adds the units that are not in `order` yet.
fn add_new(order: &mut Vec<UnitId>, units: impl IntoIterator<Item = UnitId>) {
    for unit in units {
        if !order.contains(&unit) {
            order.push(unit);
        }
    }
}

/// The units in the order in which a forward pass uses them, without root units.
pub(crate) fn forward_order(model: &Model) -> Vec<UnitId> {
    let is_inner = |unit: &Unit| !unit.is_root && !unit.range.is_empty();
    let used = model.blocks.iter().map(|block| block.unit);
    let mut order = Vec::new();
    add_new(&mut order, used.filter(|unit| is_inner(model.layout.unit(*unit))));
    order
}

/// The units in the order in which a step first needs their values: root units, which are open for the whole
/// step, then those of the forward pass, then all others.
pub(crate) fn order_of_need(model: &Model) -> Vec<UnitId> {
    let mut order = units_of(&model.layout, |unit| unit.is_root);
    order.extend(forward_order(model));
    add_new(&mut order, units_of(&model.layout, |_| true));
    order
}

/// The units in the order in which gradients become final in a backward pass, then units that no block uses, and the
/// root units last.
pub(crate) fn backward_order(model: &Model) -> Vec<UnitId> {
    let layout = &model.layout;
    let objective = model.objective.unit().filter(|unit| !layout.unit(*unit).is_root);
    let mut order: Vec<UnitId> = objective.into_iter().collect();
    order.extend(forward_order(model).into_iter().rev());
    add_new(&mut order, units_of(layout, |unit| !unit.is_root));
    order.extend(units_of(layout, |unit| unit.is_root));
    order
}

/// Where the units of a backward pass lie, if those at most `distance` uses apart are open together. Root units lie apart.
pub(crate) fn plan_backward(model: &Model, only_trained: bool, distance: usize) -> UnitArena {
    let layout = &model.layout;
    let is_meant = |unit: &UnitId| !(only_trained && layout.unit(*unit).is_frozen);
    let order = backward_order(model).into_iter().filter(is_meant);
    let (roots, inner): (Vec<_>, Vec<_>) = order.partition(|unit| layout.unit(*unit).is_root);
    UnitArena::plan(layout, &inner, &roots, distance, 0)
}
