//! Compute handles, tensors and comparisons of tests of kernels.
#![allow(dead_code, reason = "each file of tests uses a part")]

use half::{bf16, f16};
use paceline_kernels::linear_cross_entropy::IGNORED;
use paceline_kernels::{Bf16Products, Compute, SimdLevel};
use paceline_memory::{Allocator, Category, DType, Element, Shape, Tensor};

/// Pseudorandom numbers in -1..1 without short cycles, of more digits than bf16 has.
pub fn numbers(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..len).map(next).collect()
}

/// Every SIMD level of this machine, with one and three threads.
pub fn computes() -> Vec<Compute> {
    computes_with(&[1, 3])
}

/// Every SIMD level of this machine, with each of these numbers of threads.
pub fn computes_with(threads: &[usize]) -> Vec<Compute> {
    let new = |threads: &usize| Compute::new(*threads, Allocator::new()).unwrap();
    let of = |level| threads.iter().map(move |threads| new(threads).with_simd(level).unwrap());
    SimdLevel::available().into_iter().flat_map(of).collect()
}

/// Every instruction set of this machine.
pub fn instruction_sets(threads: usize) -> Vec<Compute> {
    let new = || Compute::new(threads, Allocator::new()).unwrap();
    let mut computes: Vec<_> = SimdLevel::available()
        .into_iter()
        .map(|level| {
            new().with_simd(level).unwrap().with_bf16_products(Bf16Products::Widened).unwrap()
        })
        .collect();
    for products in [Bf16Products::Dots, Bf16Products::Amx] {
        match new().with_bf16_products(products) {
            Some(compute) => computes.push(compute),
            None => println!("not tested: this processor has no {products:?}"),
        }
    }
    computes
}

/// The same numbers in f64.
pub fn wide(elems: &[f32]) -> Vec<f64> {
    elems.iter().map(|x| f64::from(*x)).collect()
}

/// A tensor of these elements, in the processor's memory.
pub fn of<T: Element>(elems: &[T], shape: impl Into<Shape>) -> Tensor {
    let tensor = Allocator::new().tensor(T::DTYPE, shape, Category::Data).unwrap();
    tensor.write::<T>().unwrap().copy_from_slice(elems);
    tensor
}

/// A tensor of these elements, rounded to the type.
pub fn tensor(
    compute: &Compute,
    dtype: DType,
    shape: impl Into<Shape>,
    elems: &[impl Copy + Into<f64>],
) -> Tensor {
    let tensor = compute.allocator.tensor(dtype, shape, Category::Data).unwrap();
    assert_eq!(tensor.num_elems(), elems.len());
    write(&tensor, elems);
    tensor
}

/// A result that is not a number wherever a kernel leaves it out.
pub fn poisoned(compute: &Compute, dtype: DType, shape: impl Into<Shape>) -> Tensor {
    let shape: Shape = shape.into();
    tensor(compute, dtype, shape, &vec![f64::NAN; shape.num_elems()])
}

/// Rounds to the type of the tensor. NaN is the largest of the integers.
pub fn write(to: &Tensor, values: &[impl Copy + Into<f64>]) {
    macro_rules! as_type {
        ($T:ty, $round:expr) => {
            to.write::<$T>()
                .unwrap()
                .iter_mut()
                .zip(values)
                .for_each(|(to, x)| *to = $round((*x).into()))
        };
    }
    match to.dtype() {
        DType::F32 => as_type!(f32, |x| x as f32),
        DType::F64 => as_type!(f64, |x| x),
        DType::BF16 => as_type!(bf16, bf16::from_f64),
        DType::F16 => as_type!(f16, f16::from_f64),
        DType::I32 => as_type!(i32, |x: f64| if x.is_nan() { i32::MAX } else { x as i32 }),
        DType::I64 => as_type!(i64, |x: f64| if x.is_nan() { i64::MAX } else { x as i64 }),
        DType::U8 => as_type!(u8, |x: f64| if x.is_nan() { u8::MAX } else { x as u8 }),
    }
}

