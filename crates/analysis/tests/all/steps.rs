//! The figures of steps: work belongs to the step that launched it. Devices lag, kernels were launched before the recording, and
//! first steps are long.

use crate::common::{Build, analyzed, diagnosed, timeline, value};
use paceline_analysis::doctor::{Diagnosis, diagnosis};
use paceline_analysis::hta::{Options, Rules, Side, StepChoice, diff};
use paceline_analysis::timeline::Timeline;

/// Four steps of 10 ms with a kernel of 9 ms each. The device is a step late.
fn late(has_views: bool) -> Timeline {
    (0..4).fold(timeline(0), |of, step| {
        let (host, device) = (1e4 * step as f64, 1e4 * (step + 1) as f64 + 100.0);
        let of = of.step(step, host, host + 9_900.0);
        let of = if has_views { of.device_step(step, device, device + 9_000.0) } else { of };
        of.launched("gemm", 7, host + 110.0, host + 130.0, device, device + 9_000.0)
    })
}

#[test]
fn a_device_that_lags_does_the_work_of_the_steps_that_launched_it() {
    for has_views in [false, true] {
        let timeline = late(has_views);
        let rank = analyzed(&timeline, Rules::Steps);
        let found = ["total_kernel_time_us", "kernel_time_us"].map(|name| value(&rank, name));
        assert_eq!((rank.steps.chosen.len(), found), (3, [27_000.0, 29_000.0]));
        // Work that is launched between two spans is of the first one.
        let runs = [timeline.clone().launched("log", 7, 9_950.0, 9_955.0, 5e4, 5e4 + 1.0)];
        let rows = diff(&runs, &runs, &StepChoice::All, &Options::default()).unwrap().rows;
        assert!(rows.iter().any(|row| row.name == "log"));
        // HTA's window ends with the last view of a step, so a fourth kernel counts.
        let hta = analyzed(&timeline, Rules::Hta);
        let expected = if has_views { 36_000.0 } else { 27_000.0 };
        assert_eq!(value(&hta, "total_kernel_time_us"), expected);
        let Diagnosis { step_ms, lengths_ms, .. } = diagnosed(&timeline);
        assert_eq!((step_ms, lengths_ms), (Some(10.0), vec![10.0; 3]));
    }
}

#[test]
fn a_rank_without_steps_is_named() {
    let without = timeline(1).launched("gemm", 7, 0.0, 5.0, 10.0, 20.0);
    let Diagnosis { step_ms, unseen, .. } = diagnosis(&[late(false), without], &Options::default());
    assert_eq!(step_ms, None);
    assert!(unseen[0].starts_with("Rank 1 has no steps"), "{unseen:?}");
}

#[test]
fn a_single_step_has_the_work_that_it_launched() {
    let of = timeline(0)
        .step(0, 0, 10_000)
        // Launched before the recording, before the step, in it, and after it.
        .stray("gemm", 7, -3_000, -1_000)
        .stray("gemm", 7, -900, 500)
        .launched("gemm", 7, -500.0, -490.0, 501.0, 1_000.0)
        .launched("gemm", 7, 100.0, 110.0, 1_001.0, 5_001.0)
        .launched("gemm", 7, 9_990.0, 9_995.0, 10_500.0, 11_500.0)
        .launched("gemm", 7, 10_010.0, 10_020.0, 11_501.0, 12_000.0);
    assert_eq!(value(&analyzed(&of, Rules::Steps), "total_kernel_time_us"), 5_000.0);
    // The device had done earlier work after 1 ms, and that of the step after 11.5.
    assert_eq!(diagnosed(&of).lengths_ms, [10.5]);
    let hta = 2_000.0 + 1_400.0 + 499.0 + 5_000.0 + 499.0;
    assert_eq!(value(&analyzed(&of, Rules::Hta), "total_kernel_time_us"), hta);
}

