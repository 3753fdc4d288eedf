//! The speed of matrix products: `cargo run --release -p paceline-kernels --example products`.
//!
//! Prints GFLOP/s of one thread for each size (m x n x k) and orientation: [`matmul::product`] with operands in bf16, to
//! bf16 and to f32, with operands in f32, and in bf16 another way than the processor's fastest (see
//! [`Bf16Products`]); and all in f32. Beside them stand the processor's peaks, of loops that touch no memory, measured in the same run. Each
//! number is the best of many short repetitions, two of each case in turn, so that work of others on the machine disturbs it little.
//! Arguments choose the cases whose name contains one of them.

use std::time::Instant;

use half::bf16;
use paceline_kernels::matmul::{self, Destination, Matrix, Multiply};
use paceline_kernels::{Bf16Products, Compute, SimdLevel, peak};
use paceline_memory::{Allocator, Category, DType};

const SIZES: [(usize, usize, usize); 5] =
    [(512, 256, 256), (512, 704, 256), (512, 8192, 256), (256, 4096, 4096), (4096, 4096, 256)];

/// Seconds that a case is measured for.
const SECONDS: f64 = 1.5;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let wanted: Vec<String> = std::env::args().skip(1).collect();
    let compute = Compute::new(1, Allocator::new())?;
    // The other way to compute, if the processor has one.
    let mut ways = Bf16Products::ALL.into_iter().filter(|way| *way != compute.bf16_products());
    let other =
        ways.find_map(|way| Compute::new(1, Allocator::new()).ok()?.with_bf16_products(way));
    let mut peaks = Peaks::default();
    println!("GFLOP/s, one thread; bf16: {:?}", compute.bf16_products());
    let heads =
        ["bf16", "to f32", "from f32", "other way", "f32"].map(|head| format!("{head:>10}"));
    println!("{:24}{}", "m x n x k", heads.concat());
    for (m, n, k) in SIZES {
        for (orientation, transposed) in
            [("a b", (false, false)), ("a b^T", (false, true)), ("a^T b", (true, false))]
        {
            let name = format!("{m}x{n}x{k} {orientation}");
            if !wanted.is_empty() && !wanted.iter().any(|part| name.contains(part)) {
                continue;
            }
            // Memory as layers have it: large pages, if there are some.
            let tensor = |dtype, len: usize| compute.allocator.tensor(dtype, [len], Category::Data);
            let [a, b, c] = [m * k, k * n, m * n].map(|len| tensor(DType::F32, len));
            let [a16, b16, c16] = [m * k, k * n, m * n].map(|len| tensor(DType::BF16, len));
            let (a, b, c, a16, b16, c16) = (a?, b?, c?, a16?, b16?, c16?);
            for (whole, half) in [(&a, &a16), (&b, &b16)] {
                let numbers = numbers(whole.num_elems());
                whole.write::<f32>()?.copy_from_slice(&numbers);
                let mut halves = half.write::<bf16>()?;
                halves.iter_mut().zip(&numbers).for_each(|(to, x)| *to = bf16::from_f32(*x));
            }
            let (a, b, a16, b16) =
                (a.read::<f32>()?, b.read::<f32>()?, a16.read::<bf16>()?, b16.read::<bf16>()?);
            let (mut c, mut c16) = (c.write::<f32>()?, c16.write::<bf16>()?);
            let (ma, mb) = (view(&a, m, k, transposed.0), view(&b, k, n, transposed.1));
            let (ma16, mb16) = (view(&a16, m, k, transposed.0), view(&b16, k, n, transposed.1));
            let cpu = compute.processor();
            // Either form of the instructions, and of the result.
            let others = [Some(cpu), other.as_ref().map(Compute::processor)].into_iter().flatten();
            let lens = others.flat_map(|cpu| {
                let of_bf16 =
                    [false, true].map(|is_c_bf16| bf16::scratch_len(cpu, [m, n, k], is_c_bf16));
                [of_bf16[0], of_bf16[1], f32::scratch_len(cpu, [m, n, k], true)]
            });
            let len = [lens.max().unwrap_or(0)];
            let packed = compute.allocator.tensor(DType::F32, len, Category::Workspace)?;
            let mut packed = packed.write::<f32>()?;
            let mut best = [f64::INFINITY; 5];
            let start = Instant::now();
            while start.elapsed().as_secs_f64() < SECONDS {
                let mut product = |which: usize| {
                    let (c, c16) = (&mut c[..], Destination::<bf16>::new(&mut c16[..], m, n));
                    let packed = &mut packed[..];
                    match (which, &other) {
                        (0, _) => matmul::product(cpu, ma16, mb16, c16, false, packed),
                        (1, _) => {
                            let c = Destination::<bf16>::new(c, m, n);
                            matmul::product(cpu, ma16, mb16, c, false, packed);
                        }
                        (2, _) => matmul::product(cpu, ma, mb, c16, false, packed),
                        (3, Some(other)) => {
                            matmul::product(other.processor(), ma16, mb16, c16, false, packed);
                        }
                        (3, None) => {}
                        _ => {
                            let c = Destination::<f32>::new(c, m, n);
                            matmul::product(cpu, ma, mb, c, false, packed);
                        }
                    }
                };
                for (which, best) in best.iter_mut().enumerate() {
                    if which == 3 && other.is_none() {
                        continue;
                    }
                    // The second time its operands are in the caches as far as they fit, as in a loop of one product.
                    for _ in 0..2 {
                        let before = Instant::now();
                        product(which);
                        *best = best.min(before.elapsed().as_secs_f64());
                    }
                }
                peaks.measure(compute.bf16_products());
            }
            let speed = best.map(|seconds| 2.0 * (m * n * k) as f64 / seconds / 1e9);
            println!("{name:24}{}", speed.map(|speed| format!("{speed:10.1}")).concat());
        }
    }
    println!("peak: f32 {:.1}, bf16 {:.1}", peaks.f32, peaks.bf16);
    Ok(())
}

/// A matrix of (rows, columns), stored as it is or transposed.
fn view<T>(elems: &[T], rows: usize, columns: usize, is_transposed: bool) -> Matrix<'_, T> {
    match is_transposed {
        true => Matrix::new(elems, columns, rows).transposed(),
        false => Matrix::new(elems, rows, columns),
    }
}

fn numbers(len: usize) -> Vec<f32> {
    let mut state = 1u32;
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state as f32 / u32::MAX as f32 - 0.5
    };
    (0..len).map(next).collect()
}

/// GFLOP/s of loops that work in registers only, the best so far. Zero where the processor lacks the instructions.
#[derive(Default)]
struct Peaks {
    f32: f64,
    bf16: f64,
}

impl Peaks {
    fn measure(&mut self, products: Bf16Products) {
        self.f32 = self.f32.max(peak::flops_per_s(SimdLevel::detect()) / 1e9);
        self.bf16 = self.bf16.max(peak::bf16_flops_per_s(products) / 1e9);
    }
}
