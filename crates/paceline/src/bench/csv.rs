//! The rows as CSV, one line each, and back again without loss. Where a value was not taken, its field
//! is empty.

use serde::{Deserialize, Serialize};

use super::result::{Row, Timing, effective_bandwidth_gib_s};

/// A line. The columns have this order and these names.
#[derive(Serialize, Deserialize)]
struct Line {
    transport: String,
    algorithm: String,
    nproc: usize,
    op: String,
    size: u64,
    count: u64,
    #[serde(rename = "type")]
    dtype: String,
    redop: Option<String>,
    root: Option<usize>,
    out_of_place_time_us: Option<f64>,
    out_of_place_p99_us: Option<f64>,
    out_of_place_max_us: Option<f64>,
    out_of_place_alg_bw: Option<f64>,
    out_of_place_bus_bw: Option<f64>,
    out_of_place_wrong: Option<u64>,
    in_place_time_us: Option<f64>,
    in_place_p99_us: Option<f64>,
    in_place_max_us: Option<f64>,
    in_place_alg_bw: Option<f64>,
    in_place_bus_bw: Option<f64>,
    in_place_wrong: Option<u64>,
    effective_bw_gib_s: Option<f64>,
    predicted_us: Option<f64>,
    memory_fraction: Option<f64>,
}

/// What the text of such a file begins with.
pub const START: &str = "transport,algorithm,nproc,op,size,";

/// The rows as the text of a file, with a first line of names.
pub fn text(rows: &[Row]) -> Result<String, csv::Error> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    for row in rows {
        writer.serialize(line(row))?;
    }
    let bytes = writer.into_inner().map_err(|error| error.into_error())?;
    // Whatever is made of strings and numbers is a string.
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// The rows of such a text.
pub fn rows(text: &str) -> Result<Vec<Row>, csv::Error> {
    let mut reader = csv::Reader::from_reader(text.as_bytes());
    reader.deserialize().map(|line| line.map(row)).collect()
}

fn line(row: &Row) -> Line {
    let (out, inside) = (row.out_of_place.as_ref(), row.in_place.as_ref());
    let effective = |timing: &Timing| effective_bandwidth_gib_s(row.bytes, timing.median_us);
    Line {
        transport: row.transport.clone(),
        algorithm: row.algorithm.clone(),
        nproc: row.nproc,
        op: row.op.clone(),
        size: row.bytes,
        count: row.count,
        dtype: row.dtype.clone(),
        redop: row.redop.clone(),
        root: row.root,
        out_of_place_time_us: out.map(|timing| timing.median_us),
        out_of_place_p99_us: out.map(|timing| timing.p99_us),
        out_of_place_max_us: out.map(|timing| timing.max_us),
        out_of_place_alg_bw: out.map(|timing| timing.alg_bw),
        out_of_place_bus_bw: out.map(|timing| timing.bus_bw),
        out_of_place_wrong: out.and_then(|timing| timing.wrong),
        in_place_time_us: inside.map(|timing| timing.median_us),
        in_place_p99_us: inside.map(|timing| timing.p99_us),
        in_place_max_us: inside.map(|timing| timing.max_us),
        in_place_alg_bw: inside.map(|timing| timing.alg_bw),
        in_place_bus_bw: inside.map(|timing| timing.bus_bw),
        in_place_wrong: inside.and_then(|timing| timing.wrong),
        effective_bw_gib_s: row.timing().map(effective),
        predicted_us: row.predicted_us,
        memory_fraction: row.memory_fraction,
    }
}

fn row(line: Line) -> Row {
    let timing = |numbers: [Option<f64>; 5], wrong| {
        let [median_us, p99_us, max_us, alg_bw, bus_bw] = numbers;
        Some(Timing {
            median_us: median_us?,
            p99_us: p99_us?,
            max_us: max_us?,
            alg_bw: alg_bw?,
            bus_bw: bus_bw?,
            wrong,
        })
    };
    let out_of_place = [
        line.out_of_place_time_us,
        line.out_of_place_p99_us,
        line.out_of_place_max_us,
        line.out_of_place_alg_bw,
        line.out_of_place_bus_bw,
    ];
    let in_place = [
        line.in_place_time_us,
        line.in_place_p99_us,
        line.in_place_max_us,
        line.in_place_alg_bw,
        line.in_place_bus_bw,
    ];
    Row {
        transport: line.transport,
        algorithm: line.algorithm,
        nproc: line.nproc,
        op: line.op,
        bytes: line.size,
        count: line.count,
        dtype: line.dtype,
        redop: line.redop,
        root: line.root,
        out_of_place: timing(out_of_place, line.out_of_place_wrong),
        in_place: timing(in_place, line.in_place_wrong),
        predicted_us: line.predicted_us,
        memory_fraction: line.memory_fraction,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::samples;

    #[test]
    fn rows_come_back_as_they_were() {
        let mut odd = samples::row(3, 4, 1.0 / 3.0);
        odd.algorithm = "two, \"stages\"\nand a half".to_owned();
        odd.redop = None;
        odd.root = Some(2);
        odd.in_place = None;
        odd.out_of_place.as_mut().unwrap().wrong = None;
        odd.predicted_us = Some(1e-7);
        let written = vec![samples::row(2, 1_000_000, 250.0), odd];
        let text = text(&written).unwrap();
        assert!(text.starts_with(START), "{text}");
        assert_eq!(rows(&text).unwrap(), written);
    }

    #[test]
    fn a_line_is_a_row() {
        let text = text(&[samples::row(2, 1_000_000, 250.0)]).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 2);
        assert!(
            lines[1].starts_with(
                "shm,units,2,all_reduce,1000000,250000,f32,sum,,250.0,375.0,500.0,4.0,4.0,0,"
            ),
            "{text}"
        );
    }
}
