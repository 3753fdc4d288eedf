//! The cost of buckets, by formula.
//!
//! Let `s` be the bytes of all gradients, `w` the bandwidth of an all-reduce in bytes per second, and `o` the fixed cost of an
//! operation in seconds. With `n` buckets, the part of the communication that a step cannot hide costs `n o + s / (n w)`: every bucket has the cost of its
//! operation, and the last one, of `s / n` bytes, starts when nothing is left to hide it. This cost is least for
//! buckets of `sqrt(s o w)` bytes.

use paceline_host::text::thousands;

/// Bytes of a MiB, in which `--bucket-cap-mb` counts.
pub const MIB: f64 = 1_048_576.0;

/// Sizes of buckets in MiB, ascending, without those that change nothing: of the sizes that hold all gradients, the smallest
/// stands for all. Also returns a line that says so, if there are several.
pub fn distinct(mut sizes: Vec<f64>, gradient_bytes: u64) -> (Vec<f64>, Option<String>) {
    let all = gradient_bytes as f64 / MIB;
    let num_smaller = sizes.iter().filter(|mb| **mb < all).count();
    let same: Vec<String> = sizes[num_smaller..].iter().map(f64::to_string).collect();
    sizes.truncate(num_smaller + 1);
    let note = (same.len() > 1).then(|| {
        format!(
            "Buckets of {} MiB hold all gradients, so they are run once, as {} MiB",
            same.join(", "),
            same[0]
        )
    });
    (sizes, note)
}

/// The size of a model in words.
pub fn size_words(params: u64, gradient_bytes: u64) -> String {
    format!("{} parameters, {:.2} MiB of gradients", thousands(params), gradient_bytes as f64 / MIB)
}

/// The cost of an all-reduce: a fixed part, and a part for each byte.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BucketCost {
    /// `o`, in milliseconds.
    pub op_ms: f64,
    /// `1 / w`.
    pub ms_per_byte: f64,
}

impl BucketCost {
    /// `w` in GB/s of 1e9 bytes.
    pub fn gb_per_s(&self) -> f64 {
        1.0 / self.ms_per_byte / 1e6
    }

    /// The cost of communication that a step with `num_buckets` buckets for `gradient_bytes` bytes cannot hide, in milliseconds.
    pub fn cost_ms(&self, gradient_bytes: f64, num_buckets: f64) -> f64 {
        num_buckets * self.op_ms + gradient_bytes * self.ms_per_byte / num_buckets
    }

    /// The bytes of a bucket for which this cost is least.
    pub fn best_bytes(&self, gradient_bytes: f64) -> f64 {
        (gradient_bytes * self.op_ms / self.ms_per_byte).sqrt()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_that_hold_everything_are_run_once() {
        let of = |sizes: &[f64]| distinct(sizes.to_vec(), 2 << 20);
        let (sizes, note) = of(&[1.0, 2.0, 10.0, 1000.0]);
        assert_eq!(sizes, [1.0, 2.0]);
        let note = note.unwrap();
        assert!(note.contains("2, 10, 1000 MiB") && note.ends_with("as 2 MiB"), "{note}");
        assert_eq!(of(&[0.5, 1.0, 4.0]), (vec![0.5, 1.0, 4.0], None));
        assert_eq!(of(&[0.5, 1.0]), (vec![0.5, 1.0], None));
        assert_eq!(of(&[4.0]), (vec![4.0], None));
    }
}
