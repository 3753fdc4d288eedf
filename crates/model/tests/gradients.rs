//! Backward passes: against finite differences in double precision, and the rules by which they
//! write, add and announce gradients. Values are compared with PyTorch's in `pytorch.rs`.

use paceline_kernels::Compute;
use paceline_kernels::conv2d;
use paceline_kernels::linear::Activation;
use paceline_kernels::pool2d;
use paceline_memory::{Allocator, Category, DType, Tensor};
use paceline_model::layers::{Conv2d, ConvReluPool, Flatten, Linear, MaxPool2d, Relu, Sequence};
use paceline_model::{
    CnnConfig, Context, Layer, Layout, LayoutBuilder, Loss, MlpConfig, Model, ParamId, Storage,
    Which, gradcheck,
};

/// The finite differences have errors of about 1e-10 (rounding, divided by the step of 1e-6, of
/// sums up to about ten). A wrong term is off by the size of a gradient, that is by about one.
const TOLERANCE: f64 = 1e-8;

/// Seeds for which no kink, a ReLU's zero or a tie of a maximum, lies within a step of an input.
/// Such a seed fails with an error of the size of a gradient for a single element; take another.
const SEEDS: [u64; 4] = [1, 2, 3, 4];

fn check(layer: &dyn Layer, layout: &Layout, input_shape: &[usize], what: &str) {
    for seed in SEEDS {
        let worst = gradcheck::worst_error(layer, layout, input_shape, seed).unwrap();
        assert!(worst < TOLERANCE, "{what}, seed {seed}: off by {worst:e}");
    }
}

/// A convolution: image, channels in and out, kernel, stride, padding.
fn conv(
    [height, width]: [usize; 2],
    [c_in, c_out]: [usize; 2],
    kernel: (usize, usize),
    stride: usize,
    padding: usize,
) -> conv2d::Conv2d {
    conv2d::Conv2d { height, width, c_in, c_out, kernel, stride, padding }
}

fn cnn() -> Model {
    CnnConfig { image: [9, 8, 2], channels: vec![3, 4], hidden: 6, num_classes: 5 }
        .build(2)
        .unwrap()
}

fn mlp() -> Model {
    MlpConfig { input_dim: 6, hidden_dim: 7, output_dim: 3, num_layers: 2 }.build(2).unwrap()
}

#[test]
fn conv2d_in_several_geometries() {
    for geometry in [
        conv([5, 4], [2, 3], (3, 3), 1, 1),
        conv([6, 7], [2, 3], (3, 3), 2, 1),
        conv([4, 3], [3, 2], (1, 1), 1, 0),
        conv([6, 5], [2, 2], (5, 3), 1, 2),
        conv([7, 6], [1, 3], (2, 4), 2, 1),
        // The last row and column are reached by no window.
        conv([5, 5], [2, 2], (2, 2), 2, 0),
        conv([3, 7], [2, 2], (1, 3), 3, 0),
    ] {
        let mut layout = LayoutBuilder::new();
        layout.unit("conv");
        let layer = Conv2d::new(&mut layout, geometry).unwrap();
        check(&layer, &layout.finish(1), &geometry.input_shape(2), &format!("{geometry:?}"));
    }
}

#[test]
fn conv_relu_pool_in_several_geometries() {
    for geometry in [
        conv([6, 4], [2, 3], (3, 3), 1, 1),
        conv([7, 5], [2, 3], (3, 3), 1, 1),
        conv([5, 6], [1, 4], (3, 3), 1, 0),
        conv([9, 8], [2, 2], (3, 5), 2, 2),
        conv([5, 3], [3, 2], (1, 1), 1, 0),
    ] {
        let mut layout = LayoutBuilder::new();
        layout.unit("conv");
        let layer = ConvReluPool::new(&mut layout, geometry).unwrap();
        check(&layer, &layout.finish(1), &geometry.input_shape(2), &format!("{geometry:?}"));
    }
}

#[test]
fn linear_with_and_without_relu() {
    for activation in [Activation::None, Activation::Relu] {
        let mut layout = LayoutBuilder::new();
        layout.unit("fc");
        let layer = Linear::new(&mut layout, 7, 5, activation);
        check(&layer, &layout.finish(1), &[4, 7], &format!("{activation:?}"));
    }
}

