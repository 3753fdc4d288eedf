//! Training on the emulated accelerator ends with the bits of the processor, in whatever order its work runs.

use crate::common::{EXACT, Make, Net, Optim, SHARDED, Trainer, all_exact, on_ranks};
use paceline_memory::{Accelerator, Allocator, SimSpec};
use paceline_strategies::{ShardOptions, Zero, ZeroStage};

/// Memory in which a rank trains: of the host, or of a device.
type Memory = fn() -> Allocator;

const STEPS: usize = 3;

fn on_sim(spec: SimSpec) -> Allocator {
    Allocator::on(&Accelerator::sim(spec).stream("compute").unwrap())
}

/// Two micro-batches. The second one has fewer samples.
const TWO: &[usize] = &[8, 5];

/// The digest after a few steps of two micro-batches. It is the same on all ranks.
fn digest(
    net: Net,
    make: Make,
    world_size: usize,
    memory: impl Fn() -> Allocator + Sync,
) -> String {
    digest_of(net, make, world_size, TWO, memory)
}

fn digest_of(
    net: Net,
    make: Make,
    world_size: usize,
    micro_batches: &[usize],
    memory: impl Fn() -> Allocator + Sync,
) -> String {
    let digests = on_ranks(world_size, |group| {
        let model = net.build(world_size);
        let (memory, strategy) = (memory(), make());
        let mesh = group.into();
        let mut trainer = Trainer::in_memory(&memory, model, net, mesh, strategy, Optim::Momentum);
        for _ in 0..STEPS {
            trainer.step(micro_batches).unwrap();
        }
        trainer.digest()
    });
    assert!(digests.iter().all(|digest| *digest == digests[0]), "{net:?}: {digests:?}");
    digests.into_iter().next().unwrap()
}

const CPU: Memory = Allocator::new;
const TIMED: Memory = || {
    let launch = std::time::Duration::ZERO;
    on_sim(SimSpec { launch, ..SimSpec::DEFAULT })
};

#[test]
fn every_exact_strategy_has_the_bits_of_the_processor() {
    for net in [Net::Mlp, Net::Cnn, Net::TiedLlama] {
        let expected = digest(net, EXACT[0], 2, CPU);
        for make in all_exact() {
            let name = make().name();
            assert_eq!(digest(net, make, 2, TIMED), expected, "{net:?} with {name}, timed");
            assert_eq!(
                digest(net, make, 2, || on_sim(SimSpec::late(7))),
                expected,
                "{net:?} with {name}, late"
            );
        }
    }
}

#[test]
fn special_networks_have_the_bits_of_the_processor() {
    let nets = [Net::BatchNormCnn, Net::FrozenCnn, Net::LlamaClassifier, Net::TiedLlamaBf16];
    for net in nets {
        // The statistics of a batch norm are those of the share.
        let (make, sharded) = (EXACT[6], SHARDED[5]);
        for make in [make, sharded] {
            let expected = digest(net, make, 2, CPU);
            for seed in 0..3 {
                let found = digest(net, make, 2, || on_sim(SimSpec::late(seed)));
                assert_eq!(found, expected, "{net:?} with {}, seed {seed}", make().name());
            }
        }
    }
}

#[test]
fn memory_that_takes_the_gradients_of_another_unit_waits_for_the_copy_of_the_first_ones() {
    let make: Make = || Box::new(Zero::new(ZeroStage::Two, ShardOptions::default()));
    let expected = digest_of(Net::Cnn, make, 2, &[9], CPU);
    for seed in 0..3 {
        let late = || on_sim(SimSpec::late(seed));
        assert_eq!(digest_of(Net::Cnn, make, 2, &[9], late), expected, "seed {seed}");
    }
}

#[test]
fn many_orders_of_the_late_mode_have_one_digest() {
    for make in [EXACT[6], SHARDED[5]] {
        let expected = digest(Net::Mlp, make, 4, CPU);
        for seed in 0..10 {
            let found = digest(Net::Mlp, make, 4, || on_sim(SimSpec::late(seed)));
            assert_eq!(found, expected, "{} with seed {seed}", make().name());
        }
    }
}
