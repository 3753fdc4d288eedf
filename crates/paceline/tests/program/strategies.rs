//! Strategies and their settings, end to end.

use crate::common::{Run, Sandbox, json, trained, weights_of};
use paceline::choices::models::Defaults;
use paceline::choices::strategies::{STRATEGIES, Synchronizes};
use paceline::collectives::MeshShape;
use paceline::observe::figures::table::TABLE;
use paceline::settings::spec::RunSpec;
use paceline::strategies::Exactness;
use serde_json::Value;

/// The smallest CNN that still has several layers.
const NET: &str = "--nproc 2 --channels 4 --hidden 8";
/// Six batches of 16, so that steps of four have a tail.
const SHORT: &str = "--samples 96 --batch-size 8 --warmup-steps 0";

/// The strategies that promise the same bits to several ranks.
pub fn exact() -> impl Iterator<Item = &'static str> {
    let settings = RunSpec::default().parse().unwrap();
    let all = STRATEGIES.all().into_iter().filter(move |choice| {
        let strategy = (choice.of.resolve)(&settings, &Defaults::default()).unwrap();
        let exactness = strategy.build().unwrap().exactness(&MeshShape::replicas(2));
        choice.of.synchronizes != Synchronizes::Alone && exactness == Exactness::Exact
    });
    all.map(|choice| choice.name)
}

fn with_epochs(flags: &str) -> String {
    let epochs = if flags.contains("--epochs") { "" } else { "--epochs 1" };
    format!("{NET} {SHORT} {epochs} {flags}")
}

#[track_caller]
fn train(flags: &str) -> (Sandbox, Run) {
    trained(&with_epochs(flags))
}

#[track_caller]
fn weights(flags: &str) -> String {
    train(flags).1.weights().to_owned()
}

fn summary(sandbox: &Sandbox) -> Value {
    sandbox.summary()
}

/// Ranks and micro-batches are parts of a batch in the same way, if both are added up as a tree.
#[test]
fn ranks_and_micro_batches_are_exchangeable_in_the_order_of_a_tree() {
    for model in
        ["--channels 4 --hidden 8", "--model mlp --input-dim 8 --hidden-dim 16 --output-dim 4"]
    {
        let digest = |nproc: usize, accumulate: usize, order: &str| {
            let steps = 3 * accumulate;
            let flags = format!(
                "{model} --nproc {nproc} --accumulate {accumulate} --accumulation-order {order} \
                 --batch-size 8 --steps-per-epoch {steps} --epochs 2 --warmup-steps 0 --clip-grad-norm 0.1 --lr 0.5"
            );
            let data = if model.contains("mlp") { "" } else { "--samples 96" };
            weights_of(&format!("{flags} {data}"))
        };
        let whole = digest(4, 1, "sequential");
        for (nproc, accumulate) in [(1, 4), (2, 2)] {
            assert_eq!(digest(nproc, accumulate, "tree"), whole, "{nproc} x {accumulate} {model}");
        }
        assert_ne!(digest(1, 4, "sequential"), whole, "the order matters: {model}");
    }
}

#[test]
fn exact_strategies_end_with_the_same_bits() {
    for accumulate in [1, 4] {
        let of = |name| weights(&format!("--strategy {name} --accumulate {accumulate}"));
        let all: Vec<_> = exact().map(|name| (name, of(name))).collect();
        assert!(all.iter().all(|(_, digest)| *digest == all[0].1), "{accumulate}: {all:?}");
    }
    let copies = weights("--strategy ddp --no-gradient-view --bucket-cap-mb 0.001");
    assert_eq!(copies, weights("--strategy pytorch_ddp --transport tcp"));
}

/// Without `no_sync` the mean over the ranks is taken of each batch: other roundings, the same for every strategy.
#[test]
fn gradients_can_be_reduced_after_each_batch() {
    let each = "--accumulate 3 --no-sync off";
    let names = [
        "simple_ddp",
        "simple_ddp_hook",
        "bucket_ddp_async",
        "ddp --bucket-cap-mb 0.001",
        "flat_ddp",
    ];
    let all = names.map(|name| weights(&format!("--strategy {name} {each}")));
    assert!(all.iter().all(|digest| *digest == all[0]), "{all:?}");
    assert_ne!(all[0], weights("--strategy ddp --accumulate 3"), "it is reduced only once");
    // Averages of one batch are averages of all.
    assert_eq!(weights("--strategy ddp --no-sync off"), weights("--strategy ddp --no-sync"));
    let sent = |flags: &str| {
        let (sandbox, _) = train(&format!("--strategy ddp --accumulate 3 {flags}"));
        summary(&sandbox)["comm_mb_per_step"].as_f64().unwrap()
    };
    let ratio = sent("--no-sync=false") / sent("");
    assert!((ratio - 3.0).abs() < 0.01, "{ratio} times as much is sent");
}

#[test]
fn accumulation_is_a_larger_batch() {
    let (sandbox, run) = train("--strategy simple_ddp_ga");
    let summary = summary(&sandbox);
    // Six batches: a step of four and one of two.
    assert_eq!((&summary["accumulate"], &summary["steps"]), (&4.into(), &2.into()));
    assert!(run.line("Epoch 1/1: ").contains("loss"));
    let larger = "--samples 96 --batch-size 32 --epochs 1 --warmup-steps 0";
    let one = Sandbox::new();
    one.train(&format!("{NET} {larger}")).ok();
    // The first step of both trains on the same 64 samples, and nothing is learned before it.
    let loss = |sandbox: &Sandbox| {
        let text = std::fs::read_to_string(sandbox.run_folder().join("metrics.jsonl")).unwrap();
        let step: Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
        assert_eq!(step["samples"], 64);
        step["loss"].as_f64().unwrap()
    };
    // f32 losses of single samples, added up in another order.
    assert!((loss(&sandbox) - loss(&one)).abs() < 1e-6);
}

