//! NumPy's files: arrays of one's own, as `numpy.save` writes them.
//!
//! Input: a folder with `x_train.npy` and `y_train.npy` and, to test with, `x_test.npy` and `y_test.npy`. Output: a part of
//! the data set. The header of a file is a literal of Python; only the form that NumPy writes is read. Objects, which NumPy
//! stores as pickles that can run code, are refused. This module knows no flags.

use std::io::{self, Read};
use std::path::{Path, PathBuf};

use crate::arrays::{ArrayInputs, Arrays, Targets};
use crate::{DataError, Split, files};

const MAGIC: &[u8] = b"\x93NUMPY";
/// The most bytes of a file.
const MAX_FILE_BYTES: u64 = 16 << 30;
/// The most bytes of a header. Those of NumPy have 128.
const MAX_HEADER_BYTES: usize = 64 << 10;
/// The most classes, as of a table.
const MAX_CLASSES: i64 = 100_000;
/// The most extents of an array: those of a batch of images.
const MAX_EXTENTS: usize = 4;
const HINT: &str = "a folder of arrays has x_train.npy and y_train.npy and, to test with, x_test.npy and y_test.npy";

/// A folder of arrays.
#[derive(Clone, Debug)]
pub struct NpyFolder {
    folder: PathBuf,
}

/// An array as a file has it.
pub(crate) struct Array {
    /// The file.
    path: PathBuf,
    /// The number of samples comes first.
    pub shape: Vec<usize>,
    pub elems: NpyElems,
}

/// The elements of an array, row after row.
#[derive(Debug, PartialEq)]
pub(crate) enum NpyElems {
    Bytes(Vec<u8>),
    Integers(Vec<i64>),
    Reals(Vec<f32>),
}

/// The kind of a number in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NumberKind {
    Signed,
    Unsigned,
    Real,
}

impl NpyFolder {
    /// The arrays in `folder`.
    pub fn new(folder: PathBuf) -> Self {
        Self { folder }
    }

    /// Whether there are arrays to test with.
    pub fn has_test(&self) -> bool {
        self.folder.join("x_test.npy").exists()
    }

    /// Reads a part. Inputs are real numbers, kept unchanged, or bytes, which become numbers from -1 to 1. Whole numbers as targets
    /// are classes, from 0 to the largest one to train on.
    pub fn load(&self, split: Split) -> Result<Arrays, DataError> {
        let name = if split == Split::Train { "train" } else { "test" };
        let (x, y) = (self.array("x", name)?, self.array("y", name)?);
        let (images, labels) = (x.shape[0], y.shape[0]);
        if images != labels {
            let problem = format!("has {images} inputs, and {} {labels} targets", y.path.display());
            return Err(DataError::content(&x.path, problem));
        }
        let (inputs, mut extents) = x.inputs()?;
        if extents.len() == 2 {
            extents.push(1); // an image without channels has one
        }
        let targets = y.targets()?;
        let targets = self.known(split, targets, &y.path)?;
        Ok(Arrays { inputs, extents, targets, class_names: Vec::new() })
    }

    fn array(&self, kind: &str, part: &str) -> Result<Array, DataError> {
        let name = format!("{kind}_{part}.npy");
        let (path, file, len) = files::open_up_to(&self.folder, name, HINT, MAX_FILE_BYTES)?;
        Array::read(path, file, len)
    }

    /// The targets of a part. Those to test with have the classes of those to train on.
    fn known(&self, split: Split, targets: Targets, path: &Path) -> Result<Targets, DataError> {
        let Targets::Classes { labels, num_classes } = targets else { return Ok(targets) };
        if split == Split::Train {
            return Ok(Targets::Classes { labels, num_classes });
        }
        let train = self.array("y", "train")?.targets()?;
        let Targets::Classes { num_classes: known, .. } = train else {
            let problem = "has whole numbers, and the targets to train on are real numbers";
            return Err(DataError::content(path, problem));
        };
        if num_classes > known {
            let class = num_classes - 1;
            let problem =
                format!("has the class {class}, and the targets to train on {known} classes");
            return Err(DataError::content(path, problem));
        }
        Ok(Targets::Classes { labels, num_classes: known })
    }
}

