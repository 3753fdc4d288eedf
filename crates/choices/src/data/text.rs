//! `--data text`: texts with a class each, or running text for language models, from the files of a folder.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use clap::{ArgMatches, Args};
use paceline_data::text::{
    TableSettings, TextError, TextFiles, TextReport, TextRows, TextSettings, TextSource,
    TokenizerSource,
};
use paceline_data::{Dataset, Split};
use paceline_failure::numbers::at_least;
use paceline_failure::{Failure, Result, usage};
use paceline_files::{Printable, printable};
use paceline_host::bar::{CountUnit, TaskBar};
use paceline_host::text::listed;
use paceline_hub::{self as hub, Found};

use super::files::FolderFlag;
use super::{DataSettings, OfData, RunNeeds, check_vocab};
use crate::models::{Samples, TOKENIZER};
use crate::registry::{Choice, flags_of, read};

/// Default length to which texts are cut.
const MAX_LENGTH: usize = 512;
/// Default length of a block of running text.
const SEQ_LEN: usize = 128;

pub(super) const TEXT: Choice<OfData> = Choice {
    name: "text",
    aliases: &[],
    about: "Texts in --data-dir: train*.parquet, .csv or .jsonl with text and label; for language models any texts",
    flags: flags_of::<Flags>,
    of: OfData::read_by(resolve),
};

/// The flags.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Data")]
struct Flags {
    #[command(flatten)]
    folder: FolderFlag,
    /// Text: the tokenizer.json of the model, a model of the Hugging Face Hub, or bytes: each byte is a token, which needs no
    /// file [default: the one in --data-dir, or else that of --pretrained]
    #[arg(long, value_name = "FILE|NAME")]
    tokenizer: Option<PathBuf>,
    /// Text: the column of tables that has the texts; without a header, its number from 1 [default: text]
    #[arg(long, value_name = "NAME")]
    text_column: Option<String>,
    /// Text and tables: the column with the label of each row; in a text without a header, its number from 1 [default: label]
    #[arg(long, value_name = "NAME")]
    label_column: Option<String>,
    /// Text: the labels that are words, in the order of their classes [default: that of the model, or of the alphabet]
    #[arg(long, value_name = "WORD", num_args = 1..)]
    label_names: Vec<String>,
    /// Text: the first line of CSV files is a row
    #[arg(long)]
    no_header: bool,
    /// Text: leave out and count rows that are empty or cannot be used, instead of refusing the file
    #[arg(long)]
    skip_bad_rows: bool,
    /// Text: cut each text to this many tokens [default: 512]
    #[arg(long, value_name = "N", value_parser = at_least::<usize>(1))]
    max_length: Option<usize>,
    /// Text: number of classes [default: those of the model]
    #[arg(long, value_name = "N", value_parser = at_least::<usize>(1))]
    classes: Option<usize>,
    /// Text: number of rows to train on, chosen by --seed [default: all]
    #[arg(long, value_name = "N", value_parser = at_least::<usize>(1))]
    train_samples: Option<usize>,
    /// Text: number of rows, or of blocks of running text, to test with, of the test files, or of the training files if there
    /// are no others; of running text the last ones [default: all of the test files]
    #[arg(long, value_name = "N", value_parser = at_least::<usize>(1))]
    test_samples: Option<usize>,
    /// Text: make batches of texts of like length, so that little is padded
    #[arg(long)]
    group_by_length: bool,
    /// Text: folder that keeps the tokens for the next run [default: ~/.cache/paceline/tokens]
    #[arg(long, value_name = "DIR", help_heading = "Files and addresses")]
    token_cache: Option<PathBuf>,
    /// Tokens of each synthetic sequence, or of each block of running text [default: 128]
    #[arg(long, value_name = "N", value_parser = at_least::<usize>(1))]
    seq_len: Option<usize>,
}

