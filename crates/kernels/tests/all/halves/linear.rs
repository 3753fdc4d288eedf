//! The fully connected layer with tensors of `Half`, for each of the two types by `half_linear.rs`.

use paceline_kernels::linear::{self, Activation};
use paceline_kernels::{Compute, elementwise};
use paceline_memory::{Allocator, Category, DType, Tensor};

use super::{Half, Other};
use crate::common::{instruction_sets, tensor};

const HALF: DType = <Half as paceline_memory::Element>::DTYPE;

/// Small integers: every product and sum below 2^24 is exact in f32, in any order, so the one rounding at the end decides
/// the bits. The sums exceed 256, so bf16 rounds some of them, and f16 some of those beyond 2048.
fn numbers(seed: u32, len: usize) -> Vec<f32> {
    let at = |i: usize| (i as u32).wrapping_add(seed).wrapping_mul(2_654_435_761) >> 27;
    (0..len).map(|i| at(i) as f32 - 15.0).collect()
}

/// The exact results, rounded once to the type of the tensor.
fn assert_equal(got: &Tensor, want: &[f64], what: &str) {
    let got: Vec<f64> = match got.dtype() {
        DType::F32 => got.read::<f32>().unwrap().iter().copied().map(f64::from).collect(),
        _ => {
            let want: Vec<_> = want.iter().copied().map(Half::from_f64).collect();
            assert_eq!(&got.read::<Half>().unwrap()[..], want, "{what}");
            return;
        }
    };
    assert_eq!(got, want, "{what}");
}

fn computes() -> Vec<Compute> {
    [1, 3].into_iter().flat_map(instruction_sets).collect()
}

#[test]
fn forward_and_gradients_round_once() {
    let (bf, f) = (HALF, DType::F32);
    for compute in computes() {
        for (m, n, k) in [(1, 1, 1), (3, 5, 7), (33, 129, 64), (70, 40, 700), (2, 3, 0), (0, 2, 3)]
        {
            for other in [bf, f] {
                let what = format!("{:?} {m} {n} {k} {other}", compute.simd());
                let (x, w, b) = (numbers(1, m * k), numbers(2, n * k), numbers(3, n));
                let dy = numbers(4, m * n);
                let (xt, wt) =
                    (tensor(&compute, bf, [m, k], &x), tensor(&compute, other, [n, k], &w));
                let bt = tensor(&compute, other, [n], &b);
                let yt = tensor(&compute, other, [m, n], &numbers(5, m * n));

                let sums = |with_bias: bool| -> Vec<f64> {
                    let sum = |at: usize| {
                        let (i, j) = (at / n, at % n);
                        let products =
                            (0..k).map(|p| f64::from(x[i * k + p]) * f64::from(w[j * k + p]));
                        products.sum::<f64>() + if with_bias { f64::from(b[j]) } else { 0.0 }
                    };
                    (0..m * n).map(sum).collect()
                };
                linear::forward(&compute, &xt, &wt, None, Activation::None, &yt).unwrap();
                assert_equal(&yt, &sums(false), &what);
                linear::forward(&compute, &xt, &wt, Some(&bt), Activation::Relu, &yt).unwrap();
                let want: Vec<_> = sums(true).into_iter().map(|y| y.max(0.0)).collect();
                assert_equal(&yt, &want, &what);

                let dyt = tensor(&compute, bf, [m, n], &dy);
                let (dw, db) = (numbers(6, n * k), numbers(7, n));
                for accumulate in [false, true] {
                    let dwt = tensor(&compute, other, [n, k], &dw);
                    let dbt = tensor(&compute, other, [n], &db);
                    linear::backward_weight(&compute, &xt, &dyt, &dwt, Some(&dbt), accumulate)
                        .unwrap();
                    let old = |x: f32| if accumulate { f64::from(x) } else { 0.0 };
                    let sum = |at: usize| {
                        let (j, p) = (at / k, at % k);
                        let products =
                            (0..m).map(|i| f64::from(dy[i * n + j]) * f64::from(x[i * k + p]));
                        old(dw[at]) + products.sum::<f64>()
                    };
                    assert_equal(&dwt, &(0..n * k).map(sum).collect::<Vec<_>>(), &what);
                    let sum = |j: usize| {
                        old(db[j]) + (0..m).map(|i| f64::from(dy[i * n + j])).sum::<f64>()
                    };
                    assert_equal(&dbt, &(0..n).map(sum).collect::<Vec<_>>(), &what);
                }

                let dxt = tensor(&compute, other, [m, k], &numbers(8, m * k));
                linear::backward_input(&compute, &wt, &dyt, &dxt).unwrap();
                let sum = |at: usize| {
                    let (i, p) = (at / k, at % k);
                    (0..n).map(|j| f64::from(dy[i * n + j]) * f64::from(w[j * k + p])).sum::<f64>()
                };
                assert_equal(&dxt, &(0..m * k).map(sum).collect::<Vec<_>>(), &what);
            }
        }
    }
}

