//! A convolutional network trains to the same weights, bit for bit, in both layouts of its images.

use crate::common::{
    checkpointed, cnn_config, in_training, initialized, integers, numbers, sums, write,
};
use half::bf16;
use paceline_kernels::optimizer::AdamW;
use paceline_kernels::{Compute, ImageLayout};
use paceline_memory::{Allocator, Category, DType};
use paceline_model::{
    Batch, CnnConfig, Context, Half, Layer, Mode, Model, OpenUnits, Optimizer, OptimizerConfig,
    Precision,
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
    let storage = initialized(model, precision, &allocator, 3);
    let adamw = AdamW { lr: 1e-2, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01 };
    let config = OptimizerConfig::AdamW(adamw);
    let mut optimizer = Optimizer::new(config, &storage, &allocator).unwrap();
    let shape = [BATCH, image[0], image[1], image[2]];
    let inputs = allocator.tensor(DType::F32, shape, Category::Data).unwrap();
    let labels = integers(&allocator, &[BATCH], &[3, 0, 1, 2, 3]);
    let sums = sums(&allocator);
    let batch = Batch::new(inputs.clone(), labels);
    let mut output = None;
    for step in 0..=STEPS {
        let fresh = numbers(&allocator, &shape, step as u64);
        write(&inputs, &fresh.read::<f64>().unwrap());
        if step == STEPS {
            let (mut units, mut ready) = (OpenUnits::new(storage.layout()), |_| Ok(()));
            let cx = Context::evaluation(&compute, &storage, &mut units, &mut ready);
            let mut cx = cx.with_batch(&batch);
            assert_eq!(cx.mode(), Mode::Evaluate);
            output = Some(model.network().forward(&mut cx, inputs.clone()).unwrap().0);
            break;
        }
        in_training(&compute, &storage, &batch, |cx| {
            let network = model.network();
            let (output, mut saved) = network.forward(cx, inputs.clone()).unwrap();
            let d_output = model.differentiate(cx, &output, 0.2, &sums, None).unwrap();
            let halves = match how {
                Backward::Whole => &[Half::Whole { wants_input: false }][..],
                Backward::Halves => &[Half::Input { wants_input: false }, Half::Weight],
            };
            for half in halves {
                let d_input = network.backward(cx, &mut saved, d_output.clone(), *half);
                assert!(d_input.unwrap().is_none());
            }
        });
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
                    let plain = CnnConfig { layout, ..config.clone() }.build(1).unwrap();
                    let model = if is_checkpointed { checkpointed(plain) } else { plain };
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
