//! The results of a benchmark, and the formulas that turn times into bandwidths.
//!
//! GB/s are 1e9 bytes per second, GiB/s are 2^30.

use paceline_launch::device::Device;
use serde::{Deserialize, Serialize};

use super::series::Measured;

/// The times of one operation with one size, each of the slowest rank. Names in JSON are those of nccl-tests.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
pub struct Timing {
    /// Median in microseconds; all bandwidths are computed from it.
    #[serde(rename = "time")]
    pub median_us: f64,
    /// 99th percentile in microseconds.
    pub p99_us: f64,
    /// Longest in microseconds.
    pub max_us: f64,
    /// Size over time, in GB/s.
    pub alg_bw: f64,
    /// `alg_bw` times [`bus_factor`], in GB/s: the load of each link, for every operation.
    pub bus_bw: f64,
    /// Elements with a wrong result; `None` if the result was not checked.
    #[serde(rename = "nwrong")]
    pub wrong: Option<u64>,
    /// The published "effective bandwidth" in GiB/s: `2 S / t`, whatever the number of ranks. With many ranks it approaches the
    /// bus bandwidth of an all-reduce.
    pub effective_bw_gib_s: f64,
    /// The time of each iteration in microseconds, with `-I 1`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub each_us: Option<Vec<f64>>,
}

impl Timing {
    /// The timing of an operation on `bytes` whose [`bus_factor`] is `factor`.
    pub fn new(
        bytes: u64,
        factor: f64,
        (median_us, p99_us, max_us): (f64, f64, f64),
        wrong: Option<u64>,
    ) -> Self {
        const GIB: f64 = (1_u64 << 30) as f64;
        let alg_bw = alg_bandwidth_gb_s(bytes, median_us);
        let effective_bw_gib_s = 2.0 * bytes as f64 / (median_us * 1e-6) / GIB;
        let bus_bw = alg_bw * factor;
        Self { median_us, p99_us, max_us, alg_bw, bus_bw, wrong, effective_bw_gib_s, each_us: None }
    }
}

/// One line of the table: an operation on one size, with one transport and number of ranks.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
pub struct Row {
    /// How the ranks reached each other.
    pub transport: String,
    /// How the transport carried the operation out.
    pub algorithm: String,
    /// Number of ranks.
    pub nproc: usize,
    /// The operation, such as `all_reduce`.
    pub op: String,
    /// The size S in the formulas. For operations that gather or scatter, the size of the whole array.
    #[serde(rename = "size")]
    pub bytes: u64,
    /// Elements as nccl-tests counts them: of a share if the operation has shares, otherwise of the whole message.
    pub count: u64,
    /// Paceline's name of the element type, such as `f32`.
    #[serde(rename = "type")]
    pub dtype: String,
    /// How elements are combined, for operations that do.
    pub redop: Option<String>,
    /// The root, for operations that have one.
    pub root: Option<usize>,
    /// The timing with separate input and output.
    pub out_of_place: Timing,
    /// The timing with the output in the same buffer as the input.
    pub in_place: Option<Timing>,
    /// The time on the emulated link by the cost model, in microseconds.
    pub predicted_us: Option<f64>,
    /// Bytes that all ranks read and write per time, as a fraction of the machine's memory bandwidth; above 1 if the data stay
    /// in the caches.
    pub memory_fraction: Option<f64>,
}

impl Row {
    /// The timing where only one is shown: in place if measured, as in training and in other programs.
    pub fn timing(&self) -> &Timing {
        self.in_place.as_ref().unwrap_or(&self.out_of_place)
    }

    /// The timings that were taken.
    pub fn timings(&self) -> impl Iterator<Item = &Timing> {
        std::iter::once(&self.out_of_place).chain(&self.in_place)
    }
}

/// A configuration that was not measured.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq)]
pub struct Skipped {
    /// How the ranks would have reached each other.
    pub transport: String,
    /// Number of ranks.
    pub nproc: usize,
    /// The size; `None` if no size was measured.
    pub bytes: Option<u64>,
    /// The reason.
    pub reason: String,
}

/// The outcome of a benchmark.
#[derive(Clone, Debug, PartialEq)]
pub struct BenchReport {
    /// The machine, in words.
    pub machine: String,
    /// The date and time of the start.
    pub date: String,
    /// The words of the command line.
    pub command: Vec<String>,
    /// The emulated link, for which the predictions are.
    pub link: Option<String>,
    /// Where the buffers were.
    pub device: Device,
    /// The bandwidth of this machine's memory in GB/s: the most that any configuration measured.
    pub memory_bandwidth_gb_s: Option<f64>,
    /// The measured rows.
    pub rows: Vec<Row>,
    /// The times of another program that was measured in turns with these rows.
    pub theirs: Vec<Measured>,
    /// The configurations that were not measured.
    pub skipped: Vec<Skipped>,
}

/// Says whether [`Row::timing`] is in place, for the headings of tables and charts.
pub fn place(rows: &[Row]) -> &'static str {
    let num_in_place = rows.iter().filter(|row| row.in_place.is_some()).count();
    match num_in_place {
        0 => "out of place",
        all if all == rows.len() => "in place",
        _ => "in place where possible",
    }
}

