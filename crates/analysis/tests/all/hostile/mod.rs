//! What must hold for any bytes that the reader gets. The fuzzer checks it too.

use std::io::Read;

use paceline_analysis::json::{Fault, JsonError, Pull};
use paceline_analysis::read::{parse, parse_from};
use paceline_analysis::timeline::Timeline;

/// Reads `bytes` in several ways, which must agree, and must come to an end without a panic.
pub fn check(bytes: &[u8]) {
    let whole = parse(bytes);
    // It must not matter where pieces and the window end. Single bytes are slow, so long inputs come in
    // larger pieces.
    let (piece, window) = (1 + bytes.len() / 1024, 1 + bytes.len() % 7);
    let pieces = parse_from(Pull::with_window(Pieces { rest: bytes, piece }, window));
    match (&whole, &pieces) {
        (Ok(whole), Ok(pieces)) => assert_eq!(said(whole), said(pieces)),
        (Err(whole), Err(pieces)) => assert_eq!(whole.to_string(), pieces.to_string()),
        _ => panic!("{:?} at once, but {:?} in pieces", whole.err(), pieces.err()),
    }
    let skipped = skip_all(Pull::with_window(bytes, window));
    match (&whole, skipped) {
        (_, Err(JsonError { fault: Fault::Input(err), .. })) => {
            panic!("memory does not fail: {err}")
        }
        // Skipping checks less than reading, so whatever can be read can be skipped.
        (Ok(_), Err(err)) => panic!("readable, but not to be skipped: {err}"),
        _ => {}
    }
    let first = bytes.iter().find(|byte| !byte.is_ascii_whitespace());
    let is_structure = matches!(first, Some(b'{' | b'['));
    if is_structure && serde_json::from_slice::<serde_json::Value>(bytes).is_ok() {
        whole.as_ref().expect("what serde_json takes is JSON");
    }
    if let Ok(timeline) = &whole {
        is_sound(timeline);
    }
}

/// Checks what an analysis relies on without checking.
fn is_sound(timeline: &Timeline) {
    let collectives = timeline.collectives.len();
    let (names, lanes) = (timeline.names.iter().count(), timeline.lanes.len());
    let named = |id: u32, lane: u32, dur_ns: i64| {
        assert!((id as usize) < names && (lane as usize) < lanes && dur_ns >= 0);
    };
    for event in &timeline.kernels {
        named(event.name.0, event.lane.0, event.time.dur_ns);
        assert!(event.collective.is_none_or(|at| (at as usize) < collectives));
    }
    for event in &timeline.operators {
        named(event.name.0, event.lane.0, event.time.dur_ns);
        assert!(event.collective.is_none_or(|at| (at as usize) < collectives));
    }
    for event in &timeline.launches {
        named(event.name.0, event.lane.0, event.time.dur_ns);
    }
    for event in &timeline.annotations {
        named(event.name.0, event.lane.0, event.time.dur_ns);
    }
}

/// Everything that a timeline says, as text in a fixed order.
fn said(timeline: &Timeline) -> String {
    let names: Vec<&str> = timeline.names.iter().collect();
    let mut timeline = timeline.clone();
    timeline.names = Default::default();
    format!("{names:?} {timeline:?}")
}

fn skip_all<R: Read>(mut pull: Pull<R>) -> Result<(), JsonError> {
    pull.skip()?;
    pull.end()
}

/// A reader that gives `rest` in reads of at most `piece` bytes.
pub struct Pieces<'a> {
    /// What is still to come.
    pub rest: &'a [u8],
    /// The most bytes per read.
    pub piece: usize,
}

impl Read for Pieces<'_> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let count = self.piece.min(self.rest.len()).min(into.len());
        let (now, rest) = self.rest.split_at(count);
        into[..count].copy_from_slice(now);
        self.rest = rest;
        Ok(count)
    }
}
