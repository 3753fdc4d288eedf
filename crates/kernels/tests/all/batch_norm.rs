//! Batch normalization at every SIMD level of this machine and with one and three threads, against
//! the plain implementation in double precision.

use crate::common::{assert_close, computes, numbers, tensor, values, wide};
use paceline_kernels::batch_norm::{self, BatchNorm};
use paceline_kernels::linear::Activation;
use paceline_kernels::{Compute, reference};
use paceline_memory::{Allocator, DType, Tensor};

/// The operands of a case, in f32.
struct Case {
    config: BatchNorm,
    dims: Vec<usize>,
    x: Vec<f32>,
    weight: Vec<f32>,
    bias: Vec<f32>,
    dy: Vec<f32>,
}

impl Case {
    /// Values around `mean`, and weights that are not close to zero.
    fn new(dims: &[usize], activation: Activation, mean: f32) -> Self {
        let (len, channels) = (dims.iter().product(), *dims.last().unwrap());
        Self {
            config: BatchNorm::new(channels, activation),
            dims: dims.into(),
            x: numbers(1, len).iter().map(|x| x + mean).collect(),
            weight: numbers(2, channels).iter().map(|w| 1.5 + w).collect(),
            bias: numbers(3, channels),
            dy: numbers(4, len),
        }
    }

    fn all() -> Vec<Self> {
        let mut cases = Vec::new();
        for activation in [Activation::None, Activation::Relu] {
            // Numbers of channels that use every size of group, and numbers of rows below, at and above the
            // size of a block.
            for dims in [
                vec![3, 4, 5, 16],
                vec![2, 12, 11, 39],
                vec![1, 1, 2, 1],
                vec![5, 9, 7, 3],
                vec![256, 20],
                vec![700, 8],
            ] {
                cases.push(Self::new(&dims, activation, 0.3));
            }
        }
        cases
    }
}

#[derive(Debug, PartialEq)]
struct Outcome {
    moments: Vec<f64>,
    gradient_sums: Vec<f64>,
    /// y, dx, d_weight, d_bias, running mean, running variance.
    tensors: [Vec<f64>; 6],
}

/// Runs both passes on shares whose sizes along the first extent are `parts`, adds up the sums of the shares
/// between the two halves of each pass, and joins the results.
fn run(compute: &Compute, case: &Case, dtype: DType, parts: &[usize]) -> Outcome {
    let Case { config, dims, .. } = case;
    let c = config.channels;
    let weight = tensor(compute, dtype, [c], &wide(&case.weight));
    let bias = tensor(compute, dtype, [c], &wide(&case.bias));
    let image = dims[1..].iter().product::<usize>();
    let mut first = 0;
    let shares: Vec<[Tensor; 4]> = parts
        .iter()
        .map(|&count| {
            let range = first * image..(first + count) * image;
            first += count;
            let mut dims = dims.clone();
            dims[0] = count;
            let garbage = vec![f64::NAN; range.len()];
            let share = |elems: &[f64]| tensor(compute, dtype, dims.as_slice(), elems);
            let (x, dy) = (&case.x[range.clone()], &case.dy[range]);
            [share(&wide(x)), share(&wide(dy)), share(&garbage), share(&garbage)]
        })
        .collect();
    assert_eq!(first, dims[0], "the parts are the batch");

    let small = |len: usize| tensor(compute, DType::F64, [len], &vec![f64::NAN; len]);
    let add = |total: &mut Vec<f64>, part: &Tensor| {
        total.iter_mut().zip(values(part)).for_each(|(total, part)| *total += part);
    };
    let mut total = vec![0.0; config.sums_len()];
    for [x, ..] in &shares {
        let sums = small(config.sums_len());
        batch_norm::sums(compute, config, x, &sums).unwrap();
        add(&mut total, &sums);
    }
    let moments = small(config.sums_len());
    let sums = tensor(compute, DType::F64, [total.len()], &total);
    batch_norm::moments(compute, config, &sums, &moments).unwrap();
    let running_mean = tensor(compute, dtype, [c], &vec![0.0; c]);
    let running_var = tensor(compute, dtype, [c], &vec![1.0; c]);
    batch_norm::update_running(compute, config, &moments, &running_mean, &running_var).unwrap();

    let mut total = vec![0.0; config.gradient_sums_len()];
    let d_weight = tensor(compute, dtype, [c], &vec![2.0; c]);
    let d_bias = tensor(compute, dtype, [c], &vec![2.0; c]);
    for (at, [x, dy, y, _]) in shares.iter().enumerate() {
        batch_norm::normalize(compute, config, x, &moments, &weight, &bias, y).unwrap();
        let sums = small(config.gradient_sums_len());
        batch_norm::gradient_sums(compute, config, x, &moments, &weight, &bias, dy, &sums).unwrap();
        batch_norm::backward_weight(compute, config, &sums, &d_weight, &d_bias, at > 0).unwrap();
        add(&mut total, &sums);
    }
    let sums = tensor(compute, DType::F64, [total.len()], &total);
    for [x, dy, _, dx] in &shares {
        batch_norm::backward_input(compute, config, x, &moments, &weight, &bias, dy, &sums, dx)
            .unwrap();
    }
    let joined = |at: usize| shares.iter().flat_map(|share| values(&share[at])).collect();
    let rest = [&d_weight, &d_bias, &running_mean, &running_var].map(values);
    let [dw, db, mean, var] = rest;
    Outcome {
        moments: values(&moments),
        gradient_sums: total,
        tensors: [joined(2), joined(3), dw, db, mean, var],
    }
}

