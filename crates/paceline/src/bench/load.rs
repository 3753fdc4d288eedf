//! Reads measurements for `--compare`: our reports in each of their forms, the `-J` files of
//! nccl-tests, and the lines of JSON that other programs print.
//!
//! In goes a file, out come series of (size, time). A file that cannot serve is answered with one
//! message: the file, the line, and what was expected there.

use std::path::Path;

use serde_json::Value;

use super::csv;
use super::result::{BenchReport, Row};
use super::series::{Measured, Series, named, series};
use crate::{Failure, Result};

const EXPECTED: &str = "a report of paceline bench, a JSON file of nccl-tests, or lines such as \
     {\"side\": \"name\", \"ranks\": 2, \"bytes\": 1000000, \"ms\": 3.6}";

/// The series of a file.
pub fn load(path: &Path) -> Result<Vec<Series>> {
    let file = path.display();
    let refuse = |place: String, problem: String| {
        Err(Failure::Usage(format!("--compare {place}: {problem}; expected {EXPECTED}")))
    };
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) => return refuse(file.to_string(), error.to_string()),
    };
    let measured = if text.starts_with(csv::START) {
        csv::rows(&text).map(|rows| ours(&rows)).map_err(|error| {
            let line = error.position().map_or(1, |position| position.line());
            (line as usize, error.to_string())
        })
    } else {
        match serde_json::from_str(&text) {
            Ok(document) => from_document(&document).map_err(|problem| (1, problem)),
            // More than one document: each line is one.
            Err(error) => from_lines(&text).unwrap_or(Err((error.line(), error.to_string()))),
        }
    };
    match measured {
        Ok(measured) if measured.is_empty() => {
            refuse(file.to_string(), "no row with a time".to_owned())
        }
        Ok(measured) => {
            let stem = path.file_stem().unwrap_or_default().to_string_lossy();
            Ok(series(named(measured, &stem)))
        }
        Err((line, problem)) => refuse(format!("{file}:{line}"), problem),
    }
}

fn from_document(document: &Value) -> std::result::Result<Vec<Measured>, String> {
    if document.get("rows").is_some() {
        let report: BenchReport =
            serde_json::from_value(document.clone()).map_err(|error| error.to_string())?;
        return Ok(ours(&report.rows));
    }
    match document.get("results").and_then(Value::as_array) {
        Some(results) => Ok(results.iter().filter_map(|row| from_result(document, row)).collect()),
        None => from_line(document).map(|measured| vec![measured]),
    }
}

/// Each line as a document of its own, or `None` if not even the first one is. Lines without a time,
/// such as one about the machine, are left out unless all are such. The error comes with its line.
#[allow(clippy::type_complexity)]
fn from_lines(text: &str) -> Option<std::result::Result<Vec<Measured>, (usize, String)>> {
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let mut all = Vec::new();
    let mut first_problem = None;
    for (read, (at, line)) in lines.enumerate() {
        let document: Value = match serde_json::from_str(line) {
            Ok(document) => document,
            Err(_) if read == 0 => return None,
            Err(error) => return Some(Err((at + 1, error.to_string()))),
        };
        match from_line(&document) {
            Ok(measured) => all.push(measured),
            Err(problem) => drop(first_problem.get_or_insert((at + 1, problem))),
        }
    }
    match first_problem {
        Some(problem) if all.is_empty() => Some(Err(problem)),
        _ => Some(Ok(all)),
    }
}

