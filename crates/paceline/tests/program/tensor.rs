//! Runs whose ranks divide each layer: the same bits as one process, checkpoints in all directions, and settings that do not go together.

use rustix::process::Signal;

use crate::common::marked::{Marked, names_only_rank};
use crate::common::{Sandbox, json, signal, trained, wait_until};

/// Each can be divided into four parts. The rows of a batch cannot be divided evenly.
const MLP: &str = "--model mlp --num-layers 4 --input-dim 20 --hidden-dim 36 --output-dim 7 --global-batch-size 14";
const LLAMA: &str = "--model llama --samples 60 --layers 2 --width 32 --heads 8 --kv-heads 4 --intermediate 36 --seq-len 9 --vocab 44 --global-batch-size 6";
const STEPS: &str = "--steps 5 --optimizer adamw --clip-grad-norm 0.5";

fn weights(flags: &str) -> String {
    trained(&format!("{flags} {STEPS}")).1.weights().to_owned()
}

#[test]
fn divided_layers_have_the_bits_of_one_process() {
    for model in [MLP, LLAMA, &format!("{LLAMA} --tie-embeddings --precision bf16")] {
        let alone = weights(&format!("{model} --nproc 1 --tp-parts 4"));
        for layout in [
            "--nproc 2 --mesh tp=2",
            "--nproc 2 --mesh tp=2 --overlap-tp --transport tcp",
            "--nproc 4 --mesh tp=4 --sequence-parallel off",
            "--nproc 4 --mesh pp=2,tp=2 --schedule zb_h1 --overlap-tp",
            "--nproc 2 --mesh tp=2 --device sim --transport thread",
            "--nproc 2 --mesh tp=2 --threads 2 --checkpoint-activations",
        ] {
            let is_llama = model.starts_with(LLAMA);
            let layout = layout.replace(
                "--checkpoint-activations",
                if is_llama { "--checkpoint-activations" } else { "" },
            );
            if layout.contains("pp=2") && model.contains("--tie") {
                continue;
            }
            assert_eq!(
                weights(&format!("{model} {layout} --tp-parts 4")),
                alone,
                "{model} {layout}"
            );
        }
        let replicas = weights(&format!("{model} --nproc 2 --tp-parts 2"));
        for layout in [
            "--nproc 4 --mesh dp=2,tp=2",
            "--nproc 4 --mesh shard=2,tp=2 --strategy sharded3 --transport thread",
            "--nproc 4 --mesh tp=2,dp=2 --strategy zero2 --transport hybrid --hosts 2",
        ] {
            assert_eq!(
                weights(&format!("{model} {layout} --tp-parts 2")),
                replicas,
                "{model} {layout}"
            );
        }
    }
}

#[test]
fn frozen_layers_are_those_of_one_process() {
    let mlp = format!("{MLP} --freeze fc0 --find-unused-parameters");
    let llama = format!("{LLAMA} --freeze model.embed_tokens model.layers.0");
    for model in [mlp, llama, format!("{LLAMA} --freeze lm_head model.layers.1")] {
        let alone = weights(&format!("{model} --nproc 1 --tp-parts 2"));
        for layout in [
            "--nproc 2 --mesh tp=2",
            "--nproc 2 --mesh tp=2 --overlap-tp --sequence-parallel off",
            "--nproc 4 --mesh tp=2,shard=2 --strategy sharded3 --micro-batch-size 2",
        ] {
            if layout.contains("shard") {
                let cut = weights(&format!("{model} --nproc 1 --tp-parts 2 --micro-batch-size 2"));
                assert_eq!(weights(&format!("{model} {layout}")), cut, "{model} {layout}");
            } else {
                assert_eq!(weights(&format!("{model} {layout}")), alone, "{model} {layout}");
            }
        }
    }
}

#[test]
fn three_ranks_have_the_bits_of_one_with_three_parts() {
    let model = MLP.replace("--hidden-dim 36", "--hidden-dim 33");
    let alone = weights(&format!("{model} --nproc 1 --tp-parts 3"));
    assert_eq!(weights(&format!("{model} --nproc 3 --mesh tp=3")), alone);
}

#[test]
fn a_checkpoint_goes_on_with_other_ranks_along_tp() {
    for model in [MLP, LLAMA] {
        let whole = weights(&format!("{model} --nproc 1 --tp-parts 4"));
        let sandbox = Sandbox::new();
        let first = format!("{model} {STEPS}").replace("--steps 5", "");
        for (steps, how) in [
            (1, format!("{first} --nproc 2 --mesh tp=2 --tp-parts 4")),
            (2, "--resume saved --nproc 4 --mesh tp=4".to_owned()),
            (3, "--resume saved --nproc 1 --mesh dp=1 --tp-parts 4 --strategy single".to_owned()),
            (4, "--resume saved --nproc 4 --mesh pp=2,tp=2 --tp-parts 4 --strategy ddp".to_owned()),
            (5, "--resume saved --nproc 2 --mesh tp=2 --tp-parts 4".to_owned()),
        ] {
            let run =
                sandbox.train(&format!("{how} --transport thread --steps {steps} --save saved"));
            let run = run.ok();
            assert!(steps < 5 || run.weights() == whole, "{run:#?}");
        }
    }
}

