//! A language model of one's own texts, from a folder of files to generated text, and what is refused on the way.

use std::fs;

use crate::common::{Run, Sandbox, fifo, json};

/// The recipe with a model that takes a moment.
const TINY_LM: &str = "--recipe tiny-lm --layers 1 --width 16 --heads 2 --intermediate 32 --seq-len 8 --test-samples 4 --nproc 1 --epochs 1";

/// A folder of texts, of several formats.
fn texts(sandbox: &Sandbox) {
    sandbox.write("texts/a.md", "the cat sat on the mat. \u{e4}\n".repeat(20).as_bytes());
    sandbox.write("texts/more/b.csv", b"id,text\n1,the dog\n2,\"a cat, a dog\"\n");
}

#[test]
fn a_model_of_any_text_is_trained_evaluated_and_tried() {
    let sandbox = Sandbox::new();
    texts(&sandbox);
    let run = sandbox.train(&format!("{TINY_LM} --data-dir texts --save model")).ok();
    // The folder of the texts stays as it was.
    assert_eq!(sandbox.names("texts"), ["a.md", "more"]);
    assert!(sandbox.path("cache/paceline/tokens").is_dir());
    let evaluation = run.line("Evaluation loss: ");
    let numbers: Vec<&str> = evaluation.split(", ").collect();
    let perplexity: f64 = numbers[1].strip_prefix("perplexity ").unwrap().parse().unwrap();
    let loss: f64 = numbers[0].parse().unwrap();
    // Both are rounded, to four and to two digits.
    assert!((loss.exp() - perplexity).abs() <= 0.01 + 1e-4 * perplexity, "{evaluation}");
    assert!(evaluation.ends_with("over 32 tokens of 4 samples"), "{evaluation}");
    let summary = sandbox.summary();
    let exact = summary["eval_loss"].as_f64().unwrap().exp();
    assert!((summary["eval_perplexity"].as_f64().unwrap() - exact).abs() < 1e-9);

    let generate = |model: &str, flags: &[&str]| {
        let words = ["generate", "--model", model, "--prompt", "the c", "--max-tokens", "30"];
        sandbox.run_words(&[&words, flags].concat()).ok()
    };
    let text = generate("model", &[]).stdout;
    assert!(text.starts_with("the c"), "{text}");
    // A window of eight tokens, which the model was trained on: the text is longer.
    let run_folder = sandbox.run_folder();
    for model in [sandbox.path("model/latest"), run_folder] {
        let model = if model.is_file() {
            sandbox.path("model").join(fs::read_to_string(model).unwrap().trim())
        } else {
            model
        };
        assert_eq!(generate(model.to_str().unwrap(), &[]).stdout, text);
    }
    // An exported folder does not say how long the sequences were.
    sandbox.run_words(&["checkpoint", "export", "model", "--hugging-face", "--to", "out"]).ok();
    assert_eq!(generate("out", &["--window", "8"]).stdout, text);
    assert_eq!(generate("model", &["--prompt", "the c"]).stdout, format!("{text}\n{text}"));
    let random = |flags: &[&str]| generate("model", &[&["--seed", "5"], flags].concat()).stdout;
    assert_eq!(random(&["--top-p", "0.9"]), random(&["--top-p", "0.9", "--temperature", "1"]));
    assert_eq!(random(&["--top-p", "1e-9"]), text, "only the likeliest token is left");
    assert_ne!(generate("model", &["--repetition-penalty", "50"]).stdout, text);
}

