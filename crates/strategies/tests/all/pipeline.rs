//! Pipelines end with the weights of one process on the same micro-batches.

use paceline_collectives::{Axis, Group, ReduceOp};
use paceline_kernels::Compute;
use paceline_memory::{Allocator, Category, DType};
use paceline_model::MeanSquaredError;
use paceline_strategies::schedule::{self, Costs, SCHEDULES, Schedule};
use paceline_strategies::{
    AccumulationOrder, Replica, ReplicaOptions, ShardAccumulation, ShardOptions, Sharded, Single,
    Stages, StrategyError, Zero, ZeroStage, evaluate,
};

use crate::common::{
    EXACT, Make, Net, Trainer, WHOLE, all_exact, largest_difference, on_mesh, on_ranks,
};

/// Sizes of the micro-batches of a step, which differ.
const SIZES: [usize; 8] = [4, 3, 4, 5, 2, 4, 3, 4];

/// Trains for four steps with clipping. Returns the digest, and the losses of the steps.
fn train(trainer: &mut Trainer, micro_batches: usize) -> (String, Vec<f64>) {
    let mut losses = Vec::new();
    for _ in 0..4 {
        losses.push(trainer.clipped_step(&SIZES[..micro_batches], 0.05).loss);
    }
    (trainer.digest(), losses)
}

fn alone(net: Net, order: AccumulationOrder, micro_batches: usize) -> (String, Vec<f64>) {
    let group = Group::single().unwrap();
    let mut trainer = Trainer::new(net, group, Box::new(Single));
    trainer.replica.options.accumulation = order;
    train(&mut trainer, micro_batches)
}

/// The digest and losses on each rank of a mesh.
fn in_stages(
    net: Net,
    mesh: &str,
    make: Make,
    of: &'static dyn Schedule,
    order: AccumulationOrder,
    micro_batches: usize,
) -> Vec<(String, Vec<f64>)> {
    on_mesh(mesh, |mesh| {
        let (stages, ranks) = (Stages::even(of, micro_batches), mesh.world().world_size());
        let mut trainer = Trainer::in_stages_with(net, mesh, make(), &stages, order).unwrap();
        let whole = net.build(ranks).layout.len();
        assert!(trainer.replica.storage.values().tensor().num_elems() < whole);
        train(&mut trainer, micro_batches)
    })
}

/// All schedules on two to four ranks, in steps of one to eight micro-batches that they know.
fn all_schedules() -> impl Iterator<Item = (&'static dyn Schedule, usize, usize)> {
    let steps =
        [1, 2, 3, 4, 5, 8].into_iter().flat_map(|step| [2, 3, 4].map(|ranks| (ranks, step)));
    let all = steps.flat_map(|(ranks, step)| SCHEDULES.map(move |of| (of, ranks, step)));
    all.filter(|(of, ranks, micro_batches)| {
        let placement = of.placement(*ranks);
        of.check(&schedule::Shape { placement, micro_batches: *micro_batches }).is_ok()
    })
}

const SINGLE: Make = || Box::new(Single);

#[test]
fn every_schedule_ends_with_the_weights_of_one_process() {
    for order in [AccumulationOrder::Sequential, AccumulationOrder::Tree] {
        for (of, ranks, micro_batches) in all_schedules() {
            let expected = alone(Net::DeepMlp, order, micro_batches);
            let mesh = format!("pp={ranks}");
            let found = in_stages(Net::DeepMlp, &mesh, SINGLE, of, order, micro_batches);
            for (rank, found) in found.iter().enumerate() {
                let what = format!(
                    "{} on {ranks}, {micro_batches} micro-batches, rank {rank}, {order:?}",
                    of.name()
                );
                if of.name() != "looped_bfs" {
                    assert_eq!(*found, expected, "{what}");
                    continue;
                }
                // The last micro-batch comes first, so its loss does, and without a tree its gradient.
                let off = largest_difference(&found.1, &expected.1);
                assert!(off < 1e-6, "losses are off by {off}, {what}");
                if order == AccumulationOrder::Tree {
                    assert_eq!(found.0, expected.0, "{what}");
                }
            }
        }
    }
}

