//! Layers, losses, optimizers and whole models against PyTorch's results, which `fixtures/make.py` stored in
//! `fixtures/torch.safetensors`. Each case runs in f64, and in f32 with every kind of vector instructions
//! that this processor has.

use crate::common::{
    cnn_config, conv, in_training, mlp_config, pool, stored, sums, train, values, write,
};
use paceline_kernels::conv2d;
use paceline_kernels::linear::Activation;
use paceline_kernels::optimizer::{AdamW, Sgd};
use paceline_kernels::{Compute, SimdLevel};
use paceline_memory::{Allocator, Category, DType, Tensor};
use paceline_model::layers::{BatchNorm, Conv2d, ConvReluPool, Linear, MaxPool2d, Relu};
use paceline_model::{
    Batch, BufferId, CnnConfig, Context, CrossEntropy, Half, Init, Layer, LayoutBuilder,
    MeanSquaredError, Model, Objective, OpenUnits, Optimizer, OptimizerConfig, ParamId, Result,
    Storage, UnitBuilder,
};
use safetensors::SafeTensors;

static FILE: &[u8] = include_bytes!("../fixtures/torch.safetensors");

/// Every case of the file with its parameters, so that no case is forgotten and no case changes unnoticed.
const CASES: [(&str, &str); 21] = [
    ("adamw", "lr=0.01 betas=(0.9,0.999) eps=1e-08 weight_decay=0.1"),
    ("batch_norm", "eps=1e-05"),
    ("batch_norm_relu", "eps=1e-05"),
    ("batch_norm_rows", "eps=1e-05"),
    ("batch_norm_running", "eps=1e-05 momentum=0.1"),
    ("cnn", "image=1x12x12 channels=4,6 hidden=8 classes=10"),
    ("cnn_batch_norm", "image=1x12x12 channels=4,6 hidden=8 classes=10"),
    ("conv1x1", "stride=1 padding=0"),
    ("conv3x3", "stride=1 padding=1"),
    ("conv3x3wide", "stride=1 padding=1"),
    ("conv5x3s2", "stride=2 padding=1"),
    ("conv_relu_pool", "conv_stride=1 conv_padding=1 pool_window=2 pool_stride=2"),
    ("cross_entropy", "reduction=mean"),
    ("linear", ""),
    ("max_pool", "window=2 stride=2 padding=0"),
    ("max_pool3s2", "window=3 stride=2 padding=0"),
    ("mlp", "features=6,5,5,3"),
    ("mse", "reduction=mean"),
    ("relu", ""),
    ("sgd", "lr=0.1 momentum=0.9 weight_decay=0.01"),
    ("sgd_plain", "lr=0.1 momentum=0.0 weight_decay=0.0"),
];

/// One way to compute: an element type and vector instructions.
struct Setup {
    dtype: DType,
    compute: Compute,
    /// The largest error, relative to the largest expected value or one.
    tolerance: f64,
}

impl Setup {
    fn all() -> Vec<Self> {
        let compute = || Compute::new(1, Allocator::new()).unwrap();
        // Both sides sum up to a few hundred products of numbers of size one in f64. The different orders of
        // summation cause differences of about 1e-14.
        let mut setups = vec![Self { dtype: DType::F64, compute: compute(), tolerance: 1e-12 }];
        for level in SimdLevel::available() {
            let compute = compute().with_simd(level).unwrap();
            // The same sums with f32's rounding errors of 6e-8, which cause differences of at most 4e-7. The
            // fixtures keep a distance of 1e-4 from every kink, so that both types take the same side.
            setups.push(Self { dtype: DType::F32, compute, tolerance: 2e-6 });
        }
        setups
    }

