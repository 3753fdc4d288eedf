//! The rules of a backward pass: which gradients it computes, whether it overwrites or adds, and when it
//! announces them. `gradients.rs` tests that the gradients are correct.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use paceline_kernels::linear::Activation;
use paceline_kernels::rotary::RotaryConfig;
use paceline_kernels::{Compute, elementwise};
use paceline_memory::{Allocator, DType, Tensor};
use paceline_model::layers::{Attention, Checkpointed, Linear, Residual, Rotary, Sequence};
use paceline_model::{
    Batch, Block, Context, Half, Init, Layer, LayoutBuilder, MlpConfig, Model, OpenUnits, ParamId,
    Result, Saved, Storage,
};

use crate::common::{
    checkpointed, cnn, cnn_with_batch_norm, every_layer, in_training, initialized, mlp, mlp_config,
    numbers,
};

const WHOLE: Half = Half::Whole { wants_input: true };
const INPUT: Half = Half::Input { wants_input: true };

/// A model with storage, an input and a gradient of its output.
struct Bench {
    model: Model,
    compute: Compute,
    storage: Storage,
    input: Tensor,
    d_output: Tensor,
    units: RefCell<OpenUnits>,
}

impl Bench {
    fn all() -> [Self; 4] {
        [
            Self::new(cnn(), &[3, 9, 8, 2], &[3, 5]),
            Self::new(cnn_with_batch_norm(), &[3, 9, 8, 2], &[3, 5]),
            Self::new(mlp(), &[4, 6], &[4, 3]),
            Self::new(every_layer(), &[2, 9, 9, 2], &[2, 3]),
        ]
    }

    fn new(model: Model, input_shape: &[usize], output_shape: &[usize]) -> Self {
        let compute = Compute::new(1, Allocator::new()).unwrap();
        let storage = initialized(&model, DType::F64, &compute.allocator, 5);
        let input = numbers(&compute.allocator, input_shape, 6);
        let d_output = numbers(&compute.allocator, output_shape, 7);
        let units = RefCell::new(OpenUnits::new(&model.layout));
        Self { model, compute, storage, input, d_output, units }
    }

    /// To attention, the rows are one sequence.
    fn batch(&self) -> Batch {
        let tokens = numbers(&self.compute.allocator, &[1, self.input.dims()[0]], 8);
        Batch::new(tokens.clone(), tokens)
    }

    /// The error of a forward pass, and of backward passes of `halves` after it.
    fn error(&self, halves: &[Half]) -> String {
        let network = &self.model.network();
        in_training(&self.compute, &self.storage, &self.batch(), |cx| {
            let (_, mut saved) = network.forward(cx, self.input.clone())?;
            let mut passes = halves.iter();
            passes.try_for_each(|half| {
                network.backward(cx, &mut saved, self.d_output.clone(), *half).map(drop)
            })
        })
        .unwrap_err()
        .to_string()
    }

    fn fill_gradients(&self, value: f64) {
        self.storage.grads().tensor().write::<f64>().unwrap().fill(value);
    }

    fn gradient(&self, id: ParamId) -> Vec<f64> {
        self.storage.grad(id).unwrap().read::<f64>().unwrap().to_vec()
    }

    fn gradients(&self) -> Vec<Vec<f64>> {
        (0..self.model.layout.params().len()).map(|at| self.gradient(ParamId(at))).collect()
    }

    /// Runs one forward pass, then one backward pass for each of `halves`. Returns the last
    /// input gradient, and every announced parameter with its gradient at that time.
    fn run(&self, accumulate: bool, halves: &[Half]) -> (Option<Vec<f64>>, Vec<Announced>) {
        let mut announced = Vec::new();
        let mut ready = |id: ParamId| {
            announced.push((id, self.gradient(id)));
            Ok(())
        };
        let mut units = self.units.borrow_mut();
        if !accumulate {
            units.begin_step(1, true);
        }
        let batch = self.batch();
        let cx = Context::training(&self.compute, &self.storage, &mut units, &mut ready);
        let mut cx = cx.with_batch(&batch);
        cx.open_roots().unwrap();
        let network = &self.model.network();
        let (_, mut saved) = network.forward(&mut cx, self.input.clone()).unwrap();
        let mut d_input = None;
        for half in halves {
            let d_output = self.d_output.clone();
            let gradient = network.backward(&mut cx, &mut saved, d_output, *half).unwrap();
            d_input = gradient.map(|tensor| tensor.read::<f64>().unwrap().to_vec()).or(d_input);
        }
        (d_input, announced)
    }
}

type Announced = (ParamId, Vec<f64>);

