//! Products in bf16, f32 and f64: all orientations, element types, instructions of this machine and numbers of threads, against
//! products in f64 of the operands, which are rounded for bf16.

use crate::common::{instruction_sets, numbers};
use half::bf16;
use paceline_kernels::linear::Activation;
use paceline_kernels::matmul::{self, Destination, Matrix, Multiply, ProductOperand};
use paceline_kernels::{Compute, SimdLevel};
use paceline_memory::{Category, DType};

fn halves(x: &[f32]) -> Vec<bf16> {
    x.iter().copied().map(bf16::from_f32).collect()
}

fn name(compute: &Compute) -> String {
    let threads = compute.threads().count();
    format!("{:?} {:?}, {threads} threads", compute.simd(), compute.bf16_products())
}

/// A product's operands, row-major with a row stride, as f32 and as bf16.
struct Case {
    m: usize,
    n: usize,
    k: usize,
    transposed: (bool, bool),
    strides: (usize, usize),
    a: Vec<f32>,
    b: Vec<f32>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Type {
    F32,
    Bf16,
}
use Type::{Bf16, F32};

impl Case {
    fn new((m, n, k): (usize, usize, usize), transposed: (bool, bool), gap: usize) -> Self {
        let (a_rows, a_columns) = if transposed.0 { (k, m) } else { (m, k) };
        let (b_rows, b_columns) = if transposed.1 { (n, k) } else { (k, n) };
        let strides = (a_columns + gap, b_columns + gap);
        let (a, b) = (numbers(1, a_rows * strides.0), numbers(2, b_rows * strides.1));
        Self { m, n, k, transposed, strides, a, b }
    }

    /// For each element of the product, the exact sum of products of the numbers that `value` makes, and that of their absolute
    /// values.
    fn exact(&self, value: impl Fn(f32) -> f64) -> Vec<(f64, f64)> {
        let values = |x: &[f32]| x.iter().map(|x| value(*x)).collect::<Vec<_>>();
        let (a, b) = (values(&self.a), values(&self.b));
        let steps = |is_turned, stride| if is_turned { (1, stride) } else { (stride, 1) };
        let (a_row, a_column) = steps(self.transposed.0, self.strides.0);
        let (b_row, b_column) = steps(self.transposed.1, self.strides.1);
        let mut sums = vec![(0.0, 0.0); self.m * self.n];
        for (at, (sum, size)) in sums.iter_mut().enumerate() {
            let (i, j) = (at / self.n, at % self.n);
            for p in 0..self.k {
                let product = a[i * a_row + p * a_column] * b[p * b_row + j * b_column];
                *sum += product;
                *size += product.abs();
            }
        }
        sums
    }

    fn single(&self, compute: &Compute) -> Vec<f32> {
        let (m, n, k) = (self.m, self.n, self.k);
        let mut c = vec![0.0; m * n];
        let (a, b) = self.matrices(&self.a, &self.b);
        product::<f32>(compute, (m, n, k), a, b, Destination::new(&mut c[..], m, n), false);
        c
    }

    /// Both operands, of numbers that lie like those of the case.
    fn matrices<'a, T: Copy>(&self, a: &'a [T], b: &'a [T]) -> (Matrix<'a, T>, Matrix<'a, T>) {
        let matrix = |x, (rows, columns), stride, is_turned| {
            if is_turned {
                Matrix::strided(x, columns, rows, stride).transposed()
            } else {
                Matrix::strided(x, rows, columns, stride)
            }
        };
        let (a_dims, b_dims) = ((self.m, self.k), (self.k, self.n));
        (
            matrix(a, a_dims, self.strides.0, self.transposed.0),
            matrix(b, b_dims, self.strides.1, self.transposed.1),
        )
    }

    fn product(
        &self,
        compute: &Compute,
        types: (Type, Type),
        c: Destination<'_>,
        accumulate: bool,
    ) {
        let (a16, b16) = (halves(&self.a), halves(&self.b));
        let (m, n, k) = (self.m, self.n, self.k);
        let ((a, b), (a16, b16)) = (self.matrices(&self.a, &self.b), self.matrices(&a16, &b16));
        let operand = |f, h, ty| match ty {
            F32 => ProductOperand::Real(f),
            Bf16 => ProductOperand::Stored(h),
        };
        let (a, b) = (operand(a, a16, types.0), operand(b, b16, types.1));
        product::<bf16>(compute, (m, n, k), a, b, c, accumulate);
    }
}

