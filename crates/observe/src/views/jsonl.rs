//! `metrics.jsonl`: one line with a JSON object per step, per evaluation and per save, as rank 0 saw them. A view
//! of the table of figures.

use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use paceline_failure::Result;
use paceline_host::disk::Disk;

use crate::figures::event::{Event, Listener};
use crate::figures::figure::Figure;
use crate::figures::table::TABLE;
use crate::record::rank_report::RankReport;
use crate::views::appended::Appended;
use crate::views::summary::Named;

const NAME: &str = "metrics.jsonl";
/// The end of a file that certainly has a step.
const TAIL_BYTES: u64 = 1 << 20;

/// The last step that the file of a run folder has; 0 if it has none.
pub fn last_step(folder: &Path) -> u64 {
    let tail = || {
        let mut file = paceline_files::open(&folder.join(NAME))?;
        let begin = file.seek(SeekFrom::End(0))?.saturating_sub(TAIL_BYTES);
        file.seek(SeekFrom::Start(begin))?;
        let mut bytes = Vec::new();
        file.take(TAIL_BYTES).read_to_end(&mut bytes)?;
        std::io::Result::Ok(bytes)
    };
    let bytes = tail().unwrap_or_default();
    let step = |line: &str| {
        let line: serde_json::Value = serde_json::from_str(line).ok()?;
        line.get("loss").and_then(|_| line.get("step")?.as_u64())
    };
    String::from_utf8_lossy(&bytes).lines().rev().find_map(step).unwrap_or(0)
}

/// The open file.
#[derive(Debug)]
pub struct MetricsFile(Appended);

impl MetricsFile {
    /// Makes the file in a run folder.
    pub fn create(disk: &Disk, folder: &Path) -> Result<Self> {
        Ok(Self(Appended::create(disk, folder.join(NAME), &[])?))
    }

    fn add_line(&mut self, line: &Named) {
        let text = serde_json::to_string(line).expect("plain data") + "\n";
        self.0.add(text.as_bytes(), "the rest of");
    }
}

impl Listener for MetricsFile {
    fn on(&mut self, event: &Event) -> Result<()> {
        if event.position().is_some() {
            // The figures that have a value, in the order of the table.
            let value = |figure: &Figure| Some((figure.name, figure.at(event)?));
            let shown = TABLE.iter().filter(|figure| figure.in_metrics);
            self.add_line(&Named(shown.filter_map(value).collect()));
        }
        Ok(())
    }

    fn add_to(&self, report: &mut RankReport) {
        report.missing_files.extend(self.0.missing.clone());
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
                file.add_line(&Named(vec![("step", step.into())]));
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
