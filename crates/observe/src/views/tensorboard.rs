//! Scalars for TensorBoard: an event file that TensorBoard follows while the run continues.
//!
//! The file is a sequence of TFRecords, each a protocol buffer of type `Event` (`tensorboard/compat/proto/event.proto`
//! and `summary.proto` of TensorBoard).

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use paceline_failure::Result;
use paceline_host::disk::Disk;

use crate::figures::event as run;
use crate::figures::event::Listener;
use crate::figures::figure::{Figure, Source};
use crate::figures::table::TABLE;
use crate::record::rank_report::RankReport;
use crate::views::appended::Appended;

/// The version in the first record of an event file.
const VERSION: &str = "brain.Event:2";

// Keys: a field's number, and how its value is stored (0: as a varint, 1: in 8 bytes, 2: after its length, 5: in 4 bytes).
const WALL_TIME: u8 = (1 << 3) | 1;
const STEP: u8 = 2 << 3;
const FILE_VERSION: u8 = (3 << 3) | 2;
const SUMMARY: u8 = (5 << 3) | 2;
const VALUE: u8 = (1 << 3) | 2;
const TAG: u8 = (1 << 3) | 2;
const SIMPLE_VALUE: u8 = (2 << 3) | 5;

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
        let seconds = now() as u64;
        let path = folder.join(format!("events.out.tfevents.{seconds:010}.{host}"));
        let begin = event(now(), 0, FILE_VERSION, VERSION.as_bytes());
        Ok(Self(Appended::create(disk, path, &record(&begin))?))
    }

    /// Adds a point to each curve with a value at this step, visible at once.
    fn add(&mut self, step: u64, value: impl Fn(&Figure) -> Option<serde_json::Value>) {
        let point = |figure: &Figure| {
            let (tag, value) = (figure.curve?, value(figure)?);
            // Scalars are always f32. A value that JSON cannot represent becomes NaN.
            Some((tag, value.as_f64().unwrap_or(f64::NAN) as f32))
        };
        let summary = summary(TABLE.iter().filter_map(point));
        let record = record(&event(now(), step, SUMMARY, &summary));
        self.0.add(&record, &format!("the curves from step {step} on to"));
    }
}

/// An `Event` with a file version or a summary, `wall_time` seconds after 1970 began.
fn event(wall_time: f64, step: u64, key: u8, content: &[u8]) -> Vec<u8> {
    let time = [&[WALL_TIME][..], &wall_time.to_le_bytes()].concat();
    let step = if step > 0 { [vec![STEP], varint(step)].concat() } else { Vec::new() };
    [time, step, field(key, content)].concat()
}

/// A `Summary` with these values.
fn summary<'a>(values: impl Iterator<Item = (&'a str, f32)>) -> Vec<u8> {
    let value = |(tag, value): (&str, f32)| {
        let value = [&[SIMPLE_VALUE][..], &value.to_le_bytes()].concat();
        field(VALUE, &[field(TAG, tag.as_bytes()), value].concat())
    };
    values.flat_map(value).collect()
}

fn field(key: u8, content: &[u8]) -> Vec<u8> {
    [&[key][..], &varint(content.len() as u64), content].concat()
}

/// A number by 7 bits in a byte, the lowest first. All bytes but the last one have the highest bit set.
fn varint(number: u64) -> Vec<u8> {
    match number {
        0..0x80 => vec![number as u8],
        _ => [vec![number as u8 | 0x80], varint(number >> 7)].concat(),
    }
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

/// `data` as a TFRecord: the length in 8 bytes, its checksum in 4, the data, and their checksum in 4, all
/// little-endian.
fn record(data: &[u8]) -> Vec<u8> {
    let len = (data.len() as u64).to_le_bytes();
    [&len[..], &masked_crc32c(&len), data, &masked_crc32c(data)].concat()
}

/// The checksum of TFRecords: CRC-32C rotated right by 15 bits, plus a constant. The masking is for data that contain
/// checksums.
fn masked_crc32c(data: &[u8]) -> [u8; 4] {
    crc32c::crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use paceline_host::disk::faults::at_each_operation;

    #[test]
    fn a_record_is_what_tensorboard_writes() {
        // The first record of a file that TensorBoard's own writer made, at the time 1234.5.
        let event = event(1234.5, 0, FILE_VERSION, VERSION.as_bytes());
        let expected = b"\x18\0\0\0\0\0\0\0\xa3\x7fK\"\
            \t\0\0\0\0\0J\x93@\x1a\rbrain.Event:2e\xb8\xd3\xfb";
        assert_eq!(record(&event), expected);
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
        let summary = summary([("train/loss", 0.625), ("comm/mb", 0.0)].into_iter());
        let event = event(1235.25, 300, SUMMARY, &summary);
        let expected = b"1\0\0\0\0\0\0\0\x9d\x83\x83\xe9\
            \t\0\0\0\0\0M\x93@\x10\xac\x02*#\
            \n\x11\n\ntrain/loss\x15\0\0 ?\
            \n\x0e\n\x07comm/mb\x15\0\0\0\0Y\xd9\xc9\xc7";
        assert_eq!(record(&event), expected);
    }
}
