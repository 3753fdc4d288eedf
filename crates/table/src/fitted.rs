//! Text that fits a width: tables and sentences for a terminal.
//!
//! A cell of a table is never broken. A table that is too wide keeps all columns, in another form:
//!
//! 1. transposed, with a column per row, if it has few rows;
//! 2. with heads of two lines;
//! 3. in parts below each other, each beginning with the columns that name the rows;
//! 4. as blocks, one per row, with a line per column.

use std::collections::HashSet;

use paceline_files::printable;

use crate::width::{left, right, width as length};

/// A table with more rows is not transposed.
const MAX_TRANSPOSED_ROWS: usize = 4;
/// The characters between two columns.
const GAP: usize = 2;
/// Indentation of the second line of a sentence.
const INDENT: usize = 2;

/// A table as lines of at most `width` characters, if it is stated; only a single word makes a line longer. The last line has
/// no line end. Columns for which `is_left` holds (by index) are left-aligned, all others right-aligned. An empty head leaves
/// out head and rule. Rows may be shorter than others. Cells are made [`printable`].
pub fn fitted(
    head: &[impl AsRef<str>],
    rows: &[impl AsRef<[String]>],
    is_left: impl Fn(usize) -> bool,
    width: Option<usize>,
) -> String {
    let lengths = rows.iter().map(|row| row.as_ref().len());
    let num_columns = lengths.chain([head.len()]).max().unwrap_or(0);
    let padded = |cells: &mut dyn Iterator<Item = &str>| -> Vec<String> {
        let cells = cells.map(|cell| printable(cell).into_owned());
        cells.chain(std::iter::repeat(String::new())).take(num_columns).collect()
    };
    let rows = rows.iter().map(|row| padded(&mut row.as_ref().iter().map(String::as_str)));
    let grid = TextGrid {
        head_lines: usize::from(!head.is_empty()),
        lines: std::iter::once(padded(&mut head.iter().map(AsRef::as_ref))).chain(rows).collect(),
        is_left: &is_left,
    };
    let whole: Vec<usize> = (0..num_columns).collect();
    // Before the lines are made: one long cell makes each of them as long.
    let Some(width) = width.filter(|width| grid.taken(&whole) > *width) else {
        return grid.part(&whole);
    };
    let transposed = grid.transposed().filter(|text| fits(text, width));
    let of_parts = || grid.with_broken_head().parts(width);
    transposed.or_else(of_parts).unwrap_or_else(|| grid.blocks(width))
}

/// A text whose lines have at most `width` characters. Broken lines go on indented. A longer word stays whole.
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
    // The finished lines, and the one that grows.
    let (mut out, mut line, mut is_begin) = (String::new(), " ".repeat(indent), true);
    // Between several spaces, words are empty.
    for word in words.split(' ') {
        if !is_begin && length(&line) + 1 + length(word) > width {
            out = out + line.trim_end() + "\n";
            (line, is_begin) = (further.clone(), true);
        }
        if is_begin && word.is_empty() {
            continue;
        }
        line = line + if is_begin { "" } else { " " } + word;
        is_begin = false;
    }
    out + &line
}

fn fits(text: &str, width: usize) -> bool {
    text.lines().all(|line| length(line) <= width)
}

/// A table, each line with a cell per column.
struct TextGrid<'a> {
    /// Lines of the head: without one, the first line is empty and not shown.
    head_lines: usize,
    /// The head and the rows.
    lines: Vec<Vec<String>>,
    is_left: &'a dyn Fn(usize) -> bool,
}

