//! Finds the text files of a folder.
//!
//! Input: a folder, or one file. Output: the files of the training part and of the test part, in the order of their names.
//! This module opens no file.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::{TextError, TextFormat};
use crate::Split;

/// A folder with more files is taken for a mistake.
const MAX_FILES: usize = 1_000_000;

/// The text files of a folder: `train*` and `test*`, in a [format](TextFormat) that can be a part. Data sets of the
/// Hugging Face Hub often have them in a subfolder.
#[derive(Clone, Debug)]
pub struct TextFiles {
    folder: PathBuf,
    train: Vec<PathBuf>,
    test: Vec<PathBuf>,
}

impl TextFiles {
    /// Texts with classes, in a folder, or in its one subfolder that has something to train on. Errors if there is no such
    /// folder, or several, or if a part has files of several formats.
    pub fn find(folder: &Path) -> Result<Self, TextError> {
        if folder.exists() && !folder.is_dir() {
            return Ok(Self {
                folder: folder.into(),
                train: vec![folder.into()],
                test: Vec::new(),
            });
        }
        let found = match Self::in_folder(folder) {
            Err(TextError::NoFiles { .. }) => entries(folder)?,
            outcome => return outcome,
        };
        let mut with_files = Vec::new();
        for subfolder in found.iter().filter(|path| path.is_dir()) {
            match Self::in_folder(subfolder) {
                Err(TextError::NoFiles { .. }) => {}
                outcome => with_files.push(outcome?),
            }
        }
        match (with_files.pop(), with_files.pop()) {
            (Some(files), None) => Ok(files),
            (Some(second), Some(first)) => {
                Err(TextError::Subfolders { first: first.folder, second: second.folder })
            }
            (None, _) => Err(TextFormat::no_files(folder, "train")),
        }
    }

    /// Any text for a language model: as [`TextFiles::find`], or else all text files of a
    /// folder and of its subfolders, whatever their names. Hidden files, and subfolders that are links, are left out.
    pub fn find_any(path: &Path) -> Result<Self, TextError> {
        match Self::find(path) {
            Err(TextError::NoFiles { .. }) => {}
            outcome => return outcome,
        }
        let (mut train, mut folders) = (Vec::new(), vec![path.to_owned()]);
        while let Some(folder) = folders.pop() {
            for entry in entries(&folder)? {
                if entry.file_name().is_some_and(|name| name.as_encoded_bytes()[0] == b'.') {
                    continue;
                }
                // A FIFO or another non-file with such a name is refused where it is opened.
                if !entry.is_dir() && TextFormat::of(&entry).is_some() {
                    train.push(entry);
                } else if entry.is_dir() && !entry.is_symlink() {
                    folders.push(entry);
                }
            }
            if train.len() + folders.len() > MAX_FILES {
                let problem = format!(
                    "has more than {MAX_FILES} files and folders; join them, or pass a smaller folder"
                );
                return Err(TextError::file(path, problem));
            }
        }
        train.sort();
        if train.is_empty() {
            Err(TextError::NoTexts { folder: path.into(), wanted: TextFormat::of_texts() })
        } else {
            Ok(Self { folder: path.into(), train, test: Vec::new() })
        }
    }

    fn in_folder(folder: &Path) -> Result<Self, TextError> {
        let is_text = |path: &PathBuf| TextFormat::of_part(path).is_some() && path.is_file();
        let paths: Vec<PathBuf> = entries(folder)?.into_iter().filter(is_text).collect();
        let part = |prefix: &str| -> Result<Vec<PathBuf>, TextError> {
            let begins = |path: &&PathBuf| {
                path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(prefix))
            };
            let part: Vec<PathBuf> = paths.iter().filter(begins).cloned().collect();
            let first = part.first().and_then(|path| path.extension());
            match part.iter().find(|path| path.extension() != first) {
                Some(second) => {
                    Err(TextError::Formats { first: part[0].clone(), second: second.clone() })
                }
                None => Ok(part),
            }
        };
        let (train, test) = (part("train")?, part("test")?);
        if train.is_empty() {
            return Err(TextFormat::no_files(folder, "train"));
        }
        Ok(Self { folder: folder.into(), train, test })
    }

    /// The folder of the files, or the only file.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The files of a part. There may be none to test with.
    pub fn of(&self, split: Split) -> &[PathBuf] {
        match split {
            Split::Train => &self.train,
            Split::Test => &self.test,
        }
    }
}

/// The entries of a folder, in the order of their names.
fn entries(folder: &Path) -> Result<Vec<PathBuf>, TextError> {
    let read = || fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<io::Result<_>>();
    let mut paths: Vec<PathBuf> = read().map_err(|error| TextError::file(folder, error))?;
    paths.sort();
    Ok(paths)
}
