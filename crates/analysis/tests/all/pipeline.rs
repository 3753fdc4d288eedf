//! Pipelines of PyTorch with known times: the idle time of each rank by cause, and what its messages waited for.

use paceline_analysis::hta::Options;
use paceline_analysis::ranks::{AcrossRanks, PipelineLedger, across_ranks};
use paceline_analysis::read::parse;
use paceline_analysis::timeline::Timeline;
use paceline_schedule::IdleCause;

/// The events of a rank. Times are in milliseconds.
#[derive(Default)]
struct Rank(Vec<String>);

impl Rank {
    fn event(&mut self, category: &str, name: &str, start: f64, end: f64) {
        let (ts, dur) = (1e3 * start, 1e3 * (end - start));
        self.0.push(format!(
            r#"{{"ph":"X","cat":"{category}","name":"{name}","pid":1,"tid":1,"ts":{ts},"dur":{dur},
                "args":{{"Input Dims":[[4,250]],"Input type":["float"]}}}}"#
        ));
    }

    /// A pass, whose name PyTorch may write. It may receive a message that is asked for and there at these times, and may send one.
    fn pass(
        &mut self,
        (name, is_named): (&str, bool),
        receive: Option<[f64; 2]>,
        [start, end]: [f64; 2],
        sends: bool,
    ) {
        let (stage, kind, at) = (&name[..1], &name[1..2], &name[2..]);
        let mut asked = start;
        if let Some([posted, arrived]) = receive {
            self.event("cpu_op", "c10d::recv_", posted, posted + 0.02);
            self.event("user_annotation", "gloo:recv", posted + 0.01, arrived);
            if is_named {
                self.event(
                    "user_annotation",
                    &format!("PP:{stage}RECV_{kind}{at}"),
                    posted,
                    posted + 0.03,
                );
            }
            asked = posted + 0.03;
        }
        let work = if kind == "F" {
            "aten::mm"
        } else {
            "autograd::engine::evaluate_function: MmBackward0"
        };
        self.event("cpu_op", work, start, end - 0.05);
        if is_named {
            self.event("user_annotation", &format!("PP:{name}"), asked, end - 0.04);
        }
        if sends {
            self.event("cpu_op", "c10d::send", end - 0.02, end);
            if is_named {
                self.event(
                    "user_annotation",
                    &format!("PP:{stage}SEND_{kind}{at}"),
                    end - 0.03,
                    end,
                );
            }
        }
    }

    fn timeline(&self, rank: usize) -> Timeline {
        let text = format!(
            r#"{{"distributedInfo":{{"rank":{rank},"world_size":2,"backend":"gloo"}},"baseTimeNanoseconds":0,"traceEvents":[{}]}}"#,
            self.0.join(",")
        );
        parse(text.as_bytes()).unwrap()
    }
}

/// Three steps of 1F1B with two micro-batches: passes of 10 and 20 ms, messages of 2 ms, and a barrier at the end. In the second one,
/// the second rank is late by so much, and the first one waits until its message has left.
fn ranks(is_named: bool, late_ms: f64) -> [Rank; 2] {
    let (mut first, mut second) = (Rank::default(), Rank::default());
    for step in 0..3u32 {
        let t = 100.0 * f64::from(step) + if step > 1 { late_ms } else { 0.0 };
        let late_ms = if step == 1 { late_ms } else { 0.0 };
        let on_time = |times: [f64; 2]| times.map(|of| t + of);
        let at = |times: [f64; 2]| times.map(|of| t + late_ms + of);
        let (asked, left) = if late_ms > 10.0 { (10.0, 10.0 + late_ms) } else { (0.1, 20.0) };
        for rank in [&mut first, &mut second] {
            rank.event("user_annotation", &format!("ProfilerStep#{step}"), t, t + late_ms + 99.9);
        }
        first.pass(("0F0", is_named), None, on_time([0.1, 10.0]), true);
        first.event("user_annotation", "gloo:send", t + 10.0, t + left - 0.02);
        first.pass(("0F1", is_named), None, on_time([10.0, 20.0]), late_ms == 0.0);
        if late_ms > 0.0 {
            first.event("cpu_op", "c10d::send", t + left, t + left + 0.02);
        }
        first.pass(
            ("0B0", is_named),
            Some([t + left + 0.02, t + late_ms + 44.0]),
            at([44.0, 64.0]),
            false,
        );
        first.pass(("0B1", is_named), Some(at([64.0, 74.0])), at([74.0, 94.0]), false);
        second.pass(("1F0", is_named), Some(at([asked, 12.0])), at([12.0, 22.0]), false);
        second.pass(("1B0", is_named), None, at([22.0, 42.0]), true);
        second.pass(("1F1", is_named), Some(at([42.0, 42.06])), at([42.1, 52.0]), false);
        second.pass(("1B1", is_named), None, at([52.0, 72.0]), true);
        for (rank, begin) in [(&mut first, 94.0), (&mut second, 72.0)] {
            rank.event("cpu_op", "c10d::barrier", at([begin, 0.0])[0], at([begin + 0.02, 0.0])[0]);
            rank.event(
                "user_annotation",
                "gloo:barrier",
                at([begin + 0.02, 0.0])[0],
                at([95.0, 0.0])[0],
            );
        }
    }
    [first, second]
}

