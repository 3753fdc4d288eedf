//! Products and convolutions on a card against the same operations on the processor, on fresh inputs, with odd
//! sizes. What an operation writes holds NaN before, and is compared whole.
//!
//! Tolerances are small multiples of the largest differences that were measured, relative to the largest element of a
//! result: cards add in another order than the processor.

mod common;
mod on_card;

use on_card::{Pair, Promise};
use paceline_kernels::conv2d::{self, Conv2d};
use paceline_kernels::linear::{self, Activation};
use paceline_kernels::linear_cross_entropy::{self, Gradients, IGNORED, Then};
use paceline_kernels::{Compute, ImageLayout, Result, conv_relu_pool, elementwise};
use paceline_memory::{DType, Tensor};

use DType::{BF16, F16, F32, F64, I64, U8};

/// How far results of a type may be off that are summed in another order.
fn reordered(dtype: DType) -> Promise {
    Promise::Within(match dtype {
        F64 => 1e-14,
        BF16 => 2.0 / 256.0,
        F16 => 2.0 / 2048.0,
        _ => 2e-6,
    })
}

/// The element types of a layer: activations, parameters, gradients of parameters.
const LINEAR_TYPES: [[DType; 3]; 7] = [
    [F32, F32, F32],
    [F64, F64, F64],
    [BF16, F32, F32],
    [BF16, BF16, F32],
    [BF16, BF16, BF16],
    [F16, F32, F32],
    [F16, F16, F16],
];

/// Both passes of a layer; gradients of parameters are written, and then added to.
fn linear_layer(
    on: &Compute,
    (with_bias, activation): (bool, Activation),
    [x, w, bias, y, dy, dw, db, dx]: [&Tensor; 8],
) -> Result<()> {
    linear::forward(on, x, w, with_bias.then_some(bias), activation, y)?;
    for accumulate in [false, true] {
        linear::backward_weight(on, x, dy, dw, with_bias.then_some(db), accumulate)?;
    }
    linear::backward_input(on, w, dy, dx)
}

#[test]
fn linear_layers() {
    let Some(pair) = Pair::new() else { return };
    let sizes = [(1, 1, 1), (5, 7, 3), (33, 40, 17), (2, 65, 130), (0, 3, 2), (3, 2, 0)];
    for [activations, parameters, gradients] in LINEAR_TYPES {
        for (at, (m, n, k)) in sizes.into_iter().enumerate() {
            let with_bias = at % 3 != 2;
            let activation = if at % 2 == 0 { Activation::Relu } else { Activation::None };
            let x = pair.random(activations, &[m, k], 1);
            let w = pair.random(parameters, &[n, k], 2);
            let bias = pair.random(parameters, &[n], 3);
            let y = pair.poisoned(activations, &[m, n]);
            let dy = pair.random(activations, &[m, n], 4);
            let dw = pair.poisoned(gradients, &[n, k]);
            let db = pair.poisoned(gradients, &[n]);
            let dx = pair.poisoned(activations, &[m, k]);
            let run = |on: &_, of: [&_; 8]| linear_layer(on, (with_bias, activation), of);
            pair.run(run, [&x, &w, &bias, &y, &dy, &dw, &db, &dx]);
            pair.compare(&y, reordered(activations));
            pair.compare(&dw, reordered(gradients));
            if with_bias {
                pair.compare(&db, reordered(gradients));
            }
            pair.compare(&dx, reordered(activations));
        }
    }
}

