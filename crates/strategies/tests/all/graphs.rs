//! Steps that leave out layers: in every pass or only in some, the same on every rank or not, the same in
//! every step or not.

use std::sync::atomic::{AtomicUsize, Ordering};

use paceline_collectives::Group;
use paceline_kernels::linear::Activation;
use paceline_memory::Tensor;
use paceline_model::layers::Linear;
use paceline_model::{
    Block, Context, Half, Layer, LayoutBuilder, MeanSquaredError, Model, Result, Saved,
};
use paceline_strategies::{FlatDdp, NoSync, ReplicaOptions, SimpleDdp, Single, StrategyError};

use crate::common::{EXACT, Make, Net, Optim, Trainer, all_exact, largest_difference, on_ranks};

/// Which of three layers a rank uses in pass number `pass`, counted from 0. The first layer has its own
/// parameters; the other two are tied.
type Graph = fn(rank: usize, pass: usize) -> [bool; 3];

/// A layer that some passes leave out.
struct Sometimes {
    inner: Linear,
    /// The layer's number in the graph.
    at: usize,
    graph: Graph,
    rank: usize,
    /// The passes so far.
    passes: AtomicUsize,
}

impl Layer for Sometimes {
    fn forward(&self, cx: &mut Context, input: Tensor) -> Result<(Tensor, Saved)> {
        let pass = self.passes.fetch_add(1, Ordering::Relaxed);
        let mut saved = Saved::default();
        if !(self.graph)(self.rank, pass)[self.at] {
            return Ok((input, saved));
        }
        let (output, part) = self.inner.forward(cx, input)?;
        saved.parts.push(part);
        Ok((output, saved))
    }

    fn backward(
        &self,
        cx: &mut Context,
        saved: &mut Saved,
        d_output: Tensor,
        half: Half,
    ) -> Result<Option<Tensor>> {
        match saved.parts.first_mut() {
            Some(part) => self.inner.backward(cx, part, d_output, half),
            None => Ok(Some(d_output)),
        }
    }
}

/// 12 inputs, the three layers of the graph, 3 outputs.
fn model(graph: Graph, rank: usize, world_size: usize) -> Model {
    let mut layout = LayoutBuilder::new();
    let width = 16;
    let first = layout.block("first", |unit| Linear::new(unit, 12, width, Activation::Relu));
    let mut square = |name| {
        let mut unit = layout.unit(name);
        (unit.id, Linear::new(&mut unit, width, width, Activation::None))
    };
    let (own, (unit, tied)) = (square("own"), square("tied"));
    let tied_again = (unit, Linear::tied_to(&mut layout, &tied, Activation::None));
    let mut blocks = vec![first];
    for (at, (unit, inner)) in [own, (unit, tied), tied_again].into_iter().enumerate() {
        let sometimes = Sometimes { inner, at, graph, rank, passes: AtomicUsize::new(0) };
        blocks.push(Block::new(unit, sometimes));
    }
    blocks.push(layout.block("last", |unit| Linear::new(unit, width, 3, Activation::None)));
    Model::new("sometimes", blocks, MeanSquaredError, layout.finish(world_size))
}

const REFUSED: ReplicaOptions = ReplicaOptions::DEFAULT;
const STATIC: ReplicaOptions = ReplicaOptions { find_unused_parameters: true, ..REFUSED };
const DYNAMIC: ReplicaOptions = ReplicaOptions { static_graph: false, ..STATIC };

fn trainer(group: Group, make: Make, graph: Graph, options: ReplicaOptions) -> Trainer {
    let model = model(graph, group.rank(), group.world_size());
    // Without weight decay, so that parameters without a gradient stay unchanged.
    let mut trainer = Trainer::with_model(model, Net::Mlp, group, make(), Optim::Plain);
    trainer.replica.options = options;
    trainer
}

/// Trains for six steps of two micro-batches. Returns the outcome of each rank.
fn train(
    make: Make,
    world_size: usize,
    graph: Graph,
    options: ReplicaOptions,
) -> Vec<(String, Vec<f32>)> {
    on_ranks(world_size, |group| {
        let mut trainer = trainer(group, make, graph, options);
        for _ in 0..6 {
            trainer.step(&[6, 5]).unwrap();
        }
        (trainer.digest(), trainer.weights())
    })
}

