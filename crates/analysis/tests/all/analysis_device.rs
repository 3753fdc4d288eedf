//! Figures from the kernels of a rank, on timelines whose answers are known.

use crate::common::{self, Build, NCCL, figure, timeline, value};
use paceline_analysis::doctor::examine;
use paceline_analysis::hta::{
    Analysis, CollectiveKind, IdleCategory, KernelKind, Kind, Options, RankAnalysis, Rules, Source,
    analyze, columns, top_kernels,
};
use paceline_analysis::report::{Report, panels::of_analysis};
use paceline_analysis::timeline::Timeline;

fn one(build: Timeline) -> RankAnalysis {
    with(build, &Options::default())
}

fn with(build: Timeline, options: &Options) -> RankAnalysis {
    let mut analysis = analyze(&[build], options).unwrap();
    analysis.ranks.remove(0)
}

fn near(a: Option<f64>, b: f64) {
    assert!(a.is_some_and(|a| (a - b).abs() < 1e-9), "{a:?} is not {b}");
}

#[test]
fn idle_computing_and_neither() {
    // Kernels out of order, overlapping, nested and of no length; two gaps of 10 us; 10 us of a copy alone.
    let build = timeline(3)
        .kernel("gemm", 7, 50.0, 80.0)
        .kernel("relu", 7, 10.0, 30.0)
        .kernel("gemm", 8, 20.0, 40.0)
        .kernel("relu", 8, 22.0, 24.0)
        .kernel("relu", 8, 45.0, 45.0)
        .kernel("Memcpy HtoD (Pinned -> Device)", 22, 90.0, 110.0)
        .kernel("gemm", 7, 100.0, 110.0);
    let rank = one(build);
    assert_eq!((rank.rank, rank.source), (3, Source::Kernels));
    assert_eq!((value(&rank, "kernel_time_us"), value(&rank, "idle_time_us")), (100.0, 20.0));
    assert_eq!(
        (value(&rank, "temporal_compute_time_us"), value(&rank, "non_compute_time_us")),
        (70.0, 10.0)
    );
    near(figure(&rank, "compute_time_pctg"), 70.0);
    near(figure(&rank, "idle_time_pctg"), 20.0);
    near(figure(&rank, "non_compute_time_pctg"), 10.0);
    // Sums count every kernel, overlapping or not.
    assert_eq!((value(&rank, "compute_time_us"), value(&rank, "memory_time_us")), (82.0, 20.0));
    assert_eq!((value(&rank, "comm_time_us"), value(&rank, "total_kernel_time_us")), (0.0, 102.0));
    assert_eq!(
        (figure(&rank, "comm_comp_overlap_pctg"), figure(&rank, "comm_overhead_pctg")),
        (None, Some(0.0))
    );
    use KernelKind::{Computation, Memory};
    let expected =
        [(vec![Computation], 60_000), (vec![Memory], 10_000), (vec![Computation, Memory], 10_000)];
    assert_eq!(rank.kinds, expected);
}

#[test]
fn communication_is_hidden_partly_wholly_or_not_at_all() {
    let overlap = |from, to| {
        let build = timeline(0).kernel("gemm", 7, 0.0, 40.0).kernel("gemm", 7, 50.0, 60.0);
        figure(&one(build.kernel(NCCL, 20, from, to)), "comm_comp_overlap_pctg")
    };
    near(overlap(30.0, 70.0), 50.0);
    near(overlap(10.0, 30.0), 100.0);
    near(overlap(40.0, 50.0), 0.0);
    near(overlap(60.0, 80.0), 0.0);
    // Two collectives at the same time count once as communication.
    let build = timeline(0).kernel("gemm", 7, 0.0, 40.0).kernel(NCCL, 20, 20.0, 60.0);
    let rank = one(build.kernel(NCCL, 21, 40.0, 60.0));
    near(figure(&rank, "comm_comp_overlap_pctg"), 50.0);
    assert_eq!((rank.overlap.communication_ns, rank.overlap.both_ns), (40_000, 20_000));
    near(figure(&rank, "comm_overhead_pctg"), 60.0);
}

