//! The pages of a column of a Parquet file, looked at before the library reads them.
//!
//! Input: the bytes of a column chunk, still compressed. Output: an error if the pages take much memory.
//! The library makes room for whatever a page states, and unpacks gzip to any length, so a file of a few
//! megabytes could take all memory. This module reads the headers of pages (Thrift's compact protocol) and no values.

use std::io::{self, Read};

use flate2::read::MultiGzDecoder;
use parquet::basic::Compression;

use super::groups::unpack;

/// The most bytes of an unpacked page. Pages have 1 MB, or one large value; old writers made a page of a
/// whole row group.
const MAX_PAGE_BYTES: u64 = 64 << 20;
/// The most values of a page. Values that repeat may take no room in the file.
const MAX_PAGE_VALUES: i64 = 1 << 24;
/// The most bytes of the header of a page. It may have the smallest and the largest value.
const MAX_HEADER_BYTES: u64 = 1 << 20;
/// The most structures in structures. A header has three.
const MAX_DEPTH: usize = 8;
/// The most fields of a structure. Those of a header have at most eight.
const MAX_FIELDS: usize = 64;
/// The fewest bytes of a text in a dictionary: those of its length.
const MIN_TEXT_BYTES: i64 = 4;

/// The kinds of pages, and encodings whose values take memory that no header states (`delta.rs`), as numbers of the format.
const DATA_PAGE: i64 = 0;
const INDEX_PAGE: i64 = 1;
const DICTIONARY_PAGE: i64 = 2;
const NEWER_DATA_PAGE: i64 = 3;
const DELTA_LENGTH_BYTE_ARRAY: i64 = 6;
const DELTA_BYTE_ARRAY: i64 = 7;

/// Checks the pages of a column chunk of `len` bytes, whose first row has the number `row`. Returns whether a page has values
/// that are encoded as differences, which are not checked here.
pub(super) fn check(
    chunk: &mut dyn Read,
    len: u64,
    compression: Compression,
    row: i64,
) -> Result<bool, String> {
    let (mut left, mut row, mut has_differences) = (len, row, false);
    while left > 0 {
        let mut header = ThriftReader { bytes: chunk, read: 0 };
        let page =
            header.fields(0).map_err(|error| format!("a page has a bad header ({error})"))?;
        let header_len = header.read;
        let [unpacked, packed] = [2, 3].map(|id| field(&page, id).and_then(ThriftValue::number));
        let (Some(Ok(unpacked)), Some(Ok(packed))) =
            (unpacked.map(u64::try_from), packed.map(u64::try_from))
        else {
            return Err("a page does not state its sizes".to_owned());
        };
        left = match header_len.checked_add(packed).and_then(|len| left.checked_sub(len)) {
            Some(left) => left,
            None => return Err("a page is longer than its column".to_owned()),
        };
        if unpacked > MAX_PAGE_BYTES {
            return Err(format!(
                "the page that begins with row {row} has {} MiB, and at most {} MiB are read, because a page is read as a \
                 whole; write the file with smaller pages, or with shorter texts",
                unpacked >> 20,
                MAX_PAGE_BYTES >> 20
            ));
        }
        let values = check_values(&page, unpacked)?;
        row = row.saturating_add(values.rows);
        has_differences |= values.are_differences;
        let mut body = chunk.take(packed);
        check_body(&mut body, &page, unpacked, compression)?;
        io::copy(&mut body, &mut io::sink()).map_err(|error| error.to_string())?;
        if body.limit() > 0 {
            return Err("a page is longer than the file".to_owned());
        }
    }
    Ok(has_differences)
}

