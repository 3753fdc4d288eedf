//! The rules of a backward pass: which gradients it computes, whether it overwrites or adds, and when it
//! announces them. `gradients.rs` tests that the gradients are correct.

mod common;

use std::cell::RefCell;
use std::sync::atomic::{AtomicUsize, Ordering};

use paceline_kernels::Compute;
use paceline_memory::{Allocator, DType, Tensor};
use paceline_model::{
    Block, Context, Layer, MlpConfig, Model, OpenUnits, ParamId, Result, Saved, Storage,
};

use common::{cnn, cnn_with_batch_norm, every_layer, mlp, numbers};

/// A part of a backward pass.
#[derive(Clone, Copy)]
enum Part {
    Both,
    Input,
    Weight,
}

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
        let storage =
            Storage::private(model.layout.clone(), DType::F64, &compute.allocator).unwrap();
        storage.initialize(5).unwrap();
        let input = numbers(&compute.allocator, input_shape, 6);
        let d_output = numbers(&compute.allocator, output_shape, 7);
        let units = RefCell::new(OpenUnits::new(&model.layout));
        Self { model, compute, storage, input, d_output, units }
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

    /// Runs one forward pass, then one backward pass for each of `parts` with what it saved. Returns the last
    /// input gradient, and every announced parameter with its gradient at the time of the announcement.
    fn run(&self, accumulate: bool, parts: &[Part]) -> (Option<Vec<f64>>, Vec<Announced>) {
        let mut announced = Vec::new();
        let mut ready = |id: ParamId| {
            announced.push((id, self.gradient(id)));
            Ok(())
        };
        let mut units = self.units.borrow_mut();
        if !accumulate {
            units.begin_step(1, true);
        }
        let mut cx = Context::training(&self.compute, &self.storage, &mut units, &mut ready);
        cx.open_roots().unwrap();
        let network = &self.model.network();
        let (_, mut saved) = network.forward(&mut cx, self.input.clone()).unwrap();
        let mut d_input = None;
        for part in parts {
            let d_output = self.d_output.clone();
            let gradient = match part {
                Part::Both => {
                    network.backward(&mut cx, std::mem::take(&mut saved), d_output, true).unwrap()
                }
                Part::Input => {
                    Some(network.backward_input(&mut cx, &mut saved, &d_output).unwrap())
                }
                Part::Weight => {
                    network.backward_weight(&mut cx, &mut saved, &d_output).unwrap();
                    None
                }
            };
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
        let (d_input, _) = bench.run(false, &[Part::Both]);
        let gradients = bench.gradients();
        assert!(d_input.is_some());

        bench.fill_gradients(7.0);
        let (of_input_alone, announced) = bench.run(false, &[Part::Input]);
        assert_eq!(of_input_alone, d_input);
        assert!(announced.is_empty(), "there is nothing to announce");
        assert!(bench.gradients().iter().flatten().all(|x| *x == 7.0), "gradients are touched");

        let (none, announced) = bench.run(false, &[Part::Weight]);
        assert_eq!(none, None);
        assert_eq!(bench.gradients(), gradients);
        assert_eq!(announced.len(), gradients.len());

        // One after the other, from the same saved tensors.
        for order in [[Part::Input, Part::Weight], [Part::Weight, Part::Input]] {
            bench.fill_gradients(7.0);
            let (of_input, _) = bench.run(false, &order);
            assert_eq!(of_input, d_input);
            assert_eq!(bench.gradients(), gradients);
        }
    }
}

/// The identity, which counts how often its input gradient is asked for.
struct Counting<'a>(&'a AtomicUsize);

impl Layer for Counting<'_> {
    fn forward(&self, _cx: &mut Context, input: Tensor) -> Result<(Tensor, Saved)> {
        Ok((input, Saved::default()))
    }

    fn backward_input(
        &self,
        _cx: &mut Context,
        _saved: &mut Saved,
        d_output: &Tensor,
    ) -> Result<Tensor> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Ok(d_output.clone())
    }
}

#[test]
fn no_half_of_a_backward_pass_repeats_work_of_the_other() {
    static CALLS: AtomicUsize = AtomicUsize::new(0);
    let mut model = mlp();
    let unit = model.blocks[0].unit;
    model.blocks = (0..3).map(|_| Block::new(unit, Counting(&CALLS))).collect();
    let bench = Bench::new(model, &[4, 6], &[4, 6]);
    for (parts, calls) in [
        (&[Part::Both][..], 3),
        // The first layer can do without.
        (&[Part::Weight], 2),
        (&[Part::Weight, Part::Input], 3),
        (&[Part::Input, Part::Weight], 3),
    ] {
        CALLS.store(0, Ordering::Relaxed);
        bench.run(false, parts);
        assert_eq!(CALLS.load(Ordering::Relaxed), calls);
    }
}