/// The first layer of a network has an input of f32, and one that ends in f32 has a gradient of f32. Values beyond 8 bits
/// show whether f32 operands are rounded.
#[test]
fn one_activation_of_16_bits_is_enough() {
    let (bf, f) = (HALF, DType::F32);
    let (m, n, k) = (33, 40, 70);
    let odd = |seed, len| numbers(seed, len).iter().map(|x| x + x / 1024.0).collect::<Vec<_>>();
    let (x, w, dy) = (odd(1, m * k), odd(2, n * k), odd(3, m * n));
    for compute in computes() {
        let [x32, x16] = [f, bf].map(|dtype| tensor(&compute, dtype, [m, k], &x));
        let [dy32, dy16] = [f, bf].map(|dtype| tensor(&compute, dtype, [m, n], &dy));
        let wt = tensor(&compute, f, [n, k], &w);
        let bits = |out: &Tensor| out.as_bytes().read::<u8>().unwrap().to_vec();
        let of =
            |dtype, dims: [usize; 2]| tensor(&compute, dtype, dims, &odd(9, dims[0] * dims[1]));

        let forward = |x: &Tensor| {
            let y = of(bf, [m, n]);
            linear::forward(&compute, x, &wt, None, Activation::None, &y).unwrap();
            bits(&y)
        };
        assert_eq!(forward(&x32), forward(&x16));
        let weight = |x: &Tensor, dy: &Tensor| {
            let dw = of(f, [n, k]);
            linear::backward_weight(&compute, x, dy, &dw, None, false).unwrap();
            bits(&dw)
        };
        assert_eq!(weight(&x32, &dy16), weight(&x16, &dy16));
        assert_eq!(weight(&x16, &dy32), weight(&x16, &dy16));
        let input = |dy: &Tensor| {
            let dx = of(bf, [m, k]);
            linear::backward_input(&compute, &wt, dy, &dx).unwrap();
            bits(&dx)
        };
        assert_eq!(input(&dy32), input(&dy16));
    }
}

#[test]
fn relu_stops_the_gradient_of_what_it_cut() {
    for compute in computes() {
        let least = Half::MIN_POSITIVE_SUBNORMAL.to_f32_const();
        let y = [0.0, -0.0, 1.0, f32::NAN, least, 3.0];
        let bf = |elems: &[f32]| tensor(&compute, HALF, [6], elems);
        let (dy, dx) = (bf(&[1.0, 2.0, 3.0, 4.0, 5.0, f32::INFINITY]), bf(&[9.0; 6]));
        elementwise::relu_backward(&compute, &bf(&y), &dy, &dx).unwrap();
        let got = dx.read::<Half>().unwrap().iter().map(|x| x.to_f32()).collect::<Vec<_>>();
        assert_eq!(got, [0.0, 0.0, 3.0, 4.0, 5.0, f32::INFINITY]);
    }
}

#[test]
fn other_types_are_refused_on_both_devices() {
    for allocator in [Allocator::new(), Allocator::meta()] {
        let compute = Compute::new(1, allocator).unwrap();
        let of = |dtype, dims: [usize; 2]| {
            compute.allocator.tensor(dtype, dims, Category::Data).unwrap()
        };
        let other = <Other as paceline_memory::Element>::DTYPE;
        let (x, w) = (of(HALF, [4, 3]), of(other, [2, 3]));
        let y = of(HALF, [4, 2]);
        for refused in [
            linear::forward(&compute, &x, &w, None, Activation::None, &y),
            linear::backward_input(&compute, &w, &y, &x),
            linear::backward_weight(&compute, &x, &y, &w, None, false),
        ] {
            let error = refused.unwrap_err().to_string();
            let said = format!("weight: expected elements of type f32, got {other}");
            assert!(error.ends_with(&said), "{error}");
        }
        // A weight of 16 bits needs such an activation.
        let (x, w) = (of(DType::F32, [4, 3]), of(HALF, [2, 3]));
        let y = of(DType::F32, [4, 2]);
        assert!(linear::forward(&compute, &x, &w, None, Activation::None, &y).is_err());
    }
}
