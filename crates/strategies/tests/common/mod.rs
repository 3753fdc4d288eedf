//! Small networks, their samples and the training of one rank, for the tests of strategies.
#![allow(dead_code, reason = "each test file uses some of it")]
#![allow(clippy::result_large_err, reason = "what a strategy returns is its own error")]

use std::ops::{Deref, DerefMut, Range};

use paceline_collectives::{Group, Mesh, MeshShape, Purpose, ReduceOp, Work};
use paceline_cuda::Card;
use paceline_kernels::optimizer::{AdamW, Sgd};
use paceline_kernels::{Compute, elementwise};
use paceline_memory::{Accelerator, Allocator, Category, DType, Tensor};
use paceline_model::{
    Batch, CnnConfig, LlamaConfig, LlamaTask, MlpConfig, Model, Optimizer, Precision, SpecialTokens,
};
use paceline_strategies::{
    AccumulationOrder, BucketCaps, BucketDdpAsync, CommHook, Ddp, Exactness, FlatDdp,
    HalfPrecision, LeftTrainer, LocalSgd, MicroBatch, NoSync, Replica, ReplicaOptions, Result,
    ShardAccumulation, ShardOptions, Sharded, SimpleDdp, SimpleDdpAsync, SimpleDdpGa,
    SimpleDdpHook, Stages, StepContext, StepLoss, Stepped, Strategy, SyncBlocks, TopK, Zero,
    ZeroStage,
};

#[derive(Clone, Copy, Debug)]
pub enum Net {
    Cnn,
    BatchNormCnn,
    /// The first convolution and the hidden layer are frozen.
    FrozenCnn,
    Mlp,
    /// Eight blocks.
    DeepMlp,
    /// Three hidden layers share their parameters.
    TiedMlp,
    /// A language model, whose objective has parameters.
    Llama,
    /// Its head uses the weight of the embedding.
    TiedLlama,
    /// Sequences of different lengths.
    LlamaClassifier,
    /// [`Net::Llama`] on sequences of different lengths. Each share is padded to its own longest sequence, with tokens and
    /// targets that exist.
    RaggedLlama,
    /// [`Net::TiedLlama`] with products in bf16.
    TiedLlamaBf16,
    /// [`Net::LlamaClassifier`] with products in bf16.
    LlamaClassifierBf16,
}

/// Networks whose passes treat every sample independently.
pub const NETS: [Net; 2] = [Net::Cnn, Net::Mlp];
/// The same, but with parameters that have no gradient, or several contributions, or belong to the objective.
pub const SPECIAL_NETS: [Net; 7] = [
    Net::FrozenCnn,
    Net::TiedMlp,
    Net::Llama,
    Net::TiedLlama,
    Net::LlamaClassifier,
    Net::TiedLlamaBf16,
    Net::LlamaClassifierBf16,
];

/// Tokens of a sequence, with padding.
pub const SEQ: usize = 5;
const VOCAB: usize = 19;

impl Net {
    pub fn precision(self) -> Precision {
        match self {
            Net::TiedLlamaBf16 | Net::LlamaClassifierBf16 => Precision::BF16,
            _ => Precision::F32,
        }
    }

    /// The same network, whatever it computes in.
    pub fn in_f32(self) -> Self {
        match self {
            Net::TiedLlamaBf16 => Net::TiedLlama,
            Net::LlamaClassifierBf16 => Net::LlamaClassifier,
            net => net,
        }
    }