#[test]
fn a_checkpointed_model_gives_the_same_bits_and_leaves_statistics_alone() {
    for (at, plain) in Bench::all().into_iter().enumerate() {
        let mut bench = Bench::all().into_iter().nth(at).unwrap();
        let blocks = bench.model.blocks.drain(..).map(Block::checkpointed).collect();
        bench.model.blocks = blocks;
        for parts in [&[Part::Both][..], &[Part::Input, Part::Weight]] {
            let (d_input, announced) = plain.run(false, parts);
            let (again, announced_again) = bench.run(false, parts);
            assert_eq!(again, d_input);
            assert_eq!(announced_again, announced);
            let buffers = |bench: &Bench| bench.storage.buffers().read::<f64>().unwrap().to_vec();
            assert_eq!(buffers(&bench), buffers(&plain), "running statistics");
        }
    }
}

/// The identity, which uses a parameter of another block's unit.
struct Stranger(ParamId);

impl Layer for Stranger {
    fn forward(&self, cx: &mut Context, input: Tensor) -> Result<(Tensor, Saved)> {
        cx.param(self.0)?;
        Ok((input, Saved::default()))
    }

    fn backward_input(
        &self,
        _cx: &mut Context,
        _saved: &mut Saved,
        d_output: &Tensor,
    ) -> Result<Tensor> {
        Ok(d_output.clone())
    }
}

#[test]
fn a_parameter_can_be_used_only_while_its_unit_is_open() {
    let mut model = mlp();
    let unit = model.blocks[1].unit;
    model.blocks.push(Block::new(unit, Stranger(ParamId(0))));
    let bench = Bench::new(model, &[4, 6], &[4, 3]);
    let mut units = OpenUnits::new(&bench.model.layout);
    let mut ready = |_: ParamId| Ok(());
    let mut cx = Context::training(&bench.compute, &bench.storage, &mut units, &mut ready);
    let error = bench.model.network().forward(&mut cx, bench.input.clone()).unwrap_err();
    let words = "a layer used the value of fc0.weight while its unit fc0 was closed";
    assert_eq!(error.to_string(), words);
}

#[test]
fn accumulation_adds_to_what_is_there() {
    for bench in Bench::all() {
        bench.fill_gradients(f64::NAN);
        bench.run(false, &[Part::Both]);
        let once = bench.gradients();
        bench.run(true, &[Part::Both]);
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
            let (_, announced) = bench.run(accumulate, &[Part::Both]);
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
    let config =
        MlpConfig { input_dim: 6, hidden_dim: 7, output_dim: 3, num_layers: 4, tie_layers: true };
    let bench = Bench::new(config.build(1).unwrap(), &[4, 6], &[4, 3]);
    // Three pairs of parameters: of the first hidden layer, of the three tied layers, and of the output.
    assert_eq!(bench.model.layout.params().len(), 6);
    bench.fill_gradients(f64::NAN);
    let (_, announced) = bench.run(false, &[Part::Both]);
    assert_eq!(announced.iter().map(|(id, _)| id.0).collect::<Vec<_>>(), [5, 4, 3, 2, 1, 0]);
    for (id, when_announced) in announced {
        assert_eq!(bench.gradient(id), when_announced, "parameter {}", id.0);
    }
}

#[test]
fn frozen_parameters_have_no_gradient_and_change_nothing_for_the_others() {
    let whole = Bench::new(cnn(), &[3, 9, 8, 2], &[3, 5]);
    whole.run(false, &[Part::Both]);
    let mut model = cnn();
    model.freeze(&["conv0".into(), "fc0".into()]).unwrap();
    let frozen = Bench::new(model, &[3, 9, 8, 2], &[3, 5]);
    let (_, announced) = frozen.run(false, &[Part::Both]);
    let trained: Vec<ParamId> = frozen.model.layout.trained().map(|(id, _)| id).collect();
    assert_eq!(trained.len(), 4);
    assert_eq!(announced.iter().rev().map(|(id, _)| *id).collect::<Vec<_>>(), trained);
    for id in trained {
        assert_eq!(frozen.gradient(id), whole.gradient(id));
    }
    assert!(frozen.storage.grad(ParamId(0)).is_err(), "a frozen parameter has no gradient");
}
