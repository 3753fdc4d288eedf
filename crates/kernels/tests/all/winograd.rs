//! Convolutions by minimal filtering: their errors beside those of the direct form, and one order of sums.

use crate::common::{computes_with, numbers, of, values, wide};
use paceline_kernels::conv2d::{self, Conv2d};
use paceline_kernels::{Compute, ImageLayout, SimdLevel, conv_relu_pool, reference};
use paceline_memory::{Allocator, Category, DType};

/// The largest error of an element, relative to the largest result, of sums of up to 3,136 squares.
const BOUND: f64 = 4e-6;
/// The square root of the mean square error, relative to that of the direct form. Minimal filtering adds more numbers before
/// it multiplies, and multiplies fewer.
const OF_DIRECT: f64 = 4.0;

fn same(height: usize, width: usize, c_in: usize, c_out: usize) -> Conv2d {
    Conv2d::same3x3(height, width, c_in, c_out)
}

/// Geometries, and numbers of images: those of README and of docs, and others. All have a form of minimal filtering, the gradient
/// of the weight if both sides have 32 channels.
fn geometries() -> Vec<(Conv2d, usize)> {
    vec![
        (same(14, 14, 32, 64), 3),
        (same(14, 14, 32, 32), 64),
        (same(7, 7, 64, 128), 4),
        (same(16, 16, 16, 32), 1),
        (Conv2d { padding: 0, ..same(9, 12, 36, 33) }, 5),
        (Conv2d { padding: 2, ..same(5, 4, 24, 17) }, 2),
        (Conv2d { padding: 2, ..same(5, 4, 32, 40) }, 2),
        (same(5, 6, 16, 16), 1),
        (same(5, 5, 40, 130), 7),
        (same(33, 3, 35, 47), 2),
        (same(40, 41, 64, 32), 2),
        (same(6, 5, 32, 40), 0),
    ]
}

/// Input, weight, bias and gradient of the output.
type Inputs = [Vec<f32>; 4];
/// Output, and gradients of the input, of the weight and of the bias.
type Results = [Vec<f64>; 4];

fn inputs(conv: &Conv2d, batch: usize) -> Inputs {
    let len = |shape: [usize; 4]| shape.iter().product();
    let (x, w) = (numbers(1, len(conv.input_shape(batch))), numbers(2, len(conv.weight_shape())));
    [x, w, numbers(3, conv.c_out), numbers(4, len(conv.output_shape(batch)))]
}

fn run(compute: &Compute, conv: &Conv2d, [x, w, b, dy]: &Inputs, accumulate: bool) -> Results {
    let batch = x.len() / (conv.height * conv.width * conv.c_in);
    let (input, output) = (conv.input_shape(batch), conv.output_shape(batch));
    let [xt, dx] = [0; 2].map(|_| of(x, input));
    let [dyt, y] = [0; 2].map(|_| of(dy, output));
    let [wt, dw] = [0; 2].map(|_| of(w, conv.weight_shape()));
    let [bt, db] = [0; 2].map(|_| of(b, [conv.c_out]));
    conv2d::forward(compute, conv, &xt, &wt, &bt, &y).unwrap();
    conv2d::backward_input(compute, conv, &wt, &dyt, &dx).unwrap();
    conv2d::backward_weight(compute, conv, &xt, &dyt, &dw, &db, accumulate).unwrap();
    [y, dx, dw, db].map(|tensor| values(&tensor))
}

/// The plain implementation in f64.
fn exact(conv: &Conv2d, inputs: &Inputs, accumulate: bool) -> Results {
    let [x, w, b, dy] = inputs.each_ref().map(|elems| wide(elems));
    let (mut y, mut dx) = (dy.clone(), x.clone());
    let zeros = |elems: &[f64]| if accumulate { elems.to_vec() } else { vec![0.0; elems.len()] };
    let (mut dw, mut db) = (zeros(&w), zeros(&b));
    reference::conv2d_forward(conv, &x, &w, &b, &mut y);
    dx.fill(0.0);
    reference::conv2d_backward_input(conv, &w, &dy, &mut dx);
    reference::conv2d_backward_weight(conv, &x, &dy, &mut dw, &mut db);
    [y, dx, dw, db]
}

/// The largest error and the square root of the mean square error, relative to the largest result.
fn errors(got: &[f64], want: &[f64]) -> [f64; 2] {
    let scale = want.iter().fold(f64::MIN_POSITIVE, |most, x| most.max(x.abs()));
    let errors = got.iter().zip(want).map(|(got, want)| (got - want).abs() / scale);
    let square = errors.clone().map(|error| error * error).sum::<f64>() / got.len().max(1) as f64;
    [errors.fold(0.0, f64::max), square.sqrt()]
}

