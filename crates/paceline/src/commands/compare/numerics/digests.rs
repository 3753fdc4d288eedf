//! Two run folders with digests of each step, which `train --watch-numerics` has kept.

use std::io;
use std::path::{Path, PathBuf};

use paceline_failure::{Failure, Result};
use paceline_files::Printable;
use paceline_observe::views::numerics::{FILE_NAME, NumericsReader};

use super::{Moment, Moments, PairOutcome, TensorPair, refused};

/// A step, and the digests of the gradient and the weights of each parameter.
type Step = (u64, Vec<[u64; 2]>);

/// The file of a run.
struct Digests {
    folder: PathBuf,
    file: NumericsReader,
}

impl Digests {
    fn open(folder: &Path) -> Result<Self> {
        let file = NumericsReader::open(folder).map_err(unreadable(folder))?;
        Ok(Self { folder: folder.to_owned(), file })
    }

    fn next(&mut self) -> Result<Option<Step>> {
        self.file.next_step().map_err(unreadable(&self.folder))
    }

    /// The next step that is not before this one.
    fn from(&mut self, step: u64) -> Result<Option<Step>> {
        loop {
            match self.next()? {
                Some((own, _)) if own < step => {}
                found => return Ok(found),
            }
        }
    }
}

/// Two moments for each step that both runs have made: gradients, then weights. A run that was resumed, or a step that was skipped, leaves
/// steps out.
pub(super) fn moments(places: [&Path; 2]) -> Result<Moments> {
    let [mut a, mut b] = [Digests::open(places[0])?, Digests::open(places[1])?];
    let [names, others] = [&a.file.names, &b.file.names];
    if names != others {
        let reason = match names.iter().zip(others).find(|(a, b)| a != b) {
            Some((a, b)) => format!("it trains {b} where A trains {a}"),
            None => format!("it trains {} parameters, and A {}", others.len(), names.len()),
        };
        return Err(refused(places[1], &format!("{reason}: pass runs of the same model")));
    }
    let Some((begin, pair)) = next_pair(&mut a, &mut b)? else {
        let fix = "pass runs with a step in common, that have come to its end";
        return Err(refused(places[1], &format!("no step is in both runs: {fix}")));
    };
    let notes = if begin > 1 { vec![format!("the first step of both is {begin}")] } else { vec![] };
    let mut ahead = Some(pair);
    let pairs = std::iter::from_fn(move || {
        let pair = match ahead.take() {
            Some(pair) => Ok(Some(pair)),
            None => next_pair(&mut a, &mut b).map(|found| found.map(|(_, pair)| pair)),
        };
        let moments = |[own, other]: [Step; 2]| compare(&a.file.names, &own, &other).map(Ok);
        match pair {
            Ok(pair) => pair.map(moments).map(Vec::from),
            Err(error) => Some(vec![Err(error)]),
        }
    });
    Ok((Box::new(pairs.flatten()), notes))
}

/// The next step that both have.
fn next_pair(a: &mut Digests, b: &mut Digests) -> Result<Option<(u64, [Step; 2])>> {
    let (Some(mut own), Some(mut other)) = (a.next()?, b.next()?) else { return Ok(None) };
    while own.0 != other.0 {
        let found = if own.0 < other.0 { a.from(other.0)? } else { b.from(own.0)? };
        let Some(found) = found else { return Ok(None) };
        if own.0 < other.0 { own = found } else { other = found }
    }
    Ok(Some((own.0, [own, other])))
}

fn compare(names: &[String], (step, own): &Step, (_, other): &Step) -> [Moment; 2] {
    [(0, "gradients"), (1, "weights")].map(|(kind, words)| {
        let pairs = names.iter().zip(own.iter().zip(other));
        let tensors = pairs.map(|(name, (a, b))| TensorPair {
            name: name.clone(),
            rank: String::new(),
            outcome: if a[kind] == b[kind] { PairOutcome::Same } else { PairOutcome::Digests },
        });
        Moment { label: format!("step {step}, {words}"), tensors: tensors.collect() }
    })
}

fn unreadable(folder: &Path) -> impl Fn(io::Error) -> Failure {
    let path = folder.join(FILE_NAME);
    move |error| Failure::Usage(format!("--numerics {}: {error}", path.printable()))
}
