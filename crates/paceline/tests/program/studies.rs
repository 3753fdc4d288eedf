//! The studies of `paceline bench` and `paceline train --ddp-choice all`, from flags to table, files and charts. These
//! tests do not check times, only that they are consistent.

use crate::common::{Run, Running, Sandbox, TINY, json, signal, wait_until};
use rustix::process::Signal;
use serde_json::Value;

/// Few steps, so that the tests take no time.
const SHORT: &str = "--steps-per-epoch 4 --warmup-steps 1 --batch-size 8";

fn bench_in(sandbox: &Sandbox, flags: &str) -> Run {
    let mut command = sandbox.paceline();
    command.arg("bench").args(flags.split_whitespace());
    // Temporary files that the runs leave behind go here.
    std::fs::create_dir_all(sandbox.path("tmp")).unwrap();
    command.env("TMPDIR", sandbox.path("tmp"));
    Run::of(command)
}

fn number(row: &Value, key: &str) -> f64 {
    row[key].as_f64().unwrap_or_else(|| panic!("no number {key} in {row}"))
}

/// The median of a figure in the row of a report.
fn median(row: &Value, figure: &str) -> f64 {
    number(&row["figures"][figure], "median")
}

fn about(a: f64, b: f64) {
    assert!((a - b).abs() <= 1e-9 * a.abs().max(b.abs()), "{a} is not {b}");
}

#[test]
fn scaling_is_tabled_judged_and_drawn() {
    let sandbox = Sandbox::new();
    let flags = format!(
        "scaling {TINY} {SHORT} --nproc 1,2 --rounds 2 --json s.json --csv s.csv --charts charts"
    );
    let run = bench_in(&sandbox, &flags).ok();
    run.line("Scaling of ddp: cnn over shm, 1 thread per rank; medians of 2 rounds");
    // For so short a step, the results of the laws are random. The test checks only that they are
    // applied.
    for words in
        ["Weak scaling to 2 ranks is ", "Strong scaling to 2 ranks is ", "Gustafson: ", "Amdahl: "]
    {
        assert!(run.stdout.contains(words), "no {words:?} in: {}", run.stdout);
    }
    let report = json(&sandbox.path("s.json"));
    let rows = report["rows"].as_array().unwrap();
    let expected = [("Weak", 1, 8), ("Weak", 2, 16), ("Strong", 1, 8), ("Strong", 2, 8)];
    for (row, (mode, ranks, batch)) in rows.iter().zip(expected) {
        assert!(row["scene"].as_str().unwrap().starts_with(mode), "{row}");
        assert_eq!(
            (median(row, "world_size"), median(row, "samples_per_step")),
            (f64::from(ranks), f64::from(batch))
        );
        about(median(row, "speedup") * 100.0 / f64::from(ranks), median(row, "efficiency_pct"));
        let step = &row["figures"]["step_ms_median"];
        assert!(number(step, "median") >= number(step, "min"), "{row}");
    }
    for (rows, ranks) in rows.chunks(2).zip([1.0, 2.0]) {
        let ideal = median(&rows[0], "step_ms_median") / ranks;
        about(median(&rows[1], "t_comm_ms"), median(&rows[1], "step_ms_median") - ideal);
        assert_eq!(rows[0]["figures"]["t_comm_ms"], Value::Null);
    }
    // Weak and strong scaling begin with the same runs.
    assert_eq!(rows[0]["figures"]["step_ms_median"], rows[2]["figures"]["step_ms_median"]);
    let csv = std::fs::read_to_string(sandbox.path("s.csv")).unwrap();
    assert_eq!(csv.lines().count(), 1 + 4, "{csv}");
    let charts = ["strong_scaling.svg", "weak_scaling.svg"];
    let mut expected = vec!["charts".to_owned()];
    expected.extend(charts.map(|name| format!("charts/{name}")));
    expected.extend(["s.csv", "s.json", "tmp"].map(str::to_owned));
    assert_eq!(sandbox.contents(), expected, "and no run folder");
}

