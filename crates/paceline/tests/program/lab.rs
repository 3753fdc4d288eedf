//! `paceline lab`, from flags to table, page and files. Every experiment runs at its smallest size; these tests do not check
//! times.

use std::collections::BTreeSet;

use crate::common::{Run, Sandbox, json};
use serde_json::Value;

/// One round of a few steps of a network that takes no time.
const SMALL: &str = "--rounds 1 --seconds 0 --warmup-steps 1 --output out";
const STEPS: &str = "--steps 3";
const NET: &str = "--model cnn --channels 4 8 --hidden 8 --samples 600 --image 8 8 1";

fn lab(sandbox: &Sandbox, flags: &str) -> Run {
    sandbox.run(&format!("lab {flags}"))
}

/// Makes an experiment at its smallest size, and returns what it printed and its rows.
#[track_caller]
fn make(name: &str, flags: &str) -> (Sandbox, Run, Vec<Value>) {
    let sandbox = Sandbox::new();
    let steps = if flags.contains("--steps ") { "" } else { STEPS };
    let run = lab(&sandbox, &format!("{name} {SMALL} {steps} {NET} {flags}")).ok();
    let found = json(&sandbox.path("out/lab.json"));
    assert_eq!((&found["experiment"], &found["rounds"]), (&name.into(), &1.into()));
    for file in ["report.html", "report.csv", "report.json", "report.md"] {
        assert!(sandbox.path("out").join(file).is_file(), "{file}");
    }
    assert!(sandbox.path("out").join(format!("{name}.svg")).is_file());
    let rows: Vec<Value> = found["rows"].as_array().unwrap().clone();
    for row in &rows {
        assert_eq!(row["failure"], Value::Null, "{row}");
        let figures = &row["figures"];
        for figure in [
            "samples_per_s",
            "step_ms_median",
            "step_ms_p99",
            "busy_pct",
            "peak_mb",
            "gradients_mb",
        ] {
            assert!(figures[figure]["median"].is_number(), "{figure} of {row}");
        }
        // With one round nothing is said to differ.
        assert_eq!(row["effect"], Value::Null);
    }
    (sandbox, run, rows)
}

fn variants(rows: &[Value]) -> BTreeSet<&str> {
    rows.iter().map(|row| row["variant"].as_str().unwrap()).collect()
}

/// The rows of the scenes whose name has this part.
fn of_scene<'a>(rows: &'a [Value], part: &str) -> Vec<&'a Value> {
    rows.iter().filter(|row| row["scene"].as_str().unwrap().contains(part)).collect()
}

#[test]
fn copies_are_made_ahead_and_beside() {
    let (_, run, rows) = make("async-copy", "");
    let all = variants(&rows);
    for name in ["in line", "a thread ahead", "pinned", "non-blocking", "copy stream", "all three"]
    {
        assert!(all.contains(name), "{name} of {all:?}");
    }
    assert!(
        rows.iter().all(|row| row["has_bits_of_base"] == true),
        "how batches come changes no bit"
    );
    run.line("Load of a batch on the processor, hidden and exposed");
    let decoded = of_scene(&rows, "takes 400 us");
    let load = |row: &Value| row["figures"]["data_ms"]["median"].as_f64().unwrap();
    // 64 samples of 400 us each, in line.
    assert!(load(decoded[0]) >= 25.0, "{}", decoded[0]);
}

#[test]
fn images_lie_in_two_layouts() {
    let (_, run, rows) = make("memory-layout", "");
    assert_eq!(variants(&rows), ["nchw", "nhwc"].into());
    assert!(rows.iter().all(|row| row["has_bits_of_base"] == true));
    for operation in ["forward", "input gradient", "weight gradient", "pool", "conversion"] {
        assert!(run.stdout.contains(operation), "{operation}: {}", run.stdout);
    }
}

#[test]
fn types_and_fusion_are_crossed() {
    // A run in which each step overflows fails.
    let (sandbox, run, rows) = make("precision-fusion", "--steps 12");
    assert_eq!(rows.len(), 6);
    assert!(rows[4..].iter().all(|row| row["is_timed"] == false));
    for line in ["Bytes moved, and the roofline", "The losses, and how far they are apart"] {
        run.line(line);
    }
    assert!(sandbox.path("out/precision-fusion-loss.svg").is_file());
    let tables = json(&sandbox.path("out/report.json"));
    let moved = tables["tables"]["roofline"].to_string();
    assert!(moved.contains("moved_mb"), "{moved}");
    // The scale that is too large overflows in the first steps, which are skipped.
    let losses = tables["tables"]["losses"].to_string();
    assert!(losses.contains("skipped"), "{losses}");
    let row = run.stdout.lines().rfind(|line| line.contains("2^28")).unwrap();
    let skipped: u32 = row.split_whitespace().next_back().unwrap().parse().unwrap();
    assert!(skipped >= 2, "{row}");
}

#[test]
fn ways_to_divide_the_work_are_compared() {
    let (_, run, rows) = make("parallelism", "--links default,1gbit:50us");
    assert_eq!(rows.len(), 10);
    run.line("Predicted and measured");
    let name = "both, 2 stages of 2 ranks";
    assert!(variants(&rows).contains(name));
}

