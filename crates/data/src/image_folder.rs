//! Images of one's own: a folder for each class, with PNG and JPEG files.
//!
//! Input: a folder that has the folders of classes, or that has the folders `train` and `test` (or `val`), which have them.
//! Output: the images of a part, all of one size, as bytes. This module knows nothing of flags.

use std::fs;
use std::io::Cursor;
use std::path::{Path, PathBuf};

use image::imageops::FilterType;
use image::{DynamicImage, ImageFormat, ImageReader, Limits};

use crate::arrays::{Arrays, Inputs, Targets};
use crate::{DataError, Split};

/// The most bytes of a file.
const MAX_FILE_BYTES: u64 = 64 << 20;
/// The most pixels along a side. A file of a few bytes can announce four thousand million.
const MAX_SIDE: u32 = 16_384;
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
struct Files {
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

    /// Reads a part. Images have `size` (height, width, channels: 1 or 3), to which they are scaled; by default all have that of
    /// the first image to train on, and another size is an error. Classes are the folders of the images to train on, in
    /// the order of their names.
    pub fn load(&self, split: Split, size: Option<[usize; 3]>) -> Result<Arrays, DataError> {
        let train = Files::of(&self.train, None)?;
        let first = train.files.first().map(|(path, _)| path.clone());
        let class_names = train.classes.clone();
        let part = match (split, &self.test) {
            (Split::Train, _) => train,
            (Split::Test, Some(test)) => Files::of(test, Some(train.classes))?,
            (Split::Test, None) => {
                let problem = "has no folder test or val beside the images to train on";
                return Err(DataError::content(&self.train, problem));
            }
        };
        let (scales, size) = match (size, first) {
            (Some(size), _) => (true, size),
            (None, Some(first)) => (false, size_of(&decoded(&first)?)),
            (None, None) => return Err(DataError::NoSamples { path: self.train.clone() }),
        };
        let of_image: usize = size.iter().product();
        let num_elems = part.files.len() as u128 * of_image as u128;
        let mut pixels: Vec<u8> = Vec::new();
        let reserved = usize::try_from(num_elems).map(|len| pixels.try_reserve_exact(len));
        if !matches!(reserved, Ok(Ok(()))) {
            return Err(DataError::TooLarge { num_elems });
        }
        for (path, _) in &part.files {
            let image = decoded(path)?;
            let found = size_of(&image);
            if !scales && found != size {
                return Err(DataError::ImageSize { path: path.clone(), found, expected: size });
            }
            pixels.extend(of_size(image, size));
        }
        let labels = part.files.iter().map(|(_, class)| *class).collect();
        Ok(Arrays {
            inputs: Inputs::Bytes(pixels),
            extents: size.to_vec(),
            targets: Targets::Classes { labels, num_classes: class_names.len() },
            class_names,
        })
    }
}

impl Files {
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
                if format_by_name(&path).is_none() {
                    let problem = "is no .png, .jpg or .jpeg file; convert it or remove it";
                    return Err(DataError::content(&path, problem));
                }
                files.push((path, class as u32));
            }
            if files.len() > MAX_IMAGES {
                return Err(DataError::content(root, format!("has more than {MAX_IMAGES} images")));
            }
        }
        match files.is_empty() {
            true => Err(DataError::NoSamples { path: root.to_owned() }),
            false => Ok(Self { classes, files }),
        }
    }
}

/// What a folder has, in the order of the names. Hidden files and the litter of systems are left out.
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

fn format_by_name(path: &Path) -> Option<ImageFormat> {
    let format = ImageFormat::from_path(path).ok()?;
    matches!(format, ImageFormat::Png | ImageFormat::Jpeg).then_some(format)
}

/// Decodes a file. Its contents decide how, not its name.
fn decoded(path: &Path) -> Result<DynamicImage, DataError> {
    let bytes = paceline_files::read(path, MAX_FILE_BYTES)
        .map_err(|source| DataError::Read { path: path.to_owned(), source })?;
    of_bytes(path, &bytes)
}

/// Decodes the bytes of a file.
pub(crate) fn of_bytes(path: &Path, bytes: &[u8]) -> Result<DynamicImage, DataError> {
    let format = image::guess_format(bytes).ok();
    let format = format.filter(|of| matches!(of, ImageFormat::Png | ImageFormat::Jpeg));
    let format = format
        .ok_or_else(|| DataError::content(path, "does not begin as a PNG or JPEG file does"))?;
    let mut reader = ImageReader::with_format(Cursor::new(bytes), format);
    let mut limits = Limits::default();
    limits.max_image_width = Some(MAX_SIDE);
    limits.max_image_height = Some(MAX_SIDE);
    reader.limits(limits);
    reader.decode().map_err(|error| DataError::content(path, format!("cannot be decoded: {error}")))
}

/// Height, width, and 1 channel for shades of gray or 3 for colors.
fn size_of(image: &DynamicImage) -> [usize; 3] {
    let channels = if image.color().has_color() { 3 } else { 1 };
    [image.height() as usize, image.width() as usize, channels]
}

/// The pixels, scaled to a size, channels last. Transparency is left out.
fn of_size(image: DynamicImage, [height, width, channels]: [usize; 3]) -> Vec<u8> {
    let is_other = (image.height() as usize, image.width() as usize) != (height, width);
    let image = match is_other {
        true => image.resize_exact(width as u32, height as u32, FilterType::Triangle),
        false => image,
    };
    if channels == 1 { image.into_luma8().into_raw() } else { image.into_rgb8().into_raw() }
}
