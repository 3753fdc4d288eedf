//! How often strategies communicate, and what becomes of a step whose peer has left.

mod common;

use paceline_collectives::{Group, ReduceOp};
use paceline_kernels::Compute;
use paceline_memory::Allocator;
use paceline_model::ParamId;
use paceline_strategies::{Ddp, Replica, Result, Single, Strategy, StrategyError};
use paceline_trace::Lane;

use common::{Make, NETS, Net, STRATEGIES, Trainer, on_ranks};

#[test]
fn operations_per_step() {
    for net in NETS {
        let operations = STRATEGIES.map(|make| {
            let counts = on_ranks(2, |group| {
                let mut trainer = Trainer::new(net, group, make());
                let mut records = Vec::new();
                trainer.replica.group.fresh_records(&mut records);
                records.clear();
                trainer.step(&[4, 3]).unwrap();
                trainer.replica.group.fresh_records(&mut records);
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
        let compute = Compute::new(1, Allocator::new());
        let error = Replica::new(&mut Single, Net::Mlp.build(2), compute, group, 1).unwrap_err();
        assert_eq!(error.to_string(), "strategy single works with one rank only, not 2");
    });
}

#[test]
fn a_gradient_must_be_announced_exactly_once() {
    let compute = Compute::new(1, Allocator::new());
    let mut ddp = Ddp::new(1 << 20);
    let replica = Replica::new(&mut ddp, Net::Mlp.build(1), compute, Group::single(), 1).unwrap();
    let mut lane = Lane::with_capacity(10);
    let last = ParamId(replica.model.layout.params().len() - 1);
    ddp.gradient_ready(&replica, &mut lane, last).unwrap();
    let error = ddp.finish(&replica, &mut lane).unwrap_err().to_string();
    assert!(error.contains("was announced never"), "{error}");
    let mut announce = || ddp.gradient_ready(&replica, &mut lane, last).map_err(|e| e.to_string());
    let error = (0..100).find_map(|_| announce().err()).unwrap();
    assert!(error.contains("was announced more than once"), "{error}");
}
