//! Functions beside the same loops by hand: the same bits, and the times of both.

use std::hint::black_box;
use std::time::Instant;

use paceline_memory::{Allocator, Category, DType, Tensor};

use super::{Function, input_gradient, parameter_gradients, value};
use crate::simd::vectorized;
use crate::threads::shares;
use crate::{Compute, Op, Real, Result, read, update, write};

const COLUMNS: usize = 256;

/// A function of x, with its constants by `of`, and loops by hand over the same expressions.
macro_rules! function {
    ($type:ident, $name:literal, $forward:ident, $backward:ident, |$x:ident, $of:ident| $value:expr, $slope:expr) => {
        #[derive(Clone)]
        struct $type;

        impl Function<0> for $type {
            const NAME: &'static str = $name;

            fn value<T: Real>(&self, $x: T, _: [T; 0]) -> T {
                let $of = T::from_f64;
                $value
            }

            fn derivatives<T: Real>(&self, $x: T, _: [T; 0]) -> (T, [T; 0]) {
                let $of = T::from_f64;
                ($slope, [])
            }
        }

        #[inline(always)]
        fn $forward(x: &[f32], y: &mut [f32]) {
            let $of = f32::from_f64;
            for (y, $x) in y.iter_mut().zip(x.iter().copied()) {
                *y = $value;
            }
        }

        #[inline(always)]
        fn $backward(x: &[f32], dy: &[f32], dx: &mut [f32]) {
            let $of = f32::from_f64;
            for ((dx, dy), $x) in dx.iter_mut().zip(dy).zip(x.iter().copied()) {
                *dx = $slope * dy;
            }
        }
    };
}

#[inline(always)]
fn sigmoid<T: Real>(x: T) -> T {
    T::from_f64(1.0) / (T::from_f64(1.0) + (-x).fast_exp())
}

function!(Silu, "silu", silu_of, silu_backward_of, |x, of| x / (of(1.0) + (-x).fast_exp()), {
    let s = sigmoid(x);
    s * (of(1.0) + x * (of(1.0) - s))
});

// The approximation of GELU (Hendrycks and Gimpel, 2016) by x / (1 + exp(-2 u)), with u = sqrt(2 / pi) (x + 0.044715 x^3).
function!(
    Gelu,
    "gelu",
    gelu_of,
    gelu_backward_of,
    |x, of| x * sigmoid(of(1.595_769_1) * (x + of(0.044_715) * x * x * x)),
    {
        let s = sigmoid(of(1.595_769_1) * (x + of(0.044_715) * x * x * x));
        s + x * s * (of(1.0) - s) * of(1.595_769_1) * (of(1.0) + of(0.134_145) * x * x)
    }
);

/// x + sin(a x)^2 / a (Ziyin et al., 2020)
#[derive(Clone)]
struct Snake;

impl Function<1> for Snake {
    const NAME: &'static str = "snake";

    fn value<T: Real>(&self, x: T, [a]: [T; 1]) -> T {
        let sin = (a * x).sin();
        x + sin * sin / a
    }

    fn derivatives<T: Real>(&self, x: T, [a]: [T; 1]) -> (T, [T; 1]) {
        let (sin, both) = ((a * x).sin(), (a * x + a * x).sin());
        (T::from_f64(1.0) + both, [(x * both - sin * sin / a) / a])
    }
}

#[inline(always)]
fn snake_of(a: &[f32], x: &[f32], y: &mut [f32]) {
    for (x, y) in x.chunks(a.len()).zip(y.chunks_mut(a.len())) {
        for ((y, x), a) in y.iter_mut().zip(x).zip(a) {
            let sin = (a * x).sin();
            *y = x + sin * sin / a;
        }
    }
}

#[inline(always)]
fn snake_backward_of(a: &[f32], x: &[f32], dy: &[f32], dx: &mut [f32]) {
    let rows = x.chunks(a.len()).zip(dy.chunks(a.len())).zip(dx.chunks_mut(a.len()));
    for ((x, dy), dx) in rows {
        for (((dx, x), dy), a) in dx.iter_mut().zip(x).zip(dy).zip(a) {
            *dx = (1.0 + (a * x + a * x).sin()) * dy;
        }
    }
}

#[inline(always)]
fn snake_gradient_of(a: &[f32], x: &[f32], dy: &[f32], first: usize, d_a: &mut [f32]) {
    for (x, dy) in x.chunks(a.len()).zip(dy.chunks(a.len())) {
        let row = d_a.iter_mut().zip(&x[first..]).zip(&dy[first..]).zip(&a[first..]);
        for (((d_a, x), dy), a) in row {
            let (sin, both) = ((a * x).sin(), (a * x + a * x).sin());
            *d_a += (x * both - sin * sin / a) / a * dy;
        }
    }
}

/// x, dy, y, dx, a and the gradient of a.
type Tensors = [Tensor; 6];

fn hand_forward(compute: &Compute, kind: &'static str, t: &Tensors) -> Result<()> {
    let [x, _, y, _, a, _] = t;
    let operands = (
        read::<f32>("x", x, x.shape()),
        read::<f32>("a", a, a.shape()),
        write::<f32>("y", y, x.shape()),
    );
    compute.launch(Op::new("by_hand"), operands, move |cpu, (x, a, y)| {
        cpu.threads.for_each(shares(cpu, y, COLUMNS, x.len() / COLUMNS, x.len()), |(first, y)| {
            let x = &x[first * COLUMNS..][..y.len()];
            match kind {
                "silu" => vectorized!(cpu.simd, silu_of, x, y),
                "gelu" => vectorized!(cpu.simd, gelu_of, x, y),
                _ => vectorized!(cpu.simd, snake_of, a, x, y),
            }
        });
        Ok(())
    })
}

