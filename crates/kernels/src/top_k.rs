//! The largest elements of a vector, and sums of such selections.
//!
//! A selection of `k` elements is a tensor of i32 (2 k): their indices in ascending order, then their
//! values as bits.

use std::marker::PhantomData;

use paceline_cuda::kernel::Out;
use paceline_cuda::{Grid, KernelSource};
use paceline_memory::Tensor;
use paceline_numeric::tree;

use crate::card::NUMBERS;
use crate::elementwise::{self, add_of};
use crate::operands::card_scratch;
use crate::simd::vectorized;
use crate::{Compute, KernelError, Op, Result, SimdLevel, read, update, write};

pub(crate) static CARD: KernelSource =
    KernelSource::new("top_k.cu", include_str!("top_k.cu"), &[NUMBERS]);

/// `residual += x`; then the `k` elements of `residual` that are largest in magnitude move to `selected`,
/// an i32 (2 k), and become -0 in `residual`. Among elements of equal magnitude the first are taken. NaN
/// counts as larger than every number. `x` and `residual` are f32 of the same shape.
pub fn select(compute: &Compute, x: &Tensor, residual: &Tensor, selected: &Tensor) -> Result<()> {
    let (n, k) = (x.num_elems(), selected.num_elems() / 2);
    let num_blocks = Grid::elements(n).blocks[0] as usize;
    let operands = (
        read::<f32>("x", x, x.shape()),
        update::<f32>("residual", residual, x.shape()),
        write::<i32>("selected", selected, selected.shape()),
        card_scratch::<i32>(compute, STATE + COUNTS + 2 * num_blocks),
    );
    compute.launch_with_card(
        Op::new("top_k_select"),
        operands,
        |cpu, (x, residual, selected, _)| {
            select_on_cpu(cpu.simd, x, residual, selected);
            Ok(())
        },
        move |card, operands| {
            let (x, residual, selected, scratch) = operands;
            let after =
                |elems: usize| Out(scratch.0 + (elems * size_of::<i32>()) as u64, PhantomData);
            let state: Out<u32> = after(0);
            let (counts, of_blocks): (Out<u32>, Out<u32>) = (after(STATE), after(STATE + COUNTS));
            let (all, one) = (Grid::elements(n), Grid::blocks(1, 1));
            let (k_word, blocks, len) = (k as u32, num_blocks as u32, n as u64);
            let (values, now) = (residual.as_in(), state.as_in());
            // SAFETY: `x` and the residual have `n` elements, the selection `2 k`, and the scratch memory a state, the counts of
            // digits, and two counts for each block of threads.
            unsafe {
                card.launch(
                    elementwise::CARD.of::<f32>("add"),
                    (x, residual, len),
                    Grid::fours(n),
                )?;
                card.launch(CARD.kernel("top_k_begin"), (state, counts, k_word), one)?;
                for (shift, bits) in DIGITS {
                    let few = Grid::blocks(blocks.min(MOST_BLOCKS), Grid::BLOCK);
                    card.launch(
                        CARD.kernel("top_k_count"),
                        (values, now, counts, shift, bits, len),
                        few,
                    )?;
                    card.launch(CARD.kernel("top_k_digit"), (state, counts, bits), one)?;
                }
                card.launch(CARD.kernel("top_k_count_blocks"), (values, now, of_blocks, len), all)?;
                card.launch(
                    CARD.kernel("top_k_sum_blocks"),
                    (of_blocks, blocks),
                    Grid::blocks(1, Grid::BLOCK),
                )?;
                let (before, len) = (of_blocks.as_in(), n as u64);
                card.launch(
                    CARD.kernel("top_k_move"),
                    (residual, now, before, selected, k_word, len),
                    all,
                )
            }
        },
    )
}

/// Elements of the state of a card's selection.
const STATE: usize = 2;

/// Elements of the counts of digits, which are 11 bits at most.
const COUNTS: usize = 1 << 11;

/// The most blocks of threads that count digits, each in memory of its own.
const MOST_BLOCKS: u32 = 512;