    /// A stored tensor, converted to this element type. Labels stay integers.
    fn load(&self, name: &str) -> Tensor {
        let file = SafeTensors::deserialize(FILE).unwrap();
        let found = file.tensor(name).unwrap_or_else(|_| panic!("{name} is not in the file"));
        let is_label = found.dtype() == safetensors::Dtype::I64;
        let dtype = if is_label { DType::I64 } else { self.dtype };
        let tensor = self.compute.allocator.tensor(dtype, found.shape(), Category::Data).unwrap();
        if is_label {
            tensor.as_bytes().write::<u8>().unwrap().copy_from_slice(found.data());
        } else {
            write(&tensor, &stored(FILE, name).1);
        }
        tensor
    }

    fn assert_close(&self, got: &[f64], want: &[f64], name: &str) {
        let largest = want.iter().fold(1.0f64, |most, x| most.max(x.abs()));
        assert_eq!(got.len(), want.len(), "{name}");
        for (at, (got, want)) in got.iter().zip(want).enumerate() {
            let limit = self.tolerance * largest;
            let setting = (self.dtype, self.compute.simd());
            assert!((got - want).abs() < limit, "{name}[{at}] {setting:?}: {got}, not {want}");
        }
    }

    fn assert_tensor(&self, got: &Tensor, name: &str) {
        let (shape, want) = stored(FILE, name);
        assert_eq!(got.dims(), shape, "{name}");
        self.assert_close(&values(got), &want, name);
    }

    /// Runs a layer whose parameters have the names `<case>.weight` and `<case>.bias` in the file.
    fn check_layer(&self, case: &str, build: impl Fn(&mut UnitBuilder) -> Box<dyn Layer>) {
        let mut layout = LayoutBuilder::new();
        let mut unit = layout.unit(case);
        let layer = build(&mut unit);
        let storage = self.storage(layout, |param| param.to_string());
        let mut ready = |_| Ok(());
        let mut units = OpenUnits::new(storage.layout());
        let mut cx = Context::training(&self.compute, &storage, &mut units, &mut ready);
        cx.open_all().unwrap();
        let input = self.load(&format!("{case}.input"));
        let (output, mut saved) = layer.forward(&mut cx, input).unwrap();
        self.assert_tensor(&output, &format!("{case}.output"));
        let d_output = self.load(&format!("{case}.d_output"));
        let d_input = layer
            .backward(&mut cx, &mut saved, d_output, Half::Whole { wants_input: true })
            .unwrap()
            .unwrap();
        self.assert_tensor(&d_input, &format!("{case}.d_input"));
        for (at, param) in storage.layout().params().iter().enumerate() {
            let d_param = param.name.replace('.', ".d_");
            self.assert_tensor(&storage.grad(ParamId(at)).unwrap(), &d_param);
        }
    }

    /// Storage with the parameters from the file. `stored` maps a parameter's name to its name in the file.
    fn storage(&self, layout: LayoutBuilder, stored: impl Fn(&str) -> String) -> Storage {
        let layout = std::sync::Arc::new(layout.finish(1));
        let storage =
            Storage::private(layout.clone(), self.dtype, &self.compute.allocator).unwrap();
        self.copy_parameters(&storage, stored).unwrap();
        storage
    }

    fn copy_parameters(&self, to: &Storage, stored: impl Fn(&str) -> String) -> Result<()> {
        for (at, param) in to.layout().params().iter().enumerate() {
            let from = self.load(&stored(&param.name));
            assert_eq!(from.shape(), param.shape, "{}", param.name);
            let to = to.value(ParamId(at))?.as_bytes();
            to.write::<u8>()?.copy_from_slice(&from.as_bytes().read::<u8>()?);
        }
        Ok(())
    }

