//! 1,000 programs drawn at random, whose figures of steps are known: lag, streams, annotations, kernels from before the recording.

use crate::common::{Build, NCCL, analyzed, diagnosed, timeline, value};
use paceline_analysis::hta::Rules;
use paceline_analysis::timeline::Timeline;

/// A fixed sequence of numbers that look random.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % end
    }

    /// A whole number of microseconds.
    fn us(&mut self, from: u64, to: u64) -> f64 {
        (from + self.below(to - from)) as f64
    }

    fn one_in(&mut self, num: u64) -> bool {
        self.below(num) == 0
    }
}

/// A trace, and its right figures.
struct Drawn {
    timeline: Timeline,
    lengths_ms: Vec<f64>,
    kernels_us: f64,
    extent_us: f64,
}

/// The steps before the recording.
const EARLIER: usize = 3;
/// The stream of copies.
const COPIES: i64 = 10;

/// Draws a program, runs it, and records the steps after the first few. `None` if the device ends its earlier work after the first
/// step has begun and before it could do the work of that step, and nothing in the recording shows that.
fn draw(seed: u64) -> Option<Drawn> {
    let mut numbers = Numbers(seed);
    let num_steps = 3 + numbers.below(6) as usize;
    let num_streams = 1 + numbers.below(3);
    let pace = numbers.us(5, 400) as u64;
    let kernels: Vec<(i64, f64, f64, &str)> = (0..5 + numbers.below(30))
        .map(|_| {
            let stream = 7 + numbers.below(num_streams) as i64;
            let name = [NCCL, "gemm", "vectorized_elementwise_kernel"][numbers.below(3) as usize];
            (stream, numbers.us(1, pace + 1), numbers.us(3, 400), name)
        })
        .collect();
    // Only recorded kernels show how long a device was busy with earlier steps that were not like the later ones.
    let shows_earlier = numbers.one_in(2);
    let jitter = if shows_earlier { numbers.below(40) } else { 0 };
    let (syncs, has_views) = (numbers.one_in(4), numbers.one_in(2));
    let first = if numbers.one_in(2) { numbers.us(100, 20_000) } else { 0.0 };
    let tail = numbers.us(1, 300);
    // Clocks of host and device may differ by a part of a step, which looks as if the device lagged for ever.
    let behind = if numbers.one_in(3) { numbers.us(3_000, 30_000) } else { 0.0 };
    // Each step copies the next batch, on a stream that waits for nothing.
    let copy = numbers.one_in(3).then(|| numbers.us(3, 300));
    // Work that no step has launched, such as a copy of a checkpoint.
    let long = numbers.one_in(4).then(|| numbers.us(100, 60_000));

    let mut of = timeline(0);
    let (mut now, mut free, mut all_done) = (0.0f64, [0.0f64; 4], 0.0f64);
    let (mut done, mut first_call, mut is_after_copy) = (Vec::new(), 0.0, false);
    let (mut sum, mut begin, mut end) = (0.0, f64::MAX, 0.0f64);
    for step in 0..EARLIER + num_steps {
        let (mark, before) = (now, all_done);
        done.push(mark.max(before + if before > 0.0 { behind } else { 0.0 }));
        let (is_recorded, counts) =
            (step >= EARLIER, step >= EARLIER && step + 1 < EARLIER + num_steps);
        if let Some(us) = long.filter(|_| step == EARLIER) {
            of = of.launched("checkpoint", 40, mark - 3.0, mark - 2.0, mark - 1.0, mark + us);
        }
        let mut view = (f64::MAX, 0.0f64);
        let copied = copy.map(|dur| (COPIES, 1.0, dur, "Memcpy HtoD (Pinned -> Device)"));
        for (at, (stream, gap, dur, name)) in copied.into_iter().chain(kernels.clone()).enumerate()
        {
            now += gap + numbers.below(jitter + 1) as f64;
            let of_first = (step == EARLIER).then(|| at - usize::from(copy.is_some() && at > 0));
            match of_first.filter(|_| stream != COPIES) {
                Some(0) => first_call = now + 2.0,
                Some(1) => now += first,
                _ => {}
            }
            let dur = dur + numbers.below(jitter + 1) as f64;
            let of_stream = &mut free[stream as usize - 7];
            // Computation begins after all work of the step before, as an optimizer needs all gradients.
            let waits_for = if stream == COPIES { 0.0 } else { before };
            let start = (now + 4.0).max(*of_stream + 1.0).max(waits_for + 1.0);
            *of_stream = start + dur;
            if stream != COPIES && of_first == Some(0) {
                // Nothing tells a stream that is free by chance when the copy has ended from one that waits for it.
                is_after_copy = copy.is_some() && (0.0..=30.0).contains(&(start - free[3]));
            }
            all_done = all_done.max(start + dur);
            let (from, to) = (start + behind, start + dur + behind);
            if is_recorded {
                of = of.launched(name, stream, now, now + 2.0, from, to);
                view = (view.0.min(from), view.1.max(to));
            } else if shows_earlier {
                of = of.stray(name, stream, from, to);
            }
            if counts {
                (sum, begin, end) = (sum + dur, begin.min(from), end.max(to));
            }
            now += 2.0;
        }
        if syncs {
            now = now.max(all_done + behind);
        }
        now += tail;
        if is_recorded {
            of = of.step(step as u64, mark, now);
            if has_views {
                of = of.device_step(step as u64, view.0, view.1);
            }
        }
    }
    let done = &done[EARLIER..];
    let lengths_ms: Vec<f64> = done.windows(2).map(|ends| (ends[1] - ends[0]) / 1e3).collect();
    let begun_us = of.annotations[0].time.start_ns as f64 / 1e3;
    let late_us = done[0] - first_call;
    let is_hidden =
        done[0] > begun_us && (is_after_copy || late_us < 50.0f64.max(10.0 * lengths_ms[0]));
    let is_hidden = !shows_earlier && is_hidden;
    (!is_hidden).then_some(Drawn {
        timeline: of,
        lengths_ms,
        kernels_us: sum,
        extent_us: end - begin,
    })
}