#[test]
fn layers_without_parameters() {
    let layout = LayoutBuilder::new().finish(1);
    for (height, width, window, stride) in [(8, 7, 3, 2), (6, 5, 2, 2), (5, 5, 2, 3), (4, 4, 3, 1)]
    {
        let geometry = pool2d::MaxPool2d { height, width, channels: 3, window, stride };
        let layer = MaxPool2d::new(geometry).unwrap();
        check(&layer, &layout, &geometry.input_shape(2), &format!("{geometry:?}"));
    }
    check(&Relu, &layout, &[3, 11], "ReLU");
    check(&Flatten, &layout, &[2, 3, 4, 2], "flatten");
    check(&Sequence::new(), &layout, &[3, 2], "an empty sequence");
}

#[test]
fn a_sequence_of_every_layer() {
    let mut layout = LayoutBuilder::new();
    let mut network = Sequence::new();
    layout.unit("conv0");
    network.push(Conv2d::new(&mut layout, conv([9, 9], [2, 3], (3, 3), 1, 1)).unwrap());
    network.push(Relu);
    let pool = pool2d::MaxPool2d { height: 9, width: 9, channels: 3, window: 3, stride: 2 };
    network.push(MaxPool2d::new(pool).unwrap());
    layout.unit("conv1");
    network.push(ConvReluPool::new(&mut layout, conv([4, 4], [3, 4], (3, 3), 1, 1)).unwrap());
    network.push(Flatten);
    layout.unit("fc0");
    network.push(Linear::new(&mut layout, 16, 5, Activation::Relu));
    let mut tail = Sequence::new();
    layout.unit("fc1");
    tail.push(Linear::new(&mut layout, 5, 3, Activation::None));
    network.push(tail);
    check(&network, &layout.finish(3), &[2, 9, 9, 2], "every layer");
}

#[test]
fn whole_networks() {
    let (cnn, mlp) = (cnn(), mlp());
    check(&*cnn.network, &cnn.layout, &[3, 9, 8, 2], "CNN");
    check(&*mlp.network, &mlp.layout, &[5, 6], "MLP");
}

/// A tensor of numbers in -1..1 that look random, the same at every call.
fn numbers(allocator: &Allocator, shape: &[usize], seed: u64) -> Tensor {
    let tensor = allocator.tensor(DType::F64, shape, Category::Data).unwrap();
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    for x in tensor.write::<f64>().unwrap().iter_mut() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        *x = (state >> 11) as f64 / (1u64 << 52) as f64 - 1.0;
    }
    tensor
}

/// Compares `scale` times the finite differences of the loss with its gradient.
fn check_loss(loss: Loss, output: &Tensor, target: &Tensor, scale: f64) {
    const STEP: f64 = 1e-6;
    let compute = Compute::new(1, Allocator::new());
    let storage_of_nothing = LayoutBuilder::new().finish(1).into();
    let storage = Storage::host(storage_of_nothing, DType::F64, &compute.allocator).unwrap();
    let mut ignore = |_| Ok(());
    let cx = Context::new(&compute, &storage, false, &mut ignore);
    let (sums, gradient) = loss.differentiate(&cx, output, target, scale).unwrap();
    assert_eq!(sums, loss.evaluate(output, target).unwrap(), "the scale is the gradient's alone");
    for (at, gradient) in gradient.read::<f64>().unwrap().iter().enumerate() {
        let value = output.read::<f64>().unwrap()[at];
        let side = |offset: f64| {
            output.write::<f64>().unwrap()[at] = value + offset;
            loss.evaluate(output, target).unwrap().loss
        };
        let difference = scale * (side(STEP) - side(-STEP)) / (2.0 * STEP);
        output.write::<f64>().unwrap()[at] = value;
        assert!((gradient - difference).abs() < TOLERANCE, "{loss:?}[{at}]: {gradient}");
    }
}

#[test]
fn losses_by_finite_differences() {
    let allocator = Allocator::new();
    for (seed, scale) in [(1, 1.0), (2, 0.25), (3, -3.0)] {
        let output = numbers(&allocator, &[5, 7], seed);
        let labels = allocator.tensor(DType::I64, [5], Category::Data).unwrap();
        labels.write::<i64>().unwrap().copy_from_slice(&[3, 0, 6, 6, 1]);
        check_loss(Loss::CrossEntropy, &output, &labels, scale);
        check_loss(Loss::Mse, &output, &numbers(&allocator, &[5, 7], seed + 100), scale);
    }
}

/// A model with storage, an input and a gradient of its output.
struct Bench {
    model: Model,
    compute: Compute,
    storage: Storage,
    input: Tensor,
    d_output: Tensor,
}

