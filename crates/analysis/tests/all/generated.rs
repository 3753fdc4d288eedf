//! Property tests on random traces: the reader returns what was written, and reading a damaged file ends
//! without a panic.

use crate::hostile;

use std::fmt::Write;
use std::fs;
use std::path::Path;

use paceline_analysis::read::parse;
use proptest::prelude::*;
use proptest::sample::{Index, select};

/// An event of a trace, and how it is written.
#[derive(Clone, Debug)]
struct Event {
    category: &'static str,
    name: String,
    row: (i32, u8),
    start_ns: i64,
    dur_ns: i64,
    stream: i64,
    correlation: u64,
    style: Style,
}

/// Ways of writing the same thing.
#[derive(Clone, Copy, Debug)]
struct Style {
    /// `args` before everything else.
    args_first: bool,
    /// Numbers as strings.
    quoted: bool,
    /// A new line for each entry.
    spread: bool,
    /// A begin and an end event instead of one complete event.
    pair: bool,
    /// Nanoseconds with an exponent instead of microseconds with a fraction.
    exponent: bool,
}

fn event() -> impl Strategy<Value = Event> {
    let style = any::<[bool; 5]>().prop_map(|[args_first, quoted, spread, pair, exponent]| Style {
        args_first,
        quoted,
        spread,
        pair,
        exponent,
    });
    let category =
        select(vec!["kernel", "cuda_runtime", "cpu_op", "user_annotation", "python_function"]);
    // Dates in microseconds have sixteen digits before the point.
    let time = (-2_000_000_000_000_000_000i64..2_000_000_000_000_000_000, 0i64..1_000_000_000_000);
    (
        category,
        any::<String>(),
        (any::<i32>(), any::<u8>()),
        time,
        any::<i64>(),
        any::<u64>(),
        style,
    )
        .prop_map(|(category, name, row, (start_ns, dur_ns), stream, correlation, style)| {
            Event { category, name, row, start_ns, dur_ns, stream, correlation, style }
        })
}

impl Event {
    fn number(&self, text: &str) -> String {
        if self.style.quoted { format!("\"{text}\"") } else { text.to_owned() }
    }

    fn micros(&self, ns: i64) -> String {
        if self.style.exponent {
            return self.number(&format!("{ns}e-3"));
        }
        let sign = if ns < 0 { "-" } else { "" };
        let ns = ns.unsigned_abs();
        self.number(&format!("{sign}{}.{:03}", ns / 1000, ns % 1000))
    }

    fn object(&self, entries: &[(&str, String)]) -> String {
        let (comma, colon) = if self.style.spread { (",\n    ", " : ") } else { (",", ":") };
        let entries: Vec<String> =
            entries.iter().map(|(key, value)| format!("\"{key}\"{colon}{value}")).collect();
        format!("{{{}}}", entries.join(comma))
    }

    fn json(&self) -> String {
        let args = self.object(&[
            ("External id", "1".into()),
            ("Call stack", "\"a \\\"b\\\" {[\\\\\"".into()),
            ("stream", self.number(&self.stream.to_string())),
            ("Input Dims", "[[1, 2], [], [[3]]]".into()),
            ("correlation", self.number(&self.correlation.to_string())),
        ]);
        let place = [("pid", self.row.0.to_string()), ("tid", format!("\"{}\"", self.row.1))];
        let mut entries = vec![
            ("ph", if self.style.pair { "\"B\"" } else { "\"X\"" }.to_owned()),
            ("cat", format!("\"{}\"", self.category)),
            ("name", serde_json::to_string(&self.name).expect("text")),
            ("ts", self.micros(self.start_ns)),
        ];
        entries.extend(place.clone());
        let at = if self.style.args_first { 0 } else { entries.len() };
        entries.insert(at, ("args", args));
        if self.style.pair {
            let mut end =
                vec![("ph", "\"E\"".to_owned()), ("ts", self.micros(self.start_ns + self.dur_ns))];
            end.extend(place);
            return format!("{}, {}", self.object(&entries), self.object(&end));
        }
        entries.push(("dur", self.micros(self.dur_ns)));
        self.object(&entries)
    }
}

/// Events as the reader returns them, by kind, as text.
type Said = [Vec<String>; 4];