/// The objective has parameters, whose gradients come with the loss.
#[test]
fn a_tree_of_micro_batches_is_the_same_with_a_language_model() {
    for micro_batches in [4, 7] {
        let expected = alone(Net::Llama, AccumulationOrder::Tree, micro_batches);
        for name in ["zb_h1", "zbv", "looped_bfs", "dualpipev"] {
            let of = schedule::named(name).unwrap();
            let order = AccumulationOrder::Tree;
            let found = in_stages(Net::Llama, "pp=2", SINGLE, of, order, micro_batches);
            assert_eq!(found, [expected.clone(), expected.clone()], "{name}, {micro_batches}");
        }
    }
}

/// The values of this rank's parameters, by their numbers.
fn own_weights(trainer: &mut Trainer) -> Vec<Vec<f32>> {
    let (strategy, mut cx, _) = trainer.parts();
    strategy.sync_replicas(&mut cx).unwrap();
    let layout = &cx.replica.model.layout;
    let values = layout.params().iter().map(|param| {
        let unit = strategy.gather_unit(&mut cx, param.unit).unwrap();
        if layout.unit(param.unit).is_elsewhere {
            Vec::new()
        } else {
            unit.slice(param.range()).unwrap().read::<f32>().unwrap().to_vec()
        }
    });
    values.collect()
}

/// Trains in stages that share parameters. All copies are equal, and weights, losses and norms near those of `ranks` ranks
/// without stages.
fn check_tied(
    net: Net,
    mesh: &str,
    make: Make,
    of: &'static dyn Schedule,
    order: AccumulationOrder,
) {
    let what = format!("{net:?}, {mesh}, {}, {}, {order:?}", make().name(), of.name());
    let shape: paceline_collectives::MeshShape = mesh.parse().unwrap();
    let replicas = shape.without(Axis::Pp).num_ranks().unwrap();
    let alone = on_ranks(replicas, |group| {
        let mut trainer = Trainer::new(net, group, EXACT[0]());
        trainer.replica.options.accumulation = order;
        let losses = train(&mut trainer, 4).1;
        (losses, own_weights(&mut trainer))
    });
    let (expected_losses, expected) = &alone[0];
    let found = on_mesh(mesh, |mesh| {
        let stages = Stages::even(of, 4);
        let mut trainer = Trainer::in_stages_with(net, mesh, make(), &stages, order).unwrap();
        let (digest, losses) = train(&mut trainer, 4);
        (digest, losses, own_weights(&mut trainer))
    });
    for (digest, losses, weights) in &found {
        assert_eq!(*digest, found[0].0, "{what}");
        // The gradient of a tied parameter is added up in another order, so it differs by some units in the last place.
        assert!(largest_difference(losses, expected_losses) < 1e-5, "{losses:?} {what}");
        for (at, own) in weights.iter().enumerate().filter(|(_, own)| !own.is_empty()) {
            let off = largest_difference(own, &expected[at]);
            assert!(off < 1e-6, "parameter {at} is off by {off}, {what}");
        }
    }
    for at in 0..expected.len() {
        let mut copies = found.iter().map(|of| &of.2[at]).filter(|copy| !copy.is_empty());
        let first = copies.next().expect("a rank has it");
        assert!(copies.all(|copy| copy == first), "parameter {at}, {what}");
    }
}

#[test]
fn stages_that_share_parameters_keep_their_copies_equal() {
    use AccumulationOrder::{Sequential, Tree};
    for order in [Sequential, Tree] {
        for name in ["gpipe", "1f1b", "zb_h2", "looped_bfs", "interleaved_1f1b", "zbv"] {
            let of = schedule::named(name).unwrap();
            check_tied(Net::TiedLlama, "pp=2", SINGLE, of, order);
        }
        for (net, name) in
            [(Net::TiedLlama, "1f1b"), (Net::TiedLlama, "zb_h1"), (Net::TiedMlp, "1f1b")]
        {
            check_tied(net, "pp=3", SINGLE, schedule::named(name).unwrap(), order);
        }
        check_tied(Net::TiedMlp, "pp=2", SINGLE, schedule::named("zbv").unwrap(), order);
    }
    for make in all_exact() {
        let of = schedule::named("zb_h1").unwrap();
        check_tied(Net::TiedLlama, "pp=2,dp=2", make, of, Sequential);
    }
}

