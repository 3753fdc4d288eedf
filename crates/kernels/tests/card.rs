//! Every operation on a card against the same operation on the processor, on fresh inputs, with odd sizes. What an operation
//! writes holds NaN before, and is compared whole.
//!
//! Needs a card, or one that is emulated, and the run-time compiler; without them each test says so and passes, unless
//! `PACELINE_CARD=1`.

mod on_card;

use on_card::{Pair, Promise};
use paceline_kernels::norm::{self, RowRanges};
use paceline_kernels::optimizer::{self, AdamW, Sgd};
use paceline_kernels::rotary::{self, RotaryConfig, RotaryTable};
use paceline_kernels::{cast, elementwise, embedding, loss, rms_norm, swiglu};
use paceline_memory::DType;

const STORED: [DType; 4] = [DType::F32, DType::F64, DType::BF16, DType::F16];

#[test]
fn sources_have_the_kernels_that_are_stated() {
    if on_card::compiler().is_none() {
        return;
    }
    for source in paceline_kernels::card::SOURCES {
        source.check().unwrap();
    }
}

/// The most registers of a thread. Up to 128, two blocks of 256 threads fit onto a multiprocessor; only convolutions in f64 need
/// more.
const MOST_REGISTERS: u32 = 160;

#[test]
fn kernels_fit_into_the_registers_of_cards() {
    if on_card::compiler().is_none() {
        return;
    }
    let mut count = 0;
    for (source, architecture) in
        paceline_kernels::card::SOURCES.iter().flat_map(|source| [80, 90].map(|of| (source, of)))
    {
        let all = paceline_cuda::compiler::resources(source, architecture).unwrap();
        assert_eq!(all.len(), source.kernels.len(), "{}", source.file);
        for kernel in &all {
            assert_eq!(kernel.spilled_bytes, 0, "{kernel:?} for sm_{architecture}");
            assert!(kernel.registers <= MOST_REGISTERS, "{kernel:?} for sm_{architecture}");
        }
        count += all.len();
    }
    println!("COMPILE: {count} kernels for sm_80 and sm_90 fit");
}

#[test]
fn elementwise_operations_have_the_processors_bits() {
    let Some(pair) = Pair::new() else { return };
    for (dtype, len) in STORED.into_iter().flat_map(|dtype| [1, 257, 1000].map(|len| (dtype, len)))
    {
        let (x, y) = (pair.random(dtype, &[len], 1), pair.random(dtype, &[len], 2));
        let out = pair.poisoned(dtype, &[len]);
        pair.run(|on, [x, out]| elementwise::relu(on, x, out), [&x, &out]);
        pair.compare(&out, Promise::Bits);
        let dx = pair.poisoned(dtype, &[len]);
        pair.run(|on, [y, dy, dx]| elementwise::relu_backward(on, y, dy, dx), [&out, &y, &dx]);
        pair.compare(&dx, Promise::Bits);
        pair.run(|on, [x, y]| elementwise::add(on, x, y), [&x, &y]);
        pair.compare(&y, Promise::Bits);
        if matches!(dtype, DType::F32 | DType::F64) {
            pair.run(|on, [y]| elementwise::divide(on, y, 3.0), [&y]);
            pair.compare(&y, Promise::Bits);
        }
    }
}

#[test]
fn optimizer_steps_have_the_processors_bits() {
    let Some(pair) = Pair::new() else { return };
    for (dtype, len) in
        [DType::F32, DType::F64].into_iter().flat_map(|dtype| [1, 255, 700].map(|len| (dtype, len)))
    {
        let [p, g, m] = [1, 2, 3].map(|seed| pair.random(dtype, &[len], seed));
        let sgd = Sgd { lr: 0.03, momentum: 0.9, weight_decay: 1e-3 };
        pair.run(|on, [p, g, v]| optimizer::sgd(on, &sgd, p, (g, 0.5), Some(v)), [&p, &g, &m]);
        pair.run(|on, [p, g]| optimizer::sgd(on, &sgd, p, (g, 1.0), None), [&p, &g]);
        pair.compare(&p, Promise::Bits);
        pair.compare(&m, Promise::Bits);
        let adamw = AdamW { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01 };
        // The second moment is not negative.
        let second = pair.of(dtype, &[len], &vec![0.25; len]);
        for step in [1, 2, 30] {
            pair.run(
                |on, [p, g, m, v]| optimizer::adamw(on, &adamw, step, p, (g, 0.25), m, v),
                [&p, &g, &m, &second],
            );
        }
        for tensor in [&p, &m, &second] {
            pair.compare(tensor, Promise::Bits);
        }
    }
}

