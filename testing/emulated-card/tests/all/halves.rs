//! 16-bit arithmetic, `ldmatrix`, and warps whose threads part and meet again.

use crate::common;

use common::bench::Bench;
use common::{numbers, stored_ptx};
use half::{bf16, f16};

#[test]
fn arithmetic_in_16_bits() {
    const N: usize = 32;
    let mut bench = Bench::new(&stored_ptx("halves.ptx"));
    let (x, y) = (numbers(1, N), numbers(2, N));
    let bits = |v: &[f32]| v.iter().map(|v| f16::from_f32(*v).to_bits()).collect::<Vec<u16>>();
    let (x, y) = (bits(&x), bits(&y));
    let out = bench.memory.allocate(12 * N).unwrap();
    let arguments = [bench.upload(&x), bench.upload(&y), out, N as u64];
    bench.launch("halves", [1, 1, 1], [32, 1, 1], 0, &arguments).unwrap();
    let got = bench.download::<u16>(out, 6 * N);
    for i in 0..N {
        // In f64 sums and products of two halves are exact, and so is a fused product of these sizes.
        let [a, b] = [x[i], y[i]].map(|v| f16::from_bits(v).to_f64());
        let [c, d] = [x[i], y[i]].map(|v| bf16::from_bits(v).to_f64());
        let half = |v: f64| f16::from_f64(v).to_bits();
        let wants = [half(a + b), half(a * b), half(a * b + a)];
        for (k, want) in wants.into_iter().enumerate() {
            assert_eq!(got[k * N + i], want, "operation {k} of {a} and {b}");
        }
        assert_eq!(got[3 * N + i], bf16::from_f64(c * d + c).to_bits());
        assert_eq!([got[4 * N + i], got[5 * N + i]], [half(2.0 * a), half(2.0 * b)]);
    }
}

#[test]
fn matrices_from_shared_memory() {
    for seed in 0..3 {
        let mut bench = Bench::new(&stored_ptx("halves.ptx"));
        bench.seed = seed;
        let x: Vec<u16> = (0..256).collect();
        let (out, transposed) =
            (bench.memory.allocate(512).unwrap(), bench.memory.allocate(512).unwrap());
        let arguments = [bench.upload(&x), out, transposed];
        bench.launch("load_matrix", [1, 1, 1], [32, 1, 1], 0, &arguments).unwrap();
        let out = bench.download::<u32>(out, 128);
        let transposed = bench.download::<u32>(transposed, 128);
        for lane in 0..32 {
            let (g, t) = (lane / 4, lane % 4 * 2);
            for k in 0..4 {
                // Matrices 0 and 1 are above each other, 2 and 3 beside them.
                let (top, left) = (8 * (k % 2), 8 * (k / 2));
                let at = |row: usize, column: usize| ((top + row) * 16 + left + column) as u32;
                assert_eq!(out[lane * 4 + k], at(g, t + 1) << 16 | at(g, t));
                assert_eq!(transposed[lane * 4 + k], at(t + 1, g) << 16 | at(t, g));
            }
        }
    }
}

#[test]
fn threads_part_and_meet_again() {
    const N: usize = 90;
    let steps = |mut v: u32| {
        let mut count = 0;
        while v != 1 {
            v = if v & 1 == 1 { 3 * v + 1 } else { v / 2 };
            count += 1;
        }
        count
    };
    for seed in 0..6 {
        let mut bench = Bench::new(&stored_ptx("halves.ptx"));
        bench.seed = seed;
        let x: Vec<u32> = (0..N as u32).map(|i| i * 37 % 101 + 1).collect();
        let (out, most) =
            (bench.memory.allocate(4 * N).unwrap(), bench.memory.allocate(4 * N).unwrap());
        let arguments = [bench.upload(&x), out, most, N as u64];
        bench.launch("collatz", [3, 1, 1], [32, 1, 1], 0, &arguments).unwrap();
        let mut want: Vec<u32> = x.iter().map(|v| steps(*v)).collect();
        assert_eq!(bench.download::<u32>(out, N), want);
        want.resize(96, 0);
        let most = bench.download::<u32>(most, N);
        for i in 0..N {
            let warp = &want[i / 32 * 32..i / 32 * 32 + 32];
            let same = warp.iter().filter(|v| **v == want[i]).count() as u32;
            assert_eq!(most[i], warp.iter().max().unwrap() * 100 + same);
        }
    }
}

