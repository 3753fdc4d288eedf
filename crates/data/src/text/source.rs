//! From a folder of texts to a data set of tokens.
//!
//! Input: files, a tokenizer, and which part of them is wanted. Output: a data set, from the cache if its tokens are there.
//! This module knows nothing of models, and draws no progress.

use std::path::{Path, PathBuf};

use rand::seq::SliceRandom;

use super::cache::{CacheFile, file_digest};
use super::row::MAX_TEXT_BYTES;
use super::rows::BYTE_ORDER_MARK;
use super::{
    TableSettings, TextError, TextFiles, TextFormat, TextRows, TokenBlocks, TokenDataset,
    TokenRows, Tokenizer,
};
use crate::Split;
use crate::digest::ContentDigest;
use crate::random::{RandomPurpose, generator};

/// No file of running text is larger. It is read as a whole.
const MAX_RUNNING_BYTES: u64 = 4_000_000_000;

/// Texts with a class each, as tokens.
#[derive(Clone, Debug)]
pub struct TextSettings {
    /// Texts are cut to this many tokens.
    pub max_length: usize,
    /// The number of classes.
    pub num_classes: usize,
    /// Determines the order of the rows before some of them are taken.
    pub seed: u64,
    /// How many rows to train on, by default all that are not to test with.
    pub train_samples: Option<usize>,
    /// How many rows to test with, by default all of the test files.
    pub test_samples: Option<usize>,
}

/// Callbacks for what happens while tokens are made.
pub struct TextReport<'a> {
    /// How many of how many texts are tokenized.
    pub progress: &'a mut dyn FnMut(usize, usize),
    /// A file in the cache is unusable and made again, or texts are empty or longer than what is read of them.
    pub warn: &'a mut dyn FnMut(String),
}

/// Files of text and the tokenizer for them.
pub struct TextSource {
    files: TextFiles,
    tokenizer: Tokenizer,
    table: TableSettings,
    cache: Option<PathBuf>,
}

impl TextSource {
    /// The texts of these files. Tokens are kept in the folder `cache`, if there is one.
    pub fn new(files: TextFiles, tokenizer: Tokenizer, cache: Option<PathBuf>) -> Self {
        Self { files, tokenizer, table: TableSettings::default(), cache }
    }

    /// The same, with tables that are read by these settings.
    pub fn with_table(self, table: TableSettings) -> Self {
        Self { table, ..self }
    }

    /// The number above all tokens.
    pub fn vocab(&self) -> usize {
        self.tokenizer.vocab()
    }

    /// Texts with classes. The rows of the files are brought into a random order, and the first ones are taken. Without
    /// test files, the rows after them are those to test with.
    pub fn classified(
        &self,
        split: Split,
        settings: &TextSettings,
        report: TextReport<'_>,
    ) -> Result<TokenDataset, TextError> {
        let files = self.files_of(split);
        let key = self.with_table_key(format!("{split:?} {settings:?}"));
        // Earlier versions cut off the ends of texts in any case.
        let key = key + if self.tokenizer.cuts_beginnings() { " without beginnings" } else { "" };
        let rows = self.cached(files, &key, report, |report| {
            let (table, warn) = (&self.table, &mut *report.warn);
            let mut rows = TextRows::read_table(files, settings.num_classes, table, warn)?;
            let chosen = self.choose(split, rows.texts.len(), settings)?;
            let texts = chosen.iter().map(|row| std::mem::take(&mut rows.texts[*row])).collect();
            let labels = chosen.iter().map(|row| rows.labels[*row]).collect();
            drop(rows);
            let rows = TextRows { texts, labels };
            tokenized(rows, &self.tokenizer, settings.max_length, report)
        })?;
        let names = self.table.label_names.clone();
        Ok(TokenDataset::new(rows, self.vocab(), settings.num_classes, names))
    }

