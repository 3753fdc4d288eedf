//! `paceline compare --numerics A B`: the first tensor in which two runs differ, and how the difference grows from there.
//!
//! Takes two folders of tensors by step, or two run folders with digests; prints the answer. Where the tensors come from is in
//! `tensors.rs` and `digests.rs`.

mod digests;
mod tensors;
mod tree;

use std::path::Path;

use paceline_failure::{Failure, Result};
use paceline_files::{Printable, printable};
use paceline_host::text::{line_width, plural, say, thousands, warn};
use paceline_model::Difference;
use paceline_observe::views::numerics::FILE_NAME;

/// The moments that are compared after the first one with a difference, to see how it grows.
const LATER_MOMENTS: usize = 3;

/// The moments of both runs, each compared when it is asked for, and notes about what only one of them has.
type Moments = (Box<dyn Iterator<Item = Result<Moment>>>, Vec<String>);

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
    /// Only the digests are known, and they differ.
    Digests,
    /// It is missing on one side, or has another type or shape there.
    Other(String),
}

/// Compares two folders. `is_open` shows all modules.
pub(super) fn compare(places: [&Path; 2], is_open: bool) -> Result<u8> {
    let is_run = |place: &&Path| place.join(FILE_NAME).exists();
    let (moments, notes) = match places.iter().filter(|place| is_run(place)).count() {
        2 => digests::moments(places)?,
        1 => {
            let files = places.into_iter().find(|place| !is_run(place)).unwrap_or(places[0]);
            return Err(refused(
                files,
                &format!(
                    "it has no {FILE_NAME}, and the other folder has: pass two runs made with --watch-numerics, or two folders of tensors"
                ),
            ));
        }
        _ => tensors::moments(places)?,
    };
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
    say(&format!("A is {}, B is {}", places[0].printable(), places[1].printable()));
    notes.iter().for_each(|note| warn(&printable(note)));
    if let Some(label) = last_same {
        let tensors = plural(num_same, "tensor");
        let words = if found.is_empty() { "No difference" } else { "The same bits" };
        say(&printable(&format!("{words} in {tensors}, up to {label}")));
    }
    let Some(first) = found.first() else { return Ok(0) };
    say_first(first);
    say(&tree::table(&found, is_open).fitted(line_width()));
    Ok(0)
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
        PairOutcome::Digests => {
            say("  the runs have kept digests only, so it is unknown by how much")
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
