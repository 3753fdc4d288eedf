//! Functions that the file formats share: finding files, and turning bytes into normalized pixels.
//!
//! Input: a folder and the names that a file may have. Output: the open file. This module knows no contents, except the
//! range of labels and pixels.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::DataError;

/// Opens the first of `names` that exists in `root` or in `root/subfolder`. Returns its path and the file.
pub(crate) fn open(
    root: &Path,
    subfolder: &str,
    names: &[String],
    hint: &'static str,
) -> Result<(PathBuf, File), DataError> {
    // Checked first, so that a mistyped folder is not reported as a missing file.
    fs::read_dir(root).map_err(|source| DataError::Directory { path: root.to_owned(), source })?;
    let mut directories = vec![root.to_owned()];
    if !subfolder.is_empty() {
        directories.push(root.join(subfolder));
    }
    for directory in &directories {
        for name in names {
            let path = directory.join(name);
            match paceline_files::open(&path) {
                Ok(file) => return Ok((path, file)),
                Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {}
                Err(source) => return Err(DataError::Read { path, source }),
            }
        }
    }
    Err(DataError::Missing { names: names.to_vec(), directories, hint })
}

/// Opens a file of a folder that has at most `limit_bytes`. Returns its path, the file and its length.
pub(crate) fn open_up_to(
    root: &Path,
    name: String,
    hint: &'static str,
    limit_bytes: u64,
) -> Result<(PathBuf, File, u64), DataError> {
    let (path, file) = open(root, "", &[name], hint)?;
    match file.metadata() {
        Ok(found) if found.len() > limit_bytes => {
            Err(DataError::content(&path, format!("has more than {} GiB", limit_bytes >> 30)))
        }
        Ok(found) => Ok((path, file, found.len())),
        Err(source) => Err(DataError::Read { path, source }),
    }
}

/// Errors on the first label that is not one of ten classes.
pub(crate) fn check_labels(
    path: &Path,
    labels: impl IntoIterator<Item = u8>,
) -> Result<(), DataError> {
    match labels.into_iter().enumerate().find(|&(_, label)| label > 9) {
        Some((record, label)) => {
            Err(DataError::format(path, format!("record {record} has the label {label}, above 9")))
        }
        None => Ok(()),
    }
}

/// The normalized value `(x / 255 - mean) / std` of every byte `x`. Each operation rounds to f32, as in
/// torchvision's `ToTensor` and `Normalize`, so that both give the same bits.
pub(crate) fn normalized(mean: f32, std: f32) -> [f32; 256] {
    std::array::from_fn(|x| (x as f32 / 255.0 - mean) / std)
}

/// A pixel as a number from -1 to 1.
pub(crate) fn centered(pixel: u8) -> f32 {
    f32::from(pixel) / 127.5 - 1.0
}