#[test]
fn a_stream_that_is_free_does_not_hide_that_another_one_is_busy() {
    let of = timeline(0)
        .step(0, 0, 2_000)
        .step(1, 2_000, 4_000)
        .launched("Memcpy HtoD (Pinned -> Device)", 22, 10.0, 15.0, 20.0, 30.0)
        // Launched before the recording, and begun after the copy.
        .stray("gemm", 7, 100, 900)
        .launched("gemm", 7, 50.0, 55.0, 901.0, 2_800.0)
        .launched("gemm", 7, 2_050.0, 2_055.0, 2_801.0, 4_700.0);
    let with_last = Options { include_last_step: true, ..Options::default() };
    assert_eq!(diagnosis(&[of], &with_last).lengths_ms, [1.9, 1.9]);
}

/// A stream that no step uses is busy until a later step, or after all of them.
#[test]
fn work_that_no_step_has_launched_makes_no_step_shorter() {
    for end in [4_000.0, 25_000.0, 60_000.0] {
        let of = timeline(0).launched("ncclDevKernel_SendRecv", 20, -500.0, -490.0, -450.0, end);
        let of = (0..5).fold(of, |of, step| {
            let begin = 1e4 * step as f64;
            let call = begin + 5_000.0;
            of.step(step, begin, begin + 9_990.0).launched(
                "gemm",
                7,
                call,
                call + 5.0,
                call + 10.0,
                call + 3_000.0,
            )
        });
        assert_eq!(diagnosed(&of).lengths_ms, [10.0; 4]);
    }
}

/// A checkpoint is copied to the host on a stream of its own, while steps go on.
#[test]
fn work_beside_the_steps_ends_none_of_them() {
    let of = (0..7).fold(timeline(0), |of, step| {
        let begin = 1e4 * step as f64;
        let of = of.step(step, begin, begin + 9_990.0);
        let of =
            of.launched("gemm", 7, begin + 100.0, begin + 105.0, begin + 110.0, begin + 9_000.0);
        if step != 1 {
            return of;
        }
        let (call, end) = (begin + 9_100.0, begin + 34_150.0);
        of.launched("Memcpy DtoH (Device -> Pinned)", 30, call, call + 5.0, call + 10.0, end)
    });
    assert_eq!(diagnosed(&of).lengths_ms, [10.0; 6]);
}

/// The profiler lets the device end its work before it records. From then on, the device does 9 ms of each step behind the host.
#[test]
fn a_device_that_has_nothing_to_do_at_first_makes_no_step_longer() {
    let of = (0..4).fold(timeline(0), |of, step| {
        let (host, device) = (5e3 * step as f64, 3_010.0 + 9e3 * step as f64);
        of.step(step, host, host + 5_000.0).launched(
            "gemm",
            7,
            host + 3_000.0,
            host + 3_005.0,
            device,
            device + 9_000.0,
        )
    });
    assert_eq!(diagnosed(&of).lengths_ms, [9.0; 3]);
    // A single step is as long as it was.
    let one = timeline(0).step(0, 0, 5_000).launched("gemm", 7, 3e3, 3_005.0, 3_010.0, 12_010.0);
    assert_eq!(diagnosed(&one).lengths_ms, [12.01]);
}

#[test]
fn a_wait_for_the_device_is_no_work() {
    let of = timeline(0)
        .launched("gemm", 7, 0.0, 5.0, 10.0, 110.0)
        .call("cudaDeviceSynchronize", 2, 500, 1_500)
        // The stream of a wait for all streams is written as 2^32 - 1.
        .wait("Context Sync", (1 << 32) - 1, 2, 500.0, 1_500.0);
    let times = |rules| {
        let rank = analyzed(&of, rules);
        ["kernel_time_us", "idle_time_us"].map(|name| value(&rank, name))
    };
    assert_eq!(times(Rules::Steps), [100.0, 0.0]);
    assert_eq!(times(Rules::Hta), [1_490.0, 390.0]);
    // Nor is it work of the device in a comparison.
    let of_device = |rules| {
        let (runs, options) = ([of.clone()], Options { rules, ..Options::default() });
        let diff = diff(&runs, &runs, &StepChoice::All, &options).unwrap();
        let rows = diff.rows.into_iter().filter(|row| row.side == Side::Device);
        rows.map(|row| row.name).collect::<Vec<_>>()
    };
    assert_eq!(of_device(Rules::Steps), ["gemm"]);
    assert_eq!(of_device(Rules::Hta).len(), 2);
}

