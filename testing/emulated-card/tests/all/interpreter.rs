//! Ordinary kernels on the interpreter, against the same computation in Rust.

use crate::common;

use common::bench::Bench;
use common::{numbers, stored_ptx};

/// Seeds of the order of blocks, warps and lanes.
const SEEDS: [u64; 4] = [0, 1, 2, 3];

fn f(x: f32) -> u64 {
    u64::from(x.to_bits())
}

fn bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// The order of `block_sum` for 256 threads.
fn block_sum(values: &[f32]) -> f32 {
    let butterfly = |mut v: Vec<f32>| {
        for distance in [16, 8, 4, 2, 1] {
            v = (0..32).map(|i| v[i] + v[i ^ distance]).collect();
        }
        v[0]
    };
    let mut warps: Vec<f32> = values.chunks(32).map(|w| butterfly(w.to_vec())).collect();
    warps.resize(32, 0.0);
    butterfly(warps)
}

#[test]
fn tree_mean_has_the_bits_of_the_processor() {
    const N: usize = 5003;
    for seed in SEEDS {
        let mut bench = Bench::new(&stored_ptx("ordinary.ptx"));
        bench.seed = seed;
        let parts: Vec<Vec<f32>> = (1..5).map(|s| numbers(s, N)).collect();
        let mut arguments: Vec<u64> = parts.iter().map(|p| bench.upload(p)).collect();
        let out = bench.memory.allocate(4 * N).unwrap();
        arguments.extend([out, N as u64]);
        bench.launch("tree_mean", [7, 1, 1], [256, 1, 1], 0, &arguments).unwrap();
        let [a, b, c, d] = &parts[..] else { unreachable!() };
        let want: Vec<f32> = (0..N).map(|i| ((a[i] + b[i]) + (c[i] + d[i])) / 4.0).collect();
        assert_eq!(bits(&bench.download::<f32>(out, N)), bits(&want));
    }
}

#[test]
fn rms_norm_and_softmax() {
    const ROWS: usize = 5;
    const COLUMNS: usize = 571;
    let mut counts = Vec::new();
    for seed in SEEDS {
        let mut bench = Bench::new(&stored_ptx("ordinary.ptx"));
        bench.seed = seed;
        let (x, w) = (numbers(7, ROWS * COLUMNS), numbers(8, COLUMNS));
        let (dx, dw) = (bench.upload(&x), bench.upload(&w));
        let y = bench.memory.allocate(2 * x.len()).unwrap();
        let scales = bench.memory.allocate(4 * ROWS).unwrap();
        let arguments = [dx, dw, f(1e-5), y, scales, COLUMNS as u64];
        let grid = [ROWS as u32, 1, 1];
        counts.push(bench.launch("rms_norm", grid, [256, 1, 1], 0, &arguments).unwrap());
        let mut want = Vec::new();
        for row in x.chunks(COLUMNS) {
            let part =
                |t: usize| (t..COLUMNS).step_by(256).fold(0.0f32, |s, j| row[j].mul_add(row[j], s));
            let parts: Vec<f32> = (0..256).map(part).collect();
            let scale = 1.0 / (block_sum(&parts) / COLUMNS as f32 + 1e-5).sqrt();
            want.extend(row.iter().zip(&w).map(|(x, w)| bf16(x * scale * w)));
        }
        assert_eq!(bench.download::<u16>(y, x.len()), want);

        let out = bench.memory.allocate(4 * x.len()).unwrap();
        let arguments = [dx, out, COLUMNS as u64];
        bench.launch("softmax", grid, [256, 1, 1], 0, &arguments).unwrap();
        let got = bench.download::<f32>(out, x.len());
        for (got, row) in got.chunks(COLUMNS).zip(x.chunks(COLUMNS)) {
            let sum: f64 = row.iter().map(|x| f64::from(*x).exp()).sum();
            for (got, x) in got.iter().zip(row) {
                // f32 sums of 571 terms of one sign.
                let want = f64::from(*x).exp() / sum;
                assert!((f64::from(*got) / want - 1.0).abs() < 1e-5, "{got} {want}");
            }
        }
    }
    assert!(counts.iter().all(|c| *c == counts[0] && *c > 100_000), "{counts:?}");
}