fn written(events: &[Event]) -> Said {
    let mut said = Said::default();
    for event in events {
        let (pid, tid) = event.row;
        let Event { name, start_ns, dur_ns, .. } = event;
        let mut words = format!("{name} {pid} {tid} {start_ns} {dur_ns}");
        let kind = match event.category {
            "kernel" => {
                let _ = write!(words, " {} {:?}", event.stream, Some(event.correlation));
                0
            }
            "cuda_runtime" => {
                let _ = write!(words, " {:?}", Some(event.correlation));
                1
            }
            "cpu_op" => 2,
            "user_annotation" => 3,
            _ => continue,
        };
        said[kind].push(words);
    }
    said
}

fn read(json: &str) -> Said {
    let trace = parse(json.as_bytes()).unwrap_or_else(|err| panic!("{err} in {json}"));
    assert!(trace.oddities.is_empty(), "{:?}", trace.oddities);
    let words = |name,
                 lane: paceline_analysis::timeline::TrackId,
                 time: paceline_analysis::timeline::TimeRange| {
        let lane = &trace.lanes[lane.0 as usize];
        format!(
            "{} {} {} {} {}",
            trace.names.text(name),
            lane.pid,
            lane.tid,
            time.start_ns,
            time.dur_ns
        )
    };
    [
        trace
            .kernels
            .iter()
            .map(|k| format!("{} {} {:?}", words(k.name, k.lane, k.time), k.stream, k.correlation))
            .collect(),
        trace
            .launches
            .iter()
            .map(|l| format!("{} {:?}", words(l.name, l.lane, l.time), l.correlation))
            .collect(),
        trace.operators.iter().map(|o| words(o.name, o.lane, o.time)).collect(),
        trace.annotations.iter().map(|a| words(a.name, a.lane, a.time)).collect(),
    ]
}

/// A change to a file.
#[derive(Clone, Debug)]
enum Change {
    Set(Index, u8),
    Insert(Index, Vec<u8>),
    Remove(Index, usize),
    Repeat(Index, usize, usize),
    Cut(Index),
}

fn change() -> impl Strategy<Value = Change> {
    let words = select(vec![
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        "\"",
        "\\",
        "\\u",
        "-",
        "e9",
        "NaN",
        "null",
        "9999999999",
    ]);
    prop_oneof![
        (any::<Index>(), any::<u8>()).prop_map(|(at, byte)| Change::Set(at, byte)),
        (any::<Index>(), words).prop_map(|(at, word)| Change::Insert(at, word.into())),
        (any::<Index>(), 1usize..40).prop_map(|(at, count)| Change::Remove(at, count)),
        (any::<Index>(), 1usize..40, 1usize..200)
            .prop_map(|(at, count, times)| Change::Repeat(at, count, times)),
        any::<Index>().prop_map(Change::Cut),
    ]
}

fn changed(mut bytes: Vec<u8>, changes: &[Change]) -> Vec<u8> {
    for change in changes {
        if bytes.is_empty() {
            break;
        }
        let at = |index: &Index| index.index(bytes.len());
        match change {
            Change::Set(index, byte) => {
                let at = at(index);
                bytes[at] = *byte;
            }
            Change::Insert(index, word) => {
                let at = at(index);
                bytes.splice(at..at, word.iter().copied());
            }
            Change::Remove(index, count) => {
                let at = at(index);
                bytes.drain(at..(at + count).min(bytes.len()));
            }
            Change::Repeat(index, count, times) => {
                let at = at(index);
                let end = (at + count).min(bytes.len());
                let again = bytes[at..end].repeat(*times);
                bytes.splice(end..end, again);
            }
            Change::Cut(index) => bytes.truncate(at(index)),
        }
    }
    bytes
}

fn kept() -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/traces");
    let mut paths: Vec<_> = fs::read_dir(folder)
        .expect("the corpus")
        .map(|entry| entry.expect("an entry").path())
        .collect();
    paths.sort();
    paths.iter().map(|path| fs::read(path).expect("a file")).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn what_was_written_is_read(events in prop::collection::vec(event(), 0..20), is_bare in any::<bool>()) {
        let list: Vec<String> = events.iter().map(Event::json).collect();
        let list = format!("[{}]", list.join(",\n  "));
        let json = if is_bare { list } else { format!("{{\"schemaVersion\": 1, \"traceEvents\": {list}}}") };
        prop_assert_eq!(read(&json), written(&events));
        hostile::check(json.as_bytes());
    }

    #[test]
    fn changed_traces_are_read_to_an_end(
        base in select(kept()),
        changes in prop::collection::vec(change(), 1..8),
    ) {
        hostile::check(&changed(base, &changes));
    }

    #[test]
    fn any_bytes_are_read_to_an_end(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        hostile::check(&bytes);
    }
}
