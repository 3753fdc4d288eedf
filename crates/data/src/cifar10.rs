//! CIFAR-10: 32 x 32 color images of ten classes of objects.
//!
//! Input: a folder with the files of the binary version. Output: normalized images, channels last, and their
//! classes. This module knows nothing of how the files got there.

use std::io::Read;
use std::path::Path;

use crate::digest::ContentDigest;
use crate::files;
use crate::{DataError, Dataset, Field, Sample, Split};

const SIDE: usize = 32;
const CHANNELS: usize = 3;
/// Bytes of one color plane. In a record, all red bytes come first, then all green, then all blue.
const PLANE: usize = SIDE * SIDE;
/// Bytes of a record: the label, then the image.
const RECORD: usize = 1 + CHANNELS * PLANE;
/// The most bytes of a file: ten times those of the original, which has 10,000 records.
const MAX_FILE_BYTES: usize = 100_000 * RECORD;
const MEAN: [f32; CHANNELS] = [0.4914, 0.4822, 0.4465];
const STD: [f32; CHANNELS] = [0.2023, 0.1994, 0.2010];
const HINT: &str = "unpack cifar-10-binary.tar.gz (the binary version, not the Python one) from \
                    https://www.cs.toronto.edu/~kriz/cifar.html";

/// CIFAR-10 in its binary version.
#[derive(Debug)]
pub struct Cifar10 {
    records: Vec<u8>, // (count, label and 3 planes of 32 x 32)
    values: [[f32; 256]; CHANNELS],
}

impl Cifar10 {
    /// Reads one split from `directory`, or from its subfolder `cifar-10-batches-bin`, which unpacking the
    /// archive creates. The files may hold fewer records than the original 10000. Errors if a file is
    /// missing, is not a whole number of records, or has a label above 9.
    pub fn load(directory: impl AsRef<Path>, split: Split) -> Result<Self, DataError> {
        let names = match split {
            Split::Train => (1..=5).map(|i| format!("data_batch_{i}.bin")).collect(),
            Split::Test => vec!["test_batch.bin".to_owned()],
        };
        let mut records = Vec::new();
        for name in names {
            let (path, file) =
                files::open(directory.as_ref(), "cifar-10-batches-bin", &[name], HINT)?;
            let start = records.len();
            if let Err(source) = file.take(MAX_FILE_BYTES as u64 + 1).read_to_end(&mut records) {
                return Err(DataError::Read { path, source });
            }
            if records.len() - start > MAX_FILE_BYTES {
                let reason = format!("it has more than {MAX_FILE_BYTES} bytes");
                let source = std::io::Error::new(std::io::ErrorKind::FileTooLarge, reason);
                return Err(DataError::Read { path, source });
            }
            check(&path, &records[start..])?;
        }
        Ok(Self::of(records))
    }

    /// The data set of these records, which have been checked.
    pub(crate) fn of(records: Vec<u8>) -> Self {
        let values = std::array::from_fn(|c| files::normalized(MEAN[c], STD[c]));
        Self { records, values }
    }
}

/// Checks the bytes of one file.
pub(crate) fn check(path: &Path, file: &[u8]) -> Result<(), DataError> {
    let found = file.len();
    if found == 0 || !found.is_multiple_of(RECORD) {
        let problem = format!(
            "{found} bytes are not a positive multiple of the {RECORD} bytes of a record; fetch the file again"
        );
        return Err(DataError::format(path, problem));
    }
    files::check_labels(path, file.chunks_exact(RECORD).map(|record| record[0]))
}

impl Dataset for Cifar10 {
    fn len(&self) -> usize {
        self.records.len() / RECORD
    }

    fn fields(&self) -> Vec<Field> {
        vec![Field::f32("inputs", [SIDE, SIDE, CHANNELS]), Field::class(10)]
    }

    fn digest(&self) -> Option<String> {
        Some(ContentDigest::default().bytes(&self.records).finish())
    }

    fn read(&self, _epoch: u64, index: usize, sample: &mut Sample<'_>) {
        let record = &self.records[index * RECORD..][..RECORD];
        let (label, image) = (record[0], &record[1..]);
        for (at, pixel) in sample.f32("inputs").chunks_exact_mut(CHANNELS).enumerate() {
            for (channel, value) in pixel.iter_mut().enumerate() {
                *value = self.values[channel][usize::from(image[channel * PLANE + at])];
            }
        }
        sample.set_class(i64::from(label));
    }
}
