//! `--model llama`, end to end: the same bits from every strategy, memory, pretrained weights, wrong settings.

use std::fs;

use crate::common::pretrained::{tokenizer, write as pretrained};
use crate::common::{Run, Sandbox, json, trained};
use crate::strategies::exact;
use serde_json::json;

/// A model so small that ten steps take no time.
const SMALL: &str = "--model llama --layers 2 --width 16 --heads 4 --kv-heads 2 --intermediate 24 --vocab 41 --seq-len 7";
const TEN_STEPS: &str =
    "--epochs 1 --steps-per-epoch 10 --warmup-steps 1 --optimizer adamw --clip-grad-norm 0.5";
#[test]
fn every_strategy_ends_with_the_same_bits_over_every_transport() {
    for nproc in [2, 4] {
        let base = format!("{SMALL} {TEN_STEPS} --batch-size 2 --accumulate 1 --nproc {nproc}");
        let (_, ddp) = trained(&format!("{base} --transport shm --strategy ddp"));
        for transport in ["shm", "tcp"] {
            for strategy in exact() {
                let flags = format!("--transport {transport} --strategy {strategy}");
                let (_, run) = trained(&format!("{base} {flags}"));
                assert_eq!(run.weights(), ddp.weights(), "{nproc} ranks, {flags}");
            }
        }
        for flags in ["--checkpoint-activations", "--strategy sharded3 --checkpoint-activations"] {
            let (_, run) = trained(&format!("{base} {flags}"));
            assert_eq!(run.weights(), ddp.weights(), "{nproc} ranks, {flags}");
        }
    }
}

/// Two ranks with two micro-batches each are four ranks, if both are added up as a tree. Sharded strategies accumulate whole
/// gradients for that.
#[test]
fn accumulated_micro_batches_end_with_the_bits_of_more_ranks() {
    let train = |nproc: usize, accumulate: usize, flags: &str| {
        let steps = format!("--steps-per-epoch {}", 10 * accumulate);
        let steps = TEN_STEPS.replace("--steps-per-epoch 10", &steps);
        let flags = format!("--nproc {nproc} --accumulate {accumulate} --strategy {flags}");
        trained(&format!("{SMALL} {steps} --batch-size 2 {flags}")).1.weights().to_owned()
    };
    let tree = "--accumulation-order tree";
    let whole = train(4, 1, "simple_ddp");
    for strategy in ["simple_ddp_ga", "ddp", "sharded3 --accumulate-in whole"] {
        assert_eq!(train(2, 2, &format!("{strategy} {tree}")), whole, "{strategy}");
    }
    let sequential = train(1, 4, "single");
    assert_ne!(sequential, whole, "the order matters");
}

/// Threads and strategies make no difference, but the element type does. The learning rate is high, so that rounding has
/// time to show.
#[test]
fn every_strategy_ends_with_the_same_bits_in_bf16() {
    let base = format!("{SMALL} {TEN_STEPS} --lr 0.01 --batch-size 2 --accumulate 1 --nproc 2");
    let (_, wide) = trained(&format!("{base} --strategy ddp"));
    let base = format!("{base} --precision bf16");
    let (_, ddp) = trained(&format!("{base} --strategy ddp"));
    assert_ne!(ddp.weights(), wide.weights());
    assert!(ddp.stdout.contains("1 thread, adamw at lr 0.01, in bf16"), "{}", ddp.stdout);
    let more = ["ddp --threads 2", "sharded3 --threads 2", "sharded3 --checkpoint-activations"];
    for strategy in exact().chain(more) {
        let (_, run) = trained(&format!("{base} --strategy {strategy}"));
        assert_eq!(run.weights(), ddp.weights(), "{strategy}");
    }
    let last = |run: &Run| -> f64 {
        let line = run.line("Epoch 1/1: loss ");
        line.split(',').next().unwrap().parse().unwrap()
    };
    let (narrow, wide) = (last(&ddp), last(&wide));
    assert!((narrow / wide - 1.0).abs() < 0.02, "{narrow}, not {wide}");
}

