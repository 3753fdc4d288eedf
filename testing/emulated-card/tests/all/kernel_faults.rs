//! Planted faults in kernels: each is reported, with its class and its line.

use crate::common;

use common::bench::Bench;
use common::stored_ptx;
use paceline_emulated_card::ptx::parse;
use paceline_emulated_card::{Fault, FaultKind};

/// Runs a kernel of 64 threads on 64 initialized floats.
fn run(name: &str, seed: u64) -> Result<u64, Fault> {
    let mut bench = Bench::new(&stored_ptx("faults.ptx"));
    bench.seed = seed;
    bench.limit = 1_000_000;
    let x = bench.upload(&[0.5f32; 64]);
    let y = bench.memory.allocate(256).unwrap();
    let arguments = if bench.kernel(name).params.len() == 2 { vec![x, y] } else { vec![x] };
    bench.launch(name, [1, 1, 1], [64, 1, 1], 0, &arguments)
}

#[test]
fn each_fault_is_told() {
    use FaultKind::*;
    let cases = [
        ("misaligned", Misaligned, "not aligned to 16 bytes"),
        ("divergent_barrier", LaunchFailed, "divergent barrier"),
        ("divergent_warps", LaunchFailed, "divergent barrier: thread 32"),
        ("absent_lane", LaunchFailed, "absent lane"),
        ("unnamed_lane", LaunchFailed, "does not name"),
        ("race", LaunchFailed, "race: "),
        ("no_barrier", LaunchFailed, "shared memory"),
        ("shared_overrun", IllegalAddress, "of 252 bytes of shared memory"),
        ("shared_uninitialized", LaunchFailed, "never written"),
        ("global_overrun", IllegalAddress, "offset 256 of an allocation of 256 bytes"),
        ("global_underrun", IllegalAddress, "never allocated"),
        ("through_pointer", IllegalAddress, "never allocated"),
        ("uninitialized", LaunchFailed, "never written"),
        ("endless", Timeout, "still running after 1000000 instructions"),
    ];
    for (name, kind, words) in cases {
        for seed in 0..6 {
            let fault = run(name, seed).expect_err(name);
            assert_eq!(fault.kind, kind, "{name}: {fault}");
            assert!(fault.message.contains(words), "{name}, seed {seed}: {fault}");
            let place = format!("kernel {name}, block (0, 0, 0), thread (");
            assert!(fault.message.starts_with(&place), "{fault}");
            assert!(fault.message.contains("PTX line ") && fault.message.contains('`'), "{fault}");
        }
    }
}

/// Threads of a warp that read what others have written, without `__syncwarp`, are found by some seeds.
#[test]
fn missing_syncwarp_is_found_by_some_seeds() {
    let results: Vec<Vec<u32>> = (0..20)
        .map(|seed| {
            let mut bench = Bench::new(&stored_ptx("faults.ptx"));
            bench.seed = seed;
            let x = bench.upload(&[0u32; 128]);
            bench.launch("counts_on_step", [1, 1, 1], [32, 1, 1], 0, &[x]).unwrap();
            bench.download(x + 256, 32)
        })
        .collect();
    let in_step: Vec<u32> = (0..32).map(|t| (t ^ 16) + 1).collect();
    assert_eq!(results[0], in_step);
    assert!(results.iter().any(|r| *r != in_step));
}

/// The compiler's `__syncthreads_or` declares predicates by names that the kernel around it may use too.
#[test]
fn what_a_block_within_braces_declares_ends_with_it() {
    let text = ".version 9.0\n.target sm_80\n.address_size 64\n.visible .entry k(\n.param .u64 p\n)\n{\n
        .reg .pred %p<3>;\n.reg .b32 %r<4>;\n.reg .b64 %rd<2>;\nld.param.u64 %rd1, [p];\nmov.u32 %r1, %tid.x;\n
        setp.lt.u32 %p1, %r1, 5;\nmov.u32 %r2, 7;\n
        {\n.reg .pred %p1;\n.reg .b32 %r2;\nsetp.ge.u32 %p1, %r1, 9;\nselp.u32 %r2, 100, 200, %p1;\nmov.u32 %r3, %r2;\n}\n
        add.u32 %r3, %r3, %r2;\n@%p1 add.u32 %r3, %r3, 1000;\nmad.wide.u32 %rd1, %r1, 4, %rd1;\n
        st.global.u32 [%rd1], %r3;\nret;\n}\n";
    let mut bench = Bench::new(text);
    let x = bench.upload(&[0u32; 32]);
    bench.launch("k", [1, 1, 1], [32, 1, 1], 0, &[x]).unwrap();
    let want = |i: u32| if i >= 9 { 107 } else { 207 } + if i < 5 { 1000 } else { 0 };
    assert_eq!(bench.download::<u32>(x, 32), (0..32).map(want).collect::<Vec<u32>>());
}

#[test]
fn what_cannot_run_is_an_error_with_its_line() {
    let head =
        ".version 9.0\n.target sm_80\n.address_size 64\n.visible .entry k(\n.param .u64 p\n)\n{\n";
    let cases = [
        ("call.uni foo, ();", "calls are not emulated"),
        ("fma.rm.f64 %fd1, %fd2, %fd3, %fd4;", "rounding"),
        ("wmma.load.a.sync.aligned.row.m16n16k16.f16 {%r1}, [%rd1];", "not emulated"),
        (
            "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%f1}, {%r1}, {%r2}, {%f1};",
            "not emulated",
        ),
        (
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f1,%f2,%f3,%f4}, {%r1,%r2}, {%r3,%r4}, {%f1,%f2,%f3,%f4};",
            "a fragment of the wrong size",
        ),
        (
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f1,%f2,%f3,%f4}, {%r1,%r2,%r3,%r4}, {%r3,%r4};",
            "3 operands instead of 4",
        ),
        (
            "mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32 {%f1,%f2,%f3,%f4}, {%r1,%r2}, {%r3}, {%f1,%f2,%f3,%f4};",
            "not emulated",
        ),
        ("cvt.rn.tf32.f32 %r1, %f1;", "`.tf32` is not emulated"),
        ("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1,%r2}, [%r3];", "2 registers"),
        ("ldmatrix.sync.aligned.m8n8.x2.b16 {%r1,%r2}, [%rd3];", "not emulated"),
        ("cp.async.ca.shared.global [%r1], [%rd1], 16;", "`.async` is not emulated"),
        ("bra $L__nowhere;", "label `$L__nowhere` does not exist"),
        ("ld.global.u32 %r1, [nothing];", "unknown operand `nothing`"),
        ("mov.u32 %r1, %smid;", "special register"),
        ("add.cc.u32 %r1, %r2, %r3;", "`.cc` is not emulated"),
        ("bar.sync 1, 64;", "part of the block"),
        ("ld.global.u32.v2 %r1, [%rd1];", "vector"),
    ];
    for (line, words) in cases {
        let error = parse(&format!("{head}{line}\nret;\n}}\n")).expect_err(line);
        assert!(error.message.contains(words), "{line}: {error}");
        assert!(error.message.contains("kernel k"), "{error}");
        assert!(error.line == 8 || line.starts_with("bra"), "{line}: {error}");
    }
    let function = "// nothing\n.func foo(.param .b32 a)\n{\nret;\n}\n";
    let error = parse(function).unwrap_err();
    assert!(error.line == 2 && error.message.contains("functions are not emulated"), "{error}");
}
