//! The training of one rank, step by step: a model, its optimizer, and the strategy that joins it with the other ranks.
//!
//! Input: this rank's batches. Output: the loss over all ranks, and updated parameters. A run of the command line trains with the same
//! object. It knows nothing of epochs or files.

use paceline_collectives::{Mesh, ReduceOp};
use paceline_kernels::Compute;
use paceline_kernels::loss::SUMS_LEN;
use paceline_memory::{Allocator, Category, DType};
use paceline_model::{Batch, Model, Optimizer, OptimizerConfig, Owned};
use paceline_trace::SpanTrack;

use crate::commit::certain;
use crate::{
    Commit, LeftTrainer, MicroBatch, Replica, ReplicaOptions, Result, StepContext, StepState,
    Stepped, Strategy, StrategyError, clip_factor, evaluate, train_step,
};

/// The seed of [`Trainer::new`].
const SEED: u64 = 42;
/// The most spans of a step. A strategy records a few per parameter.
const NUM_SPANS: usize = 1 << 14;

/// Trains a model as one rank of several, each of which has one. All ranks call the same methods in the same order.
pub struct Trainer {
    /// The model, its parameters and gradients, and the ranks.
    pub replica: Replica,
    /// Keeps the ranks' models equal.
    pub strategy: Box<dyn Strategy>,
    /// Updates the parameters.
    pub optimizer: Optimizer,
    /// The state that steps change, and the settings of the next one.
    pub state: StepState,
    /// Has the spans of the last step.
    pub track: SpanTrack,
    /// The largest norm of the gradients: longer ones are scaled down to it. `None` by default.
    pub max_norm: Option<f64>,
    /// Whether the loss is scaled ([`StepState::loss_scale`]), so that gradients may overflow. False by default.
    pub scales_loss: bool,
    /// Lets ranks complete a step though others are lost. `None` by default.
    pub commit: Option<Commit>,
}

/// Means over the samples of an evaluation, or over their tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Evaluated {
    /// The loss.
    pub loss: f64,
    /// The part that was predicted correctly; `None` if predictions are not right or wrong.
    pub accuracy: Option<f64>,
}

impl Trainer {
    /// A trainer of `model` in f32 with one thread, whose parameters follow from a fixed seed. [`Trainer::of`] has all choices.
    /// Errors if the strategy cannot train the model on these ranks. Collective.
    ///
    /// ```
    /// use paceline_collectives::Group;
    /// use paceline_kernels::optimizer::AdamW;
    /// use paceline_memory::{Allocator, Category, DType};
    /// use paceline_model::{Batch, MlpConfig};
    /// use paceline_strategies::{FlatDdp, Trainer};
    ///
    /// let sizes = MlpConfig { input_dim: 4, hidden_dim: 8, output_dim: 2, num_layers: 2, tie_layers: false };
    /// let train = |group: Group| {
    ///     let model = sizes.build(group.world_size())?;
    ///     let mut trainer = Trainer::new(model, FlatDdp, group, AdamW::default())?;
    ///     let tensor = |columns: usize| Allocator::new().tensor(DType::F32, [16, columns], Category::Data);
    ///     let (inputs, targets) = (tensor(4)?, tensor(2)?);
    ///     inputs.write::<f32>()?.fill(1.0);
    ///     let batch = Batch::new(inputs, targets);
    ///     let first = trainer.step(&[batch.clone()])?.loss.loss;
    ///     let second = trainer.step(&[batch])?.loss.loss;
    ///     assert!(second < first);
    ///     trainer.digest()
    /// };
    /// let digests: Vec<String> = std::thread::scope(|scope| {
    ///     let ranks: Vec<_> = Group::threads(2).into_iter().map(|group| scope.spawn(|| train(group))).collect();
    ///     ranks.into_iter().map(|rank| rank.join().unwrap().unwrap()).collect()
    /// });
    /// assert_eq!(digests[0], digests[1]);
    /// ```
    pub fn new(
        model: Model,
        strategy: impl Strategy + 'static,
        ranks: impl Into<Mesh>,
        optimizer: impl Into<OptimizerConfig>,
    ) -> Result<Self> {
        let (mut strategy, compute) = (Box::new(strategy), Compute::new(1, Allocator::new())?);
        let options = ReplicaOptions::DEFAULT;
        let replica = Replica::new(strategy.as_mut(), model, compute, ranks, SEED, options)?;
        let optimizer = replica.optimizer(optimizer.into())?;
        Self::of(replica, strategy, optimizer)
    }

    /// A trainer of a replica that this strategy has prepared. Collective.
    pub fn of(replica: Replica, strategy: Box<dyn Strategy>, optimizer: Optimizer) -> Result<Self> {
        let (state, track) = (StepState::new(&replica)?, SpanTrack::with_capacity(NUM_SPANS));
        let (max_norm, scales_loss, commit) = (None, false, None);
        Ok(Self { replica, strategy, optimizer, state, track, max_norm, scales_loss, commit })
    }

    /// The same with commit points, and with this many copies of each shard ([`Commit::new`]). Collective.
    pub fn with_commit(mut self, copies: usize) -> Result<Self> {
        self.sync_replicas()?;
        let Self { replica, strategy, optimizer, .. } = &self;
        self.commit = Some(Commit::new(replica, strategy.as_ref(), optimizer, copies)?);
        Ok(self)
    }

