//! Every operation on a card against the same operation on the processor, on fresh inputs, with odd sizes. What an operation
//! writes holds NaN before, and is compared whole.
//!
//! Needs a card, or one that is emulated, and the run-time compiler; without them each test says so and passes, unless
//! `PACELINE_CARD=1`.

mod common;
mod on_card;

use std::io::{self, Write};
use std::thread;

use half::{bf16, f16};
use on_card::{Pair, Promise};
use paceline_cuda::kernel::{CardKernel, KernelSource, KernelStatement, Tf32};
use paceline_emulated_card::for_tests::is_ready;
use paceline_kernels::batch_norm::{self, BatchNorm};
use paceline_kernels::function::{self, Function};
use paceline_kernels::linear::Activation;
use paceline_kernels::norm::{self, RowRanges};
use paceline_kernels::optimizer::{self, AdamW, Sgd, StepNumbers};
use paceline_kernels::pool2d::{self, MaxPool2d};
use paceline_kernels::{
    ImageLayout, KernelError, Op, Real, cast, elementwise, embedding, layout, loss, rms_norm,
    swiglu, top_k, write,
};
use paceline_memory::DType;

const STORED: [DType; 4] = [DType::F32, DType::F64, DType::BF16, DType::F16];

/// Each type with each of the others.
fn each<T: Copy, const N: usize>(
    dtypes: &[DType],
    others: [T; N],
) -> impl Iterator<Item = (DType, T)> {
    dtypes.iter().flat_map(move |dtype| others.map(|other| (*dtype, other)))
}

/// The kernels of a source, for all types and constants that they are launched for.
fn kernels_of(source: &'static KernelSource) -> Vec<CardKernel> {
    let is_pooled = source.file.contains("pool");
    let kernels = source.statements().flat_map(|KernelStatement { name, template, .. }| {
        let (parameter, constants) = template.split_once(", ").unwrap_or((template, ""));
        let is_large = constants.contains("u32");
        let constants: &[&'static str] = match (constants.contains("POOLED"), is_pooled, is_large) {
            _ if constants.contains("IS_WIDE") => &["true", "false"],
            (false, _, true) if source.file.contains("attention") => &["32", "64"],
            (false, _, true) => &["128, 64", "128, 128"],
            (true, false, false) => &["false"],
            (true, true, false) => &["true"],
            (true, false, true) if constants.contains("SIDE") => &["false, 64", "false, 128"],
            (true, true, true) if constants.contains("SIDE") => &["true, 64", "true, 128"],
            (true, false, true) => &["false, 128, 64", "false, 128, 128"],
            (true, true, true) => &["true, 128, 64", "true, 128, 128"],
            (false, _, false) => &[""],
        };
        let of_types = move |constants: &&'static str| match (parameter, is_large) {
            ("", _) => vec![source.kernel(name)],
            ("typename H", _) => of!(source, name, constants, f16 bf16),
            ("typename S", true) => of!(source, name, constants, f32 Tf32 f16 bf16),
            ("typename S", false) => of!(source, name, constants, f32 f64 f16 bf16),
            ("typename R" | "typename Real", _) => of!(source, name, constants, f32 f64),
            (other, _) => panic!("{}: {name} is a template of {other}", source.file),
        };
        constants.iter().flat_map(of_types)
    });
    kernels.collect()
}

macro_rules! of {
    ($source:expr, $name:expr, $constants:expr, $($of:ty)+) => {
        vec![$($source.with::<$of>($name, $constants)),+]
    };
}
use of;

/// The most registers of a thread, with which a block of 256 threads fits onto a multiprocessor, and in f64, which is for checks.
const MOST_REGISTERS: [u32; 2] = [192, 255];

