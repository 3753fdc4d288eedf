//! `paceline sweep`, from flags to table, files and chart, and the files that are left when it is killed.
//! These tests do not check times.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use crate::common::{Run, Running, Sandbox, TINY, json, signal};
use rustix::process::Signal;
use serde_json::Value;

/// Few steps, so that the tests take no time.
const SHORT: &str = "--epochs 1 --steps-per-epoch 4 --warmup-steps 1 --batch-size 8";

/// `paceline sweep` into the folder `out`, with these flags and these varied flags.
fn command(sandbox: &Sandbox, vary: &[&str], flags: &str) -> Command {
    let mut command = sandbox.paceline();
    command.arg("sweep").args(["--output", "out"]);
    command.args(vary.iter().flat_map(|vary| ["--vary", vary])).args(flags.split_whitespace());
    command
}

fn sweep(sandbox: &Sandbox, vary: &[&str], flags: &str) -> Run {
    Run::of(command(sandbox, vary, &format!("--samples 200 {SHORT} {flags}")))
}

/// All records, by the names of their files.
fn records(sandbox: &Sandbox) -> BTreeMap<String, Value> {
    let Ok(entries) = std::fs::read_dir(sandbox.path("out/records")) else {
        return BTreeMap::new();
    };
    let paths = entries.map(|entry| entry.unwrap().path());
    let is_whole = |path: &std::path::PathBuf| path.extension().is_some_and(|of| of == "json");
    let named = |path: &Path| path.file_name().unwrap().to_str().unwrap().to_owned();
    paths.filter(is_whole).map(|path| (named(&path), json(&path))).collect()
}