/// The copies of a rank are one, and its gradient is that of one process.
#[test]
fn parameters_that_two_stages_of_a_rank_share_have_the_bits_of_one_process() {
    for name in ["zbv", "dualpipev"] {
        let of = schedule::named(name).unwrap();
        for micro_batches in [4, 7] {
            let expected = alone(Net::TiedLlama, AccumulationOrder::Tree, micro_batches);
            let order = AccumulationOrder::Tree;
            let found = in_stages(Net::TiedLlama, "pp=2", SINGLE, of, order, micro_batches);
            assert_eq!(found, [expected.clone(), expected], "{name}, {micro_batches}");
        }
    }
}

#[test]
fn each_token_of_a_step_counts_once_however_many_stages_have_it() {
    // A sequence of these nets has the same length as every other one, or a length of its own.
    for net in [Net::Llama, Net::RaggedLlama] {
        let counted = |mesh: &str| -> usize {
            let each = on_mesh(mesh, |mesh| {
                let (make, order) = (EXACT[0], AccumulationOrder::Sequential);
                let mut trainer = if mesh.shape().size(Axis::Pp) > 1 {
                    let stages = Stages::even(schedule::named("1f1b").unwrap(), 4);
                    Trainer::in_stages_with(net, mesh, make(), &stages, order).unwrap()
                } else {
                    Trainer::new(net, mesh.world().clone(), make())
                };
                let shares = trainer.shares(&SIZES[..4]);
                trainer.step_on(&shares).unwrap().own_tokens
            });
            each.into_iter().sum()
        };
        let expected = counted("dp=1");
        assert!(expected > SIZES[..4].iter().sum(), "{net:?}: {expected}");
        for mesh in ["dp=2", "pp=2", "pp=3", "pp=2,dp=2"] {
            assert_eq!(counted(mesh), expected, "{net:?}, {mesh}");
        }
    }
}

#[test]
fn stages_of_several_replicas_end_with_the_weights_of_one_process() {
    let cases = [
        (Net::DeepMlp, &["1f1b", "interleaved_1f1b", "zb_h1", "zbv", "dualpipev"][..]),
        (Net::Llama, &["1f1b", "zb_h2", "zbv"]),
        (Net::FrozenCnn, &["1f1b", "zb_h1"]),
    ];
    for (net, schedules) in cases {
        let expected = alone_on_two(net, EXACT[0], 4);
        for (make, name) in
            all_exact().flat_map(|make| schedules.iter().map(move |name| (make, name)))
        {
            let of = schedule::named(name).unwrap();
            let order = AccumulationOrder::Sequential;
            let found = in_stages(net, "pp=2,dp=2", make, of, order, 4);
            for (rank, (digest, _)) in found.iter().enumerate() {
                assert_eq!(*digest, expected, "{net:?}, {name}, {}, rank {rank}", make().name());
            }
        }
    }
}

/// Gradients are reduced after each micro-batch.
const SHARDS: ShardOptions = ShardOptions { accumulation: ShardAccumulation::Shards, ..WHOLE };

