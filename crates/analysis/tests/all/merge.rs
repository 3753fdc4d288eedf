//! `ranks::merge` on files, checked by the rules of Perfetto's importer.

use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use crate::perfetto::{Imported, import};
use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use paceline_analysis::TraceError;
use paceline_analysis::json::{Pull, float};
use paceline_analysis::ranks::ClockSource;
use paceline_analysis::ranks::merge::{LeftOut, Merged, merge};
use paceline_analysis::read::{Select, find};
use serde_json::{Value, json};

/// Writes traces as `rank_<r>/worker_<r>.1.pt.trace.json` and merges them.
fn merged(folder: &Path, traces: &[Value]) -> Result<(Merged, Value), TraceError> {
    for (rank, trace) in traces.iter().enumerate() {
        let folder = folder.join(format!("rank_{rank}"));
        fs::create_dir_all(&folder).unwrap();
        let path = folder.join(format!("worker_{rank}.1.pt.trace.json"));
        fs::write(path, serde_json::to_string(trace).unwrap()).unwrap();
    }
    merge_folder(folder)
}

fn merge_folder(folder: &Path) -> Result<(Merged, Value), TraceError> {
    let window = find(&[folder.to_owned()], Select::Latest).unwrap().remove(0);
    let mut out = Vec::new();
    let merged = merge(&window.files, true, &mut out);
    // A trace that cannot be used is found before the first byte is written.
    assert!(merged.is_ok() || out.is_empty(), "{} bytes", out.len());
    let merged = merged?;
    let mut text = String::new();
    GzDecoder::new(&out[..]).read_to_string(&mut text).unwrap();
    let mut trace = serde_json::from_str(&text).unwrap();
    take_numbers(&text, &mut trace);
    Ok((merged, trace))
}

/// Parses all times again, as the nearest floating-point numbers: `serde_json` errs in the last bit.
fn take_numbers(text: &str, trace: &mut Value) {
    let mut pull = Pull::new(text.as_bytes());
    pull.begin_object().unwrap();
    while let Some(key) = pull.next_key().unwrap() {
        if key != b"traceEvents" {
            pull.skip().unwrap();
            continue;
        }
        pull.begin_array().unwrap();
        for event in trace["traceEvents"].as_array_mut().unwrap() {
            assert!(pull.next_item().unwrap());
            pull.begin_object().unwrap();
            while let Some(key) = pull.next_key().unwrap() {
                let key = String::from_utf8(key.to_vec()).unwrap();
                let value = pull.value().unwrap();
                if key == "ts" || key == "dur" {
                    event[&key] = float(value.bytes().unwrap()).unwrap().into();
                }
            }
        }
        assert!(!pull.next_item().unwrap());
    }
}

/// Imports a trace. The test fails if the import has errors.
fn imported(trace: &Value) -> Imported {
    let imported = import(trace);
    assert!(imported.errors.is_empty(), "{:?}", imported.errors);
    imported
}

fn x(name: &str, cat: &str, tid: Value, ts: f64, dur: f64) -> Value {
    json!({"ph": "X", "name": name, "cat": cat, "pid": 0, "tid": tid, "ts": ts, "dur": dur})
}

fn trace(rank: usize, run_facts: Value, events: Vec<Value>) -> Value {
    json!({
        "distributedInfo": {"backend": "shm", "rank": rank, "world_size": 2},
        "baseTimeNanoseconds": 1_700_000_000_000_000_000i64,
        "paceline": run_facts,
        "traceEvents": events,
    })
}

/// A step with an all-reduce that begins at `start` and ends at 90, by a clock that is ahead by `ahead`.
/// Times are in microseconds.
fn rank(rank: usize, start: f64, ahead: f64) -> Value {
    let offset = (-ahead * 1000.0).to_string();
    let error = if rank == 0 { "0" } else { "700" };
    let run_facts = json!({"clock_offset_begin_ns": offset, "clock_offset_end_ns": offset,
                       "clock_offset_error_ns": error});
    let mut reduce = x("ncclDevKernel_AllReduce", "kernel", json!(20), ahead + start, 90.0 - start);
    reduce["args"] = json!({"Collective name": "all_reduce", "Seq": 3, "correlation": 1,
                            "Process Group Name": "0", "External id": 1, "dtype": "f32"});
    let events = vec![
        json!({"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "python"}}),
        json!({"ph": "M", "name": "process_labels", "pid": 0, "args": {"labels": "GPU 0"}}),
        json!({"ph": "M", "name": "thread_name", "pid": 0, "tid": 20, "args": {"name": "stream 20"}}),
        x("ProfilerStep#1", "user_annotation", json!("main"), ahead, 100.0),
        x("cudaLaunchKernel", "cuda_runtime", json!("main"), ahead + 5.0, 0.0),
        json!({"ph": "s", "name": "ac2g", "cat": "ac2g", "id": 1, "pid": 0, "tid": "main",
               "ts": ahead + 5.0}),
        reduce,
        json!({"ph": "f", "name": "ac2g", "cat": "ac2g", "id": 1, "pid": 0, "tid": 20,
               "ts": ahead + start, "bp": "e"}),
        json!({"ph": "C", "name": "memory", "pid": 0, "ts": ahead + 50.0, "args": {"bytes": 7}}),
    ];
    trace(rank, run_facts, events)
}

fn named<'a>(trace: &'a Value, name: &str) -> Vec<&'a Value> {
    let events = trace["traceEvents"].as_array().unwrap();
    events.iter().filter(|event| event["name"] == name && event["ph"] != "M").collect()
}

