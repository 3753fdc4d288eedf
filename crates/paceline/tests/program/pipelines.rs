//! `paceline train --mesh pp=...`: stages on several ranks.

use crate::common::{Sandbox, column, json, weights_of};
use paceline_schedule::SCHEDULES;

const SMALL: &str = "--channels 4 4 --hidden 8 --global-batch-size 16 --accumulate 4 --steps 4 --samples 256 --clip-grad-norm 1";

#[test]
fn stages_end_with_the_weights_and_the_accuracy_of_one_process() {
    let llama = "--model llama --layers 3 --width 32 --heads 4 --kv-heads 2 --intermediate 48 --vocab 301 --seq-len 16 \
                 --global-batch-size 16 --accumulate 4 --steps 3 --optimizer adamw";
    for (model, evaluate) in [(SMALL, "--evaluate"), (llama, "")] {
        let ends = |flags: &str| {
            let sandbox = Sandbox::new();
            let run = sandbox.train(&format!("{model} {evaluate} {flags}")).ok();
            let weights = run.weights().to_owned();
            let accuracy =
                run.stdout.lines().find(|line| line.starts_with("Evaluation")).map(str::to_owned);
            (weights, accuracy, run)
        };
        let (alone, accuracy, _) = ends("--nproc 1");
        for (transport, schedule) in
            [("shm", "1f1b"), ("shm", "zb_h1"), ("tcp", "gpipe"), ("thread", "zb_h2")]
        {
            let (weights, other, run) = ends(&format!(
                "--nproc 2 --mesh pp=2 --transport {transport} --schedule {schedule}"
            ));
            assert_eq!(weights, alone, "{model} {transport} {schedule}");
            assert_eq!(other, accuracy, "{model} {transport} {schedule}");
            let title = run.line("paceline train: ");
            assert!(
                title.contains(&format!("a pipeline of 2 stages ({schedule}, cut at")),
                "{title}"
            );
        }
        let cut = if model == SMALL { "conv1,fc1" } else { "model.layers.1,model.norm" };
        let (weights, other, run) = ends(&format!("--nproc 3 --mesh pp=3 --stages {cut}"));
        assert_eq!((weights, other), (alone, accuracy), "{model} cut at {cut}");
        let title = run.line("paceline train: ");
        assert!(title.contains(&format!("cut at {}", cut.replace(',', ", "))), "{title}");
        let (replicas, ..) = ends("--nproc 2");
        for strategy in ["ddp", "sharded2"] {
            let flags = format!("--nproc 4 --mesh pp=2,dp=2 --strategy {strategy}");
            assert_eq!(ends(&flags).0, replicas, "{model} {strategy}");
        }
    }
}

#[test]
fn a_tree_of_micro_batches_has_the_same_weights_with_every_order_of_them() {
    let weights = |flags: &str| {
        let sandbox = Sandbox::new();
        let model = "--model mlp --num-layers 5 --input-dim 16 --hidden-dim 24 --output-dim 3 --global-batch-size 16 --accumulate 4 --steps 4";
        let flags = format!("{model} --accumulation-order tree --clip-grad-norm 1 {flags}");
        sandbox.train(&flags).ok().weights().to_owned()
    };
    let alone = weights("--nproc 1");
    for schedule in ["1f1b", "looped_bfs", "interleaved_1f1b", "zb_h2", "zbv"] {
        let found = weights(&format!("--nproc 2 --mesh pp=2 --schedule {schedule}"));
        assert_eq!(found, alone, "{schedule}");
    }
}

#[test]
fn every_schedule_has_the_same_weights_over_every_transport() {
    let weights = |flags: &str| {
        let mlp = "--model mlp --num-layers 7 --input-dim 16 --hidden-dim 24 --output-dim 3 --global-batch-size 16 --accumulate 4 \
                   --steps 3 --clip-grad-norm 1";
        weights_of(&format!("{mlp} {flags}"))
    };
    let tree = " --accumulation-order tree";
    let (in_sequence, as_a_tree) = (weights("--nproc 2"), weights(&format!("--nproc 2{tree}")));
    let mut strategies = ["ddp", "sharded1", "sharded2", "sharded3"].into_iter().cycle();
    for schedule in SCHEDULES {
        for transport in ["shm", "tcp", "hybrid"] {
            let (name, strategy) = (schedule.name(), strategies.next().unwrap());
            // The last micro-batch comes first, so only a tree adds up in the same order.
            let (order, expected) =
                if name == "looped_bfs" { (tree, &as_a_tree) } else { ("", &in_sequence) };
            let flags = format!(
                "--nproc 4 --mesh pp=2,dp=2 --schedule {name} --transport {transport} --strategy {strategy}{order}"
            );
            assert_eq!(weights(&flags), *expected, "{flags}");
        }
    }
}

