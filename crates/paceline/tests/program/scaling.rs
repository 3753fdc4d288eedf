//! `paceline bench scaling -- PROGRAM`: each number of ranks of a program is started, timed, and judged; a program that cannot be
//! measured is named, with the reason.
//!
//! `record/torch.py` stands in for PyTorch. With the variable `PACELINE_TORCH`, which names a Python that has PyTorch, the last
//! test measures that too.

use std::fs;
use std::process::Command;

use rustix::process::Signal;
use serde_json::Value;

use crate::common::{Run, Running, Sandbox, json, signal, torch, wait_until};

/// A program that prints a line for each step, as many samples/s as its ranks have samples.
const PRINTS: &str = "for i in 1 2 3 4; do echo step $i: $((WORLD_SIZE * 100)).0 samples/s; done";
const LINE: &str = r"([\d.]+) samples/s";

fn command(sandbox: &Sandbox, flags: &[&str], program: &[&str]) -> Command {
    fs::create_dir_all(sandbox.path("tmp")).unwrap();
    sandbox.write("lib/torch.py", include_bytes!("record/torch.py"));
    let mut command = sandbox.given("bench scaling --nproc 1,2 --rounds 1");
    command.args(flags).arg("--").args(program);
    command.env("PYTHONPATH", sandbox.path("lib")).env("TMPDIR", sandbox.path("tmp"));
    command.env_remove("PYTHONSTARTUP").env("PYTHONDONTWRITEBYTECODE", "1");
    command
}

fn scaling(sandbox: &Sandbox, flags: &[&str], program: &[&str]) -> Run {
    let run = Run::of(command(sandbox, flags, program));
    assert_eq!(sandbox.names("tmp"), [""; 0], "something is left: {run:#?}");
    run
}

fn python(sandbox: &Sandbox, flags: &[&str], code: &str) -> Option<Run> {
    let python = Command::new("python3").arg("--version").output();
    if !python.is_ok_and(|python| python.status.success()) {
        println!("skipped: there is no python3 here");
        return None;
    }
    Some(scaling(sandbox, flags, &["python3", "-c", code]))
}

fn median(row: &Value, figure: &str) -> f64 {
    row["figures"][figure]["median"].as_f64().unwrap_or_else(|| panic!("no {figure}: {row}"))
}

const TRAIN: &str = "import torch; torch.distributed.init_process_group(); torch.train(100000)";

#[test]
fn the_steps_of_a_program_are_timed_and_end_it() {
    let sandbox = Sandbox::new();
    let flags = ["--steps", "12", "--json", "s.json", "--charts", "charts"];
    let Some(run) = python(&sandbox, &flags, TRAIN) else { return };
    let run = run.ok();
    run.prints(&[
        "Scaling: python3 -c import torch",
        "Weak scaling to 2 ranks is ",
        "throughput: what the program prints, samples if it takes {batch}, otherwise batches",
    ]);
    assert!(!run.stdout.contains("Strong"), "{}", run.stdout);
    let report = json(&sandbox.path("s.json"));
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 2);
    for (row, ranks) in rows.iter().zip([1.0, 2.0]) {
        assert_eq!((median(row, "world_size"), median(row, "steps")), (ranks, 12.0));
        let (step, per_s) = (median(row, "step_ms_median"), median(row, "throughput"));
        assert!(step >= 2.0 && median(row, "in_backward_ms") >= 1.0, "{row}");
        assert!((per_s * step / ranks / 1e3 - 1.0).abs() < 1e-9, "{row}");
        let speedup = per_s / median(&rows[0], "throughput");
        assert!((median(row, "speedup") - speedup).abs() < 1e-9, "{row}");
    }
    assert!(sandbox.path("charts/weak_scaling.svg").exists());
}

#[test]
fn the_lines_of_a_program_are_read_and_its_batch_is_divided() {
    let sandbox = Sandbox::new();
    let program = format!("echo $RANK of $WORLD_SIZE: {{batch}} >> batches; {PRINTS}");
    let flags = ["--throughput", LINE, "--global-batch-size", "64", "--json", "s.json"];
    let run = scaling(&sandbox, &flags, &["sh", "-c", &program]).ok();
    run.prints(&["Weak scaling to 2 ranks is ", "Strong scaling to 2 ranks is "]);
    run.prints(&["200.0 % efficient. If each rank prints the throughput of all, let rank 0 alone"]);
    let report = json(&sandbox.path("s.json"));
    // Both ranks print it, so it counts twice.
    let all: Vec<f64> =
        report["rows"].as_array().unwrap().iter().map(|row| median(row, "throughput")).collect();
    assert_eq!(all, [100.0, 400.0, 100.0, 400.0]);
    let batches = fs::read_to_string(sandbox.path("batches")).unwrap();
    let mut batches: Vec<&str> = batches.lines().collect();
    batches.sort_unstable();
    let expected = ["0 of 1: 64", "0 of 2: 32", "0 of 2: 64", "1 of 2: 32", "1 of 2: 64"];
    assert_eq!(batches, expected, "weak and strong scaling begin with one run");
    // The same command goes on with its records.
    let kept = ["--throughput", LINE, "--output", "kept"];
    for says in ["Scaling: sh -c", "Goes on after 2 of 2 runs, from kept"] {
        scaling(&sandbox, &kept, &["sh", "-c", PRINTS]).ok().line(says);
    }
}