#[test]
fn the_two_halves_of_a_backward_pass_give_what_both_gives() {
    for bench in Bench::all() {
        // Elements that are not overwritten stay NaN, which equals nothing.
        bench.fill_gradients(f64::NAN);
        let (d_input, _) = bench.run(false, &[WHOLE]);
        let gradients = bench.gradients();
        assert!(d_input.is_some());

        bench.fill_gradients(7.0);
        let (of_input_alone, announced) = bench.run(false, &[INPUT]);
        assert_eq!(of_input_alone, d_input);
        assert!(announced.is_empty(), "there is nothing to announce");
        assert!(bench.gradients().iter().flatten().all(|x| *x == 7.0), "gradients are touched");

        let (none, announced) = bench.run(false, &[Half::Weight]);
        assert_eq!(none, None);
        assert_eq!(bench.gradients(), gradients);
        assert_eq!(announced.len(), gradients.len());

        // One after the other, from the same saved tensors.
        for order in [[INPUT, Half::Weight], [Half::Weight, INPUT]] {
            bench.fill_gradients(7.0);
            let (of_input, _) = bench.run(false, &order);
            assert_eq!(of_input, d_input);
            assert_eq!(bench.gradients(), gradients);
        }
    }
}

/// The identity, which counts how often its input gradient is asked for.
struct Counting<'a> {
    calls: &'a AtomicUsize,
    has_parameters: bool,
}

impl Layer for Counting<'_> {
    fn has_parameters(&self) -> bool {
        self.has_parameters
    }

    fn forward(&self, _cx: &mut Context, input: Tensor) -> Result<(Tensor, Saved)> {
        Ok((input, Saved::default()))
    }

    fn backward(
        &self,
        _cx: &mut Context,
        _saved: &mut Saved,
        d_output: Tensor,
        half: Half,
    ) -> Result<Option<Tensor>> {
        self.calls.fetch_add(usize::from(half.wants_input()), Ordering::Relaxed);
        Ok(Some(d_output))
    }
}

#[test]
fn no_half_of_a_backward_pass_repeats_work_of_the_other() {
    static CALLS: AtomicUsize = AtomicUsize::new(0);
    let mut model = mlp();
    let unit = model.blocks[0].unit;
    let counting = || Counting { calls: &CALLS, has_parameters: true };
    model.blocks = (0..3).map(|_| Block::new(unit, counting())).collect();
    let bench = Bench::new(model, &[4, 6], &[4, 6]);
    for (parts, calls) in [
        (&[WHOLE][..], 3),
        // The first layer can do without.
        (&[Half::Weight], 2),
        (&[Half::Weight, INPUT], 3),
        (&[INPUT, Half::Weight], 3),
    ] {
        CALLS.store(0, Ordering::Relaxed);
        bench.run(false, parts);
        assert_eq!(CALLS.load(Ordering::Relaxed), calls);
    }
}

#[test]
fn a_layer_around_one_without_parameters_has_none() {
    static CALLS: AtomicUsize = AtomicUsize::new(0);
    let mut model = mlp();
    let unit = model.blocks[0].unit;
    let counting = || Counting { calls: &CALLS, has_parameters: false };
    let layers = Sequence::new()
        .then(Residual(counting()))
        .then(Checkpointed(counting()))
        .then(Residual(Checkpointed(counting())));
    model.blocks = vec![Block::new(unit, layers)];
    let bench = Bench::new(model, &[4, 6], &[4, 6]);
    for (parts, calls) in [(&[Half::Weight][..], 0), (&[INPUT, Half::Weight], 3)] {
        CALLS.store(0, Ordering::Relaxed);
        bench.run(false, parts);
        assert_eq!(CALLS.load(Ordering::Relaxed), calls);
    }
}

#[test]
fn a_checkpointed_model_gives_the_same_bits_and_leaves_statistics_alone() {
    for (at, plain) in Bench::all().into_iter().enumerate() {
        let bench = Bench::all().into_iter().nth(at).unwrap();
        let bench = Bench { model: checkpointed(bench.model), ..bench };
        for parts in [&[WHOLE][..], &[INPUT, Half::Weight]] {
            let (d_input, announced) = plain.run(false, parts);
            let (again, announced_again) = bench.run(false, parts);
            assert_eq!(again, d_input);
            assert_eq!(announced_again, announced);
            let buffers = |bench: &Bench| bench.storage.buffers().read::<f64>().unwrap().to_vec();
            assert_eq!(buffers(&bench), buffers(&plain), "running statistics");
        }
    }
}

/// `y = x + inner(x)`, in memory of its own, with what the inner layer saves.
struct Skip(Linear);