    /// Runs forward pass, loss and backward pass of a whole model.
    fn check_model(&self, case: &str, model: &Model, targets: &str) {
        let storage = Storage::private(model.layout.clone(), self.dtype, &self.compute.allocator);
        let storage = storage.unwrap();
        self.copy_parameters(&storage, |param| format!("{case}.param.{param}")).unwrap();
        let inputs = self.load(&format!("{case}.input"));
        let targets = self.load(&format!("{case}.{targets}"));
        let rows = inputs.dims()[0] as f64;
        let batch = Batch::new(inputs, targets);
        let sums = train(model, &self.compute, &storage, &batch, 1.0 / rows);
        let (_, want) = stored(FILE, &format!("{case}.loss"));
        self.assert_close(&[sums[0] / rows], &want, case);
        for (at, param) in model.layout.params().iter().enumerate() {
            let grad = storage.grad(ParamId(at)).unwrap();
            self.assert_tensor(&grad, &format!("{case}.grad.{}", param.name));
        }
    }

    /// Compares four optimizer steps of one parameter.
    fn check_optimizer(&self, case: &str, config: OptimizerConfig) {
        let mut layout = LayoutBuilder::new();
        let mut unit = layout.unit(case);
        let id = unit.param("param0", [17], Init::Constant(0.0));
        let storage = self.storage(layout, |param| param.to_string());
        let mut optimizer = Optimizer::new(config, &storage, &self.compute.allocator).unwrap();
        for step in 0..4 {
            let grad = storage.grad(id).unwrap().as_bytes();
            let from = self.load(&format!("{case}.grad{step}")).as_bytes();
            grad.write::<u8>().unwrap().copy_from_slice(&from.read::<u8>().unwrap());
            optimizer.step(&self.compute, &storage).unwrap();
            self.assert_tensor(&storage.value(id).unwrap(), &format!("{case}.param{}", step + 1));
        }
    }

    fn check_objective(
        &self,
        case: &str,
        objective: &dyn Objective,
        [output, target, gradient]: [&str; 3],
    ) {
        let layout = std::sync::Arc::new(LayoutBuilder::new().finish(1));
        let storage = Storage::private(layout, self.dtype, &self.compute.allocator).unwrap();
        let output = self.load(&format!("{case}.{output}"));
        let target = self.load(&format!("{case}.{target}"));
        let rows = output.dims()[0] as f64;
        let sums = sums(&self.compute.allocator);
        let batch = Batch::new(output.clone(), target);
        let d_output = in_training(&self.compute, &storage, &batch, |cx| {
            objective.differentiate(cx, &output, 1.0 / rows, &sums, None).unwrap()
        });
        let (_, want) = stored(FILE, &format!("{case}.loss"));
        self.assert_close(&[sums.read::<f64>().unwrap()[0] / rows], &want, case);
        self.assert_tensor(&d_output, &format!("{case}.{gradient}"));
    }
}

#[test]
fn the_file_holds_the_cases_that_are_tested_here() {
    let (_, header) = SafeTensors::read_metadata(FILE).unwrap();
    let mut stored: Vec<(String, String)> =
        header.metadata().clone().unwrap().into_iter().collect();
    stored.retain(|(case, _)| case != "torch");
    stored.sort();
    let known = CASES.map(|(case, parameters)| (case.to_string(), parameters.to_string()));
    assert_eq!(stored, known);
}

#[test]
fn convolutions() {
    for setup in Setup::all() {
        for (case, geometry) in [
            ("conv3x3", conv([6, 5], [3, 5], (3, 3), 1, 1)),
            ("conv5x3s2", conv([9, 8], [2, 4], (5, 3), 2, 1)),
            ("conv1x1", conv([4, 4], [3, 2], (1, 1), 1, 0)),
            ("conv3x3wide", conv([7, 5], [16, 33], (3, 3), 1, 1)),
        ] {
            setup.check_layer(case, |unit| Box::new(Conv2d::new(unit, geometry).unwrap()));
        }
        setup.check_layer("conv_relu_pool", |unit| {
            let geometry = conv2d::Conv2d::same3x3(7, 7, 3, 20);
            Box::new(ConvReluPool::new(unit, geometry).unwrap())
        });
    }
}

