//! A convolutional network trains to the same weights, bit for bit, in both layouts of its images.

mod common;

use common::{cnn_config, numbers};
use half::bf16;
use paceline_kernels::optimizer::AdamW;
use paceline_kernels::{Compute, ImageLayout};
use paceline_memory::{Allocator, Category, DType};
use paceline_model::{
    Batch, Block, CnnConfig, Context, Half, Layer, Mode, Model, OpenUnits, Optimizer,
    OptimizerConfig, Precision, Storage,
};

const BATCH: usize = 5;
const STEPS: usize = 4;

/// How the backward pass runs.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Backward {
    Whole,
    /// The gradient of each input first, and those of the parameters later, as in a pipeline.
    Halves,
}

/// The digest of all parameters, and the bits of the output of an evaluation, after some steps.
fn trained(
    model: &Model,
    precision: Precision,
    image: [usize; 3],
    threads: usize,
    how: Backward,
) -> (String, Vec<u32>) {
    let allocator = Allocator::new();
    let compute = Compute::new(threads, allocator.clone()).unwrap();
    let storage = Storage::private(model.layout.clone(), precision, &allocator).unwrap();
    storage.initialize(3).unwrap();
    let adamw = AdamW { lr: 1e-2, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01 };
    let config = OptimizerConfig::AdamW(adamw);
    let mut optimizer = Optimizer::new(config, &storage, &allocator).unwrap();
    let shape = [BATCH, image[0], image[1], image[2]];
    let inputs = allocator.tensor(DType::F32, shape, Category::Data).unwrap();
    let labels = allocator.tensor(DType::I64, [BATCH], Category::Data).unwrap();
    labels.write::<i64>().unwrap().copy_from_slice(&[3, 0, 1, 2, 3]);
    let sums = allocator.tensor(DType::F64, [3], Category::Workspace).unwrap();
    sums.fill_zero().unwrap();
    let batch = Batch::new(inputs.clone(), labels);
    let mut output = None;
    for step in 0..=STEPS {
        let fresh = numbers(&allocator, &shape, step as u64);
        let fresh = fresh.read::<f64>().unwrap();
        inputs
            .write::<f32>()
            .unwrap()
            .iter_mut()
            .zip(fresh.iter())
            .for_each(|(x, y)| *x = *y as f32);
        let mut ready = |_| Ok(());
        let mut units = OpenUnits::new(storage.layout());
        if step == STEPS {
            let cx = Context::evaluation(&compute, &storage, &mut units, &mut ready);
            let mut cx = cx.with_batch(&batch);
            assert_eq!(cx.mode(), Mode::Evaluate);
            output = Some(model.network().forward(&mut cx, inputs.clone()).unwrap().0);
            break;
        }
        let cx = Context::training(&compute, &storage, &mut units, &mut ready);
        let mut cx = cx.with_batch(&batch);
        let network = model.network();
        let (output, mut saved) = network.forward(&mut cx, inputs.clone()).unwrap();
        let d_output = model.differentiate(&mut cx, &output, 0.2, &sums, None).unwrap();
        match how {
            Backward::Whole => {
                let d_input = network
                    .backward(&mut cx, &mut saved, d_output, Half::Whole { wants_input: false })
                    .unwrap();
                assert!(d_input.is_none());
            }
            Backward::Halves => {
                let half = Half::Input { wants_input: false };
                let d_input = network.backward(&mut cx, &mut saved, d_output.clone(), half);
                assert!(d_input.unwrap().is_none());
                network.backward(&mut cx, &mut saved, d_output, Half::Weight).unwrap();
            }
        }
        optimizer.step(&compute, &storage).unwrap();
    }
    let output = output.unwrap();
    let output = match output.dtype() {
        DType::F32 => output.read::<f32>().unwrap().iter().map(|x| x.to_bits()).collect(),
        _ => output.read::<bf16>().unwrap().iter().map(|x| x.to_bits().into()).collect(),
    };
    (storage.digest().unwrap(), output)
}

#[test]
fn both_layouts_train_to_the_same_weights() {
    let plain = cnn_config([13, 12, 3], &[8, 17], 9, 4);
    let configs = [
        plain.clone(),
        CnnConfig { batch_norm: true, ..plain.clone() },
        // No channels and no positions that lie apart: nothing is copied.
        CnnConfig { image: [4, 4, 1], ..plain.clone() },
        CnnConfig { image: [8, 9, 1], channels: vec![16], batch_norm: true, ..plain },
    ];
    for config in configs {
        for precision in [Precision::F32, Precision::BF16] {
            for (threads, how, is_checkpointed) in [
                (1, Backward::Whole, false),
                (3, Backward::Halves, false),
                (1, Backward::Whole, true),
            ] {
                let [nhwc, nchw] = ImageLayout::ALL.map(|layout| {
                    let mut model = CnnConfig { layout, ..config.clone() }.build(1).unwrap();
                    if is_checkpointed {
                        model.blocks = model.blocks.drain(..).map(Block::checkpointed).collect();
                    }
                    trained(&model, precision, config.image, threads, how)
                });
                assert!(
                    nhwc == nchw,
                    "{config:?} {precision:?} {threads} {how:?} {is_checkpointed}"
                );
            }
        }
    }
}
