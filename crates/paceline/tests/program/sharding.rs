//! Strategies that divide the model among the ranks, end to end.

use crate::common::{Sandbox, TINY, TINY_MLP, json, trained, weights_of};

/// Ten steps of AdamW or SGD with clipping.
const TEN_STEPS: &str = "--epochs 2 --steps-per-epoch 5 --warmup-steps 0 --clip-grad-norm 0.5";
/// The strategies that divide the model, without loss.
pub const SHARDED: [&str; 6] = ["zero1", "zero2", "zero3", "sharded1", "sharded2", "sharded3"];

#[test]
fn ten_steps_end_with_the_bits_of_replicas() {
    for nproc in [2, 3, 4] {
        let base = format!("{TINY} {TEN_STEPS} --batch-size 4 --momentum 0.9 --nproc {nproc}");
        let expected = weights_of(&format!("{base} --strategy ddp"));
        assert_eq!(weights_of(&format!("{base} --strategy simple_ddp")), expected);
        for strategy in SHARDED {
            let found = weights_of(&format!("{base} --strategy {strategy}"));
            assert_eq!(found, expected, "{strategy}, {nproc} ranks");
        }
    }
}

#[test]
fn every_transport_gives_the_same_bits() {
    let base = format!("{TINY} {TEN_STEPS} --batch-size 4 --optimizer adamw --nproc 4");
    let expected = weights_of(&format!("{base} --strategy ddp"));
    for transport in ["thread", "tcp", "hybrid"] {
        for strategy in SHARDED {
            let flags = format!("{base} --strategy {strategy} --transport {transport}");
            assert_eq!(weights_of(&flags), expected, "{strategy} over {transport}");
        }
    }
}

#[test]
fn shards_within_replicas_give_the_same_bits() {
    let base = format!("{TINY} {TEN_STEPS} --batch-size 4 --nproc 4");
    let expected = weights_of(&format!("{base} --strategy ddp"));
    for strategy in ["sharded1", "sharded2", "sharded3"] {
        for mesh in ["dp=2,shard=2", "shard=4", "dp=4,shard=1"] {
            let flags = format!("{base} --strategy {strategy} --mesh {mesh}");
            assert_eq!(weights_of(&flags), expected, "{strategy} on {mesh}");
        }
    }
}

#[test]
fn accumulation_of_whole_gradients_has_the_bits_of_replicas_and_of_shards_the_memory() {
    let base = format!("{TINY} {TEN_STEPS} --batch-size 4 --nproc 2 --accumulate 2");
    let expected = weights_of(&format!("{base} --strategy ddp"));
    let gradients = |strategy: &str, how: &str| {
        let flags = format!("{base} --strategy {strategy} --accumulate-in {how}");
        let (sandbox, run) = trained(&flags);
        let summary = sandbox.summary();
        assert_eq!(run.weights() == expected, how == "whole", "{strategy} {how}");
        (run.weights().to_owned(), summary["peak_bytes"]["gradients"].as_u64().unwrap())
    };
    let mut of_shards = Vec::new();
    for strategy in ["zero2", "zero3", "sharded2", "sharded3"] {
        let (_, whole) = gradients(strategy, "whole");
        let (weights, shards) = gradients(strategy, "shards");
        assert!(shards < whole, "{strategy}: {shards} and {whole} bytes");
        of_shards.push(weights);
    }
    assert!(of_shards.iter().all(|weights| *weights == of_shards[0]), "{of_shards:?}");
}

#[test]
fn all_choices_are_compared_with_the_baseline() {
    let sandbox = Sandbox::new();
    let flags = format!("{TINY_MLP} {TEN_STEPS} --batch-size 4 --optimizer adamw --nproc 2");
    let run = sandbox.train(&format!("{flags} --shard-choice all --json all.json")).ok();
    let report = json(&sandbox.path("all.json"));
    let runs = report["rows"].as_array().unwrap();
    let names: Vec<&str> = runs.iter().map(|run| run["variant"].as_str().unwrap()).collect();
    assert_eq!(names[0], "baseline");
    assert_eq!(names[1..], SHARDED);
    for run in runs {
        assert_eq!(run["has_bits_of_base"], true, "{}", run["variant"]);
    }
    // In so small a model some are the same in all.
    for column in ["parameters", "gradients", "optimizer", "unsharded", "peak"] {
        assert!(run.stdout.contains(&format!("{column} ")), "{}", run.stdout);
    }
    // A single choice is a strategy, under its name and under PyTorch's.
    let alone = |choice: &str| {
        let sandbox = Sandbox::new();
        let run = sandbox.train(&format!("{flags} --shard-choice {choice}")).ok();
        let summary = sandbox.summary();
        (summary["strategy"].as_str().unwrap().to_owned(), run.weights().to_owned())
    };
    let (baseline, digest) = alone("baseline");
    assert_eq!(baseline, "simple_ddp");
    assert_eq!(alone("pytorch_zero3"), ("sharded3".to_owned(), digest.clone()));
    assert_eq!(alone("zero2"), ("zero2".to_owned(), digest));
}