#[test]
fn accumulation_beyond_an_epoch_is_said() {
    let (sandbox, run) = train("--accumulate 9");
    let said = "--accumulate 9: an epoch has 6 batches";
    run.says(&[said, "each epoch is one step of 6 batches"]);
    assert_eq!(summary(&sandbox)["steps"], 1);
}

#[test]
fn the_anatomy_of_a_step_adds_up() {
    // A link is refused if the transport is not faster, as a busy machine's may not be than one of
    // microseconds.
    let (sandbox, run) = train("--strategy ddp --bucket-cap-mb 0.001 --link 1gbit,1ms --verbose");
    let summary = summary(&sandbox);
    let anatomy = &summary["anatomy"];
    let ms = |key: &str| summary[key].as_f64().unwrap_or_else(|| panic!("{key}: {summary}"));
    let parts = TABLE.iter().filter(|figure| figure.is_part_of_step);
    let sum: f64 = parts.map(|figure| ms(figure.name)).sum();
    assert!((sum - ms("wall_ms")).abs() < 1e-6 * sum, "{sum} of {summary}");
    assert!(ms("comm_hidden_ms") <= ms("comm_ms"));
    assert!(ms("comm_exposed_wait_ms") <= ms("comm_exposed_ms"));
    let buckets = anatomy["buckets"].as_array().unwrap();
    assert!(buckets.len() > 1);
    for bucket in buckets {
        let at = |key: &str| bucket[key].as_f64().unwrap();
        assert!(at("ready_ms") <= at("sent_ms") && at("sent_ms") < at("done_ms"), "{bucket}");
        assert!(!bucket["units"].as_array().unwrap().is_empty());
    }
    assert_eq!(anatomy["ready"].as_array().unwrap()[0]["param"], "fc1.bias");
    assert!(run.stdout.contains("Anatomy of a step"));
    assert!(run.line("Bucket ").contains("Hidden (%)"));
    assert!(run.line("Advice: ").len() > 30);
}

#[test]
fn unused_parameters_are_named() {
    let run = Sandbox::new().train(&with_epochs("--unused-head"));
    assert_eq!(run.code, Some(1), "{}", run.stderr);
    run.says(&["unused_head.weight, unused_head.bias", "--find-unused-parameters"]);
    // Its gradients are zero, so only the weights of the head itself differ.
    let found = weights("--unused-head --find-unused-parameters");
    assert_eq!(found, weights("--unused-head --find-unused-parameters --no-static-graph"));
    let simple = "--unused-head --find-unused-parameters --strategy simple_ddp_async";
    assert_eq!(found, weights(simple));
}

#[test]
fn frozen_and_tied_layers() {
    let (sandbox, _) = train("--freeze conv0 fc1 --momentum 0.9");
    let part = summary(&sandbox)["comm_mb_per_step"].as_f64().unwrap();
    let (sandbox, _) = train("--momentum 0.9");
    assert!(part < summary(&sandbox)["comm_mb_per_step"].as_f64().unwrap());
    let mlp = "--model mlp --input-dim 8 --hidden-dim 16 --output-dim 4 --num-layers 4 --batch-size 8 \
               --epochs 1 --steps-per-epoch 3 --warmup-steps 0 --tie-layers --nproc 2";
    let digest = |strategy: &str| {
        let run = Sandbox::new().train(&format!("{mlp} --strategy {strategy}")).ok();
        assert!(run.stdout.contains("Parameters: 484,"), "{}", run.stdout);
        run.weights().to_owned()
    };
    assert_eq!(digest("simple_ddp"), digest("ddp"));
}

#[test]
fn lossy_strategies_train_and_say_what_they_are() {
    for strategy in ["top_k", "fp16", "bf16", "local_sgd --sync-every 2"] {
        let (sandbox, run) = train(&format!("--strategy {strategy}"));
        assert_eq!(summary(&sandbox)["replicas_agree"], true, "{strategy}");
        assert!(!run.stdout.contains("different weights"));
    }
    let exact = weights("--strategy top_k --top-k 1");
    assert_eq!(exact, weights("--strategy simple_ddp"));
    let (sandbox, run) = train("--strategy local_sgd --sync-every 2 --verbose");
    // Every second step averages. Steps that the anatomy of single operations leaves out are counted and
    // reported.
    let summary_of_run = summary(&sandbox);
    assert_eq!((&summary_of_run["steps"], &summary_of_run["unlike_steps"]), (&6.into(), &3.into()));
    run.prints(&["\n3 of 6 steps have other operations or gradients"]);
    let (sandbox, run) = train("--strategy no_sync");
    assert_eq!(summary(&sandbox)["replicas_agree"], false);
    assert!(run.line("The ranks hold different weights").contains("rank 0"));
}

#[test]
fn blocks_without_synchronization_tell_what_it_costs() {
    let (sandbox, run) = train("--strategy ddp --sync-blocks 2 --epochs 3");
    let cost = &summary(&sandbox)["sync_cost"];
    assert!(cost["synchronised_ms"].as_f64().unwrap() > 0.0, "{cost}");
    assert!(run.line("Synchronization: ").contains("in turns"));
}

#[test]
fn flags_without_effect_are_said() {
    let (sandbox, run) = train("--strategy flat_ddp --bucket-cap-mb 4 --top-k 0.5");
    for flag in ["--bucket-cap-mb", "--top-k"] {
        run.says(&[&format!("{flag} has no effect on flat_ddp")]);
    }
    let warnings = &json(&sandbox.run_folder().join("config.json"))["resolved"]["warnings"];
    assert_eq!(warnings.as_array().unwrap().len(), 2);
}
