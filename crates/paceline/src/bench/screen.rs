//! What a benchmark prints while it runs, in either style. Only the rank, or the process above the
//! ranks, that has one of these says anything.

use std::io::Write;

use super::lines;
use super::result::{BenchReport, Row, Skipped};
use super::table::{self, Columns};
use crate::cli::StyleName;

/// Standard output.
#[derive(Clone, Copy, Debug)]
pub struct Screen {
    /// What is printed for each size.
    pub style: StyleName,
    /// Which columns the table has.
    pub columns: Columns,
}

impl Screen {
    /// The first configuration is about to begin.
    pub fn opens(&self) {
        if let (StyleName::Table, Some(legend)) = (self.style, table::legend(self.columns)) {
            say(&legend);
        }
    }

    /// A configuration begins, without these sizes; `about` says in words how it is measured.
    pub fn configuration(&self, transport: &str, nproc: usize, about: &str, skipped: &[Skipped]) {
        match self.style {
            StyleName::Table => {
                let ranks = if nproc == 1 { "rank" } else { "ranks" };
                say(&format!("# {nproc} {ranks} over {transport}{about}"));
                for skipped in skipped {
                    say(&table::print_skipped(skipped));
                }
                say(&table::header(self.columns));
            }
            StyleName::Lines => skipped.iter().for_each(|skipped| self.skipped(skipped)),
        }
    }

    /// A size begins.
    pub fn begins(&self, transport: &str, nproc: usize, bytes: u64) {
        if self.style == StyleName::Lines {
            say(&lines::config_line(transport, nproc, bytes));
        }
    }

    /// A size is measured.
    pub fn row(&self, row: &Row) {
        match self.style {
            StyleName::Table => say(&table::print_row(self.columns, row)),
            StyleName::Lines => say(&lines::result_line(row)),
        }
    }

    /// A size, or a whole configuration, is not measured.
    pub fn skipped(&self, skipped: &Skipped) {
        match (self.style, skipped.bytes) {
            (StyleName::Table, _) => say(&table::print_skipped(skipped)),
            (StyleName::Lines, Some(bytes)) => {
                say(&lines::config_line(&skipped.transport, skipped.nproc, bytes));
                say(&lines::skipped_line(skipped));
            }
            // The closing table says it.
            (StyleName::Lines, None) => {}
        }
    }

    /// A configuration of these rows ends; one without any has failed, and that was said.
    pub fn configuration_ends(&self, rows: &[Row], op: &str) {
        if self.style == StyleName::Table && !rows.is_empty() {
            say(&table::footer(rows, op));
        }
    }

    /// All is measured.
    pub fn ends(&self, report: &BenchReport) {
        if self.style == StyleName::Lines {
            say(&lines::result_table(&report.rows, &report.skipped));
        }
    }
}

/// Prints a text. A reader that went away, as `head` does, is no reason to stop.
pub fn say(text: &str) {
    let mut stdout = std::io::stdout().lock();
    let _ = writeln!(stdout, "{text}").and_then(|()| stdout.flush());
}
