//! After the first steps, a training step takes no memory from the system: every block returns to the pool
//! and serves the next step.

use paceline_kernels::optimizer::AdamW;
use paceline_kernels::{Compute, ImageLayout};
use paceline_memory::{Allocator, Category, DType, Tensor};
use paceline_model::{
    Batch, CnnConfig, Context, Layer, MlpConfig, Model, OpenUnits, Optimizer, OptimizerConfig,
    Storage,
};

const BATCH: usize = 4;

/// Trains for twelve steps and compares the number of blocks after two steps with the number at the end. Uses
/// one thread, because the scratch memory of several threads depends on how much they overlap.
fn check(model: Model, inputs: &[usize], targets: impl Fn(&Allocator) -> Tensor) {
    let allocator = Allocator::new();
    let compute = Compute::new(1, allocator.clone()).unwrap();
    let storage = Storage::host(model.layout.clone(), DType::F32, &allocator).unwrap();
    storage.initialize(1).unwrap();
    let adamw = AdamW { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01 };
    let config = OptimizerConfig::AdamW(adamw);
    let mut optimizer = Optimizer::new(config, &storage, &allocator).unwrap();
    let inputs = allocator.tensor(DType::F32, inputs, Category::Data).unwrap();
    inputs.write::<f32>().unwrap().fill(0.5);
    let targets = targets(&allocator);
    let sums = allocator.tensor(DType::F64, [3], Category::Workspace).unwrap();
    sums.fill_zero().unwrap();

    let batch = Batch::new(inputs.clone(), targets);
    let mut step = || {
        let mut ready = |_| Ok(());
        let mut units = OpenUnits::new(storage.layout());
        let cx = Context::training(&compute, &storage, &mut units, &mut ready);
        let mut cx = cx.with_batch(&batch);
        let (output, saved) = model.network().forward(&mut cx, inputs.clone()).unwrap();
        let scale = 1.0 / BATCH as f64;
        let d_output = model.differentiate(&mut cx, &output, scale, &sums).unwrap();
        drop(output);
        model.network().backward(&mut cx, saved, d_output, false).unwrap();
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
    assert_eq!(sums.read::<f64>().unwrap()[2], 12.0 * BATCH as f64, "{model:?}");
    assert_eq!(alive, 0, "{model:?} keeps activations after its backward pass");
}

#[test]
fn a_cnn_allocates_nothing_after_two_steps() {
    let plain = CnnConfig {
        image: [12, 12, 3],
        channels: vec![8, 16],
        hidden: 32,
        num_classes: 10,
        batch_norm: false,
        unused_head: false,
        layout: Default::default(),
    };
    for config in [
        CnnConfig { batch_norm: true, ..plain.clone() },
        CnnConfig { layout: ImageLayout::Nchw, ..plain.clone() },
        plain,
    ] {
        check(config.build(1).unwrap(), &[BATCH, 12, 12, 3], |allocator| {
            let labels = allocator.tensor(DType::I64, [BATCH], Category::Data).unwrap();
            labels.write::<i64>().unwrap().fill(3);
            labels
        });
    }
}

#[test]
fn an_mlp_allocates_nothing_after_two_steps() {
    let config = MlpConfig {
        input_dim: 20,
        hidden_dim: 48,
        output_dim: 5,
        num_layers: 3,
        tie_layers: false,
    };
    check(config.build(1).unwrap(), &[BATCH, 20], |allocator| {
        let values = allocator.tensor(DType::F32, [BATCH, 5], Category::Data).unwrap();
        values.write::<f32>().unwrap().fill(-0.5);
        values
    });
}
