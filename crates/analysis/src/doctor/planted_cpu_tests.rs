//! One fault of each kind planted in steps of a processor that are sound otherwise. The doctor must find it and nothing else.

use super::against::against;
use super::{Diagnosis, examine};
use crate::common::{Build, timeline, us};
use crate::hta::Options;
use crate::timeline::{Operator, Product, Timeline, TrackId};

const STEPS: u64 = 7;
const EVALUATED: &str = "autograd::engine::evaluate_function";

/// Steps that each begin with the work that `part` adds, followed by four products of 2 ms. `part` gets the start of a step,
/// and returns when its work ends. Times are in microseconds.
fn steps(part: impl Fn(Timeline, i64) -> (Timeline, i64)) -> Timeline {
    let mut all = timeline(0);
    let mut now = 0;
    for number in 0..STEPS {
        let begin = now;
        (all, now) = part(all, begin + 5);
        for _ in 0..4 {
            all = all.operator("aten::addmm", now + 5, now + 2005);
            now += 2005;
        }
        now += 5;
        all = all.step(number, begin, now);
    }
    all
}

fn diagnose(timeline: Timeline) -> Diagnosis {
    examine(&[timeline], &Options::default(), None).unwrap().diagnosis
}

#[track_caller]
fn assert_found(timeline: Timeline, cause: &str, low_ms: f64, high_ms: f64) {
    let diagnosis = diagnose(timeline);
    let said: Vec<String> = diagnosis.advice.iter().map(|of| of.words()).collect();
    assert_eq!(
        diagnosis.advice.iter().map(|of| of.cause.key).collect::<Vec<_>>(),
        [cause],
        "{said:#?}"
    );
    let gain = diagnosis.advice[0].gain;
    let is_close = (gain.low_ms - low_ms).abs() < 1e-6 && (gain.high_ms - high_ms).abs() < 1e-6;
    assert!(is_close, "{} to {}", gain.low_ms, gain.high_ms);
    assert!(!diagnosis.advice[0].evidence.names.is_empty());
}

#[test]
fn sound_steps_of_a_processor_get_no_advice() {
    let said: Vec<String> =
        diagnose(steps(|all, now| (all, now))).advice.iter().map(|of| of.words()).collect();
    assert_eq!(said, [""; 0]);
    // Two element-wise operators are not a chain.
    let two = steps(|all, now| {
        let all = all.operator("aten::mul", now, now + 500);
        (all.operator("aten::add", now + 500, now + 1000), now + 1000)
    });
    assert!(diagnose(two).advice.is_empty());
}

#[test]
fn a_chain_of_operators_could_be_one() {
    let chain = steps(|mut all, now| {
        let names = ["aten::mul", "aten::add_", "aten::tanh"].map(str::to_owned);
        let backward = ["TanhBackward0", "MulBackward0"].map(|name| format!("{EVALUATED}: {name}"));
        let mut end = now;
        for name in names.iter().chain(&backward) {
            all = all.operator(name, end, end + 400);
            end += 400;
        }
        (all, end)
    });
    // Half of five times 0.4 ms, or all but one.
    assert_found(chain, "elementwise", 1.0, 1.6);
}

#[test]
fn operators_that_are_too_short_want_a_larger_batch() {
    // 800 operators of 5 us, 10 us apart: 12 ms beside 8 ms of products.
    let short = steps(|mut all, now| {
        for at in 0..800 {
            let begin = now + 10 + 15 * at;
            all = all.operator("aten::view", begin, begin + 5);
        }
        (all, now + 15 * 800)
    });
    let diagnosis = diagnose(short);
    let causes: Vec<&str> = diagnosis.advice.iter().map(|of| of.cause.key).collect();
    assert_eq!(causes, ["host_bound"]);
    let gain = diagnosis.advice[0].gain;
    // Three quarters of 8 ms between operators, or of all 12; the products' own few microseconds come on top.
    assert!((6.0..6.1).contains(&gain.low_ms) && (9.0..9.1).contains(&gain.high_ms), "{gain:?}");
    assert!(diagnosis.advice[0].change.contains("batch"));
}

