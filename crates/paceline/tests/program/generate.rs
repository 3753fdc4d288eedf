//! `paceline generate`: the text of `transformers`, where a text ends, random choices, and what is refused.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use crate::common::pretrained::tokenizer;
use crate::common::{Run, Sandbox, json};
use paceline::checkpoint::index::Index;
use safetensors::SafeTensors;
use serde_json::{Value, json};

/// Tiny models, prompts, and the tokens with which `transformers` goes on. `make_llama.py` of `paceline-model` stored
/// them.
static FIXTURE: &[u8] = include_bytes!("../../../model/tests/fixtures/generate.safetensors");

fn tokens(name: &str) -> Vec<i64> {
    let file = SafeTensors::deserialize(FIXTURE).unwrap();
    let elems = file.tensor(name).unwrap().data().chunks_exact(8);
    elems.map(|bytes| i64::from_le_bytes(bytes.try_into().unwrap())).collect()
}

/// The words of these tokens. The tokenizer of these tests puts a space between two of them.
fn words(tokens: &[i64]) -> String {
    tokens.iter().map(|token| format!("t{token}")).collect::<Vec<_>>().join(" ")
}

/// Writes a case of the fixture as a folder of Hugging Face.
fn write_folder(folder: &Path, case: &str, change: impl Fn(&mut Value)) {
    fs::create_dir_all(folder).unwrap();
    let file = SafeTensors::deserialize(FIXTURE).unwrap();
    let prefix = format!("{case}.weight.");
    let weights = file.tensors().into_iter();
    let weights: Vec<_> = weights
        .filter_map(|(name, view)| Some((name.strip_prefix(&prefix)?.to_owned(), view)))
        .collect();
    let bytes = safetensors::serialize(weights, None).unwrap();
    fs::write(folder.join("model.safetensors"), bytes).unwrap();
    let metadata: HashMap<String, String> = SafeTensors::read_metadata(FIXTURE)
        .unwrap()
        .1
        .metadata()
        .clone()
        .unwrap()
        .into_iter()
        .collect();
    let mut config: Value = serde_json::from_str(&metadata[case]).unwrap();
    change(&mut config);
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    fs::write(folder.join("tokenizer.json"), tokenizer(61)).unwrap();
}

fn generate(sandbox: &Sandbox, prompt: &str, flags: &str) -> Run {
    let flags: Vec<&str> = flags.split_whitespace().collect();
    sandbox.run_words(&[&["generate", "--prompt", prompt], &flags[..]].concat())
}

#[test]
fn the_text_is_that_of_transformers_and_ends_where_it_must() {
    for case in ["whole", "grouped_tied"] {
        let sandbox = Sandbox::new();
        write_folder(&sandbox.path("model"), case, |_| {});
        let prompt = words(&tokens(&format!("{case}.prompt")));
        let greedy = tokens(&format!("{case}.greedy"));
        let text = |count: usize| format!("{prompt} {}\n", words(&greedy[..count]));
        let run = |flags: &str| generate(&sandbox, &prompt, &format!("--model model {flags}")).ok();

        for flags in ["--max-tokens 50", "--max-tokens 50 --greedy --threads 1"] {
            let run = run(flags);
            assert_eq!(run.stdout, text(50), "{case} {flags}");
            assert!(run.stderr.starts_with("7 tokens read in "), "{}", run.stderr);
            assert!(run.stderr.contains(", 50 tokens generated in "), "{}", run.stderr);
            assert!(run.stderr.ends_with(" tokens/s, the number that --max-tokens allows\n"));
        }
        assert_eq!(run("--max-tokens 1 --top-k 1").stdout, text(1));
        // By default a text has 100 tokens more, and here there are fewer positions.
        let run_to_end = run("");
        assert!(run_to_end.stdout.starts_with(text(50).trim_end()), "{}", run_to_end.stdout);
        assert_eq!(run_to_end.stdout.split_whitespace().count(), 64);
        assert!(run_to_end.stderr.ends_with("the model knows no more than 64 positions\n"));

        // The file of generation counts before that of the model.
        let end = |value: Value| {
            write_folder(&sandbox.path("model"), case, |config| {
                config["eos_token_id"] = value.clone();
            })
        };
        let before = |token: i64| greedy.iter().position(|at| *at == token).unwrap();
        let (first, second) = (greedy[5], greedy[12]);
        end(json!(second));
        let ended = run("");
        assert_eq!(ended.stdout, text(before(second)));
        assert!(ended.stderr.ends_with(" tokens/s, the model has ended the text\n"));
        let generation = |value: Value| {
            sandbox.write("model/generation_config.json", value.to_string().as_bytes());
        };
        generation(json!({"temperature": 0.6}));
        assert_eq!(run("").stdout, text(before(second)));
        generation(json!({"eos_token_id": [first, second]}));
        assert_eq!(run("").stdout, text(before(first).min(before(second))));
    }
}

