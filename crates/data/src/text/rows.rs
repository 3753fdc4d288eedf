//! Texts with labels, read from files.
//!
//! Input: files. Output: their rows, checked. The formats are in `formats.rs`. This module knows nothing of
//! tokens.

use std::collections::BTreeSet;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use super::formats::{csv, lines};
use super::row::{Label, Sink, TextRow};
use super::table::SkippedRows;
use super::{TableSettings, TextError, TextFormat};

/// The mark that some programs write in front of a text.
pub(super) const BYTE_ORDER_MARK: &str = "\u{feff}";
/// The most different words that are names of classes.
const MAX_LABEL_WORDS: usize = 1000;
const TOO_MANY_WORDS: &str = "more than 1,000 different words are labels up to here; labels are the names or the numbers of \
                              classes, so name another column with --label-column";

/// Rows with a text and a class each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TextRows {
    /// The texts. Some may be empty.
    pub texts: Vec<String>,
    /// The class of each text.
    pub labels: Vec<i64>,
}

impl TextRows {
    /// Reads the files one after the other, with the columns `text` and `label`. Errors name the file and the row: a file that
    /// is cut off, a missing column, or a label that is not one of `num_classes` classes. Only the first 8 MiB of a longer text
    /// are kept.
    pub fn read(paths: &[PathBuf], num_classes: usize) -> Result<Self, TextError> {
        Self::read_table(paths, num_classes, &TableSettings::default(), &mut |_| {})
    }

    /// The same, with columns by choice. `warn` receives the rows that were left out.
    pub fn read_table(
        paths: &[PathBuf],
        num_classes: usize,
        table: &TableSettings,
        warn: &mut dyn FnMut(String),
    ) -> Result<Self, TextError> {
        let mut rows = Self::default();
        for path in paths {
            let read = |sink: Sink<'_>| read_as_named(path, table, sink);
            rows.add(path, num_classes, table, read, warn)?;
        }
        Ok(rows)
    }

    /// Reads the contents of a CSV file that a program carries. Errors name it by `name`.
    pub fn from_csv(name: &Path, contents: &[u8], num_classes: usize) -> Result<Self, TextError> {
        let (mut rows, table) = (Self::default(), TableSettings::default());
        let read = |sink: Sink<'_>| csv::read(name, unmarked(name, contents)?, &table, sink);
        rows.add(name, num_classes, &table, read, &mut |_| {})?;
        Ok(rows)
    }

    /// The labels of these files that are words, in alphabetical order. Empty if the first label is a number. Unusable rows are
    /// left out here: reading the texts says what is wrong with them.
    pub fn label_words(
        paths: &[PathBuf],
        table: &TableSettings,
    ) -> Result<BTreeSet<String>, TextError> {
        let mut words = BTreeSet::new();
        for path in paths {
            let mut are_numbers = false;
            let mut sink = |number, row: Result<TextRow, String>| {
                let is_used = |row: &TextRow| !(table.skip_bad_rows && row.text.trim().is_empty());
                match row.ok().filter(is_used).and_then(|row| row.label) {
                    None => return Ok(()),
                    Some(Label::Word(word)) => words.insert(word),
                    Some(Label::Number(number)) if !words.is_empty() => {
                        words.insert(number.to_string())
                    }
                    Some(Label::Number(_)) => {
                        are_numbers = true;
                        // Nothing after it matters.
                        return Err(TextError::row(path, number, "the label is a number"));
                    }
                };
                if words.len() > MAX_LABEL_WORDS {
                    return Err(TextError::row(path, number, TOO_MANY_WORDS));
                }
                Ok(())
            };
            let read = read_as_named(path, table, &mut sink);
            if are_numbers {
                break;
            }
            read?;
        }
        Ok(words)
    }

    /// Adds the rows that `read` finds, each after a check. There must be one.
    fn add(
        &mut self,
        path: &Path,
        num_classes: usize,
        table: &TableSettings,
        read: impl FnOnce(Sink<'_>) -> Result<(), TextError>,
        warn: &mut dyn FnMut(String),
    ) -> Result<(), TextError> {
        let before = self.texts.len();
        let mut skipped = SkippedRows::default();
        read(&mut |number, row| {
            let with_class = |TextRow { text, label }: TextRow| {
                if table.skip_bad_rows && text.trim().is_empty() {
                    return Err("the text is empty".to_owned());
                }
                Ok((text, table.class_of(label)?))
            };
            let checked = row.and_then(with_class);
            let checked = checked.map_err(|problem| TextError::row(path, number, problem));
            let checked = checked.and_then(|(text, label)| {
                if usize::try_from(label).is_ok_and(|label| label < num_classes) {
                    return Ok((text, label));
                }
                Err(TextError::Label { path: path.into(), row: number, label, num_classes })
            });
            match checked {
                Ok((text, label)) => {
                    self.texts.push(text);
                    self.labels.push(label);
                }
                Err(problem) if table.skip_bad_rows => skipped.add(problem),
                Err(problem) => return Err(problem),
            }
            Ok(())
        })?;
        skipped.warning(path).into_iter().for_each(warn);
        if self.texts.len() == before {
            return Err(TextError::file(path, "has no rows"));
        }
        Ok(())
    }
}

/// Passes each text of a file on, in order, and keeps none, until `sink` returns false: the text column of a table, or the lines of
/// any other file. Without a file, the lines of standard input. Errors name the file and the row.
pub fn each_text(
    path: Option<&Path>,
    table: &TableSettings,
    mut sink: impl FnMut(String) -> bool,
) -> Result<(), TextError> {
    let name = path.unwrap_or(Path::new("standard input"));
    let mut goes_on = true;
    let mut each = |number, row: Result<TextRow, String>| {
        goes_on = sink(row.map_err(|problem| TextError::row(name, number, problem))?.text);
        // Nobody sees the error.
        if goes_on { Ok(()) } else { Err(TextError::row(name, number, "is the last one")) }
    };
    let read = match (path, path.and_then(TextFormat::of)) {
        (None, _) => lines::read(name, unmarked(name, io::stdin().lock())?, &mut each),
        (Some(path), Some(TextFormat { read: Some(read), .. })) => read(path, table, &mut each),
        (Some(path), _) => lines::read(path, open(path)?, &mut each),
    };
    if goes_on { read } else { Ok(()) }
}

/// Reads a file in the format that its name states.
fn read_as_named(path: &Path, table: &TableSettings, sink: Sink<'_>) -> Result<(), TextError> {
    match TextFormat::of(path) {
        Some(TextFormat { read: Some(read), .. }) => read(path, table, sink),
        Some(_) => Err(TextError::file(path, "plain text has no labels")),
        None => {
            let problem = format!("is not a {} file", TextFormat::of_tables(""));
            Err(TextError::file(path, problem))
        }
    }
}

pub(super) fn open(path: &Path) -> Result<impl BufRead, TextError> {
    let file = paceline_files::open(path).map_err(|error| TextError::file(path, error))?;
    unmarked(path, file)
}

/// Contents without a mark of byte order. Errors name the file `path`.
fn unmarked(path: &Path, contents: impl Read) -> Result<impl BufRead, TextError> {
    let mut contents = BufReader::new(contents);
    let begin = contents.fill_buf().map_err(|error| TextError::file(path, error))?;
    if begin.starts_with(BYTE_ORDER_MARK.as_bytes()) {
        contents.consume(BYTE_ORDER_MARK.len());
    }
    Ok(contents)
}
