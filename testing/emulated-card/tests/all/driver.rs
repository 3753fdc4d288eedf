//! The driver's functions, as a program calls them: work runs late, in orders that a seed decides, and faults stick.

use crate::common;

use std::ffi::{CStr, CString};

use common::cuda::{Cuda, path};
use common::library::Library;
use common::{numbers, stored_ptx};

fn f(x: f32) -> u64 {
    u64::from(x.to_bits())
}

#[test]
fn every_function_is_exported() {
    let names = "cuInit cuDriverGetVersion cuDeviceGetCount cuDeviceGet cuDeviceGetName cuDeviceTotalMem_v2 \
        cuDeviceGetAttribute cuDeviceGetUuid_v2 cuDeviceGetPCIBusId cuDevicePrimaryCtxRetain \
        cuDevicePrimaryCtxRelease_v2 cuCtxSetCurrent cuCtxGetCurrent cuCtxSynchronize cuMemGetInfo_v2 \
        cuGetErrorName cuGetErrorString cuMemAlloc_v2 cuMemFree_v2 cuMemHostAlloc cuMemFreeHost \
        cuMemHostRegister_v2 cuMemHostUnregister cuMemcpyHtoDAsync_v2 cuMemcpyDtoHAsync_v2 cuMemcpyDtoDAsync_v2 \
        cuMemcpyHtoD_v2 cuMemcpyDtoH_v2 cuMemsetD8Async cuMemsetD32Async cuStreamCreate \
        cuStreamCreateWithPriority cuStreamDestroy_v2 cuStreamSynchronize cuStreamQuery cuStreamWaitEvent \
        cuEventCreate cuEventDestroy_v2 cuEventRecord cuEventQuery cuEventSynchronize cuEventElapsedTime \
        cuEventElapsedTime_v2 cuModuleLoadData cuModuleUnload cuModuleGetFunction cuFuncGetAttribute \
        cuFuncSetAttribute cuLaunchKernel cuStreamBeginCapture_v2 cuStreamEndCapture cuStreamIsCapturing \
        cuGraphInstantiateWithFlags cuGraphLaunch cuGraphDestroy cuGraphExecDestroy cuGetExportTable";
    let library = Library::open(&path()).unwrap();
    for name in names.split_whitespace() {
        assert!(library.symbol(name).is_some(), "{name}");
    }
}

#[test]
fn device_and_context() {
    let cuda = Cuda::start_with(&[
        ("PACELINE_EMULATED_CARDS", "2"),
        ("PACELINE_EMULATED_MEMORY", "65536"),
        ("PACELINE_EMULATED_VERSION", "12040"),
    ]);
    let (mut count, mut version, mut major, mut device) = (0, 0, 0, 0);
    assert_eq!(cuda.cuDeviceGetCount(&mut count), 0);
    assert_eq!(cuda.cuDriverGetVersion(&mut version), 0);
    assert_eq!(cuda.cuDeviceGetAttribute(&mut major, 75, 1), 0);
    assert_eq!((count, version, major), (2, 12040, 9));
    assert_eq!(cuda.cuDeviceGet(&mut device, 2), 101);
    let mut name = [0u8; 32];
    assert_eq!(cuda.cuDeviceGetName(name.as_mut_ptr(), 32, 0), 0);
    assert_eq!(CStr::from_bytes_until_nul(&name).unwrap(), c"emulated card");
    let mut text = std::ptr::null();
    assert_eq!(cuda.cuGetErrorName(700, &mut text), 0);
    // SAFETY: the card answers with a constant that ends with a zero byte.
    assert_eq!(unsafe { CStr::from_ptr(text) }, c"CUDA_ERROR_ILLEGAL_ADDRESS");

    // Out of memory names what is free; the other card has memory of its own.
    let at = cuda.allocate(40_000);
    let mut other = 0;
    assert_eq!(cuda.cuMemAlloc_v2(&mut other, 40_000), 2);
    assert!(cuda.fault().contains("asked for 40000 bytes, 25536 are free"), "{}", cuda.fault());
    let (mut free, mut total, mut context) = (0, 0, 0);
    assert_eq!(cuda.cuMemGetInfo_v2(&mut free, &mut total), 0);
    assert_eq!((free, total), (25_536, 65_536));
    assert_eq!(cuda.cuDevicePrimaryCtxRetain(&mut context, 1), 0);
    assert_eq!(cuda.cuCtxSetCurrent(context), 0);
    let far = cuda.allocate(40_000);
    assert_ne!(at, far);
    // A card does not reach the other one's memory.
    assert_eq!(cuda.cuMemsetD8Async(at, 0, 8, 0), 1);
    assert!(cuda.fault().contains("another card"), "{}", cuda.fault());
    // A thread without a context gets an error.
    assert_eq!(cuda.cuCtxSetCurrent(0), 0);
    assert_eq!(cuda.cuMemAlloc_v2(&mut other, 4), 201);
    assert_eq!(cuda.cuCtxSetCurrent(77), 201);
}

