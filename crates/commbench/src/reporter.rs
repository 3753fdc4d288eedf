//! A rank reports its measurements here: to the screen, and to the process that has started it.

use std::fs::File;
use std::io::Write;

use paceline_failure::{Failure, Result};
use paceline_launch::TransportName;
use serde::{Deserialize, Serialize};

use super::result::Row;
use super::screen::Screen;
use super::series::Measured;

/// Something that rank 0 reports.
#[derive(Serialize, Deserialize)]
pub(super) enum Found {
    /// The measurement of one size.
    Row(Box<Row>),
    /// The memory bandwidth of all ranks together, in GB/s.
    MemoryBandwidth(f64),
    /// The percentage of its time in which a rank had no core: the most of any rank.
    CpuWait(f64),
    /// The reason why nothing can be measured.
    Failed(String),
}

/// Collects the results of one configuration as they come.
#[derive(Default)]
pub(super) struct Reporter {
    /// The screen on which rows are shown, with the transport and the number of ranks.
    pub(super) screen: Option<(Screen, TransportName, usize)>,
    /// The file to which results are written, one line of JSON for each [`Found`].
    pub(super) file: Option<File>,
    pub(super) rows: Vec<Row>,
    /// The times of another program.
    pub(super) theirs: Vec<Measured>,
    pub(super) memory_bandwidth_gb_s: Option<f64>,
    pub(super) cpu_wait_pct: Option<f64>,
    pub(super) failed: Option<String>,
}

impl Reporter {
    /// Shows that the ranks begin to measure a size.
    pub(super) fn begins(&self, bytes: u64) {
        if let Some((screen, transport, nproc)) = &self.screen {
            screen.begins(transport.name(), *nproc, bytes);
        }
    }

    /// Shows, writes and keeps a result.
    pub(super) fn report(&mut self, found: Found) -> Result<()> {
        if let (Some((screen, ..)), Found::Row(row)) = (&self.screen, &found) {
            screen.row(row);
        }
        if let Some(file) = &mut self.file {
            let line =
                serde_json::to_string(&found).map_err(|e| Failure::io("cannot write a row", e))?;
            writeln!(file, "{line}").map_err(|e| Failure::io("cannot pass a row on", e))?;
        }
        match found {
            Found::Row(row) => self.rows.push(*row),
            Found::CpuWait(pct) => self.cpu_wait_pct = Some(pct),
            Found::MemoryBandwidth(gb_s) => self.memory_bandwidth_gb_s = Some(gb_s),
            Found::Failed(reason) => self.failed = Some(reason),
        }
        Ok(())
    }
}
