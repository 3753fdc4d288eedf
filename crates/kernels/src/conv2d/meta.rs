//! The scratch memory of a convolution, without the convolution: what [`direct`](super::direct) and both gradients take for
//! f32 and bf16.
//!
//! Input: a geometry and a batch. Output: requests of the same sizes, in the same order. This file computes no values.
//! The plain f64 convolutions take no scratch memory.

use paceline_memory::DType;

use super::direct::Product;
use super::input_gradient::InputGradient;
use super::prepare::Reading;
use super::weight_gradient::{WeightGradient, parts};
use super::{Conv2d, columns_for};
use crate::meta::MetaScratch;
use crate::{Compute, Result};

/// The scratch memory of a forward pass that computes the first `rows` rows and `positions` columns of the output.
pub(crate) fn forward(
    pretended: &mut MetaScratch,
    compute: &Compute,
    conv: &Conv2d,
    (rows, positions): (usize, usize),
    batch: usize,
) -> Result<()> {
    let (reading, columns) = (Reading::input(conv), columns_for(compute, conv.c_out));
    pretended.scratch(DType::F32, Product::panel_elems(&reading, &columns))?;
    let raw = rows * positions * columns.padded;
    pretended.scratch_of_parts(batch, |_| [reading.elems, raw])
}

/// The scratch memory of the gradient of the weight, from output gradients of type `d_output` that are zero outside of the
/// first `rows` rows and `positions` columns.
pub(crate) fn backward_weight(
    pretended: &mut MetaScratch,
    compute: &Compute,
    conv: &Conv2d,
    (rows, positions): (usize, usize),
    (batch, d_output): (usize, DType),
) -> Result<()> {
    let gradient = WeightGradient::new(compute, conv, rows, positions);
    let parts = parts(compute, batch, d_output);
    pretended.scratch(DType::F32, parts.len() * gradient.sum_elems())?;
    // Each thread works on one part at a time.
    for part in parts.iter().take(compute.threads.count()) {
        for len in gradient.group_elems(part.room) {
            pretended.scratch(DType::F32, len)?;
        }
    }
    Ok(())
}

/// The scratch memory of the gradient of the input, which is of type `d_input`.
pub(crate) fn backward_input(
    pretended: &mut MetaScratch,
    compute: &Compute,
    conv: &Conv2d,
    live_rows: usize,
    (batch, d_input): (usize, DType),
) -> Result<()> {
    let (reading, columns) = InputGradient::plan(compute, conv, live_rows);
    pretended.scratch(DType::F32, Product::panel_elems(&reading, &columns))?;
    let raw = InputGradient::raw_elems(conv, &columns, d_input);
    pretended.scratch_of_parts(batch, |_| [reading.elems, raw])
}