/// The row's name in tables and charts: the transport, with the algorithm if `rows` have several of that transport.
pub fn program_name(row: &Row, rows: &[Row]) -> String {
    let same = rows.iter().filter(|other| other.transport == row.transport);
    if same.into_iter().any(|other| other.algorithm != row.algorithm) {
        format!("{} {}", row.transport, row.algorithm)
    } else {
        row.transport.clone()
    }
}

/// Size over time in GB/s: `S / t`.
pub fn alg_bandwidth_gb_s(bytes: u64, time_us: f64) -> f64 {
    bytes as f64 / time_us / 1e3
}

/// The factor that turns the algorithm's bandwidth into the bus bandwidth, for `n` ranks:
/// `2(n-1)/n` for an all-reduce; `(n-1)/n` for a reduce-scatter, all-gather, all-to-all, gather and
/// scatter; 1 for a broadcast, a reduce and a send with its receive. `None` for other names.
pub fn bus_factor(op: &str, n: usize) -> Option<f64> {
    let others = n.saturating_sub(1) as f64 / n.max(1) as f64;
    match op {
        "all_reduce" => Some(2.0 * others),
        "reduce_scatter" | "all_gather" | "all_to_all" | "gather" | "scatter" => Some(others),
        "broadcast" | "reduce" | "send_recv" => Some(1.0),
        _ => None,
    }
}

/// The mean bus bandwidth over all timings, out of place and in place; 0 without timings.
pub fn average_bus_bandwidth(rows: &[Row]) -> f64 {
    let all = || rows.iter().flat_map(Row::timings);
    // The sum of an empty iterator would be -0.
    all().map(|timing| timing.bus_bw).fold(0.0, |a, b| a + b) / all().count().max(1) as f64
}

/// How many timings had wrong results.
pub fn num_failed(rows: &[Row]) -> usize {
    rows.iter().flat_map(Row::timings).filter(|timing| timing.wrong.unwrap_or(0) > 0).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples;

    #[test]
    fn bandwidths_follow_their_formulas() {
        // 1 GB in 0.1 s.
        assert_eq!(alg_bandwidth_gb_s(1_000_000_000, 1e5), 10.0);
        let second = Timing::new(1 << 30, 1.0, (1e6, 1e6, 1e6), None);
        assert!((second.effective_bw_gib_s - 2.0).abs() < 1e-12);
        let timing = Timing::new(1_000_000_000, 1.5, (1e5, 2e5, 3e5), None);
        assert_eq!((timing.alg_bw, timing.bus_bw), (10.0, 15.0));
    }

    #[test]
    fn the_bus_factor_depends_on_operation_and_ranks() {
        for (op, at_1, at_2, at_4) in [
            ("all_reduce", 0.0, 1.0, 1.5),
            ("reduce_scatter", 0.0, 0.5, 0.75),
            ("all_gather", 0.0, 0.5, 0.75),
            ("all_to_all", 0.0, 0.5, 0.75),
            ("gather", 0.0, 0.5, 0.75),
            ("scatter", 0.0, 0.5, 0.75),
            ("broadcast", 1.0, 1.0, 1.0),
            ("reduce", 1.0, 1.0, 1.0),
            ("send_recv", 1.0, 1.0, 1.0),
        ] {
            let factors = [1, 2, 4].map(|n| bus_factor(op, n));
            assert_eq!(factors, [Some(at_1), Some(at_2), Some(at_4)], "{op}");
        }
        assert_eq!(bus_factor("all_reduse", 2), None);
    }

    #[test]
    fn the_time_in_place_stands_for_the_row() {
        let mut rows = vec![samples::row(2, 8, 6.0), samples::row(2, 16, 6.0)];
        rows[0].in_place.as_mut().unwrap().median_us = 5.0;
        assert_eq!(rows[0].timing().median_us, 5.0);
        assert_eq!(place(&rows), "in place");
        rows[0].in_place = None;
        assert_eq!(rows[0].timing().median_us, 6.0);
        assert_eq!(place(&rows), "in place where possible");
        assert_eq!(place(&rows[..1]), "out of place");
    }

    #[test]
    fn the_average_weighs_every_timing_alike() {
        let mut rows = vec![samples::row(2, 1000, 100.0), samples::row(2, 2000, 100.0)];
        // 0.01 and 0.02 GB/s, both out of place and in place.
        assert!((average_bus_bandwidth(&rows) - 0.015).abs() < 1e-12);
        rows[1].in_place = None;
        assert!((average_bus_bandwidth(&rows) - 0.04 / 3.0).abs() < 1e-12);
        assert_eq!(average_bus_bandwidth(&[]), 0.0);
    }

    #[test]
    fn a_failure_is_a_timing_with_wrong_elements() {
        let mut row = samples::row(2, 1000, 100.0);
        assert_eq!(num_failed(std::slice::from_ref(&row)), 0);
        row.in_place.as_mut().unwrap().wrong = Some(12);
        row.out_of_place.wrong = None;
        assert_eq!(num_failed(&[row]), 1);
    }
}
