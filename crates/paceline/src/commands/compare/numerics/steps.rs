//! The steps that two runs have in common, each compared when it is asked for.

use std::io;
use std::path::Path;

use paceline_failure::{Failure, Result};
use paceline_files::Printable;

use super::{Moment, Moments, refused};

/// The steps of a run, in order, with their numbers.
pub(super) type Steps<'a, T> = Box<dyn Iterator<Item = Result<(u64, T)>> + 'a>;

/// The moments of each step that both runs have made. A run that was resumed, or a step that was skipped, leaves steps out.
pub(super) fn paired<'a, T: 'a>(
    places: [&'a Path; 2],
    [mut a, mut b]: [Steps<'a, T>; 2],
    compare: impl Fn(u64, [T; 2]) -> Vec<Moment> + 'a,
) -> Result<Moments<'a>> {
    let mut next = move || -> Result<Option<(u64, [T; 2])>> {
        let (Some(mut own), Some(mut other)) = (a.next().transpose()?, b.next().transpose()?)
        else {
            return Ok(None);
        };
        while own.0 != other.0 {
            let (behind, steps) =
                if own.0 < other.0 { (&mut own, &mut a) } else { (&mut other, &mut b) };
            let Some(found) = steps.next().transpose()? else { return Ok(None) };
            *behind = found;
        }
        Ok(Some((own.0, [own.1, other.1])))
    };
    let Some(first) = next()? else {
        let fix = "pass runs with a step in common, that have come to its end";
        return Err(refused(places[1], &format!("no step is in both runs: {fix}")));
    };
    let begin = first.0;
    let notes = if begin > 1 { vec![format!("the first step of both is {begin}")] } else { vec![] };
    let pairs = std::iter::once(Ok(first)).chain(std::iter::from_fn(move || next().transpose()));
    let moments = pairs.flat_map(move |pair| match pair {
        Ok((step, pair)) => compare(step, pair).into_iter().map(Ok).collect(),
        Err(error) => vec![Err(error)],
    });
    Ok((Box::new(moments), notes))
}

/// The failure for a file of a run that cannot be read.
pub(super) fn unreadable(folder: &Path, file: &str) -> impl Fn(io::Error) -> Failure {
    let path = folder.join(file);
    move |error| Failure::Usage(format!("--numerics {}: {error}", path.printable()))
}