/// An optimizer takes as long for any size of a batch.
#[test]
fn an_optimizer_that_takes_most_of_a_step_wants_a_larger_batch() {
    let large = steps(|all, now| {
        let all = all.span("Optimizer.step#AdamW.step", now, now + 12_000);
        (all.operator("aten::_fused_adamw_", now, now + 12_000), now + 12_000)
    });
    let diagnosis = diagnose(large);
    let [advice] = &diagnosis.advice[..] else { panic!("{:?}", diagnosis.advice) };
    let gain = advice.gain;
    assert_eq!(advice.cause.key, "host_bound");
    assert!((9.0..9.1).contains(&gain.low_ms) && (9.0..9.1).contains(&gain.high_ms), "{gain:?}");
}

#[test]
fn a_loop_that_fetches_values_is_seen() {
    // 100 values of 40 us and an operator before each; all but the first value are between two values.
    let fetched = |count: i64| {
        steps(move |mut all, now| {
            for at in 0..count {
                let begin = now + 50 * at;
                all = all.operator("aten::argmax", begin, begin + 10);
                all = all.operator("aten::item", begin + 10, begin + 50);
            }
            (all, now + 50 * count)
        })
    };
    assert_found(fetched(100), "synchronizations", 99.0 * 0.025, 99.0 * 0.05);
    assert!(diagnose(fetched(20)).advice.is_empty());
    // An optimizer that fetches the steps of its parameters is slow for another reason.
    let fetching = steps(|mut all, now| {
        all = all.span("Optimizer.step#AdamW.step", now, now + 5000);
        for at in 0..100 {
            all = all.operator("aten::item", now + 50 * at, now + 50 * at + 50);
        }
        (all, now + 5000)
    });
    let causes: Vec<&str> = diagnose(fetching).advice.iter().map(|of| of.cause.key).collect();
    assert_eq!(causes, ["optimizer"]);
}

/// A batch takes 24 ms in a loader without workers, beside 8 ms of products.
#[test]
fn workers_of_a_loader_that_computes_are_no_more_than_free_cores() {
    let loaded = |operator: &str, free_cores: Option<u64>| {
        let mut of = steps(|all, now| {
            let all = all.span("enumerate(DataLoader)#_Single", now, now + 24_000);
            (all.operator(operator, now, now + 24_000), now + 24_000)
        });
        of.free_cores = free_cores;
        let advice = diagnose(of).advice.swap_remove(0);
        (advice.change, advice.evidence.text, advice.gain.high_ms)
    };
    // A worker that takes 24 ms for a batch hides the 8 ms of products.
    for (free, workers, gain_ms) in
        [(None, 4, 18.0), (Some(9), 4, 18.0), (Some(2), 2, 18.0), (Some(0), 1, 8.0)]
    {
        let (change, text, high_ms) = loaded("aten::normal_", free);
        assert!(change.contains(&format!("num_workers={workers},")), "{free:?}: {change}");
        assert!((high_ms - gain_ms).abs() < 0.1, "{free:?}: {high_ms}");
        assert!(text.contains("4 workers keep up if each of them has a free core"), "{text}");
        let known = free.map(|free| format!("free cores of this rank: {free}"));
        let known = known.as_deref().unwrap_or("the trace does not say how many are free");
        assert!(text.ends_with(&format!("a network; {known}")), "{text}");
    }
}

/// The recorded steps take 20 ms, those before took 10 ms.
#[test]
fn gains_are_parts_of_the_steps_before_the_recording() {
    let mut of = steps(|all, now| {
        let all = all.span("Optimizer.step#AdamW.step", now, now + 12_000);
        (all.operator("aten::_fused_adamw_", now, now + 12_000), now + 12_000)
    });
    of.unrecorded_ms = vec![10.0, 9.0, 11.0];
    let found = diagnose(of.clone());
    let (advice, gain) = (&found.advice[0], found.advice[0].gain);
    assert!(advice.step_ms == 10.0 && found.step_ms.unwrap() > 19.0, "{found:?}");
    assert!((4.4..4.6).contains(&gain.low_ms) && (4.4..4.6).contains(&gain.high_ms), "{gain:?}");
    // Before and after: recorded by `paceline record` both, or one of them.
    of.unrecorded_ms.clear();
    let plain = diagnose(of);
    let medians = |other: &Diagnosis| against(&found, other).unwrap().step_ms;
    assert_eq!(medians(&found), [10.0, 10.0]);
    assert!(medians(&plain).iter().all(|ms| (19.0..21.0).contains(ms)), "{:?}", medians(&plain));
    let promised = against(&found, &plain).unwrap().causes[0].promised_ms.unwrap();
    assert!((8.9..9.1).contains(&promised.0), "{promised:?}");
}