/// A gradient is reduced when its weight half has been computed, and not when the input half has been.
#[test]
fn gradients_are_reduced_after_their_weight_half() {
    let whole: [Make; 4] = [
        || Box::new(Zero::new(ZeroStage::Two, ShardOptions::default())),
        || Box::new(Zero::new(ZeroStage::Three, ShardOptions::default())),
        || Box::new(Sharded::new(ZeroStage::Two, ShardOptions::default())),
        || Box::new(Sharded::new(ZeroStage::Three, ShardOptions::default())),
    ];
    let each: [Make; 4] = [
        || Box::new(Zero::new(ZeroStage::Two, SHARDS)),
        || Box::new(Zero::new(ZeroStage::Three, SHARDS)),
        || Box::new(Sharded::new(ZeroStage::Two, SHARDS)),
        || Box::new(Sharded::new(ZeroStage::Three, SHARDS)),
    ];
    for (net, makes, micro_batches) in [
        (Net::DeepMlp, whole, 1),
        (Net::Llama, whole, 1),
        (Net::DeepMlp, each, 4),
        (Net::Llama, each, 4),
    ] {
        for make in makes {
            let expected = alone_on_two(net, make, micro_batches);
            // The last micro-batch comes first with looped_bfs, so its shards are added up in another order.
            let exact =
                SCHEDULES.iter().filter(|of| micro_batches == 1 || of.name() != "looped_bfs");
            for of in exact {
                let shape = schedule::Shape { placement: of.placement(2), micro_batches };
                if of.check(&shape).is_err() {
                    continue;
                }
                let order = AccumulationOrder::Sequential;
                let found = in_stages(net, "pp=2,dp=2", make, *of, order, micro_batches);
                let what = format!("{net:?}, {}, {}, {micro_batches}", make().name(), of.name());
                assert!(found.iter().all(|(digest, _)| *digest == expected), "{what}");
            }
        }
    }
    // A tree over one micro-batch puts nothing aside, so no rank needs whole gradients.
    for make in whole {
        let expected = alone_on_two(Net::Llama, make, 1);
        let of = schedule::named("zb_h1").unwrap();
        let order = AccumulationOrder::Tree;
        let found = in_stages(Net::Llama, "pp=2,dp=2", make, of, order, 1);
        assert!(found.iter().all(|(digest, _)| *digest == expected), "{}", make().name());
    }
    for make in each {
        let of = schedule::named("zb_h1").unwrap();
        check_tied(Net::TiedLlama, "pp=2,dp=2", make, of, AccumulationOrder::Sequential);
    }
}

/// The digest of two replicas without stages.
fn alone_on_two(net: Net, make: Make, micro_batches: usize) -> String {
    let ends = on_ranks(2, |group| train(&mut Trainer::new(net, group, make()), micro_batches).0);
    assert_eq!(ends[0], ends[1]);
    ends[0].clone()
}

#[test]
fn an_evaluation_adds_up_the_sums_of_the_last_stage() {
    for (net, name) in [
        (Net::DeepMlp, "zbv"),
        (Net::DeepMlp, "1f1b"),
        (Net::Llama, "1f1b"),
        (Net::TiedLlama, "1f1b"),
        (Net::TiedLlama, "zbv"),
    ] {
        let sums = |trainer: &mut Trainer| {
            let shares = trainer.shares(&[5, 2]);
            let memory = &trainer.replica.compute.allocator;
            let sums = memory.tensor(DType::F64, [3], Category::Workspace).unwrap();
            sums.fill_zero().unwrap();
            let (strategy, mut cx, _) = trainer.parts();
            let replica = cx.replica;
            for share in &shares {
                evaluate(strategy, &mut cx, &share.batch, |cx, output| {
                    replica.model.evaluate(cx, output, &sums)
                })
                .unwrap();
            }
            trainer.replica.world.all_reduce(&sums, ReduceOp::Sum).unwrap();
            sums.read::<f64>().unwrap().to_vec()
        };
        let alone = sums(&mut Trainer::new(net, Group::single().unwrap(), Box::new(Single)));
        let of = Stages::even(schedule::named(name).unwrap(), 1);
        let found = on_mesh("pp=2", |mesh| {
            sums(&mut Trainer::in_stages(net, mesh, Box::new(Single), &of).unwrap())
        });
        assert_eq!(found, [alone.clone(), alone], "{net:?} {name}");
    }
}