/// The names of the run folders.
fn run_folders(sandbox: &Sandbox) -> Vec<String> {
    let entries = std::fs::read_dir(sandbox.path("out/runs")).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn two_keys_meet_and_rounds_alternate() {
    let sandbox = Sandbox::new();
    let vary = ["strategy=ddp,flat_ddp", "channels=4,4 8"];
    let run = sweep(&sandbox, &vary, "--hidden 8 --rounds 3 --nproc 2").ok();
    run.line("Sweep of strategy, channels: 4 cases, 3 rounds");
    run.line("Ranked by samples/s: more is better");
    run.line("Compared by samples/s. Cases differ if the 95 % interval of their ratio");

    let records = records(&sandbox);
    let number = |record: &Value, key: &str| record[key].as_u64().unwrap();
    let cases: Vec<u64> = records.values().map(|record| number(record, "case")).collect();
    assert_eq!(cases, [0, 1, 2, 3, 3, 2, 1, 0, 0, 1, 2, 3], "rounds go there and back again");
    let begins: Vec<&str> = records.values().map(|r| r["started"].as_str().unwrap()).collect();
    assert!(begins.is_sorted(), "runs are made in this order: {begins:?}");
    let of = |name: &str| records.values().find(|record| record["name"] == name).unwrap();
    assert_eq!(of("strategy=flat_ddp, channels=4")["summary"]["strategy"], "flat_ddp");
    // 4x1x3x3 + 4, 784x8 + 8, 8x10 + 10; with a second convolution 8x4x3x3 + 8, and 392x8 + 8.
    assert_eq!(of("strategy=ddp, channels=4")["summary"]["params"], 6410);
    assert_eq!(of("strategy=ddp, channels=4 8")["summary"]["params"], 3570);

    let report = json(&sandbox.path("out/sweep.json"));
    let rows = report["rows"].as_array().unwrap();
    assert_eq!((rows.len(), &report["rounds"]), (4, &3.into()));
    assert_eq!(rows[0]["place"], 1);
    for row in rows {
        let figure = &row["figures"]["samples_per_s"];
        let of = |key: &str| figure[key].as_f64().unwrap();
        assert!(of("min") <= of("median") && of("median") <= of("max"), "{row}");
        assert_eq!(figure["rounds"], 3);
        // The seed is the same, so the loss is the same in every round, whatever the strategy.
        let loss = &row["figures"]["train_loss"];
        assert_eq!(loss["min"], loss["max"], "{row}");
    }
    let csv = std::fs::read_to_string(sandbox.path("out/sweep.csv")).unwrap();
    assert_eq!(csv.lines().count(), 1 + 4, "{csv}");
    assert!(csv.starts_with("place,scene,variant,strategy,channels,samples_per_s,effect,failure,"));
    let svg = std::fs::read_to_string(sandbox.path("out/sweep.svg")).unwrap();
    assert!(svg.contains("strategy=flat_ddp"), "each case is named");
    let page = std::fs::read_to_string(sandbox.path("out/sweep.html")).unwrap();
    for part in ["All variants", "Effects of the settings", "--hidden 8", "flat_ddp"] {
        assert!(page.contains(part), "no {part} in the page");
    }
    // Each setting has two values, and each pair differs in one setting.
    let effects = report["tables"]["effects"]["rows"].as_array().unwrap();
    let effects: Vec<_> =
        effects.iter().map(|of| (of["value"].as_str().unwrap(), of["pairs"].as_u64())).collect();
    assert_eq!(effects, [("flat_ddp", Some(2)), ("4 8", Some(2))]);

    run.line("Does a setting still help once another is changed?");

    let folders = run_folders(&sandbox);
    assert_eq!(folders.len(), 12);
    assert!(folders.contains(&"000-strategy=ddp_channels=4.1".to_owned()), "{folders:?}");
    assert!(!sandbox.path("out/unfinished").exists());
    let mut compare = sandbox.paceline();
    compare.args(["compare", "out/runs", "--output", "report"]);
    let compared = Run::of(compare).ok();
    assert!(compared.stdout.contains("Comparison of 12 runs"), "{}", compared.stdout);
}

#[test]
fn a_sweep_that_was_killed_goes_on() {
    let sandbox = Sandbox::new();
    // Every operation takes 20 ms, so that there is something to interrupt.
    let flags = format!("{TINY} {SHORT} --nproc 2 --rounds 3 --link 1gbit,10ms");
    let vary = ["strategy=simple_ddp,flat_ddp"];
    let mut before = BTreeMap::new();
    for (num_records, sent) in [(1, Signal::KILL), (3, Signal::INT)] {
        let mut running = Running::start(command(&sandbox, &vary, &flags));
        let finished = || records(&sandbox).len() >= num_records;
        running.wait_until("some runs to be finished", finished);
        signal(running.id(), sent);
        let ended = running.end();
        let way_on = "Stopped. This goes on where it ended: paceline sweep --output out --vary ";
        assert_eq!(ended.stderr.contains(way_on), sent == Signal::INT, "{ended:#?}");
        // Its ranks die a moment later, and until then they write where the next one begins.
        sandbox.wait_until_deserted();
        let now = records(&sandbox);
        for (name, record) in &before {
            assert_eq!(now.get(name), Some(record), "{name} was made again");
        }
        before = now;
    }
    // A kill in the middle of a run and of a record leaves these behind.
    sandbox.write("out/unfinished/runs/half/config.json", b"{}");
    sandbox.write("out/unfinished/summary.json", b"{}");
    sandbox.write("out/records/00005.partial", b"{");
    let run = Run::of(command(&sandbox, &vary, &flags)).ok();
    run.line(&format!("Goes on after {} of 6 runs, from out", before.len()));
    let after = records(&sandbox);
    let mut begins: Vec<&str> = after.values().map(|r| r["started"].as_str().unwrap()).collect();
    begins.dedup();
    assert_eq!((after.len(), begins.len()), (6, 6), "{after:#?}");
    for (name, record) in &before {
        assert_eq!(&after[name], record, "{name} was made again");
    }
    let cases: Vec<&Value> = after.values().map(|record| &record["case"]).collect();
    assert_eq!(cases, [0, 1, 1, 0, 0, 1]);
    assert_eq!(run_folders(&sandbox).len(), 6);
    assert!(!sandbox.path("out/unfinished").exists());
    // Run again: there is nothing left to do, and the table is the same.
    let again = Run::of(command(&sandbox, &vary, &flags)).ok();
    again.line("Goes on after 6 of 6 runs, from out");
    assert_eq!(records(&sandbox), after);
    let table = |run: &Run| run.stdout.split_once("Sweep of").unwrap().1.to_owned();
    assert_eq!(table(&again), table(&run));
}

#[test]
fn a_case_that_fails_is_recorded_and_the_others_go_on() {
    let sandbox = Sandbox::new();
    let run = sweep(&sandbox, &["lr=1e30,0.01"], "--rounds 2 --nproc 1 --channels 4 --hidden 8");
    assert_eq!(run.code, Some(1), "{run:#?}");
    let said = run.line("failed: lr=1e30: ");
    assert!(said.contains("paceline train") && run.stdout.contains("not finite"), "{}", run.stdout);
    let of = |lr: &str| {
        let all = records(&sandbox).into_values();
        all.filter(|record| record["name"] == format!("lr={lr}")).collect::<Vec<_>>()
    };
    assert_eq!((of("1e30").len(), of("0.01").len()), (1, 2), "what has failed is not run again");
    assert!(of("1e30")[0]["failure"].as_str().unwrap().contains("not finite"));
    let rows = &json(&sandbox.path("out/sweep.json"))["rows"];
    assert_eq!((&rows[0]["variant"], &rows[0]["place"]), (&"lr=0.01".into(), &1.into()));
    assert_eq!(rows[1]["place"], Value::Null);
    assert!(rows[1]["failure"].as_str().unwrap().contains("not finite"));
    let before = records(&sandbox);
    let again = sweep(&sandbox, &["lr=1e30,0.01"], "--rounds 2 --nproc 1 --channels 4 --hidden 8");
    assert_eq!(again.code, Some(1));
    assert_eq!(records(&sandbox), before);
}

#[test]
fn another_command_on_the_same_folder_is_refused() {
    let sandbox = Sandbox::new();
    let vary = ["hidden=8,16"];
    sweep(&sandbox, &vary, "--channels 4 --rounds 1 --nproc 1").ok();
    let before = sandbox.contents();
    for (vary, flags, words) in [
        (&vary[..], "--rounds 2 --nproc 1", &["--rounds: 1 there, 2 here"][..]),
        (&vary, "--rounds 1 --nproc 1 --seed 7", &["--seed: none there, 7 here"]),
        (&vary, "--rounds 1", &["--nproc: 1 there, none here"]),
        (&["hidden=8,32"], "--rounds 1 --nproc 1", &["hidden=8;16;", "hidden=8;32;"]),
        (&["hidden=8,16", "seed=1,2"], "--rounds 1 --nproc 1", &["seed=1;2;"]),
    ] {
        let flags = format!("--channels 4 {flags}");
        let run = sweep(&sandbox, vary, &flags).refused(&["--output out", "another sweep"]);
        for word in words {
            assert!(run.stderr.contains(word), "no {word:?} in: {}", run.stderr);
        }
        assert_eq!(sandbox.contents(), before, "{flags} wrote something");
    }
    sandbox.write("mine/file", b"x");
    let mut other = sandbox.paceline();
    other.args(["sweep", "--vary", "seed=1,2", "--output", "mine"]);
    Run::of(other).refused(&["--output mine", "not empty"]);
    assert_eq!(std::fs::read_dir(sandbox.path("mine")).unwrap().count(), 1);
}
