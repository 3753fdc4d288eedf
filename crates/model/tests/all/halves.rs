//! Small networks that compute in bf16 or fp16, beside the same networks in f32: parameters, their gradients and the optimizer's
//! state stay f32, and training goes as well.

use crate::common::{
    self, cnn_config, in_training, initialized, integers, mlp_config, pool, sums, write,
};
use paceline_kernels::Compute;
use paceline_kernels::linear::Activation;
use paceline_kernels::optimizer::Sgd;
use paceline_memory::{Allocator, Category, DType, Tensor};
use paceline_model::layers::{BatchNorm, Conv2d, Flatten, Linear, MaxPool2d, Relu, Sequence};
use paceline_model::{
    Batch, Block, CnnConfig, Half, Layer, LayoutBuilder, MeanSquaredError, Model, Optimizer,
    OptimizerConfig, ParamId, Precision, Storage,
};

const BF16: Precision = Precision { compute: DType::BF16, grads: DType::F32, master: DType::F32 };
const HALVES: [Precision; 2] = [BF16, Precision::FP16];

const BATCH: usize = 32;

/// A network and the batch that it learns.
struct Case {
    name: &'static str,
    model: Model,
    input: Vec<usize>,
    /// The number of columns of the targets. `None`: the targets are classes.
    target_columns: Option<usize>,
    /// Whether a batch normalization follows each convolution.
    is_normalized: bool,
    lr: f64,
}

impl Case {
    fn all() -> Vec<Self> {
        let new = |name, model, input: &[usize], target_columns, lr| {
            let (input, is_normalized) = (input.to_vec(), name == "cnn with batch norm");
            Self { name, model, input, target_columns, is_normalized, lr }
        };
        let cnn = |name, batch_norm, lr| {
            let config = CnnConfig { batch_norm, ..cnn_config([13, 12, 3], &[8, 16], 32, 10) };
            new(name, config.build(1).unwrap(), &[13, 12, 3], None, lr)
        };
        let mlp = mlp_config([20, 48, 5], 2).build(1).unwrap();
        vec![
            cnn("cnn", false, 0.12),
            cnn("cnn with batch norm", true, 0.02),
            new("mlp", mlp, &[20], Some(5), 0.1),
            new("pool first", Self::with_product_last(), &[9, 9, 2], Some(3), 0.02),
        ]
    }

    /// Layers without products come first. They keep the type of the images, f32, until a product rounds them.
    fn with_product_last() -> Model {
        let mut layout = LayoutBuilder::new();
        let mut unit = layout.unit("all");
        let norm = BatchNorm::new(&mut unit, 2, Activation::None);
        let first = Sequence::new()
            .then(MaxPool2d::new(pool([9, 9], 2, 3, 2)).unwrap())
            .then(norm)
            .then(Relu);
        let conv = Conv2d::new(&mut unit, common::conv([4, 4], [2, 8], (3, 3), 1, 1)).unwrap();
        let head = Linear::new(&mut unit, 128, 3, Activation::None);
        let all = first.then(conv).then(Relu).then(Flatten).then(head);
        Model::new("pool first", [Block::new(unit.id, all)], MeanSquaredError, layout.finish(1))
    }

    fn batch(&self, allocator: &Allocator) -> Batch {
        let single = |shape: &[usize], seed| {
            let to = allocator.tensor(DType::F32, shape, Category::Data).unwrap();
            let from = common::numbers(allocator, shape, seed);
            write(&to, &from.read::<f64>().unwrap());
            to
        };
        let inputs = single(&[&[BATCH], &self.input[..]].concat(), 1);
        if self.target_columns.is_none() {
            // Images of one class look alike, so that few steps suffice.
            let elems = inputs.num_elems() / BATCH;
            let patterns = common::numbers(allocator, &[10, elems], 5);
            let patterns = patterns.read::<f64>().unwrap();
            let mut images = inputs.write::<f32>().unwrap();
            for (at, image) in images.chunks_exact_mut(elems).enumerate() {
                let pattern = &patterns[at * 7 % 10 * elems..][..elems];
                image.iter_mut().zip(pattern).for_each(|(x, p)| *x = 0.3 * *x + *p as f32);
            }
        }
        let targets = match self.target_columns {
            Some(columns) => single(&[BATCH, columns], 2),
            None => {
                let labels: Vec<i64> = (0..BATCH as i64).map(|at| at * 7 % 10).collect();
                integers(allocator, &[BATCH], &labels)
            }
        };
        Batch::new(inputs, targets)
    }
}

struct Run {
    compute: Compute,
    storage: Storage,
    batch: Batch,
}

impl Run {
    fn new(case: &Case, precision: Precision, threads: usize) -> Self {
        let compute = Compute::new(threads, Allocator::new()).unwrap();
        let allocator = &compute.allocator;
        let storage = initialized(&case.model, precision, allocator, 3);
        let batch = case.batch(allocator);
        Self { compute, storage, batch }
    }

