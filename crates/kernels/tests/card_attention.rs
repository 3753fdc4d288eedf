//! Attention on a card against the same operations on the processor, on fresh inputs, with odd sizes. What an operation writes
//! holds NaN before, and is compared whole.
//!
//! Tolerances are small multiples of the largest differences that were measured, relative to the largest element of a
//! result: cards add in another order than the processor.

mod common;
mod on_card;

use on_card::{Pair, Promise};
use paceline_kernels::attention::{self, AttentionSpec};
use paceline_kernels::rotary::{RotaryConfig, RotaryTable};
use paceline_kernels::{CardNeeds, Compute};
use paceline_memory::{Allocator, Category, DType, Tensor};

use DType::{BF16, F16, F32, F64, I64};

/// How far results of a type may be off: sums in another order, of which exponentials are taken.
fn attended(dtype: DType) -> Promise {
    Promise::Within(match dtype {
        F64 => 1e-13,
        BF16 => 4.0 / 256.0,
        F16 => 4.0 / 2048.0,
        _ => 1e-5,
    })
}
/// Sizes of attention, and the lengths of the rows if they have padding. There are more tokens than a tile has, or fewer,
/// and heads of more columns than a block computes.
fn attentions() -> Vec<(AttentionSpec, Option<Vec<f64>>)> {
    let spec = |[batch, seq, heads, kv_heads, head_dim]: [usize; 5]| AttentionSpec {
        batch,
        seq,
        heads,
        kv_heads,
        head_dim,
    };
    vec![
        (spec([1, 1, 1, 1, 2]), None),
        (spec([3, 37, 4, 2, 6]), Some(vec![35.0, 0.0, 37.0])),
        (spec([1, 70, 2, 1, 34]), None),
        (spec([1, 5, 1, 1, 132]), None),
        // Narrow heads.
        (spec([2, 150, 2, 1, 8]), Some(vec![149.0, 3.0])),
        (spec([1, 33, 4, 2, 16]), None),
        (spec([0, 5, 1, 1, 2]), None),
    ]
}

fn table(on: &Compute, spec: &AttentionSpec, dtype: DType) -> RotaryTable {
    let config = RotaryConfig { head_dim: spec.head_dim, theta: 100.0, scaling: None };
    RotaryTable::new(&on.allocator, config, spec.seq, dtype).unwrap()
}

#[test]
fn attention_and_its_gradients() {
    let Some(pair) = Pair::new() else { return };
    for (dtype, real) in [(F32, F32), (F64, F64), (BF16, F32), (F16, F32)] {
        for (spec, lengths) in attentions() {
            let has_lengths = lengths.is_some();
            let lengths = pair.of(I64, &[spec.batch], &lengths.unwrap_or(vec![0.0; spec.batch]));
            let qkv = pair.random(dtype, &spec.qkv_shape(), 1);
            let output = pair.poisoned(dtype, &spec.output_shape());
            let log_sums = pair.poisoned(real, &[spec.log_sums_len()]);
            let forward = |on: &Compute, [qkv, lengths, output, log_sums]: [&Tensor; 4]| {
                let (lengths, table) = (has_lengths.then_some(lengths), table(on, &spec, real));
                attention::forward(on, qkv, lengths, &table, &spec, output, log_sums)
            };
            pair.run(forward, [&qkv, &lengths, &output, &log_sums]);
            pair.compare(&output, attended(dtype));
            pair.compare(&log_sums, attended(dtype));

            let d_output = pair.random(dtype, &spec.output_shape(), 2);
            let d_qkv = pair.poisoned(dtype, &spec.qkv_shape());
            let backward = |on: &Compute, [qkv, lengths, y, log_sums, dy, to]: [&Tensor; 6]| {
                let (lengths, table) = (has_lengths.then_some(lengths), table(on, &spec, real));
                attention::backward(on, qkv, lengths, &table, &spec, y, log_sums, dy, to)
            };
            pair.run(backward, [&qkv, &lengths, &output, &log_sums, &d_output, &d_qkv]);
            pair.compare(&d_qkv, attended(dtype));
        }
    }
}