/// The input and the weight, and the output with what is added to it.
#[test]
fn linear_layers_of_a_residual_connection() {
    let Some(pair) = Pair::new() else { return };
    for [input, weight, output] in [[F32, F32, F32], [F64, F64, F64], [BF16, F32, F32]] {
        for (m, n, k) in [(5, 7, 3), (33, 40, 17), (3, 2, 0)] {
            let (x, w) = (pair.random(input, &[m, k], 1), pair.random(weight, &[n, k], 2));
            let (onto, y) = (pair.random(output, &[m, n], 3), pair.poisoned(output, &[m, n]));
            let (product, sum) = (pair.poisoned(output, &[m, n]), pair.random(output, &[m, n], 3));
            let run = |on: &_, [x, w, onto, y, product, sum]: [&Tensor; 6]| {
                linear::forward_onto(on, x, w, onto, y)?;
                linear::forward(on, x, w, None, Activation::None, product)?;
                elementwise::add(on, product, sum)
            };
            pair.run(run, [&x, &w, &onto, &y, &product, &sum]);
            pair.compare(&y, reordered(input));
            assert_eq!(pair.on_processor(&y), pair.on_processor(&sum));
            assert_eq!(pair.on_card(&y), pair.on_card(&sum));
        }
    }
}

/// TF32 keeps 10 bits of the mantissa of each factor.
#[test]
fn products_on_tensor_cores_are_off_by_the_rounding_of_their_factors() {
    let Some(pair) = Pair::new() else { return };
    let pair = pair.with_tf32();
    let (m, n, k) = (33, 40, 17);
    let (x, w) = (pair.random(F32, &[m, k], 1), pair.random(F32, &[n, k], 2));
    let y = pair.poisoned(F32, &[m, n]);
    let forward =
        |on: &_, [x, w, y]: [&Tensor; 3]| linear::forward(on, x, w, None, Activation::None, y);
    pair.run(forward, [&x, &w, &y]);
    pair.compare(&y, Promise::Within(2e-3));
    let (on_card, exact) = (pair.on_card(&y), pair.on_processor(&y));
    let is_rounded = on_card.iter().zip(&exact).any(|(a, b)| (a - b).abs() > 1e-5);
    assert!(is_rounded, "the products have every bit of their factors");
}

/// Activations may differ from one side of a layer to the other, and a bias from both.
#[test]
fn linear_layers_with_mixed_types() {
    let Some(pair) = Pair::new() else { return };
    let (m, n, k) = (9, 12, 20);
    for [input, weight, bias, output] in
        [[F32, F32, BF16, BF16], [BF16, F32, BF16, F32], [F32, F16, F32, F16], [F16, F16, F16, F32]]
    {
        let x = pair.random(input, &[m, k], 1);
        let w = pair.random(weight, &[n, k], 2);
        let bias = pair.random(bias, &[n], 3);
        let y = pair.poisoned(output, &[m, n]);
        let dy = pair.random(output, &[m, n], 4);
        let (dw, db) = (pair.poisoned(F32, &[n, k]), pair.poisoned(weight, &[n]));
        let dx = pair.poisoned(input, &[m, k]);
        let run = |on: &_, of: [&_; 8]| linear_layer(on, (true, Activation::None), of);
        pair.run(run, [&x, &w, &bias, &y, &dy, &dw, &db, &dx]);
        for (of, dtype) in [(&y, output), (&dw, F32), (&db, weight), (&dx, input)] {
            pair.compare(of, reordered(dtype));
        }
    }
}

