//! `paceline train --mesh pp=...`: stages on several ranks.

mod common;

use common::Sandbox;

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
            assert!(!run.stdout.contains("Advice:"), "ranks wait for each other by plan");
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
fn what_a_pipeline_cannot_do_is_refused_before_a_rank_starts() {
    for (flags, words) in [
        ("--nproc 2 --schedule 1f1b", ["--schedule", "pass --mesh pp=2 too"]),
        (
            "--nproc 2 --mesh pp=2 --schedule 1f1bee",
            ["--schedule 1f1bee", "pass one of gpipe, 1f1b"],
        ),
        ("--nproc 2 --mesh pp=2 --schedule dualpipev --accumulate 2", ["--accumulate 2", "pass 4"]),
        ("--nproc 2 --stages fc0", ["--stages", "there are no stages"]),
        (
            "--nproc 2 --mesh pp=2 --stages fc7",
            ["--stages fc7", "there are conv0, conv1, fc0, fc1"],
        ),
        ("--nproc 2 --mesh pp=2 --stages conv0", ["--stages conv0", "the first stage has a block"]),
        (
            "--nproc 2 --mesh pp=2 --stages conv1,fc0",
            ["--stages conv1,fc0", "the schedule needs 1"],
        ),
        ("--nproc 3 --mesh pp=2", ["--mesh pp=2", "another number of ranks"]),
        ("--nproc 8 --mesh pp=8", ["needs 8 stages", "the model has 4 blocks"]),
        ("--nproc 2 --mesh pp=2 --device sim", ["--device", "pipelines cannot do this yet"]),
        ("--nproc 2 --mesh pp=2 --strategy local_sgd", ["local_sgd", "equal on all ranks"]),
        ("--nproc 2 --mesh pp=2 --model mlp --tie-layers", ["--mesh", "share parameters"]),
    ] {
        let cnn = if flags.contains("mlp") { "" } else { "--channels 4 4 --hidden 8" };
        Sandbox::new().train(&format!("{cnn} {flags}")).refused(&words);
    }
}