    pub fn build(self, world_size: usize) -> Model {
        match self {
            Net::TiedLlamaBf16 | Net::LlamaClassifierBf16 => {
                return self.in_f32().build(world_size);
            }
            Net::FrozenCnn => {
                let mut model = Net::Cnn.build(world_size);
                model.freeze(&["conv0".into(), "fc0".into()]).unwrap();
                return model;
            }
            Net::Cnn | Net::BatchNormCnn => {
                let (channels, hidden) = (vec![8, 16], 32);
                CnnConfig {
                    image: [12, 12, 1],
                    channels,
                    hidden,
                    num_classes: 10,
                    batch_norm: matches!(self, Net::BatchNormCnn),
                    unused_head: false,
                    layout: Default::default(),
                    direct_convolutions: false,
                }
                .build(world_size)
            }
            Net::Mlp | Net::TiedMlp | Net::DeepMlp => MlpConfig {
                input_dim: 12,
                hidden_dim: 24,
                output_dim: 3,
                num_layers: match self {
                    Net::Mlp => 2,
                    Net::TiedMlp => 4,
                    _ => 7,
                },
                tie_layers: matches!(self, Net::TiedMlp),
            }
            .build(world_size),
            Net::Llama | Net::TiedLlama | Net::LlamaClassifier | Net::RaggedLlama => LlamaConfig {
                vocab_size: VOCAB,
                hidden_size: 16,
                intermediate_size: 24,
                num_hidden_layers: 2,
                num_attention_heads: 4,
                num_key_value_heads: 2,
                head_dim: 4,
                max_position_embeddings: SEQ,
                rope_theta: 10_000.0,
                rope_scaling: None,
                rms_norm_eps: 1e-5,
                initializer_range: 0.2,
                tie_word_embeddings: matches!(self, Net::TiedLlama),
                task: match self {
                    Net::LlamaClassifier => LlamaTask::Classification { num_labels: 3 },
                    _ => LlamaTask::LanguageModel,
                },
                special_tokens: SpecialTokens::default(),
            }
            .build(world_size),
        }
        .unwrap()
    }

    /// This rank's share of the samples with these numbers, on which alone their contents depend: the batch is the same for
    /// every number of ranks.
    fn share(self, allocator: &Allocator, samples: Range<usize>, group: &Group) -> MicroBatch {
        let (rank, world_size) = (group.rank(), group.world_size());
        let (each, longer) = (samples.len() / world_size, samples.len() % world_size);
        let start = samples.start + rank * each + rank.min(longer);
        let mine = start..start + each + usize::from(rank < longer);
        let (inputs, targets) = self.batch(allocator, mine.clone());
        let batch = Batch::new(inputs, targets);
        let batch = match self.in_f32() {
            Net::LlamaClassifier => {
                let length = |n: usize| 1 + (n * 3) as i64 % SEQ as i64;
                batch.with(Batch::LENGTHS, integers(allocator, &[mine.len()], mine.map(length)))
            }
            Net::RaggedLlama => {
                // Most sequences are short, so shares differ in their longest one.
                let length = |n: usize| [1, 2, 1, 5, 2, 1, 3][n % 7];
                let longest = mine.clone().map(length).max().unwrap_or(1) as usize;
                let cut = |tensor: &Tensor| {
                    let all = tensor.read::<i64>().unwrap();
                    let rows = all.chunks_exact(SEQ).flat_map(|row| row[..longest].to_vec());
                    integers(
                        allocator,
                        &[mine.len(), longest],
                        rows.collect::<Vec<_>>().into_iter(),
                    )
                };
                let batch =
                    Batch::new(cut(batch.inputs()), cut(&batch.get("targets").unwrap().clone()));
                let lengths = integers(allocator, &[mine.len()], mine.clone().map(length));
                batch.with(Batch::LENGTHS, lengths)
            }
            _ => batch,
        };
        MicroBatch { batch, global_count: samples.len() }
    }

