//! 16-bit arithmetic, `ldmatrix`, and warps whose threads part and meet again.

mod common;

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
