//! Every fast path, at every SIMD level of this machine and with one and three threads, against the
//! plain implementation.

use crate::common::{self, computes, numbers, of, values, wide};
use paceline_kernels::conv2d::{self, Conv2d};
use paceline_kernels::linear::{self, Activation};
use paceline_kernels::optimizer::{self, AdamW, Sgd, StepNumbers};
use paceline_kernels::{Compute, conv_relu_pool, elementwise, reference};
use paceline_memory::{Allocator, Category, DType, Tensor};

/// The tolerance, relative to the largest result, for the rounding errors of f32 sums of up to a few thousand
/// products of numbers below one, in a different order and with fused multiply-adds.
const TOLERANCE: f64 = 1e-5;

fn assert_close(got: &Tensor, want: &[f32], what: &str) {
    common::assert_close(&values(got), &wide(want), TOLERANCE, 0.0, what);
}

fn geometries() -> Vec<Conv2d> {
    let conv = |height, width, c_in, c_out, kernel, stride, padding| Conv2d {
        kernel,
        stride,
        padding,
        ..Conv2d::same3x3(height, width, c_in, c_out)
    };
    vec![
        Conv2d::same3x3(6, 5, 3, 5),
        Conv2d::same3x3(28, 28, 1, 32),
        Conv2d::same3x3(7, 7, 64, 48),
        Conv2d::same3x3(14, 15, 17, 33),
        Conv2d::same3x3(2, 2, 20, 130),
        conv(9, 8, 2, 4, (5, 3), 2, 1),
        conv(9, 8, 16, 24, (5, 3), 2, 1),
        conv(11, 12, 16, 20, (4, 4), 3, 2),
        conv(4, 4, 19, 2, (1, 1), 1, 0),
        conv(5, 6, 18, 16, (3, 3), 2, 0),
        conv(6, 6, 8, 16, (2, 2), 2, 1),
        conv(5, 1, 1, 3, (5, 5), 1, 2),
        conv(1, 1, 2, 3, (3, 3), 1, 1),
    ]
}

#[test]
fn convolution_and_its_gradients() {
    for compute in computes() {
        for conv in geometries() {
            for batch in [1, 3, 0] {
                let what = format!("{:?} {conv:?} batch {batch}", compute.simd());
                let x = numbers(1, conv.input_shape(batch).iter().product());
                let w = numbers(2, conv.weight_shape().iter().product());
                let b = numbers(3, conv.c_out);
                let dy = numbers(4, conv.output_shape(batch).iter().product());
                let (xt, wt) = (of(&x, conv.input_shape(batch)), of(&w, conv.weight_shape()));
                let (bt, dyt) = (of(&b, [conv.c_out]), of(&dy, conv.output_shape(batch)));

                let mut y = vec![0.0; dy.len()];
                reference::conv2d_forward(&conv, &x, &w, &b, &mut y);
                let yt = of(&numbers(9, y.len()), conv.output_shape(batch));
                conv2d::forward(&compute, &conv, &xt, &wt, &bt, &yt).unwrap();
                assert_close(&yt, &y, &what);

                let (mut dw, mut db) = (numbers(5, w.len()), numbers(6, b.len()));
                let (dwt, dbt) = (of(&dw, conv.weight_shape()), of(&db, [conv.c_out]));
                reference::conv2d_backward_weight(&conv, &x, &dy, &mut dw, &mut db);
                conv2d::backward_weight(&compute, &conv, &xt, &dyt, &dwt, &dbt, true).unwrap();
                assert_close(&dwt, &dw, &what);
                assert_close(&dbt, &db, &what);

                let mut dx = vec![0.0; x.len()];
                let dxt = of(&numbers(7, x.len()), conv.input_shape(batch));
                reference::conv2d_backward_input(&conv, &w, &dy, &mut dx);
                conv2d::backward_input(&compute, &conv, &wt, &dyt, &dxt).unwrap();
                assert_close(&dxt, &dx, &what);
            }
        }
    }
}

