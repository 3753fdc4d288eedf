//! `metrics.jsonl`: one line with a JSON object per step and per evaluation, as rank 0 saw them. A view
//! of the table of figures.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use serde_json::Value;

use super::event::{Event, Listener};
use super::figure::Figure;
use super::table::TABLE;
use crate::{Failure, Result};

/// The open file.
#[derive(Debug)]
pub struct MetricsFile {
    file: BufWriter<File>,
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
    pub fn create(folder: &Path) -> Result<Self> {
        let path = folder.join("metrics.jsonl");
        let file = File::create(&path)
            .map_err(|e| Failure::io(format!("cannot write {}", path.display()), e))?;
        Ok(Self { file: BufWriter::new(file) })
    }

    /// Adds a line, and flushes it, so that programs that follow the file see it at once.
    fn add(&mut self, line: &Line) -> Result<()> {
        let fail = |e: &dyn std::fmt::Display| Failure::io("cannot write metrics.jsonl", e);
        serde_json::to_writer(&mut self.file, line).map_err(|e| fail(&e))?;
        self.file.write_all(b"\n").and_then(|()| self.file.flush()).map_err(|e| fail(&e))
    }
}

impl Listener for MetricsFile {
    fn on(&mut self, event: &Event) -> Result<()> {
        match event {
            Event::Step(step) => self.add(&Line::new(|figure| figure.of_step(step))),
            Event::Evaluated(evaluation) if !evaluation.is_repeated => {
                self.add(&Line::new(|figure| figure.of_evaluation(evaluation)))
            }
            _ => Ok(()),
        }
    }
}