/// A line of another program.
fn from_line(line: &Value) -> std::result::Result<Measured, String> {
    let lacks = |key: &str| format!("no usable \"{key}\"");
    let name = line.get("side").and_then(Value::as_str).ok_or(lacks("side"))?;
    let nproc = line.get("ranks").and_then(Value::as_u64).filter(|&n| n > 0);
    let bytes = line.get("bytes").and_then(Value::as_u64).filter(|&n| n > 0);
    let ms = line.get("ms").and_then(Value::as_f64).filter(|&ms| ms > 0.0);
    // A time is laid beside ours in place unless the line says that it is no such.
    let is_in_place = line.get("in_place").and_then(Value::as_bool).unwrap_or(true);
    let name = if is_in_place { name.to_owned() } else { format!("{name}, out of place") };
    // These programs began with all-reduces, and did not name them.
    let op = line.get("op").and_then(Value::as_str).unwrap_or("all_reduce");
    Ok(Measured {
        name,
        algorithm: None,
        nproc: nproc.ok_or(lacks("ranks"))? as usize,
        op: Some(op.to_owned()),
        bytes: bytes.ok_or(lacks("bytes"))?,
        time_us: ms.ok_or(lacks("ms"))? * 1e3,
    })
}

/// A row of a `-J` file: ours says the number of ranks itself, that of nccl-tests lists the devices.
fn from_result(document: &Value, row: &Value) -> Option<Measured> {
    let word = |key: &str| row.get(key).and_then(Value::as_str).map(str::to_owned);
    let devices = || document.pointer("/config/devices").and_then(Value::as_array).map(Vec::len);
    let nproc = row.get("nproc").and_then(Value::as_u64).map(|nproc| nproc as usize);
    let time = |half: &str| row.get(half)?.get("time")?.as_f64().filter(|&us| us > 0.0);
    Some(Measured {
        name: word("transport").unwrap_or("nccl-tests".to_owned()),
        algorithm: word("algorithm"),
        nproc: nproc.or_else(devices)?,
        op: word("op"),
        bytes: row.get("size").and_then(Value::as_u64)?,
        time_us: time("in_place").or_else(|| time("out_of_place"))?,
    })
}

