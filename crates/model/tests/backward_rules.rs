//! The rules of a backward pass: which gradients it computes, whether it overwrites or adds, and
//! when it announces them. That the gradients are right is tested in `gradients.rs`.

mod common;

use paceline_kernels::Compute;
use paceline_memory::{Allocator, DType, Tensor};
use paceline_model::{Context, Model, ParamId, Storage, Which};

use common::{cnn, every_layer, mlp, numbers};

/// A model with storage, an input and a gradient of its output.
struct Bench {
    model: Model,
    compute: Compute,
    storage: Storage,
    input: Tensor,
    d_output: Tensor,
}

impl Bench {
    fn all() -> [Self; 3] {
        [
            Self::new(cnn(), &[3, 9, 8, 2], &[3, 5]),
            Self::new(mlp(), &[4, 6], &[4, 3]),
            Self::new(every_layer(), &[2, 9, 9, 2], &[2, 3]),
        ]
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
