//! The kernels of a language model, compared with plain formulas in f64 on random inputs.

use crate::common::{
    assert_close, computes, of, plain_linear_cross_entropy, plain_rms_norm, plain_swiglu, values,
};
use paceline_kernels::linear_cross_entropy::{self, Gradients, IGNORED, Then};
use paceline_kernels::{Compute, embedding, rms_norm, swiglu};
use paceline_memory::{Allocator, DType, Tensor};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

fn random(len: usize, seed: u64) -> Vec<f64> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    // Values that f32 has too.
    (0..len).map(|_| f64::from(rng.random::<f32>() * 4.0 - 2.0)).collect()
}

fn reals(dtype: DType, elems: &[f64], shape: &[usize]) -> Tensor {
    match dtype {
        DType::F64 => of(elems, shape),
        _ => of(&elems.iter().map(|x| *x as f32).collect::<Vec<_>>(), shape),
    }
}

/// Compares element by element. f32 may be off by 2e-6 of the largest element, about 30 roundings.
#[track_caller]
fn close(got: &Tensor, expected: &[f64], what: &str) {
    let tolerance = if got.dtype() == DType::F64 { 1e-13 } else { 2e-6 };
    assert_close(&values(got), expected, tolerance, 0.0, what);
}

/// Runs a check on every handle in f32, and once in f64.
fn on_each(check: impl Fn(&Compute, DType)) {
    for compute in computes() {
        check(&compute, DType::F32);
    }
    check(&Compute::new(1, Allocator::new()).unwrap(), DType::F64);
}

#[test]
fn rms_norm_and_its_gradients() {
    for (rows, columns) in [(1, 1), (5, 7), (3, 32), (9, 100), (0, 4)] {
        let (x, w) = (random(rows * columns, 1), random(columns, 2));
        let (dy, before) = (random(rows * columns, 3), random(columns, 4));
        let eps = 1e-5;
        let [y, r, dx, dw] = plain_rms_norm(&x, &w, &dy, eps);
        let added: Vec<f64> = dw.iter().zip(&before).map(|(dw, before)| dw + before).collect();
        on_each(|compute, dtype| {
            let wide = [rows, columns];
            let [xs, dys] = [&x, &dy].map(|elems| reals(dtype, elems, &wide));
            let ws = reals(dtype, &w, &[columns]);
            let [ys, dxs] = [0, 1].map(|_| reals(dtype, &vec![9.0; rows * columns], &wide));
            let rs = reals(dtype, &vec![9.0; rows], &[rows]);
            rms_norm::forward(compute, &xs, &ws, eps, &ys, &rs).unwrap();
            close(&ys, &y, "y");
            close(&rs, &r, "r");
            rms_norm::backward_input(compute, &xs, &ws, &rs, &dys, None, &dxs).unwrap();
            close(&dxs, &dx, "dx");
            let sums = reals(dtype, &vec![9.0; rows * columns], &wide);
            rms_norm::backward_input(compute, &xs, &ws, &rs, &dys, Some(&xs), &sums).unwrap();
            close(&sums, &x.iter().zip(&dx).map(|(x, dx)| x + dx).collect::<Vec<_>>(), "sum");
            let dws = reals(dtype, &before, &[columns]);
            rms_norm::backward_weight(compute, &xs, &rs, &dys, &dws, true).unwrap();
            close(&dws, &added, "dw added");
            rms_norm::backward_weight(compute, &xs, &rs, &dys, &dws, false).unwrap();
            close(&dws, &dw, "dw");
        });
    }
}

#[test]
fn swiglu_and_its_gradients() {
    for (rows, columns) in [(1, 1), (4, 3), (7, 64), (0, 5)] {
        let x: Vec<f64> = random(rows * 2 * columns, 5).iter().map(|x| x * 4.0).collect();
        let dy = random(rows * columns, 6);
        let [y, dx] = plain_swiglu(&x, &dy, columns);
        on_each(|compute, dtype| {
            let xs = reals(dtype, &x, &[rows, 2 * columns]);
            let dys = reals(dtype, &dy, &[rows, columns]);
            let ys = reals(dtype, &vec![9.0; rows * columns], &[rows, columns]);
            swiglu::forward(compute, &xs, &ys).unwrap();
            close(&ys, &y, "y");
            let dxs = reals(dtype, &vec![9.0; 2 * rows * columns], &[rows, 2 * columns]);
            swiglu::backward(compute, &xs, &dys, &dxs).unwrap();
            close(&dxs, &dx, "dx");
        });
    }
}

#[test]
fn embedding_and_its_gradient() {
    let (len, width) = (5, 3);
    let ids = [4i64, 0, 4, 2, 4, 0];
    let (table, dy) = (random(len * width, 7), random(ids.len() * width, 8));
    on_each(|compute, dtype| {
        let tables = reals(dtype, &table, &[len, width]);
        let dys = reals(dtype, &dy, &[ids.len(), width]);
        let ys = reals(dtype, &vec![9.0; ids.len() * width], &[ids.len(), width]);
        // The shape of the numbers does not matter.
        let numbers = of(&ids, [2, 3]);
        embedding::forward(compute, &numbers, &tables, &ys).unwrap();
        let expected = ids.iter().flat_map(|id| &table[*id as usize * width..][..width]);
        assert_eq!(values(&ys), expected.copied().collect::<Vec<_>>());
        let mut sums = vec![0.0; len * width];
        for (row, id) in ids.iter().enumerate() {
            for j in 0..width {
                sums[*id as usize * width + j] += dy[row * width + j];
            }
        }
        let d = reals(dtype, &vec![9.0; len * width], &[len, width]);
        embedding::backward(compute, &numbers, &dys, &d, false).unwrap();
        close(&d, &sums, "d_table");
        embedding::backward(compute, &numbers, &dys, &d, true).unwrap();
        close(&d, &sums.iter().map(|x| 2.0 * x).collect::<Vec<_>>(), "d_table added");
        for wrong in [-1i64, 5] {
            let error =
                embedding::forward(compute, &of(&[wrong; 6], [6]), &tables, &ys).unwrap_err();
            assert_eq!(
                error.to_string(),
                format!("embedding_forward: index {wrong} is not among 5 elements")
            );
        }
    });
}

