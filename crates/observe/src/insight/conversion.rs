//! How long it takes to round gradients to half precision and to widen them, measured on this machine.

use std::time::Instant;

use paceline_failure::{Failure, Result};
use paceline_kernels::{Compute, cast};
use paceline_memory::{Allocator, Category, DType};
use paceline_table::stats::median;

/// Parts of [`half_costs`], each converted once.
const PARTS: usize = 16;

/// The times to round `len` gradients to half precision and to widen them, in milliseconds. Each part of them is converted
/// once: gradients that were converted just before would be found in the cache, which those of a step are not.
pub fn half_costs(len: usize, threads: usize) -> Result<[f64; 2]> {
    let failed = |e: &dyn std::fmt::Display| Failure::Run(format!("cannot time compression: {e}"));
    let compute = Compute::new(threads, Allocator::new())?;
    let part = len.div_ceil(PARTS);
    let tensor = |dtype| {
        let tensor = compute.allocator.tensor(dtype, [part * PARTS], Category::Workspace);
        tensor.map_err(|e| failed(&e))
    };
    let (x, rounded) = (tensor(DType::F32)?, tensor(DType::BF16)?);
    x.write::<f32>().map_err(|e| failed(&e))?.fill(0.1);
    let mut costs = [Vec::new(), Vec::new()];
    for at in 0..PARTS {
        let range = at * part..(at + 1) * part;
        let own = x.slice(range.clone()).map_err(|e| failed(&e))?;
        let half = rounded.slice(range).map_err(|e| failed(&e))?;
        let ways: [&dyn Fn() -> paceline_kernels::Result<()>; 2] =
            [&|| cast::narrow(&compute, &own, &half), &|| cast::widen(&compute, &half, &own)];
        for (cost, way) in costs.iter_mut().zip(ways) {
            let begin = Instant::now();
            way().map_err(|e| failed(&e))?;
            cost.push(begin.elapsed().as_secs_f64() * 1e3);
        }
    }
    let all = len as f64 / part as f64;
    Ok(costs.map(|parts| median(parts).unwrap_or(0.0) * all))
}
