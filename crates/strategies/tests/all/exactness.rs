//! Checks the guarantee that every strategy states about the weights of its replicas.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use paceline_collectives::{Group, Mesh, MeshShape};
use paceline_kernels::Compute;
use paceline_memory::Tensor;
use paceline_model::{Held, Model, Optimizer, Owned, ParamId, Precision, Storage, UnitId, View};
use paceline_strategies::{
    Exactness, Footprint, Replica, Result, Single, StepContext, Strategy, SyncBlocks, clip_factor,
};

use crate::common::{EXACT, INEXACT, Make, Net, Trainer, on_ranks};

/// Not a multiple of four, so that no average is due at the end with an average every four steps.
const STEPS: usize = 10;

/// The digest of each of two ranks after training, and after [`Strategy::sync_replicas`].
fn train(make: Make, blocks: Option<SyncBlocks>) -> Vec<[String; 2]> {
    on_ranks(2, |group| {
        let mut trainer = Trainer::new(Net::Mlp, group, make());
        trainer.blocks = blocks;
        for _ in 0..STEPS {
            trainer.step(&[9]).unwrap();
        }
        let before = trainer.replica.storage.digest().unwrap();
        trainer.sync_replicas();
        [before, trainer.replica.storage.digest().unwrap()]
    })
}

#[test]
fn weights_are_as_each_strategy_states() {
    let exact = &train(EXACT[0], None)[0][0];
    let all = EXACT.into_iter().chain(INEXACT.iter().map(|of| of.make));
    let all = all.map(|make| (make, None));
    for (make, blocks) in all.chain([(EXACT[0], SyncBlocks::new(2).ok())]) {
        let (strategy, ends) = (make(), train(make, blocks));
        let stated = strategy.exactness(&MeshShape::replicas(2));
        let stated = blocks.map_or(stated.clone(), |blocks| blocks.exactness(&stated));
        let is_equal = ends[0][0] == ends[1][0];
        let is_settled = ends[0][1] == ends[1][1];
        let found = match (is_equal, is_settled) {
            (true, _) if ends[0][0] == *exact => Exactness::Exact,
            (true, _) => Exactness::Lossy(stated.words().into()),
            (false, true) => Exactness::Periodic(stated.words().into()),
            (false, false) => Exactness::Unsynchronized(stated.words().into()),
        };
        assert_eq!(found, stated, "{}", strategy.name());
        assert_eq!(is_equal, stated.keeps_replicas_equal(), "{}", strategy.name());
    }
    assert_eq!(Single.exactness(&MeshShape::replicas(1)), Exactness::Exact);
}

#[test]
fn words_name_all_that_the_weights_depend_on() {
    let mesh = MeshShape::replicas(2);
    for of in INEXACT {
        assert_eq!((of.make)().exactness(&mesh).words(), of.words);
    }
    let in_blocks = SyncBlocks::new(2).unwrap().exactness(&Exactness::Exact);
    assert_eq!(in_blocks.words(), "any of the exact ones, 2 steps with it and 2 without");
}

/// Records which of its methods are called. It implements all of them.
struct Witness {
    called: Arc<Mutex<BTreeSet<&'static str>>>,
}

impl Witness {
    fn record(&self, method: &'static str) {
        self.called.lock().unwrap().insert(method);
    }
}

