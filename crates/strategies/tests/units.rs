//! Units that are open only while they are used: a strategy that frees each one after each use ends with the same bits.
#![allow(clippy::result_large_err, reason = "what a strategy returns is its own error")]

mod common;

use paceline_model::{Block, Slot, UnitId, View};
use paceline_strategies::{Exactness, Replica, Result, SimpleDdp, Strategy};
use paceline_trace::SpanTrack;

use common::{EXACT, Net, Optim, Trainer, on_ranks};

/// Shows every unit to the model in a slot only. The slot is filled before each use and poisoned after it. Parameters and
/// gradients lie elsewhere in between.
#[derive(Default)]
struct FreeAndRefill {
    /// For the unit that is in use. A root unit, which stays open, has a slot of its own.
    slots: Vec<Slot>,
    num_opened: usize,
}

impl FreeAndRefill {
    fn slot(&self, replica: &Replica, unit: UnitId) -> &Slot {
        &self.slots[if replica.model.layout.unit(unit).is_root { 1 } else { 0 }]
    }

    fn open(&mut self, replica: &Replica, unit: UnitId) -> Result<View> {
        self.num_opened += 1;
        let (layout, slot) = (&replica.model.layout, self.slot(replica, unit));
        let values = replica.storage.values().slice(layout.unit(unit).range.clone())?;
        replica.compute.copy(&values, &slot.values(layout, unit)?)?;
        Ok(slot.view(layout, unit)?)
    }
}

impl Strategy for FreeAndRefill {
    fn name(&self) -> &'static str {
        "free_and_refill"
    }

    fn exactness(&self) -> Exactness {
        Exactness::Exact
    }

    fn prepare(&mut self, replica: &Replica) -> Result<()> {
        let Replica { model, compute, options, .. } = replica;
        let slot = || Slot::new(&model.layout, options.precision, &compute.allocator);
        self.slots = vec![slot()?, slot()?];
        Ok(())
    }

    fn pre_forward(&mut self, replica: &Replica, _: &mut SpanTrack, unit: UnitId) -> Result<View> {
        self.open(replica, unit)
    }

    fn post_forward(&mut self, replica: &Replica, _: &mut SpanTrack, unit: UnitId) -> Result<()> {
        Ok(self.slot(replica, unit).free()?)
    }

    fn pre_backward(&mut self, replica: &Replica, _: &mut SpanTrack, unit: UnitId) -> Result<View> {
        self.open(replica, unit)
    }

    fn post_backward(&mut self, replica: &Replica, _: &mut SpanTrack, unit: UnitId) -> Result<()> {
        let Replica { model, storage, compute, .. } = replica;
        let (of_unit, slot) = (model.layout.unit(unit), self.slot(replica, unit));
        let grads = slot.grads(&model.layout, unit)?;
        for (id, param) in model.layout.trained().filter(|(_, param)| param.unit == unit) {
            let range = param.range();
            let range = range.start - of_unit.range.start..range.end - of_unit.range.start;
            compute.copy(&grads.slice(range)?, &storage.grad(id)?)?;
        }
        Ok(slot.free()?)
    }

    fn finish_gradients(&mut self, replica: &Replica, track: &mut SpanTrack) -> Result<()> {
        // Each block in each pass, and each root unit once.
        let is_root = |unit: UnitId| replica.model.layout.unit(unit).is_root;
        let blocks = replica.model.blocks.iter().filter(|block| !is_root(block.unit)).count();
        let roots = replica.model.layout.units().iter().filter(|unit| unit.is_root).count();
        assert_eq!(std::mem::take(&mut self.num_opened), 2 * blocks + roots);
        SimpleDdp.finish_gradients(replica, track)
    }
}

const ALL: [Net; 5] = [Net::Cnn, Net::BatchNormCnn, Net::Mlp, Net::FrozenCnn, Net::TiedMlp];

fn digests(
    net: Net,
    make: impl Fn() -> Box<dyn Strategy> + Sync,
    is_checkpointed: bool,
) -> Vec<String> {
    on_ranks(2, |group| {
        let mut model = net.build(group.world_size());
        if is_checkpointed {
            model.blocks = model.blocks.drain(..).map(Block::checkpointed).collect();
        }
        let mut trainer = Trainer::with_model(model, net, group, make(), Optim::Momentum);
        for _ in 0..5 {
            trainer.step(&[9]).unwrap();
        }
        trainer.replica.storage.digest().unwrap()
    })
}

#[test]
fn no_layer_keeps_a_parameter() {
    for net in ALL {
        let expected = digests(net, EXACT[6], false);
        let freed = digests(net, || Box::new(FreeAndRefill::default()), false);
        assert_eq!(freed, expected, "{net:?}");
        // With activation checkpointing, layers run forward within the backward pass.
        let recomputed = digests(net, || Box::new(FreeAndRefill::default()), true);
        assert_eq!(recomputed, expected, "{net:?}");
    }
}