#[test]
fn published_choices_need_the_number_of_ranks() {
    let flags = format!("{TINY_MLP} {TEN_STEPS} --batch-size 4 --optimizer adamw");
    let six =
        "simple_ddp simple_ddp_ga simple_ddp_hook simple_ddp_async bucket_ddp_async ddp".to_owned();
    let seven = format!("baseline {}", SHARDED.join(" "));
    for (flag, names) in [("--ddp-choice", six), ("--shard-choice", seven)] {
        let sandbox = Sandbox::new();
        sandbox.train(&format!("{flags} {flag} published")).refused(&[
            flag,
            "published",
            "--nproc 2",
        ]);
        assert_eq!(sandbox.contents(), [""; 0]);
        sandbox.train(&format!("{flags} {flag} published --nproc 2")).ok();
        let folder =
            std::fs::read_dir(sandbox.path("runs")).unwrap().next().unwrap().unwrap().path();
        let table = std::fs::read_to_string(folder.join("comparison.csv")).unwrap();
        let rows = table.lines().skip(1).filter_map(|line| line.split(',').nth(2));
        assert_eq!(rows.collect::<Vec<_>>().join(" "), names);
    }
}

#[test]
fn the_end_of_a_run_shows_when_units_are_gathered_and_needed() {
    let (sandbox, run) = trained(
        "--model mlp --input-dim 16 --hidden-dim 16 --output-dim 4 --num-layers 3 --strategy sharded3 --nproc 2 --epochs 1 --steps-per-epoch 12 --batch-size 8 --verbose",
    );
    assert!(run.line("Unit ").contains("Exposed (ms)"), "{}", run.stdout);
    let summary = sandbox.summary();
    let gathers = summary["anatomy"]["gathers"].as_array().unwrap();
    let uses: Vec<(&str, bool)> = gathers
        .iter()
        .map(|of| (of["unit"].as_str().unwrap(), of["is_backward"].as_bool().unwrap()))
        .collect();
    let units = ["fc0", "fc1", "fc2", "fc3"];
    let expected: Vec<(&str, bool)> = units
        .map(|unit| (unit, false))
        .into_iter()
        .chain(units.map(|unit| (unit, true)).into_iter().rev())
        .collect();
    assert_eq!(uses, expected);
    for of in gathers {
        let ms = |key: &str| of[key].as_f64().unwrap();
        let is_gathered = of["bytes"].as_u64().unwrap() > 0;
        // The last two units of the forward pass are still there.
        let is_there =
            of["is_backward"] == true && ["fc3", "fc2"].contains(&of["unit"].as_str().unwrap());
        assert_eq!(is_gathered, !is_there, "{of}");
        if is_gathered {
            assert!(ms("ready_ms") <= ms("sent_ms") && ms("sent_ms") <= ms("done_ms"), "{of}");
            assert!(ms("done_ms") <= ms("needed_ms") + ms("exposed_ms") + 0.1, "{of}");
        }
    }
    // The step before has gathered the first unit.
    assert!(gathers[0]["ready_ms"].as_f64().unwrap() < 0.0, "{}", gathers[0]);
    for key in ["gather_ms", "gather_exposed_ms", "gather_replayed_ms"] {
        assert!(summary[key].as_f64().unwrap() >= 0.0, "{key}: {}", summary[key]);
    }
}

#[test]
fn flags_of_other_strategies_have_no_effect_and_say_so() {
    let flags = format!(
        "{TINY_MLP} --nproc 2 --batch-size 8 --epochs 1 --steps-per-epoch 2 --warmup-steps 0"
    );
    let run = Sandbox::new().train(&format!("{flags} --strategy sharded2 --prefetch 2")).ok();
    assert!(run.stderr.contains("--prefetch has no effect on sharded2"), "{}", run.stderr);
    // Six parameters on four ranks: two each, and the last rank has none.
    let idle = "--model mlp --input-dim 8 --hidden-dim 8 --output-dim 4 --num-layers 2 --nproc 4";
    let run = Sandbox::new()
        .train(&format!(
            "{idle} --strategy zero3 --batch-size 8 --epochs 1 --steps-per-epoch 2 --warmup-steps 0"
        ))
        .ok();
    assert!(run.stderr.contains("nothing is left for rank 3"), "{}", run.stderr);
}