/// A program that does not mark its steps of 10 ms. In each, the loader takes 1 ms, three kernels are launched, and optimizers step at
/// 8 ms, and at 4 ms too if there are two. Step 2 is another 5 ms longer.
fn unmarked(num_optimizers: u32, has_loader: bool) -> Timeline {
    let mut of = timeline(0);
    let mut begin = 0.0;
    for step in 0..6 {
        if has_loader {
            of = of.span(
                "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",
                begin,
                begin + 1_000.0,
            );
        }
        for at in [2.0, 3.0, 5.0] {
            let call = begin + 1_000.0 * at;
            of = of.launched("gemm", 7, call, call + 5.0, call + 10.0, call + 1_010.0);
        }
        for at in [8.0, 4.0].into_iter().take(num_optimizers as usize) {
            let from = begin + 1_000.0 * at;
            of = of.span("Optimizer.step#Adam.step", from, from + 500.0);
        }
        begin += if step == 2 { 15_000.0 } else { 10_000.0 };
    }
    of.find_steps(None);
    of
}

#[test]
fn steps_are_found_between_steps_of_the_optimizer_or_batches_of_the_loader() {
    for (num_optimizers, has_loader, name) in [
        (1, false, "Optimizer.step#Adam.step"),
        (1, true, "Optimizer.step#Adam.step"),
        (0, true, "enumerate"),
        (2, true, "enumerate"),
    ] {
        let of = unmarked(num_optimizers, has_loader);
        let found = of.found.as_ref().expect("steps");
        assert!(found.words.contains(name), "{}", found.words);
        assert!(
            found.words.contains("5 of 5 steps have about the same number of launches (3)"),
            "{}",
            found.words
        );
        assert!(!found.words.contains("not sure"), "{}", found.words);
        // The last one is whole: it ends where the next one would begin.
        let rank = analyzed(&of, Rules::Steps);
        assert_eq!(rank.steps.chosen.len(), 5);
        assert_eq!(value(&rank, "total_kernel_time_us"), 15_000.0);
        let Diagnosis { lengths_ms, step_ms, .. } = diagnosed(&of);
        assert_eq!((lengths_ms.len(), step_ms), (5, Some(11.25)), "{lengths_ms:?}");
        // HTA knows no such steps.
        assert!(analyzed(&of, Rules::Hta).steps.chosen.is_empty());
    }
}

#[test]
fn steps_that_are_not_alike_are_not_sure_or_no_steps() {
    let with = |counts: &[i64]| {
        let mut of = timeline(0);
        for (step, count) in counts.iter().enumerate() {
            let begin = 1e4 * step as f64;
            for at in 0..*count {
                let call = begin + 100.0 * at as f64;
                of = of.launched(
                    &format!("gemm {step}"),
                    7,
                    call,
                    call + 5.0,
                    call + 10.0,
                    call + 50.0,
                );
            }
            of = of.span("Optimizer.step#SGD.step", begin + 9_000.0, begin + 9_100.0);
        }
        of.find_steps(None);
        of.found.map(|found| found.words)
    };
    assert!(
        with(&[9, 40, 40, 40, 40, 9])
            .is_some_and(|words| words.contains("4 of 5") && words.contains("not sure"))
    );
    assert_eq!(with(&[40, 40, 10, 20, 30, 60, 7]), None);
    // An evaluation is no step: one of the sides of it is looked at.
    assert!(with(&[40, 40, 40, 85, 40, 40, 40, 40, 40]).is_some_and(|words| {
        words.contains("7 of 8") && words.contains("The longest run of such steps is looked at: 5")
    }));
    // A launch more is much for a graph. The forward pass comes between layers with an optimizer each.
    assert!(with(&[1, 1, 1, 1, 2, 1, 1]).is_some_and(|words| words.contains("5 of 6")));
    let layers: Vec<i64> = (0..36).map(|at| if at % 12 == 0 { 90 } else { 40 }).collect();
    assert!(
        with(&layers)
            .is_some_and(|words| { words.contains("33 of 35") && words.contains("not sure") })
    );
    // Two steps of the optimizer may be parts of one step.
    assert_eq!(with(&[40, 40]), None);
    // Nothing was launched, and there are no operators.
    assert_eq!(with(&[0, 0, 0, 0]), None);
}

