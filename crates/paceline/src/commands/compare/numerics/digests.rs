//! Two run folders with digests of each step, which `train --watch-numerics` has kept.

use std::path::Path;

use paceline_failure::Result;
use paceline_observe::views::numerics::{FILE_NAME, NumericsReader};

use super::steps::{Steps, paired, unreadable};
use super::{Moment, Moments, PairOutcome, TensorPair, refused};

/// The digests of the gradient and the weights of each parameter.
type Digests = Vec<[u64; 2]>;

/// Two moments for each step that both runs have made: gradients, then weights.
pub(super) fn moments(places: [&Path; 2]) -> Result<Moments<'_>> {
    let open =
        |at: usize| NumericsReader::open(places[at]).map_err(unreadable(places[at], FILE_NAME));
    let [a, b] = [open(0)?, open(1)?];
    let [names, others] = [&a.names, &b.names];
    if names != others {
        let reason = match names.iter().zip(others).find(|(a, b)| a != b) {
            Some((a, b)) => format!("it trains {b} where A trains {a}"),
            None => format!("it trains {} parameters, and A {}", others.len(), names.len()),
        };
        return Err(refused(places[1], &format!("{reason}: pass runs of the same model")));
    }
    let names = names.clone();
    let steps = |mut file: NumericsReader, place| -> Steps<Digests> {
        let next = move || file.next_step().map_err(unreadable(place, FILE_NAME)).transpose();
        Box::new(std::iter::from_fn(next))
    };
    paired(places, [steps(a, places[0]), steps(b, places[1])], move |step, digests| {
        compare(&names, step, digests).into()
    })
}

fn compare(names: &[String], step: u64, [own, other]: [Digests; 2]) -> [Moment; 2] {
    [(0, "gradients"), (1, "weights")].map(|(kind, words)| {
        let pairs = names.iter().zip(own.iter().zip(&other));
        let tensors = pairs.map(|(name, (a, b))| TensorPair {
            name: name.clone(),
            rank: String::new(),
            outcome: if a[kind] == b[kind] {
                PairOutcome::Same
            } else {
                PairOutcome::Digests(None)
            },
        });
        Moment { label: format!("step {step}, {words}"), tensors: tensors.collect() }
    })
}
