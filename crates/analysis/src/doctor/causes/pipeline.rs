//! The stages of a pipeline compute for different times, so that all wait for the slowest.
//!
//! Seen: ranks that send messages to each other, and differ in computation. Taken away: at most the time by which the slowest
//! stage exceeds the mean; at least half of it, because layers are whole.

use std::collections::HashMap;

use super::super::names::{Class, brief};
use super::super::recorded::Recorded;
use super::super::{Advice, evidence};
use super::Cause;
use crate::advice::gain::Gain;
use crate::hta::CollectiveKind;

fn compute_ms(of: &Recorded) -> f64 {
    let works = of.works.iter().filter(|work| work.class != Class::Communication);
    of.per_step(works.map(|work| work.time.dur_ns).sum::<i64>() as f64 / 1e6)
}

pub(in super::super) fn advise(recorded: &[Recorded], step_ms: f64) -> Option<Advice> {
    let is_message = |of: &Recorded| {
        let mut works = of.works.iter().filter(|work| work.class == Class::Communication);
        works.any(|work| of.collective(work) == CollectiveKind::PointToPoint)
    };
    if recorded.len() < 2 || !recorded.iter().all(is_message) {
        return None;
    }
    let all: Vec<f64> = recorded.iter().map(compute_ms).collect();
    let mean = all.iter().sum::<f64>() / all.len() as f64;
    let slowest = (0..all.len()).max_by(|a, b| all[*a].total_cmp(&all[*b]))?;
    let high_ms = all[slowest] - mean;
    let it = &recorded[slowest];
    let text = format!(
        "rank {} computes for {:.2} ms per step, and the mean of {} ranks is {mean:.2} ms",
        it.rank,
        all[slowest],
        all.len()
    );
    let mut what: HashMap<String, i64> = HashMap::new();
    for work in it.works.iter().filter(|work| work.class != Class::Communication) {
        *what.entry(brief(it.text(work.name))).or_default() += work.time.dur_ns;
    }
    Some(Advice {
        cause: Cause::Pipeline,
        title: Cause::Pipeline.title().to_owned(),
        change: format!(
            "move a layer from the stage of rank {} to another one: split_spec in torch.distributed.pipelining.pipeline(...)",
            it.rank
        ),
        gain: Gain { ms: 0.75 * high_ms, low_ms: high_ms / 2.0, high_ms, steps: it.steps.len() },
        step_ms,
        evidence: evidence(it, text, &what, None),
    })
}
