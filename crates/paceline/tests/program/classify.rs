//! `paceline classify` and `paceline evaluate --predictions`: the answers of a classifier that was trained on texts of one's own,
//! and what is refused.

use std::fs::{self, File};
use std::io::Write;
use std::process::Stdio;

use serde_json::json;

use crate::common::{Run, Sandbox, TINY, accuracy, fifo, json, pretrained};

/// The model of the recipe for reviews.
const MODEL: &str =
    "--model llama --num-labels 2 --vocab 394 --width 64 --layers 2 --heads 4 --intermediate 128";

/// The texts and the tokenizer of the reviews that the program carries, with words as labels.
fn write_reviews(sandbox: &Sandbox) {
    let reviews = concat!(env!("CARGO_MANIFEST_DIR"), "/../choices/reviews");
    for name in ["train.csv", "test.csv"] {
        let text = fs::read_to_string(format!("{reviews}/{name}")).unwrap();
        let text = text.replace(",1\n", ",good\n").replace(",0\n", ",bad\n");
        sandbox.write(&format!("texts/{name}"), text.as_bytes());
    }
    let tokenizer = fs::read(format!("{reviews}/tokenizer.json")).unwrap();
    sandbox.write("texts/tokenizer.json", &tokenizer);
}

/// The rows of a CSV without quotes, below its header.
fn rows(text: &str) -> Vec<Vec<&str>> {
    text.lines().skip(1).map(|line| line.split(',').collect()).collect()
}