impl Layer for Skip {
    fn forward(&self, cx: &mut Context, input: Tensor) -> Result<(Tensor, Saved)> {
        let (output, saved) = self.0.forward(cx, input.clone())?;
        let sum = cx.activation(output.shape())?;
        cx.compute.copy(&output, &sum)?;
        elementwise::add(cx.compute, &input, &sum)?;
        Ok((sum, saved))
    }

    fn backward(
        &self,
        cx: &mut Context,
        saved: &mut Saved,
        d_output: Tensor,
        half: Half,
    ) -> Result<Option<Tensor>> {
        let d_input = self.0.backward(cx, saved, d_output.clone(), half)?;
        if let Some(d_input) = &d_input {
            elementwise::add(cx.compute, &d_output, d_input)?;
        }
        Ok(d_input)
    }
}

#[test]
fn the_weight_half_leaves_the_gradient_of_the_output_to_the_input_half() {
    let mut layout = LayoutBuilder::new();
    let mut block = |name: &str| {
        let mut unit = layout.unit(name);
        Block::new(unit.id, Skip(Linear::new(&mut unit, 6, 6, Activation::Relu)))
    };
    let blocks = vec![block("first"), block("second")];
    let model = Model { blocks, layout: Arc::new(layout.finish(1)), ..mlp() };
    let bench = Bench::new(model, &[4, 6], &[4, 6]);
    let (d_input, announced) = bench.run(false, &[WHOLE]);
    for halves in [[Half::Weight, INPUT], [INPUT, Half::Weight]] {
        assert_eq!(bench.run(false, &halves), (d_input.clone(), announced.clone()));
    }
}

/// Attention keeps its output, and a residual layer adds its input to that.
#[test]
fn attention_in_a_residual_layer_has_the_same_gradients() {
    let (heads, head_dim) = (2, 4);
    let width = heads * head_dim;
    let rotary = RotaryConfig { head_dim, theta: 1e4, scaling: None };
    let rotary = Arc::new(Rotary::new(rotary, 6).unwrap());
    let bench = |is_residual: bool| {
        let mut layout = LayoutBuilder::new();
        let mut unit = layout.unit("attention");
        let init = Init::Normal { std: 0.4 };
        let qkv = Linear::projection(&mut unit, width, &[("qkv", 3 * width)], init).unwrap();
        let layers = Sequence::new().then(qkv).then(Attention::new(heads, heads, rotary.clone()));
        let block = if is_residual {
            Block::new(unit.id, Residual(layers))
        } else {
            Block::new(unit.id, layers)
        };
        let (blocks, layout) = (vec![block], Arc::new(layout.finish(1)));
        Bench::new(Model { blocks, layout, ..mlp() }, &[6, width], &[6, width])
    };
    let [(alone, gradients), (with_sum, same_gradients)] =
        [bench(false), bench(true)].map(|bench| bench.run(false, &[WHOLE]));
    let d_output = numbers(&Allocator::new(), &[6, width], 7);
    let d_output = d_output.read::<f64>().unwrap();
    let expected = alone.unwrap().into_iter().zip(d_output.iter());
    assert_eq!(with_sum.unwrap(), expected.map(|(a, b)| a + *b).collect::<Vec<_>>());
    assert_eq!(same_gradients, gradients);
}

/// A layer that never gives the gradient of its input.
struct Mute;

impl Layer for Mute {
    fn forward(&self, _cx: &mut Context, input: Tensor) -> Result<(Tensor, Saved)> {
        Ok((input, Saved::default()))
    }

    fn backward(
        &self,
        _cx: &mut Context,
        _saved: &mut Saved,
        _d_output: Tensor,
        _half: Half,
    ) -> Result<Option<Tensor>> {
        Ok(None)
    }
}

#[test]
fn a_layer_that_gives_no_gradient_of_its_input_is_named() {
    for half in [WHOLE, INPUT, Half::Weight] {
        let mut model = mlp();
        let unit = model.blocks[1].unit;
        model.blocks.insert(1, Block::new(unit, Mute));
        let bench = Bench::new(model, &[4, 6], &[4, 3]);
        let error = bench.error(&[half]);
        let words = "Mute gives no gradient of its input; it must be a model's first layer";
        assert!(error.ends_with(words), "{error}");
    }
}

#[test]
fn a_second_backward_pass_of_one_forward_pass_is_refused() {
    let bench = Bench::new(mlp(), &[4, 6], &[4, 3]);
    for half in [WHOLE, INPUT, Half::Weight] {
        let error = bench.error(&[WHOLE, half]);
        assert!(error.contains("expected 3 saved tensors, found 0"), "{error}");
    }
}