#[test]
fn other_layers() {
    for setup in Setup::all() {
        setup.check_layer("relu", |_| Box::new(Relu));
        for (case, geometry) in
            [("max_pool", pool([7, 6], 3, 2, 2)), ("max_pool3s2", pool([8, 9], 3, 3, 2))]
        {
            setup.check_layer(case, |_| Box::new(MaxPool2d::new(geometry).unwrap()));
        }
        let linear = |unit: &mut UnitBuilder| Linear::new(unit, 12, 7, Activation::None);
        setup.check_layer("linear", |unit| Box::new(linear(unit)));
    }
}

#[test]
fn batch_norm_of_a_batch() {
    for setup in Setup::all() {
        for (case, channels, activation) in [
            ("batch_norm", 6, Activation::None),
            ("batch_norm_rows", 21, Activation::None),
            ("batch_norm_relu", 18, Activation::Relu),
        ] {
            setup.check_layer(case, |l| Box::new(BatchNorm::new(l, channels, activation)));
        }
    }
}

#[test]
fn running_statistics_after_three_steps_and_evaluation_by_them() {
    let case = "batch_norm_running";
    for setup in Setup::all() {
        let mut layout = LayoutBuilder::new();
        let mut unit = layout.unit(case);
        let layer = BatchNorm::new(&mut unit, 5, Activation::None);
        let layout = std::sync::Arc::new(layout.finish(1));
        let storage = Storage::private(layout, setup.dtype, &setup.compute.allocator).unwrap();
        storage.initialize(1).unwrap();
        setup.copy_parameters(&storage, |param| param.to_string()).unwrap();
        let input = |step: usize| setup.load(&format!("{case}.input{step}"));
        let mut units = OpenUnits::new(storage.layout());
        for step in 0..3 {
            let mut ready = |_| Ok(());
            let mut cx = Context::training(&setup.compute, &storage, &mut units, &mut ready);
            cx.open_all().unwrap();
            layer.forward(&mut cx, input(step)).unwrap();
        }
        let assert_buffers = || {
            for (at, buffer) in storage.layout().buffers().iter().enumerate() {
                setup.assert_tensor(&storage.buffer(BufferId(at)).unwrap(), &buffer.name);
            }
        };
        assert_buffers();
        let mut ready = |_| Ok(());
        let mut cx = Context::evaluation(&setup.compute, &storage, &mut units, &mut ready);
        cx.open_all().unwrap();
        let (output, _) = layer.forward(&mut cx, input(0)).unwrap();
        setup.assert_tensor(&output, &format!("{case}.output"));
        // Evaluation has not changed the buffers.
        assert_buffers();
    }
}

#[test]
fn losses() {
    for setup in Setup::all() {
        let names = ["logits", "labels", "d_logits"];
        setup.check_objective("cross_entropy", &CrossEntropy, names);
        setup.check_objective("mse", &MeanSquaredError, ["input", "target", "d_input"]);
    }
}

#[test]
fn optimizers() {
    let sgd = |momentum, weight_decay| Sgd { lr: 0.1, momentum, weight_decay };
    let adamw = AdamW { lr: 0.01, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.1 };
    for setup in Setup::all() {
        setup.check_optimizer("sgd", OptimizerConfig::Sgd(sgd(0.9, 0.01)));
        setup.check_optimizer("sgd_plain", OptimizerConfig::Sgd(sgd(0.0, 0.0)));
        setup.check_optimizer("adamw", OptimizerConfig::AdamW(adamw));
    }
}

#[test]
fn models() {
    let cnn = cnn_config([12, 12, 1], &[4, 6], 8, 10);
    let with_batch_norm = CnnConfig { batch_norm: true, ..cnn.clone() };
    let mlp = mlp_config([6, 5, 3], 2);
    for setup in Setup::all() {
        setup.check_model("cnn", &cnn.build(1).unwrap(), "labels");
        setup.check_model("cnn_batch_norm", &with_batch_norm.build(1).unwrap(), "labels");
        setup.check_model("mlp", &mlp.build(1).unwrap(), "target");
    }
}
