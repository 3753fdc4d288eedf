//! Checks that a training set can be divided into the shards that `--rank-samples` asks for.
//!
//! This file knows the flags and the number of samples, but not how a shard is read.

use paceline_failure::{Failure, Result};
use paceline_settings::flags::RunFlags;

/// Checks the number of samples of each rank's shard against a training set of `available` samples.
pub fn check_rank_samples(
    flags: &RunFlags,
    samples: &[usize],
    world_size: usize,
    available: usize,
) -> Result<()> {
    let usage = |problem: String| Err(Failure::Usage(problem));
    let all = samples.iter().map(usize::to_string).collect::<Vec<_>>().join(" ");
    if flags.training.global_batch_size.is_some() {
        return usage(format!(
            "--rank-samples {all}: each rank takes batches of its own; pass --batch-size instead of \
             --global-batch-size"
        ));
    }
    if samples.len() != world_size {
        return usage(format!(
            "--rank-samples {all}: there are {world_size} ranks; pass one number for each"
        ));
    }
    match samples.iter().try_fold(0usize, |sum, &samples| sum.checked_add(samples)) {
        Some(0) => usage(format!("--rank-samples {all}: at least one rank must have samples")),
        Some(sum) if sum <= available => Ok(()),
        _ => usage(format!(
            "--rank-samples {all}: more in all than the training set, which has {available} samples; \
             lower them"
        )),
    }
}
