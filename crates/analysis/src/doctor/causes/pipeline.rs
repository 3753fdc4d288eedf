//! The stages of a pipeline compute for different times, so that all wait for the slowest.
//!
//! Seen: ranks that send messages to each other, and differ in computation. Taken away: at most the time by which the slowest
//! stage exceeds the mean; at least half of it, because layers are whole.

use super::*;

pub(in super::super) const CAUSE: Cause = Cause {
    key: "pipeline",
    title: "The stages of the pipeline are unequal",
    gain: Known::Exactly,
    find: Find::All(find),
};

fn find(ranks: &Ranks, cause: &'static Cause) -> Option<Finding> {
    let recorded = &ranks.recorded;
    let is_message = |of: &Recorded| {
        let mut works = of.works.iter().filter(|work| work.class == Class::Communication);
        works.any(|work| of.collective(work) == CollectiveKind::PointToPoint)
    };
    if recorded.len() < 2 || !recorded.iter().all(is_message) {
        return None;
    }
    let tallies = recorded.iter().map(|of| {
        let tally = Tally::of_works(of, |work| work.class != Class::Communication);
        (of, tally.per_step(of).1, Tally { longest: None, ..tally })
    });
    let all: Vec<(&Recorded, f64, Tally)> = tallies.collect();
    let mean = all.iter().map(|(_, ms, _)| ms).sum::<f64>() / all.len() as f64;
    let (it, most_ms, tally) = all.iter().max_by(|a, b| a.1.total_cmp(&b.1))?;
    let text = format!(
        "rank {} computes for {most_ms:.2} ms per step, and the mean of {} ranks is {mean:.2} ms",
        it.rank,
        all.len()
    );
    let change = format!(
        "move a layer from the stage of rank {} to another one: split_spec in torch.distributed.pipelining.pipeline(...)",
        it.rank
    );
    let high_ms = most_ms - mean;
    let gain = Gain::between(high_ms / 2.0, high_ms, it.steps.len());
    let evidence = evidence(it, text, tally);
    let finding =
        ranks.finding(cause, cause.title.to_owned(), change, gain, evidence, Vec::new())?;
    Some(Finding { idle_ms: gain.high_ms, ..finding })
}