#[test]
fn stages_on_an_emulated_accelerator_have_the_weights_of_the_processor() {
    let weights = |flags: &str| {
        let run = Sandbox::new().train(&format!("{SMALL} {flags}")).ok();
        assert!(!run.stdout.contains("idle"), "a ledger of the host's times: {}", run.stdout);
        run.weights().to_owned()
    };
    let (alone, replicas) = (weights("--nproc 1"), weights("--nproc 2"));
    for (seed, schedule) in ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv"].iter().enumerate()
    {
        let flags = format!("--schedule {schedule} --device sim:late,seed={seed}");
        assert_eq!(weights(&format!("--nproc 2 --mesh pp=2 {flags}")), alone, "{flags}");
    }
    for (seed, strategy) in ["ddp", "sharded3"].iter().enumerate() {
        let flags = format!("--strategy {strategy} --device sim:late,seed={seed}");
        assert_eq!(weights(&format!("--nproc 4 --mesh pp=2,dp=2 {flags}")), replicas, "{flags}");
    }
}

#[test]
fn a_language_model_in_stages_can_compute_parts_again_and_its_head_at_once() {
    let weights = |flags: &str| {
        let llama = "--model llama --layers 3 --width 32 --heads 4 --kv-heads 2 --intermediate 48 --vocab 301 --seq-len 16 \
                     --global-batch-size 16 --accumulate 4 --steps 3 --optimizer adamw";
        weights_of(&format!("{llama} {flags}"))
    };
    let alone = weights("--nproc 1");
    for flag in ["--checkpoint-activations", "--head-at-once"] {
        let flags = format!("--nproc 2 --mesh pp=2 --schedule zb_h1 {flag}");
        assert_eq!(weights(&flags), alone, "{flags}");
    }
}

#[test]
fn stages_share_a_tied_embedding() {
    let llama = "--model llama --layers 3 --width 32 --heads 4 --kv-heads 2 --intermediate 48 --vocab 301 --seq-len 16 \
                 --tie-embeddings --global-batch-size 16 --accumulate 4 --steps 3 --optimizer adamw";
    let losses = |flags: &str| {
        let sandbox = Sandbox::new();
        sandbox.train(&format!("{llama} {flags}")).ok();
        column(&sandbox.run_folder(), "loss")
    };
    let alone = losses("--nproc 1");
    for flags in [
        "--nproc 2 --mesh pp=2",
        "--nproc 3 --mesh pp=3 --schedule zb_h1",
        "--nproc 4 --mesh pp=2,dp=2",
    ] {
        // A frozen table has no gradient, so nothing is added up in another order.
        let frozen =
            |flags: &str| weights_of(&format!("{llama} --freeze model.embed_tokens {flags}"));
        if !flags.contains("dp=2") {
            assert_eq!(frozen(flags), frozen("--nproc 1"), "{flags}");
        }
        let found = losses(flags);
        assert_eq!(found.len(), alone.len(), "{flags}");
        for (found, alone) in found.iter().zip(&alone) {
            // The gradient of the embedding is added up in another order.
            assert!((found - alone).abs() < 1e-4, "{found} and {alone} with {flags}");
        }
    }
}