#[test]
fn what_computes_in_bf16_goes_on_and_is_evaluated_in_it() {
    let sandbox = Sandbox::new();
    let base = "--recipe tiny-llama --nproc 2 --lr-schedule constant";
    let train = |flags: &str| sandbox.train(&format!("{base} {flags}"));
    let trained = train("--precision bf16 --steps 30 --evaluate --save saved --json one.json").ok();
    let accuracy = json(&sandbox.path("one.json"))["eval_accuracy"].as_f64().unwrap();
    assert!(accuracy > 0.8, "{accuracy}");
    assert_eq!(json(&sandbox.path("one.json"))["precision"], "bf16");
    let config = json(&sandbox.run_folder().join("config.json"));
    assert_eq!(config["stated"]["precision"], "bf16");
    assert_eq!(config["resolved"]["precision"], "bf16");

    let evaluate = |flags: &str| {
        sandbox.run(&format!("evaluate --recipe tiny-llama --checkpoint saved {flags}"))
    };
    let line = "Evaluation loss: ";
    let same = evaluate("--nproc 2").ok();
    assert_eq!(same.line(line), trained.line(line));
    assert!(same.stdout.contains("2 ranks, in bf16"), "{}", same.stdout);
    let wide = evaluate("--precision f32").ok();
    assert!(!wide.stdout.contains("bf16"), "{}", wide.stdout);

    // Weights are f32 in both, so a run can go on in the other type, and is told that this is another run.
    let note = "it was written with --precision bf16, this run has f32; it goes on, but ends with other weights";
    let other = train("--precision f32 --steps 40 --resume saved").ok();
    assert!(other.stderr.contains(note), "{}", other.stderr);
    let more = train("--precision bf16 --steps 40 --resume saved").ok();
    assert!(!more.stderr.contains("--precision"), "{}", more.stderr);
    let whole = train("--precision bf16 --steps 40").ok();
    assert_eq!(more.weights(), whole.weights());
}

#[test]
fn tokens_and_samples_are_counted_apart_and_memory_is_predicted() {
    let flags = format!("{SMALL} {TEN_STEPS} --batch-size 3 --nproc 2 --json summary.json");
    let (sandbox, run) = trained(&format!("{flags} --tie-embeddings --verbose"));
    let summary = json(&sandbox.path("summary.json"));
    let number = |key: &str| summary[key].as_f64().unwrap();
    let ratio = number("tokens_per_s") / number("samples_per_s");
    assert!((ratio - 7.0).abs() < 1e-9, "{ratio} tokens per sample");
    let steps = crate::common::metrics(&sandbox.run_folder());
    assert!(steps.iter().all(|step| step["samples"] == 6), "{steps:?}");
    // A random model knows nothing: its loss is about the logarithm of the vocabulary.
    let first = steps[0]["loss"].as_f64().unwrap();
    assert!((first - 41f64.ln()).abs() < 0.2, "{first}");
    run.line("      difference, %           0          0          0            0          0");
}

#[test]
fn pretrained_weights_are_where_training_begins() {
    let sandbox = Sandbox::new();
    pretrained(&sandbox.path("small"), |_, _| {});
    let base = format!("--model llama --pretrained small --seq-len 7 {TEN_STEPS} --batch-size 2");
    let loaded = sandbox.train(&format!("{base} --nproc 2 --strategy ddp")).ok();
    for strategy in ["zero3", "sharded3", "simple_ddp"] {
        let run = sandbox.train(&format!("{base} --nproc 2 --strategy {strategy}")).ok();
        assert_eq!(run.weights(), loaded.weights(), "{strategy}");
    }
    // The seed makes no weights, only the data.
    let random = sandbox.train(&format!("{base} --nproc 2 --init random")).ok();
    assert_ne!(random.weights(), loaded.weights());
}

