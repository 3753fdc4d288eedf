//! Text that fits a width: tables and sentences for a terminal.
//!
//! Input: the cells of a table or a sentence, and the number of characters that a line may have. Output: lines. A cell of a
//! table is never broken. A table that is too wide keeps all of its columns, in another form:
//!
//! 1. transposed, with a column per row, if it has few rows;
//! 2. in parts below each other, each of which begins with the columns that name the rows;
//! 3. as blocks, one per row, with a line per column.
//!
//! This module does not know which device has the width.

use std::collections::HashSet;

use paceline_files::printable;

use crate::table::aligned;
use crate::width::{left, width as length};

/// A table with more rows is not transposed.
const MAX_TRANSPOSED_ROWS: usize = 4;
/// The characters between two columns.
const GAP: usize = 2;
/// By how much the second line of a sentence is indented.
const INDENT: usize = 2;

/// A table as lines of at most `width` characters; of any length if `width` is `None`. The other arguments are those of
/// [`aligned`]. A line is longer only if a single word is. Like there, cells are made printable.
pub fn fitted(
    head: &[impl AsRef<str>],
    rows: &[impl AsRef<[String]>],
    is_left: impl Fn(usize) -> bool,
    width: Option<usize>,
) -> String {
    let shown = |cell: &str| printable(cell).into_owned();
    let grid = Grid {
        head: head.iter().map(|name| shown(name.as_ref())).collect(),
        rows: rows
            .iter()
            .map(|row| row.as_ref().iter().map(|cell| shown(cell)).collect())
            .collect(),
        is_left: &is_left,
    };
    // Asked before the lines are made: a single long cell makes each of them as long.
    let Some(width) = width.filter(|width| grid.widest() > *width) else {
        return aligned(&grid.head, &grid.rows, is_left);
    };
    let transposed = grid.transposed().filter(|text| fits(text, width));
    transposed.or_else(|| grid.parts(width)).unwrap_or_else(|| grid.blocks(width))
}

/// A text whose lines have at most `width` characters. Lines are broken between words, and go on indented. A single word
/// that is longer stays whole.
pub fn wrapped(text: &str, width: usize) -> String {
    text.split('\n').map(|line| wrapped_line(line, width)).collect::<Vec<_>>().join("\n")
}

fn wrapped_line(line: &str, width: usize) -> String {
    if length(line) <= width {
        return line.to_owned();
    }
    let words = line.trim_start_matches(' ');
    let indent = line.len() - words.len();
    let further = " ".repeat((indent + INDENT).min(width / 2));
    let mut out = " ".repeat(indent);
    let (mut at, mut is_begin) = (indent, true);
    // Where several spaces follow each other, some words are empty.
    for word in words.split(' ') {
        if !is_begin && at + 1 + length(word) > width {
            out.truncate(out.trim_end().len());
            out += "\n";
            out += &further;
            (at, is_begin) = (further.len(), true);
        }
        if is_begin && word.is_empty() {
            continue;
        }
        if !is_begin {
            out.push(' ');
            at += 1;
        }
        out += word;
        at += length(word);
        is_begin = false;
    }
    out
}

fn fits(text: &str, width: usize) -> bool {
    text.lines().all(|line| length(line) <= width)
}

/// A table that is too wide.
struct Grid<'a> {
    head: Vec<String>,
    rows: Vec<Vec<String>>,
    is_left: &'a dyn Fn(usize) -> bool,
}