#[test]
fn infinite_numbers_of_a_token_reach_only_tokens_that_attend_to_it() {
    let Some(pair) = Pair::new() else { return };
    let specs = [(F32, 34), (F32, 16), (F64, 8), (BF16, 34), (F16, 64), (BF16, 8)];
    for (dtype, head_dim) in specs {
        let spec = AttentionSpec { batch: 1, seq: 70, heads: 2, kv_heads: 1, head_dim };
        let real = if dtype == F64 { F64 } else { F32 };
        // The output, and the gradient of qkv, with an infinite number in one place of qkv or of the gradient of the output.
        let attend = |in_qkv: Option<usize>, in_d_output: Option<usize>| {
            let with = |shape: [usize; 2], seed: u64, at: Option<usize>| {
                let mut values = pair.on_processor(&pair.random(dtype, &shape, seed));
                at.into_iter().for_each(|at| values[at] = f64::INFINITY);
                pair.of(dtype, &shape, &values)
            };
            let qkv = with(spec.qkv_shape(), 1, in_qkv);
            let dy = with(spec.output_shape(), 2, in_d_output);
            let y = pair.poisoned(dtype, &spec.output_shape());
            let log_sums = pair.poisoned(real, &[spec.log_sums_len()]);
            let d_qkv = pair.poisoned(dtype, &spec.qkv_shape());
            pair.run_on_card(
                |on, [qkv, y, log_sums, dy, d_qkv]| {
                    let table = table(on, &spec, real);
                    attention::forward(on, qkv, None, &table, &spec, y, log_sums)?;
                    attention::backward(on, qkv, None, &table, &spec, y, log_sums, dy, d_qkv)
                },
                [&qkv, &y, &log_sums, &dy, &d_qkv],
            );
            [pair.on_card(&y), pair.on_card(&d_qkv)]
        };
        let [wide, narrow] = [spec.qkv_shape()[1], spec.output_shape()[1]];
        let same = |what: &str, got: &[f64], want: &[f64]| {
            let Promise::Within(part) = attended(dtype) else { unreachable!() };
            let largest = want.iter().fold(0f64, |most, x| most.max(x.abs()));
            for (at, (got, want)) in got.iter().zip(want).enumerate() {
                let is_close = (got - want).abs() <= part * largest;
                assert!(is_close, "{what} of {dtype}, {head_dim}, {at}: {got}, {want}");
            }
        };
        let [y, d_qkv] = attend(None, None);
        // Within a tile, and the last token of one.
        for token in [41, 31] {
            let value = token * wide + 3 * head_dim;
            let [other, _] = attend(Some(value), None);
            same("output", &other[..token * narrow], &y[..token * narrow]);
            assert!(!other[token * narrow].is_finite() && !other[69 * narrow].is_finite());

            let key = token * wide + 2 * head_dim;
            let [other, d_other] = attend(Some(key), None);
            same("output", &other[..token * narrow], &y[..token * narrow]);
            for row in 0..token {
                let queries = row * wide..row * wide + 2 * head_dim;
                same("gradient of queries", &d_other[queries.clone()], &d_qkv[queries]);
            }

            let [_, d_other] = attend(None, Some(token * narrow));
            for row in token + 1..70 {
                let keys = row * wide + 2 * head_dim..(row + 1) * wide;
                same("gradients of keys", &d_other[keys.clone()], &d_qkv[keys]);
            }
            assert!(!d_other[value].is_finite());
        }
    }
}

#[test]
fn heads_of_256_numbers_fit_into_the_shared_memory_of_small_cards() {
    let Some(pair) = Pair::new() else { return };
    let spec = AttentionSpec { batch: 1, seq: 70, heads: 1, kv_heads: 1, head_dim: 256 };
    let qkv = pair.random(BF16, &spec.qkv_shape(), 1);
    let (y, log_sums) =
        (pair.poisoned(BF16, &spec.output_shape()), pair.poisoned(F32, &[spec.log_sums_len()]));
    let (dy, d_qkv) =
        (pair.random(BF16, &spec.output_shape(), 2), pair.poisoned(BF16, &spec.qkv_shape()));
    pair.run(
        |on, [qkv, y, log_sums, dy, d_qkv]| {
            let table = table(on, &spec, F32);
            attention::forward(on, qkv, None, &table, &spec, y, log_sums)?;
            attention::backward(on, qkv, None, &table, &spec, y, log_sums, dy, d_qkv)
        },
        [&qkv, &y, &log_sums, &dy, &d_qkv],
    );
    pair.compare(&y, attended(BF16));
    pair.compare(&d_qkv, attended(BF16));
    // What a rehearsal says of it: 99 KB are what compute capability 8.6 and 8.9 have.
    let meta = Compute::new(1, Allocator::meta()).unwrap();
    let on_meta =
        |dtype, shape: &[usize]| meta.allocator.tensor(dtype, shape, Category::Data).unwrap();
    let table = table(&meta, &spec, F32);
    let [qkv, d_qkv] = [1, 2].map(|_| on_meta(BF16, &spec.qkv_shape()));
    let [y, dy] = [1, 2].map(|_| on_meta(BF16, &spec.output_shape()));
    let log_sums = on_meta(F32, &[spec.log_sums_len()]);
    attention::forward(&meta, &qkv, None, &table, &spec, &y, &log_sums).unwrap();
    attention::backward(&meta, &qkv, None, &table, &spec, &y, &log_sums, &dy, &d_qkv).unwrap();
    assert_eq!(
        meta.card_needs(),
        CardNeeds { capability: (8, 0), shared_bytes: 99 << 10, missing: None }
    );
}

#[test]
fn lengths_that_are_wrong_make_nan_on_a_card() {
    let Some(pair) = Pair::new() else { return };
    let spec = AttentionSpec { batch: 2, seq: 3, heads: 1, kv_heads: 1, head_dim: 2 };
    let qkv = pair.random(F32, &spec.qkv_shape(), 1);
    let lengths = pair.of(I64, &[2], &[4.0, -1.0]);
    let output = pair.random(F32, &spec.output_shape(), 2);
    let log_sums = pair.random(F32, &[spec.log_sums_len()], 3);
    pair.run_on_card(
        |on, [qkv, lengths, output, log_sums]| {
            let table = table(on, &spec, F32);
            attention::forward(on, qkv, Some(lengths), &table, &spec, output, log_sums)
        },
        [&qkv, &lengths, &output, &log_sums],
    );
    for result in [&output, &log_sums] {
        assert!(pair.on_card(result).iter().all(|x| x.is_nan()));
    }
}