#[test]
fn kernels_fit_into_the_registers_of_cards() {
    if !is_ready() {
        return;
    }
    let fit = |architecture: u32| {
        let mut count = 0;
        for source in paceline_kernels::CARD_SOURCES {
            // Attention in 16 bits is refused on older cards before a rank starts.
            if architecture < 80 && source.file.contains("halves") {
                continue;
            }
            for kernel in kernels_of(source) {
                let name = kernel.expression();
                let found = paceline_cuda::compiler::resources(&kernel, architecture).unwrap();
                assert!(found.registers > 0, "{name} for sm_{architecture}: {found:?}");
                assert_eq!(found.spilled_bytes, 0, "{name} for sm_{architecture}: {found:?}");
                let most = MOST_REGISTERS[usize::from(name.contains("f64"))];
                assert!(found.registers <= most, "{name} for sm_{architecture}: {found:?}");
                count += 1;
            }
        }
        count
    };
    let counts = thread::scope(|scope| {
        let threads = [75, 80, 90].map(|of| scope.spawn(move || fit(of)));
        threads.map(|thread| thread.join().unwrap())
    });
    // Not by `println!`, so that it is seen though the test passes: scripts/card_tiers.sh looks for it.
    let count: usize = counts.iter().sum();
    writeln!(io::stdout(), "\nCOMPILE: {count} kernels for sm_75, sm_80 and sm_90, none spills")
        .unwrap();
}

/// It is refused before its operands are looked at, so that no work is queued that never comes.
#[test]
fn an_operation_without_a_body_for_cards_is_refused_there() {
    let Some(pair) = Pair::new() else { return };
    let x = pair.random(DType::F32, &[3], 1);
    let operand = write::<f32>("x", &x.card, [4]);
    let refused = pair.card.launch(Op::new("own_layer"), operand, |_, _| Ok(()));
    assert!(matches!(refused, Err(KernelError::NoCardBody("own_layer"))), "{refused:?}");
}

