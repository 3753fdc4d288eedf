//! Strategies that do not give the bits of `simple_ddp`: how close they come, and with which settings they do
//! give them.

use paceline_collectives::Group;
use paceline_strategies::{Ddp, LocalSgd, SimpleDdp, Strategy, SyncBlocks, TopK};

use crate::common::{INEXACT, Make, NETS, Net, Optim, Trainer, largest_difference, on_ranks};

/// Samples of each step, divided evenly over the ranks.
const BATCH: usize = 16;
/// Enough for both networks to learn the same few samples.
const LONG: usize = 100;
/// Few enough for rounding errors not to grow.
const SHORT: usize = 20;

/// The mean loss of the last ten steps, and rank 0's weights. If `settle` is set, all ranks must end with the
/// same weights.
fn train(
    net: Net,
    make: Make,
    optim: Optim,
    steps: usize,
    world_size: usize,
    settle: bool,
) -> (f64, Vec<f32>) {
    let outcomes = on_ranks(world_size, |group| {
        let mut trainer = Trainer::with_optimizer(net, group, make(), optim);
        let mut losses = Vec::new();
        for _ in 0..steps {
            // Every step uses the same few samples, so that training converges.
            trainer.next_sample = 0;
            losses.push(trainer.step(&[BATCH]).unwrap().loss);
        }
        trainer.sync_replicas();
        let loss = losses[steps - 10..].iter().sum::<f64>() / 10.0;
        (loss, trainer.replica.storage.digest().unwrap(), trainer.weights())
    });
    let is_equal = outcomes.iter().all(|(_, digest, _)| *digest == outcomes[0].1);
    assert_eq!(is_equal, settle, "{net:?}: whether all ranks hold the same weights");
    let (loss, _, weights) = outcomes.into_iter().next().unwrap();
    (loss, weights)
}

const SIMPLE: Make = || Box::new(SimpleDdp);

#[test]
fn lossy_strategies_converge_to_nearly_the_same_loss() {
    for net in NETS {
        for world_size in [2, 4] {
            let first = on_ranks(world_size, |group| {
                Trainer::new(net, group, SIMPLE()).step(&[BATCH]).unwrap().loss
            })[0];
            let (exact, _) = train(net, SIMPLE, Optim::Plain, LONG, world_size, true);
            assert!(exact < 0.1 * first, "{net:?}: {exact} after {first} is not much learned");
            for (make, part) in INEXACT.iter().filter_map(|of| Some((of.make, of.excess?))) {
                let (loss, _) = train(net, make, Optim::Plain, LONG, world_size, true);
                let (limit, name) = (exact + part * (first - exact), make().name());
                assert!(loss < limit, "{net:?}, {world_size} ranks, {name}: {loss}, not {exact}");
            }
        }
    }
}

#[test]
fn local_sgd_with_an_average_after_each_step_is_data_parallelism() {
    let local: Make = || Box::new(LocalSgd::new(1).unwrap());
    for net in NETS {
        for world_size in [2, 4] {
            let (_, exact) = train(net, SIMPLE, Optim::Plain, SHORT, world_size, true);
            let (_, averaged) = train(net, local, Optim::Plain, SHORT, world_size, true);
            let off = largest_difference(&exact, &averaged);
            // The mean of parameters is rounded in a different place than the mean of gradients: 20 steps of
            // half a unit in the last place of weights below one, 6e-8, give 1e-6, and each error also
            // affects later gradients.
            assert!(off < 5e-6, "{net:?} on {world_size} ranks: off by {off:e}");
        }
    }
}

#[test]
fn top_k_of_everything_keeps_the_sign_of_zero() {
    let exact: Make = || Box::new(Ddp::new(1024));
    let everything: Make = || Box::new(Ddp::new(1024).with_hook(TopK::new(1.0).unwrap()));
    for make in [exact, everything] {
        let bits = on_ranks(2, |group| {
            let mut trainer = Trainer::new(Net::Mlp, group, make());
            let (strategy, mut cx, _) = trainer.parts();
            let replica = cx.replica;
            // The second step adds to the gradients in the residual of the first step.
            let mut step = || {
                replica.storage.grads().tensor().write::<f32>().unwrap().fill(-0.0);
                strategy.begin_gradients(&mut cx).unwrap();
                for (id, _) in replica.model.layout.trained().rev() {
                    strategy.gradient_ready(&mut cx, id).unwrap();
                }
                strategy.finish_gradients(&mut cx).unwrap();
                let grads = replica.storage.grads().tensor().read::<f32>().unwrap();
                grads.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
            };
            [step(), step()].concat()
        });
        assert!(bits.iter().flatten().all(|bits| *bits == (-0.0f32).to_bits()));
    }
}

#[test]
fn the_residuals_are_the_state_of_top_k() {
    let state = |strategy: Box<dyn Strategy>| {
        let mut trainer = Trainer::new(Net::Mlp, Group::single().unwrap(), strategy);
        trainer.step(&[4]).unwrap();
        trainer.strategy.state()
    };
    assert!(state(Box::new(Ddp::new(1024))).is_empty());
    let state = state(Box::new(Ddp::new(1024).with_hook(TopK::new(0.1).unwrap())));
    let trained = Net::Mlp.build(1).layout.trained_len();
    assert_eq!(state.iter().map(|(_, tensor)| tensor.num_elems()).sum::<usize>(), trained);
    assert_eq!(state[0].0, "residual 0");
    // Nine of ten gradients have not been sent.
    let waits = state.iter().flat_map(|(_, tensor)| tensor.read::<f32>().unwrap().to_vec());
    assert!(waits.filter(|x| *x != 0.0).count() > trained / 2);
}

#[test]
fn settings_that_make_no_sense_are_refused() {
    let error = SyncBlocks::new(0).unwrap_err().to_string();
    assert!(error.contains("at least 1 step, not 0"), "{error}");
    assert!(LocalSgd::new(0).unwrap_err().to_string().contains("at least 1, not 0"));
    for k in [0.0, -0.5, 1.5, f64::NAN] {
        let error = TopK::new(k).unwrap_err().to_string();
        assert!(error.contains(&format!("above 0 and up to 1, not {k}")), "{error}");
    }
}
