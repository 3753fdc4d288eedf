//! The parser itself: returns keys, items and scalars as the caller asks for them.
//!
//! The calls mirror the structure of the JSON. After `begin_object`, the caller alternates between `next_key`
//! and reading a value until there is no key left. Arrays work the same way with `begin_array` and
//! `next_item`. Every value must be read or skipped.

use std::io::Read;
use std::ops::Range;

use super::decimal::num_digits;
use super::escape::{self, BadEscape};
use super::window::{WINDOW_BYTES, Window};
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
        Self::with_window(input, WINDOW_BYTES)
    }

    /// Like [`Pull::new`], with a window of this many bytes at first.
    pub fn with_window(input: R, bytes: usize) -> Self {
        let window = Window::with_capacity(input, bytes);
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

    /// Consumes the `{` of the next value if it is an object, and skips it otherwise. Returns whether it is one.
    pub fn enter_object(&mut self) -> Result<bool> {
        let is_it = self.at_object()?;
        if is_it {
            self.begin_object()?
        } else {
            self.skip()?
        }
        Ok(is_it)
    }

    fn begin(&mut self, open: u8, what: &'static str) -> Result<()> {
        if self.peek()? != Some(open) {
            return self.expected(what);
        }
        if self.depth == MAX_DEPTH {
            return Err(self.fault(Fault::TooDeep));
        }
        self.step();
        self.depth += 1;
        self.is_fresh = true;
        Ok(())
    }

    /// The next key of the innermost object, with its escapes resolved. Its value must be read or skipped
    /// next. `None` closes the object.
    #[inline]
    pub fn next_key(&mut self) -> Result<Option<&[u8]>> {
        // Almost always, the comma, the quotes and the colon are the next marks.
        let Window { bytes, index, .. } = &self.window;
        let num_commas = usize::from(!self.is_fresh);
        if let Some([start, end, colon]) = index.marks_from(num_commas)
            && [start, end, colon].map(|at| bytes[at]) == *b"\"\":"
            && (self.is_fresh || index.mark().is_some_and(|at| bytes[at] == b','))
        {
            self.is_fresh = false;
            self.window.index.step(num_commas + 3);
            self.window.pos = colon + 1;
            return Ok(Some(&self.window.bytes[start + 1..end]));
        }
        self.any_key()
    }

    /// [`Pull::next_key`] in any case.
    fn any_key(&mut self) -> Result<Option<&[u8]>> {
        if !self.goes_on(b'}', "',' or '}'")? {
            return Ok(None);
        }
        if self.peek()? != Some(b'"') {
            return self.expected("a key in quotes");
        }
        self.step();
        let mut text = self.string()?;
        // The colon is almost always in the same piece. If it is not, the key is copied, so that it survives a
        // refill of the window.
        if self.window.index.mark().is_none()
            && let Text::Window(range) = text
        {
            self.copied.clear();
            self.copied.extend_from_slice(&self.window.bytes[range]);
            text = Text::Copied;
        }
        if self.peek()? != Some(b':') {
            return self.expected("':'");
        }
        self.step();
        Ok(Some(self.bytes_of(text)))
    }

    /// Whether the innermost array has another item, which must be read or skipped next. `false` closes the
    /// array.
    pub fn next_item(&mut self) -> Result<bool> {
        self.goes_on(b']', "',' or ']'")
    }

    /// Consumes the comma before the next entry, or the end of the structure.
    #[inline]
    fn goes_on(&mut self, close: u8, what: &'static str) -> Result<bool> {
        let is_fresh = std::mem::replace(&mut self.is_fresh, false);
        match self.peek()? {
            Some(byte) if byte == close => {
                self.step();
                self.depth -= 1;
                Ok(false)
            }
            _ if is_fresh => Ok(true),
            Some(b',') => {
                self.step();
                Ok(true)
            }
            _ => self.expected(what),
        }
    }

    /// Reads the next value. An object or array is skipped.
    #[inline]
    pub fn value(&mut self) -> Result<Value<'_>> {
        // Almost always, the value is a string or a number, and the next two marks say where it ends.
        let Window { bytes, index, .. } = &self.window;
        if let Some([start, next]) = index.marks_from(0) {
            match bytes[start] {
                b'"' if bytes[next] == b'"' => {
                    self.window.index.step(2);
                    self.window.pos = next + 1;
                    return Ok(Value::Str(&self.window.bytes[start + 1..next]));
                }
                b'-' | b'0'..=b'9' => {
                    let (len, is_number) = number(&bytes[start..]);
                    let end = start + len;
                    if is_number && (end == next || is_blank(bytes[end])) {
                        self.window.index.step(1);
                        self.window.pos = end;
                        return Ok(Value::Num(&self.window.bytes[start..end]));
                    }
                }
                _ => {}
            }
        }
        self.any_value()
    }

    /// [`Pull::value`] in any case.
    fn any_value(&mut self) -> Result<Value<'_>> {
        match self.peek()? {
            Some(b'"') => {
                self.step();
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
            Some(byte) => {
                let (word, value): (&'static [u8], _) = match byte {
                    b't' => (b"true", Value::Bool(true)),
                    b'f' => (b"false", Value::Bool(false)),
                    b'n' => (b"null", Value::Null),
                    b'N' => (b"NaN", Value::NonFinite),
                    b'I' => (b"Infinity", Value::NonFinite),
                    _ => return self.expected("a value"),
                };
                self.window.index.step(1);
                self.word(word, value)
            }
            None => self.expected("a value"),
        }
    }

    /// Skips the next value.
    pub fn skip(&mut self) -> Result<()> {
        match self.peek()? {
            Some(b'"') => {
                self.step();
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
    #[inline]
    fn peek(&mut self) -> Result<Option<u8>> {
        loop {
            if let Some(at) = self.window.index.mark() {
                self.window.pos = at;
                return Ok(Some(self.window.bytes[at]));
            }
            self.window.pos = self.window.indexed;
            if !self.more()? {
                return Ok(None);
            }
        }
    }

    /// Consumes the byte that [`Pull::peek`] has returned.
    #[inline]
    fn step(&mut self) {
        self.window.index.step(1);
        self.window.pos += 1;
    }

    /// Indexes the next piece, once all marks are used. Keeps the bytes from the current position on, which may
    /// move. Returns false at the end of the input.
    #[cold]
    fn more(&mut self) -> Result<bool> {
        if self.window.is_all_indexed() && self.window.rest().len() >= MAX_TOKEN_BYTES {
            return Err(self.fault(Fault::TooLong));
        }
        self.window.more().map_err(|err| self.fault(Fault::Input(err)))
    }

    /// Reads a string whose opening quote has been consumed.
    fn string(&mut self) -> Result<Text> {
        let mut has_escapes = false;
        loop {
            if let Some(at) = self.window.index.mark() {
                self.window.index.step(1);
                if self.window.bytes[at] != b'"' {
                    has_escapes = true;
                    continue;
                }
                let text = self.window.pos..at;
                self.window.pos = at + 1;
                return if has_escapes { self.resolve(text) } else { Ok(Text::Window(text)) };
            }
            match self.more() {
                Ok(true) => {}
                Ok(false) => return self.unclosed(None),
                Err(err) => return self.unclosed(Some(err)),
            }
        }
    }

    /// Resolves the escapes of a string.
    fn resolve(&mut self, text: Range<usize>) -> Result<Text> {
        match escape::resolve(&self.window.bytes[text.clone()], &mut self.copied) {
            Ok(()) => Ok(Text::Copied),
            Err(bad) => self.bad_escape(text.start, &bad),
        }
    }

    fn bad_escape<T>(&mut self, start: usize, bad: &BadEscape) -> Result<T> {
        self.window.pos = start + bad.at;
        self.expected(bad.expected)
    }

    /// The error of a string that does not end because no more can be read, or because the input ends. A wrong
    /// escape before that is the error instead.
    fn unclosed<T>(&mut self, failed: Option<JsonError>) -> Result<T> {
        let text = self.window.pos..self.window.len;
        let bad = escape::resolve(&self.window.bytes[text.clone()], &mut self.copied).err();
        match (bad, failed) {
            (Some(bad), failed) if failed.is_none() || bad.at < text.len() => {
                self.bad_escape(text.start, &bad)
            }
            (_, Some(err)) => Err(err),
            (_, None) => {
                self.window.pos = self.window.len;
                self.expected("'\"'")
            }
        }
    }

    /// Reads a number and returns its range in the window; `None` for `-Infinity`.
    fn number(&mut self) -> Result<Option<Range<usize>>> {
        self.window.index.step(1);
        let (len, is_number) = loop {
            let rest = self.window.rest();
            let (len, is_number) = number(rest);
            if len < rest.len() || !self.more()? {
                break (len, is_number);
            }
        };
        let (start, end) = (self.window.pos, self.window.pos + len);
        let next = self.window.rest().get(len).copied();
        if !is_number && len == 1 && next == Some(b'I') {
            self.window.pos = end;
            self.word(b"Infinity", Value::NonFinite)?;
            return Ok(None);
        }
        if !is_number || next.is_some_and(is_part_of_number) {
            return self.expected("a number");
        }
        self.end_scalar(end);
        Ok(Some(start..end))
    }

    /// Reads a literal whose mark has been stepped over.
    fn word(&mut self, word: &'static [u8], value: Value<'static>) -> Result<Value<'_>> {
        // One byte more than the word, to check that the word ends there.
        while self.window.index.mark().is_none()
            && self.window.rest().len() <= word.len()
            && self.more()?
        {}
        let rest = self.window.rest();
        let ends = !rest.get(word.len()).is_some_and(|b| b.is_ascii_alphanumeric() || *b == b'_');
        if !rest.starts_with(word) || !ends {
            return self.expected("a value");
        }
        self.end_scalar(self.window.pos + word.len());
        Ok(value)
    }

    /// Ends a number or literal before `end`. The index has no mark there if the next byte is not one that can
    /// follow. It must still be found.
    fn end_scalar(&mut self, end: usize) {
        self.window.pos = end;
        if self.window.index.mark() != Some(end)
            && let Some(byte) = self.window.rest().first()
            && !is_blank(*byte)
        {
            self.window.index.put_back(end);
        }
    }

    /// Skips a string whose opening quote has been consumed. Escapes are not checked.
    fn skip_string(&mut self) -> Result<()> {
        loop {
            match self.window.index.mark() {
                Some(at) => {
                    self.window.index.step(1);
                    if self.window.bytes[at] == b'"' {
                        self.window.pos = at + 1;
                        return Ok(());
                    }
                }
                None => {
                    self.window.pos = self.window.indexed;
                    if !self.more()? {
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
            let Some(byte) = self.peek()? else {
                return self.expected("the end of an object or array");
            };
            match byte {
                b'"' => {
                    self.step();
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
                b'}' | b']' => {
                    match (byte, kinds & 1) {
                        (b'}', 0) => return self.expected("']'"),
                        (b']', 1) => return self.expected("'}'"),
                        _ => {}
                    }
                    kinds >>= 1;
                    open -= 1;
                }
                _ => {}
            }
            self.step();
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

/// How many bytes at the start of `text` fit JSON's grammar of a number, and whether they are one. Leading
/// zeros are accepted.
fn number(text: &[u8]) -> (usize, bool) {
    let digits = |from: usize| num_digits(&text[from..]);
    let mut at = usize::from(text.first() == Some(&b'-'));
    let mut count = digits(at);
    at += count;
    let mut is_number = count > 0;
    if text.get(at) == Some(&b'.') {
        count = digits(at + 1);
        at += 1 + count;
        is_number &= count > 0;
    }
    if let Some(b'e' | b'E') = text.get(at) {
        at += 1 + usize::from(matches!(text.get(at + 1), Some(b'+' | b'-')));
        count = digits(at);
        at += count;
        is_number &= count > 0;
    }
    (at, is_number)
}

fn is_blank(byte: u8) -> bool {
    matches!(byte, b' ' | b'\n' | b'\r' | b'\t')
}

fn is_part_of_number(byte: u8) -> bool {
    matches!(byte, b'0'..=b'9' | b'.' | b'-' | b'+' | b'e' | b'E')
}
