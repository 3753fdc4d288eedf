//! Batch normalization, element-wise operations and losses on tensors of `Half`, for each of the two types by `half_rows.rs`.

use paceline_kernels::batch_norm::{self, BatchNorm};
use paceline_kernels::linear::Activation;
use paceline_kernels::{Compute, elementwise, loss, reference};
use paceline_memory::{Allocator, Category, DType};

use super::Half;
use crate::common::{self, computes, numbers, poisoned, tensor, values};

const HALF: DType = <Half as paceline_memory::Element>::DTYPE;

/// Pseudorandom numbers in -1..1 without short cycles, rounded to `Half`.
fn halves(seed: u64, len: usize) -> Vec<f64> {
    numbers(seed, len).into_iter().map(|x| Half::from_f32(x).to_f64()).collect()
}

/// Neighbors are at most `EPSILON` of their size apart. Rounding changes a number by at most half of that.
const ROUNDING: f64 = Half::EPSILON.to_f64_const() / 2.0;

/// The errors of a handful of operations in f32 on numbers of size one, relative to the largest result.
const SINGLE: f64 = 1e-6;

#[track_caller]
fn assert_close(got: &[f64], want: &[f64], rounding: f64, what: &str) {
    common::assert_close(got, want, 2.0 * SINGLE, rounding, what);
}

/// y, dx, d_weight, d_bias and the moments.
fn normalize(
    compute: &Compute,
    config: &BatchNorm,
    dims: &[usize],
    [x, weight, bias, dy]: [&[f64]; 4],
    accumulate: bool,
) -> [Vec<f64>; 5] {
    let small = |elems: &[f64]| tensor(compute, DType::F32, [elems.len()], elems);
    let [weight, bias] = [weight, bias].map(small);
    let [x, dy] = [x, dy].map(|elems| tensor(compute, HALF, dims, elems));
    let [y, dx] = [(); 2].map(|()| poisoned(compute, HALF, dims));
    let [sums, moments] = [(); 2].map(|()| poisoned(compute, DType::F64, [config.sums_len()]));
    batch_norm::sums(compute, config, &x, &sums).unwrap();
    batch_norm::moments(compute, config, &sums, &moments).unwrap();
    batch_norm::normalize(compute, config, &x, &moments, &weight, &bias, &y).unwrap();
    let sums = poisoned(compute, DType::F64, [config.gradient_sums_len()]);
    batch_norm::gradient_sums(compute, config, &x, &moments, &weight, &bias, &dy, &sums).unwrap();
    let begin = vec![if accumulate { 2.0 } else { f64::NAN }; config.channels];
    let [dw, db] = [(); 2].map(|()| small(&begin));
    batch_norm::backward_weight(compute, config, &sums, &dw, &db, accumulate).unwrap();
    batch_norm::backward_input(compute, config, &x, &moments, &weight, &bias, &dy, &sums, &dx)
        .unwrap();
    [&y, &dx, &dw, &db, &moments].map(values)
}

#[test]
fn batch_norm_rounds_what_goes_from_layer_to_layer_and_nothing_else() {
    for activation in [Activation::None, Activation::Relu] {
        // Every size of group of channels, and numbers of rows below and above the size of a block.
        for dims in [vec![3, 4, 5, 16], vec![2, 12, 11, 39], vec![1, 1, 2, 1], vec![700, 8]] {
            let (len, channels) = (dims.iter().product::<usize>(), dims[dims.len() - 1]);
            let config = BatchNorm::new(channels, activation);
            let (x, dy, bias) = (halves(1, len), halves(4, len), halves(3, channels));
            let weight: Vec<f64> = halves(2, channels).iter().map(|w| 1.5 + w).collect();
            let operands = [&x[..], &weight, &bias, &dy];

            let (mut y, mut dx) = (vec![0.0; len], vec![0.0; len]);
            reference::batch_norm_forward(&config, &x, &weight, &bias, &mut y);
            let mut first = None;
            for (at, compute) in computes().iter().enumerate() {
                let what = format!("{:?} {activation:?} {dims:?}", compute.simd());
                let accumulate = at % 2 == 1;
                let begin = if accumulate { 2.0 } else { 0.0 };
                let (mut dw, mut db) = (vec![begin; channels], vec![begin; channels]);
                reference::batch_norm_backward(
                    &config, &x, &y, &weight, &dy, &mut dw, &mut db, &mut dx,
                );
                let got = normalize(compute, &config, &dims, operands, accumulate);
                assert_close(&got[0], &y, ROUNDING, &format!("y, {what}"));
                assert_close(&got[1], &dx, ROUNDING, &format!("dx, {what}"));
                assert_close(&got[2], &dw, 0.0, &format!("dw, {what}"));
                assert_close(&got[3], &db, 0.0, &format!("db, {what}"));
                // The bits are the same for all vector instructions and numbers of threads.
                let [y, dx, _, _, moments] = got;
                let bits = [y, dx, moments];
                assert_eq!(&bits, first.get_or_insert_with(|| bits.clone()), "{what}");
            }
        }
    }
}

