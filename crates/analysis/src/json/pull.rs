//! The parser itself: returns keys, items and scalars as the caller asks for them.
//!
//! The calls mirror the structure of the JSON. After `begin_object`, the caller alternates between `next_key`
//! and reading a value until there is no key left. Arrays work the same way with `begin_array` and
//! `next_item`. Every value must be read or skipped.

use std::io::Read;
use std::ops::Range;

use memchr::memchr2;

use super::window::Window;
use super::{Fault, JsonError, MAX_DEPTH, MAX_TOKEN_BYTES, Value};

type Result<T> = std::result::Result<T, JsonError>;

/// A pull parser over an input.
pub struct Pull<R> {
    window: Window<R>,
    /// The text of a string that had to be copied.
    copied: Vec<u8>,
    depth: u32,
    /// Whether nothing has been read from the innermost structure yet, so that no comma is expected.
    is_fresh: bool,
}

/// Where the bytes of a string are stored.
enum Text {
    Window(Range<usize>),
    Copied,
}

impl<R: Read> Pull<R> {
    /// A parser at the start of an input.
    pub fn new(input: R) -> Self {
        Self::over(Window::new(input))
    }

    /// Like [`Pull::new`], with a window of this many bytes at first.
    pub fn with_window(input: R, bytes: usize) -> Self {
        Self::over(Window::with_capacity(input, bytes))
    }

    fn over(window: Window<R>) -> Self {
        Self { window, copied: Vec::new(), depth: 0, is_fresh: false }
    }

    /// The number of bytes of the input that have been consumed.
    pub fn offset(&self) -> u64 {
        self.window.offset_of(self.window.pos)
    }

    /// Whether the next value is an object.
    pub fn at_object(&mut self) -> Result<bool> {
        Ok(self.peek()? == Some(b'{'))
    }

    /// Whether the next value is an array.
    pub fn at_array(&mut self) -> Result<bool> {
        Ok(self.peek()? == Some(b'['))
    }

    /// Consumes the `{` of an object.
    pub fn begin_object(&mut self) -> Result<()> {
        self.begin(b'{', "an object")
    }

    /// Consumes the `[` of an array.
    pub fn begin_array(&mut self) -> Result<()> {
        self.begin(b'[', "an array")
    }

    fn begin(&mut self, open: u8, what: &'static str) -> Result<()> {
        if self.peek()? != Some(open) {
            return self.expected(what);
        }
        if self.depth == MAX_DEPTH {
            return Err(self.fault(Fault::TooDeep));
        }
        self.window.pos += 1;
        self.depth += 1;
        self.is_fresh = true;
        Ok(())
    }

    /// The next key of the innermost object, with its escapes resolved. Its value must be read or skipped
    /// next. `None` closes the object.
    pub fn next_key(&mut self) -> Result<Option<&[u8]>> {
        if !self.goes_on(b'}', "',' or '}'")? {
            return Ok(None);
        }
        if self.peek()? != Some(b'"') {
            return self.expected("a key in quotes");
        }
        self.window.pos += 1;
        let mut text = self.string()?;
        // The colon almost always follows at once. If it does not, the key is copied, so that it survives a
        // refill of the window.
        if self.window.rest().first() == Some(&b':') {
            self.window.pos += 1;
        } else {
            if let Text::Window(range) = text {
                self.copied.clear();
                self.copied.extend_from_slice(&self.window.bytes[range]);
                text = Text::Copied;
            }
            if self.peek()? != Some(b':') {
                return self.expected("':'");
            }
            self.window.pos += 1;
        }
        Ok(Some(self.bytes_of(text)))
    }

    /// Whether the innermost array has another item, which must be read or skipped next. `false` closes the
    /// array.
    pub fn next_item(&mut self) -> Result<bool> {
        self.goes_on(b']', "',' or ']'")
    }

    /// Consumes the comma before the next entry, or the end of the structure.
    fn goes_on(&mut self, close: u8, what: &'static str) -> Result<bool> {
        let is_fresh = std::mem::replace(&mut self.is_fresh, false);
        match self.peek()? {
            Some(byte) if byte == close => {
                self.window.pos += 1;
                self.depth -= 1;
                Ok(false)
            }
            _ if is_fresh => Ok(true),
            Some(b',') => {
                self.window.pos += 1;
                Ok(true)
            }
            _ => self.expected(what),
        }
    }

