//! Whatever decides about a run is part of its state: a run that goes on from any of its checkpoints makes the steps, and ends
//! after the step, of the run that was not interrupted.

use std::collections::BTreeSet;

use crate::common::{Run, Sandbox, TINY, metrics, signal};
use paceline_checkpoint::index::Index;
use paceline_settings::flags;
use rustix::process::Signal;
use serde_json::Value;

/// The groups of flags that decide about steps.
const GROUPS: [&str; 3] = ["Training", "Strategy", "Evaluation"];

/// Flags whose effect on a step, or on the end of the run, depends on earlier steps; and flags of a run that shows it.
const WITH_HISTORY: [(&[&str], &str); 9] = [
    (&["early-stop"], "--lr 0 --steps 40 --eval-every 2 --early-stop 9"),
    // What is written decides nothing.
    (&["early-stop"], "--lr 0 --steps 40 --eval-every 2 --early-stop 9 --save-best"),
    (
        &["loss-scale", "loss-scale-window"],
        "--precision fp16 --emulate-fp16 --loss-scale dynamic:1099511627776 --loss-scale-window 3 --steps 40",
    ),
    (
        &["lr-schedule", "lr-warmup-steps", "min-lr", "lr-steps"],
        "--lr-schedule cosine --lr-warmup-steps 4 --min-lr 0.001 --lr-steps 9",
    ),
    (
        &["optimizer", "weight-decay", "decay-matrices-only", "beta1", "beta2", "eps"],
        "--optimizer adamw --weight-decay 0.1 --decay-matrices-only --beta1 0.8 --beta2 0.9 --eps 1e-6",
    ),
    (
        &["momentum", "clip-grad-norm", "accumulate", "accumulation-order"],
        "--momentum 0.9 --clip-grad-norm 0.5 --accumulate 3 --accumulation-order tree",
    ),
    (&["top-k"], "--strategy top_k --top-k 0.2"),
    (&["sync-every"], "--strategy local_sgd --sync-every 4"),
    (
        &["sync-batch-norm", "broadcast-buffers"],
        "--batch-norm --sync-batch-norm --broadcast-buffers",
    ),
];

/// The other flags of these groups: they say how each step is made, how many there are, or what is measured.
const WITHOUT_HISTORY: [&str; 28] = [
    "accumulate-in",
    "batch-size",
    "bucket-cap-mb",
    "epochs",
    "eval-every",
    "evaluate",
    "find-unused-parameters",
    "first-bucket-mb",
    "gather-precision",
    "global-batch-size",
    "keep-after-forward",
    "lr",
    "mesh",
    // `layouts.rs` has its runs that go on.
    "micro-batch-size",
    "no-gradient-view",
    "no-static-graph",
    "no-sync",
    "overlap-tp",
    "prefetch",
    "replicate-shards",
    "seed",
    "sequence-parallel",
    "steps",
    "steps-per-epoch",
    "strategy",
    // Not with --save.
    "sync-blocks",
    // `tensor.rs` has its runs that go on.
    "tp-parts",
    "warmup-steps",
];

#[test]
fn of_every_flag_it_is_known_whether_it_has_a_history() {
    let all = flags::all();
    let is_of_group = |group: &str| GROUPS.contains(&group);
    let all = all.iter().filter(|flag| flag.get_help_heading().is_some_and(is_of_group));
    let all: BTreeSet<&str> = all.map(flags::key).collect();
    let with_history = WITH_HISTORY.iter().flat_map(|(flags, _)| flags.iter().copied());
    let known: BTreeSet<&str> = with_history.chain(WITHOUT_HISTORY).collect();
    assert_eq!(known, all, "a flag with a history needs a run in WITH_HISTORY");
}

/// How the steps after the first `from` ones went, and the end of a run, without what depends on time.
fn course(sandbox: &Sandbox, name: &str, run: &Run, from: u64) -> (Vec<Vec<Value>>, Vec<String>) {
    let keys = ["step", "loss", "lr", "grad_norm", "loss_scale", "skipped_steps", "eval_loss"];
    let lines = metrics(&sandbox.path("runs").join(name)).into_iter();
    let lines = lines.filter(|line| line["step"].as_u64().is_some_and(|step| step > from));
    // Those of saves have times only.
    let lines = lines.filter(|line| line.get("save_s").is_none());
    let steps = lines.map(|line| keys.map(|key| line[key].clone()).into()).collect();
    let is_of_end = |line: &&str| {
        ["Weights: ", "Evaluation "].iter().any(|start| line.starts_with(start))
            || line.contains("so the run ends")
    };
    (steps, run.stdout.lines().filter(is_of_end).map(str::to_owned).collect())
}

fn goes_on_as_if_never_interrupted(more: &str) {
    let sandbox = Sandbox::new();
    // Under local_sgd, replicas are made equal before each save.
    let how = "--nproc 2 --transport thread --save-every 1 --save-keep 99";
    let steps = if more.contains("--steps") { "" } else { "--steps 12" };
    let flags = format!("{TINY} --batch-size 4 --evaluate {how} --save whole {steps} {more}");
    let whole = sandbox.train(&format!("{flags} --name whole")).ok();
    let from = 7;
    let flags = format!("--resume whole/step-{from:09} {how} --save rest --name rest");
    let rest = sandbox.train(&flags).ok();
    let expected = course(&sandbox, "whole", &whole, from);
    assert!(expected.0.len() > 4, "{more}: {expected:#?}");
    assert_eq!(course(&sandbox, "rest", &rest, from), expected, "{more}");
}

#[test]
fn what_decides_about_a_run_goes_on_with_it() {
    for (_, more) in WITH_HISTORY {
        goes_on_as_if_never_interrupted(more);
    }
}

#[test]
fn a_run_that_is_asked_to_end_makes_the_evaluation_that_counts() {
    let sandbox = Sandbox::new();
    let endless = "--lr 0 --eval-every 1 --early-stop 100000000 --epochs 10000000 --save saved";
    let mut run = sandbox.start(&format!("train {TINY} --nproc 1 --batch-size 50 {endless}"));
    run.wait_until("a checkpoint", || sandbox.path("saved/latest").exists());
    signal(run.id(), Signal::TERM);
    let run = run.end();
    assert_eq!(run.code, Some(143), "{run:#?}");
    let recorded = Index::parse(&sandbox.checkpoint_index()).unwrap().run;
    let number = |key: &str| recorded[key].parse::<u64>().unwrap();
    assert_eq!(number("eval-loss-steps"), 1, "weights that do not change have one loss");
    assert_eq!(number("evaluations-since") + 1, number("steps"));
}

#[test]
fn a_run_that_has_ended_early_has_nothing_left_to_do() {
    let sandbox = Sandbox::new();
    let flags = format!("{TINY} --nproc 1 --lr 0 --steps 40 --eval-every 2 --save saved");
    sandbox.train(&format!("{flags} --early-stop 3")).ok();
    let words = [
        "--resume saved",
        "not lower in 3 evaluations",
        "--early-stop 3 ends there",
        "a larger --early-stop",
    ];
    sandbox.train("--resume saved").refused(&words);
    let ended = "Step 8: the evaluation loss was not lower in 3 evaluations, so the run ends; ";
    sandbox.train(&format!("{flags} --early-stop 3 --resume auto")).ok().line(ended);
    let rest = sandbox.train("--resume saved --early-stop 5").ok();
    rest.line("Step 12: the evaluation loss was not lower in 5 evaluations, so the run ends; ");
}
