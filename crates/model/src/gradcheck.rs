//! Checks a layer's backward pass by finite differences, in double precision.

use std::sync::Arc;

use paceline_kernels::Compute;
use paceline_memory::{Allocator, Category, DType, Tensor};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::{Context, Half, Layer, Layout, OpenUnits, ParamId, Result, Storage};

/// Step size of the central differences. Their error is of second order in the step, so about 1e-12 for
/// functions of size one, and rounding adds about 1e-16 / 1e-6. Results agree to about 1e-9, unless a kink
/// (ReLU, max) lies within a step of an input.
const STEP: f64 = 1e-6;

/// The largest difference between a gradient and its finite difference, over the input and every
/// parameter, relative to the larger of the gradient and one.
///
/// The layer gets a random input of `input_shape` (batch first) and random parameters; the loss is
/// `sum of r * output` with random `r`. For a correct layer the result is below about 1e-7.
///
/// Panics if the layer does not announce every gradient exactly once.
pub fn worst_error(
    layer: &dyn Layer,
    layout: &Layout,
    input_shape: &[usize],
    seed: u64,
) -> Result<f64> {
    let compute = Compute::new(1, Allocator::new())?;
    let allocator = &compute.allocator;
    let storage = Storage::private(Arc::new(layout.clone()), DType::F64, allocator)?;
    storage.initialize(seed)?;
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut random =
        |len: usize| -> Vec<f64> { (0..len).map(|_| rng.random::<f64>() * 2.0 - 1.0).collect() };

    let input = allocator.tensor(DType::F64, input_shape, Category::Data)?;
    let input_values = random(input.num_elems());
    input.write::<f64>()?.copy_from_slice(&input_values);

    let mut announced = Vec::new();
    let mut ready = |id: ParamId| {
        announced.push(id);
        Ok(())
    };
    let mut units = OpenUnits::new(layout);
    let mut cx = Context::training(&compute, &storage, &mut units, &mut ready);
    cx.open_all()?;
    let (output, mut saved) = layer.forward(&mut cx, input.clone())?;
    let weights = random(output.num_elems());
    let d_output = allocator.tensor(DType::F64, output.shape(), Category::Data)?;
    d_output.write::<f64>()?.copy_from_slice(&weights);
    drop(output);
    let d_input =
        layer.backward(&mut cx, &mut saved, d_output, Half::Whole { wants_input: true })?;
    announced.sort();
    let every: Vec<ParamId> = layout.trained().map(|(id, _)| id).collect();
    assert_eq!(announced, every, "every gradient is announced once");

    let mut ignore = |_: ParamId| Ok(());
    let mut loss = || -> Result<f64> {
        let mut units = OpenUnits::new(layout);
        let mut cx = Context::training(&compute, &storage, &mut units, &mut ignore);
        cx.open_all()?;
        let (output, _) = layer.forward(&mut cx, input.clone())?;
        Ok(output.read::<f64>()?.iter().zip(&weights).map(|(y, w)| y * w).sum())
    };
    let mut worst = 0.0f64;
    let mut compare = |variable: &Tensor, gradient: &Tensor| -> Result<()> {
        let gradient = gradient.read::<f64>()?.to_vec();
        for (at, gradient) in gradient.into_iter().enumerate() {
            let value = variable.read::<f64>()?[at];
            let mut side = |offset: f64| -> Result<f64> {
                variable.write::<f64>()?[at] = value + offset;
                loss()
            };
            let difference = (side(STEP)? - side(-STEP)?) / (2.0 * STEP);
            variable.write::<f64>()?[at] = value;
            worst = worst.max((gradient - difference).abs() / gradient.abs().max(1.0));
        }
        Ok(())
    };
    if let Some(d_input) = d_input {
        compare(&input, &d_input)?;
    }
    for id in every {
        compare(&storage.value(id)?, &storage.grad(id)?)?;
    }
    Ok(worst)
}
