//! Figures from the events of the host: operators, spans, memory, and what changed between two runs.

use std::path::PathBuf;

use crate::common::{self, Build, NCCL, OTHER, figure, timeline, us, value};
use paceline_analysis::hta::{
    KernelKind, Kind, Options, Part, RankAnalysis, Shift, Side, Source, StepChoice, analyze, diff,
};
use paceline_analysis::ranks::across_ranks;
use paceline_analysis::read::{Select, find, open};
use paceline_analysis::report::Report;
use paceline_analysis::report::panels::of_analysis;
use paceline_analysis::timeline::{LaneInfo, Operator, TimeRange, Timeline, TrackId};

fn one(build: Timeline) -> RankAnalysis {
    analyze(&[build], &Options::default()).unwrap().ranks.remove(0)
}

#[test]
fn without_kernels_operators_and_transfers_are_analyzed() {
    let build = timeline(0)
        .operator("aten::linear", 0.0, 30.0)
        .operator("aten::addmm", 5.0, 25.0)
        // Hands the all-reduce to another thread, which works on it from 42 to 60.
        .operator("c10d::allreduce_", 40.0, 44.0)
        .operator("record_param_comms", 41.0, 43.0)
        .operator_on(OTHER, "gloo:all_reduce", us(42.0, 60.0))
        .operator("aten::mul", 50.0, 55.0);
    let analysis = analyze(&[build], &Options::default()).unwrap();
    let rank = &analysis.ranks[0];
    assert_eq!(rank.source, Source::Operators);
    assert!(analysis.notes[0].contains("from its operators"), "{:?}", analysis.notes);
    let words = "Where a report says kernels, it means these operators.";
    assert!(analysis.notes[0].ends_with(words), "{:?}", analysis.notes);
    assert_eq!(
        (value(rank, "kernel_time_us"), value(rank, "temporal_compute_time_us")),
        (60.0, 35.0)
    );
    assert_eq!((value(rank, "non_compute_time_us"), value(rank, "idle_time_us")), (13.0, 12.0));
    assert_eq!((value(rank, "all_reduce_calls"), value(rank, "all_reduce_time_us")), (1.0, 18.0));
    assert!((figure(rank, "comm_comp_overlap_pctg").unwrap() - 100.0 * 5.0 / 18.0).abs() < 1e-9);
    // Time in a nested operator counts only for the nested operator.
    let sums: Vec<_> = rank.kernels.iter().map(|of| (of.name.as_str(), of.sum_ns)).collect();
    let expected = [
        ("aten::addmm", 20_000),
        ("gloo:all_reduce", 18_000),
        ("aten::linear", 10_000),
        ("aten::mul", 5_000),
    ];
    assert_eq!(sums, expected);
    assert!(rank.idle.is_empty() && rank.queues.is_empty() && rank.launches.is_none());
    assert!(rank.critical_path.is_none());
}

#[test]
fn where_no_thread_shows_transfers_the_calls_are_the_communication() {
    let build = timeline(0)
        .operator("aten::addmm", 0.0, 20.0)
        .operator("c10d::_allgather_base_", 20.0, 30.0)
        .operator("record_param_comms", 22.0, 24.0);
    let rank = one(build);
    assert_eq!((value(&rank, "comm_time_us"), value(&rank, "all_gather_time_us")), (8.0, 8.0));
    assert_eq!(
        (value(&rank, "collective_calls"), value(&rank, "temporal_compute_time_us")),
        (1.0, 20.0)
    );
    let kind = |rank: &RankAnalysis, name: &str| {
        rank.kernels.iter().find(|of| of.name == name).map(|of| of.kind)
    };
    assert_eq!(kind(&rank, "c10d::_allgather_base_"), Some(KernelKind::Communication));
    assert_eq!(kind(&rank, "record_param_comms"), None);
}

#[test]
fn operators_of_the_last_step_are_left_out() {
    let build = timeline(0).step(1, 0.0, 50.0).step(2, 50.0, 100.0);
    let build = build.operator("a", 10.0, 30.0).operator_on(OTHER, "a", us(20.0, 45.0));
    let rank = one(build.operator("a", 50.0, 70.0));
    assert_eq!(
        (value(&rank, "kernel_time_us"), value(&rank, "temporal_compute_time_us")),
        (35.0, 35.0)
    );
    assert_eq!(value(&rank, "compute_time_us"), 45.0);
}

