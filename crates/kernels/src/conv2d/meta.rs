//! The scratch memory of a convolution, without the convolution: what [`direct`](super::direct) takes for f32.
//!
//! Input: a geometry and a batch. Output: requests of the same sizes, in the same order. This file computes no values.
//! The plain f64 convolutions take no scratch memory.

use paceline_memory::DType;

use super::direct::{InputGradient, Product, WeightGradient};
use super::prepare::Reading;
use super::{Conv2d, columns_for};
use crate::meta::Pretended;
use crate::{Compute, Result};

/// The scratch memory of a forward pass that computes the first `rows` rows and `positions` columns of the output.
pub(crate) fn forward(
    pretended: &mut Pretended,
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

/// The scratch memory of the gradient of the weight, from output gradients that are zero outside of the first `rows` rows
/// and `positions` columns.
pub(crate) fn backward_weight(
    pretended: &mut Pretended,
    compute: &Compute,
    conv: &Conv2d,
    (rows, positions): (usize, usize),
    batch: usize,
) -> Result<()> {
    let gradient = WeightGradient::new(compute, conv, rows, positions);
    let num_parts = compute.threads.split(batch).len();
    pretended.scratch(DType::F32, num_parts * gradient.sum_elems())?;
    pretended.scratch_of_parts(batch, |part_len| gradient.group_elems(part_len))
}

/// The scratch memory of the gradient of the input.
pub(crate) fn backward_input(
    pretended: &mut Pretended,
    compute: &Compute,
    conv: &Conv2d,
    live_rows: usize,
    batch: usize,
) -> Result<()> {
    let (reading, columns) = InputGradient::plan(compute, conv, live_rows);
    pretended.scratch(DType::F32, Product::panel_elems(&reading, &columns))?;
    let raw = InputGradient::raw_elems(conv, &columns);
    pretended.scratch_of_parts(batch, |_| [reading.elems, raw])
}
