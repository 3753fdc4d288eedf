//! Attention at every SIMD level of this machine, with one and three threads, against the plain form in f64; the plain form
//! against the formula and against finite differences.

use crate::common::{assert_close, computes, of, wide};
use paceline_kernels::attention::{self, AttentionSpec};
use paceline_kernels::rotary::{RotaryConfig, RotaryTable};
use paceline_kernels::{Compute, SimdLevel, reference};
use paceline_memory::{Allocator, DType, Shape, Tensor};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

fn f32s(shape: impl Into<Shape>, elems: &[f64]) -> Tensor {
    let elems: Vec<f32> = elems.iter().map(|x| *x as f32).collect();
    of(&elems, shape)
}

fn table(spec: &AttentionSpec, dtype: DType) -> RotaryTable {
    let config = RotaryConfig { head_dim: spec.head_dim, theta: 10_000.0, scaling: None };
    RotaryTable::new(&Allocator::new(), config, spec.seq + 3, dtype).unwrap()
}

/// Inputs whose padding is NaN. They are numbers of f32, so that f32 and f64 start from the same values.
struct Inputs {
    spec: AttentionSpec,
    lengths: Vec<i64>,
    qkv: Vec<f64>,
    d_output: Vec<f64>,
}

impl Inputs {
    fn new(seed: u64, spec: AttentionSpec, lengths: &[usize], size: f32) -> Self {
        assert_eq!(lengths.len(), spec.batch);
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut rows = |[rows, columns]: [usize; 2]| {
            let mut values = vec![f64::NAN; rows * columns];
            for (at, row) in values.chunks_exact_mut(columns).enumerate() {
                if at % spec.seq < lengths[at / spec.seq] {
                    row.fill_with(|| f64::from(rng.random_range(-size..size)));
                }
            }
            values
        };
        let (qkv, d_output) = (rows(spec.qkv_shape()), rows(spec.output_shape()));
        let lengths = lengths.iter().map(|len| *len as i64).collect();
        Self { spec, lengths, qkv, d_output }
    }

    /// Output, log_sums and the gradient of qkv, in f64.
    fn plain(&self) -> [Vec<f64>; 3] {
        let Self { spec, lengths, qkv, d_output } = self;
        let table = table(spec, DType::F64);
        let angles = table.values().read::<f64>().unwrap();
        let mut output = vec![f64::NAN; d_output.len()];
        let mut log_sums = vec![f64::NAN; spec.log_sums_len()];
        let mut d_qkv = vec![f64::NAN; qkv.len()];
        reference::attention_forward(spec, qkv, lengths, &angles, &mut output, &mut log_sums);
        let results = (&*output, &*log_sums, &**d_output);
        reference::attention_backward(spec, qkv, lengths, &angles, results, &mut d_qkv);
        [output, log_sums, d_qkv]
    }

    /// The same by the operations, in f32.
    fn fast(&self, compute: &Compute) -> [Vec<f32>; 3] {
        let Self { spec, lengths, qkv, d_output } = self;
        let table = table(spec, DType::F32);
        let lengths = of(lengths, [spec.batch]);
        let qkv = f32s(spec.qkv_shape(), qkv);
        let nan = |shape: Shape| f32s(shape, &vec![f64::NAN; shape.num_elems()]);
        let output = nan(spec.output_shape().into());
        let log_sums = nan([spec.log_sums_len()].into());
        let d_qkv = nan(spec.qkv_shape().into());
        attention::forward(compute, &qkv, Some(&lengths), &table, spec, &output, &log_sums)
            .unwrap();
        let results = [&output, &log_sums, &d_qkv].map(|x| x.read::<f32>().unwrap().to_vec());
        // Padding of the results is not read either.
        for (at, output) in
            output.write::<f32>().unwrap().chunks_exact_mut(spec.output_shape()[1]).enumerate()
        {
            if at % spec.seq >= self.lengths[at / spec.seq] as usize {
                output.fill(f32::NAN);
            }
        }
        let d_output = f32s(spec.output_shape(), d_output);
        let (x, n, y, l, dy, dx) = (&qkv, Some(&lengths), &output, &log_sums, &d_output, &d_qkv);
        attention::backward(compute, x, n, &table, spec, y, l, dy, dx).unwrap();
        let [output, log_sums, _] = results;
        [output, log_sums, d_qkv.read::<f32>().unwrap().to_vec()]
    }
}