/// Checks that all strategies and ranks give the same bits, with each of the options. Returns the weights.
fn digests_agree(world_size: usize, graph: Graph, options: &[ReplicaOptions]) -> Vec<f32> {
    let runs = options.iter().flat_map(|&options| all_exact().map(move |make| (make, options)));
    let outcomes = runs.flat_map(|(make, options)| train(make, world_size, graph, options));
    let outcomes: Vec<_> = outcomes.collect();
    assert!(outcomes.iter().all(|(digest, _)| *digest == outcomes[0].0), "{world_size} ranks");
    outcomes.into_iter().next().unwrap().1
}

/// The step in which training failed, and the error, on every rank.
fn refusals(make: Make, graph: Graph, options: ReplicaOptions) -> Vec<(usize, StrategyError)> {
    let ranks = on_ranks(2, |group| {
        let mut trainer = trainer(group, make, graph, options);
        let refusal = (0..4).find_map(|step| Some((step, trainer.step(&[5, 4]).err()?)));
        // The trainer is returned too, so that no rank leaves before all have their own error.
        (refusal.unwrap(), trainer)
    });
    ranks.into_iter().map(|(refusal, _)| refusal).collect()
}

/// For each rank, the step of the `Unused` error, its names, and whether they are new.
fn unused(make: Make, graph: Graph, options: ReplicaOptions) -> Vec<(usize, Vec<String>, bool)> {
    let names = |(step, error)| match error {
        StrategyError::Unused { names, is_new } => (step, names, is_new),
        other => panic!("{other:?}"),
    };
    refusals(make, graph, options).into_iter().map(names).collect()
}

/// As in `parity.rs`, sums over the batch are in a different order: f32 rounding errors over 6 steps with a
/// learning rate of 0.3.
const TOLERANCE: f64 = 1e-6;

const WITHOUT_OWN: Graph = |_, _| [false, true, true];
/// The tied parameters are used once, not twice.
const TIED_ONCE: Graph = |_, _| [true, true, false];
/// The first layer takes part only in the first micro-batch of each step.
const EARLY_ONLY: Graph = |_, pass| [pass % 2 == 0, true, true];

#[test]
fn what_a_step_leaves_out_is_named() {
    let own = ["own.weight", "own.bias"].map(String::from).to_vec();
    let tied = ["tied.weight", "tied.bias"].map(String::from).to_vec();
    for make in EXACT {
        for (graph, names) in [(WITHOUT_OWN, &own), (TIED_ONCE, &tied), (EARLY_ONLY, &own)] {
            for refused in unused(make, graph, REFUSED) {
                assert_eq!(refused, (0, names.clone(), false));
            }
        }
    }
    let (_, error) = &refusals(EXACT[0], WITHOUT_OWN, REFUSED)[0];
    let message = error.to_string();
    assert!(message.contains("for own.weight, own.bias;"), "{message}");
    assert!(message.contains("ReplicaOptions::find_unused_parameters"), "{message}");
}

#[test]
fn graphs_that_all_ranks_share_train_as_in_one_process() {
    for graph in [WITHOUT_OWN, TIED_ONCE, EARLY_ONLY] {
        let (_, single) = train(|| Box::new(Single), 1, graph, DYNAMIC).remove(0);
        for world_size in [2, 3] {
            let weights = digests_agree(world_size, graph, &[STATIC, DYNAMIC]);
            let off = largest_difference(&weights, &single);
            assert!(off < TOLERANCE, "{world_size} ranks: off by {off:e}");
        }
    }
}

#[test]
fn graphs_may_differ_between_ranks() {
    let without_own_on_rank_1: Graph = |rank, _| [rank != 1, true, true];
    digests_agree(3, without_own_on_rank_1, &[STATIC, DYNAMIC]);
    // On rank 0 one of the two uses is left out, on rank 2 both.
    let uses: Graph = |rank, _| [true, rank < 2, rank == 1];
    digests_agree(3, uses, &[STATIC, DYNAMIC]);
}

#[test]
fn dynamic_graphs_may_change_from_step_to_step() {
    let same_on_all_ranks: Graph = |_, pass| [pass % 3 > 0, pass % 4 > 1, pass % 5 > 1];
    let other_on_each: Graph =
        |rank, pass| [(pass + rank) % 3 > 0, (pass / 2 + rank) % 2 > 0, pass % 5 > rank];
    for graph in [same_on_all_ranks, other_on_each] {
        for world_size in [2, 3] {
            digests_agree(world_size, graph, &[DYNAMIC]);
        }
    }
}

