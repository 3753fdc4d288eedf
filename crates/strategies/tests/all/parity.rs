//! Every strategy ends with the weights of one process that trains on the whole batch, and all of them
//! with the same bits on all ranks.
//!
//! Ranks are threads here. The end-to-end tests of the binary cover processes.

use paceline_collectives::Group;
use paceline_memory::Allocator;
use paceline_strategies::{Ddp, ReplicaOptions, Single, StepLoss, span, train_step};

use crate::common::{
    EXACT, Make, NETS, Net, Optim, SPECIAL_NETS, SumThenDivide, Trainer, all_exact,
    largest_difference, on_ranks,
};

/// Weights after twenty steps may differ by this much from those of one process, which sums over the batch in
/// a different order: 20 steps, each with an f32 rounding error of 6e-8 in gradients of about one, times a
/// learning rate of 0.05 and a momentum that repeats the error ten times, give 6e-7. Leaving out one sample
/// of a batch changes weights by more than 1e-3.
const TOLERANCE: f64 = 1e-6;

/// The same for language models: their gradients pass through norms and a softmax, each of which divides by numbers with
/// rounding errors of their own, and weights of norms are about one. Measured: 1.2e-6.
const TOLERANCE_OF_LLAMAS: f64 = 2e-5;

/// The same in bf16: where f32 differs by a rounding, bf16 may differ by one of its own, which are 2^16 times as large.
/// Measured: 2e-4.
const TOLERANCE_OF_BF16: f64 = 2e-3;

/// Samples of each batch: most do not divide evenly over four ranks (3, 3, 2, 2), and batches of three leave
/// the last of four ranks without samples.
const STEPS: [usize; 20] =
    [10, 10, 10, 10, 3, 10, 10, 10, 10, 3, 10, 10, 10, 10, 3, 10, 10, 10, 8, 3];

const SINGLE: Make = || Box::new(Single);

/// The state of one rank at the end of training.
struct Outcome {
    digest: String,
    weights: Vec<f32>,
    losses: Vec<StepLoss>,
}

/// Trains on every rank, checks that all ranks have the same outcome, and returns rank 0's.
fn train(net: Net, make: Make, world_size: usize, steps: &[Vec<usize>]) -> Outcome {
    let outcomes = on_ranks(world_size, |group| {
        let mut trainer = Trainer::new(net, group, make());
        let losses = steps.iter().map(|step| trainer.step(step).unwrap()).collect();
        let digest = trainer.digest();
        Outcome { digest, weights: trainer.weights(), losses }
    });
    for (rank, outcome) in outcomes.iter().enumerate() {
        assert_eq!(outcome.digest, outcomes[0].digest, "{net:?}: rank {rank} of {world_size}");
        let agreed = |loss: &StepLoss| StepLoss { local_sum: 0.0, own_tokens: 0, ..*loss };
        let ours = outcome.losses.iter().map(agreed);
        assert!(ours.eq(outcomes[0].losses.iter().map(agreed)), "{net:?}: rank {rank}");
    }
    for (at, loss) in outcomes[0].losses.iter().enumerate() {
        // Summed as in the group, so the bits are the same.
        let sums: Vec<f64> = outcomes.iter().map(|outcome| outcome.losses[at].local_sum).collect();
        let sum = tree_sum(&sums);
        assert_eq!(sum / loss.count as f64, loss.loss, "{net:?}: step {at}");
    }
    outcomes.into_iter().next().unwrap()
}

/// Trains with every strategy, and checks that all end with the same bits, close to the weights of one process.
fn train_all(net: Net, world_size: usize, steps: &[Vec<usize>], single: &Outcome) {
    let outcomes: Vec<Outcome> =
        all_exact().map(|make| train(net, make, world_size, steps)).collect();
    let tolerance = match net {
        Net::Llama | Net::TiedLlama | Net::LlamaClassifier | Net::RaggedLlama => {
            TOLERANCE_OF_LLAMAS
        }
        Net::TiedLlamaBf16 | Net::LlamaClassifierBf16 => TOLERANCE_OF_BF16,
        _ => TOLERANCE,
    };
    for outcome in &outcomes {
        let off = largest_difference(&outcome.weights, &single.weights);
        assert!(off < tolerance, "{net:?} on {world_size} ranks: off by {off:e}");
        assert_eq!(outcome.digest, outcomes[0].digest, "{net:?} on {world_size} ranks");
    }
}

/// The sum as a balanced tree, whose left half has the largest power of two below the number of values.
fn tree_sum(values: &[f64]) -> f64 {
    match values {
        [only] => *only,
        _ => {
            let (left, right) = values.split_at(values.len().next_power_of_two() / 2);
            tree_sum(left) + tree_sum(right)
        }
    }
}

fn whole_batches() -> Vec<Vec<usize>> {
    STEPS.iter().map(|&count| vec![count]).collect()
}

/// Each batch in four parts. Some ranks have no sample of the last part. Small batches have fewer parts.
fn split_batches() -> Vec<Vec<usize>> {
    let split = |&count: &usize| if count > 3 { vec![3, 2, 3, count - 8] } else { vec![2, 1] };
    let parts = |count| split(count).into_iter().filter(|part| *part > 0).collect();
    STEPS.iter().map(parts).collect()
}

