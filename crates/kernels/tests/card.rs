//! Every operation on a card against the same operation on the processor, on fresh inputs, with odd sizes. What an operation
//! writes holds NaN before, and is compared whole.
//!
//! Needs a card, or one that is emulated, and the run-time compiler; without them each test says so and passes, unless
//! `PACELINE_CARD=1`.

mod on_card;

use on_card::{Pair, Promise};
use paceline_kernels::optimizer::{self, AdamW, Sgd};
use paceline_kernels::{elementwise, loss};
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

/// The most registers of a thread: two blocks of 256 threads fit onto a multiprocessor.
const MOST_REGISTERS: u32 = 128;

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