/// A product whose scratch memory has numbers in it.
fn product<'a, S: Multiply>(
    compute: &Compute,
    (m, n, k): (usize, usize, usize),
    a: impl Into<ProductOperand<'a, S>>,
    b: impl Into<ProductOperand<'a, S>>,
    c: Destination<'_, S>,
    accumulate: bool,
) {
    let cpu = compute.processor();
    let len = [false, true].map(|is_c_stored| S::scratch_len(cpu, [m, n, k], is_c_stored, true));
    let len = [len[0].max(len[1])];
    let scratch = compute.allocator.tensor(DType::F32, len, Category::Workspace).unwrap();
    let mut scratch = scratch.write::<f32>().unwrap();
    scratch.fill(f32::NAN);
    matmul::product(cpu, a, b, c, accumulate, &mut scratch);
}

const ORIENTATIONS: [(bool, bool); 4] =
    [(false, false), (false, true), (true, false), (true, true)];

/// The largest error of a sum of k products of bf16 in f32. Each product of two bf16 is exact in f32. Each of at most
/// `k + 3` additions (old value, blocks of k and bias among them) rounds once, with a relative error of 2^-24, or
/// without a fused form the product's own rounding, which is exact. So the error is at most `(k + 3) 2^-24 / (1 - (k +
/// 3) 2^-24)` times the sum of the absolute values (Higham, "Accuracy and Stability of Numerical Algorithms", 3.1). The
/// processor's pairs are added in two such roundings.
fn bound(k: usize, size: f64) -> f64 {
    let gamma = (k + 3) as f64 * 2f64.powi(-24);
    gamma / (1.0 - gamma) * size
}

/// Half a unit in the last place of bf16, relative.
const BF16_ROUNDING: f64 = 1.0 / 256.0;

const SIZES: [(usize, usize, usize); 15] = [
    (1, 1, 1),
    (1, 33, 2),
    (2, 1, 33),
    (13, 31, 14),
    (14, 32, 32),
    (15, 33, 31),
    (29, 65, 257),
    (31, 15, 513),
    (33, 257, 255),
    (64, 64, 64),
    (70, 255, 1),
    (257, 13, 65),
    (5, 2100, 30),
    (100, 40, 1030),
    (130, 1100, 512),
];

#[test]
fn every_orientation_type_and_size() {
    let computes: Vec<_> = [1, 3].into_iter().flat_map(instruction_sets).collect();
    for sizes @ (m, n, k) in SIZES {
        for (at, transposed) in ORIENTATIONS.into_iter().enumerate() {
            // Every pair of types meets every orientation, over the sizes.
            let types = [(F32, F32), (Bf16, Bf16), (F32, Bf16), (Bf16, F32)][(at + m + k) % 4];
            let case = Case::new(sizes, transposed, at % 3);
            let exact = case.exact(|x| bf16::from_f32(x).to_f64());
            for compute in &computes {
                let what = format!("{}: {sizes:?} {transposed:?} {types:?}", name(compute));
                let stride = n + 3;
                let old = numbers(3, m * stride);
                let bias = numbers(4, n);
                let mut sums = old.clone();
                case.product(
                    compute,
                    types,
                    Destination::strided(&mut sums[..], m, n, stride),
                    false,
                );
                let mut added = old.clone();
                let c = Destination::strided(&mut added[..], m, n, stride);
                case.product(compute, types, c.with_bias(Some(&bias)), true);
                let mut rounded = halves(&old);
                let c = Destination::strided(&mut rounded[..], m, n, stride);
                let c = c.with_bias(Some(&bias)).with_activation(Activation::Relu);
                case.product(compute, types, c, true);
                for i in 0..m {
                    for j in 0..n {
                        let at = i * stride + j;
                        let (exact, size) = exact[i * n + j];
                        let near = |got: f64, want: f64, error: f64| {
                            assert!(
                                (got - want).abs() <= error,
                                "{what} [{i}, {j}]: {got}, not {want}"
                            );
                        };
                        near(f64::from(sums[at]), exact, bound(k, size));
                        let (start, b) = (f64::from(old[at]), f64::from(bias[j]));
                        let error = bound(k, size + start.abs() + b.abs());
                        near(f64::from(added[at]), exact + start + b, error);
                        let start = bf16::from_f32(old[at]).to_f64();
                        let want = (exact + start + b).max(0.0);
                        let error = bound(k, size + start.abs() + b.abs());
                        near(rounded[at].to_f64(), want, error + (want + error) * BF16_ROUNDING);
                    }
                    for at in i * stride + n..(i + 1) * stride {
                        assert_eq!(sums[at], old[at], "{what}: between the rows");
                        assert_eq!(
                            rounded[at],
                            bf16::from_f32(old[at]),
                            "{what}: between the rows"
                        );
                    }
                }
            }
        }
    }
}

