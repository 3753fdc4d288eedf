//! Batch norm on several ranks. With synchronized statistics, training equals that of one process on the
//! whole batch. Without, each rank has its own running statistics, but the parameters still stay equal.

use paceline_collectives::{Group, Mesh};
use paceline_strategies::schedule::named;
use paceline_strategies::{FlatDdp, LocalSgd, NoSync, ReplicaOptions, Single, Stages, SyncBlocks};

use crate::common::{EXACT, Make, Net, Trainer, largest_difference, on_ranks};

/// Samples of each batch. Four ranks cannot divide most of them evenly; of the batches of three, the last of
/// four ranks has no sample.
const STEPS: [usize; 8] = [12, 10, 3, 12, 10, 3, 12, 10];

const PLAIN: ReplicaOptions = ReplicaOptions::DEFAULT;
const SYNC: ReplicaOptions = ReplicaOptions { sync_batch_norm: true, ..PLAIN };
const BROADCAST: ReplicaOptions = ReplicaOptions { broadcast_buffers: true, ..PLAIN };

/// The state of one rank at the end of training.
struct Outcome {
    digest: String,
    weights: Vec<f32>,
    buffers: Vec<f32>,
    losses: Vec<f64>,
}

fn train(make: Make, world_size: usize, options: ReplicaOptions) -> Vec<Outcome> {
    on_ranks(world_size, |group| {
        let mut trainer = trainer(group, make, options);
        let losses = STEPS.iter().map(|&count| trainer.step(&[count]).unwrap().loss).collect();
        Outcome {
            digest: trainer.replica.storage.digest().unwrap(),
            weights: trainer.weights(),
            buffers: buffers(&trainer),
            losses,
        }
    })
}

fn trainer(group: Group, make: Make, options: ReplicaOptions) -> Trainer {
    let mut trainer = Trainer::new(Net::BatchNormCnn, group, make());
    trainer.replica.options = options;
    trainer
}

fn buffers(trainer: &Trainer) -> Vec<f32> {
    trainer.replica.storage.buffers().read::<f32>().unwrap().to_vec()
}

fn one_process() -> Outcome {
    train(|| Box::new(Single), 1, PLAIN).remove(0)
}

/// The statistics are summed in f64, so only the order in which f32
/// gradients are summed differs from one process: eight steps with rounding errors of 6e-8 in gradients of about one, times a
/// learning rate of 0.05 and a momentum that repeats them, give 2e-7. Using the statistics of a share
/// changes weights, statistics and losses by more than 1e-2.
const TOLERANCE: f64 = 1e-6;

#[test]
fn synchronized_statistics_are_those_of_one_process() {
    let single = one_process();
    for world_size in [2, 4] {
        for make in EXACT {
            let outcomes = train(make, world_size, SYNC);
            for outcome in &outcomes {
                let off = [
                    largest_difference(&outcome.weights, &single.weights),
                    largest_difference(&outcome.buffers, &single.buffers),
                    largest_difference(&outcome.losses, &single.losses),
                ];
                assert!(off.iter().all(|off| *off < TOLERANCE), "{world_size} ranks: {off:?}");
                assert_eq!(outcome.digest, outcomes[0].digest, "{world_size} ranks");
                assert_eq!(outcome.buffers, outcomes[0].buffers, "{world_size} ranks");
            }
        }
        let apart = train(EXACT[0], world_size, PLAIN).remove(0);
        assert!(largest_difference(&apart.weights, &single.weights) > 1e-2, "the test can fail");
    }
}

#[test]
fn parameters_stay_equal_whatever_the_statistics_are_of() {
    for world_size in [2, 4] {
        for options in [PLAIN, SYNC, BROADCAST] {
            let all = EXACT.map(|make| train(make, world_size, options));
            for outcome in all.iter().flatten() {
                // All equal those of simple_ddp on rank 0. Running statistics do not affect training.
                assert_eq!(outcome.digest, all[0][0].digest, "{options:?}");
                assert_eq!(outcome.losses, all[0][0].losses, "{options:?}");
            }
            for outcomes in &all {
                for (ours, theirs) in outcomes.iter().zip(&all[0]) {
                    assert_eq!(ours.buffers, theirs.buffers, "{options:?}");
                }
            }
            let ranks_agree = all[0].iter().all(|outcome| outcome.buffers == all[0][0].buffers);
            assert_eq!(ranks_agree, options.sync_batch_norm, "{options:?}");
        }
    }
}

