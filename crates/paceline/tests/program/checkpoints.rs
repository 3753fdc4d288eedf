//! Checkpoints from end to end: written by ranks that hold a part of the model each, read by other numbers of ranks with
//! other strategies, shown, verified and exported.

use std::fs;

use crate::common::{Run, Sandbox, TINY, column};
use paceline_model::weights::WeightFile;

/// Runs `paceline checkpoint` with these words, which are separated by spaces.
fn checkpoint(sandbox: &Sandbox, words: &str) -> Run {
    sandbox.run(&format!("checkpoint {words}"))
}

/// A model whose units no number of ranks below divides, and a global batch that all of them divide.
const MODEL: &str = "--channels 4 8 --hidden 8 --samples 480 --global-batch-size 48 \
                     --optimizer adamw --lr 0.001 --transport thread";

/// The losses of a run in an empty folder of runs.
fn losses(sandbox: &Sandbox, flags: &str) -> (Run, Vec<f64>) {
    let runs = sandbox.path("runs");
    if runs.exists() {
        fs::remove_dir_all(&runs).unwrap();
    }
    let run = sandbox.train(&format!("{MODEL} {flags}")).ok();
    let losses = column(&sandbox.run_folder(), "loss");
    (run, losses)
}

/// Settings that it does not have were not there when it was written.
#[test]
fn a_checkpoint_of_an_earlier_build_goes_on() {
    let saved = concat!(env!("CARGO_MANIFEST_DIR"), "/../../bench/checkpoint/step-000000003");
    let run = Sandbox::new().train(&format!("--resume {saved} --steps 6 --warmup-steps 0")).ok();
    assert!(!run.stderr.contains("does not say"), "{run:#?}");
}

#[test]
fn a_checkpoint_of_sharded_ranks_goes_on_with_any_number_of_ranks_and_any_strategy() {
    let sandbox = Sandbox::new();
    let sharded = "--strategy sharded3 --nproc 4";
    let (whole, expected) = losses(&sandbox, &format!("{sharded} --steps 16"));
    losses(&sandbox, &format!("{sharded} --steps 6 --save saved"));
    for nproc in [1, 2, 3, 8] {
        for strategy in ["ddp", "zero2", "sharded1"] {
            let flags = format!("--strategy {strategy} --nproc {nproc} --steps 16 --resume saved");
            let (_, found) = losses(&sandbox, &flags);
            assert_eq!(found.len(), 10, "{flags}");
            for (step, (found, expected)) in found.iter().zip(&expected[6..]).enumerate() {
                // Sums over the batch in another order, in f32, as between any two world sizes.
                let off = (found - expected).abs();
                assert!(off < 1e-5, "{flags}, step {}: {found}, {expected}", step + 7);
            }
        }
    }
    // This test can fail: a step that starts elsewhere has another loss.
    assert!((expected[6] - expected[0]).abs() > 1e-2, "{expected:?}");
    let (rest, found) = losses(&sandbox, &format!("{sharded} --steps 16 --resume saved"));
    assert_eq!((rest.weights(), &found[..]), (whole.weights(), &expected[6..]));
}

#[test]
fn every_placement_writes_what_any_other_reads() {
    let sandbox = Sandbox::new();
    let (whole, _) = losses(&sandbox, "--strategy ddp --nproc 2 --steps 8");
    let strategies = ["ddp", "zero1", "zero3", "sharded1", "sharded2", "sharded3"];
    for (at, writes) in strategies.iter().enumerate() {
        let reads = strategies[(at + 1) % strategies.len()];
        let sandbox = Sandbox::new();
        losses(&sandbox, &format!("--strategy {writes} --nproc 2 --steps 4 --save saved"));
        let (rest, _) =
            losses(&sandbox, &format!("--strategy {reads} --nproc 2 --steps 8 --resume saved"));
        assert_eq!(rest.weights(), whole.weights(), "{writes}, then {reads}");
    }
}