#[test]
fn heads_of_language_models() {
    let Some(pair) = Pair::new() else { return };
    // More rows than a chunk, more classes than a block has threads, and neither.
    for (rows, classes, inputs) in [(1, 1, 1), (70, 33, 5), (5, 700, 9), (4100, 3, 2), (0, 3, 2)] {
        let labels: Vec<f64> = (0..rows)
            .map(|row| if row % 5 == 3 { IGNORED as f64 } else { (row * 7 % classes) as f64 })
            .collect();
        let labels = pair.of(I64, &[rows], &labels);
        // So many rows take long on an emulated card.
        let of_many = if rows > 1000 { 2..3 } else { 0..4 };
        let types = [[F32, F32], [F64, F64], [BF16, F32], [F16, F32]];
        for [activations, real] in types[of_many].iter().copied() {
            // Differences of 16 bits come from outputs that are rounded on their way, not from the type of the result.
            let tolerance = reordered(if real == F64 { F64 } else { activations });
            let x = pair.random(activations, &[rows, inputs], 1);
            let w = pair.random(real, &[classes, inputs], 2);
            let sums = pair.of(F64, &[3], &[1.0, 2.0, 3.0]);
            let evaluate = |on: &_, [x, w, labels, sums]: [&Tensor; 4]| {
                linear_cross_entropy::evaluate(on, x, w, labels, sums)
            };
            pair.run(evaluate, [&x, &w, &labels, &sums]);
            pair.compare(&sums, tolerance);

            let dx = pair.poisoned(activations, &[rows, inputs]);
            let dw = pair.poisoned(real, &[classes, inputs]);
            let kept = pair.poisoned(real, &[rows, classes]);
            for accumulate in [false, true] {
                let backward = |on: &_, [x, w, labels, dx, dw, sums]: [&Tensor; 6]| {
                    let gradients =
                        Gradients { d_input: dx, then: Then::weight(Some(dw), accumulate) };
                    linear_cross_entropy::differentiate(on, x, w, labels, 0.5, gradients, sums)
                };
                pair.run(backward, [&x, &w, &labels, &dx, &dw, &sums]);
                for tensor in [&sums, &dx, &dw] {
                    pair.compare(tensor, tolerance);
                }
                let keep = |on: &_, [x, w, labels, dx, kept, sums]: [&Tensor; 6]| {
                    let gradients = Gradients { d_input: dx, then: Then::Keep(kept) };
                    linear_cross_entropy::differentiate(on, x, w, labels, 0.5, gradients, sums)
                };
                pair.run(keep, [&x, &w, &labels, &dx, &kept, &sums]);
                let weight = |on: &_, [x, kept, dw]: [&Tensor; 3]| {
                    linear_cross_entropy::backward_weight(on, x, kept, dw, accumulate)
                };
                pair.run(weight, [&x, &kept, &dw]);
                for tensor in [&sums, &dx, &kept, &dw] {
                    pair.compare(tensor, tolerance);
                }
            }
        }
    }
}

#[test]
fn labels_that_are_no_class_make_nan_on_a_card() {
    let Some(pair) = Pair::new() else { return };
    let (x, w) = (pair.random(F32, &[3, 2], 1), pair.random(F32, &[4, 2], 2));
    let labels = pair.of(I64, &[3], &[0.0, 4.0, -1.0]);
    let (dx, sums) = (pair.poisoned(F32, &[3, 2]), pair.of(F64, &[3], &[0.0; 3]));
    pair.run_on_card(
        |on, [x, w, labels, dx, sums]| {
            let gradients = Gradients { d_input: dx, then: Then::Nothing };
            linear_cross_entropy::differentiate(on, x, w, labels, 1.0, gradients, sums)
        },
        [&x, &w, &labels, &dx, &sums],
    );
    assert!(pair.on_card(&sums)[0].is_nan());
    let dx: Vec<bool> = pair.on_card(&dx).iter().map(|x| x.is_nan()).collect();
    assert_eq!(dx, [false, false, true, true, true, true]);
}

#[test]
fn labels_behind_the_ends_of_sequences_are_ignored() {
    let Some(pair) = Pair::new() else { return };
    for (n, seq) in [(1, 1), (5, 13), (3, 200)] {
        let labels: Vec<f64> = (0..n * seq).map(|at| at as f64).collect();
        let labels = pair.of(I64, &[n, seq], &labels);
        let lengths: Vec<f64> = (0..n).map(|row| (row * 5) as f64 - 1.0).collect();
        let lengths = pair.of(I64, &[n], &lengths);
        let real = pair.poisoned(I64, &[n, seq]);
        let ignore = |on: &_, [labels, lengths, real]: [&Tensor; 3]| {
            linear_cross_entropy::ignore_padding(on, labels, lengths, real)
        };
        pair.run(ignore, [&labels, &lengths, &real]);
        pair.compare(&real, Promise::Bits);
    }
}