#[test]
fn a_seed_decides_random_choices() {
    let sandbox = Sandbox::new();
    write_folder(&sandbox.path("model"), "whole", |_| {});
    let run =
        |flags: &str| generate(&sandbox, "t1 t2", &format!("--model model {flags}")).ok().stdout;
    let text = run("--temperature 1.5 --seed 3");
    assert_eq!(text, run("--temperature 1.5 --seed 3 --threads 1"));
    assert_ne!(text, run("--temperature 1.5 --seed 4"));
    assert_eq!(run("--top-k 5"), run("--top-k 5 --temperature 1 --seed 0"));
    assert_ne!(run("--top-k 5"), run("--top-k 2"));
    // So cold that only the likeliest token is left.
    assert_eq!(run("--temperature 1e-6"), run(""));
}

#[test]
fn a_trained_model_can_be_tried() {
    let sandbox = Sandbox::new();
    let sizes = "--layers 1 --width 16 --heads 2 --intermediate 24 --vocab 41 --seq-len 7";
    let train =
        format!("--model llama {sizes} --nproc 1 --epochs 1 --steps-per-epoch 2 --save ckpt");
    sandbox.train(&train).ok();
    let advice =
        "Copy tokenizer.json into tuned from the folder of the model that training began with ";
    assert_eq!(
        sandbox.run("checkpoint export ckpt --hugging-face --to tuned").ok().line(advice),
        "(the run has read no tokenizer)"
    );
    generate(&sandbox, "t1", "--model tuned").refused(&[
        "--model tuned: there is no tokenizer.json; copy it from the folder of the model that training began with",
    ]);
    sandbox.write("tuned/tokenizer.json", tokenizer(41).as_bytes());
    let run = generate(&sandbox, "t1 t40", "--model tuned --max-tokens 9").ok();
    assert!(run.stdout.starts_with("t1 t40 t"), "{}", run.stdout);
    assert_eq!(run.stdout.split_whitespace().count(), 11);
}

