//! The IDX format of the MNIST files: a magic number, extents, and bytes, either plain or compressed with
//! gzip.
//!
//! Input: the bytes of a file and the extents that its items must have. Output: the items. This module knows nothing
//! of what the items mean.

use std::io::{self, BufRead, BufReader, Read};
use std::path::PathBuf;

use flate2::bufread::MultiGzDecoder;

use crate::DataError;

/// The first bytes of every gzip stream. No IDX file begins with them.
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// The most items of a file. MNIST has 60,000, and the largest data set that is made like it eight million; a file of a few
/// bytes can announce four thousand million, and unpack to as many.
const MAX_ITEMS: usize = 10_000_000;

/// The contents of one file.
pub(crate) struct Idx {
    /// The file, for error messages.
    pub(crate) path: PathBuf,
    /// Number of items.
    pub(crate) count: usize,
    /// The items, one after the other: (count, item extents...).
    pub(crate) data: Vec<u8>,
}

/// Reads a file of unsigned bytes. The contents decide whether the file is compressed, not its name: browsers
/// and tools sometimes unpack files without renaming them, and sometimes rename files without unpacking them.
pub(crate) fn read(path: PathBuf, file: impl Read, item_shape: &[usize]) -> Result<Idx, DataError> {
    let mut reader = BufReader::new(file);
    match reader.fill_buf() {
        Ok(start) if start.starts_with(&GZIP_MAGIC) => {
            let wrap = |path: PathBuf, source| {
                let problem = format!("broken gzip stream ({source}); fetch the file again");
                DataError::Format { path, problem }
            };
            IdxReader { path, reader: MultiGzDecoder::new(reader), wrap }.read(item_shape)
        }
        Ok(_) => {
            let wrap = |path, source| DataError::Read { path, source };
            IdxReader { path, reader, wrap }.read(item_shape)
        }
        Err(source) => Err(DataError::Read { path, source }),
    }
}

/// A stream of uncompressed bytes, and the error to which its failures are converted.
struct IdxReader<R> {
    path: PathBuf,
    reader: R,
    wrap: fn(PathBuf, io::Error) -> DataError,
}

impl<R: Read> IdxReader<R> {
    fn read(mut self, item_shape: &[usize]) -> Result<Idx, DataError> {
        let path = self.path.clone();
        let truncated = |expected, found| {
            let sizes = format!("expected {expected} bytes (uncompressed), found {found}");
            DataError::format(&path, format!("truncated: {sizes}; fetch the file again"))
        };
        // Header: two zero bytes, the type (8: unsigned byte), the number of extents; then the
        // extents, big-endian, the number of items first.
        let header_len = 4 * (2 + item_shape.len() as u64);
        let header = self.up_to(header_len)?;
        let mut words = header
            .chunks_exact(4)
            .map(|word| u32::from_be_bytes([word[0], word[1], word[2], word[3]]));
        let expected = 0x0800 + 1 + item_shape.len() as u32;
        if let Some(found) = words.next()
            && found != expected
        {
            let problem = format!(
                "expected the magic number {expected:#010x}, found {found:#010x}; check that images and labels were not \
                 swapped and that this is an IDX file at all"
            );
            return Err(DataError::format(&path, problem));
        }
        let found = header.len() as u64;
        if found < header_len {
            return Err(truncated(header_len, found));
        }
        let mut extents = words.map(|word| word as usize);
        let count = extents.next().unwrap_or(0);
        let found_shape: Vec<usize> = extents.collect();
        if found_shape != item_shape {
            let problem = format!("expected items of shape {item_shape:?}, found {found_shape:?}");
            return Err(DataError::format(&path, problem));
        }
        if count == 0 {
            return Err(DataError::format(&path, "holds no samples"));
        }
        if count > MAX_ITEMS {
            let reason = format!("it announces {count} items, and at most {MAX_ITEMS} are read");
            let source = io::Error::new(io::ErrorKind::FileTooLarge, reason);
            return Err(DataError::Read { path: self.path, source });
        }
        let data_len = count as u64 * item_shape.iter().product::<usize>() as u64;
        let expected = header_len + data_len;
        // Reads one byte more than the header announces, to notice a file that is too long. Memory grows with
        // the bytes that are read, not with what a broken header announces.
        let data = self.up_to(data_len + 1)?;
        let found = header_len + data.len() as u64;
        if found < expected {
            return Err(truncated(expected, found));
        }
        if found > expected {
            let problem = format!(
                "has trailing bytes: it should end after {expected} bytes (uncompressed); fetch the file again"
            );
            return Err(DataError::format(&path, problem));
        }
        Ok(Idx { path, count, data })
    }

    fn up_to(&mut self, num_bytes: u64) -> Result<Vec<u8>, DataError> {
        let mut bytes = Vec::new();
        match self.reader.by_ref().take(num_bytes).read_to_end(&mut bytes) {
            Ok(_) => Ok(bytes),
            Err(source) => Err((self.wrap)(self.path.clone(), source)),
        }
    }
}