#[test]
fn errors_are_bounded_and_near_those_of_the_direct_form() {
    let compute = Compute::new(2, Allocator::new()).unwrap();
    for (conv, batch) in geometries() {
        for accumulate in [false, true] {
            let inputs = inputs(&conv, batch);
            let want = exact(&conv, &inputs, accumulate);
            let of = |direct| run(&compute, &Conv2d { direct, ..conv }, &inputs, accumulate);
            let (direct, fast) = (of(true), of(false));
            let names = ["forward", "gradient of input", "gradient of weight"];
            for (at, name) in names.into_iter().enumerate() {
                let (direct, fast) = (errors(&direct[at], &want[at]), errors(&fast[at], &want[at]));
                let [ulps_direct, ulps] = [direct, fast].map(|of| of.map(|x| x * 2f64.powi(24)));
                println!("{conv:?} batch {batch}, {name}: {ulps_direct:.2?} -> {ulps:.2?} ulps");
                assert!(fast[0] < BOUND, "{conv:?} batch {batch}, {name}: {fast:?}");
                let most = OF_DIRECT * direct[1];
                assert!(fast[1] <= most, "{conv:?}, {name}: {fast:?}, directly {direct:?}");
            }
            assert_eq!(direct[3], fast[3]);
        }
    }
}

#[test]
fn all_levels_and_numbers_of_threads_give_the_same_bits() {
    let computes = computes_with(&[1, 2, 3, 4]);
    for (conv, batch) in geometries() {
        for accumulate in [false, true] {
            let inputs = inputs(&conv, batch);
            let mut want = None;
            for compute in computes.iter().filter(|on| on.simd() != SimdLevel::Portable) {
                let got = run(compute, &conv, &inputs, accumulate);
                let want = want.get_or_insert_with(|| got.clone());
                assert!(got == *want, "{conv:?} batch {batch} with {:?}", compute.simd());
            }
        }
    }
}

/// The images of an array with their channels as planes.
fn planes<T: Copy>(elems: &[T], positions: usize, channels: usize) -> Vec<T> {
    let all = positions * channels;
    (0..elems.len())
        .map(|at| elems[at / all * all + at % positions * channels + at % all / positions])
        .collect()
}

#[test]
fn planes_have_the_bits_of_channels_side_by_side() {
    let compute = Compute::new(2, Allocator::new()).unwrap();
    for (conv, batch) in geometries() {
        let (input, output) = (conv.height * conv.width, conv.out_height() * conv.out_width());
        let [x, w, b, dy] = inputs(&conv, batch);
        let (xp, dyp) = (planes(&x, input, conv.c_in), planes(&dy, output, conv.c_out));
        let [y, dx, dw, db] = run(&compute, &conv, &[x, w.clone(), b.clone(), dy], false);
        let in_planes = Conv2d { layout: ImageLayout::Nchw, ..conv };
        let want = [planes(&y, output, conv.c_out), planes(&dx, input, conv.c_in), dw, db];
        assert!(run(&compute, &in_planes, &[xp, w, b, dyp], false) == want, "{conv:?}");
    }
}

#[test]
fn a_pool_takes_the_sums_of_either_form() {
    for compute in computes_with(&[1, 3]) {
        for (conv, batch) in geometries() {
            let pooled = conv_relu_pool::output_shape(&conv, batch);
            let [x, w, b, _] = inputs(&conv, batch);
            let dy = numbers(5, pooled.iter().product());
            let input = conv.input_shape(batch);
            let of_form = |direct| {
                let conv = Conv2d { direct, ..conv };
                let (xt, wt, bt) =
                    (of(&x, input), of(&w, conv.weight_shape()), of(&b, [conv.c_out]));
                let (y, dyt, dx) = (of(&dy, pooled), of(&dy, pooled), of(&x, input));
                let (dw, db) = (of(&w, conv.weight_shape()), of(&b, [conv.c_out]));
                let allocator = &compute.allocator;
                let winners = allocator.tensor(DType::U8, pooled, Category::Activations).unwrap();
                conv_relu_pool::forward(&compute, &conv, &xt, &wt, &bt, &y, &winners).unwrap();
                // Rounding may decide who wins, so the gradients get winners of their own.
                let all = winners.num_elems();
                let own: Vec<u8> = (0..all).map(|at| (at * 7 % 5) as u8).collect();
                winners.write::<u8>().unwrap().copy_from_slice(&own);
                conv_relu_pool::backward_input(&compute, &conv, &wt, &winners, &dyt, &dx).unwrap();
                conv_relu_pool::backward_weight(
                    &compute, &conv, &xt, &winners, &dyt, &dw, &db, false,
                )
                .unwrap();
                [y, dx, dw].map(|tensor| values(&tensor))
            };
            let (direct, fast) = (of_form(true), of_form(false));
            for (direct, fast) in direct.iter().zip(&fast) {
                let error = errors(fast, direct)[0];
                assert!(error < BOUND, "{conv:?} batch {batch} {:?}: {error}", compute.simd());
            }
        }
    }
}