#[test]
fn the_last_of_several_steps_is_left_out() {
    let build = || {
        timeline(0)
            .step(4, 0.0, 100.0)
            .step(5, 100.0, 200.0)
            .step(6, 200.0, 300.0)
            .kernel("gemm", 7, 10.0, 20.0)
            // Launched in step 5, run in step 6: it belongs to step 5.
            .launched("gemm", 7, 190.0, 191.0, 250.0, 260.0)
            .kernel("gemm", 7, 280.0, 290.0)
            .stray("gemm", 7, 295.0, 299.0)
    };
    let rank = one(build());
    assert_eq!(rank.steps.chosen.iter().map(|step| step.number).collect::<Vec<_>>(), [4, 5]);
    assert_eq!((rank.steps.found, value(&rank, "kernel_time_us")), (3, 250.0));
    let stray = build().stray("gemm", 7, 5.0, 8.0);
    let analysis = analyze(&[stray], &Options::default()).unwrap();
    assert_eq!(value(&analysis.ranks[0], "kernel_time_us"), 250.0);
    assert!(analysis.notes[0].contains("could not be traced"), "{:?}", analysis.notes);
    let all = Options { include_last_step: true, ..Options::default() };
    let rank = with(build(), &all);
    assert_eq!((rank.steps.chosen.len(), value(&rank, "kernel_time_us")), (3, 280.0));
    // If no steps are chosen, a kernel whose launch is missing from the trace counts too.
    let whole = common::timeline(0).kernel("gemm", 7, 10.0, 20.0).stray("gemm", 7, 295.0, 299.0);
    let analysis = analyze(&[whole], &Options::default()).unwrap();
    assert_eq!(value(&analysis.ranks[0], "kernel_time_us"), 289.0);
    assert!(analysis.notes[0].contains("names no steps"), "{:?}", analysis.notes);
}

#[test]
fn kernels_without_launches_are_chosen_by_their_own_begin() {
    let build = timeline(1).step(1, 0.0, 100.0).step(2, 100.0, 200.0);
    let build = build.stray("gemm", 7, 10.0, 30.0).stray("gemm", 7, 150.0, 160.0);
    let analysis = analyze(&[build], &Options::default()).unwrap();
    assert_eq!(value(&analysis.ranks[0], "kernel_time_us"), 20.0);
    assert!(analysis.ranks[0].launches.is_none());
    assert!(analysis.notes[0].starts_with("Rank 1: No kernel could be traced"));
}

#[test]
fn gaps_are_put_down_to_host_kernels_or_neither() {
    let build = timeline(0)
        .launched("a", 7, 0.0, 1.0, 10.0, 20.0)
        // Launched after the end of the kernel before.
        .launched("b", 7, 25.0, 26.0, 40.0, 50.0)
        // Launched before that end; gap of 29.999 us.
        .launched("c", 7, 41.0, 42.0, 79.999, 90.0)
        // Launched before that end; a gap of 30 us is at the threshold and no longer a kernel wait.
        .launched("d", 7, 60.0, 61.0, 120.0, 130.0)
        .launched("e", 9, 60.0, 61.0, 120.0, 130.0);
    let idle = one(build).idle;
    let times: Vec<Vec<i64>> =
        idle.iter().map(|of| of.by_category.iter().map(|by| by.time_ns).collect()).collect();
    assert_eq!(times, [[20_000, 29_999, 30_000], [0, 0, 0]]);
    assert_eq!((idle[0].stream, idle[1].stream), (7, 9));
    assert_eq!(idle[0].by_category[1].category, IdleCategory::KernelWait);
    near(idle[0].by_category[0].ratio, 20_000.0 / 79_999.0);
    assert_eq!(idle[1].by_category[0].ratio, None);
}

