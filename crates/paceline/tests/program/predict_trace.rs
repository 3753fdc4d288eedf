//! `paceline predict --trace`: predictions from traces of PyTorch and of our own, and what it says of traces that do not
//! suffice.

use crate::common::traces::{Training, pytorch_ddp, trace};
use crate::common::{Run, Sandbox, json};
use serde_json::Value;

const MIB: f64 = 1048576.0;

fn predict(sandbox: &Sandbox, flags: &str) -> Run {
    sandbox.run(&format!("predict {flags}"))
}

/// What `--json` holds of a prediction from the traces in `traces`.
fn predicted(sandbox: &Sandbox, flags: &str) -> Value {
    predict(sandbox, &format!("--trace traces --json p.json {flags}")).ok();
    json(&sandbox.path("p.json"))
}

#[track_caller]
fn close(value: &Value, expected: f64) {
    let value = value.as_f64().unwrap_or_else(|| panic!("no number: {value}"));
    // Each of a few operations is rounded to nanoseconds.
    assert!((value - expected).abs() < 1e-4, "{value}, not {expected}");
}

/// Two ranks of PyTorch: 118 of the 150 ms of a step are no communication.
fn of_pytorch(with_shapes: bool) -> Sandbox {
    let sandbox = Sandbox::new();
    for rank in 0..2 {
        let name = format!("traces/rank_{rank}.pt.trace.json");
        sandbox.write(&name, pytorch_ddp(rank, with_shapes).as_bytes());
    }
    sandbox
}

/// A step by strategy.
fn step_ms<'a>(found: &'a Value, strategy: &str) -> &'a Value {
    let rows = found["strategies"].as_array().unwrap();
    &rows.iter().find(|row| row["strategy"] == strategy).unwrap()["step_ms"]
}

#[test]
fn a_profile_of_pytorch_predicts_other_links() {
    let sandbox = of_pytorch(true);
    let found = predicted(&sandbox, "--nproc 2 --links 100GB/s,1ms --charts charts");
    // In a ring of two ranks, an all-reduce takes three latencies, its bytes once, and a header. The gradient of 1 MiB that
    // is final first travels alone; the others, of 5 MiB, when the pass ends.
    let cost = |mib: f64| 3.0 + (mib * MIB + 88.0) / 1e8;
    let row = &found["rows"][0];
    assert_eq!(row["algorithm"], "ring");
    close(&row["step_ms"], 118.0 + cost(5.0));
    close(&row["step_low_ms"], 118.0 + cost(5.0));
    close(&found["calibrations"][0]["step_ms"], 118.0);
    close(&found["calibrations"][0]["traced"]["traced_ms"], 150.0);
    close(step_ms(&found, "ddp"), 118.0 + cost(5.0));
    close(step_ms(&found, "flat_ddp"), 118.0 + cost(6.0));
    close(step_ms(&found, "simple_ddp_async"), 118.0 + cost(3.0));
    close(step_ms(&found, "simple_ddp"), 118.0 + 3.0 * cost(1.0) + cost(3.0));
    assert!(sandbox.path("charts/predict_efficiency.svg").is_file());
    // Twice as slow ranks, and links by name.
    let found = predicted(&sandbox, "--nproc 8,64 --links 400gbe nvlink4 --compute-scale 2");
    close(&found["calibrations"][0]["step_ms"], 236.0);
    assert_eq!(found["rows"].as_array().unwrap().len(), 4);
    // Without the profiler a step takes 91 ms, of which it waits for 32 as before.
    let found = predicted(&sandbox, "--nproc 2 --links 100GB/s,1ms --step-ms 91");
    close(&found["calibrations"][0]["step_ms"], 59.0);
    let found = predicted(&sandbox, "--nproc 2 --links 100GB/s,1ms --step-ms 91 --compute-scale 4");
    close(&found["calibrations"][0]["step_ms"], 236.0);
    let run = predict(&sandbox, "--trace traces --links 25gbe 40gbe ndr --nproc 8").ok();
    let widest = run.stdout.lines().map(|line| line.chars().count()).max();
    assert!(widest <= Some(80), "{}", run.stdout);
    run.line("Predicted steps: 4 gradients of 6.29 MB");
    run.line("From 6 of 6 steps that PyTorch traced on 2 ranks");
    assert!(run.stdout.contains("simple_ddp_async"), "{}", run.stdout);
}

