//! How often strategies communicate, and what becomes of a step whose peer has left.

mod common;

use paceline_collectives::ReduceOp;
use paceline_kernels::Compute;
use paceline_memory::Allocator;
use paceline_model::ParamId;
use paceline_strategies::{Replica, Result, Single, Strategy, StrategyError};
use paceline_trace::Lane;

use common::{Make, NETS, Net, STRATEGIES, Trainer, on_ranks};

#[test]
fn operations_per_step() {
    for net in NETS {
        let operations = STRATEGIES.map(|make| {
            let counts = on_ranks(2, |group| {
                let mut trainer = Trainer::new(net, group, make());
                let mut records = Vec::new();
                trainer.replica.group.drain_records(&mut records);
                records.clear();
                trainer.step(&[4, 3]).unwrap();
                trainer.replica.group.drain_records(&mut records);
                records.len()
            });
            assert_eq!(counts[0], counts[1]);
            counts[0]
        });
        let params = net.build(2).layout.params().len();
        let [simple, small_buckets, one_bucket] = operations;
        // Each with one more for the sums of the loss.
        assert_eq!((simple, one_bucket), (params + 1, 2), "{net:?}");
        assert!((3..=params).contains(&small_buckets), "{net:?}: {small_buckets}");
    }
}

/// Reduces inside the hook itself, so that a failure passes through the model's backward pass.
struct ReduceInHook;

impl Strategy for ReduceInHook {
    fn name(&self) -> &'static str {
        "reduce_in_hook"
    }

    fn prepare(&mut self, _: &Replica) -> Result<()> {
        Ok(())
    }

    fn gradient_ready(&mut self, replica: &Replica, _: &mut Lane, id: ParamId) -> Result<()> {
        replica.group.all_reduce(&replica.storage.grad(id)?, ReduceOp::Mean)?;
        Ok(())
    }

    fn finish(&mut self, _: &Replica, _: &mut Lane) -> Result<()> {
        Ok(())
    }
}

#[test]
fn a_peer_that_leaves_is_an_error_of_the_next_step() {
    let reduce_in_hook: Make = || Box::new(ReduceInHook);
    for make in STRATEGIES.into_iter().chain([reduce_in_hook]) {
        on_ranks(3, |group| {
            let rank = group.rank();
            let mut trainer = Trainer::new(Net::Cnn, group, make());
            trainer.step(&[10]).unwrap();
            if rank == 1 {
                return;
            }
            let error = trainer.step(&[10]).unwrap_err();
            let StrategyError::Collective(cause) = &error else { panic!("{error:?}") };
            assert!(cause.is_consequence(), "{error}");
            assert!(error.to_string().contains("rank 1 left the group"), "{error}");
        });
    }
}

#[test]
fn one_rank_strategies_refuse_more() {
    on_ranks(2, |group| {
        let replica =
            Replica::new(Net::Mlp.build(2), Compute::new(1, Allocator::new()), group, 1).unwrap();
        let error = Single.prepare(&replica).unwrap_err();
        assert_eq!(error.to_string(), "strategy single works with one rank only, not 2");
    });
}