#[test]
fn a_gap_that_no_launch_explains_is_told_by_its_length() {
    let build = timeline(0).stray("a", 7, 0.0, 10.0).stray("b", 7, 20.0, 30.0);
    let idle = one(build.stray("c", 7, 100.0, 110.0)).idle;
    let gaps: Vec<_> = idle[0].by_category.iter().map(|by| (by.gaps, by.time_ns)).collect();
    assert_eq!(gaps, [(0, 0), (1, 10_000), (1, 70_000)]);
}

#[test]
fn launches_are_counted_as_short_slow_and_late() {
    let build = timeline(0)
        // The kernel is shorter than its call and begins 4 us after it.
        .launched("a", 7, 0.0, 6.0, 10.0, 14.0)
        // A call above 50 us is slow. Its kernel is then not counted as short.
        .launched("b", 7, 20.0, 71.0, 72.0, 82.0)
        // The kernel began while the call still ran: its delay is zero, not negative.
        .launched("a", 7, 90.0, 95.0, 93.0, 99.0)
        .launched("a", 7, 100.0, 101.0, 202.0, 210.0)
        // A kernel without a launch call, which HTA does not list as a launch.
        .stray("c", 7, 300.0, 310.0);
    let stats = one(build).launches.unwrap();
    assert_eq!((stats.short_kernels, stats.slow_calls, stats.long_delays), (1, 1, 1));
    assert_eq!(stats.cpu_ns.count, 4);
    assert_eq!((stats.cpu_ns.mean, stats.gpu_ns.mean), (15_750.0, 7_000.0));
    assert_eq!((stats.delay_ns.mean, stats.delay_ns.max), (26_500.0, 101_000.0));
    assert_eq!((stats.by_kernel[0].name.as_str(), stats.by_kernel[0].launches), ("a", 3));
    assert_eq!((stats.by_kernel[0].delay_mean_ns, stats.by_kernel[0].short), (35_000.0, 1));
}

#[test]
fn queues_grow_with_launches_and_shrink_with_kernels() {
    let build = timeline(0)
        .launched("a", 7, 0.0, 1.0, 10.0, 20.0)
        .launched("b", 7, 2.0, 3.0, 20.0, 30.0)
        .launched("c", 7, 4.0, 5.0, 30.0, 40.0)
        .launched("d", 9, 6.0, 7.0, 8.0, 9.0);
    // The 1024th of these is launched after 1.023 ms, and the first one starts after 2 ms.
    let queues = one((0..1024)
        .map(f64::from)
        .fold(build, |build, at| build.launched("e", 11, at, at + 0.5, at + 2000.0, at + 2001.0)))
    .queues;
    assert_eq!([0, 1, 2].map(|at| queues[at].stream), [7, 9, 11]);
    let points: Vec<_> = queues[0].series.iter().map(|p| (p.at_ns / 1000, p.value)).collect();
    let expected = [(0, 1.0), (2, 2.0), (4, 3.0), (10, 2.0), (20, 1.0), (30, 0.0)];
    assert_eq!(points, expected);
    assert_eq!((queues[0].length.max, queues[0].length.mean), (3.0, 1.5));
    assert_eq!([0, 2].map(|at| queues[at].full_ns), [0, 977_000]);
}

#[test]
fn copies_have_bytes_and_bandwidth_by_kind() {
    let build = timeline(0)
        .copy("Memcpy HtoD (Pinned -> Device)", 10.0, 20.0, 1000, 10.0)
        .copy("Memcpy HtoD (Pageable -> Device)", 15.0, 25.0, 500, 5.0)
        .copy("Memset (Device)", 30.0, 30.0, 8, 100.0);
    let copies = one(build).copies;
    assert_eq!(
        (copies[0].name.as_str(), copies[0].copies, copies[0].bytes),
        ("Memcpy HtoD", 2, 1500)
    );
    assert_eq!((copies[1].name.as_str(), copies[1].time_ns), ("Memset", 0));
    let bandwidth = copies[0].gb_per_s.unwrap();
    // 10 for the first copy, then the sum of both, then the second alone. The zero at the end does not count.
    assert_eq!((bandwidth.count, bandwidth.max, bandwidth.mean), (3, 15.0, 10.0));
    assert_eq!(copies[1].gb_per_s.unwrap().mean, 100.0);
}

