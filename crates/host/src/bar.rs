//! A progress bar: one line of a terminal that is drawn again and again.
//!
//! While the bar is shown, the cursor stands at the start of the line. A terminal that becomes narrower breaks the line but
//! keeps the cursor at its character, so the next drawing, or [`Stream::line`], erases all of it.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use paceline_files::printable;
use paceline_table::width::width as length;

use crate::screen::ERASE;
use crate::streams::{self, Stream};
use crate::text::thousands;

/// The time between two drawings, at least.
const INTERVAL: Duration = Duration::from_millis(100);
/// The time over which speeds are means.
const WINDOW: Duration = Duration::from_secs(10);
/// The most and the fewest characters between the brackets.
const MAX_CELLS: usize = 30;
const MIN_CELLS: usize = 5;

/// The contents of a bar.
#[derive(Clone, Debug, Default)]
pub struct Progress {
    /// The name of the task.
    pub name: String,
    /// How much is done.
    pub done: u64,
    /// How much there is to do; 0 if that is not known.
    pub of: u64,
    /// Other facts, the most important first. A narrow terminal leaves out the last ones.
    pub facts: Vec<String>,
}

impl Progress {
    /// The line, of fewer than `width` characters unless the first fact alone is longer.
    fn line(&self, width: usize) -> String {
        // Names may be those of files.
        let name = printable(&self.name);
        let all: Vec<_> = self.facts.iter().map(|fact| printable(fact)).collect();
        let room = width.saturating_sub(1);
        let facts = |count: usize| all[..count].join(", ");
        // The facts go one after the other, but the first two are worth more than the name.
        let named = (self.facts.len().min(2)..=self.facts.len())
            .rev()
            .map(|count| format!("{name} {}", facts(count)));
        let bare = (0..=self.facts.len().min(2)).rev().map(facts);
        let mut lines = named.chain(bare);
        let Some(line) = lines.find(|line| length(line) <= room) else { return String::new() };
        let left = room.saturating_sub(length(&line));
        // Brackets and a space.
        let num_cells = left.saturating_sub(3).min(MAX_CELLS);
        match line.strip_prefix(&*name) {
            Some(rest) if num_cells >= MIN_CELLS && self.of > 0 => {
                let full = (self.done.min(self.of) as u128 * num_cells as u128
                    / u128::from(self.of)) as usize;
                let cells = "#".repeat(full) + &"-".repeat(num_cells - full);
                format!("{name} [{cells}]{rest}")
            }
            _ => line,
        }
    }
}

/// A bar on a terminal. It goes away when it is dropped.
#[derive(Debug)]
pub struct Bar {
    stream: &'static Stream,
    progress: Progress,
    drawn: Option<Instant>,
}

impl Bar {
    /// A bar on this stream, if it is a terminal that can redraw a line.
    pub fn new(stream: &'static Stream) -> Option<Self> {
        stream.width_of_bar()?;
        streams::expect_bars();
        Some(Self { stream, progress: Progress::default(), drawn: None })
    }

    /// Shows this progress, unless it was shown a moment ago.
    pub fn show(&mut self, progress: Progress) {
        self.progress = progress;
        if self.drawn.is_none_or(|drawn| drawn.elapsed() >= INTERVAL) {
            self.draw();
        }
    }

    /// Prints a line above the bar.
    pub fn say(&mut self, text: &str) {
        self.stream.line(text);
        if self.drawn.is_some() {
            self.draw();
        }
    }

    /// Erases the bar. It stays away until it is shown again.
    pub fn clear(&mut self) {
        if self.drawn.take().is_some() {
            self.stream.bytes(ERASE.as_bytes().to_vec());
        }
    }

    fn draw(&mut self) {
        // The terminal may have another width each time.
        let Some(width) = self.stream.width_of_bar() else { return };
        let line = self.progress.line(width);
        self.stream.bytes(format!("{ERASE}{line}\r").into_bytes());
        self.drawn = Some(Instant::now());
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.clear();
    }
}

/// The unit of a task's count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CountUnit {
    /// Shown in MB, of 1e6 bytes.
    Bytes,
    /// Named by the bar.
    Items,
}

/// A bar on standard error with a count, the time left and the speed.
#[derive(Debug)]
pub struct TaskBar {
    bar: Option<Bar>,
    name: String,
    unit: CountUnit,
    of: Option<u64>,
    speed: Speed,
}

