//! Steps that a card, which may be emulated, launches as graphs: they have the bits of the same steps without graphs.
//!
//! Without a card each test says so and passes, unless `PACELINE_CARD=1`.

mod common;

use std::sync::{Mutex, MutexGuard, Once, PoisonError};

use common::{Make, Net, Optim, SHARDED, Trainer, on_card, on_ranks};
use paceline_collectives::{Group, NcclOrder};
use paceline_cuda::Card;
use paceline_emulated_card::for_tests::{is_ready, launches};
use paceline_kernels::optimizer::AdamW;
use paceline_memory::{Accelerator, Allocator, Category, DType, Tensor};
use paceline_model::OptimizerConfig;
use paceline_strategies::{
    AccumulationOrder, Ddp, HalfPrecision, LocalSgd, Replica, ReplicaOptions, Result, ShardOptions,
    SimpleDdp, SimpleDdpHook, Single, SyncBlocks, TopK, Zero, ZeroStage, clip_factor,
};

const GRAPHS: ReplicaOptions = ReplicaOptions { as_graph: true, ..ReplicaOptions::DEFAULT };

#[allow(clippy::result_large_err, reason = "what it returns is the strategy's own error")]
fn trainer(net: Net, group: Group, make: Make, options: ReplicaOptions) -> Result<Trainer> {
    let model = net.build(group.world_size());
    let ranks = (&on_card(), group.into());
    Trainer::with_options(ranks, model, net, make(), Optim::Momentum, options)
}

/// The steps of a run, each third one with fewer micro-batches.
const STEPS: usize = 18;

/// The samples of the micro-batches of a step: two kinds of steps, each often enough that its graph is launched again.
fn micro_batches(step: usize) -> &'static [usize] {
    if step % 3 == 2 { &[2] } else { &[2, 3] }
}

/// Tests of this file take turns, because the card counts for the whole process.
fn alone() -> Option<MutexGuard<'static, ()>> {
    static ALONE: Mutex<()> = Mutex::new(());
    static CARDS: Once = Once::new();
    // SAFETY: the first test to come sets it, and no other thread of this program reads the environment by then but through the
    // standard library, which locks it.
    CARDS.call_once(|| unsafe { std::env::set_var("PACELINE_EMULATED_CARDS", "2") });
    is_ready().then(|| ALONE.lock().unwrap_or_else(PoisonError::into_inner))
}

/// The end of a run: the digest, and the bits of all losses.
type Ending = (String, Vec<u64>);

/// Trains with AdamW, whose learning rate and corrections change from step to step, and a scale of the loss that changes too.
fn train(net: Net, make: Make, world_size: usize, options: ReplicaOptions) -> Ending {
    train_in_blocks(net, make, world_size, options, None)
}

fn train_in_blocks(
    net: Net,
    make: Make,
    world_size: usize,
    options: ReplicaOptions,
    blocks: Option<SyncBlocks>,
) -> Ending {
    let ranks = on_ranks(world_size, |group| {
        let mut trainer = trainer(net, group, make, options).unwrap();
        trainer.blocks = blocks;
        let adamw = AdamW { lr: 0.0, beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1 };
        let replica = &trainer.replica;
        let optimizer = replica.optimizer(OptimizerConfig::AdamW(adamw)).unwrap();
        trainer.optimizer = optimizer.decaying_matrices_only(replica.storage.layout());
        let memory = trainer.replica.compute.allocator.clone();
        let (mut losses, mut other) = (Vec::new(), None::<Tensor>);
        for at in 0..STEPS {
            let scale = if at < 10 { 8.0 } else { 2.0 };
            trainer.state.loss_scale = scale;
            trainer.optimizer.set_lr(0.05 / (1.0 + at as f64));
            trainer.optimizer.set_grad_factor(1.0 / scale);
            losses.push(trainer.step(micro_batches(at)).unwrap().loss.to_bits());
            // Other work between two steps takes memory and writes to it, and no step changes it.
            if let Some(other) = other {
                assert!(other.to_host().unwrap().read::<f32>().unwrap().iter().all(|x| x.is_nan()));
            }
            let new = memory.tensor(DType::F32, [5000], Category::Workspace).unwrap();
            new.fill_bytes(0xff).unwrap();
            other = Some(new);
        }
        (trainer.digest(), losses)
    });
    ranks.into_iter().next().unwrap()
}

#[test]
fn steps_as_graphs_have_the_bits_of_steps_without() {
    let Some(_alone) = alone() else { return };
    let single: Make = || Box::new(Single);
    for net in [Net::Mlp, Net::FrozenCnn, Net::BatchNormCnn, Net::TiedLlamaBf16] {
        let expected = train(net, single, 1, ReplicaOptions::DEFAULT);
        assert_eq!(train(net, single, 1, GRAPHS), expected, "{net:?}");
    }
}

