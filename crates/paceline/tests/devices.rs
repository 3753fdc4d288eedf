//! `--device sim`: training and checks on the emulated accelerator.

mod common;

use common::{Run, Sandbox};

/// The digest of the final weights of a run with these flags, in its own folder.
#[track_caller]
fn weights_of(flags: &str) -> String {
    Sandbox::new().train(flags).ok().weights().to_owned()
}

#[test]
fn an_emulated_accelerator_ends_with_the_weights_of_the_processor() {
    let small =
        "--nproc 2 --channels 4 --hidden 16 --batch-size 8 --clip-grad-norm 1 --optimizer adamw";
    for strategy in ["ddp", "sharded3"] {
        let flags = format!("{small} --strategy {strategy} --steps 6 --evaluate");
        let expected = weights_of(&flags);
        for device in ["sim:copy=1gbit,5us,launch=0us", "sim:late,seed=3"] {
            let sandbox = Sandbox::new();
            let run = sandbox.train(&format!("{flags} --device {device}")).ok();
            assert_eq!(run.weights(), expected, "{strategy} on {device}");
            assert!(run.line("Ranks: 2 on ").ends_with(&format!(", device {device}")));
            assert!(!run.stdout.contains("Advice:"), "the host's times do not say what would help");
        }
    }
    // A checkpoint does not say where it was computed.
    let whole = weights_of(&format!("{small} --steps 6"));
    let sandbox = Sandbox::new();
    let flags = format!("{small} --save saved --save-every 3");
    sandbox.train(&format!("{flags} --steps 3 --device sim")).ok();
    let resumed = sandbox.train(&format!("{flags} --steps 6 --resume saved")).ok();
    assert_eq!(resumed.weights(), whole);
    for (flags, flag, words) in [
        ("--device sim:seed=7", "--device", "pass late too"),
        ("--device sim:copy=0gbit,1us", "--device", "a bandwidth and a latency"),
        ("--device cuda:1", "--device", "has no code for CUDA"),
        ("--device tpu", "--device", "there is no device of this name"),
        ("--pin-memory", "--pin-memory", "pass --device sim"),
        ("--device cpu --non-blocking", "--non-blocking", "pass --device sim"),
        ("--copy-stream", "--copy-stream", "pass --device sim"),
    ] {
        Sandbox::new().train(&format!("{small} {flags}")).refused(&[flag, words]);
    }
}

#[test]
fn a_check_names_the_device_and_uses_its_memory() {
    let sandbox = Sandbox::new();
    for device in ["sim:copy=16gbit,10us,launch=5us", "sim:late,seed=3"] {
        let mut check = sandbox.paceline();
        check.args(["check", "--nproc", "2", "--transport", "thread", "--device", device]);
        let run = Run::of(check).ok();
        assert_eq!(run.stdout.matches(&format!("device={device}")).count(), 3, "{}", run.stdout);
        assert!(run.stdout.contains("every element right on every rank"), "{}", run.stdout);
    }
    let mut check = sandbox.paceline();
    check.args(["check", "--device", "cuda:0"]);
    Run::of(check).refused(&["--device", "has no code for CUDA"]);
}