impl Bench {
    fn all() -> [Self; 2] {
        [Self::new(cnn(), &[3, 9, 8, 2], &[3, 5]), Self::new(mlp(), &[4, 6], &[4, 3])]
    }

    fn new(model: Model, input_shape: &[usize], output_shape: &[usize]) -> Self {
        let compute = Compute::new(1, Allocator::new());
        let storage = Storage::host(model.layout.clone(), DType::F64, &compute.allocator).unwrap();
        storage.initialize(5).unwrap();
        let input = numbers(&compute.allocator, input_shape, 6);
        let d_output = numbers(&compute.allocator, output_shape, 7);
        Self { model, compute, storage, input, d_output }
    }

    fn fill_gradients(&self, value: f64) {
        self.storage.grads().write::<f64>().unwrap().fill(value);
    }

    fn gradient(&self, id: ParamId) -> Vec<f64> {
        self.storage.grad(id).unwrap().read::<f64>().unwrap().to_vec()
    }

    fn gradients(&self) -> Vec<Vec<f64>> {
        (0..self.model.layout.params().len()).map(|at| self.gradient(ParamId(at))).collect()
    }

    /// One forward pass, then the backward passes of `parts` over what it saved. Returns the last
    /// input gradient, and every announced parameter with its gradient at that moment.
    fn run(&self, accumulate: bool, parts: &[Which]) -> (Option<Vec<f64>>, Vec<Announced>) {
        let mut announced = Vec::new();
        let mut ready = |id: ParamId| {
            announced.push((id, self.gradient(id)));
            Ok(())
        };
        let mut cx = Context::new(&self.compute, &self.storage, accumulate, &mut ready);
        let network = &self.model.network;
        let (_, mut saved) = network.forward(&mut cx, self.input.clone()).unwrap();
        let mut d_input = None;
        for &which in parts {
            let d_output = self.d_output.clone();
            let gradient = network.backward(&mut cx, &mut saved, d_output, which).unwrap();
            d_input = gradient.map(|tensor| tensor.read::<f64>().unwrap().to_vec());
        }
        (d_input, announced)
    }
}

type Announced = (ParamId, Vec<f64>);

#[test]
fn the_two_halves_of_a_backward_pass_give_what_both_gives() {
    for bench in Bench::all() {
        // Whatever is not overwritten stays NaN, which equals nothing.
        bench.fill_gradients(f64::NAN);
        let (d_input, _) = bench.run(false, &[Which::Both]);
        let gradients = bench.gradients();
        assert!(d_input.is_some());

        bench.fill_gradients(7.0);
        let (of_input_alone, announced) = bench.run(false, &[Which::Input]);
        assert_eq!(of_input_alone, d_input);
        assert!(announced.is_empty(), "there is nothing to announce");
        assert!(bench.gradients().iter().flatten().all(|x| *x == 7.0), "gradients are touched");

        let (none, announced) = bench.run(false, &[Which::Weight]);
        assert_eq!(none, None, "the first layer can do without");
        assert_eq!(bench.gradients(), gradients);
        assert_eq!(announced.len(), gradients.len());

        // The input's gradient first, the parameters' later, from the same saved tensors.
        bench.fill_gradients(7.0);
        bench.run(false, &[Which::Input, Which::Weight]);
        assert_eq!(bench.gradients(), gradients);
    }
}

#[test]
fn accumulation_adds_to_what_is_there() {
    for bench in Bench::all() {
        bench.fill_gradients(f64::NAN);
        bench.run(false, &[Which::Both]);
        let once = bench.gradients();
        bench.run(true, &[Which::Both]);
        for (twice, once) in bench.gradients().concat().iter().zip(once.concat()) {
            // A sum that starts from the first pass rounds differently from twice that pass: f64
            // of a few hundred products of numbers below one.
            assert!((twice - 2.0 * once).abs() < 1e-13, "{twice}, not twice {once}");
        }
    }
}

#[test]
fn gradients_are_announced_once_and_final_from_the_last_to_the_first() {
    for bench in Bench::all() {
        for accumulate in [false, true] {
            let (_, announced) = bench.run(accumulate, &[Which::Both]);
            let order: Vec<usize> = announced.iter().map(|(id, _)| id.0).collect();
            let last_to_first: Vec<usize> = (0..bench.model.layout.params().len()).rev().collect();
            assert_eq!(order, last_to_first);
            for (id, when_announced) in announced {
                assert_eq!(bench.gradient(id), when_announced, "parameter {}", id.0);
            }
        }
    }
}
