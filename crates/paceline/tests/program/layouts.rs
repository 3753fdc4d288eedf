//! Every layout of the same micro-batches ends with the same bits, also across a resume, and a run that could not promise
//! that is refused. `bench/layouts.py` has more layouts and larger models.

use crate::common::{Sandbox, trained};

const STEP: &str = "--global-batch-size 16 --micro-batch-size 2";
/// An epoch of 3 steps, the last with 5 samples.
const CNN: &str = "--channels 2 3 --hidden 8 --image 8 8 1 --samples 37 --batch-norm --evaluate";
const MLP: &str = "--model mlp --num-layers 5 --input-dim 8 --hidden-dim 8 --output-dim 3";
const LLAMA: &str = "--model llama --layers 4 --width 16 --heads 2 --intermediate 16 --vocab 61 --seq-len 8 --samples 37";
const LAYOUTS: [&str; 13] = [
    "--nproc 1",
    "--nproc 2 --threads 2",
    "--nproc 3",
    "--nproc 3 --strategy sharded3",
    "--nproc 4 --strategy simple_ddp_async",
    "--nproc 6 --strategy zero3",
    "--nproc 6 --strategy sharded1 --mesh dp=3,shard=2",
    "--nproc 8 --strategy bucket_ddp_async",
    "--nproc 2 --mesh pp=2 --schedule zbv",
    "--nproc 2 --mesh pp=2 --schedule looped_bfs",
    "--nproc 6 --mesh pp=2,dp=3 --schedule 1f1b",
    "--nproc 4 --mesh pp=2,shard=2 --strategy sharded2",
    "--nproc 4 --strategy zero2",
];

/// The digest of the weights, and the losses with all their digits.
fn ended(flags: &str) -> Vec<String> {
    let (sandbox, run) =
        trained(&format!("{STEP} --transport thread {flags} --quiet --json out.json"));
    let text = std::fs::read_to_string(sandbox.path("out.json")).unwrap();
    let found: serde_json::Value = serde_json::from_str(&text).unwrap();
    drop(run);
    ["weights_sha256", "train_loss", "train_accuracy", "eval_loss", "grad_norm"]
        .map(|key| found[key].to_string())
        .to_vec()
}

#[test]
fn all_layouts_end_with_the_same_bits() {
    for model in [CNN, MLP, LLAMA] {
        let what =
            format!("{model} --epochs 2 --steps-per-epoch 3 --clip-grad-norm 0.5 --momentum 0.9");
        let expected = ended(&format!("{what} {}", LAYOUTS[0]));
        for layout in &LAYOUTS[1..] {
            assert_eq!(ended(&format!("{what} {layout}")), expected, "{model} {layout}");
        }
    }
}

#[test]
fn any_layout_goes_on_with_the_bits_of_a_run_that_never_stopped() {
    let what = format!("{STEP} {LLAMA} --optimizer adamw --lr-schedule cosine");
    let whole = trained(&format!("{what} --nproc 1 --steps 7")).1;
    let sandbox = Sandbox::new();
    let first = format!("{what} --nproc 3 --lr-steps 7");
    // Stopped in the middle of an epoch of three steps, and at its end.
    for (steps, how) in [
        (1, &first[..]),
        (2, "--resume saved --nproc 1 --strategy single"),
        (3, "--resume saved --nproc 6 --strategy sharded3 --checkpoint-activations"),
        (5, "--resume saved --nproc 2 --mesh pp=2"),
        (7, "--resume saved --nproc 8 --strategy zero2"),
    ] {
        let run = sandbox.train(&format!("{how} --transport thread --steps {steps} --save saved"));
        let run = run.ok();
        assert!(steps < 7 || run.weights() == whole.weights(), "{run:#?}");
    }
}

#[test]
fn a_run_that_could_not_promise_the_same_bits_is_refused() {
    let sandbox = Sandbox::new();
    let refused = |flags: &str, words: &[&str]| {
        sandbox.train(&format!("{MLP} {flags}")).refused(words);
        assert_eq!(sandbox.contents(), Vec::<String>::new(), "{flags}");
    };
    let of_step = "--nproc 2 --global-batch-size 16 --micro-batch-size 2";
    refused("--micro-batch-size 2", &["--global-batch-size too, a multiple of 2"]);
    refused("--micro-batch-size 0", &["--micro-batch-size"]);
    refused("--micro-batch-size 3 --global-batch-size 16", &["not a multiple", "pass 18"]);
    refused("--micro-batch-size 3 --global-batch-size 0", &["not a multiple", "pass 3"]);
    refused("--micro-batch-size 18446744073709551615 --global-batch-size 16", &["not a multiple"]);
    refused("--micro-batch-size 1 --global-batch-size 1000000007", &["at most 65536", "larger"]);
    refused("--micro-batch-size 2 --batch-size 4", &["--batch-size follows from it"]);
    refused(&format!("{of_step} --accumulate 4"), &["--accumulate follows from it"]);
    refused(
        "--nproc 3 --micro-batch-size 8 --global-batch-size 16",
        &["makes 2 micro-batches, and 3 ranks", "--global-batch-size 32"],
    );
    for setting in [
        "--strategy top_k",
        "--strategy local_sgd",
        "--strategy no_sync",
        "--accumulate-in shards --strategy sharded2",
        "--sync-blocks 2",
        "--no-sync off",
        "--algorithm ring --transport tcp",
    ] {
        let flag = setting.split(' ').next().unwrap();
        refused(&format!("{of_step} {setting}"), &["--micro-batch-size 2", flag]);
    }
    refused(&format!("{of_step} --mesh pp=2 --tie-layers"), &["tied parameters"]);
    let uneven = "--nproc 6 --global-batch-size 16 --micro-batch-size 2 --mesh pp=2,dp=3";
    refused(&format!("{uneven} --schedule looped_bfs"), &["--schedule looped_bfs"]);
    refused(&format!("{of_step} --rank-samples 8 8"), &["--rank-samples"]);
}
