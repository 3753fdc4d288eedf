//! A Llama's folder, its texts and its sizes, if something is wrong with them: one whole message, exit code 2, and
//! nothing is written.
//!
//! `llama.rs` and `generate.rs` have more folders that are refused; these tests do not repeat them.

use std::fs;

use crate::common::{Sandbox, pretrained};
use serde_json::{Value, json};

/// Checks that `paceline train --model llama` refuses these flags with exactly this message, and writes nothing.
#[track_caller]
fn refused(sandbox: &Sandbox, flags: &str, message: &str) {
    let before = sandbox.contents();
    let run = sandbox.train(&format!("--model llama {flags}")).refused(&[]);
    let said: Vec<&str> = run.stderr.split_whitespace().collect();
    assert_eq!(said.join(" "), format!("error: {message}"), "{flags}");
    assert_eq!(sandbox.contents(), before, "{flags} wrote something");
}

#[test]
fn settings_that_are_not_supported() {
    let sandbox = Sandbox::new();
    for (key, value, message) in [
        (
            "num_key_value_heads",
            json!(3),
            "num_attention_heads 2 must be a multiple of num_key_value_heads 3",
        ),
        ("head_dim", json!(5), "head_dim 5 must be even, because rotary positions rotate pairs"),
        (
            "hidden_act",
            json!("gelu"),
            "hidden_act is gelu, which is not supported; it must be silu",
        ),
        (
            "attention_bias",
            json!(true),
            "attention_bias is true, which is not supported; it must be false",
        ),
        (
            "rope_scaling",
            json!({"rope_type": "yarn", "factor": 2.0}),
            "rope_type is yarn, which is not supported; it must be default, linear or llama3",
        ),
        ("vocab_size", Value::Null, "vocab_size is missing"),
        (
            "intermediate_size",
            json!(3),
            "mlp.gate_proj.weight has 3 x 8 elements, and this number must be a multiple of 16",
        ),
    ] {
        pretrained::write(&sandbox.path(key), |config, _| config[key] = value.clone());
        let message = format!("--pretrained {key}/config.json: {message}");
        refused(&sandbox, &format!("--pretrained {key} --seq-len 7"), &message);
    }
    sandbox.write("vocab_size/config.json", b"{\"vocab_size\": ");
    refused(
        &sandbox,
        "--pretrained vocab_size",
        "--pretrained vocab_size/config.json: this is no JSON (EOF while parsing a value at line 1 column 15)",
    );
}

/// A tied head that is stored too must be the embedding.
#[test]
fn a_tied_head_of_other_values() {
    let sandbox = Sandbox::new();
    let write = |folder: &str, change: bool| {
        pretrained::write(&sandbox.path(folder), |_, tensors| {
            tensors.push(("lm_head.weight".to_owned(), vec![41, 8]));
        });
        // The tensors lie in the order of their names, behind the header.
        let path = sandbox.path(folder).join("model.safetensors");
        let mut bytes = fs::read(&path).unwrap();
        let header = u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
        bytes[8 + header] ^= u8::from(change);
        fs::write(&path, bytes).unwrap();
    };
    write("other", true);
    refused(
        &sandbox,
        "--pretrained other --seq-len 7",
        "--pretrained other/config.json: tie_word_embeddings is true, but the weights have a lm_head.weight that differs \
         from model.embed_tokens.weight, and versions of transformers differ in which they use; set it to false to use \
         both, or remove lm_head.weight",
    );
    write("same", false);
    sandbox.train("--model llama --pretrained same --seq-len 7 --steps 1").ok();
}

#[test]
fn samples_that_are_longer_than_the_model_knows() {
    let sandbox = Sandbox::new();
    pretrained::write(&sandbox.path("short"), |config, _| {
        config["max_position_embeddings"] = json!(8);
    });
    refused(
        &sandbox,
        "--pretrained short --seq-len 9",
        "the samples have up to 9 tokens, and the model knows 8 positions; pass --seq-len 8 or less",
    );
}

