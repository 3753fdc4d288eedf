//! Sentences of advice for synthetic steps.

use paceline_model::{Init, LayoutBuilder};

use super::*;
use crate::metrics::anatomy::ReadyLine;

const MB: usize = 1 << 20;

fn layout() -> Layout {
    let mut builder = LayoutBuilder::new();
    for at in 0..4 {
        builder.unit(format!("u{at}"));
        builder.param("weight", [MB / 4], Init::Constant(0.0));
    }
    builder.finish(1)
}

/// Four gradients of 1 MiB, ready at 40, 30, 20, 10 ms; backward ends at 40 ms.
fn anatomy(exposed_ms: f64) -> Anatomy {
    let ready =
        |at| ReadyLine { param: format!("u{at}.weight"), ready_ms: 10.0 * f64::from(4 - at) };
    Anatomy {
        wall_ms: 50.0,
        exposed_ms,
        communication_ms: 40.0,
        backward_end_ms: 40.0,
        ready: (0..4).rev().map(ready).collect(),
        ..Anatomy::default()
    }
}

fn say(kind: Advice, caps: BucketCaps, exposed_ms: f64, ms_per_mb: f64) -> String {
    let cost: Cost = Box::new(move |bytes| ms_per_mb * bytes as f64 / MB as f64);
    let name = if kind == Advice::UseBuckets { "simple_ddp" } else { "ddp" };
    advice(name, kind, caps, &anatomy(exposed_ms), &layout(), &cost).unwrap()
}

/// An operation of a synchronized batch norm: submitted, and done.
fn statistics(ready_ms: f64, done_ms: f64) -> OpLine {
    OpLine { bytes: 0, ready_ms, sent_ms: ready_ms, present_ms: ready_ms, done_ms, hidden_pct: 0.0 }
}

#[test]
fn what_a_run_is_told() {
    let small = BucketCaps { first_bytes: MB, bytes: MB };
    let large = BucketCaps { first_bytes: 4 * MB, bytes: 4 * MB };
    let all = [
        say(Advice::ChooseBuckets, large, 32.0, 8.0),
        say(Advice::ChooseBuckets, small, 8.0, 8.0),
        say(Advice::ChooseBuckets, small, 50.0, 20.0),
        say(Advice::UseBuckets, small, 32.0, 8.0),
        say(Advice::ChooseBuckets, small, 0.5, 0.1),
        say(Advice::AverageLess { every: 8 }, small, 5.0, 8.0),
    ];
    insta::assert_snapshot!(all.join("\n"));
}

#[test]
fn waiting_is_not_the_links_fault() {
    let slowest = Some(Slowest { rank: 3, steps_pct: 90.0, cost_ms: 7.0 });
    let anatomy = Anatomy { slowest, exposed_wait_ms: 5.0, ..anatomy(8.0) };
    let cost: Cost = Box::new(|_| 1.0);
    let caps = BucketCaps::new(MB);
    let kind = Advice::ChooseBuckets;
    let text = advice("ddp", kind, caps, &anatomy, &layout(), &cost).unwrap();
    assert!(text.contains("mostly for rank 3"), "{text}");
}

#[test]
fn costs_are_fitted() {
    let op = |bytes: u64, ms: f64| OpLine {
        bytes,
        ready_ms: 0.0,
        sent_ms: 1.0,
        present_ms: 2.0,
        done_ms: 2.0 + ms,
        hidden_pct: 0.0,
    };
    let cost = measured_cost(&[op(100, 1.5), op(300, 2.5)]);
    assert!((cost(0) - 1.0).abs() < 1e-9 && (cost(1000) - 6.0).abs() < 1e-9);
    assert_eq!(measured_cost(&[op(100, 3.0)])(7), 3.0);
    assert_eq!(measured_cost(&[])(7), 0.0);
}

#[test]
fn statistics_of_batch_norms_are_a_cause_of_their_own() {
    // Each operation takes 5 ms, and 1 ms more for each MiB. The forward pass of 20 ms waits once, the backward pass of 40 ms
    // waits once between the gradients. Both ends and ready times contain the waits.
    let cost: Cost = Box::new(|bytes| 5.0 + bytes as f64 / MB as f64);
    let caps = BucketCaps { first_bytes: 4 * MB, bytes: 4 * MB };
    let ready = [4, 3, 2, 1].map(|at| ReadyLine {
        param: format!("u{}.weight", 4 - at),
        ready_ms: 25.0 + 10.0 * f64::from(at) + if at > 1 { 5.0 } else { 0.0 },
    });
    let anatomy = Anatomy {
        wall_ms: 85.0,
        exposed_ms: 19.0,
        communication_ms: 19.0,
        backward_begin_ms: 25.0,
        backward_end_ms: 70.0,
        ready: ready.into(),
        statistics: vec![statistics(10.0, 15.0), statistics(37.0, 42.0)],
        ..Anatomy::default()
    };
    let layout = layout();
    let replayed =
        pass::backward(&anatomy.ready, [25.0, 70.0], &anatomy.statistics, &layout).unwrap();
    assert_eq!((replayed.end, replayed.ready.clone()), (65.0, vec![65.0, 55.0, 45.0, 35.0]));
    assert_eq!(replayed.blocking.iter().map(|of| of.at).collect::<Vec<_>>(), [37.0]);
    let told = |anatomy: &Anatomy, kind| advice("ddp", kind, caps, anatomy, &layout, &cost);
    let text = told(&anatomy, Advice::ChooseBuckets).unwrap();
    assert!(
        text.starts_with("2 all-reduces of synchronised batch norm make the passes wait 10.00 ms"),
        "{text}"
    );
    assert!(text.contains("would take about 10.00 ms less"), "{text}");
    // Without them, the only bucket is what is left to complain about.
    let without = Anatomy { statistics: Vec::new(), ..anatomy.clone() };
    assert!(
        told(&without, Advice::ChooseBuckets).unwrap().starts_with("bucket 0 is ready 0.00 ms")
    );
    let text = told(&anatomy, Advice::ChooseGathers { prefetch: Some(1) }).unwrap();
    assert!(text.contains("--sync-batch-norm"), "{text}");
}

#[test]
fn compression_pays_on_slow_links_only() {
    let caps = BucketCaps { first_bytes: MB, bytes: MB };
    let told = |exposed_ms: f64, sync_ms: f64, ms_per_mb: f64| {
        let cost: Cost = Box::new(move |bytes| ms_per_mb * bytes as f64 / MB as f64);
        let anatomy = Anatomy { sync_ms, ..anatomy(exposed_ms) };
        advice("bf16", Advice::CompareWithDdp, caps, &anatomy, &layout(), &cost).unwrap()
    };
    // 1 ms per MiB: whole gradients leave 1 ms exposed, the last bucket. 4 ms are for compression.
    let fast = told(2.0, 4.0, 1.0);
    assert!(
        fast.ends_with(
            "would leave about 1.00 exposed and compress nothing, 5.00 ms less per step"
        ),
        "{fast}"
    );
    // Even where next to nothing is exposed.
    let hidden = told(0.5, 8.0, 0.1);
    assert!(
        hidden.ends_with("about 0.10 exposed and compress nothing, 8.40 ms less per step"),
        "{hidden}"
    );
    // 20 ms per MiB: without compression, 80 ms of communication begin at 9 ms, and the pass ends at 36 ms.
    let slow = told(10.0, 4.0, 20.0);
    assert!(
        slow.ends_with("about 53.00 would be exposed, so the step would take 39.00 ms more"),
        "{slow}"
    );
}