/// A warp of `mma` with the fragments of each lane as its arguments lay them out, one after the other: a, b, and c, which
/// becomes d. The type of a and b is that of a kind of products.
fn product(kind: &str, before: &str) -> String {
    let loads = |name: &str, kind: &str, at: &str, count: usize, skip: usize| -> String {
        (0..count)
            .map(|k| format!("ld.global.{kind} %{name}{}, [%rd{at}+{}];\n", k + 1 + skip, 4 * k))
            .collect()
    };
    let stores: String =
        (0..4).map(|k| format!("st.global.f32 [%rd6+{}], %f{};\n", 4 * k, k + 1)).collect();
    format!(
        ".version 8.0\n.target sm_80\n.address_size 64\n
        .visible .entry product(.param .u64 a, .param .u64 b, .param .u64 c)\n{{\n
        .reg .pred %p<2>;\n.reg .b32 %r<9>;\n.reg .f32 %f<5>;\n.reg .b64 %rd<7>;\n
        ld.param.u64 %rd1, [a];\nld.param.u64 %rd2, [b];\nld.param.u64 %rd3, [c];\nmov.u32 %r7, %tid.x;\n
        mad.wide.u32 %rd4, %r7, 16, %rd1;\nmad.wide.u32 %rd5, %r7, 8, %rd2;\n
        mad.wide.u32 %rd6, %r7, 16, %rd3;\n{}{}{}{before}
        mma.sync.aligned.{kind}.f32 {{%f1,%f2,%f3,%f4}}, {{%r1,%r2,%r3,%r4}},
        {{%r5,%r6}}, {{%f1,%f2,%f3,%f4}};\n{stores}ret;\n}}\n",
        loads("r", "u32", "4", 4, 0),
        loads("r", "u32", "5", 2, 4),
        loads("f", "f32", "6", 4, 0),
    )
}

const F16: &str = "m16n8k16.row.col.f32.f16.f16";
const BF16: &str = "m16n8k16.row.col.f32.bf16.bf16";
const TF32: &str = "m16n8k8.row.col.f32.tf32.tf32";
/// Rounds a and b to TF32.
const ROUND: &str =
    "cvt.rna.tf32.f32 %r1, %r1;\ncvt.rna.tf32.f32 %r2, %r2;\ncvt.rna.tf32.f32 %r3, %r3;\n
    cvt.rna.tf32.f32 %r4, %r4;\ncvt.rna.tf32.f32 %r5, %r5;\ncvt.rna.tf32.f32 %r6, %r6;\n";

/// The fragments of the PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type": which element each lane has.
#[test]
fn products_on_tensor_cores_have_the_documented_fragments() {
    let (a, b, c) = (numbers(3, 256), numbers(4, 128), numbers(5, 128));
    for (name, bits, exact) in [
        (
            F16,
            (|x| f16::from_f32(x).to_bits()) as fn(f32) -> u16,
            (|x| f16::from_bits(x).to_f64()) as fn(u16) -> f64,
        ),
        (BF16, |x| bf16::from_f32(x).to_bits(), |x| bf16::from_bits(x).to_f64()),
    ] {
        let (a, b): (Vec<u16>, Vec<u16>) =
            (a.iter().map(|x| bits(*x)).collect(), b.iter().map(|x| bits(*x)).collect());
        let lanes = |count: usize| {
            (0..32).flat_map(move |lane| (0..count).map(move |i| (lane / 4, lane % 4, i)))
        };
        let a_fragments: Vec<u16> = lanes(8)
            .map(|(group, in_group, i)| {
                let row = if matches!(i, 0 | 1 | 4 | 5) { group } else { group + 8 };
                a[row * 16 + in_group * 2 + (i & 1) + if i >= 4 { 8 } else { 0 }]
            })
            .collect();
        let b_fragments: Vec<u16> = lanes(4)
            .map(|(group, in_group, i)| {
                b[(in_group * 2 + (i & 1) + if i >= 2 { 8 } else { 0 }) * 8 + group]
            })
            .collect();
        let of_c = |(group, in_group, i): (usize, usize, usize)| {
            (if i < 2 { group } else { group + 8 }) * 8 + in_group * 2 + (i & 1)
        };
        let c_fragments: Vec<f32> = lanes(4).map(|at| c[of_c(at)]).collect();
        let mut bench = Bench::new(&product(name, ""));
        let sums = bench.upload(&c_fragments);
        let arguments = [bench.upload(&a_fragments), bench.upload(&b_fragments), sums];
        bench.launch("product", [1, 1, 1], [32, 1, 1], 0, &arguments).unwrap();
        for (got, at) in bench.download::<f32>(sums, 128).into_iter().zip(lanes(4).map(of_c)) {
            let (row, column) = (at / 8, at % 8);
            let sum: f64 = (0..16).map(|k| exact(a[row * 16 + k]) * exact(b[k * 8 + column])).sum();
            assert!(
                (f64::from(got) - (f64::from(c[at]) + sum)).abs() < 1e-6,
                "{name}, element {at}: {got}"
            );
        }
    }
}

