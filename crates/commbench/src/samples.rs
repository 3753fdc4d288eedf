//! Made-up measurements for the tests of this module.

use paceline_launch::device::Device;

use super::result::{BenchReport, Row, Skipped, Timing, bus_factor};
use super::series::Measured;

/// An all-reduce of 4-byte elements that took `us` microseconds, out of place and in place.
pub fn row(nproc: usize, bytes: u64, us: f64) -> Row {
    let factor = bus_factor("all_reduce", nproc).unwrap();
    let timing = Timing::new(bytes, factor, (us, 1.5 * us, 2.0 * us), Some(0));
    Row {
        transport: "shm".to_owned(),
        algorithm: "units".to_owned(),
        nproc,
        op: "all_reduce".to_owned(),
        bytes,
        count: bytes / 4,
        dtype: "f32".to_owned(),
        redop: Some("sum".to_owned()),
        root: None,
        out_of_place: timing.clone(),
        in_place: Some(timing),
        predicted_us: None,
        memory_fraction: None,
    }
}

/// A report of `rows`.
pub fn report(rows: Vec<Row>) -> BenchReport {
    BenchReport {
        machine: "a machine, \"quoted\"".to_owned(),
        date: "2026-01-02 03:04:05".to_owned(),
        command: ["paceline", "bench", "all_reduce", "-J", "a run.json"].map(str::to_owned).into(),
        link: None,
        device: Device::Cpu,
        memory_bandwidth_gb_s: Some(12.5),
        rows,
        theirs: Vec::new(),
        skipped: vec![Skipped {
            transport: "shm".to_owned(),
            nproc: 6,
            bytes: Some(1_024_000_000),
            reason: "6 ranks need 12.3 GB, 8.0 GB may be used".to_owned(),
        }],
    }
}

/// A time of another program.
pub fn time(name: &str, nproc: usize, bytes: u64, time_us: f64) -> Measured {
    Measured { name: name.to_owned(), algorithm: None, nproc, op: None, bytes, time_us }
}
