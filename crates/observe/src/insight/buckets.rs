//! The buckets of `ddp`, as a replay takes them.
//!
//! Input: where the gradients lie, and sizes of buckets. Output: which parameters travel together, by number, and their
//! bytes ([`Bucket`]). This module does not know when gradients are final.

use paceline_analysis::advice::replay::Bucket;
use paceline_model::Layout;
use paceline_strategies::{BucketCaps, SHARED_SUMS_BYTES, plan_buckets};

/// Bytes of a gradient.
pub const ELEM_BYTES: usize = size_of::<f32>();

/// Bytes of the sums of the loss, which travel before everything else.
pub const LOSS_BYTES: u64 = SHARED_SUMS_BYTES as u64;

/// The buckets of `ddp` with these sizes, in the order of sending.
pub fn plan(layout: &Layout, caps: BucketCaps) -> Vec<Bucket> {
    let buckets = plan_buckets(layout, ELEM_BYTES, caps).into_iter().map(|bucket| Bucket {
        gradients: bucket.params.iter().map(|id| id.0).collect(),
        bytes: (bucket.range.len() * ELEM_BYTES) as u64,
    });
    buckets.collect()
}

/// The buckets of all pairs of sizes that are powers of two from 16 KiB to 1 GiB, the largest first. Among equals the first
/// wins, because it needs the fewest operations.
pub fn plans(layout: &Layout) -> impl Iterator<Item = (BucketCaps, Vec<Bucket>)> {
    let sizes = || (14..=30).rev().map(|shift| 1usize << shift);
    let caps = sizes().flat_map(move |bytes| {
        let firsts = sizes().filter(move |first| *first <= bytes);
        firsts.map(move |first_bytes| BucketCaps { first_bytes, bytes })
    });
    caps.map(|caps| (caps, plan(layout, caps)))
}