#[test]
fn a_head_for_another_number_of_classes_is_new() {
    let sandbox = Sandbox::new();
    pretrained(&sandbox.path("two"), |config, tensors| {
        config["architectures"] = json!(["LlamaForSequenceClassification"]);
        config["num_labels"] = json!(2);
        tensors.push(("score.weight".to_owned(), vec![2, 8]));
    });
    pretrained(&sandbox.path("none"), |_, _| {});
    let train = |flags: &str| {
        let _ = fs::remove_dir_all(sandbox.path("saved"));
        let flags = format!("--model llama {flags} --data text --data-dir texts --max-length 7");
        sandbox.train(&format!("{flags} {TEN_STEPS} --nproc 2 --save saved --batch-size 2"))
    };
    let rows = (0..40).map(|at| format!("t{at} t2,{}\n", at % 2)).collect::<String>();
    sandbox.write("texts/train.csv", format!("text,label\n{rows}").as_bytes());
    sandbox.write("texts/tokenizer.json", tokenizer(41).as_bytes());
    let note = |run: &Run| {
        let lines = run.stderr.lines().filter(|line| line.starts_with("score.weight is new"));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(note(&train("--pretrained two").ok()), [""; 0]);
    assert_eq!(note(&train("--pretrained two --num-labels 2").ok()), [""; 0]);
    let begin = "score.weight is new and gets random values, because";
    let other = format!("{begin} two has one of another kind, [2, 8] of F32");
    assert_eq!(note(&train("--pretrained two --num-labels 5").ok()), [other]);
    let none = format!("{begin} none has none");
    assert_eq!(note(&train("--pretrained none --num-labels 5").ok()), [none]);
    // A run that goes on has the head of its checkpoint.
    let more = TEN_STEPS.replace("--epochs 1", "--epochs 2");
    let flags = "--model llama --pretrained none --num-labels 5 --data text --data-dir texts --max-length 7";
    let flags = format!("{flags} {more} --nproc 2 --batch-size 2 --resume saved");
    let rest = sandbox.train(&flags).ok();
    assert_eq!(note(&rest), [""; 0]);
}

#[test]
fn what_is_exported_can_be_loaded_again() {
    let sandbox = Sandbox::new();
    let base = format!("{SMALL} {TEN_STEPS} --batch-size 2 --nproc 2");
    let trained = sandbox.train(&format!("{base} --strategy sharded3 --save ckpt")).ok();
    let export = |flags: &str| sandbox.run(&format!("checkpoint export ckpt {flags}"));
    export("--hugging-face --to folder").ok().line("folder/model.safetensors: 21 tensors of ");
    let config = json(&sandbox.path("folder/config.json"));
    assert_eq!(config["architectures"], json!(["LlamaForCausalLM"]));
    assert_eq!((&config["num_key_value_heads"], &config["vocab_size"]), (&2.into(), &41.into()));
    export("--hugging-face --to folder").refused(&["folder/model.safetensors is there already"]);
    // With a learning rate of zero, the weights stay as they were loaded.
    let flags = format!("--model llama --pretrained folder --seq-len 7 {TEN_STEPS} --batch-size 2");
    let loaded = sandbox.train(&format!("{flags} --nproc 2 --lr 0 --weight-decay 0")).ok();
    assert_eq!(loaded.weights(), trained.weights());

    sandbox.train("--channels 4 --hidden 8 --samples 64 --epochs 1 --save cnn").ok();
    sandbox
        .run("checkpoint export cnn --hugging-face --to other")
        .refused(&["--hugging-face", "a model that transformers does not have"]);
}

#[test]
fn folders_that_do_not_fit_are_refused() {
    let sandbox = Sandbox::new();
    let refused = |name: &str, flags: &str, expected: &[&str]| {
        let flags = format!("--model llama --pretrained {name} {flags}");
        sandbox.train(&flags).refused(expected);
    };
    pretrained(&sandbox.path("small"), |_, _| {});
    refused(
        "small",
        "--seq-len 7 --width 8",
        &["--width: the folder of --pretrained states it; leave it out"],
    );
    refused("small", "--seq-len 17", &["up to 17 tokens", "16 positions"]);
    pretrained(&sandbox.path("gpt"), |config, _| {
        config["architectures"] = json!(["GPT2LMHeadModel"])
    });
    refused(
        "gpt",
        "",
        &["--pretrained gpt/config.json: the architecture is GPT2LMHeadModel", "LlamaForCausalLM"],
    );
    pretrained(&sandbox.path("wrong"), |config, _| config["hidden_size"] = json!("8"));
    refused(
        "wrong",
        "",
        &["--pretrained wrong/config.json: hidden_size is \"8\", and must be a whole number"],
    );
    pretrained(&sandbox.path("missing"), |_, tensors| {
        tensors.pop();
    });
    refused(
        "missing",
        "",
        &["--pretrained missing: there is no tensor model.layers.0.self_attn.o_proj.weight"],
    );
    pretrained(&sandbox.path("shape"), |_, tensors| tensors[6].1 = vec![9]);
    refused(
        "shape",
        "",
        &["shape/model.safetensors: model.norm.weight has shape [9], and the model needs [8]"],
    );
    let path = sandbox.path("small/model.safetensors");
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    refused(
        "small",
        "--seq-len 7",
        &["small/model.safetensors: it has", "it is truncated or damaged"],
    );
}