#[test]
fn convolutions_of_images_in_nchw_are_seen_by_their_strides() {
    let convolutions = |is_nchw: bool| {
        steps(move |all, now| {
            let mut all = all.operator("aten::conv2d", now, now + 2000);
            let names = ["aten::mkldnn_convolution", "float", "8x32x32x32 32x32x3x3"];
            let [name, dtype, shape] = names.map(|name| all.names.intern(name));
            let time = us(now + 10, now + 1990);
            let (lane, flops) = (TrackId(0), 1);
            let bytes = 0;
            all.products.push(Product { name, time, lane, flops, bytes, dtype, shape, is_nchw });
            (all, now + 2000)
        })
    };
    // Nothing, or half of 1.98 ms.
    assert_found(convolutions(true), "layout", 0.0, 0.99);
    assert!(diagnose(convolutions(false)).advice.is_empty());
}

/// Gradients that are allocated again take as long as gradients that are cleared.
#[test]
fn zeroed_gradients_are_no_fault_of_a_processor() {
    let zeroed = steps(|all, now| {
        let all = all.span("Optimizer.zero_grad#SGD.zero_grad", now, now + 500);
        (all.operator("aten::zero_", now, now + 500), now + 500)
    });
    assert!(diagnose(zeroed).advice.is_empty());
}

/// Two passes in each step, each with a transfer that is exposed for 1 ms. In the first one a thread of the transfer takes the core of the
/// rank for 4 ms, each time from another function.
#[test]
fn calls_that_transfers_interrupt_are_shorter_without_them() {
    let pass = |mut all: Timeline, now: i64, interrupted: Option<i64>| {
        all = all.operator("aten::addmm", now + 10, now + 1010);
        let mut end = now + 1010;
        let mut begin = end;
        for function in 0..4 {
            let took = if interrupted == Some(function) { 4500 } else { 500 };
            all = all.operator(&format!("{EVALUATED}: AddmmBackward0"), end, end + took);
            end += took;
            begin = if function == 0 { end } else { begin };
        }
        let name = all.names.intern("gloo:all_reduce");
        let (time, lane) = (us(begin, end + 1000), TrackId(2));
        all.operators.push(Operator { name, time, lane, collective: None });
        (all, end + 1000)
    };
    let mut all = timeline(0);
    let mut now = 0;
    for number in 0..STEPS {
        let begin = now;
        let (first, end) = pass(all, begin, Some(1 + number as i64 % 3));
        let (second, end) = pass(first, end, None);
        all = second.operator("Optimizer.step#SGD.step", end + 10, end + 510);
        now = end + 520;
        all = all.step(number, begin, now);
    }
    let diagnosis = diagnose(all);
    let found = diagnosis.advice.iter().find(|of| of.cause.key == "no_sync");
    let gain = found.expect("gradients are exchanged twice").gain;
    // The exposed transfer, and half of the time that its thread took, or all of it and half of the other calls beside it.
    let is_close = (gain.low_ms - 3.0).abs() < 0.1 && (gain.high_ms - 5.5).abs() < 0.1;
    assert!(is_close, "{gain:?}");
}

/// `softmax(x @ gate) @ experts` multiplies matrices; attention multiplies a matrix for each sample and head.
#[test]
fn a_softmax_is_one_of_attention_between_products_of_batches() {
    let gated = |inner: &'static str| {
        steps(move |mut all, now| {
            for (name, at) in [("aten::matmul", 0), ("aten::softmax", 500), ("aten::matmul", 1500)]
            {
                all = all.operator(name, now + at, now + at + 500);
                all = all.operator(inner, now + at + 10, now + at + 490);
            }
            (all, now + 2000)
        })
    };
    assert!(diagnose(gated("aten::mm")).advice.is_empty());
    let found = diagnose(gated("aten::bmm")).advice;
    assert_eq!(found.iter().map(|of| of.cause.key).collect::<Vec<_>>(), ["attention"]);
}