#[test]
fn what_cannot_be_divided_is_refused() {
    let refused = |net: Net, ranks: usize, name: &str| {
        let errors = on_mesh(&format!("pp={ranks}"), |mesh| {
            let of = Stages::even(schedule::named(name).unwrap(), 1);
            match Trainer::in_stages(net, mesh, Box::new(Single), &of) {
                Err(StrategyError::Setting(problem)) => problem,
                Err(other) => panic!("{other}"),
                Ok(_) => panic!("{net:?} was divided"),
            }
        });
        errors[0].clone()
    };
    assert!(refused(Net::Mlp, 4, "1f1b").contains("4 stages of at least one block"));
    assert!(refused(Net::Mlp, 2, "zbv").contains("the model has 3 blocks"));
    assert!(refused(Net::DeepMlp, 2, "dualpipev").contains("1 are too few, pass 4"));
    // The stages of a rank end a micro-batch at different moments, so no moment shows what it has left out.
    let errors = on_mesh("pp=2", |mesh| {
        let of = Stages::even(schedule::named("zbv").unwrap(), 1);
        let (model, compute) = (Net::DeepMlp.build(2), Compute::new(1, Allocator::new()).unwrap());
        let (mut strategy, find_unused_parameters) = (Sharded::new(ZeroStage::Two, SHARDS), true);
        let options = ReplicaOptions { find_unused_parameters, ..Default::default() };
        let setting = (1, options);
        let replica = Replica::in_stages(&mut strategy, model, compute, mesh, &of, setting);
        replica.err().unwrap().to_string()
    });
    assert!(errors[0].contains("cannot leave out parameters"), "{}", errors[0]);
    // The pipeline does not know of the head, which is a layer.
    let errors = on_mesh("pp=2", |mesh| {
        let of = Stages::even(schedule::named("1f1b").unwrap(), 1);
        let (mut model, compute) =
            (Net::TiedLlama.build(2), Compute::new(1, Allocator::new()).unwrap());
        model.objective = Box::new(MeanSquaredError);
        let setting = (1, ReplicaOptions::DEFAULT);
        let replica = Replica::in_stages(&mut Single, model, compute, mesh, &of, setting);
        replica.err().unwrap().to_string()
    });
    let words = "model.embed_tokens.weight cannot be in a pipeline: 2 layers use it, and 1 of them";
    assert!(errors[0].contains(words), "{}", errors[0]);
    // No rank starts a step that its schedule does not know.
    let errors = on_mesh("pp=2", |mesh| {
        let of = Stages::even(schedule::named("dualpipev").unwrap(), 4);
        let mut trainer = Trainer::in_stages(Net::DeepMlp, mesh, Box::new(Single), &of).unwrap();
        trainer.step(&[4, 4]).unwrap_err().to_string()
    });
    assert!(errors.iter().all(|error| error.contains("2 are too few, pass 4")), "{errors:?}");
}

/// The first rank wants a gradient before it has sent the second micro-batch, for which the second rank waits.
struct Crossed;

impl Schedule for Crossed {
    fn name(&self) -> &'static str {
        "crossed"
    }

    fn about(&self) -> &'static str {
        "lists of ranks that wait for each other"
    }

    fn list(&self, shape: &schedule::Shape, rank: usize, _: &Costs) -> Vec<schedule::Entry> {
        let mut list = schedule::List::new(shape, rank);
        list.forward(0);
        if rank == 0 {
            list.backward(0);
        }
        list.forward(0);
        (0..2).for_each(|_| list.backward(0));
        list.finish()
    }
}

#[test]
fn a_plan_that_cannot_run_is_refused_with_the_replica() {
    let refused = |stages: &Stages| {
        let errors = on_mesh("pp=2", |mesh| {
            let made = Trainer::in_stages(Net::DeepMlp, mesh, Box::new(Single), stages);
            made.err().expect("the lists do not fit together").to_string()
        });
        assert_eq!(errors[0], errors[1]);
        errors[0].clone()
    };
    let cycle = "crossed in 2 micro-batches: the ranks wait for each other: ";
    let error = refused(&Stages::even(Crossed, 2));
    assert!(error.contains(cycle), "{error}");
    assert!(error.contains("rank 0 cannot do 0B0 before 1I0 of rank 1"), "{error}");
    let costs = Some(Costs::even(&schedule::Placement::line(3), 1.0, 1.0, 1.0));
    let error = refused(&Stages { costs, ..Stages::even(schedule::OneFOneB, 2) });
    assert!(error.contains("2 stages, and costs of 3"), "{error}");
}