fn hand_backward(compute: &Compute, kind: &'static str, t: &Tensors) -> Result<()> {
    let [x, dy, _, dx, a, d_a] = t;
    let stated = |name, of| read::<f32>(name, of, of.shape());
    let operands =
        (stated("x", x), stated("dy", dy), stated("a", a), write::<f32>("dx", dx, x.shape()));
    if kind == "snake" {
        let operands = (
            stated("x", x),
            stated("dy", dy),
            stated("a", a),
            update::<f32>("d_a", d_a, a.shape()),
        );
        compute.launch(Op::new("by_hand"), operands, |cpu, (x, dy, a, d_a)| {
            d_a.fill(0.0);
            cpu.threads.for_each(shares(cpu, d_a, 1, COLUMNS, x.len()), |(first, d_a)| {
                vectorized!(cpu.simd, snake_gradient_of, a, x, dy, first, d_a);
            });
            Ok(())
        })?;
    }
    compute.launch(Op::new("by_hand"), operands, move |cpu, (x, dy, a, dx)| {
        cpu.threads.for_each(
            shares(cpu, dx, COLUMNS, x.len() / COLUMNS, x.len()),
            |(first, dx)| {
                let part = first * COLUMNS..first * COLUMNS + dx.len();
                let (x, dy) = (&x[part.clone()], &dy[part]);
                match kind {
                    "silu" => vectorized!(cpu.simd, silu_backward_of, x, dy, dx),
                    "gelu" => vectorized!(cpu.simd, gelu_backward_of, x, dy, dx),
                    _ => vectorized!(cpu.simd, snake_backward_of, a, x, dy, dx),
                }
            },
        );
        Ok(())
    })
}

fn function_forward(compute: &Compute, kind: &'static str, t: &Tensors) -> Result<()> {
    let [x, _, y, _, a, _] = t;
    match kind {
        "silu" => value(compute, &Silu, x, [], y),
        "gelu" => value(compute, &Gelu, x, [], y),
        _ => value(compute, &Snake, x, [a], y),
    }
}

fn function_backward(compute: &Compute, kind: &'static str, t: &Tensors) -> Result<()> {
    let [x, dy, _, dx, a, d_a] = t;
    match kind {
        "silu" => input_gradient(compute, &Silu, x, [], dy, dx),
        "gelu" => input_gradient(compute, &Gelu, x, [], dy, dx),
        _ => {
            parameter_gradients(compute, &Snake, x, [a], dy, [(d_a, false)])?;
            input_gradient(compute, &Snake, x, [a], dy, dx)
        }
    }
}

fn tensors(rows: usize) -> Tensors {
    let memory = Allocator::new();
    let filled = |shape: &[usize], seed: f32, least: f32| {
        let to = memory.tensor(DType::F32, shape, Category::Data).unwrap();
        let values = (0..).map(|at| least + (at as f32 * 0.37 + seed).sin());
        to.write::<f32>().unwrap().iter_mut().zip(values).for_each(|(to, value)| *to = value);
        to
    };
    let [x, dy, y, dx] = [1.0, 2.0, 3.0, 4.0].map(|seed| filled(&[rows, COLUMNS], seed, 0.0));
    [x, dy, y, dx, filled(&[COLUMNS], 5.0, 2.0), filled(&[COLUMNS], 6.0, 0.0)]
}

const KINDS: [&str; 3] = ["silu", "gelu", "snake"];

#[test]
fn functions_have_the_bits_of_loops_by_hand() {
    for (kind, threads) in KINDS.into_iter().flat_map(|kind| [(kind, 1), (kind, 2)]) {
        let compute = Compute::new(threads, Allocator::new()).unwrap();
        let [hand, function] = [(); 2].map(|()| tensors(300));
        hand_forward(&compute, kind, &hand).unwrap();
        hand_backward(&compute, kind, &hand).unwrap();
        function_forward(&compute, kind, &function).unwrap();
        function_backward(&compute, kind, &function).unwrap();
        for (hand, function) in hand.iter().zip(&function) {
            assert_eq!(
                hand.read::<f32>().unwrap()[..],
                function.read::<f32>().unwrap()[..],
                "{kind}"
            );
        }
    }
}

/// Prints a line of JSON for each case: nanoseconds of a call in each round, in which the loops by hand come before and after.
#[test]
#[ignore = "measures times: bench/library.py"]
fn times_of_functions_and_of_loops_by_hand() {
    type Pass = fn(&Compute, &'static str, &Tensors) -> Result<()>;
    let passes: [(&str, [Pass; 2]); 2] = [
        ("forward", [hand_forward, function_forward]),
        ("backward", [hand_backward, function_backward]),
    ];
    for (threads, kib) in
        [1, 2].into_iter().flat_map(|of| [4, 256, 4096, 65536].map(|kib| (of, kib)))
    {
        let compute = Compute::new(threads, Allocator::new()).unwrap();
        let t = tensors(kib * 1024 / 4 / COLUMNS);
        for (kind, (pass, [hand, function])) in
            KINDS.into_iter().flat_map(|kind| passes.map(|pass| (kind, pass)))
        {
            let calls = (2048 / kib).clamp(1, 64);
            let time = |run: Pass| {
                let begin = Instant::now();
                (0..calls).for_each(|_| run(&compute, kind, black_box(&t)).unwrap());
                begin.elapsed().as_nanos() as usize / calls
            };
            let rounds = if kib > 1000 { 7 } else { 15 };
            let round = |_| [hand, function, hand].map(time);
            round(0);
            let rounds: Vec<_> = (0..rounds).map(round).collect();
            println!(
                r#"{{"function": "{kind}", "pass": "{pass}", "threads": {threads}, "kib": {kib}, "ns": {rounds:?}}}"#
            );
        }
    }
}