    /// Running text in blocks of `seq_len` tokens. Without test files, the last `test_samples` blocks of the training files
    /// are to test with. The rows of tables are joined by line breaks.
    pub fn blocks(
        &self,
        split: Split,
        seq_len: usize,
        test_samples: Option<usize>,
        report: TextReport<'_>,
    ) -> Result<TokenBlocks, TextError> {
        let is_divided = self.files.of(Split::Test).is_empty();
        let num_test = test_samples.filter(|_| is_divided).unwrap_or(0);
        let files = match self.files.of(split) {
            [] if num_test > 0 => self.files.of(Split::Train),
            files => files,
        };
        let folder = self.files.folder();
        if files.is_empty() {
            return Err(TextFormat::no_files(folder, "test"));
        }
        // An earlier version cut texts elsewhere, so its files may have other tokens than the whole text.
        let key = "running text, as a whole, without a mark of byte order".to_owned();
        let key = if files.iter().any(|path| is_table(path)) {
            self.with_table_key(key + ", rows joined")
        } else {
            key
        };
        let part = if split == Split::Train { "training" } else { "test" };
        let num_train_of = |num_tokens: usize| {
            let num_blocks = num_tokens.saturating_sub(1) / seq_len;
            if num_blocks == 0 {
                return Err(TextError::TooShort { path: folder.into(), part, num_tokens, seq_len });
            }
            let left = num_blocks.checked_sub(num_test).filter(|left| *left > 0);
            left.ok_or_else(|| self.too_few("test", num_test, num_blocks - 1))
        };
        let rows = self.cached(files, &key, report, |report| {
            let mut tokens = Vec::new();
            for path in files {
                let text = TextFiles::running_text(path, &self.table, &mut *report.warn)?;
                tokens.extend(self.tokenizer.encode_running_text(&text, &mut *report.progress)?);
            }
            // What is refused is not kept.
            num_train_of(tokens.len())?;
            Ok(TokenRows { ends: vec![tokens.len() as u64], tokens, labels: vec![0] })
        })?;
        let mut tokens = rows.tokens;
        let num_train = num_train_of(tokens.len())?;
        if num_test > 0 {
            // The last token of a block is a target only, so both parts have the one between them.
            match split {
                Split::Train => tokens.truncate(num_train * seq_len + 1),
                Split::Test => drop(tokens.drain(..num_train * seq_len)),
            }
        }
        Ok(TokenBlocks { tokens, seq_len, vocab: self.vocab() })
    }

    /// The key of tokens that depend on how tables are read.
    fn with_table_key(&self, key: String) -> String {
        // Tokens of earlier versions have no such part.
        if self.table == TableSettings::default() { key } else { format!("{key} {:?}", self.table) }
    }

    /// The files of a part: without test files, both parts are made of the training files.
    fn files_of(&self, split: Split) -> &[PathBuf] {
        match self.files.of(split) {
            [] => self.files.of(Split::Train),
            files => files,
        }
    }

    /// The rows of a part, out of the `len` rows of its files.
    fn choose(
        &self,
        split: Split,
        len: usize,
        settings: &TextSettings,
    ) -> Result<Vec<usize>, TextError> {
        let mut order: Vec<usize> = (0..len).collect();
        order.shuffle(&mut generator(settings.seed, RandomPurpose::Rows, 0, 0));
        let is_divided = self.files.of(Split::Test).is_empty();
        let for_test = if is_divided { settings.test_samples.unwrap_or(0) } else { 0 };
        let left = len.saturating_sub(for_test);
        let train = settings.train_samples.unwrap_or(left);
        let (begin, wanted) = match split {
            Split::Train if train > left => return Err(self.too_few("training", train, left)),
            Split::Train => (0, train),
            Split::Test if is_divided => (train, for_test),
            Split::Test => (0, settings.test_samples.unwrap_or(len)),
        };
        match order.get(begin..begin.saturating_add(wanted)) {
            Some(chosen) => Ok(chosen.to_vec()),
            None => Err(self.too_few("test", wanted, len.saturating_sub(begin))),
        }
    }

    fn too_few(&self, part: &'static str, wanted: usize, available: usize) -> TextError {
        TextError::TooFew { part, wanted, available, folder: self.files.folder().into() }
    }

