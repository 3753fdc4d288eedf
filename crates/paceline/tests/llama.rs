//! `--model llama`, end to end: the same bits from every strategy, memory, pretrained weights, wrong settings.

mod common;

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use common::{Run, Sandbox, json};
use safetensors::tensor::{Dtype, TensorView, serialize};
use serde_json::{Value, json};

/// A model so small that ten steps take no time.
const SMALL: &str = "--model llama --layers 2 --width 16 --heads 4 --kv-heads 2 --intermediate 24 --vocab 41 --seq-len 7";
const TEN_STEPS: &str =
    "--epochs 1 --steps-per-epoch 10 --warmup-steps 1 --optimizer adamw --clip-grad-norm 0.5";
const STRATEGIES: [&str; 11] = [
    "simple_ddp",
    "simple_ddp_hook",
    "simple_ddp_async",
    "bucket_ddp_async",
    "flat_ddp",
    "zero1",
    "zero2",
    "zero3",
    "sharded1",
    "sharded2",
    "sharded3",
];

#[track_caller]
fn train(flags: &str) -> (Sandbox, Run) {
    let sandbox = Sandbox::new();
    let run = sandbox.train(flags).ok();
    (sandbox, run)
}

#[test]
fn every_strategy_ends_with_the_same_bits() {
    for (nproc, transport) in [(2, "shm"), (4, "tcp")] {
        let base =
            format!("{SMALL} {TEN_STEPS} --batch-size 2 --nproc {nproc} --transport {transport}");
        let (_, ddp) = train(&format!("{base} --strategy ddp"));
        for strategy in STRATEGIES {
            let (_, run) = train(&format!("{base} --strategy {strategy}"));
            assert_eq!(run.weights(), ddp.weights(), "{strategy}, {nproc} ranks over {transport}");
        }
        for flags in ["--checkpoint-activations", "--strategy sharded3 --checkpoint-activations"] {
            let (_, run) = train(&format!("{base} {flags}"));
            assert_eq!(run.weights(), ddp.weights(), "{flags}");
        }
    }
}

#[test]
fn tokens_and_samples_are_counted_apart_and_memory_is_predicted() {
    let flags = format!("{SMALL} {TEN_STEPS} --batch-size 3 --nproc 2 --json summary.json");
    let (sandbox, run) = train(&format!("{flags} --tie-embeddings"));
    let summary = json(&sandbox.path("summary.json"));
    let number = |key: &str| summary[key].as_f64().unwrap();
    let ratio = number("tokens_per_s") / number("samples_per_s");
    assert!((ratio - 7.0).abs() < 1e-9, "{ratio} tokens per sample");
    let steps = common::metrics(&sandbox.run_folder());
    assert!(steps.iter().all(|step| step["samples"] == 6), "{steps:?}");
    // A random model knows nothing: its loss is about the logarithm of the vocabulary.
    let first = steps[0]["loss"].as_f64().unwrap();
    assert!((first - 41f64.ln()).abs() < 0.2, "{first}");
    run.line("      difference, %           0          0          0            0          0");
}

#[test]
fn wrong_sizes_are_refused_before_a_rank_starts() {
    let sandbox = Sandbox::new();
    for (flags, expected) in [
        ("--width 18 --heads 4", "--width 18 must be a multiple of --heads 4"),
        (
            "--width 12 --heads 4",
            "--width 12 gives each of --heads 4 a width of 3, which must be even",
        ),
        ("--heads 4 --kv-heads 3", "--heads 4 must be a multiple of --kv-heads 3"),
        ("--vocab 0", "--vocab must be above zero"),
        ("--layers 100000", "--layers 100000: pass 10000 or less"),
        ("--init pretrained", "--init pretrained needs a folder; pass --pretrained DIR"),
        ("--pretrained none", "--pretrained none/config.json: No such file"),
        ("--data mnist", "--model llama trains on tokens"),
    ] {
        sandbox.train(&format!("--model llama {flags}")).refused(&[expected]);
    }
    sandbox.train("--layers 3").refused(&["--layers", "--model llama"]);
}

/// A folder as Hugging Face stores it, with weights of 0.01 times the place.
fn pretrained(folder: &Path, change: impl Fn(&mut Value, &mut Vec<(String, Vec<usize>)>)) {
    let mut config = json!({
        "architectures": ["LlamaForCausalLM"], "vocab_size": 41, "hidden_size": 8,
        "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2,
        "max_position_embeddings": 16, "rms_norm_eps": 1e-5, "tie_word_embeddings": true,
    });
    let layer = "model.layers.0";
    let mut tensors = vec![
        ("model.embed_tokens.weight".to_owned(), vec![41, 8]),
        (format!("{layer}.input_layernorm.weight"), vec![8]),
        (format!("{layer}.post_attention_layernorm.weight"), vec![8]),
        (format!("{layer}.mlp.gate_proj.weight"), vec![12, 8]),
        (format!("{layer}.mlp.up_proj.weight"), vec![12, 8]),
        (format!("{layer}.mlp.down_proj.weight"), vec![8, 12]),
        ("model.norm.weight".to_owned(), vec![8]),
    ];
    for part in ["q", "k", "v", "o"] {
        tensors.push((format!("{layer}.self_attn.{part}_proj.weight"), vec![8, 8]));
    }
    change(&mut config, &mut tensors);
    fs::create_dir_all(folder).unwrap();
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let data: Vec<Vec<u8>> = tensors
        .iter()
        .map(|(_, shape)| {
            let elems = 0..shape.iter().product::<usize>();
            elems.flat_map(|at| (((at * 7) % 11) as f32 * 0.01).to_le_bytes()).collect()
        })
        .collect();
    let views: HashMap<String, TensorView> = tensors
        .iter()
        .zip(&data)
        .map(|((name, shape), data)| {
            (name.clone(), TensorView::new(Dtype::F32, shape.clone(), data).unwrap())
        })
        .collect();
    fs::write(folder.join("model.safetensors"), serialize(views, None).unwrap()).unwrap();
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
fn what_is_exported_can_be_loaded_again() {
    let sandbox = Sandbox::new();
    let base = format!("{SMALL} {TEN_STEPS} --batch-size 2 --nproc 2");
    let trained = sandbox.train(&format!("{base} --strategy sharded3 --save ckpt")).ok();
    let export = |flags: &str| {
        let mut command = sandbox.paceline();
        command.args(format!("checkpoint export ckpt {flags}").split_whitespace());
        Run::of(command)
    };
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
    let mut command = sandbox.paceline();
    command.args("checkpoint export cnn --hugging-face --to other".split_whitespace());
    Run::of(command).refused(&["--hugging-face", "a model that transformers does not have"]);
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