fn ours(rows: &[Row]) -> Vec<Measured> {
    let measured = |row: &Row| {
        let time_us = row.timing()?.median_us;
        Some(Measured {
            name: row.transport.clone(),
            algorithm: Some(row.algorithm.clone()),
            nproc: row.nproc,
            op: Some(row.op.clone()),
            bytes: row.bytes,
            time_us,
        })
    };
    rows.iter().filter_map(measured).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::{json, samples};

    fn loaded(text: &str) -> Result<Vec<Series>> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("other.json");
        std::fs::write(&path, text).unwrap();
        load(&path)
    }

    fn refused(text: &str) -> String {
        match loaded(text) {
            Err(Failure::Usage(message)) => {
                assert!(message.ends_with(EXPECTED), "{message}");
                message.split_once("other.json").unwrap().1.replace(EXPECTED, "...")
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn each_of_our_forms_gives_the_same_series() {
        let mut in_place = samples::row(2, 8, 5.0);
        in_place.out_of_place = None;
        let mut empty = in_place.clone();
        empty.in_place = None;
        let rows = vec![samples::row(2, 1000, 20.0), samples::row(4, 8, 7.0), in_place, empty];
        let report = samples::report(rows);
        let series = |nproc, points: &[(u64, f64)]| Series {
            name: "shm (other)".to_owned(),
            nproc,
            op: Some("all_reduce".to_owned()),
            points: points.to_vec(),
        };
        let expected = [series(2, &[(8, 5.0), (1000, 20.0)]), series(4, &[(8, 7.0)])];
        assert_eq!(loaded(&json::text(&report)).unwrap(), expected);
        assert_eq!(loaded(&serde_json::to_string(&report).unwrap()).unwrap(), expected);
        assert_eq!(loaded(&csv::text(&report.rows).unwrap()).unwrap(), expected);
    }

    #[test]
    fn algorithms_are_kept_apart() {
        let mut ring = samples::row(2, 1000, 90.0);
        ring.algorithm = "ring".to_owned();
        let report = samples::report(vec![samples::row(2, 1000, 20.0), ring]);
        let names: Vec<(String, Vec<(u64, f64)>)> = loaded(&json::text(&report))
            .unwrap()
            .into_iter()
            .map(|series| (series.name, series.points))
            .collect();
        let expected = [("shm units (other)", 20.0), ("shm ring (other)", 90.0)];
        assert_eq!(names, expected.map(|(name, us)| (name.to_owned(), vec![(1000, us)])));
    }

    #[test]
    fn lines_of_other_programs_are_read() {
        let line = |bytes: u64, ms: f64| {
            format!(
                "{{\"side\": \"torch-gloo\", \"ranks\": 2, \"bytes\": {bytes}, \"ms\": {ms}}}\n"
            )
        };
        let points = |text: String| loaded(&text).unwrap()[0].points.clone();
        let machine = "{\"machine\": \"some\"}\n\n";
        assert_eq!(
            points([machine, &line(2000, 2.0), &line(1000, 1.0)].concat()),
            [(1000, 1000.0), (2000, 2000.0)]
        );
        assert_eq!(points(line(1000, 3.6)), [(1000, 3600.0)], "a single line");
        let series = loaded(&line(1000, 3.6)).unwrap();
        assert_eq!(series[0].op.as_deref(), Some("all_reduce"), "what such lines began with");
        let other = line(1000, 3.6).replace("}", ", \"op\": \"gather\", \"in_place\": false}");
        let series = loaded(&other).unwrap();
        assert_eq!(series[0].op.as_deref(), Some("gather"));
        assert_eq!(series[0].name, "torch-gloo, out of place");
        let rounds = [3.0, 1.0, 9.0].map(|ms| line(1000, ms)).concat();
        assert_eq!(points(rounds), [(1000, 3000.0)], "the median of several rounds");
    }

    #[test]
    fn files_of_nccl_tests_are_read() {
        let text = r#"{"version":2,"config":{"devices":[{"rank":0},{"rank":1}]},"results":[
            {"size":1024,"out_of_place":{"time":12.5},"in_place":{"time":13.0}},
            {"size":2048,"out_of_place":null,"in_place":{"time":14.0}}]}"#;
        let series = loaded(text).unwrap();
        assert_eq!((series[0].name.as_str(), series[0].nproc), ("nccl-tests", 2));
        assert_eq!(series[0].points, [(1024, 13.0), (2048, 14.0)]);
    }

    #[test]
    fn what_cannot_serve_is_answered_with_file_and_line() {
        let good = "{\"side\": \"a\", \"ranks\": 2, \"bytes\": 8, \"ms\": 1}";
        assert_eq!(refused("hello"), ":1: expected value at line 1 column 1; expected ...");
        assert_eq!(refused(""), ": no row with a time; expected ...");
        assert!(refused(&format!("{good}\nhello")).starts_with(":2: expected value"));
        assert_eq!(refused("{}\n\n{\"side\": \"a\"}"), ":1: no usable \"side\"; expected ...");
        let without_time = good.replace("1}", "0}");
        assert_eq!(refused(&without_time), ":1: no usable \"ms\"; expected ...");
        assert_eq!(refused("{\"results\": []}"), ": no row with a time; expected ...");
        assert!(refused("{\"rows\": 3}").starts_with(":1: "));
        let cut = "{\n\"results\": [\n";
        assert!(refused(cut).starts_with(":3: EOF"), "{}", refused(cut));
        let bad_csv = format!("{}\nshm,units,two", csv::text(&[samples::row(2, 8, 1.0)]).unwrap());
        assert!(
            refused(&bad_csv).starts_with(":4: CSV") || refused(&bad_csv).starts_with(":3: CSV")
        );
    }

    #[test]
    fn a_file_that_is_not_there_is_named() {
        let error = load(Path::new("/nowhere/a.json")).unwrap_err().to_string();
        assert!(error.starts_with("--compare /nowhere/a.json: No such file"), "{error}");
    }
}
