//! Numbers, words and tables as all commands print them.

use std::ffi::OsStr;
use std::time::{SystemTime, UNIX_EPOCH};

use chrono::{DateTime, Local};
use paceline_files::printable;
use paceline_table::fitted::fitted;
use paceline_table::table::grouped;

use crate::streams;

/// Prints a line on standard output. A reader that is gone, such as `head`, is no reason to stop.
pub fn say(text: &str) {
    streams::stdout().line(text);
}

/// Prints a line that programs read too, such as a path or a row of a format. It stays one line on every terminal.
pub fn say_unbroken(text: &str) {
    streams::stdout().unbroken(text);
}

/// Prints a warning on standard error.
pub fn warn(text: &str) {
    streams::stderr().line(&format!("warning: {text}"));
}

/// A word as it can be typed again, with `\xff` for bytes that are not UTF-8.
pub fn named(word: &OsStr) -> String {
    let mut text = String::new();
    for chunk in word.as_encoded_bytes().utf8_chunks() {
        text += chunk.valid();
        text.extend(chunk.invalid().iter().map(|byte| format!("\\x{byte:02x}")));
    }
    text
}

/// The first of these names, safe in a line, with commas between them.
pub fn listed(names: &[String]) -> String {
    const MOST: usize = 10;
    const MOST_CHARS: usize = 40;
    let shown = |name: &String| {
        let start: String = name.chars().take(MOST_CHARS).collect();
        let more = if start.len() < name.len() { "..." } else { "" };
        printable(&start).into_owned() + more
    };
    let mut all: Vec<String> = names.iter().take(MOST).map(shown).collect();
    if names.len() > MOST {
        all.push(format!("and {} more", names.len() - MOST));
    }
    all.join(", ")
}

/// The local date and time now, by a format of `strftime`.
pub fn now(format: &str) -> String {
    date(SystemTime::now(), format)
}

/// A moment in local time; as seconds since 1970 if no calendar has it.
pub fn date(moment: SystemTime, format: &str) -> String {
    let since = moment.duration_since(UNIX_EPOCH).unwrap_or_default();
    let seconds = i64::try_from(since.as_secs()).ok();
    match seconds.and_then(|seconds| DateTime::from_timestamp(seconds, since.subsec_nanos())) {
        Some(time) => time.with_timezone(&Local).format(format).to_string(),
        None => format!("{}s", since.as_secs()),
    }
}

/// Nanoseconds as milliseconds.
pub fn ms(ns: u64) -> f64 {
    ns as f64 / 1e6
}

/// A count with its noun, such as `1 rank`, `2 ranks` or `2 batches`.
pub fn plural(count: usize, what: &str) -> String {
    let ending = match count {
        1 => "",
        _ if what.ends_with("tch") => "es",
        _ => "s",
    };
    format!("{count} {what}{ending}")
}

/// A number with commas between the thousands.
pub fn thousands(number: u64) -> String {
    grouped(number as f64, 0)
}

/// How many characters a line of a table on standard output may have, as tables take it: `None` would be no limit.
pub fn line_width() -> Option<usize> {
    Some(streams::stdout().width_of_table())
}

/// A table with a header, whose lines have at most `width` characters. Its first `num_left` columns are words, aligned
/// left; the others are numbers, aligned right.
pub fn plain_table<const N: usize>(
    names: [&str; N],
    num_left: usize,
    lines: &[[String; N]],
    width: Option<usize>,
) -> String {
    fitted(&names, lines, |at| at < num_left, width)
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt;

    use super::*;

    #[test]
    fn names_are_listed_up_to_a_limit() {
        let names = |count: usize| (0..count).map(|at| format!("{at}\u{7}")).collect::<Vec<_>>();
        assert_eq!(listed(&names(2)), "0\\u{7}, 1\\u{7}");
        assert!(listed(&names(12)).ends_with("9\\u{7}, and 2 more"));
        assert_eq!(listed(&["x".repeat(99)]), "x".repeat(40) + "...");
    }

    #[test]
    fn a_clock_that_is_far_off_is_no_reason_to_end() {
        let after = |secs| UNIX_EPOCH + std::time::Duration::from_secs(secs);
        // Beyond the year 262,142, with which calendars of the library end.
        assert_eq!(date(after(8_845_413_408_000), "%Y"), "8845413408000s");
        assert_eq!(date(after(1_700_000_000), "%Y"), "2023");
    }

    #[test]
    fn thousands_are_separated() {
        let all = [0, 7, 999, 1000, 27_400, 1_234_567].map(thousands);
        assert_eq!(all, ["0", "7", "999", "1,000", "27,400", "1,234,567"]);
    }

    #[test]
    fn a_word_that_is_not_utf8_can_be_recognized() {
        assert_eq!(named(OsStr::from_bytes(b"ck\xff\xc3/x")), "ck\\xff\\xc3/x");
        assert_eq!(named(OsStr::new("Überlauf")), "Überlauf");
    }
}
