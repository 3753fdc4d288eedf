//! Tables of numbers with a column of classes, as CSV files.
//!
//! Input: a folder with `train.csv` and, to test with, `test.csv`, whose first lines name the columns. Output: a part of the
//! data set. The mean of each column becomes 0 and its standard deviation 1, both of the file to train on; a column with one
//! value becomes 0. This module knows no flags.

use std::collections::BTreeSet;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use paceline_files::printable;

use crate::arrays::{ArrayInputs, Arrays, Targets};
use crate::{DataError, Split, files};

/// The most bytes of a file.
const MAX_FILE_BYTES: u64 = 4 << 30;
/// The most bytes of a line.
const MAX_LINE_BYTES: usize = 16 << 20;
/// The most classes. A column of measurements is no column of classes.
const MAX_CLASSES: usize = 100_000;
/// The most letters of a cell in a message.
const MAX_SHOWN: usize = 40;
/// Values of a column that differ by a smaller part of the largest one are equal, up to rounding.
const ROUNDING: f64 = 1e-14;
const ODD: &str = "has a line with an odd number of quotes";
const HINT: &str = "a folder of tables has train.csv and, to test with, test.csv";

/// Where a table lies, and which of its columns has the classes.
#[derive(Clone, Debug)]
pub struct NumberTable {
    folder: PathBuf,
    label: String,
}

/// The rows of a file.
pub(crate) struct Rows {
    path: PathBuf,
    /// The columns of numbers.
    pub(crate) columns: Vec<String>,
    /// (rows, columns). A time in seconds since 1970 or a number of many digits is no f32 before scaling.
    pub(crate) values: Vec<f64>,
    pub(crate) labels: Vec<String>,
}

impl NumberTable {
    /// The table in `folder` whose column `label` has the classes.
    pub fn new(folder: PathBuf, label: String) -> Self {
        Self { folder, label }
    }

    /// Whether there is a file to test with.
    pub fn has_test(&self) -> bool {
        self.folder.join("test.csv").exists()
    }

    /// Reads a part. Inputs have the extents `size`, or are vectors. Classes are the whole numbers from 0 to the largest one, or
    /// from 1 if 0 does not occur, or the words in alphabetical order, of the file to train on.
    pub fn load(&self, split: Split, size: Option<[usize; 3]>) -> Result<Arrays, DataError> {
        let train = self.rows("train.csv")?;
        let classes = ColumnClasses::of(&train)?;
        let scales = scales(&train);
        let mut rows = match split {
            Split::Train => train,
            Split::Test => {
                let test = self.rows("test.csv")?;
                if test.columns != train.columns {
                    let problem = format!("has other columns than {}", train.path.display());
                    return Err(DataError::content(&test.path, problem));
                }
                test
            }
        };
        let columns = rows.columns.len();
        let values = std::mem::take(&mut rows.values);
        let scaled = values.into_iter().enumerate().map(|(at, value)| {
            let (mean, deviation) = scales[at % columns];
            let scaled = ((value - mean) / deviation) as f32;
            Some(scaled).filter(|scaled| scaled.is_finite()).ok_or_else(|| {
                let (row, column) = (at / columns + 1, shown(&rows.columns[at % columns]));
                let problem = format!(
                    "row {row} has {value} in the column {column}, too far from what the training part has there"
                );
                DataError::content(&rows.path, problem)
            })
        });
        let scaled: Vec<f32> = scaled.collect::<Result<_, _>>()?;
        let extents = size.map_or(vec![columns], Vec::from);
        if extents.iter().product::<usize>() != columns {
            let problem =
                format!("has {columns} columns of numbers, which are no image of {extents:?}");
            return Err(DataError::content(&rows.path, problem));
        }
        let labels = (1..).zip(&rows.labels).map(|(at, label)| classes.find(&rows.path, at, label));
        let labels = labels.collect::<Result<_, _>>()?;
        let targets = Targets::Classes { labels, num_classes: classes.len() };
        let class_names = match classes {
            ColumnClasses::Words(words) => words,
            ColumnClasses::Numbers { first: 0, .. } => Vec::new(),
            ColumnClasses::Numbers { first, count } => {
                (first..first + count).map(|label| label.to_string()).collect()
            }
        };
        Ok(Arrays { inputs: ArrayInputs::Reals(scaled), extents, targets, class_names })
    }