/// The same results from the plain implementation, in double precision.
fn expected(case: &Case) -> [Vec<f64>; 4] {
    let (x, dy, weight) = (wide(&case.x), wide(&case.dy), wide(&case.weight));
    let (mut y, mut dx) = (vec![0.0; x.len()], vec![0.0; x.len()]);
    let (mut dw, mut db) = (vec![0.0; weight.len()], vec![0.0; weight.len()]);
    reference::batch_norm_forward(&case.config, &x, &weight, &wide(&case.bias), &mut y);
    reference::batch_norm_backward(&case.config, &x, &y, &weight, &dy, &mut dw, &mut db, &mut dx);
    [y, dx, dw, db]
}

/// The tolerance, relative to the largest result. The results come from a handful of operations on numbers of
/// size one, with rounding errors of 6e-8 in f32. In f64 these are 1e-16, and the sums over a thousand values
/// add their own errors.
fn tolerance(dtype: DType) -> f64 {
    if dtype == DType::F64 { 1e-12 } else { 1e-6 }
}

fn check(outcome: &Outcome, case: &Case, tolerance: f64, what: &str) {
    let names = ["y", "dx", "dw", "db"];
    for ((got, want), name) in outcome.tensors.iter().zip(expected(case)).zip(names) {
        assert_close(got, &want, tolerance, 0.0, &format!("{what} {:?} {name}", case.dims));
    }
}

#[test]
fn both_passes_at_every_level_whole_and_in_shares() {
    for case in Case::all() {
        for dtype in [DType::F32, DType::F64] {
            let mut whole: Option<Outcome> = None;
            for compute in computes() {
                let what = format!("{dtype} {:?} {:?}", compute.simd(), compute.threads());
                let outcome = run(&compute, &case, dtype, &[case.dims[0]]);
                check(&outcome, &case, tolerance(dtype), &what);
                // The bits are the same for all vector instructions and numbers of threads.
                assert_eq!(
                    &outcome,
                    whole.get_or_insert_with(|| run(&compute, &case, dtype, &[case.dims[0]]))
                );
                // One of the shares is empty.
                let parts = [case.dims[0] / 2, 0, case.dims[0] - case.dims[0] / 2];
                let outcome = run(&compute, &case, dtype, &parts);
                check(&outcome, &case, tolerance(dtype), &what);
            }
        }
    }
}

#[test]
fn statistics_far_from_zero_keep_their_digits() {
    // Mean 1000, deviation 0.6. Floats near 1000 have a spacing of 6e-5. The results must not have larger
    // errors than f32's rounding, which they would if the mean were rounded to f32.
    for activation in [Activation::None, Activation::Relu] {
        let case = Case::new(&[4, 10, 9, 20], activation, 1000.0);
        for compute in computes() {
            let outcome = run(&compute, &case, DType::F32, &[4]);
            check(&outcome, &case, tolerance(DType::F32), "far from zero");
            for c in 0..20 {
                let values = || case.x.iter().skip(c).step_by(20).map(|x| f64::from(*x));
                let mean = values().sum::<f64>() / 360.0;
                let variance = values().map(|x| (x - mean).powi(2)).sum::<f64>() / 360.0;
                assert!((outcome.moments[1 + c] - mean).abs() < 1e-10);
                assert!((outcome.moments[21 + c] - variance).abs() < 1e-8);
            }
        }
    }
}