fn resolve(settings: &ArgMatches, run: &RunNeeds) -> Result<Arc<dyn DataSettings>> {
    let flags: Flags = read(settings)?;
    let stated = flags.folder.of(TEXT.name, "the folder of its files")?;
    let kind = Kind::of(&flags, run)?;
    let data = hub::find("--data-dir", stated, hub::Wanted::Texts)?;
    let folder = data.path.clone();
    // For a single file, the folder that it is in.
    let beside = if folder.is_dir() { &*folder } else { folder.parent().unwrap_or(Path::new("")) };
    let (tokenizer, of_tokenizer) = tokenizer(&flags, beside, run)?;
    let mut table = table(&flags, &kind)?;
    let files = match kind {
        Kind::Classified { .. } => TextFiles::find(&folder),
        Kind::Running { .. } => TextFiles::find_any(&folder),
    };
    let files = files.map_err(in_folder)?;
    if let Kind::Classified { num_classes, .. } = kind
        && table.label_names.is_empty()
    {
        table.label_names = label_names(&files, &table, num_classes, run.class_names)?;
    }
    let cache = flags.token_cache.clone().map_or_else(hub::tokens_folder, Ok)?;
    let known = match run.samples {
        Samples::Tokens { vocab, .. } => Some((run.model.to_owned(), vocab)),
        _ => None,
    };
    let found = [Some(data), of_tokenizer].into_iter().flatten().collect();
    let quiet = OnceLock::new();
    Ok(Arc::new(Texts { flags, files, table, tokenizer, cache, kind, known, found, quiet }))
}

/// The tokenizer, and how it was found if a flag names it.
fn tokenizer(
    flags: &Flags,
    beside: &Path,
    run: &RunNeeds,
) -> Result<(TokenizerSource, Option<Found>)> {
    let (path, found) = match &flags.tokenizer {
        Some(stated) if stated == Path::new(TokenizerSource::BYTES) => {
            return Ok((TokenizerSource::Bytes, None));
        }
        Some(stated) => {
            let found = hub::find("--tokenizer", stated, hub::Wanted::Tokenizer)?;
            let is_file = found.note.is_none();
            let path = if is_file { found.path.clone() } else { found.path.join(TOKENIZER) };
            (path, Some(found))
        }
        None => match (beside.join(TOKENIZER), run.tokenizer) {
            (there, Some(of_model)) if !there.is_file() => (of_model.to_owned(), None),
            (there, _) => (there, None),
        },
    };
    if path.is_file() {
        return Ok((TokenizerSource::File(path), found));
    }
    usage(format!(
        "--tokenizer: {} is no file; pass the tokenizer.json that the model was published with, or bytes, whose \
         tokens are the bytes of a text",
        path.printable()
    ))
}

/// How to allow labels above the last class.
const CLASSES: &str = "pass the number of classes (--num-labels for a Llama, otherwise --classes), or correct the label";

fn in_folder(error: TextError) -> Failure {
    let fix = match &error {
        TextError::Label { label, num_classes, .. } if *label == *num_classes as i64 => {
            let names = match *num_classes {
                few @ ..=10 => (1..=few).map(|name| name.to_string()).collect::<Vec<_>>().join(" "),
                many => format!("$(seq {many})"),
            };
            &format!("; if labels count from 1, pass --label-names {names}, otherwise {CLASSES}")
        }
        TextError::Label { label, .. } if *label >= 0 => &format!("; {CLASSES}"),
        TextError::NoRoom { .. } => "; pass a larger --max-length",
        TextError::Column { .. } => {
            "; name the columns with --text-column and --label-column, or pass --no-header if the first line is a row"
        }
        TextError::Row { .. } => "; correct the row, or pass --skip-bad-rows",
        TextError::TooShort { .. } => "; pass more text, or a smaller --seq-len",
        TextError::NoTexts { .. } => "; pass a folder or a file with text as --data-dir",
        _ => "",
    };
    Failure::Usage(format!("--data text: {error}{fix}"))
}

