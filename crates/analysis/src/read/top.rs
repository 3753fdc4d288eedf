//! Reads the object around the events of a trace: its rank, its devices and the events, in any order.
//!
//! Input: a stream of JSON. Output: a timeline or a [`Header`]. This module does not read the events itself.

use std::collections::BTreeMap;
use std::io::Read;

use super::events::Reader;
use super::names::MAX_RANKS;
use crate::json::{JsonError, Pull, Value, float, lossy, signed, unsigned};
use crate::limit::{self, Speeds};
use crate::timeline::{CUT_OFF, Timeline};

/// The fact of a merged trace that lists its ranks.
pub(crate) const MERGED_RANKS: &str = "merged_ranks";

/// Reads a trace. The caller sets `source`, and the rank if only the path names it.
pub fn parse(input: impl Read) -> Result<Timeline, JsonError> {
    parse_from(Pull::new(input))
}

/// Like [`parse`], from a parser that has not read anything yet.
pub fn parse_from<R: Read>(mut pull: Pull<R>) -> Result<Timeline, JsonError> {
    let mut reader = Reader::default();
    whole(&mut reader, &mut pull)?;
    Ok(reader.finish())
}

/// Like [`parse`], but keeps the events of a file that ends in the middle of them, and the oddities say so. Profilers leave such
/// files when a job is killed or a disk is full.
pub(super) fn parse_beginning(input: impl Read) -> Result<Timeline, JsonError> {
    let mut reader = Reader::default();
    match whole(&mut reader, &mut Pull::new(input)) {
        Err(err) if err.is_cut_off() && reader.has_events() => {
            reader.odd(CUT_OFF);
        }
        done => done?,
    }
    Ok(reader.finish())
}

fn whole<R: Read>(reader: &mut Reader, pull: &mut Pull<R>) -> Result<(), JsonError> {
    if pull.at_array()? {
        reader.events(pull, usize::MAX)?;
    } else {
        top(reader, pull)?;
    }
    pull.end()
}

