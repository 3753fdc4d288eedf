//! A Llama in what surrounds training: sweeps, traces and their analysis, the published comparisons, sizes by name.
//!
//! These tests do not check times.

use std::collections::BTreeMap;
use std::fs;

use crate::common::{Sandbox, json};
use serde_json::Value;

/// A model so small that a run takes no time.
const SMALL: &str = "--model llama --layers 1 --width 16 --heads 2 --intermediate 24 --vocab 41 --seq-len 7 --batch-size 2";

#[test]
fn element_types_and_strategies_are_swept() {
    let sandbox = Sandbox::new();
    let vary = "--vary precision=f32,bf16 --vary strategy=ddp,sharded3";
    let steps = "--steps 4 --warmup-steps 1 --nproc 2 --lr 0.01";
    let run = sandbox.run(&format!("sweep {vary} --output out {SMALL} {steps}")).ok();
    run.line("Sweep of precision, strategy: 4 cases");
    let records = fs::read_dir(sandbox.path("out/records")).unwrap();
    let records = records.map(|entry| json(&entry.unwrap().path()));
    let of_case = |record: Value| {
        let summary = &record["summary"];
        let of = |key: &str| summary[key].as_str().unwrap().to_owned();
        ((of("precision"), of("strategy")), of("weights_sha256"))
    };
    let weights: BTreeMap<(String, String), String> = records.map(of_case).collect();
    let of = |precision: &str, strategy: &str| &weights[&(precision.into(), strategy.into())];
    for precision in ["f32", "bf16"] {
        assert_eq!(of(precision, "ddp"), of(precision, "sharded3"), "{precision}");
    }
    assert_ne!(of("f32", "ddp"), of("bf16", "ddp"));
    let csv = fs::read_to_string(sandbox.path("out/sweep.csv")).unwrap();
    assert_eq!(csv.lines().count(), 1 + 4, "{csv}");
    assert!(csv.starts_with("place,scene,variant,precision,strategy,"), "{csv}");
}

#[test]
fn a_trace_has_the_kernels_of_attention_and_of_products() {
    let sandbox = Sandbox::new();
    let window = "--profile --profile-wait 0 --profile-warmup 1 --profile-active 3";
    let steps = "--steps 4 --warmup-steps 0 --nproc 2 --strategy sharded3";
    // The report names the kernels that take the most time. In a model of this size these are among them.
    let sizes =
        "--layers 1 --width 64 --heads 2 --intermediate 128 --vocab 41 --seq-len 32 --batch-size 4";
    sandbox.run(&format!("train --model llama {sizes} {steps} {window}")).ok();
    sandbox.run("analyze profile/sharded3").ok();
    let report = json(&sandbox.path("reports_sharding/sharded3/summary.json"));
    let rows = report["tables"]["kernels"]["rows"].as_array().unwrap();
    // The last of the three steps may have been cut off and is left out. A block has four products: queries, keys and values
    // together, the output of attention, gate and up together, and down.
    for (kernel, per_step) in [
        ("attention_forward", 1),
        ("attention_backward", 1),
        ("linear_forward", 4),
        ("linear_backward_weight", 4),
        ("linear_backward_input", 4),
    ] {
        for rank in 0..2 {
            let row = rows.iter().find(|row| row["rank"] == rank && row["name"] == kernel);
            let row = row.unwrap_or_else(|| panic!("no {kernel} of rank {rank} in {rows:?}"));
            assert_eq!(
                (&row["kind"], &row["calls"]),
                (&"computation".into(), &(2 * per_step).into())
            );
        }
    }
}

#[test]
fn the_tiny_recipe_is_compared_as_published() {
    for (flag, accumulate) in
        [("--ddp-choice", &[1, 4, 4, 4, 4, 1][..]), ("--shard-choice", &[1, 4, 4, 4, 4, 4, 4])]
    {
        let sandbox = Sandbox::new();
        let flags =
            format!("train --recipe tiny-llama --steps 3 --warmup-steps 1 {flag} published");
        let run = sandbox.run(&format!("{flags} --json all.json")).ok();
        run.line("variant ");
        let report = json(&sandbox.path("all.json"));
        let runs = report["rows"].as_array().unwrap();
        let median = |run: &Value, name: &str| run["figures"][name]["median"].as_f64();
        let batches = |run: &Value| median(run, "accumulate").unwrap() as u64;
        assert_eq!(runs.iter().map(batches).collect::<Vec<_>>(), accumulate, "{report}");
        for run in runs {
            let alike = runs.iter().find(|of| batches(of) == batches(run)).unwrap();
            assert_eq!(run["weights"], alike["weights"], "{}", run["variant"]);
            assert_eq!(median(run, "steps"), Some(2.0), "{}", run["variant"]);
            assert!(median(run, "eval_accuracy_pct").is_some(), "{}", run["variant"]);
        }
    }
}

/// Blocks of four square matrices for attention and three of the feed-forward layer, with two norms; an embedding, a last
/// norm and a head. SmolLM2 shares keys and values, and as a classifier has a row for each class in place of a head.
#[test]
fn sizes_by_name_have_their_parameters() {
    let sandbox = Sandbox::new();
    // Classes need texts.
    sandbox.write("texts/train.csv", b"text,label\ngood food,1\nbad food,0\n");
    let tokenizer = include_bytes!("../../../choices/reviews/tokenizer.json");
    sandbox.write("texts/tokenizer.json", tokenizer);
    let params = |flags: &str| {
        let plan = "plan --on 1xL4 --top 1 --batch-size 1 --precision f32 --json plan.json";
        sandbox.run(&format!("{plan} --model llama {flags}")).ok();
        json(&sandbox.path("plan.json"))["params"].as_u64().unwrap()
    };
    let llama = |layers: u64, width: u64, intermediate: u64, vocab: u64| {
        let block = 4 * width * width + 3 * width * intermediate + 2 * width;
        layers * block + 2 * vocab * width + width
    };
    for (name, expected) in [
        ("tiny", llama(4, 256, 688, 8192)),
        ("small", llama(12, 768, 3072, 10_000)),
        ("medium", llama(24, 1024, 4096, 10_000)),
        ("large", llama(36, 1280, 5120, 10_000)),
        ("xl", llama(48, 1600, 6400, 10_000)),
        // 290 tensors of the language model, whose head is the embedding.
        ("smollm2-360m", 361_821_120),
        // One more.
        ("smollm2-360m --num-labels 5 --data text --data-dir texts", 361_825_920),
    ] {
        assert_eq!(params(&format!("--llama-size {name}")), expected, "{name}");
    }
}