#[test]
fn traces_of_our_own_predict_what_their_run_would_measure() {
    let sandbox = Sandbox::new();
    let train = "--nproc 2 --model mlp --input-dim 16 --hidden-dim 16 --output-dim 4 --num-layers 1 --epochs 1 \
                 --steps-per-epoch 9 --warmup-steps 1 --profile --profile-active 5 --quiet";
    sandbox.train(&format!("{train} --strategy ddp --profile-dir traces")).ok();
    let found = predicted(&sandbox, "--nproc 2 --links 100GB/s,0us 1gbit,5s");
    let calibration = &found["calibrations"][0];
    assert_eq!((&calibration["ranks"], &calibration["traced"]["steps"]), (&2.into(), &5.into()));
    let number = |value: &Value| value.as_f64().unwrap();
    let alone = number(&calibration["step_ms"]);
    assert!(alone > 0.0 && alone <= number(&calibration["traced"]["traced_ms"]), "{calibration}");
    // Gradients are followed by name, each within the pass.
    let ready = calibration["ready"].as_array().unwrap();
    assert!(ready.len() >= 4 && ready.iter().all(|of| number(&of["ready_ms"]) > 0.0), "{ready:?}");
    let row = |at: usize| &found["rows"][at];
    assert!(number(&row(0)["step_ms"]) >= alone - 1e-9);
    // Three latencies of the last bucket, and three of the sums of the loss before it.
    assert!(number(&row(1)["step_ms"]) >= alone + 15000.0, "{}", row(1));
    assert!(number(&row(1)["step_low_ms"]) <= number(&row(1)["step_high_ms"]));
    assert!(row(1)["slowest_gbit_s"].is_null() && row(1)["slowest_high_gbit_s"].is_null());
    assert!(number(step_ms(&found, "simple_ddp")) >= number(step_ms(&found, "flat_ddp")));
    // Ranks that divide the model compute something else.
    sandbox.train(&format!("{train} --strategy sharded3 --profile-dir sharded")).ok();
    predict(&sandbox, "--trace sharded").refused(&["--trace sharded", "not plain replicas"]);
}

#[test]
fn traces_that_do_not_suffice_say_what_they_lack() {
    let refused = |sandbox: &Sandbox, flags: &str, words: &[&str]| {
        let before = sandbox.contents();
        let flags = format!("--trace traces --json p.json --charts charts {flags}");
        predict(sandbox, &flags).refused(words);
        assert_eq!(sandbox.contents(), before, "nothing is written");
    };
    let sandbox = of_pytorch(false);
    refused(&sandbox, "", &["record_shapes=True", "or give --gradient-bytes"]);
    let found = predicted(&sandbox, "--gradient-bytes 50MB --links 10gbe");
    assert_eq!(found["strategies"].as_array().unwrap().len(), 2);
    assert!(found["rows"][0]["simple_step_ms"].is_null());
    std::fs::remove_file(sandbox.path("p.json")).unwrap();
    refused(&sandbox, "--gradient-bytes 3", &["--gradient-bytes 3", "4 or more"]);
    for (wrong, said) in
        [("30", "30"), ("400", "400"), ("nan", "NaN"), ("-1", "-1"), ("inf", "inf")]
    {
        let flags = format!("--gradient-bytes 50MB --step-ms={wrong}");
        refused(&sandbox, &flags, &[&format!("--step-ms {said}"), "took 150.00 ms"]);
    }
    std::fs::remove_file(sandbox.path("traces/rank_1.pt.trace.json")).unwrap();
    refused(&sandbox, "", &["--trace traces", "there is no trace of rank 1;"]);
    let write = |text: &str| sandbox.write("traces/rank_0.pt.trace.json", text.as_bytes());
    let whole = pytorch_ddp(0, true);
    write(&whole[..whole.len() / 2]);
    refused(&sandbox, "", &["rank_0.pt.trace.json"]);
    write("{\"traceEvents\":[]}");
    refused(&sandbox, "", &["there are no steps"]);
    // One rank without a group, which knows its gradients all the same.
    let alone = whole
        .replace("gloo:all_reduce", "aten::other")
        .replace("\"world_size\":2", "\"world_size\":1");
    write(&alone);
    let found = predicted(&sandbox, "--links 10gbe");
    assert_eq!(found["calibrations"][0]["ranks"], 1);
    std::fs::remove_file(sandbox.path("p.json")).unwrap();
    write(&alone.replace("evaluate_function", "other"));
    refused(&sandbox, "", &["no step has a backward pass"]);
    write(&trace(0, 1, Training::Ddp, 1.0).to_string());
    refused(&sandbox, "", &["no step has a backward pass"]);
    std::fs::remove_file(sandbox.path("traces/rank_0.pt.trace.json")).unwrap();
    refused(&sandbox, "", &["--trace traces", "No trace files found"]);
    predict(&sandbox, "--trace none").refused(&["--trace none"]);
    predict(&sandbox, "--trace \u{1b}[31mred").refused(&["--trace"]);
}
