//! Convolutions and pools with images of `Half`, for each of the two types by `half_images.rs`.

use paceline_kernels::conv2d::{self, Conv2d};
use paceline_kernels::pool2d::{self, MaxPool2d};
use paceline_kernels::{Compute, ImageLayout, SimdLevel, conv_relu_pool, reference};
use paceline_memory::{Allocator, Category, DType};

use super::{Half, Other};
use crate::common::{self, numbers, poisoned, tensor, values, wide};

const HALF: DType = <Half as paceline_memory::Element>::DTYPE;

/// What a convolution computes with.
fn rounded(elems: &[f32]) -> Vec<f64> {
    elems.iter().map(|x| Half::from_f32(*x).to_f64()).collect()
}

/// The tolerance for sums in f32, relative to the largest result: the rounding errors of up to a few thousand products of
/// numbers below one, in a different order.
const SUMS: f64 = 1e-5;

/// Neighbors are at most `EPSILON` of their size apart. Rounding changes a number by at most half of that.
const ROUNDING: f64 = Half::EPSILON.to_f64_const() / 2.0;

#[track_caller]
fn assert_close(got: &[f64], want: &[f64], rounding: f64, what: &str) {
    // An error of the sum may move the result to the neighbor, so it counts before and after rounding.
    common::assert_close(got, want, 2.0 * SUMS, rounding, what);
}

fn geometries() -> Vec<Conv2d> {
    let conv = |[height, width]: [usize; 2], [c_in, c_out]: [usize; 2], kernel, stride, padding| {
        Conv2d { kernel, stride, padding, ..Conv2d::same3x3(height, width, c_in, c_out) }
    };
    vec![
        // Narrow images, whose patches are laid out in full, and wide ones.
        Conv2d::same3x3(6, 5, 3, 5),
        Conv2d::same3x3(13, 12, 1, 32),
        Conv2d::same3x3(7, 7, 64, 48),
        Conv2d::same3x3(4, 5, 17, 33),
        conv([9, 8], [2, 4], (5, 3), 2, 1),
        conv([11, 12], [16, 20], (4, 4), 3, 2),
        conv([4, 4], [19, 2], (1, 1), 1, 0),
    ]
}

/// The operands and results of a convolution.
struct Case {
    conv: Conv2d,
    batch: usize,
    /// Whether ReLU and a pool follow.
    is_fused: bool,
    accumulate: bool,
}

/// y, d_weight, d_bias, d_input.
type Outcome = [Vec<f64>; 4];

impl Case {
    fn out_shape(&self) -> [usize; 4] {
        if self.is_fused {
            conv_relu_pool::output_shape(&self.conv, self.batch)
        } else {
            self.conv.output_shape(self.batch)
        }
    }

    /// x, w, b, dy, and the earlier gradients of w and b.
    fn operands(&self) -> [Vec<f32>; 6] {
        let Self { conv, batch, .. } = self;
        let len = |shape: [usize; 4]| shape.iter().product::<usize>();
        let (x, w) = (len(conv.input_shape(*batch)), len(conv.weight_shape()));
        let lens = [x, w, conv.c_out, len(self.out_shape()), w, conv.c_out];
        let mut seed = 0;
        lens.map(|len| {
            seed += 1;
            numbers(seed, len)
        })
    }

    /// The results for an input of this type, and the winners of the pool.
    fn run(&self, compute: &Compute, input: DType) -> (Outcome, Vec<u8>) {
        let Self { conv, batch, accumulate, .. } = self;
        let [x, w, b, dy, dw, db] = self.operands();
        let f32_of = |shape: &[usize], elems: &[f32]| tensor(compute, DType::F32, shape, elems);
        let x = tensor(compute, input, conv.input_shape(*batch), &x);
        let (w, b) = (f32_of(&conv.weight_shape(), &w), f32_of(&[conv.c_out], &b));
        let dy = tensor(compute, HALF, self.out_shape(), &dy);
        let y = poisoned(compute, HALF, self.out_shape());
        let dx = poisoned(compute, input, conv.input_shape(*batch));
        let winners = compute.allocator.tensor(DType::U8, self.out_shape(), Category::Data);
        let winners = winners.unwrap();
        winners.write::<u8>().unwrap().fill(u8::MAX);
        let (dw, db) = if *accumulate {
            (f32_of(&conv.weight_shape(), &dw), f32_of(&[conv.c_out], &db))
        } else {
            (
                poisoned(compute, DType::F32, conv.weight_shape()),
                poisoned(compute, DType::F32, [conv.c_out]),
            )
        };
        if self.is_fused {
            let win = &winners;
            conv_relu_pool::forward(compute, conv, &x, &w, &b, &y, win).unwrap();
            conv_relu_pool::backward_weight(compute, conv, &x, win, &dy, &dw, &db, *accumulate)
                .unwrap();
            conv_relu_pool::backward_input(compute, conv, &w, win, &dy, &dx).unwrap();
        } else {
            conv2d::forward(compute, conv, &x, &w, &b, &y).unwrap();
            conv2d::backward_weight(compute, conv, &x, &dy, &dw, &db, *accumulate).unwrap();
            conv2d::backward_input(compute, conv, &w, &dy, &dx).unwrap();
        }
        ([&y, &dw, &db, &dx].map(values), winners.read::<u8>().unwrap().to_vec())
    }