#[test]
fn a_network_without_blocks_is_the_identity() {
    let mut model = mlp();
    model.blocks.clear();
    let bench = Bench::new(model, &[4, 6], &[4, 6]);
    let d_output = bench.d_output.read::<f64>().unwrap().to_vec();
    for half in [WHOLE, INPUT, Half::Weight, Half::Input { wants_input: false }] {
        let expected = half.wants_input().then(|| d_output.clone());
        assert_eq!(bench.run(false, &[half]), (expected, Vec::new()));
    }
}

/// The identity, which uses a parameter of another block's unit.
struct Stranger(ParamId);

impl Layer for Stranger {
    fn forward(&self, cx: &mut Context, input: Tensor) -> Result<(Tensor, Saved)> {
        cx.param(self.0)?;
        Ok((input, Saved::default()))
    }

    fn backward(
        &self,
        _cx: &mut Context,
        _saved: &mut Saved,
        d_output: Tensor,
        _half: Half,
    ) -> Result<Option<Tensor>> {
        Ok(Some(d_output))
    }
}

#[test]
fn a_parameter_can_be_used_only_while_its_unit_is_open() {
    let mut model = mlp();
    let unit = model.blocks[1].unit;
    model.blocks.push(Block::new(unit, Stranger(ParamId(0))));
    let bench = Bench::new(model, &[4, 6], &[4, 3]);
    let words = "a layer used the value of fc0.weight while its unit fc0 was closed";
    assert_eq!(bench.error(&[]), words);
}

#[test]
fn accumulation_adds_to_what_is_there() {
    for bench in Bench::all() {
        bench.fill_gradients(f64::NAN);
        bench.run(false, &[WHOLE]);
        let once = bench.gradients();
        bench.run(true, &[WHOLE]);
        for (twice, once) in bench.gradients().concat().iter().zip(once.concat()) {
            // A sum that starts from the result of the first pass rounds differently from twice that result:
            // these are f64 sums of a few hundred products of numbers below one.
            assert!((twice - 2.0 * once).abs() < 1e-13, "{twice}, not twice {once}");
        }
    }
}

#[test]
fn gradients_are_announced_once_and_final_from_the_last_to_the_first() {
    for bench in Bench::all() {
        for accumulate in [false, true] {
            let (_, announced) = bench.run(accumulate, &[WHOLE]);
            let order: Vec<usize> = announced.iter().map(|(id, _)| id.0).collect();
            let last_to_first: Vec<usize> = (0..bench.model.layout.params().len()).rev().collect();
            assert_eq!(order, last_to_first);
            for (id, when_announced) in announced {
                assert_eq!(bench.gradient(id), when_announced, "parameter {}", id.0);
            }
        }
    }
}

#[test]
fn a_tied_gradient_is_announced_once_after_its_last_use() {
    let config = MlpConfig { tie_layers: true, ..mlp_config([6, 7, 3], 4) };
    let bench = Bench::new(config.build(1).unwrap(), &[4, 6], &[4, 3]);
    // Three pairs of parameters: of the first hidden layer, of the three tied layers, and of the output.
    assert_eq!(bench.model.layout.params().len(), 6);
    bench.fill_gradients(f64::NAN);
    let (_, announced) = bench.run(false, &[WHOLE]);
    assert_eq!(announced.iter().map(|(id, _)| id.0).collect::<Vec<_>>(), [5, 4, 3, 2, 1, 0]);
    for (id, when_announced) in announced {
        assert_eq!(bench.gradient(id), when_announced, "parameter {}", id.0);
    }
}

#[test]
fn frozen_parameters_have_no_gradient_and_change_nothing_for_the_others() {
    let whole = Bench::new(cnn(), &[3, 9, 8, 2], &[3, 5]);
    whole.run(false, &[WHOLE]);
    let mut model = cnn();
    model.freeze(&["conv0".into(), "fc0".into()]).unwrap();
    let frozen = Bench::new(model, &[3, 9, 8, 2], &[3, 5]);
    let (_, announced) = frozen.run(false, &[WHOLE]);
    let trained: Vec<ParamId> = frozen.model.layout.trained().map(|(id, _)| id).collect();
    assert_eq!(trained.len(), 4);
    assert_eq!(announced.iter().rev().map(|(id, _)| *id).collect::<Vec<_>>(), trained);
    for id in trained {
        assert_eq!(frozen.gradient(id), whole.gradient(id));
    }
    assert!(frozen.storage.grad(ParamId(0)).is_err(), "a frozen parameter has no gradient");
}
