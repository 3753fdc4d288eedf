//! The trace doctor from the command line: advice on traces of PyTorch, two traces against each other, and bad input.

use crate::common::traces::{Training, pytorch_ddp, trace};
use crate::common::{Sandbox, json};
use serde_json::{Value, json};

/// A trace of a GPU with seven steps of 30 kernels. The host takes `pace` microseconds for each launch. In each step it sets
/// gradients to zero with 40 kernels if `zeroes`.
fn steps(pace: f64, zeroes: bool) -> Value {
    let mut events = Vec::new();
    let (mut now, mut free, mut number) = (1000.0, 0.0f64, 0);
    for step in 0..7 {
        let begin = now;
        for at in 0..if zeroes { 70 } else { 30 } {
            let is_zero = at >= 30;
            number += 1;
            now += if is_zero { 3.0 } else { pace };
            let us = if is_zero { 20.0 } else { 100.0 };
            let start = free.max(now) + 5.0;
            free = start + us;
            let (name, kernel) = if is_zero {
                ("Optimizer.zero_grad#SGD.zero_grad", "vectorized_elementwise_kernel")
            } else {
                ("forward", "sm80_xmma_gemm_f32f32")
            };
            let x = |cat: &str, name: &str, pid: u32, ts: f64, dur: f64, args: Value| json!({"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": pid, "ts": ts, "dur": dur, "args": args});
            events.push(x("user_annotation", name, 1, now - 0.5, 3.0, json!({})));
            events.push(x(
                "cuda_runtime",
                "cudaLaunchKernel",
                1,
                now,
                2.0,
                json!({"correlation": number}),
            ));
            events.push(x(
                "kernel",
                kernel,
                2,
                start,
                us,
                json!({"stream": 7, "correlation": number}),
            ));
            now += 3.0;
        }
        let name = format!("ProfilerStep#{step}");
        events.push(json!({"ph": "X", "cat": "user_annotation", "name": name, "pid": 1, "tid": 1,
            "ts": begin, "dur": now - begin, "args": {}}));
    }
    json!({"distributedInfo": {"rank": 0, "world_size": 1}, "traceEvents": events})
}

fn write(sandbox: &Sandbox, name: &str, trace: &Value) {
    sandbox.write(&format!("{name}/rank_0/a.pt.trace.json"), trace.to_string().as_bytes());
}

#[test]
fn advice_is_on_the_console_and_in_the_report() {
    let sandbox = Sandbox::new();
    write(&sandbox, "slow", &steps(180.0, false));
    let run = sandbox.run("analyze slow --output out").ok();
    let line = run.line("advice: The device waits for launches");
    assert!(line.contains("torch.compile") && line.contains("ms per step"), "{line}");
    let summary = json(&sandbox.path("out/summary.json"));
    let advice = &summary["tables"]["advice"]["rows"][0];
    assert_eq!(advice["cause"], "host_bound");
    let [low, high, step] =
        ["low_ms", "high_ms", "step_ms"].map(|key| advice[key].as_f64().unwrap());
    // 78 of each 183 us are waited for, at most.
    assert!(0.2 * step < low && low <= high && high < 0.6 * step, "{low} {high} {step}");
    let page = std::fs::read_to_string(sandbox.path("out/summary.html")).unwrap();
    assert!(page.contains("id=\"advice-1\""));
    // A sound run gets none.
    write(&sandbox, "sound", &steps(10.0, false));
    let run = sandbox.run("analyze sound --output sound_out").ok();
    assert!(!run.stdout.contains("advice:"), "{}", run.stdout);
}

#[test]
fn a_promise_is_held_against_the_trace_after_the_change() {
    let sandbox = Sandbox::new();
    write(&sandbox, "before", &steps(10.0, true));
    write(&sandbox, "after", &steps(10.0, false));
    let run = sandbox.run("analyze before --against after").ok();
    let line = run.line("A step takes");
    assert!(run.stdout.starts_with("A step takes"), "{}", run.stdout);
    let came = "ms were promised for `zeroing`, and they came. ";
    assert!(line.contains("ms less; ") && line.contains(came), "{line}");
    let report = json(&sandbox.path("reports/against/before-after/against.json"));
    let cause = &report["tables"]["causes"]["rows"][0];
    assert_eq!((&cause["cause"], &cause["became"]), (&json!("zeroing"), &json!("gone")));
    assert!(!report["tables"]["diff"]["rows"].as_array().unwrap().is_empty());
}

#[test]
fn other_cards_are_named() {
    let sandbox = Sandbox::new();
    for (name, card, world) in [("a", "Tesla V100", 2), ("b", "NVIDIA A100", 8)] {
        let mut of = steps(10.0, false);
        of["deviceProperties"] = json!([{"id": 0, "name": card}]);
        of["distributedInfo"]["world_size"] = json!(world);
        write(&sandbox, name, &of);
    }
    let differ = "Not only the program differs: Tesla V100 before and NVIDIA A100 after; 2 ranks before and 8 ranks after.";
    let run = sandbox.run("analyze a --against b").ok();
    assert!(run.stdout.contains(differ), "{}", run.stdout);
    let run = sandbox.run("analyze a --against a --output same").ok();
    assert!(!run.stdout.contains("Not only the program"), "{}", run.stdout);
}

