//! `paceline train --tensorboard`: the event file, read back byte by byte.

use std::fs;
use std::path::{Path, PathBuf};

use crate::common::{Sandbox, TINY, TINY_MLP, column, metrics};
use serde_json::Value;

/// The scalars of one step in an event file: names and values.
type Scalars = Vec<(String, f32)>;

/// CRC-32C (polynomial 0x1edc6f41, reflected), bit by bit, and masked as TFRecords have it.
fn masked_crc32c(data: &[u8]) -> u32 {
    let mut crc = u32::MAX;
    for byte in data {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
        }
    }
    let crc = !crc;
    crc.rotate_right(15).wrapping_add(0xa282_ead8)
}

/// Takes `N` bytes from the front.
fn take<const N: usize>(data: &mut &[u8]) -> [u8; N] {
    let (bytes, rest) = data.split_first_chunk().expect("the file ends within a record");
    *data = rest;
    *bytes
}

/// The records of an event file. Checks both checksums of each.
fn records(mut data: &[u8]) -> Vec<Vec<u8>> {
    let mut records = Vec::new();
    while !data.is_empty() {
        let len = take::<8>(&mut data);
        assert_eq!(u32::from_le_bytes(take(&mut data)), masked_crc32c(&len));
        let (record, rest) = data.split_at(u64::from_le_bytes(len) as usize);
        data = rest;
        assert_eq!(u32::from_le_bytes(take(&mut data)), masked_crc32c(record));
        records.push(record.to_vec());
    }
    records
}

/// The fields of a protocol buffer message: the number and the wire type in one value, as encoded, and
/// the bytes.
fn fields(mut data: &[u8]) -> Vec<(u64, Vec<u8>)> {
    fn varint(data: &mut &[u8]) -> u64 {
        let mut value = 0;
        for shift in (0..).step_by(7) {
            let [byte] = take::<1>(data);
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                break;
            }
        }
        value
    }
    let mut fields = Vec::new();
    while !data.is_empty() {
        let key = varint(&mut data);
        let value = match key & 7 {
            0 => varint(&mut data).to_le_bytes().to_vec(),
            1 => take::<8>(&mut data).to_vec(),
            2 => {
                let len = varint(&mut data) as usize;
                let (value, rest) = data.split_at(len);
                data = rest;
                value.to_vec()
            }
            5 => take::<4>(&mut data).to_vec(),
            kind => panic!("field of kind {kind}"),
        };
        fields.push((key, value));
    }
    fields
}

/// The field of an `Event` with this key, which is number * 8 + wire type.
fn field(event: &[u8], key: u64) -> Option<Vec<u8>> {
    fields(event).into_iter().find(|(found, _)| *found == key).map(|(_, value)| value)
}

/// The event files below a folder. TensorBoard takes every file with this word in its name.
fn event_files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(event_files(&path));
        } else if path.file_name().unwrap().to_str().unwrap().contains("tfevents") {
            found.push(path);
        }
    }
    found.sort();
    found
}

/// All steps of the only event file of a run folder, in the file's order.
fn events(folder: &Path) -> Vec<(u64, Scalars)> {
    let paths = event_files(folder);
    assert_eq!(paths.len(), 1, "one file, of rank 0: {paths:?}");
    let path = &paths[0];
    let name = path.file_name().unwrap().to_str().unwrap();
    let rest = name.strip_prefix("events.out.tfevents.").unwrap();
    let (seconds, host) = rest.split_once('.').unwrap();
    assert!(seconds.len() == 10 && seconds.bytes().all(|b| b.is_ascii_digit()), "{name}");
    assert!(!host.is_empty(), "{name}");

    let records = records(&fs::read(path).unwrap());
    assert_eq!(field(&records[0], 3 << 3 | 2).unwrap(), b"brain.Event:2");
    let scalar = |value: Vec<u8>| {
        let tag = String::from_utf8(field(&value, 1 << 3 | 2).unwrap()).unwrap();
        let number = field(&value, 2 << 3 | 5).unwrap_or_else(|| panic!("{tag} has no value"));
        (tag, f32::from_le_bytes(number.try_into().unwrap()))
    };
    let event = |record: &Vec<u8>| {
        let wall_time = f64::from_le_bytes(field(record, 8 | 1).unwrap().try_into().unwrap());
        let begin: f64 = seconds.parse().unwrap();
        assert!((begin..begin + 3600.0).contains(&wall_time), "{wall_time} after {begin}");
        let step = u64::from_le_bytes(field(record, 2 << 3).unwrap().try_into().unwrap());
        let summary = field(record, 5 << 3 | 2).unwrap();
        (step, fields(&summary).into_iter().map(|(_, value)| scalar(value)).collect())
    };
    records[1..].iter().map(event).collect()
}

/// The values of one curve.
fn curve(events: &[(u64, Scalars)], tag: &str) -> Vec<(u64, f32)> {
    let of = |(step, scalars): &(u64, Scalars)| {
        scalars.iter().find(|(name, _)| name == tag).map(|(_, value)| (*step, *value))
    };
    events.iter().filter_map(of).collect()
}

