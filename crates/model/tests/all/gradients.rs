//! Backward passes against finite differences in double precision. `pytorch.rs` compares values with
//! PyTorch's, and `backward_rules.rs` tests the rules of writing and announcing.

use paceline_kernels::function::{self, Function};
use paceline_kernels::linear::Activation;
use paceline_kernels::{Compute, Real};
use paceline_memory::{Allocator, Category, DType, Tensor};
use paceline_model::layers::{
    BatchNorm, Checkpointed, Conv2d, ConvReluPool, Elementwise, Flatten, Linear, MaxPool2d, Relu,
    Residual, RmsNorm, Sequence, SwiGlu,
};
use paceline_model::{
    Batch, CrossEntropy, Init, Layer, Layout, LayoutBuilder, MeanSquaredError, MlpConfig,
    Objective, Storage, UnitBuilder, gradcheck,
};

use crate::common::{
    cnn, cnn_with_batch_norm, conv, every_layer, in_training, integers, mlp, mlp_config, numbers,
    pool, sums,
};

/// The finite differences have errors of about 1e-9: the rounding error of sums up to about ten, 1e-15,
/// divided by the step of 1e-6. A wrong term would cause an error as large as a gradient, about one.
const TOLERANCE: f64 = 1e-8;

/// Seeds for which no kink (the zero of a ReLU, or a tie of a maximum) lies within a step of an input. A seed
/// with such a kink fails with an error as large as a gradient, in a single element; choose another seed
/// then.
const SEEDS: [u64; 4] = [1, 2, 3, 4];

fn check(layer: &dyn Layer, layout: &Layout, input_shape: &[usize], what: &str) {
    for seed in SEEDS {
        let worst = gradcheck::worst_error(layer, layout, input_shape, seed).unwrap();
        assert!(worst < TOLERANCE, "{what}, seed {seed}: off by {worst:e}");
    }
}

/// A layer with parameters of its own.
fn check_built<L: Layer>(
    build: impl FnOnce(&mut UnitBuilder) -> L,
    input_shape: &[usize],
    what: &str,
) {
    let mut layout = LayoutBuilder::new();
    let mut unit = layout.unit("all");
    let layer = build(&mut unit);
    check(&layer, &layout.finish(1), input_shape, what);
}

#[test]
fn conv2d_in_several_geometries() {
    for geometry in [
        conv([5, 4], [2, 3], (3, 3), 1, 1),
        conv([6, 7], [2, 3], (3, 3), 2, 1),
        conv([4, 3], [3, 2], (1, 1), 1, 0),
        conv([6, 5], [2, 2], (5, 3), 1, 2),
        conv([7, 6], [1, 3], (2, 4), 2, 1),
        // No window covers the last row and column.
        conv([5, 5], [2, 2], (2, 2), 2, 0),
        conv([3, 7], [2, 2], (1, 3), 3, 0),
    ] {
        let build = |unit: &mut UnitBuilder| Conv2d::new(unit, geometry).unwrap();
        check_built(build, &geometry.input_shape(2), &format!("{geometry:?}"));
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
        let build = |unit: &mut UnitBuilder| ConvReluPool::new(unit, geometry).unwrap();
        check_built(build, &geometry.input_shape(2), &format!("{geometry:?}"));
    }
}

#[test]
fn linear_with_and_without_relu() {
    for activation in [Activation::None, Activation::Relu] {
        let build = |unit: &mut UnitBuilder| Linear::new(unit, 7, 5, activation);
        check_built(build, &[4, 7], &format!("{activation:?}"));
    }
}

#[test]
fn a_projection_of_one_and_of_several_parts() {
    let init = Init::Normal { std: 0.4 };
    for parts in [&[("weight", 3)][..], &[("q", 4), ("k", 2), ("v", 3)]] {
        let build = |unit: &mut UnitBuilder| Linear::projection(unit, 8, parts, init).unwrap();
        check_built(build, &[4, 8], &format!("{parts:?}"));
    }
    let mut layout = LayoutBuilder::new();
    let mut unit = layout.unit("fc");
    let refused = Linear::projection(&mut unit, 7, &[("q", 4), ("k", 2)], init);
    let reason = "q has 4 x 7 elements, and this number must be a multiple of 16";
    assert_eq!(refused.unwrap_err().to_string(), reason);
}

