//! The files of a run folder that are written once, when the run has ended: each a view of the facts about the run.
//!
//! `summary.txt` has all that `--verbose` prints about a run, for `paceline show`; its tables have the width that they need.

use std::path::{Path, PathBuf};

use paceline_failure::Result;
use paceline_failure::outputs::write_bytes;
use paceline_host::disk::Disk;
use paceline_settings::config::TrainConfig;

use crate::figures::event::{Event, Listener};
use crate::views::blocks::{detail_lines, end_lines};
use crate::views::{head, step_lines};

/// The name of the text.
pub const SUMMARY_TEXT: &str = "summary.txt";

/// Writes the files.
#[derive(Debug)]
pub struct EndFiles<'a> {
    disk: Disk,
    config: &'a TrainConfig,
    folder: PathBuf,
    /// The first lines of the text.
    head: Vec<String>,
}

impl<'a> EndFiles<'a> {
    /// The files of a run folder.
    pub fn new(disk: Disk, config: &'a TrainConfig, folder: &Path) -> Self {
        Self { disk, config, folder: folder.to_owned(), head: Vec::new() }
    }
}

impl Listener for EndFiles<'_> {
    fn on(&mut self, event: &Event) -> Result<()> {
        match event {
            Event::Placed { group, placements } => {
                self.head.push(head::title(self.config, group));
                self.head.extend(head::places(placements, self.config.device, true));
            }
            Event::Built(model) => {
                self.head.extend([head::size(model), head::samples(self.config)]);
            }
            Event::Ended(facts) => {
                let [end, details] = [end_lines, detail_lines].map(|of| of(facts, None));
                let text = [&*self.head, &end, &details].concat();
                let files = [
                    (SUMMARY_TEXT, Some(text.join("\n") + "\n")),
                    (step_lines::FILE_NAME, step_lines::svg(facts)?),
                ];
                for (name, contents) in files {
                    if let Some(contents) = contents {
                        write_bytes(&self.disk, &self.folder.join(name), contents.as_bytes())?;
                    }
                }
            }
            _ => {}
        }
        Ok(())
    }
}