impl Array {
    /// Reads an array of at most `file_bytes` bytes with its header.
    pub(crate) fn read(
        path: PathBuf,
        mut file: impl Read,
        file_bytes: u64,
    ) -> Result<Self, DataError> {
        let cut = |source: io::Error| match source.kind() {
            io::ErrorKind::UnexpectedEof => DataError::content(&path, "ends within its header"),
            _ => DataError::Read { path: path.clone(), source },
        };
        let mut start = [0; 8];
        file.read_exact(&mut start).map_err(cut)?;
        if !start.starts_with(MAGIC) {
            return Err(DataError::content(&path, "does not begin as a file of NumPy's does"));
        }
        // The length of the header has two bytes, or four since version 2.
        let mut len = [0; 4];
        let len_bytes = if start[6] < 2 { 2 } else { 4 };
        file.read_exact(&mut len[..len_bytes]).map_err(cut)?;
        let len = u32::from_le_bytes(len) as usize;
        if len > MAX_HEADER_BYTES {
            let problem = format!("has a header of more than {MAX_HEADER_BYTES} bytes");
            return Err(DataError::content(&path, problem));
        }
        let mut header = vec![0; len];
        file.read_exact(&mut header).map_err(cut)?;
        let header = String::from_utf8_lossy(&header);
        let (kind, width, shape) =
            parse(&header).map_err(|problem| DataError::content(&path, problem))?;
        if !(1..=MAX_EXTENTS).contains(&shape.len()) || shape.contains(&0) {
            let problem = format!(
                "has the shape {shape:?}; 1 to {MAX_EXTENTS} extents above zero are possible"
            );
            return Err(DataError::content(&path, problem));
        }
        let bytes = shape.iter().try_fold(width, |bytes, extent| bytes.checked_mul(*extent));
        let found = file_bytes.saturating_sub((start.len() + len_bytes + len) as u64);
        // Memory is taken for what is there, and not for what a header announces.
        if bytes.map(|bytes| bytes as u64) != Some(found) {
            let problem = format!(
                "has {found} bytes for the shape {shape:?} of {width} bytes each; is it cut off?"
            );
            return Err(DataError::content(&path, problem));
        }
        let elems = elems(&mut file, found, kind, width);
        let elems = elems.map_err(|source| DataError::Read { path: path.clone(), source })?;
        Ok(Self { path, shape, elems })
    }

    fn inputs(self) -> Result<(ArrayInputs, Vec<usize>), DataError> {
        let extents = self.shape[1..].to_vec();
        let inputs = match self.elems {
            NpyElems::Bytes(bytes) => ArrayInputs::Bytes(bytes),
            NpyElems::Reals(reals) => ArrayInputs::Reals(finite(&self.path, reals)?),
            NpyElems::Integers(_) => {
                let problem = "has whole numbers; save inputs as float32, or pixels as uint8";
                return Err(DataError::content(&self.path, problem));
            }
        };
        if extents.is_empty() {
            let problem = "has one number for each sample; its shape is (samples, numbers)";
            return Err(DataError::content(&self.path, problem));
        }
        Ok((inputs, extents))
    }

    fn targets(&self) -> Result<Targets, DataError> {
        let len: usize = self.shape[1..].iter().product();
        let integers: Vec<i64> = match &self.elems {
            NpyElems::Reals(reals) => {
                let values = finite(&self.path, reals.clone())?;
                return Ok(Targets::Values { values, len });
            }
            NpyElems::Bytes(bytes) => bytes.iter().map(|byte| i64::from(*byte)).collect(),
            NpyElems::Integers(integers) => integers.clone(),
        };
        if len != 1 {
            let problem = "has several whole numbers for each sample; a class is one of them";
            return Err(DataError::content(&self.path, problem));
        }
        if let Some(class) = integers.iter().find(|class| !(0..MAX_CLASSES).contains(*class)) {
            let problem = format!("has the class {class}; 0 to {} are possible", MAX_CLASSES - 1);
            return Err(DataError::content(&self.path, problem));
        }
        let labels: Vec<u32> = integers.into_iter().map(|class| class as u32).collect();
        let num_classes = labels.iter().max().map_or(0, |largest| *largest as usize + 1);
        Ok(Targets::Classes { labels, num_classes })
    }
}