#[test]
fn a_fine_tuned_model_can_be_tried_at_once() {
    let sandbox = Sandbox::new();
    let (prompt, greedy) = (words(&tokens("whole.prompt")), tokens("whole.greedy"));
    let ids = [
        ("bos_token_id", json!(1)),
        ("eos_token_id", json!(greedy[12])),
        ("pad_token_id", json!(3)),
    ];
    write_folder(&sandbox.path("model"), "whole", |config| {
        for (key, id) in &ids {
            config[key] = id.clone();
        }
    });
    sandbox.write("model/tokenizer_config.json", b"{\"model_max_length\": 64}");
    let text = words(&(0..60).collect::<Vec<_>>());
    sandbox.write("texts/train.txt", text.as_bytes());
    // With a learning rate of zero, the weights stay as they were.
    let train = "--model llama --pretrained model --data text --data-dir texts --seq-len 7 --batch-size 2 --nproc 1";
    let train =
        format!("{train} --epochs 1 --steps-per-epoch 2 --lr 0 --weight-decay 0 --save ckpt");
    sandbox.train(&train).ok();
    let export = |flags: &str| {
        sandbox.run(&format!("checkpoint export ckpt --hugging-face --to tuned {flags}"))
    };
    let run = export("").ok();
    run.line("Copied: tokenizer.json, tokenizer_config.json");
    assert!(!run.stdout.contains("Copy "), "{}", run.stdout);
    let config = json(&sandbox.path("tuned/config.json"));
    for (key, id) in &ids {
        assert_eq!(config[key], *id, "{key}");
    }
    let before = |token: i64| greedy.iter().position(|at| *at == token).unwrap();
    let check = |count: usize| {
        let run = generate(&sandbox, &prompt, "--model tuned").ok();
        assert_eq!(run.stdout, format!("{prompt} {}\n", words(&greedy[..count])));
        assert!(run.stderr.ends_with("the model has ended the text\n"), "{}", run.stderr);
    };
    check(before(greedy[12]));

    let generation = json!({"eos_token_id": [greedy[12], greedy[5]]}).to_string();
    sandbox.write("model/generation_config.json", generation.as_bytes());
    fs::remove_file(sandbox.path("tuned/model.safetensors")).unwrap();
    export("").refused(&["--to tuned/tokenizer.json is there already; pass --force"]);
    export("--force")
        .ok()
        .line("Copied: tokenizer.json, tokenizer_config.json, generation_config.json");
    check(before(greedy[5]).min(before(greedy[12])));

    // A stranger's index that names another file of the user does not bring it into what is published.
    let latest = fs::read_to_string(sandbox.path("ckpt/latest")).unwrap();
    let file = sandbox.path("ckpt").join(latest.trim()).join("index.json");
    let bytes = fs::read(&file).unwrap();
    let mut index = Index::parse(&bytes).unwrap();
    sandbox.write("secret", b"{\"token\": \"of the user\"}");
    index.run.insert("tokenizer-file".into(), sandbox.path("secret").display().to_string());
    fs::write(&file, index.to_json()).unwrap();
    let before = fs::read(sandbox.path("tuned/tokenizer.json")).unwrap();
    export("--force").refused(&["names another file as its tokenizer: tokenizer.json: is not"]);
    assert_eq!(fs::read(sandbox.path("tuned/tokenizer.json")).unwrap(), before);
    fs::write(&file, bytes).unwrap();

    // The folder of the model is gone.
    fs::rename(sandbox.path("model"), sandbox.path("moved")).unwrap();
    let run = export("--force").ok();
    let advice = run.line(
        "Copy tokenizer.json, tokenizer_config.json, generation_config.json into tuned from the ",
    );
    assert!(advice.contains("model/tokenizer.json: No such file"), "{advice}");
}

#[test]
fn wrong_flags_prompts_and_folders_are_refused() {
    let sandbox = Sandbox::new();
    write_folder(&sandbox.path("model"), "whole", |_| {});
    let empty = ["--prompt has no token; pass the text to go on from"];
    generate(&sandbox, "  ", "--model model").refused(&empty);
    let long = ["t1"; 64].join(" ");
    generate(&sandbox, &long, "--model model").refused(&[
        "--prompt has 64 tokens, and the model knows 64 positions",
        "shorten the prompt",
    ]);
    generate(&sandbox, &["t1"; 63].join(" "), "--model model").ok();

    let refused = |change: &dyn Fn(&mut Value), expected: &str| {
        write_folder(&sandbox.path("changed"), "whole", change);
        generate(&sandbox, "t1", "--model changed").refused(&[expected]);
    };
    refused(
        &|config| {
            config["architectures"] = json!(["LlamaForSequenceClassification"]);
            config["num_labels"] = json!(5);
        },
        "--model changed: this is a classifier of",
    );
    refused(
        &|config| config["hidden_act"] = json!("gelu"),
        "--model changed/config.json: hidden_act is gelu",
    );
    refused(
        &|config| config["eos_token_id"] = json!("end"),
        "--model changed/config.json: eos_token_id is \"end\", and must be a token or a list of tokens",
    );
    refused(
        &|config| config["num_hidden_layers"] = json!(3),
        "--model changed: there is no tensor model.layers.2.",
    );
    sandbox.write("model/tokenizer.json", tokenizer(70).as_bytes());
    generate(&sandbox, "t3 t65", "--model model").refused(&[
        "tokenizer.json makes token 65 of --prompt",
        "by config.json the model has 61 tokens",
    ]);
    sandbox.write("model/tokenizer.json", b"{}");
    generate(&sandbox, "t1", "--model model")
        .refused(&["--model model/tokenizer.json: is not the tokenizer.json of a model"]);
}