#[test]
fn weights_that_are_damaged_or_of_another_type() {
    const FILE: &str = "model.safetensors";
    const INDEX: &str = "model.safetensors.index.json";
    let sandbox = Sandbox::new();
    pretrained::write(&sandbox.path("whole"), |_, _| {});
    let whole = fs::read(sandbox.path("whole").join(FILE)).unwrap();
    let folder = |name: &str, files: &[(&str, &[u8])]| {
        pretrained::write(&sandbox.path(name), |_, _| {});
        fs::remove_file(sandbox.path(name).join(FILE)).unwrap();
        for (file, bytes) in files {
            fs::write(sandbox.path(name).join(file), bytes).unwrap();
        }
    };
    let refused = |name: &str, message: &str| {
        refused(&sandbox, &format!("--pretrained {name} --seq-len 7"), message);
    };

    folder("none", &[]);
    refused("none", &format!("--pretrained none: there is no {FILE} and no {INDEX}"));
    // A byte of the header is another one. The next two are no such files at all.
    let mut header = whole.clone();
    header[9] = 0xff;
    folder("header", &[(FILE, &header)]);
    refused(
        "header",
        "--pretrained header/model.safetensors: its header is damaged (key must be a string at line 1 column 2)",
    );
    folder("text", &[(FILE, b"version https://git-lfs.github.com/spec/v1\n")]);
    refused(
        "text",
        "--pretrained text/model.safetensors: its header would have 2336927755350992246 bytes, and the file has 43: it \
         is truncated, or no safetensors file",
    );
    folder("short", &[(FILE, &whole[..7])]);
    refused(
        "short",
        "--pretrained short/model.safetensors: it has 7 bytes: it is truncated, or no safetensors file",
    );
    let entry = b"\"model.norm.weight\":{\"dtype\":\"F32";
    let at = whole.windows(entry.len()).position(|bytes| bytes == entry).unwrap() + entry.len();
    let mut integers = whole.clone();
    integers[at - 3..at].copy_from_slice(b"I32");
    folder("integers", &[(FILE, &integers)]);
    refused(
        "integers",
        "--pretrained integers/model.safetensors: model.norm.weight is of type I32; F32, F16 and BF16 can be read",
    );

    let index = |file: &str| json!({"weight_map": {"model.norm.weight": file}}).to_string();
    folder("index", &[(INDEX, &index("part.safetensors").as_bytes()[..20])]);
    refused(
        "index",
        "--pretrained index/model.safetensors.index.json: is no index of weights (EOF while parsing a string at line 1 \
         column 20)",
    );
    folder("lost", &[(INDEX, index("part.safetensors").as_bytes())]);
    refused(
        "lost",
        "--pretrained lost/part.safetensors: is missing, and model.safetensors.index.json says that model.norm.weight is \
         there",
    );
    let others = index("part.safetensors").replace("model.norm", "model.other");
    folder("other", &[(INDEX, others.as_bytes()), ("part.safetensors", &whole)]);
    refused(
        "other",
        "--pretrained other/part.safetensors: there is no tensor model.other.weight, which \
         model.safetensors.index.json says is here",
    );
    folder("outside", &[(INDEX, index("../whole/model.safetensors").as_bytes())]);
    refused(
        "outside",
        "--pretrained outside/model.safetensors.index.json: model.norm.weight lies in \"../whole/model.safetensors\", which \
         is no name of a file",
    );
}