#[test]
fn more_ranks_than_cores_are_marked() {
    let ranks = std::thread::available_parallelism().unwrap().get() + 1;
    if ranks > 8 {
        println!("skipped: this host has {} cores, too many to exceed in a test", ranks - 1);
        return;
    }
    let flags = format!(
        "scaling {TINY} {SHORT} --nproc {ranks},1 --rounds 1 --mode weak --transport thread \
         --link 1gbit,1ms"
    );
    let run = bench_in(&Sandbox::new(), &flags).ok();
    run.line(
        "Weak scaling: the batch of each rank stays, on an emulated link of 1 Gbit/s, 1000.0 us",
    );
    let marked = run.stdout.lines().filter(|line| line.trim_start().starts_with('*')).count();
    assert_eq!(marked, 2, "a row and what it means: {}", run.stdout);
    assert!(run.stdout.contains("Too few cores limit it"), "{}", run.stdout);
    assert!(!run.stdout.contains("Strong scaling"), "{}", run.stdout);
}

#[test]
fn a_sharded_optimizer_is_compared_with_replicas() {
    let sandbox = Sandbox::new();
    let flags = format!(
        "sharded-optimizer {TINY} {SHORT} --strategies ddp,zero1,pytorch_zero1 --rounds 1 --bucket-cap-mb 2 --json o.json \
         --csv o.csv --charts charts --output kept"
    );
    let run = bench_in(&sandbox, &flags).ok();
    run.line("Sharded optimizer, adamw, 2 ranks: cnn over shm, 1 thread per rank");
    let report = json(&sandbox.path("o.json"));
    let rows = report["rows"].as_array().unwrap();
    let strategies: Vec<&Value> = rows.iter().map(|row| &row["variant"]).collect();
    assert_eq!(strategies, ["ddp", "zero1", "sharded1"]);
    let of = |key: &str| rows.iter().map(|row| median(row, key)).collect::<Vec<_>>();
    // AdamW has two values for each parameter, and even shards are half of them.
    let (parameters, optimizer) = (of("parameters_mb"), of("optimizer_mb"));
    about(optimizer[0], 2.0 * parameters[0]);
    about(optimizer[2], optimizer[0] / 2.0);
    // Whole parameters divide unevenly: this model has one that is most of it.
    assert!(optimizer[1] > optimizer[2] && optimizer[1] < optimizer[0], "{optimizer:?}");
    about(parameters[2], parameters[0]);
    for row in rows {
        for moment in ["init", "before_step"] {
            let (peak, in_use) = (format!("{moment}_peak_mb"), format!("{moment}_mb"));
            assert!(median(row, &peak) >= median(row, &in_use), "{row}");
        }
        assert!(median(row, "step_peak_mb") >= median(row, "after_step_mb"), "{row}");
        assert!(median(row, "after_step_mb") >= median(row, "optimizer_mb"), "{row}");
        assert!(median(row, "optimizer_ms") > 0.0, "{row}");
    }
    let saved = |key: &str| of(key)[0] - of(key)[2];
    about(saved("init_mb"), optimizer[0] / 2.0);
    assert_eq!(std::fs::read_to_string(sandbox.path("o.csv")).unwrap().lines().count(), 1 + 3);
    assert!(sandbox.path("charts/sharded_optimizer_memory.svg").exists());
    // The same command again makes no run, and shows the same.
    bench_in(&sandbox, &flags).ok().line("Goes on after 3 of 3 runs, from kept");
    assert_eq!(json(&sandbox.path("o.json"))["rows"], report["rows"]);
    let other = format!("sharded-optimizer {TINY} {SHORT} --rounds 1 --output kept");
    bench_in(&sandbox, &other).refused(&["--output kept", "holds another sweep", "case 0"]);
}

