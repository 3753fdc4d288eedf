//! One event of a trace file, as far as merging needs to understand it.
//!
//! In goes the JSON of an event; out come what it is, when and where, and the rest as it stands.

use std::io::Read;

use crate::hta::LIMIT_NS;
use crate::json::{JsonError, Pull, Value, lossy, micros_ns};
use crate::kineto::text::Text;

/// Numbers of one rank in the merged file lie this far from those of the next one.
pub(super) const RANK_STRIDE: u64 = 1 << 40;

/// Makes a number that ties events of one rank together distinct from those of other ranks.
pub(super) fn distinct(id: u64, place: usize) -> u64 {
    id % RANK_STRIDE + RANK_STRIDE * place as u64
}

/// Whether a time is one that the analysis takes, too.
fn is_believable(ns: &i64) -> bool {
    ns.unsigned_abs() < LIMIT_NS as u64
}

/// What of an event is taken.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Take {
    /// Its place, and the words of events that name rows.
    Place,
    /// All of it; of the rank at this place.
    All(usize),
}

/// An event. Its texts keep their memory from one event to the next.
#[derive(Default)]
pub(super) struct Event {
    pub(super) phase: u8,
    pub(super) category: Vec<u8>,
    pub(super) name: Vec<u8>,
    pub(super) pid: Vec<u8>,
    pub(super) tid: Vec<u8>,
    pub(super) ts_ns: Option<i64>,
    pub(super) dur_ns: Option<i64>,
    /// As written, without quotes.
    pub(super) id: Vec<u8>,
    /// `s`: how far an instant reaches.
    pub(super) scope: Vec<u8>,
    /// Whether an arrow ends in the event around it, and not in the next one.
    pub(super) binds_enclosing: bool,
    /// `name`, or `labels`, of the arguments.
    pub(super) words: Option<String>,
    /// `args` as JSON, empty without any.
    pub(super) args: Text,
}

impl Event {
    /// Takes the event that comes next.
    pub(super) fn take<R: Read>(
        &mut self,
        pull: &mut Pull<R>,
        take: Take,
    ) -> Result<(), JsonError> {
        self.clear();
        pull.begin_object()?;
        while let Some(key) = pull.next_key()? {
            let text = match key {
                b"ph" => {
                    let value = pull.value()?;
                    self.phase =
                        value.bytes().and_then(|phase| phase.first().copied()).unwrap_or(0);
                    continue;
                }
                b"ts" => {
                    let ts_ns = pull.value()?.bytes().and_then(micros_ns);
                    self.ts_ns = ts_ns.filter(is_believable);
                    continue;
                }
                b"dur" => {
                    self.dur_ns = pull.value()?.bytes().and_then(micros_ns);
                    continue;
                }
                b"bp" => {
                    self.binds_enclosing = pull.value()?.bytes() == Some(b"e");
                    continue;
                }
                b"args" => {
                    match take {
                        Take::All(place) => args(pull, &mut self.args, place)?,
                        // The phase comes before the arguments almost always.
                        Take::Place if matches!(self.phase, b'M' | 0) => {
                            self.words = words(pull)?;
                        }
                        Take::Place => pull.skip()?,
                    }
                    continue;
                }
                b"cat" => &mut self.category,
                b"name" => &mut self.name,
                b"pid" => &mut self.pid,
                b"tid" => &mut self.tid,
                b"id" => &mut self.id,
                b"s" => &mut self.scope,
                _ => {
                    pull.skip()?;
                    continue;
                }
            };
            text.extend_from_slice(pull.value()?.bytes().unwrap_or_default());
        }
        if self.dur_ns.is_some_and(|dur_ns| !is_believable(&dur_ns)) {
            self.ts_ns = None;
        }
        Ok(())
    }

    fn clear(&mut self) {
        let Self { category, name, pid, tid, id, scope, args, .. } = self;
        for text in [category, name, pid, tid, id, scope, &mut args.bytes] {
            text.clear();
        }
        (self.phase, self.ts_ns, self.dur_ns) = (0, None, None);
        (self.binds_enclosing, self.words) = (false, None);
    }

    /// `pid`, a zero byte, `tid`.
    pub(super) fn row(&self, row: &mut Vec<u8>) {
        row.clear();
        row.extend_from_slice(&self.pid);
        row.push(0);
        row.extend_from_slice(&self.tid);
    }

    /// A number for the identity of an arrow: as written if it is a number, else made of its text.
    pub(super) fn flow_id(&self) -> u64 {
        let text = std::str::from_utf8(&self.id).unwrap_or_default();
        let number = text.parse().ok().filter(|&number: &u64| number < RANK_STRIDE);
        // FNV-1a.
        let hash = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
        number.unwrap_or_else(|| self.id.iter().fold(0xcbf2_9ce4_8422_2325, hash) % RANK_STRIDE)
    }
}

/// The `name` or the `labels` of an `args` object.
fn words<R: Read>(pull: &mut Pull<R>) -> Result<Option<String>, JsonError> {
    if !pull.at_object()? {
        pull.skip()?;
        return Ok(None);
    }
    let mut words = None;
    pull.begin_object()?;
    while let Some(key) = pull.next_key()? {
        if matches!(key, b"name" | b"labels") {
            words = pull.value()?.words().map(|words| words.into_owned());
        } else {
            pull.skip()?;
        }
    }
    Ok(words)
}

/// Copies an `args` object, and makes the numbers distinct that tie a launch to its kernel and an operator
/// to what it called. Anything else than an object is no arguments.
fn args<R: Read>(pull: &mut Pull<R>, out: &mut Text, place: usize) -> Result<(), JsonError> {
    out.bytes.clear();
    if !pull.at_object()? {
        return pull.skip();
    }
    pull.begin_object()?;
    let mut open = "{";
    while let Some(key) = pull.next_key()? {
        let is_tie = matches!(key, b"correlation" | b"External id" | b"External Id");
        out.raw(open).string(&lossy(key)).raw(":");
        open = ",";
        if is_tie && !pull.at_object()? && !pull.at_array()? {
            let value = pull.value()?;
            match value.bytes().and_then(crate::json::unsigned) {
                Some(id) => _ = out.int(distinct(id, place)),
                None => scalar(value, out),
            }
        } else {
            copy(pull, out)?;
        }
    }
    if open == "," {
        out.raw("}");
    }
    Ok(())
}

/// Copies a value. The parser limits how deep it can be.
fn copy<R: Read>(pull: &mut Pull<R>, out: &mut Text) -> Result<(), JsonError> {
    if pull.at_object()? {
        pull.begin_object()?;
        out.raw("{");
        let mut separator = "";
        while let Some(key) = pull.next_key()? {
            out.raw(separator).string(&lossy(key)).raw(":");
            separator = ",";
            copy(pull, out)?;
        }
        out.raw("}");
    } else if pull.at_array()? {
        pull.begin_array()?;
        out.raw("[");
        let mut separator = "";
        while pull.next_item()? {
            out.raw(separator);
            separator = ",";
            copy(pull, out)?;
        }
        out.raw("]");
    } else {
        scalar(pull.value()?, out);
    }
    Ok(())
}

fn scalar(value: Value<'_>, out: &mut Text) {
    match value {
        Value::Str(text) => _ = out.string(&lossy(text)),
        Value::Num(number) => out.bytes.extend_from_slice(number),
        Value::Bool(true) => _ = out.raw("true"),
        Value::Bool(false) => _ = out.raw("false"),
        // JSON has no word for numbers that are none.
        Value::Null | Value::NonFinite | Value::Nested => _ = out.raw("null"),
    }
}
