//! Reads measurements for `--compare`: the files that `-J` and `--csv` write, the `-J` files of
//! nccl-tests, and the lines of JSON that other programs print.
//!
//! Takes a file and returns its times. The error for a file that cannot be used names the
//! file, the line, and the expected value.

use std::path::Path;

use paceline_failure::{Failure, Result};
use paceline_files::Printable;
use serde::Deserialize;
use serde_json::Value;

use super::files;
use super::series::{Measured, named, series};

const EXPECTED: &str = "a report of paceline bench, a JSON file of nccl-tests, or lines such as \
     {\"side\": \"name\", \"ranks\": 2, \"bytes\": 1000000, \"ms\": 3.6}";

/// The most bytes of a file. A report of all operations, sizes and ranks has about one million.
const MAX_BYTES: u64 = 64 << 20;

/// The line number of a problem in a text, and its description.
type Problem = (usize, String);

/// The times of a file, one series after the other.
pub fn load(path: &Path) -> Result<Vec<Measured>> {
    let file = path.printable();
    let refuse = |place: String, problem: String| {
        Failure::Usage(format!("--compare {place}: {problem}; expected {EXPECTED}"))
    };
    let text = paceline_files::read_stream(path, MAX_BYTES)
        .map_err(|e| refuse(file.to_string(), e.to_string()))?;
    let measured = if text.starts_with(&files::names().join(",")) {
        from_csv(&text)
    } else {
        from_json(&text)
    };
    let measured = measured.map_err(|(line, problem)| refuse(format!("{file}:{line}"), problem))?;
    if measured.is_empty() {
        return Err(refuse(file.to_string(), "no row with a time".to_owned()));
    }
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    Ok(series(named(measured, &stem)))
}

/// The columns of our CSV that are compared.
#[derive(Deserialize)]
struct CsvRow {
    transport: String,
    algorithm: String,
    nproc: usize,
    op: String,
    size: u64,
    out_of_place_time_us: f64,
    in_place_time_us: Option<f64>,
}

fn from_csv(text: &str) -> std::result::Result<Vec<Measured>, Problem> {
    let mut all = Vec::new();
    for line in csv::Reader::from_reader(text.as_bytes()).deserialize() {
        let line: CsvRow = line.map_err(|error| {
            let line = error.position().map_or(1, |position| position.line());
            (line as usize, error.to_string())
        })?;
        all.push(Measured {
            name: line.transport,
            algorithm: Some(line.algorithm),
            nproc: line.nproc,
            op: Some(line.op),
            bytes: line.size,
            time_us: line.in_place_time_us.unwrap_or(line.out_of_place_time_us),
        });
    }
    Ok(all)
}

/// Reads one JSON document or several. Documents without a time, such as one about the machine, are
/// skipped. If no document has a time, the error is about the first document.
fn from_json(text: &str) -> std::result::Result<Vec<Measured>, Problem> {
    let (mut all, mut first_problem) = (Vec::new(), None);
    let mut documents = serde_json::Deserializer::from_str(text).into_iter::<Value>();
    while let Some(document) = documents.next() {
        let document = document.map_err(|error| (error.line(), error.to_string()))?;
        if let Some(results) = document.get("results").and_then(Value::as_array) {
            all.extend(results.iter().filter_map(|row| from_result(&document, row)));
            continue;
        }
        match from_line(&document) {
            Ok(measured) => all.push(measured),
            Err(problem) => {
                let line = 1 + text[..documents.byte_offset()].matches('\n').count();
                first_problem.get_or_insert((line, problem));
            }
        }
    }
    first_problem.filter(|_| all.is_empty()).map_or(Ok(all), Err)
}

/// Reads a line of another program.
fn from_line(line: &Value) -> std::result::Result<Measured, String> {
    let lacks = |key: &str| format!("no usable \"{key}\"");
    let name = line.get("side").and_then(Value::as_str).ok_or(lacks("side"))?;
    let nproc = line.get("ranks").and_then(Value::as_u64).filter(|&n| n > 0);
    let bytes = line.get("bytes").and_then(Value::as_u64).filter(|&n| n > 0);
    let ms = line.get("ms").and_then(Value::as_f64).filter(|&ms| ms > 0.0);
    // By default the time is for an operation in place.
    let is_in_place = line.get("in_place").and_then(Value::as_bool).unwrap_or(true);
    let name = if is_in_place { name.to_owned() } else { format!("{name}, out of place") };
    // By default the operation is an all-reduce.
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

/// Reads a row of a `-J` file. Files of paceline have the number of ranks in the row; those of nccl-tests
/// list the devices.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples;

    fn loaded(text: &str) -> Result<Vec<Measured>> {
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
        let mut out_of_place = samples::row(2, 8, 5.0);
        out_of_place.in_place = None;
        let report = samples::report(vec![
            samples::row(2, 1000, 20.0),
            samples::row(4, 8, 7.0),
            out_of_place,
        ]);
        let time = |(nproc, bytes, time_us)| Measured {
            algorithm: Some("units".to_owned()),
            op: Some("all_reduce".to_owned()),
            ..samples::time("shm (other)", nproc, bytes, time_us)
        };
        let expected = [(2, 8, 5.0), (2, 1000, 20.0), (4, 8, 7.0)].map(time);
        assert_eq!(loaded(&files::json(&report)).unwrap(), expected);
        assert_eq!(loaded(&files::csv(&report.rows)).unwrap(), expected);
    }

    #[test]
    fn algorithms_are_kept_apart() {
        let mut ring = samples::row(2, 1000, 90.0);
        ring.algorithm = "ring".to_owned();
        let report = samples::report(vec![samples::row(2, 1000, 20.0), ring]);
        let found = loaded(&files::json(&report)).unwrap();
        let names: Vec<_> = found.iter().map(|of| (&*of.name, of.time_us)).collect();
        assert_eq!(names, [("shm units (other)", 20.0), ("shm ring (other)", 90.0)]);
    }

    #[test]
    fn lines_of_other_programs_are_read() {
        let line = |bytes: u64, ms: f64| {
            format!(
                "{{\"side\": \"torch-gloo\", \"ranks\": 2, \"bytes\": {bytes}, \"ms\": {ms}}}\n"
            )
        };
        let points = |text: String| -> Vec<_> {
            loaded(&text).unwrap().iter().map(|of| (of.bytes, of.time_us)).collect()
        };
        let machine = "{\"machine\": \"some\"}\n\n";
        assert_eq!(
            points([machine, &line(2000, 2.0), &line(1000, 1.0)].concat()),
            [(1000, 1000.0), (2000, 2000.0)]
        );
        assert_eq!(points(line(1000, 3.6)), [(1000, 3600.0)], "a single line");
        let series = loaded(&line(1000, 3.6)).unwrap();
        assert_eq!(series[0].op.as_deref(), Some("all_reduce"), "the operation is not named");
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
        let expected = [(1024, 13.0), (2048, 14.0)];
        let expected = expected.map(|(bytes, us)| samples::time("nccl-tests", 2, bytes, us));
        assert_eq!(loaded(text).unwrap(), expected);
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
        let bad_csv = format!("{}\nshm,units,two", files::csv(&[samples::row(2, 8, 1.0)]));
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
