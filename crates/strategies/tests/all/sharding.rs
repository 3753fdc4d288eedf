//! Strategies that divide the model among the ranks: with every option they end with the bits of replicas, and they take the
//! memory that they state.
//!
//! `parity.rs` and `graphs.rs` compare them with the other strategies too.

#![allow(clippy::result_large_err, reason = "what a strategy returns is its own error")]

use std::sync::Arc;

use paceline_collectives::{Axis, Group, Mesh, MeshShape};
use paceline_kernels::Compute;
use paceline_memory::{Allocator, Category};
use paceline_model::{
    Init, LayoutBuilder, Model, OptimizerConfig, Owned, Precision, Storage, UnitId, View,
};
use paceline_strategies::{
    Ddp, Exactness, Replica, ReplicaOptions, ShardAccumulation, ShardOptions, Sharded, StepContext,
    Strategy, StrategyError, Zero, ZeroStage,
};

use crate::common::{self, Make, Net, Optim, SHARDED, Trainer, WHOLE, on_mesh, on_ranks};

const ALL: [Net; 5] = [Net::Cnn, Net::BatchNormCnn, Net::Mlp, Net::FrozenCnn, Net::TiedMlp];

fn boxed(strategy: impl Strategy + 'static) -> Box<dyn Strategy> {
    Box::new(strategy)
}

/// The strategies that have gathers or reductions to choose options for.
fn with_options(options: ShardOptions) -> [Box<dyn Strategy>; 4] {
    [
        boxed(Zero::new(ZeroStage::Two, options)),
        boxed(Zero::new(ZeroStage::Three, options)),
        boxed(Sharded::new(ZeroStage::Two, options)),
        boxed(Sharded::new(ZeroStage::Three, options)),
    ]
}

/// The digest of each rank of a mesh after six steps, clipped if `max_norm` is given.
fn digests(
    net: Net,
    mesh: &MeshShape,
    make: impl Fn() -> Box<dyn Strategy> + Sync,
    max_norm: Option<f64>,
) -> Vec<String> {
    on_mesh(&mesh.to_string(), |mesh| {
        let mut trainer = Trainer::on_mesh(net, mesh, make());
        for _ in 0..6 {
            match max_norm {
                Some(max_norm) => trainer.clipped_step(&[13], max_norm),
                None => trainer.step(&[13]).unwrap(),
            };
        }
        trainer.digest()
    })
}

fn of_ddp(net: Net, world_size: usize, max_norm: Option<f64>) -> String {
    let mesh = MeshShape::replicas(world_size);
    digests(net, &mesh, || boxed(Ddp::new(1024)), max_norm).remove(0)
}

#[test]
fn every_way_to_gather_gives_the_same_bits() {
    for net in ALL {
        let expected = of_ddp(net, 3, None);
        for prefetch in 0..4 {
            for keep_after_forward in [0, 1, 2, 9] {
                let options = ShardOptions { prefetch, keep_after_forward, ..WHOLE };
                let options = ShardOptions { max_micro_batches: 1, ..options };
                let make = || boxed(Sharded::new(ZeroStage::Three, options));
                let found = digests(net, &MeshShape::replicas(3), make, None);
                let case = format!("{net:?}, {prefetch} ahead, {keep_after_forward} kept");
                assert!(found.iter().all(|digest| *digest == expected), "{case}");
            }
        }
    }
}

#[test]
fn clipping_gives_the_bits_of_replicas() {
    for net in [Net::Cnn, Net::TiedMlp, Net::FrozenCnn] {
        for world_size in [2, 3, 4] {
            let expected = of_ddp(net, world_size, Some(0.05));
            for make in SHARDED {
                let found = digests(net, &MeshShape::replicas(world_size), make, Some(0.05));
                let name = make().name();
                assert!(found.iter().all(|of| *of == expected), "{name}, {net:?}, {world_size}");
            }
        }
    }
}