#[test]
fn what_ranks_keep_for_lossy_strategies_goes_on_too() {
    for flags in ["--strategy top_k --top-k 0.2", "--strategy local_sgd --sync-every 2"] {
        let sandbox = Sandbox::new();
        let flags = format!("{flags} --nproc 3 --save saved --save-every 4");
        let (whole, _) = losses(&sandbox, &format!("{flags} --steps 8"));
        assert!(!whole.stderr.contains("no part of a checkpoint"), "{whole:#?}");
        let sandbox = Sandbox::new();
        losses(&sandbox, &format!("{flags} --steps 4"));
        let rest = losses(&sandbox, &format!("{flags} --steps 8 --resume saved")).0;
        assert_eq!(rest.weights(), whole.weights(), "{flags}");
        assert_eq!(rest.stderr.matches("warning: --resume").count(), 0, "{rest:#?}");
    }
    // With k = 1 everything is sent, so nothing is kept.
    let sandbox = Sandbox::new();
    losses(&sandbox, "--strategy ddp --nproc 2 --steps 4 --save saved");
    losses(&sandbox, "--strategy top_k --top-k 1 --nproc 2 --steps 8 --save saved --resume saved");
    losses(&sandbox, "--strategy ddp --nproc 2 --steps 9 --resume saved");
    let sandbox = Sandbox::new();
    let flags = "--strategy top_k --top-k 0.2 --save saved";
    losses(&sandbox, &format!("{flags} --nproc 3 --steps 4"));
    let fewer = losses(&sandbox, &format!("{flags} --nproc 2 --steps 8 --resume saved")).0;
    let words = "warning: --resume saved: what 3 ranks with top_k";
    assert_eq!(fewer.stderr.matches(words).count(), 1, "{fewer:#?}");
    assert!(fewer.stderr.contains("is dropped, because this run has 2"), "{fewer:#?}");
    let exact = losses(&sandbox, "--strategy sharded2 --nproc 3 --steps 9 --resume saved").0;
    exact.says(&["it was written with --strategy top_k", "what 2 ranks with top_k", "is dropped"]);
}

#[test]
fn a_checkpoint_is_shown_verified_and_exported() {
    let sandbox = Sandbox::new();
    let flags = format!("{TINY} --nproc 2 --global-batch-size 50 --momentum 0.9 --batch-norm");
    let trained = sandbox.train(&format!("{flags} --steps 6 --save saved --save-every 2")).ok();
    let shown = checkpoint(&sandbox, "show saved").ok();
    for (start, rest) in [
        ("Checkpoint ", " saved/step-000000006"),
        ("Step ", "       6"),
        ("Epoch ", "      1 complete, and 2 batches of the next"),
        ("Samples ", "    300"),
        ("Written by ", " 2 ranks"),
        ("Also there ", " step-000000002, step-000000004"),
        ("Follows ", "    step-000000004"),
    ] {
        assert_eq!(shown.line(start), rest, "{}", shown.stdout);
    }
    shown.prints(&[
        "rank-001-of-002.shard",
        "model.bn0.running_mean",
        "optimizer.velocity.fc0.weight",
    ]);
    assert!(shown.line("model.conv0.weight ").contains("f32   [3, 3, 1, 4]"), "{}", shown.stdout);
    assert!(shown.line("seed ").trim().starts_with("42"), "{}", shown.stdout);
    let one = checkpoint(&sandbox, "show saved/step-000000004").ok();
    assert_eq!(one.line("Step ").trim(), "4");

    let verified = checkpoint(&sandbox, "verify saved").ok();
    assert_eq!(verified.stdout.matches("in 2 files match their digests").count(), 3);

    // The exported file has the weights that the run ended with.
    let model = checkpoint(&sandbox, "export saved --to model.safetensors").ok();
    assert!(model.stdout.starts_with("model.safetensors: 10 tensors"), "{}", model.stdout);
    let file = WeightFile::open(&sandbox.path("model.safetensors")).unwrap();
    assert_eq!(file.metadata()["steps"], "6");
    let again = checkpoint(&sandbox, "export saved --to model.safetensors");
    again.refused(&["--to model.safetensors is there already", "--force"]);
    let all = "export saved --to model.safetensors --force --optimizer";
    let all = checkpoint(&sandbox, all).ok();
    assert!(all.stdout.starts_with("model.safetensors: 18 tensors"), "{}", all.stdout);
    let rest = sandbox.train(&format!("{flags} --steps 8 --resume saved/step-000000006")).ok();
    assert_ne!(rest.weights(), trained.weights());
}

#[test]
fn damage_is_named_with_the_file_and_the_rank_that_wrote_it() {
    let sandbox = Sandbox::new();
    let flags = format!("{TINY} --nproc 3 --global-batch-size 48");
    sandbox.train(&format!("{flags} --steps 2 --save saved --quiet")).ok();
    let shard = |rank: usize| sandbox.checkpoint().join(format!("rank-00{rank}-of-003.shard"));
    let mut bytes = fs::read(shard(2)).unwrap();
    bytes[7] ^= 1;
    fs::write(shard(2), bytes).unwrap();
    let resume = format!("{flags} --steps 4 --resume saved");
    // Each rank reads the whole model under ddp, and the first one that reports it ends the run.
    let run = sandbox.train(&resume);
    assert_eq!(run.code, Some(1), "{run:#?}");
    let words = "rank-002-of-003.shard, which rank 2 wrote, is corrupt: its bytes 0..";
    let said = |line: &&str| line.starts_with("[rank ") && line.contains(words);
    assert_eq!(run.stderr.lines().filter(said).count(), 1, "{run:#?}");

    fs::remove_file(shard(1)).unwrap();
    let words = ["--resume saved", "rank-001-of-003.shard, which rank 1 wrote,", "No such file"];
    sandbox.train(&resume).refused(&words);
    let verified = checkpoint(&sandbox, "verify saved");
    assert_eq!(verified.code, Some(1), "{verified:#?}");
    for words in ["which rank 1 wrote, cannot be read", "which rank 2 wrote, is corrupt"] {
        assert_eq!(verified.stdout.matches(words).count(), 1, "{verified:#?}");
    }
    verified.says(&["2 problems in saved: 1 checkpoint verified"]);
    checkpoint(&sandbox, "show saved").refused(&["which rank 1 wrote"]);
    checkpoint(&sandbox, "show nowhere").refused(&["nowhere cannot be read", "No such file"]);
    let empty = ["there is no checkpoint in runs"];
    checkpoint(&sandbox, "verify runs").refused(&empty);
}

