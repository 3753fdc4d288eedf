//! Norms and scaling against the plain implementation. Also checks that neither threads nor vector
//! instructions change a bit.

use paceline_kernels::{Compute, SimdLevel, norm, reference};
use paceline_memory::{Allocator, Category, DType, Element, Tensor};

/// Numbers between -1 and 1 over many orders of magnitude.
fn numbers(len: usize) -> Vec<f64> {
    let number = |at: usize| {
        let mixed = (at as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 11;
        let unit = mixed as f64 / (1u64 << 52) as f64 - 1.0;
        unit * 10f64.powi(-((at % 7) as i32))
    };
    (0..len).map(number).collect()
}

fn tensor<T: Element>(dtype: DType, elems: &[T]) -> Tensor {
    let tensor = Allocator::new().tensor(dtype, [elems.len()], Category::Data).unwrap();
    tensor.write::<T>().unwrap().copy_from_slice(elems);
    tensor
}

fn computes() -> Vec<Compute> {
    let with = |(level, threads)| {
        Compute::new(threads, Allocator::new()).unwrap().with_simd(level).unwrap()
    };
    let levels = SimdLevel::available().into_iter();
    levels.flat_map(|level| [1, 2, 3].map(|threads| (level, threads))).map(with).collect()
}

/// Lengths around the sizes of lanes and blocks, and of several blocks.
const LENGTHS: [usize; 9] = [0, 1, 15, 16, 17, 4095, 4096, 4097, 40_003];

/// For f64 sums of 40,000 positive numbers in two orders, each with a relative error below 40,000 times
/// 1.1e-16.
const TOLERANCE: f64 = 1e-11;

#[test]
fn sums_of_squares() {
    for len in LENGTHS {
        let doubles = numbers(len);
        let singles: Vec<f32> = doubles.iter().map(|x| *x as f32).collect();
        let cases = [
            (tensor(DType::F32, &singles), reference::sum_of_squares(&singles)),
            (tensor(DType::F64, &doubles), reference::sum_of_squares(&doubles)),
        ];
        for (tensor, expected) in cases {
            let sums: Vec<f64> = computes()
                .iter()
                .map(|compute| norm::sum_of_squares(compute, &tensor).unwrap())
                .collect();
            let off = (sums[0] - expected).abs();
            assert!(off <= TOLERANCE * expected, "{len}: {} and {expected}", sums[0]);
            assert!(sums.iter().all(|sum| sum.to_bits() == sums[0].to_bits()), "{len}: {sums:?}");
        }
    }
}

#[test]
fn squares_that_f32_cannot_hold() {
    let compute = Compute::new(1, Allocator::new()).unwrap();
    let sum = |elems: &[f32]| norm::sum_of_squares(&compute, &tensor(DType::F32, elems)).unwrap();
    assert_eq!(sum(&[1e30, 0.0]), f64::from(1e30f32).powi(2));
    assert!(sum(&[1e-30]) > 0.0);
    assert!(sum(&[1.0, f32::NAN]).is_nan());
    assert_eq!(sum(&[f32::NEG_INFINITY, 1.0]), f64::INFINITY);
}

#[test]
fn scaling() {
    for compute in computes() {
        for len in LENGTHS {
            let mut doubles = numbers(len);
            let mut singles: Vec<f32> = doubles.iter().map(|x| *x as f32).collect();
            let (single, double) = (tensor(DType::F32, &singles), tensor(DType::F64, &doubles));
            norm::scale(&compute, &single, 0.3).unwrap();
            norm::scale(&compute, &double, 0.3).unwrap();
            reference::scale(&mut singles, 0.3);
            reference::scale(&mut doubles, 0.3);
            assert_eq!(*single.read::<f32>().unwrap(), *singles);
            assert_eq!(*double.read::<f64>().unwrap(), *doubles);
        }
    }
}

#[test]
fn integers_are_refused() {
    let compute = Compute::new(1, Allocator::new()).unwrap();
    let numbers = tensor(DType::I64, &[1i64, 2]);
    let error = norm::sum_of_squares(&compute, &numbers).unwrap_err().to_string();
    assert!(error.contains("sum of squares") && error.contains("i64"), "{error}");
    assert!(norm::scale(&compute, &numbers, 2.0).is_err());
}
