//! Scalars for TensorBoard: an event file that TensorBoard follows while the run continues.
//!
//! The file is a sequence of TFRecords, each a protocol buffer of type `Event` (`tensorboard/compat/proto/event.proto`
//! and `summary.proto` of TensorBoard).

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use paceline_failure::Result;
use paceline_host::disk::Disk;
use prost::Message;

use crate::figures::event as run;
use crate::figures::event::Listener;
use crate::figures::figure::{Figure, Source};
use crate::figures::table::TABLE;
use crate::record::rank_report::RankReport;
use crate::views::appended::Appended;

/// The version in the first record of an event file.
const FILE_VERSION: &str = "brain.Event:2";

#[derive(Clone, PartialEq, Message)]
struct Event {
    /// Seconds since 1970.
    #[prost(double, tag = "1")]
    wall_time: f64,
    #[prost(int64, tag = "2")]
    step: i64,
    // A record has one of these.
    #[prost(string, optional, tag = "3")]
    file_version: Option<String>,
    #[prost(message, optional, tag = "5")]
    summary: Option<Summary>,
}

#[derive(Clone, PartialEq, Message)]
struct Summary {
    #[prost(message, repeated, tag = "1")]
    value: Vec<Value>,
}

#[derive(Clone, PartialEq, Message)]
struct Value {
    #[prost(string, tag = "1")]
    tag: String,
    /// Optional, because otherwise a zero would be left out.
    #[prost(float, optional, tag = "2")]
    simple_value: Option<f32>,
}

/// An open event file.
#[derive(Debug)]
pub struct TensorBoard(Appended);

impl Listener for TensorBoard {
    fn on(&mut self, event: &run::Event) -> Result<()> {
        if let Some((step, _)) = event.position() {
            // The curve of the epochs has a point per step already.
            let has_epoch = matches!(event, run::Event::Step(_));
            let is_shown = |of: &Figure| has_epoch || !matches!(of.source, Source::Position(_));
            self.add(step, |figure| figure.at(event).filter(|_| is_shown(figure)));
        }
        Ok(())
    }

    fn add_to(&self, report: &mut RankReport) {
        report.missing_files.extend(self.0.missing.clone());
    }
}

impl TensorBoard {
    /// Makes `events.out.tfevents.<seconds since 1970>.<host>` in the run folder, by which TensorBoard names the run.
    pub fn create(disk: &Disk, folder: &Path) -> Result<Self> {
        let uname = rustix::system::uname();
        // TensorBoard requires only "tfevents" in the name. A host's name need not be part of a valid file name.
        let host = uname.nodename().to_string_lossy().replace('/', "_");
        let seconds = now().as_secs();
        let path = folder.join(format!("events.out.tfevents.{seconds:010}.{host}"));
        let begin = Event { file_version: Some(FILE_VERSION.to_owned()), ..Event::default() };
        Ok(Self(Appended::create(disk, path, &begin.record())?))
    }

    /// Adds a point to each curve with a value at this step, visible at once.
    fn add(&mut self, step: u64, value: impl Fn(&Figure) -> Option<serde_json::Value>) {
        let point = |figure: &Figure| {
            let (tag, value) = (figure.curve?.to_owned(), value(figure)?);
            // Scalars are always f32. A value that JSON cannot represent becomes NaN.
            let simple_value = Some(value.as_f64().unwrap_or(f64::NAN) as f32);
            Some(Value { tag, simple_value })
        };
        let summary = Summary { value: TABLE.iter().filter_map(point).collect() };
        let event = Event { step: step as i64, summary: Some(summary), ..Event::default() };
        self.0.add(&event.record(), &format!("the curves from step {step} on to"));
    }
}

impl Event {
    /// The event as a record of this moment.
    fn record(self) -> Vec<u8> {
        record(&Self { wall_time: now().as_secs_f64(), ..self }.encode_to_vec())
    }
}