#[test]
fn a_gradient_counts_as_zero_where_a_rank_leaves_it_out() {
    /// The gradients of one step on every rank, by parameter.
    fn gradients(make: Make, graph: Graph, options: ReplicaOptions) -> Vec<Vec<Vec<f32>>> {
        on_ranks(3, |group| {
            let mut trainer = trainer(group, make, graph, options);
            // NaN, so that a gradient that nobody writes is not taken for zero.
            trainer.replica.storage.grads().tensor().write::<f32>().unwrap().fill(f32::NAN);
            trainer.step(&[6, 5]).unwrap();
            let storage = &trainer.replica.storage;
            let ids = storage.layout().trained().map(|(id, _)| id);
            ids.map(|id| storage.grad(id).unwrap().read::<f32>().unwrap().to_vec()).collect()
        })
    }
    // The units are first, own, tied and last, of two parameters each.
    let graph: Graph = |rank, _| [rank == 2, rank > 0, rank > 0];
    let own = gradients(|| Box::new(NoSync), graph, DYNAMIC);
    for (rank, gradients) in own.iter().enumerate() {
        let is_zero = |at: usize| gradients[at].iter().all(|x| *x == 0.0);
        assert_eq!([is_zero(2), is_zero(3)], [rank != 2; 2], "rank {rank}: own");
        assert_eq!([is_zero(4), is_zero(5)], [rank == 0; 2], "rank {rank}: tied");
        assert!(!is_zero(0) && !is_zero(7), "rank {rank}: what all use");
    }
    let mean = |at: usize| -> Vec<f32> {
        let elems = own[0][at].iter().zip(&own[1][at]).zip(&own[2][at]);
        elems.map(|((a, b), c)| (a + b + c) / 3.0).collect()
    };
    let expected: Vec<Vec<f32>> = (0..own[0].len()).map(mean).collect();
    for make in EXACT {
        for options in [STATIC, DYNAMIC] {
            assert!(gradients(make, graph, options).iter().all(|rank| *rank == expected));
        }
    }
}

#[test]
fn a_static_graph_leaves_out_no_more_than_in_the_first_step() {
    let own = ["own.weight", "own.bias"].map(String::from).to_vec();
    // A parameter that every step leaves out in part is not reported as new.
    let own_later_too: Graph = |_, pass| [pass < 2, true, false];
    for make in EXACT {
        for refused in unused(make, own_later_too, STATIC) {
            assert_eq!(refused, (1, own.clone(), true));
        }
    }
    let (_, error) = &refusals(EXACT[0], own_later_too, STATIC)[0];
    assert!(error.to_string().contains("the first step used them"), "{error}");
    assert!(error.to_string().contains("ReplicaOptions::static_graph"), "{error}");
    digests_agree(2, own_later_too, &[DYNAMIC]);
    // A parameter that the first step used in part may later be used completely, or not at all.
    let in_part_then_otherwise: Graph = |_, pass| [true, pass < 4, (2..4).contains(&pass)];
    digests_agree(2, in_part_then_otherwise, &[STATIC, DYNAMIC]);
}

#[test]
fn a_static_graph_uses_nothing_that_the_first_step_left_out() {
    let own_later: Graph = |_, pass| [pass >= 2, true, true];
    // The layer is used only in the first micro-batch of the second step.
    let own_early: Graph = |_, pass| [pass == 2, true, true];
    let used_after_all = |make: Make, graph: Graph| {
        for (step, error) in refusals(make, graph, STATIC) {
            assert_eq!(step, 1);
            let StrategyError::UsedAfterAll { name } = error else { panic!("{error:?}") };
            assert!(["own.bias", "own.weight", "tied.weight"].contains(&&*name), "{name}");
        }
    };
    for make in EXACT {
        used_after_all(make, own_early);
        // In the last micro-batch the zeros may already be in flight, and the layer must not write to their
        // memory. That is an error too; which of the two errors comes first depends on timing.
        assert!(refusals(make, own_later, STATIC).iter().all(|(step, _)| *step == 1));
    }
    for make in [EXACT[0], || Box::new(FlatDdp)] {
        used_after_all(make, own_later);
    }
    // Half of the uses do not make the gradient final, so it is not announced during the pass.
    let tied_half: Graph = |_, pass| [true, pass >= 2, false];
    used_after_all(|| Box::new(SimpleDdp), tied_half);
    digests_agree(2, own_later, &[DYNAMIC]);
    digests_agree(2, tied_half, &[DYNAMIC]);
}
