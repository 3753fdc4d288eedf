//! Property tests on random timelines: figures against a count nanosecond by nanosecond, and what must hold
//! for any trace.

use paceline_analysis::hta::{
    Analysis, KernelKind, Options, RankAnalysis, Rounding, StepChoice, analyze, diff,
};
use paceline_analysis::timeline::{
    Annotation, DeviceWork, Kernel, LaneInfo, Launch, MemorySample, Operator, SyncWait, TimeRange,
    Timeline, TrackId,
};
use proptest::prelude::*;
use proptest::sample::select;

/// An event: name, start and duration in nanoseconds, and a number that varies its other fields.
type Piece = (&'static str, i64, i64, u32);

const KERNELS: [&str; 7] = [
    "gemm",
    "ncclDevKernel_AllReduce_Sum",
    "Memcpy HtoD (Pinned -> Device)",
    "Memset (Device)",
    "Stream Sync",
    "Stream Wait Event",
    "Context Sync",
];
const CALLS: [&str; 5] = [
    "cudaLaunchKernel",
    "cudaMemcpyAsync",
    "cudaStreamSynchronize",
    "cudaEventRecord",
    "cudaStreamWaitEvent",
];
const SPANS: [&str; 6] =
    ["ProfilerStep#1", "ProfilerStep#2", "ProfilerStep#3", "forward", "backward", "grad_sync"];
const OPERATORS: [&str; 4] = ["aten::mm", "c10d::allreduce_", "gloo:all_reduce", "Optimizer.step"];

/// Events with times so close together that many overlap, touch or coincide.
fn pieces(names: &'static [&'static str], most: usize) -> impl Strategy<Value = Vec<Piece>> {
    let piece = (select(names), 0i64..300, 0i64..60, 0u32..8);
    prop::collection::vec(piece, 0..most)
}

fn timeline(
    kernels: Vec<Piece>,
    calls: Vec<Piece>,
    spans: Vec<Piece>,
    operators: Vec<Piece>,
) -> Timeline {
    let lane = |tid: &str| LaneInfo { pid: "1".into(), tid: tid.into(), name: None };
    let mut timeline = Timeline {
        source: "chance".into(),
        rank: Some(0),
        lanes: vec![lane("0"), lane("1")],
        ..Timeline::default()
    };
    let time = |&(_, start_ns, dur_ns, _): &Piece| TimeRange { start_ns, dur_ns };
    let lane = |&(.., number): &Piece| TrackId(number % 2);
    for piece in &kernels {
        let name = timeline.names.intern(piece.0);
        let work = match piece.0 {
            "Stream Sync" | "Stream Wait Event" | "Context Sync" => DeviceWork::Sync,
            name if name.starts_with("Memcpy") => DeviceWork::Copy,
            _ => DeviceWork::Kernel,
        };
        let stream = if piece.0 == "Context Sync" { -1 } else { i64::from(piece.3 % 3) };
        if piece.0 == "Stream Wait Event" {
            let kernel = timeline.kernels.len() as u32;
            timeline.sync_waits.push(SyncWait { kernel, stream: 1, record: u64::from(piece.3) });
        }
        timeline.kernels.push(Kernel {
            name,
            work,
            time: time(piece),
            lane: lane(piece),
            stream,
            correlation: (piece.3 < 7).then_some(u64::from(piece.3)),
            bytes: Some(100),
            bandwidth_gb_s: Some(0.1 * piece.3 as f32),
            collective: None,
        });
    }
    for piece in &calls {
        let name = timeline.names.intern(piece.0);
        let correlation = Some(u64::from(piece.3));
        let (time, lane) = (time(piece), lane(piece));
        timeline.launches.push(Launch { name, time, lane, correlation });
    }
    for piece in &spans {
        let (name, is_device) = (timeline.names.intern(piece.0), piece.3 == 7);
        // Steps and the spans in them are on one thread.
        let lane = TrackId(0);
        timeline.annotations.push(Annotation { name, time: time(piece), lane, is_device });
    }
    for piece in &operators {
        let name = timeline.names.intern(piece.0);
        let (time, lane) = (time(piece), lane(piece));
        timeline.operators.push(Operator { name, time, lane, collective: None });
        timeline.memory.push(MemorySample {
            at_ns: piece.1,
            allocated_bytes: piece.2 as u64,
            reserved_bytes: 60,
            device_type: 0,
            delta_bytes: 0,
        });
    }
    timeline
}

fn any_timeline() -> impl Strategy<Value = Timeline> {
    let parts =
        (pieces(&KERNELS, 25), pieces(&CALLS, 25), pieces(&SPANS, 8), pieces(&OPERATORS, 12));
    parts.prop_map(|(kernels, calls, spans, operators)| timeline(kernels, calls, spans, operators))
}

fn options(rounding: Rounding, include_last_step: bool) -> Options {
    Options { rounding, include_last_step, ..Options::default() }
}