    /// The tokens from the cache, or else from `make`.
    fn cached(
        &self,
        files: &[PathBuf],
        settings: &str,
        mut report: TextReport<'_>,
        make: impl FnOnce(&mut TextReport<'_>) -> Result<TokenRows, TextError>,
    ) -> Result<TokenRows, TextError> {
        let Some(folder) = &self.cache else { return make(&mut report) };
        let mut key =
            ContentDigest::default().bytes(settings.as_bytes()).bytes(self.tokenizer.json());
        for path in files {
            // The end of the name decides the format.
            key = key.bytes(path.extension().unwrap_or_default().as_encoded_bytes());
            key = key.bytes(&file_digest(path)?);
        }
        let cache = CacheFile::new(folder, key.hash());
        match cache.read() {
            Ok(Some(rows)) => return Ok(rows),
            Ok(None) => {}
            Err(reason) => {
                let path = cache.path.display();
                (report.warn)(format!("{path}: {reason}; the texts are tokenized again"));
            }
        }
        let rows = make(&mut report)?;
        cache.write(&rows)?;
        Ok(rows)
    }
}

impl TextFiles {
    /// The text of a file of any format. The rows of a table are joined by line breaks; `warn` receives those that were
    /// left out.
    pub fn running_text(
        path: &Path,
        table: &TableSettings,
        warn: &mut dyn FnMut(String),
    ) -> Result<String, TextError> {
        if is_table(path) {
            let table = TableSettings { label_column: None, ..table.clone() };
            let rows = TextRows::read_table(&[path.to_owned()], 1, &table, warn)?;
            return Ok(rows.texts.join("\n") + "\n");
        }
        let text = paceline_files::read_text(path, MAX_RUNNING_BYTES)
            .map_err(|error| TextError::file(path, error))?;
        Ok(text.strip_prefix(BYTE_ORDER_MARK).map(str::to_owned).unwrap_or(text))
    }
}

impl TokenDataset {
    /// Texts with a class each, in their order, and the names of the classes. For texts that no folder holds.
    pub fn of_texts(
        texts: TextRows,
        class_names: Vec<String>,
        tokenizer: &Tokenizer,
        max_length: usize,
    ) -> Result<Self, TextError> {
        let mut report = TextReport { progress: &mut |_, _| {}, warn: &mut |_| {} };
        let rows = tokenized(texts, tokenizer, max_length, &mut report)?;
        Ok(Self::new(rows, tokenizer.vocab(), class_names.len(), class_names))
    }
}

/// Whether a file has rows. Unknown formats are taken for text.
fn is_table(path: &Path) -> bool {
    TextFormat::of(path).is_some_and(|format| format.read.is_some())
}

/// The tokens of texts. A text without any becomes one token of padding: in
/// transformers too, a batch with such a text has a row of nothing else.
fn tokenized(
    rows: TextRows,
    tokenizer: &Tokenizer,
    max_length: usize,
    report: &mut TextReport<'_>,
) -> Result<TokenRows, TextError> {
    let TextRows { texts, labels } = rows;
    let mut tokens = tokenizer.encode(&texts, max_length, &mut *report.progress)?;
    let all = tokens.len();
    let mut num_empty = 0;
    for row in tokens.iter_mut().filter(|row| row.is_empty()) {
        row.push(tokenizer.pad());
        num_empty += 1;
    }
    if num_empty > 0 {
        let pad = tokenizer.pad();
        (report.warn)(format!(
            "{num_empty} of {all} texts have no tokens; each of them is a row of padding, token {pad}"
        ));
    }
    let is_short = |(text, row): &(&String, &Vec<u32>)| {
        let lacks_tokens = row.len() < max_length || tokenizer.cuts_beginnings();
        text.len() >= MAX_TEXT_BYTES && lacks_tokens
    };
    let num_short = texts.iter().zip(&tokens).filter(is_short).count();
    if num_short > 0 {
        let most = MAX_TEXT_BYTES >> 20;
        let why = if tokenizer.cuts_beginnings() {
            "although the tokenizer keeps the ends of texts".to_owned()
        } else {
            format!("which have fewer than {max_length} tokens")
        };
        (report.warn)(format!(
            "{num_short} of {all} texts were cut to their first {most} MiB, {why}; the rest of these texts is not used"
        ));
    }
    let mut end = 0;
    let ends = tokens.iter().map(|row| {
        end += row.len() as u64;
        end
    });
    Ok(TokenRows { ends: ends.collect(), tokens: tokens.concat(), labels })
}