#[test]
fn a_classifier_of_own_texts_answers_as_it_was_evaluated() {
    let sandbox = Sandbox::new();
    write_reviews(&sandbox);
    let train = format!(
        "{MODEL} --data text --data-dir texts --optimizer adamw --lr 0.001 --batch-size 8 --nproc 2 --epochs 5 --evaluate \
         --max-length 64 --save ckpt"
    );
    let trained = sandbox.train(&train).ok();
    assert!(accuracy(&trained) > 70.0, "{}", trained.stdout);

    // Any number of ranks predicts the same, and the table is that of the rows.
    let mut predictions = String::new();
    for ranks in ["--nproc 1", "--nproc 2", "--nproc 3 --transport tcp --batch-size 5"] {
        let flags = "--predictions rows.csv --json found.json";
        let run = sandbox.run(&format!("evaluate --checkpoint ckpt {ranks} {flags}")).ok();
        assert_eq!(accuracy(&run), accuracy(&trained));
        let written = fs::read_to_string(sandbox.path("rows.csv")).unwrap();
        assert!(written.starts_with("index,label,predicted,probability\n0,"), "{written}");
        assert!(predictions.is_empty() || predictions == written, "{ranks}");
        predictions = written;
        let count = |label: &str, class: &str| {
            rows(&predictions).iter().filter(|row| row[1..3] == [label, class]).count()
        };
        let [bad, good] = ["bad", "good"].map(|label| [count(label, "bad"), count(label, "good")]);
        assert_eq!(json(&sandbox.path("found.json"))["confusions"], json!([bad, good]));
        let table: Vec<&str> =
            run.stdout.lines().skip_while(|line| !line.starts_with("Predicted classes")).collect();
        let row = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(row(table[1]), ["label", "bad", "good"]);
        assert_eq!(row(table[3]), ["bad".to_owned(), bad[0].to_string(), bad[1].to_string()]);
        assert_eq!(row(table[4]), ["good".to_owned(), good[0].to_string(), good[1].to_string()]);
    }
    assert_eq!(rows(&predictions).len(), 40);
    assert!(rows(&predictions).iter().enumerate().all(|(at, row)| row[0] == at.to_string()));
    let without = sandbox.run("evaluate --checkpoint ckpt --json found.json").ok();
    assert!(!without.stdout.contains("Predicted"), "{}", without.stdout);
    assert_eq!(json(&sandbox.path("found.json")).get("confusions"), None);

    // The same texts as a file, in its order; an evaluation shuffles them.
    let answers = sandbox.run("classify --model ckpt --file texts/test.csv").ok();
    assert!(answers.stdout.starts_with("class,probability\n"), "{}", answers.stdout);
    let sorted = |mut rows: Vec<Vec<String>>| {
        rows.sort();
        rows
    };
    let owned = |row: &[&str]| row.iter().map(|cell| (*cell).to_owned()).collect::<Vec<_>>();
    let evaluated = rows(&predictions).iter().map(|row| owned(&row[2..])).collect();
    let answered = rows(&answers.stdout).iter().map(|row| owned(row)).collect();
    assert_eq!(sorted(answered), sorted(evaluated));
    let csv = fs::read_to_string(sandbox.path("texts/test.csv")).unwrap();
    let labels: Vec<&str> =
        csv.lines().skip(1).map(|line| line.rsplit_once(',').unwrap().1).collect();
    let correct =
        rows(&answers.stdout).into_iter().zip(&labels).filter(|(row, label)| row[0] == **label);
    assert_eq!(100.0 * correct.count() as f64 / 40.0, accuracy(&trained));

    // Each way to the same texts has the same answers.
    let plain = |row: &str| row.rsplit_once(',').unwrap().0.trim_matches('"').replace("\"\"", "\"");
    let texts: Vec<String> = csv.lines().skip(1).map(plain).collect();
    sandbox.write("lines.txt", (texts.join("\r\n") + "\r\n").as_bytes());
    sandbox.write("bare.csv", csv.split_once('\n').unwrap().1.as_bytes());
    let jsonl = texts.iter().map(|text| json!({"id": 1, "review": text}).to_string() + "\n");
    sandbox.write("rows.jsonl", jsonl.collect::<String>().as_bytes());
    sandbox.run("checkpoint export ckpt --hugging-face --to out").ok();
    for flags in [
        "--model ckpt --file lines.txt",
        "--model ckpt --file bare.csv --no-header --text-column 1",
        "--model ckpt --file rows.jsonl --text-column review",
        "--model out --file texts/test.csv",
    ] {
        assert_eq!(
            sandbox.run(&format!("classify {flags}")).ok().stdout,
            answers.stdout,
            "{flags}"
        );
    }
    let mut command = sandbox.given("classify --model ckpt");
    command.stdin(File::open(sandbox.path("lines.txt")).unwrap());
    assert_eq!(Run::of(command).ok().stdout, answers.stdout);

    let ask =
        |words: &[&str]| sandbox.run_words(&[&["classify", "--model", "ckpt"], words].concat());
    let answered = rows(&answers.stdout);
    let [class, part] = answered[7][..] else { panic!("{}", answers.stdout) };
    let part: f64 = part.parse().unwrap();
    assert_eq!(ask(&[&texts[7]]).ok().stdout, format!("{class} {:.2} %\n", 100.0 * part));
    let all = ask(&[&texts[7], "--all"]).ok().stdout;
    let other = if class == "good" { "bad" } else { "good" };
    assert_eq!(
        all,
        format!("{class} {:.2} %, {other} {:.2} %\n", 100.0 * part, 100.0 - 100.0 * part)
    );
    assert_eq!(ask(&[&texts[7], &texts[8]]).ok().stdout.lines().count(), 2);
    // Texts are cut as in training.
    let short =
        train.replace("--max-length 64", "--max-length 3").replace("--epochs 5", "--steps 1");
    sandbox.train(&short.replace("--save ckpt", "--save short")).ok();
    let same = ["classify", "--model", "short", "the soup was cold", "the soup was warm"];
    let same = sandbox.run_words(&same).ok().stdout;
    assert_eq!(same.lines().next(), same.lines().nth(1));
    let all = ask(&["--all", "--file", "lines.txt"]).ok().stdout;
    assert!(all.starts_with("class,probability,bad,good\n"), "{all}");
    for row in rows(&all) {
        let parts: Vec<f64> = row[1..].iter().map(|part| part.parse().unwrap()).collect();
        assert!((parts[1] + parts[2] - 1.0).abs() <= 1e-6, "{row:?}");
        assert_eq!(parts[0], parts[if row[0] == "bad" { 1 } else { 2 }]);
    }
}

/// A classifier with random answers, which knows 16 positions and 41 tokens. Its classes have no names.
fn write_classifier(sandbox: &Sandbox) {
    pretrained::write(&sandbox.path("model"), |config, tensors| {
        config["architectures"] = json!(["LlamaForSequenceClassification"]);
        config["num_labels"] = json!(2);
        tensors.push(("score.weight".to_owned(), vec![2, 8]));
    });
    sandbox.write("model/tokenizer.json", pretrained::tokenizer(41).as_bytes());
}

