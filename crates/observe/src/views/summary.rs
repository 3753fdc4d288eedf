//! `summary.json`: the results of a run. A view of the table of figures.

use std::path::{Path, PathBuf};

use paceline_failure::Result;
use paceline_failure::outputs::{write_json, write_stated_json};
use paceline_host::disk::Disk;
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

use crate::figures::event::{Event, Listener};
use crate::figures::facts::Facts;
use crate::figures::table::TABLE;

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
    disk: Disk,
    /// The file in the run folder.
    own: Option<PathBuf>,
    copy: Option<PathBuf>,
}

impl SummaryFile {
    /// Writes the summary to the run folder, if there is one, and to `copy`, if that is given.
    pub fn new(disk: Disk, folder: Option<&Path>, copy: Option<&Path>) -> Self {
        let own = folder.map(|folder| folder.join("summary.json"));
        Self { disk, own, copy: copy.map(Path::to_owned) }
    }
}

impl Listener for SummaryFile {
    fn on(&mut self, event: &Event) -> Result<()> {
        let Event::Ended(facts) = event else { return Ok(()) };
        let summary = Summary(facts);
        if let Some(own) = &self.own {
            // A run with a summary has come to its end, or says where it was stopped, so the file is complete or not there.
            write_json(&self.disk, own, &summary)?;
        }
        self.copy.as_ref().map_or(Ok(()), |copy| write_stated_json(&self.disk, copy, &summary))
    }
}