#[test]
fn transpose_through_shared_memory() {
    for seed in SEEDS {
        let mut bench = Bench::new(&stored_ptx("ordinary.ptx"));
        bench.seed = seed;
        let (rows, columns) = (50usize, 76usize);
        let m = numbers(9, rows * columns);
        let (input, out) = (bench.upload(&m), bench.memory.allocate(4 * m.len()).unwrap());
        let arguments = [input, out, rows as u64, columns as u64];
        // 32 rows of a tile, each by 8 threads with vectors of 4. Only whole vectors are read.
        bench.launch("transpose", [3, 2, 1], [8, 32, 1], 0, &arguments).unwrap();
        let got = bench.download::<f32>(out, m.len());
        for i in 0..rows {
            for j in 0..columns {
                assert_eq!(got[j * rows + i], m[i * columns + j]);
            }
        }
    }
}

#[test]
fn tensor_cores() {
    let mut bench = Bench::new(&stored_ptx("ordinary.ptx"));
    let a: Vec<f32> = (0..256).map(|i| (i % 7) as f32 - 3.0).collect();
    let b: Vec<f32> = (0..128).map(|i| (i % 5) as f32 - 2.0).collect();
    let columns: Vec<u16> = (0..128).map(|i| bf16(b[i % 16 * 8 + i / 16])).collect();
    let (da, db) =
        (bench.upload(&a.iter().map(|x| bf16(*x)).collect::<Vec<u16>>()), bench.upload(&columns));
    let d = bench.memory.allocate(4 * 128).unwrap();
    bench.launch("tensor_core", [1, 1, 1], [32, 1, 1], 0, &[da, db, d]).unwrap();
    let got = bench.download::<f32>(d, 128);
    for i in 0..16 {
        for j in 0..8 {
            let want: f32 = (0..16).map(|k| a[i * 16 + k] * b[k * 8 + j]).sum();
            assert_eq!(got[i * 8 + j], want);
        }
    }
}

#[test]
fn functions_of_the_math_library() {
    const N: usize = 300;
    let mut bench = Bench::new(&stored_ptx("ordinary.ptx"));
    let x: Vec<f32> = numbers(11, N).iter().map(|v| v * 4.0).collect();
    let (dx, out) = (bench.upload(&x), bench.memory.allocate(24 * 4 * N).unwrap());
    bench.launch("functions", [3, 1, 1], [128, 1, 1], 0, &[dx, out, N as u64]).unwrap();
    let got = bench.download::<f32>(out, 24 * N);
    let wants: [fn(f64) -> f64; 24] = [
        f64::exp,
        |v| v.abs().ln(),
        f64::tanh,
        // erf by its series, which converges everywhere.
        |v| {
            let mut term = v;
            let mut sum = v;
            for k in 1..200 {
                term *= -v * v / f64::from(k);
                sum += term / f64::from(2 * k + 1);
            }
            sum * 2.0 / std::f64::consts::PI.sqrt()
        },
        f64::sin,
        f64::cos,
        |v| v.abs().powf(1.5),
        |v| 1.0 / v.abs().sqrt(),
        f64::exp2,
        |v| v.abs().ln_1p(),
        f64::exp_m1,
        f64::cbrt,
        f64::floor,
        f64::round_ties_even,
        f64::trunc,
        f64::round,
        |v| v % f64::from(0.3f32),
        |v| v.abs().sqrt(),
        f64::exp,
        |v| v.abs().ln(),
        |v| v.min(0.25),
        |v| 2.0f64.copysign(v),
        f64::sin,
        f64::exp2,
    ];
    for (k, want) in wants.iter().enumerate() {
        for (got, x) in got[k * N..(k + 1) * N].iter().zip(&x) {
            let want = want(f64::from(*x));
            // The library promises 1 to 4 units in the last place; near zero the absolute error counts.
            let off = (f64::from(*got) - want).abs();
            assert!(off <= 1e-6 * want.abs().max(0.3), "function {k} of {x}: {got}, want {want}");
        }
    }
}

#[test]
fn integers_have_the_bits_of_the_processor() {
    const N: usize = 200;
    let mut bench = Bench::new(&stored_ptx("ordinary.ptx"));
    let x: Vec<u32> =
        numbers(5, N).iter().map(|v| v.to_bits().wrapping_mul(2_654_435_761)).collect();
    let (dx, out) = (bench.upload(&x), bench.memory.allocate(8 * N).unwrap());
    bench.launch("integers", [2, 1, 1], [128, 1, 1], 0, &[dx, out, N as u64]).unwrap();
    let want: Vec<u64> = (0..N).map(|i| fold_integers(x[i], x[(i + 1) % N])).collect();
    assert_eq!(bench.download::<u64>(out, N), want);
}