/// Checks that the body of a page unpacks to as many bytes as the page states.
fn check_body(
    body: &mut io::Take<impl Read>,
    page: &[(i16, ThriftValue)],
    unpacked: u64,
    compression: Compression,
) -> Result<(), String> {
    if !matches!(compression, Compression::GZIP(_) | Compression::ZSTD(_)) {
        return Ok(());
    }
    // The levels in front of the values of a newer page are not compressed.
    let newer = field(page, 8);
    let levels = newer.map_or(0, |newer| {
        let len = |id| newer.field(id).and_then(ThriftValue::number).unwrap_or(0);
        u64::try_from(len(5).saturating_add(len(6))).unwrap_or(u64::MAX)
    });
    let is_packed = newer.and_then(|newer| newer.field(7)) != Some(&ThriftValue::Bool(false));
    let packed = body.limit();
    skip(body, levels.min(packed)).map_err(|error| error.to_string())?;
    if !is_packed || packed <= levels {
        return Ok(());
    }
    let most = unpacked.saturating_sub(levels);
    let found = match compression {
        Compression::ZSTD(_) => unpack(body, most, &mut io::sink()),
        _ => io::copy(&mut MultiGzDecoder::new(body).take(most + 1), &mut io::sink()),
    };
    let problem = match found {
        Ok(found) if found == most => return Ok(()),
        Ok(found) if found > most => "unpacks to more bytes than it states".to_owned(),
        Ok(_) => "unpacks to fewer bytes than it states".to_owned(),
        Err(error) => format!("does not unpack ({error})"),
    };
    Err(format!("a page {problem}; the file is damaged, so write it again"))
}

/// Checks the number of values.
fn check_values(page: &[(i16, ThriftValue)], unpacked: u64) -> Result<PageValues, String> {
    // The kind decides which of the headers counts, as it does for the library.
    let kind =
        field(page, 1).and_then(ThriftValue::number).ok_or("a page does not state its kind")?;
    let (own, of_encoding) = match kind {
        DATA_PAGE => (5, 2),
        INDEX_PAGE => return Ok(PageValues::default()),
        DICTIONARY_PAGE => (7, 2),
        NEWER_DATA_PAGE => (8, 4),
        kind => return Err(format!("a page is of the unknown kind {kind}")),
    };
    let values = field(page, own).ok_or("a page lacks the header of its kind")?;
    if [5, 7, 8].iter().any(|id| *id != own && field(page, *id).is_some()) {
        return Err("a page has the headers of two kinds".to_owned());
    }
    let number = |id| values.field(id).and_then(ThriftValue::number);
    let count = number(1).ok_or("a page does not state its number of values")?;
    let encoding = number(of_encoding).ok_or("a page does not state its encoding")?;
    let is_dictionary = kind == DICTIONARY_PAGE;
    let most = if is_dictionary { unpacked as i64 / MIN_TEXT_BYTES } else { MAX_PAGE_VALUES };
    if !(0..=most).contains(&count) {
        return Err(format!("a page states {count} values, and {most} are the most it can have"));
    }
    Ok(PageValues {
        rows: if is_dictionary { 0 } else { count },
        are_differences: matches!(encoding, DELTA_LENGTH_BYTE_ARRAY | DELTA_BYTE_ARRAY),
    })
}

/// The statements of a page about its values.
#[derive(Default)]
struct PageValues {
    rows: i64,
    are_differences: bool,
}

/// A field's value, as far as it matters here.
#[derive(Debug, PartialEq)]
enum ThriftValue {
    Bool(bool),
    Number(i64),
    Struct(Vec<(i16, ThriftValue)>),
    Other,
}

impl ThriftValue {
    fn number(&self) -> Option<i64> {
        match self {
            ThriftValue::Number(number) => Some(*number),
            _ => None,
        }
    }

    fn field(&self, id: i16) -> Option<&ThriftValue> {
        match self {
            ThriftValue::Struct(fields) => field(fields, id),
            _ => None,
        }
    }
}

fn field(fields: &[(i16, ThriftValue)], id: i16) -> Option<&ThriftValue> {
    fields.iter().find(|(known, _)| *known == id).map(|(_, value)| value)
}

/// A structure that is read.
struct ThriftReader<'a> {
    bytes: &'a mut dyn Read,
    read: u64,
}

