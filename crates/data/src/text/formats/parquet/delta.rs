//! The numbers in front of texts that are encoded as differences, looked at before the library makes room for them.
//!
//! Input: the values of an unpacked page. Output: an error if there are more numbers than values.
//! The library makes room for as many numbers as a page states in a few bytes. This module reads the headers
//! of the numbers (`DELTA_BINARY_PACKED`) and no texts.

use parquet::basic::Encoding;
use parquet::column::page::{Page, PageReader};
use parquet::schema::types::ColumnDescriptor;

use super::pages;

/// Checks the pages of a column that are encoded as lengths and texts, or as differences from the text before.
pub(super) fn check(pages: &mut dyn PageReader, column: &ColumnDescriptor) -> Result<(), String> {
    while let Some(page) = pages.get_next_page().map_err(|error| error.to_string())? {
        let num_lists = match page.encoding() {
            Encoding::DELTA_LENGTH_BYTE_ARRAY => 1,
            // How much of the text before begins a text, and the length of the rest.
            Encoding::DELTA_BYTE_ARRAY => 2,
            _ => continue,
        };
        let mut values = values(&page, column).ok_or("a page has levels that cannot be read")?;
        for _ in 0..num_lists {
            values = after_numbers(values, u64::from(page.num_values()))?;
        }
    }
    Ok(())
}

/// The values of a page, which follow the levels that say where lists begin and where values are missing.
fn values<'a>(page: &'a Page, column: &ColumnDescriptor) -> Option<&'a [u8]> {
    let bytes: &[u8] = page.buffer();
    match page {
        Page::DataPageV2 { def_levels_byte_len, rep_levels_byte_len, .. } => {
            let levels = def_levels_byte_len.checked_add(*rep_levels_byte_len)?;
            bytes.get(levels as usize..)
        }
        Page::DataPage { rep_level_encoding, def_level_encoding, .. } => {
            let lists = (column.max_rep_level(), *rep_level_encoding);
            let missing = (column.max_def_level(), *def_level_encoding);
            // Levels of an older encoding do not state their length. No writer uses it together with differences.
            [lists, missing].iter().filter(|(most, _)| *most > 0).try_fold(
                bytes,
                |bytes, (_, encoding)| {
                    let (len, levels) = bytes.split_first_chunk()?;
                    let is_known = *encoding == Encoding::RLE;
                    levels.get(u32::from_le_bytes(*len) as usize..).filter(|_| is_known)
                },
            )
        }
        Page::DictionaryPage { .. } => None,
    }
}

/// The bytes after packed numbers, which must be at most `most`.
///
/// They begin with the numbers of a block, the miniblocks of a block, the count, and the first number. A block has the
/// smallest difference, a width in bits for each miniblock, and the miniblocks, without unneeded ones at the end.
fn after_numbers(bytes: &[u8], most: u64) -> Result<&[u8], String> {
    let mut bytes = bytes;
    let [block, miniblocks, count, _] =
        [varint(&mut bytes)?, varint(&mut bytes)?, varint(&mut bytes)?, varint(&mut bytes)?];
    if count > most {
        return Err(format!("a page states {count} lengths of {most} texts"));
    }
    let miniblock = block.checked_div(miniblocks).unwrap_or(0);
    let mut left = count.saturating_sub(1);
    while left > 0 {
        varint(&mut bytes)?;
        let widths = take(&mut bytes, miniblocks)?;
        for width in widths {
            if left > 0 {
                take(&mut bytes, u64::from(*width).saturating_mul(miniblock) / 8)?;
            }
            left = left.saturating_sub(miniblock);
        }
    }
    Ok(bytes)
}

fn take<'a>(bytes: &mut &'a [u8], len: u64) -> Result<&'a [u8], String> {
    let taken = usize::try_from(len).ok().and_then(|len| bytes.split_off(..len));
    taken.ok_or_else(|| "a page is shorter than its lengths".to_owned())
}

fn varint(bytes: &mut &[u8]) -> Result<u64, String> {
    let number = pages::varint(|| take(bytes, 1).map(|taken| taken[0]))?;
    number.ok_or_else(|| "a page has a length that is too long".to_owned())
}