#[test]
fn linear_cross_entropy_and_its_gradients() {
    // More rows than a chunk of 512; so many classes that a chunk has 128 rows; and some more than a product of 1024 takes.
    for (rows, inputs, classes) in
        [(1, 1, 1), (6, 5, 7), (700, 3, 11), (150, 2, 65_536), (20, 4, 1100), (0, 4, 3)]
    {
        let (x, w) = (random(rows * inputs, 9), random(classes * inputs, 10));
        let labels: Vec<i64> = (0..rows)
            .map(|i| if i % 5 == 3 { IGNORED } else { (i * 7919 % classes) as i64 })
            .collect();
        let scale = 0.25;
        let (sums, dx, dw) = plain_linear_cross_entropy(&x, &w, &labels, inputs, scale);
        let check = |compute: &Compute, dtype| {
            let xs = reals(dtype, &x, &[rows, inputs]);
            let ws = reals(dtype, &w, &[classes, inputs]);
            let (found, label) = (of(&[1.0f64, 2.0, 3.0], [3]), of(&labels, [rows]));
            linear_cross_entropy::evaluate(compute, &xs, &ws, &label, &found).unwrap();
            let found = values(&found);
            let off = (found[0] - 1.0 - sums[0]).abs();
            assert!(off <= 1e-5 * sums[0].max(1.0), "{found:?}, not {sums:?}");
            assert_eq!(found[1..], [2.0 + sums[1], 3.0 + sums[2]]);
            let dxs = reals(dtype, &vec![9.0; rows * inputs], &[rows, inputs]);
            let dws = reals(dtype, &vec![1.0; classes * inputs], &[classes, inputs]);
            for accumulate in [true, false] {
                let then = Then::Weight { d_weight: &dws, accumulate };
                let gradients = Gradients { d_input: &dxs, then };
                let weight_before = reals(dtype, &values(&dws), &[classes, inputs]);
                let differentiate = |gradients| {
                    let (x, w, found) = (&xs, &ws, of(&[0.0f64; 3], [3]));
                    linear_cross_entropy::differentiate(
                        compute, x, w, &label, scale, gradients, &found,
                    )
                    .unwrap();
                    assert_eq!(values(&found)[2], sums[2]);
                };
                differentiate(gradients);
                close(&dxs, &dx, "dx");
                let before = if accumulate { 1.0 } else { 0.0 };
                close(&dws, &dw.iter().map(|dw| dw + before).collect::<Vec<_>>(), "dw");
                // The same in halves, bit by bit.
                let kept = reals(dtype, &vec![7.0; rows * classes], &[rows, classes]);
                let apart = reals(dtype, &vec![9.0; rows * inputs], &[rows, inputs]);
                differentiate(Gradients { d_input: &apart, then: Then::Keep(&kept) });
                let (x, dw) = (&xs, &weight_before);
                linear_cross_entropy::backward_weight(compute, x, &kept, dw, accumulate).unwrap();
                assert_eq!(values(&apart), values(&dxs));
                assert_eq!(values(&weight_before), values(&dws));
            }
        };
        // A plain sum of 65,536 terms takes long.
        match classes {
            65_536 => check(&Compute::new(2, Allocator::new()).unwrap(), DType::F32),
            _ => on_each(check),
        }
    }
}

#[test]
fn labels_are_checked_and_ties_go_to_the_first() {
    let compute = Compute::new(1, Allocator::new()).unwrap();
    let (x, w) = (of(&[1.0f32, f32::NAN], [2, 1]), of(&[2.0f32, 2.0], [2, 1]));
    let evaluate = |labels: &[i64]| {
        let sums = of(&[0.0f64; 3], [3]);
        linear_cross_entropy::evaluate(&compute, &x, &w, &of(labels, [2]), &sums)?;
        paceline_kernels::Result::Ok(values(&sums))
    };
    assert_eq!(evaluate(&[0, IGNORED]).unwrap()[1], 1.0);
    assert_eq!(evaluate(&[1, IGNORED]).unwrap()[1], 0.0);
    assert_eq!(linear_cross_entropy::count(&of(&[1, IGNORED, 0], [3])).unwrap(), 2);
    let with_nan = evaluate(&[0, 0]).unwrap();
    assert!(with_nan[0].is_nan() && with_nan[1] == 1.0, "{with_nan:?}");
    for label in [-1, 2] {
        let error = evaluate(&[0, label]).unwrap_err().to_string();
        assert!(
            error.contains(&format!("label {label} of row 1 is not among 2 classes")),
            "{error}"
        );
    }
}
