//! Digests of the bits of tensors, as fast as memory, to see whether two tensors are the same.
//!
//! A digest is a sum over the words of a parameter, so those of its parts add up to that of the whole, however ranks and threads
//! divide it. No single changed bit is overlooked. It is no defense against somebody who changes a tensor on purpose.

use std::ops::AddAssign;

use paceline_memory::Tensor;

use crate::simd::vectorized;
use crate::{Compute, Result};

/// Bytes of a row: parts of a parameter begin at a multiple of this.
const ROW_BYTES: usize = 32;
/// Two rows are added at a time, in eight words.
const WORDS: usize = 2 * ROW_BYTES / 8;
/// Bytes for which a thread is worth waking.
const BYTES_OF_THREAD: usize = 1 << 18;

/// Odd numbers, so that a word's place in its row counts, and no bit is lost.
const FACTORS: [u64; WORDS / 2] =
    [0x9E37_79B9_7F4A_7C15, 0xC2B2_AE3D_27D4_EB4F, 0x1656_67B1_9E37_79F9, 0xD6E8_FEB8_6659_FD93];

/// The digest of a parameter, or of a part of one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Digest {
    /// The sum over all words, each multiplied by the factor of its place in the row.
    pub sum: u64,
    /// The same, multiplied by the number of the row, counted from 1.
    pub by_row: u64,
}

impl Digest {
    /// Both sums in one number.
    pub fn folded(self) -> u64 {
        self.sum ^ self.by_row.rotate_left(32).wrapping_mul(FACTORS[0])
    }
}

impl AddAssign for Digest {
    fn add_assign(&mut self, other: Self) {
        self.sum = self.sum.wrapping_add(other.sum);
        self.by_row = self.by_row.wrapping_add(other.by_row);
    }
}

/// The digest of a part of a parameter that begins at its element `start`: a multiple of 16. Waits for the device.
pub fn digest(compute: &Compute, part: &Tensor, start: usize) -> Result<Digest> {
    let first = start * part.dtype().size_bytes() / ROW_BYTES;
    let host = part.to_host()?.as_bytes();
    let bytes = &*host.read::<u8>()?;
    let threads = compute.threads();
    let num_pairs = bytes.len().div_ceil(2 * ROW_BYTES);
    let count = threads.count().min(bytes.len() / BYTES_OF_THREAD).max(1);
    let mut parts: Vec<(usize, &[u8], Digest)> = (0..count)
        .map(|at| {
            let [begin, end] = [at, at + 1].map(|at| at * num_pairs / count * 2 * ROW_BYTES);
            (first + begin / ROW_BYTES, &bytes[begin..end.min(bytes.len())], Digest::default())
        })
        .collect();
    let simd = compute.simd();
    threads.for_each(parts.iter_mut().collect(), |(first, bytes, digest)| {
        *digest = vectorized!(simd, of_rows, bytes, *first as u64);
    });
    let mut all = Digest::default();
    parts.into_iter().for_each(|(.., digest)| all += digest);
    Ok(all)
}

/// The digest of whole rows from row `first` on; the last one may be shorter.
#[inline(always)]
fn of_rows(bytes: &[u8], first: u64) -> Digest {
    let (pairs, rest) = bytes.as_chunks::<{ 8 * WORDS }>();
    let mut last = [0; 8 * WORDS];
    last[..rest.len()].copy_from_slice(rest);
    let mut sums = [[0u64; WORDS]; 2];
    for pair in pairs {
        add_pair(pair, &mut sums);
    }
    if !rest.is_empty() {
        add_pair(&last, &mut sums);
    }
    let [sums, sums_of_sums] = sums;
    let num_pairs = (pairs.len() + usize::from(!rest.is_empty())) as u64;
    let mut digest = Digest::default();
    for (at, (sum, of_sums)) in sums.into_iter().zip(sums_of_sums).enumerate() {
        let factor = FACTORS[at % FACTORS.len()];
        // The sum of sums has each word as often as pairs follow from it on, so this has it as often as pairs lie before it.
        let by_pair = num_pairs.wrapping_mul(sum).wrapping_sub(of_sums);
        let row = first + (at / FACTORS.len()) as u64 + 1;
        let by_row = by_pair.wrapping_mul(2).wrapping_add(row.wrapping_mul(sum));
        digest += Digest { sum: factor.wrapping_mul(sum), by_row: factor.wrapping_mul(by_row) };
    }
    digest
}