#[test]
fn classes_have_their_names_or_numbers_and_command_nothing() {
    let sandbox = Sandbox::new();
    write_classifier(&sandbox);
    let ask = || sandbox.run_words(&["classify", "--model", "model", "--all", "t1 t2"]).ok().stdout;
    assert!(ask().contains("0 ") && ask().contains("1 "), "{}", ask());
    let mut config = json(&sandbox.path("model/config.json"));
    config["id2label"] = json!({"0": "=1+1", "1": "b\u{1b}[2J\n"});
    sandbox.write("model/config.json", config.to_string().as_bytes());
    assert!(ask().contains("=1+1 ") && ask().contains("b\\u{1b}[2J"), "{}", ask());
    sandbox.write("lines.txt", b"t1\n\nt3 t4\n");
    let answers = sandbox.run("classify --model model --all --file lines.txt").ok().stdout;
    // A spreadsheet takes none of it for a formula.
    assert!(answers.starts_with("class,probability,'=1+1,b\\u{1b}[2J\\n\n"), "{answers}");
    assert_eq!(answers.lines().count(), 4, "{answers}");
}

#[test]
fn what_cannot_be_classified_is_refused() {
    let sandbox = Sandbox::new();
    write_classifier(&sandbox);
    sandbox.write("lines.txt", b"t1\nt2\n");
    let refused = |flags: &str, words: &[&str]| {
        let before = sandbox.contents();
        sandbox.run(&format!("classify {flags}")).refused(words);
        assert_eq!(sandbox.contents(), before, "{flags} wrote something");
    };
    refused("--model model t1 --file lines.txt", &["--file"]);
    refused("--model gone t1", &["--model gone: there is no such folder"]);
    refused("--model model --file gone.csv", &["--file gone.csv: No such file"]);
    refused("--model model --file model", &["model: it is a folder, not a regular file"]);
    fifo(&sandbox.path("fifo.csv"));
    refused("--model model --file fifo.csv", &["fifo.csv: it is a FIFO, not a regular file"]);
    refused("--model model --file /dev/zero", &["/dev/zero: it is a device, not a regular file"]);
    sandbox.write("empty.csv", b"");
    refused("--model model --file empty.csv", &["empty.csv: has no column text", "--text-column"]);
    sandbox.write("rows.csv", b"id,review\n1,t1\n");
    refused("--model model --file rows.csv", &["has no column text; its columns are id, review"]);
    sandbox.write("cut.csv", b"text,label\nt1,1\nt2\n");
    refused("--model model --file cut.csv", &["cut.csv: row 2: has 1 fields"]);
    sandbox.write("bytes.txt", b"t1\nt2 \xff\n");
    refused("--model model --file bytes.txt", &["bytes.txt: line 2: byte 4 is not UTF-8"]);
    sandbox.write("bytes.jsonl", b"{\"text\": \"t1\"}\n{\"text\": \"\xff\"}\n");
    refused("--model model --file bytes.jsonl", &["row 2: byte 11 is not UTF-8"]);
    sandbox.write("bytes.csv", b"text\nt1\nt2\xff\n");
    refused(
        "--model model --file bytes.csv",
        &["bytes.csv: row 2: byte 3 of field 1 is not UTF-8 (the row begins in line 3)"],
    );

    // Models that are no classifiers of texts, or not whole.
    let config = json(&sandbox.path("model/config.json"));
    let changed = |key: &str, value: serde_json::Value, words: &[&str]| {
        let mut config = config.clone();
        config[key] = value;
        sandbox.write("model/config.json", config.to_string().as_bytes());
        refused("--model model t1", words);
    };
    changed("num_labels", json!(3), &["its weights have no score.weight for these classes"]);
    changed("vocab_size", json!(40), &["--model model"]);
    changed(
        "architectures",
        json!(["LlamaForCausalLM"]),
        &["--model model: this is a language model"],
    );
    changed("hidden_act", json!("gelu"), &["--model model/config.json: hidden_act is gelu"]);
    sandbox.write("model/config.json", config.to_string().as_bytes());
    sandbox.write("model/tokenizer.json", pretrained::tokenizer(42).as_bytes());
    refused(
        "--model model t1",
        &["tokenizer.json has 42 tokens, and by config.json the model has 41"],
    );
    fs::remove_file(sandbox.path("model/tokenizer.json")).unwrap();
    refused("--model model t1", &["--model model: there is no tokenizer.json"]);
    sandbox.train(&format!("{TINY} --nproc 1 --steps 1 --save cnn")).ok();
    refused("--model cnn t1", &["--model cnn: the checkpoint is of cnn, which reads no texts"]);
    sandbox
        .run("evaluate --checkpoint cnn --predictions gone/a.csv")
        .refused(&["--predictions gone/a.csv: its folder does not exist"]);
}