#[test]
fn the_event_file_has_what_the_metrics_have() {
    let sandbox = Sandbox::new();
    let flags = format!(
        "{TINY} --nproc 2 --tensorboard --evaluate --eval-every 2 --clip-grad-norm 1 --lr-schedule linear \
         --save saved"
    );
    let run = sandbox.train(&flags).ok();
    let folder = sandbox.run_folder();
    let events = events(&folder);
    let lines = metrics(&folder);

    let steps: Vec<_> = lines.iter().filter(|line| line["loss"].is_number()).collect();
    assert!(steps.len() >= 3, "too few steps to tell anything");
    let same = [
        ("train/loss", "loss"),
        ("train/learning_rate", "lr"),
        ("train/grad_norm", "grad_norm"),
        ("train/epoch", "epoch"),
        ("speed/step_ms", "step_ms"),
        ("speed/data_ms", "data_ms"),
        ("anatomy/forward_ms", "forward_ms"),
        ("anatomy/backward_ms", "backward_ms"),
        ("anatomy/sync_ms", "sync_ms"),
        ("anatomy/optimizer_ms", "optimizer_ms"),
        ("anatomy/exposed_ms", "comm_exposed_ms"),
        ("communication/hidden_ms", "comm_hidden_ms"),
        ("communication/wait_ms", "comm_wait_ms"),
        ("communication/move_ms", "comm_move_ms"),
        ("communication/operations", "comm_ops"),
        ("communication/mb", "comm_mb"),
    ];
    for (tag, key) in same {
        let expected: Vec<_> = steps
            .iter()
            .map(|line| (line["step"].as_u64().unwrap(), line[key].as_f64().unwrap() as f32))
            .collect();
        assert_eq!(curve(&events, tag), expected, "{tag}");
    }
    let quotients = |above: &str, below: &str| -> Vec<_> {
        let number = |line: &Value, key: &str| line[key].as_f64().unwrap();
        let quotient = |line: &&Value| number(line, above) / number(line, below);
        steps.iter().map(|line| (line["step"].as_u64().unwrap(), quotient(line) as f32)).collect()
    };
    assert_eq!(curve(&events, "train/accuracy"), quotients("correct", "samples"));
    let speed = curve(&events, "speed/samples_per_s");
    for ((step, speed), line) in speed.iter().zip(&steps) {
        let number = |key: &str| line[key].as_f64().unwrap();
        let wall_ms = number("step_ms") + number("data_ms");
        let expected = number("samples") / wall_ms * 1e3;
        assert!((f64::from(*speed) / expected - 1.0).abs() < 1e-6, "{speed} {expected}");
        assert_eq!(*step, line["step"].as_u64().unwrap());
    }
    assert!(!curve(&events, "checkpoint/save_s").is_empty());
    assert!(curve(&events, "communication/mb").iter().all(|(_, mb)| *mb > 0.0));

    // The evaluations during training, and the one after it. The last step has only one, although both
    // fall on it.
    let evaluations: Vec<_> = lines
        .iter()
        .filter(|line| line["eval_loss"].is_number())
        .map(|line| (line["step"].as_u64().unwrap(), line["eval_loss"].as_f64().unwrap() as f32))
        .collect();
    assert!(!evaluations.is_empty(), "{lines:?}");
    let last = curve(&events, "evaluation/loss").last().copied().unwrap();
    assert_eq!(last.0, steps.len() as u64);
    let said = run.line("Evaluation loss: ").split_once(',').unwrap().0;
    assert_eq!(format!("{:.4}", last.1), said);
    // The metrics have twelve digits, an event an f32.
    let digits = |of: Vec<(u64, f32)>| {
        of.into_iter().map(|(step, loss)| (step, format!("{loss:.5}"))).collect::<Vec<_>>()
    };
    assert_eq!(digits(curve(&events, "evaluation/loss")), digits(evaluations.clone()));
    assert_eq!(curve(&events, "evaluation/accuracy").len(), evaluations.len());
}

#[test]
fn what_a_run_has_not_is_no_curve() {
    let sandbox = Sandbox::new();
    sandbox.train(&format!("{TINY_MLP} --nproc 1 --tensorboard")).ok();
    let folder = sandbox.run_folder();
    let events = events(&folder);
    assert_eq!(events.len(), column(&folder, "loss").len());
    for absent in ["train/accuracy", "train/grad_norm", "evaluation/loss", "checkpoint/save_s"] {
        assert_eq!(curve(&events, absent), [], "{absent}");
    }
}

#[test]
fn tensorboard_names_each_run_like_its_folder() {
    let sandbox = Sandbox::new();
    for strategy in ["ddp", "simple_ddp"] {
        sandbox.train(&format!("{TINY_MLP} --nproc 1 --tensorboard --strategy {strategy}")).ok();
    }
    let logdir = sandbox.path("runs");
    let mut folders: Vec<_> =
        fs::read_dir(&logdir).unwrap().map(|entry| entry.unwrap().path()).collect();
    folders.sort();
    assert_eq!(folders.len(), 2, "{folders:?}");
    // TensorBoard's name of a run is the folder of its event file, relative to --logdir.
    let of_events: Vec<_> =
        event_files(&logdir).iter().map(|file| file.parent().unwrap().to_owned()).collect();
    assert_eq!(of_events, folders);
}