#[test]
fn kernels_by_name_and_the_rest_together() {
    let build = timeline(0)
        .kernel("a", 7, 0.0, 10.0)
        .kernel("a", 7, 10.0, 40.0)
        .kernel("b", 7, 50.0, 55.0)
        .kernel("c", 7, 60.0, 61.0)
        .kernel("c", 7, 62.0, 65.0);
    let kernels = one(build).kernels;
    assert_eq!((kernels[0].calls, kernels[0].sum_ns, kernels[0].mean_ns), (2, 40_000, 20_000.0));
    assert_eq!((kernels[0].min_ns, kernels[0].max_ns), (10_000, 30_000));
    assert!((kernels[0].std_ns - 14142.135623730952).abs() < 1e-6);
    let top = top_kernels(&kernels, Some(KernelKind::Computation), 1);
    assert_eq!(
        (top.len(), top[1].name.as_str(), top[1].calls, top[1].sum_ns),
        (2, "others", 3, 9_000)
    );
    // The standard deviation of 5, 1 and 3 us.
    assert!((top[1].std_ns - 2_000.0).abs() < 1e-6);
    assert!(top_kernels(&kernels, Some(KernelKind::Memory), 3).is_empty());
}

#[test]
fn collectives_are_told_by_their_arguments_first() {
    let build = timeline(0)
        .kernel("ncclDevKernel_SendRecv(args)", 20, 0.0, 10.0)
        .told("all_to_allv", Some(4))
        .kernel("ncclKernel_AllGather_RING_LL_Sum_int8_t(args)", 20, 10.0, 15.0)
        .told("", None)
        .kernel(NCCL, 20, 20.0, 21.0)
        .kernel("ncclDevKernel_Generic(args)", 20, 30.0, 32.0);
    let rank = one(build);
    assert_eq!(value(&rank, "all_to_all_time_us"), 10.0);
    assert_eq!((value(&rank, "all_gather_time_us"), value(&rank, "all_reduce_calls")), (5.0, 1.0));
    assert_eq!((value(&rank, "collective_calls"), value(&rank, "collective_time_us")), (4.0, 18.0));
    assert_eq!(rank.collectives.calls(CollectiveKind::Unknown), 1);
}

#[test]
fn rounding_is_that_of_hta() {
    let build = || {
        timeline(0)
            .kernel("a", 7, 0.5, 10.5)
            // Contains no whole microsecond, so it lasts -1 us in HTA.
            .kernel("b", 7, 20.2, 20.8)
            .kernel("a", 7, 30.0, 40.0)
    };
    let exact = one(build());
    assert_eq!(
        (value(&exact, "kernel_time_us"), value(&exact, "temporal_compute_time_us")),
        (39.5, 20.6)
    );
    let hta = with(build(), &Options { rules: Rules::HtaRounded, ..Options::default() });
    // Rounded: 1..10, 21..20, 30..40.
    assert_eq!(
        (value(&hta, "kernel_time_us"), value(&hta, "temporal_compute_time_us")),
        (39.0, 18.0)
    );
    assert_eq!(value(&hta, "idle_time_us"), 21.0);
    assert_eq!(hta.kernels[1].sum_ns, -1_000);
}

#[test]
fn waits_of_the_device_count_only_to_hta() {
    // To HTA, a wait on a stream counts as something that runs but does not compute. A wait without a stream counts
    // as nothing, and so does every wait by our own rules.
    let build = timeline(0)
        .kernel("gemm", 7, 0.0, 10.0)
        .wait("Stream Sync", 7, 77, 10.0, 15.0)
        .wait("Context Sync", -1, 78, 15.0, 18.0)
        .kernel("gemm", 7, 20.0, 30.0);
    for (rules, idle_us, non_compute_us) in [(Rules::Steps, 10.0, 0.0), (Rules::Hta, 5.0, 5.0)] {
        let rank = with(build.clone(), &Options { rules, ..Options::default() });
        let found = (value(&rank, "idle_time_us"), value(&rank, "non_compute_time_us"));
        assert_eq!(found, (idle_us, non_compute_us));
        assert_eq!(value(&rank, "total_kernel_time_us"), 20.0);
        // A wait does not end a gap.
        assert_eq!(rank.idle[0].by_category[0].time_ns, 10_000);
    }
}