    fn rows(&self, name: &str) -> Result<Rows, DataError> {
        let (path, file, _) =
            files::open_up_to(&self.folder, name.to_owned(), HINT, MAX_FILE_BYTES)?;
        Rows::read(path, BufReader::new(file), &self.label)
    }
}

impl Rows {
    /// Reads the contents of a file.
    pub(crate) fn read(
        path: PathBuf,
        contents: impl BufRead,
        label: &str,
    ) -> Result<Self, DataError> {
        let fail = |problem: String| DataError::content(&path, problem);
        let mut reader =
            csv::Reader::from_reader(LimitedLines { contents, line_bytes: 0, quotes: 0 });
        let failed = |error: csv::Error| match error.kind() {
            csv::ErrorKind::UnequalLengths { pos, expected_len, len } => {
                let line = pos.as_ref().map_or(0, csv::Position::line);
                fail(format!(
                    "line {line} has {len} cells, and the first line {expected_len}; is the file cut off?"
                ))
            }
            _ => fail(error.to_string()),
        };
        let header = reader.headers().map_err(failed)?;
        let header: Vec<String> = header.iter().map(|name| name.trim().to_owned()).collect();
        let at = position_of(&header, label).map_err(fail)?;
        let mut columns = header;
        columns.remove(at);
        if columns.is_empty() {
            return Err(fail("has no column of numbers beside the classes".to_owned()));
        }
        let (mut values, mut labels) = (Vec::new(), Vec::new());
        let mut record = csv::StringRecord::new();
        while reader.read_record(&mut record).map_err(failed)? {
            let row = labels.len() + 1;
            labels.push(record[at].trim().to_owned());
            let cells = record.iter().enumerate().filter(|(position, _)| *position != at);
            for ((_, cell), column) in cells.zip(&columns) {
                let value = cell.trim().parse().ok().filter(|value: &f64| value.is_finite());
                values.push(value.ok_or_else(|| {
                    let (cell, column) = (shown(cell), shown(column));
                    fail(format!(
                        "row {row} has {cell} in the column {column}, which is no finite number"
                    ))
                })?);
            }
        }
        if labels.is_empty() {
            Err(DataError::format(&path, "holds no samples"))
        } else {
            Ok(Self { path, columns, values, labels })
        }
    }
}

/// The position of the one column with this name.
fn position_of(header: &[String], label: &str) -> Result<usize, String> {
    let mut found = header.iter().enumerate().filter(|(_, name)| *name == label);
    match (found.next(), found.next()) {
        (Some((at, _)), None) => Ok(at),
        (Some(_), Some(_)) => Err(format!("has two columns {}", shown(label))),
        (None, _) if header.is_empty() => {
            Err("has no line with the names of its columns".to_owned())
        }
        (None, _) => {
            let names: Vec<String> = header.iter().take(10).map(|name| shown(name)).collect();
            let more = if header.len() > 10 { ", ..." } else { "" };
            Err(format!("has no column {}, but {}{more}", shown(label), names.join(", ")))
        }
    }
}

/// The classes of a column.
pub(crate) enum ColumnClasses {
    Numbers { first: usize, count: usize },
    Words(Vec<String>),
}

impl ColumnClasses {
    pub(crate) fn of(rows: &Rows) -> Result<Self, DataError> {
        let words: BTreeSet<&str> = rows.labels.iter().map(String::as_str).collect();
        let numbers: Option<BTreeSet<usize>> = words.iter().map(|word| word.parse().ok()).collect();
        let classes = match numbers {
            Some(numbers) => {
                let largest = numbers.last().copied().unwrap_or(0);
                // Labels without a 0 count from 1: 1 to 5 are five classes, also if one of them does not occur.
                let first = usize::from(!numbers.contains(&0));
                Self::Numbers { first, count: (largest - first).saturating_add(1) }
            }
            None => Self::Words(words.into_iter().map(str::to_owned).collect()),
        };
        match classes.len() {
            2..=MAX_CLASSES => Ok(classes),
            count => Err(DataError::content(
                &rows.path,
                format!(
                    "its column of labels has {count} classes, and 2 to {MAX_CLASSES} are possible"
                ),
            )),
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::Numbers { count, .. } => *count,
            Self::Words(words) => words.len(),
        }
    }

