//! How often strategies communicate, and what happens to a step whose peer has left.

use paceline_collectives::Group;
use paceline_kernels::Compute;
use paceline_memory::Allocator;
use paceline_model::ParamId;
use paceline_strategies::{
    Ddp, Replica, ReplicaOptions, Single, StepContext, StepState, Strategy, StrategyError,
};
use paceline_trace::SpanTrack;

use crate::common::{EXACT, NETS, Net, SPECIAL_NETS, Trainer, on_ranks};

#[test]
fn operations_per_step() {
    for net in NETS.into_iter().chain(SPECIAL_NETS) {
        let operations = EXACT.map(|make| {
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
        let params = net.build(2).layout.trained().count();
        // One more operation for the sums of the loss.
        let per_param = params + 1;
        assert_eq!(operations[..4], [per_param; 4], "{net:?}");
        let [small_copies, one_copy, small, one, no_view, flat, sparse, own] = operations[4..]
        else {
            panic!("{} strategies", operations.len())
        };
        assert_eq!([one_copy, one, flat], [2; 3], "{net:?}");
        assert_eq!([no_view, sparse, own], [small; 3], "{net:?}");
        assert!((3..=params).contains(&small), "{net:?}: {small}");
        // Copied buckets are sent before they exceed the cap, buckets in place after they reach it. So there
        // are fewer buckets in place.
        assert!((small..=per_param).contains(&small_copies), "{net:?}: {small_copies}");
    }
}

#[test]
fn a_peer_that_leaves_is_an_error_of_the_next_step() {
    for make in EXACT {
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
        let compute = Compute::new(1, Allocator::new()).unwrap();
        let (model, options) = (Net::Mlp.build(2), ReplicaOptions::default());
        let error = Replica::new(&mut Single, model, compute, group, 1, options).unwrap_err();
        assert_eq!(error.to_string(), "strategy single works with one rank only, not 2");
    });
}

#[test]
fn a_gradient_must_be_announced_exactly_once() {
    let compute = Compute::new(1, Allocator::new()).unwrap();
    let mut ddp = Ddp::new(1 << 20);
    let (model, options) = (Net::Mlp.build(1), ReplicaOptions::default());
    let replica =
        Replica::new(&mut ddp, model, compute, Group::single().unwrap(), 1, options).unwrap();
    let (mut state, mut track) = (StepState::new(&replica).unwrap(), SpanTrack::with_capacity(10));
    let cx = &mut StepContext { replica: &replica, state: &mut state, track: &mut track };
    ddp.begin_gradients(cx).unwrap();
    let last = ParamId(replica.model.layout.params().len() - 1);
    ddp.gradient_ready(cx, last).unwrap();
    let error = ddp.finish_gradients(cx).unwrap_err().to_string();
    assert!(error.contains("was announced never"), "{error}");
    let mut announce = || ddp.gradient_ready(cx, last).map_err(|e| e.to_string());
    let error = (0..100).find_map(|_| announce().err()).unwrap();
    assert!(error.contains("was announced more than once"), "{error}");
}
