//! Stream capture: graphs that replay, and calls that a capture refuses.

use crate::common;

use common::cuda::Cuda;
use common::stored_ptx;

const GLOBAL: u32 = 0;
const THREAD_LOCAL: u32 = 1;

fn f(x: f32) -> u64 {
    u64::from(x.to_bits())
}

/// A card with the two kernels `fill` and `add`.
fn start(seed: u64) -> (Cuda, usize, usize) {
    let cuda = Cuda::start(seed);
    let module = cuda.module(&stored_ptx("faults.ptx"));
    let (fill, add) = (cuda.function(module, "fill"), cuda.function(module, "add"));
    (cuda, fill, add)
}

#[test]
fn graphs_replay_with_their_forks() {
    for seed in 0..8 {
        for with_join in [true, false] {
            let (cuda, fill, add) = start(seed);
            let (one, two) = (cuda.stream(), cuda.stream());
            let (x, y) = (cuda.upload(&[0.0; 64]), cuda.allocate(256));
            let (fork, join) = (cuda.event(), cuda.event());
            assert_eq!(cuda.cuStreamBeginCapture_v2(one, THREAD_LOCAL), 0);
            assert_eq!(cuda.launch(add, 1, 64, one, &[x, x]), 0);
            assert_eq!(cuda.cuEventRecord(fork, one), 0);
            assert_eq!(cuda.cuStreamWaitEvent(two, fork, 0), 0);
            assert_eq!(cuda.launch(fill, 1, 64, two, &[y, f(1.0)]), 0);
            assert_eq!(cuda.cuEventRecord(join, two), 0);
            if with_join {
                assert_eq!(cuda.cuStreamWaitEvent(one, join, 0), 0);
            }
            assert_eq!(cuda.launch(add, 1, 64, one, &[x, y]), 0);
            let (mut graph, mut executable, mut status) = (0, 0, 9);
            assert_eq!(cuda.cuStreamIsCapturing(two, &mut status), 0);
            assert_eq!(status, 1);
            let ended = cuda.cuStreamEndCapture(one, &mut graph);
            if !with_join {
                assert_eq!((ended, graph), (904, 0));
                continue;
            }
            assert_eq!(ended, 0);
            assert_eq!(cuda.cuGraphInstantiateWithFlags(&mut executable, graph, 0), 0);
            assert_eq!(cuda.cuGraphDestroy(graph), 0);
            // Nothing ran while it was captured. Each replay doubles and adds one.
            assert_eq!(cuda.download(x, 64, one), [0.0; 64]);
            for _ in 0..3 {
                assert_eq!(cuda.cuGraphLaunch(executable, one), 0);
            }
            assert_eq!(cuda.download(x, 64, one), [7.0; 64]);
            assert_eq!(cuda.cuGraphExecDestroy(executable), 0);
        }
    }
}

