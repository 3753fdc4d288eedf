//! The words of a chart: their sizes, the room that they take, and its numbers.
//!
//! Text goes in; lengths and shorter text come out. The reader's browser chooses the font, so lengths are estimates. Nothing
//! here draws.

use paceline_files::printable;
use unicode_width::UnicodeWidthChar;

use crate::fitted::wrapped;
use crate::table::grouped;
use crate::width::width;

/// The average width of a letter, as a fraction of the font size. It is that of a wide font, because the
/// reader's font is unknown.
const WIDE: f64 = 0.61;

/// Font sizes.
pub(super) const SIZE: f64 = 12.0;
pub(super) const SMALL: f64 = 11.0;

/// Estimates how wide text is, from the average letter of a proportional font. The estimate is on the safe
/// side, because the browser chooses the font.
pub(super) fn width_of(text: &str, size: f64) -> f64 {
    width(&printable(text)) as f64 * size * WIDE
}

/// The text, or its beginning and its end if the whole would be wider than `room`.
pub(super) fn fitted(text: &str, size: f64, room: f64) -> String {
    let fits = (room / (size * WIDE)) as usize;
    let text = printable(text);
    // Letters without a width count too, or a name could be as long as it likes.
    let columns = |letter: &char| letter.width().unwrap_or(0).max(1);
    let part = |letters: &mut dyn Iterator<Item = char>, room: usize| -> Vec<char> {
        let mut used = 0;
        let fits = |letter: &char| {
            used += columns(letter);
            used <= room
        };
        letters.take_while(fits).collect()
    };
    if text.chars().map(|letter| columns(&letter)).sum::<usize>() <= fits {
        return text.into_owned();
    }
    let kept = fits.saturating_sub(1);
    let head = part(&mut text.chars(), kept - kept / 3);
    let tail = part(&mut text.chars().rev(), kept / 3);
    head.into_iter().chain(['\u{2026}']).chain(tail.into_iter().rev()).collect()
}

/// The text in lines of at most `room`. Only a single word that is longer loses its middle.
pub(super) fn broken(text: &str, size: f64, room: f64) -> Vec<String> {
    let lines = wrapped(&printable(text), (room / (size * WIDE)) as usize);
    lines.split('\n').map(|line| fitted(line.trim(), size, room)).collect()
}

/// A number for a label by itself, with four significant digits at most.
pub(super) fn brief(value: f64) -> String {
    match value.abs() {
        size if value == value.round() && size < 1e6 => grouped(value, 0),
        size if size < 0.01 => format!("{value:.2e}"),
        size => grouped(value, decimals_for(size)),
    }
}

/// How many decimals all numbers of a chart have, given the largest of them.
fn decimals_for(largest: f64) -> usize {
    match largest.abs() {
        size if size >= 1000.0 => 0,
        size if size >= 100.0 => 1,
        size if size >= 1.0 => 2,
        _ => 3,
    }
}

/// A function that writes all numbers of a chart with the same number of decimals; without decimals if all
/// numbers are whole.
pub(super) fn like(values: impl Iterator<Item = f64> + Clone) -> impl Fn(f64) -> String {
    let is_whole = values.clone().all(|value| value == value.round());
    let largest = values.map(f64::abs).filter(|value| value.is_finite()).fold(0.0, f64::max);
    let decimals = if is_whole { 0 } else { decimals_for(largest) };
    let is_tiny = largest < 0.01 && !is_whole;
    move |value| if is_tiny { format!("{value:.2e}") } else { grouped(value, decimals) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_have_few_digits() {
        let all = [0.0, 12.0, 1234.56, 123.456, 1.234, 0.01234, 1e-5].map(brief);
        assert_eq!(all, ["0", "12", "1,235", "123.5", "1.23", "0.012", "1.00e-5"]);
    }

    #[test]
    fn long_names_are_broken_between_words() {
        let name = "precision=f32, bucket-cap-mb=25, layout=nhwc";
        let lines = broken(name, SIZE, 180.0);
        assert_eq!(lines, ["precision=f32,", "bucket-cap-mb=25,", "layout=nhwc"]);
        assert_eq!(broken("", SIZE, 180.0), [""]);
        assert_eq!(broken("a\nb", SIZE, 180.0), ["a\\nb"], "a line end breaks no line");
        let word = broken(&"x".repeat(99), SIZE, 180.0);
        assert!(word.len() == 1 && width_of(&word[0], SIZE) <= 180.0, "{word:?}");
    }

    #[test]
    fn long_names_keep_both_ends() {
        assert_eq!(fitted("short", SIZE, 100.0), "short");
        let cut = fitted("ncclDevKernel_AllReduce_Sum_f32_RING_LL", SIZE, 100.0);
        assert!(cut.starts_with("ncclDevK") && cut.ends_with("_LL"), "{cut}");
        assert!(width_of(&cut, SIZE) <= 100.0);
        assert_eq!(fitted("anything", SIZE, 0.0), "\u{2026}");
        let wide = fitted(&"\u{65e5}\u{672c}".repeat(20), SIZE, 100.0);
        assert!(wide.contains('\u{2026}') && width_of(&wide, SIZE) <= 100.0, "{wide}");
    }
}