#[test]
fn fused_convolution_relu_and_pool() {
    for compute in computes() {
        for conv in geometries() {
            if conv.out_height() < 2 || conv.out_width() < 2 {
                continue;
            }
            for batch in [1, 4] {
                let what = format!("{:?} {conv:?} batch {batch}", compute.simd());
                let a = &compute.allocator;
                let pooled = conv_relu_pool::output_shape(&conv, batch);
                let x = numbers(1, conv.input_shape(batch).iter().product());
                let w = numbers(2, conv.weight_shape().iter().product());
                let b = numbers(3, conv.c_out);
                let dy = numbers(4, pooled.iter().product());
                let (xt, wt) = (of(&x, conv.input_shape(batch)), of(&w, conv.weight_shape()));
                let (bt, dyt) = (of(&b, [conv.c_out]), of(&dy, pooled));

                let (mut y, mut winners) = (vec![0.0; dy.len()], vec![0; dy.len()]);
                reference::conv_relu_pool_forward(&conv, &x, &w, &b, &mut y, &mut winners);
                let yt = of(&numbers(9, y.len()), pooled);
                let wint = a.tensor(DType::U8, pooled, Category::Activations).unwrap();
                conv_relu_pool::forward(&compute, &conv, &xt, &wt, &bt, &yt, &wint).unwrap();
                assert_close(&yt, &y, &what);
                // Rounding may decide which of two nearly equal values wins. The gradients below are
                // compared with the fast path's own winners.
                let winners = wint.read::<u8>().unwrap().to_vec();

                let full = reference::unpool(&conv, &dy, &winners);
                let (mut dw, mut db) = (numbers(5, w.len()), numbers(6, b.len()));
                let (dwt, dbt) = (of(&dw, conv.weight_shape()), of(&db, [conv.c_out]));
                reference::conv2d_backward_weight(&conv, &x, &full, &mut dw, &mut db);
                conv_relu_pool::backward_weight(
                    &compute, &conv, &xt, &wint, &dyt, &dwt, &dbt, true,
                )
                .unwrap();
                assert_close(&dwt, &dw, &what);
                assert_close(&dbt, &db, &what);

                let mut dx = vec![0.0; x.len()];
                let dxt = of(&numbers(7, x.len()), conv.input_shape(batch));
                reference::conv2d_backward_input(&conv, &w, &full, &mut dx);
                conv_relu_pool::backward_input(&compute, &conv, &wt, &wint, &dyt, &dxt).unwrap();
                assert_close(&dxt, &dx, &what);
            }
        }
    }
}

#[test]
fn a_not_a_number_gets_through_pool_and_relu() {
    let conv = Conv2d::same3x3(4, 4, 1, 16);
    for compute in computes() {
        let a = &compute.allocator;
        let mut x = numbers(1, 16);
        x[5] = f32::NAN;
        let weight = of(&numbers(2, 9 * 16), conv.weight_shape());
        let (x, bias) = (of(&x, conv.input_shape(1)), of(&[0.0f32; 16], [16]));
        let y = of(&[0.0f32; 64], [1, 2, 2, 16]);
        let winners = a.tensor(DType::U8, [1, 2, 2, 16], Category::Data).unwrap();
        conv_relu_pool::forward(&compute, &conv, &x, &weight, &bias, &y, &winners).unwrap();
        assert!(y.read::<f32>().unwrap().iter().all(|y| y.is_nan()));
        let z = of(&[0.0f32; 64], [1, 2, 2, 16]);
        elementwise::relu(&compute, &y, &z).unwrap();
        assert!(z.read::<f32>().unwrap().iter().all(|z| z.is_nan()));
    }
}

