//! Resolves the escapes of JSON strings.
//!
//! Input: the bytes between the quotes. Output: the bytes that they mean, or the place of an escape that does
//! not exist. This module does not know where a string ends.

use memchr::memchr;

/// An escape that does not exist.
#[derive(Debug)]
pub(super) struct BadEscape {
    /// The place of the first byte that does not fit, which may be the end of the text.
    pub(super) at: usize,
    /// The expected text there, in words.
    pub(super) expected: &'static str,
}

/// Replaces `out` by the text with its escapes resolved.
pub(super) fn resolve(text: &[u8], out: &mut Vec<u8>) -> Result<(), BadEscape> {
    out.clear();
    let mut at = 0;
    while let Some(plain) = memchr(b'\\', &text[at..]) {
        out.extend_from_slice(&text[at..at + plain]);
        at += plain + 1;
        let byte = match text.get(at) {
            Some(byte @ (b'"' | b'\\' | b'/')) => *byte,
            Some(b'b') => 0x08,
            Some(b'f') => 0x0c,
            Some(b'n') => b'\n',
            Some(b'r') => b'\r',
            Some(b't') => b'\t',
            Some(b'u') => {
                at = char(text, at + 1, out)?;
                continue;
            }
            _ => {
                return Err(BadEscape {
                    at,
                    expected: "one of \" \\ / b f n r t u after a backslash",
                });
            }
        };
        out.push(byte);
        at += 1;
    }
    out.extend_from_slice(&text[at..]);
    Ok(())
}

/// Reads the digits of `\uXXXX`, which begin at `at`, and those of a second escape if the first is half of a
/// surrogate pair. A half that stands alone becomes U+FFFD. Returns the place after them.
fn char(text: &[u8], mut at: usize, out: &mut Vec<u8>) -> Result<usize, BadEscape> {
    let mut push = |char: char| out.extend_from_slice(char.encode_utf8(&mut [0; 4]).as_bytes());
    let mut unit = hex_digits(text, at)?;
    at += 4;
    while (0xd800..0xdc00).contains(&unit) && text[at..].starts_with(b"\\u") {
        let low = hex_digits(text, at + 2)?;
        at += 6;
        if (0xdc00..0xe000).contains(&low) {
            unit = 0x10000 + ((unit - 0xd800) << 10) + (low - 0xdc00);
        } else {
            push(char::REPLACEMENT_CHARACTER);
            unit = low;
        }
    }
    push(char::from_u32(unit).unwrap_or(char::REPLACEMENT_CHARACTER));
    Ok(at)
}

fn hex_digits(text: &[u8], start: usize) -> Result<u32, BadEscape> {
    let mut unit = 0;
    for at in start..start + 4 {
        match text.get(at).and_then(|&byte| char::from(byte).to_digit(16)) {
            Some(digit) => unit = 16 * unit + digit,
            None => return Err(BadEscape { at, expected: "four hexadecimal digits" }),
        }
    }
    Ok(unit)
}