/// Adds two rows to the sums, and these to their sums.
#[inline(always)]
fn add_pair(pair: &[u8; 8 * WORDS], [sums, sums_of_sums]: &mut [[u64; WORDS]; 2]) {
    for (at, word) in pair.as_chunks::<8>().0.iter().enumerate() {
        let word = u64::from_le_bytes(*word);
        // Two changes of the highest bit would cancel each other, and those of both halves with a shift of 32.
        sums[at] = sums[at].wrapping_add(word ^ (word >> 29));
        sums_of_sums[at] = sums_of_sums[at].wrapping_add(sums[at]);
    }
}

#[cfg(test)]
mod tests {
    use paceline_memory::{Allocator, Category, DType};

    use super::*;

    fn tensor(values: &[f32]) -> Tensor {
        let tensor =
            Allocator::new().tensor(DType::F32, [values.len()], Category::Workspace).unwrap();
        tensor.write::<f32>().unwrap().copy_from_slice(values);
        tensor
    }

    fn values(len: usize) -> Vec<f32> {
        (0..len).map(|at| (at as f32 * 0.37).sin()).collect()
    }

    #[test]
    fn parts_add_up_whatever_threads_and_instructions() {
        let compute = |threads| Compute::new(threads, Allocator::new()).unwrap();
        let long = tensor(&values(300_000));
        let whole = digest(&compute(1), &long, 0).unwrap();
        assert_eq!(digest(&compute(3), &long, 0).unwrap(), whole);
        let portable = compute(1).with_simd(paceline_numeric::SimdLevel::Portable).unwrap();
        assert_eq!(digest(&portable, &long, 0).unwrap(), whole);
        for cuts in [vec![16], vec![48, 1024, 299_984]] {
            let mut sum = Digest::default();
            let mut begin = 0;
            for end in cuts.into_iter().chain([300_000]) {
                sum += digest(&compute(1), &long.slice(begin..end).unwrap(), begin).unwrap();
                begin = end;
            }
            assert_eq!(sum, whole);
        }
    }

    #[test]
    fn changes_show() {
        let compute = Compute::new(1, Allocator::new()).unwrap();
        let of = |values: &[f32]| digest(&compute, &tensor(values), 0).unwrap().folded();
        let before = values(16384);
        let mut changed = vec![of(&before)];
        for at in [0, 1, 7, 8, 15, 16, 4097, 16383] {
            for bit in 0..32 {
                let mut after = before.clone();
                after[at] = f32::from_bits(after[at].to_bits() ^ (1 << bit));
                changed.push(of(&after));
            }
        }
        let mut each = |change: &dyn Fn(&mut Vec<f32>)| {
            let mut after = before.clone();
            change(&mut after);
            changed.push(of(&after));
        };
        each(&|all| all.iter_mut().for_each(|x| *x *= 2.0));
        each(&|all| all.iter_mut().for_each(|x| *x *= 0.5));
        each(&|all| all.iter_mut().for_each(|x| *x = -*x));
        each(&|all| all.swap(3, 11));
        each(&|all| all.rotate_left(16));
        each(&|all| [9, 25].into_iter().for_each(|at| all[at] = -all[at]));
        each(&|all| all.fill(0.0));
        let count = changed.len();
        changed.sort_unstable();
        changed.dedup();
        assert_eq!(changed.len(), count);
    }
}