#[test]
fn a_run_that_fails_is_named() {
    let sandbox = Sandbox::new();
    let diverging = format!("scaling {TINY} {SHORT} --nproc 1,2 --rounds 1 --lr 1e30");
    let run = bench_in(&sandbox, &diverging);
    assert_eq!(run.code, Some(1), "{run:#?}");
    for words in ["paceline train ", "--lr=1e30", "failed (exit status: 1)", "not finite"] {
        assert!(run.stderr.contains(words), "no {words:?} in: {}", run.stderr);
    }
    let endless = "scaling --nproc 1,2 --rounds 1 --run-limit 0.3 --epochs 100000";
    let run = bench_in(&sandbox, endless);
    assert_eq!(run.code, Some(1), "{run:#?}");
    assert!(run.stderr.contains("was stopped after 0.3 s; raise --run-limit"), "{}", run.stderr);
    let unmeasured = format!("scaling {TINY} --nproc 1,2 --rounds 1 --warmup-steps 50");
    let run = bench_in(&sandbox, &unmeasured);
    assert!(run.stderr.contains("no step was measured; pass more --steps"), "{}", run.stderr);
    assert_eq!(sandbox.contents(), ["tmp"], "nothing is left");
}

#[test]
fn a_study_that_is_asked_to_end_leaves_nothing_behind() {
    let sandbox = Sandbox::new();
    let tmp = sandbox.path("tmp");
    std::fs::create_dir_all(&tmp).unwrap();
    let mut command = sandbox.paceline();
    let flags = format!("bench scaling {TINY} --nproc 1,2 --epochs 1000000");
    command.args(flags.split_whitespace()).env("TMPDIR", &tmp);
    let running = Running::start(command);
    let pid = running.id();
    let under_way = || sandbox.contents().iter().any(|path| path.ends_with("metrics.jsonl"));
    wait_until("a run to be under way", under_way);
    let children = format!("/proc/{pid}/task/{pid}/children");
    let run = std::fs::read_to_string(children).unwrap().trim().to_owned();
    assert!(!run.is_empty(), "no child of {pid}");
    signal(pid, Signal::TERM);
    let ended = running.end();
    assert_eq!(ended.code, None, "by the signal: {ended:#?}");
    assert!(ended.stderr.contains("Stopped. A study with --output DIR goes on"), "{ended:#?}");
    assert_eq!(sandbox.contents(), ["tmp"]);
    let still = std::fs::read_to_string(format!("/proc/{run}/cmdline")).unwrap_or_default();
    assert!(!still.contains("train"), "its run goes on: {still}");
}

#[test]
fn all_strategies_are_compared() {
    let sandbox = Sandbox::new();
    // The default is one rank where there is one core.
    let flags = format!("{TINY} {SHORT} --nproc 2 --epochs 1");
    let all = "--ddp-choice all --price-per-hour 3600 --json c.json";
    let run = sandbox.train(&format!("{flags} {all}")).ok();
    assert_eq!(run.stderr, "");
    let report = json(&sandbox.path("c.json"));
    let runs = report["rows"].as_array().unwrap();
    let of = |name: &str| runs.iter().find(|run| run["variant"] == name).unwrap();
    for name in ["simple_ddp", "simple_ddp_ga", "ddp", "bucket_ddp_async", "flat_ddp"] {
        assert_eq!(of(name)["has_bits_of_base"], true, "{name}");
        let line = run.line(&format!("{name} "));
        assert!(line.contains("  yes  "), "{line}");
    }
    for name in ["top_k", "fp16", "bf16"] {
        assert_eq!(of(name)["has_bits_of_base"], false, "{name} is lossy");
    }
    assert!(run.stdout.starts_with("First of single runs: "), "{}", run.stdout);
    for run in runs {
        assert_eq!((median(run, "accumulate"), median(run, "world_size")), (1.0, 2.0));
        about(median(run, "cost"), median(run, "seconds"));
    }
    // The table has the same values for a strategy as a run of that strategy alone.
    sandbox.train(&format!("{flags} --ddp-choice ddp --json ddp.json")).ok();
    let alone = json(&sandbox.path("ddp.json"));
    assert_eq!(of("ddp")["weights"], alone["weights_sha256"]);
    for key in ["train_loss", "comm_ops_per_step", "comm_mb_per_step", "steps"] {
        assert_eq!(median(of("ddp"), key), number(&alone, key), "{key}");
    }
    let folder = run.line("Run folders: ");
    let inside = std::fs::read_dir(sandbox.path(folder)).unwrap().count();
    assert_eq!(
        inside,
        runs.len() + 4,
        "a run folder each, and comparison.html, .csv, .json and .md"
    );
}