fn fold_integers(a: u32, b: u32) -> u64 {
    let (sa, sb) = (a as i32, b as i32);
    let (wa, wb) = (u64::from(a), u64::from(b));
    let s = |x: i32| x as i64 as u64;
    let u = u64::from;
    let permuted = {
        let bytes: Vec<u8> = [a.to_le_bytes(), b.to_le_bytes()].concat();
        u32::from_le_bytes([bytes[0], bytes[4], bytes[1], bytes[5]])
    };
    let values = [
        u(a.wrapping_add(b)),
        u(a.wrapping_mul(b)),
        s(sa.wrapping_div(sb | 1)),
        u(a % (b | 1)),
        wa * wb,
        (i64::from(sa) * i64::from(sb)) as u64,
        (wa * wb) >> 32,
        u(((i64::from(sa) * i64::from(sb)) >> 32) as u32),
        ((u128::from(wa << 20 | wb) * u128::from(wb << 13 | wa)) >> 64) as u64,
        u(a >> (b & 31)),
        u((sa >> (b & 31)) as u32),
        u(a.count_ones()),
        u(b.leading_zeros()),
        u(if a == 0 { 0 } else { a.trailing_zeros() + 1 }),
        u(a.reverse_bits()),
        u((wa << 32 | wb).count_ones()),
        u(permuted),
        u((((wb << 32 | wa) << (b & 31)) >> 32) as u32),
        s(sa.min(sb)),
        u(a.max(b)),
        u((a & 0x0ff0) | (!b & 0xf00f) ^ (a << 3)),
        u(u32::from(a.wrapping_add(b) as u8)),
        u(u32::from(a.wrapping_mul(3) as u16)),
        a as i8 as i64 as u64,
        b as i16 as i64 as u64,
        u(sa.unsigned_abs()),
        (wa << 32 | wb) / u(a | 1),
        (wb << 32 | wa) % 1_000_003,
        u((a >> 5) & 0x3ff),
        u((((a << 7) as i32) >> 22) as u32),
        u(u32::from(a == b)),
        if a < b { u64::MAX } else { 7 },
    ];
    let h = values
        .iter()
        .fold(0u64, |h, v| (h ^ v).wrapping_mul(0x0100_0000_01b3).wrapping_add(h >> 29));
    match a & 7 {
        0 => h.wrapping_add(11),
        1 => h ^ wb,
        2 => h.wrapping_mul(3),
        3 => h.wrapping_sub(wa),
        4 => h.wrapping_add(u(b.wrapping_mul(5))),
        5 => h ^ 0x55,
        _ => !h,
    }
}

#[test]
fn conversions_have_the_bits_of_the_processor() {
    const N: usize = 100;
    let mut bench = Bench::new(&stored_ptx("ordinary.ptx"));
    let x = numbers(13, N);
    let (dx, out) = (bench.upload(&x), bench.memory.allocate(16 * 8 * N).unwrap());
    bench.launch("conversions", [1, 1, 1], [128, 1, 1], 0, &[dx, out, N as u64]).unwrap();
    let got = bench.download::<f64>(out, 16 * N);
    for (i, x) in x.iter().enumerate() {
        let v = x * 1000.0;
        let d = f64::from(v);
        let toward_zero = {
            let near = (d / 3.0) as f32;
            if f64::from(near).abs() > (d / 3.0).abs() {
                f32::from_bits(near.to_bits() - 1)
            } else {
                near
            }
        };
        let rounded_bf16 = |v: f32| f64::from(f32::from_bits(u32::from(bf16(v)) << 16));
        let exact = d + f64::from(1e-3f32);
        let down = {
            let near = exact as f32;
            if f64::from(near) > exact { near.next_down() } else { near }
        };
        let unsigned = u32::MAX - v.abs() as u32;
        let wants = [
            f64::from(v as i32),
            f64::from(v.abs() as u32),
            (v * 1e6) as i64 as f64,
            rounded_bf16(v),
            f64::from(half::f16::from_f32(v).to_f32()),
            f64::from(v.round_ties_even()),
            f64::from((d / 3.0) as f32),
            f64::from(toward_zero),
            f64::from((v * 1e12) as i64 as f32),
            f64::from(v as i32 as i8),
            d.mul_add(1e-3, 2.0),
            // 4294967295 - v is less than 2^32: toward zero its low 8 bits go.
            f64::from(unsigned & !0xff),
            d.floor(),
            rounded_bf16(-v) + 2.0 * rounded_bf16(v),
            d.clamp(0.0, 1.0),
            f64::from(down),
        ];
        for (k, want) in wants.into_iter().enumerate() {
            assert_eq!(got[k * N + i], want, "conversion {k} of {v}");
        }
    }
}

