//! fp16 and loss scaling, end to end: a scale changes no bit, an overflow skips the step on every rank, and a checkpoint has
//! the scale.

use crate::common::{Sandbox, TINY, json, metrics};
use serde_json::Value;

const FP16: &str = "--precision fp16 --emulate-fp16";
/// A scale with which the gradients of the small CNN overflow in fp16 for some steps.
const LARGE: &str = "--loss-scale dynamic:1099511627776";

/// The lines of the steps of the only run in a sandbox, and the digest of the weights.
fn train(flags: &str) -> (Vec<Value>, String) {
    let sandbox = Sandbox::new();
    let run = sandbox.train(&format!("{TINY} --batch-size 20 {flags}")).ok();
    (steps(&sandbox), run.weights().to_owned())
}

fn steps(sandbox: &Sandbox) -> Vec<Value> {
    let lines = metrics(&sandbox.run_folder()).into_iter();
    lines.filter(|line| line.get("loss").is_some()).collect()
}

fn column(steps: &[Value], key: &str) -> Vec<f64> {
    steps.iter().map(|step| step[key].as_f64().unwrap()).collect()
}

#[test]
fn a_power_of_two_changes_no_bit() {
    for flags in [
        "--nproc 1",
        "--nproc 2",
        "--nproc 2 --strategy sharded3 --optimizer adamw --clip-grad-norm 0.3",
        "--nproc 2 --mesh pp=2 --accumulate 2 --clip-grad-norm 0.3",
        "--nproc 2 --precision bf16",
    ] {
        let (plain, weights) = train(flags);
        for scale in ["1", "65536", "dynamic", "dynamic:4 --loss-scale-window 1"] {
            let (scaled, of_scaled) = train(&format!("{flags} --loss-scale {scale}"));
            assert_eq!(of_scaled, weights, "{flags}, {scale}");
            assert_eq!(column(&scaled, "loss"), column(&plain, "loss"), "{flags}, {scale}");
            if flags.contains("clip") {
                let norms = column(&scaled, "grad_norm");
                assert_eq!(norms, column(&plain, "grad_norm"), "{flags}, {scale}");
            }
            assert!(column(&scaled, "skipped_steps").iter().all(|skipped| *skipped == 0.0));
        }
        assert!(plain[0].get("loss_scale").is_none());
    }
}

#[test]
fn an_overflow_skips_the_step_and_halves_the_scale() {
    for more in [
        "--nproc 1",
        "--nproc 2 --strategy ddp",
        "--nproc 2 --strategy fp16",
        "--nproc 2 --strategy bf16",
        "--nproc 2 --strategy zero1",
        "--nproc 2 --strategy zero2",
        "--nproc 2 --strategy zero3",
        "--nproc 2 --strategy sharded1",
        "--nproc 2 --strategy sharded2",
        "--nproc 2 --strategy sharded3",
        "--nproc 4 --mesh dp=2,shard=2 --strategy sharded3",
        "--nproc 2 --mesh pp=2 --accumulate 2",
        "--nproc 4 --mesh dp=2,pp=2 --accumulate 2",
        "--nproc 2 --device sim --transport thread",
    ] {
        let sandbox = Sandbox::new();
        let flags = format!("{TINY} --batch-size 4 --steps 40 --optimizer adamw {FP16} {LARGE}");
        let run = sandbox.train(&format!("{flags} {more}")).ok();
        let steps = steps(&sandbox);
        let (scales, skipped) = (column(&steps, "loss_scale"), column(&steps, "skipped_steps"));
        // Each step is either skipped and halves the scale, or leaves both as they are.
        let (mut scale, mut count) = (1_099_511_627_776.0, 0.0);
        for (now, so_far) in scales.iter().zip(&skipped) {
            if *so_far > count {
                (scale, count) = (scale / 2.0, count + 1.0);
            }
            assert_eq!((*now, *so_far), (scale, count), "{more}");
        }
        assert!(skipped[0] == 1.0 && count > 5.0 && count < 40.0, "{more}: {skipped:?}");
        assert_eq!(skipped[39], skipped[30], "{more}: the last steps are good");
        let summary = sandbox.summary();
        assert_eq!(summary["skipped_steps"], count, "{more}");
        assert_eq!(summary["loss_scale"], scale, "{more}");
        assert_eq!(summary["replicas_agree"], true, "{more}");
        assert_eq!(summary["emulates_fp16"], true, "{more}");
        assert!(run.line("Step 1: its gradients overflowed").contains("549755813888"), "{more}");
        let lines = run.stdout.lines().filter(|line| line.contains("overflowed")).count();
        assert!(lines <= 4, "{more}: {}", run.stdout);
        assert!(run.stdout.contains(", in fp16 (emulated)"), "{}", run.stdout);
    }
}

