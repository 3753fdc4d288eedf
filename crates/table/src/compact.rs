//! A comparison as one table on a console, however many columns it has.
//!
//! The first columns name the rows, and the others come in the order of their importance: those that have no room, and those
//! that are the same in every row, are left out. Files have them all.

use paceline_files::printable;

use crate::fitted::fitted;
use crate::table::{Cell, Head, Table};

/// The most figures. A table that is transposed still fits a screen.
const MOST_FIGURES: usize = 13;
/// With less room than for so many figures, numbers name the rows.
const FEW_FIGURES: usize = 3;
/// The head of these numbers.
const NUMBER: &str = "no.";

impl Table {
    /// One table of the columns that differ, and a line with those that do not. The first `num_names` columns name the rows.
    /// The difference of two rows may follow.
    pub fn compact(&self, num_names: usize, has_difference: bool, width: Option<usize>) -> String {
        let shown = |row: &Vec<Cell>, at: usize| row[at].shown(&self.columns[at]);
        let is_same = |at: &usize| {
            let mut cells = self.rows.iter().map(|row| shown(row, *at));
            let first = cells.next();
            *at > 0 && self.rows.len() > 1 && cells.all(|cell| Some(cell) == first)
        };
        let is_there = |at: &usize| {
            let is_missing = self.rows.iter().all(|row| row[*at] == Cell::Missing);
            !self.columns[*at].label.is_empty() && !is_missing
        };
        let all = (0..self.columns.len()).filter(is_there);
        let (same, differ): (Vec<usize>, Vec<usize>) = all.partition(is_same);
        let (names, figures): (Vec<usize>, Vec<usize>) =
            differ.into_iter().partition(|at| *at < num_names);
        let draw = |columns: &[usize]| self.drawn(columns, has_difference, width);
        let (kept, text) = with_room(&names, &figures, draw);
        let is_numbered = self.columns[0].key == NUMBER;
        if kept < FEW_FIGURES.min(figures.len()) && !is_numbered && !names.is_empty() {
            let numbered = self.numbered(num_names).compact(1, has_difference, width);
            return numbered + &self.legend(&names);
        }
        let words = same.iter().map(|at| {
            let Head { label, unit, .. } = &self.columns[*at];
            format!("{label} {} {unit}", shown(&self.rows[0], *at)).trim_end().to_owned()
        });
        let words: Vec<String> = words.collect();
        let same = format!("\nThe same in all: {}.", printable(&words.join(", ")));
        text + if words.is_empty() { "" } else { &same }
    }

    fn drawn(&self, columns: &[usize], has_difference: bool, width: Option<usize>) -> String {
        let heads: Vec<String> = columns.iter().map(|at| self.columns[*at].words()).collect();
        let line = |row: &Vec<Cell>| -> Vec<String> {
            columns.iter().map(|at| row[*at].shown(&self.columns[*at])).collect()
        };
        let mut lines: Vec<Vec<String>> = self.rows.iter().map(line).collect();
        if let ([one, other], true) = (&self.rows[..], has_difference) {
            let cell = |at: &usize| difference(&self.columns[*at], &one[*at], &other[*at]);
            let cells: Vec<String> = columns.iter().skip(1).map(cell).collect();
            if cells.iter().any(|cell| !cell.is_empty()) {
                lines.push([vec!["difference".to_owned()], cells].concat());
            }
        }
        fitted(&heads, &lines, |at| !self.is_number(columns[at]), width)
    }

    /// The table with the number of each row in place of its names.
    fn numbered(&self, num_names: usize) -> Self {
        let mut table = self.clone();
        for (at, row) in table.rows.iter_mut().enumerate() {
            row.splice(..num_names, [Cell::from(at + 1)]);
        }
        table.columns.splice(..num_names, [Head::plain(NUMBER)]);
        table
    }

