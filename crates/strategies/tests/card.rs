//! Training on a card, which may be emulated: every exact strategy ends with the same bits, near those of the processor.
//!
//! Without a card each test says so and passes, unless `PACELINE_CARD=1`.

mod common;

use common::{EXACT, Make, Net, Optim, Trainer, all_exact, on_card, on_ranks};
use paceline_emulated_card::for_tests::is_ready;
use paceline_memory::Allocator;

const STEPS: usize = 2;

/// The digest after a few steps of two micro-batches, and the weights.
fn train(
    net: Net,
    make: Make,
    world_size: usize,
    memory: impl Fn() -> Allocator + Sync,
) -> (String, Vec<f32>) {
    let ranks = on_ranks(world_size, |group| {
        let model = net.build(world_size);
        let (memory, strategy) = (memory(), make());
        let mut trainer =
            Trainer::in_memory(&memory, model, net, group.into(), strategy, Optim::Momentum);
        for _ in 0..STEPS {
            trainer.step(&[8, 5]).unwrap();
        }
        (trainer.digest(), trainer.weights())
    });
    assert!(ranks.iter().all(|(digest, _)| *digest == ranks[0].0), "{net:?}");
    ranks.into_iter().next().unwrap()
}

fn every_exact_strategy_has_the_same_bits_near_those_of_the_processor(net: Net) {
    if !is_ready() {
        return;
    }
    let (_, of_cpu) = train(net, EXACT[0], 2, Allocator::new);
    let (expected, of_card) = train(net, EXACT[0], 2, on_card);
    let largest = of_cpu.iter().fold(0f32, |most, x| most.max(x.abs()));
    let furthest = of_cpu.iter().zip(&of_card).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
    println!("{net:?}: weights are off by {:.1e} of the largest", furthest / largest);
    assert!(furthest <= 1e-5 * largest, "{net:?}: {furthest} of {largest}");
    for make in all_exact() {
        assert_eq!(train(net, make, 2, on_card).0, expected, "{net:?} with {}", make().name());
    }
}

#[test]
fn every_exact_strategy_has_the_same_bits_for_an_mlp() {
    every_exact_strategy_has_the_same_bits_near_those_of_the_processor(Net::Mlp);
}

#[test]
fn every_exact_strategy_has_the_same_bits_for_a_cnn() {
    every_exact_strategy_has_the_same_bits_near_those_of_the_processor(Net::Cnn);
}

#[test]
fn every_exact_strategy_has_the_same_bits_for_a_language_model() {
    every_exact_strategy_has_the_same_bits_near_those_of_the_processor(Net::TiedLlama);
}