    /// One step on this rank's batches, whose gradients are added up before the update. Every sample of all ranks has the same
    /// weight. All ranks have equally many batches, at least one, of any sizes. Collective.
    pub fn step(&mut self, batches: &[Batch]) -> Result<Stepped> {
        if batches.is_empty() {
            return Err(StrategyError::Setting("a step needs at least one batch".to_owned()));
        }
        let mut counts: Vec<i64> = batches.iter().map(|own| own.num_samples() as i64).collect();
        self.replica.group.all_reduce_slice(&mut counts, ReduceOp::Sum)?;
        let shares = batches.iter().zip(counts).map(|(batch, count)| MicroBatch {
            batch: batch.clone(),
            global_count: count as usize,
        });
        self.track.clear();
        self.step_on(&shares.collect::<Vec<_>>())
    }

    /// The same where the numbers of samples of all ranks are known. Adds to the spans. Collective.
    pub fn step_on(&mut self, shares: &[MicroBatch]) -> Result<Stepped> {
        let (max_norm, scales_loss) = (self.max_norm, self.scales_loss);
        let Self { strategy, replica, state, track, optimizer, commit, .. } = self;
        commit.iter_mut().for_each(Commit::begin_step);
        let cx = &mut StepContext { replica, state, track };
        let loss = train_step(strategy.as_mut(), cx, shares)?;
        let (mut grad_norm, mut factor) = (None, 1.0);
        if (max_norm.is_some() || scales_loss) && loss.loss.is_finite() {
            // All ranks know the norm of all gradients, so they skip the same steps.
            let max_norm = max_norm.unwrap_or(f64::INFINITY);
            let (norm, clipped) = clip_factor(strategy.as_mut(), cx, max_norm)?;
            (grad_norm, factor) = (Some(norm), clipped);
        }
        let is_updated = loss.loss.is_finite() && grad_norm.is_none_or(f64::is_finite);
        if is_updated {
            // The scale is a power of two, so the bits are the same as if it were removed before clipping.
            optimizer.set_grad_factor(factor / cx.state.loss_scale);
        }
        let stepped = Stepped { loss, grad_norm, is_updated };
        if let Some(commit) = commit {
            commit.reach(cx, optimizer, stepped)?;
        }
        if is_updated {
            strategy.optimizer_step(cx, optimizer)?;
        }
        if let Some(commit) = commit {
            commit.end_step(&replica.compute, &replica.storage, optimizer)?;
        }
        replica.compute.synchronize()?;
        Ok(stepped)
    }

    /// The elements that surely have the contents of the last step that this rank has completed, though a later step was
    /// interrupted: other values are those of other ranks, and may be half updated.
    pub fn valid(&self) -> Owned {
        let Replica { model, owned, .. } = &self.replica;
        Owned { values: certain(owned, &model.layout), ..owned.clone() }
    }

    /// Leaves the groups of ranks. Peers that still need this rank get an error. Keeps what another trainer needs to go on from the
    /// last step that all ranks can complete.
    pub fn leave(self) -> LeftTrainer {
        LeftTrainer::new(self)
    }

    /// Loss and accuracy over this rank's batches and those of all others. Changes no parameter. Collective.
    pub fn evaluate(&mut self, batches: &[Batch]) -> Result<Evaluated> {
        let memory = self.replica.compute.allocator.clone();
        let sums = memory.tensor(DType::F64, [SUMS_LEN], Category::Workspace)?;
        sums.fill_zero()?;
        let (strategy, mut cx) = self.parts();
        let Replica { model, world, .. } = cx.replica;
        for batch in batches {
            evaluate(strategy, &mut cx, batch, |cx, output| model.evaluate(cx, output, &sums))?;
        }
        if !cx.replica.counts_samples() {
            sums.fill_zero()?;
        }
        world.all_reduce(&sums, ReduceOp::Sum)?;
        let sums = sums.to_host()?;
        let [loss, correct, count] = sums.read::<f64>()?[..] else {
            unreachable!("{SUMS_LEN} sums")
        };
        let accuracy = model.objective.classifies().then_some(correct / count);
        Ok(Evaluated { loss: loss / count, accuracy })
    }

    /// Makes the ranks' models equal, if the strategy does not do so in every step. Collective.
    pub fn sync_replicas(&mut self) -> Result<()> {
        let (strategy, mut cx) = self.parts();
        strategy.sync_replicas(&mut cx)?;
        cx.track.clear();
        Ok(())
    }

    /// The SHA-256 of all parameters, in hexadecimal. Errors if the ranks' parameters differ, and the strategy promises that they
    /// are equal. Collective.
    pub fn digest(&mut self) -> Result<String> {
        let (strategy, mut cx) = self.parts();
        let own = strategy.digest(&mut cx)?;
        let Replica { world, mesh, .. } = cx.replica;
        let all = world.all_gather_object(&own)?;
        let other = all.iter().position(|digest| *digest != all[0]);
        if let Some(rank) =
            other.filter(|_| strategy.exactness(mesh.shape()).keeps_replicas_equal())
        {
            return Err(StrategyError::Setting(format!(
                "the parameters of ranks 0 and {rank} differ, and strategy {} promises equal ones: when it has finished the \
                 gradients, they must be the same on all ranks",
                strategy.name()
            )));
        }
        Ok(own)
    }

    /// The strategy, and the context of its methods.
    pub fn parts(&mut self) -> (&mut dyn Strategy, StepContext<'_>) {
        let Self { strategy, replica, state, track, .. } = self;
        (strategy.as_mut(), StepContext { replica, state, track })
    }
}