    fn find(&self, path: &Path, row: usize, label: &str) -> Result<u32, DataError> {
        let class = match self {
            Self::Numbers { first, count } => {
                let label = label.parse::<usize>().ok();
                label.and_then(|label| label.checked_sub(*first)).filter(|class| class < count)
            }
            Self::Words(words) => words.binary_search_by(|word| word.as_str().cmp(label)).ok(),
        };
        class.map(|class| class as u32).ok_or_else(|| {
            let label = shown(label);
            let problem = format!("row {row} has the label {label}, which no row to train on has");
            DataError::content(path, problem)
        })
    }
}

/// The mean and the standard deviation of each column. The latter is infinite, so that all values become 0, if the values
/// differ by no more than rounding.
pub(crate) fn scales(rows: &Rows) -> Vec<(f64, f64)> {
    let columns = rows.columns.len();
    let count = rows.labels.len() as f64;
    let mut ends = vec![(f64::INFINITY, f64::NEG_INFINITY); columns];
    for (at, value) in rows.values.iter().enumerate() {
        let (low, high) = &mut ends[at % columns];
        (*low, *high) = (low.min(*value), high.max(*value));
    }
    // Seen from the middle of a column and in halves of its width, no sum overflows or loses digits.
    let middle = |at: usize| ends[at].0.midpoint(ends[at].1);
    let half = |at: usize| ends[at].1 / 2.0 - ends[at].0 / 2.0;
    let mut sums = vec![(0.0, 0.0); columns];
    for (at, value) in rows.values.iter().enumerate() {
        let at = at % columns;
        sums[at].0 += (value - middle(at)) / half(at) / count;
    }
    for (at, value) in rows.values.iter().enumerate() {
        let at = at % columns;
        sums[at].1 += ((value - middle(at)) / half(at) - sums[at].0).powi(2) / count;
    }
    let scale = |(at, (mean, squares)): (usize, (f64, f64))| {
        let largest = ends[at].0.abs().max(ends[at].1.abs());
        if half(at) > (ROUNDING * largest).max(f64::MIN_POSITIVE) {
            (middle(at) + half(at) * mean, half(at) * squares.sqrt())
        } else {
            (middle(at), f64::INFINITY)
        }
    };
    sums.into_iter().enumerate().map(scale).collect()
}

/// A cell in a message.
fn shown(cell: &str) -> String {
    let start: String = cell.chars().take(MAX_SHOWN).collect();
    let more = if start.len() < cell.len() { "..." } else { "" };
    format!("\"{}{more}\"", printable(&start))
}

/// Contents whose lines have a limit, and whose quotes end on their line, so that no cell fills the memory.
struct LimitedLines<R> {
    contents: R,
    line_bytes: usize,
    quotes: usize,
}

impl<R: BufRead> Read for LimitedLines<R> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let len = self.contents.read(to)?;
        if len == 0 && !to.is_empty() && self.quotes % 2 == 1 {
            return Err(io::Error::new(io::ErrorKind::InvalidData, ODD));
        }
        for byte in &to[..len] {
            self.line_bytes += 1;
            self.quotes += usize::from(*byte == b'"');
            let problem = match byte {
                b'\n' if self.quotes % 2 == 1 => ODD,
                _ if self.line_bytes > MAX_LINE_BYTES => "has a line of more than 16 MiB",
                b'\n' => {
                    (self.line_bytes, self.quotes) = (0, 0);
                    continue;
                }
                _ => continue,
            };
            return Err(io::Error::new(io::ErrorKind::InvalidData, problem));
        }
        Ok(len)
    }
}