    /// Inputs and targets of the samples with these numbers.
    pub fn batch(self, allocator: &Allocator, mine: Range<usize>) -> (Tensor, Tensor) {
        let elems = |elems: usize, salt: usize| -> Vec<f32> {
            let values = mine.clone().flat_map(|n| (0..elems).map(move |at| number(n, at + salt)));
            values.collect()
        };
        let tensor = |shape: &[usize], elems: Vec<f32>| {
            let tensor = allocator.tensor(DType::F32, shape, Category::Data).unwrap();
            tensor.write::<f32>().unwrap().copy_from_slice(&elems);
            tensor
        };
        match self {
            Net::TiedLlamaBf16 | Net::LlamaClassifierBf16 => self.in_f32().batch(allocator, mine),
            Net::Cnn | Net::BatchNormCnn | Net::FrozenCnn => {
                let numbers = mine.clone().map(|n| (n * 7 % 10) as i64);
                let labels = integers(allocator, &[mine.len()], numbers);
                (tensor(&[mine.len(), 12, 12, 1], elems(144, 0)), labels)
            }
            Net::Llama | Net::TiedLlama | Net::LlamaClassifier | Net::RaggedLlama => {
                let tokens = |salt: usize| {
                    let of =
                        move |n| (0..SEQ).map(move |at| ((n * 11 + at * 7 + salt) % VOCAB) as i64);
                    integers(allocator, &[mine.len(), SEQ], mine.clone().flat_map(of))
                };
                let classes = mine.clone().map(|n| (n % 3) as i64);
                let targets = match self {
                    Net::LlamaClassifier => integers(allocator, &[mine.len()], classes),
                    _ => tokens(5),
                };
                (tokens(0), targets)
            }
            Net::Mlp | Net::TiedMlp | Net::DeepMlp => {
                (tensor(&[mine.len(), 12], elems(12, 0)), tensor(&[mine.len(), 3], elems(3, 1000)))
            }
        }
    }
}

fn integers(allocator: &Allocator, shape: &[usize], numbers: impl Iterator<Item = i64>) -> Tensor {
    let tensor = allocator.tensor(DType::I64, shape, Category::Data).unwrap();
    tensor.write::<i64>().unwrap().iter_mut().zip(numbers).for_each(|(to, n)| *to = n);
    tensor
}

