//! Reads measurements for `--compare`: the files that `-J` writes, the `-J` files and the logs of nccl-tests, and the lines of JSON
//! that other programs print.
//!
//! Takes a file and returns its times. The error for a file that cannot be used names the
//! file, the line, and the expected value.

use std::path::Path;

use paceline_failure::{Failure, Result};
use paceline_files::Printable;
use serde_json::Value;

use super::log;
use super::series::{Measured, named, series};

const EXPECTED: &str = "a report of paceline bench, a log or a JSON file of nccl-tests, or lines such as \
     {\"side\": \"name\", \"ranks\": 2, \"bytes\": 1000000, \"ms\": 3.6}";

/// The most bytes of a file. A report of all operations, sizes and ranks has about one million.
pub(super) const MAX_BYTES: u64 = 64 << 20;

/// The most times of a file.
const MAX_TIMES: usize = 1_000_000;

/// The line number of a problem in a text, and its description.
pub(super) type Problem = (usize, String);

/// The times of a file, one series after the other.
pub fn load(path: &Path) -> Result<Vec<Measured>> {
    let file = path.printable();
    let refuse = |place: String, problem: String| {
        Failure::Usage(format!("--compare {place}: {problem}; expected {EXPECTED}"))
    };
    let text = paceline_files::read_stream(path, MAX_BYTES)
        .map_err(|e| refuse(file.to_string(), e.to_string()))?;
    let measured = if log::is_log(&text) { log::parse(&text) } else { from_json(&text) };
    let measured = measured.map_err(|(line, problem)| refuse(format!("{file}:{line}"), problem))?;
    if measured.is_empty() {
        return Err(refuse(file.to_string(), "no row with a time".to_owned()));
    }
    if measured.len() > MAX_TIMES {
        return Err(refuse(file.to_string(), format!("more than {MAX_TIMES} times")));
    }
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    Ok(series(named(measured, &stem)))
}

/// Reads one JSON document or several. Documents without a time, such as one about the machine, are
/// skipped. If no document has a time, the error is about the first document.
pub(super) fn from_json(text: &str) -> std::result::Result<Vec<Measured>, Problem> {
    let (mut all, mut first_problem) = (Vec::new(), None);
    let mut documents = serde_json::Deserializer::from_str(text).into_iter::<Value>();
    while let Some(document) = documents.next() {
        let document = document.map_err(|error| (error.line(), error.to_string()))?;
        let end = documents.byte_offset();
        let problem = |problem| (1 + text[..end].matches('\n').count(), problem);
        if let Some(results) = document.get("results").and_then(Value::as_array) {
            for (at, row) in results.iter().enumerate() {
                let of_row = |error| problem(format!("result {}: {error}", at + 1));
                all.push(from_result(&document, row).map_err(of_row)?);
            }
            continue;
        }
        match from_line(&document) {
            Ok(measured) => all.push(measured),
            Err(error) => {
                first_problem.get_or_insert_with(|| problem(error));
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
    let ms = line.get("ms").and_then(Value::as_f64).and_then(usable);
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
fn from_result(document: &Value, row: &Value) -> std::result::Result<Measured, String> {
    let lacks = |key: &str| format!("no usable \"{key}\"");
    let word = |key: &str| row.get(key).and_then(Value::as_str).map(str::to_owned);
    let nproc = row.get("nproc").and_then(Value::as_u64).map(|nproc| nproc as usize);
    let program = || document.pointer("/args/0").and_then(Value::as_str).and_then(log::operation);
    let place = ["in_place", "out_of_place"].into_iter().find(|place| !row[place].is_null());
    let time = place.and_then(|place| row[place]["time"].as_f64()).and_then(usable);
    Ok(Measured {
        name: word("transport").unwrap_or("nccl-tests".to_owned()),
        algorithm: word("algorithm"),
        nproc: nproc.or_else(|| num_devices(&document["config"])).ok_or(lacks("devices"))?,
        op: word("op").or_else(program),
        bytes: row["size"].as_u64().ok_or(lacks("size"))?,
        time_us: time.ok_or(lacks("time"))?,
    })
}

/// The ranks of a group. nccl-tests lists the first device of each process.
fn num_devices(config: &Value) -> Option<usize> {
    let devices = config["devices"].as_array()?;
    let processes = devices.iter().filter(|device| device["group"] == devices[0]["group"]).count();
    let each = ["nthreads", "ngpus"].map(|key| config[key].as_u64().unwrap_or(1) as usize);
    each.into_iter().try_fold(processes, usize::checked_mul).filter(|&ranks| ranks > 0)
}

/// A time that can be compared.
pub(super) fn usable(time: f64) -> Option<f64> {
    (time.is_finite() && time > 0.0).then_some(time)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{files, samples};

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
    fn a_report_gives_its_series() {
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
        // The operation is in the program's name, and each process lists its first device.
        let eight = text.replace("\"devices\"", "\"nthreads\":1,\"ngpus\":4,\"devices\"");
        let named = eight.replace("\"config\"", "\"args\":[\"build/sendrecv_perf\"],\"config\"");
        let first = loaded(&named).unwrap().swap_remove(0);
        assert_eq!((first.nproc, first.op.as_deref()), (8, Some("send_recv")));
        for (from, to, problem) in [
            ("13.0", "\"nan\"", ":3: result 1: no usable \"time\"; expected ..."),
            ("14.0", "0", ":3: result 2: no usable \"time\"; expected ..."),
            (
                "\"time\":14.0",
                "\"cpu_time\":14.0",
                ":3: result 2: no usable \"time\"; expected ...",
            ),
            ("2048", "-1", ":3: result 2: no usable \"size\"; expected ..."),
            (
                "[{\"rank\":0},{\"rank\":1}]",
                "[]",
                ":3: result 1: no usable \"devices\"; expected ...",
            ),
        ] {
            assert_ne!(text.replace(from, to), text, "{from}");
            assert_eq!(refused(&text.replace(from, to)), problem);
        }
        let many = text.replace("\"devices\"", "\"nthreads\":9999999999999999999,\"devices\"");
        assert!(refused(&many).contains("no usable \"devices\""));
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
    }

    #[test]
    fn a_file_that_is_not_there_is_named() {
        let error = load(Path::new("/nowhere/a.json")).unwrap_err().to_string();
        assert!(error.starts_with("--compare /nowhere/a.json: No such file"), "{error}");
    }
}