fn table(flags: &Flags, kind: &Kind) -> Result<TableSettings> {
    let default = TableSettings::default();
    let table = TableSettings {
        text_column: flags.text_column.clone().unwrap_or(default.text_column),
        label_column: flags.label_column.clone().or(default.label_column),
        label_names: flags.label_names.clone(),
        has_header: !flags.no_header,
        skip_bad_rows: flags.skip_bad_rows,
    };
    if matches!(kind, Kind::Running { .. }) {
        return Ok(table);
    }
    let (names, columns) = (&table.label_names, (&table.text_column, &table.label_column));
    if columns.1.as_ref() == Some(columns.0) {
        return usage(format!(
            "--text-column {0} is --label-column too; pass two columns",
            printable(columns.0)
        ));
    }
    let is_twice = |(at, name): &(usize, &String)| names[..*at].contains(name);
    if let Some((_, name)) = names.iter().enumerate().find(is_twice) {
        return usage(format!("--label-names has {} twice; name each class once", printable(name)));
    }
    match kind {
        Kind::Classified { num_classes, .. } if ![0, *num_classes].contains(&names.len()) => {
            usage(format!(
                "--label-names names {} classes, and the model has {num_classes}; name each class once",
                names.len()
            ))
        }
        _ => Ok(table),
    }
}

/// The labels of the training files, if they are words; in the order of the model if it knows them all.
fn label_names(
    files: &TextFiles,
    table: &TableSettings,
    num_classes: usize,
    known: &[String],
) -> Result<Vec<String>> {
    let words = TextRows::label_words(files.of(Split::Train), table).map_err(in_folder)?;
    if !words.is_empty() && words.iter().all(|word| known.contains(word)) {
        return Ok(known.to_vec());
    }
    let names: Vec<String> = words.into_iter().collect();
    if [0, num_classes].contains(&names.len()) {
        return Ok(names);
    }
    let count = names.len();
    usage(format!(
        "--data text: the labels in {} are {count} words ({}), and the model has {num_classes} classes; pass --num-labels {count} \
         for a Llama, otherwise --classes {count}",
        files.folder().printable(),
        listed(&names)
    ))
}

#[derive(Debug)]
enum Kind {
    Classified { num_classes: usize, max_length: usize },
    Running { seq_len: usize },
}

impl Kind {
    fn of(flags: &Flags, run: &RunNeeds) -> Result<Self> {
        match (run.samples, flags.classes) {
            (Samples::Images | Samples::Vectors { .. }, _) => usage(format!(
                "--model {} trains on {}, and --data text has texts; leave --data out, or pass another --model",
                run.model,
                run.samples.plural()
            )),
            (Samples::Tokens { classes: None, .. }, _) => Self::running(flags),
            (Samples::Tokens { classes: Some(of_model), .. }, Some(classes))
                if classes != of_model =>
            {
                usage(format!(
                    "--classes {classes}: --model {} has {of_model} classes; pass the same number",
                    run.model
                ))
            }
            (Samples::Tokens { classes: Some(classes), .. }, _) | (Samples::Any, Some(classes)) => {
                Self::classified(flags, classes)
            }
            (Samples::Any, None) => {
                usage("--data text needs --classes, the number of classes of its labels")
            }
        }
    }

    fn classified(flags: &Flags, num_classes: usize) -> Result<Self> {
        if flags.seq_len.is_some() {
            return usage(
                "--seq-len is for blocks of running text; texts with classes are cut by --max-length",
            );
        }
        Ok(Self::Classified { num_classes, max_length: flags.max_length.unwrap_or(MAX_LENGTH) })
    }

    fn running(flags: &Flags) -> Result<Self> {
        let given = [
            ("--max-length", flags.max_length.is_some()),
            ("--classes", flags.classes.is_some()),
            ("--train-samples", flags.train_samples.is_some()),
            ("--label-column", flags.label_column.is_some()),
            ("--label-names", !flags.label_names.is_empty()),
            ("--group-by-length", flags.group_by_length),
        ];
        match given.iter().find(|(_, is_given)| *is_given) {
            Some((flag, _)) => usage(format!(
                "{flag} is for texts with classes, and the model predicts the next token; leave it out"
            )),
            None => Ok(Self::Running { seq_len: flags.seq_len.unwrap_or(SEQ_LEN) }),
        }
    }
}

/// The settings.
#[derive(Debug)]
struct Texts {
    flags: Flags,
    files: TextFiles,
    table: TableSettings,
    tokenizer: TokenizerSource,
    cache: PathBuf,
    kind: Kind,
    /// The model's name and number of tokens, if it states one.
    known: Option<(String, usize)>,
    found: Vec<Found>,
    /// Set in the process that prepares the run; others find the tokens in the cache.
    quiet: OnceLock<bool>,
}