#[test]
fn running_statistics_follow_mean_and_unbiased_variance() {
    let case = Case::new(&[5, 3], Activation::None, 2.0);
    let compute = Compute::new(1, Allocator::new()).unwrap();
    let outcome = run(&compute, &case, DType::F32, &[5]);
    let [_, _, _, _, mean, var] = &outcome.tensors;
    for c in 0..3 {
        let (batch_mean, batch_var) = (outcome.moments[1 + c], outcome.moments[4 + c]);
        assert!((mean[c] - 0.1 * batch_mean).abs() < 1e-7);
        assert!((var[c] - (0.9 + 0.1 * batch_var * 5.0 / 4.0)).abs() < 1e-7);
    }
}

#[test]
fn no_values_and_a_single_one_leave_running_statistics_alone() {
    let compute = Compute::new(3, Allocator::new()).unwrap();
    for count in [0, 1] {
        let case = Case::new(&[count, 4], Activation::Relu, 2.0);
        let outcome = run(&compute, &case, DType::F32, &[count]);
        let [y, dx, dw, db, mean, var] = outcome.tensors;
        assert_eq!((mean, var), (vec![0.0; 4], vec![1.0; 4]));
        assert_eq!(
            (y.len(), dx),
            (4 * count, vec![0.0; 4 * count]),
            "no value can move its own mean"
        );
        assert_eq!(dw, [0.0; 4]);
        assert_eq!(db.len(), 4);
        assert_eq!(outcome.moments[0], count as f64);
    }
}

#[test]
fn running_statistics_are_constants_of_evaluation() {
    let case = Case::new(&[6, 5, 18], Activation::Relu, 0.5);
    let (config, c) = (&case.config, 18);
    let (mean, var) = (numbers(7, c), numbers(8, c).iter().map(|v| v + 1.5).collect::<Vec<_>>());
    for compute in computes() {
        let of = |elems: &[f32]| tensor(&compute, DType::F32, [elems.len()], &wide(elems));
        let like = |elems: &[f32]| of(elems).view(case.dims.as_slice()).unwrap();
        let (weight, bias, x, dy) =
            (of(&case.weight), of(&case.bias), like(&case.x), like(&case.dy));
        let (y, dx) = (like(&case.x), like(&case.x));
        let moments = tensor(&compute, DType::F64, [37], &[f64::NAN; 37]);
        let sums = tensor(&compute, DType::F64, [36], &[f64::NAN; 36]);
        batch_norm::running_moments(&compute, config, &of(&mean), &of(&var), &moments).unwrap();
        batch_norm::normalize(&compute, config, &x, &moments, &weight, &bias, &y).unwrap();
        batch_norm::gradient_sums(&compute, config, &x, &moments, &weight, &bias, &dy, &sums)
            .unwrap();
        batch_norm::backward_input(&compute, config, &x, &moments, &weight, &bias, &dy, &sums, &dx)
            .unwrap();
        let (mut want_y, mut want_dx) = (Vec::new(), Vec::new());
        for (at, (x, dy)) in wide(&case.x).into_iter().zip(wide(&case.dy)).enumerate() {
            let c = at % c;
            let slope = f64::from(case.weight[c]) / (f64::from(var[c]) + config.eps).sqrt();
            let z = (x - f64::from(mean[c])) * slope + f64::from(case.bias[c]);
            want_y.push(z.max(0.0));
            want_dx.push(if z > 0.0 { dy * slope } else { 0.0 });
        }
        assert_close(&values(&y), &want_y, 1e-6, 0.0, "y");
        assert_close(&values(&dx), &want_dx, 1e-6, 0.0, "dx");
    }
}

#[test]
fn a_not_a_number_gets_through() {
    let mut case = Case::new(&[40, 17], Activation::Relu, 0.0);
    case.x[17 * 3 + 5] = f32::NAN;
    for compute in computes() {
        let outcome = run(&compute, &case, DType::F32, &[40]);
        for (at, y) in outcome.tensors[0].iter().enumerate() {
            assert_eq!(y.is_nan(), at % 17 == 5, "{at}: {y}");
        }
    }
}

#[test]
fn wrong_shapes_are_explained() {
    let compute = Compute::new(1, Allocator::new()).unwrap();
    let config = BatchNorm::new(3, Activation::None);
    let x = tensor(&compute, DType::F32, [2, 4], &[0.0; 8]);
    let sums = tensor(&compute, DType::F64, [7], &[0.0; 7]);
    let error = batch_norm::sums(&compute, &config, &x, &sums).unwrap_err();
    assert_eq!(error.to_string(), "batch_norm_sums: input must have shape [2, 3], got [2, 4]");
    let error = batch_norm::moments(&compute, &config, &sums, &x).unwrap_err();
    assert_eq!(error.to_string(), "batch_norm_moments: moments must have shape [7], got [2, 4]");
}