/// The optimizers of a GAN: their work alternates, in its names or its number.
#[test]
fn two_optimizers_make_one_step() {
    let with = |names: &[(&str, usize)], num_spans: usize| {
        let mut of = timeline(0);
        for (span, (name, count)) in names.iter().cycle().take(num_spans).enumerate() {
            let begin = 1e4 * span as f64;
            for at in 0..*count {
                let call = begin + 100.0 * at as f64;
                of = of.launched(name, 7, call, call + 5.0, call + 10.0, call + 50.0);
            }
            of = of.span("Optimizer.step#Adam.step", begin + 9_000.0, begin + 9_100.0);
        }
        of.find_steps(None);
        let found = of.found.expect("steps");
        (found.steps.len(), found.steps[0].time.dur_ns / 1_000_000, found.words)
    };
    for names in [[("conv", 20), ("convT", 20)], [("gemm", 20), ("gemm", 40)]] {
        let (num, ms, words) = with(&names, 12);
        assert_eq!((num, ms), (5, 20));
        assert!(
            words.contains(", 2 to a step: 5 of 5 steps") && words.contains("not sure"),
            "{words}"
        );
    }
    let critic = [("c", 9), ("c", 9), ("c", 9), ("g", 12)];
    assert_eq!(with(&critic, 13).1, 40);
    assert_eq!(with(&critic[..1], 13).1, 10);
}

#[test]
fn the_user_names_the_spans_that_are_steps() {
    let mut of = timeline(0)
        .span("iteration 10", 0, 100)
        .span("iteration 11", 150, 250)
        .span("iteration", 160, 170)
        .span("iteration 12", 300, 400)
        .span("iterations", 0, 400)
        .kernel("gemm", 7, 120.0, 125.0)
        .kernel("gemm", 7, 260.0, 269.0)
        .kernel("gemm", 7, 310.0, 315.0);
    assert!(!of.find_steps(Some("epoch")) && !of.find_steps(None));
    assert!(of.find_steps(Some("iteration")));
    let rank = analyzed(&of, Rules::Steps);
    // The last one may be cut off. What lies between two spans is of the first one.
    assert_eq!((rank.steps.found, rank.steps.chosen.len()), (3, 2));
    assert_eq!(value(&rank, "total_kernel_time_us"), 14.0);
    assert_eq!(diagnosed(&of).lengths_ms, [0.15, 0.15]);
    let (runs, options) = ([of], Options::default());
    let rows = diff(&runs, &runs, &StepChoice::All, &options).unwrap().rows;
    let gemm = rows.iter().find(|row| row.name == "gemm" && row.side == Side::Device).unwrap();
    assert_eq!(gemm.control_calls, 2, "{gemm:?}");
}

/// Epochs of four batches, with an evaluation after each.
#[test]
fn evaluations_at_regular_distances_are_in_no_step() {
    let mut of = (0..14).fold(timeline(0), |of, step| {
        let (begin, is_evaluation) = (1e4 * step as f64, step % 5 == 4);
        let name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__";
        let of = of.span(name, begin, begin + 10.0);
        let of = (0..if is_evaluation { 1 } else { 5 }).fold(of, |of, at| {
            let from = begin + 100.0 + 1e3 * f64::from(at);
            of.kernel("gemm", 7, from, from + 900.0)
        });
        let end = if is_evaluation { begin } else { begin + 8e3 };
        if is_evaluation { of } else { of.span("Optimizer.step#SGD.step", end, end + 100.0) }
    });
    of.find_steps(None);
    assert_eq!(diagnosed(&of).lengths_ms, [10.0; 3]);
}

#[test]
fn an_evaluation_between_two_spans_is_no_step() {
    let mut of = (0..9).fold(timeline(0), |of, batch| {
        let begin = 1e4 * batch as f64 + if batch > 3 { 5e5 } else { 0.0 };
        let of = of.span(&format!("batch {batch}"), begin, begin + 9e3);
        (0..if batch == 3 { 200 } else { 4 }).fold(of, |of, at| {
            let from = begin + 100.0 + 2e3 * f64::from(at);
            of.kernel("gemm", 7, from, from + 1e3)
        })
    });
    assert!(of.find_steps(Some("batch")));
    assert_eq!(diagnosed(&of).lengths_ms, [10.0; 4]);
    assert!(of.found.unwrap().words.contains("Of them, 8 of 9 steps have about the same number"));
}