/// Otherwise the spans of a damaged trace, each of which covers all steps, would be cut into as many pieces as there are pairs.
#[test]
fn a_span_is_a_part_of_a_limited_number_of_steps() {
    let mut build = timeline(0).span("forward", 0.0, 1000.0).operator("aten::mul", 0.0, 1000.0);
    for (number, begin) in (0..100).zip((0..).step_by(10)) {
        build = build.step(number, f64::from(begin), f64::from(begin + 10));
    }
    let anatomy = one(build).anatomy.unwrap();
    let is_forward = |step: usize| anatomy.steps[step].parts[0].0 == Part::Forward;
    assert_eq!([0, 63, 64, 98].map(is_forward), [true, true, false, false]);
}

#[test]
fn the_parts_of_a_step_add_up() {
    let build = timeline(0)
        .step(1, 0.0, 100.0)
        .step(2, 100.0, 220.0)
        .step(3, 220.0, 300.0)
        .span("forward", 10.0, 30.0)
        .span("DistributedDataParallel.forward", 12.0, 28.0)
        .span("backward", 30.0, 80.0)
        .span("grad_sync", 40.0, 60.0)
        .span("exposed", 50.0, 60.0)
        .span("Optimizer.step#SGD.step", 80.0, 95.0)
        .span("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 100.0, 110.0)
        .span("forward", 110.0, 130.0)
        .span("something else", 130.0, 140.0)
        .span("param broadcast", 210.0, 230.0)
        .kernel("gemm", 7, 10.0, 50.0)
        // Belongs to step 1, though it runs into step 2. 20 us of it are hidden.
        .launched(NCCL, 20, 30.0, 31.0, 30.0, 110.0)
        .kernel("gemm", 7, 150.0, 160.0);
    let anatomy = one(build).anatomy.unwrap();
    let parts = |step: usize| -> Vec<(Part, i64)> {
        anatomy.steps[step].parts.iter().map(|of| (of.0, of.1 / 1000)).collect()
    };
    use Part::*;
    let first = [
        (Forward, 20),
        (Backward, 30),
        (GradSync, 10),
        (Exposed, 10),
        (OptimizerStep, 15),
        (Rest, 15),
    ];
    assert_eq!(parts(0), first);
    assert_eq!(parts(1), [(DataWait, 10), (Forward, 20), (ParamBroadcast, 10), (Rest, 80)]);
    for step in &anatomy.steps {
        let sum: i64 = step.parts.iter().map(|part| part.1).sum();
        assert_eq!(sum, step.step.time.dur_ns);
    }
    let exposed: Vec<i64> = anatomy.steps.iter().map(|step| step.exposed_ns).collect();
    assert_eq!(exposed, [60_000, 0]);
    assert_eq!(anatomy.step_mean_ns, 110_000.0);
    assert_eq!(anatomy.mean_ns[1], (Forward, 20_000.0));
}

/// The traces of two ranks of PyTorch on a CPU.
fn torch() -> Vec<Timeline> {
    let folder = PathBuf::from("tests/fixtures/torch_cpu");
    let window = find(&[folder], Select::Latest).unwrap().remove(0);
    let open = |file: &paceline_analysis::read::TraceFile| open(&file.path).unwrap();
    window.files.iter().map(open).collect()
}

/// Moves what autograd runs to a thread of its own.
fn on_own_thread(mut timeline: Timeline) -> Timeline {
    let own = TrackId(timeline.lanes.len() as u32);
    timeline.lanes.push(LaneInfo { pid: "1".into(), tid: "autograd".into(), name: None });
    let names = &timeline.names;
    let is_function =
        |of: &&Operator| names.text(of.name).starts_with("autograd::engine::evaluate_function");
    let functions: Vec<TimeRange> =
        timeline.operators.iter().filter(is_function).map(|of| of.time).collect();
    assert!(functions.len() > 10, "{}", functions.len());
    for operator in &mut timeline.operators {
        let (start_ns, end_ns) = (operator.time.start_ns, operator.time.end_ns());
        if functions.iter().any(|of| of.start_ns <= start_ns && end_ns <= of.end_ns()) {
            operator.lane = own;
        }
    }
    timeline
}

#[test]
fn the_backward_pass_of_pytorch_is_a_part_of_the_step_on_any_thread() {
    let own: Vec<Timeline> = torch().into_iter().map(on_own_thread).collect();
    for timelines in [torch(), own] {
        let analysis = analyze(&timelines, &Options::default()).unwrap();
        for rank in &analysis.ranks {
            let anatomy = rank.anatomy.as_ref().unwrap();
            let share = |part: Part| {
                let of_part = anatomy.mean_ns.iter().find(|of| of.0 == part);
                of_part.map_or(0.0, |of| of.1) / anatomy.step_mean_ns
            };
            // What is left is Python, between the loss and the optimizer.
            assert!(
                share(Part::Backward) > 0.25 && share(Part::Rest) < 0.1,
                "{:?}",
                anatomy.mean_ns
            );
            assert!(share(Part::Exposed) > 0.05, "{:?}", anatomy.mean_ns);
        }
        let across = across_ranks(&timelines, &Options::default());
        let has = |name: &str| {
            let parts = across.path.ranks.iter().flat_map(|rank| &rank.parts);
            parts.filter(|part| part.0 == name).map(|part| part.1).sum::<i64>()
        };
        assert!(has("backward") > 3 * has("host"), "{} {}", has("backward"), has("host"));
        let advice = across.path.headline().unwrap();
        assert!(!advice.contains("host"), "{advice}");
        let about = Report::default();
        let report = of_analysis(&analysis, Some(&across), &timelines, about);
        let said = report
            .notes
            .iter()
            .filter(|note| note.text.contains("causes of idle time are left out"));
        assert_eq!(said.count(), 1, "{:?}", report.notes);
    }
}

#[test]
fn memory_is_that_of_the_device_where_one_is_sampled() {
    const MB: u64 = 1 << 20;
    let build = timeline(0)
        .kernel("gemm", 7, 0.0, 10.0)
        .memory(3.0, 1, 4 * MB, 10 * MB)
        .memory(1.0, 1, MB, 8 * MB)
        .memory(2.0, 1, 5 * MB, 10 * MB)
        .memory(2.0, 0, 100 * MB, 100 * MB)
        .memory(4.0, 1, 2 * MB, 9 * MB);
    let rank = one(build);
    assert_eq!(value(&rank, "memory_samples"), 4.0);
    assert_eq!(
        (figure(&rank, "peak_allocated_mb"), figure(&rank, "peak_reserved_mb")),
        (Some(5.0), Some(10.0))
    );
    assert_eq!(
        (figure(&rank, "final_allocated_mb"), figure(&rank, "final_reserved_mb")),
        (Some(2.0), Some(9.0))
    );
    assert_eq!(figure(&rank, "p50_allocated_mb"), Some(3.0));
    assert!((figure(&rank, "p95_allocated_mb").unwrap() - 4.85).abs() < 1e-9);
    let host = common::timeline(0).kernel("gemm", 7, 0.0, 10.0).memory(1.0, 0, 3 * MB, 0);
    assert_eq!(figure(&one(host), "peak_allocated_mb"), Some(3.0));
}

#[test]
fn spans_of_sharded_training_make_it_sharded() {
    let kind = |span: &str| {
        let build = timeline(0).operator("aten::mm", 0.0, 10.0).span(span, 0.0, 10.0);
        analyze(&[build], &Options::default()).unwrap().kind
    };
    assert_eq!(kind("reduce-scatter"), Kind::Sharding);
    assert_eq!(kind("gather"), Kind::Ddp);
    assert_eq!(kind("grad_sync"), Kind::Ddp);
}

fn run(number: u64, build: Timeline) -> Timeline {
    build.step(number, 0.0, 100.0).operator("aten::mm", 10.0, 20.0).kernel("gemm", 7, 15.0, 40.0)
}

#[test]
fn a_difference_has_counts_and_times_of_both() {
    let control = run(3, timeline(0)).kernel("old", 7, 50.0, 60.0).step(4, 100.0, 200.0);
    // A kernel launched in the first step and run in the second counts. Work launched in the second does not.
    let test = run(3, timeline(0))
        .launched("gemm", 7, 90.0, 91.0, 110.0, 120.0)
        .operator("aten::relu", 30.0, 31.0)
        .step(4, 100.0, 200.0)
        .kernel("late", 7, 150.0, 160.0);
    let options = Options::default();
    let (control, test) = ([control], [test]);
    let whole = Options { include_last_step: true, ..Options::default() };
    let diff_of = |steps| diff(&control, &test, &steps, &whole).unwrap();
    let first = diff_of(StepChoice::First);
    let row = |name: &str| first.rows.iter().find(|row| row.name == name);
    let gemm = row("gemm").unwrap();
    assert_eq!((gemm.change, gemm.side), ("increased", Side::Device));
    assert_eq!(
        (gemm.test_calls - gemm.control_calls, gemm.control_ns, gemm.test_ns),
        (1, 25_000, 35_000)
    );
    assert_eq!(row("old").unwrap().change, "deleted");
    assert_eq!(row("aten::relu").unwrap().change, "added");
    assert_eq!(row("aten::mm").unwrap().change, "unchanged");
    assert_eq!((row("late"), row("ProfilerStep").unwrap().side), (None, Side::Host));
    // Both first steps have two launches, though not of the same kernels.
    assert_eq!(row("cudaLaunchKernel").unwrap().change, "unchanged");
    assert!(first.notes.iter().all(|note| note.ends_with("rank 0, 1 step.")), "{:?}", first.notes);

    let all = diff_of(StepChoice::All);
    assert!(all.rows.iter().any(|row| row.name == "late" && row.change == "added"));
    // The last of several steps is left out by default.
    let all = diff(&control, &test, &StepChoice::All, &options).unwrap();
    assert!(all.rows.iter().all(|row| row.name != "late"));
    assert_eq!((all.control_steps, all.test_steps), (1, 1));
    let second = diff_of(StepChoice::One(4));
    assert!(second.rows.iter().all(|row| row.name != "gemm"));
    let error = diff(&control, &test, &StepChoice::One(9), &options).unwrap_err();
    assert_eq!(error.to_string(), "rank_0.json: no step 9; it has 3, 4");
    let none = diff(&[], &test, &StepChoice::All, &options).unwrap_err();
    assert_eq!(none.to_string(), "there are no traces to analyse");
}

/// Steps of 100 us with one kernel each, that takes as many microseconds as stated.
fn steps_of(durations: &[f64]) -> [Timeline; 1] {
    let mut build = timeline(0);
    for (number, dur) in durations.iter().enumerate() {
        let from = 100.0 * number as f64;
        build = build.step(number as u64, from, from + 100.0).kernel(
            "gemm",
            7,
            from + 5.0,
            from + 5.0 + dur,
        );
    }
    [build]
}

#[test]
fn a_difference_that_steps_show_too_is_noise() {
    let options = Options { include_last_step: true, ..Options::default() };
    let verdict = |first: &[f64], second: &[f64]| {
        let diff = diff(&steps_of(first), &steps_of(second), &StepChoice::All, &options).unwrap();
        let gemm = diff.rows.iter().find(|row| row.name == "gemm").unwrap().clone();
        (gemm.verdict, gemm.change, diff.time_ns(&gemm).round() as i64)
    };
    let first = [20.0, 24.0, 22.0, 18.0];
    assert_eq!(verdict(&first, &[21.0, 25.0, 23.0, 19.0]), (Shift::Noise, "unchanged", 1_000));
    assert_eq!(verdict(&first, &[41.0, 45.0, 43.0, 39.0]), (Shift::Slower, "unchanged", 21_000));
    assert_eq!(verdict(&first, &[11.0, 10.0, 11.0, 10.0]), (Shift::Faster, "unchanged", -10_500));
    assert_eq!(verdict(&first, &first), (Shift::Equal, "unchanged", 0));
    // Runs of different lengths are compared per step.
    let [twice, once] = [[first, first].concat(), first.to_vec()];
    assert_eq!(verdict(&twice, &once), (Shift::Equal, "unchanged", 0));
    assert_eq!(verdict(&[20.0], &[30.0]).0, Shift::Unknown);
}

#[test]
fn runs_without_steps_are_compared_as_a_whole() {
    let control = [timeline(0).stray("gemm", 7, 0.0, 10.0)];
    let test = [timeline(0).stray("gemm", 7, 0.0, 10.0).stray("gemm", 7, 20.0, 50.0)];
    let diff = diff(&control, &test, &StepChoice::First, &Options::default()).unwrap();
    let row = &diff.rows[0];
    assert_eq!((row.test_calls - row.control_calls, row.test_ns - row.control_ns), (1, 30_000));
    assert!(diff.notes[0].contains("names no steps"));
}