impl Grid<'_> {
    fn num_columns(&self) -> usize {
        self.rows.iter().map(Vec::len).chain([self.head.len()]).max().unwrap_or(0)
    }

    fn cell(row: &[String], at: usize) -> String {
        row.get(at).cloned().unwrap_or_default()
    }

    fn name(&self, at: usize) -> String {
        self.head.get(at).cloned().unwrap_or_default()
    }

    /// How many characters a column takes.
    fn width(&self, at: usize) -> usize {
        let cells = self.rows.iter().filter_map(|row| row.get(at)).chain(self.head.get(at));
        cells.map(|cell| length(cell)).max().unwrap_or(0)
    }

    /// How many characters a line of the whole table takes.
    fn widest(&self) -> usize {
        (0..self.num_columns()).map(|at| self.width(at) + GAP).sum::<usize>().saturating_sub(GAP)
    }

    /// How many of the first columns distinguish the rows. `None` if the others are needed for that.
    fn num_names(&self) -> Option<usize> {
        // An empty name is that of the row above.
        let mut above = vec![String::new(); self.num_columns()];
        let mut whole = |row: &Vec<String>| {
            let cells = row.iter().enumerate().filter(|(_, cell)| !cell.is_empty());
            cells.for_each(|(at, cell)| above[at].clone_from(cell));
            above.clone()
        };
        let rows: Vec<Vec<String>> = self.rows.iter().map(&mut whole).collect();
        let tells_apart = |count: &usize| {
            let names: HashSet<&[String]> = rows.iter().map(|row| &row[..*count]).collect();
            names.len() == rows.len()
        };
        (1..self.num_columns()).find(tells_apart)
    }

    /// With a line per column. `None` if there are many rows, or rows that their first cells do not distinguish.
    fn transposed(&self) -> Option<String> {
        let mut names: Vec<String> = self.rows.iter().map(|row| Self::cell(row, 0)).collect();
        let head = [vec![self.name(0)], names.clone()].concat();
        names.retain(|name| !name.is_empty());
        names.sort();
        names.dedup();
        let is_clear = names.len() == self.rows.len();
        if self.head.is_empty() || self.rows.len() > MAX_TRANSPOSED_ROWS || !is_clear {
            return None;
        }
        let line = |at: usize| {
            let cells = self.rows.iter().map(|row| Self::cell(row, at));
            std::iter::once(self.name(at)).chain(cells).collect::<Vec<_>>()
        };
        let lines: Vec<Vec<String>> = (1..self.num_columns()).map(line).collect();
        Some(aligned(&head, &lines, |at| at == 0))
    }

    /// In parts, each with the columns that name the rows. `None` if some column does not fit beside these.
    fn parts(&self, width: usize) -> Option<String> {
        let taken = |columns: usize| -> usize { (0..columns).map(|at| self.width(at) + GAP).sum() };
        // Long names, such as those of a unit and its tensors, leave no room: then only the first column is repeated.
        let num_names = self.num_names().filter(|count| taken(*count) <= width / 2).unwrap_or(1);
        let names_width = taken(num_names);
        let mut parts: Vec<Vec<usize>> = Vec::new();
        let mut used = usize::MAX;
        for at in num_names..self.num_columns() {
            let own = self.width(at);
            if names_width + own > width {
                return None;
            }
            match parts.last_mut().filter(|_| used + own <= width) {
                Some(part) => part.push(at),
                None => {
                    parts.push((0..num_names).chain([at]).collect());
                    used = names_width;
                }
            }
            used += own + GAP;
        }
        let part = |columns: &Vec<usize>| {
            let head: Vec<String> = if self.head.is_empty() {
                Vec::new()
            } else {
                columns.iter().map(|at| self.name(*at)).collect()
            };
            let row = |row: &Vec<String>| -> Vec<String> {
                columns.iter().map(|at| Self::cell(row, *at)).collect()
            };
            let rows: Vec<Vec<String>> = self.rows.iter().map(row).collect();
            aligned(&head, &rows, |at| (self.is_left)(columns[at]))
        };
        Some(parts.iter().map(part).collect::<Vec<_>>().join("\n\n"))
    }

    /// With a block per row. A value that does not fit beside its name stands below it.
    fn blocks(&self, width: usize) -> String {
        let names = (0..self.num_columns()).map(|at| length(&self.name(at))).max().unwrap_or(0);
        let line = |row: &[String], at: usize| {
            let (name, value) = (self.name(at), Self::cell(row, at));
            if names + GAP + length(&value) <= width {
                return (left(&name, names + GAP) + &value).trim_end().to_owned();
            }
            format!("{name}\n{}", wrapped(&format!("{:INDENT$}{value}", ""), width))
        };
        let block = |row: &Vec<String>| {
            let lines: Vec<String> = (0..self.num_columns()).map(|at| line(row, at)).collect();
            lines.join("\n")
        };
        self.rows.iter().map(block).collect::<Vec<_>>().join("\n\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(count: usize) -> Vec<[String; 5]> {
        let names = ["ddp", "simple_ddp", "flat_ddp", "zero1", "sharded3", "local_sgd"];
        let row = |at: usize| {
            let numbers = [12.5, 100.0, 3.25, 0.125].map(|of| format!("{:.2}", of * at as f64));
            let [a, b, c, d] = numbers;
            [names[at].to_owned(), a, b, c, d]
        };
        (0..count).map(row).collect()
    }

    const HEAD: [&str; 5] = ["strategy", "step ms", "exposed ms", "hidden ms", "waiting ms"];

    fn at_width(count: usize, width: usize) -> String {
        let text = fitted(&HEAD, &rows(count), |at| at == 0, Some(width));
        assert!(fits(&text, width), "{text}");
        text
    }

    #[test]
    fn a_table_that_fits_stays_as_it_is() {
        let text = at_width(2, 54);
        assert_eq!(text, aligned(&HEAD, &rows(2), |at| at == 0));
        assert_eq!(fitted(&HEAD, &rows(2), |at| at == 0, None), text);
        assert_eq!(text.lines().map(length).max(), Some(54));
    }

    #[test]
    fn few_rows_become_columns() {
        let expected = [
            "strategy     ddp  simple_ddp",
            "----------  ----  ----------",
            "step ms     0.00       12.50",
            "exposed ms  0.00      100.00",
            "hidden ms   0.00        3.25",
            "waiting ms  0.00        0.12",
        ];
        assert_eq!(at_width(2, 53), expected.join("\n"));
    }

    #[test]
    fn many_rows_stand_in_parts() {
        let expected = [
            "strategy    step ms  exposed ms",
            "----------  -------  ----------",
            "ddp            0.00        0.00",
            "simple_ddp    12.50      100.00",
            "flat_ddp      25.00      200.00",
            "zero1         37.50      300.00",
            "sharded3      50.00      400.00",
            "",
            "strategy    hidden ms  waiting ms",
            "----------  ---------  ----------",
            "ddp              0.00        0.00",
            "simple_ddp       3.25        0.12",
            "flat_ddp         6.50        0.25",
            "zero1            9.75        0.38",
            "sharded3        13.00        0.50",
        ];
        assert_eq!(at_width(5, 40), expected.join("\n"));
    }

    #[test]
    fn each_part_begins_with_the_columns_that_tell_the_rows_apart() {
        let row = |at: usize| {
            [
                ["ddp", "zero1"][at % 2].to_owned(),
                (at / 2).to_string(),
                at.to_string(),
                "8".to_owned(),
            ]
        };
        let rows: Vec<[String; 4]> = (0..6).map(row).collect();
        let text =
            fitted(&["strategy", "ranks", "a long name", "other"], &rows, |at| at == 0, Some(34));
        let heads: Vec<&str> = text.lines().filter(|line| line.starts_with("strategy")).collect();
        assert_eq!(heads, ["strategy  ranks  a long name", "strategy  ranks  other"]);
    }

    #[test]
    fn what_fits_no_other_way_becomes_blocks() {
        let text = at_width(5, 20);
        let blocks: Vec<&str> = text.split("\n\n").collect();
        assert_eq!(blocks.len(), 5);
        assert_eq!(
            blocks[1],
            "strategy\n  simple_ddp\nstep ms     12.50\nexposed ms  100.00\nhidden ms   3.25\nwaiting ms  0.12"
        );
        let long = [["a".to_owned(), "the gradients of fc1, fc2 and fc3".to_owned()]];
        assert_eq!(
            fitted(&["at", "what"], &long, |_| true, Some(20)),
            "at    a\nwhat\n  the gradients of\n    fc1, fc2 and fc3"
        );
    }

    #[test]
    fn a_cell_may_be_longer_than_any_width_in_a_format_string() {
        let long = "x".repeat(1 << 17);
        let rows = [[long.clone(), "1".to_owned()], ["a".to_owned(), long.clone()]];
        for head in ["name", &long] {
            for width in [None, Some(80), Some(1 << 18)] {
                let text = fitted(&[head, "value"], &rows, |at| at == 0, width);
                assert!(text.matches(&long).count() >= 2, "{width:?}");
            }
        }
    }

    #[test]
    fn a_table_without_a_head_keeps_none() {
        let row = |from: usize| (0..6).map(|to| format!("{from} to {to}")).collect::<Vec<_>>();
        let rows: Vec<Vec<String>> = (0..3).map(row).collect();
        assert_eq!(
            fitted(&[""; 0], &rows, |_| false, Some(30)),
            "0 to 0  0 to 1  0 to 2  0 to 3\n1 to 0  1 to 1  1 to 2  1 to 3\n2 to 0  2 to 1  2 to 2  2 to 3\n\n\
             0 to 0  0 to 4  0 to 5\n1 to 0  1 to 4  1 to 5\n2 to 0  2 to 4  2 to 5"
        );
    }

    #[test]
    fn sentences_break_between_words() {
        let text = "Step: 12 ms median, 15 ms p99; waiting included\nshort";
        assert_eq!(
            wrapped(text, 20),
            "Step: 12 ms median,\n  15 ms p99; waiting\n  included\nshort"
        );
        assert_eq!(wrapped(text, 47), text);
        assert_eq!(wrapped("    name  value of it", 12), "    name\n      value\n      of it");
        // A word is never cut.
        assert_eq!(wrapped("sha256 0123456789abcdef", 10), "sha256\n  0123456789abcdef");
        assert_eq!(wrapped("0123456789abcdef", 10), "0123456789abcdef");
        assert_eq!(wrapped("", 10), "");
    }

    #[test]
    fn everything_fits_every_width() {
        let text = "all of these words have at most ten characters, and none is cut";
        for width in 14..90 {
            assert!(fits(&wrapped(text, width), width), "{width}");
            let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
            assert_eq!(words(&wrapped(text, width)), words(text));
            for count in 1..6 {
                let table = fitted(&HEAD, &rows(count), |at| at == 0, Some(width));
                assert!(fits(&table, width), "{width}:\n{table}");
                for cell in rows(count).iter().flatten() {
                    assert!(table.contains(cell.as_str()), "{width}: no {cell} in\n{table}");
                }
            }
        }
    }
}
