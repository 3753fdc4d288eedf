//! Ranks with different numbers of batches, of different sizes. Every strategy finishes. The exact strategies
//! end with the same bits on all ranks, and with the weights of one process that trains on the samples of all
//! ranks in each step.

use std::ops::Range;

use paceline_collectives::Group;
use paceline_model::Batch;
use paceline_strategies::{Ddp, HalfPrecision, Join, LocalSgd, MicroBatch, NoSync, Single, TopK};

use crate::common::{Make, NETS, Net, Trainer, all_exact, largest_difference, on_ranks};

/// As in `parity.rs`, sums over the batch are in a different order: f32 rounding errors over 9 steps.
const TOLERANCE: f64 = 1e-6;

/// The sizes of each rank's batches: one rank has no batch, one has the most, one has an empty batch in between,
/// and in the last three steps only one rank has samples.
const BATCHES: [&[usize]; 4] =
    [&[3, 3, 3, 2], &[], &[5, 5, 5, 5, 5, 5, 5, 5, 1], &[2, 0, 2, 2, 7, 7]];

/// The samples of each rank's batches. No two ranks share a sample.
fn samples(rank: usize) -> Vec<Range<usize>> {
    let mut next = 1000 * rank;
    let mut take = |size: &usize| {
        next += size;
        next - size..next
    };
    BATCHES[rank].iter().map(&mut take).collect()
}

struct Outcome {
    steps: usize,
    counts: Vec<usize>,
    digest: String,
    weights: Vec<f32>,
}

fn outcome(trainer: &mut Trainer, counts: Vec<usize>) -> Outcome {
    let digest = trainer.digest();
    Outcome { steps: counts.len(), counts, digest, weights: trainer.weights() }
}

/// Trains until all ranks are out of data, `micro_batches` at a time.
fn train(net: Net, make: Make, micro_batches: usize) -> Vec<Outcome> {
    on_ranks(BATCHES.len(), |group| {
        let mut own = samples(group.rank()).into_iter();
        let mut trainer = Trainer::new(net, group, make());
        let allocator = trainer.replica.compute.allocator.clone();
        let (inputs, targets) = net.batch(&allocator, 0..0);
        let join = Join::new(Batch::new(inputs, targets));
        let mut counts = Vec::new();
        loop {
            trainer.track.clear();
            let mut shares = Vec::new();
            for _ in 0..micro_batches {
                let own = own.next().map(|samples| net.batch(&allocator, samples));
                let own = own.map(|(inputs, targets)| Batch::new(inputs, targets));
                let paceline_strategies::Trainer { replica, track, .. } = &mut *trainer;
                shares.extend(join.next(replica, own, track).unwrap());
            }
            if shares.is_empty() {
                break;
            }
            counts.push(trainer.step_on(&shares).unwrap().count);
        }
        trainer.sync_replicas();
        outcome(&mut trainer, counts)
    })
}

/// The same on one process, which has the samples of all ranks in each step.
fn alone(net: Net, micro_batches: usize) -> Outcome {
    let mut trainer = Trainer::new(net, Group::single().unwrap(), Box::new(Single));
    let allocator = trainer.replica.compute.allocator.clone();
    let all: Vec<Vec<Range<usize>>> = (0..BATCHES.len()).map(samples).collect();
    let num_steps = all.iter().map(Vec::len).max().unwrap();
    let mut counts = Vec::new();
    for step in (0..num_steps).step_by(micro_batches) {
        let present: Vec<&Range<usize>> = (step..step + micro_batches)
            .flat_map(|at| all.iter().filter_map(move |r| r.get(at)))
            .collect();
        let global_count = present.iter().map(|samples| samples.len()).sum();
        // One micro-batch for each rank and batch. Together they count as one batch.
        let share = |(at, samples): (usize, &&Range<usize>)| {
            let (inputs, targets) = net.batch(&allocator, (*samples).clone());
            let global_count = if at == 0 { global_count } else { 0 };
            MicroBatch { batch: Batch::new(inputs, targets), global_count }
        };
        let shares: Vec<MicroBatch> = present.iter().enumerate().map(share).collect();
        trainer.track.clear();
        counts.push(trainer.step_on(&shares).unwrap().count);
    }
    outcome(&mut trainer, counts)
}

#[test]
fn ranks_that_run_out_of_data_keep_the_others_company() {
    for net in NETS {
        for micro_batches in [1, 2] {
            let expected = alone(net, micro_batches);
            assert_eq!(expected.steps, 9usize.div_ceil(micro_batches));
            if micro_batches == 1 {
                assert_eq!(expected.counts, [10, 8, 10, 9, 12, 12, 5, 5, 1]);
            }
            let mut digests = Vec::new();
            for make in all_exact() {
                for (rank, outcome) in train(net, make, micro_batches).into_iter().enumerate() {
                    let what = format!("{net:?}, {micro_batches} at a time, rank {rank}");
                    assert_eq!(outcome.counts, expected.counts, "{what}");
                    let off = largest_difference(&outcome.weights, &expected.weights);
                    assert!(off < TOLERANCE, "{what}: off by {off:e}");
                    digests.push(outcome.digest);
                }
            }
            assert!(digests.iter().all(|digest| *digest == digests[0]), "{net:?}: {digests:?}");
        }
    }
}

#[test]
fn lossy_strategies_finish_on_every_rank() {
    // The last field tells whether all ranks end with the same bits.
    let cases: [(&str, Make, bool); 4] = [
        ("fp16", || Box::new(Ddp::new(1024).with_hook(HalfPrecision::fp16())), true),
        ("top_k", || Box::new(Ddp::new(1024).with_hook(TopK::new(0.1).unwrap())), true),
        ("local_sgd", || Box::new(LocalSgd::new(4).unwrap()), true),
        ("no_sync", || Box::new(NoSync), false),
    ];
    for (name, make, is_equal) in cases {
        for micro_batches in [1, 2] {
            let outcomes = train(Net::Mlp, make, micro_batches);
            for (rank, outcome) in outcomes.iter().enumerate() {
                assert_eq!(outcome.steps, 9usize.div_ceil(micro_batches), "{name}, rank {rank}");
                let is_finite = outcome.weights.iter().all(|weight| weight.is_finite());
                assert!(is_finite, "{name}, rank {rank}: {:?}", outcome.weights);
            }
            let all_equal = outcomes.iter().all(|outcome| outcome.digest == outcomes[0].digest);
            assert_eq!(all_equal, is_equal, "{name}, {micro_batches} at a time");
        }
    }
}