/// Gradients that are reduced after each micro-batch are summed in another order than whole gradients. So the weights
/// differ by rounding errors, as in `parity.rs`.
#[test]
fn sums_of_shards_differ_in_rounding_only_and_not_among_each_other() {
    let options = ShardOptions { accumulation: ShardAccumulation::Shards, ..WHOLE };
    for net in ALL {
        let weights = |make: &(dyn Fn() -> Box<dyn Strategy> + Sync)| {
            let ranks = on_ranks(2, |group| {
                let mut trainer = Trainer::new(net, group, make());
                for _ in 0..6 {
                    trainer.step(&[5, 4, 3, 5]).unwrap();
                }
                trainer.weights()
            });
            assert_eq!(ranks[0], ranks[1]);
            ranks.into_iter().next().unwrap()
        };
        let whole = weights(&|| boxed(Ddp::new(1024)));
        let found: Vec<_> = (0..4)
            .map(|at| weights(&move || with_options(options).into_iter().nth(at).unwrap()))
            .collect();
        for of in &found {
            let off = common::largest_difference(of, &whole);
            assert!(off < 1e-6, "{net:?}: off by {off:e}");
            assert_eq!(*of, found[0], "{net:?}");
        }
    }
    let mesh = MeshShape::replicas(2);
    for strategy in with_options(options) {
        assert!(matches!(strategy.exactness(&mesh), Exactness::Lossy(_)), "{}", strategy.name());
    }
    for strategy in with_options(WHOLE) {
        assert_eq!(strategy.exactness(&mesh), Exactness::Exact, "{}", strategy.name());
    }
}

#[test]
fn the_weights_are_as_a_strategy_states_for_its_mesh() {
    let exact = ["dp=2,shard=2", "dp=1,shard=4", "shard=2,dp=1", "dp=4,shard=1", "shard=1,dp=4"];
    let exact = exact.into_iter().chain(["shard=4", "dp=4", "dp=3,shard=2", "dp=1,shard=3"]);
    // Their sums have another order than the tree over all ranks.
    let others = ["shard=2,dp=2", "dp=2,shard=3", "shard=3,dp=2"];
    for (shape, is_exact) in exact.map(|shape| (shape, true)).chain(others.map(|of| (of, false))) {
        let shape: MeshShape = shape.parse().unwrap();
        let mut differs = false;
        for net in ALL {
            let replicas = of_ddp(net, shape.num_ranks().unwrap(), Some(0.05));
            let found = SHARDED[3..].iter().map(|make| {
                let stated = make().exactness(&shape);
                assert_eq!(stated == Exactness::Exact, is_exact, "{} on {shape}", make().name());
                assert!(is_exact || stated.words().ends_with(&shape.to_string()), "{stated:?}");
                digests(net, &shape, *make, Some(0.05))
            });
            let found: Vec<String> = found.flatten().collect();
            assert!(found.iter().all(|of| *of == found[0]), "{shape}, {net:?}: {found:?}");
            assert!(!is_exact || found[0] == replicas, "{shape}, {net:?}");
            differs |= found[0] != replicas;
        }
        assert_eq!(differs, !is_exact, "{shape}");
    }
}

#[test]
fn one_shard_on_many_ranks_leaves_no_order_to_chance() {
    // Those that hold the same shard are then all ranks, whose group also sums up losses.
    let shape: MeshShape = "shard=1,dp=3".parse().unwrap();
    let replicas = of_ddp(Net::Llama, 3, Some(0.05));
    for make in &SHARDED[3..] {
        for _ in 0..20 {
            let found = digests(Net::Llama, &shape, *make, Some(0.05));
            assert!(found.iter().all(|of| *of == replicas), "{}: {found:?}", make().name());
        }
    }
}

/// The model with this value in every parameter, as a host with another mathematical library might compute it.
fn filled(mut model: Model, value: f64, world_size: usize) -> Model {
    let mut builder = LayoutBuilder::new();
    for (at, unit) in model.layout.units().iter().enumerate() {
        let mut unit = builder.unit(&unit.name);
        for param in model.layout.params().iter().filter(|param| param.unit == UnitId(at)) {
            let name = param.name.rsplit('.').next().unwrap();
            unit.param(name, param.shape, Init::Constant(value));
        }
    }
    model.layout = Arc::new(builder.finish(world_size));
    model
}