#[test]
fn flags_of_saving_do_what_they_say() {
    let mut indexes = Vec::new();
    // A model of 8 MB with its optimizer.
    let wide = "--model mlp --input-dim 256 --hidden-dim 2048 --output-dim 64 --num-layers 1 --nproc 2 \
                --batch-size 8 --steps-per-epoch 9 --optimizer adamw --save saved --save-every 2";
    for more in ["--save-keep 3", "--save-keep 3 --save-sync", "--save-keep 3 --save-budget-mb 2"] {
        let sandbox = Sandbox::new();
        let run = sandbox.train(&format!("{wide} --steps 9 {more}")).ok();
        let steps = [5, 7, 9].map(|steps| steps - 1).map(|steps| format!("step-{steps:09}"));
        let [_, second, third] = steps;
        // The first one waits to be good, so it stays beside the last three.
        let first = "step-000000002";
        let expected = ["checkpoint.lock", "latest", first, &second, &third, "step-000000009"];
        assert_eq!(sandbox.names("saved"), expected, "{more}");
        let warned = run.stderr.matches("training waits while the rest is written").count();
        assert_eq!(warned, usize::from(more.contains("budget")), "{}", run.stderr);
        indexes.push(sandbox.checkpoint_index());
    }
    assert!(indexes.iter().all(|index| *index == indexes[0]), "how it is saved changes nothing");
}

#[test]
fn a_newest_checkpoint_that_is_gone_is_an_error_and_the_others_can_be_chosen() {
    let flags = format!("{TINY} --nproc 2 --global-batch-size 50 --save saved --save-every 2");
    let sandbox = Sandbox::new();
    sandbox.train(&format!("{flags} --steps 4")).ok();
    let newest = sandbox.checkpoint();
    let more = format!("{flags} --steps 6");
    let refused = |found: &str| {
        let words = ["saved/latest names step-000000004", found, "saved/step-000000002"];
        for resume in ["saved", "auto"] {
            sandbox.train(&format!("{more} --resume {resume}")).refused(&words);
        }
        let verified = checkpoint(&sandbox, "verify saved");
        assert_eq!(verified.code, Some(1), "{verified:#?}");
        verified.prints(&words).prints(&["step-000000002: all of"]);
        checkpoint(&sandbox, "show saved").refused(&words);
    };
    fs::remove_file(newest.join("index.json")).unwrap();
    refused("which has no index.json");
    fs::remove_dir_all(&newest).unwrap();
    refused("which is not there");
    fs::remove_dir_all(sandbox.path("saved/step-000000002")).unwrap();
    for resume in ["saved", "auto"] {
        let run = sandbox.train(&format!("{more} --resume {resume}"));
        run.refused(&["which is not there", "no other checkpoint is there"]);
    }

    let sandbox = Sandbox::new();
    sandbox.train(&format!("{flags} --steps 4")).ok();
    fs::remove_dir_all(sandbox.checkpoint()).unwrap();
    let chosen = sandbox.train(&format!("{more} --resume saved/step-000000002")).ok();
    assert!(chosen.line("Resumed from ").contains("2 steps are complete"), "{chosen:#?}");
    checkpoint(&sandbox, "verify saved").ok();
}

#[test]
fn a_checkpoint_that_another_one_does_not_follow_is_found() {
    let flags = format!("{TINY} --nproc 1 --global-batch-size 50 --save saved --save-every 2");
    let [first, other] = [(); 2].map(|()| Sandbox::new());
    first.train(&format!("{flags} --steps 4")).ok();
    other.train(&format!("{flags} --steps 4 --lr 0.02")).ok();
    checkpoint(&first, "verify saved").ok();
    // Each checkpoint is whole; but the newest one was not made from the one before.
    let of = |sandbox: &Sandbox| sandbox.path("saved/step-000000002");
    fs::remove_dir_all(of(&first)).unwrap();
    fs::rename(of(&other), of(&first)).unwrap();
    let verified = checkpoint(&first, "verify saved");
    assert_eq!(verified.code, Some(1), "{verified:#?}");
    let words = "saved/step-000000002 is not the checkpoint that saved/step-000000004 follows";
    assert!(verified.stdout.contains(words), "{verified:#?}");
}