#[test]
fn one_file_is_enough_and_labels_may_be_words() {
    let sandbox = Sandbox::new();
    sandbox.write("book.text", "so it goes, and goes.\n".repeat(30).as_bytes());
    sandbox.train(&format!("{TINY_LM} --data-dir book.text")).ok();

    sandbox.write("rows.csv", "good,nice food\nbad,cold food\n,\nbad,late\n".repeat(8).as_bytes());
    let train = "--model llama --num-labels 2 --vocab 256 --layers 1 --width 16 --heads 2 --intermediate 32 --data text \
                 --data-dir rows.csv --tokenizer bytes --no-header --text-column 2 --label-column 1 --label-names good bad \
                 --nproc 1 --epochs 1 --batch-size 4 --save classifier";
    sandbox.train(train).refused(&["rows.csv: row 3: ", "pass --skip-bad-rows"]);
    let run = sandbox.train(&format!("{train} --skip-bad-rows")).ok();
    assert!(run.stderr.contains("8 bad or empty rows were left out"), "{}", run.stderr);
    sandbox.run_words(&["generate", "--model", "classifier", "--prompt", "a"]).refused(&[
        "--model classifier: this is a classifier of 2 classes, which predicts no tokens; pass the folder of a language model",
    ]);
    // An exported classifier names its classes, and data with these names have them in its order.
    sandbox
        .run_words(&["checkpoint", "export", "classifier", "--hugging-face", "--to", "out"])
        .ok();
    let config = json(&sandbox.path("out/config.json"));
    assert_eq!(config["id2label"], serde_json::json!({"0": "good", "1": "bad"}));
    assert_eq!(config["label2id"], serde_json::json!({"good": 0, "bad": 1}));
    let train = "--model llama --pretrained out --data text --data-dir rows.csv --no-header --text-column 2 --label-column 1 \
                 --skip-bad-rows --nproc 1 --epochs 1 --batch-size 4";
    fs::remove_dir_all(sandbox.path("runs")).unwrap();
    sandbox.train(train).ok();
    let summary = sandbox.summary();
    assert_eq!(summary["class_names"], serde_json::json!(["good", "bad"]));
}

#[test]
fn what_is_no_text_is_refused_before_a_rank_starts() {
    let sandbox = Sandbox::new();
    fs::create_dir(sandbox.path("texts")).unwrap();
    let refused = |flags: &str, expected: &[&str]| {
        sandbox.train(&format!("{TINY_LM} {flags}")).refused(expected);
        for written in ["runs", "tokens", "texts/tokens"] {
            assert!(!sandbox.path(written).exists(), "{flags}: {written} was written");
        }
    };
    refused("", &["--data text needs --data-dir"]);
    refused("--data-dir texts", &["found no .txt, .md, ", "pass a folder or a file with text"]);
    sandbox.write("texts/a.txt", b"short");
    refused(
        "--data-dir texts",
        &["has 5 tokens, too few for a sequence of 8", "a smaller --seq-len"],
    );
    sandbox.write("texts/a.txt", &[b'a'; 33]);
    refused("--data-dir texts", &["4 test samples are wanted, and texts has 3 for them"]);
    sandbox.write("texts/a.txt", &[0xff; 999]);
    refused("--data-dir texts", &["texts/a.txt: ", "UTF-8"]);
    sandbox.write("texts/a.txt", &[b'a'; 999]);
    fifo(&sandbox.path("texts/b.txt"));
    refused("--data-dir texts", &["texts/b.txt: ", "FIFO"]);
    refused("--data-dir texts/b.txt", &["texts/b.txt: ", "FIFO"]);
    fs::remove_file(sandbox.path("texts/b.txt")).unwrap();
    refused("--data-dir gone", &["gone: No such file"]);
    refused("--data-dir texts --label-names a b", &["--label-names is for texts with classes"]);
    refused("--data-dir texts --tokenizer byte", &["--tokenizer: byte is no file", "or bytes"]);
    refused("--data-dir texts --vocab 255", &["has tokens up to 255", "pass --vocab 256"]);
    sandbox.write("texts/b.csv", b"a\x1b[2Jb,c\nx,y\n");
    refused("--data-dir texts", &["has no column text", "name the columns with --text-column"]);
}

