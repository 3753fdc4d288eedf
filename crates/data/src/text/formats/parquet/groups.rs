//! The row groups of a Parquet file, whose pages may be compressed by Zstandard.
//!
//! Input: a file, and what it states of a row group. Output: its pages, unpacked. The library's decoder of Zstandard is
//! written in C. So the library reads such pages as if they were uncompressed, and they are unpacked here. This module
//! knows no values, and checks no sizes (`pages.rs`).

use std::fs::File;
use std::io::{self, Read, Write};
use std::sync::Arc;

use parquet::basic::Compression;
use parquet::bloom_filter::Sbbf;
use parquet::column::page::{Page, PageMetadata, PageReader};
use parquet::errors::{ParquetError, Result};
use parquet::file::metadata::{ColumnChunkMetaData, RowGroupMetaData};
use parquet::file::properties::ReaderProperties;
use parquet::file::reader::RowGroupReader;
use parquet::file::serialized_reader::SerializedPageReader;
use parquet::record::reader::RowIter;
use parquet::schema::types::Type;
use ruzstd::decoding::StreamingDecoder;

/// A row group.
pub(super) struct RowGroup<'a> {
    pub file: Arc<File>,
    pub metadata: &'a RowGroupMetaData,
}

impl RowGroupReader for RowGroup<'_> {
    fn metadata(&self) -> &RowGroupMetaData {
        self.metadata
    }

    fn num_columns(&self) -> usize {
        self.metadata.num_columns()
    }

    fn get_column_page_reader(&self, at: usize) -> Result<Box<dyn PageReader>> {
        let chunk = self.metadata.column(at);
        let num_rows = usize::try_from(self.metadata.num_rows())?;
        // Old writers gave the name LZ4 to a format that unpacks to any length. It is refused.
        let settings = ReaderProperties::builder().set_backward_compatible_lz4(false).build();
        let pages = |chunk: &ColumnChunkMetaData| {
            let (file, settings) = (self.file.clone(), Arc::new(settings));
            SerializedPageReader::new_with_properties(file, chunk, num_rows, None, settings)
        };
        match chunk.compression() {
            Compression::ZSTD(_) => {
                let plain = chunk.clone().into_builder();
                let plain = plain.set_compression(Compression::UNCOMPRESSED).build()?;
                Ok(Box::new(ZstdPages(pages(&plain)?)))
            }
            _ => Ok(Box::new(pages(chunk)?)),
        }
    }

    fn get_column_bloom_filter(&self, _: usize) -> Option<&Sbbf> {
        None
    }

    fn get_row_iter(&self, columns: Option<Type>) -> Result<RowIter<'_>> {
        RowIter::from_row_group(columns, self)
    }
}

/// Unpacks the pages of a column.
struct ZstdPages(SerializedPageReader<File>);

impl PageReader for ZstdPages {
    fn get_next_page(&mut self) -> Result<Option<Page>> {
        let Some(mut page) = self.0.get_next_page()? else { return Ok(None) };
        // The levels in front of the values of a newer page are not compressed.
        let (bytes, levels) = match &mut page {
            Page::DataPageV2 { is_compressed: false, .. } => return Ok(Some(page)),
            Page::DataPageV2 { buf, def_levels_byte_len, rep_levels_byte_len, .. } => {
                (buf, *def_levels_byte_len as usize + *rep_levels_byte_len as usize)
            }
            Page::DataPage { buf, .. } | Page::DictionaryPage { buf, .. } => (buf, 0),
        };
        let short = || ParquetError::EOF("a page is shorter than its levels".to_owned());
        let (levels, packed) = bytes.split_at_checked(levels).ok_or_else(short)?;
        let mut unpacked = levels.to_vec();
        unpack(&mut packed.take(packed.len() as u64), u64::MAX - 1, &mut unpacked)?;
        *bytes = unpacked.into();
        Ok(Some(page))
    }

    fn peek_next_page(&mut self) -> Result<Option<PageMetadata>> {
        self.0.peek_next_page()
    }

    fn skip_next_page(&mut self) -> Result<()> {
        self.0.skip_next_page()
    }

    fn at_record_boundary(&mut self) -> Result<bool> {
        self.0.at_record_boundary()
    }
}

impl Iterator for ZstdPages {
    type Item = Result<Page>;

    fn next(&mut self) -> Option<Self::Item> {
        self.get_next_page().transpose()
    }
}

/// Unpacks frames of Zstandard, and returns their number of bytes. It stops after one byte more
/// than `most`. The memory is that of a window, at most 128 MiB.
pub(super) fn unpack(
    packed: &mut io::Take<impl Read>,
    most: u64,
    to: &mut impl Write,
) -> io::Result<u64> {
    let mut found = 0;
    while packed.limit() > 0 {
        let mut frame = StreamingDecoder::new(&mut *packed).map_err(io::Error::other)?;
        found += io::copy(&mut (&mut frame).take(most + 1 - found), to)?;
        if found > most {
            break;
        }
        let stated = frame.decoder.get_checksum_from_data();
        if stated.is_some_and(|stated| frame.decoder.get_calculated_checksum() != Some(stated)) {
            return Err(io::Error::other("the checksum of its contents is another one"));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A frame with the text hello uncompressed, a checksum, and the length in one byte.
    const HELLO: &[u8] = b"\x28\xb5\x2f\xfd\x24\x05\x29\0\0hello\xa3\x6d\x9f\x88";

    fn unpacked(packed: &[u8], most: u64) -> Result<(u64, Vec<u8>), String> {
        let mut to = Vec::new();
        let found = unpack(&mut packed.take(packed.len() as u64), most, &mut to);
        found.map(|found| (found, to)).map_err(|error| error.to_string())
    }

    #[test]
    fn frames_follow_each_other_up_to_a_limit() {
        assert_eq!(unpacked(b"", 9), Ok((0, Vec::new())));
        assert_eq!(unpacked(HELLO, 5), Ok((5, b"hello".to_vec())));
        let twice = [HELLO, HELLO].concat();
        assert_eq!(unpacked(&twice, 10), Ok((10, b"hellohello".to_vec())));
        assert_eq!(unpacked(&twice, 7), Ok((8, b"hellohel".to_vec())));
    }

    #[test]
    fn frames_that_are_damaged_are_refused() {
        for len in 1..HELLO.len() {
            unpacked(&HELLO[..len], 5).unwrap_err();
        }
        let wrong = [&HELLO[..HELLO.len() - 1], b"\x89"].concat();
        assert_eq!(unpacked(&wrong, 5).unwrap_err(), "the checksum of its contents is another one");
        let claims = [&b"\x28\xb5\x2f\xfd\xe0"[..], &10_000_000_000u64.to_le_bytes()].concat();
        assert!(unpacked(&claims, 5).unwrap_err().contains("10000000000"));
    }
}