#[test]
fn the_kind_is_chosen_from_the_collectives_or_given() {
    let kind = |name: &str, options: &Options| {
        let build = timeline(0).kernel("gemm", 7, 0.0, 10.0).kernel(NCCL, 20, 10.0, 20.0);
        analyze(&[build.kernel(name, 20, 20.0, 25.0)], options).unwrap().kind
    };
    let any = Options::default();
    assert_eq!(kind("ncclDevKernel_Broadcast_RING_LL", &any), Kind::Ddp);
    assert_eq!(kind("ncclDevKernel_ReduceScatter_Sum_f32", &any), Kind::Sharding);
    // A short all-gather beside a longer all-reduce, for example statistics of a batch norm.
    assert_eq!(kind("ncclDevKernel_AllGather_RING_LL", &any), Kind::Ddp);
    let ddp = Options { kind: Some(Kind::Ddp), ..Options::default() };
    assert_eq!(kind("ncclDevKernel_ReduceScatter_Sum_f32", &ddp), Kind::Ddp);
    let named = |span: &str| {
        let spans = timeline(0).span(span, 0.0, 5.0).kernel("gemm", 7, 0.0, 10.0);
        analyze(&[spans], &any).unwrap().kind
    };
    assert_eq!(named("reduce scatter"), Kind::Sharding);
    // Data-parallel programs have these spans too.
    assert_eq!([named("param broadcast"), named("gather")], [Kind::Ddp; 2]);
}

#[test]
fn means_are_over_the_ranks_that_have_the_figure() {
    let first = timeline(1).kernel("gemm", 7, 0.0, 10.0).kernel(NCCL, 20, 5.0, 15.0);
    let second = timeline(0).kernel("gemm", 7, 0.0, 30.0);
    let analysis: Analysis = analyze(&[first, second], &Options::default()).unwrap();
    assert_eq!(analysis.ranks.iter().map(|rank| rank.rank).collect::<Vec<_>>(), [0, 1]);
    let mean = |name: &str| {
        let column = columns(Kind::Sharding).find(|column| column.head.key == name).unwrap();
        analysis.mean(column)
    };
    assert_eq!(mean("compute_time_us"), Some(20.0));
    assert_eq!(mean("comm_comp_overlap_pctg"), Some(50.0));
    assert_eq!(mean("peak_allocated_mb"), None);
}

#[test]
fn what_cannot_be_analyzed_is_said() {
    let analyze =
        |timelines: &[_]| analyze(timelines, &Options::default()).unwrap_err().to_string();
    assert_eq!(analyze(&[]), "there are no traces to analyse");
    let mut nameless = timeline(0).kernel("gemm", 7, 0.0, 10.0);
    nameless.rank = None;
    assert!(analyze(&[nameless]).starts_with("rank_0.json: no rank"));
    let twice = || timeline(2).kernel("gemm", 7, 0.0, 10.0);
    let both = "rank_2.json and rank_2.json are both of rank 2; pass one of them";
    assert_eq!(analyze(&[twice(), twice()]), both);
    let no_work = ".json: neither kernels nor operators in the steps that are looked at";
    assert!(analyze(&[timeline(5)]).starts_with("rank_5.json: nothing was recorded"));
    let mut endless = timeline(0).kernel("gemm", 7, 0.0, 10.0);
    endless.kernels[0].time.start_ns = i64::MIN;
    assert!(analyze(&[endless]).contains("more than 73 years"));
    // Each duration is short enough, but their sum is not.
    let mut many = timeline(0);
    for _ in 0..5 {
        many = many.kernel("gemm", 7, 0.0, 1e-3 * (1u64 << 59) as f64);
    }
    assert!(analyze(&[many]).contains("more than 73 years"));
    // All work belongs to the last step.
    let last = timeline(0).step(1, 0.0, 10.0).step(2, 10.0, 20.0).kernel("gemm", 7, 15.0, 18.0);
    assert!(analyze(&[last]).contains(no_work));
}