    /// Both passes over the batch. Returns the mean loss and the gradient of the input.
    fn differentiate(&self, model: &Model) -> (f64, Tensor) {
        let Self { compute, storage, batch } = self;
        let (sums, scale) = (sums(&compute.allocator), 1.0 / BATCH as f64);
        let d_input = in_training(compute, storage, batch, |cx| {
            let (network, whole) = (model.network(), Half::Whole { wants_input: true });
            let (output, mut saved) = network.forward(cx, batch.inputs().clone()).unwrap();
            assert_eq!(output.dtype(), storage.precision().compute);
            let d_output = model.differentiate(cx, &output, scale, &sums, None).unwrap();
            assert_eq!(d_output.dtype(), output.dtype());
            let d_input = network.backward(cx, &mut saved, d_output, whole).unwrap();
            cx.close_roots().unwrap();
            d_input.unwrap()
        });
        (sums.read::<f64>().unwrap()[0] * scale, d_input)
    }

    fn gradients(&self) -> Vec<f32> {
        self.storage.grads().tensor().read::<f32>().unwrap().to_vec()
    }
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| -> f64 {
        a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
    };
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

/// The least cosine between the gradients of both types, of all parameters and of each. Rounding changes each activation by
/// up to 1/256, which sends some gradients through another position of a pool, or stops them at a ReLU. Measured were 0.9975
/// for all parameters, 0.9908 for the input and 0.9937 for a single parameter, at least.
const ALL: f64 = 0.995;
const EACH: f64 = 0.98;

/// How far a loss may be from that in f32, as a part of it. 0.4% was measured after ten steps.
const LOSSES: f64 = 0.02;

/// The losses before each of some steps of SGD.
fn losses(case: &Case, precision: Precision) -> Vec<f64> {
    let run = Run::new(case, precision, 1);
    let config = OptimizerConfig::Sgd(Sgd { lr: case.lr, momentum: 0.9, weight_decay: 0.0 });
    let mut optimizer = Optimizer::new(config, &run.storage, &run.compute.allocator).unwrap();
    let step = |_| {
        let (loss, _) = run.differentiate(&case.model);
        optimizer.step(&run.compute, &run.storage).unwrap();
        loss
    };
    (0..10).map(step).collect()
}

#[test]
fn gradients_point_where_those_of_f32_point() {
    for (case, precision) in Case::all().iter().flat_map(|case| HALVES.map(|half| (case, half))) {
        let single = Run::new(case, Precision::F32, 1);
        let half = Run::new(case, precision, 1);
        let (want, want_input) = single.differentiate(&case.model);
        let (got, got_input) = half.differentiate(&case.model);
        let (got_input, want_input) =
            (got_input.read::<f32>().unwrap(), want_input.read::<f32>().unwrap());
        let loss = (got - want).abs() / want;
        assert!(loss < 0.001, "{}: loss {got}, {want} in f32", case.name);
        let check = |what: &str, got: &[f32], want: &[f32], least: f64| {
            let cosine = cosine(got, want);
            println!("{}, {what}: cosine {cosine}", case.name);
            assert!(cosine > least, "{}, {what}: cosine {cosine}", case.name);
        };
        check("input", &got_input, &want_input, EACH);
        check("all gradients", &half.gradients(), &single.gradients(), ALL);
        for (at, param) in case.model.layout.params().iter().enumerate() {
            // The mean that a normalization subtracts takes a bias along, so its gradient is nothing but rounding errors.
            if case.is_normalized && param.name.starts_with("conv") && param.name.ends_with("bias")
            {
                continue;
            }
            let [got, want] = [&half, &single].map(|run| {
                let grad = run.storage.grad(ParamId(at)).unwrap();
                grad.read::<f32>().unwrap().to_vec()
            });
            check(&param.name, &got, &want, EACH);
        }
    }
}

#[test]
fn ten_steps_reduce_the_loss_as_in_f32() {
    for (case, precision) in Case::all().iter().flat_map(|case| HALVES.map(|half| (case, half))) {
        let (got, want) = (losses(case, precision), losses(case, Precision::F32));
        println!("{}: {got:.4?}, {want:.4?} in f32", case.name);
        for (step, (got, want)) in got.iter().zip(&want).enumerate() {
            let apart = (got - want).abs() / want;
            assert!(apart < LOSSES, "{}, step {step}: loss {got}, {want} in f32", case.name);
        }
        let (first, last) = (got[0], got[got.len() - 1]);
        assert!(last < 0.95 * first, "{}: {first} became {last}", case.name);
    }
}

#[test]
fn bits_of_gradients_do_not_depend_on_the_number_of_threads() {
    for case in Case::all() {
        let bits = |threads| {
            let run = Run::new(&case, BF16, threads);
            let (loss, _) = run.differentiate(&case.model);
            let grads: Vec<u32> = run.gradients().iter().map(|grad| grad.to_bits()).collect();
            (loss.to_bits(), grads)
        };
        let one = bits(1);
        for threads in [2, 3] {
            assert!(bits(threads) == one, "{}, {threads} threads", case.name);
        }
    }
}
