//! `summary.txt`: all that `--verbose` prints about a run, for `paceline show`. A view of the run's events.

use std::path::{Path, PathBuf};

use paceline_failure::Result;
use paceline_failure::outputs::write_bytes;
use paceline_host::disk::Disk;
use paceline_settings::config::TrainConfig;

use crate::figures::event::{Event, Listener};
use crate::views::blocks::{detail_lines, summary_lines};
use crate::views::console::answer_lines;
use crate::views::head;

/// The name of the file.
pub const FILE_NAME: &str = "summary.txt";

/// Collects the lines, and writes them when the run has ended. Tables have the width that they need.
#[derive(Debug)]
pub struct SummaryText<'a> {
    disk: Disk,
    config: &'a TrainConfig,
    file: PathBuf,
    lines: Vec<String>,
}

impl<'a> SummaryText<'a> {
    /// The text for a run folder.
    pub fn new(disk: Disk, config: &'a TrainConfig, folder: &Path) -> Self {
        Self { disk, config, file: folder.join(FILE_NAME), lines: Vec::new() }
    }
}

impl Listener for SummaryText<'_> {
    fn on(&mut self, event: &Event) -> Result<()> {
        match event {
            Event::Placed { group, placements } => {
                self.lines.push(head::title(self.config, group));
                self.lines.extend(head::places(placements, self.config.device, true));
            }
            Event::Built(model) => self.lines.push(head::size(model)),
            Event::Ended(facts) => {
                self.lines.extend(summary_lines(facts, None));
                self.lines.extend(detail_lines(facts, None));
                self.lines.extend(answer_lines(facts));
                let text = self.lines.join("\n") + "\n";
                write_bytes(&self.disk, &self.file, text.as_bytes())?;
            }
            _ => {}
        }
        Ok(())
    }
}