/// 900 launches in 4 ms, and then nothing: a chart of fewer points ends at zero, when the queue did.
#[test]
fn the_chart_of_a_queue_falls_to_zero_when_the_queue_is_empty() {
    let queued = (0..900).map(f64::from).fold(timeline(0), |of, at| {
        of.launched("k", 7, at * 4.0, at * 4.0 + 1.0, at * 5.0 + 5.0, at * 5.0 + 9.0)
    });
    let queues = one(queued.launched("k", 7, 100_000.0, 100_001.0, 100_010.0, 100_020.0)).queues;
    let series = &queues[0].series;
    assert!(series.len() <= 1000, "{}", series.len());
    let at = |us: i64| series.iter().rfind(|point| point.at_ns <= us * 1000).unwrap().value;
    assert_eq!([5_000, 50_000, 99_000, 100_015].map(at), [0.0; 4]);
    // The highest point is kept.
    let highest = series.iter().map(|point| point.value).fold(0.0, f64::max);
    assert_eq!(highest, queues[0].length.max);
}

/// CUPTI recorded the calls that launch kernels, and no kernels.
#[test]
fn kernels_that_were_not_recorded_are_named() {
    let of = (0..2).fold(timeline(0), |of, step| {
        let begin = 100 * step as i64;
        let of = of.step(step, begin, begin + 100).operator("aten::mm", begin + 10, begin + 60);
        of.call("cuLaunchKernelEx", step, begin + 20, begin + 30)
    });
    let all = [of];
    let analysis = analyze(&all, &Options::default()).unwrap();
    assert!(analysis.notes[0].contains("CUPTI"), "{:?}", analysis.notes);
    assert!(!analysis.notes.iter().any(|note| note.contains("on a CPU")), "{:?}", analysis.notes);
    let diagnosis = examine(&all, &Options::default(), None).unwrap().diagnosis;
    assert!(
        diagnosis.advice.is_empty() && diagnosis.unseen[0].contains("no kernels"),
        "{diagnosis:?}"
    );
    let report = of_analysis(&analysis, None, &all, Report::default());
    assert!(!report.notes.iter().any(|note| note.text.contains("CPU")), "{:?}", report.notes);
    // Metrics come in their place, or the file is cut off.
    let cut = "the file is cut off, and what came after is missing";
    let [mut metrics, mut beginning] = [all[0].clone(), all[0].clone()];
    metrics.skipped.insert("cuda_profiler_range".into(), 1);
    beginning.oddities.insert(cut.into(), 1);
    for (of, note, unseen) in [(metrics, "metrics", "no kernels"), (beginning, "", "cut off")] {
        let notes = analyze(std::slice::from_ref(&of), &Options::default()).unwrap().notes;
        assert!(!notes.iter().any(|of| of.contains("CUPTI") || of.contains("on a CPU")));
        assert!(note.is_empty() || notes[0].contains(note), "{notes:?}");
        let diagnosis = examine(&[of], &Options::default(), None).unwrap().diagnosis;
        assert!(diagnosis.unseen[0].contains(unseen), "{diagnosis:?}");
    }
}

#[test]
fn a_trace_of_another_program_is_named() {
    let mut other = timeline(0);
    other.skipped = [("ph X".to_owned(), 5), ("ph M".to_owned(), 2)].into();
    let error = analyze(&[other], &Options::default()).unwrap_err().to_string();
    assert!(error.contains("5 of kind \"ph X\"") && error.contains("another program"), "{error}");
    // PyTorch's profiler, in which nothing but Python ran.
    let mut own = timeline(0);
    own.skipped = [("python_function".to_owned(), 31), ("ph i".to_owned(), 2)].into();
    let error = analyze(&[own], &Options::default()).unwrap_err().to_string();
    assert!(error.contains("nothing was recorded"), "{error}");
}
