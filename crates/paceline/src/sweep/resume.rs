//! Keeps the records of finished runs, in memory or in the folder of a sweep.
//!
//! ```text
//! DIR/sweep-settings.json   the settings of the sweep; a command with other settings is refused
//! DIR/records/00000.json    one for each finished run, failed or not
//! DIR/runs/                 their run folders
//! DIR/unfinished/           whatever the run under way writes
//! ```
//!
//! A record is written atomically and is on the disk before the next run starts. So a sweep that was
//! killed at any moment continues with the first run that has no record. This module does not know what
//! is compared.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use super::summary::RunSummary;
use crate::{Failure, Result};

const SETTINGS: &str = "sweep-settings.json";
const RECORDS: &str = "records";

/// The settings that determine the runs of a sweep: names and values, as text.
pub type Settings = BTreeMap<String, String>;

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
    /// The folder with the records, and the lock on it; `None` if the records are kept in memory only.
    folder: Option<(PathBuf, File)>,
    records: Vec<Record>,
}

impl Ledger {
    /// Opens the folder of a sweep with these settings, or makes it. Fails if another sweep uses the
    /// folder.
    pub fn open(folder: &Path, settings: &Settings) -> Result<Self> {
        let failed = |e: std::io::Error| Failure::io(folder.display(), e);
        let usage =
            |text: String| Err(Failure::Usage(format!("--output {}: {text}", folder.display())));
        fs::create_dir_all(folder).map_err(failed)?;
        let lock = File::open(folder).map_err(failed)?;
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            return usage("another sweep is at work in this folder; wait for its end".into());
        }
        let file = folder.join(SETTINGS);
        match fs::read(&file) {
            Ok(bytes) => {
                let before: Settings =
                    serde_json::from_slice(&bytes).map_err(|e| Failure::io(file.display(), e))?;
                if let Some(differences) = differences(&before, settings) {
                    return usage(format!(
                        "this folder holds another sweep: {differences}; pass the same command to go on \
                         with that one, or another folder"
                    ));
                }
            }
            Err(_) if fs::read_dir(folder).map_err(failed)?.next().is_some() => {
                return usage("this folder is not empty, and no sweep has made it".into());
            }
            Err(_) => write_durably(&file, settings)?,
        }
        let mut ledger = Self { folder: Some((folder.to_owned(), lock)), records: Vec::new() };
        fs::create_dir_all(folder.join(RECORDS)).map_err(failed)?;
        for entry in fs::read_dir(folder.join(RECORDS)).map_err(failed)? {
            let file = entry.map_err(failed)?.path();
            // A record that was being written when the sweep was killed has another extension.
            if file.extension().is_some_and(|extension| extension == "json") {
                let bytes = fs::read(&file).map_err(failed)?;
                let record = serde_json::from_slice(&bytes);
                ledger.records.push(record.map_err(|e| Failure::io(file.display(), e))?);
            }
        }
        ledger.records.sort_by_key(|record| record.position);
        Ok(ledger)
    }

    /// The folder, if there is one.
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_ref().map(|(folder, _)| folder.as_path())
    }

    /// All records, in the order of the runs.
    pub fn records(&self) -> &[Record] {
        &self.records
    }

    /// Whether the run at this position is finished, or is skipped because its case has failed before.
    pub fn is_settled(&self, position: usize, case: usize) -> bool {
        let has_failed = |of: &Record| of.case == case && matches!(of.ending, Ending::Failure(_));
        self.records.iter().any(|of| of.position == position || has_failed(of))
    }

    /// Adds a finished run. It is on the disk when this returns.
    pub fn add(&mut self, record: Record) -> Result<()> {
        if let Some((folder, _)) = &self.folder {
            let name = format!("{:05}.json", record.position);
            write_durably(&folder.join(RECORDS).join(name), &record)?;
        }
        self.records.push(record);
        Ok(())
    }

    /// The summaries of a case, one for each round, and the message if it has failed.
    pub fn of_case(&self, case: usize) -> (Vec<RunSummary>, Option<&str>) {
        let (mut summaries, mut failure) = (Vec::new(), None);
        for record in self.records.iter().filter(|record| record.case == case) {
            match &record.ending {
                Ending::Summary(summary) => summaries.push(summary.clone()),
                Ending::Failure(message) => failure = Some(message.as_str()),
            }
        }
        (summaries, failure)
    }
}

/// A text with the settings that differ; `None` if all are the same.
fn differences(before: &Settings, now: &Settings) -> Option<String> {
    let names: std::collections::BTreeSet<&String> = before.keys().chain(now.keys()).collect();
    let or_none = |of: &Settings, name: &String| of.get(name).cloned().unwrap_or("none".into());
    let different = names.into_iter().filter(|name| before.get(*name) != now.get(*name));
    let words: Vec<String> = different
        .map(|name| format!("{name}: {} there, {} here", or_none(before, name), or_none(now, name)))
        .collect();
    (!words.is_empty()).then(|| words.join("; "))
}

/// Writes a file atomically and durably: after a power failure the file is complete, or is not there.
fn write_durably(file: &Path, value: &impl Serialize) -> Result<()> {
    let write = || -> std::io::Result<()> {
        let partial = file.with_extension("partial");
        let mut out = File::create(&partial)?;
        serde_json::to_writer_pretty(&mut out, value)?;
        out.write_all(b"\n")?;
        out.sync_all()?;
        fs::rename(&partial, file)?;
        file.parent().map_or(Ok(()), |folder| File::open(folder)?.sync_all())
    };
    write().map_err(|e| Failure::io(format!("cannot write {}", file.display()), e))
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let mut ledger = Ledger::open(&path, &settings(3)).unwrap();
        ledger.add(done.clone()).unwrap();
        ledger.add(failed.clone()).unwrap();
        // A kill in the middle of writing leaves this behind.
        fs::write(path.join(RECORDS).join("00002.partial"), b"{").unwrap();
        drop(ledger);
        let ledger = Ledger::open(&path, &settings(3)).unwrap();
        assert_eq!(ledger.records(), [done, failed]);
        assert!(ledger.is_settled(0, 0) && !ledger.is_settled(2, 2));
        assert!(ledger.is_settled(7, 1), "a case that has failed is not run again");
        assert_eq!(ledger.of_case(0).0[0].number("steps"), Some(3.0));
        assert_eq!(ledger.of_case(1), (Vec::new(), Some("not finite")));
    }

    #[test]
    fn another_sweep_is_refused_with_what_differs() {
        let folder = tempfile::tempdir().unwrap();
        let refused = |settings: &Settings| match Ledger::open(folder.path(), settings) {
            Err(Failure::Usage(text)) => text,
            other => panic!("{other:?}"),
        };
        drop(Ledger::open(folder.path(), &settings(3)).unwrap());
        let text = refused(&settings(4));
        assert!(text.contains("--rounds: 3 there, 4 here;") && !text.contains("--lr"), "{text}");
        let mut fewer = settings(3);
        fewer.remove("--lr");
        assert!(refused(&fewer).contains("--lr: 0.1 there, none here"));
        let held = Ledger::open(folder.path(), &settings(3)).unwrap();
        assert!(refused(&settings(3)).contains("another sweep is at work"));
        drop(held);
        fs::remove_file(folder.path().join(SETTINGS)).unwrap();
        assert!(refused(&settings(3)).contains("not empty"));
    }
}
