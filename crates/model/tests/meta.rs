//! A rehearsal on the device without contents sees the same memory as a real step.

mod common;

use std::sync::Arc;

use paceline_kernels::Compute;
use paceline_kernels::linear::Activation;
use paceline_memory::{Allocator, Category, DType, PhaseUsage};
use paceline_model::layers::{Linear, Sequence};
use paceline_model::{
    Batch, Block, CnnConfig, Context, Layer, LayoutBuilder, MeanSquaredError, MlpConfig, Model,
    OpenUnits, ParamId, Precision, Rehearsal, Storage,
};

/// The targets of a model: classes, or values with this many columns.
#[derive(Clone, Copy)]
enum Targets {
    Classes,
    Values(usize),
}

/// Inputs (n, ...) and targets. Their contents are unspecified, which on the host means zero.
fn batch(allocator: &Allocator, n: usize, input: &[usize], targets: Targets) -> Batch {
    let shape = [&[n], input].concat();
    let inputs = allocator.tensor(DType::F32, shape.as_slice(), Category::Data).unwrap();
    let targets = match targets {
        Targets::Classes => allocator.tensor(DType::I64, [n], Category::Data).unwrap(),
        Targets::Values(dim) => allocator.tensor(DType::F32, [n, dim], Category::Data).unwrap(),
    };
    Batch::new(inputs, targets)
}

/// The phases of a step on the host, without the code of the rehearsal.
fn measured(model: &Model, n: usize, input: &[usize], targets: Targets) -> [PhaseUsage; 2] {
    let compute = Compute::new(1, Allocator::new()).unwrap();
    let allocator = &compute.allocator;
    let storage = Storage::host(model.layout.clone(), DType::F32, allocator).unwrap();
    storage.initialize(1).unwrap();
    let sums = allocator.tensor(DType::F64, [3], Category::Workspace).unwrap();
    sums.fill_zero().unwrap();
    let batch = batch(allocator, n, input, targets);
    let mut units = OpenUnits::new(&model.layout);
    let mut ready = |_: ParamId| Ok(());
    allocator.begin_phase();
    let cx = Context::training(&compute, &storage, &mut units, &mut ready);
    let mut cx = cx.with_batch(&batch);
    cx.open_roots().unwrap();
    let (output, saved) = model.network().forward(&mut cx, batch.inputs().clone()).unwrap();
    let d_output = model.differentiate(&mut cx, &output, 1.0, &sums).unwrap();
    drop(output);
    let forward = allocator.end_phase("forward");
    model.network().backward(&mut cx, saved, d_output, false).unwrap();
    [forward, allocator.end_phase("backward")]
}

fn rehearsed(model: &Model, n: usize, input: &[usize], targets: Targets) -> Rehearsal {
    let compute = Compute::new(1, Allocator::meta()).unwrap();
    let batch = batch(&compute.allocator, n, input, targets);
    Rehearsal::of(model, Precision::F32, &compute, &[batch], None, false).unwrap()
}

/// Everything is equal: each category and the memory taken from the system, now and at the peak.
fn check(model: &Model, input: &[usize], targets: Targets) {
    for n in [1, 3, 17, 64] {
        let Rehearsal { forward, backward, .. } = rehearsed(model, n, input, targets);
        assert_eq!([forward, backward], measured(model, n, input, targets), "{model:?}, {n}");
        assert!(forward.of(Category::Activations).peak_bytes > 0);
    }
}

fn cnn(batch_norm: bool) -> CnnConfig {
    let (image, channels) = ([12, 12, 3], vec![8, 16]);
    CnnConfig { image, channels, hidden: 32, num_classes: 10, batch_norm, unused_head: false }
}

#[test]
fn a_cnn_needs_what_the_rehearsal_says() {
    for batch_norm in [false, true] {
        check(&cnn(batch_norm).build(2).unwrap(), &[12, 12, 3], Targets::Classes);
    }
    // A number of channels that fills no vector register, and an odd image.
    let odd = CnnConfig { image: [13, 11, 1], channels: vec![3, 5, 7], ..cnn(true) };
    check(&odd.build(1).unwrap(), &[13, 11, 1], Targets::Classes);
}

#[test]
fn an_mlp_needs_what_the_rehearsal_says_tied_or_not() {
    for tie_layers in [false, true] {
        let (input_dim, hidden_dim, output_dim) = (20, 48, 5);
        let config = MlpConfig { input_dim, hidden_dim, output_dim, num_layers: 4, tie_layers };
        check(&config.build(2).unwrap(), &[20], Targets::Values(5));
    }
}

#[test]
fn every_layer_needs_what_the_rehearsal_says() {
    check(&common::every_layer(), &[9, 9, 2], Targets::Values(3));
}

#[test]
fn checkpointed_blocks_need_what_the_rehearsal_says() {
    let mut layout = LayoutBuilder::new();
    let mut blocks = Vec::new();
    for at in 0..4 {
        let unit = layout.unit(format!("block{at}"));
        let mut block = Sequence::new();
        for _ in 0..3 {
            block.push(Linear::new(&mut layout, 24, 24, Activation::Relu));
        }
        blocks.push(Block::new(unit, block).checkpointed());
    }
    let (objective, layout) = (Box::new(MeanSquaredError), Arc::new(layout.finish(1)));
    let deep = Model { name: "deep", blocks, objective, layout, activation_elems: 0 };
    check(&deep, &[24], Targets::Values(24));
    let mut checkpointed = cnn(true).build(1).unwrap();
    checkpointed.blocks = checkpointed.blocks.drain(..).map(Block::checkpointed).collect();
    check(&checkpointed, &[12, 12, 3], Targets::Classes);
}

#[test]
fn a_model_larger_than_any_memory_is_rehearsed() {
    let (input_dim, hidden_dim, output_dim) = (1 << 10, 1 << 20, 10);
    let config = MlpConfig { input_dim, hidden_dim, output_dim, num_layers: 2, tie_layers: false };
    let model = config.build(8).unwrap();
    assert!(model.layout.num_params() > 1_000_000_000_000);
    let needed = rehearsed(&model, 1 << 16, &[1 << 10], Targets::Values(10));
    let params = 4 * model.layout.num_params() as u64;
    assert!(needed.forward.of(Category::Parameters).current_bytes >= params);
    // Each hidden layer keeps its output: 2^16 rows of 2^20 f32.
    assert!(needed.peak_bytes(Category::Activations) >= 2 << 38);
}

#[test]
fn a_rehearsal_on_the_host_is_refused() {
    let model = cnn(false).build(1).unwrap();
    let compute = Compute::new(1, Allocator::new()).unwrap();
    let batch = batch(&compute.allocator, 1, &[12, 12, 3], Targets::Classes);
    let error = Rehearsal::of(&model, Precision::F32, &compute, &[batch], None, false);
    let text = error.unwrap_err().to_string();
    assert!(text.contains("a rehearsal needs the device meta, not cpu"), "{text}");
}