/// Where the digits of a magnitude begin, and their bits.
const DIGITS: [(u32, u32); 3] = [(21, 10), (10, 11), (0, 10)];

fn select_on_cpu(simd: SimdLevel, x: &[f32], residual: &mut [f32], selected: &mut [i32]) {
    let k = selected.len() / 2;
    let (indices, values) = selected.split_at_mut(k);
    vectorized!(simd, add_of::<f32>, x, &mut *residual);
    let (threshold, mut num_equal) = threshold(residual, k);
    let mut places = indices.iter_mut().zip(values);
    for (at, value) in residual.iter_mut().enumerate() {
        let size = magnitude(*value);
        if size < threshold {
            continue;
        }
        if size == threshold {
            let Some(rest) = num_equal.checked_sub(1) else { continue };
            num_equal = rest;
        }
        let Some((index, place)) = places.next() else { break };
        *index = at as i32;
        *place = value.to_bits() as i32;
        // Not +0: -0 + x is x for every x, but +0 + -0 is +0.
        *value = -0.0;
    }
}

/// The bits of the absolute value. They have the same order as the absolute values.
fn magnitude(x: f32) -> u32 {
    x.to_bits() & 0x7FFF_FFFF
}

/// The magnitude of the `k`-th largest element, and how many elements of exactly that magnitude are among the `k`: a radix
/// selection, whose three passes over all values find one digit each, from the upper bits down.
fn threshold(values: &[f32], k: usize) -> (u32, usize) {
    let mut known = 0;
    let mut left = k;
    for (shift, bits) in DIGITS {
        let mut counts = [0usize; 1 << 11];
        let above = shift + bits;
        for size in values.iter().map(|x| magnitude(*x)).filter(|size| size >> above == known) {
            counts[(size >> shift) as usize & ((1 << bits) - 1)] += 1;
        }
        let mut digit = (1 << bits) - 1;
        while digit > 0 && counts[digit] < left {
            left -= counts[digit];
            digit -= 1;
        }
        known = known << bits | digit as u32;
    }
    (known, left)
}

/// Elements that are added up at a time, so that they stay in the first-level cache.
const BLOCK: usize = 1024;

/// `mean = ((s0 + s1) + (s2 + s3) + ...) / n` over the `n` selections that lie one after the other in `selections`. The sum
/// is a tree as in an all-reduce, see [`paceline_numeric::tree`]. Elements that are not selected count as -0. f32;
/// overwrites. Errors on an index beyond `mean`, and on indices that do not ascend.
pub fn scatter_mean(compute: &Compute, selections: &Tensor, n: usize, mean: &Tensor) -> Result<()> {
    let op = Op::new("top_k_scatter_mean");
    let operands = (
        read::<i32>("selections", selections, selections.shape()),
        write::<f32>("mean", mean, mean.shape()),
    );
    let (k, len) = (selections.num_elems() / (2 * n), mean.num_elems());
    compute.launch_with_card(
        op,
        operands,
        move |_, (selections, mean)| scatter_mean_on_cpu(op.name, selections, n, mean),
        move |card, (selections, mean)| {
            // SAFETY: there are `n` selections of `2 k` elements, and `len` means.
            unsafe {
                card.launch(
                    CARD.kernel("top_k_mean"),
                    (selections, mean, k as u32, n as u32, len as u64),
                    Grid::elements(len),
                )
            }
        },
    )
}