    /// The names of the numbers, a line each.
    fn legend(&self, names: &[usize]) -> String {
        let word = |row: &Vec<Cell>, at: usize| {
            let head = &self.columns[at];
            let label = if at == 0 { "" } else { &*head.label };
            printable(&format!("{label} {}", row[at].shown(head))).trim_start().to_owned()
        };
        let name = |row: &Vec<Cell>| {
            let names = names.iter().filter(|at| row[**at] != Cell::Missing);
            names.map(|at| word(row, *at)).collect::<Vec<_>>().join(", ")
        };
        let lines = self.rows.iter().enumerate();
        lines.map(|(at, row)| format!("\n{:>3}  {}", at + 1, name(row))).collect()
    }
}

/// As many of these figures as have room in one table beside the names, and their number.
fn with_room(
    names: &[usize],
    figures: &[usize],
    draw: impl Fn(&[usize]) -> String,
) -> (usize, String) {
    let mut columns = names.to_vec();
    let mut text = draw(&columns);
    for at in figures {
        columns.push(*at);
        let more = draw(&columns);
        // An empty line separates parts.
        if columns.len() > names.len() + MOST_FIGURES || more.contains("\n\n") {
            columns.pop();
        } else {
            text = more;
        }
    }
    (columns.len() - names.len(), text)
}

/// The second value beside the first one: points of a percentage, or percent of another number.
fn difference(head: &Head, one: &Cell, other: &Cell) -> String {
    match (one.number(), other.number()) {
        (Some(one), Some(other)) if head.unit == "%" => {
            format!("{:+.*}", head.decimals, other - one)
        }
        (Some(one), Some(other)) if one > 0.0 => format!("{:+.1} %", 100.0 * (other / one - 1.0)),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs with names of this many letters, a setting, and figures of which one never differs.
    fn runs(count: usize, letters: usize) -> Table {
        let mut columns = ["run", "strategy"].map(Head::plain).to_vec();
        let figures = ["samples/s", "median step", "exposed comm.", "peak", "training loss"];
        let units = ["", "ms", "ms", "MB", ""].into_iter().zip(figures);
        columns.extend(units.map(|(unit, label)| Head::new(label, label, (unit, 2), "")));
        let row = |at: usize| {
            let name = format!("{at}{}", "x".repeat(letters));
            let strategy = ["ddp", "simple_ddp_async"][at % 2];
            let mut row = vec![Cell::from(name), Cell::from(strategy)];
            let values = [1000.0, 20.0, 1.5].map(|of| Cell::Number(of * (at + 4) as f64 / 4.0));
            row.extend(values);
            row.extend([Cell::Number(50.0), Cell::Number(1.0 / (at + 1) as f64)]);
            row
        };
        Table { columns, rows: (0..count).map(row).collect(), mean: None }
    }

    #[test]
    fn two_rows_have_their_difference() {
        let expected = "\
run                     0x                1x  difference
----------------  --------  ----------------  ----------
strategy               ddp  simple_ddp_async
samples/s         1,000.00          1,250.00     +25.0 %";
        let text = runs(2, 1).compact(2, true, Some(60));
        assert_eq!(text.lines().take(4).collect::<Vec<_>>().join("\n"), expected);
        assert!(text.ends_with("\nThe same in all: peak 50.00 MB."), "{text}");
        assert!(!runs(2, 1).compact(2, false, None).contains("difference"));
    }

    #[test]
    fn equal_rows_keep_their_names() {
        let mut table = runs(2, 1);
        table.rows[1] = table.rows[0].clone();
        assert!(table.compact(2, true, Some(80)).starts_with("run"));
    }

    #[test]
    fn any_number_of_runs_is_one_table_that_fits() {
        for count in [1, 2, 3, 8, 17] {
            for (letters, width) in [(5, 80), (30, 80), (30, 120), (70, 80), (200, 80)] {
                let text = runs(count, letters).compact(2, true, Some(width));
                assert!(!text.contains("\n\n"), "{text}");
                // A name that is longer than a line stands in a line of its own.
                let is_name = |line: &str| letters >= 70 && line.contains("xxx");
                let fits = |line: &str| line.chars().count() <= width || is_name(line);
                assert!(text.lines().all(fits), "{text}");
                assert!(text.contains("samples/s") && text.contains("median"), "{text}");
            }
        }
    }
}