#[test]
fn ranks_that_hold_the_same_values_begin_with_those_of_the_first_of_them() {
    let shapes = ["dp=4", "dp=2,shard=2", "shard=2,dp=2", "dp=4,shard=1", "shard=2,dp=2,tp=1"];
    for shape in shapes {
        let shape: MeshShape = shape.parse().unwrap();
        // Without an axis for shards, only the replicas of ddp and of the first stages hold the same values.
        let stages = if shape.size(Axis::Shard) == 1 { &SHARDED[..] } else { &SHARDED[3..] };
        let replicas: Make = || boxed(Ddp::new(1024));
        for make in stages.iter().copied().chain([replicas]) {
            let found = on_mesh(&shape.to_string(), |mesh| {
                let model = filled(Net::Mlp.build(4), mesh.world().rank() as f64, 4);
                Trainer::with_model(model, Net::Mlp, mesh, make(), Optim::Plain).weights()
            });
            let name = make().name();
            assert!(found.iter().all(|of| *of == found[0]), "{name} on {shape}");
            if !matches!(name, "zero3" | "sharded3") {
                assert!(found[0].iter().all(|value| *value == 0.0), "{name} on {shape}");
            }
        }
    }
}

#[test]
fn memory_is_what_the_strategy_states() {
    let shards = ShardOptions { accumulation: ShardAccumulation::Shards, ..WHOLE };
    let far = ShardOptions { prefetch: 2, keep_after_forward: 2, max_micro_batches: 1, ..WHOLE };
    let mut makes: Vec<Box<dyn Fn() -> Box<dyn Strategy> + Sync>> = vec![
        Box::new(|| boxed(Zero::new(ZeroStage::One, ShardOptions::default()))),
        Box::new(|| boxed(Sharded::new(ZeroStage::One, ShardOptions::default()))),
    ];
    for options in [ShardOptions::default(), WHOLE, shards, far] {
        for at in 0..4 {
            makes.push(Box::new(move || with_options(options).into_iter().nth(at).unwrap()));
        }
    }
    for net in ALL {
        for (make, world_size) in makes.iter().flat_map(|make| [2, 3].map(|n| (make, n))) {
            on_ranks(world_size, |group: Group| {
                let allocator = Allocator::new();
                let compute = Compute::new(1, allocator.clone()).unwrap();
                let (mut strategy, model) = (make(), net.build(world_size));
                let (rank, mesh) = (group.rank(), Mesh::replicas(group));
                let options = ReplicaOptions::DEFAULT;
                let stated = strategy.footprint(&model, options.precision, mesh.shape(), rank);
                let replica =
                    Replica::new(strategy.as_mut(), model, compute, mesh, 1, options).unwrap();
                let adamw = paceline_kernels::optimizer::AdamW {
                    lr: 1e-3,
                    beta1: 0.9,
                    beta2: 0.999,
                    eps: 1e-8,
                    weight_decay: 0.0,
                };
                let _optimizer = replica.optimizer(OptimizerConfig::AdamW(adamw)).unwrap();
                let used = |category| allocator.usage(category).current_bytes as usize;
                let name = strategy.name();
                assert_eq!(used(Category::Parameters), stated.parameters, "{name}, {net:?}");
                assert_eq!(used(Category::Gradients), stated.gradients, "{name}, {net:?}");
                assert_eq!(used(Category::Unsharded), stated.unsharded, "{name}, {net:?}");
                let state: usize = replica.owned.state.iter().map(|range| range.len()).sum();
                assert_eq!(used(Category::Optimizer), 2 * 4 * state, "{name}, {net:?}");
            });
        }
    }
}

/// Stage 3 takes less memory than stage 2, and stage 2 less than stage 1, on equal layers. Peaks, not only what is kept.
#[test]
fn each_stage_takes_less_memory_than_the_one_before() {
    let config = paceline_model::MlpConfig {
        input_dim: 64,
        hidden_dim: 64,
        output_dim: 64,
        num_layers: 11,
        tie_layers: false,
    };
    for world_size in [2, 4] {
        let peak = |strategy: Box<dyn Strategy>| {
            let model = config.build(world_size).unwrap();
            let shape = format!("shard={world_size}").parse().unwrap();
            let precision = ReplicaOptions::DEFAULT.precision;
            let footprint = strategy.footprint(&model, precision, &shape, 0);
            let state: usize =
                strategy.owned(&model, &shape, 0).state.iter().map(|range| range.len()).sum();
            footprint.parameters + footprint.gradients + footprint.unsharded + 8 * state
        };
        let options = ShardOptions::default();
        let replicas = peak(boxed(Ddp::new(1 << 20)));
        let stages = [
            peak(boxed(Sharded::new(ZeroStage::One, ShardOptions::default()))),
            peak(boxed(Sharded::new(ZeroStage::Two, options))),
            peak(boxed(Sharded::new(ZeroStage::Three, options))),
        ];
        assert!(replicas > stages[0], "{replicas}, {stages:?}");
        assert!(stages.is_sorted_by(|a, b| a > b), "{stages:?} on {world_size} ranks");
    }
}