/// The product in the type of the numbers, with bias and ReLU, and added to old numbers: each near the exact one, where `unit` is
/// half the distance from 1 to the next number. A product and its addition are two roundings where there is no fused form.
fn is_near<S>(
    compute: &Compute,
    case: &Case,
    exact: &[(f64, f64)],
    from: fn(f32) -> S,
    to: fn(S) -> f64,
    unit: f64,
) where
    S: Multiply<Real = S> + Copy,
{
    let what = format!("{}: {:?} {:?}", name(compute), (case.m, case.n, case.k), case.transposed);
    let all = |x: &[f32]| x.iter().map(|x| from(*x)).collect::<Vec<S>>();
    let (m, n, k, stride) = (case.m, case.n, case.k, case.n + 3);
    let (a, b, bias, old) =
        (all(&case.a), all(&case.b), all(&numbers(4, n)), all(&numbers(3, m * stride)));
    let (a, b) = case.matrices(&a, &b);
    let (mut cut, mut added) = (old.clone(), old.clone());
    let c = Destination::strided(&mut cut[..], m, n, stride);
    let c = c.with_bias(Some(&bias)).with_activation(Activation::Relu);
    product::<S>(compute, (m, n, k), a, b, c, false);
    let c = Destination::strided(&mut added[..], m, n, stride);
    product::<S>(compute, (m, n, k), a, b, c, true);
    let rounding = (2 * k + 3) as f64 * unit;
    for (at, (exact, size)) in exact.iter().copied().enumerate() {
        let (j, at) = (at % n, at / n * stride + at % n);
        let near = |got: S, want: f64, other: f64| {
            let error = rounding / (1.0 - rounding) * (size + other.abs());
            assert!((to(got) - want).abs() <= error, "{what} [{at}]: {}, not {want}", to(got));
        };
        let (bias, old) = (to(bias[j]), to(old[at]));
        near(cut[at], (exact + bias).max(0.0), bias);
        near(added[at], exact + old, old);
    }
    for (at, old) in old.iter().enumerate().filter(|(at, _)| at % stride >= n) {
        assert_eq!([to(cut[at]), to(added[at])], [to(*old); 2], "{what}: between the rows");
    }
}

