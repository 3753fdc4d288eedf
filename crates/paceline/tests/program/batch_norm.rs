//! `paceline train --batch-norm`: every strategy gives the same weights, synchronized statistics equal
//! those of a single rank, and running statistics are used in evaluation and restored from a checkpoint.

use crate::common::{Run, Sandbox, json};

/// Tails of two samples leave the last of three ranks without any.
const FLAGS: &str = "--channels 4 8 --hidden 8 --samples 202 --global-batch-size 25 --momentum 0.9 \
                     --batch-norm --epochs 2 --evaluate";

#[track_caller]
fn train(flags: &str) -> Run {
    Sandbox::new().train(&format!("{FLAGS} {flags}")).ok()
}

#[test]
fn strategies_and_transports_agree_on_weights_and_evaluation() {
    for options in ["", "--sync-batch-norm", "--broadcast-buffers"] {
        let simple = train(&format!("--nproc 3 --strategy simple_ddp {options}"));
        for other in [
            "--strategy ddp",
            "--strategy ddp --bucket-cap-mb 0.001",
            "--strategy bucket_ddp_async --transport tcp",
            "--strategy flat_ddp --transport thread",
        ] {
            let run = train(&format!("--nproc 3 {other} {options}"));
            assert_eq!(run.weights(), simple.weights(), "{other} {options}");
            for line in ["Evaluation loss: ", "Evaluation accuracy: "] {
                assert_eq!(run.line(line), simple.line(line), "{other} {options}");
            }
        }
    }
}

#[test]
fn synchronized_ranks_train_as_one_process_does() {
    let loss = |flags: &str| {
        let sandbox = Sandbox::new();
        sandbox.train(&format!("{FLAGS} {flags} --json summary.json")).ok();
        json(&sandbox.path("summary.json"))["eval_loss"].as_f64().unwrap()
    };
    let one = loss("--nproc 1");
    for nproc in [2, 3] {
        let off = |options: &str| (loss(&format!("--nproc {nproc} {options}")) - one).abs();
        // 18 steps of f32 whose gradients are added up in another order.
        assert!(off("--sync-batch-norm") < 1e-4, "{nproc} ranks");
        assert!(off("") > 1e-3, "{nproc} ranks with statistics of their own train otherwise");
    }
}

#[test]
fn a_resumed_run_goes_on_with_the_running_statistics() {
    for options in ["", "--sync-batch-norm"] {
        let flags = format!("{FLAGS} --nproc 2 {options}");
        let sandbox = Sandbox::new();
        let whole = sandbox.train(&flags).ok();
        // The later --epochs counts.
        sandbox.train(&format!("{flags} --save saved").replace("--epochs 2", "--epochs 1")).ok();
        let rest = sandbox.train(&format!("{flags} --resume saved")).ok();
        assert_eq!(rest.weights(), whole.weights(), "{options}");
        assert_eq!(rest.line("Evaluation loss: "), whole.line("Evaluation loss: "), "{options}");

        let other = flags
            .replace("--batch-norm ", "--batch-norm=false ")
            .replace("--sync-batch-norm", "--sync-batch-norm=false");
        sandbox
            .train(&format!("{other} --resume saved"))
            .refused(&["--resume saved", "it has model.bn0.bias, which this run has no use for"]);
    }
}

#[test]
fn what_has_no_effect_is_warned_about() {
    let run = train("--nproc 1 --sync-batch-norm");
    assert!(run.stderr.contains("--sync-batch-norm has no effect on single"), "{}", run.stderr);
    let flags = format!("{FLAGS} --nproc 2 --strategy no_sync --broadcast-buffers");
    let run = Sandbox::new().train(&flags.replace("--evaluate", "")).ok();
    assert!(run.stderr.contains("--broadcast-buffers has no effect on no_sync"), "{}", run.stderr);
}

#[test]
fn statistics_are_those_of_a_rank_that_has_trained() {
    let of = |samples: &str| {
        let flags = FLAGS.replace("--global-batch-size 25", "--batch-size 16");
        let sandbox = Sandbox::new();
        let run = sandbox.train(&format!("{flags} --nproc 2 --rank-samples {samples}")).ok();
        run.line("Evaluation loss: ").to_owned()
    };
    // The same samples on either rank, while the other rank trains on none.
    assert_eq!(of("96 0"), of("0 96"));
}

#[test]
fn the_sums_of_synchronized_batch_norms_are_followed() {
    let statistics = |options: &str| {
        let sandbox = Sandbox::new();
        let flags = "--channels 4 8 --hidden 8 --samples 200 --batch-size 25 --batch-norm --epochs 2 --warmup-steps 1";
        let run = sandbox
            .train(&format!("{flags} --nproc 2 {options} --verbose --json summary.json"))
            .ok();
        let summary = json(&sandbox.path("summary.json"));
        let followed = summary["anatomy"]["statistics"].as_array().map(Vec::len);
        (
            followed,
            run.stdout
                .contains("Synchronized batch norm: 4 all-reduces, for which the passes wait"),
        )
    };
    // Two layers, each with sums of the forward pass and of the backward pass.
    assert_eq!(statistics("--sync-batch-norm"), (Some(4), true));
    assert_eq!(statistics(""), (None, false));
}
