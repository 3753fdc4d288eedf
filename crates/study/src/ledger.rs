//! Keeps the records of finished runs, in memory or in the folder of a sweep.
//!
//! ```text
//! DIR/lock                  locked while a sweep is at work
//! DIR/sweep-settings.json   the settings of the sweep; a command with other settings is refused
//! DIR/records/00000.json    one for each finished run, failed or not
//! DIR/runs/                 their run folders
//! DIR/unfinished/           whatever the run under way writes
//! ```
//!
//! A record is written atomically and is on the disk before the next run starts, so a killed sweep continues with the first
//! run without a record. A record states its run, so a copy in another place is refused.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use paceline_failure::outputs::write_json;
use paceline_failure::{Failure, Result};
use paceline_files::{Printable, printable};
use paceline_host::disk::{Disk, DiskFile};
use paceline_host::resources;
use paceline_host::text::say;
use paceline_observe::figures::run_summary::RunSummary;
use serde::{Deserialize, Serialize};

use crate::cases::{self, Case};
use crate::spec;

const LOCK: &str = "lock";
const SETTINGS: &str = "sweep-settings.json";
const RECORDS: &str = "records";

/// The settings that determine the runs of a sweep: names and values, as text.
pub type Settings = BTreeMap<String, String>;

/// The settings of a study that states the specification of each case.
pub fn settings_of(cases: &[Case]) -> impl Iterator<Item = (String, String)> {
    cases.iter().enumerate().map(|(at, case)| {
        (format!("case {at}"), format!("{} ({})", case.name, spec::shown(&case.spec)))
    })
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ending {
    /// It finished, with this summary.
    Summary(RunSummary),
    /// It failed, with this message.
    Failure(String),
}

/// A finished run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Its place in the order of all runs.
    pub position: usize,
    /// The round, from 0.
    pub round: usize,
    /// The case, from 0.
    pub case: usize,
    /// The name of the case.
    pub name: String,
    /// The date and time of its start.
    pub started: String,
    /// Its wall-clock time in seconds.
    pub seconds: f64,
    /// How it ended.
    #[serde(flatten)]
    pub ending: Ending,
}

/// All finished runs.
#[derive(Debug, Default)]
pub struct Ledger {
    /// The disk to which the records are written.
    pub(crate) disk: Disk,
    /// The folder with the records, and the lock on it; `None` in memory.
    folder: Option<(PathBuf, DiskFile)>,
    /// All records, in the order of the runs.
    pub(crate) records: Vec<Record>,
}

/// The most bytes of a sweep's settings, and of a record.
const MAX_BYTES: u64 = 64 << 20;