    /// The same from the plain implementation in f64. Rounding in f32 may decide which of two nearly equal values wins, so
    /// the gradients follow the winners of the kernel.
    fn expected(&self, winners: &[u8]) -> Outcome {
        let Self { conv, accumulate, .. } = self;
        let [x, w, b, dy, dw, db] = self.operands();
        let (x, w, b, dy) = (rounded(&x), rounded(&w), wide(&b), rounded(&dy));
        let mut y = vec![0.0; dy.len()];
        let full = if self.is_fused {
            let mut own = vec![0; dy.len()];
            reference::conv_relu_pool_forward(conv, &x, &w, &b, &mut y, &mut own);
            reference::unpool(conv, &dy, winners)
        } else {
            reference::conv2d_forward(conv, &x, &w, &b, &mut y);
            dy
        };
        let old = |elems: &[f32]| if *accumulate { wide(elems) } else { vec![0.0; elems.len()] };
        let (mut dw, mut db, mut dx) = (old(&dw), old(&db), vec![0.0; x.len()]);
        reference::conv2d_backward_weight(conv, &x, &full, &mut dw, &mut db);
        reference::conv2d_backward_input(conv, &w, &full, &mut dx);
        [y, dw, db, dx]
    }
}

#[test]
fn convolutions_round_operands_and_results_and_sum_in_f32() {
    for conv in geometries() {
        for (is_fused, batch, accumulate) in [
            (false, 1, false),
            (false, 3, true),
            (false, 0, false),
            (true, 1, true),
            (true, 3, false),
            (true, 0, true),
        ] {
            if is_fused && conv_relu_pool::check(&conv).is_err() {
                continue;
            }
            let case = Case { conv, batch, is_fused, accumulate };
            for level in SimdLevel::available() {
                let what = format!("{level:?} {conv:?} batch {batch}, fused {is_fused}");
                let compute = Compute::new(1, Allocator::new()).unwrap().with_simd(level).unwrap();
                let (halves, winners) = case.run(&compute, HALF);
                let [y, dw, db, dx] = case.expected(&winners);
                assert_close(&halves[0], &y, ROUNDING, &format!("y, {what}"));
                assert_close(&halves[1], &dw, 0.0, &format!("dw, {what}"));
                assert_close(&halves[2], &db, 0.0, &format!("db, {what}"));
                assert_close(&halves[3], &dx, ROUNDING, &format!("dx, {what}"));

                // An input of f32 is rounded first, and its gradient is not rounded.
                let (singles, same_winners) = case.run(&compute, DType::F32);
                assert!(singles[..3] == halves[..3] && same_winners == winners, "{what}");
                assert_close(&singles[3], &dx, 0.0, &format!("dx in f32, {what}"));
                let once: Vec<_> =
                    singles[3].iter().map(|x| Half::from_f32(*x as f32).to_f64()).collect();
                assert!(once == halves[3], "rounded dx, {what}");
            }
        }
    }
}

#[test]
fn bits_do_not_depend_on_the_number_of_threads() {
    for conv in [Conv2d::same3x3(6, 5, 3, 5), Conv2d::same3x3(5, 4, 16, 32)] {
        for (is_fused, batch) in [(false, 3), (true, 11), (false, 21)] {
            let case = Case { conv, batch, is_fused, accumulate: true };
            for input in [DType::F32, HALF] {
                let run =
                    |threads| case.run(&Compute::new(threads, Allocator::new()).unwrap(), input);
                let one = run(1);
                for threads in [2, 3, 9] {
                    assert!(run(threads) == one, "{threads} threads, {conv:?}, batch {batch}");
                }
            }
        }
    }
}