#[test]
fn element_wise_operations() {
    for compute in computes() {
        for len in [0, 1, 15, 67] {
            let (a, b) = (halves(1, len), halves(2, len));
            let of = |elems: &[f64]| tensor(&compute, HALF, [len], elems);
            let y = poisoned(&compute, HALF, [len]);
            elementwise::relu(&compute, &of(&a), &y).unwrap();
            assert_eq!(values(&y), a.iter().map(|x| x.max(0.0)).collect::<Vec<_>>());
            // Sums of two such numbers are exact in f32, so only the last rounding counts.
            let sum = of(&b);
            elementwise::add(&compute, &of(&a), &sum).unwrap();
            let exact = a.iter().zip(&b).map(|(a, b)| Half::from_f32((a + b) as f32).to_f64());
            assert_eq!(values(&sum), exact.collect::<Vec<_>>());
        }
        let not_a_number = poisoned(&compute, HALF, [3]);
        let y = tensor(&compute, HALF, [3], &[0.0; 3]);
        elementwise::relu(&compute, &not_a_number, &y).unwrap();
        assert!(values(&y).iter().all(|y| y.is_nan()));
    }
}

#[test]
fn losses_are_those_of_the_rounded_outputs_and_gradients_are_rounded_once() {
    let compute = Compute::new(1, Allocator::new()).unwrap();
    for (rows, columns) in [(1, 1), (7, 10), (33, 5), (0, 3)] {
        let x: Vec<f64> = halves(1, rows * columns).iter().map(|x| x * 4.0).collect();
        let labels = compute.allocator.tensor(DType::I64, [rows], Category::Data).unwrap();
        for (row, label) in labels.write::<i64>().unwrap().iter_mut().enumerate() {
            *label = (row * 3 % columns) as i64;
        }
        let targets = halves(2, rows * columns);
        // The sums and the gradients of both losses.
        let run = |dtype: DType, target: DType, has_gradient: bool| -> [Vec<f64>; 4] {
            let x = tensor(&compute, dtype, [rows, columns], &x);
            let targets = tensor(&compute, target, [rows, columns], &targets);
            let [first, second] = [(); 2].map(|()| poisoned(&compute, dtype, [rows, columns]));
            let [of_classes, of_values] =
                [(); 2].map(|()| tensor(&compute, DType::F64, [3], &[0.0; 3]));
            let gradient = |to| has_gradient.then_some(to);
            loss::cross_entropy(&compute, &x, &labels, 0.25, gradient(&first), &of_classes)
                .unwrap();
            loss::mse(&compute, &x, &targets, 0.25, gradient(&second), &of_values).unwrap();
            [&of_classes, &of_values, &first, &second].map(values)
        };
        let want = run(DType::F64, DType::F64, true);
        let got = run(HALF, DType::F32, true);
        let what = format!("{rows} x {columns}");
        assert_close(&got[0], &want[0], 0.0, &what);
        assert_close(&got[1], &want[1], 0.0, &what);
        assert_close(&got[2], &want[2], ROUNDING, &what);
        assert_close(&got[3], &want[3], ROUNDING, &what);
        assert_eq!(run(HALF, DType::F32, false)[..2], got[..2], "{what}");
    }
}