#[test]
fn a_rank_needs_its_part_of_the_memory() {
    let of = |flags: &str| {
        let (sandbox, _) = trained(&format!("{flags} --steps 3 --json out.json --optimizer adamw"));
        json(&sandbox.path("out.json"))
    };
    let model = "--model llama --layers 6 --width 64 --heads 8 --kv-heads 8 --intermediate 128 --vocab 128 --seq-len 32 --global-batch-size 8";
    let (alone, divided) =
        (of(&format!("{model} --nproc 1")), of(&format!("{model} --nproc 4 --mesh tp=4")));
    let bytes = |of: &serde_json::Value, category: &str| {
        of["memory_predicted"][0][category].as_f64().unwrap()
    };
    // The norms are not divided.
    for category in ["parameters", "gradients", "optimizer"] {
        let part = bytes(&divided, category) / bytes(&alone, category);
        assert!((0.25..0.26).contains(&part), "{category}: {part}");
    }
    // One tensor has all rows. The statistics of rows and a chunk of the logits take less than another one.
    let all_rows = f64::from(8 * 32 * 64 * 4);
    let above = bytes(&divided, "activations") - bytes(&alone, "activations") / 4.0;
    assert!(above < 2.0 * all_rows, "activations: {above} above a quarter");
    for rank in 0..4 {
        let phases = divided["memory"][rank]["phases"].as_array().unwrap().iter();
        let phases = phases.filter(|phase| phase["phase"] != "initialization");
        for category in ["parameters", "gradients", "optimizer", "activations", "workspace"] {
            let peaks = phases.clone().map(|phase| phase["peak_bytes"][category].as_f64().unwrap());
            let (peak, predicted) = (peaks.fold(0.0, f64::max), bytes(&divided, category));
            assert!((peak / predicted - 1.0).abs() < 0.03, "{category}: {peak} of {predicted}");
        }
    }
}

#[test]
fn a_killed_rank_is_named_whatever_its_place() {
    for (mesh, victim) in [("dp=2,tp=2", 3), ("pp=2,tp=2", 1), ("tp=4", 0)] {
        let sandbox = Sandbox::new();
        let endless = "--steps-per-epoch 5 --epochs 10000000 --save saved";
        let mut launcher =
            Marked::train(&sandbox, &format!("{MLP} --nproc 4 --mesh {mesh} {endless}"));
        wait_until("a checkpoint", || sandbox.path("saved/latest").exists());
        signal(launcher.rank(victim), Signal::KILL);
        let run = launcher.end();
        assert_eq!(run.code, Some(137), "{run:#?}");
        names_only_rank(&run, victim, "was killed by SIGKILL");
        launcher.left_nothing();
    }
}

#[test]
fn settings_that_cannot_be_divided_are_refused() {
    let sandbox = Sandbox::new();
    let refused = |flags: &str, words: &[&str]| {
        sandbox.train(flags).refused(words);
        assert_eq!(sandbox.contents(), Vec::<String>::new(), "{flags}");
    };
    let two = "--nproc 2 --mesh tp=2";
    refused(two, &["--mesh tp", "the layers of this model cannot be divided"]);
    refused("--sequence-parallel", &["--sequence-parallel: no layer is divided", "--mesh tp=2"]);
    refused("--overlap-tp", &["--overlap-tp: no layer is divided"]);
    refused("--tp-parts 0", &["--tp-parts"]);
    refused(
        &format!("{MLP} --nproc 3 --mesh tp=3 --tp-parts 4"),
        &["each of the 3 ranks along tp", "pass 3 or 6"],
    );
    refused(
        &format!("{MLP} --nproc 2 --mesh tp=2 --tp-parts 6"),
        &["each of the 2 ranks along tp"],
    );
    refused(
        &format!("{MLP} --nproc 1 --tp-parts 5"),
        &["width 36 cannot be divided into 5 equal parts"],
    );
    refused(&format!("{MLP} {two} --tie-layers"), &["tied layers cannot be divided"]);
    refused(
        &format!("{LLAMA} --nproc 1 --tp-parts 8"),
        &["num_key_value_heads 4 cannot be divided into 8", "1 or 2 or 4"],
    );
    refused(
        &format!("{} --nproc 1 --tp-parts 2", LLAMA.replace("--vocab 44", "--vocab 45")),
        &["vocab_size 45 cannot be divided into 2"],
    );
    refused(&format!("{MLP} {two} --strategy local_sgd"), &["equal after each step"]);
    let own = MLP.replace("--global-batch-size 14", "--batch-size 4 --rank-samples 8 6");
    refused(&format!("{own} {two}"), &["--rank-samples: ", "the same samples", "--tp-parts"]);
}