/// On a processor, all ranks are replayed with other buckets.
#[test]
fn the_size_of_buckets_is_that_of_a_replay_of_all_ranks() {
    let sandbox = Sandbox::new();
    for rank in 0..2 {
        let file = format!("traces/rank_{rank}/a.pt.trace.json");
        let text = pytorch_ddp(rank, true).replace("gloo:all_reduce", "gloo:all_reduce<float>");
        sandbox.write(&file, text.as_bytes());
    }
    sandbox.run("analyze traces --output out").ok();
    let rows = json(&sandbox.path("out/summary.json"))["tables"]["advice"]["rows"].clone();
    let rows = rows.as_array().unwrap();
    let buckets = rows.iter().find(|of| of["cause"] == "first_bucket").unwrap();
    let change = buckets["change"].as_str().unwrap();
    assert_eq!(change, "DistributedDataParallel(model, bucket_cap_mb=1)");
    // The whole name, by which a viewer finds it.
    assert_eq!(buckets["names"], "gloo:all_reduce<float>");
    // Of 8 ms that would be hidden, half comes at least.
    let [low, high] = ["low_ms", "high_ms"].map(|key| buckets[key].as_f64().unwrap());
    assert!((low - 4.0).abs() < 0.01 && (high - 8.0).abs() < 0.01, "{buckets}");
}

/// Before, rank 1 comes 0.48 ms late to each all-reduce, and a step is 0.38 ms longer.
#[test]
fn runs_of_paceline_are_held_against_each_other_too() {
    let sandbox = Sandbox::new();
    for (name, scale, late) in [("before", 1.2, 10), ("after", 1.0, 0)] {
        for rank in 0..2 {
            // In these traces, a higher rank computes longer.
            let mut own = trace(late * rank, 2, Training::Ddp, scale);
            own["distributedInfo"]["rank"] = json!(rank);
            own["paceline"] = json!({"transport": "shm"});
            let file = format!("{name}/rank_{rank}/a.pt.trace.json");
            sandbox.write(&file, own.to_string().as_bytes());
        }
    }
    let run = sandbox.run("analyze before --against after").ok();
    let line = run.line("A step takes");
    assert!(line.contains("0.40 ms less") && line.contains("and they came"), "{line}");
    let report = json(&sandbox.path("reports/against/before-after/against.json"));
    let causes = report["tables"]["causes"]["rows"].as_array().unwrap();
    let is_it = |of: &&Value| of["cause"] == "straggler" && of["became"] == "gone";
    let straggler = causes.iter().find(is_it).unwrap_or_else(|| panic!("{causes:?}"));
    assert!((straggler["promised_high_ms"].as_f64().unwrap() - 0.48).abs() < 0.01, "{straggler}");
    assert!(!report["tables"]["diff"]["rows"].as_array().unwrap().is_empty());
}

/// The program does not call prof.step(): its own spans are steps, and without them the launches that repeat.
#[test]
fn steps_are_found_in_spans_and_in_launches() {
    let sandbox = Sandbox::new();
    let text = steps(180.0, false).to_string();
    write(
        &sandbox,
        "spans",
        &serde_json::from_str(&text.replace("ProfilerStep#", "batch ")).unwrap(),
    );
    let run = sandbox.run("analyze spans --step batch --output out").ok();
    assert!(run.stdout.contains("6 of 7 steps (0 to 5)"), "{}", run.stdout);
    assert!(run.stdout.contains("Steps are the 7 spans \"batch\""), "{}", run.stdout);
    assert!(run.line("advice: The device waits for launches").contains(" ms of 5."));
    // Without the flag, groups of 30 equal launches cannot be told from one another.
    let run = sandbox.run("analyze spans --output none").ok();
    assert!(
        run.stdout.contains("names no steps") && run.stdout.contains("--step"),
        "{}",
        run.stdout
    );
    for (args, words) in [
        ("analyze spans --step bath --output bad", ["no spans of that name", "such as batch"]),
        ("analyze spans --step= --output bad", ["--step", "value"]),
        ("analyze spans --step batch --hta --output bad", ["--step", "--hta"]),
        ("analyze spans --against spans --step bath --output bad", ["--step bath", "no spans"]),
    ] {
        sandbox.run(args).ended_with(2, &words);
        assert!(!sandbox.path("bad").exists(), "{args}");
    }
}

#[test]
fn bad_input_is_refused_before_anything_is_written() {
    let sandbox = Sandbox::new();
    write(&sandbox, "a", &steps(10.0, false));
    let before = steps(10.0, false).to_string();
    sandbox.write("cut/rank_0/a.pt.trace.json", &before.as_bytes()[..before.len() / 2]);
    let mut own = trace(0, 1, Training::Ddp, 1.0);
    own["paceline"] = json!({"transport": "shm"});
    write(&sandbox, "own", &own);
    std::os::unix::fs::symlink("nowhere", sandbox.path("link")).unwrap();
    let pipe = std::process::Command::new("mkfifo").arg(sandbox.path("pipe.json")).status();
    assert!(pipe.unwrap().success());
    for (args, code, word) in [
        ("analyze a --against nowhere", 1, "nowhere"),
        ("analyze a --against link", 1, "link"),
        ("analyze a --against pipe.json", 1, "pipe.json"),
        ("analyze a --against a --kind ddp", 2, "--kind"),
        ("analyze a --link 0gbit,1us", 2, "--link"),
        ("analyze a --link 1e999GB/s,1us", 2, "--link"),
        ("analyze a --link fast", 2, "BANDWIDTH,LATENCY"),
    ] {
        sandbox.run(args).ended_with(code, &[word]);
        assert!(!sandbox.path("reports").exists(), "{args}");
    }
    // Another program can only be compared by its operators.
    let run = sandbox.run("analyze a --against own").ok();
    assert!(run.stdout.contains("Only one side is of paceline"), "{}", run.stdout);
    // What is there of a trace that is cut off is examined, and a warning says so.
    let run = sandbox.run("analyze cut --output out").ok();
    assert!(run.stdout.contains("is cut off, and what came after is missing"), "{}", run.stdout);
    let odd = json(&sandbox.path("out/summary.json"))["tables"]["oddities"]["rows"].to_string();
    assert!(odd.contains("cut off"), "{odd}");
}
