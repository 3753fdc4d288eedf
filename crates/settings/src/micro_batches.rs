//! Batches that are cut into micro-batches by the data alone, so that every layout of ranks ends with the same bits.
//!
//! Input: the samples of a batch and of a micro-batch, and the number of ranks that share them. Output: the micro-batches of
//! each rank, which are a node of the tree over all of them. This file does not know which settings would break the promise.

use std::ops::Range;

use clap::ArgMatches;
use paceline_failure::{Result, usage};
use paceline_host::text::plural;
use paceline_numeric::tree;
use serde::{Serialize, Serializer};

use crate::flags::RunFlags;
use crate::spec::RunSpec;

/// The most micro-batches of a step: each is a pass, also one that has no samples left.
const MOST: usize = 1 << 16;

/// The micro-batches of a batch, which is a step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MicroBatches {
    /// The samples of each.
    pub size: usize,
    /// Those of each rank. The ranks of a pipeline work on the same ones.
    #[serde(rename = "of_ranks", serialize_with = "lens")]
    pub shares: Vec<Range<usize>>,
}

fn lens<S: Serializer>(
    shares: &[Range<usize>],
    serializer: S,
) -> std::result::Result<S::Ok, S::Error> {
    serializer.collect_seq(shares.iter().map(Range::len))
}

impl MicroBatches {
    /// Those that `--micro-batch-size` asks for, divided among `num_shares` ranks or pipelines.
    pub fn resolve(flags: &RunFlags, spec: &RunSpec, num_shares: usize) -> Result<Option<Self>> {
        let Some(size) = flags.strategy.micro_batch_size else { return Ok(None) };
        let flag = format!("--micro-batch-size {size}");
        for given in ["batch-size", "accumulate", "accumulation-order"] {
            if spec.has(given) {
                return usage(format!(
                    "{flag}: --{given} follows from it, --global-batch-size and the number of ranks; leave it out"
                ));
            }
        }
        let Some(samples) = flags.training.global_batch_size else {
            return usage(format!(
                "{flag}: a step has the samples of one global batch; pass --global-batch-size too, a multiple of {size}"
            ));
        };
        if samples == 0 || !samples.is_multiple_of(size) {
            return usage(format!(
                "{flag}: --global-batch-size {samples} is not a multiple of it; pass {}",
                samples.next_multiple_of(size).max(size)
            ));
        }
        let count = samples / size;
        if count > MOST {
            return usage(format!(
                "{flag}: a global batch of {samples} makes {count} micro-batches, and a step has at most {MOST}; pass a larger one"
            ));
        }
        let Some(shares) = tree::shares(count, num_shares) else {
            let next = count.max(num_shares).checked_next_power_of_two();
            let fix = next.and_then(|next| next.checked_mul(size)).map_or(String::new(), |next| {
                format!("; pass --global-batch-size {next}, or fewer ranks")
            });
            return usage(format!(
                "{flag}: a global batch of {samples} makes {}, and {num_shares} ranks cannot share them as the tree adds \
                 them up{fix}",
                plural(count, "micro-batch")
            ));
        };
        Ok(Some(Self { size, shares }))
    }

    /// The settings of a run with these micro-batches, if any: the rank that has the most decides how many batches are accumulated.
    pub fn settings(of: Option<&Self>, spec: &RunSpec) -> Result<ArgMatches> {
        of.map_or(spec.clone(), |of| spec.with("accumulate", of.most())).parse()
    }

    /// The micro-batches of a batch.
    pub fn count(&self) -> usize {
        self.shares.iter().map(Range::len).sum()
    }

    /// The most that a rank has.
    pub fn most(&self) -> usize {
        self.shares.iter().map(Range::len).max().unwrap_or(1)
    }

    /// Whether all ranks have as many.
    pub fn are_even(&self) -> bool {
        self.shares.iter().all(|share| share.len() == self.most())
    }

    /// In words.
    pub fn words(&self) -> String {
        format!("{} of {}", plural(self.count(), "micro-batch"), plural(self.size, "sample"))
    }

    /// A warning if ranks have to wait for others that have more.
    pub fn warning(&self) -> Option<String> {
        let lens: Vec<String> = self.shares.iter().map(|share| share.len().to_string()).collect();
        let ranks = self.shares.len();
        (!self.are_even()).then(|| {
            format!(
                "--micro-batch-size {}: the ranks have {} of {} micro-batches, because the tree does not divide them evenly; \
                 a step takes the time of {}. With --global-batch-size {} each has the same number",
                self.size,
                lens.join(", "),
                self.count(),
                self.most(),
                self.size as u128 * (ranks * (self.count() / ranks).next_power_of_two()) as u128,
            )
        })
    }
}