/// 1,000 programs: figures of steps are right to a thousandth.
#[test]
fn figures_of_drawn_steps_are_those_of_the_program() {
    let near = |found: f64, right: f64| (found - right).abs() <= 1e-3 * right;
    let mut wrong = Vec::new();
    let drawn = (0u64..).filter_map(|seed| Some((seed, draw(seed)?)));
    for (seed, drawn) in drawn.take(1_000) {
        let Drawn { timeline, lengths_ms, kernels_us, extent_us } = drawn;
        let rank = analyzed(&timeline, Rules::Steps);
        let found = ["total_kernel_time_us", "kernel_time_us"].map(|name| value(&rank, name));
        let steps = diagnosed(&timeline);
        // The first one of three or more does not count.
        let counted = &lengths_ms[usize::from(lengths_ms.len() > 2)..];
        let mean_ms = counted.iter().sum::<f64>() / counted.len() as f64;
        let is_right = near(found[0], kernels_us)
            && near(found[1], extent_us)
            && rank.steps.chosen.len() == lengths_ms.len()
            && steps.step_ms.is_some_and(|ms| near(ms, mean_ms))
            && steps
                .lengths_ms
                .iter()
                .zip(&lengths_ms)
                .all(|(ms, right)| (ms - right).abs() <= 1e-3 * mean_ms);
        if !is_right {
            wrong.push(format!(
                "{seed}: {found:?} of {kernels_us} and {extent_us}, {:?} of {lengths_ms:?}",
                steps.lengths_ms
            ));
        }
    }
    assert!(
        wrong.is_empty(),
        "{} wrong:\n{}",
        wrong.len(),
        wrong[..wrong.len().min(20)].join("\n")
    );
}
