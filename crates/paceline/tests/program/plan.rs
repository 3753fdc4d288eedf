//! `paceline plan`: from a `config.json` or from flags to layouts, and the first of them run here.

use crate::common::{Sandbox, json};

const CONFIG: &str = include_str!("../../../model/src/llama/configs/qwen2.5-0.5b.json");

#[test]
fn a_config_alone_is_enough() {
    let sandbox = Sandbox::new();
    sandbox.write("config.json", CONFIG.as_bytes());
    let planned = |flags: &str| {
        let hardware = "--on 4xL4 --link 25gbe --ranks-per-host 2 --link-in-host pcie4";
        let step = "--global-batch-size 16 --seq-len 512 --optimizer adamw";
        let run = format!("plan --config config.json {hardware} {step} {flags} --json plan.json");
        let run = sandbox.run(&run).ok();
        run.prints(&["494,032,768 parameters", "2 per host on pcie4", "limit"]);
        json(&sandbox.path("plan.json"))["rows"].as_array().unwrap().clone()
    };
    let rows = planned("--top 10");
    let steps: Vec<f64> = rows.iter().map(|row| row["step_ms"].as_f64().unwrap()).collect();
    assert!(steps.is_sorted() && steps.len() >= 10, "{steps:?}");
    for row in &rows {
        let part = |name: &str| row[name].as_f64().unwrap();
        let parts = ["compute_ms", "idle_ms", "exposed_ms", "exchange_ms"].map(part);
        assert!((parts.iter().sum::<f64>() / part("step_ms") - 1.0).abs() < 1e-9, "{row}");
        assert!(row["command"].as_str().unwrap().starts_with("paceline train "), "{row}");
    }
    // Each replica has the whole model, and a stage a part of it.
    let bytes = |mesh: &str| {
        let rows = planned(&format!("--mesh {mesh} --strategy ddp --precision f32 --top 1"));
        rows.last().unwrap()["bytes"]["parameters"].as_f64().unwrap()
    };
    let whole = 4.0 * 494_032_768.0;
    assert!((bytes("dp=4") / whole - 1.0).abs() < 1e-3);
    let half = bytes("pp=2,dp=2");
    assert!(half > whole / 2.0 && half < 0.85 * whole, "{half} of {whole}");
}

#[test]
fn the_first_layouts_run_here_with_the_memory_that_was_planned() {
    let sandbox = Sandbox::new();
    let model =
        "--model llama --layers 2 --width 32 --heads 2 --intermediate 48 --vocab 97 --seq-len 16";
    let step = "--global-batch-size 4 --optimizer adamw --rounds 1 --warmup-steps 1";
    let run = format!("plan --on 2xthis --link 10gbit,50us {model} {step} --measure 2");
    sandbox.run(&format!("{run} --json plan.json")).ok().prints(&["measured ms", "measured MB"]);
    let plan = json(&sandbox.path("plan.json"));
    let rows = plan["rows"].as_array().unwrap();
    for row in &rows[..2] {
        assert!(row["measured_ms"]["median"].as_f64().unwrap() > 0.0, "{row}");
        let planned = row["bytes"]["total"].as_f64().unwrap();
        let off = row["measured_bytes"].as_f64().unwrap() / planned - 1.0;
        assert!(off.abs() < 0.03, "off by {off}: {row}");
    }
    assert!(rows[2]["measured_ms"].is_null());
    let many = format!("{run}0000000");
    sandbox.run(&many).refused(&["--measure 20000000: pass at most the 10 layouts of --top"]);
}
