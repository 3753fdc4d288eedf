//! `--device sim`: training and checks on the emulated accelerator.

use crate::common::{Sandbox, json, trained, weights_of};

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
}

#[test]
fn synthetic_data_made_on_the_device_are_those_of_the_host() {
    let cnn = "--channels 4 --hidden 8";
    let mlp = "--model mlp --input-dim 16 --hidden-dim 32 --output-dim 4";
    let llama = "--model llama --layers 1 --width 32 --heads 4 --kv-heads 2 --intermediate 48 --vocab 301 --seq-len 16";
    let uneven = "--rank-samples 40 24 --samples 64 --strategy simple_ddp";
    for model in [cnn, mlp, llama, &format!("{cnn} {uneven}")] {
        let flags = format!(
            "{model} --nproc 2 --batch-size 4 --epochs 2 --steps-per-epoch 5 --accumulate 2"
        );
        let expected = weights_of(&flags);
        let copied = "--generate-on-host --pin-memory --non-blocking --copy-stream";
        for (more, is_copied) in [("", false), (copied, true)] {
            let (sandbox, run) = trained(&format!("{flags} --device sim {more}"));
            assert_eq!(run.weights(), expected, "{model} {more}");
            let copy_ms = sandbox.summary()["copy_ms"].as_f64().unwrap();
            assert_eq!(copy_ms > 0.0, is_copied, "{model} {more}");
        }
    }
}

#[test]
fn a_benchmark_of_a_device_checks_and_names_it() {
    let sandbox = Sandbox::new();
    let bench = "bench all_reduce --nproc 2 -b 1K -e 4K -J b.json";
    for transport in ["thread", "shm", "tcp"] {
        let device = "sim:copy=16gbit,10us,launch=5us";
        let run = sandbox.run(&format!("{bench} --device {device} --transport {transport}")).ok();
        run.prints(&[&format!("in memory of {device}")]);
        let report = json(&sandbox.path("b.json"));
        assert_eq!(report["device"], device);
        for row in report["results"].as_array().unwrap() {
            // Its input is copied to the host, and its result back, each with this latency.
            assert!(row["in_place"]["time"].as_f64().unwrap() >= 20.0, "{row}");
            assert_eq!(row["in_place"]["nwrong"], 0.0, "{row}");
        }
    }
}

#[test]
fn a_check_names_the_device_and_uses_its_memory() {
    let sandbox = Sandbox::new();
    for device in ["sim:copy=16gbit,10us,launch=5us", "sim:late,seed=3"] {
        let check = format!("check --nproc 2 --transport thread --device {device}");
        let run = sandbox.run(&check).ok();
        assert_eq!(run.stdout.matches(&format!("device={device}")).count(), 3, "{}", run.stdout);
        run.prints(&["every element right on every rank"]);
    }
}