#[test]
fn ranks_lie_side_by_side_on_one_time_line() {
    let folder = tempfile::tempdir().unwrap();
    let (merged, trace) = merged(folder.path(), &[rank(0, 30.0, 0.0), rank(1, 60.0, 5e6)]).unwrap();
    assert_eq!((merged.num_joined, merged.left_out, merged.num_split), (1, LeftOut::default(), 0));
    assert_eq!(merged.clocks.ranks[1].source, ClockSource::Measured);
    let imported = imported(&trace);
    assert_eq!(imported.num_slices, 6);
    let processes: Vec<_> = imported.processes.values().collect();
    assert_eq!(processes, ["rank 0: python, GPU 0", "rank 1: python, GPU 0"]);
    let threads: Vec<_> = imported.threads.values().map(String::as_str).collect();
    // Counters belong to a process, not to a thread. Their row is named 0.
    assert_eq!(threads, ["stream 20", "main", "0", "stream 20", "main", "0"]);
    // An arrow leads from each launch to its kernel, and one from the collective's first rank to its last.
    let thread = |rank: usize, name: &str| {
        let of = |((pid, _), named): &(&(u64, u64), &String)| {
            imported.processes[pid].starts_with(&format!("rank {rank}")) && *named == name
        };
        *imported.threads.iter().find(of).unwrap().0
    };
    let mut flows = imported.flows.clone();
    flows.sort();
    let launch = |rank| ("ac2g".to_owned(), thread(rank, "main"), thread(rank, "stream 20"));
    let across = ("collective".to_owned(), thread(0, "stream 20"), thread(1, "stream 20"));
    assert_eq!(flows, [launch(0), launch(1), across]);
    let begins: Vec<_> = named(&trace, "ncclDevKernel_AllReduce")
        .iter()
        .map(|event| (event["ts"].as_f64().unwrap(), event["dur"].as_f64().unwrap()))
        .collect();
    assert_eq!(begins, [(30.0, 60.0), (60.0, 30.0)]);
    let ties: Vec<_> = named(&trace, "ncclDevKernel_AllReduce")
        .iter()
        .map(|event| event["args"]["correlation"].as_u64().unwrap())
        .collect();
    assert_eq!(ties, [1, 1 + (1 << 40)]);
    assert_eq!(named(&trace, "ncclDevKernel_AllReduce")[0]["args"]["dtype"], "f32");
    assert_eq!(trace["baseTimeNanoseconds"], 1_700_000_000_000_000_000i64);
    assert_eq!(
        trace["paceline"]["clock_1"],
        "measured: -5000000000 ns at its begin, \
                                              -5000000000 ns at its end, within 700 ns"
    );
}

#[test]
fn rows_that_do_not_nest_are_split() {
    let row = |start: f64, dur: f64| x("op", "cpu_op", json!(7), start, dur);
    let events = vec![
        row(10.0, 20.0),
        row(0.0, 20.0),
        // Within the row from 0 to 20: the next one begins with it, the one after ends with it.
        row(0.0, 5.0),
        row(5.0, 15.0),
        row(20.0, 30.0),
        row(25.0, 100.0),
        json!({"ph": "B", "name": "begun", "pid": 0, "tid": 7, "ts": 40}),
        json!({"ph": "E", "name": "begun", "pid": 0, "tid": 7, "ts": 45}),
        json!({"ph": "B", "name": "endless", "pid": 0, "tid": 7, "ts": 46}),
    ];
    assert!(!import(&json!({"traceEvents": events[..6]})).errors.is_empty());
    let folder = tempfile::tempdir().unwrap();
    let (merged, trace) = merged(folder.path(), &[trace(0, json!({}), events)]).unwrap();
    let imported = imported(&trace);
    assert_eq!((imported.num_slices, merged.num_split), (8, 2));
    let threads: Vec<_> = imported.threads.values().map(String::as_str).collect();
    assert_eq!(threads, ["7", "7 (2)", "7 (3)"]);
    assert_eq!(named(&trace, "begun")[0]["dur"].as_f64(), Some(5.0));
    assert_eq!(named(&trace, "endless")[0]["dur"].as_f64(), Some(79.0));
}

