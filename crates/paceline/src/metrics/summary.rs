//! `summary.json`: the results of a run. A view of the table of figures.

use std::path::{Path, PathBuf};

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

use super::event::{Event, Listener};
use super::facts::Facts;
use super::table::TABLE;
use crate::Result;
use crate::outputs::write_json;

/// All figures of a run; null if no step was measured.
struct Summary<'a>(&'a Facts<'a>);

impl Serialize for Summary<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let shown = TABLE.iter().filter(|figure| figure.in_summary);
        let mut map = serializer.serialize_map(None)?;
        for figure in shown {
            map.serialize_entry(figure.name, &figure.of_run(self.0))?;
        }
        map.end()
    }
}

/// `summary.json`, and the copy that `--json` asks for.
#[derive(Debug)]
pub struct SummaryFile {
    files: Vec<PathBuf>,
}

impl SummaryFile {
    /// Writes the summary to the run folder, if there is one, and to `copy`, if that is given.
    pub fn new(folder: Option<&Path>, copy: Option<&Path>) -> Self {
        let file = folder.map(|folder| folder.join("summary.json"));
        Self { files: file.into_iter().chain(copy.map(Path::to_owned)).collect() }
    }
}

impl Listener for SummaryFile {
    fn on(&mut self, event: &Event) -> Result<()> {
        let Event::Ended(facts) = event else { return Ok(()) };
        self.files.iter().try_for_each(|file| write_json(file, &Summary(facts)))
    }
}
