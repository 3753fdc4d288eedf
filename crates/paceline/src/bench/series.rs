//! Measurements of anybody, sorted into series of one program, operation and number of ranks.

use std::collections::BTreeMap;

/// Times of one program with one number of ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    /// The program; for a report of ours its transport, with the file's name after it.
    pub name: String,
    /// Number of ranks.
    pub nproc: usize,
    /// The operation; `None` for the files of nccl-tests, which do not name it.
    pub op: Option<String>,
    /// Sizes in bytes, ascending, and times in microseconds.
    pub points: Vec<(u64, f64)>,
}

/// One time that somebody measured.
pub struct Measured {
    /// As in [`Series`].
    pub name: String,
    /// Only reports of ours name one.
    pub algorithm: Option<String>,
    /// Number of ranks.
    pub nproc: usize,
    /// The operation, where it is named.
    pub op: Option<String>,
    /// The size.
    pub bytes: u64,
    /// The time in microseconds.
    pub time_us: f64,
}

/// Tells times of ours apart: several algorithms of a file from each other, and all from those of the
/// report that they are compared with.
pub fn named(mut measured: Vec<Measured>, stem: &str) -> Vec<Measured> {
    let several = |one: &Measured| {
        measured.iter().any(|other| other.name == one.name && other.algorithm != one.algorithm)
    };
    let several: Vec<bool> = measured.iter().map(several).collect();
    for (one, several) in measured.iter_mut().zip(several) {
        match &one.algorithm {
            Some(algorithm) if several => one.name = format!("{} {algorithm} ({stem})", one.name),
            Some(_) => one.name = format!("{} ({stem})", one.name),
            None => {}
        }
    }
    measured
}

/// Sorts the times into series. Where a program gives several for one size, as after several rounds,
/// their median counts: the lower one of the middle two.
pub fn series(measured: Vec<Measured>) -> Vec<Series> {
    type Times = BTreeMap<u64, Vec<f64>>;
    let mut all: Vec<(Series, Times)> = Vec::new();
    for Measured { name, nproc, op, bytes, time_us, .. } in measured {
        let key = Series { name, nproc, op, points: Vec::new() };
        let at = all.iter().position(|(series, _)| *series == key).unwrap_or(all.len());
        if at == all.len() {
            all.push((key, Times::new()));
        }
        all[at].1.entry(bytes).or_default().push(time_us);
    }
    let median = |mut times: Vec<f64>| {
        times.sort_by(f64::total_cmp);
        times[(times.len() - 1) / 2]
    };
    all.into_iter()
        .map(|(series, times)| {
            let points = times.into_iter().map(|(bytes, times)| (bytes, median(times))).collect();
            Series { points, ..series }
        })
        .collect()
}