impl ThriftReader<'_> {
    fn fields(&mut self, depth: usize) -> io::Result<Vec<(i16, ThriftValue)>> {
        let mut fields = Vec::new();
        let mut id = 0i16;
        loop {
            let head = self.byte()?;
            if head == 0 {
                return Ok(fields);
            }
            id = match head >> 4 {
                0 => i16::try_from(self.number()?).map_err(|_| bad("a field has no number"))?,
                step => id.wrapping_add(i16::from(step)),
            };
            let value = match head & 15 {
                1 => ThriftValue::Bool(true),
                2 => ThriftValue::Bool(false),
                kind => self.value(kind, depth)?,
            };
            // The library takes the last one of a repeated field.
            if fields.len() == MAX_FIELDS || field(&fields, id).is_some() {
                return Err(bad("it has a field twice, or too many"));
            }
            fields.push((id, value));
        }
    }

    fn value(&mut self, kind: u8, depth: usize) -> io::Result<ThriftValue> {
        if depth > MAX_DEPTH {
            return Err(bad("it has too many structures in structures"));
        }
        match kind {
            // Numbers of one byte. In lists, truth values are such bytes too.
            1..=3 => self.byte().map(|_| ThriftValue::Other),
            // All numbers that matter have 32 bits, and the library cuts others.
            5 => match i32::try_from(self.number()?) {
                Ok(number) => Ok(ThriftValue::Number(number.into())),
                Err(_) => Err(bad("a number has more than 32 bits")),
            },
            4 | 6 => self.number().map(|_| ThriftValue::Other),
            7 => self.skip(8),
            8 => {
                let len = self.varint()?;
                self.skip(len)
            }
            9 | 10 => {
                let head = self.byte()?;
                let len = match head >> 4 {
                    15 => self.varint()?,
                    len => u64::from(len),
                };
                for _ in 0..len {
                    self.value(head & 15, depth + 1)?;
                }
                Ok(ThriftValue::Other)
            }
            11 => {
                let len = self.varint()?;
                let kinds = if len > 0 { self.byte()? } else { 0 };
                for _ in 0..len {
                    self.value(kinds >> 4, depth + 1)?;
                    self.value(kinds & 15, depth + 1)?;
                }
                Ok(ThriftValue::Other)
            }
            12 => self.fields(depth + 1).map(ThriftValue::Struct),
            _ => Err(bad("a field has an unknown type")),
        }
    }

    /// A whole number with its sign in the lowest bit.
    fn number(&mut self) -> io::Result<i64> {
        let bits = self.varint()?;
        Ok((bits >> 1) as i64 ^ -((bits & 1) as i64))
    }

    fn varint(&mut self) -> io::Result<u64> {
        varint(|| self.byte())?.ok_or_else(|| bad("a number is too long"))
    }

    fn byte(&mut self) -> io::Result<u8> {
        let mut byte = [0];
        self.count(1)?;
        self.bytes.read_exact(&mut byte)?;
        Ok(byte[0])
    }

    fn skip(&mut self, len: u64) -> io::Result<ThriftValue> {
        self.count(len)?;
        skip(self.bytes, len)?;
        Ok(ThriftValue::Other)
    }

    fn count(&mut self, len: u64) -> io::Result<()> {
        self.read = self.read.saturating_add(len);
        if self.read > MAX_HEADER_BYTES { Err(bad("it has more than 1 MiB")) } else { Ok(()) }
    }
}

/// A whole number in pieces of seven bits. `None` if it has more than 64 bits.
pub(super) fn varint<E>(mut byte: impl FnMut() -> Result<u8, E>) -> Result<Option<u64>, E> {
    let mut number = 0;
    for shift in (0..64).step_by(7) {
        let byte = byte()?;
        number |= u64::from(byte & 127) << shift;
        if byte < 128 {
            return Ok(Some(number));
        }
    }
    Ok(None)
}

fn skip(bytes: &mut dyn Read, len: u64) -> io::Result<()> {
    let found = io::copy(&mut bytes.take(len), &mut io::sink())?;
    if found == len { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

fn bad(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}
