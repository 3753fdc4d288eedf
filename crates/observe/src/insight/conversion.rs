//! How long it takes to round gradients to 16 bits and to widen them, measured on this machine.

use std::time::Instant;

use paceline_kernels::{Compute, cast};
use paceline_memory::{Allocator, Category, DType};
use paceline_table::stats::median;

/// The gradients that are timed, at most: 6 MB.
const MAX_ELEMS: usize = 1 << 20;
/// The gradients are converted in as many parts, each once: gradients that were converted just before would be found in the cache,
/// which those of a step are not.
const PARTS: usize = 16;

/// The times of rounding gradients to 16 bits and of widening them, in milliseconds per gradient.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Conversion {
    /// Rounding, before a bucket is sent.
    pub narrow_ms: f64,
    /// Widening, after it has arrived.
    pub widen_ms: f64,
}

impl Conversion {
    /// Measures both for a model with as many gradients; `None` if that fails.
    pub fn measured(num_gradients: usize, threads: usize) -> Option<Self> {
        let compute = Compute::new(threads, Allocator::new()).ok()?;
        let part = num_gradients.clamp(1, MAX_ELEMS).div_ceil(PARTS);
        let tensor =
            |dtype| compute.allocator.tensor(dtype, [part * PARTS], Category::Workspace).ok();
        let (x, rounded) = (tensor(DType::F32)?, tensor(DType::BF16)?);
        x.write::<f32>().ok()?.fill(0.1);
        let mut times = [Vec::new(), Vec::new()];
        for at in 0..PARTS {
            let range = at * part..(at + 1) * part;
            let (own, half) = (x.slice(range.clone()).ok()?, rounded.slice(range).ok()?);
            let ways: [&dyn Fn() -> paceline_kernels::Result<()>; 2] =
                [&|| cast::narrow(&compute, &own, &half), &|| cast::widen(&compute, &half, &own)];
            for (times, way) in times.iter_mut().zip(ways) {
                let begin = Instant::now();
                way().ok()?;
                times.push(begin.elapsed().as_secs_f64() * 1e3 / part as f64);
            }
        }
        let [narrow_ms, widen_ms] = times.map(|of| median(of).unwrap_or(0.0));
        Some(Self { narrow_ms, widen_ms })
    }
}