#[test]
fn atomics_of_every_order() {
    const N: usize = 1000;
    for seed in SEEDS {
        let mut bench = Bench::new(&stored_ptx("ordinary.ptx"));
        bench.seed = seed;
        let labels: Vec<u8> = (0..N).map(|i| (i * 7 % 251) as u8).collect();
        let weights: Vec<f32> = (0..N).map(|i| (i % 64) as f32 / 64.0).collect();
        let arguments = [
            bench.upload(&labels),
            bench.upload(&weights),
            bench.upload(&[0u32; 16]),
            bench.upload(&[0f32; 16]),
            bench.upload(&[0f64]),
            bench.upload(&[0u64; 2]),
            N as u64,
        ];
        bench.launch("histogram", [3, 1, 1], [96, 1, 1], 0, &arguments).unwrap();
        let (mut counts, mut sums) = ([0u32; 16], [0f32; 16]);
        for (label, weight) in labels.iter().zip(&weights) {
            counts[usize::from(label & 15)] += 1;
            sums[usize::from(label & 15)] += weight;
        }
        assert_eq!(bench.download::<u32>(arguments[2], 16), counts);
        assert_eq!(bench.download::<f32>(arguments[3], 16), sums);
        let total: f64 = weights.iter().map(|w| f64::from(*w)).sum();
        assert_eq!(bench.download::<f64>(arguments[4], 1), [total]);
        assert_eq!(bench.download::<u64>(arguments[5], 2), [N as u64 - 1, N as u64]);
    }
}

#[test]
fn variables_votes_and_barriers_that_count() {
    const T: usize = 64;
    for seed in SEEDS {
        let mut bench = Bench::new(&stored_ptx("ordinary.ptx"));
        bench.seed = seed;
        let x: Vec<u32> = (0..T as u32).map(|i| i * 5 % 17).collect();
        let out = bench.memory.allocate(4 * (T + 1)).unwrap();
        let votes = bench.memory.allocate(16 * T).unwrap();
        let arguments = [bench.upload(&x), out, votes, T as u64];
        for run in 1..3 {
            bench.launch("odds_and_ends", [1, 1, 1], [T as u32, 1, 1], 4 * T, &arguments).unwrap();
            assert_eq!(bench.download::<f32>(out, T + 1)[T], run as f32);
        }
        let got = bench.download::<f32>(out, T);
        let odd = x.iter().filter(|v| *v & 1 == 1).count() as f32;
        let votes = bench.download::<u32>(votes, 4 * T);
        for t in 0..T {
            let table = [1.0, -2.0, 0.5, 8.0][x[t] as usize & 3];
            // stack[(k * 4) % 9] = x + k, so k = 7 i mod 9.
            let stack = (x[t] + x[t] % 9 * 7 % 9) as f32;
            assert_eq!(got[t], table * stack + odd + 0.5);
            let warp = t / 32 * 32;
            let ballot = (0..32).fold(0, |m, l| m | u32::from(x[warp + l] > 7) << l);
            let any = u32::from(x[warp..warp + 32].contains(&3));
            let up = if t % 8 < 3 { x[t] } else { x[t - 3] };
            let down = if t % 32 + 5 > 31 { x[t] } else { x[t + 5] };
            assert_eq!(votes[4 * t..4 * t + 3], [ballot, any + 2, up * 1000 + down]);
            assert!(seed != 0 || votes[4 * t + 3] == 16);
        }
    }
}

/// Not a test of time: a print that says how fast the interpreter is.
#[test]
fn speed() {
    let mut bench = Bench::new(&stored_ptx("ordinary.ptx"));
    const ROWS: usize = 64;
    const COLUMNS: usize = 2048;
    let x = numbers(7, ROWS * COLUMNS);
    let (dx, dw) = (bench.upload(&x), bench.upload(&x[..COLUMNS]));
    let y = bench.memory.allocate(2 * x.len()).unwrap();
    let scales = bench.memory.allocate(4 * ROWS).unwrap();
    let arguments = [dx, dw, f(1e-5), y, scales, COLUMNS as u64];
    let start = std::time::Instant::now();
    let steps = bench.launch("rms_norm", [ROWS as u32, 1, 1], [256, 1, 1], 0, &arguments).unwrap();
    let seconds = start.elapsed().as_secs_f64();
    println!("{:.0} million instructions per second", steps as f64 / seconds / 1e6);
}
