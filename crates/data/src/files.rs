//! What the file formats share: where files lie, and how bytes become normalised pixels.
//!
//! In goes a folder and the names that a file may have; out comes the open file. It knows nothing
//! of what is in the files.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::DataError;

/// Opens the first of `names` that exists in `root` or in `root/subfolder`, and says which it was.
pub(crate) fn open(
    root: &Path,
    subfolder: &str,
    names: &[String],
    hint: &'static str,
) -> Result<(PathBuf, File), DataError> {
    // Asked first, so that a mistyped folder is reported as such and not as a missing file.
    fs::read_dir(root).map_err(|source| DataError::Directory { path: root.to_owned(), source })?;
    let directories = vec![root.to_owned(), root.join(subfolder)];
    for directory in &directories {
        for name in names {
            let path = directory.join(name);
            match File::open(&path) {
                Ok(file) => return Ok((path, file)),
                Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {}
                Err(source) => return Err(DataError::Read { path, source }),
            }
        }
    }
    Err(DataError::Missing { names: names.to_vec(), directories, hint })
}

/// Errors on the first label that names none of ten classes.
pub(crate) fn check_labels(
    path: &Path,
    labels: impl IntoIterator<Item = u8>,
) -> Result<(), DataError> {
    let largest = 9;
    match labels.into_iter().enumerate().find(|&(_, label)| label > largest) {
        Some((record, label)) => {
            Err(DataError::FileLabel { path: path.to_owned(), record, label, largest })
        }
        None => Ok(()),
    }
}

/// The normalised value `(x / 255 - mean) / std` of every byte `x`, rounded to f32 after each
/// operation as torchvision's `ToTensor` and `Normalize` do, so that both give the same bits.
pub(crate) fn normalised(mean: f32, std: f32) -> [f32; 256] {
    std::array::from_fn(|x| (x as f32 / 255.0 - mean) / std)
}