#[test]
fn copies_run_late() {
    let cuda = Cuda::start(0);
    let stream = cuda.stream();
    let at = cuda.allocate(8);
    // Memory that is not pinned is read when the copy is asked for.
    let mut plain = [1.0f32, 2.0];
    assert_eq!(cuda.cuMemcpyHtoDAsync_v2(at, plain.as_ptr().cast(), 8, stream), 0);
    plain[0] = 9.0;
    assert_eq!(cuda.download(at, 2, stream), [1.0, 2.0]);
    assert_eq!(plain[0], 9.0);
    // Pinned memory is read when the copy runs.
    let pinned = cuda.pinned(&[3.0, 4.0]);
    assert_eq!(cuda.cuMemcpyHtoDAsync_v2(at, pinned.as_ptr().cast(), 8, stream), 0);
    pinned[0] = 5.0;
    assert_eq!(cuda.download(at, 2, stream), [5.0, 4.0]);
    // And written then.
    let back = cuda.pinned(&[0.0, 0.0]);
    assert_eq!(cuda.cuMemcpyDtoHAsync_v2(back.as_mut_ptr().cast(), at, 8, stream), 0);
    assert_eq!(back, [0.0, 0.0]);
    assert_eq!(cuda.cuStreamQuery(stream), 600);
    assert_eq!(cuda.cuStreamQuery(stream), 0);
    assert_eq!(back, [5.0, 4.0]);
    // Registered memory counts as pinned.
    let own = [6.0f32, 7.0];
    assert_eq!(cuda.cuMemHostRegister_v2(own.as_ptr() as usize, 8, 0), 0);
    assert_eq!(cuda.cuMemHostRegister_v2(own.as_ptr() as usize + 4, 4, 0), 712);
    assert_eq!(cuda.cuMemcpyHtoDAsync_v2(at, own.as_ptr().cast(), 8, stream), 0);
    assert_eq!(cuda.download(at, 2, stream), [6.0, 7.0]);
    assert_eq!(cuda.cuMemHostUnregister(own.as_ptr() as usize), 0);
    assert_eq!(cuda.cuMemsetD32Async(at + 4, 2.5f32.to_bits(), 1, stream), 0);
    assert_eq!(cuda.download(at, 2, stream), [6.0, 2.5]);
    // Staging memory that is freed before its copy runs.
    assert_eq!(cuda.cuMemcpyHtoDAsync_v2(at, pinned.as_ptr().cast(), 8, stream), 0);
    assert_eq!(cuda.cuMemFreeHost(pinned.as_ptr() as usize), 0);
    assert_eq!(cuda.cuStreamSynchronize(stream), 700);
    assert!(cuda.fault().contains("pinned memory"), "{}", cuda.fault());
}

/// Producer and consumer on two streams. Without the wait some seeds run the consumer first.
fn two_streams(seed: u64, with_wait: bool) -> (u32, Vec<f32>, String) {
    let cuda = Cuda::start(seed);
    let module = cuda.module(&stored_ptx("faults.ptx"));
    let (fill, add) = (cuda.function(module, "fill"), cuda.function(module, "add"));
    let (one, two) = (cuda.stream(), cuda.stream());
    let (x, y) = (cuda.upload(&[1.0; 64]), cuda.allocate(256));
    let event = cuda.event();
    assert_eq!(cuda.launch(fill, 1, 64, one, &[y, f(2.0)]), 0);
    assert_eq!(cuda.cuEventRecord(event, one), 0);
    if with_wait {
        assert_eq!(cuda.cuStreamWaitEvent(two, event, 0), 0);
    }
    assert_eq!(cuda.launch(add, 1, 64, two, &[x, y]), 0);
    let status = cuda.cuStreamSynchronize(two);
    let fault = cuda.fault();
    let values = if status == 0 { cuda.download(x, 64, two) } else { Vec::new() };
    (status, values, fault)
}

#[test]
fn waits_between_streams() {
    for seed in 0..10 {
        assert_eq!(two_streams(seed, true), (0, vec![3.0; 64], String::new()));
        // Nothing runs that is not needed, so a forgotten wait is found by every seed.
        let (status, _, fault) = two_streams(seed, false);
        assert_eq!(status, 719);
        assert!(fault.contains("kernel add") && fault.contains("never written"), "{fault}");
    }
}