#[test]
fn linear_and_its_gradients() {
    for compute in computes() {
        // Some with so few rows that the product is computed the other way round, some with more.
        for (m, n, k) in
            [(5, 7, 12), (64, 33, 100), (1, 1, 1), (0, 3, 4), (300, 70, 600), (300, 70, 599)]
        {
            let what = format!("{:?} {m} {n} {k}", compute.simd());
            let (x, w) = (numbers(1, m * k), numbers(2, n * k));
            let (b, dy) = (numbers(3, n), numbers(4, m * n));
            let (xt, wt) = (of(&x, [m, k]), of(&w, [n, k]));
            let (bt, dyt) = (of(&b, [n]), of(&dy, [m, n]));
            let mut y = vec![0.0; m * n];
            reference::matmul((m, n, k), |i, p| x[i * k + p], |p, j| w[j * k + p], &mut y, false);
            let linear: Vec<f32> = y.iter().enumerate().map(|(i, y)| y + b[i % n]).collect();
            let cut: Vec<f32> = linear.iter().map(|y| y.max(0.0)).collect();
            let yt = of(&linear, [m, n]);
            linear::forward(&compute, &xt, &wt, None, Activation::None, &yt).unwrap();
            assert_close(&yt, &y, &what);
            linear::forward(&compute, &xt, &wt, Some(&bt), Activation::None, &yt).unwrap();
            assert_close(&yt, &linear, &what);
            linear::forward(&compute, &xt, &wt, Some(&bt), Activation::Relu, &yt).unwrap();
            assert_close(&yt, &cut, &what);

            let (mut dw, mut db) = (numbers(5, n * k), numbers(6, n));
            let (dwt, dbt) = (of(&dw, [n, k]), of(&db, [n]));
            reference::matmul((n, k, m), |j, i| dy[i * n + j], |i, p| x[i * k + p], &mut dw, true);
            for (i, dy) in dy.iter().enumerate() {
                db[i % n] += dy;
            }
            linear::backward_weight(&compute, &xt, &dyt, &dwt, Some(&dbt), true).unwrap();
            assert_close(&dwt, &dw, &what);
            assert_close(&dbt, &db, &what);

            let mut dx = vec![0.0; m * k];
            reference::matmul((m, k, n), |i, j| dy[i * n + j], |j, p| w[j * k + p], &mut dx, false);
            let dxt = of(&numbers(7, m * k), [m, k]);
            linear::backward_input(&compute, &wt, &dyt, &dxt).unwrap();
            assert_close(&dxt, &dx, &what);
        }
    }
}

#[test]
fn optimizers_give_the_same_bits_at_every_level_and_place() {
    let len = 1037;
    let sgd = Sgd { lr: 0.1, momentum: 0.9, weight_decay: 0.01 };
    let adamw = AdamW { lr: 0.01, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.1 };
    let mut seen: Vec<Vec<u32>> = Vec::new();
    for compute in computes() {
        let p = of(&numbers(1, len), [len]);
        let g = of(&numbers(2, len), [len]);
        let state: Vec<Tensor> = (0..3).map(|_| of(&vec![0.0f32; len], [len])).collect();
        for step in 1..=3 {
            let numbers = StepNumbers::Here(sgd.numbers(1.0));
            optimizer::sgd(&compute, numbers, &p, &g, Some(&state[0])).unwrap();
            let numbers = StepNumbers::Here(adamw.numbers(step, 1.0));
            optimizer::adamw(&compute, numbers, &p, &g, &state[1], &state[2]).unwrap();
            // In two unaligned parts, as with shards.
            for part in [0..501, 501..len] {
                let (p, g) = (p.slice(part.clone()).unwrap(), g.slice(part).unwrap());
                let plain = Sgd { momentum: 0.0, ..sgd };
                optimizer::sgd(&compute, StepNumbers::Here(plain.numbers(1.0)), &p, &g, None)
                    .unwrap();
            }
        }
        seen.push(p.read::<f32>().unwrap().iter().map(|x| x.to_bits()).collect());
    }
    assert!(seen.windows(2).all(|pair| pair[0] == pair[1]));
}

#[test]
fn wrong_shapes_are_explained() {
    let compute = Compute::new(1, Allocator::new()).unwrap();
    let (x, w) = (of(&[0.0f32; 6], [2, 3]), of(&[0.0f32; 20], [4, 5]));
    let y = of(&[0.0f32; 8], [2, 4]);
    let error = linear::forward(&compute, &x, &w, Some(&y), Activation::None, &y).unwrap_err();
    assert_eq!(error.to_string(), "linear_forward: input must have shape [2, 5], got [2, 3]");
    let conv = Conv2d { padding: 3, ..Conv2d::same3x3(6, 6, 1, 1) };
    assert!(conv.check().unwrap_err().to_string().contains("padding is not smaller"));
    let conv = Conv2d::same3x3(1, 4, 1, 1);
    let error = conv_relu_pool::check(&conv).unwrap_err().to_string();
    assert!(error.contains("the 1x4 image is too small for a 2x2 pool"), "{error}");
}