impl Strategy for Witness {
    fn name(&self) -> &'static str {
        self.record("name");
        "witness"
    }

    fn exactness(&self, _: &MeshShape) -> Exactness {
        self.record("exactness");
        Exactness::Exact
    }

    fn owned(&self, model: &Model, _: &MeshShape, _: usize) -> Owned {
        self.record("owned");
        Owned::everything(model)
    }

    fn footprint(&self, model: &Model, precision: Precision, _: &MeshShape, _: usize) -> Footprint {
        self.record("footprint");
        Footprint::of_replica(&model.layout, precision)
    }

    fn allocate(
        &mut self,
        model: &Model,
        precision: Precision,
        compute: &Compute,
        _: &Mesh,
    ) -> Result<Storage> {
        self.record("allocate");
        Ok(Storage::private(model.layout.clone(), precision, &compute.allocator)?)
    }

    fn prepare(&mut self, _: &Replica) -> Result<()> {
        self.record("prepare");
        Ok(())
    }

    fn pre_forward(&mut self, cx: &mut StepContext, _: UnitId) -> Result<View> {
        self.record("pre_forward");
        Ok(View::whole(&cx.replica.storage))
    }

    fn post_forward(&mut self, _: &mut StepContext, _: UnitId) -> Result<()> {
        self.record("post_forward");
        Ok(())
    }

    fn pre_backward(&mut self, cx: &mut StepContext, _: UnitId, _: bool) -> Result<View> {
        self.record("pre_backward");
        Ok(View::whole(&cx.replica.storage))
    }

    fn post_backward(&mut self, _: &mut StepContext, _: UnitId, _: bool) -> Result<()> {
        self.record("post_backward");
        Ok(())
    }

    fn grad_norm(&mut self, _: &mut StepContext) -> Result<f64> {
        self.record("grad_norm");
        Ok(42.0)
    }

    fn optimizer_step(&mut self, _: &mut StepContext, _: &mut Optimizer) -> Result<()> {
        self.record("optimizer_step");
        Ok(())
    }

    fn gather_unit(&mut self, cx: &mut StepContext, _: UnitId) -> Result<Held> {
        self.record("gather_unit");
        Ok(cx.replica.storage.values().clone())
    }

    fn digest(&mut self, _: &mut StepContext) -> Result<String> {
        self.record("digest");
        Ok("digest".into())
    }

    fn state(&self) -> Vec<(String, Tensor)> {
        self.record("state");
        Vec::new()
    }

    fn shares_loss(&self) -> bool {
        self.record("shares_loss");
        true
    }

    fn reduces_every_pass(&self) -> bool {
        self.record("reduces_every_pass");
        false
    }

    fn passes_are_local(&self) -> bool {
        self.record("passes_are_local");
        true
    }

    fn max_micro_batches(&self) -> Option<usize> {
        self.record("max_micro_batches");
        None
    }

    fn begin_gradients(&mut self, _: &mut StepContext) -> Result<()> {
        self.record("begin_gradients");
        Ok(())
    }

    fn gradient_ready(&mut self, _: &mut StepContext, _: ParamId) -> Result<()> {
        self.record("gradient_ready");
        Ok(())
    }

    fn finish_gradients(&mut self, _: &mut StepContext) -> Result<()> {
        self.record("finish_gradients");
        Ok(())
    }

    fn sync_replicas(&mut self, _: &mut StepContext) -> Result<()> {
        self.record("sync_replicas");
        Ok(())
    }
}

/// Blocks of steps change which methods a step calls, and nothing stands between the step and the strategy.
#[test]
fn a_step_without_synchronization_calls_all_methods_of_the_strategy_but_those_of_gradients() {
    let called = Arc::<Mutex<BTreeSet<&'static str>>>::default();
    let witness = Box::new(Witness { called: called.clone() });
    let mut trainer = Trainer::new(Net::Mlp, Group::single().unwrap(), witness);
    trainer.blocks = SyncBlocks::new(1).ok();
    let mut of_step = || {
        called.lock().unwrap().clear();
        let loss = trainer.step(&[4, 4]).unwrap();
        (loss.is_shared, called.lock().unwrap().clone())
    };
    let passes = ["optimizer_step", "post_backward", "post_forward", "pre_backward", "pre_forward"];
    let asked = ["max_micro_batches", "reduces_every_pass"];
    let gradients = ["begin_gradients", "gradient_ready", "finish_gradients", "shares_loss"];
    let without: BTreeSet<_> = passes.into_iter().chain(asked).collect();
    let with: BTreeSet<_> = without.iter().copied().chain(gradients).collect();
    assert_eq!(
        [of_step(), of_step(), of_step()],
        [(true, with.clone()), (false, without), (true, with),]
    );
    called.lock().unwrap().clear();
    let (strategy, mut cx, _) = trainer.parts();
    assert_eq!(clip_factor(strategy, &mut cx, 21.0).unwrap(), (42.0, 21.0 / (42.0 + 1e-6)));
    strategy.sync_replicas(&mut cx).unwrap();
    assert_eq!(strategy.digest(&mut cx).unwrap(), "digest");
    let expected = ["digest", "grad_norm", "sync_replicas"];
    assert_eq!(*called.lock().unwrap(), BTreeSet::from(expected));
}