/// Parameters lie behind each other in one buffer, so addresses are multiples of an element's size only.
#[test]
fn linear_layers_at_odd_addresses() {
    let Some(pair) = Pair::new() else { return };
    let (m, n, k) = (3, 5, 7);
    for dtype in [F32, F64, BF16, F16] {
        let x = pair.random(dtype, &[m * k + 1], 1);
        let parameters = pair.random(dtype, &[1 + n * k + n], 2);
        // Its first element is not written.
        let y = pair.random(dtype, &[m * n + 1], 3);
        let forward = |on: &_, [x, parameters, y]: [&Tensor; 3]| {
            let weight = parameters.slice(1..1 + n * k)?.view([n, k])?;
            let bias = parameters.slice(1 + n * k..1 + n * k + n)?;
            let (x, y) = (x.slice(1..1 + m * k)?.view([m, k])?, y.slice(1..1 + m * n)?);
            linear::forward(on, &x, &weight, Some(&bias), Activation::Relu, &y.view([m, n])?)
        };
        pair.run(forward, [&x, &parameters, &y]);
        pair.compare(&y, reordered(dtype));
    }
}

/// The element types of images: input, output, and parameters.
const IMAGE_TYPES: [[DType; 3]; 6] = [
    [F32, F32, F32],
    [F64, F64, F64],
    [F32, BF16, F32],
    [BF16, BF16, F32],
    [F32, F16, F32],
    [F16, F16, F32],
];

/// A batch and a convolution. They have more positions, channels and steps than a tile, or fewer. `which` chooses the layout.
fn convolutions(which: usize, with_large_tiles: bool) -> Vec<(usize, Conv2d)> {
    let same = Conv2d::same3x3;
    let other = |kernel, stride, padding| Conv2d { kernel, stride, padding, ..same(7, 6, 5, 3) };
    let mut all = vec![
        (1, same(2, 2, 1, 1)),
        (3, same(5, 7, 3, 6)),
        (1, same(4, 4, 9, 70)),
        (2, other((3, 2), 2, 1)),
        (1, other((1, 1), 1, 0)),
        (0, same(4, 4, 2, 2)),
    ];
    for (n, (_, conv)) in all.iter_mut().enumerate() {
        conv.layout = ImageLayout::ALL[(which + n) % 2];
    }
    if with_large_tiles {
        all.extend(large_tiles().map(|(batch, conv)| {
            let layout = ImageLayout::Nhwc;
            (batch, Conv2d { layout, ..conv })
        }));
    }
    all
}

/// Those whose channels come by vectors: in tiles of each size, with padding, with a stride, and with an input whose channels
/// do not.
fn large_tiles() -> [(usize, Conv2d); 4] {
    let same = Conv2d::same3x3;
    [
        (2, same(10, 14, 8, 72)),
        (1, Conv2d { kernel: (2, 2), stride: 2, padding: 1, ..same(24, 25, 72, 8) }),
        (3, same(9, 8, 3, 16)),
        (40, Conv2d { kernel: (3, 2), padding: 1, ..same(2, 1, 16, 24) }),
    ]
}

/// Both passes of a convolution, which may be pooled; its gradients follow the winners `used`. Gradients of parameters are written,
/// and then added to as often as is said.
fn convolve(
    on: &Compute,
    conv: &Conv2d,
    (is_pooled, num_passes): (bool, usize),
    [x, w, bias, y, winners, used, dy, dw, db, dx]: [&Tensor; 10],
) -> Result<()> {
    if is_pooled {
        conv_relu_pool::forward(on, conv, x, w, bias, y, winners)?;
        for pass in 0..num_passes {
            conv_relu_pool::backward_weight(on, conv, x, used, dy, dw, db, pass > 0)?;
        }
        conv_relu_pool::backward_input(on, conv, w, used, dy, dx)
    } else {
        conv2d::forward(on, conv, x, w, bias, y)?;
        for pass in 0..num_passes {
            conv2d::backward_weight(on, conv, x, dy, dw, db, pass > 0)?;
        }
        conv2d::backward_input(on, conv, w, dy, dx)
    }
}

