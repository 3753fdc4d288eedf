//! Writes the report as JSON, with the keys of nccl-tests' `-J` file, version 3, and keys of our own; and
//! the rows as CSV, one line per row, where a figure that was not measured is an empty field.
//!
//! The keys of nccl-tests keep their meaning and their types, even surprising ones: `root` and `okay` are
//! strings. Only `time` differs: it is the mean in nccl-tests, and the median here, as in the table.

use paceline_table::table::{Cell, Column, Columns, Head};
use serde_json::{Value, json};

use super::result::{BenchReport, Row, Timing, average_bus_bandwidth, num_failed};
use super::table::their_words;

/// The version of the JSON format.
const VERSION: u32 = 3;

/// The report as the text of a JSON file.
pub fn json(report: &BenchReport) -> String {
    let failed = num_failed(&report.rows);
    let value = json!({
        "version": VERSION,
        "start_time": report.date,
        "args": report.command,
        "results": report.rows.iter().map(result).collect::<Vec<_>>(),
        "out_of_bounds": { "count": failed, "okay": (failed == 0).to_string() },
        "average_bus_bandwidth": {
            "bandwidth": average_bus_bandwidth(&report.rows),
            "okay": "unchecked",
        },
        "program": "paceline",
        "machine": report.machine,
        "link": report.link,
        "device": report.device,
        "memory_bandwidth_gb_s": report.memory_bandwidth_gb_s,
        "against": report.theirs,
        "skipped": report.skipped,
    });
    format!("{value:#}\n")
}

fn result(row: &Row) -> Value {
    let mut value = json!(row);
    let [dtype, redop, root] = their_words(row);
    for (key, word) in [("type", dtype), ("redop", redop), ("root", root)] {
        value[key] = json!(word);
    }
    for place in ["out_of_place", "in_place"] {
        let each = value[place].as_object_mut().and_then(|of| of.remove("each_us"));
        if let Some(each) = each {
            value[format!("{place}_per_iter")] =
                json!({ "skipped_iterations": 0, "times_us": each });
        }
        if let Some(wrong) = value[place]["nwrong"].as_u64() {
            value[place]["nwrong"] = json!(wrong as f64);
        }
    }
    value
}

/// The rows as the text of a CSV file, with a header line.
pub fn csv(rows: &[Row]) -> String {
    columns().table(rows).csv()
}