#[test]
fn texts_and_tokenizers() {
    let sandbox = Sandbox::new();
    let tokenizer: &[u8] = include_bytes!("../../../choices/reviews/tokenizer.json");
    let sizes = "--layers 1 --width 16 --heads 2 --intermediate 8";
    let base = format!("{sizes} --vocab 394 --num-labels 2 --data text --data-dir texts");
    let refused_with = refused;
    let refused = |file: &str, contents: &[u8], message: &str| {
        let _ = fs::remove_dir_all(sandbox.path("texts"));
        sandbox.write("texts/tokenizer.json", tokenizer);
        sandbox.write(&format!("texts/{file}"), contents);
        refused_with(&sandbox, &base, message);
    };
    let labels = |label: &str| format!("text,label\ngood food,1\nbad food,{label}\n").into_bytes();
    let classes = "not one of the 2 classes from 0 to 1";
    let fix = "pass the number of classes (--num-labels for a Llama, otherwise --classes), or correct the label";
    let from_one = format!("; if labels count from 1, pass --label-names 1 2, otherwise {fix}");
    for (label, fix) in [("2", &*from_one), ("3", &format!("; {fix}")), ("-1", "")] {
        let row =
            format!("--data text: texts/train.csv: row 2: the label is {label}, {classes}{fix}");
        refused("train.csv", &labels(label), &row);
    }
    refused(
        "train.csv",
        &labels("x"),
        "--data text: texts/train.csv: row 2: the label \"x\" is not an integer; labels are the numbers of the classes from 0, \
         or words that are listed; correct the row, or pass --skip-bad-rows",
    );
    refused("train.csv", b"text,label\n", "--data text: texts/train.csv: has no rows");
    refused(
        "train.csv",
        b"review,stars\ngood,1\n",
        "--data text: texts/train.csv: has no column text; its columns are review, stars; name the columns with \
         --text-column and --label-column, or pass --no-header if the first line is a row",
    );
    refused(
        "train.parquet",
        b"PAR1 this is no footer PAR1",
        "--data text: texts/train.parquet: EOF: Parquet file too small. Size is 27 but need 544367996; is the file damaged or \
         cut off, or not a Parquet file?",
    );
    refused(
        "train.parquet",
        b"version https://git-lfs.github.com/spec/v1\n",
        "--data text: texts/train.parquet: Invalid Parquet file. Corrupt footer; is the file damaged or cut off, or not a \
         Parquet file?",
    );

    let write = |file: &str, contents: &[u8]| sandbox.write(&format!("texts/{file}"), contents);
    fs::remove_dir_all(sandbox.path("texts")).unwrap();
    write("train.csv", &labels("0"));
    let missing = "--tokenizer: texts/tokenizer.json is no file; pass the tokenizer.json that the model was published with, or \
                   bytes, whose tokens are the bytes of a text";
    refused_with(&sandbox, &base, missing);
    write("tokenizer.json", b"{}");
    refused_with(
        &sandbox,
        &base,
        "--tokenizer: texts/tokenizer.json is not the tokenizer.json of a model: Model missing. at line 1 column 2; pass \
         the tokenizer.json that the model was published with",
    );
    // Nothing is tokenized, and so no tokens are kept, for a model that would not know them.
    write("tokenizer.json", tokenizer);
    refused_with(
        &sandbox,
        &base.replace("--vocab 394", "--vocab 393"),
        "--data text has tokens up to 393, and --model llama knows 393 of them; pass --vocab 394, or, with --pretrained, \
         the tokenizer of that model",
    );
}

/// Sizes that fit together, but into no machine.
#[test]
fn a_model_that_no_machine_can_hold() {
    let sandbox = Sandbox::new();
    let flags = "--model llama --llama-size xl --layers 400 --width 102400 --nproc 2";
    let run = sandbox.train(flags).refused(&[
        "not enough memory: 2 ranks need about",
        "a rank of ddp needs",
        "for parameters",
        "for gradients",
        "no strategy and no smaller batch would fit: use a smaller model (--llama-size, --layers, --width)",
        "or fewer ranks (--nproc)",
    ]);
    assert!(!run.stderr.contains("panicked"), "{}", run.stderr);
    assert_eq!(sandbox.contents(), [""; 0]);
}