#[test]
fn a_not_a_number_gets_through_a_convolution() {
    let conv = Conv2d::same3x3(4, 4, 1, 16);
    let compute = Compute::new(1, Allocator::new()).unwrap();
    let mut x = numbers(1, 16);
    x[5] = f32::NAN;
    let w = tensor(&compute, DType::F32, conv.weight_shape(), &numbers(2, 9 * 16));
    let b = tensor(&compute, DType::F32, [16], &[0.0; 16]);
    for input in [DType::F32, HALF] {
        let x = tensor(&compute, input, conv.input_shape(1), &x);
        let y = tensor(&compute, HALF, [1, 2, 2, 16], &[0.0; 64]);
        let winners = compute.allocator.tensor(DType::U8, [1, 2, 2, 16], Category::Data).unwrap();
        conv_relu_pool::forward(&compute, &conv, &x, &w, &b, &y, &winners).unwrap();
        assert!(values(&y).iter().all(|y| y.is_nan()));
    }
}

#[test]
fn pools_choose_the_largest_and_round_gradients_once() {
    let pool = |height, width, channels, window, stride| MaxPool2d {
        height,
        width,
        channels,
        window,
        stride,
        layout: ImageLayout::Nhwc,
    };
    let compute = Compute::new(1, Allocator::new()).unwrap();
    // Windows side by side, windows that overlap, and windows with gaps.
    for pool in [pool(6, 4, 5, 2, 2), pool(9, 8, 3, 3, 1), pool(7, 8, 2, 2, 3)] {
        for batch in [0, 1, 3] {
            let (input, output) = (pool.input_shape(batch), pool.output_shape(batch));
            let len = |shape: [usize; 4]| shape.iter().product::<usize>();
            // Many ties, because few numbers of 16 bits occur.
            let x: Vec<f32> = numbers(1, len(input)).iter().map(|x| (x * 8.0).round()).collect();
            // Numbers of eight digits, whose sums need more digits than `Half` has and fewer than f32 has.
            let dy: Vec<f32> =
                numbers(2, len(output)).iter().map(|x| (x * 255.0).round()).collect();
            let run = |dtype| {
                let (y, dx) = (poisoned(&compute, dtype, output), poisoned(&compute, dtype, input));
                let winners = compute.allocator.tensor(DType::U8, output, Category::Data).unwrap();
                let (x, dy) =
                    (tensor(&compute, dtype, input, &x), tensor(&compute, dtype, output, &dy));
                pool2d::forward(&compute, &pool, &x, &y, &winners).unwrap();
                pool2d::backward(&compute, &pool, &winners, &dy, &dx).unwrap();
                (values(&y), winners.read::<u8>().unwrap().to_vec(), values(&dx))
            };
            let (y, winners, dx) = run(DType::F64);
            let dx: Vec<f64> = dx.iter().map(|x| Half::from_f32(*x as f32).to_f64()).collect();
            assert_eq!(run(HALF), (y, winners, dx), "{pool:?}, batch {batch}");
        }
    }
}

#[test]
fn types_that_do_not_go_together_are_refused_on_both_devices() {
    let conv = Conv2d::same3x3(4, 4, 2, 3);
    for allocator in [Allocator::new(), Allocator::meta()] {
        let compute = Compute::new(1, allocator).unwrap();
        let of = |dtype, shape: &[usize]| {
            compute.allocator.tensor(dtype, shape, Category::Data).unwrap()
        };
        let (w, b) = (of(DType::F32, &conv.weight_shape()), of(DType::F32, &[3]));
        let forward = |input, output| {
            let (x, y) = (of(input, &conv.input_shape(1)), of(output, &conv.output_shape(1)));
            conv2d::forward(&compute, &conv, &x, &w, &b, &y).map_err(|error| error.to_string())
        };
        assert_eq!(forward(DType::F32, HALF), Ok(()));
        let other = <Other as paceline_memory::Element>::DTYPE;
        for wrong in [DType::F32, other] {
            let error = forward(HALF, wrong).unwrap_err();
            let said = format!("expected elements of type {HALF}, got {wrong}");
            assert!(error.contains(&said), "{error}");
        }
        let error = forward(DType::I32, HALF).unwrap_err();
        assert_eq!(error, "conv2d_forward is not defined for elements of type i32");
        let w = of(HALF, &conv.weight_shape());
        let (x, y) = (of(HALF, &conv.input_shape(1)), of(HALF, &conv.output_shape(1)));
        let error = conv2d::forward(&compute, &conv, &x, &w, &b, &y).unwrap_err().to_string();
        let said = format!("expected elements of type f32, got {HALF}");
        assert!(error.contains(&said), "{error}");
    }
}