impl TaskBar {
    /// A bar with this name, drawn on a terminal unless `quiet`.
    pub fn new(name: impl Into<String>, unit: CountUnit, quiet: bool) -> Self {
        let bar = if quiet { None } else { Bar::new(streams::stderr()) };
        Self { bar, name: name.into(), unit, of: None, speed: Speed::default() }
    }

    /// Whether there is a terminal.
    pub fn is_drawn(&self) -> bool {
        self.bar.is_some()
    }

    /// Shows the count, and its total if that is known. Another total begins another count.
    pub fn show(&mut self, done: u64, of: Option<u64>) {
        let Some(bar) = &mut self.bar else { return };
        if self.of != of {
            (self.of, self.speed) = (of, Speed::default());
        }
        self.speed.mark(Instant::now(), done);
        bar.show(Progress {
            name: self.name.clone(),
            done,
            of: of.unwrap_or(0),
            facts: facts(self.unit, done, of, self.speed.per_s()),
        });
    }

    /// Prints a line on standard error, above the bar if there is one.
    pub fn say(&mut self, text: &str) {
        match &mut self.bar {
            Some(bar) => bar.say(text),
            None => streams::stderr().line(text),
        }
    }
}

fn facts(unit: CountUnit, done: u64, of: Option<u64>, per_s: Option<f64>) -> Vec<String> {
    let mb = |bytes: f64| format!("{:.1}", bytes / 1e6);
    let so_far = match (unit, of) {
        (CountUnit::Bytes, Some(of)) => format!("{}/{} MB", mb(done as f64), mb(of as f64)),
        (CountUnit::Bytes, None) => format!("{} MB", mb(done as f64)),
        (CountUnit::Items, Some(of)) => format!("{done}/{of}"),
        (CountUnit::Items, None) => done.to_string(),
    };
    let left = of.zip(per_s).map(|(of, per_s)| time_left(of.saturating_sub(done) as f64 / per_s));
    let speed = per_s.map(|per_s| match unit {
        CountUnit::Bytes => format!("{} MB/s", three_digits(per_s / 1e6)),
        CountUnit::Items => format!("{}/s", three_digits(per_s)),
    });
    [Some(so_far), left, speed].into_iter().flatten().collect()
}

/// How fast a count grows, over the last seconds.
#[derive(Clone, Debug, Default)]
pub struct Speed {
    marks: VecDeque<(Instant, u64)>,
}

impl Speed {
    /// Marks the count at this moment. It begins at the first value.
    pub fn mark(&mut self, now: Instant, count: u64) {
        // Marks close to each other would be many.
        let close = |(at, _): &(Instant, u64)| now.duration_since(*at) < INTERVAL;
        if self.marks.len() > 1 && self.marks.iter().nth_back(1).is_some_and(close) {
            self.marks.pop_back();
        }
        self.marks.push_back((now, count));
        let is_old = |(at, _): &(Instant, u64)| now.duration_since(*at) > WINDOW;
        while self.marks.len() > 2 && self.marks.get(1).is_some_and(is_old) {
            self.marks.pop_front();
        }
    }

    /// How much it grows in a second. `None` if it has not grown.
    pub fn per_s(&self) -> Option<f64> {
        let ((begin, first), (end, last)) = self.marks.front().zip(self.marks.back())?;
        let (count, took) = (last.saturating_sub(*first), end.duration_since(*begin));
        (count > 0 && !took.is_zero()).then(|| count as f64 / took.as_secs_f64())
    }
}

/// A speed with about three digits.
pub fn three_digits(value: f64) -> String {
    match value {
        value if value >= 100.0 => thousands(value.round() as u64),
        value if value >= 10.0 => format!("{value:.1}"),
        value if value >= 1.0 => format!("{value:.2}"),
        value => format!("{value:.3}"),
    }
}

