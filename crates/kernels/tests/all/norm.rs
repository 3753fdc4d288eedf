//! Norms and scaling against the plain implementation. Also checks that neither threads nor vector
//! instructions change a bit.

use crate::common::{computes_with, of};
use paceline_kernels::norm::RowRanges;
use paceline_kernels::norm::tree::RowTree;
use paceline_kernels::{Compute, KernelError, norm, reference};
use paceline_memory::{Allocator, Category, Tensor};

/// Numbers between -1 and 1 over many orders of magnitude.
fn numbers(len: usize) -> Vec<f64> {
    let number = |at: usize| {
        let mixed = (at as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 11;
        let unit = mixed as f64 / (1u64 << 52) as f64 - 1.0;
        unit * 10f64.powi(-((at % 7) as i32))
    };
    (0..len).map(number).collect()
}

/// Lengths around the sizes of rows, runs and blocks, and of several blocks.
const LENGTHS: [usize; 11] = [0, 1, 15, 16, 17, 511, 513, 4095, 4096, 4097, 40_003];

/// The sum of the squares of a tensor that is one parameter.
fn sum_of_squares(compute: &Compute, tensor: &Tensor) -> Result<f64, KernelError> {
    let rows = RowRanges::new(std::iter::once(0..tensor.num_elems()));
    Ok(norm::squares(compute, tensor, 0, &rows, 0..rows.count())?.read()?.total())
}

/// The sum over rows as a tree, by its definition.
fn naive(rows: &[[f64; 16]]) -> [f64; 16] {
    match rows {
        [] => [0.0; 16],
        [row] => *row,
        rows => {
            let (left, right) = rows.split_at(rows.len().next_power_of_two() / 2);
            let (left, right) = (naive(left), naive(right));
            std::array::from_fn(|lane| left[lane] + right[lane])
        }
    }
}

#[test]
fn the_sum_is_a_tree_over_the_rows_of_all_parameters_however_they_are_divided_and_padded() {
    // Parameters that end within a row, within a run of rows and within a block, with gaps between them.
    let lens = [5, 16, 4096, 700, 9001, 33];
    let numbers = numbers(lens.iter().sum());
    let mut rows: Vec<[f64; 16]> = Vec::new();
    let mut from = 0;
    for len in lens {
        for row in numbers[from..from + len].chunks(16) {
            let of = |lane: usize| row.get(lane).map_or(0.0, |x| *x as f32 as f64);
            rows.push(std::array::from_fn(|lane| of(lane) * of(lane)));
        }
        from += len;
    }
    let expected: f64 = naive(&rows).iter().sum();
    for gap in [16, 160] {
        let mut elems = vec![f32::NAN; 30_000];
        let (mut places, mut at, mut from) = (Vec::new(), gap, 0);
        for len in lens {
            for (to, x) in elems[at..].iter_mut().zip(&numbers[from..from + len]) {
                *to = *x as f32;
            }
            places.push(at..at + len);
            (at, from) = ((at + len).next_multiple_of(16) + gap, from + len);
        }
        let (tensor, rows) = (of(&elems, [elems.len()]), RowRanges::new(places));
        for compute in computes_with(&[1, 2, 3]) {
            let part =
                |range| norm::squares(&compute, &tensor, 0, &rows, range).unwrap().read().unwrap();
            let whole = part(0..rows.count());
            assert_eq!(whole.total().to_bits(), expected.to_bits(), "gap {gap}");
            for bounds in [[1, 2], [31, 300], [256, 512], [260, 700], [0, 866]] {
                let [first, second] = bounds.map(|bound: usize| bound.min(rows.count()));
                let mut joined = RowTree::default();
                for range in [0..first, first..second, second..rows.count()] {
                    part(range).nodes().iter().for_each(|node| joined.push(*node));
                }
                assert_eq!(joined, whole, "gap {gap}, parts end at {first} and {second}");
            }
        }
    }
}

/// For f64 sums of 40,000 positive numbers in two orders, each with a relative error below 40,000 times
/// 1.1e-16.
const TOLERANCE: f64 = 1e-11;

#[test]
fn sums_of_squares() {
    for len in LENGTHS {
        let doubles = numbers(len);
        let singles: Vec<f32> = doubles.iter().map(|x| *x as f32).collect();
        let cases = [
            (of(&singles, [singles.len()]), reference::sum_of_squares(&singles)),
            (of(&doubles, [doubles.len()]), reference::sum_of_squares(&doubles)),
        ];
        for (tensor, expected) in cases {
            let sums: Vec<f64> = computes_with(&[1, 2, 3])
                .iter()
                .map(|compute| sum_of_squares(compute, &tensor).unwrap())
                .collect();
            let off = (sums[0] - expected).abs();
            assert!(off <= TOLERANCE * expected, "{len}: {} and {expected}", sums[0]);
            assert!(sums.iter().all(|sum| sum.to_bits() == sums[0].to_bits()), "{len}: {sums:?}");
        }
    }
}

#[test]
fn squares_that_f32_cannot_hold() {
    let compute = Compute::new(1, Allocator::new()).unwrap();
    let sum = |elems: &[f32]| sum_of_squares(&compute, &of(elems, [elems.len()])).unwrap();
    assert_eq!(sum(&[1e30, 0.0]), f64::from(1e30f32).powi(2));
    assert!(sum(&[1e-30]) > 0.0);
    assert!(sum(&[1.0, f32::NAN]).is_nan());
    assert_eq!(sum(&[f32::NEG_INFINITY, 1.0]), f64::INFINITY);
}

#[test]
fn integers_are_refused() {
    let compute = Compute::new(1, Allocator::new()).unwrap();
    let numbers = of(&[1i64, 2], [2]);
    let error = sum_of_squares(&compute, &numbers).unwrap_err().to_string();
    assert!(error.contains("squares") && error.contains("i64"), "{error}");
}

#[test]
fn a_sum_stays_in_a_tensor_until_it_is_read() {
    let compute = Compute::new(1, Allocator::new()).unwrap();
    let numbers = of(&[0.5f32; 16 * 21], [16 * 21]);
    let rows = RowRanges::new(std::iter::once(0..numbers.num_elems()));
    let squares = norm::squares(&compute, &numbers, 0, &rows, 0..21).unwrap();
    // 21 rows are nodes of 16, 4 and one row.
    assert_eq!(squares.nodes().dims(), [3, 16]);
    let workspace = compute.allocator.usage(Category::Workspace);
    assert_eq!(workspace.current_bytes, 3 * 16 * 8, "nothing else is kept");
    squares.nodes().fill_zero().unwrap();
    assert_eq!(squares.read().unwrap().total(), 0.0, "the numbers come from the tensor");
    assert_eq!(sum_of_squares(&compute, &numbers).unwrap(), 0.25 * 16.0 * 21.0);
}