impl Ledger {
    /// Opens `folder` for runs that `cases`, `settings`, rounds, limit, program and machine determine. Says so if some are
    /// done. Fails if a record belongs to another run than its place.
    pub fn of_runs(
        folder: &Path,
        cases: &[Case],
        (rounds, run_limit): (usize, f64),
        settings: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Self> {
        let mut all: Settings = [
            ("--rounds".to_owned(), rounds.to_string()),
            ("--run-limit".to_owned(), run_limit.to_string()),
            ("version of paceline".to_owned(), env!("CARGO_PKG_VERSION").to_owned()),
            ("machine".to_owned(), resources::machine()),
        ]
        .into();
        all.extend(settings);
        let ledger = Self::open(&Disk::default(), folder, &all)?;
        let order = cases::order(cases.len(), rounds);
        if let Some(problem) =
            ledger.records.iter().find_map(|record| misplaced(record, cases, &order))
        {
            return Err(Failure::Usage(format!("--output {}: {problem}", folder.printable())));
        }
        if !ledger.records.is_empty() {
            let (done, num_runs) = (ledger.records.len(), order.len());
            say(&format!("Goes on after {done} of {num_runs} runs, from {}", folder.printable()));
        }
        Ok(ledger)
    }

    /// Opens or makes the folder of a sweep with these settings. Fails if another sweep uses it.
    pub fn open(disk: &Disk, folder: &Path, settings: &Settings) -> Result<Self> {
        let failed = |e: std::io::Error| Failure::io(folder.printable(), e);
        let usage =
            |text: String| Err(Failure::Usage(format!("--output {}: {text}", folder.printable())));
        disk.create_folder(folder).map_err(failed)?;
        let (file, lock) = (folder.join(SETTINGS), folder.join(LOCK));
        let holds_others = || {
            let is_other = |of: io::Result<fs::DirEntry>| of.is_ok_and(|of| of.file_name() != LOCK);
            fs::read_dir(folder).map(|mut all| all.any(is_other)).map_err(failed)
        };
        let foreign = || {
            let text = "this folder is not empty, and no sweep has made it; pass another folder";
            usage(text.into())
        };
        // Nothing is written into such a folder.
        if !lock.exists() && !file.exists() && holds_others()? {
            return foreign();
        }
        // Not the folder itself, which is locked whenever a file in it is replaced.
        let lock = disk.open_or_create(&lock).map_err(|e| Failure::io(lock.printable(), e))?;
        if lock.lock().is_err() {
            return usage("another sweep is at work in this folder; wait for its end".into());
        }
        // A killed sweep may have left part of a file.
        disk.remove_partial(&file).map_err(failed)?;
        match paceline_files::read(&file, MAX_BYTES) {
            Ok(bytes) => {
                let before: Settings =
                    serde_json::from_slice(&bytes).map_err(|e| Failure::io(file.printable(), e))?;
                if let Some(differences) = differences(&before, settings) {
                    return usage(format!(
                        "this folder holds another sweep: {differences}; pass the same command to go on \
                         with that one, or another folder"
                    ));
                }
            }
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return usage(format!("{} cannot be read: {error}", file.printable()));
            }
            Err(_) if holds_others()? => return foreign(),
            Err(_) => write_json(disk, &file, settings)?,
        }
        let held = Some((folder.to_owned(), lock));
        disk.create_folder(&folder.join(RECORDS)).map_err(failed)?;
        Ok(Self { disk: disk.clone(), folder: held, records: records_in(folder)? })
    }

    /// The folder, if there is one.
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_ref().map(|(folder, _)| folder.as_path())
    }

    /// Whether the run at this position is finished, or skipped because its case has failed.
    pub fn is_settled(&self, position: usize, case: usize) -> bool {
        let has_failed = |of: &Record| of.case == case && matches!(of.ending, Ending::Failure(_));
        self.records.iter().any(|of| of.position == position || has_failed(of))
    }

    /// Adds a finished run. It is on the disk when this returns.
    pub fn add(&mut self, record: Record) -> Result<()> {
        if let Some((folder, _)) = &self.folder {
            let file = folder.join(RECORDS).join(file_of(record.position));
            write_json(&self.disk, &file, &record)?;
        }
        self.records.push(record);
        self.records.sort_by_key(|record| record.position);
        Ok(())
    }

    /// The records of the first rounds.
    pub fn of_rounds(&self, rounds: usize) -> impl Iterator<Item = &Record> {
        self.records.iter().filter(move |record| record.round < rounds)
    }

    /// The summaries of a case, one for each of the first rounds in which it was run, and the message if it has failed.
    pub fn of_case(&self, case: usize, rounds: usize) -> (Vec<RunSummary>, Option<&str>) {
        let (mut summaries, mut failure) = (Vec::new(), None);
        for record in self.of_rounds(rounds).filter(|record| record.case == case) {
            match &record.ending {
                Ending::Summary(summary) => summaries.push(summary.clone()),
                Ending::Failure(message) => failure = Some(message.as_str()),
            }
        }
        (summaries, failure)
    }
}

/// The records in the folder of a sweep, in the order of the runs.
fn records_in(folder: &Path) -> Result<Vec<Record>> {
    let failed = |e: std::io::Error| Failure::io(folder.printable(), e);
    let mut records = Vec::new();
    for entry in fs::read_dir(folder.join(RECORDS)).map_err(failed)? {
        let file = entry.map_err(failed)?.path();
        let refused = |why: String| {
            Failure::Usage(format!(
                "--output {}: {}{why}; remove it, and a run without a record is made again",
                folder.printable(),
                file.printable()
            ))
        };
        // A half-written record has another extension. Its run is repeated, and replaces it.
        if file.extension().is_some_and(|extension| extension == "json") {
            let bytes = paceline_files::read(&file, MAX_BYTES)
                .map_err(|e| Failure::io(file.printable(), e))?;
            let record: Record =
                serde_json::from_slice(&bytes).map_err(|e| refused(format!(": {e}")))?;
            let name = file_of(record.position);
            if !file.ends_with(&name) {
                return Err(refused(format!(" holds the record {name}")));
            }
            records.push(record);
        }
    }
    records.sort_by_key(|record| record.position);
    Ok(records)
}

