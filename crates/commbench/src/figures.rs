//! The figures of a row. Each is defined once, with its names in files, its column in the table, and the
//! function that gets its value. The table, the CSV file and the JSON file are views of these lists.

use std::sync::LazyLock;

use clap::ValueEnum;
use paceline_memory::DType;
use paceline_table::table::{Cell, Column, Head};

use super::result::{Row, Timing};

/// Which columns the table has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ColumnSet {
    /// Those of nccl-tests
    Standard,
    /// Also p99, maximum, effective bandwidth, prediction, and share of the memory bandwidth
    Extended,
}

/// A figure that is computed from a `T`: a column, and what nccl-tests' table and JSON need in addition.
pub struct Figure<T> {
    /// Its column. The key is its name in CSV; label and unit are the two lines of its heading in the table.
    pub column: Column<T>,
    /// Its key in JSON, which is that of nccl-tests if nccl-tests has the figure.
    pub json: &'static str,
    /// Gets its value in the form in which nccl-tests writes it to JSON and to the table, where that form is
    /// not the column's.
    their_value: Option<fn(&T) -> Cell>,
    /// Its place in the table, if it has one.
    pub place: Option<Place>,
}

/// The place of a figure in the table.
#[derive(Clone, Copy)]
pub struct Place {
    /// [`ColumnSet::Standard`] for a column of nccl-tests, [`ColumnSet::Extended`] for one of paceline's own.
    pub set: ColumnSet,
    /// Its width in characters.
    pub width: usize,
    /// How many characters a fraction may have; 0 means that it is written as C's `%g` does.
    pub digits: usize,
}

/// The figures, in the order of files and tables.
pub struct Figures {
    /// Those that say what was measured.
    pub setting: Vec<Figure<Row>>,
    /// Those of the result, out of place and in place. Times are medians, where nccl-tests has means.
    pub timing: Vec<Figure<Timing>>,
    /// The effective bandwidth. JSON has it for each timing; CSV and the table have it once per row, for
    /// [`Row::timing`].
    pub effective: Figure<Timing>,
    /// Those with which the row is compared.
    pub reference: Vec<Figure<Row>>,
}

impl<T: 'static> Figure<T> {
    /// A figure whose key in JSON is its name in CSV, and which the table does not show.
    fn new<C: Into<Cell>>(
        name: &'static str,
        (label, unit): (&'static str, &'static str),
        definition: &'static str,
        value: impl Fn(&T) -> C + Send + Sync + 'static,
    ) -> Self {
        let column = Column::new(Head::new(name, label, (unit, 0), definition), value);
        Self { column, json: name, their_value: None, place: None }
    }

    fn key(mut self, json: &'static str) -> Self {
        self.json = json;
        self
    }

    fn written_as(mut self, value: fn(&T) -> Cell) -> Self {
        self.their_value = Some(value);
        self
    }

    fn at(mut self, set: ColumnSet, width: usize, digits: usize) -> Self {
        self.place = Some(Place { set, width, digits });
        self
    }

    /// Its value in the form in which nccl-tests writes it.
    pub fn their_value(&self, of: &T) -> Cell {
        self.their_value.map_or_else(|| self.column.cell(of), |value| value(of))
    }
}

use ColumnSet::{Extended, Standard};

/// All figures.
pub static FIGURES: LazyLock<Figures> = LazyLock::new(|| Figures {
    setting: setting(),
    timing: timing(),
    effective: Figure::new(
        "effective_bw_gib_s",
        ("eff.bw", "GiB/s"),
        "= 2 x size / the same time, in GiB/s (2^30 B), for any number of ranks",
        |t: &Timing| t.effective_bw_gib_s,
    )
    .at(Extended, 7, 6),
    reference: reference(),
});