fn run(is_named: bool, late_ms: f64) -> AcrossRanks {
    let [first, second] = ranks(is_named, late_ms);
    across_ranks(&[first.timeline(0), second.timeline(1)], &Options::default())
}

#[test]
fn idle_time_is_that_of_the_clock_and_closes() {
    for is_named in [false, true] {
        let Some(PipelineLedger { ranks, num_steps, most_rest_pct, routes, now, other }) =
            run(is_named, 0.0).pipeline
        else {
            panic!("no pipeline, named: {is_named}");
        };
        assert_eq!(num_steps, 2);
        assert!(most_rest_pct < 0.5, "{most_rest_pct} {ranks:?}");
        let near = |a: f64, b: f64| assert!((a - b).abs() < 0.3, "{a}, not {b}: {ranks:?}");
        let idle = |rank: usize| ranks[rank].step - ranks[rank].busy;
        near(ranks[0].step, 100.0);
        near(idle(0), 24.0 + 10.0);
        near(idle(1), 12.0 + 22.0);
        near(ranks[1].of(IdleCause::Barrier), 22.0);
        near(ranks[0].of(IdleCause::Drain), 30.0);
        near(ranks[1].of(IdleCause::Fill), 10.0);
        near(ranks[0].of(IdleCause::Transfer), 4.0);
        near(ranks[1].of(IdleCause::Transfer), 2.0);
        assert_eq!(routes.iter().map(|of| of.ranks).collect::<Vec<_>>(), [(0, 1), (1, 0)]);
        near(routes[0].waited_ms, 10.0);
        near(routes[0].moved_ms, 2.0);
        near(routes[1].waited_ms, 22.0 + 8.0);
        near(routes[1].moved_ms, 4.0);
        assert_eq!((routes[0].messages, routes[0].bytes), (2.0, Some(8000.0)));
        // A rehearsal moves a message only when both ranks have asked for it, so the second one of rank 1 takes time.
        near(now.step_ms, 94.0 + 2.2);
        let (class, rehearsed) = other.unwrap();
        assert!(class.starts_with("Schedule") && rehearsed.step_ms < now.step_ms, "{class}");
    }
}

#[test]
fn a_wait_until_a_message_has_left_is_idle_time() {
    let PipelineLedger { ranks, most_rest_pct, .. } = run(false, 30.0).pipeline.unwrap();
    let near = |a: f64, b: f64| assert!((a - b).abs() < 0.3, "{a}, not {b}: {ranks:?}");
    assert!(most_rest_pct < 0.5, "{most_rest_pct} {ranks:?}");
    near(ranks[0].step, 100.0 + 30.0 / 2.0);
    near(ranks[0].step - ranks[0].busy, 24.0 + 10.0 + 30.0 / 2.0);
    near(ranks[0].of(IdleCause::LatePeer) + ranks[0].of(IdleCause::Transfer), 4.0 + 30.0 / 2.0);
}

#[test]
fn traces_that_are_no_pipeline_have_none() {
    let mut alone = Rank::default();
    alone.event("user_annotation", "ProfilerStep#0", 0.0, 10.0);
    alone.pass(("0F0", false), Some([1.0, 2.0]), [2.0, 5.0], true);
    assert_eq!(
        across_ranks(&[alone.timeline(0), alone.timeline(1)], &Options::default()).pipeline,
        None
    );
    // Two pipelines side by side: the second rank receives nothing from the first.
    let [mut first, second] = ranks(false, 0.0);
    let places = [&first, &first, &second, &second];
    let mesh: Vec<Timeline> =
        places.iter().enumerate().map(|(rank, of)| of.timeline(rank)).collect();
    assert_eq!(across_ranks(&mesh, &Options::default()).pipeline, None);
    // NCCL's messages are kernels, and its passes run on a card.
    first.event("kernel", "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 20.0, 44.0);
    let on_cards = [first.timeline(0), second.timeline(1)];
    assert_eq!(across_ranks(&on_cards, &Options::default()).pipeline, None);
    // Actions of other stages than these ranks have, and one that is no action.
    alone.event("user_annotation", "PP:77F0", 6.0, 7.0);
    alone.event("user_annotation", "PP:99999999999999999999F0", 7.0, 8.0);
    assert_eq!(
        across_ranks(&[alone.timeline(0), alone.timeline(1)], &Options::default()).pipeline,
        None
    );
}
