//! `passes.jsonl`: digests of the tensors of each pass, written and read: a line with a JSON object per step.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use paceline_failure::Result;
use paceline_host::disk::Disk;
use paceline_strategies::Digested;
use serde::{Deserialize, Serialize};

use crate::figures::event::{Event, Listener};
use crate::record::rank_report::RankReport;
use crate::views::appended::Appended;

/// Its name in a run folder.
pub const FILE_NAME: &str = "passes.jsonl";

/// No line that is read is longer. The values of a tensor take up to four bytes per byte.
const MAX_LINE_BYTES: u64 = 256 << 20;

/// A step.
#[derive(Debug, Serialize, Deserialize)]
struct PassesLine<R> {
    step: u64,
    /// The tensors of each rank.
    ranks: R,
}

/// Writes the file.
#[derive(Debug)]
pub struct PassesFile(Appended);

impl PassesFile {
    /// Makes the file in a run folder.
    pub fn create(disk: &Disk, folder: &Path) -> Result<Self> {
        Ok(Self(Appended::create(disk, folder.join(FILE_NAME), &[])?))
    }
}

impl Listener for PassesFile {
    fn on(&mut self, event: &Event) -> Result<()> {
        if let &Event::Passes(step, ranks) = event {
            let line =
                serde_json::to_string(&PassesLine { step, ranks }).expect("plain data") + "\n";
            self.0.add(line.as_bytes(), "the rest of");
        }
        Ok(())
    }

    fn add_to(&self, report: &mut RankReport) {
        report.missing_files.extend(self.0.missing.clone());
    }
}

/// Reads the file of a run folder, step by step: the tensors of each rank. A last line that was cut off is left out.
///
/// # Errors
/// If it cannot be read, or is no such file.
pub fn read(
    folder: &Path,
) -> io::Result<impl Iterator<Item = io::Result<(u64, Vec<Vec<Digested>>)>>> {
    let mut file = BufReader::new(paceline_files::open(&folder.join(FILE_NAME))?);
    Ok(std::iter::from_fn(move || next(&mut file).transpose()))
}

fn next(file: &mut BufReader<File>) -> io::Result<Option<(u64, Vec<Vec<Digested>>)>> {
    let mut line = Vec::new();
    file.take(MAX_LINE_BYTES).read_until(b'\n', &mut line)?;
    if !line.ends_with(b"\n") {
        let is_cut_off = (line.len() as u64) < MAX_LINE_BYTES;
        let too_long = "it has a line of more than 256 MiB; watch a smaller tensor";
        return if is_cut_off { Ok(None) } else { Err(io::Error::other(too_long)) };
    }
    let PassesLine { step, ranks } = serde_json::from_slice(&line)?;
    Ok(Some((step, ranks)))
}
