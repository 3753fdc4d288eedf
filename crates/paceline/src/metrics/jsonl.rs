//! `metrics.jsonl`: one line with a JSON object per step, per evaluation and per save, as rank 0 saw them. A view
//! of the table of figures.

use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use serde_json::Value;

use super::event::{Event, Listener};
use super::figure::Figure;
use super::table::TABLE;
use crate::disk::{Disk, DiskFile};
use crate::{Failure, Result};

/// The open file.
#[derive(Debug)]
pub struct MetricsFile {
    path: PathBuf,
    file: BufWriter<DiskFile>,
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
    pub fn create(disk: &Disk, folder: &Path) -> Result<Self> {
        let path = folder.join("metrics.jsonl");
        let file = disk
            .create(&path)
            .map_err(|e| Failure::io(format!("cannot write {}", path.display()), e))?;
        Ok(Self { path, file: BufWriter::new(file) })
    }

    /// Adds a line, and flushes it, so that programs that follow the file see it at once.
    fn add(&mut self, line: &Line) -> Result<()> {
        let added = serde_json::to_writer(&mut self.file, line)
            .map_err(std::io::Error::from)
            .and_then(|()| self.file.write_all(b"\n"))
            .and_then(|()| self.file.flush());
        added.map_err(|e| Failure::io(format!("cannot write {}", self.path.display()), e))
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
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::faults::at_each_operation;

    #[test]
    fn after_a_fault_all_lines_but_the_last_are_whole() {
        at_each_operation(|disk, _| {
            let folder = tempfile::tempdir().unwrap();
            let write = || {
                let mut file = MetricsFile::create(disk, folder.path())?;
                (0..3).try_for_each(|step| file.add(&Line(vec![("step", step.into())])))
            };
            let outcome = write();
            assert_eq!(outcome.is_err(), disk.has_failed());
            if let Err(error) = outcome {
                let text = error.to_string();
                assert!(text.contains("metrics.jsonl: no space left"), "{text}");
            }
            let text = std::fs::read_to_string(folder.path().join("metrics.jsonl"));
            let text = text.unwrap_or_default();
            let whole = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
            for (step, line) in whole.enumerate() {
                assert_eq!(line, format!("{{\"step\":{step}}}\n"));
            }
        });
    }
}
