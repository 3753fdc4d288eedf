//! The measurements of any program as series: one for each program, operation and number of ranks.

use std::collections::{HashMap, HashSet};

use paceline_table::stats::median;
use serde::Serialize;

/// One measured time.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Measured {
    /// The program. For a report of paceline: the transport and the name of the file.
    pub name: String,
    /// The algorithm of the operation. Only reports of paceline have it.
    pub algorithm: Option<String>,
    /// Number of ranks.
    pub nproc: usize,
    /// The operation; `None` for the files of nccl-tests, which do not name it.
    pub op: Option<String>,
    /// The size in bytes.
    pub bytes: u64,
    /// The time in microseconds.
    pub time_us: f64,
}

impl Measured {
    /// Whether both are of the same series.
    pub fn is_beside(&self, other: &Self) -> bool {
        (&self.name, self.nproc, &self.op) == (&other.name, other.nproc, &other.op)
    }

    /// Whether it may be of this operation.
    pub fn is_of(&self, op: &str) -> bool {
        self.op.as_ref().is_none_or(|own| own == op)
    }
}

/// Gives the measurements of paceline names that tell them apart. The algorithm is added if the file has
/// several, and the file's name is added to tell them from the report that they are compared with.
pub fn named(mut measured: Vec<Measured>, stem: &str) -> Vec<Measured> {
    let mut algorithms: HashMap<&str, &Option<String>> = HashMap::new();
    let mut several = HashSet::new();
    for one in &measured {
        if *algorithms.entry(&one.name).or_insert(&one.algorithm) != &one.algorithm {
            several.insert(one.name.clone());
        }
    }
    for one in &mut measured {
        match &one.algorithm {
            Some(algorithm) if several.contains(&one.name) => {
                one.name = format!("{} {algorithm} ({stem})", one.name)
            }
            Some(_) => one.name = format!("{} ({stem})", one.name),
            None => {}
        }
    }
    measured
}

/// The times, one series after the other, with ascending sizes. If a program has several times for one size, for example one
/// per round, their median is used.
pub fn series(mut measured: Vec<Measured>) -> Vec<Measured> {
    let mut first = HashMap::new();
    for (at, one) in measured.iter().enumerate() {
        first.entry((one.name.clone(), one.nproc, one.op.clone())).or_insert(at);
    }
    let place = |one: &Measured| first[&(one.name.clone(), one.nproc, one.op.clone())];
    measured.sort_by_cached_key(|one| (place(one), one.bytes));
    let same = measured.chunk_by(|a, b| a.is_beside(b) && a.bytes == b.bytes);
    let median = |same: &[Measured]| {
        let time_us = median(same.iter().map(|of| of.time_us))?;
        Some(Measured { time_us, ..same[0].clone() })
    };
    same.filter_map(median).collect()
}
