//! What a checkpoint records of its run: a run goes on, and is evaluated, without the flags that it was started with, and
//! flags that differ are said or refused by name.

use std::fs;

use crate::common::{Run, Sandbox, TINY, write_cifar10};
use paceline::checkpoint::index::Index;

/// Flags of every kind that a checkpoint records.
const FLAGS: &str = "--channels 4 8 --hidden 8 --samples 203 --batch-norm --optimizer adamw --lr 0.02 --weight-decay 0.1 \
                     --clip-grad-norm 0.5 --lr-schedule cosine --lr-warmup-steps 2 --lr-steps 9 --seed 7 --accumulate 2 \
                     --precision bf16 --epochs 2";

fn evaluate(sandbox: &Sandbox, flags: &str) -> Run {
    sandbox.run(&format!("evaluate {flags}"))
}

#[test]
fn a_run_goes_on_without_a_flag() {
    for (more, nproc) in [
        ("--batch-size 15 --bucket-cap-mb 0.01", 2),
        ("--batch-size 10 --mesh dp=2,shard=2 --strategy sharded3", 4),
        ("--batch-size 10 --rank-samples 60 33 41", 3),
    ] {
        let sandbox = Sandbox::new();
        let save = "--save saved --save-every 1 --save-keep 9";
        let whole = sandbox.train(&format!("{FLAGS} {more} --nproc {nproc} {save}")).ok();
        let after_two = "saved/step-000000002";
        let rest = sandbox.train(&format!("--resume {after_two}")).ok();
        assert_eq!(rest.weights(), whole.weights(), "{more}");
        assert_eq!(rest.stderr, "", "{more}");
        // A restart goes on likewise, and so does the same command that began.
        fs::rename(sandbox.path(after_two), sandbox.path("two")).unwrap();
        fs::remove_dir_all(sandbox.path("saved")).unwrap();
        fs::create_dir(sandbox.path("saved")).unwrap();
        fs::rename(sandbox.path("two"), sandbox.path(after_two)).unwrap();
        fs::write(sandbox.path("saved/latest"), "step-000000002\n").unwrap();
        let rest = sandbox.train("--save saved --resume auto").ok();
        assert_eq!(rest.weights(), whole.weights(), "{more}");
    }
}

#[test]
fn a_checkpoint_is_evaluated_without_a_flag() {
    let sandbox = Sandbox::new();
    write_cifar10(&sandbox, "data", 8, 7);
    let flags = FLAGS.replace(" --samples 203", " --data cifar10 --data-dir data");
    let flags = format!("{flags} --batch-size 1 --nproc 1 --evaluate --save saved");
    let trained = sandbox.train(&flags).ok();
    for ranks in ["", "--nproc 3"] {
        let run = evaluate(&sandbox, &format!("--checkpoint saved {ranks}")).ok();
        for line in ["Evaluation loss: ", "Evaluation accuracy: "] {
            assert_eq!(run.line(line), trained.line(line), "{ranks}");
        }
        assert_eq!(run.stderr, "", "{ranks}");
    }
}

#[test]
fn a_flag_that_differs_is_said_or_refused_by_name() {
    let sandbox = Sandbox::new();
    let flags = format!("{TINY} --global-batch-size 20 --nproc 2 --optimizer adamw --lr 0.02");
    sandbox.train(&format!("{flags} --steps 3 --save saved")).ok();
    for (flag, was, is) in
        [("--lr", "0.02", "0.5"), ("--weight-decay", "0.01", "0.3"), ("--precision", "f32", "bf16")]
    {
        let run = sandbox.train(&format!("--resume saved --steps 4 {flag} {is}")).ok();
        let said = format!("it was written with {flag} {was}, this run has {is}; it goes on");
        assert!(run.stderr.contains(&said), "no {said:?} in {run:#?}");
        assert_eq!(run.stderr.matches("warning: ").count(), 1, "{run:#?}");
    }
    for (flag, was) in [
        ("--optimizer sgd", "--optimizer adamw, this run has sgd"),
        ("--seed 7", "--seed 42, this run has 7"),
        ("--global-batch-size 30", "--global-batch-size 20, this run has 30"),
        ("--clip-grad-norm 1", "--clip-grad-norm none, this run has 1"),
        ("--accumulate 2", "--accumulate 1, this run has 2"),
    ] {
        let words = [was, "pass "];
        sandbox.train(&format!("--resume saved --steps 4 {flag}")).refused(&words);
    }
    // A file of settings counts like flags.
    sandbox.write("other.toml", b"lr = 0.5\n");
    let run = sandbox.train("--resume saved --steps 4 --config other.toml").ok();
    assert!(run.stderr.contains("--lr 0.02, this run has 0.5"), "{run:#?}");
    // Momentum needs a state that a run without momentum has not kept.
    sandbox.train(&format!("{TINY} --nproc 1 --steps 3 --save plain")).ok();
    let words = ["optimizer state is nothing, and this run needs", "pass the same --optimizer"];
    sandbox.train("--resume plain --steps 4 --momentum 0.9").refused(&words);
    let run = sandbox.train("--resume plain --steps 4").ok();
    assert_eq!(run.stderr, "");
}