#[test]
fn broadcast_statistics_are_those_of_rank_0() {
    let outcomes = on_ranks(3, |group| {
        let mut trainer = trainer(group, EXACT[0], BROADCAST);
        let mut after_steps = Vec::new();
        for _ in 0..3 {
            trainer.step(&[9]).unwrap();
            after_steps.push(buffers(&trainer));
        }
        let inner = &mut *trainer;
        inner.replica.broadcast_buffers(0, &mut inner.track).unwrap();
        (after_steps, buffers(&trainer))
    });
    let (of_rank_0, _) = &outcomes[0];
    let mut without = on_ranks(3, |group| {
        let mut trainer = trainer(group, EXACT[0], PLAIN);
        for _ in 0..3 {
            trainer.step(&[9]).unwrap();
        }
        buffers(&trainer)
    });
    assert_eq!(without.remove(0), of_rank_0[2], "rank 0 follows its own samples");
    for (rank, (after_steps, settled)) in outcomes.iter().enumerate().skip(1) {
        assert_ne!(after_steps[2], of_rank_0[2], "rank {rank} has seen other samples");
        assert_eq!(settled, &of_rank_0[2], "rank {rank}");
        assert_ne!(after_steps[2], without[rank - 1], "rank {rank} began the step with rank 0's");
    }
}

#[test]
fn operations_of_synchronized_batch_norm() {
    let operations = |options| {
        let counts = on_ranks(2, |group| {
            let mut trainer = trainer(group, || Box::new(FlatDdp), options);
            let mut records = Vec::new();
            trainer.step(&[8]).unwrap();
            trainer.replica.group.fresh_records(&mut records);
            records.clear();
            trainer.step(&[8]).unwrap();
            trainer.replica.group.fresh_records(&mut records);
            records.len()
        });
        counts[0]
    };
    // Two operations for gradients and loss. Two layers of batch norm add one operation each in both passes.
    // Broadcasting buffers adds one.
    assert_eq!((operations(PLAIN), operations(SYNC), operations(BROADCAST)), (2, 6, 3));
}

#[test]
fn settled_ranks_hold_rank_0s_statistics() {
    let local: Make = || Box::new(LocalSgd::new(4).unwrap());
    let blocks = SyncBlocks::new(1).ok();
    for (make, blocks) in [(EXACT[0], None), (local, None), (local, blocks)] {
        let outcomes = on_ranks(2, |group| {
            let mut trainer = trainer(group, make, PLAIN);
            trainer.blocks = blocks;
            for _ in 0..2 {
                trainer.step(&[9]).unwrap();
            }
            let before = buffers(&trainer);
            trainer.sync_replicas();
            (before, buffers(&trainer), trainer.replica.storage.digest().unwrap())
        });
        let [(own, settled, digest), (other, settled_other, digest_other)] = &outcomes[..] else {
            panic!("two ranks");
        };
        assert_ne!(own, other);
        assert_eq!((settled, settled_other), (own, own));
        assert_eq!(digest, digest_other);
    }
}

#[test]
fn ranks_that_are_not_synchronized_do_not_communicate() {
    let options = ReplicaOptions { sync_batch_norm: true, ..BROADCAST };
    on_ranks(2, |group| {
        let mut trainer = trainer(group, || Box::new(NoSync), options);
        let mut records = Vec::new();
        trainer.replica.group.fresh_records(&mut records);
        records.clear();
        trainer.step(&[8]).unwrap();
        trainer.replica.group.fresh_records(&mut records);
        assert!(records.is_empty(), "{records:?}");
    });
}

/// Statistics are those of each micro-batch, with stages and without.
#[test]
fn stages_normalize_as_one_rank_does() {
    let end = |trainer: &mut Trainer, options| {
        trainer.replica.options = options;
        for _ in 0..3 {
            trainer.step(&[5, 4, 6, 3]).unwrap();
        }
        (trainer.digest(), buffers(trainer))
    };
    for options in [PLAIN, SYNC, BROADCAST] {
        let whole = on_ranks(2, |group| {
            end(&mut Trainer::new(Net::BatchNormCnn, group, EXACT[0]()), options)
        });
        let (digest, statistics) = &whole[0];
        for name in ["1f1b", "zb_h1", "interleaved_1f1b", "zbv"] {
            let stages = Stages::even(named(name).unwrap(), 4);
            let parts = on_ranks(4, |group| {
                let mesh = Mesh::new(group, &"pp=2,dp=2".parse().unwrap()).unwrap();
                let net = Net::BatchNormCnn;
                end(&mut Trainer::in_stages(net, mesh, EXACT[0](), &stages).unwrap(), options)
            });
            assert!(parts.iter().all(|(own, _)| own == digest), "{name} {options:?}");
            // A rank changes those of its own stages.
            let is_somewhere = |at: usize| parts.iter().any(|(_, own)| own[at] == statistics[at]);
            assert!((0..statistics.len()).all(is_somewhere), "{name} {options:?}");
        }
    }
}
