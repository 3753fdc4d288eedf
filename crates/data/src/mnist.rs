//! MNIST: 28 x 28 gray images of handwritten digits.
//!
//! Input: a folder with the four IDX files. Output: normalized images and their digits. The images stay in
//! memory as bytes, a quarter of their size as f32, and are normalized when they are read. This module knows
//! nothing of how the files got there.

use std::path::Path;

use crate::digest::ContentDigest;
use crate::files;
use crate::idx::{self, Idx};
use crate::{DataError, Dataset, Field, Sample, Split};

const SIDE: usize = 28;
const HINT: &str = "the four MNIST files are at \
                    https://storage.googleapis.com/cvdf-datasets/mnist/";

/// MNIST, or any data set with the same format and normalization and ten classes.
#[derive(Debug)]
pub struct Mnist {
    images: Vec<u8>, // (count, 28, 28)
    labels: Vec<u8>, // (count)
    values: [f32; 256],
}

impl Mnist {
    /// Reads one split from `directory`, or from its subfolder `MNIST/raw`, in which torchvision puts the
    /// files. Each file may be plain or compressed (`.gz`).
    pub fn load(directory: impl AsRef<Path>, split: Split) -> Result<Self, DataError> {
        let prefix = match split {
            Split::Train => "train",
            Split::Test => "t10k",
        };
        let read = |kind: &str, item_shape: &[usize]| -> Result<Idx, DataError> {
            let plain = format!("{prefix}-{kind}-ubyte");
            let names = [plain.clone(), plain + ".gz"];
            let (path, file) = files::open(directory.as_ref(), "MNIST/raw", &names, HINT)?;
            idx::read(path, file, item_shape)
        };
        let images = read("images-idx3", &[SIDE, SIDE])?;
        let labels = read("labels-idx1", &[])?;
        Self::of(images, labels)
    }

    /// The data set of these two files.
    pub(crate) fn of(images: Idx, labels: Idx) -> Result<Self, DataError> {
        if images.count != labels.count {
            let problem = format!(
                "has {} images but {} has {} labels; take both files from one source",
                images.count,
                labels.path.display(),
                labels.count
            );
            return Err(DataError::content(&images.path, problem));
        }
        files::check_labels(&labels.path, labels.data.iter().copied())?;
        let values = files::normalized(0.1307, 0.3081);
        Ok(Self { images: images.data, labels: labels.data, values })
    }
}

impl Dataset for Mnist {
    fn len(&self) -> usize {
        self.labels.len()
    }

    fn fields(&self) -> Vec<Field> {
        vec![Field::f32("inputs", [SIDE, SIDE, 1]), Field::class(10)]
    }

    fn digest(&self) -> Option<String> {
        Some(ContentDigest::default().bytes(&self.images).bytes(&self.labels).finish())
    }

    fn read(&self, _epoch: u64, index: usize, sample: &mut Sample<'_>) {
        let image = &self.images[index * SIDE * SIDE..][..SIDE * SIDE];
        for (value, &pixel) in sample.f32("inputs").iter_mut().zip(image) {
            *value = self.values[usize::from(pixel)];
        }
        sample.set_class(i64::from(self.labels[index]));
    }
}