/// The time that is left, such as `1:05 left`.
pub fn time_left(seconds: f64) -> String {
    let seconds = seconds.ceil() as u64;
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    match hours {
        0 => format!("{minutes}:{seconds:02} left"),
        _ => format!("{hours}:{minutes:02}:{seconds:02} left"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn progress() -> Progress {
        let facts = ["12/100", "0:26 left", "3.38 batches/s", "216 samples/s", "loss 2.3012"];
        Progress {
            name: "Epoch 1/3".to_owned(),
            done: 12,
            of: 100,
            facts: facts.map(str::to_owned).into(),
        }
    }

    #[test]
    fn a_wide_terminal_shows_everything_and_a_narrow_one_the_first_facts() {
        let at = |width| progress().line(width);
        let facts = "12/100, 0:26 left, 3.38 batches/s, 216 samples/s, loss 2.3012";
        assert_eq!(at(200), format!("Epoch 1/3 [###---------------------------] {facts}"));
        assert_eq!(at(80), format!("Epoch 1/3 [-----] {facts}"));
        assert_eq!(at(74), format!("Epoch 1/3 {facts}"));
        assert_eq!(
            at(71),
            "Epoch 1/3 [#--------] 12/100, 0:26 left, 3.38 batches/s, 216 samples/s"
        );
        assert_eq!(at(40), "Epoch 1/3 [#--------] 12/100, 0:26 left");
        assert_eq!(at(20), "12/100, 0:26 left");
        assert_eq!(at(12), "12/100");
        assert_eq!(at(3), "");
        for width in 1..250 {
            assert!(length(&at(width)) < width, "{width}: {}", at(width));
            let wide = Progress { name: "\u{65e5}\u{672c} \u{1f680}".repeat(2), ..progress() };
            assert!(length(&wide.line(width)) < width, "{width}: {}", wide.line(width));
        }
    }

    #[test]
    fn a_bar_that_has_just_begun_has_its_name() {
        let begun = Progress { done: 0, facts: vec!["0/100".to_owned()], ..progress() };
        assert_eq!(begun.line(30), "Epoch 1/3 [-----------] 0/100");
        assert_eq!(begun.line(10), "0/100");
    }

    #[test]
    fn the_bar_is_full_when_all_is_done() {
        for (done, of, full) in [(0, 7, 0), (7, 7, 30), (9, 7, 30), (u64::MAX, u64::MAX, 30)] {
            let line = Progress { done, of, ..progress() }.line(200);
            assert_eq!(line.matches('#').count(), full, "{line}");
        }
        assert!(!Progress { of: 0, ..progress() }.line(200).contains('['));
    }

    #[test]
    fn a_task_says_what_it_knows() {
        let mb = |count: u64| count * 1_000_000;
        let of = Some(mb(724));
        let all = facts(CountUnit::Bytes, mb(24), of, Some(35e6));
        assert_eq!(all, ["24.0/724.0 MB", "0:20 left", "35.0 MB/s"]);
        assert_eq!(facts(CountUnit::Bytes, mb(24), of, None), ["24.0/724.0 MB"]);
        assert_eq!(facts(CountUnit::Bytes, mb(24), None, Some(2.5e6)), ["24.0 MB", "2.50 MB/s"]);
        assert_eq!(
            facts(CountUnit::Items, 50, Some(200), Some(30.0)),
            ["50/200", "0:05 left", "30.0/s"]
        );
    }

    #[test]
    fn speeds_are_those_of_the_last_seconds() {
        let begin = Instant::now();
        let at = |ms: u64| begin + Duration::from_millis(ms);
        let mut speed = Speed::default();
        assert_eq!(speed.per_s(), None);
        speed.mark(at(0), 100);
        assert_eq!(speed.per_s(), None);
        speed.mark(at(500), 101);
        assert_eq!(speed.per_s(), Some(2.0));
        // Ten per second, in marks that are close to each other; then a step that takes long.
        (1..=200).for_each(|step| speed.mark(at(500 + 50 * step), 101 + step));
        let steady = speed.per_s().unwrap();
        assert!((19.0..20.5).contains(&steady), "{steady}");
        assert!(speed.marks.len() < 250, "{}", speed.marks.len());
        speed.mark(at(60_000), 302);
        let slow = speed.per_s().unwrap();
        assert!(slow < 0.1, "{slow}");
    }

    #[test]
    fn numbers_are_short() {
        let all = [0.0512, 1.0, 12.345, 123.4, 12_345.6].map(three_digits);
        assert_eq!(all, ["0.051", "1.00", "12.3", "123", "12,346"]);
        let all = [0.0, 0.4, 59.5, 3599.0, 3661.0].map(time_left);
        assert_eq!(all, ["0:00 left", "0:01 left", "1:00 left", "59:59 left", "1:01:01 left"]);
    }
}
