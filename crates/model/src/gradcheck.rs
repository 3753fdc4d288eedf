//! Checks a layer's backward pass by finite differences, in double precision.

use std::sync::Arc;

use paceline_kernels::Compute;
use paceline_memory::{Allocator, Category, DType, Tensor};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::{Context, Half, Layer, Layout, OpenUnits, ParamId, Result, Storage};

/// Step size of the central differences. Their error is of second order in the step, so about 1e-12 for
/// functions of size one, and rounding adds about 1e-16 / 1e-6. Results agree to about 1e-9, unless a kink
/// (ReLU, max) lies within a step.
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
    let storage = Storage::private(Arc::new(layout.clone()), DType::F64, &compute.allocator)?;
    storage.initialize(seed)?;
    let input = compute.allocator.tensor(DType::F64, input_shape, Category::Data)?;
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    input.write::<f64>()?.fill_with(|| random(&mut rng));
    let check = Check { layer, compute, storage, input };
    let (d_input, weights) = check.differentiate(&mut rng)?;
    let mut worst = d_input.map_or(Ok(0.0), |d| check.worst(&weights, &check.input, &d))?;
    for (id, _) in layout.trained() {
        let (value, gradient) = (check.storage.value(id)?, check.storage.grad(id)?);
        worst = check.worst(&weights, &value, &gradient)?.max(worst);
    }
    Ok(worst)
}

fn random(rng: &mut ChaCha8Rng) -> f64 {
    rng.random::<f64>() * 2.0 - 1.0
}

struct Check<'a> {
    layer: &'a dyn Layer,
    compute: Compute,
    storage: Storage,
    input: Tensor,
}

impl Check<'_> {
    /// Runs a pass with all units open.
    fn pass<T>(
        &self,
        mut ready: impl FnMut(ParamId) -> Result<()>,
        run: impl FnOnce(&mut Context) -> Result<T>,
    ) -> Result<T> {
        let mut units = OpenUnits::new(self.storage.layout());
        let mut cx = Context::training(&self.compute, &self.storage, &mut units, &mut ready);
        cx.open_all()?;
        run(&mut cx)
    }

    /// Both passes. Returns the gradient of the input, and the weights of the outputs in the loss.
    fn differentiate(&self, rng: &mut ChaCha8Rng) -> Result<(Option<Tensor>, Vec<f64>)> {
        let mut announced = Vec::new();
        let ready = |id: ParamId| {
            announced.push(id);
            Ok(())
        };
        let outcome = self.pass(ready, |cx| {
            let (output, mut saved) = self.layer.forward(cx, self.input.clone())?;
            let d_output =
                self.compute.allocator.tensor(DType::F64, output.shape(), Category::Data)?;
            d_output.write::<f64>()?.fill_with(|| random(rng));
            drop(output);
            let weights = d_output.read::<f64>()?.to_vec();
            let half = Half::Whole { wants_input: true };
            Ok((self.layer.backward(cx, &mut saved, d_output, half)?, weights))
        })?;
        announced.sort();
        let every: Vec<ParamId> = self.storage.layout().trained().map(|(id, _)| id).collect();
        assert_eq!(announced, every, "every gradient is announced once");
        Ok(outcome)
    }

    fn loss(&self, weights: &[f64]) -> Result<f64> {
        let (output, _) = self.pass(|_| Ok(()), |cx| self.layer.forward(cx, self.input.clone()))?;
        Ok(output.read::<f64>()?.iter().zip(weights).map(|(y, w)| y * w).sum())
    }

    /// The largest difference between a gradient and the finite difference of its variable.
    fn worst(&self, weights: &[f64], variable: &Tensor, gradient: &Tensor) -> Result<f64> {
        let mut worst = 0.0f64;
        for (at, gradient) in gradient.read::<f64>()?.iter().enumerate() {
            let value = variable.read::<f64>()?[at];
            let side = |offset: f64| -> Result<f64> {
                variable.write::<f64>()?[at] = value + offset;
                self.loss(weights)
            };
            let difference = (side(STEP)? - side(-STEP)?) / (2.0 * STEP);
            variable.write::<f64>()?[at] = value;
            worst = worst.max((gradient - difference).abs() / gradient.abs().max(1.0));
        }
        Ok(worst)
    }
}