#[test]
fn the_parts_of_a_language_model() {
    check_built(|unit| RmsNorm::new(unit, "weight", 6, 1e-5), &[4, 6], "rms norm");
    check_built(|_| SwiGlu, &[4, 6], "swiglu");
    let feed_forward = |unit: &mut UnitBuilder| {
        let norm = RmsNorm::new(unit, "norm", 8, 1e-5);
        let init = Init::Normal { std: 0.4 };
        let parts = [("gate", 6), ("up", 6)];
        let gate_up = Linear::projection(unit, 8, &parts, init).unwrap();
        let down = Linear::projection(unit, 6, &[("down", 8)], init).unwrap();
        Residual(Sequence::new().then(norm).then(gate_up).then(SwiGlu).then(down))
    };
    check_built(feed_forward, &[4, 8], "residual feed-forward layer");
}

/// The sum of a residual layer must not overwrite what the layer within it saves or returns.
#[test]
fn a_residual_layer_around_one_that_needs_its_output() {
    let nothing = LayoutBuilder::new().finish(1);
    check(&Residual(Relu), &nothing, &[3, 11], "ReLU");
    check(&Residual(Residual(Relu)), &nothing, &[3, 11], "ReLU, twice");
    check(&Residual(Checkpointed(Relu)), &nothing, &[3, 11], "checkpointed ReLU");
    check(&Residual(Sequence::new()), &nothing, &[3, 11], "the identity");
    let view_of_saved = Sequence::new().then(Relu).then(Flatten);
    check(&Residual(view_of_saved), &nothing, &[3, 11], "ReLU, flattened");
    let linear = |unit: &mut UnitBuilder| Residual(Linear::new(unit, 5, 5, Activation::Relu));
    check_built(linear, &[4, 5], "linear with ReLU");
    let ends_with_relu = |unit: &mut UnitBuilder| {
        Residual(Sequence::new().then(RmsNorm::new(unit, "weight", 6, 1e-5)).then(Relu))
    };
    check_built(ends_with_relu, &[4, 6], "a sequence that ends with ReLU");
}

#[test]
fn a_checkpointed_layer() {
    let build = |unit: &mut UnitBuilder| Checkpointed(Linear::new(unit, 7, 5, Activation::Relu));
    check_built(build, &[4, 7], "checkpointed");
}

#[test]
fn batch_norm_of_images_and_rows_with_and_without_relu() {
    for activation in [Activation::None, Activation::Relu] {
        for shape in [&[2, 3, 4, 5][..], &[6, 19]] {
            let channels = shape[shape.len() - 1];
            let build = |unit: &mut UnitBuilder| BatchNorm::new(unit, channels, activation);
            check_built(build, shape, &format!("{activation:?} {shape:?}"));
        }
    }
}

#[test]
fn layers_without_parameters() {
    let layout = LayoutBuilder::new().finish(1);
    for (height, width, window, stride) in [(8, 7, 3, 2), (6, 5, 2, 2), (5, 5, 2, 3), (4, 4, 3, 1)]
    {
        let geometry = pool([height, width], 3, window, stride);
        let layer = MaxPool2d::new(geometry).unwrap();
        check(&layer, &layout, &geometry.input_shape(2), &format!("{geometry:?}"));
    }
    check(&Relu, &layout, &[3, 11], "ReLU");
    check(&Flatten, &layout, &[2, 3, 4, 2], "flatten");
    check(&Sequence::new(), &layout, &[3, 2], "an empty sequence");
}

#[test]
fn a_sequence_of_every_layer() {
    let model = every_layer();
    check(&model.network(), &model.layout, &[2, 9, 9, 2], "every layer");
}

#[test]
fn whole_networks() {
    let (cnn, mlp, cnn_bn) = (cnn(), mlp(), cnn_with_batch_norm());
    check(&cnn_bn.network(), &cnn_bn.layout, &[3, 9, 8, 2], "CNN with batch norm");
    check(&cnn.network(), &cnn.layout, &[3, 9, 8, 2], "CNN");
    check(&mlp.network(), &mlp.layout, &[5, 6], "MLP");
    let config = MlpConfig { tie_layers: true, ..mlp_config([6, 5, 3], 3) };
    let tied = config.build(1).unwrap();
    check(&tied.network(), &tied.layout, &[5, 6], "MLP with tied layers");
}