impl TextGrid<'_> {
    fn widest(&self, column: usize) -> usize {
        self.lines.iter().map(|line| length(&line[column])).max().unwrap_or(0)
    }

    /// How many characters a line of these columns takes.
    fn taken(&self, columns: &[usize]) -> usize {
        columns.iter().map(|at| self.widest(*at) + GAP).sum::<usize>().saturating_sub(GAP)
    }

    fn part(&self, columns: &[usize]) -> String {
        let widths: Vec<usize> = columns.iter().map(|at| self.widest(*at)).collect();
        let set = |line: &Vec<String>| {
            let cells = columns.iter().zip(&widths).map(|(at, width)| {
                if (self.is_left)(*at) {
                    left(&line[*at], *width)
                } else {
                    right(&line[*at], *width)
                }
            });
            cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
        };
        let mut lines: Vec<String> = self.lines.iter().map(set).collect();
        if self.head_lines > 0 {
            let rule: Vec<_> = widths.iter().map(|width| "-".repeat(*width)).collect();
            lines.insert(self.head_lines, rule.join("  "));
        } else {
            lines.remove(0);
        }
        lines.join("\n")
    }

    /// How many of the first columns distinguish the rows. `None` if the others are needed for that.
    fn num_names(&self) -> Option<usize> {
        // An empty name is that of the row above.
        let mut above = vec![String::new(); self.lines[0].len()];
        let mut whole = |row: &Vec<String>| {
            let cells = row.iter().zip(&mut above).filter(|(cell, _)| !cell.is_empty());
            cells.for_each(|(cell, above)| above.clone_from(cell));
            above.clone()
        };
        let rows = self.lines[self.head_lines.max(1)..].iter();
        let rows: Vec<Vec<String>> = rows.map(&mut whole).collect();
        let are_distinct = |count: &usize| {
            let names: HashSet<&[String]> = rows.iter().map(|row| &row[..*count]).collect();
            names.len() == rows.len()
        };
        (1..self.lines[0].len()).find(are_distinct)
    }

    /// With a line per column. `None` if rows are many, or not told apart by their first cells.
    fn transposed(&self) -> Option<String> {
        let rows = &self.lines[1..];
        let names = rows.iter().map(|row| &row[0]).filter(|name| !name.is_empty());
        let is_clear = names.collect::<HashSet<_>>().len() == rows.len();
        if self.head_lines == 0 || rows.len() > MAX_TRANSPOSED_ROWS || !is_clear {
            return None;
        }
        let line = |at: usize| self.lines.iter().map(|row| row[at].clone()).collect();
        let lines = (0..self.lines[0].len()).map(line).collect();
        let whole: Vec<usize> = (0..self.lines.len()).collect();
        Some(TextGrid { head_lines: 1, lines, is_left: &|at| at == 0 }.part(&whole))
    }

    /// With heads of several words in two lines.
    fn with_broken_head(&self) -> Self {
        let longer = |(one, other): &(&str, &str)| length(one).max(length(other));
        let broken = |head: &String| {
            let at = head.match_indices(' ').map(|(at, _)| (&head[..at], &head[at + 1..]));
            let (above, below) = at.min_by_key(longer).unwrap_or(("", head));
            (above.to_owned(), below.to_owned())
        };
        let (above, below): (Vec<_>, Vec<_>) = self.lines[0].iter().map(broken).unzip();
        let head =
            if above.iter().all(String::is_empty) { vec![below] } else { vec![above, below] };
        let head_lines = head.len().min(self.head_lines * 2);
        TextGrid { head_lines, lines: [&head, &self.lines[1..]].concat(), ..*self }
    }

    /// In parts, each with the columns that name the rows. `None` if a column does not fit beside these.
    fn parts(&self, width: usize) -> Option<String> {
        let first = |count| (0..count).collect::<Vec<usize>>();
        let has_room = |count: &usize| self.taken(&first(*count)) + GAP <= width / 2;
        // If long names leave no room, only the first column is repeated.
        let names = first(self.num_names().filter(has_room).unwrap_or(1));
        let mut parts: Vec<Vec<usize>> = Vec::new();
        for at in names.len()..self.lines[0].len() {
            let with = |columns: &[usize]| [columns, &[at]].concat();
            match parts.last_mut().filter(|part| self.taken(&with(part)) <= width) {
                Some(part) => part.push(at),
                None if self.taken(&with(&names)) <= width => parts.push(with(&names)),
                None => return None,
            }
        }
        Some(parts.iter().map(|part| self.part(part)).collect::<Vec<_>>().join("\n\n"))
    }

    /// With a block per row. Long values stand below their names.
    fn blocks(&self, width: usize) -> String {
        let head = &self.lines[0];
        let names = head.iter().map(|name| length(name)).max().unwrap_or(0);
        let line = |(name, value): (&String, &String)| {
            if names + GAP + length(value) <= width {
                return (left(name, names + GAP) + value).trim_end().to_owned();
            }
            format!("{name}\n{}", wrapped(&format!("{:INDENT$}{value}", ""), width))
        };
        let block = |row: &Vec<_>| head.iter().zip(row).map(line).collect::<Vec<_>>().join("\n");
        self.lines[1..].iter().map(block).collect::<Vec<_>>().join("\n\n")
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
            "             step  exposed  hidden",
            "strategy       ms       ms      ms",
            "----------  -----  -------  ------",
            "ddp          0.00     0.00    0.00",
            "simple_ddp  12.50   100.00    3.25",
            "flat_ddp    25.00   200.00    6.50",
            "zero1       37.50   300.00    9.75",
            "sharded3    50.00   400.00   13.00",
            "",
            "            waiting",
            "strategy         ms",
            "----------  -------",
            "ddp            0.00",
            "simple_ddp     0.12",
            "flat_ddp       0.25",
            "zero1          0.38",
            "sharded3       0.50",
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
            fitted(&["strategy", "ranks", "a_long_name", "other"], &rows, |at| at == 0, Some(34));
        let heads: Vec<&str> = text.lines().filter(|line| line.starts_with("strategy")).collect();
        assert_eq!(heads, ["strategy  ranks  a_long_name", "strategy  ranks  other"]);
    }

    #[test]
    fn what_fits_no_other_way_becomes_blocks() {
        let text = at_width(5, 18);
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
