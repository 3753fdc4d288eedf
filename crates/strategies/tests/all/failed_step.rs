//! After a step that has failed on all ranks, the next one starts clean.

use paceline_memory::Allocator;
use paceline_model::Batch;
use paceline_strategies::{
    MicroBatch, ReplicaOptions, ShardAccumulation, ShardOptions, Sharded, Zero, ZeroStage,
};

use crate::common::{EXACT, Make, Net, Optim, Trainer, WHOLE, on_ranks};

/// Trains for three steps of two micro-batches each. If `fails`, a step before the last two has no loss for its second micro-batch:
/// the gradients of the first one have been announced, and are on their way.
fn train(make: Make, options: ReplicaOptions, fails: bool) -> Vec<String> {
    on_ranks(2, |group| {
        let model = Net::Mlp.build(2);
        let ranks = (&Allocator::new(), group.into());
        let mut trainer =
            Trainer::with_options(ranks, model, Net::Mlp, make(), Optim::Momentum, options)
                .unwrap();
        trainer.step(&[4, 6]).unwrap();
        if fails {
            let next = trainer.next_sample;
            let mut shares = trainer.shares(&[4, 6]);
            trainer.next_sample = next;
            let memory = &trainer.replica.compute.allocator;
            let inputs = shares[1].batch.inputs().clone();
            let batch = Batch::new(inputs, Net::Mlp.batch(memory, 0..1).1);
            shares[1] = MicroBatch { batch, ..shares[1] };
            trainer.step_on(&shares).unwrap_err();
        }
        for _ in 0..2 {
            trainer.step(&[4, 6]).unwrap();
        }
        trainer.digest()
    })
}

#[test]
fn a_step_after_a_failed_one_has_the_bits_of_a_step_without_it() {
    const SHARDS: ShardOptions = ShardOptions { accumulation: ShardAccumulation::Shards, ..WHOLE };
    let sharded: [Make; 4] = [
        || Box::new(Zero::new(ZeroStage::Two, SHARDS)),
        || Box::new(Zero::new(ZeroStage::Three, SHARDS)),
        || Box::new(Sharded::new(ZeroStage::Two, SHARDS)),
        || Box::new(Sharded::new(ZeroStage::Three, SHARDS)),
    ];
    let each = ReplicaOptions { no_sync: false, ..ReplicaOptions::DEFAULT };
    let all = EXACT.map(|make| (make, each)).into_iter();
    for (make, options) in all.chain(sharded.map(|make| (make, ReplicaOptions::DEFAULT))) {
        let expected = train(make, options, false);
        assert_eq!(train(make, options, true), expected, "{}", make().name());
    }
}