#[test]
fn what_ranks_send_comes_between_their_graphs() {
    let Some(_alone) = alone() else { return };
    let of_replicas: [Make; 6] = [
        || Box::new(SimpleDdp),
        || Box::new(SimpleDdpHook::default()),
        || Box::new(Ddp::new(1024)),
        || Box::new(Ddp::new(1024).without_view().with_hook(TopK::new(0.5).unwrap())),
        || Box::new(Ddp::new(1024).with_hook(HalfPrecision::bf16())),
        || Box::new(Zero::new(ZeroStage::One, ShardOptions::default())),
    ];
    for make in of_replicas {
        let expected = train(Net::Mlp, make, 2, ReplicaOptions::DEFAULT);
        assert_eq!(train(Net::Mlp, make, 2, GRAPHS), expected, "{}", make().name());
    }
    let local: Make = || Box::new(LocalSgd::new(2).unwrap());
    let in_blocks = |options| train_in_blocks(Net::Mlp, local, 2, options, SyncBlocks::new(2).ok());
    assert_eq!(in_blocks(GRAPHS), in_blocks(ReplicaOptions::DEFAULT));
    let ddp: Make = || Box::new(Ddp::new(1024));
    for net in [Net::Cnn, Net::TiedLlama] {
        let expected = train(net, ddp, 2, ReplicaOptions::DEFAULT);
        assert_eq!(train(net, ddp, 2, GRAPHS), expected, "{net:?}");
    }
}

/// Trains with each rank on a card of its own, with NCCL. Returns the ending, how often the ranks together put something into a stream
/// in the last step, and how many operations each of them called.
fn train_by_nccl(net: Net, make: Make, options: ReplicaOptions) -> (Ending, Option<u64>, usize) {
    let ranks = on_ranks(2, |group| {
        let accelerator = Accelerator::cuda(Card::open(group.rank()).unwrap());
        let memory = Allocator::on(&accelerator.stream("compute").unwrap());
        group.use_nccl(&memory, NcclOrder::Tree).unwrap();
        let model = net.build(group.world_size());
        let ranks = (&memory, group.clone().into());
        let made = Trainer::with_options(ranks, model, net, make(), Optim::Momentum, options);
        let mut trainer = made.unwrap();
        let mut losses = Vec::new();
        let (mut last, mut records) = (None, Vec::new());
        for at in 0..STEPS {
            group.barrier().unwrap();
            records.clear();
            group.fresh_records(&mut records);
            records.clear();
            let before = launches();
            losses.push(trainer.step(micro_batches(at)).unwrap().loss.to_bits());
            group.barrier().unwrap();
            group.fresh_records(&mut records);
            last = launches().zip(before).map(|(after, before)| after - before);
        }
        ((trainer.digest(), losses), last, records.len() - 1)
    });
    assert_eq!(ranks[0].0, ranks[1].0);
    ranks.into_iter().next().unwrap()
}

#[test]
fn a_graph_has_what_ranks_send_by_nccl() {
    let Some(_alone) = alone() else { return };
    if paceline_cuda::driver::count().unwrap() < 2 {
        return println!("skipped: two ranks need two cards");
    }
    let strategies: [Make; 3] = [
        || Box::new(Ddp::new(1024)),
        || Box::new(Ddp::new(1024).without_view()),
        || Box::new(Ddp::new(1024).with_hook(HalfPrecision::bf16())),
    ];
    let nets = [(Net::Cnn, 0), (Net::TiedLlama, 0), (Net::Mlp, 1), (Net::Mlp, 2)];
    for (net, make) in nets.map(|(net, at)| (net, strategies[at])) {
        let (expected, of_each, calls_of_each) = train_by_nccl(net, make, ReplicaOptions::DEFAULT);
        let (found, launches, calls) = train_by_nccl(net, make, GRAPHS);
        println!(
            "{net:?}: {of_each:?} launches and {calls_of_each} calls, then {launches:?} and {calls}"
        );
        assert_eq!(found, expected, "{net:?} with {}", make().name());
        // On each of two ranks the passes with their communication, and the optimizer; and one call before the launch.
        if let Some(launches) = launches {
            assert_eq!((launches, calls), (4, 1), "{net:?}");
        }
    }
}