fn file_of(position: usize) -> String {
    format!("{position:05}.json")
}

/// A message if a record belongs to another run than the one at its position.
fn misplaced(record: &Record, cases: &[Case], order: &[cases::Planned]) -> Option<String> {
    let Record { position, round, case, name, .. } = record;
    let expected = order.get(*position).map(|(_, run)| *run);
    let is_of_case = cases.get(*case).is_some_and(|of| of.name == *name);
    if expected == Some((*round, *case)) && is_of_case {
        return None;
    }
    let place = expected.map_or("no run".to_owned(), |(round, case)| {
        format!("round {} of {}", round + 1, cases[case].name)
    });
    Some(format!(
        "{RECORDS}/{} is of round {} of {}, and stands for {place}; remove it, and a run without a record is made again",
        file_of(*position),
        round.saturating_add(1),
        printable(name)
    ))
}

/// The settings that differ, as text; `None` if there are none.
fn differences(before: &Settings, now: &Settings) -> Option<String> {
    let names: std::collections::BTreeSet<&String> = before.keys().chain(now.keys()).collect();
    let or_none = |of: &Settings, name: &String| of.get(name).cloned().unwrap_or("none".into());
    let different = names.into_iter().filter(|name| before.get(*name) != now.get(*name));
    let words: Vec<String> = different
        .map(|name| format!("{name}: {} there, {} here", or_none(before, name), or_none(now, name)))
        .collect();
    (!words.is_empty()).then(|| words.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use paceline_host::disk::faults::at_each_operation;

    fn settings(rounds: usize) -> Settings {
        [("--rounds".to_owned(), rounds.to_string()), ("--lr".to_owned(), "0.1".to_owned())].into()
    }

    fn record(position: usize, ending: Ending) -> Record {
        let (started, name) = (String::new(), format!("case {position}"));
        Record { position, round: 0, case: position, name, started, seconds: 1.5, ending }
    }

    #[test]
    fn a_ledger_is_read_as_it_was_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a/b");
        let done = record(0, Ending::Summary(serde_json::json!({"steps": 3}).into()));
        let failed = record(1, Ending::Failure("not finite".into()));
        let mut ledger = Ledger::open(&Disk::default(), &path, &settings(3)).unwrap();
        ledger.add(done.clone()).unwrap();
        ledger.add(failed.clone()).unwrap();
        // A kill in the middle of writing leaves this behind.
        fs::write(path.join(RECORDS).join("00002.json.partial"), b"{").unwrap();
        drop(ledger);
        let ledger = Ledger::open(&Disk::default(), &path, &settings(3)).unwrap();
        assert_eq!(ledger.records, [done, failed]);
        assert!(ledger.is_settled(0, 0) && !ledger.is_settled(2, 2));
        assert!(ledger.is_settled(7, 1), "a case that has failed is not run again");
        assert_eq!(ledger.of_case(0, 1).0[0].number("steps"), Some(3.0));
        assert_eq!(ledger.of_case(1, 1), (Vec::new(), Some("not finite")));
    }

    #[test]
    fn another_sweep_is_refused_with_what_differs() {
        let folder = tempfile::tempdir().unwrap();
        let refused =
            |settings: &Settings| match Ledger::open(&Disk::default(), folder.path(), settings) {
                Err(Failure::Usage(text)) => text,
                other => panic!("{other:?}"),
            };
        drop(Ledger::open(&Disk::default(), folder.path(), &settings(3)).unwrap());
        let text = refused(&settings(4));
        assert!(text.contains("--rounds: 3 there, 4 here;") && !text.contains("--lr"), "{text}");
        let mut fewer = settings(3);
        fewer.remove("--lr");
        assert!(refused(&fewer).contains("--lr: 0.1 there, none here"));
        let held = Ledger::open(&Disk::default(), folder.path(), &settings(3)).unwrap();
        assert!(refused(&settings(3)).contains("another sweep is at work"));
        drop(held);
        fs::remove_file(folder.path().join(SETTINGS)).unwrap();
        assert!(refused(&settings(3)).contains("not empty"));
    }

    #[test]
    fn a_record_in_another_place_is_refused_with_its_place() {
        let of = |name: &str| Case { name: name.into(), ..Default::default() };
        let cases = [of("seed=1"), of("seed=2")];
        // Rounds go forth and back: cases 0, 1, 1, 0.
        let record = |position, round, case: usize| {
            let (name, ending) = (cases[case].name.clone(), Ending::Failure(String::new()));
            Record { position, round, case, name, started: String::new(), seconds: 1.0, ending }
        };
        let folder = tempfile::tempdir().unwrap();
        let open = |cases: &[Case]| Ledger::of_runs(folder.path(), cases, (2, 60.0), None);
        let mut ledger = open(&cases).unwrap();
        ledger.add(record(0, 0, 0)).unwrap();
        ledger.add(record(2, 1, 1)).unwrap();
        drop(ledger);
        assert_eq!(open(&cases).unwrap().records.len(), 2);
        let records = folder.path().join(RECORDS);
        let path = |position: usize| records.join(file_of(position));
        let refused = |cases: &[Case]| match open(cases) {
            Err(Failure::Usage(text)) => text,
            other => panic!("{other:?}"),
        };
        // Copied over another one, or beside it under any name.
        for name in ["00002.json", "00003.json", "copy.json"] {
            let before = fs::read(records.join(name)).ok();
            fs::copy(path(0), records.join(name)).unwrap();
            let text = refused(&cases);
            assert!(
                text.contains(&format!("{name} holds the record 00000.json; remove")),
                "{text}"
            );
            match before {
                Some(bytes) => fs::write(records.join(name), bytes).unwrap(),
                None => fs::remove_file(records.join(name)).unwrap(),
            }
        }
        // Of another sweep, which has the same number of cases, or more.
        for (position, round, case, place) in [
            (1, 0, 0, "round 1 of seed=2"),
            (1, usize::MAX, 1, "round 1 of seed=2"),
            (9, 4, 1, "no run"),
        ] {
            write_json(&Disk::default(), &path(position), &record(position, round, case)).unwrap();
            let text = refused(&cases);
            assert!(text.contains(&format!("and stands for {place}; remove")), "{text}");
            fs::remove_file(path(position)).unwrap();
        }
        let text = refused(&[of("seed=1"), of("seed=3")]);
        assert!(text.contains("round 2 of seed=2, and stands for round 2 of seed=3"), "{text}");
    }

    #[test]
    fn after_a_fault_at_any_operation_the_sweep_continues() {
        let done = || Ending::Summary(serde_json::json!({"steps": 3}).into());
        let num_operations = at_each_operation(|disk, _| {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("sweep");
            let make = |disk: &Disk| {
                let mut ledger = Ledger::open(disk, &path, &settings(3))?;
                let from = ledger.records.len();
                (from..3).try_for_each(|position| ledger.add(record(position, done())))?;
                Ok::<usize, Failure>(from)
            };
            let outcome = make(disk);
            assert_eq!(outcome.is_err(), disk.has_failed());
            if let Err(error) = outcome {
                let text = error.to_string();
                assert!(text.contains(&path.display().to_string()), "{text}");
                assert!(text.contains("no space left"), "{text}");
            }
            // The next command goes on with the first run that has no record, and finds the others as they were.
            let records = fs::read_dir(path.join(RECORDS));
            let is_record =
                |entry: &fs::DirEntry| entry.path().extension().is_some_and(|of| of == "json");
            let kept =
                records.map_or(0, |all| all.filter(|of| is_record(of.as_ref().unwrap())).count());
            assert_eq!(make(&Disk::default()).unwrap(), kept);
            let ledger = Ledger::open(&Disk::default(), &path, &settings(3)).unwrap();
            let expected: Vec<Record> = (0..3).map(|position| record(position, done())).collect();
            assert_eq!(ledger.records, expected);
            let left =
                fs::read_dir(&path).unwrap().chain(fs::read_dir(path.join(RECORDS)).unwrap());
            assert_eq!(left.count(), 3 + 3, "a partial file is left");
        });
        assert!(num_operations > 4 * 5, "{num_operations} operations");
    }
}
