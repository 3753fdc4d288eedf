//! `paceline compare --numerics A B`: the first tensor in which two runs differ, and how the difference grows from there.
//!
//! Takes two folders of tensors by step, or two run folders with digests; prints the answer. Where the tensors come from is in
//! `tensors.rs`, `digests.rs` and `passes.rs`.

mod digests;
mod passes;
mod steps;
mod tensors;
mod tree;

use std::path::Path;

use paceline_failure::{Failure, Result};
use paceline_files::{Printable, printable};
use paceline_host::text::{line_width, plural, say, thousands, warn};
use paceline_model::Difference;
use paceline_observe::views::{numerics, passes as of_passes};

/// The moments that are compared after the first one with a difference, to see how it grows.
const LATER_MOMENTS: usize = 3;

/// The moments of both runs, each compared when it is asked for, and notes about what only one of them has.
type Moments<'a> = (Box<dyn Iterator<Item = Result<Moment>> + 'a>, Vec<String>);

/// A moment of both runs, such as `step 3`, and what was found there: per tensor, in the order of the modules.
struct Moment {
    label: String,
    tensors: Vec<TensorPair>,
}

/// A tensor of both runs.
struct TensorPair {
    name: String,
    /// The ranks from which it comes, as in `rank 1`; empty if there is only one.
    rank: String,
    outcome: PairOutcome,
}

enum PairOutcome {
    Same,
    Differs(Difference),
    /// Only the digests are known, and they differ; and the tensor, if its values can be kept.
    Digests(Option<String>),
    /// It is missing on one side, or has another type or shape there.
    Other(String),
}

/// The moments of two folders, by the first kind of file that both have.
fn moments(places: [&Path; 2]) -> Result<Moments<'_>> {
    type Read = fn([&Path; 2]) -> Result<Moments<'_>>;
    let kinds: [(&str, &str, Read); 2] = [
        (of_passes::FILE_NAME, "--watch-passes", passes::moments),
        (numerics::FILE_NAME, "--watch-numerics", digests::moments),
    ];
    let mut problem = None;
    for (file, flag, moments) in kinds {
        let without: Vec<&Path> =
            places.into_iter().filter(|place| !place.join(file).exists()).collect();
        match without[..] {
            [] => return moments(places),
            [only] if problem.is_none() => {
                problem = Some(refused(
                    only,
                    &format!(
                        "it has no {file}, and the other folder has: pass two runs made with {flag}, or two folders of tensors"
                    ),
                ));
            }
            _ => {}
        }
    }
    problem.map_or_else(|| tensors::moments(places), Err)
}

/// Whether two folders differ, and then the place of the first tensor that does, if its values are unknown.
pub(in crate::commands) fn first_place(places: [&Path; 2]) -> Result<Option<Option<String>>> {
    for moment in moments(places)?.0 {
        match moment?.tensors.into_iter().find(TensorPair::differs) {
            Some(TensorPair { outcome: PairOutcome::Digests(place), .. }) => {
                return Ok(Some(place));
            }
            Some(_) => return Ok(Some(None)),
            None => {}
        }
    }
    Ok(None)
}

/// Compares two folders, which are called by these names. `is_open` shows all modules. Returns whether they differ.
pub(in crate::commands) fn compare(
    places: [&Path; 2],
    names: [&Path; 2],
    is_open: bool,
) -> Result<bool> {
    let (moments, notes) = moments(places)?;
    let (mut num_same, mut last_same, mut found) = (0, None, Vec::new());
    for moment in moments {
        let moment = moment?;
        if found.is_empty() && !moment.tensors.iter().any(TensorPair::differs) {
            num_same += moment.tensors.len();
            last_same = Some(moment.label);
            continue;
        }
        found.push(moment);
        if found.len() > LATER_MOMENTS {
            break;
        }
    }
    say(&format!("A is {}, B is {}", names[0].printable(), names[1].printable()));
    notes.iter().for_each(|note| warn(&printable(note)));
    if let Some(label) = last_same {
        let tensors = plural(num_same, "tensor");
        let words = if found.is_empty() { "No difference" } else { "The same bits" };
        say(&printable(&format!("{words} in {tensors}, up to {label}")));
    }
    let Some(first) = found.first() else { return Ok(false) };
    say_first(first);
    say(&tree::table(&found, is_open).fitted(line_width()));
    Ok(true)
}

/// Names the first tensor that differs, and by how much.
fn say_first(moment: &Moment) {
    let Some(TensorPair { name, rank, outcome }) = moment.tensors.iter().find(|of| of.differs())
    else {
        return;
    };
    let rank = if rank.is_empty() { String::new() } else { format!(", {rank}") };
    say(&printable(&format!("The first difference: {}, {name}{rank}", moment.label)));
    match outcome {
        PairOutcome::Same => {}
        PairOutcome::Other(words) => say(&printable(&format!("  {words}"))),
        PairOutcome::Digests(place) => {
            say("  the runs have kept digests only, so it is unknown by how much");
            if let Some(place) = place {
                let flag = format!("--watch-passes '{place}'");
                say(&printable(&format!("  to keep its values, train both again with {flag}")));
            }
        }
        PairOutcome::Differs(of) => {
            let [a, b] = &of.values;
            let (differing, elems) = (thousands(of.differing), thousands(of.elems));
            say(&format!(
                "  {differing} of {elems} elements; the first at {:?}: {a} in A, {b} in B",
                of.first
            ));
            let apart = format!("{} ulps and {:.3e}", of.ulps, of.absolute);
            say(&format!("  at most {apart}; {:.3e} relative to the norm of A", of.relative));
            if of.not_finite != [0; 2] {
                let [a, b] = of.not_finite.map(thousands);
                say(&format!(
                    "  NaN or infinite: {a} elements in A, {b} in B; they are left out of these figures"
                ));
            }
        }
    }
}

impl TensorPair {
    fn differs(&self) -> bool {
        !matches!(self.outcome, PairOutcome::Same)
    }
}

/// The error for a folder that cannot be compared, which says what to change.
fn refused(place: &Path, reason: &str) -> Failure {
    Failure::Usage(format!("--numerics {}: {reason}", place.printable()))
}