/// The shape of the output of a convolution, which may be pooled.
fn output_shape(conv: &Conv2d, batch: usize, is_pooled: bool) -> [usize; 4] {
    if is_pooled { conv_relu_pool::output_shape(conv, batch) } else { conv.output_shape(batch) }
}

fn compare_convolutions(is_pooled: bool) {
    let Some(pair) = Pair::new() else { return };
    for (at, [input, output, real]) in IMAGE_TYPES.into_iter().enumerate() {
        for (batch, conv) in convolutions(at, real != F64) {
            let shape = output_shape(&conv, batch, is_pooled);
            let x = pair.random(input, &conv.input_shape(batch), 1);
            let w = pair.random(real, &conv.weight_shape(), 2);
            let bias = pair.random(real, &[conv.c_out], 3);
            let (y, dy) = (pair.poisoned(output, &shape), pair.random(output, &shape, 4));
            let winners = pair.poisoned(U8, &shape);
            let dw = pair.poisoned(real, &conv.weight_shape());
            let db = pair.poisoned(real, &[conv.c_out]);
            let dx = pair.poisoned(input, &conv.input_shape(batch));
            let run = |on: &_, of: [&_; 10]| convolve(on, &conv, (is_pooled, 2), of);
            pair.run(run, [&x, &w, &bias, &y, &winners, &winners, &dy, &dw, &db, &dx]);
            for (of, dtype) in [(&y, output), (&dw, real), (&db, real), (&dx, input)] {
                pair.compare(of, reordered(dtype));
            }
            pair.compare(&winners, Promise::Bits);
        }
    }
}

#[test]
fn convolutions_of_images() {
    compare_convolutions(false);
}

#[test]
fn convolutions_that_are_pooled() {
    compare_convolutions(true);
}

/// How far products may be off whose factors are rounded to TF32: a small multiple of 4e-4, the largest difference that was
/// measured. Two roundings to 10 bits of mantissa change a product by 1e-3 at most.
const ROUNDED: Promise = Promise::Within(1e-3);

/// Those of large tiles are rounded to TF32 where that is allowed.
#[test]
fn convolutions_in_tf32() {
    let (Some(exact), Some(rounded)) = (Pair::new(), Pair::new().map(Pair::with_tf32)) else {
        return;
    };
    for (batch, conv) in large_tiles() {
        for is_pooled in [false, true] {
            let results = [&exact, &rounded].map(|pair| {
                let shape = output_shape(&conv, batch, is_pooled);
                let x = pair.random(F32, &conv.input_shape(batch), 1);
                let w = pair.random(F32, &conv.weight_shape(), 2);
                let bias = pair.random(F32, &[conv.c_out], 3);
                let (y, dy) = (pair.poisoned(F32, &shape), pair.random(F32, &shape, 4));
                // Sums that are rounded may have other winners, so gradients have winners of their own.
                let winners = pair.poisoned(U8, &shape);
                let places: Vec<f64> = (0..dy.len()).map(|at| (at * 7 % 5) as f64).collect();
                let others = pair.of(U8, &shape, &places);
                let dw = pair.poisoned(F32, &conv.weight_shape());
                let db = pair.poisoned(F32, &[conv.c_out]);
                let dx = pair.poisoned(F32, &conv.input_shape(batch));
                let run = |on: &_, of: [&_; 10]| convolve(on, &conv, (is_pooled, 1), of);
                pair.run(run, [&x, &w, &bias, &y, &winners, &others, &dy, &dw, &db, &dx]);
                if is_pooled {
                    // All of them were written.
                    assert!(pair.on_card(&winners).iter().all(|place| *place <= 4.0));
                }
                for of in [&y, &dw, &dx] {
                    pair.compare(of, ROUNDED);
                }
                pair.compare(&db, reordered(F32));
                [y, dw, dx].map(|of| (pair.on_card(&of), pair.on_processor(&of)))
            });
            let [exact, rounded] = results;
            for (at, (exact, rounded)) in exact.iter().zip(&rounded).enumerate() {
                let most = exact.1.iter().fold(0f64, |most, x| most.max(x.abs()));
                let off = |of: &(Vec<f64>, Vec<f64>)| {
                    of.0.iter().zip(&of.1).map(|(a, b)| (a - b).abs() / most).fold(0.0, f64::max)
                };
                assert!(off(exact) <= 2e-6);
                // The gradient of an input whose channels are no vectors comes by other tiles.
                let has_tiles = at < 2 || conv.c_in.is_multiple_of(4);
                assert_eq!(off(rounded) > 1e-5, has_tiles, "{conv:?}, {is_pooled}, {at}");
            }
        }
    }
}

