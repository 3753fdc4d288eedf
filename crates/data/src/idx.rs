//! The IDX format of the MNIST files: a magic number, extents, and bytes, either plain or compressed with
//! gzip.
//!
//! Input: the bytes of a file and the extents that its items must have. Output: the items. This module does not know what
//! the items mean.

use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use flate2::bufread::MultiGzDecoder;

use crate::DataError;

/// The first bytes of every gzip stream. No IDX file begins with them.
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// The most items of a file. MNIST has 60,000, and the largest data set of its kind eight million; a file of a few
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
/// and tools sometimes unpack files without renaming them, or the reverse.
pub(crate) fn read(path: PathBuf, file: impl Read, item_shape: &[usize]) -> Result<Idx, DataError> {
    let unreadable = |source| DataError::Read { path: path.clone(), source };
    let mut reader = BufReader::new(file);
    let is_packed = reader.fill_buf().map_err(unreadable)?.starts_with(&GZIP_MAGIC);
    let mut reader: Box<dyn Read> =
        if is_packed { Box::new(MultiGzDecoder::new(reader)) } else { Box::new(reader) };
    let mut up_to = |num_bytes| {
        let mut bytes = Vec::new();
        match reader.by_ref().take(num_bytes).read_to_end(&mut bytes) {
            Ok(_) => Ok(bytes),
            Err(source) if is_packed => {
                let problem = format!("broken gzip stream ({source}); fetch the file again");
                Err(DataError::format(&path, problem))
            }
            Err(source) => Err(unreadable(source)),
        }
    };
    let (count, data) = items(&path, item_shape, &mut up_to)?;
    Ok(Idx { path, count, data })
}

/// The number of items, and their bytes. `up_to` reads the next bytes of the file, at most so many.
fn items(
    path: &Path,
    item_shape: &[usize],
    up_to: &mut dyn FnMut(u64) -> Result<Vec<u8>, DataError>,
) -> Result<(usize, Vec<u8>), DataError> {
    let truncated = |expected, found| {
        let sizes = format!("expected {expected} bytes (uncompressed), found {found}");
        DataError::format(path, format!("truncated: {sizes}; fetch the file again"))
    };
    // Header: two zero bytes, the type (8: unsigned byte), the number of extents; then the
    // extents, big-endian, the number of items first.
    let header_len = 4 * (2 + item_shape.len() as u64);
    let header = up_to(header_len)?;
    let mut words = header.as_chunks().0.iter().map(|word| u32::from_be_bytes(*word));
    let expected = 0x0800 + 1 + item_shape.len() as u32;
    if let Some(found) = words.next()
        && found != expected
    {
        let problem = format!(
            "expected the magic number {expected:#010x}, found {found:#010x}; check that images and labels were not \
             swapped and that this is an IDX file at all"
        );
        return Err(DataError::format(path, problem));
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
        return Err(DataError::format(path, problem));
    }
    if count == 0 {
        return Err(DataError::format(path, "holds no samples"));
    }
    if count > MAX_ITEMS {
        let reason = format!("it announces {count} items, and at most {MAX_ITEMS} are read");
        let source = io::Error::new(io::ErrorKind::FileTooLarge, reason);
        return Err(DataError::Read { path: path.to_owned(), source });
    }
    let data_len = count as u64 * item_shape.iter().product::<usize>() as u64;
    let expected = header_len + data_len;
    // Reads one byte more than the header announces, to notice a file that is too long. Memory grows with
    // the bytes that are read, not with a broken header.
    let data = up_to(data_len + 1)?;
    let found = header_len + data.len() as u64;
    if found < expected {
        return Err(truncated(expected, found));
    }
    if found > expected {
        let problem = format!(
            "has trailing bytes: it should end after {expected} bytes (uncompressed); fetch the file again"
        );
        return Err(DataError::format(path, problem));
    }
    Ok((count, data))
}