/// Element `at` of sample `n`: between -1 and 1, and looks random.
fn number(n: usize, at: usize) -> f32 {
    let mut state = (n as u64 * 10_007 + at as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    state ^= state >> 29;
    state = state.wrapping_mul(0xBF58_476D_1CE4_E5B9);
    (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}

/// A user's own communication hook: sums over the ranks; each rank then divides.
pub struct SumThenDivide;

impl CommHook for SumThenDivide {
    fn name(&self) -> &'static str {
        "sum_then_divide"
    }

    fn exactness(&self, _: BucketCaps) -> Exactness {
        Exactness::Exact
    }

    fn send(&mut self, cx: &mut StepContext, at: usize, bucket: &Tensor) -> Result<Work> {
        let group = cx.replica.group.for_purpose(Purpose::Bucket(at));
        Ok(group.all_reduce_async(bucket, ReduceOp::Sum)?)
    }

    fn receive(&mut self, cx: &mut StepContext, _: usize, bucket: &Tensor) -> Result<()> {
        let Replica { group, compute, .. } = cx.replica;
        Ok(elementwise::divide(compute, bucket, group.world_size() as f64)?)
    }
}

pub type Make = fn() -> Box<dyn Strategy>;

/// The strategies that give the same bits, `simple_ddp` first. The small bucket sizes give both networks
/// several buckets.
pub const EXACT: [Make; 12] = [
    || Box::new(SimpleDdp),
    || Box::new(SimpleDdpGa),
    || Box::new(SimpleDdpHook::default()),
    || Box::new(SimpleDdpAsync::default()),
    || Box::new(BucketDdpAsync::new(1024)),
    || Box::new(BucketDdpAsync::new(64 << 20)),
    || Box::new(Ddp::new(1024)),
    || Box::new(Ddp::new(64 << 20)),
    || Box::new(Ddp::new(1024).without_view()),
    || Box::new(FlatDdp),
    || Box::new(Ddp::new(1024).with_hook(TopK::new(1.0).unwrap())),
    || Box::new(Ddp::new(1024).with_hook(SumThenDivide)),
];

/// Up to four micro-batches, whose gradients are added up before they are reduced.
pub const WHOLE: ShardOptions = ShardOptions {
    prefetch: 1,
    keep_after_forward: 1,
    max_micro_batches: 4,
    accumulation: ShardAccumulation::Whole,
    gathers_bf16: false,
};

/// The strategies that divide the model among the ranks. They give the same bits as [`EXACT`].
pub const SHARDED: [Make; 6] = [
    || Box::new(Zero::new(ZeroStage::One, ShardOptions::default())),
    || Box::new(Zero::new(ZeroStage::Two, WHOLE)),
    || Box::new(Zero::new(ZeroStage::Three, WHOLE)),
    || Box::new(Sharded::new(ZeroStage::One, ShardOptions::default())),
    || Box::new(Sharded::new(ZeroStage::Two, WHOLE)),
    || Box::new(Sharded::new(ZeroStage::Three, WHOLE)),
];

pub fn all_exact() -> impl Iterator<Item = Make> {
    EXACT.into_iter().chain(SHARDED)
}

/// A strategy that does not state that it is exact.
pub struct Inexact {
    pub make: Make,
    /// All that the weights depend on, in its words.
    pub words: &'static str,
    /// By how much its loss may exceed that of simple_ddp, as a fraction of simple_ddp's improvement, if it learns from all
    /// samples.
    pub excess: Option<f64>,
}

/// These strategies. Half precision keeps at least 8 bits of each gradient, so it loses only some thousandths of the
/// improvement. With a tenth of the gradients, or with averages every four steps, training may need a few more steps.
pub const INEXACT: &[Inexact] = &[
    Inexact {
        make: || Box::new(Ddp::new(1024).with_hook(HalfPrecision::fp16())),
        words: "fp16",
        excess: Some(0.01),
    },
    Inexact {
        make: || Box::new(Ddp::new(1024).with_hook(HalfPrecision::bf16())),
        words: "bf16",
        excess: Some(0.01),
    },
    Inexact {
        make: || Box::new(Ddp::new(1024).with_hook(TopK::new(0.1).unwrap())),
        words: "top_k, with a part of 0.1 in buckets of BucketCaps { first_bytes: 1024, bytes: 1024 }",
        excess: Some(0.02),
    },
    Inexact {
        make: || Box::new(LocalSgd::new(4).unwrap()),
        words: "local_sgd, every 4 steps",
        excess: Some(0.02),
    },
    Inexact { make: || Box::new(NoSync), words: "no_sync", excess: None },
];

/// How weights are updated.
#[derive(Clone, Copy, Debug)]
pub enum Optim {
    Plain,
    Momentum,
    /// With weight decay of matrices only.
    AdamW,
}

/// A trainer with the samples of a network.
pub struct Trainer {
    net: Net,
    trainer: paceline_strategies::Trainer,
    /// Blocks of steps with and without synchronization.
    pub blocks: Option<SyncBlocks>,
    num_steps: usize,
    pub next_sample: usize,
}

impl Deref for Trainer {
    type Target = paceline_strategies::Trainer;

    fn deref(&self) -> &Self::Target {
        &self.trainer
    }
}

impl DerefMut for Trainer {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.trainer
    }
}

impl Trainer {
    pub fn leave(self) -> LeftTrainer {
        self.trainer.leave()
    }

    pub fn new(net: Net, group: Group, strategy: Box<dyn Strategy>) -> Self {
        Self::with_optimizer(net, group, strategy, Optim::Momentum)
    }

    pub fn with_optimizer(
        net: Net,
        group: Group,
        strategy: Box<dyn Strategy>,
        optim: Optim,
    ) -> Self {
        let model = net.build(group.world_size());
        Self::with_model(model, net, group, strategy, optim)
    }

    pub fn on_mesh(net: Net, mesh: Mesh, strategy: Box<dyn Strategy>) -> Self {
        let model = net.build(mesh.world().world_size());
        Self::with_model(model, net, mesh, strategy, Optim::Momentum)
    }

    /// Trains `model` on the samples of `net`.
    pub fn with_model(
        model: Model,
        net: Net,
        ranks: impl Into<Mesh>,
        strategy: Box<dyn Strategy>,
        optim: Optim,
    ) -> Self {
        Self::in_memory(&Allocator::new(), model, net, ranks.into(), strategy, optim)
    }