fn finite(path: &Path, reals: Vec<f32>) -> Result<Vec<f32>, DataError> {
    match reals.iter().position(|value| !value.is_finite()) {
        Some(at) => Err(DataError::content(path, format!("has {} as its element {at}", reals[at]))),
        None => Ok(reals),
    }
}

/// Reads elements of a kind that have `width` bytes each.
fn elems(file: &mut impl Read, bytes: u64, kind: NumberKind, width: usize) -> io::Result<NpyElems> {
    let mut raw = Vec::new();
    file.take(bytes).read_to_end(&mut raw)?;
    if raw.len() as u64 != bytes {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let words = raw.chunks_exact(width);
    Ok(match (kind, width) {
        (NumberKind::Unsigned, 1) => NpyElems::Bytes(raw),
        (NumberKind::Real, 4) => {
            NpyElems::Reals(words.map(|w| f32::from_le_bytes(array(w))).collect())
        }
        (NumberKind::Real, _) => {
            NpyElems::Reals(words.map(|w| f64::from_le_bytes(array(w)) as f32).collect())
        }
        _ => {
            let is_negative = |w: &[u8]| kind == NumberKind::Signed && w[width - 1] > 127;
            NpyElems::Integers(words.map(|w| integer(w, is_negative(w))).collect())
        }
    })
}

fn array<const N: usize>(word: &[u8]) -> [u8; N] {
    std::array::from_fn(|at| word[at])
}

/// A whole number of up to eight bytes, little-endian.
fn integer(word: &[u8], is_negative: bool) -> i64 {
    let fill = if is_negative { 0xff } else { 0 };
    i64::from_le_bytes(std::array::from_fn(|at| word.get(at).copied().unwrap_or(fill)))
}

/// The kind and the bytes of an element, and the shape, from a header such as
/// `{'descr': '<f4', 'fortran_order': False, 'shape': (60000, 28, 28), }`.
fn parse(header: &str) -> Result<(NumberKind, usize, Vec<usize>), String> {
    let value = |key: &str| {
        let (_, rest) = header.split_once(&format!("'{key}':"))?;
        Some(rest.trim_start())
    };
    let unknown = || "has a header that NumPy does not write".to_owned();
    let descr = value("descr").ok_or_else(unknown)?;
    let descr = descr.strip_prefix('\'').and_then(|rest| rest.split_once('\'')).map(|of| of.0);
    let kind = match descr {
        Some("|u1" | "<u1" | "|b1") => (NumberKind::Unsigned, 1),
        Some("|i1" | "<i1") => (NumberKind::Signed, 1),
        Some("<u2") => (NumberKind::Unsigned, 2),
        Some("<u4") => (NumberKind::Unsigned, 4),
        Some("<u8") => (NumberKind::Unsigned, 8),
        Some("<i2") => (NumberKind::Signed, 2),
        Some("<i4") => (NumberKind::Signed, 4),
        Some("<i8") => (NumberKind::Signed, 8),
        Some("<f4") => (NumberKind::Real, 4),
        Some("<f8") => (NumberKind::Real, 8),
        Some(other) => {
            let other: String = other.escape_default().take(20).collect();
            return Err(format!(
                "has elements of the type {other}; save float32, float64, uint8 or a type of whole numbers, little-endian"
            ));
        }
        None => return Err("has records or objects, and no plain numbers".to_owned()),
    };
    let order = value("fortran_order").ok_or_else(unknown)?;
    if order.starts_with("True") {
        return Err("has its columns first; save numpy.ascontiguousarray of it".to_owned());
    }
    let shape = value("shape").and_then(|rest| rest.strip_prefix('(')).ok_or_else(unknown)?;
    let (shape, _) = shape.split_once(')').ok_or_else(unknown)?;
    let extents = shape.split(',').map(str::trim).filter(|extent| !extent.is_empty());
    let extents = extents.map(|extent| extent.parse().map_err(|_| unknown()));
    Ok((kind.0, kind.1, extents.collect::<Result<_, String>>()?))
}