#[test]
fn losses_are_those_of_the_processor() {
    let Some(pair) = Pair::new() else { return };
    for dtype in STORED {
        let (gradients, sums_within) = match dtype {
            DType::F64 => (1e-14, 1e-14),
            DType::F32 => (1e-6, 1e-6),
            DType::BF16 => (1.0 / 256.0, 1e-6),
            _ => (1.0 / 1024.0, 1e-6),
        };
        for (rows, classes) in [(1, 10), (7, 3), (33, 100)] {
            let logits = pair.random(dtype, &[rows, classes], 5);
            let labels: Vec<f64> = (0..rows).map(|row| (row * 7 % classes) as f64).collect();
            let labels = pair.of(DType::I64, &[rows], &labels);
            let d_logits = pair.poisoned(dtype, &[rows, classes]);
            let sums = pair.of(DType::F64, &[3], &[1.0, 2.0, 3.0]);
            let op = |on: &_, [x, labels, d, sums]: [&_; 4]| {
                loss::cross_entropy(on, x, labels, 0.125, Some(d), sums)?;
                loss::cross_entropy(on, x, labels, 0.125, None, sums)
            };
            pair.run(op, [&logits, &labels, &d_logits, &sums]);
            pair.compare(&d_logits, Promise::Within(gradients));
            pair.compare(&sums, Promise::Within(sums_within));

            let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
            let target = pair.random(wide, &[rows, classes], 6);
            let op = |on: &_, [x, t, d, sums]: [&_; 4]| loss::mse(on, x, t, 0.5, Some(d), sums);
            pair.run(op, [&logits, &target, &d_logits, &sums]);
            pair.compare(&d_logits, Promise::Bits);
            pair.compare(&sums, Promise::Within(sums_within));
        }
    }
}

/// Bits, but for f64, whose exponential function is another one.
fn with_exp(dtype: DType) -> Promise {
    if dtype == DType::F64 { Promise::Within(1e-14) } else { Promise::Bits }
}

