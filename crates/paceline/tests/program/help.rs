//! What `paceline train --help` shows, and flags that have several names.

use crate::common::{Run, Sandbox, TINY, json};

#[test]
fn help_opens_with_examples() {
    let sandbox = Sandbox::new();
    let mut command = sandbox.given("train --help-all");
    command.env("COLUMNS", "100");
    let run = Run::of(command).ok();
    let head: Vec<&str> =
        run.stdout.lines().take_while(|line| !line.starts_with("Usage")).collect();
    insta::assert_snapshot!(head.join("\n"), @r"
    Examples:
      paceline train                                      2 ranks, a CNN on synthetic images
      paceline train --nproc 4 --strategy simple_ddp      another strategy, more ranks
      paceline train --ddp-choice all                     every strategy, compared in a table
      paceline train --channels 16 32 --hidden 64 --data cifar10 --data-dir ~/cifar --download
      paceline train --recipe tiny-llama                  a language model learns from reviews
      paceline train --model mlp --epochs 1 --steps-per-epoch 10 --warmup-steps 2
      paceline train --save ckpt --steps 200              then: --resume ckpt --steps 400
      paceline train --save ckpt --save-every 50 --max-restarts 3    starts again after a failure
      paceline train --config runs/20260131-120000-cnn-ddp/config.json --lr 0.02    a run again, changed
      paceline train --profile && paceline analyze profile/ddp    traces, and a report of them

    Train a model on several ranks
    ");
    for heading in [
        "Model:",
        "Ranks:",
        "Strategy:",
        "Communication:",
        "Training:",
        "Data:",
        "Observation:",
        "Host:",
        "Checkpoints:",
        "Files and addresses:",
        "Output:",
    ] {
        assert!(run.stdout.lines().any(|line| line == heading), "no {heading}");
    }
}

#[test]
fn help_has_the_first_flags_by_purpose() {
    let sandbox = Sandbox::new();
    let help = |words: &str| sandbox.run(words).ok().stdout;
    let long = help("train --help");
    assert_eq!([help("train -h"), help("help train")], [&*long; 2]);
    let (_, flags) = long.split_once("Usage: ").unwrap();
    insta::assert_snapshot!(flags);
}

#[test]
fn a_flag_may_have_the_word_of_other_programs() {
    let sandbox = Sandbox::new();
    let flags = format!("{TINY} --nproc 1 --steps 1 --quiet");
    let words = "--learning-rate 0.5 --gradient-accumulation-steps 2 --precision bfloat16";
    sandbox.train(&format!("{flags} {words}")).ok();
    let stated = &json(&sandbox.run_folder().join("config.json"))["stated"];
    assert_eq!(
        (&stated["lr"], &stated["accumulate"]),
        (&serde_json::json!(0.5), &serde_json::json!(2))
    );
}