#[test]
fn faults_stick_and_have_codes() {
    let cases = [
        ("misaligned", 716),
        ("divergent_barrier", 719),
        ("absent_lane", 719),
        ("race", 719),
        ("shared_overrun", 700),
        ("global_overrun", 700),
        ("through_pointer", 700),
    ];
    for (name, code) in cases {
        let cuda = Cuda::start(1);
        let module = cuda.module(&stored_ptx("faults.ptx"));
        let function = cuda.function(module, name);
        let x = cuda.upload(&[0.5; 64]);
        let stream = cuda.stream();
        assert_eq!(cuda.launch(function, 1, 64, stream, &[x]), 0);
        assert_eq!(cuda.cuStreamSynchronize(stream), code, "{name}");
        assert!(cuda.fault().starts_with(&format!("kernel {name}, block")), "{}", cuda.fault());
        // Nothing works any more.
        let mut at = 0;
        assert_eq!(cuda.cuMemAlloc_v2(&mut at, 4), code);
        assert_eq!(cuda.cuMemFree_v2(x), code);
        assert_eq!(cuda.cuCtxSynchronize(), code);
    }
}

#[test]
fn freed_under_work_and_host_pointers() {
    let cuda = Cuda::start(0);
    let module = cuda.module(&stored_ptx("faults.ptx"));
    let fill = cuda.function(module, "fill");
    let x = cuda.upload(&[0.5; 64]);
    assert_eq!(cuda.launch(fill, 1, 64, 0, &[x, f(1.0)]), 0);
    assert_eq!(cuda.cuMemFree_v2(x), 0);
    assert_eq!(cuda.cuMemFree_v2(x + 4), 1);
    assert_eq!(cuda.cuCtxSynchronize(), 700);
    assert!(cuda.fault().contains("that memory was freed"), "{}", cuda.fault());
    drop(cuda);

    let cuda = Cuda::start(0);
    let module = cuda.module(&stored_ptx("faults.ptx"));
    let fill = cuda.function(module, "fill");
    let host = [0f32; 64];
    assert_eq!(cuda.launch(fill, 1, 64, 0, &[host.as_ptr() as u64, f(1.0)]), 0);
    assert_eq!(cuda.cuCtxSynchronize(), 700);
    assert!(cuda.fault().contains("an address of the host"), "{}", cuda.fault());
    drop(cuda);

    // Memory that an allocator hands out again is uninitialized again, if the allocator says so.
    let cuda = Cuda::start(0);
    let module = cuda.module(&stored_ptx("faults.ptx"));
    let add = cuda.function(module, "add");
    let (x, y) = (cuda.upload(&[1.0; 64]), cuda.upload(&[2.0; 64]));
    assert_eq!(cuda.paceline_emulated_forget(y, 256), 0);
    assert_eq!(cuda.launch(add, 1, 64, 0, &[x, y]), 0);
    assert_eq!(cuda.cuCtxSynchronize(), 719);
}

#[test]
fn stream_zero_is_ordered_with_blocking_streams() {
    for seed in 0..6 {
        let cuda = Cuda::start(seed);
        let module = cuda.module(&stored_ptx("faults.ptx"));
        let fill = cuda.function(module, "fill");
        let mut blocking = 0;
        assert_eq!(cuda.cuStreamCreate(&mut blocking, 0), 0);
        let x = cuda.allocate(256);
        for (k, stream) in [blocking, 0, blocking, 0].into_iter().enumerate() {
            assert_eq!(cuda.launch(fill, 1, 64, stream, &[x, f(k as f32)]), 0);
        }
        assert_eq!(cuda.download(x, 64, 0), [3.0; 64]);
        assert_eq!(cuda.launch(fill, 1, 64, 0, &[x, f(8.0)]), 0);
        assert_eq!(cuda.download(x, 64, blocking), [8.0; 64]);
    }
}

#[test]
fn events_tell_when_the_work_before_them_is_done() {
    let cuda = Cuda::start(2);
    let stream = cuda.stream();
    let at = cuda.upload(&[7.0, 8.0]);
    let back = cuda.pinned(&[0.0, 0.0]);
    let (start, end) = (cuda.event(), cuda.event());
    assert_eq!(cuda.cuEventRecord(start, stream), 0);
    assert_eq!(cuda.cuMemcpyDtoHAsync_v2(back.as_mut_ptr().cast(), at, 8, stream), 0);
    assert_eq!(cuda.cuEventRecord(end, stream), 0);
    let mut time = -1.0;
    assert_eq!(cuda.cuEventElapsedTime(&mut time, start, end), 600);
    // The copy comes after the first event and before the second.
    assert_eq!(cuda.cuEventQuery(start), 600);
    assert_eq!(cuda.cuEventSynchronize(start), 0);
    assert_eq!(cuda.cuEventQuery(start), 0);
    assert_eq!(back, [0.0, 0.0]);
    assert_eq!(cuda.cuEventElapsedTime(&mut time, start, end), 600);
    assert_eq!(cuda.cuEventQuery(end), 600);
    assert_eq!(cuda.cuEventSynchronize(end), 0);
    assert_eq!(cuda.cuEventQuery(end), 0);
    assert_eq!(back, [7.0, 8.0]);
    assert_eq!(cuda.cuEventElapsedTime(&mut time, start, end), 0);
    assert!(time >= 0.0);
}