/// Checks what holds for every rank.
fn check(rank: &RankAnalysis, rounding: Rounding) {
    let temporal = rank.temporal;
    let sum = temporal.idle_ns + temporal.compute_ns + temporal.non_compute_ns;
    assert_eq!(sum, temporal.kernel_time_ns);
    let kernels: i64 = rank.kernels.iter().map(|kernel| kernel.sum_ns).sum();
    let kinds: i64 = rank.kinds.iter().map(|of| of.1).sum();
    if rounding == Rounding::Exact {
        assert!(temporal.idle_ns >= 0 && temporal.compute_ns >= 0 && temporal.non_compute_ns >= 0);
        assert!(kinds <= temporal.kernel_time_ns - temporal.idle_ns && kinds <= kernels);
        assert!(rank.overlap.pctg().is_none_or(|pctg| (0.0..=100.0).contains(&pctg)));
        if let Some(path) = &rank.critical_path {
            assert_eq!(path.edges.iter().map(|edge| edge.dur_ns).sum::<i64>(), path.total_ns);
            assert_eq!(path.by_bound.iter().map(|of| of.1).sum::<i64>(), path.total_ns);
            assert_eq!(path.by_name.iter().map(|of| of.time_ns).sum::<i64>(), path.total_ns);
        }
    }
    for queue in &rank.queues {
        let last = queue.series.last().map(|point| point.value);
        assert_eq!(last, Some(0.0), "every kernel that was launched has begun");
    }
}

proptest! {
    #[test]
    fn whatever_a_trace_says_is_analyzed(timeline in any_timeline()) {
        let timelines = [timeline];
        for rounding in [Rounding::Exact, Rounding::Hta] {
            for include_last_step in [false, true] {
                let options = options(rounding, include_last_step);
                if let Ok(Analysis { ranks, .. }) = analyze(&timelines, &options) {
                    check(&ranks[0], rounding);
                }
                for steps in [StepChoice::First, StepChoice::All, StepChoice::One(2)] {
                    if let Ok(same) = diff(&timelines, &timelines, &steps, &options) {
                        let is_same = |row: &paceline_analysis::hta::DiffRow| {
                            row.control_calls == row.test_calls
                                && row.control_ns == row.test_ns
                                && row.control_calls > 0
                        };
                        prop_assert!(same.rows.iter().all(is_same));
                    }
                }
            }
        }
    }

    #[test]
    fn sets_of_time_agree_with_counting_nanoseconds(kernels in pieces(&KERNELS[..4], 30)) {
        let timeline = timeline(kernels.clone(), vec![], vec![], vec![]);
        let Ok(analysis) = analyze(&[timeline], &Options::default()) else {
            prop_assert!(kernels.is_empty());
            return Ok(());
        };
        let runs = |at: i64, kind: KernelKind| {
            kernels.iter().any(|&(name, start, dur, _)| {
                KernelKind::of_name(name) == kind && start <= at && at < start + dur
            })
        };
        use KernelKind::{Communication, Computation, Memory};
        let count = |is: &dyn Fn(i64) -> bool| (0..400).filter(|&at| is(at)).count() as i64;
        let rank = &analysis.ranks[0];
        prop_assert_eq!(rank.temporal.compute_ns, count(&|at| runs(at, Computation)));
        prop_assert_eq!(rank.overlap.communication_ns, count(&|at| runs(at, Communication)));
        let both = |at| runs(at, Communication) && runs(at, Computation);
        prop_assert_eq!(rank.overlap.both_ns, count(&both));
        for (kinds, time_ns) in &rank.kinds {
            let exactly = |at| {
                [Computation, Communication, Memory]
                    .iter()
                    .all(|&kind| runs(at, kind) == kinds.contains(&kind))
            };
            prop_assert_eq!(*time_ns, count(&exactly), "{:?}", kinds);
        }
        let first = kernels.iter().map(|of| of.1).min().unwrap_or(0);
        let last = kernels.iter().map(|of| of.1 + of.2).max().unwrap_or(0);
        let idle = (first..last).filter(|&at| {
            ![Computation, Communication, Memory].iter().any(|&kind| runs(at, kind))
        });
        prop_assert_eq!(rank.temporal.idle_ns, idle.count() as i64);
    }

    #[test]
    fn parts_of_steps_add_up(spans in pieces(&SPANS[3..], 12)) {
        let mut all = spans;
        all.extend([("ProfilerStep#1", 10, 90, 0), ("ProfilerStep#2", 120, 100, 0)]);
        all.push(("ProfilerStep#3", 220, 50, 0));
        let operators = vec![("aten::mm", 10, 5, 0)];
        let timeline = timeline(vec![], vec![], all, operators);
        let analysis = analyze(&[timeline], &Options::default()).unwrap();
        let anatomy = analysis.ranks[0].anatomy.as_ref().unwrap();
        prop_assert_eq!(anatomy.steps.len(), 2);
        for step in &anatomy.steps {
            let sum: i64 = step.parts.iter().map(|part| part.1).sum();
            prop_assert_eq!(sum, step.step.time.dur_ns);
        }
    }
}