fn now() -> std::time::Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// `data` as a TFRecord: the length in 8 bytes, its checksum in 4, the data, and their checksum in 4, all
/// little-endian.
fn record(data: &[u8]) -> Vec<u8> {
    let len = (data.len() as u64).to_le_bytes();
    let mut record = Vec::with_capacity(data.len() + 16);
    record.extend(len);
    record.extend(masked_crc32c(&len).to_le_bytes());
    record.extend(data);
    record.extend(masked_crc32c(data).to_le_bytes());
    record
}

/// The checksum of TFRecords: CRC-32C rotated right by 15 bits, plus a constant. The masking is for data that contain
/// checksums.
fn masked_crc32c(data: &[u8]) -> u32 {
    crc32c::crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests {
    use super::*;
    use paceline_host::disk::faults::at_each_operation;

    #[test]
    fn a_record_is_what_tensorboard_writes() {
        // The first record of a file that TensorBoard's own writer made, at the time 1234.5.
        let event = Event {
            wall_time: 1234.5,
            file_version: Some(FILE_VERSION.into()),
            ..Event::default()
        };
        let expected = b"\x18\0\0\0\0\0\0\0\xa3\x7fK\"\
            \t\0\0\0\0\0J\x93@\x1a\rbrain.Event:2e\xb8\xd3\xfb";
        assert_eq!(record(&event.encode_to_vec()), expected);
    }

    /// The number of whole records at the start of a file. All bytes after them are part of one record.
    fn whole_records(mut bytes: &[u8]) -> usize {
        let mut count = 0;
        while let Some(len) = bytes.first_chunk().map(|len| u64::from_le_bytes(*len) as usize) {
            let Some(whole) = bytes.get(..len + 16) else { break };
            assert_eq!(record(&whole[12..12 + len]), whole, "a record that is not whole");
            bytes = &bytes[len + 16..];
            count += 1;
        }
        count
    }

    #[test]
    fn after_a_fault_nothing_follows_a_record_that_is_not_whole() {
        let num_operations = at_each_operation(|disk, _| {
            let folder = tempfile::tempdir().unwrap();
            let mut events = match TensorBoard::create(disk, folder.path()) {
                Ok(events) => events,
                Err(error) => {
                    assert!(error.to_string().contains("tfevents"), "{error}");
                    assert!(error.to_string().contains("no space left"), "{error}");
                    return;
                }
            };
            for step in 0..3 {
                events.add(step, |_| Some(1.into()));
            }
            let mut report = RankReport::default();
            events.add_to(&mut report);
            let bytes = std::fs::read(&events.0.path).unwrap();
            let lost = match &report.missing_files[..] {
                [] => 0,
                [what] => {
                    let (_, step) = what.split_once("the curves from step ").expect(what);
                    assert!(what.contains("no space left"), "{what}");
                    3 - step[..1].parse::<usize>().unwrap()
                }
                all => panic!("{all:?}"),
            };
            assert_eq!(lost > 0, disk.has_failed());
            assert_eq!(whole_records(&bytes), 1 + 3 - lost);
        });
        assert_eq!(num_operations, 1 + 4, "the file, and a write for each record");
    }

    #[test]
    fn scalars_are_what_tensorboard_writes() {
        // The second record of the same file: two scalars of step 300, one of them zero.
        let summary = Summary {
            value: [("train/loss", 0.625), ("comm/mb", 0.0)]
                .map(|(tag, value)| Value { tag: tag.into(), simple_value: Some(value) })
                .to_vec(),
        };
        let (wall_time, summary) = (1235.25, Some(summary));
        let event = Event { wall_time, step: 300, summary, ..Event::default() };
        let expected = b"1\0\0\0\0\0\0\0\x9d\x83\x83\xe9\
            \t\0\0\0\0\0M\x93@\x10\xac\x02*#\
            \n\x11\n\ntrain/loss\x15\0\0 ?\
            \n\x0e\n\x07comm/mb\x15\0\0\0\0Y\xd9\xc9\xc7";
        assert_eq!(record(&event.encode_to_vec()), expected);
    }
}
