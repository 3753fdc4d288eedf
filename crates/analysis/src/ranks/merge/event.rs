//! Reads one event of a trace file with its arguments, for merging.
//!
//! Input: the JSON of an event. Output: the event, and its arguments as JSON, with numbers that are distinct
//! between ranks. Times that the analysis does not consider plausible are left out.

use std::io::Read;

use crate::hta::LIMIT_NS;
use crate::json::{JsonError, Pull, Value, lossy, unsigned};
use crate::kineto::text::Text;
use crate::read::Event;

/// The distance between the numbers of one rank and those of the next in the merged file.
pub(super) const RANK_STRIDE: u64 = 1 << 40;

/// Makes a number that links events of one rank distinct from the numbers of other ranks. `place` is the
/// index of the rank's file.
pub(super) fn distinct(id: u64, place: usize) -> u64 {
    id % RANK_STRIDE + RANK_STRIDE * place as u64
}

/// An event with its arguments.
#[derive(Default)]
pub(super) struct Taken {
    pub(super) event: Event,
    /// The argument `name` or `labels`.
    pub(super) words: Option<String>,
    /// The arguments as JSON; empty without arguments.
    pub(super) args: Text,
}

impl Taken {
    /// Reads the next event: all of it for the file with index `place`. `None`: only its row, time and phase, and the name in an event
    /// that names a row.
    pub(super) fn take<R: Read>(
        &mut self,
        pull: &mut Pull<R>,
        place: Option<usize>,
    ) -> Result<(), JsonError> {
        let Self { event, words, args } = self;
        args.bytes.clear();
        *words = None;
        event.take(pull, |event, pull| match place {
            Some(place) => copy_args(pull, args, place),
            // The phase comes before the arguments in almost all files.
            None if matches!(event.phase.as_slice(), b"M" | b"") => {
                *words = words_of_args(pull)?;
                Ok(())
            }
            None => pull.skip(),
        })?;
        let is_believable = |ns: i64| ns.unsigned_abs() < LIMIT_NS as u64;
        if event.dur_ns.is_some_and(|dur_ns| !is_believable(dur_ns)) {
            event.ts_ns = None;
        }
        event.ts_ns = event.ts_ns.filter(|ts_ns| is_believable(*ts_ns));
        Ok(())
    }

    /// The first letter of the phase, or 0 without a phase.
    pub(super) fn phase(&self) -> u8 {
        self.event.phase.first().copied().unwrap_or(0)
    }

    /// The id of an arrow as a number: as written if it is a number that is small enough, otherwise a hash of
    /// its text.
    pub(super) fn flow_id(&self) -> u64 {
        let text = std::str::from_utf8(&self.event.id).unwrap_or_default();
        let number = text.parse().ok().filter(|&number: &u64| number < RANK_STRIDE);
        // The hash is FNV-1a.
        let hash = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
        number
            .unwrap_or_else(|| self.event.id.iter().fold(0xcbf2_9ce4_8422_2325, hash) % RANK_STRIDE)
    }
}

/// The `name` or the `labels` of an `args` object.
fn words_of_args<R: Read>(pull: &mut Pull<R>) -> Result<Option<String>, JsonError> {
    if !pull.enter_object()? {
        return Ok(None);
    }
    let mut words = None;
    while let Some(key) = pull.next_key()? {
        if matches!(key, b"name" | b"labels") {
            words = pull.value()?.words().map(|words| words.into_owned());
        } else {
            pull.skip()?;
        }
    }
    Ok(words)
}

/// Copies an `args` object. Numbers that link a launch to its kernel, or an operator to the events that it
/// caused, are made distinct between ranks. Arguments that are not an object are left out.
fn copy_args<R: Read>(pull: &mut Pull<R>, out: &mut Text, place: usize) -> Result<(), JsonError> {
    out.bytes.clear();
    if !pull.enter_object()? {
        return Ok(());
    }
    let mut open = "{";
    while let Some(key) = pull.next_key()? {
        let is_tie = matches!(key, b"correlation" | b"External id" | b"External Id");
        out.raw(open).string(&lossy(key)).raw(":");
        open = ",";
        copy(pull, out, is_tie.then_some(place))?;
    }
    if open == "," {
        out.raw("}");
    }
    Ok(())
}

/// Copies a value. A number becomes distinct between ranks if it is to be, for the file with index `distinct_for`. The parser limits
/// the depth.
fn copy<R: Read>(
    pull: &mut Pull<R>,
    out: &mut Text,
    distinct_for: Option<usize>,
) -> Result<(), JsonError> {
    if pull.at_object()? {
        pull.begin_object()?;
        out.raw("{");
        let mut separator = "";
        while let Some(key) = pull.next_key()? {
            out.raw(separator).string(&lossy(key)).raw(":");
            separator = ",";
            copy(pull, out, None)?;
        }
        out.raw("}");
    } else if pull.at_array()? {
        pull.begin_array()?;
        out.raw("[");
        let mut separator = "";
        while pull.next_item()? {
            out.raw(separator);
            separator = ",";
            copy(pull, out, None)?;
        }
        out.raw("]");
    } else {
        let value = pull.value()?;
        match (value, distinct_for.zip(value.bytes().and_then(unsigned))) {
            (_, Some((place, id))) => _ = out.int(distinct(id, place)),
            (Value::Str(text), _) => _ = out.string(&lossy(text)),
            (Value::Num(number), _) => out.bytes.extend_from_slice(number),
            (Value::Bool(is_so), _) => _ = out.raw(if is_so { "true" } else { "false" }),
            // JSON cannot express `NaN` and infinities.
            (Value::Null | Value::NonFinite | Value::Nested, _) => _ = out.raw("null"),
        }
    }
    Ok(())
}