#[test]
fn a_folder_without_a_language_model_is_refused() {
    let sandbox = Sandbox::new();
    texts(&sandbox);
    sandbox.train(&format!("{TINY_LM} --data-dir texts --save model")).ok();
    let generate = |model: &str, flags: &[&str], expected: &[&str]| {
        let words = ["generate", "--model", model, "--prompt", "the c"];
        sandbox.run_words(&[&words, flags].concat()).refused(expected);
    };
    let folder = sandbox.run_folder();
    let run = folder.to_str().unwrap();
    for (flags, expected) in [
        (&["--window", "1"], "'--window <N>': pass 2 or more"),
        (&["--window", "99999999999"], "--window 99999999999: the model knows 8192 positions"),
        (&["--prompt", ""], "--prompt is empty"),
    ] {
        generate("model", flags, &[expected]);
    }
    // The checkpoints are gone, or the run has saved none.
    fs::rename(sandbox.path("model"), sandbox.path("moved")).unwrap();
    generate(run, &[], &["its run has saved to model, and there is no checkpoint"]);
    fs::remove_dir_all(sandbox.path("runs")).unwrap();
    sandbox.train(&format!("{TINY_LM} --data-dir texts")).ok();
    let folder = sandbox.run_folder();
    generate(
        folder.to_str().unwrap(),
        &[],
        &["its run has saved no checkpoint; train with --save DIR"],
    );
    // Of another model.
    fs::remove_dir_all(sandbox.path("runs")).unwrap();
    sandbox.train(&format!("{} --nproc 1 --epochs 1 --save cnn", crate::common::TINY)).ok();
    generate("cnn", &[], &["--model cnn: the checkpoint is of cnn, which reads no texts"]);
    // A checkpoint that is cut off.
    let shard = sandbox
        .path("moved")
        .join(fs::read_to_string(sandbox.path("moved/latest")).unwrap().trim());
    let index = shard.join("index.json");
    let text = fs::read(&index).unwrap();
    fs::write(&index, &text[..text.len() / 2]).unwrap();
    generate("moved", &[], &["--model moved: "]);
}

#[test]
fn texts_show_what_a_model_learns_whatever_holds_its_parameters() {
    let sandbox = Sandbox::new();
    texts(&sandbox);
    let train = |flags: &str| {
        let flags = format!(
            "{TINY_LM} --data-dir texts --steps 4 --sample-every 2 --global-batch-size 4 {flags}"
        );
        sandbox.train(&flags.replace("--epochs 1 ", "").replace("--nproc 1 ", "")).ok()
    };
    let samples = |run: &Run| -> Vec<String> {
        let lines = run.stdout.lines().filter(|line| line.contains(", a text: "));
        lines.map(str::to_owned).collect()
    };
    let whole = train("--nproc 2 --evaluate=false");
    let [first, second] = &samples(&whole)[..] else { panic!("{}", whole.stdout) };
    assert!(first.starts_with("Step 2, a text: ") && second.starts_with("Step 4, a text: "));
    // The ranks end with the same weights, so the texts are the same.
    for strategy in ["zero1", "sharded1", "sharded3"] {
        let run = train(&format!("--nproc 2 --strategy {strategy} --evaluate=false"));
        assert_eq!(samples(&run), [first.clone(), second.clone()], "{strategy}");
        assert_eq!(run.weights(), whole.weights(), "{strategy}");
    }
    let alone = train("--nproc 1 --tp-parts 2 --evaluate=false");
    for layout in ["--nproc 2 --mesh tp=2", "--nproc 4 --mesh shard=2,tp=2 --strategy sharded3"] {
        let run = train(&format!("{layout} --tp-parts 2 --evaluate=false"));
        assert_eq!((samples(&run).len(), &samples(&run)), (2, &samples(&alone)), "{layout}");
    }
    let without = sandbox.train(&format!(
        "{} --data-dir texts --steps 4 --global-batch-size 4 --nproc 2",
        TINY_LM.replace("--epochs 1", "").replace("--nproc 1 ", "")
    ));
    assert_eq!(without.ok().weights(), whole.weights(), "a text changes nothing");
    for (flags, expected) in [
        (
            format!("{TINY_LM} --data-dir texts --sample-every 0"),
            "'--sample-every <N>': pass 1 or more",
        ),
        ("--sample-every 2".to_owned(), "--sample-every: --model cnn predicts no tokens"),
        ("--model llama --sample-every 2".to_owned(), "--data synthetic has no tokenizer"),
        (
            format!("{TINY_LM} --data-dir texts --sample-every 2 --nproc 2 --mesh pp=2"),
            "no rank of a pipeline has the whole model",
        ),
    ] {
        sandbox
            .train(&flags.replace(
                "--nproc 1 --epochs 1 --data-dir texts --sample-every 2",
                "--epochs 1 --data-dir texts --sample-every 2",
            ))
            .refused(&[expected]);
    }
}