#[test]
fn all_strategies_end_with_the_weights_of_one_process() {
    for net in NETS {
        let single = train(net, SINGLE, 1, &whole_batches());
        let untrained = Trainer::new(net, Group::single().unwrap(), SINGLE()).weights();
        assert!(largest_difference(&single.weights, &untrained) > 0.01, "nothing was learned");
        for world_size in [2, 3, 4] {
            train_all(net, world_size, &whole_batches(), &single);
        }
    }
}

#[test]
fn losses_are_those_of_one_process() {
    for net in NETS {
        let single = train(net, SINGLE, 1, &whole_batches());
        for make in EXACT {
            let shared = train(net, make, 4, &whole_batches());
            for (at, (ours, theirs)) in shared.losses.iter().zip(&single.losses).enumerate() {
                // The weights differ by at most the tolerance, so the loss, which is about two, does too.
                let off = (ours.loss - theirs.loss).abs();
                assert!(off < TOLERANCE, "{net:?}, step {at}: off by {off:e}");
                assert_eq!((ours.count, ours.correct), (STEPS[at], theirs.correct), "step {at}");
            }
        }
    }
}

#[test]
fn accumulated_micro_batches_are_one_batch() {
    for net in NETS {
        let single = train(net, SINGLE, 1, &whole_batches());
        let split = train(net, SINGLE, 1, &split_batches());
        let off = largest_difference(&split.weights, &single.weights);
        assert!(off < TOLERANCE, "{net:?} in one process: off by {off:e}");
        for world_size in [2, 4] {
            train_all(net, world_size, &split_batches(), &single);
        }
    }
}

#[test]
fn frozen_units_and_tied_layers_train_as_in_one_process() {
    for net in SPECIAL_NETS {
        let single = train(net, SINGLE, 1, &whole_batches());
        train_all(net, 2, &whole_batches(), &single);
        train_all(net, 4, &split_batches(), &single);
    }
}

/// Of the gradients of some steps nothing becomes, so they may still travel when the next step begins.
#[test]
fn the_optimizer_works_bucket_by_bucket_with_the_same_bits() {
    const DDP: [Make; 4] = [
        || Box::new(Ddp::new(1024)),
        || Box::new(Ddp::new(64 << 20)),
        || Box::new(Ddp::new(1024).without_view()),
        || Box::new(Ddp::new(1024).with_hook(SumThenDivide)),
    ];
    let train = |net: Net, make: Make, steps_by_bucket: bool| {
        let options = ReplicaOptions { steps_by_bucket, ..Default::default() };
        let outcomes = on_ranks(3, |group| {
            let model = net.build(3);
            let ranks = (&Allocator::new(), group.into());
            let mut trainer =
                Trainer::with_options(ranks, model, net, make(), Optim::Momentum, options).unwrap();
            let mut num_updates = 0;
            for (at, step) in split_batches().iter().enumerate() {
                if at % 4 == 2 {
                    let shares = trainer.shares(step);
                    let (strategy, mut cx, _) = trainer.parts();
                    train_step(strategy, &mut cx, &shares).unwrap();
                    continue;
                }
                trainer.step(step).unwrap();
                num_updates = trainer.track.named(span::OPTIMIZER).count();
            }
            (trainer.digest(), num_updates)
        });
        assert!(outcomes.iter().all(|outcome| *outcome == outcomes[0]), "{net:?}");
        outcomes.into_iter().next().unwrap()
    };
    for net in NETS.into_iter().chain(SPECIAL_NETS) {
        for (at, make) in DDP.into_iter().enumerate() {
            let ((whole, one), (by_bucket, several)) =
                (train(net, make, false), train(net, make, true));
            assert_eq!(by_bucket, whole, "{net:?}, {at}");
            // One bucket of 64 MiB may hold all gradients.
            assert!(one == 1 && (several > 1 || at == 1), "{net:?}, {at}: {one}, {several}");
        }
    }
}

#[test]
fn frozen_units_stay_as_they_are() {
    on_ranks(2, |group| {
        let mut trainer = Trainer::new(Net::FrozenCnn, group, EXACT[0]());
        let before = trainer.weights();
        trainer.step(&[10]).unwrap();
        let after = trainer.weights();
        let mut start = 0;
        for param in trainer.replica.model.layout.params() {
            let range = start..start + param.range().len();
            start = range.end;
            let is_equal = before[range.clone()] == after[range];
            assert_eq!(is_equal, param.is_frozen, "{}", param.name);
        }
    });
}

/// Each rank pads to its own longest sequence, and the padding would be valid tokens. One process pads all to the longest
/// of the batch.
#[test]
fn targets_of_different_lengths_count_each_once() {
    for step in [vec![10], vec![4, 3]] {
        let steps = vec![step; 6];
        let single = train(Net::RaggedLlama, SINGLE, 1, &steps);
        let counts: Vec<usize> = single.losses.iter().map(|loss| loss.count).collect();
        // 15 tokens in seven samples.
        let first = if steps[0].len() == 1 { 15 + 1 + 2 + 1 } else { 15 };
        assert_eq!(counts[0], first);
        for world_size in [2, 3, 4] {
            train_all(Net::RaggedLlama, world_size, &steps, &single);
        }
    }
}