/// Rounding of f32: scores of numbers below one have sums of up to 80 products, and gradients have sums of up to 129
/// products of those. Relative to the largest result, or to one if it is smaller.
const TOLERANCE: f64 = 1e-5;

const NAMES: [&str; 3] = ["output", "log_sums", "d_qkv"];

#[test]
fn the_fast_form_agrees_with_the_plain_form() {
    let computes = computes();
    let mut seed = 0;
    for (heads, kv_heads) in [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (9, 3)] {
        for head_dim in [8, 16, 64, 80, 2] {
            for seq in [1, 2, 63, 64, 65, 129] {
                let lengths = [seq, 0, 1, seq * 2 / 3];
                let spec = AttentionSpec { batch: 4, seq, heads, kv_heads, head_dim };
                seed += 1;
                let inputs = Inputs::new(seed, spec, &lengths, 1.0);
                let plain = inputs.plain();
                for compute in &computes {
                    let fast = inputs.fast(compute);
                    let what = format!("{spec:?} {:?}", compute.simd());
                    for ((got, want), name) in fast.iter().zip(&plain).zip(NAMES) {
                        assert_close(&wide(got), want, TOLERANCE, 0.0, &format!("{what} {name}"));
                    }
                    for (row, len) in lengths.into_iter().enumerate() {
                        assert_padding_is_zero(&spec, row, len, &fast, &what);
                    }
                }
            }
        }
    }
}

fn assert_padding_is_zero(
    spec: &AttentionSpec,
    row: usize,
    len: usize,
    [output, log_sums, d_qkv]: &[Vec<f32>; 3],
    what: &str,
) {
    let is_zero = |values: &[f32]| values.iter().all(|x| x.to_bits() == 0);
    for (values, [_, columns]) in [(output, spec.output_shape()), (d_qkv, spec.qkv_shape())] {
        let rows = row * spec.seq + len..(row + 1) * spec.seq;
        assert!(is_zero(&values[rows.start * columns..rows.end * columns]), "{what} row {row}");
    }
    for head in 0..spec.heads {
        let start = (row * spec.heads + head) * spec.seq;
        assert!(is_zero(&log_sums[start + len..start + spec.seq]), "{what} row {row}");
    }
}

/// Scores of thousands, whose exponentials no f32 can hold.
#[test]
fn large_scores_do_not_overflow() {
    let spec = AttentionSpec { batch: 2, seq: 200, heads: 2, kv_heads: 1, head_dim: 64 };
    let inputs = Inputs::new(5, spec, &[200, 150], 40.0);
    let plain = inputs.plain();
    assert!(plain[1].iter().any(|log_sum| *log_sum > 1000.0));
    for compute in computes() {
        for ((got, want), name) in inputs.fast(&compute).iter().zip(&plain).zip(NAMES) {
            // A score of 2^11 is rounded to 2^-12 or so, which is the relative error of its exponential.
            assert_close(&wide(got), want, 1e-3, 0.0, name);
        }
    }
}

#[test]
fn a_number_that_is_nan_makes_the_results_nan_that_depend_on_it() {
    let spec = AttentionSpec { batch: 1, seq: 100, heads: 1, kv_heads: 1, head_dim: 16 };
    let mut inputs = Inputs::new(6, spec, &[100], 1.0);
    // A key.
    inputs.qkv[90 * 48 + 16] = f64::NAN;
    for compute in computes() {
        let [output, log_sums, _] = inputs.fast(&compute);
        assert!(output[90 * 16..].iter().chain(&log_sums[90..]).all(|x| x.is_nan()));
        assert!(output[..64 * 16].iter().chain(&log_sums[..90]).all(|x| x.is_finite()));
    }
}