/// Parameters lie behind each other in one buffer, so addresses are multiples of an element's size only. The bits are the same.
#[test]
fn convolutions_at_odd_addresses() {
    for (dtype, rounds) in [(F32, false), (F32, true), (BF16, false)] {
        let Some(mut pair) = Pair::new() else { return };
        if rounds {
            pair = pair.with_tf32();
        }
        let promise = if rounds { ROUNDED } else { reordered(dtype) };
        let (batch, conv) = large_tiles()[0];
        let steps = conv.weight_shape().iter().product::<usize>();
        let [inputs, outputs] = [conv.input_shape(batch), conv.output_shape(batch)]
            .map(|shape| shape.iter().product::<usize>());
        let results = [0, 1].map(|first| {
            // The same numbers behind `first` others.
            let numbers = |dtype, len, seed| {
                let shifted =
                    [pair.of(dtype, &[first], &vec![0.5; first]), pair.random(dtype, &[len], seed)];
                pair.joined(&shifted)
            };
            let (x, w) = (numbers(dtype, inputs, 1), numbers(F32, steps, 2));
            let (bias, dy) = (numbers(F32, conv.c_out, 3), numbers(dtype, outputs, 4));
            let (y, dx) = (numbers(dtype, outputs, 5), numbers(dtype, inputs, 6));
            let (dw, db) = (numbers(F32, steps, 7), numbers(F32, conv.c_out, 8));
            let run = |on: &Compute, [x, w, bias, dy, y, dx, dw, db]: [&Tensor; 8]| {
                let [x, dx] = [x, dx].map(|of| of.slice(first..first + inputs).unwrap());
                let [dy, y] = [dy, y].map(|of| of.slice(first..first + outputs).unwrap());
                let [w, dw] = [w, dw].map(|of| of.slice(first..first + steps).unwrap());
                let [bias, db] = [bias, db].map(|of| of.slice(first..first + conv.c_out).unwrap());
                let [x, dx] = [x, dx].map(|of| of.view(conv.input_shape(batch)).unwrap());
                let [dy, y] = [dy, y].map(|of| of.view(conv.output_shape(batch)).unwrap());
                let [w, dw] = [w, dw].map(|of| of.view(conv.weight_shape()).unwrap());
                conv2d::forward(on, &conv, &x, &w, &bias, &y)?;
                conv2d::backward_input(on, &conv, &w, &dy, &dx)?;
                conv2d::backward_weight(on, &conv, &x, &dy, &dw, &db, false)
            };
            pair.run(run, [&x, &w, &bias, &dy, &y, &dx, &dw, &db]);
            pair.compare(&y, promise);
            pair.compare(&dx, promise);
            pair.compare(&dw, if rounds { ROUNDED } else { reordered(F32) });
            [&y, &dx, &dw, &db].map(|of| pair.on_card(of)[first..].to_vec())
        });
        assert!(results[0] == results[1], "{dtype}, {rounds}");
    }
}