/// Leaves the run when the backward pass of its first unit begins, before anything has been reduced.
struct Leaves(Sharded);

impl Strategy for Leaves {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn exactness(&self, mesh: &MeshShape) -> Exactness {
        self.0.exactness(mesh)
    }

    fn owned(&self, model: &Model, mesh: &MeshShape, rank: usize) -> Owned {
        self.0.owned(model, mesh, rank)
    }

    fn allocate(
        &mut self,
        model: &Model,
        precision: Precision,
        compute: &Compute,
        mesh: &Mesh,
    ) -> paceline_strategies::Result<Storage> {
        self.0.allocate(model, precision, compute, mesh)
    }

    fn prepare(&mut self, replica: &Replica) -> paceline_strategies::Result<()> {
        self.0.prepare(replica)
    }

    fn pre_forward(
        &mut self,
        cx: &mut StepContext,
        unit: UnitId,
    ) -> paceline_strategies::Result<View> {
        self.0.pre_forward(cx, unit)
    }

    fn pre_backward(
        &mut self,
        _: &mut StepContext,
        _: UnitId,
        _: bool,
    ) -> paceline_strategies::Result<View> {
        Err(StrategyError::Setting("leaves".into()))
    }

    fn finish_gradients(&mut self, _: &mut StepContext) -> paceline_strategies::Result<()> {
        unreachable!("the rank has left")
    }
}

#[test]
fn a_rank_that_is_lost_between_gather_and_reduction_is_named() {
    let errors = on_ranks(3, |group| {
        let rank = group.rank();
        let strategy = Sharded::new(ZeroStage::Three, ShardOptions::default());
        let strategy = if rank == 1 { boxed(Leaves(strategy)) } else { boxed(strategy) };
        let mut trainer = Trainer::new(Net::Mlp, group, strategy);
        (rank, trainer.step(&[9]).unwrap_err().to_string())
    });
    for (rank, error) in errors {
        let words = if rank == 1 { "leaves" } else { "rank 1" };
        assert!(error.contains(words), "rank {rank}: {error}");
    }
}

#[test]
fn more_micro_batches_than_stated_are_refused() {
    for at in 0..4 {
        on_ranks(1, |group| {
            let strategy = with_options(ShardOptions::default()).into_iter().nth(at).unwrap();
            let mut trainer = Trainer::new(Net::Mlp, group, strategy);
            let error = trainer.step(&[4, 4]).unwrap_err().to_string();
            assert!(error.contains("at most 1 micro-batches, not 2"), "{error}");
            trainer.step(&[4]).unwrap();
        });
    }
}

/// The owners keep all digits, so training comes as far, and what travels and is used has 16 bits.
#[test]
fn parameters_that_are_gathered_in_bf16_learn_as_much() {
    let losses = |gathers_bf16: bool| {
        on_ranks(2, |group| {
            let options = ShardOptions { gathers_bf16, ..ShardOptions::default() };
            let strategy = Box::new(Sharded::new(ZeroStage::Three, options));
            let mut trainer = Trainer::new(Net::Llama, group, strategy);
            let losses: Vec<f64> = (0..20).map(|_| trainer.step(&[8]).unwrap().loss).collect();
            (losses, trainer.digest())
        })
    };
    let (exact, rounded) = (losses(false), losses(true));
    assert_eq!(rounded[0], rounded[1]);
    assert_ne!(rounded[0].1, exact[0].1);
    for (own, other) in rounded[0].0.iter().zip(&exact[0].0) {
        assert!((own / other - 1.0).abs() < 0.01, "{rounded:?} {exact:?}");
    }
}