    pub fn in_memory(
        memory: &Allocator,
        model: Model,
        net: Net,
        mesh: Mesh,
        strategy: Box<dyn Strategy>,
        optim: Optim,
    ) -> Self {
        let ranks = (memory, mesh);
        Self::with_options(ranks, model, net, strategy, optim, ReplicaOptions::default()).unwrap()
    }

    /// The same with these options, but for the precision, which is that of the network.
    pub fn with_options(
        (memory, mesh): (&Allocator, Mesh),
        model: Model,
        net: Net,
        mut strategy: Box<dyn Strategy>,
        optim: Optim,
        options: ReplicaOptions,
    ) -> Result<Self> {
        let compute = Compute::new(1, memory.clone())?;
        // Only rank 0's seed may have an effect.
        let seed = 1 + mesh.world().rank() as u64;
        let options = ReplicaOptions { precision: net.precision(), ..options };
        let replica = Replica::new(strategy.as_mut(), model, compute, mesh, seed, options)?;
        Self::of_replica(net, replica, strategy, optim)
    }

    pub fn in_stages(
        net: Net,
        mesh: Mesh,
        strategy: Box<dyn Strategy>,
        stages: &Stages,
    ) -> Result<Self> {
        Self::in_stages_with(net, mesh, strategy, stages, AccumulationOrder::Sequential)
    }

    /// One rank of a pipeline that adds up micro-batches in this order.
    pub fn in_stages_with(
        net: Net,
        mesh: Mesh,
        mut strategy: Box<dyn Strategy>,
        stages: &Stages,
        accumulation: AccumulationOrder,
    ) -> Result<Self> {
        let compute = Compute::new(1, Allocator::new())?;
        let precision = net.precision();
        let options = ReplicaOptions { precision, accumulation, ..Default::default() };
        let model = net.build(mesh.world().world_size());
        let seed = 1 + mesh.world().rank() as u64;
        let setting = (seed, options);
        let replica = Replica::in_stages(strategy.as_mut(), model, compute, mesh, stages, setting)?;
        Self::of_replica(net, replica, strategy, Optim::Momentum)
    }

    pub fn model_in_stages(
        model: Model,
        net: Net,
        mesh: Mesh,
        mut strategy: Box<dyn Strategy>,
        stages: &Stages,
    ) -> Self {
        let compute = Compute::new(1, Allocator::new()).unwrap();
        let setting = (1, ReplicaOptions { precision: net.precision(), ..Default::default() });
        let replica = Replica::in_stages(strategy.as_mut(), model, compute, mesh, stages, setting);
        Self::of_replica(net, replica.unwrap(), strategy, Optim::Momentum).unwrap()
    }

    fn of_replica(
        net: Net,
        replica: Replica,
        strategy: Box<dyn Strategy>,
        optim: Optim,
    ) -> Result<Self> {
        let mut optimizer = replica.optimizer(match optim {
            Optim::Plain => Sgd { lr: 0.3, momentum: 0.0, weight_decay: 0.0 }.into(),
            Optim::Momentum => Sgd { lr: 0.05, momentum: 0.9, weight_decay: 1e-4 }.into(),
            Optim::AdamW => AdamW { lr: 0.01, weight_decay: 0.1, ..AdamW::default() }.into(),
        })?;
        if matches!(optim, Optim::AdamW) {
            optimizer = optimizer.decaying_matrices_only(replica.storage.layout());
        }
        let trainer = paceline_strategies::Trainer::of(replica, strategy, optimizer)?;
        Ok(Self { net, trainer, blocks: None, num_steps: 0, next_sample: 0 })
    }

    /// The same with commit points, and with so many copies of each shard.
    pub fn with_commit(self, copies: usize) -> Result<Self> {
        Ok(Self { trainer: self.trainer.with_commit(copies)?, ..self })
    }

    pub fn parts(&mut self) -> (&mut dyn Strategy, StepContext<'_>, &mut Optimizer) {
        let paceline_strategies::Trainer { strategy, replica, state, track, optimizer, .. } =
            &mut self.trainer;
        (strategy.as_mut(), StepContext { replica, state, track }, optimizer)
    }

