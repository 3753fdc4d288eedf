//! How wide a text is on a terminal.
//!
//! Text goes in; columns of the terminal, or text of a stated width, come out. A letter of Chinese, Japanese or Korean and an
//! emoji take two columns, and an accent that follows its letter takes no column. Nothing here knows how much room there is.

use unicode_width::UnicodeWidthStr;

/// The columns that a text of one line takes.
pub fn width(text: &str) -> usize {
    // Most text is plain ASCII.
    if text.is_ascii() { text.len() } else { text.width() }
}

/// The text, filled with spaces up to `columns`. (A width in a format string ends at 65,535.)
pub fn left(text: &str, columns: usize) -> String {
    format!("{text}{}", " ".repeat(columns.saturating_sub(width(text))))
}

/// The text with these spaces before it.
pub(crate) fn right(text: &str, columns: usize) -> String {
    format!("{}{text}", " ".repeat(columns.saturating_sub(width(text))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wide_letters_take_two_columns() {
        let all = [
            ("", 0),
            ("a b", 3),
            ("Gr\u{f6}\u{df}e", 5),
            ("\u{2013}", 1),
            ("\u{65e5}\u{672c}", 4),
            ("\u{d55c}\u{ae00}", 4),
            ("e\u{301}", 1),
            ("\u{1f680}", 2),
            ("\u{1f468}\u{200d}\u{1f469}\u{200d}\u{1f467}", 2),
        ];
        for (text, columns) in all {
            assert_eq!(width(text), columns, "{text}");
        }
        assert_eq!(left("\u{65e5}", 4), "\u{65e5}  ");
        assert_eq!(right("\u{65e5}", 4), "  \u{65e5}");
        assert_eq!(left("abc", 2), "abc");
        assert_eq!(left("", 70_000).len(), 70_000);
    }
}