#[test]
fn threads_share_a_card() {
    let cuda = Cuda::start(3);
    let module = cuda.module(&stored_ptx("faults.ptx"));
    let fill = cuda.function(module, "fill");
    std::thread::scope(|scope| {
        for k in 0..4 {
            let cuda = &cuda;
            scope.spawn(move || {
                let mut context = 0;
                assert_eq!(cuda.cuDevicePrimaryCtxRetain(&mut context, 0), 0);
                assert_eq!(cuda.cuCtxSetCurrent(context), 0);
                let (stream, x) = (cuda.stream(), cuda.allocate(256));
                for round in 0..50 {
                    let value = (100 * k + round) as f32;
                    assert_eq!(cuda.launch(fill, 1, 64, stream, &[x, f(value)]), 0);
                    assert_eq!(cuda.download(x, 64, stream), [value; 64]);
                }
                assert_eq!(cuda.cuStreamDestroy_v2(stream), 0);
                assert_eq!(cuda.cuMemFree_v2(x), 0);
            });
        }
    });
    let counts = cuda.counts();
    assert_eq!((counts[1], counts[3]), (200, 200));
    assert!(counts[0] >= 200 * 64);
    // Nothing is left but the module.
    assert_eq!(counts[4..], [0, 0, 0, 0, 0, 1, 0, 0]);
    assert_eq!(cuda.cuModuleUnload(module), 0);
    assert_eq!(cuda.counts()[9], 0);
    assert_eq!(cuda.launch(fill, 1, 64, 0, &[0, 0]), 400);
}

#[test]
fn modules_and_limits_of_launches() {
    let cuda = Cuda::start(0);
    let load = |text: &str| {
        let (mut module, text) = (0, CString::new(text).unwrap());
        (cuda.cuModuleLoadData(&mut module, text.as_ptr()), cuda.fault())
    };
    let ptx = stored_ptx("ordinary.ptx");
    let (status, why) = load(&ptx.replacen(".version 9.0", ".version 9.5", 1));
    assert_eq!(status, 222, "{why}");
    let (status, why) = load(&ptx.replacen("sm_80", "sm_100", 1));
    assert_eq!(status, 218, "{why}");
    let (status, why) = load(&ptx.replacen("bar.sync", "barsync", 1));
    assert_eq!(status, 218);
    assert!(why.contains("PTX line ") && why.contains("barsync"), "{why}");
    assert_eq!(load("\u{7f}ELF").0, 209);
    let module = cuda.module(&ptx);
    let mut function = 0;
    assert_eq!(cuda.cuModuleGetFunction(&mut function, module, c"nothing".as_ptr()), 500);
    let function = cuda.function(module, "odds_and_ends");
    let x = cuda.upload(&numbers(1, 64));
    let arguments = [x, x, x, 64];
    let pointers: Vec<*const u64> = arguments.iter().map(|a| &raw const *a).collect();
    let launch = |threads, shared| {
        cuda.cuLaunchKernel(function, 1, 1, 1, threads, 1, 1, shared, 0, pointers.as_ptr(), 0)
    };
    assert_eq!(launch(1025, 0), 1);
    assert_eq!(launch(0, 0), 1);
    assert_eq!(launch(64, 60_000), 1);
    assert_eq!(cuda.cuFuncSetAttribute(function, 8, 60_000), 0);
    assert_eq!(launch(64, 60_000), 0);
    assert_eq!(cuda.cuFuncSetAttribute(function, 8, 300_000), 1);
}

#[test]
fn a_missing_staging_wait_is_seen() {
    // One staging buffer for two copies, filled again before the first has run.
    let cuda = Cuda::start(0);
    let stream = cuda.stream();
    let (x, y) = (cuda.allocate(8), cuda.allocate(8));
    let staging = cuda.pinned(&[1.0, 2.0]);
    assert_eq!(cuda.cuMemcpyHtoDAsync_v2(x, staging.as_ptr().cast(), 8, stream), 0);
    staging.copy_from_slice(&[3.0, 4.0]);
    assert_eq!(cuda.cuMemcpyHtoDAsync_v2(y, staging.as_ptr().cast(), 8, stream), 0);
    assert_eq!(cuda.cuStreamSynchronize(stream), 0);
    assert_eq!(cuda.download(x, 2, stream), [3.0, 4.0]);
}
