//! The floating-point operations of a model, counted in a pass without arithmetic.
//!
//! Input: a model and the fields of its samples. Output: a number per sample. It does not know how fast anything is.

use paceline_data::BatchShape;
use paceline_failure::{Failure, Result};
use paceline_kernels::Compute;
use paceline_memory::Allocator;
use paceline_model::{BlockCost, Model, ModelError, Rehearsal, block_costs};
use paceline_strategies::ReplicaOptions;

use crate::insight::memory::{batch_of, if_possible};

/// The floating-point operations of the model's products for a sample in a step. `length` is the sample's length, where
/// lengths differ. `None` if the model has a layer of the user's own that reads values, so that it cannot be rehearsed.
pub fn per_sample(
    model: &Model,
    samples: &BatchShape,
    length: usize,
    options: &ReplicaOptions,
) -> Result<Option<u64>> {
    let rehearse = || -> std::result::Result<Rehearsal, ModelError> {
        let compute = Compute::new(1, Allocator::meta())?;
        let batch = batch_of(samples, &compute.allocator, 1, length)?;
        let precision = options.precision;
        Rehearsal::of(model, precision, &compute, &[batch], None, options.sync_batch_norm)
    };
    let rehearsal = if_possible(rehearse()).map_err(|error| {
        Failure::Run(format!("the floating-point operations of a step: {error}"))
    })?;
    Ok(rehearsal.map(|rehearsal| rehearsal.forward_flops + rehearsal.backward_flops))
}

/// The same for each pass of each block, for samples of the largest length.
pub fn per_block(
    model: &Model,
    samples: &BatchShape,
    options: &ReplicaOptions,
) -> Result<Option<Vec<BlockCost>>> {
    let rehearse = || -> std::result::Result<Vec<BlockCost>, ModelError> {
        let compute = Compute::new(1, Allocator::meta())?;
        let batch = batch_of(samples, &compute.allocator, 1, samples.max_length().unwrap_or(1))?;
        let mut counted = || (compute.forward_flops() + compute.backward_flops()) as f64;
        let clock: &mut dyn FnMut() -> f64 = &mut counted;
        block_costs(model, options.precision, &compute, &batch, |_| true, (clock, 0))
    };
    if_possible(rehearse())
        .map_err(|error| Failure::Run(format!("the floating-point operations of a block: {error}")))
}