#[test]
fn a_program_that_cannot_be_measured_is_named_with_the_reason() {
    let sandbox = Sandbox::new();
    let sh = |flags: &[&str], code: &str| scaling(&sandbox, flags, &["sh", "-c", code]);
    let by_line = ["--throughput", LINE];
    for code in ["echo not 0 samples/s", "true"] {
        let found = r"printed no number above zero that --throughput ([\d.]+) samples/s finds";
        sh(&by_line, code).ended_with(1, &["bench scaling --nproc=1 ", "failed", found]);
    }
    let second =
        "test $WORLD_SIZE = 1 && exit; test $RANK = 0 && sleep 60; echo the reason >&2; exit 5";
    sh(&by_line, &format!("{PRINTS}; {second}"))
        .ended_with(1, &["--nproc=2", "failed (exit status: 5)", "rank 1", "the reason"]);
    sh(&[], "true")
        .ended_with(1, &["no Python has started with the recorder", "--throughput REGEX"]);
    let limited = ["--run-limit", "0.3", "--throughput", LINE];
    sh(&limited, "sleep 60").ended_with(1, &["was stopped after 0.3 s; raise --run-limit"]);
    let alone = "import torch; torch.train(20)";
    let few = "import torch; torch.distributed.init_process_group(); torch.train(7)";
    for (code, words) in [
        (alone, "started as 2 ranks, and torch.distributed had 1 in its steps"),
        (few, "the program made fewer than 8 optimizer steps; --throughput REGEX"),
        ("import torch", "the program made no optimizer step"),
        ("print('no torch')", "the program has not imported PyTorch"),
    ] {
        let Some(run) = python(&sandbox, &[], code) else { return };
        run.ended_with(1, &["bench scaling --nproc=", words]);
    }
    // A program that leaves without Python's own end has the steps of the last note.
    python(&sandbox, &[], &format!("{}; import os; os._exit(0)", TRAIN.replace("100000", "20")))
        .map(Run::ok);
}

#[test]
fn a_program_ends_with_its_study() {
    let sandbox = Sandbox::new();
    let code = "echo $$ > rank; trap '' TERM; while true; do sleep 0.1; done";
    let running = Running::start(command(&sandbox, &["--throughput", LINE], &["sh", "-c", code]));
    wait_until("a rank to be under way", || {
        fs::read_to_string(sandbox.path("rank")).is_ok_and(|text| text.ends_with('\n'))
    });
    let rank = fs::read_to_string(sandbox.path("rank")).unwrap().trim().to_owned();
    signal(running.id(), Signal::TERM);
    assert_eq!(running.end().code, None, "by the signal");
    let still = fs::read_to_string(format!("/proc/{rank}/cmdline")).unwrap_or_default();
    assert!(!still.contains("trap"), "its rank goes on: {still}");
    assert_eq!(sandbox.names("tmp"), [""; 0]);
}

/// PyTorch itself, in the Python that `PACELINE_TORCH` names.
#[test]
fn pytorch_itself_is_timed() {
    let Some(python) = torch() else { return };
    let sandbox = Sandbox::new();
    let code = "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n\
                model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))\n\
                optimizer = torch.optim.AdamW(model.parameters())\nwhile True:\n    \
                model(torch.randn(8, 64)).sum().backward()\n    optimizer.step()\n    optimizer.zero_grad()\n";
    sandbox.write("train.py", code.as_bytes());
    let flags = ["--steps", "20", "--json", "s.json"];
    let python = python.to_str().unwrap();
    let mut command = command(&sandbox, &flags, &[python, "train.py"]);
    command.env_remove("PYTHONPATH");
    Run::of(command).ok().prints(&["Weak scaling to 2 ranks is "]);
    for row in json(&sandbox.path("s.json"))["rows"].as_array().unwrap() {
        assert_eq!(median(row, "steps"), 20.0);
        assert!(median(row, "in_backward_ms") < median(row, "step_ms_median"), "{row}");
    }
}