/// The rows of one matrix that belong to a row of the batch, `rows` of them, as bits.
fn bits(values: &[f32], seq: usize, columns: usize, row: usize, rows: usize) -> Vec<u32> {
    let rows = row * seq..row * seq + rows;
    values[rows.start * columns..rows.end * columns].iter().map(|x| x.to_bits()).collect()
}

#[test]
fn a_row_has_the_same_bits_alone_in_a_batch_and_with_more_padding() {
    let lengths = [70, 129, 64, 3];
    for (heads, kv_heads, head_dim) in [(4, 2, 64), (3, 1, 80)] {
        let spec = AttentionSpec { batch: 4, seq: 129, heads, kv_heads, head_dim };
        let together = Inputs::new(8, spec, &lengths, 2.0);
        for compute in computes() {
            let of_batch = together.fast(&compute);
            let columns = [spec.output_shape()[1], 0, spec.qkv_shape()[1]];
            for (row, len) in lengths.into_iter().enumerate() {
                for seq in [len, len + 1, 300] {
                    let alone = AttentionSpec { batch: 1, seq, ..spec };
                    let mut inputs = Inputs::new(9, alone, &[len], 1.0);
                    for (to, from, columns) in [
                        (&mut inputs.qkv, &together.qkv, columns[2]),
                        (&mut inputs.d_output, &together.d_output, columns[0]),
                    ] {
                        let from = &from[row * spec.seq * columns..][..len * columns];
                        to[..len * columns].copy_from_slice(from);
                    }
                    let of_one = inputs.fast(&compute);
                    for at in [0, 2] {
                        assert_eq!(
                            bits(&of_batch[at], spec.seq, columns[at], row, len),
                            bits(&of_one[at], seq, columns[at], 0, len),
                            "{:?} {} row {row} seq {seq}",
                            compute.simd(),
                            NAMES[at]
                        );
                    }
                    for head in 0..heads {
                        assert_eq!(
                            bits(&of_batch[1], spec.seq, 1, row * heads + head, len),
                            bits(&of_one[1], seq, 1, head, len),
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn threads_and_repetition_change_no_bit() {
    let spec = AttentionSpec { batch: 3, seq: 150, heads: 6, kv_heads: 2, head_dim: 32 };
    let inputs = Inputs::new(10, spec, &[150, 20, 149], 1.0);
    for level in SimdLevel::available() {
        let runs = [1, 1, 2, 3, 7].map(|threads| {
            let compute = Compute::new(threads, Allocator::new()).unwrap();
            inputs.fast(&compute.with_simd(level).unwrap())
        });
        assert!(runs.iter().all(|run| run == &runs[0]), "{level:?}");
    }
}

/// A token sees the tokens before it and itself, so what comes later changes nothing.
#[test]
fn later_tokens_do_not_change_earlier_ones() {
    let long = AttentionSpec { batch: 1, seq: 140, heads: 2, kv_heads: 1, head_dim: 16 };
    let inputs = Inputs::new(11, long, &[140], 1.0);
    let compute = Compute::new(1, Allocator::new()).unwrap();
    let [all, ..] = inputs.fast(&compute);
    for len in [1, 63, 64, 65, 100] {
        let spec = AttentionSpec { seq: len, ..long };
        let mut first = Inputs::new(12, spec, &[len], 1.0);
        first.qkv.copy_from_slice(&inputs.qkv[..len * long.qkv_shape()[1]]);
        let [output, ..] = first.fast(&compute);
        assert_eq!(output, all[..output.len()], "{len}");
    }
}

/// The formula with complex numbers: `re((q conj(k)) e^(i (m - n) f))` is the score of one pair.
#[test]
fn the_plain_form_is_the_formula() {
    let spec = AttentionSpec { batch: 2, seq: 5, heads: 4, kv_heads: 2, head_dim: 6 };
    let inputs = Inputs::new(20, spec, &[5, 3], 1.0);
    let [output, log_sums, _] = inputs.plain();
    let [_, columns] = spec.qkv_shape();
    for (row, len) in [(0, 5), (1, 3)] {
        for head in 0..4 {
            let at = |token: usize, head: usize| {
                &inputs.qkv[(row * 5 + token) * columns + head * 6..][..6]
            };
            let kv_head = head / 2;
            for i in 0..len {
                let q = at(i, head);
                let score = |j: usize| {
                    let k = at(j, 4 + kv_head);
                    let pair = |p: usize| {
                        let angle = (i as f64 - j as f64) * 10_000f64.powf(-(p as f64) / 3.0);
                        let re = q[p] * k[p] + q[p + 3] * k[p + 3];
                        let im = q[p + 3] * k[p] - q[p] * k[p + 3];
                        re * angle.cos() - im * angle.sin()
                    };
                    (0..3).map(pair).sum::<f64>() / 6f64.sqrt()
                };
                let sum: f64 = (0..=i).map(|j| score(j).exp()).sum();
                assert!((sum.ln() - log_sums[(row * 4 + head) * 5 + i]).abs() < 1e-12);
                for d in 0..6 {
                    let want: f64 =
                        (0..=i).map(|j| score(j).exp() / sum * at(j, 6 + kv_head)[d]).sum();
                    let got = output[(row * 5 + i) * 24 + head * 6 + d];
                    assert!((got - want).abs() < 1e-12, "{row} {head} {i} {d}: {got}, not {want}");
                }
            }
        }
    }
}

/// The operations in f64 against differences of the loss `sum(output * d_output)`.
#[test]
fn the_gradient_is_that_of_finite_differences() {
    let spec = AttentionSpec { batch: 2, seq: 4, heads: 4, kv_heads: 2, head_dim: 4 };
    let lengths = [4, 2];
    let inputs = Inputs::new(30, spec, &lengths, 1.0);
    let compute = Compute::new(1, Allocator::new()).unwrap();
    let table = table(&spec, DType::F64);
    let f64s = |shape: Shape, elems: &[f64]| of(elems, shape);
    let qkv = f64s(spec.qkv_shape().into(), &inputs.qkv);
    let d_output = f64s(spec.output_shape().into(), &inputs.d_output);
    let d_qkv = f64s(spec.qkv_shape().into(), &vec![f64::NAN; inputs.qkv.len()]);
    let output = f64s(spec.output_shape().into(), &vec![f64::NAN; inputs.d_output.len()]);
    let log_sums = f64s([spec.log_sums_len()].into(), &vec![f64::NAN; spec.log_sums_len()]);
    let lengths_t = of(&inputs.lengths, [2]);
    let loss = || {
        attention::forward(&compute, &qkv, Some(&lengths_t), &table, &spec, &output, &log_sums)
            .unwrap();
        let output = output.read::<f64>().unwrap();
        let products = output.iter().zip(&inputs.d_output);
        products.filter(|(_, d)| !d.is_nan()).map(|(y, d)| y * d).sum::<f64>()
    };
    loss();
    let (on, x, n, y, l) = (&compute, &qkv, Some(&lengths_t), &output, &log_sums);
    attention::backward(on, x, n, &table, &spec, y, l, &d_output, &d_qkv).unwrap();
    let [_, columns] = spec.qkv_shape();
    for at in 0..inputs.qkv.len() {
        let got = d_qkv.read::<f64>().unwrap()[at];
        let token = at / columns;
        if token % spec.seq >= lengths[token / spec.seq] {
            assert_eq!(got.to_bits(), 0);
            continue;
        }
        const STEP: f64 = 1e-5;
        let moved = |by: f64| {
            qkv.write::<f64>().unwrap()[at] = inputs.qkv[at] + by;
            loss()
        };
        let want = (moved(STEP) - moved(-STEP)) / (2.0 * STEP);
        moved(0.0);
        // The error of a central difference is of the order of STEP^2 plus 1e-16 / STEP.
        assert!((got - want).abs() < 1e-8, "{at}: {got}, not {want}");
    }
}

#[test]
fn memory_grows_linearly_with_the_length() {
    let spec = |seq| AttentionSpec { batch: 1, seq, heads: 9, kv_heads: 3, head_dim: 64 };
    for scratch in [attention::forward_scratch, attention::backward_scratch] {
        let [one, two, three] = [1024, 2048, 3072].map(|seq| scratch(&spec(seq)));
        assert_eq!(two - one, three - two);
    }
    // Keys, values; a tile of queries, twice; a tile of the output; a square.
    assert_eq!(attention::forward_scratch(&spec(100)), 2 * 128 * 64 + 3 * 64 * 64 + 64 * 64);
    assert_eq!(attention::backward_scratch(&spec(100)), 4 * 128 * 64 + 5 * 64 * 64 + 2 * 64 * 64);
}

#[test]
fn mistakes_are_errors() {
    let compute = Compute::new(1, Allocator::new()).unwrap();
    let spec = AttentionSpec { batch: 2, seq: 3, heads: 2, kv_heads: 1, head_dim: 4 };
    let forward =
        |spec: &AttentionSpec, lengths: [i64; 2], table: &RotaryTable, qkv: [usize; 2]| {
            let qkv = f32s(qkv, &vec![0.0; qkv[0] * qkv[1]]);
            let [output, log_sums] = [spec.output_shape(), [spec.log_sums_len(), 1]]
                .map(|shape| f32s(shape, &vec![0.0; shape[0] * shape[1]]));
            let log_sums = log_sums.view([spec.log_sums_len()]).unwrap();
            let lengths = of(&lengths, [2]);
            let result =
                attention::forward(&compute, &qkv, Some(&lengths), table, spec, &output, &log_sums);
            result.map_err(|e| e.to_string())
        };
    let good = table(&spec, DType::F32);
    let qkv = spec.qkv_shape();
    assert_eq!(forward(&spec, [0, 3], &good, qkv), Ok(()));
    let error = forward(&spec, [3, 4], &good, qkv).unwrap_err();
    assert_eq!(error, "attention_forward: length 4 of row 1 is not within 0..=3");
    let error = forward(&spec, [-1, 3], &good, qkv).unwrap_err();
    assert_eq!(error, "attention_forward: length -1 of row 0 is not within 0..=3");
    let error = forward(&spec, [3, 3], &good, [6, 12]).unwrap_err();
    assert!(error.contains("qkv must have shape [6, 16], got [6, 12]"), "{error}");
    let error = forward(&spec, [3, 3], &table(&spec, DType::F64), qkv).unwrap_err();
    assert!(error.contains("expected elements of type f32, got f64"), "{error}");
    let odd = AttentionSpec { kv_heads: 3, ..spec };
    let error = forward(&odd, [3, 3], &good, qkv).unwrap_err();
    assert_eq!(error, "attention_forward: kv_heads must divide heads, got 3 and 2");
    let config = RotaryConfig { head_dim: 4, theta: 1e4, scaling: None };
    let short = RotaryTable::new(&compute.allocator, config, 2, DType::F32).unwrap();
    let error = forward(&spec, [1, 1], &short, qkv).unwrap_err();
    assert_eq!(error, "attention_forward: the rotary table has 2 positions, 3 are needed");
    let config = RotaryConfig { head_dim: 8, ..config };
    let wide = RotaryTable::new(&compute.allocator, config, 9, DType::F32).unwrap();
    let error = forward(&spec, [1, 1], &wide, qkv).unwrap_err();
    assert_eq!(error, "attention_forward: the rotary table is for heads of 8 elements, not of 4");
}