/// A column of a timing in CSV: its name without the place, and its cell.
type OfTiming = (&'static str, fn(&Timing) -> Cell);

/// The columns of a timing.
const TIMING: [OfTiming; 6] = [
    ("time_us", |of| of.median_us.into()),
    ("p99_us", |of| of.p99_us.into()),
    ("max_us", |of| of.max_us.into()),
    ("alg_bw", |of| of.alg_bw.into()),
    ("bus_bw", |of| of.bus_bw.into()),
    ("wrong", |of| of.wrong.into()),
];

/// The columns of the CSV file.
fn columns() -> Columns<Row> {
    fn column<C: Into<Cell>>(
        name: impl Into<String>,
        get: impl Fn(&Row) -> C + Send + Sync + 'static,
    ) -> Column<Row> {
        Column::new(Head::plain(name.into()), get)
    }
    let mut columns = vec![
        column("transport", |row| row.transport.clone()),
        column("algorithm", |row| row.algorithm.clone()),
        column("nproc", |row| row.nproc),
        column("op", |row| row.op.clone()),
        column("size", |row| row.bytes),
        column("count", |row| row.count),
        column("type", |row| row.dtype.clone()),
        column("redop", |row| row.redop.clone()),
        column("root", |row| row.root),
    ];
    let of_place = |place: &str, of: fn(&Row) -> Option<&Timing>| {
        let timing =
            |(name, get): OfTiming| column(format!("{place}_{name}"), move |row| of(row).map(get));
        TIMING.map(timing)
    };
    columns.extend(of_place("out_of_place", |row| Some(&row.out_of_place)));
    columns.extend(of_place("in_place", |row| row.in_place.as_ref()));
    columns.extend([
        column("effective_bw_gib_s", |row| row.timing().effective_bw_gib_s),
        column("predicted_us", |row| row.predicted_us),
        column("memory_fraction", |row| row.memory_fraction),
    ]);
    Columns(columns)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples;

    #[test]
    fn rows_have_the_original_keys_and_ours() {
        let mut only_out_of_place = samples::row(4, 2_000_000, 500.0);
        only_out_of_place.in_place = None;
        only_out_of_place.out_of_place.wrong = None;
        let report = samples::report(vec![samples::row(2, 1_000_000, 250.0), only_out_of_place]);
        let value: Value = serde_json::from_str(&json(&report)).unwrap();
        let first = &value["results"][0];
        let timing = json!({
            "time": 250.0, "alg_bw": 4.0, "bus_bw": 4.0, "nwrong": 0.0,
            "p99_us": 375.0, "max_us": 500.0,
            "effective_bw_gib_s": 2.0 * 1e6 / 250e-6 / (1_u64 << 30) as f64,
        });
        assert_eq!(
            first,
            &json!({
                "size": 1_000_000, "count": 250_000, "type": "float", "redop": "sum",
                "root": "    -1", "out_of_place": timing, "in_place": timing,
                "transport": "shm", "algorithm": "units", "nproc": 2, "op": "all_reduce",
                "predicted_us": null, "memory_fraction": null,
            })
        );
        let second = &value["results"][1];
        assert_eq!(second["in_place"], Value::Null);
        assert_eq!(second["out_of_place"]["nwrong"], Value::Null);
        assert_eq!(value["out_of_bounds"], json!({ "count": 0, "okay": "true" }));
        assert_eq!(
            value["average_bus_bandwidth"],
            json!({ "bandwidth": (4.0 + 4.0 + 6.0) / 3.0, "okay": "unchecked" })
        );
        assert_eq!(value["skipped"][0]["nproc"], 6);
        // A word with a blank stays one word, so that the command can be repeated.
        assert_eq!(value["args"][4], "a run.json");
    }

    #[test]
    fn iterations_have_the_original_keys() {
        let mut row = samples::row(2, 8, 2.0);
        row.out_of_place.each_us = Some(vec![3.0, 1.0, 2.0, 2.0]);
        let value: Value = serde_json::from_str(&json(&samples::report(vec![row]))).unwrap();
        let row = value["results"][0].as_object().unwrap();
        assert_eq!(
            row["out_of_place_per_iter"],
            json!({ "skipped_iterations": 0, "times_us": [3.0, 1.0, 2.0, 2.0] })
        );
        assert_eq!(row["out_of_place"].get("each_us"), None);
        assert_eq!(row.get("in_place_per_iter"), None);
    }

    #[test]
    fn csv_keeps_every_value_exactly() {
        let mut odd = samples::row(3, 4, 1.0 / 3.0);
        odd.algorithm = "two, \"stages\" and a half".to_owned();
        odd.redop = None;
        odd.root = Some(2);
        odd.in_place = None;
        odd.out_of_place.wrong = None;
        odd.predicted_us = Some(1e-7);
        let text = csv(&[samples::row(2, 1_000_000, 250.0), odd]);
        let lines: Vec<&str> = text.lines().collect();
        let names = [
            "transport,algorithm,nproc,op,size,count,type,redop,root",
            "out_of_place_time_us,out_of_place_p99_us,out_of_place_max_us",
            "out_of_place_alg_bw,out_of_place_bus_bw,out_of_place_wrong",
            "in_place_time_us,in_place_p99_us,in_place_max_us,in_place_alg_bw,in_place_bus_bw,in_place_wrong",
            "effective_bw_gib_s,predicted_us,memory_fraction",
        ];
        assert_eq!(lines[0], names.join(","));
        let timing = "250,375,500,4,4,0,250,375,500,4,4,0";
        let first = "shm,units,2,all_reduce,1000000,250000,f32,sum,";
        assert_eq!(lines[1], format!("{first},{timing},7.450580596923828,,"));
        let timing = "0.3333333333333333,0.5,0.6666666666666666,0.012,0.016,";
        let second = "shm,\"two, \"\"stages\"\" and a half\",3,all_reduce,4,1,f32,,2";
        let rest = ",,,,,,0.022351741790771488,0.0000001,";
        assert_eq!(lines[2..], [format!("{second},{timing},{rest}")]);
    }
}
