//! Units are open only while they are used: strategies that free each unit after each use end with the same bits. Builds
//! with debug assertions fill freed memory with not-a-number, so a layer that kept a parameter would show.

use paceline_model::Block;
use paceline_strategies::{Ddp, ShardOptions, Sharded, Strategy, Zero, ZeroStage};

use crate::common::{Net, Optim, Trainer, on_ranks};

const ALL: [Net; 5] = [Net::Cnn, Net::BatchNormCnn, Net::Mlp, Net::FrozenCnn, Net::TiedMlp];

fn digests(
    net: Net,
    make: impl Fn() -> Box<dyn Strategy> + Sync,
    is_checkpointed: bool,
) -> Vec<String> {
    on_ranks(2, |group| {
        let mut model = net.build(group.world_size());
        if is_checkpointed {
            model.blocks = model.blocks.drain(..).map(Block::checkpointed).collect();
        }
        let mut trainer = Trainer::with_model(model, net, group, make(), Optim::Momentum);
        for _ in 0..5 {
            trainer.step(&[9]).unwrap();
        }
        trainer.digest()
    })
}

#[test]
fn no_layer_keeps_a_parameter() {
    for net in ALL {
        let expected = digests(net, || Box::new(Ddp::new(64 << 20)), false);
        // With activation checkpointing, layers run forward within the backward pass.
        for is_checkpointed in [false, true] {
            let zero3 = digests(
                net,
                || Box::new(Zero::new(ZeroStage::Three, ShardOptions::default())),
                is_checkpointed,
            );
            assert_eq!(zero3, expected, "zero3, {net:?}");
            let sharded3 = digests(
                net,
                || Box::new(Sharded::new(ZeroStage::Three, ShardOptions::default())),
                is_checkpointed,
            );
            assert_eq!(sharded3, expected, "sharded3, {net:?}");
        }
    }
}
