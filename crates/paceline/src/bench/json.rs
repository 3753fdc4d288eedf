//! The report as JSON with the keys of nccl-tests' `-J` file, version 2, and our own beside them.
//!
//! Theirs keep their meaning and their types, of which some surprise: `root` and `okay` are strings.
//! Only `time` differs: theirs is the mean and ours is the median, as in the table.

use serde_json::{Value, json};

use super::result::{
    BenchReport, Row, Timing, average_bus_bandwidth, effective_bandwidth_gib_s, num_failed,
};
use super::table::type_name;

/// The version of the format.
const VERSION: u32 = 2;

/// The report as the text of a file.
pub fn text(report: &BenchReport) -> String {
    format!("{:#}\n", value(report))
}

fn value(report: &BenchReport) -> Value {
    let failed = num_failed(&report.rows);
    json!({
        "version": VERSION,
        "start_time": report.date,
        "args": report.command.split_whitespace().collect::<Vec<_>>(),
        "results": report.rows.iter().map(row).collect::<Vec<_>>(),
        "out_of_bounds": { "count": failed, "okay": (failed == 0).to_string() },
        "average_bus_bandwidth": {
            "bandwidth": average_bus_bandwidth(&report.rows),
            "okay": "unchecked",
        },
        "program": "paceline",
        "machine": report.machine,
        "link": report.link,
        "memory_bandwidth_gb_s": report.memory_bandwidth_gb_s,
        "skipped": report.skipped,
    })
}

fn row(row: &Row) -> Value {
    let root = row.root.map_or("-1".to_owned(), |root| root.to_string());
    json!({
        "size": row.bytes,
        "count": row.count,
        "type": type_name(&row.dtype),
        "redop": row.redop.as_deref().unwrap_or("none"),
        "root": format!("{root:>6}"),
        "out_of_place": row.out_of_place.as_ref().map(|timing| half(row, timing)),
        "in_place": row.in_place.as_ref().map(|timing| half(row, timing)),
        "transport": row.transport,
        "algorithm": row.algorithm,
        "nproc": row.nproc,
        "op": row.op,
        "predicted_us": row.predicted_us,
        "memory_fraction": row.memory_fraction,
    })
}

fn half(row: &Row, timing: &Timing) -> Value {
    json!({
        "time": timing.median_us,
        "alg_bw": timing.alg_bw,
        "bus_bw": timing.bus_bw,
        "nwrong": timing.wrong.map(|wrong| wrong as f64),
        "p99_us": timing.p99_us,
        "max_us": timing.max_us,
        "effective_bw_gib_s": effective_bandwidth_gib_s(row.bytes, timing.median_us),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::samples;

    #[test]
    fn rows_have_the_original_keys_and_ours() {
        let mut only_in_place = samples::row(4, 2_000_000, 500.0);
        only_in_place.out_of_place = None;
        only_in_place.in_place.as_mut().unwrap().wrong = None;
        let report = samples::report(vec![samples::row(2, 1_000_000, 250.0), only_in_place]);
        let value: Value = serde_json::from_str(&text(&report)).unwrap();
        let first = &value["results"][0];
        let timing = json!({
            "time": 250.0, "alg_bw": 4.0, "bus_bw": 4.0, "nwrong": 0.0,
            "p99_us": 375.0, "max_us": 500.0,
            "effective_bw_gib_s": effective_bandwidth_gib_s(1_000_000, 250.0),
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
        assert_eq!(second["out_of_place"], Value::Null);
        assert_eq!(second["in_place"]["nwrong"], Value::Null);
        assert_eq!(value["out_of_bounds"], json!({ "count": 0, "okay": "true" }));
        assert_eq!(
            value["average_bus_bandwidth"],
            json!({ "bandwidth": (4.0 + 4.0 + 6.0) / 3.0, "okay": "unchecked" })
        );
        assert_eq!(value["skipped"][0]["nproc"], 6);
    }
}
