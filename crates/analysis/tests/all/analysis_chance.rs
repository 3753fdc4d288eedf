//! Property tests on random timelines: figures against a count nanosecond by nanosecond, and what must hold
//! for any trace.

use crate::common::{self, Build, Us, us};
use paceline_analysis::hta::{
    Analysis, KernelKind, Options, RankAnalysis, Rules, StepChoice, analyze, diff,
};
use paceline_analysis::timeline::{DeviceWork, Timeline, TrackId};
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

/// A time in nanoseconds.
#[derive(Clone, Copy)]
struct Ns(i64);

impl Us for Ns {
    fn ns(self) -> i64 {
        self.0
    }
}

fn timeline(
    kernels: Vec<Piece>,
    calls: Vec<Piece>,
    spans: Vec<Piece>,
    operators: Vec<Piece>,
) -> Timeline {
    let mut of = common::timeline(0);
    for (name, start, dur, number) in kernels {
        let is_sync = name.starts_with("Stream ") || name == "Context Sync";
        let stream = if name == "Context Sync" { -1 } else { i64::from(number % 3) };
        of = of.stray(name, stream, Ns(start), Ns(start + dur));
        if name == "Stream Wait Event" {
            of = of.waits_for(1, number.into());
        }
        let kernel = of.kernels.last_mut().unwrap();
        kernel.work = if is_sync { DeviceWork::Sync } else { kernel.work };
        kernel.correlation = (number < 7).then_some(number.into());
        (kernel.bytes, kernel.bandwidth_gb_s) = (Some(100), Some(0.1 * number as f32));
    }
    for (name, start, dur, number) in calls {
        of = of.call(name, number.into(), Ns(start), Ns(start + dur));
        of.launches.last_mut().unwrap().lane = TrackId(number % 2);
    }
    for (name, start, dur, number) in spans {
        of = of.span(name, Ns(start), Ns(start + dur));
        of.annotations.last_mut().unwrap().is_device = number == 7;
    }
    for (name, start, dur, number) in operators {
        of = of.operator_on(TrackId(number % 2), name, us(Ns(start), Ns(start + dur)));
        of = of.memory(start as f64 / 1e3, 0, dur as u64, 60);
    }
    of
}

fn any_timeline() -> impl Strategy<Value = Timeline> {
    let parts =
        (pieces(&KERNELS, 25), pieces(&CALLS, 25), pieces(&SPANS, 8), pieces(&OPERATORS, 12));
    parts.prop_map(|(kernels, calls, spans, operators)| timeline(kernels, calls, spans, operators))
}

fn options(rules: Rules, include_last_step: bool) -> Options {
    Options { rules, include_last_step, ..Options::default() }
}

/// Checks what holds for every rank.
fn check(rank: &RankAnalysis, rules: Rules) {
    let temporal = rank.temporal;
    let sum = temporal.idle_ns + temporal.compute_ns + temporal.non_compute_ns;
    assert_eq!(sum, temporal.kernel_time_ns);
    let kernels: i64 = rank.kernels.iter().map(|kernel| kernel.sum_ns).sum();
    let kinds: i64 = rank.kinds.iter().map(|of| of.1).sum();
    if rules != Rules::HtaRounded {
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
        for rules in [Rules::Steps, Rules::Hta, Rules::HtaRounded] {
            for include_last_step in [false, true] {
                let options = options(rules, include_last_step);
                if let Ok(Analysis { ranks, .. }) = analyze(&timelines, &options) {
                    check(&ranks[0], rules);
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