/// Compares `scale` times the finite differences of the loss with its gradient.
fn check_objective(objective: &dyn Objective, output: &Tensor, target: &Tensor, scale: f64) {
    const STEP: f64 = 1e-6;
    let compute = Compute::new(1, Allocator::new()).unwrap();
    let storage_of_nothing = LayoutBuilder::new().finish(1).into();
    let storage = Storage::private(storage_of_nothing, DType::F64, &compute.allocator).unwrap();
    let batch = Batch::new(output.clone(), target.clone());
    let sums = || sums(&compute.allocator);
    let evaluate = || {
        let sums = sums();
        in_training(&compute, &storage, &batch, |cx| {
            objective.evaluate(cx, output, &sums).unwrap();
        });
        sums.read::<f64>().unwrap().to_vec()
    };
    let of_gradient = sums();
    let gradient = in_training(&compute, &storage, &batch, |cx| {
        objective.differentiate(cx, output, scale, &of_gradient, None).unwrap()
    });
    let of_gradient = of_gradient.read::<f64>().unwrap();
    assert_eq!(*of_gradient, *evaluate(), "the scale is the gradient's alone");
    assert_eq!(of_gradient[2], 5.0, "five samples");
    for (at, gradient) in gradient.read::<f64>().unwrap().iter().enumerate() {
        let value = output.read::<f64>().unwrap()[at];
        let side = |offset: f64| {
            output.write::<f64>().unwrap()[at] = value + offset;
            evaluate()[0]
        };
        let difference = scale * (side(STEP) - side(-STEP)) / (2.0 * STEP);
        output.write::<f64>().unwrap()[at] = value;
        assert!((gradient - difference).abs() < TOLERANCE, "[{at}]: {gradient}, not {difference}");
    }
}

#[test]
fn losses_by_finite_differences() {
    let allocator = Allocator::new();
    for (seed, scale) in [(1, 1.0), (2, 0.25), (3, -3.0)] {
        let output = numbers(&allocator, &[5, 7], seed);
        let labels = integers(&allocator, &[5], &[3, 0, 6, 6, 1]);
        let targets = numbers(&allocator, &[5, 7], seed + 100);
        check_objective(&CrossEntropy, &output, &labels, scale);
        check_objective(&MeanSquaredError, &output, &targets, scale);
    }
}

/// Two parameters: `a x + tanh(b x)`.
#[derive(Clone)]
struct Bent;

impl Function<2> for Bent {
    const NAME: &'static str = "bent";

    fn value<T: Real>(&self, x: T, [a, b]: [T; 2]) -> T {
        a * x + (b * x).tanh()
    }

    fn derivatives<T: Real>(&self, x: T, [a, b]: [T; 2]) -> (T, [T; 2]) {
        let tanh = (b * x).tanh();
        let slope = T::from_f64(1.0) - tanh * tanh;
        (a + b * slope, [x, x * slope])
    }
}

#[derive(Clone)]
struct Square;

impl Function<0> for Square {
    const NAME: &'static str = "square";

    fn value<T: Real>(&self, x: T, _: [T; 0]) -> T {
        x * x
    }

    fn derivatives<T: Real>(&self, x: T, _: [T; 0]) -> (T, [T; 0]) {
        (x + x, [])
    }
}

#[test]
fn stated_functions() {
    let params = [("a", Init::Constant(0.5)), ("b", Init::Constant(2.0))];
    check_built(|unit| Elementwise::new(unit, Bent, 6, params), &[4, 6], "two parameters");
    check_built(|_| Elementwise::of(Square), &[4, 6], "none");
}

/// The same bits with any number of threads, which share many elements.
#[test]
fn threads_compute_the_same_bits_of_a_stated_function() {
    let bits = |threads| {
        let allocator = Allocator::new();
        let compute = Compute::new(threads, allocator.clone()).unwrap();
        let filled = |shape: &[usize], seed: f32| {
            let to = allocator.tensor(DType::F32, shape, Category::Data).unwrap();
            let values = (0..).map(|at| (at as f32 * 0.37 + seed).sin());
            to.write::<f32>().unwrap().iter_mut().zip(values).for_each(|(to, value)| *to = value);
            to
        };
        let [x, dy, y] = [1.0, 2.0, 0.0].map(|seed| filled(&[1000, 300], seed));
        let [a, b, d_a, d_b] = [3.0, 4.0, 0.5, 0.5].map(|seed| filled(&[300], seed));
        let grads = [(&d_a, false), (&d_b, true)];
        function::parameter_gradients(&compute, &Bent, &x, [&a, &b], &dy, grads).unwrap();
        function::value(&compute, &Bent, &x, [&a, &b], &y).unwrap();
        let dx = filled(&[1000, 300], 0.0);
        function::input_gradient(&compute, &Bent, &x, [&a, &b], &dy, &dx).unwrap();
        [y, d_a, d_b, dx].map(|tensor| tensor.read::<f32>().unwrap().to_vec())
    };
    assert_eq!(bits(1), bits(3));
}