#[test]
fn a_step_is_two_launches_once_it_is_a_graph() {
    let Some(_alone) = alone() else { return };
    let mut group = Group::threads(1);
    let mut trainer = trainer(Net::Cnn, group.remove(0), || Box::new(Single), GRAPHS).unwrap();
    let mut counts = Vec::new();
    for _ in 0..6 {
        let before = launches();
        trainer.step(&[4, 4]).unwrap();
        trainer.replica.compute.synchronize().unwrap();
        counts.push(launches().zip(before).map(|(after, before)| after - before));
        let Replica { compute, .. } = &trainer.replica;
        // The memory of the passes is counted, though nothing is captured any more.
        let phase = compute.allocator.phases();
        let backward = phase.iter().find(|(name, _)| *name == "backward").unwrap().1;
        assert!(backward.of(Category::Activations).peak_bytes > 0);
        compute.allocator.forget_phases();
    }
    // The emulated card counts.
    if let [Some(first), Some(second), rest @ ..] = &counts[..] {
        assert!(*first > 20 && first == second, "{counts:?}");
        assert_eq!(rest, [Some(2); 4], "captured work runs by its graph only");
    }
}

#[test]
fn a_step_takes_no_memory_from_the_card_once_it_is_a_graph() {
    let Some(_alone) = alone() else { return };
    let mut group = Group::threads(1);
    let mut trainer =
        trainer(Net::TiedLlama, group.remove(0), || Box::new(Single), GRAPHS).unwrap();
    let mut reserved = Vec::new();
    for _ in 0..6 {
        trainer.step(&[2]).unwrap();
        let (strategy, mut cx, _) = trainer.parts();
        clip_factor(strategy, &mut cx, 1.0).unwrap();
        let memory = &trainer.replica.compute.allocator;
        reserved.push((memory.fresh_blocks(), memory.total().current_bytes));
    }
    assert!(reserved[2..].windows(2).all(|pair| pair[0] == pair[1]), "{reserved:?}");
}

#[test]
fn what_cannot_be_a_graph_is_refused_with_the_replica() {
    let Some(_alone) = alone() else { return };
    let refused = |make: Make, options: ReplicaOptions, words: &str| {
        let group = Group::threads(1).remove(0);
        let error = trainer(Net::Mlp, group, make, options).err().unwrap().to_string();
        assert!(error.contains(words) && error.contains("and a graph cannot"), "{error}");
    };
    // But for the first one, these communicate within the passes.
    for make in &SHARDED[1..] {
        refused(*make, GRAPHS, "this strategy communicates within the passes");
    }
    let single: Make = || Box::new(Single);
    let open = ReplicaOptions { static_graph: false, find_unused_parameters: true, ..GRAPHS };
    refused(single, open, "ReplicaOptions::static_graph = false lets other parameters");
    refused(
        single,
        ReplicaOptions { sync_batch_norm: true, ..GRAPHS },
        "ReplicaOptions::sync_batch_norm",
    );
    refused(single, ReplicaOptions { no_sync: false, ..GRAPHS }, "ReplicaOptions::no_sync = false");
    // Elsewhere there are no graphs.
    let group = Group::threads(1).remove(0);
    let (memory, model) = (Allocator::new(), Net::Mlp.build(1));
    let ranks = (&memory, group.into());
    let made = Trainer::with_options(ranks, model, Net::Mlp, single(), Optim::Plain, GRAPHS);
    let error = made.err().unwrap().to_string();
    assert!(error.contains("work of the device cpu"), "{error}");
}

/// The gradients of a micro-batch that are put aside belong to one step.
#[test]
fn a_step_of_several_micro_batches_in_a_tree_is_refused_as_a_graph() {
    let Some(_alone) = alone() else { return };
    let options = ReplicaOptions { accumulation: AccumulationOrder::Tree, ..GRAPHS };
    let group = Group::threads(1).remove(0);
    let mut trainer = trainer(Net::Mlp, group, || Box::new(Single), options).unwrap();
    trainer.step(&[2]).unwrap();
    let error = trainer.step(&[2, 3]).unwrap_err().to_string();
    assert!(error.contains("ReplicaOptions::accumulation keeps memory"), "{error}");
}

/// Their number of tokens is known in the step only.
#[test]
fn sequences_of_different_lengths_run_without_a_graph() {
    let Some(_alone) = alone() else { return };
    let losses = |options| {
        let group = Group::threads(1).remove(0);
        let mut trainer = trainer(Net::RaggedLlama, group, || Box::new(Single), options).unwrap();
        [3, 2, 3, 3].map(|count| trainer.step(&[count]).unwrap().loss.to_bits())
    };
    assert_eq!(losses(GRAPHS), losses(ReplicaOptions::DEFAULT));
}
