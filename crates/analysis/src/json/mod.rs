//! A pull parser for JSON, made for traces: files far larger than memory, of which most is skipped.
//!
//! Anything that can be read goes in. Keys, scalars and the structure come out, one after the other, as the
//! caller asks for them. Text is borrowed from the window on the file and copied only where it is escaped.
//! What the caller does not ask for is skipped; only closed strings and matching brackets are checked there.
//! It does not know what a trace is.
//!
//! Beyond the standard it takes `NaN`, `Infinity` and `-Infinity`, which profilers do write, as values that say
//! nothing ([`Value::NonFinite`]), and bytes that are no UTF-8 within strings ([`lossy`]).

mod decimal;
mod pull;
mod window;

use std::borrow::Cow;
use std::io;

pub use decimal::{float, micros_ns, scaled, signed, unsigned};
pub use pull::Pull;

/// How deep objects and arrays may lie within each other.
pub const MAX_DEPTH: u32 = 128;

/// How long a single key, string or number may be that is asked for (an escaped one may be longer by what is
/// read at a time); skipped ones have no limit.
pub const MAX_TOKEN_BYTES: usize = 16 << 20;

/// A value, where its place in the structure is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Value<'a> {
    /// A string without its escapes; see [`lossy`] for its text.
    Str(&'a [u8]),
    /// A number as written, of the grammar of JSON.
    Num(&'a [u8]),
    /// `true` or `false`.
    Bool(bool),
    /// `null`.
    Null,
    /// `NaN`, `Infinity` or `-Infinity`.
    NonFinite,
    /// An object or an array, which is passed over.
    Nested,
}

impl<'a> Value<'a> {
    /// The bytes of a string or of a number: writers differ in which of them they use for numbers.
    pub fn bytes(self) -> Option<&'a [u8]> {
        match self {
            Self::Str(bytes) | Self::Num(bytes) => Some(bytes),
            _ => None,
        }
    }

    /// A scalar as text; `None` for `null`, for `NaN` and infinities, and for structures.
    pub fn words(self) -> Option<Cow<'a, str>> {
        match self {
            Self::Str(bytes) | Self::Num(bytes) => Some(lossy(bytes)),
            Self::Bool(true) => Some("true".into()),
            Self::Bool(false) => Some("false".into()),
            Self::Null | Self::NonFinite | Self::Nested => None,
        }
    }
}

/// Text of bytes; what is no UTF-8 becomes U+FFFD.
pub fn lossy(bytes: &[u8]) -> Cow<'_, str> {
    match std::str::from_utf8(bytes) {
        Ok(text) => Cow::Borrowed(text),
        Err(_) => String::from_utf8_lossy(bytes),
    }
}

/// Why JSON could not be read on, and where.
#[derive(Debug, thiserror::Error)]
#[error("at byte {at} of the JSON: {fault}")]
pub struct JsonError {
    /// The byte, counted from zero, in the decompressed JSON.
    pub at: u64,
    /// What was wrong there.
    #[source]
    pub fault: Fault,
}

/// What was wrong with JSON.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// Something else was expected.
    #[error("expected {what}, found {found}")]
    Expected {
        /// What would have been right.
        what: &'static str,
        /// What there was instead, in words.
        found: String,
    },
    /// Structures within structures, too many of them.
    #[error("objects and arrays lie more than {MAX_DEPTH} deep within each other")]
    TooDeep,
    /// A key, string or number that does not end within reason.
    #[error("a single value is longer than {} MB", MAX_TOKEN_BYTES >> 20)]
    TooLong,
    /// The input failed.
    #[error("reading failed: {0}")]
    Input(#[source] io::Error),
}