#[test]
fn samples_and_tokens_of_a_step_count_once_however_many_stages_there_are() {
    let lm = "--model llama --layers 3 --width 16 --heads 2 --intermediate 16 --vocab 61 --seq-len 8 --global-batch-size 6";
    // Texts of different lengths: the mean of a step's tokens is not one of its length.
    let texts = "--model llama --layers 3 --width 16 --heads 2 --intermediate 16 --data reviews --num-labels 2 --global-batch-size 6";
    for data in [lm, texts] {
        let figures = |flags: &str| {
            let sandbox = Sandbox::new();
            sandbox
                .train(&format!(
                    "{data} --accumulate 4 --steps 3 --warmup-steps 0 --transport thread {flags}"
                ))
                .ok();
            let summary = sandbox.summary();
            let of = |key: &str| summary[key].as_f64().unwrap();
            // Both are divided by the same time.
            (of("tokens_per_s") / of("samples_per_s"), of("model_gflop_per_sample"))
        };
        let (tokens, flop) = figures("--nproc 1");
        for flags in [
            "--nproc 2 --mesh pp=2",
            "--nproc 3 --mesh pp=3 --schedule zb_h1",
            "--nproc 4 --mesh pp=2,dp=2",
        ] {
            let (found, found_flop) = figures(flags);
            assert!(
                (found / tokens - 1.0).abs() < 1e-9,
                "{found} and {tokens} tokens of a sample with {flags}"
            );
            assert_eq!(found_flop, flop, "{flags}");
        }
    }
}

#[test]
fn a_pipeline_says_before_it_trains_that_a_step_has_one_micro_batch() {
    let words = "--mesh pp=2: a step has one micro-batch, so the stages work one after the other; pass --accumulate N";
    for (flags, is_said) in
        [("", true), ("--accumulate 1 --quiet", true), ("--accumulate 2", false)]
    {
        let model = "--channels 4 4 --hidden 8 --samples 64 --batch-size 8 --steps 1 --transport thread --nproc 2 --mesh pp=2";
        let run = Sandbox::new().train(&format!("{model} {flags}")).ok();
        assert_eq!(run.stderr.contains(words), is_said, "{flags}: {run:#?}");
        assert_eq!(run.stderr.lines().count(), usize::from(is_said), "{flags}: {run:#?}");
    }
}

#[test]
fn what_is_chosen_by_measured_costs_ends_with_the_same_weights() {
    let weights = |flags: &str| {
        let run = Sandbox::new().train(&format!("{SMALL} {flags}")).ok();
        (run.weights().to_owned(), run.line("paceline train: ").to_owned())
    };
    let (alone, _) = weights("--nproc 1");
    let (auto, title) = weights("--nproc 2 --mesh pp=2 --schedule auto");
    assert_eq!(auto, alone);
    assert!(title.contains(" ms a step by rehearsal; "), "{title}");
    let (measured, title) = weights("--nproc 2 --mesh pp=2 --schedule zb_h1 --stages measured");
    assert_eq!(measured, alone);
    assert!(title.contains("(zb_h1, cut at "), "{title}");
    let little = "--nproc 2 --mesh pp=2 --schedule auto --pipeline-memory 0.000001";
    let refused = Sandbox::new().train(&format!("{SMALL} {little}"));
    refused.ended_with(2, &["no schedule keeps so little"]);
    assert_eq!(refused.stdout, "");
}

#[test]
fn a_run_says_why_its_stages_were_idle() {
    let sandbox = Sandbox::new();
    let flags = "--nproc 2 --mesh pp=2 --schedule zb_h1 --warmup-steps 1";
    let run = sandbox.train(&format!("{SMALL} {flags}")).ok();
    assert!(run.stdout.contains("why ranks are idle"), "{}", run.stdout);
    let folder = sandbox.run_folder();
    let picture = std::fs::read_to_string(folder.join("step.svg")).unwrap();
    for word in ["As planned", "As run", "zb_h1 on 2 ranks", "stage 1", "backward, weights"] {
        assert!(picture.contains(word), "the picture has {word}");
    }
    let text = std::fs::read_to_string(folder.join("summary.txt")).unwrap();
    assert!(text.contains("The step as planned") && text.contains("The step as run"), "{text}");
    // Each stage has its own buckets, and its messages end in any order.
    assert!(!text.contains("Buckets (") && !text.contains("other operations"), "{text}");
    let summary = json(&folder.join("summary.json"));
    assert_eq!(summary["unlike_steps"], 0);
    let of = |key: &str| summary[key].as_f64().unwrap();
    let causes = ["fill", "drain", "imbalance", "late_peer", "transfer", "head_of_line", "barrier"];
    let all: f64 = causes.iter().map(|cause| of(&format!("bubble_{cause}_ms"))).sum();
    // The gradients are clipped.
    assert!(of("bubble_barrier_ms") > 0.0 && of("bubble_pct") > 0.0, "{summary}");
    assert!(all + of("bubble_rest_ms") > 0.0, "{summary}");
}