fn setting() -> Vec<Figure<Row>> {
    vec![
        Figure::new(
            "transport",
            ("transport", ""),
            "How the ranks reach each other.",
            |row: &Row| row.transport.clone(),
        ),
        Figure::new("algorithm", ("algorithm", ""), "How the transport works.", |row: &Row| {
            row.algorithm.clone()
        }),
        Figure::new("nproc", ("ranks", ""), "Number of ranks.", |row: &Row| row.nproc),
        Figure::new("op", ("operation", ""), "The operation.", |row: &Row| row.op.clone()),
        Figure::new("size", ("size", "B"), "The size S in the formulas.", |row: &Row| row.bytes)
            .at(Standard, 12, 0),
        Figure::new(
            "count",
            ("count", "elements"),
            "Elements as nccl-tests counts them: those of a share if the operation has shares.",
            |row: &Row| row.count,
        )
        .at(Standard, 12, 0),
        Figure::new("type", ("type", ""), "The element type.", |row: &Row| row.dtype.clone())
            .written_as(|row| row.dtype.parse().ok().map(DType::nccl_name).into())
            .at(Standard, 8, 0),
        Figure::new("redop", ("redop", ""), "How elements are combined.", |row: &Row| {
            row.redop.clone()
        })
        .written_as(|row| row.redop.as_deref().unwrap_or("none").into())
        .at(Standard, 6, 0),
        // nccl-tests writes a string, padded to the width of its column.
        Figure::new("root", ("root", ""), "The root, if there is one.", |row: &Row| row.root)
            .written_as(|row| format!("{:>6}", row.root.map_or(-1, |root| root as i64)).into())
            .at(Standard, 6, 0),
    ]
}

/// What the legend says of p99 and maximum.
const LONG_TIMES: &str = "of the in-place times; of the out-of-place times if there are no others";

fn timing() -> Vec<Figure<Timing>> {
    vec![
        Figure::new("time_us", ("time", "us"), "The median time.", |t: &Timing| t.median_us)
            .key("time")
            .at(Standard, 7, 7),
        Figure::new("p99_us", ("p99", "us"), LONG_TIMES, |t: &Timing| t.p99_us).at(Extended, 7, 7),
        Figure::new("max_us", ("max", "us"), LONG_TIMES, |t: &Timing| t.max_us).at(Extended, 7, 7),
        Figure::new("alg_bw", ("algbw", "GB/s"), "Size / time.", |t: &Timing| t.alg_bw)
            .at(Standard, 6, 6),
        Figure::new(
            "bus_bw",
            ("busbw", "GB/s"),
            "What each link carries: algbw times a factor of the operation and the number of ranks.",
            |t: &Timing| t.bus_bw,
        )
        .at(Standard, 6, 6),
        Figure::new("wrong", ("#wrong", ""), "Elements with a wrong result.", |t: &Timing| t.wrong)
            .key("nwrong")
            .written_as(|t| t.wrong.map(|wrong| wrong as f64).into())
            .at(Standard, 6, 0),
    ]
}

fn reference() -> Vec<Figure<Row>> {
    vec![
        Figure::new(
            "predicted_us",
            ("predicted", "us"),
            "= steps x latency + bytes of the busiest rank / bandwidth, on the emulated link",
            |row: &Row| row.predicted_us,
        )
        .at(Extended, 9, 7),
        Figure::new(
            "memory_fraction",
            ("%mem", "%"),
            "= 100 x bytes read and written / out-of-place time / memory bandwidth; > 100 in caches",
            |row: &Row| row.memory_fraction,
        )
        .at(Extended, 6, 6),
    ]
}

/// The explanation of paceline's own columns: their definitions, where columns with the same one share a line.
pub fn legend() -> String {
    let mut lines: Vec<(String, String)> = Vec::new();
    let all = &*FIGURES;
    let heads = own(&all.timing).chain(own(std::slice::from_ref(&all.effective)));
    for head in heads.chain(own(&all.reference)) {
        match lines.last_mut() {
            Some((labels, definition)) if *definition == head.definition => {
                *labels += &format!(", {}", head.label);
            }
            _ => lines.push((head.label.to_string(), head.definition.to_string())),
        }
    }
    let lines = lines.iter().map(|(labels, definition)| format!("# {labels:<9} {definition}"));
    lines.collect::<Vec<_>>().join("\n")
}

fn own<T>(figures: &[Figure<T>]) -> impl Iterator<Item = &Head> {
    let is_own = |place: Place| place.set == Extended;
    figures.iter().filter(move |of| of.place.is_some_and(is_own)).map(|of| &of.column.head)
}