#[test]
fn elementwise_operations_have_the_processors_bits() {
    let Some(pair) = Pair::new() else { return };
    for (dtype, len) in each(&STORED, [1, 257, 1000]) {
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
    for (dtype, len) in each(&[DType::F32, DType::F64], [1, 255, 700]) {
        let [p, g, m] = [1, 2, 3].map(|seed| pair.random(dtype, &[len], seed));
        let sgd = Sgd { lr: 0.03, momentum: 0.9, weight_decay: 1e-3 };
        let (with, without) = (sgd.numbers(0.5), Sgd { momentum: 0.0, ..sgd }.numbers(1.0));
        let in_memory = |numbers: &[f64]| pair.of(dtype, &[numbers.len()], numbers);
        let (there, plain) = (in_memory(&with), in_memory(&without));
        let (with, without) = (StepNumbers::Here(with), StepNumbers::Here(without));
        pair.run(|on, [p, g, v]| optimizer::sgd(on, with, p, g, Some(v)), [&p, &g, &m]);
        pair.run(|on, [p, g]| optimizer::sgd(on, without, p, g, None), [&p, &g]);
        pair.run(
            |on, [p, g, v, of]| optimizer::sgd(on, StepNumbers::InMemory(of), p, g, Some(v)),
            [&p, &g, &m, &there],
        );
        pair.run(
            |on, [p, g, of]| optimizer::sgd(on, StepNumbers::InMemory(of), p, g, None),
            [&p, &g, &plain],
        );
        pair.same_bits([&p, &m]);
        let adamw = AdamW { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01 };
        // The second moment is not negative.
        let second = pair.of(dtype, &[len], &vec![0.25; len]);
        for step in [1, 2, 30] {
            let numbers = adamw.numbers(step, 0.25);
            pair.run(
                |on, [p, g, m, v]| optimizer::adamw(on, StepNumbers::Here(numbers), p, g, m, v),
                [&p, &g, &m, &second],
            );
            pair.run(
                |on, [p, g, m, v, of]| optimizer::adamw(on, StepNumbers::InMemory(of), p, g, m, v),
                [&p, &g, &m, &second, &in_memory(&numbers)],
            );
        }
        pair.same_bits([&p, &m, &second]);
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
    for (dtype, [rows, columns]) in each(&STORED, [[1, 1], [7, 33], [3, 300], [9, 40]]) {
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

/// `gain * x / (1 + exp(-slope * x))`, with a setting that is added.
#[derive(Clone)]
struct Gated(f64);

impl Function<2> for Gated {
    const NAME: &'static str = "gated";
    const CARD: &'static str = "
template <typename R> __device__ R value(R x, const R* by, const double* settings) {
    return by[0] * x / (R(1) + fast_exp(-by[1] * x)) + R(settings[0]);
}
template <typename R> __device__ R derivatives(R x, const R* by, const double*, R* by_params) {
    R s = R(1) / (R(1) + fast_exp(-by[1] * x)), slope = by[0] * x * s * (R(1) - s);
    by_params[0] = x * s;
    by_params[1] = slope * x;
    return by[0] * s + slope * by[1];
}";

    fn settings(&self) -> [f64; 4] {
        [self.0, 0.0, 0.0, 0.0]
    }

    fn value<T: Real>(&self, x: T, [gain, slope]: [T; 2]) -> T {
        gain * x / (T::from_f64(1.0) + (-slope * x).fast_exp()) + T::from_f64(self.0)
    }

    fn derivatives<T: Real>(&self, x: T, [gain, slope]: [T; 2]) -> (T, [T; 2]) {
        let one = T::from_f64(1.0);
        let s = one / (one + (-slope * x).fast_exp());
        let by = gain * x * s * (one - s);
        (gain * s + by * slope, [x * s, by * x])
    }
}

/// Has the name of the other one, and no parameters.
#[derive(Clone)]
struct Doubled;

impl Function<0> for Doubled {
    const NAME: &'static str = "gated";
    const CARD: &'static str = "
template <typename R> __device__ R value(R x, const R*, const double*) { return x + x; }
template <typename R> __device__ R derivatives(R, const R*, const double*, R*) { return 2; }";

    fn value<T: Real>(&self, x: T, _: [T; 0]) -> T {
        x + x
    }

    fn derivatives<T: Real>(&self, _: T, _: [T; 0]) -> (T, [T; 0]) {
        (T::from_f64(2.0), [])
    }
}

#[test]
fn stated_functions_have_the_processors_bits() {
    let Some(pair) = Pair::new() else { return };
    for (dtype, shape) in each(&STORED, [[1, 1], [7, 33], [40, 300]]) {
        let [x, dy] = [1, 2].map(|seed| pair.random(dtype, &shape, seed));
        let [a, b, d_a, d_b] = [3, 4, 5, 6].map(|seed| pair.random(wide(dtype), &shape[1..], seed));
        let [y, dx, z, dz] = [(); 4].map(|()| pair.poisoned(dtype, &shape));
        let f = Gated(0.25);
        let op = |on: &_, [x, dy, a, b, d_a, d_b, y, dx, z, dz]: [&_; 10]| {
            function::value(on, &f, x, [a, b], y)?;
            function::input_gradient(on, &f, x, [a, b], dy, dx)?;
            let grads = [(d_a, false), (d_b, true)];
            function::parameter_gradients(on, &f, x, [a, b], dy, grads)?;
            function::value(on, &Doubled, x, [], z)?;
            function::input_gradient(on, &Doubled, x, [], dy, dz)
        };
        pair.run(op, [&x, &dy, &a, &b, &d_a, &d_b, &y, &dx, &z, &dz]);
        for found in [&y, &dx, &d_a, &d_b, &z, &dz] {
            pair.compare(found, with_exp(dtype));
        }
    }
}

#[test]
fn norms_of_rows_have_the_processors_bits_and_gradients_of_their_weight_are_near() {
    let Some(pair) = Pair::new() else { return };
    for (dtype, [rows, columns]) in each(&STORED, [[1, 5], [9, 64], [131, 100]]) {
        let wide = wide(dtype);
        let (x, w) = (pair.random(wide, &[rows, columns], 1), pair.random(wide, &[columns], 2));
        let (dy, y) =
            (pair.random(dtype, &[rows, columns], 3), pair.poisoned(dtype, &[rows, columns]));
        let (r, dx) = (pair.poisoned(wide, &[rows]), pair.poisoned(wide, &[rows, columns]));
        let (dw, sum) = (pair.poisoned(wide, &[columns]), pair.poisoned(wide, &[rows, columns]));
        let op = |on: &_, [x, w, y, r, dy, dx, dw, sum]: [&_; 8]| {
            rms_norm::forward(on, x, w, 1e-5, y, r)?;
            rms_norm::backward_input(on, x, w, r, dy, None, dx)?;
            rms_norm::backward_input(on, x, w, r, dy, Some(x), sum)?;
            rms_norm::backward_weight(on, x, r, dy, dw, false)?;
            rms_norm::backward_weight(on, x, r, dy, dw, true)
        };
        pair.run(op, [&x, &w, &y, &r, &dy, &dx, &dw, &sum]);
        pair.same_bits([&y, &r, &dx, &sum]);
        // The bits of a gradient and a sum.
        pair.run(|on, [x, dx]| elementwise::add(on, x, dx), [&x, &dx]);
        assert_eq!(pair.on_card(&dx), pair.on_card(&sum));
        pair.compare(&dw, Promise::Within(if wide == DType::F64 { 1e-14 } else { 1e-5 }));
    }
}

#[test]
fn embeddings_have_the_processors_bits() {
    let Some(pair) = Pair::new() else { return };
    for (dtype, (count, len, width)) in each(&STORED, [(1, 1, 1), (40, 7, 5), (300, 90, 260)]) {
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
        [&[0..1, 1..1], &[0..16, 16..16], &[3..40, 64..65, 80..4000], &[0..70_001, 70_016..71_000]];
    for (dtype, pieces) in each(&[DType::F32, DType::F64], cases) {
        let len = pieces.last().unwrap().end + 3;
        let x = pair.random(dtype, &[len], 1);
        let rows = RowRanges::new(pieces.iter().cloned());
        for range in [0..rows.count(), rows.count() / 3..rows.count()] {
            let nodes = pair.both(&x, |on, x| {
                Ok(norm::squares(on, x, 0, &rows, range.clone())?.nodes().clone())
            });
            pair.compare(&nodes, Promise::Bits);
        }
    }
}

#[test]
fn pools_have_the_processors_bits() {
    let Some(pair) = Pair::new() else { return };
    let sizes = [(2, 6, 4, 3, 2, 2), (1, 7, 9, 5, 3, 2), (3, 5, 5, 1, 2, 1), (2, 9, 8, 2, 3, 3)];
    for (dtype, layout) in each(&STORED, [ImageLayout::Nhwc, ImageLayout::Nchw]) {
        for (batch, height, width, channels, window, stride) in sizes {
            let pool = MaxPool2d { height, width, channels, window, stride, layout };
            let x = pair.random(dtype, &pool.input_shape(batch), 1);
            let y = pair.poisoned(dtype, &pool.output_shape(batch));
            let winners = pair.poisoned(DType::U8, &pool.output_shape(batch));
            let dy = pair.random(dtype, &pool.output_shape(batch), 2);
            let dx = pair.poisoned(dtype, &pool.input_shape(batch));
            let op = |on: &_, [x, y, winners, dy, dx]: [&_; 5]| {
                pool2d::forward(on, &pool, x, y, winners)?;
                pool2d::backward(on, &pool, winners, dy, dx)
            };
            pair.run(op, [&x, &y, &winners, &dy, &dx]);
            pair.same_bits([&y, &winners, &dx]);
        }
    }
}

#[test]
fn layouts_are_converted_without_a_change_of_a_bit() {
    let Some(pair) = Pair::new() else { return };
    for (dtype, [height, width, channels]) in
        each(&[DType::F32, DType::F64, DType::BF16, DType::U8], [[1, 1, 1], [5, 7, 3], [9, 8, 65]])
    {
        let x = pair.random(dtype, &[3, height, width, channels], 1);
        let y = pair.poisoned(dtype, &[3, channels, height, width]);
        let back = pair.poisoned(dtype, &[3, height, width, channels]);
        pair.run(|on, [x, y]| layout::convert(on, ImageLayout::Nchw, x, y), [&x, &y]);
        pair.compare(&y, Promise::Bits);
        pair.run(|on, [y, x]| layout::convert(on, ImageLayout::Nhwc, y, x), [&y, &back]);
        pair.compare(&back, Promise::Bits);
    }
}

#[test]
fn batch_normalization_has_the_processors_bits() {
    let Some(pair) = Pair::new() else { return };
    for (dtype, activation) in each(&STORED, [Activation::None, Activation::Relu]) {
        for [rows, channels] in [[1, 3], [300, 5], [20, 70]] {
            let (wide, config) = (wide(dtype), BatchNorm::new(channels, activation));
            let (x, dy) = (
                pair.random(dtype, &[rows, channels], 1),
                pair.random(dtype, &[rows, channels], 2),
            );
            let [weight, bias, mean] = [3, 4, 5].map(|seed| pair.random(wide, &[channels], seed));
            let var = pair.of(wide, &[channels], &vec![0.75; channels]);
            let [running, sums, moments] =
                [(); 3].map(|()| pair.poisoned(DType::F64, &[config.sums_len()]));
            let gradient_sums = pair.poisoned(DType::F64, &[config.gradient_sums_len()]);
            let [y, dx] = [(); 2].map(|()| pair.poisoned(dtype, &[rows, channels]));
            let (dw, db) = (pair.poisoned(wide, &[channels]), pair.random(wide, &[channels], 6));
            let op = |on: &_, of: [&_; 14]| {
                let (c, [x, dy, w, b, mean, var, running, sums, m, y, grads, dx, dw, db]) =
                    (&config, of);
                batch_norm::running_moments(on, c, mean, var, running)?;
                batch_norm::sums(on, c, x, sums)?;
                batch_norm::moments(on, c, sums, m)?;
                batch_norm::update_running(on, c, m, mean, var)?;
                batch_norm::normalize(on, c, x, m, w, b, y)?;
                batch_norm::gradient_sums(on, c, x, m, w, b, dy, grads)?;
                batch_norm::backward_input(on, c, x, m, w, b, dy, grads, dx)?;
                batch_norm::backward_weight(on, c, grads, dw, db, false)?;
                batch_norm::backward_weight(on, c, grads, dw, db, true)
            };
            let (m, grads) = (&moments, &gradient_sums);
            let written = [&mean, &var, &running, &sums, m, &y, grads, &dx, &dw, &db];
            let [mean, var, running, sums, m, y, grads, dx, dw, db] = written;
            pair.run(
                op,
                [&x, &dy, &weight, &bias, mean, var, running, sums, m, y, grads, dx, dw, db],
            );
            pair.same_bits(written);
        }
    }
}

#[test]
fn selections_have_the_processors_bits() {
    let Some(pair) = Pair::new() else { return };
    for (len, k) in [(1, 1), (300, 7), (1000, 1000), (5000, 260)] {
        let selections: Vec<_> = (0..3)
            .map(|rank| {
                let (x, residual) =
                    (pair.random(DType::F32, &[len], rank), pair.random(DType::F32, &[len], 9));
                let selected = pair.poisoned(DType::I32, &[2 * k]);
                let op = |on: &_, [x, residual, selected]: [&_; 3]| {
                    top_k::select(on, x, residual, selected)
                };
                pair.run(op, [&x, &residual, &selected]);
                pair.same_bits([&selected, &residual]);
                selected
            })
            .collect();
        // Equal magnitudes: the first ones are taken.
        let equal = pair.of(
            DType::F32,
            &[len],
            &(0..len).map(|at| [0.5, -0.5, 0.25][at % 3]).collect::<Vec<_>>(),
        );
        let residual = pair.of(DType::F32, &[len], &vec![0.0; len]);
        let selected = pair.poisoned(DType::I32, &[2 * k]);
        pair.run(|on, [x, r, s]| top_k::select(on, x, r, s), [&equal, &residual, &selected]);
        pair.compare(&selected, Promise::Bits);
        let all = pair.joined(&selections);
        let mean = pair.poisoned(DType::F32, &[len]);
        pair.run(|on, [all, mean]| top_k::scatter_mean(on, all, 3, mean), [&all, &mean]);
        pair.compare(&mean, Promise::Bits);
    }
}