    /// Reads the next value. An object or array is skipped.
    pub fn value(&mut self) -> Result<Value<'_>> {
        match self.peek()? {
            Some(b'"') => {
                self.window.pos += 1;
                let text = self.string()?;
                Ok(Value::Str(self.bytes_of(text)))
            }
            Some(b'-' | b'0'..=b'9') => match self.number()? {
                Some(range) => Ok(Value::Num(&self.window.bytes[range])),
                None => Ok(Value::NonFinite),
            },
            Some(b'{' | b'[') => {
                self.skip_nested()?;
                Ok(Value::Nested)
            }
            Some(b't') => self.word(b"true", Value::Bool(true)),
            Some(b'f') => self.word(b"false", Value::Bool(false)),
            Some(b'n') => self.word(b"null", Value::Null),
            Some(b'N') => self.word(b"NaN", Value::NonFinite),
            Some(b'I') => self.word(b"Infinity", Value::NonFinite),
            _ => self.expected("a value"),
        }
    }

    /// Skips the next value.
    pub fn skip(&mut self) -> Result<()> {
        match self.peek()? {
            Some(b'"') => {
                self.window.pos += 1;
                self.skip_string()
            }
            Some(b'{' | b'[') => self.skip_nested(),
            _ => self.value().map(|_| ()),
        }
    }

    /// Checks that only white space follows.
    pub fn end(&mut self) -> Result<()> {
        match self.peek()? {
            None => Ok(()),
            Some(_) => self.expected("the end of the file"),
        }
    }

    /// The next byte that is not white space, without consuming it; `None` at the end.
    fn peek(&mut self) -> Result<Option<u8>> {
        loop {
            let rest = self.window.rest();
            if let Some(at) = rest.iter().position(|b| !matches!(b, b' ' | b'\n' | b'\r' | b'\t')) {
                let byte = rest[at];
                self.window.pos += at;
                return Ok(Some(byte));
            }
            self.window.pos = self.window.len;
            if !self.more(self.window.len)? {
                return Ok(None);
            }
        }
    }

    fn more(&mut self, keep: usize) -> Result<bool> {
        if self.window.len - keep >= MAX_TOKEN_BYTES {
            return Err(self.fault(Fault::TooLong));
        }
        self.window.more(keep).map_err(|err| self.fault(Fault::Input(err)))
    }

    /// Reads a string whose opening quote has been consumed.
    fn string(&mut self) -> Result<Text> {
        let (mut start, mut from) = (self.window.pos, self.window.pos);
        loop {
            match memchr2(b'"', b'\\', &self.window.bytes[from..self.window.len]) {
                Some(at) if self.window.bytes[from + at] == b'"' => {
                    self.window.pos = from + at + 1;
                    return Ok(Text::Window(start..from + at));
                }
                Some(at) => return self.unescape(start..from + at),
                None => {
                    let seen = self.window.len - start;
                    if !self.more(start)? {
                        self.window.pos = self.window.len;
                        return self.expected("'\"'");
                    }
                    (start, from) = (0, seen);
                }
            }
        }
    }

    /// Continues a string at its first backslash. `plain` is the range before the backslash.
    fn unescape(&mut self, plain: Range<usize>) -> Result<Text> {
        self.copied.clear();
        self.window.pos = plain.end;
        self.copied.extend_from_slice(&self.window.bytes[plain]);
        loop {
            let rest = self.window.rest();
            let Some(at) = memchr2(b'"', b'\\', rest) else {
                self.copied.extend_from_slice(rest);
                self.window.pos = self.window.len;
                if self.copied.len() >= MAX_TOKEN_BYTES {
                    return Err(self.fault(Fault::TooLong));
                }
                if !self.more(self.window.len)? {
                    return self.expected("'\"'");
                }
                continue;
            };
            self.copied.extend_from_slice(&rest[..at]);
            let is_end = rest[at] == b'"';
            self.window.pos += at + 1;
            if is_end {
                return Ok(Text::Copied);
            }
            self.escape()?;
        }
    }

    /// Reads the rest of an escape, after the backslash.
    fn escape(&mut self) -> Result<()> {
        const WHAT: &str = "one of \" \\ / b f n r t u after a backslash";
        let plain = match self.byte()? {
            Some(byte @ (b'"' | b'\\' | b'/')) => byte,
            Some(b'b') => 0x08,
            Some(b'f') => 0x0c,
            Some(b'n') => b'\n',
            Some(b'r') => b'\r',
            Some(b't') => b'\t',
            Some(b'u') => {
                self.window.pos += 1;
                return self.escaped_char();
            }
            _ => return self.expected(WHAT),
        };
        self.window.pos += 1;
        self.copied.push(plain);
        Ok(())
    }

    /// Reads the digits of `\uXXXX`, and of a second escape if the first is half of a surrogate pair. A half
    /// that stands alone becomes U+FFFD.
    fn escaped_char(&mut self) -> Result<()> {
        let mut unit = self.hex_digits()?;
        while (0xd800..0xdc00).contains(&unit) {
            while self.window.rest().len() < 2 && self.more(self.window.pos)? {}
            if !self.window.rest().starts_with(b"\\u") {
                break;
            }
            self.window.pos += 2;
            let low = self.hex_digits()?;
            if (0xdc00..0xe000).contains(&low) {
                unit = 0x10000 + ((unit - 0xd800) << 10) + (low - 0xdc00);
            } else {
                self.push_char(char::REPLACEMENT_CHARACTER);
                unit = low;
            }
        }
        self.push_char(char::from_u32(unit).unwrap_or(char::REPLACEMENT_CHARACTER));
        Ok(())
    }

    fn push_char(&mut self, char: char) {
        self.copied.extend_from_slice(char.encode_utf8(&mut [0; 4]).as_bytes());
    }

    fn hex_digits(&mut self) -> Result<u32> {
        let mut unit = 0;
        for _ in 0..4 {
            match self.byte()?.and_then(|byte| char::from(byte).to_digit(16)) {
                Some(digit) => unit = 16 * unit + digit,
                None => return self.expected("four hexadecimal digits"),
            }
            self.window.pos += 1;
        }
        Ok(unit)
    }

    /// The next byte, including white space, without consuming it; `None` at the end.
    fn byte(&mut self) -> Result<Option<u8>> {
        if self.window.pos == self.window.len && !self.more(self.window.len)? {
            return Ok(None);
        }
        Ok(Some(self.window.bytes[self.window.pos]))
    }

    /// Reads a number and returns its range in the window; `None` for `-Infinity`.
    fn number(&mut self) -> Result<Option<Range<usize>>> {
        let mut start = self.window.pos;
        let mut end = start;
        loop {
            let rest = &self.window.bytes[end..self.window.len];
            let is_part = |b: &u8| matches!(b, b'0'..=b'9' | b'.' | b'-' | b'+' | b'e' | b'E');
            if let Some(at) = rest.iter().position(|b| !is_part(b)) {
                end += at;
                break;
            }
            let seen = self.window.len - start;
            let goes_on = self.more(start)?;
            (start, end) = (0, seen);
            if !goes_on {
                break;
            }
        }
        let text = &self.window.bytes[start..end];
        if text == b"-" && self.window.bytes[..self.window.len].get(end) == Some(&b'I') {
            self.window.pos = end;
            self.word(b"Infinity", Value::NonFinite)?;
            return Ok(None);
        }
        if !is_number(text) {
            return self.expected("a number");
        }
        self.window.pos = end;
        Ok(Some(start..end))
    }

    /// Reads a literal.
    fn word(&mut self, word: &'static [u8], value: Value<'static>) -> Result<Value<'_>> {
        // One byte more than the word, to check that the word ends there.
        while self.window.rest().len() <= word.len() && self.more(self.window.pos)? {}
        let rest = self.window.rest();
        let ends = !rest.get(word.len()).is_some_and(|b| b.is_ascii_alphanumeric() || *b == b'_');
        if !rest.starts_with(word) || !ends {
            return self.expected("a value");
        }
        self.window.pos += word.len();
        Ok(value)
    }

    /// Skips a string whose opening quote has been consumed. Escapes are not checked.
    fn skip_string(&mut self) -> Result<()> {
        loop {
            let rest = self.window.rest();
            match memchr2(b'"', b'\\', rest) {
                Some(at) if rest[at] == b'"' => {
                    self.window.pos += at + 1;
                    return Ok(());
                }
                Some(at) => {
                    self.window.pos += at + 1;
                    if self.byte()?.is_some() {
                        self.window.pos += 1;
                    }
                }
                None => {
                    self.window.pos = self.window.len;
                    if !self.more(self.window.len)? {
                        return self.expected("'\"'");
                    }
                }
            }
        }
    }

    /// Skips the next object or array.
    fn skip_nested(&mut self) -> Result<()> {
        // One bit per open structure, 1 for an object, to know which bracket must close it.
        let (mut kinds, mut open) = (0u128, 0);
        loop {
            let rest = self.window.rest();
            let Some(at) = rest.iter().position(|&b| IS_STRUCTURE[usize::from(b)]) else {
                self.window.pos = self.window.len;
                if !self.more(self.window.len)? {
                    return self.expected("the end of an object or array");
                }
                continue;
            };
            let byte = rest[at];
            self.window.pos += at;
            match byte {
                b'"' => {
                    self.window.pos += 1;
                    self.skip_string()?;
                    continue;
                }
                b'{' | b'[' => {
                    if self.depth + open == MAX_DEPTH {
                        return Err(self.fault(Fault::TooDeep));
                    }
                    kinds = kinds << 1 | u128::from(byte == b'{');
                    open += 1;
                }
                _ => {
                    match (byte, kinds & 1) {
                        (b'}', 0) => return self.expected("']'"),
                        (b']', 1) => return self.expected("'}'"),
                        _ => {}
                    }
                    kinds >>= 1;
                    open -= 1;
                }
            }
            self.window.pos += 1;
            if open == 0 {
                return Ok(());
            }
        }
    }

    fn bytes_of(&self, text: Text) -> &[u8] {
        match text {
            Text::Window(range) => &self.window.bytes[range],
            Text::Copied => &self.copied,
        }
    }

    fn fault(&self, fault: Fault) -> JsonError {
        JsonError { at: self.offset(), fault }
    }

    fn expected<T>(&self, what: &'static str) -> Result<T> {
        let found = match self.window.rest().first() {
            None => super::END.to_owned(),
            Some(byte @ 0x21..=0x7e) => format!("'{}'", char::from(*byte)),
            Some(byte) => format!("the byte 0x{byte:02x}"),
        };
        Err(self.fault(Fault::Expected { what, found }))
    }
}

/// The bytes at which `skip_nested` has to stop.
const IS_STRUCTURE: [bool; 256] = {
    let mut table = [false; 256];
    table[b'"' as usize] = true;
    table[b'{' as usize] = true;
    table[b'}' as usize] = true;
    table[b'[' as usize] = true;
    table[b']' as usize] = true;
    table
};

/// Whether `text` is a number by JSON's grammar. Leading zeros are accepted.
fn is_number(text: &[u8]) -> bool {
    let digits = |text: &[u8]| text.iter().take_while(|b| b.is_ascii_digit()).count();
    let mut rest = text.strip_prefix(b"-").unwrap_or(text);
    let whole = digits(rest);
    rest = &rest[whole..];
    let mut is_right = whole > 0;
    if let Some(fraction) = rest.strip_prefix(b".") {
        let count = digits(fraction);
        is_right &= count > 0;
        rest = &fraction[count..];
    }
    if let [b'e' | b'E', exponent @ ..] = rest {
        let unsigned = match exponent {
            [b'+' | b'-', unsigned @ ..] => unsigned,
            unsigned => unsigned,
        };
        let count = digits(unsigned);
        is_right &= count > 0;
        rest = &unsigned[count..];
    }
    is_right && rest.is_empty()
}