/// Passes the parser to `read` at each list of events, until it returns true. Returns whether it has.
pub(crate) fn each_list<R: Read>(
    pull: &mut Pull<R>,
    mut read: impl FnMut(&mut Pull<R>) -> Result<bool, JsonError>,
) -> Result<bool, JsonError> {
    if pull.at_array()? {
        return read(pull);
    }
    pull.begin_object()?;
    while let Some(key) = pull.next_key()? {
        let is_events = key == b"traceEvents";
        if !is_events || !pull.at_array()? {
            pull.skip()?;
        } else if read(pull)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether these are events, or an object around events.
pub(super) fn holds_events<R: Read>(pull: &mut Pull<R>) -> Result<bool, JsonError> {
    let mut wanted: &[u8] = b"traceEvents";
    if pull.at_array()? {
        wanted = b"ph";
        pull.begin_array()?;
        if !pull.next_item()? {
            return Ok(false);
        }
    }
    if !pull.at_object()? {
        return Ok(false);
    }
    pull.begin_object()?;
    while let Some(key) = pull.next_key()? {
        if key == wanted {
            return Ok(true);
        }
        pull.skip()?;
    }
    Ok(false)
}

/// The facts about its run in a trace file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// From `distributedInfo`.
    pub rank: Option<usize>,
    /// From `distributedInfo`.
    pub world_size: Option<usize>,
    /// From `distributedInfo`.
    pub backend: Option<String>,
    /// From `distributedInfo` of paceline's own files: an id that the traces of one profiling window of one
    /// run share.
    pub run_id: Option<String>,
    /// A number in `distributedInfo` that no run can have, in words, such as `a rank of -1`.
    pub absurd: Option<String>,
    /// Whether `paceline trace merge` has merged the traces of ranks into this file.
    pub is_merged: bool,
}

impl Header {
    /// Reads a trace up to its `distributedInfo` or to the mark of a merged trace, or to its end.
    pub(super) fn first<R: Read>(pull: &mut Pull<R>) -> Result<Self, JsonError> {
        let mut header = Self::default();
        match header.find(pull) {
            // A file that is cut off has no more facts. Whether it has events is found when it is read.
            Err(err) if err.is_cut_off() => Ok(header),
            done => done.map(|()| header),
        }
    }

    fn find<R: Read>(&mut self, pull: &mut Pull<R>) -> Result<(), JsonError> {
        if pull.at_array()? {
            return pull.skip();
        }
        pull.begin_object()?;
        while let Some(key) = pull.next_key()? {
            match key {
                b"distributedInfo" => return self.take(pull),
                b"paceline" => {
                    self.is_merged = run_facts(pull)?.contains_key(MERGED_RANKS);
                    if self.is_merged {
                        return Ok(());
                    }
                }
                _ => pull.skip()?,
            }
        }
        Ok(())
    }

    fn take<R: Read>(&mut self, pull: &mut Pull<R>) -> Result<(), JsonError> {
        if !pull.enter_object()? {
            return Ok(());
        }
        while let Some(key) = pull.next_key()? {
            match key {
                b"rank" => self.rank = self.number("a rank", pull.value()?),
                b"world_size" => self.world_size = self.number("a world size", pull.value()?),
                b"backend" => self.backend = pull.value()?.words().map(Into::into),
                b"run_id" => self.run_id = pull.value()?.words().map(Into::into),
                _ => pull.skip()?,
            }
        }
        Ok(())
    }

    /// Reads a rank or a number of ranks. A number that no run can have is noted in `absurd`.
    fn number(&mut self, of: &str, value: Value<'_>) -> Option<usize> {
        let number: Option<usize> =
            value.bytes().and_then(unsigned).and_then(|number| number.try_into().ok());
        let number = number.filter(|&number| number <= MAX_RANKS);
        // Writers without ranks write `null`.
        if number.is_none() && value != Value::Null {
            let words = value.words().unwrap_or_else(|| "nothing that is a number".into());
            self.absurd = Some(format!("{of} of {}", words.chars().take(40).collect::<String>()));
        }
        number
    }
}

/// Reads the object around the events.
fn top<R: Read>(reader: &mut Reader, pull: &mut Pull<R>) -> Result<(), JsonError> {
    pull.begin_object()?;
    while let Some(key) = pull.next_key()? {
        let timeline = &mut reader.timeline;
        match key {
            b"traceEvents" => {
                if pull.at_array()? {
                    reader.events(pull, usize::MAX)?;
                } else {
                    pull.skip()?;
                }
            }
            b"distributedInfo" => {
                let mut header = Header::default();
                header.take(pull)?;
                (timeline.rank, timeline.world_size) = (header.rank, header.world_size);
                timeline.backend = header.backend;
                if let Some(absurd) = header.absurd {
                    timeline.oddities.insert(absurd, 1);
                }
            }
            b"deviceProperties" => devices(timeline, pull)?,
            b"record_shapes" => timeline.has_shapes = pull.value()?.bytes() == Some(b"1"),
            b"baseTimeNanoseconds" => {
                timeline.base_ns = pull.value()?.bytes().and_then(signed);
            }
            b"unrecorded_steps_ms" => {
                let words = pull.value()?.words().unwrap_or_default();
                let numbers = words.split(' ').filter_map(|word| float(word.as_bytes()));
                timeline.unrecorded_ms = numbers.filter(|ms| (1e-3..1e9).contains(ms)).collect();
            }
            b"free_cores" => timeline.free_cores = pull.value()?.bytes().and_then(unsigned),
            b"speeds" => timeline.speeds = pull.value()?.words().and_then(|of| Speeds::parse(&of)),
            b"paceline" => {
                let facts = run_facts(pull)?;
                let speeds = facts.get(limit::SPEEDS).and_then(|of| Speeds::parse(of));
                timeline.speeds = timeline.speeds.or(speeds);
                timeline.run_facts.extend(facts);
            }
            _ => pull.skip()?,
        }
    }
    Ok(())
}

fn devices<R: Read>(timeline: &mut Timeline, pull: &mut Pull<R>) -> Result<(), JsonError> {
    if !pull.at_array()? {
        return pull.skip();
    }
    pull.begin_array()?;
    while pull.next_item()? {
        if !pull.enter_object()? {
            continue;
        }
        while let Some(key) = pull.next_key()? {
            match key {
                b"name" => timeline.devices.extend(pull.value()?.words().map(Into::into)),
                b"totalGlobalMem" => {
                    timeline.device_bytes = pull.value()?.bytes().and_then(unsigned);
                }
                b"computeMajor" => {
                    timeline.compute_major = pull.value()?.bytes().and_then(unsigned);
                }
                _ => pull.skip()?,
            }
        }
    }
    Ok(())
}

fn run_facts<R: Read>(pull: &mut Pull<R>) -> Result<BTreeMap<String, String>, JsonError> {
    let mut facts = BTreeMap::new();
    if !pull.enter_object()? {
        return Ok(facts);
    }
    while let Some(key) = pull.next_key()? {
        let key = lossy(key).into_owned();
        if let Some(words) = pull.value()?.words() {
            facts.insert(key, words.into_owned());
        }
    }
    Ok(facts)
}