/// The elements, each exact.
pub fn values(of: &Tensor) -> Vec<f64> {
    macro_rules! as_type {
        ($T:ty, $widen:expr) => {
            of.read::<$T>().unwrap().iter().map(|x| $widen(*x)).collect()
        };
    }
    match of.dtype() {
        DType::F32 => as_type!(f32, f64::from),
        DType::F64 => as_type!(f64, |x| x),
        DType::BF16 => as_type!(bf16, f64::from),
        DType::F16 => as_type!(f16, f64::from),
        DType::I32 => as_type!(i32, f64::from),
        DType::I64 => as_type!(i64, |x| x as f64),
        DType::U8 => as_type!(u8, f64::from),
    }
}

/// Each element may be off by `within`, relative to the largest element or one, and by `rounding`, relative to itself.
#[track_caller]
pub fn assert_close(got: &[f64], want: &[f64], within: f64, rounding: f64, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    let scale = want.iter().fold(1.0f64, |most, x| most.max(x.abs()));
    for (at, (got, want)) in got.iter().zip(want).enumerate() {
        let limit = rounding * want.abs() + within * scale;
        assert!((got - want).abs() <= limit, "{what}[{at}]: {got}, not {want}");
    }
}

/// The output of SwiGLU for rows of gates and values, and the gradient of its input.
pub fn plain_swiglu(x: &[f64], dy: &[f64], columns: usize) -> [Vec<f64>; 2] {
    let (mut y, mut dx) = (vec![0.0; dy.len()], vec![0.0; x.len()]);
    for (e, y) in y.iter_mut().enumerate() {
        let begin = e / columns * 2 * columns + e % columns;
        let (g, u) = (x[begin], x[begin + columns]);
        let s = 1.0 / (1.0 + (-g).exp());
        *y = g * s * u;
        dx[begin] = dy[e] * u * (s + g * s * (1.0 - s));
        dx[begin + columns] = dy[e] * g * s;
    }
    [y, dx]
}

/// The output of an RMS norm of rows, the factor of each row, and the gradients of the input and of the weight.
pub fn plain_rms_norm(x: &[f64], w: &[f64], dy: &[f64], eps: f64) -> [Vec<f64>; 4] {
    let n = w.len();
    let [mut y, mut r, mut dx, mut dw] = [vec![], vec![], vec![], vec![0.0; n]];
    for (x, dy) in x.chunks(n).zip(dy.chunks(n)) {
        let factor = 1.0 / (x.iter().map(|x| x * x).sum::<f64>() / n as f64 + eps).sqrt();
        let dot: f64 = (0..n).map(|j| w[j] * dy[j] * x[j]).sum();
        r.push(factor);
        for j in 0..n {
            y.push(x[j] * factor * w[j]);
            dx.push(factor * w[j] * dy[j] - x[j] * factor.powi(3) * dot / n as f64);
            dw[j] += dy[j] * x[j] * factor;
        }
    }
    [y, r, dx, dw]
}

/// The sums of the loss of a head, and `scale` times the gradients of its inputs and its weight.
pub fn plain_linear_cross_entropy(
    x: &[f64],
    w: &[f64],
    labels: &[i64],
    inputs: usize,
    scale: f64,
) -> ([f64; 3], Vec<f64>, Vec<f64>) {
    let (mut sums, mut dx, mut dw) = ([0.0; 3], vec![0.0; x.len()], vec![0.0; w.len()]);
    for (i, label) in labels.iter().enumerate().filter(|(_, label)| **label != IGNORED) {
        let x = &x[i * inputs..][..inputs];
        let z: Vec<f64> =
            w.chunks(inputs).map(|w| w.iter().zip(x).map(|(w, x)| w * x).sum()).collect();
        let largest = z.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = z.iter().map(|z| (z - largest).exp()).sum();
        let label = *label as usize;
        sums[0] += total.ln() + largest - z[label];
        sums[1] += f64::from(u8::from(z[label] == largest));
        sums[2] += 1.0;
        for (j, z) in z.iter().enumerate() {
            let hit = f64::from(u8::from(j == label));
            let dz = scale * ((z - largest).exp() / total - hit);
            for k in 0..inputs {
                dx[i * inputs + k] += dz * w[j * inputs + k];
                dw[j * inputs + k] += dz * x[k];
            }
        }
    }
    (sums, dx, dw)
}