#[test]
fn accumulation_has_the_bits_of_more_ranks() {
    let (_, run, rows) = make("grad-accum", "--links 1gbit:50us");
    run.line("With --accumulation-order tree, 4 ranks, 2 ranks with 2 batches and 1 rank with 4 end with the same bits.");
    let sent = |name: &str| {
        let row = rows.iter().find(|row| row["variant"] == name).unwrap();
        row["figures"]["comm_mb_per_step"]["median"].as_f64().unwrap()
    };
    let ratio = sent("8 batches, each reduced") / sent("8 batches, no_sync");
    assert!((ratio - 8.0).abs() < 0.3, "{ratio} times as much is sent");
}

#[test]
fn recording_has_its_price() {
    let (sandbox, run, rows) = make("profiling", "");
    assert_eq!(rows.len(), 4);
    run.line("What an event costs");
    run.line("Operations and their limit");
    run.line("Operations take ");
    let folder = run.line("A trace to look at: ");
    let command = {
        let mut command = sandbox.paceline();
        command.args(["analyze", folder]);
        command
    };
    Run::of(command).ok();
    let again = lab(&sandbox, &format!("profiling {SMALL} {STEPS} {NET}")).ok();
    again.line("Goes on after 4 of 4 runs");
    // One page of all that is there, also where an experiment is, and again.
    for folder in [".", ".", "out", "out"] {
        lab(&sandbox, &format!("--report {folder}")).ok().line("1 experiment");
        for ending in ["html", "csv"] {
            assert!(sandbox.path(folder).join(format!("experiments.{ending}")).is_file());
        }
    }
}

#[test]
fn buckets_are_measured_and_replayed() {
    let (sandbox, run, rows) = make("buckets", "--links default,1gbit:1ms --sizes 0.001,1");
    run.line("Measured and replayed");
    assert!(run.stdout.contains("leave --bucket-cap-mb as it is"), "{}", run.stdout);
    assert!(sandbox.path("out/buckets-curve.svg").is_file());
    let with_buckets = rows.iter().filter(|row| row["variant"] != "no communication");
    assert!(with_buckets.into_iter().all(|row| row["has_bits_of_base"] == true));
    // 8 parameters. Each operation takes 3 ms at least, and nothing hides those of the naive way.
    let of = |variant: &str, figure: &str| {
        let on_link = of_scene(&rows, "1ms");
        let is_of = |row: &&&Value| row["variant"].as_str().unwrap().starts_with(variant);
        let row = on_link.iter().find(is_of).unwrap();
        row["figures"][figure]["median"].as_f64().unwrap()
    };
    let counts = ["1 MiB", "naive", "flat", "overlapped"].map(|of_way| of(of_way, "num_buckets"));
    assert_eq!(counts, [1.0, 8.0, 1.0, 8.0]);
    assert_eq!(of("no communication", "num_buckets"), 0.0);
    assert!(of("0.001 MiB", "num_buckets") > 1.0 && of("naive", "comm_exposed_ms") >= 24.0);
    lab(&sandbox, "grad-accum --sizes 1").refused(&["--sizes is for buckets"]);
}

#[test]
fn mistakes_are_told_before_anything_runs() {
    let sandbox = Sandbox::new();
    std::fs::create_dir(sandbox.path("full")).unwrap();
    std::fs::write(sandbox.path("full/file"), "x").unwrap();
    std::fs::create_dir(sandbox.path("empty")).unwrap();
    for (flags, part) in [
        ("asynk-copy", "a similar value exists: 'async-copy'"),
        ("async-copy --pin-memory", "the experiment varies it"),
        ("grad-accum --links banana", "banana"),
        ("grad-accum --global-batch-size 100", "pass a multiple of 16"),
        ("parallelism --global-batch-size 20", "pass a multiple of 8"),
        ("buckets --nproc 1", "pass 2 or more"),
        ("buckets --sizes 1,0", "'--sizes <MiB>': pass a number above zero"),
        ("buckets --bucket-cap-mb 5", "pass --sizes"),
        ("async-copy --rounds 0", "'--rounds <R>': pass a number from 1 to 1000"),
        ("async-copy --rounds 1000000000000", "--rounds"),
        ("async-copy --seconds nan", "'--seconds <SECONDS>': pass a finite number"),
        ("async-copy --within 0", "'--within <PCT>'"),
        ("async-copy --output full", "not empty"),
        ("async-copy --output full/file", "full/file"),
        ("--report empty", "there is no experiment in it"),
        ("--report nowhere", "nowhere"),
    ] {
        lab(&sandbox, flags).refused(&[part]);
    }
    assert!(!sandbox.path("lab").exists(), "nothing is written");
    // A folder of another version is another experiment.
    let small = format!("memory-layout {SMALL} {STEPS} {NET}");
    lab(&sandbox, &small).ok();
    let file = sandbox.path("out/sweep-settings.json");
    let mut settings = json(&file);
    settings["version of paceline"] = "0.0.1".into();
    std::fs::write(&file, settings.to_string()).unwrap();
    lab(&sandbox, &small).refused(&["version of paceline: 0.0.1 there"]);
    // Rows that are cut off, or none.
    std::fs::write(sandbox.path("out/lab.json"), "{\"experiment\":").unwrap();
    lab(&sandbox, "--report out").refused(&["lab.json cannot be read"]);
}
