//! Sorts the measurements of any program into series: one for each program, operation and number of
//! ranks.

use std::collections::BTreeMap;

use paceline_table::stats::median;

/// Times of one program with one number of ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    /// The program. For a report of paceline: the transport and the name of the file.
    pub name: String,
    /// Number of ranks.
    pub nproc: usize,
    /// The operation; `None` for the files of nccl-tests, which do not name it.
    pub op: Option<String>,
    /// Sizes in bytes, ascending, and times in microseconds.
    pub points: Vec<(u64, f64)>,
}

/// One measured time.
pub struct Measured {
    /// The program, as in [`Series::name`].
    pub name: String,
    /// The algorithm of the operation. Only reports of paceline have it.
    pub algorithm: Option<String>,
    /// Number of ranks.
    pub nproc: usize,
    /// The operation, if the file names it.
    pub op: Option<String>,
    /// The size in bytes.
    pub bytes: u64,
    /// The time in microseconds.
    pub time_us: f64,
}

/// Gives the measurements of paceline names that tell them apart. The algorithm is added if the file has
/// several, and the file's name is added to tell them from the report that they are compared with.
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

/// Sorts the times into series. If a program has several times for one size, for example one per round,
/// their median is used.
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
    all.into_iter()
        .map(|(series, times)| {
            let points =
                times.into_iter().filter_map(|(bytes, all)| Some((bytes, median(all)?))).collect();
            Series { points, ..series }
        })
        .collect()
}
