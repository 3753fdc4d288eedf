//! Images of one's own: a folder for each class, with PNG and JPEG files.
//!
//! Input: a folder of the folders of classes, or of the folders `train` and `test` (or `val`), which have them.
//! Output: the images of a part, all of one size, as bytes. This module knows no flags.

use std::fs;
use std::path::{Path, PathBuf};

use crate::arrays::{ArrayInputs, Arrays, Targets, reserved};
use crate::pixels::Pixels;
use crate::{DataError, Split};

/// The most bytes of a file.
const MAX_FILE_BYTES: u64 = 64 << 20;
/// The most images of a part.
const MAX_IMAGES: usize = 10_000_000;
/// Files that systems leave in folders.
const LITTER: [&str; 2] = ["Thumbs.db", "desktop.ini"];

/// Where the images of a data set lie.
#[derive(Clone, Debug)]
pub struct ImageFolder {
    train: PathBuf,
    test: Option<PathBuf>,
}

/// The files of a part.
struct ImageFiles {
    classes: Vec<String>,
    /// Each with its class.
    files: Vec<(PathBuf, u32)>,
}

impl ImageFolder {
    /// Looks which parts a folder has. Errors if it cannot be read.
    pub fn find(root: &Path) -> Result<Self, DataError> {
        fs::read_dir(root)
            .map_err(|source| DataError::Directory { path: root.to_owned(), source })?;
        let part = |name: &str| Some(root.join(name)).filter(|folder| folder.is_dir());
        Ok(match part("train") {
            Some(train) => Self { train, test: part("test").or_else(|| part("val")) },
            None => Self { train: root.to_owned(), test: None },
        })
    }

    /// Whether there are images to test with.
    pub fn has_test(&self) -> bool {
        self.test.is_some()
    }

    /// Reads a part. Images are scaled to `size` (height, width, channels: 1 or 3); by default all must have that of
    /// the first image to train on. Classes are the folders of the images to train on, in the order of their names.
    pub fn load(&self, split: Split, size: Option<[usize; 3]>) -> Result<Arrays, DataError> {
        let train = ImageFiles::of(&self.train, None)?;
        let first = train.files.first().map(|(path, _)| path.clone());
        let class_names = train.classes.clone();
        let part = match (split, &self.test) {
            (Split::Train, _) => train,
            (Split::Test, Some(test)) => ImageFiles::of(test, Some(train.classes))?,
            (Split::Test, None) => {
                let problem = "has no folder test or val beside the images to train on";
                return Err(DataError::content(&self.train, problem));
            }
        };
        let (scales, size) = match (size, first) {
            (Some(size), _) => (true, size),
            (None, Some(first)) => (false, decoded(&first)?.size()),
            (None, None) => return Err(DataError::format(&self.train, "holds no samples")),
        };
        let of_image: usize = size.iter().product();
        let mut pixels: Vec<u8> = reserved(part.files.len() as u128 * of_image as u128)?;
        for (path, _) in &part.files {
            let image = decoded(path)?;
            let found = image.size();
            if !scales && found != size {
                return Err(DataError::ImageSize { path: path.clone(), found, expected: size });
            }
            pixels.extend(image.of_size(size));
        }
        let labels = part.files.iter().map(|(_, class)| *class).collect();
        Ok(Arrays {
            inputs: ArrayInputs::Bytes(pixels),
            extents: size.to_vec(),
            targets: Targets::Classes { labels, num_classes: class_names.len() },
            class_names,
        })
    }
}

impl ImageFiles {
    /// The files below a folder, which has a folder for each class. If `classes` are known, it may have no others.
    fn of(root: &Path, classes: Option<Vec<String>>) -> Result<Self, DataError> {
        let mut found = Vec::new();
        for path in entries(root)? {
            if !path.is_dir() {
                let problem = "is no folder; images stand in a folder for each class";
                return Err(DataError::content(&path, problem));
            }
            let name = path.file_name().and_then(|name| name.to_str());
            let name =
                name.ok_or_else(|| DataError::content(&path, "has a name that is not UTF-8"))?;
            found.push(name.to_owned());
        }
        let classes = match classes {
            Some(classes) => classes,
            None if found.len() < 2 => {
                let problem = "has no folders for two or more classes";
                return Err(DataError::content(root, problem));
            }
            None => found.clone(),
        };
        let mut files = Vec::new();
        for name in found {
            let folder = root.join(&name);
            let class = classes.iter().position(|class| *class == name);
            let class = class.ok_or_else(|| {
                DataError::content(&folder, "is a class without images to train on")
            })?;
            for path in entries(&folder)? {
                if !has_name_of_image(&path) {
                    let problem = "is no .png, .jpg or .jpeg file; convert it or remove it";
                    return Err(DataError::content(&path, problem));
                }
                files.push((path, class as u32));
            }
            if files.len() > MAX_IMAGES {
                return Err(DataError::content(root, format!("has more than {MAX_IMAGES} images")));
            }
        }
        if files.is_empty() {
            Err(DataError::format(root, "holds no samples"))
        } else {
            Ok(Self { classes, files })
        }
    }
}

/// The entries of a folder, in the order of their names. Hidden files and the litter of systems are left out.
fn entries(folder: &Path) -> Result<Vec<PathBuf>, DataError> {
    let failed = |source| DataError::Directory { path: folder.to_owned(), source };
    let mut paths = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name();
        let is_litter = LITTER.iter().any(|litter| name == *litter);
        if !name.as_encoded_bytes().starts_with(b".") && !is_litter {
            paths.push(entry.path());
        }
    }
    paths.sort();
    Ok(paths)
}

fn has_name_of_image(path: &Path) -> bool {
    let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or("");
    ["png", "apng", "jpg", "jpeg", "jfif"].iter().any(|known| extension.eq_ignore_ascii_case(known))
}

fn decoded(path: &Path) -> Result<Pixels, DataError> {
    let bytes = paceline_files::read(path, MAX_FILE_BYTES)
        .map_err(|source| DataError::Read { path: path.to_owned(), source })?;
    Pixels::decode(&bytes).map_err(|problem| DataError::content(path, problem))
}