    /// A training step on a batch with micro-batches of these sizes.
    pub fn step(&mut self, micro_batches: &[usize]) -> Result<StepLoss> {
        let shares = self.shares(micro_batches);
        self.track.clear();
        self.step_on(&shares)
    }

    /// This rank's shares of the next micro-batches, which have these sizes.
    pub fn shares(&mut self, micro_batches: &[usize]) -> Vec<MicroBatch> {
        let mut shares = Vec::new();
        for count in micro_batches {
            let samples = self.next_sample..self.next_sample + count;
            let Replica { compute, group, .. } = &self.replica;
            let MicroBatch { batch, global_count } = self.net.share(&compute.host, samples, group);
            let batch = match compute.allocator.home() {
                Some(home) => batch.to_device(&compute.allocator, home, &mut Vec::new()).unwrap(),
                None => batch,
            };
            shares.push(MicroBatch { batch, global_count });
            self.next_sample += count;
        }
        shares
    }

    /// A training step on this rank's shares of micro-batches.
    pub fn step_on(&mut self, shares: &[MicroBatch]) -> Result<StepLoss> {
        let step = self.num_steps;
        self.num_steps += 1;
        self.state.synchronizes = self.blocks.is_none_or(|blocks| blocks.is_synchronized(step));
        Ok(self.trainer.step_on(shares)?.loss)
    }

    /// A training step on micro-batches of these sizes, whose gradients are clipped: they are larger than `max_norm`.
    pub fn clipped_step(&mut self, micro_batches: &[usize], max_norm: f64) -> StepLoss {
        let shares = self.shares(micro_batches);
        self.track.clear();
        self.trainer.max_norm = Some(max_norm);
        let Stepped { loss, grad_norm, .. } = self.trainer.step_on(&shares).unwrap();
        assert!(grad_norm > Some(max_norm), "the gradients are clipped: {grad_norm:?}");
        self.trainer.max_norm = None;
        loss
    }

    /// All parameters, without padding. Every rank calls this.
    pub fn weights(&mut self) -> Vec<f32> {
        let (strategy, mut cx, _) = self.parts();
        let layout = &cx.replica.model.layout;
        let mut weights = Vec::new();
        for param in layout.params() {
            let values = strategy.gather_unit(&mut cx, param.unit).unwrap();
            let value = values.slice(param.range()).unwrap();
            weights.extend_from_slice(&value.to_host().unwrap().read::<f32>().unwrap());
        }
        weights
    }

    /// The digest of all parameters. Every rank calls this.
    pub fn digest(&mut self) -> String {
        self.sync_replicas();
        let (strategy, mut cx, _) = self.parts();
        strategy.digest(&mut cx).unwrap()
    }

    pub fn sync_replicas(&mut self) {
        let (strategy, mut cx, _) = self.parts();
        strategy.sync_replicas(&mut cx).unwrap();
    }
}

pub fn largest_difference<T: Copy + Into<f64>>(a: &[T], b: &[T]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).fold(0.0, |most, (a, b)| ((*a).into() - (*b).into()).abs().max(most))
}

/// Memory of the card. Ranks share it.
pub fn on_card() -> Allocator {
    let accelerator = Accelerator::cuda(Card::open(0).unwrap());
    Allocator::on(&accelerator.stream("compute").unwrap())
}

/// Runs `body` on a thread per rank. Returns the results in rank order.
pub fn on_ranks<R: Send>(world_size: usize, body: impl Fn(Group) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let groups = Group::threads(world_size).into_iter();
        let ranks: Vec<_> = groups.map(|group| scope.spawn(|| body(group))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// The same on a mesh of this shape.
pub fn on_mesh<R: Send>(shape: &str, body: impl Fn(Mesh) -> R + Sync) -> Vec<R> {
    let shape: MeshShape = shape.parse().unwrap();
    let body = |group| body(Mesh::new(group, &shape).unwrap());
    on_ranks(shape.num_ranks().unwrap(), body)
}
