//! Every strategy takes the memory that it states, and a step takes the activations and the scratch memory of its
//! rehearsal.

use paceline_kernels::Compute;
use paceline_memory::{Allocator, Category, DType, PhaseUsage};
use paceline_model::{Batch, Rehearsal};
use paceline_strategies::{SHARED_SUMS_BYTES, clip_factor, span, train_step};

use crate::common::{INEXACT, Make, NETS, Net, SEQ, SPECIAL_NETS, Trainer, all_exact, on_ranks};

/// A batch of `rows` samples of a network, without contents.
fn batch(net: Net, allocator: &Allocator, rows: usize) -> Batch {
    let tensor = |dtype, dims: &[usize]| allocator.tensor(dtype, dims, Category::Data).unwrap();
    match net {
        Net::TiedLlamaBf16 | Net::LlamaClassifierBf16 => batch(net.in_f32(), allocator, rows),
        Net::Cnn | Net::BatchNormCnn | Net::FrozenCnn => {
            Batch::new(tensor(DType::F32, &[rows, 12, 12, 1]), tensor(DType::I64, &[rows]))
        }
        Net::Mlp | Net::TiedMlp | Net::DeepMlp => {
            Batch::new(tensor(DType::F32, &[rows, 12]), tensor(DType::F32, &[rows, 3]))
        }
        Net::Llama | Net::TiedLlama | Net::RaggedLlama => {
            let tokens = || tensor(DType::I64, &[rows, SEQ]);
            Batch::new(tokens(), tokens())
        }
        Net::LlamaClassifier => {
            let batch = Batch::new(tensor(DType::I64, &[rows, SEQ]), tensor(DType::I64, &[rows]));
            batch.with(Batch::LENGTHS, tensor(DType::I64, &[rows]))
        }
    }
}

#[test]
fn a_step_takes_the_memory_that_is_predicted() {
    for net in NETS.into_iter().chain(SPECIAL_NETS).chain([Net::BatchNormCnn]) {
        let all = all_exact().chain(INEXACT.iter().map(|of| of.make));
        for (make, world_size) in all.flat_map(|make| [2, 4].map(|n| (make, n))) {
            on_ranks(world_size, |group| check(net, make, group));
        }
    }
}

/// Compares the phases of the second step with the formulas.
fn check(net: Net, make: Make, group: paceline_collectives::Group) {
    let mut trainer = Trainer::new(net, group, make());
    // The batch is uneven, so one rank has more samples than the others.
    let micro_batches = [9, 9];
    trainer.step(&micro_batches).unwrap();
    let allocator = trainer.replica.compute.allocator.clone();
    let shares = trainer.shares(&micro_batches);
    allocator.forget_phases();
    allocator.begin_phase();
    let (strategy, mut cx, optimizer) = trainer.parts();
    train_step(strategy, &mut cx, &shares).unwrap();
    let (_, factor) = clip_factor(strategy, &mut cx, 0.1).unwrap();
    optimizer.set_grad_factor(factor);
    strategy.optimizer_step(&mut cx, optimizer).unwrap();
    allocator.end_phase("step");
    let phases = allocator.phases();
    let phase = |name: &str| phases.iter().find(|(known, _)| *known == name).unwrap().1;

    let replica = cx.replica;
    let (name, rank) = (strategy.name(), replica.group.rank());
    let precision = net.precision();
    let stated = strategy.footprint(&replica.model, precision, replica.mesh.shape(), rank);
    let state: usize = replica.owned.state.iter().map(|range| range.len()).sum();
    let what = format!("{name} with {net:?} on rank {rank}");
    for usage in [phase(span::FORWARD), phase(span::BACKWARD), phase("step")] {
        for (category, bytes) in [
            (Category::Parameters, stated.parameters),
            (Category::Gradients, stated.gradients),
            (Category::Optimizer, 4 * state),
            (Category::Unsharded, stated.unsharded),
            (Category::Communication, stated.communication + SHARED_SUMS_BYTES),
        ] {
            let usage = usage.of(category);
            assert_eq!(usage.current_bytes, bytes as u64, "{category} of {what}");
            assert_eq!(usage.peak_bytes, bytes as u64, "{category} of {what}");
        }
    }
    let compute = Compute::new(1, Allocator::meta()).unwrap();
    let batches: Vec<Batch> = shares
        .iter()
        .map(|share| batch(net, &compute.allocator, share.batch.num_samples()))
        .collect();
    let clipped = Some(&*replica.owned.grads);
    let rehearsal =
        Rehearsal::of(&replica.model, precision, &compute, &batches, clipped, false).unwrap();
    let expected = [rehearsal.forward, rehearsal.backward, rehearsal.step];
    let found = [span::FORWARD, span::BACKWARD, "step"].map(phase);
    for category in [Category::Activations, Category::Workspace] {
        let of = |usages: [PhaseUsage; 3]| usages.map(|usage| usage.of(category));
        assert_eq!(of(found), of(expected), "{category} of {what}");
    }
}
