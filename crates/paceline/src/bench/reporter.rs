//! Where a rank reports what it measures: on the screen, and to the process that has started it.

use std::fs::File;
use std::io::Write;

use serde::{Deserialize, Serialize};

use super::result::Row;
use super::screen::Screen;
use crate::run::named::TransportName;
use crate::{Failure, Result};

/// Something that rank 0 finds.
#[derive(Serialize, Deserialize)]
pub(super) enum Found {
    /// A size is measured.
    Row(Box<Row>),
    /// What the memory delivers to all ranks at once, in GB/s.
    MemoryBandwidth(f64),
    /// Why nothing can be measured.
    Failed(String),
}

/// All that one configuration finds, as it comes.
#[derive(Default)]
pub(super) struct Reporter {
    /// Where it is shown.
    pub(super) screen: Option<(Screen, TransportName, usize)>,
    /// Where it is written, one line of JSON for each [`Found`].
    pub(super) file: Option<File>,
    pub(super) rows: Vec<Row>,
    pub(super) memory_bandwidth_gb_s: Option<f64>,
    pub(super) failed: Option<String>,
}

impl Reporter {
    /// The ranks begin with a size.
    pub(super) fn begins(&self, bytes: u64) {
        if let Some((screen, transport, nproc)) = &self.screen {
            screen.begins(transport.name(), *nproc, bytes);
        }
    }

    /// Shows, writes and keeps what was found.
    pub(super) fn report(&mut self, found: Found) -> Result<()> {
        if let (Some((screen, ..)), Found::Row(row)) = (&self.screen, &found) {
            screen.row(row);
        }
        if let Some(file) = &mut self.file {
            let line =
                serde_json::to_string(&found).map_err(|e| Failure::io("a row is no text", e))?;
            writeln!(file, "{line}").map_err(|e| Failure::io("cannot pass a row on", e))?;
        }
        match found {
            Found::Row(row) => self.rows.push(*row),
            Found::MemoryBandwidth(gb_s) => self.memory_bandwidth_gb_s = Some(gb_s),
            Found::Failed(reason) => self.failed = Some(reason),
        }
        Ok(())
    }
}