#[test]
fn a_model_without_classes_has_no_predictions() {
    let sandbox = Sandbox::new();
    sandbox.write("a.txt", "so it goes, and goes. ".repeat(30).as_bytes());
    for part in ["train", "test"] {
        for (name, shape) in [("x", "8, 2"), ("y", "8, 1")] {
            let header =
                format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({shape}), }}\n");
            let len = (header.len() as u16).to_le_bytes();
            let numbers = vec![0; if name == "x" { 64 } else { 32 }];
            let npy = [b"\x93NUMPY\x01\x00", &len[..], header.as_bytes(), &numbers].concat();
            sandbox.write(&format!("{name}_{part}.npy"), &npy);
        }
    }
    let numbers = "--model mlp --input-dim 2 --hidden-dim 16 --output-dim 1 --num-layers 1 --data npy --data-dir .";
    let tokens = "--recipe tiny-lm --layers 1 --width 16 --heads 2 --intermediate 32 --seq-len 8 --data-dir a.txt";
    for (name, flags) in [("llama", tokens), ("mlp", numbers)] {
        sandbox.train(&format!("{flags} --nproc 1 --steps 1 --save ckpt-{name}")).ok();
        let words = "--predictions: the model predicts no class for a sample";
        sandbox
            .run(&format!("evaluate --checkpoint ckpt-{name} --predictions a.csv"))
            .refused(&[words, "leave it out"]);
    }
    assert!(!sandbox.path("a.csv").exists());
}

#[test]
fn texts_may_be_long_and_readers_may_go() {
    let sandbox = Sandbox::new();
    write_classifier(&sandbox);
    // Of a cell of 10 MB, the beginning is enough.
    let long = format!("text\nt1 t2\n{}\nt1 t2\n", "t3 ".repeat(10_000_000 / 3));
    sandbox.write("long.csv", long.as_bytes());
    let answers = sandbox.run("classify --model model --file long.csv").ok().stdout;
    assert_eq!(rows(&answers).len(), 3);
    assert_eq!(rows(&answers)[0], rows(&answers)[2]);
    // A line without an end.
    let mut endless = sandbox.given("classify --model model");
    endless.stdin(File::open("/dev/zero").unwrap());
    Run::of(endless).ended_with(2, &["standard input: line 1: has more than 32 MiB"]);

    sandbox.write("lines.txt", "t1 t2\n".repeat(200).as_bytes());
    let full = || File::options().write(true).open("/dev/full").unwrap();
    let mut command = sandbox.given("classify --model model --file lines.txt");
    command.stdout(full()).stderr(Stdio::piped());
    let run = Run::wait(command.spawn().unwrap());
    run.ended_with(1, &["cannot write to standard output: No space left"]);
    sandbox.train(&format!("{TINY} --nproc 1 --steps 1 --save cnn")).ok();
    sandbox
        .run("evaluate --checkpoint cnn --predictions /dev/full")
        .ended_with(1, &["cannot write /dev/full: No space left"]);

    // Without a reader it ends, however much there is to read.
    let mut command = sandbox.given("classify --model model");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut texts = child.stdin.take().unwrap();
    drop(child.stdout.take());
    let refused = (0..1_000_000).any(|_| texts.write_all(b"t1 t2\n").is_err());
    assert!(refused, "all texts were read, although nobody reads the answers");
    drop(texts);
    assert_eq!(Run::wait(child).code, Some(0));
}