/// The type in which kernels compute.
fn wide(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

#[test]
fn conversions_have_the_processors_bits() {
    let Some(pair) = Pair::new() else { return };
    let special = [0.0, -0.0, f64::INFINITY, f64::NAN, 65504.0, 65519.9, 1e-7, -3e38, 1.00390625];
    for half in [DType::F16, DType::BF16] {
        for x in [pair.of(DType::F32, &[9], &special), pair.random(DType::F32, &[301], 1)] {
            let len = [x.len()];
            let (rounded, back) = (pair.poisoned(half, &len), pair.poisoned(DType::F32, &len));
            pair.run(|on, [x, rounded]| cast::narrow(on, x, rounded), [&x, &rounded]);
            pair.compare(&rounded, Promise::Bits);
            pair.run(|on, [rounded, x]| cast::widen(on, rounded, x), [&rounded, &back]);
            pair.compare(&back, Promise::Bits);
        }
    }
}

#[test]
fn the_gated_activation_has_the_processors_bits() {
    let Some(pair) = Pair::new() else { return };
    for (dtype, [rows, columns]) in
        STORED.into_iter().flat_map(|dtype| [[1, 1], [7, 33], [3, 300]].map(|sizes| (dtype, sizes)))
    {
        let gate_up = pair.random(dtype, &[rows, 2 * columns], 1);
        let (dy, y) =
            (pair.random(dtype, &[rows, columns], 2), pair.poisoned(dtype, &[rows, columns]));
        let dx = pair.poisoned(dtype, &[rows, 2 * columns]);
        pair.run(|on, [x, y]| swiglu::forward(on, x, y), [&gate_up, &y]);
        pair.compare(&y, with_exp(dtype));
        pair.run(|on, [x, dy, dx]| swiglu::backward(on, x, dy, dx), [&gate_up, &dy, &dx]);
        pair.compare(&dx, with_exp(dtype));
    }
}

#[test]
fn norms_of_rows_have_the_processors_bits_and_gradients_of_their_weight_are_near() {
    let Some(pair) = Pair::new() else { return };
    for (dtype, [rows, columns]) in STORED
        .into_iter()
        .flat_map(|dtype| [[1, 5], [9, 64], [131, 100]].map(|sizes| (dtype, sizes)))
    {
        let wide = wide(dtype);
        let (x, w) = (pair.random(wide, &[rows, columns], 1), pair.random(wide, &[columns], 2));
        let (dy, y) =
            (pair.random(dtype, &[rows, columns], 3), pair.poisoned(dtype, &[rows, columns]));
        let (r, dx) = (pair.poisoned(wide, &[rows]), pair.poisoned(wide, &[rows, columns]));
        let op = |on: &_, [x, w, y, r]: [&_; 4]| rms_norm::forward(on, x, w, 1e-5, y, r);
        pair.run(op, [&x, &w, &y, &r]);
        pair.compare(&y, Promise::Bits);
        pair.compare(&r, Promise::Bits);
        let op = |on: &_, [x, w, r, dy, dx]: [&_; 5]| rms_norm::backward_input(on, x, w, r, dy, dx);
        pair.run(op, [&x, &w, &r, &dy, &dx]);
        pair.compare(&dx, Promise::Bits);
        for accumulate in [false, true] {
            let dw = match accumulate {
                false => pair.poisoned(wide, &[columns]),
                true => pair.random(wide, &[columns], 4),
            };
            let op = |on: &_, [x, r, dy, dw]: [&_; 4]| {
                rms_norm::backward_weight(on, x, r, dy, dw, accumulate)
            };
            pair.run(op, [&x, &r, &dy, &dw]);
            pair.compare(&dw, Promise::Within(if wide == DType::F64 { 1e-14 } else { 1e-5 }));
        }
    }
}

#[test]
fn rotations_have_the_processors_bits() {
    let Some(pair) = Pair::new() else { return };
    for dtype in STORED {
        let (seq, heads, head_dim, rows, columns) = (5, 3, 8, 15, 31);
        let x = pair.random(dtype, &[rows, columns], 1);
        let op = |on: &paceline_kernels::Compute, [x]: [&_; 1]| {
            let config = RotaryConfig { head_dim, theta: 10_000.0, scaling: None };
            let table = RotaryTable::new(&on.allocator, config, 16, wide(dtype))?;
            rotary::rotate(on, &table, (4, seq), heads, x)
        };
        pair.run(op, [&x]);
        pair.compare(&x, Promise::Bits);
    }
}

#[test]
fn embeddings_have_the_processors_bits() {
    let Some(pair) = Pair::new() else { return };
    for (dtype, (count, len, width)) in STORED
        .into_iter()
        .flat_map(|dtype| [(1, 1, 1), (40, 7, 5), (300, 90, 260)].map(|sizes| (dtype, sizes)))
    {
        let ids: Vec<f64> = (0..count).map(|at| (at * at * 5 % len) as f64).collect();
        let ids = pair.of(DType::I64, &[count], &ids);
        let (table, y) =
            (pair.random(dtype, &[len, width], 1), pair.poisoned(dtype, &[count, width]));
        pair.run(|on, [ids, table, y]| embedding::forward(on, ids, table, y), [&ids, &table, &y]);
        pair.compare(&y, Promise::Bits);
        let dy = pair.random(dtype, &[count, width], 2);
        for accumulate in [false, true] {
            let op =
                |on: &_, [ids, dy, dt]: [&_; 3]| embedding::backward(on, ids, dy, dt, accumulate);
            pair.run(op, [&ids, &dy, &table]);
            pair.compare(&table, Promise::Bits);
        }
    }
    let ids = pair.of(DType::I64, &[2, 3], &[5.0, 9.0, 9.0, 9.0, 9.0, 9.0]);
    let lengths = pair.of(DType::I64, &[2], &[3.0, 2.0]);
    for pad in [None, Some(9)] {
        let rows = pair.poisoned(DType::I64, &[2]);
        let op = |on: &_, [ids, lengths, rows]: [&_; 3]| {
            embedding::last_rows(on, ids, lengths, pad, rows)
        };
        pair.run(op, [&ids, &lengths, &rows]);
        pair.compare(&rows, Promise::Bits);
    }
}

#[test]
fn sums_of_squares_have_the_processors_bits() {
    let Some(pair) = Pair::new() else { return };
    // One parameter, several of odd sizes with gaps between them, and one that takes several levels of the tree.
    let cases: [&[std::ops::Range<usize>]; 4] =
        [&[0..1], &[0..16], &[3..40, 64..65, 80..4000], &[0..70_001, 70_016..71_000]];
    for (dtype, pieces) in
        [DType::F32, DType::F64].into_iter().flat_map(|dtype| cases.map(|pieces| (dtype, pieces)))
    {
        let len = pieces.last().unwrap().end + 3;
        let x = pair.random(dtype, &[len], 1);
        let rows = RowRanges::new(pieces.iter().cloned());
        for range in [0..rows.count(), rows.count() / 3..rows.count()] {
            let nodes = pair.both(&x, |on, x| {
                Ok(norm::squares(on, x, 0, &rows, range.clone())?.nodes().clone())
            });
            pair.compare(&nodes, Promise::Bits);
        }
        pair.run(|on, [x]| norm::scale(on, x, 0.3), [&x]);
        pair.compare(&x, Promise::Bits);
    }
}
