//! Each rank trains independently for several steps. Then the ranks average their parameters.
//!
//! McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data" (2017), and
//! Stich, "Local SGD Converges Fast and Communicates Little" (2019). Between two averages the replicas
//! differ. With an average after every step and plain SGD, this is data parallelism: the mean of the ranks' parameters
//! is the point after the mean step. Momentum and moments are not averaged.
//!
//! Operations per `every` steps: one, and the few bytes of the loss, which the ranks sum only in these steps. Bytes: the
//! parameters. Memory: nothing beyond them. It is faster than the others if even overlapped communication is too slow,
//! provided that the model tolerates the divergence.

use paceline_collectives::{Mesh, MeshShape, ReduceOp};
use paceline_kernels::Compute;
use paceline_model::{Model, Optimizer, Owned, Precision, Storage};

use crate::strategy::allocate;
use crate::{Exactness, Replica, Result, StepContext, Strategy, StrategyError, span};

/// Averages parameters every few steps.
#[derive(Debug)]
pub struct LocalSgd {
    every: usize,
    /// Steps since the last average.
    steps: usize,
}

impl LocalSgd {
    /// The default number of steps between two averages.
    pub const DEFAULT_EVERY: usize = 8;

    /// Averages every `every` steps. Errors if `every` is zero.
    pub fn new(every: usize) -> Result<Self> {
        if every == 0 {
            let reason = "local_sgd averages every so many steps, at least 1, not 0".to_owned();
            return Err(StrategyError::Setting(reason));
        }
        Ok(Self { every, steps: 0 })
    }

    fn average(&mut self, cx: &mut StepContext) -> Result<()> {
        self.steps = 0;
        let Replica { model, storage, group, .. } = cx.replica;
        let values = storage.values().slice(0..model.layout.trained_len())?;
        cx.track.record(span::EXPOSED, || group.all_reduce(&values, ReduceOp::Mean))?;
        Ok(())
    }
}

impl Strategy for LocalSgd {
    fn name(&self) -> &'static str {
        "local_sgd"
    }

    fn exactness(&self, _: &MeshShape) -> Exactness {
        Exactness::Periodic(format!("local_sgd, every {} steps", self.every))
    }

    /// Allocates parameters where peers can reduce them in place.
    fn allocate(
        &mut self,
        model: &Model,
        precision: Precision,
        compute: &Compute,
        mesh: &Mesh,
    ) -> Result<Storage> {
        let held = Owned::everything(model);
        allocate(model, precision, compute, mesh, (held, [true, false]))
    }

    /// Only in steps that communicate anyway.
    fn shares_loss(&self) -> bool {
        self.steps + 1 == self.every
    }

    fn finish_gradients(&mut self, _: &mut StepContext) -> Result<()> {
        self.steps += 1;
        Ok(())
    }

    fn optimizer_step(&mut self, cx: &mut StepContext, optimizer: &mut Optimizer) -> Result<()> {
        let Replica { compute, storage, .. } = cx.replica;
        cx.track.record(span::OPTIMIZER, || optimizer.step(compute, storage))?;
        if self.steps == self.every {
            self.average(cx)?;
        }
        Ok(())
    }

    /// Averages early, if there were steps since the last average.
    fn sync_replicas(&mut self, cx: &mut StepContext) -> Result<()> {
        if self.steps > 0 {
            self.average(cx)?;
        }
        cx.sync_buffers()
    }
}
