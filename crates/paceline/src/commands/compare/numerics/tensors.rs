//! Folders of safetensors files: one file per step, as `step_0003.safetensors`, and a folder for each rank, as `rank_1`, if there are
//! several.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use paceline_failure::{Failure, Result};
use paceline_model::{FileTensor, ModelError};

use super::{Moment, Moments, PairOutcome, TensorPair, refused};

/// The files of a moment: those of all ranks that have one. A rank is `None` if its file lies in the folder itself.
type Files = BTreeMap<Option<usize>, PathBuf>;

/// The last number in a name without its ending, and the name: files come in this order.
type Key = (Option<u64>, String);

/// The files of both sides that are compared with each other, and the rank in words.
struct Pending {
    label: String,
    pairs: Vec<(String, [PathBuf; 2])>,
}

/// A moment for each file name that both sides have.
pub(super) fn moments(places: [&Path; 2]) -> Result<Moments<'_>> {
    let [a, b] = [files_of(places[0])?, files_of(places[1])?];
    let (mut moments, mut notes) = (Vec::new(), Vec::new());
    for (key, files) in &a {
        let Some(others) = b.get(key) else {
            notes.push(format!("only A has {}.safetensors", key.1));
            continue;
        };
        let label = label(key);
        moments.push(Pending { pairs: pairs(files, others, &label, &mut notes), label });
    }
    let only_b = b.keys().filter(|key| !a.contains_key(key));
    notes.extend(only_b.map(|(_, name)| format!("only B has {name}.safetensors")));
    if moments.iter().all(|moment| moment.pairs.is_empty()) {
        let [first, other] = [&a, &b].map(|of| of.keys().next().map_or("", |(_, name)| &**name));
        let reason = "no file has the name and the rank of one in A";
        return Err(refused(
            places[1],
            &format!("{reason}; A has {first}, B has {other}: give the steps the same names"),
        ));
    }
    Ok((Box::new(moments.into_iter().map(Pending::compare)), notes))
}

/// `step 3`, with the rest of the name if that says more.
fn label((number, name): &Key) -> String {
    let Some(step) = number else { return name.clone() };
    let words = name.trim_end_matches(|letter: char| letter.is_ascii_digit());
    match words.trim_end_matches(['_', '-']) {
        "" | "step" => format!("step {step}"),
        words => format!("step {step}, {words}"),
    }
}

/// Which files belong together: those of the same rank. The only file of a side stands for all its ranks.
fn pairs(
    a: &Files,
    b: &Files,
    label: &str,
    notes: &mut Vec<String>,
) -> Vec<(String, [PathBuf; 2])> {
    let only = |of: &Files| of.values().next().filter(|_| of.len() == 1).cloned();
    let (only_a, only_b) = (only(a), only(b));
    let ranks: BTreeSet<Option<usize>> = if only_a.is_some() && only_b.is_some() {
        b.keys().copied().collect()
    } else {
        a.keys().chain(b.keys()).filter(|rank| rank.is_some()).copied().collect()
    };
    let mut pairs = Vec::new();
    for rank in ranks {
        let words = rank.map_or(String::new(), |rank| format!("rank {rank}"));
        match (a.get(&rank).or(only_a.as_ref()), b.get(&rank).or(only_b.as_ref())) {
            (Some(own), Some(other)) => pairs.push((words, [own.clone(), other.clone()])),
            (Some(_), None) => notes.push(format!("only A has {label} of {words}")),
            _ => notes.push(format!("only B has {label} of {words}")),
        }
    }
    pairs
}

/// The files of a folder and of its folders of ranks.
fn files_of(place: &Path) -> Result<BTreeMap<Key, Files>> {
    let mut found: BTreeMap<Key, Files> = BTreeMap::new();
    let mut folders = vec![(None, place.to_owned())];
    while let Some((rank, folder)) = folders.pop() {
        let entries = std::fs::read_dir(&folder)
            .and_then(|all| all.collect::<std::io::Result<Vec<_>>>())
            .map_err(|error| refused(&folder, &error.to_string()))?;
        for entry in entries {
            let (path, name) = (entry.path(), entry.file_name());
            let name = name.to_string_lossy();
            let of_rank = name.strip_prefix("rank_").and_then(|rank| rank.parse::<usize>().ok());
            if of_rank.is_some() && rank.is_none() && path.is_dir() {
                folders.push((of_rank, path));
            } else if let Some(stem) = name.strip_suffix(".safetensors") {
                let numbers = stem.rsplit(|letter: char| !letter.is_ascii_digit());
                let number = numbers.into_iter().find(|digits| !digits.is_empty());
                let number = number.and_then(|digits| digits.parse().ok());
                found.entry((number, stem.to_owned())).or_default().insert(rank, path);
            }
        }
    }
    if found.is_empty() {
        let fix = "write one per step, or pass the folders of two runs made with --watch-numerics";
        return Err(refused(place, &format!("there is no .safetensors file in it: {fix}")));
    }
    Ok(found)
}

impl Pending {
    /// Reads the files and compares their tensors.
    fn compare(self) -> Result<Moment> {
        let mut tensors = Vec::new();
        for (rank, paths) in self.pairs {
            let [a, b] = [all(&paths[0])?, all(&paths[1])?];
            let names: BTreeSet<&str> = a.iter().map(|own| &*own.name).collect();
            let others: BTreeMap<&str, _> = b.iter().map(|other| (&*other.name, other)).collect();
            let outcome = |own: &FileTensor| -> Result<PairOutcome> {
                let Some(other) = others.get(&*own.name) else {
                    return Ok(PairOutcome::Other("it is in A only".to_owned()));
                };
                let [a, b] = [own.form(), other.form()];
                if a != b {
                    return Ok(PairOutcome::Other(format!("it is {a} in A and {b} in B")));
                }
                let difference = own.difference(other).map_err(unreadable)?;
                Ok(difference.map_or(PairOutcome::Same, PairOutcome::Differs))
            };
            for own in &a {
                let (name, rank) = (own.name.clone(), rank.clone());
                tensors.push(TensorPair { name, rank, outcome: outcome(own)? });
            }
            for other in b.iter().filter(|other| !names.contains(&*other.name)) {
                let (name, rank) = (other.name.clone(), rank.clone());
                let outcome = PairOutcome::Other("it is in B only".to_owned());
                tensors.push(TensorPair { name, rank, outcome });
            }
        }
        Ok(Moment { label: self.label, tensors })
    }
}

fn all(path: &Path) -> Result<Vec<FileTensor>> {
    FileTensor::all(path).map_err(unreadable)
}

fn unreadable(error: ModelError) -> Failure {
    Failure::Usage(format!("--numerics: {error}"))
}
