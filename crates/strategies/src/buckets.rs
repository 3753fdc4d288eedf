//! Divides gradients into buckets.
//!
//! Input: a layout and bucket sizes. Output: the range and the parameters of each bucket. Gradients become
//! final from the last layer to the first, so the buckets are formed from the end of flat storage backward:
//! each is a contiguous range, and reducing it copies nothing. The parameter that fills a bucket closes it,
//! as in PyTorch's DistributedDataParallel (Li et al., 2020). The first bucket is small, to start communication early.

use std::ops::Range;

use paceline_model::{Layout, ParamId};

/// The sizes of buckets, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BucketCaps {
    /// Size of the first bucket to be sent.
    pub first_bytes: usize,
    /// Size of all other buckets.
    pub bytes: usize,
}

/// The size of the first bucket in PyTorch, in bytes.
const FIRST_BUCKET_BYTES: usize = 1 << 20;

impl BucketCaps {
    /// Buckets of `bytes` bytes. The first bucket has 1 MiB, or `bytes` if that is less.
    pub fn new(bytes: usize) -> Self {
        Self { first_bytes: FIRST_BUCKET_BYTES.min(bytes), bytes }
    }
}

/// A bucket: gradients that are reduced together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bucket {
    /// Elements of flat storage, padding included.
    pub range: Range<usize>,
    /// The parameters in the bucket, in order of registration.
    pub params: Vec<ParamId>,
}

/// The buckets of a layout, in order of sending. The parameter that brings a bucket to its cap closes it, however large the
/// parameter is.
pub fn plan_buckets(layout: &Layout, elem_bytes: usize, caps: BucketCaps) -> Vec<Bucket> {
    let mut buckets: Vec<Bucket> = Vec::new();
    let mut end = layout.trained_len();
    let mut is_open = false;
    for (id, param) in layout.trained().rev() {
        if !is_open {
            buckets.push(Bucket { range: end..end, params: Vec::new() });
        }
        let cap = if buckets.len() == 1 { caps.first_bytes } else { caps.bytes };
        if let Some(bucket) = buckets.last_mut() {
            bucket.range.start = param.start;
            bucket.params.push(id);
            end = param.start;
            is_open = bucket.range.len() * elem_bytes < cap;
        }
    }
    // The parameters were added from the last to the first.
    buckets.iter_mut().for_each(|bucket| bucket.params.reverse());
    buckets
}

#[cfg(test)]
mod tests {
    use paceline_model::{Init, LayoutBuilder};

    use super::*;

    fn layout() -> Layout {
        let mut builder = LayoutBuilder::new();
        for size in [100, 3000, 50, 700, 8] {
            builder.unit(format!("u{size}")).param("weight", [size], Init::Constant(0.0));
        }
        builder.finish(2)
    }

    fn ids(buckets: &[Bucket]) -> Vec<Vec<usize>> {
        let numbers = |bucket: &Bucket| bucket.params.iter().map(|id| id.0).collect();
        buckets.iter().map(numbers).collect()
    }

    #[test]
    fn buckets_cover_everything_once_from_the_end() {
        let layout = layout();
        let caps = BucketCaps { first_bytes: 1000, bytes: 4000 };
        let buckets = plan_buckets(&layout, 4, caps);
        assert_eq!(ids(&buckets), [vec![3, 4], vec![1, 2], vec![0]]);
        assert_eq!(buckets[0].range.end, layout.len());
        assert_eq!(buckets[2].range.start, 0);
        assert!(buckets.windows(2).all(|pair| pair[1].range.end == pair[0].range.start));
        assert_eq!(BucketCaps::new(4000), BucketCaps { first_bytes: 4000, bytes: 4000 });
        assert_eq!(BucketCaps::new(25 << 20).first_bytes, 1 << 20);
    }

    /// A simpler, slower implementation for comparison: parameters are inserted at the front of buckets.
    fn plan_from_the_front(layout: &Layout, elem_bytes: usize, caps: BucketCaps) -> Vec<Bucket> {
        let mut buckets: Vec<Bucket> = Vec::new();
        let mut is_open = false;
        for (id, param) in layout.trained().rev() {
            if !is_open {
                let end = buckets.last().map_or(layout.trained_len(), |last| last.range.start);
                buckets.push(Bucket { range: end..end, params: Vec::new() });
            }
            let cap = if buckets.len() == 1 { caps.first_bytes } else { caps.bytes };
            let bucket = buckets.last_mut().unwrap();
            bucket.range.start = param.start;
            bucket.params.insert(0, id);
            is_open = bucket.range.len() * elem_bytes < cap;
        }
        buckets
    }

    #[test]
    fn plans_are_those_of_the_first_definition() {
        let mut builder = LayoutBuilder::new();
        for unit in 0..300 {
            let mut of_unit = builder.unit(format!("u{unit}"));
            for param in 0..unit % 4 {
                let size = 1 + (unit * 7919 + param * 104_729) % 5000;
                of_unit.param(&format!("p{param}"), [size], Init::Constant(0.0));
            }
        }
        let all = builder.finish(3);
        let frozen: Vec<String> = (0..300).step_by(7).map(|unit| format!("u{unit}")).collect();
        for layout in [&all, &all.with_frozen(&frozen).unwrap(), &LayoutBuilder::new().finish(1)] {
            for bytes in [1, 1000, 4096, 50_000, 1 << 20, 1 << 30] {
                for first_bytes in [1, 3000, bytes] {
                    let caps = BucketCaps { first_bytes, bytes };
                    let plan = plan_buckets(layout, 4, caps);
                    assert_eq!(plan, plan_from_the_front(layout, 4, caps), "{caps:?}");
                }
            }
        }
    }

    #[test]
    fn frozen_parameters_are_in_no_bucket() {
        let layout = layout().with_frozen(&["u3000".into(), "u8".into()]).unwrap();
        let buckets = plan_buckets(&layout, 4, BucketCaps::new(1 << 20));
        assert_eq!(ids(&buckets), [vec![0, 2, 3]]);
        assert_eq!(buckets[0].range, 0..layout.trained_len());
    }
}
