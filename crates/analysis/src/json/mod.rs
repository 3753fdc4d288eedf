//! A pull parser for JSON, made for traces: files far larger than memory, most of which is skipped.
//!
//! Input: anything that can be read. Output: keys, scalars and the structure, one after the other, as the
//! caller asks for them. Text is borrowed from the window on the file and copied only if it has escapes.
//! Values that the caller does not ask for are skipped. In these, the parser checks only that strings are
//! closed and brackets match. It does not know what a trace is.
//!
//! The parser accepts two things beyond the standard. `NaN`, `Infinity` and `-Infinity`, which profilers do
//! write, become [`Value::NonFinite`]. Strings may contain bytes that are not UTF-8, see [`lossy`].

mod decimal;
mod escape;
mod index;
mod pull;
mod sixteen;
mod window;

use std::borrow::Cow;
use std::io;

pub use decimal::{float, micros_ns, scaled, signed, unsigned};
pub use pull::Pull;
pub(crate) use window::WINDOW_BYTES;

/// How deep objects and arrays may be nested.
pub const MAX_DEPTH: u32 = 128;

/// The largest length in bytes of a key, string or number that the caller asks for, as written. Skipped values have no limit.
pub const MAX_TOKEN_BYTES: usize = 16 << 20;

/// A value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Value<'a> {
    /// A string with its escapes resolved. [`lossy`] converts it to text.
    Str(&'a [u8]),
    /// A number as written, valid by JSON's grammar.
    Num(&'a [u8]),
    /// `true` or `false`.
    Bool(bool),
    /// `null`.
    Null,
    /// `NaN`, `Infinity` or `-Infinity`.
    NonFinite,
    /// An object or an array, which was skipped.
    Nested,
}

impl<'a> Value<'a> {
    /// The bytes of a string or a number. Writers differ in which of these they use for numbers.
    pub fn bytes(self) -> Option<&'a [u8]> {
        match self {
            Self::Str(bytes) | Self::Num(bytes) => Some(bytes),
            _ => None,
        }
    }

    /// A scalar as text; `None` for `null`, `NaN`, infinities, objects and arrays.
    pub fn words(self) -> Option<Cow<'a, str>> {
        match self {
            Self::Str(bytes) | Self::Num(bytes) => Some(lossy(bytes)),
            Self::Bool(true) => Some("true".into()),
            Self::Bool(false) => Some("false".into()),
            Self::Null | Self::NonFinite | Self::Nested => None,
        }
    }
}

/// Converts bytes to text. Bytes that are not UTF-8 become U+FFFD.
pub fn lossy(bytes: &[u8]) -> Cow<'_, str> {
    match std::str::from_utf8(bytes) {
        Ok(text) => Cow::Borrowed(text),
        Err(_) => String::from_utf8_lossy(bytes),
    }
}

/// Why and where reading JSON failed.
#[derive(Debug, thiserror::Error)]
#[error("at byte {at} of the JSON: {fault}")]
pub struct JsonError {
    /// The offset in the decompressed JSON, in bytes.
    pub at: u64,
    /// The fault at this byte.
    #[source]
    pub fault: Fault,
}

impl JsonError {
    /// Whether the input ended in the middle.
    pub fn is_cut_off(&self) -> bool {
        match &self.fault {
            Fault::Expected { found, .. } => found == END,
            Fault::Input(err) => err.kind() == io::ErrorKind::UnexpectedEof,
            Fault::TooDeep | Fault::TooLong => false,
        }
    }
}

/// How a fault names the end of the input.
const END: &str = "the end of the file";

/// A fault in JSON, or of its input.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// The parser expected something else.
    #[error("expected {what}, found {found}")]
    Expected {
        /// The expected token, in words.
        what: &'static str,
        /// The text found instead, in words.
        found: String,
    },
    /// Objects and arrays are nested too deep.
    #[error("objects and arrays lie more than {MAX_DEPTH} deep within each other")]
    TooDeep,
    /// A key, string or number is too long.
    #[error("a single value is longer than {} MiB", MAX_TOKEN_BYTES >> 20)]
    TooLong,
    /// The input could not be read.
    #[error("reading failed: {0}")]
    Input(#[source] io::Error),
}