impl DataSettings for Texts {
    fn open(&self, seed: u64, split: Split) -> Result<Arc<dyn Dataset>> {
        let quiet = self.quiet.get().copied().unwrap_or(true);
        let bar = RefCell::new(TaskBar::new("tokenize", CountUnit::Items, quiet));
        let report = TextReport {
            progress: &mut |done, of| bar.borrow_mut().show(done as u64, Some(of as u64)),
            warn: &mut |problem| {
                if !quiet {
                    bar.borrow_mut().say(&format!("warning: {problem}"));
                }
            },
        };
        let tokenizer = self.tokenizer.load().map_err(|error| match error {
            TextError::File { path, problem } => Failure::Usage(format!(
                "--tokenizer: {} {problem}; pass the tokenizer.json that the model was published with",
                path.printable()
            )),
            other => in_folder(other),
        })?;
        let source = TextSource::new(self.files.clone(), tokenizer, Some(self.cache.clone()));
        let source = source.with_table(self.table.clone());
        // Before the texts are tokenized.
        if let Some((model, vocab)) = &self.known {
            check_vocab("text", source.vocab(), model, *vocab)?;
        }
        let Flags { train_samples, test_samples, .. } = self.flags;
        let open = || -> std::result::Result<Arc<dyn Dataset>, TextError> {
            Ok(match self.kind {
                Kind::Running { seq_len } => {
                    Arc::new(source.blocks(split, seq_len, test_samples, report)?)
                }
                Kind::Classified { num_classes, max_length } => {
                    let settings =
                        TextSettings { max_length, num_classes, seed, train_samples, test_samples };
                    Arc::new(source.classified(split, &settings, report)?)
                }
            })
        };
        open().map_err(in_folder)
    }

    fn notes(&self) -> Vec<String> {
        self.found.iter().filter_map(|found| found.note.clone()).collect()
    }

    fn revisions(&self) -> Vec<String> {
        self.found.iter().filter_map(|found| found.revision.clone()).collect()
    }

    fn tokenizer(&self) -> Option<&TokenizerSource> {
        Some(&self.tokenizer)
    }

    fn has_test(&self) -> bool {
        !self.files.of(Split::Test).is_empty() || self.flags.test_samples.is_some()
    }

    fn length_flag(&self) -> Option<&'static str> {
        Some(match self.kind {
            Kind::Classified { .. } => "--max-length",
            Kind::Running { .. } => "--seq-len",
        })
    }

    fn groups_by_length(&self) -> bool {
        self.flags.group_by_length
    }

    /// A token has four bytes; a row also has its end and its label.
    fn resident_bytes(&self, dataset: &dyn Dataset) -> f64 {
        let tokens = match (dataset.lengths(), &self.kind) {
            (Some(lengths), _) => lengths.iter().map(|length| f64::from(*length)).sum(),
            (None, Kind::Running { seq_len }) => (dataset.len() * seq_len) as f64,
            (None, Kind::Classified { max_length, .. }) => (dataset.len() * max_length) as f64,
        };
        4.0 * tokens + 16.0 * dataset.len() as f64
    }

    fn prepare(&self, quiet: bool) -> Result<()> {
        self.quiet.get_or_init(|| quiet);
        Ok(())
    }

    /// The files and the tokenizer may lie in other folders.
    fn identity(&self) -> Option<Vec<(&'static str, String)>> {
        let all = |number: Option<usize>| number.map_or("all".to_owned(), |n| n.to_string());
        Some(match self.kind {
            Kind::Running { seq_len } => {
                let mut all = vec![("--seq-len", seq_len.to_string())];
                all.extend(self.flags.test_samples.map(|n| ("--test-samples", n.to_string())));
                all
            }
            Kind::Classified { num_classes, max_length } => vec![
                ("--classes", num_classes.to_string()),
                ("--max-length", max_length.to_string()),
                ("--train-samples", all(self.flags.train_samples)),
                ("--test-samples", all(self.flags.test_samples)),
                ("--group-by-length", self.flags.group_by_length.to_string()),
            ],
        })
    }
}

#[cfg(test)]
mod tests;
