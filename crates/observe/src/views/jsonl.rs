//! `metrics.jsonl`: one line with a JSON object per step, per evaluation and per save, as rank 0 saw them. A view
//! of the table of figures.

use std::io::Write;
use std::path::{Path, PathBuf};

use paceline_failure::{Failure, Result};
use paceline_files::Printable;
use paceline_host::disk::{Disk, DiskFile};
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use serde_json::Value;

use crate::figures::event::{Event, Listener};
use crate::figures::figure::Figure;
use crate::figures::table::TABLE;
use crate::record::rank_report::{RankReport, do_without};

/// The open file.
#[derive(Debug)]
pub struct MetricsFile {
    path: PathBuf,
    /// `None` after a write has failed: a line that comes later would hide that others are missing.
    file: Option<DiskFile>,
    /// The bytes of whole lines.
    len_bytes: u64,
    /// Why the file ends early.
    missing: Option<String>,
}

/// A line: names and values, in the order of the table.
struct Line(Vec<(&'static str, Value)>);

impl Line {
    fn new(value: impl Fn(&Figure) -> Option<Value>) -> Self {
        let shown = TABLE.iter().filter(|figure| figure.in_metrics);
        Self(shown.filter_map(|figure| Some((figure.name, value(figure)?))).collect())
    }
}

impl Serialize for Line {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (name, value) in &self.0 {
            map.serialize_entry(name, value)?;
        }
        map.end()
    }
}

impl MetricsFile {
    /// Makes the file in a run folder.
    ///
    /// # Errors
    ///
    /// If the file cannot be made at the start of the run, when nothing is lost yet. If a later write fails, the run goes
    /// on, and its report says that the file ends early.
    pub fn create(disk: &Disk, folder: &Path) -> Result<Self> {
        let path = folder.join("metrics.jsonl");
        let file = disk
            .create(&path)
            .map_err(|e| Failure::io(format!("cannot write {}", path.printable()), e))?;
        Ok(Self { path, file: Some(file), len_bytes: 0, missing: None })
    }

    /// Adds a line in one write, so that programs that follow the file see it at once. If the disk takes only a part of it,
    /// that part is removed again.
    fn add(&mut self, line: &Line) -> Result<()> {
        let Some(file) = &mut self.file else { return Ok(()) };
        let mut text = serde_json::to_vec(line)
            .map_err(|e| Failure::io(format!("cannot write {}", self.path.printable()), e))?;
        text.push(b'\n');
        let Err(error) = file.write_all(&text) else {
            self.len_bytes += text.len() as u64;
            return Ok(());
        };
        // Making a file shorter takes no room. A disk that refuses even that leaves half a line.
        let _ = file.cut(self.len_bytes);
        let what = format!("the rest of {}", self.path.printable());
        self.missing = Some(do_without(&what, &error));
        self.file = None;
        Ok(())
    }
}

impl Listener for MetricsFile {
    fn on(&mut self, event: &Event) -> Result<()> {
        match event {
            Event::Step(step) => self.add(&Line::new(|figure| figure.of_step(step))),
            Event::Evaluated(evaluation) if !evaluation.is_repeated => {
                self.add(&Line::new(|figure| figure.of_evaluation(evaluation)))
            }
            Event::Saved(save) => self.add(&Line::new(|figure| figure.of_save(save))),
            _ => Ok(()),
        }
    }

    fn add_to(&self, report: &mut RankReport) {
        report.missing_files.extend(self.missing.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use paceline_host::disk::faults::{Fault, at_each_operation};

    #[test]
    fn after_a_fault_the_run_goes_on_and_all_lines_are_whole() {
        let mut num_without = 0;
        at_each_operation(|disk, fault| {
            let folder = tempfile::tempdir().unwrap();
            let mut file = match MetricsFile::create(disk, folder.path()) {
                Ok(file) => file,
                Err(error) => {
                    let text = error.to_string();
                    assert!(text.contains("metrics.jsonl: no space left"), "{text}");
                    return;
                }
            };
            for step in 0..3 {
                file.add(&Line(vec![("step", step.into())])).unwrap();
            }
            let mut report = RankReport::default();
            file.add_to(&mut report);
            assert_eq!(report.missing_files.len(), usize::from(disk.has_failed()));
            num_without += report.missing_files.len();
            let text = std::fs::read_to_string(folder.path().join("metrics.jsonl")).unwrap();
            // A process that has ended cannot remove its output.
            assert!(fault == Fault::Stops || text.is_empty() || text.ends_with('\n'), "{text:?}");
            let whole = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
            for (step, line) in whole.enumerate() {
                assert_eq!(line, format!("{{\"step\":{step}}}\n"));
            }
        });
        assert_eq!(num_without, 3 * 3, "a write for each line, with each kind of fault");
    }
}