fn scatter_mean_on_cpu(
    op: &'static str,
    selections: &[i32],
    n: usize,
    mean: &mut [f32],
) -> Result<()> {
    let k = selections.len() / (2 * n);
    if k == 0 {
        mean.fill(-0.0);
        return Ok(());
    }
    let len = mean.len();
    let mut rest: Vec<(&[i32], &[i32])> =
        selections.chunks_exact(2 * k).map(|selection| selection.split_at(k)).collect();
    let mut stack = vec![[0f32; BLOCK]; tree::height(n) + 1];
    for (at, block) in mean.chunks_mut(BLOCK).enumerate() {
        let mut depth = 0;
        for (number, (indices, values)) in rest.iter_mut().enumerate() {
            let top = &mut stack[depth][..block.len()];
            // -0 and not +0, as in `select`.
            top.fill(-0.0);
            let within = |index: i32| usize::try_from(index).is_ok_and(|i| i / BLOCK == at);
            let count = indices.iter().take_while(|index| within(**index)).count();
            for (index, value) in indices[..count].iter().zip(&values[..count]) {
                let index = i64::from(*index);
                let place = top.get_mut(index as usize % BLOCK);
                *place.ok_or(KernelError::Index { op, index, len })? =
                    f32::from_bits(*value as u32);
            }
            (*indices, *values) = (&indices[count..], &values[count..]);
            depth += 1;
            for _ in 0..tree::merges_after(number, n) {
                depth -= 1;
                let (left, right) = stack.split_at_mut(depth);
                let (left, right) = (&mut left[depth - 1], &right[0]);
                left.iter_mut().zip(right).for_each(|(x, y)| *x += y);
            }
        }
        let n = n as f32;
        block.iter_mut().zip(&stack[0]).for_each(|(mean, sum)| *mean = sum / n);
    }
    match rest.iter().find_map(|(indices, _)| indices.first()) {
        Some(index) => Err(KernelError::Index { op, index: i64::from(*index), len }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use paceline_memory::{Allocator, Category, DType};
    use rand::{RngExt, SeedableRng};

    use super::*;

    struct Case {
        compute: Compute,
    }

    impl Case {
        fn tensor(&self, values: &[f32]) -> Tensor {
            let allocator = &self.compute.allocator;
            let tensor = allocator.tensor(DType::F32, [values.len()], Category::Gradients).unwrap();
            tensor.write::<f32>().unwrap().copy_from_slice(values);
            tensor
        }

        /// The selected (index, value) pairs, and the residual.
        fn select(&self, x: &[f32], residual: &[f32], k: usize) -> (Vec<(i32, f32)>, Vec<f32>) {
            let (x, residual) = (self.tensor(x), self.tensor(residual));
            let allocator = &self.compute.allocator;
            let selected = allocator.tensor(DType::I32, [2 * k], Category::Gradients).unwrap();
            select(&self.compute, &x, &residual, &selected).unwrap();
            let selected = selected.read::<i32>().unwrap();
            let pair = |at: usize| (selected[at], f32::from_bits(selected[k + at] as u32));
            ((0..k).map(pair).collect(), residual.read::<f32>().unwrap().to_vec())
        }
    }

    fn case() -> Case {
        Case { compute: Compute::new(1, Allocator::new()).unwrap() }
    }

    #[test]
    fn the_largest_are_taken_and_the_rest_is_the_residual() {
        let (selected, residual) = case().select(&[1.0, -5.0, 0.5, 2.0], &[0.0, 1.0, 3.0, 0.0], 2);
        assert_eq!(selected, [(1, -4.0), (2, 3.5)]);
        assert_eq!(residual, [1.0, 0.0, 0.0, 2.0]);
        // Among equal elements the first is taken.
        let (selected, _) = case().select(&[1.0, -1.0, 1.0, 0.0], &[0.0; 4], 2);
        assert_eq!(selected, [(0, 1.0), (1, -1.0)]);
        let (selected, _) = case().select(&[1.0, f32::NAN, 9.0], &[0.0; 3], 1);
        assert_eq!(selected[0].0, 1);
    }

    #[test]
    fn the_selection_is_that_of_a_sort() {
        let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(3);
        for (len, k) in [(1, 1), (1000, 1), (1000, 100), (1000, 1000), (4097, 410)] {
            // Few distinct values, so that many elements are equal.
            let x: Vec<f32> = (0..len).map(|_| rng.random_range(-50..50) as f32 / 8.0).collect();
            let mut order: Vec<usize> = (0..len).collect();
            order.sort_by(|a, b| x[*b].abs().total_cmp(&x[*a].abs()));
            let mut expected = order[..k].to_vec();
            expected.sort_unstable();
            let (selected, residual) = case().select(&x, &vec![0.0; len], k);
            let indices: Vec<usize> = selected.iter().map(|(index, _)| *index as usize).collect();
            assert_eq!(indices, expected, "{k} of {len}");
            let rest: f32 = residual.iter().sum();
            let sent: f32 = selected.iter().map(|(_, value)| value).sum();
            assert_eq!(rest + sent, x.iter().sum::<f32>(), "eighths add up exactly");
        }
    }

    #[test]
    fn a_gradient_of_minus_zero_stays_one() {
        let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        // In the second round, `residual` has the values that the first round left.
        let mut residual = vec![-0.0; 2];
        for _ in 0..2 {
            let (selected, rest) = case().select(&[-0.0, 1.0], &residual, 2);
            assert_eq!(bits(&[selected[0].1, selected[1].1]), bits(&[-0.0, 1.0]));
            residual = rest;
        }
        assert_eq!(bits(&residual), bits(&[-0.0; 2]));
    }

    #[test]
    fn selections_add_up_in_order() {
        let case = case();
        let bits = |x: f32| x.to_bits() as i32;
        let both = [0, 2, bits(1.0), bits(-0.0), 0, 1, bits(2.0), bits(5.0)];
        let selections =
            case.compute.allocator.tensor(DType::I32, [8], Category::Gradients).unwrap();
        selections.write::<i32>().unwrap().copy_from_slice(&both);
        let mean = case.tensor(&[9.0; 3]);
        scatter_mean(&case.compute, &selections, 2, &mean).unwrap();
        let mean = mean.read::<f32>().unwrap();
        assert_eq!(mean.iter().map(|x| bits(*x)).collect::<Vec<_>>(), [1.5, 2.5, -0.0].map(bits));
        let short = case.tensor(&[0.0; 2]);
        let error = scatter_mean(&case.compute, &selections, 2, &short).unwrap_err().to_string();
        assert!(error.contains("index 2"), "{error}");
    }

    /// The sum by the definition of the tree.
    fn tree(values: &[f32]) -> f32 {
        let middle = values.len().next_power_of_two() / 2;
        match values {
            [only] => *only,
            _ => tree(&values[..middle]) + tree(&values[middle..]),
        }
    }

    #[test]
    fn selections_add_up_as_a_tree() {
        let case = case();
        let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(5);
        for n in [1usize, 2, 3, 4, 5, 6, 7, 8, 9, 16] {
            for (len, part) in [(1, 1), (1000, 1), (2500, 1), (2500, 3)] {
                let k = usize::div_ceil(len, part);
                let mut of_ranks = vec![vec![-0.0f32; len]; n];
                let mut selections = Vec::new();
                for dense in &mut of_ranks {
                    let first = rng.random_range(0..part);
                    let indices = (0..k).map(|at| (at * part + first).min(len - k + at));
                    let indices: Vec<usize> = indices.collect();
                    for &index in &indices {
                        let scale = 2f32.powi(rng.random_range(-12..12));
                        dense[index] = rng.random_range(-1.0f32..1.0) * scale;
                    }
                    selections.extend(indices.iter().map(|index| *index as i32));
                    selections.extend(indices.iter().map(|&index| dense[index].to_bits() as i32));
                }
                let shape = [selections.len()];
                let tensor =
                    case.compute.allocator.tensor(DType::I32, shape, Category::Gradients).unwrap();
                tensor.write::<i32>().unwrap().copy_from_slice(&selections);
                let mean = case.tensor(&vec![9.0; len]);
                scatter_mean(&case.compute, &tensor, n, &mean).unwrap();
                for (at, mean) in mean.read::<f32>().unwrap().iter().enumerate() {
                    let values: Vec<f32> = of_ranks.iter().map(|dense| dense[at]).collect();
                    let want = tree(&values) / n as f32;
                    assert_eq!(mean.to_bits(), want.to_bits(), "{n} x {len}, element {at}");
                }
            }
        }
    }
}
