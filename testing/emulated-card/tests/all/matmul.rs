//! cuBLASLt's functions: products of all types and transpositions against plain loops, and what is refused.

use crate::common;

use std::ffi::c_void;

use common::cuda::Cuda;
use common::numbers;

const F32: u32 = 0;
const F16: u32 = 2;
const BF16: u32 = 14;
const COMPUTE_32F: u32 = 68;
const COMPUTE_TF32: u32 = 77;
const TRANSA: u32 = 3;
const TRANSB: u32 = 4;
const EPILOGUE: u32 = 7;
const BIAS_POINTER: u32 = 8;
const BATCH_COUNT: u32 = 5;
const BATCH_OFFSET: u32 = 6;

/// A value as an attribute.
fn raw<T>(value: &T) -> (*const c_void, usize) {
    ((&raw const *value).cast(), size_of::<T>())
}

/// A product to try, and what it is tried on.
#[derive(Clone)]
struct Case {
    element: u32,
    element_d: u32,
    compute: u32,
    transposed: [bool; 2],
    /// m, n, k
    size: [usize; 3],
    /// Rows that the columns are longer than they need be.
    padding: usize,
    batch: usize,
    epilogue: u32,
    alpha: f32,
    beta: f32,
}

const PLAIN: Case = Case {
    element: F32,
    element_d: F32,
    compute: COMPUTE_32F,
    transposed: [false, false],
    size: [5, 4, 3],
    padding: 0,
    batch: 1,
    epilogue: 1,
    alpha: 1.0,
    beta: 0.0,
};

fn round(element: u32, x: f32) -> f32 {
    match element {
        F16 => half::f16::from_f32(x).to_f32(),
        BF16 => half::bf16::from_f32(x).to_f32(),
        _ => x,
    }
}

