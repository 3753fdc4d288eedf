//! Pipelines end with the weights of one process on the same micro-batches.

mod common;

use paceline_collectives::{Group, Mesh, ReduceOp};
use paceline_memory::{Category, DType};
use paceline_strategies::schedule::{self, SCHEDULES, Schedule};
use paceline_strategies::{
    ShardAccumulation, ShardOptions, Sharded2, Single, Stages, StrategyError, clip_grad_norm,
    evaluate, train_step,
};

use common::{EXACT, Make, Net, Trainer, WHOLE, all_exact, on_ranks};

/// Sizes of the micro-batches of a step, which differ.
const SIZES: [usize; 8] = [4, 3, 4, 5, 2, 4, 3, 4];

/// Trains for four steps with clipping. Returns the digest, and the losses of the steps.
fn train(trainer: &mut Trainer, micro_batches: usize) -> (String, Vec<f64>) {
    let mut losses = Vec::new();
    for _ in 0..4 {
        let shares = trainer.shares(&SIZES[..micro_batches]);
        let Trainer { strategy, replica, track, optimizer, .. } = &mut *trainer;
        track.clear();
        let loss = train_step(strategy.as_mut(), replica, &shares, track).unwrap();
        losses.push(loss.loss);
        let norm = clip_grad_norm(strategy.as_mut(), replica, 0.05, track).unwrap();
        assert!(norm > 0.05, "the gradients are clipped: {norm}");
        strategy.optimizer_step(replica, optimizer, track).unwrap();
    }
    (trainer.digest(), losses)
}

fn alone(net: Net, micro_batches: usize) -> (String, Vec<f64>) {
    let group = Group::single().unwrap();
    train(&mut Trainer::new(net, group, Box::new(Single)), micro_batches)
}

/// The digest and losses on each rank of a mesh.
fn in_stages(
    net: Net,
    mesh: &str,
    make: Make,
    of: &'static dyn Schedule,
    micro_batches: usize,
) -> Vec<(String, Vec<f64>)> {
    let shape: paceline_collectives::MeshShape = mesh.parse().unwrap();
    on_ranks(shape.num_ranks().unwrap(), |group| {
        let mesh = Mesh::new(group, &shape).unwrap();
        let mut trainer = Trainer::in_stages(net, mesh, make(), &Stages::even(of)).unwrap();
        let whole = net.build(shape.num_ranks().unwrap()).layout.len();
        assert!(trainer.replica.storage.values().tensor().num_elems() < whole);
        train(&mut trainer, micro_batches)
    })
}

#[test]
fn every_schedule_ends_with_the_weights_of_one_process() {
    for micro_batches in [1, 2, 3, 4, 8] {
        let expected = alone(Net::DeepMlp, micro_batches);
        for of in SCHEDULES {
            for ranks in [2, 3, 4] {
                let shape = schedule::Shape { placement: of.placement(ranks), micro_batches };
                if of.check(&shape).is_err() {
                    continue;
                }
                let single: Make = || Box::new(Single);
                let found =
                    in_stages(Net::DeepMlp, &format!("pp={ranks}"), single, of, micro_batches);
                for (rank, found) in found.iter().enumerate() {
                    let what = format!(
                        "{} on {ranks}, {micro_batches} micro-batches, rank {rank}",
                        of.name()
                    );
                    // The last micro-batch comes first, so gradients are added up in another order.
                    if of.name() == "looped_bfs" {
                        assert_eq!(found.1[0], expected.1[0], "{what}");
                    } else {
                        assert_eq!(*found, expected, "{what}");
                    }
                }
            }
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
        let expected = alone_on_two(net);
        for (make, name) in
            all_exact().flat_map(|make| schedules.iter().map(move |name| (make, name)))
        {
            let of = schedule::named(name).unwrap();
            let found = in_stages(net, "pp=2,dp=2", make, of, 4);
            for (rank, (digest, _)) in found.iter().enumerate() {
                assert_eq!(*digest, expected, "{net:?}, {name}, {}, rank {rank}", make().name());
            }
        }
    }
}

/// The digest of two replicas without stages.
fn alone_on_two(net: Net) -> String {
    let ends = on_ranks(2, |group| train(&mut Trainer::new(net, group, EXACT[0]()), 4).0);
    assert_eq!(ends[0], ends[1]);
    ends[0].clone()
}

#[test]
fn an_evaluation_adds_up_the_sums_of_the_last_stage() {
    for (net, name) in [(Net::DeepMlp, "zbv"), (Net::DeepMlp, "1f1b"), (Net::Llama, "1f1b")] {
        let sums = |trainer: &mut Trainer| {
            let shares = trainer.shares(&[5, 2]);
            let memory = &trainer.replica.compute.allocator;
            let sums = memory.tensor(DType::F64, [3], Category::Workspace).unwrap();
            sums.fill_zero().unwrap();
            let Trainer { strategy, replica, track, .. } = &mut *trainer;
            for share in &shares {
                evaluate(strategy.as_mut(), replica, &share.batch, &sums, track).unwrap();
            }
            replica.world.all_reduce(&sums, ReduceOp::Sum).unwrap();
            sums.read::<f64>().unwrap().to_vec()
        };
        let alone = sums(&mut Trainer::new(net, Group::single().unwrap(), Box::new(Single)));
        let of = Stages::even(schedule::named(name).unwrap());
        let found = on_ranks(2, |group| {
            let mesh = Mesh::new(group, &"pp=2".parse().unwrap()).unwrap();
            sums(&mut Trainer::in_stages(net, mesh, Box::new(Single), &of).unwrap())
        });
        assert_eq!(found, [alone.clone(), alone], "{net:?} {name}");
    }
}

#[test]
fn what_cannot_be_divided_is_refused() {
    let refused = |net: Net, ranks: usize, name: &str| {
        let errors = on_ranks(ranks, |group| {
            let mesh = Mesh::new(group, &format!("pp={ranks}").parse().unwrap()).unwrap();
            let of = Stages::even(schedule::named(name).unwrap());
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
    assert!(refused(Net::TiedMlp, 2, "1f1b").contains("share parameters"));
    // Gradients that are reduced after each micro-batch need its backward passes together.
    let errors = on_ranks(2, |group| {
        let mesh = Mesh::new(group, &"pp=2".parse().unwrap()).unwrap();
        let of = Stages::even(schedule::named("interleaved_1f1b").unwrap());
        let each = Box::new(Sharded2::new(ShardOptions {
            accumulation: ShardAccumulation::Shards,
            ..WHOLE
        }));
        Trainer::in_stages(Net::DeepMlp, mesh, each, &of).err().unwrap().to_string()
    });
    assert!(errors[0].contains("goes back to micro-batches that it has left"), "{}", errors[0]);
    // No rank starts a step that its schedule does not know.
    let errors = on_ranks(2, |group| {
        let mesh = Mesh::new(group, &"pp=2".parse().unwrap()).unwrap();
        let of = Stages::even(schedule::named("dualpipev").unwrap());
        let mut trainer = Trainer::in_stages(Net::DeepMlp, mesh, Box::new(Single), &of).unwrap();
        trainer.step(&[4, 4]).unwrap_err().to_string()
    });
    assert!(errors.iter().all(|error| error.contains("2 are too few, pass 4")), "{errors:?}");
}