#[test]
fn a_run_fails_if_its_steps_are_all_skipped() {
    let largest = "170141183460469231731687303715884105728";
    for (steps, failed, scale, reached) in [
        (200, 50, largest.to_owned(), 2f64.powi(127)),
        (20, 20, largest.to_owned(), 2f64.powi(127)),
        (200, 50, format!("dynamic:{largest}"), 2f64.powi(77)),
    ] {
        let sandbox = Sandbox::new();
        let save = "--save saved --save-every 10 --max-restarts 1";
        let flags = format!("{TINY} --batch-size 4 --nproc 2 --steps {steps} {FP16} {save}");
        let run = sandbox.train(&format!("{flags} --loss-scale {scale}"));
        assert_eq!(run.code, Some(1), "{run:#?}");
        let problem = format!(
            "the gradients of {failed} steps in a row overflowed, the last time in step {failed}, so every rank skipped them"
        );
        let of_rank = format!("[rank 0] error: {problem}");
        assert_eq!(run.stderr.matches(&of_rank).count(), 2, "a restart fails too: {run:#?}");
        assert!(!run.stderr.contains("the last good checkpoint"), "{run:#?}");
        let fix = format!("the loss scale is now {reached}: pass a smaller --loss-scale");
        assert!(run.stderr.contains(&fix), "{run:#?}");
        assert!(!sandbox.path("saved/good").exists(), "no step has proven the weights");
    }
}

#[test]
fn strategies_end_with_the_same_bits_in_fp16() {
    for scale in ["", &format!("{LARGE} --steps 40")] {
        let of = |more: &str| train(&format!("--nproc 2 {FP16} {scale} {more}")).1;
        let ddp = of("--strategy ddp");
        let others = ["simple_ddp", "flat_ddp", "zero1", "sharded1", "sharded2", "sharded3"];
        for strategy in others {
            assert_eq!(of(&format!("--strategy {strategy}")), ddp, "{strategy} {scale}");
        }
    }
}

#[test]
fn a_resumed_run_ends_with_the_same_bits() {
    for more in ["--strategy ddp --nproc 2", "--mesh pp=2 --nproc 2 --accumulate 2"] {
        let sandbox = Sandbox::new();
        let flags = format!("{TINY} --batch-size 4 --steps 40 --optimizer adamw {more}");
        let flags = format!("{flags} {FP16} {LARGE} --loss-scale-window 3");
        let save = "--save saved --save-every 4 --save-keep 20";
        let whole = sandbox.train(&format!("{flags} {save}")).ok();
        // Within the steps that are skipped, and behind them.
        for steps in [4, 36] {
            let from = format!("--resume saved/step-{steps:09} --json rest.json");
            let rest = sandbox.train(&from).ok();
            assert_eq!(rest.weights(), whole.weights(), "{more}, {steps}");
            let summary = json(&sandbox.path("rest.json"));
            assert!(summary["skipped_steps"].as_u64().unwrap() > 5, "{more}, {steps}");
        }
        let last = "--resume saved/step-000000036";
        let refused = sandbox.train(&format!("{last} --emulate-fp16=false"));
        let refused = refused.refused(&["--emulate-fp16", "bf16"]);
        assert!(!refused.stderr.contains("rank"), "{}", refused.stderr);
        let other = sandbox.train(&format!("{last} --loss-scale 8")).ok();
        assert!(other.stderr.contains("--loss-scale"), "{more}");
        let other = sandbox.train(&format!("{last} --precision bf16")).ok();
        assert!(!other.stderr.contains("emulate"), "{more}: {}", other.stderr);
    }
}

#[test]
fn a_checkpoint_of_fp16_is_evaluated_in_it() {
    let sandbox = Sandbox::new();
    let flags = format!("{TINY} --batch-size 20 --nproc 2 --evaluate --save saved");
    let trained = sandbox.train(&format!("{flags} --amp fp16 --emulate-fp16")).ok();
    let evaluate = |more: &str| sandbox.run(&format!("evaluate --checkpoint saved {more}"));
    evaluate("--emulate-fp16=false").refused(&["--precision fp16", "--emulate-fp16"]);
    let same = evaluate("").ok();
    assert_eq!(same.line("Evaluation loss: "), trained.line("Evaluation loss: "));
    assert!(same.stdout.contains("in fp16 (emulated)"), "{}", same.stdout);
    let wide = evaluate("--amp off").ok();
    assert!(!wide.stdout.contains("fp16"), "{}", wide.stdout);
}

#[test]
fn amp_names_a_precision() {
    let config = |flags: &str| {
        let sandbox = Sandbox::new();
        sandbox.train(&format!("{TINY} --nproc 1 --steps 1 {flags}")).ok();
        json(&sandbox.run_folder().join("config.json"))["resolved"]["precision"].clone()
    };
    for (flags, precision) in [
        ("--amp", "bf16"),
        ("--amp=true", "bf16"),
        ("--amp bf16 --precision bf16", "bf16"),
        ("--amp fp16 --emulate-fp16", "fp16"),
        ("--amp off", "f32"),
        ("--amp=false", "f32"),
    ] {
        assert_eq!(config(flags), precision, "{flags}");
    }
}

#[test]
fn flags_without_effect_are_said() {
    let said = |flags: &str| {
        Sandbox::new().train(&format!("{TINY} --nproc 1 --steps 1 {flags}")).ok().stderr
    };
    assert!(said("--emulate-fp16").contains("--emulate-fp16 has no effect without --precision"));
    for flags in ["", "--loss-scale 8"] {
        let stderr = said(&format!("--loss-scale-window 5 {flags}"));
        assert!(stderr.contains("--loss-scale-window has no effect"), "{flags}: {stderr}");
    }
}