/// Calls of a model with an embedding, layers and a head, with a pause between calls.
fn inference(num_calls: u32, num_layers: u32) -> Timeline {
    let (mut of, mut now) = (timeline(0), 0.0);
    for _ in 0..num_calls {
        let layers = (0..num_layers)
            .flat_map(|_| ["norm", "qkv", "attention", "projection", "norm", "up", "down"]);
        for name in ["embedding"].into_iter().chain(layers).chain(["head"]) {
            of = of.launched(name, 7, now, now + 3.0, now + 8.0, now + 12.0);
            now += 10.0;
        }
        now += 500.0;
    }
    of.find_steps(None);
    of
}

#[test]
fn calls_of_a_model_are_found_by_launches_that_repeat() {
    let of = inference(6, 4);
    let found = of.found.as_ref().expect("steps");
    assert!(
        found.words.contains("5 groups of about 30 launches, which are equal in 100 %."),
        "{}",
        found.words
    );
    // A call begins after the pause.
    let starts: Vec<i64> = found.steps.iter().map(|step| step.time.start_ns / 1000).collect();
    assert_eq!(starts, [0, 800, 1600, 2400, 3200]);
    assert_eq!(value(&analyzed(&of, Rules::Steps), "total_kernel_time_us"), 5.0 * 30.0 * 4.0);
    assert!(!found.words.contains("not sure"), "{}", found.words);
    // Layers without an embedding, as in the middle of a pipeline, look like calls, but without a pause.
    let layers = (0..24 * 7).fold(timeline(0), |of, at| {
        let name = ["norm", "qkv", "attention", "projection", "norm", "up", "down"][at % 7];
        let now = 10.0 * at as f64;
        of.launched(name, 7, now, now + 3.0, now + 8.0, now + 12.0)
    });
    let mut layers: Timeline = layers;
    layers.find_steps(None);
    assert!(layers.found.is_none_or(|found| found.words.contains("not sure")));
    // So do layers whose weights are copied from the host, which waits for each copy.
    let mut weights = (0..12).fold(timeline(0).kernel("embedding", 7, 5.0, 8.0), |of, layer| {
        let now = 20.0 + 1_900.0 * f64::from(layer);
        let copy = "Memcpy HtoD (Pageable -> Device)";
        let of = of.launched(copy, 7, now, now + 1e3, now + 1.0, now + 1e3);
        ["norm", "qkv", "attention", "up", "down"].into_iter().zip(1..).fold(
            of,
            |of, (name, at)| {
                let now = now + 1e3 + 10.0 * f64::from(at);
                of.launched(name, 7, now, now + 3.0, now + 8.0, now + 12.0)
            },
        )
    });
    weights.find_steps(None);
    assert!(weights.found.unwrap().words.contains("not sure"));
    // The layers of one call repeat too, but are no steps. Nor are two calls.
    assert_eq!(inference(1, 24).found, None);
    assert_eq!(inference(2, 4).found, None);
    // With kernels that are in no call, such as a warm-up, results that each call copies to the host tell calls from layers.
    let with_warm_up = |copies: bool| {
        let mut of = inference(0, 0).kernel("warm-up", 7, -100.0, -90.0);
        for call in 0..5 {
            let begin = 1e3 * call as f64;
            for (at, name) in
                ["qkv", "attention", "projection", "up", "down"].into_iter().enumerate()
            {
                let from = begin + 20.0 * at as f64;
                of = of.launched(name, 7, from, from + 3.0, from + 8.0, from + 12.0);
            }
            if copies {
                of = of.copy(
                    "Memcpy DtoH (Device -> Pageable)",
                    begin + 200.0,
                    begin + 210.0,
                    8,
                    1.0,
                );
            }
        }
        of.find_steps(None);
        of.found.map(|found| found.steps.len())
    };
    assert_eq!([true, false].map(with_warm_up), [Some(4), None]);
    // Traces of paceline mark their steps.
    let mut own = inference(6, 4);
    own.run_facts.insert("transport".into(), "shm".into());
    assert!(!own.find_steps(None) && own.found.is_none());
}