#[test]
fn what_a_capture_refuses() {
    type Call = fn(&Cuda, usize, usize) -> u32;
    let calls: [(&str, Call, u32); 9] = [
        ("cuMemAlloc", |cuda, _, _| cuda.cuMemAlloc_v2(&mut 0, 4), 900),
        ("cuMemFree", |cuda, _, _| cuda.cuMemFree_v2(1 << 56), 900),
        ("cuMemHostAlloc", |cuda, _, _| cuda.cuMemHostAlloc(&mut 0, 4, 0), 900),
        ("cuStreamSynchronize", |cuda, stream, _| cuda.cuStreamSynchronize(stream), 900),
        ("cuStreamQuery", |cuda, stream, _| cuda.cuStreamQuery(stream), 900),
        ("cuCtxSynchronize", |cuda, _, _| cuda.cuCtxSynchronize(), 900),
        ("cuEventQuery", |cuda, _, event| cuda.cuEventQuery(event), 900),
        ("waits for an event", |cuda, stream, event| cuda.cuStreamWaitEvent(stream, event, 0), 905),
        (
            "not pinned",
            |cuda, stream, _| cuda.cuMemcpyHtoDAsync_v2(1 << 56, [0u8; 4].as_ptr(), 4, stream),
            900,
        ),
    ];
    for (words, call, code) in calls {
        let (cuda, fill, _) = start(0);
        let x = cuda.allocate(256);
        let (stream, event) = (cuda.stream(), cuda.event());
        assert_eq!(cuda.cuEventRecord(event, stream), 0);
        assert_eq!(cuda.cuStreamSynchronize(stream), 0);
        assert_eq!(cuda.cuStreamBeginCapture_v2(stream, GLOBAL), 0);
        assert_eq!(cuda.launch(fill, 1, 64, stream, &[x, f(1.0)]), 0);
        // The first allocation of the card, as the calls above name it, is `x` or a module's variable.
        assert_eq!(call(&cuda, stream, event), code, "{words}");
        assert!(cuda.fault().contains(words), "{words}: {}", cuda.fault());
        let (mut graph, mut status) = (5, 0);
        assert_eq!(cuda.cuStreamIsCapturing(stream, &mut status), 0);
        assert_eq!(status, 2, "{words}");
        assert_eq!(cuda.launch(fill, 1, 64, stream, &[x, f(1.0)]), 901);
        assert_eq!(cuda.cuStreamEndCapture(stream, &mut graph), 901);
        assert_eq!(graph, 0);
        // Afterwards the stream works as before.
        assert_eq!(cuda.launch(fill, 1, 64, stream, &[x, f(4.0)]), 0);
        assert_eq!(cuda.download(x, 64, stream), [4.0; 64]);
    }
}

#[test]
fn captures_of_threads_streams_and_events() {
    let (cuda, fill, _) = start(0);
    let x = cuda.allocate(256);
    let (stream, event, mut graph) = (cuda.stream(), cuda.event(), 0);
    assert_eq!(cuda.cuStreamEndCapture(stream, &mut graph), 401);
    assert_eq!(cuda.cuStreamBeginCapture_v2(0, GLOBAL), 900);
    assert_eq!(cuda.cuStreamBeginCapture_v2(stream, THREAD_LOCAL), 0);
    assert_eq!(cuda.cuStreamBeginCapture_v2(stream, THREAD_LOCAL), 401);
    assert_eq!(cuda.cuEventRecord(event, stream), 0);
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            let mut context = 0;
            assert_eq!(cuda.cuDevicePrimaryCtxRetain(&mut context, 0), 0);
            assert_eq!(cuda.cuCtxSetCurrent(context), 0);
            // A thread-local capture does not concern other threads, but only its own can end it.
            let mut at = 0;
            assert_eq!(cuda.cuMemAlloc_v2(&mut at, 4), 0);
            let mut graph = 0;
            assert_eq!(cuda.cuStreamEndCapture(stream, &mut graph), 908);
        });
        other.join().unwrap();
    });
    assert_eq!(cuda.launch(fill, 1, 64, stream, &[x, f(1.0)]), 0);
    assert_eq!(cuda.cuStreamEndCapture(stream, &mut graph), 0);
    assert_eq!(cuda.cuEventQuery(event), 907);

    // A blocking stream that is captured forbids work of stream 0.
    let mut blocking = 0;
    assert_eq!(cuda.cuStreamCreate(&mut blocking, 0), 0);
    assert_eq!(cuda.cuStreamBeginCapture_v2(blocking, THREAD_LOCAL), 0);
    assert_eq!(cuda.launch(fill, 1, 64, 0, &[x, f(1.0)]), 906);
    assert_eq!(cuda.cuStreamEndCapture(blocking, &mut graph), 901);

    // Two captures do not merge.
    let other = cuda.stream();
    assert_eq!(cuda.cuStreamBeginCapture_v2(stream, THREAD_LOCAL), 0);
    assert_eq!(cuda.cuStreamBeginCapture_v2(other, THREAD_LOCAL), 0);
    assert_eq!(cuda.cuEventRecord(event, stream), 0);
    assert_eq!(cuda.cuStreamWaitEvent(other, event, 0), 902);
    assert_eq!(cuda.cuStreamEndCapture(other, &mut graph), 901);
    assert_eq!(cuda.cuStreamEndCapture(stream, &mut graph), 901);
}