#[test]
fn the_best_weights_are_kept_and_the_run_ends_when_the_loss_no_longer_falls() {
    let sandbox = Sandbox::new();
    texts(&sandbox);
    let train = |flags: &str| {
        let flags = format!(
            "{TINY_LM} --data-dir texts --lr-schedule constant --eval-every 2 --save model --save-best {flags}"
        );
        sandbox.train(&flags.replace("--epochs 1", "")).ok()
    };
    // Weights that do not change have the same loss each time, so the first evaluation is the best.
    let run = train("--lr 0 --weight-decay 0 --steps 40 --early-stop 3");
    let line =
        run.line("Step 8: the evaluation loss was not lower in 3 evaluations, so the run ends; ");
    assert!(line.starts_with("the lowest was ") && line.ends_with(" after step 2"), "{line}");
    let latest = |folder: &str| fs::read_to_string(sandbox.path(folder).join("latest")).unwrap();
    assert_eq!(latest("model").trim(), "step-000000008");
    assert_eq!(latest("model/best").trim(), "step-000000002");
    let summary = sandbox.summary();
    assert_eq!(
        (&summary["stopped_after"], summary["eval_loss"].is_number()),
        (&serde_json::Value::Null, true)
    );
    // A run that goes on knows what was best.
    let run = train("--lr 0 --weight-decay 0 --steps 40 --early-stop 5 --resume auto");
    let line =
        run.line("Step 12: the evaluation loss was not lower in 5 evaluations, so the run ends; ");
    assert!(line.ends_with(" after step 2"), "{line}");
    let run = train("--lr 0.01 --steps 16 --early-stop 9 --resume auto");
    assert!(!run.stdout.contains("so the run ends"), "{}", run.stdout);
    assert_eq!(latest("model/best").trim(), "step-000000016");
    sandbox
        .run_words(&["generate", "--model", "model/best", "--prompt", "the", "--max-tokens", "3"])
        .ok();
    for (flags, expected) in [
        ("--early-stop 3", "--eval-every"),
        ("--eval-every 2 --early-stop 0", "'--early-stop <N>': pass 1 or more"),
        ("--eval-every 2 --save-best", "--save"),
    ] {
        sandbox.train(&format!("{TINY_LM} --data-dir texts {flags}")).refused(&[expected]);
    }
}

#[test]
fn a_tokenizer_of_ones_own_texts_is_used_from_training_to_generation() {
    let sandbox = Sandbox::new();
    texts(&sandbox);
    let train = |flags: &[&str]| {
        sandbox
            .run_words(&[&["tokenizer", "train", "--to", "tok.json", "--data-dir"], flags].concat())
    };
    train(&["texts", "--vocab", "255"]).refused(&["--vocab: ", "cannot have 255 tokens: pass 256"]);
    train(&["gone", "--vocab", "300"]).refused(&["--data-dir: gone: No such file"]);
    train(&["texts", "--vocab", "99999999999999999999"]).refused(&["--vocab"]);
    assert!(!sandbox.path("tok.json").exists());
    let run = train(&["texts", "--vocab", "270"]).ok();
    assert!(run.stdout.starts_with("tok.json: 270 tokens, from 2 files; "), "{}", run.stdout);
    train(&["texts", "--vocab", "270"]).refused(&["--to tok.json is there already; pass --force"]);
    let most = train(&["texts", "--vocab", "9999", "--force"]).ok();
    assert!(most.stderr.contains("--vocab 9999: no more neighbors occur twice"), "{}", most.stderr);
    train(&["texts", "--vocab", "264", "--force"]).ok();
    let flags = format!("{TINY_LM} --data-dir texts --tokenizer tok.json --save model");
    sandbox.train(&flags).refused(&["has tokens up to 263", "pass --vocab 264"]);
    sandbox.train(&format!("{flags} --vocab 264")).ok();
    let words = ["generate", "--model", "model", "--prompt", "the cat", "--max-tokens", "9"];
    let run = sandbox.run_words(&words).ok();
    assert!(run.stdout.starts_with("the cat"), "{}", run.stdout);
    fs::remove_file(sandbox.path("tok.json")).unwrap();
    sandbox
        .run_words(&words)
        .refused(&["--model model: tokenizer.json of the run is missing (", "tok.json"]);
}