#[test]
fn comparisons_show_accuracies_and_the_lines_that_are_asked_for() {
    let sandbox = Sandbox::new();
    let published = "--ddp-choice published --accumulate 1";
    let flags = format!("{TINY} {SHORT} --nproc 2 --epochs 1 {published}");
    let run = sandbox.train(&format!("{flags} --evaluate --log-every 1 --json c.json")).ok();
    let report = json(&sandbox.path("c.json"));
    assert!(run.stdout.contains("evaluation loss"), "{}", run.stdout);
    for of in report["rows"].as_array().unwrap() {
        let name = of["variant"].as_str().unwrap();
        let accuracy = median(of, "eval_accuracy_pct");
        let is_row = |line: &&str| line.split_whitespace().next() == Some(name);
        let line = run.stdout.lines().find(is_row).unwrap();
        let same = run.line("The same in all: ");
        let shown = format!("{accuracy:.2}");
        assert!(line.contains(&shown) || same.contains(&shown), "{accuracy}: {line}");
        for progress in ["Epoch 1 Batch 1 Loss: ", "Epoch 1/1: loss ", "Evaluation accuracy: "] {
            run.line(&format!("{name}: {progress}"));
        }
        assert!(!run.stdout.contains(&format!("{name}: Total time")), "{}", run.stdout);
    }
    // Without lines and without evaluations there are none.
    let plain = sandbox.train(&format!("{flags} --log-every 1 --quiet --json c.json")).ok();
    assert_eq!(plain.stdout, "");
    let folder = run.line("Run folders: ").trim_end_matches('/').to_owned();
    let mut compare = sandbox.paceline();
    compare.args(["compare", "--verbose"]);
    for entry in std::fs::read_dir(sandbox.path(&folder)).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            compare.arg(path);
        }
    }
    let compared = Run::of(compare).ok();
    assert!(compared.stdout.contains("accuracy "), "{}", compared.stdout);
}

#[test]
fn published_settings_are_unequal() {
    let sandbox = Sandbox::new();
    let flags = format!("{TINY} {SHORT} --nproc 2 --epochs 1 --accumulate 2");
    let published = "--ddp-choice published --json c.json";
    sandbox.train(&format!("{flags} {published}")).ok();
    let report = json(&sandbox.path("c.json"));
    for run in report["rows"].as_array().unwrap() {
        let is_one = ["simple_ddp", "ddp"].iter().any(|name| run["variant"] == *name);
        assert_eq!(median(run, "accumulate"), if is_one { 1.0 } else { 2.0 }, "{run}");
    }
    // A flag that does not fit one strategy does not prevent the others from running.
    let run = sandbox.train(&format!("{flags} --ddp-choice all --clip-grad-norm 5")).ok();
    run.line("Left out");
    assert!(run.stdout.contains("--clip-grad-norm: with --strategy local_sgd"), "{}", run.stdout);
}

#[test]
fn studies_start_ranks_of_their_own() {
    let sandbox = Sandbox::new();
    let binary = env!("CARGO_BIN_EXE_paceline");
    let sweep = "sweep --vary seed=1,2 --output out";
    for command in ["bench scaling", "train --ddp-choice all", sweep] {
        let args = format!("-n 2 -- {binary} {command} {TINY}");
        let run = sandbox.launch(&args.split(' ').collect::<Vec<_>>());
        assert_eq!(run.code, Some(2), "{run:#?}");
        assert!(run.stderr.contains("another launcher has started 2"), "{}", run.stderr);
    }
}
