//! What an operation costs besides its arithmetic: `cargo run --release -p paceline-kernels --example launches`.
//!
//! Prints nanoseconds of small operations on one thread: the shortest mean of many rounds, since other work on the machine only
//! makes a round longer.

use std::time::Instant;

use paceline_kernels::linear::Activation;
use paceline_kernels::optimizer::{self, AdamW, Numbers};
use paceline_kernels::{Compute, elementwise, linear, rms_norm};
use paceline_memory::{Allocator, Category, DType, Tensor};

/// Operations of a round, and rounds.
const OPERATIONS: u32 = 2_000;
const ROUNDS: u32 = 200;

fn main() -> paceline_kernels::Result<()> {
    let compute = Compute::new(1, Allocator::new())?;
    let tensor = |dims: &[usize]| -> Tensor {
        let tensor = compute.allocator.tensor(DType::F32, dims, Category::Data).expect("memory");
        tensor.fill_zero().expect("nobody uses it");
        tensor
    };
    let (x, y) = (tensor(&[16]), tensor(&[16]));
    let [p, g, m, v] = [(); 4].map(|()| tensor(&[16]));
    let (input, weight, bias, output) =
        (tensor(&[2, 4]), tensor(&[4, 4]), tensor(&[4]), tensor(&[2, 4]));
    let (rows, scale, normed, r) =
        (tensor(&[4, 16]), tensor(&[16]), tensor(&[4, 16]), tensor(&[4]));
    let adamw = AdamW { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01 };
    let operations: [(&str, &dyn Fn() -> paceline_kernels::Result<()>); 6] = [
        ("add, 16 elements", &|| elementwise::add(&compute, &x, &y)),
        ("relu, 16 elements", &|| elementwise::relu(&compute, &x, &y)),
        ("divide, 16 elements", &|| elementwise::divide(&compute, &x, 3.0)),
        ("adamw, 16 elements", &|| {
            let numbers = Numbers::Here(adamw.numbers(1, 1.0));
            optimizer::adamw(&compute, numbers, &p, &g, &m, &v)
        }),
        ("linear, 2 x 4 x 4", &|| {
            linear::forward(&compute, &input, &weight, Some(&bias), Activation::None, &output)
        }),
        ("rms_norm, 4 x 16", &|| rms_norm::forward(&compute, &rows, &scale, 1e-5, &normed, &r)),
    ];
    for (name, operation) in operations {
        let mut best = f64::INFINITY;
        for _ in 0..ROUNDS {
            let begin = Instant::now();
            for _ in 0..OPERATIONS {
                operation()?;
            }
            best = best.min(begin.elapsed().as_secs_f64() * 1e9 / f64::from(OPERATIONS));
        }
        println!("{name:24}{best:8.1} ns");
    }
    Ok(())
}
