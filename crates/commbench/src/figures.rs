//! The figures of a row. Each is defined once, with its names in files, its column in the table, and the
//! function that gets its value. The table, the CSV file and the JSON file are views of these lists.

use clap::ValueEnum;
use paceline_memory::DType;
use serde_json::{Value, json};

use super::result::{Row, Timing};

/// Which columns the table has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Columns {
    /// Those of nccl-tests
    Standard,
    /// Also p99, maximum, effective bandwidth, prediction, and share of the memory bandwidth
    Extended,
}

/// A figure that is computed from a `T`.
pub struct Figure<T> {
    /// Its name in CSV.
    pub csv: &'static str,
    /// Its key in JSON, which is that of nccl-tests if nccl-tests has the figure.
    pub json: &'static str,
    /// Gets its value; `null` if there is none.
    pub value: fn(&T) -> Value,
    /// Gets its value in the form in which nccl-tests writes it to JSON and to the table.
    pub their_value: fn(&T) -> Value,
    /// Its column in the table, if it has one.
    pub column: Option<Column>,
}

/// A column of the table.
#[derive(Clone, Copy)]
pub struct Column {
    /// [`Columns::Standard`] for a column of nccl-tests, [`Columns::Extended`] for one of paceline's own.
    pub set: Columns,
    /// The two lines of its heading.
    pub heading: [&'static str; 2],
    /// Its width in characters.
    pub width: usize,
    /// How many characters a fraction may have; 0 means that it is written as C's `%g` does.
    pub digits: usize,
}

/// A figure of a row.
const fn row(name: &'static str, value: fn(&Row) -> Value) -> Figure<Row> {
    Figure { csv: name, json: name, value, their_value: value, column: None }
}

/// A figure of a timing.
const fn timing(
    csv: &'static str,
    json: &'static str,
    value: fn(&Timing) -> Value,
) -> Figure<Timing> {
    Figure { csv, json, value, their_value: value, column: None }
}

impl<T> Figure<T> {
    const fn written_as(mut self, value: fn(&T) -> Value) -> Self {
        self.their_value = value;
        self
    }

    const fn column(
        mut self,
        set: Columns,
        heading: [&'static str; 2],
        width: usize,
        digits: usize,
    ) -> Self {
        self.column = Some(Column { set, heading, width, digits });
        self
    }
}

use Columns::{Extended, Standard};

/// The figures that say what was measured.
pub const SETTING: [Figure<Row>; 9] = [
    row("transport", |row| json!(row.transport)),
    row("algorithm", |row| json!(row.algorithm)),
    row("nproc", |row| json!(row.nproc)),
    row("op", |row| json!(row.op)),
    row("size", |row| json!(row.bytes)).column(Standard, ["size", "(B)"], 12, 0),
    row("count", |row| json!(row.count)).column(Standard, ["count", "(elements)"], 12, 0),
    row("type", |row| json!(row.dtype))
        .written_as(|row| json!(row.dtype.parse().ok().map(DType::nccl_name)))
        .column(Standard, ["type", ""], 8, 0),
    row("redop", |row| json!(row.redop))
        .written_as(|row| json!(row.redop.as_deref().unwrap_or("none")))
        .column(Standard, ["redop", ""], 6, 0),
    // nccl-tests writes a string, padded to the width of its column.
    row("root", |row| json!(row.root))
        .written_as(|row| json!(format!("{:>6}", row.root.map_or(-1, |root| root as i64))))
        .column(Standard, ["root", ""], 6, 0),
];

/// The figures of the result, out of place and in place. Times are medians, where nccl-tests has means.
pub const TIMING: [Figure<Timing>; 6] = [
    timing("time_us", "time", |t| json!(t.median_us)).column(Standard, ["time", "(us)"], 7, 7),
    timing("p99_us", "p99_us", |t| json!(t.p99_us)).column(Extended, ["p99", "(us)"], 7, 7),
    timing("max_us", "max_us", |t| json!(t.max_us)).column(Extended, ["max", "(us)"], 7, 7),
    timing("alg_bw", "alg_bw", |t| json!(t.alg_bw)).column(Standard, ["algbw", "(GB/s)"], 6, 6),
    timing("bus_bw", "bus_bw", |t| json!(t.bus_bw)).column(Standard, ["busbw", "(GB/s)"], 6, 6),
    timing("wrong", "nwrong", |t| json!(t.wrong))
        .written_as(|t| json!(t.wrong.map(|wrong| wrong as f64)))
        .column(Standard, ["#wrong", ""], 6, 0),
];

/// The effective bandwidth. JSON has it for each timing; CSV and the table have it once per row, for
/// [`Row::timing`].
pub const EFFECTIVE: Figure<Timing> =
    timing("effective_bw_gib_s", "effective_bw_gib_s", |t| json!(t.effective_bw_gib_s)).column(
        Extended,
        ["eff.bw", "(GiB/s)"],
        7,
        6,
    );

/// The figures with which the row is compared.
pub const REFERENCE: [Figure<Row>; 2] = [
    row("predicted_us", |row| json!(row.predicted_us)).column(
        Extended,
        ["predicted", "(us)"],
        9,
        7,
    ),
    row("memory_fraction", |row| json!(row.memory_fraction)).column(
        Extended,
        ["%mem", "(%)"],
        6,
        6,
    ),
];

/// The explanation of paceline's own columns.
pub const LEGEND: &str = "\
# p99, max  of the in-place times; of the out-of-place times if there are no others
# eff.bw    = 2 x size / the same time, in GiB/s (2^30 B), for any number of ranks
# predicted = steps x latency + bytes of the busiest rank / bandwidth, on the emulated link
# %mem      = 100 x bytes read and written / out-of-place time / memory bandwidth; > 100 in caches";