#[test]
fn nanoseconds_survive_readers_that_compute_in_floating_point() {
    // Events that touch each other, and ends that coincide, with every combination of digits after the point.
    let us = |ns: i64| ns as f64 / 1000.0;
    let mut events = Vec::new();
    for i in 0..3000 {
        let (start, len) = (4_399_454_557_000_000 + 1_003 * i, 1_003);
        events.push(x("outer", "cpu_op", json!(7), us(start), us(len)));
        events.push(x("inner", "cpu_op", json!(7), us(start + 1 + i % 500), us(len - 1 - i % 500)));
    }
    let folder = tempfile::tempdir().unwrap();
    let (merged, trace) = merged(folder.path(), &[trace(0, json!({}), events)]).unwrap();
    assert_eq!((imported(&trace).num_slices, merged.num_split), (6000, 0));
}

#[test]
fn arrows_from_or_to_nowhere_are_left_out() {
    let flow = |ph: &str, ts: f64, id: Value| json!({"ph": ph, "name": "fwdbwd", "cat": "fwdbwd", "id": id, "pid": 0, "tid": 7, "ts": ts});
    let events = vec![
        // One arrow begins before all events, one has no id, and two have the same id.
        flow("s", 1.0, json!(5)),
        flow("s", 12.0, Value::Null),
        flow("s", 12.0, json!(6)),
        flow("f", 35.0, json!(6)),
        flow("s", 13.0, json!(6)),
        flow("f", 45.0, json!(6)),
        flow("s", 10.0, json!("0xab")),
        flow("f", 45.0, json!("0xab")),
        x("forward", "cpu_op", json!(7), 10.0, 10.0),
        x("backward", "cpu_op", json!(7), 40.0, 10.0),
        x("next", "cpu_op", json!(7), 60.0, 10.0),
        json!({"ph": "X", "name": "no time", "pid": 0, "tid": 7}),
        json!({"ts": 3, "name": "no phase", "pid": 0, "tid": 7}),
        json!({"ph": "C", "ts": 3, "name": "no values", "pid": 0, "tid": 7}),
        x("negative", "cpu_op", json!(7), 80.0, -4.0),
    ];
    let folder = tempfile::tempdir().unwrap();
    let (merged, trace) = merged(folder.path(), &[trace(0, json!({}), events)]).unwrap();
    let imported = imported(&trace);
    assert_eq!((imported.flows.len(), imported.num_slices), (3, 4));
    let expected =
        LeftOut { without_time: 1, without_meaning: 2, loose_arrows: 2, ..LeftOut::default() };
    assert_eq!(merged.left_out, expected);
    assert_eq!(merged.oddities["negative duration"], 1);
    assert_eq!(merged.oddities["an X without a ts"], 1);
}

#[test]
fn texts_and_structures_are_copied_as_they_are() {
    let mut event = x("a \"b\"\\\n\u{e9}", "cpu_op", json!(7), 1.0, 2.0);
    event["args"] = json!({
        "Input Dims": [[2, [3]], [], {"k\"": null}], "on": true, "off": false, "x": -1.5e-7,
        "text": "tab\t\u{1F600}", "External id": "word",
    });
    let args = event["args"].clone();
    let folder = tempfile::tempdir().unwrap();
    let (_, trace) = merged(folder.path(), &[trace(0, json!({}), vec![event])]).unwrap();
    let copied = named(&trace, "a \"b\"\\\n\u{e9}")[0];
    assert_eq!(copied["args"], args);
}

#[test]
fn a_rank_without_a_clock_is_brought_in_by_its_collectives() {
    let strip = |mut trace: Value| {
        trace["paceline"] = json!({});
        trace
    };
    let traces = [strip(rank(0, 30.0, 0.0)), strip(rank(1, 60.0, -40.0))];
    let folder = tempfile::tempdir().unwrap();
    let (merged, trace) = merged(folder.path(), &traces).unwrap();
    assert_eq!(merged.clocks.ranks[1].source, ClockSource::Estimated { num_collectives: 1 });
    let begins: Vec<_> = named(&trace, "ProfilerStep#1").iter().map(|e| e["ts"].as_f64()).collect();
    assert_eq!(begins, [Some(0.0), Some(0.0)]);
    imported(&trace);
}

