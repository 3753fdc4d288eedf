//! Checks the guarantee that every strategy states about the weights of its replicas.

mod common;

use paceline_collectives::{Group, MeshShape};
use paceline_strategies::{
    Alternating, Ddp, Exactness, HalfPrecision, LocalSgd, NoSync, Replica, Result, SimpleDdp,
    Single, Strategy, TopK,
};
use paceline_trace::SpanTrack;

use common::{EXACT, Make, Net, Trainer, on_ranks};

/// Not a multiple of four, so that no average is due at the end with an average every four steps.
const STEPS: usize = 10;

/// The strategies that do not state that they are exact.
const OTHERS: [Make; 7] = [
    || Box::new(Ddp::new(1024).with_hook(HalfPrecision::fp16())),
    || Box::new(Ddp::new(1024).with_hook(HalfPrecision::bf16())),
    || Box::new(Ddp::new(1024).with_hook(TopK::new(0.1).unwrap())),
    || Box::new(LocalSgd::new(4).unwrap()),
    || Box::new(LocalSgd::new(4).unwrap().as_published()),
    || Box::new(NoSync),
    || Box::new(Alternating::new(Box::new(SimpleDdp), 2).unwrap()),
];

/// The digest of each of two ranks after training, and after [`Strategy::sync_replicas`].
fn train(make: Make) -> Vec<[String; 2]> {
    on_ranks(2, |group| {
        let mut trainer = Trainer::new(Net::Mlp, group, make());
        for _ in 0..STEPS {
            trainer.step(&[9]).unwrap();
        }
        let before = trainer.replica.storage.digest().unwrap();
        trainer.strategy.sync_replicas(&trainer.replica, &mut trainer.track).unwrap();
        [before, trainer.replica.storage.digest().unwrap()]
    })
}

#[test]
fn weights_are_as_each_strategy_states() {
    let published: Make = || Box::new(LocalSgd::new(1).unwrap().as_published());
    let exact = &train(EXACT[0])[0][0];
    for make in EXACT.into_iter().chain([published]).chain(OTHERS) {
        let (strategy, ends) = (make(), train(make));
        let stated = strategy.exactness(&MeshShape::replicas(2));
        let is_equal = ends[0][0] == ends[1][0];
        let is_settled = ends[0][1] == ends[1][1];
        let found = match (is_equal, is_settled) {
            (true, _) if ends[0][0] == *exact => Exactness::Exact,
            (true, _) => Exactness::Lossy(stated.words().into()),
            (false, true) => Exactness::Periodic(stated.words().into()),
            (false, false) => Exactness::Unsynchronized(stated.words().into()),
        };
        assert_eq!(found, stated, "{}", strategy.name());
        assert_eq!(is_equal, stated.keeps_replicas_equal(), "{}", strategy.name());
    }
    assert_eq!(Single.exactness(&MeshShape::replicas(1)), Exactness::Exact);
}

#[test]
fn words_name_all_that_the_weights_depend_on() {
    let mesh = MeshShape::replicas(2);
    let words = OTHERS.map(|make| make().exactness(&mesh).words().to_owned());
    assert_eq!(
        words,
        [
            "fp16",
            "bf16",
            "top_k, with a part of 0.1 in buckets of BucketCaps { first_bytes: 1024, bytes: 1024 }",
            "local_sgd, every 4 steps",
            "local_sgd as published, every 4 steps",
            "no_sync",
            "any of the exact ones, 2 steps with it and 2 without",
        ]
    );
}

/// A strategy that overrides the default methods.
struct Peculiar;

impl Strategy for Peculiar {
    fn name(&self) -> &'static str {
        "peculiar"
    }

    fn exactness(&self, _: &MeshShape) -> Exactness {
        Exactness::Lossy("peculiar".into())
    }

    fn shares_loss(&self) -> bool {
        false
    }

    fn finish_gradients(&mut self, _: &Replica, _: &mut SpanTrack) -> Result<()> {
        Ok(())
    }

    fn grad_norm(&mut self, _: &Replica) -> Result<f64> {
        Ok(42.0)
    }

    fn digest(&mut self, _: &Replica) -> Result<String> {
        Ok("digest".into())
    }
}

#[test]
fn blocks_of_steps_ask_the_strategy_inside_them() {
    let strategy = Box::new(Alternating::new(Box::new(Peculiar), 2).unwrap());
    let mut trainer = Trainer::new(Net::Mlp, Group::single().unwrap(), strategy);
    trainer.step(&[4]).unwrap();
    let (strategy, replica) = (&mut trainer.strategy, &trainer.replica);
    assert_eq!((strategy.name(), strategy.shares_loss()), ("peculiar", false));
    assert_eq!(strategy.grad_norm(replica).unwrap(), 42.0);
    assert_eq!(strategy.digest(replica).unwrap(), "digest");
}