/// The same of "Matrix Fragments for mma.m16n8k8" in TF32.
#[test]
fn products_in_tf32_have_the_documented_fragments() {
    let (a, b, c) = (numbers(3, 128), numbers(4, 64), numbers(5, 128));
    let lanes =
        |count: usize| (0..32 * count).map(move |i| (i / count / 4, i / count % 4, i % count));
    let of_a: Vec<f32> = lanes(4).map(|(g, t, i)| a[(g + i % 2 * 8) * 8 + t + i / 2 * 4]).collect();
    let of_b: Vec<f32> = lanes(2).map(|(g, t, i)| b[(t + i * 4) * 8 + g]).collect();
    let of_c = |(g, t, i): (usize, usize, usize)| (g + i / 2 * 8) * 8 + 2 * t + i % 2;
    let c_fragments: Vec<f32> = lanes(4).map(|at| c[of_c(at)]).collect();
    let mut bench = Bench::new(&product(TF32, ROUND));
    let sums = bench.upload(&c_fragments);
    let arguments = [bench.upload(&of_a), bench.upload(&of_b), sums];
    bench.launch("product", [1, 1, 1], [32, 1, 1], 0, &arguments).unwrap();
    // Half of the unit of the last of 10 bits, away from zero.
    let rounded = |x: f32| f64::from(f32::from_bits((x.to_bits() + (1 << 12)) >> 13 << 13));
    for (got, at) in bench.download::<f32>(sums, 128).into_iter().zip(lanes(4).map(of_c)) {
        let (row, column) = (at / 8, at % 8);
        let sum: f64 = (0..8).map(|k| rounded(a[row * 8 + k]) * rounded(b[k * 8 + column])).sum();
        assert!((f64::from(got) - (f64::from(c[at]) + sum)).abs() < 1e-6, "element {at}: {got}");
    }
}

#[test]
fn products_in_tf32_need_rounded_numbers() {
    let mut bench = Bench::new(&product(TF32, ""));
    let (x, third) = (bench.upload(&[0f32; 128]), bench.upload(&[1.0f32 / 3.0; 128]));
    let fault = bench.launch("product", [1, 1, 1], [32, 1, 1], 0, &[x, third, x]).unwrap_err();
    assert!(fault.message.contains("is not rounded to TF32"), "{}", fault.message);
    let mut bench = Bench::new(&product(TF32, ROUND));
    let (nan, infinite) = (bench.upload(&[f32::NAN; 128]), bench.upload(&[f32::INFINITY; 128]));
    let sums = bench.upload(&[0f32; 128]);
    bench.launch("product", [1, 1, 1], [32, 1, 1], 0, &[infinite, infinite, sums]).unwrap();
    assert!(bench.download::<f32>(sums, 128).iter().all(|x| *x == f32::INFINITY));
    bench.launch("product", [1, 1, 1], [32, 1, 1], 0, &[nan, infinite, sums]).unwrap();
    assert!(bench.download::<f32>(sums, 128).iter().all(|x| x.is_nan()));
}

#[test]
fn products_on_tensor_cores_need_all_lanes() {
    let mut bench = Bench::new(&product(BF16, "setp.lt.u32 %p1, %r7, 8;\n@%p1 ret;\n"));
    let x = bench.upload(&[0u32; 128]);
    let fault = bench.launch("product", [1, 1, 1], [32, 1, 1], 0, &[x, x, x]).unwrap_err();
    assert!(fault.message.contains("absent lane"), "{}", fault.message);
    let mut bench = Bench::new(&product(F16, ""));
    let x = bench.upload(&[0u32; 128]);
    let fault = bench.launch("product", [1, 1, 1], [16, 1, 1], 0, &[x, x, x]).unwrap_err();
    assert!(fault.message.contains("absent lane"), "{}", fault.message);
}