#[test]
fn a_file_that_cannot_be_read_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path: PathBuf = folder.path().join("rank_0").join("worker_0.1.pt.trace.json.gz");
    fs::create_dir(path.parent().unwrap()).unwrap();
    let mut packed = GzEncoder::new(Vec::new(), Compression::fast());
    packed.write_all(serde_json::to_string(&rank(0, 30.0, 0.0)).unwrap().as_bytes()).unwrap();
    let packed = packed.finish().unwrap();
    fs::write(&path, &packed[..packed.len() - 9]).unwrap();
    let error = merge_folder(folder.path()).unwrap_err();
    let expected = format!("{}: the gzip file is cut off, after ", path.display());
    assert!(error.to_string().starts_with(&expected), "{error}");
}

#[test]
fn traces_without_events_or_with_times_of_no_use_are_refused() {
    for text in [json!({}), json!([]), json!({"traceEvents": [{"ph": "M", "name": "x"}]})] {
        let folder = tempfile::tempdir().unwrap();
        let error = merged(folder.path(), &[text]).unwrap_err();
        assert!(error.to_string().contains("worker_0.1.pt.trace.json: no events"), "{error}");
    }
    let folder = tempfile::tempdir().unwrap();
    let long = x("op", "cpu_op", json!(7), 9e15, 9.2e15);
    let error = merged(folder.path(), &[trace(0, json!({}), vec![long])]).unwrap_err();
    assert!(error.to_string().contains("more than 73 years"), "{error}");
    // Such an event is left out if it is of a kind that the analysis does not use.
    let op = |cat: &str, ts: f64, dur: f64| x("op", cat, json!(7), ts, dur);
    let events = vec![op("other", 9e15, 1.0), op("other", 1.0, 9e15), op("cpu_op", 1.0, 1.0)];
    let (merged, _) = merged(folder.path(), &[trace(0, json!({}), events)]).unwrap();
    assert_eq!((merged.num_events, merged.left_out.without_time), (1, 2));
}

#[test]
fn rows_that_overlap_too_often_are_thinned_out_and_counted() {
    let op = |i: usize| x("op", "cpu_op", json!(7), i as f64, 1e6);
    let folder = tempfile::tempdir().unwrap();
    let events = (0..70_000).map(op).collect();
    let (merged, trace) = merged(folder.path(), &[trace(0, json!({}), events)]).unwrap();
    assert_eq!((merged.num_events, merged.num_split), (256, 255));
    assert_eq!(merged.left_out, LeftOut { crowded: 70_000 - 256, ..LeftOut::default() });
    assert_eq!(imported(&trace).num_slices, 256);
}

#[test]
fn traces_of_other_times_are_probably_of_another_run() {
    let folder = tempfile::tempdir().unwrap();
    let mut old = rank(1, 60.0, 0.0);
    old["baseTimeNanoseconds"] = json!(1_600_000_000_000_000_000i64);
    let (merged, _) = merged(folder.path(), &[rank(0, 30.0, 0.0), old]).unwrap();
    assert_eq!(merged.apart, [1]);
}

#[test]
fn a_merged_trace_is_not_taken_for_that_of_a_rank() {
    let folder = tempfile::tempdir().unwrap();
    let (_, trace) = merged(folder.path(), &[rank(0, 30.0, 0.0), rank(1, 60.0, 0.0)]).unwrap();
    let path = folder.path().join("merged.json");
    fs::write(&path, trace.to_string()).unwrap();
    let error = find(std::slice::from_ref(&path), Select::Latest).unwrap_err();
    assert!(error.to_string().starts_with(&path.display().to_string()), "{error}");
    assert!(error.to_string().contains("pass the folder of the ranks' own files"), "{error}");
    // Beside traces that profilers have named, it is not looked at.
    assert_eq!(merge_folder(folder.path()).unwrap().0.num_joined, 1);
}

#[test]
fn the_rules_find_what_is_wrong() {
    let wrong = |event: Value| import(&json!({"traceEvents": [event]})).errors;
    let found = |event| wrong(event).into_keys().collect::<Vec<_>>();
    assert_eq!(
        found(x("a", "b", json!(1), -1.0, 2.0)),
        ["trace_sorter_negative_timestamp_dropped"]
    );
    assert_eq!(found(x("a", "b", json!(1), 1.0, -2.0)), ["slice_negative_duration"]);
    assert_eq!(found(json!({"ph": "X", "pid": 1, "tid": 1})), ["json_tokenizer_failure"]);
    let flow = json!({"ph": "s", "pid": 1, "tid": 1, "ts": 1, "id": 1});
    assert_eq!(found(flow), ["flow_no_enclosing_slice"]);
    let overlap = [x("a", "", json!(1), 0.0, 10.0), x("b", "", json!(1), 5.0, 10.0)];
    let errors = import(&json!({"traceEvents": overlap})).errors;
    assert_eq!(errors.into_keys().collect::<Vec<_>>(), ["slice_spill_overlapping_complete_event"]);
}