#[test]
fn what_a_checkpoint_must_not_decide_is_refused_and_nothing_is_written() {
    let sandbox = Sandbox::new();
    sandbox.train(&format!("{TINY} --nproc 1 --steps 2 --save saved")).ok();
    let whole = Index::parse(&sandbox.checkpoint_index()).unwrap();
    sandbox.write("mine", b"of the user");
    let file = sandbox.path("mine").display().to_string();
    for (key, value) in [
        ("json", file.clone()),
        ("init-method", format!("file://{file}")),
        ("nproc", "1000".into()),
        ("save", "elsewhere".into()),
        ("run_dir", "elsewhere".into()),
        ("profile", "true".into()),
        ("download", "true".into()),
        ("config", file.clone()),
    ] {
        let mut index = whole.clone();
        let mut flags: serde_json::Value = serde_json::from_str(&index.run["flags"]).unwrap();
        flags[key] = serde_json::from_str(&value).unwrap_or(value.into());
        index.run.insert("flags".into(), flags.to_string());
        fs::write(sandbox.checkpoint().join("index.json"), index.to_json()).unwrap();
        let before = sandbox.contents();
        let words = ["saved/step-000000002/index.json:1: ", &key.replace('_', "-")];
        sandbox.train("--resume saved --steps 3").refused(&words);
        evaluate(&sandbox, "--checkpoint saved").refused(&words);
        assert_eq!(sandbox.contents(), before, "{key} wrote something");
        assert_eq!(fs::read(sandbox.path("mine")).unwrap(), b"of the user", "{key}");
    }
}

#[test]
fn numbers_beyond_the_data_are_refused_before_a_rank_starts() {
    let sandbox = Sandbox::new();
    sandbox.train(&format!("{TINY} --nproc 1 --steps 2 --save saved")).ok();
    let whole = Index::parse(&sandbox.checkpoint_index()).unwrap();
    let largest = "18446744073709551615";
    for (key, value) in [
        ("batches", "4"),
        ("batches", largest),
        ("epochs", "1"),
        ("samples-trained", largest),
        ("optimizer-steps", largest),
    ] {
        let mut index = whole.clone();
        index.run.insert(key.into(), value.into());
        fs::write(sandbox.checkpoint().join("index.json"), index.to_json()).unwrap();
        let before = sandbox.contents();
        let words =
            ["--resume saved: ", "is corrupt: after 2 optimizer steps", value, "has 4 batches"];
        sandbox.train("--resume saved --steps 4").refused(&words);
        assert_eq!(sandbox.contents(), before, "{key}");
    }
}

#[test]
fn a_run_that_ends_earlier_than_planned_stays_on_the_course_of_its_learning_rate() {
    let sandbox = Sandbox::new();
    let flags = format!("{TINY} --global-batch-size 50 --nproc 1 --lr-schedule cosine --epochs 3");
    sandbox.train(&format!("{flags} --save saved --save-every 1 --save-keep 20")).ok();
    // Of 12 steps, after 5, it is asked to end with 7; 2 epochs have 8.
    let short = sandbox
        .train(&format!("{flags} --lr-steps 12 --steps 7 --save other").replace("--epochs 3 ", ""))
        .ok();
    let from = "--resume saved/step-000000005";
    let rest = sandbox.train(&format!("{from} --save short --steps 7")).ok();
    assert_eq!(rest.weights(), short.weights());
    let note = "the learning rate stays on its course of 12 steps";
    assert!(rest.stderr.contains(note), "{}", rest.stderr);
    let whole = sandbox.train(&format!("{from} --epochs 2 --save two")).ok();
    let longer = sandbox.train("--resume short --epochs 2").ok();
    assert_eq!(longer.weights(), whole.weights());
    // Later than planned, it needs to be said.
    let words = ["--lr-steps 12, this run has 13", "pass a smaller --steps, or its --lr-steps too"];
    sandbox.train("--resume short --steps 13").refused(&words);
    sandbox.train("--resume short --steps 13 --lr-steps 12").ok();
}

#[test]
fn files_with_other_contents_are_refused_wherever_they_lie() {
    let sandbox = Sandbox::new();
    let recipe = "crates/choices/reviews";
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let text = fs::read_to_string(format!("{root}/{recipe}/train.csv")).unwrap();
    let tokenizer = fs::read(format!("{root}/{recipe}/tokenizer.json")).unwrap();
    for folder in ["texts", "copy", "other"] {
        sandbox.write(&format!("{folder}/tokenizer.json"), &tokenizer);
        // The same texts, and another class for one of them.
        let text = if folder == "other" { text.replacen(",0\n", ",1\n", 1) } else { text.clone() };
        sandbox.write(&format!("{folder}/train.csv"), text.as_bytes());
    }
    let flags = "--model llama --num-labels 2 --data text --max-length 16 --batch-size 4 --nproc 1";
    let flags = format!("{flags} --steps 2 --save saved --data-dir");
    sandbox.train(&format!("{flags} texts")).ok();
    let rest = sandbox.train("--resume saved --steps 3").ok();
    let elsewhere = sandbox.train("--resume saved --steps 3 --data-dir copy").ok();
    assert_eq!(elsewhere.weights(), rest.weights());
    let words = ["written with data of the digest ", "differ: pass a --data-dir with the same"];
    sandbox.train("--resume saved --steps 3 --data-dir other").refused(&words);
    fs::copy(sandbox.path("other/train.csv"), sandbox.path("texts/train.csv")).unwrap();
    sandbox.train("--resume saved --steps 3").refused(&words);
    sandbox.train("--save saved --resume auto --steps 3").refused(&words);
}