#[test]
fn products_of_single_and_double_precision() {
    let computes: Vec<_> = [1, 3].into_iter().flat_map(instruction_sets).collect();
    for sizes @ (_, _, k) in SIZES {
        for (at, transposed) in ORIENTATIONS.into_iter().enumerate() {
            let case = Case::new(sizes, transposed, (at + k) % 3);
            let exact = case.exact(f64::from);
            for compute in &computes {
                let unit = f64::from(f32::EPSILON) / 2.0;
                is_near::<f32>(compute, &case, &exact, |x| x, f64::from, unit);
                is_near::<f64>(compute, &case, &exact, f64::from, |x| x, f64::EPSILON / 2.0);
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_whatever_the_others_are() {
    let sets = [1, 3].map(instruction_sets);
    for (one, three) in sets[0].iter().zip(&sets[1]) {
        // Several blocks of each, which are smaller without instructions for vectors. With three threads, a part has too few
        // columns for panels to be packed one by one.
        let sizes = match one.simd() {
            SimdLevel::Portable => (150, 600, 300),
            _ => (350, 1100, 768),
        };
        for transposed in ORIENTATIONS {
            rows_are_independent(one, three, &Case::new(sizes, transposed, 0));
        }
    }
}

fn rows_are_independent(one: &Compute, three: &Compute, case: &Case) {
    let (m, n, k, transposed) = (case.m, case.n, case.k, case.transposed);
    let whole = |compute: &Compute| {
        let mut c = vec![0.0; m * n];
        case.product(compute, (F32, Bf16), Destination::new(&mut c[..], m, n), false);
        c
    };
    let first = whole(one);
    assert_eq!(first, whole(one), "{}: called again", name(one));
    assert_eq!(first, whole(three), "{}: with one thread", name(three));
    let single = case.single(one);
    assert_eq!(single, case.single(three), "{}: f32 with one thread", name(three));
    let mut rounded = vec![bf16::ZERO; m * n];
    case.product(one, (F32, Bf16), Destination::new(&mut rounded[..], m, n), false);
    assert_eq!(rounded, halves(&first), "{}: rounded once", name(one));
    // Rows and columns of the whole, computed alone.
    for (rows, columns) in [(0..1, 0..n), (3..17, 1..2), (40..97, 7..150), (96..97, 149..150)] {
        let mut part = Case::new((rows.len(), columns.len(), k), transposed, 0);
        for i in rows.clone() {
            for p in 0..k {
                let (from, to) = if transposed.0 {
                    (p * m + i, p * rows.len() + i - rows.start)
                } else {
                    (i * k + p, (i - rows.start) * k + p)
                };
                part.a[to] = case.a[from];
            }
        }
        for j in columns.clone() {
            for p in 0..k {
                let (from, to) = if transposed.1 {
                    (j * k + p, (j - columns.start) * k + p)
                } else {
                    (p * n + j, p * columns.len() + j - columns.start)
                };
                part.b[to] = case.b[from];
            }
        }
        let mut c = vec![0.0; rows.len() * columns.len()];
        let to = Destination::new(&mut c[..], rows.len(), columns.len());
        part.product(one, (F32, Bf16), to, false);
        let of_part = part.single(one);
        for i in rows.clone() {
            let row = (i - rows.start) * columns.len()..(i - rows.start + 1) * columns.len();
            let of_whole = i * n + columns.start..i * n + columns.end;
            let what = format!("{}: row {i}", name(one));
            assert_eq!(c[row.clone()], first[of_whole.clone()], "{what}");
            assert_eq!(of_part[row], single[of_whole], "{what} of f32");
        }
    }
}

#[test]
fn not_a_number_and_infinity_reach_their_sums_only() {
    for compute in [1, 3].into_iter().flat_map(instruction_sets) {
        for transposed in ORIENTATIONS {
            for types in [(F32, F32), (Bf16, Bf16)] {
                let (m, n, k) = (20, 40, 67);
                let mut case = Case::new((m, n, k), transposed, 0);
                let of_a = |i: usize, p: usize| if transposed.0 { p * m + i } else { i * k + p };
                // A signalling NaN whose payload lies in the half that bf16 does not have.
                case.a[of_a(2, 66)] = f32::from_bits(0x7f80_0001);
                case.a[of_a(13, 0)] = f32::INFINITY;
                // Rounds to infinity.
                case.a[of_a(19, 33)] = f32::MAX;
                let mut c = vec![0.0; m * n];
                case.product(&compute, types, Destination::new(&mut c[..], m, n), false);
                let what = format!("{}: {transposed:?} {types:?}", name(&compute));
                for (at, x) in c.iter().enumerate() {
                    match at / n {
                        2 => assert!(x.is_nan(), "{what}: {x}"),
                        13 | 19 => assert!(x.is_infinite(), "{what}: {x}"),
                        _ => assert!(x.is_finite(), "{what}: {x}"),
                    }
                }
                let mut c = vec![bf16::ZERO; m * n];
                let to = Destination::new(&mut c[..], m, n).with_activation(Activation::Relu);
                case.product(&compute, types, to, false);
                assert!(c[2 * n..3 * n].iter().all(|x| x.is_nan()), "{what}: ReLU keeps NaN");
                assert!(c.iter().all(|x| x.is_nan() || *x >= bf16::ZERO), "{what}: after ReLU");
            }
        }
    }
}

#[test]
fn empty_sizes() {
    for compute in instruction_sets(3) {
        let empty: [f32; 0] = [];
        let (a, b) = (Matrix::new(&empty, 2, 0), Matrix::new(&empty, 0, 3));
        let mut c = [bf16::ONE; 6];
        let bias = [1.0, -2.0, 3.0];
        let to = Destination::<bf16>::new(&mut c[..], 2, 3).with_bias(Some(&bias));
        product::<bf16>(&compute, (2, 3, 0), a, b, to, false);
        assert_eq!(c.map(bf16::to_f32), [1.0, -2.0, 3.0, 1.0, -2.0, 3.0]);
        let to = Destination::<bf16>::new(&mut c[..], 2, 3);
        product::<bf16>(&compute, (2, 3, 0), a, b, to, true);
        assert_eq!(c.map(bf16::to_f32), [1.0, -2.0, 3.0, 1.0, -2.0, 3.0]);
        let (a, b) = (Matrix::new(&empty, 0, 3), Matrix::new(&[1.0f32; 6], 3, 2));
        let mut none: [f32; 0] = [];
        let to = Destination::<bf16>::new(&mut none[..], 0, 2);
        product::<bf16>(&compute, (0, 2, 3), a, b, to, false);
    }
}
