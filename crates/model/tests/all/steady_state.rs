//! After the first steps, a training step takes no memory from the system: every block returns to the pool
//! and serves the next step.

use std::sync::Arc;

use crate::common::{cnn_config, filled, initialized, integers, mlp_config, train};
use paceline_kernels::linear::Activation;
use paceline_kernels::optimizer::AdamW;
use paceline_kernels::{Compute, ImageLayout};
use paceline_memory::{Allocator, Category, DType, Tensor};
use paceline_model::layers::{Linear, Sequence, SwiGlu};
use paceline_model::{
    Batch, Block, CnnConfig, Context, Half, Init, Layer, LayoutBuilder, Model, OpenUnits,
    Optimizer, OptimizerConfig, Storage,
};

const BATCH: usize = 4;

/// Trains for twelve steps and compares the number of blocks after two steps with the number at the end. Uses
/// one thread, because the scratch memory of several threads depends on how much they overlap.
fn check(model: Model, inputs: &[usize], targets: impl Fn(&Allocator) -> Tensor) {
    let allocator = Allocator::new();
    let compute = Compute::new(1, allocator.clone()).unwrap();
    let storage = initialized(&model, DType::F32, &allocator, 1);
    let adamw = AdamW { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01 };
    let config = OptimizerConfig::AdamW(adamw);
    let mut optimizer = Optimizer::new(config, &storage, &allocator).unwrap();
    let batch = Batch::new(filled(&allocator, inputs, 0.5), targets(&allocator));
    let mut step = || {
        let sums = train(&model, &compute, &storage, &batch, 1.0 / BATCH as f64);
        assert_eq!(sums[2], BATCH as f64, "{model:?}");
        optimizer.step(&compute, &storage).unwrap();
    };
    step();
    step();
    let after_two = allocator.fresh_blocks();
    for _ in 0..10 {
        step();
    }
    assert_eq!(allocator.fresh_blocks(), after_two, "{model:?}");
    let alive = allocator.usage(Category::Activations).current_bytes;
    assert_eq!(alive, 0, "{model:?} keeps activations after its backward pass");
}

#[test]
fn a_cnn_allocates_nothing_after_two_steps() {
    let plain = cnn_config([12, 12, 3], &[8, 16], 32, 10);
    for config in [
        CnnConfig { batch_norm: true, ..plain.clone() },
        CnnConfig { layout: ImageLayout::Nchw, ..plain.clone() },
        plain,
    ] {
        check(config.build(1).unwrap(), &[BATCH, 12, 12, 3], |allocator| {
            integers(allocator, &[BATCH], &[3; BATCH])
        });
    }
}

#[test]
fn an_mlp_allocates_nothing_after_two_steps() {
    let config = mlp_config([20, 48, 5], 3);
    check(config.build(1).unwrap(), &[BATCH, 20], |to| filled(to, &[BATCH, 5], -0.5));
}

/// Between the halves of the backward pass only the inputs and the gradients of the outputs of layers with parameters are
/// needed: neither what SwiGLU saved nor the gradient that it passed on, nor a gradient from before a ReLU.
#[test]
fn between_its_halves_a_backward_pass_keeps_what_the_second_one_needs() {
    const WIDTH: usize = 64;
    const ELEM_BYTES: usize = 4;
    let mut layout = LayoutBuilder::new();
    let mut unit = layout.unit("all");
    let init = Init::fan_in(WIDTH);
    let up = Linear::projection(&mut unit, WIDTH, &[("up", 4 * WIDTH)], init).unwrap();
    let down = Linear::projection(&mut unit, 2 * WIDTH, &[("down", WIDTH)], init).unwrap();
    let last = Linear::new(&mut unit, WIDTH, 3 * WIDTH, Activation::Relu);
    let block = Block::new(unit.id, Sequence::new().then(up).then(SwiGlu).then(down).then(last));
    let layout = Arc::new(layout.finish(1));

    let allocator = Allocator::new();
    let compute = Compute::new(1, allocator.clone()).unwrap();
    let storage = Storage::private(layout.clone(), DType::F32, &allocator).unwrap();
    storage.initialize(1).unwrap();
    let input = filled(&allocator, &[BATCH, WIDTH], 0.5);
    let d_output = filled(&allocator, &[BATCH, 3 * WIDTH], 0.25);

    let (mut units, mut ready) = (OpenUnits::new(&layout), |_| Ok(()));
    let mut cx = Context::training(&compute, &storage, &mut units, &mut ready);
    let in_use = || allocator.usage(Category::Activations).current_bytes;
    let (output, mut saved) = block.forward(&mut cx, input).unwrap();
    drop(output);
    let half = Half::Input { wants_input: true };
    let d_input = block.backward(&mut cx, &mut saved, d_output.clone(), half).unwrap();
    drop(d_input);
    // Of `down` and `last` the inputs, of all three the gradients of the outputs, and of `last` the output.
    let inputs = 2 * WIDTH + WIDTH;
    let gradients = 4 * WIDTH + WIDTH + 3 * WIDTH;
    let elems = BATCH * (inputs + gradients + 3 * WIDTH);
    assert_eq!(in_use(), (elems * ELEM_BYTES) as u64);
    block.backward(&mut cx, &mut saved, d_output.clone(), Half::Weight).unwrap();
    drop(saved);
    assert_eq!(in_use(), 0);
}
