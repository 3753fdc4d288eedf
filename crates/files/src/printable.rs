//! The one way to show text that others wrote.
//!
//! Untrusted text may hold control characters, which move the cursor of a terminal, or change its colors and title, and
//! characters without a shape, which can hide or reorder text. Such characters are written as escapes.

use std::borrow::Cow;
use std::ffi::OsStr;
use std::path::Path;

/// Names of files in messages. Their `display` keeps line ends, after which the rest of a name would look like a message.
pub trait Printable {
    /// The name as [`printable`] shows it. Bytes that are not UTF-8 become U+FFFD.
    fn printable(&self) -> Cow<'_, str>;
}

impl Printable for OsStr {
    fn printable(&self) -> Cow<'_, str> {
        match self.to_string_lossy() {
            Cow::Borrowed(text) => printable(text),
            Cow::Owned(text) => Cow::Owned(printable(&text).into_owned()),
        }
    }
}

impl Printable for Path {
    fn printable(&self) -> Cow<'_, str> {
        self.as_os_str().printable()
    }
}

/// Text that is safe in a line, a cell or a label: control characters, line ends included, and characters without a shape
/// become escapes such as `\u{1b}`.
pub fn printable(text: &str) -> Cow<'_, str> {
    escaped(text, false, false)
}

/// Like [`printable`], for text of several lines: line feeds and tabs stay.
pub fn printable_lines(text: &str) -> Cow<'_, str> {
    escaped(text, true, false)
}

/// Like [`printable_lines`], for text that comes in pieces, as from a model: joiners stay, because the next piece may have
/// the sign that they join.
pub fn printable_piece(text: &str) -> Cow<'_, str> {
    escaped(text, true, true)
}

fn escaped(text: &str, keeps_lines: bool, keeps_joiners: bool) -> Cow<'_, str> {
    let is_kept = |c: char| keeps_lines && matches!(c, '\n' | '\t');
    // Most text is plain ASCII.
    if text.bytes().all(|byte| matches!(byte, b' '..=b'~') || is_kept(char::from(byte))) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len());
    let mut before = ' ';
    let mut rest = text.chars().peekable();
    while let Some(c) = rest.next() {
        let mut is_between = || is_joined(before) && rest.peek().copied().is_some_and(is_joined);
        let joins = is_joiner(c) && (keeps_joiners || is_between());
        if is_hidden(c) && !is_kept(c) && !joins {
            out.extend(c.escape_default())
        } else {
            out.push(c)
        }
        before = c;
    }
    Cow::Owned(out)
}

/// The zero-width joiner and non-joiner, which words of many languages and signs made of several signs need.
fn is_joiner(c: char) -> bool {
    matches!(c, '\u{200c}' | '\u{200d}')
}

/// Whether a joiner beside this character can be part of a word or a sign.
fn is_joined(c: char) -> bool {
    !c.is_ascii() && !is_hidden(c)
}

/// Whether this is a control character, or one without a shape, which may change the direction of text, end a line, or fill
/// space.
fn is_hidden(c: char) -> bool {
    c.is_control()
        || matches!(
            c,
            '\u{ad}'
                | '\u{61c}'
                | '\u{115f}'..='\u{1160}'
                | '\u{180e}'
                | '\u{200b}'..='\u{200f}'
                | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}'
                | '\u{3164}'
                | '\u{feff}'
                | '\u{ffa0}'
                | '\u{fff9}'..='\u{fffb}'
                | '\u{1bca0}'..='\u{1bca3}'
                | '\u{1d173}'..='\u{1d17a}'
                | '\u{e0000}'..='\u{e0fff}'
        )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_can_be_seen_stays() {
        for text in
            ["", "a b", "Größe \u{3b1} \u{65e5}\u{672c}", "\u{2026}\u{2013}\u{b7}", "\\u{1b}"]
        {
            assert_eq!(printable(text), text);
            assert_eq!(printable_lines(text), text);
            assert_eq!(printable_piece(text), text);
        }
        // A family of three, and a Persian word: joiners are part of both.
        for text in ["\u{1f468}\u{200d}\u{1f469}\u{200d}\u{1f467}", "\u{645}\u{6cc}\u{200c}\u{634}"]
        {
            assert_eq!(printable(text), text);
        }
    }

    #[test]
    fn what_commands_a_terminal_or_hides_text_is_shown() {
        let all = [
            ("\u{1b}[31mred\u{7}\u{9b}2J\u{7f}", "\\u{1b}[31mred\\u{7}\\u{9b}2J\\u{7f}"),
            ("a\r\nb\tc\0", "a\\r\\nb\\tc\\u{0}"),
            ("rm\u{202e}txt\u{2066}.\u{200f}\u{61c}", "rm\\u{202e}txt\\u{2066}.\\u{200f}\\u{61c}"),
            ("a\u{2028}b\u{feff}\u{200b}", "a\\u{2028}b\\u{feff}\\u{200b}"),
            // Beside ASCII, and at an end, a joiner only hides.
            ("ad\u{200d}min", "ad\\u{200d}min"),
            ("\u{3b1}\u{200c}", "\u{3b1}\\u{200c}"),
            ("\u{3b1}\u{200d}\u{200d}\u{3b1}", "\u{3b1}\\u{200d}\\u{200d}\u{3b1}"),
        ];
        for (text, expected) in all {
            assert_eq!(printable(text), expected);
            assert_eq!(printable(&printable(text)), expected, "twice is once");
        }
        assert_eq!(Path::new("a\nb\t\u{1b}").printable(), "a\\nb\\t\\u{1b}");
        assert_eq!(Path::new("a b/c").printable(), "a b/c");
        assert_eq!(printable_lines("a\n\tb\r\u{1b}"), "a\n\tb\\r\\u{1b}");
        let family = "\u{1f468}\u{200d}";
        assert_eq!(printable_piece(family), family);
        assert_eq!(printable_piece("a\u{9b}\u{202e}"), "a\\u{9b}\\u{202e}");
    }
}