fn bytes(element: u32, values: &[f32]) -> Vec<u8> {
    match element {
        F16 => values.iter().flat_map(|x| half::f16::from_f32(*x).to_le_bytes()).collect(),
        BF16 => values.iter().flat_map(|x| half::bf16::from_f32(*x).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
    }
}

fn values(element: u32, bytes: &[u8]) -> Vec<f32> {
    let pairs = || bytes.chunks_exact(2).map(|b| [b[0], b[1]]);
    match element {
        F16 => pairs().map(|b| half::f16::from_le_bytes(b).to_f32()).collect(),
        BF16 => pairs().map(|b| half::bf16::from_le_bytes(b).to_f32()).collect(),
        _ => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
    }
}

/// Everything of one product on the card.
struct Setup {
    library: usize,
    description: usize,
    /// Of A, B, and of C and D.
    layouts: [usize; 3],
    /// Of A, B, C and D.
    at: [u64; 4],
    bias: u64,
    host: [Vec<f32>; 4],
    ld: [usize; 3],
    stream: usize,
}

fn upload(cuda: &Cuda, bytes: &[u8]) -> u64 {
    let at = cuda.allocate(bytes.len());
    assert_eq!(cuda.cuMemcpyHtoD_v2(at, bytes.as_ptr(), bytes.len()), 0);
    at
}

fn setup(cuda: &Cuda, case: &Case) -> Setup {
    let [m, n, k] = case.size;
    let mut library = 0;
    assert_eq!(cuda.cublasLtCreate(&mut library), 0);
    let mut description = 0;
    assert_eq!(cuda.cublasLtMatmulDescCreate(&mut description, case.compute, F32), 0);
    let set = |which, (value, len)| {
        let status = cuda.cublasLtMatmulDescSetAttribute(description, which, value, len);
        assert_eq!(status, 0, "{}", cuda.fault());
    };
    for (which, transposed) in [TRANSA, TRANSB].into_iter().zip(case.transposed) {
        set(which, raw(&i32::from(transposed)));
    }
    set(EPILOGUE, raw(&case.epilogue));
    let bias_len = if case.epilogue == 512 { n } else { m };
    let bias_values: Vec<f32> =
        numbers(9, bias_len).iter().map(|x| round(case.element_d, *x)).collect();
    let bias = upload(cuda, &bytes(case.element_d, &bias_values));
    if case.epilogue >= 4 {
        set(BIAS_POINTER, raw(&bias));
    }
    let shape = |rows, cols, transposed| if transposed { (cols, rows) } else { (rows, cols) };
    let shapes = [shape(m, k, case.transposed[0]), shape(k, n, case.transposed[1]), (m, n)];
    let elements = [case.element, case.element, case.element_d];
    let ld = shapes.map(|(rows, _)| rows + case.padding);
    let mut layouts = [0; 3];
    for (index, (rows, cols)) in shapes.into_iter().enumerate() {
        let layout = &mut layouts[index];
        let (rows, ld) = (rows as u64, ld[index] as i64);
        assert_eq!(
            cuda.cublasLtMatrixLayoutCreate(layout, elements[index], rows, cols as u64, ld),
            0
        );
        let (batch, offset) = (case.batch as i32, ld * cols as i64);
        for (which, (value, len)) in [(BATCH_COUNT, raw(&batch)), (BATCH_OFFSET, raw(&offset))] {
            assert_eq!(cuda.cublasLtMatrixLayoutSetAttribute(*layout, which, value, len), 0);
        }
    }
    let host = [0, 1, 2].map(|index| {
        let count = ld[index] * shapes[index].1 * case.batch;
        let values = numbers(index as u64 + 1, count);
        values.iter().map(|x| round(elements[index], *x)).collect::<Vec<f32>>()
    });
    let [a, b, c] = [0, 1, 2].map(|index| upload(cuda, &bytes(elements[index], &host[index])));
    let d = cuda.allocate(host[2].len() * if case.element_d == F32 { 4 } else { 2 });
    let [ha, hb, hc] = host;
    let stream = cuda.stream();
    Setup {
        library,
        description,
        layouts,
        at: [a, b, c, d],
        bias,
        host: [ha, hb, hc, bias_values],
        ld,
        stream,
    }
}

fn multiply(cuda: &Cuda, case: &Case, s: &Setup) -> u32 {
    let [a, b, c, d] = s.at;
    let [la, lb, lc] = s.layouts;
    cuda.cublasLtMatmul(
        s.library,
        s.description,
        &case.alpha,
        a,
        la,
        b,
        lb,
        &case.beta,
        c,
        lc,
        d,
        lc,
        std::ptr::null(),
        0,
        0,
        s.stream,
    )
}

fn download(cuda: &Cuda, element: u32, at: u64, count: usize, stream: usize) -> Vec<f32> {
    let mut out = vec![0u8; count * if element == F32 { 4 } else { 2 }];
    assert_eq!(
        cuda.cuMemcpyDtoHAsync_v2(out.as_mut_ptr(), at, out.len(), stream),
        0,
        "{}",
        cuda.fault()
    );
    values(element, &out)
}

/// The largest error of a product, relative to the sum of magnitudes of its terms.
fn error(case: &Case) -> f64 {
    let cuda = Cuda::start(1);
    let s = setup(&cuda, case);
    assert_eq!(multiply(&cuda, case, &s), 0, "{}", cuda.fault());
    let [m, n, k] = case.size;
    let [ha, hb, hc, bias] = &s.host;
    let got = download(&cuda, case.element_d, s.at[3], s.ld[2] * n * case.batch, s.stream);
    let element =
        |host: &[f32], ld: usize, cols: usize, t: bool, batch: usize, i: usize, j: usize| {
            let (i, j) = if t { (j, i) } else { (i, j) };
            f64::from(host[(batch * cols + j) * ld + i])
        };
    let [ta, tb] = case.transposed;
    let (a_cols, b_cols) = (if ta { m } else { k }, if tb { k } else { n });
    let left = |batch, i, p| element(ha, s.ld[0], a_cols, ta, batch, i, p);
    let right = |batch, p, j| element(hb, s.ld[1], b_cols, tb, batch, p, j);
    let mut worst: f64 = 0.0;
    for batch in 0..case.batch {
        for j in 0..n {
            for i in 0..m {
                let terms = (0..k).map(|p| left(batch, i, p) * right(batch, p, j));
                let size: f64 = terms.clone().map(f64::abs).sum::<f64>() + 1.0;
                let mut want = f64::from(case.alpha) * terms.sum::<f64>();
                want += f64::from(case.beta) * element(hc, s.ld[2], n, false, batch, i, j);
                if case.epilogue & 4 != 0 {
                    want += f64::from(bias[i]);
                }
                if case.epilogue & 2 != 0 {
                    want = want.max(0.0);
                }
                let got = f64::from(got[(batch * n + j) * s.ld[2] + i]);
                worst = worst.max((got - want).abs() / size);
            }
        }
    }
    if case.epilogue >= 256 {
        let count = if case.epilogue == 256 { m } else { n };
        let sums = download(&cuda, case.element_d, s.bias, count, s.stream);
        for (i, sum) in sums.into_iter().enumerate() {
            let want: f64 = (0..k)
                .map(|p| if case.epilogue == 256 { left(0, i, p) } else { right(0, p, i) })
                .sum();
            worst = worst.max((f64::from(sum) - want).abs() / (k as f64));
        }
    }
    worst
}

#[test]
fn products_of_every_form() {
    for transposed in [[false, false], [true, false], [false, true], [true, true]] {
        for (element, element_d, tolerance) in
            // f32 sums; results are rounded to 8 and to 11 bits.
            [
                (F32, F32, 1e-6),
                (BF16, BF16, 4e-3),
                (BF16, F32, 1e-6),
                (F16, F16, 5e-4),
                (F16, F32, 1e-6),
            ]
        {
            for (size, padding, batch) in
                [([5, 4, 3], 0, 1), ([17, 9, 33], 3, 3), ([1, 1, 1], 0, 2)]
            {
                let case = Case { element, element_d, transposed, size, padding, batch, ..PLAIN };
                assert!(error(&case) < tolerance, "{transposed:?} {element} {element_d} {size:?}");
                let scaled = Case { alpha: 0.5, beta: -2.0, ..case };
                assert!(error(&scaled) < 2.0 * tolerance, "{transposed:?} {element} {size:?}");
            }
        }
        for epilogue in [2, 4, 6, 256, 512] {
            let case = Case { transposed, epilogue, size: [7, 6, 20], padding: 1, ..PLAIN };
            assert!(error(&case) < 1e-6, "{transposed:?} {epilogue}");
        }
    }
}

#[test]
fn tf32_is_seen() {
    let case = Case { size: [8, 8, 64], ..PLAIN };
    let (f32, tf32) = (error(&case), error(&Case { compute: COMPUTE_TF32, ..case }));
    assert!(f32 < 1e-6 && tf32 > 1e-5 && tf32 < 1e-3, "{f32:e} {tf32:e}");
}

#[test]
fn wrong_products_are_refused() {
    let cuda = Cuda::start(0);
    let case = PLAIN;
    let s = setup(&cuda, &case);
    let [a, b, c, d] = s.at;
    let [la, lb, lc] = s.layouts;
    let layout = |rows, cols, ld| {
        let mut layout = 0;
        assert_eq!(cuda.cublasLtMatrixLayoutCreate(&mut layout, F32, rows, cols, ld), 0);
        layout
    };
    let call = |[a, b, c, d]: [u64; 4], [la, lb, lc, ld]: [usize; 4]| {
        let status = cuda.cublasLtMatmul(
            s.library,
            s.description,
            &1.0,
            a,
            la,
            b,
            lb,
            &1.0,
            c,
            lc,
            d,
            ld,
            std::ptr::null(),
            0,
            0,
            s.stream,
        );
        (status, cuda.fault())
    };
    // A leading dimension that is shorter than a column.
    let (status, why) = call(s.at, [layout(5, 3, 4), lb, lc, lc]);
    assert!(status == 7 && why.contains("leading dimension of A is 4"), "{status} {why}");
    // Operands that do not fit: a transposition that was forgotten.
    let (status, why) = call(s.at, [layout(3, 5, 3), lb, lc, lc]);
    assert!(status == 7 && why.contains("op(A) is 3 x 5"), "{status} {why}");
    // An address between two elements.
    let (status, why) = call([a + 2, b, c, d], [la, lb, lc, lc]);
    assert!(status == 7 && why.contains("of A"), "{status} {why}");
    // A layout that was destroyed.
    let gone = layout(5, 3, 5);
    assert_eq!(cuda.cublasLtMatrixLayoutDestroy(gone), 0);
    assert_eq!(call(s.at, [gone, lb, lc, lc]).0, 7);
    // Types that no card multiplies.
    let mut half = 0;
    assert_eq!(cuda.cublasLtMatrixLayoutCreate(&mut half, BF16, 5, 3, 5), 0);
    assert_eq!(call(s.at, [half, lb, lc, lc]).0, 15);
    // An attribute of the wrong size, an epilogue that is not emulated.
    let set =
        |which, (value, len)| cuda.cublasLtMatmulDescSetAttribute(s.description, which, value, len);
    assert_eq!(set(TRANSA, raw(&0u64)), 7);
    assert_eq!(set(EPILOGUE, raw(&32u32)), 15);

    // Heuristics: the alignment that was promised, and the workspace that was asked for, are held to.
    let mut preference = 0;
    assert_eq!(cuda.cublasLtMatmulPreferenceCreate(&mut preference), 0);
    let (value, len) = raw(&(1u64 << 20));
    assert_eq!(cuda.cublasLtMatmulPreferenceSetAttribute(preference, 1, value, len), 0);
    let (mut result, mut found) = ([0u64; 12], 0);
    let status = cuda.cublasLtMatmulAlgoGetHeuristic(
        s.library,
        s.description,
        la,
        lb,
        lc,
        lc,
        preference,
        1,
        &mut result,
        &mut found,
    );
    assert_eq!((status, found, result[8], result[9] as u32), (0, 1, 4096, 0));
    let workspace = cuda.allocate(4096);
    let chosen = |a, workspace_bytes| {
        let status = cuda.cublasLtMatmul(
            s.library,
            s.description,
            &1.0,
            a,
            la,
            b,
            lb,
            &0.0,
            c,
            lc,
            d,
            lc,
            result.as_ptr(),
            workspace,
            workspace_bytes,
            s.stream,
        );
        (status, cuda.fault())
    };
    let (status, why) = chosen(a, 100);
    assert!(status == 7 && why.contains("needs 4096"), "{why}");
    let (status, why) = chosen(a + 4, 4096);
    assert!(status == 7 && why.contains("not aligned to 256"), "{why}");
    assert_eq!(chosen(a, 4096).0, 0);
    assert_eq!(cuda.cuStreamSynchronize(s.stream), 0);

    // A leading dimension that is longer than the memory: found when the product runs.
    assert_eq!(call(s.at, [layout(5, 3, 6), lb, lc, lc]).0, 0);
    assert_eq!(cuda.cuStreamSynchronize(s.stream), 700);
    assert!(cuda.fault().contains("cublasLtMatmul, column 2 of A"), "{}", cuda.fault());
    assert_eq!(multiply(&cuda, &case, &s), 13);
}

#[test]
fn products_in_graphs_and_uninitialized_operands() {
    let cuda = Cuda::start(4);
    let case = Case { beta: 1.0, ..PLAIN };
    let mut s = setup(&cuda, &case);
    // Accumulates in place: C is D.
    s.at[3] = s.at[2];
    let (mut graph, mut executable) = (0, 0);
    assert_eq!(cuda.cuStreamBeginCapture_v2(s.stream, 0), 0);
    assert_eq!(multiply(&cuda, &case, &s), 0);
    assert_eq!(cuda.cuStreamEndCapture(s.stream, &mut graph), 0);
    assert_eq!(cuda.cuGraphInstantiateWithFlags(&mut executable, graph, 0), 0);
    for _ in 0..3 {
        assert_eq!(cuda.cuGraphLaunch(executable, s.stream), 0);
    }
    let got = download(&cuda, F32, s.at[2], 20, s.stream);
    let [a, b, c, _] = &s.host;
    for (i, got) in got.iter().enumerate() {
        let sum: f32 = (0..3).map(|k| a[k * 5 + i % 5] * b[i / 5 * 3 + k]).sum();
        assert!((got - (c[i] + 3.0 * sum)).abs() < 1e-5);
    }
    s.at[0] = cuda.allocate(60);
    assert_eq!(multiply(&cuda, &case, &s), 0);
    assert_eq!(cuda.cuStreamSynchronize(s.stream), 719);
    assert!(cuda.fault().contains("column 0 of A: reads"), "{}", cuda.fault());
}
