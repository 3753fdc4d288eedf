//! Prints the progress of a benchmark, in either style. Only one process, or one rank, has a [`Screen`].

use clap::{Args, ValueEnum};
use paceline_host::text::{line_width, plural, say, say_unbroken};
use paceline_table::stats::noise_words;

use super::result::{BenchReport, Row, Skipped};
use super::table::ColumnSet;
use super::{lines, table};

/// The format of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Style {
    /// The table of nccl-tests
    Table,
    /// Two lines per configuration, and a closing table
    Lines,
}

/// Prints to standard output.
#[derive(Clone, Copy, Debug, Args)]
pub struct Screen {
    /// Format of the output
    #[arg(long, value_enum, default_value_t = Style::Table)]
    pub style: Style,
    /// Which columns the table has
    #[arg(long, value_enum, default_value_t = ColumnSet::Standard)]
    pub columns: ColumnSet,
}

impl Screen {
    /// Prints the lines before the first configuration.
    pub fn opens(&self) {
        if let (Style::Table, Some(legend)) = (self.style, table::legend(self.columns)) {
            say_unbroken(legend);
        }
    }

    /// Prints the lines before a configuration, with the sizes that are skipped. `about` says in words
    /// how the configuration is measured.
    pub fn configuration(&self, transport: &str, nproc: usize, about: &str, skipped: &[Skipped]) {
        if self.style == Style::Table {
            say_unbroken(&format!("# {} over {transport}{about}", plural(nproc, "rank")));
        }
        skipped.iter().for_each(|skipped| self.skipped(skipped));
        if self.style == Style::Table {
            say_unbroken(&table::header(self.columns));
        }
    }

    /// Prints the line before a size.
    pub fn begins(&self, transport: &str, nproc: usize, bytes: u64) {
        if self.style == Style::Lines {
            say_unbroken(&lines::config_line(transport, nproc, bytes));
        }
    }

    /// Prints the line after a size.
    pub fn row(&self, row: &Row) {
        say_unbroken(&match self.style {
            Style::Table => table::print_row(self.columns, row),
            Style::Lines => lines::result_line(row),
        });
    }

    /// Prints a line instead of a size, or of a whole configuration, that is not measured.
    pub fn skipped(&self, skipped: &Skipped) {
        match (self.style, skipped.bytes) {
            (Style::Table, _) => say_unbroken(&table::print_skipped(skipped)),
            (Style::Lines, Some(bytes)) => {
                self.begins(&skipped.transport, skipped.nproc, bytes);
                say_unbroken(&format!("-> Skipped: {}", skipped.reason));
            }
            // The closing table reports it.
            (Style::Lines, None) => {}
        }
    }

    /// Prints the lines after a configuration. A configuration without rows has failed, which was
    /// reported already.
    pub fn configuration_ends(&self, rows: &[Row], op: &str, cpu_wait_pct: Option<f64>) {
        if self.style == Style::Table && !rows.is_empty() {
            say_unbroken(&table::footer(rows, op));
            say_unbroken(&table::spread(rows));
        }
        let noise = noise_words(cpu_wait_pct, None);
        noise.iter().for_each(|words| say_unbroken(&format!("# {words}")));
    }

    /// Prints the lines after the last configuration.
    pub fn ends(&self, report: &BenchReport) {
        if self.style == Style::Lines {
            say(&lines::result_table(&report.rows, &report.skipped, line_width()));
        }
    }
}
