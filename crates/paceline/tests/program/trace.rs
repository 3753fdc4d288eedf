//! `paceline trace merge` on traces of a run, and on files that cannot be merged.

use std::fs::{self, File};

use crate::common::{Run, Sandbox, TINY};
use flate2::read::GzDecoder;
use serde_json::Value;

fn merge(sandbox: &Sandbox, args: &str) -> Run {
    sandbox.run(&format!("trace merge {args}"))
}

#[test]
fn the_traces_of_a_run_become_one() {
    let sandbox = Sandbox::new();
    let flags = "--nproc 2 --global-batch-size 20 --profile --profile-wait 1 --profile-warmup 1 \
                 --profile-active 3";
    sandbox.train(&format!("{TINY} {flags}")).ok();
    let run = merge(&sandbox, "profile").ok();
    run.line("Ranks 0, 1: ");
    assert_eq!(run.line("Clocks: "), "all ranks read the same one.");
    run.line("Written: merged.json.gz");
    let packed = File::open(sandbox.path("merged.json.gz")).unwrap();
    let merged: Value = serde_json::from_reader(GzDecoder::new(packed)).unwrap();
    let events = merged["traceEvents"].as_array().unwrap();
    // Both ranks are on one time line: their third steps overlap, and no process belongs to both.
    let steps: Vec<&Value> = events.iter().filter(|e| e["name"] == "ProfilerStep#4").collect();
    let [first, second] = steps[..] else { panic!("{steps:?}") };
    let time = |event: &Value| (event["ts"].as_f64().unwrap(), event["dur"].as_f64().unwrap());
    let ((begin, len), (other_begin, other_len)) = (time(first), time(second));
    assert!(begin < other_begin + other_len && other_begin < begin + len);
    assert_ne!(first["pid"], second["pid"]);
    // Every collective has an arrow from the rank that came first to the one that came last.
    let ends = |phase: &str| {
        let is_end = |e: &&Value| e["cat"] == "across_ranks" && e["ph"] == phase;
        events.iter().filter(is_end).count()
    };
    let is_reduce = |e: &&Value| e["args"]["Collective name"] == "all_reduce";
    assert!(ends("s") >= 3);
    assert_eq!((ends("s"), ends("f")), (ends("f"), events.iter().filter(is_reduce).count() / 2));

    // An existing file is not overwritten, unless the user asks for it.
    let words = ["merged.json.gz is there already", "--force"];
    merge(&sandbox, "profile").refused(&words);
    merge(&sandbox, "profile --force").ok();
}

#[test]
fn what_cannot_be_merged_is_named() {
    let sandbox = Sandbox::new();
    let failed = |args: &str, word: &str| {
        merge(&sandbox, args).ended_with(1, &[word]);
        assert!(!sandbox.path("merged.json.gz").exists());
    };
    fs::create_dir(sandbox.path("empty")).unwrap();
    failed("empty", "No trace files found.");
    failed("nowhere", "nowhere");
    sandbox.write("rank_0.json", b"{\"traceEvents\": [");
    failed("rank_0.json", "rank_0.json");
    for name in ["some.json", "other.json"] {
        sandbox.write(name, b"{\"traceEvents\": []}");
    }
    failed("some.json other.json", "other.json does not say which rank it is of");
    sandbox.write("rank_1.json", b"{\"traceEvents\": []}");
    merge(&sandbox, "rank_1.json -o rank_1.json --force")
        .refused(&["rank_1.json is one of the traces"]);
}
