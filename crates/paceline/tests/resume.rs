//! Runs that go on where another one stopped: on another number of ranks, or because one command is
//! started again and again.

mod common;

use std::fs;
use std::process::{Command, Stdio};

use common::{Run, Sandbox, TINY, signal, wait_until};
use serde_json::Value;

/// Every step's value of `key`, over all run folders of the sandbox in order of their steps.
fn column(sandbox: &Sandbox, key: &str) -> Vec<f64> {
    let mut lines: Vec<Value> = Vec::new();
    for folder in fs::read_dir(sandbox.path("runs")).unwrap() {
        let text = fs::read_to_string(folder.unwrap().path().join("metrics.jsonl")).unwrap();
        // A killed run may leave half a line, which the next one repeats.
        lines.extend(text.lines().filter_map(|line| serde_json::from_str(line).ok()));
    }
    lines.sort_by_key(|line| line["step"].as_u64());
    lines.dedup_by_key(|line| line["step"].as_u64());
    lines.iter().map(|line| line[key].as_f64().unwrap()).collect()
}

#[test]
fn a_run_goes_on_with_another_number_of_ranks() {
    // Units of 40, 6280 and 90 parameters, which each number of ranks pads differently.
    for optimizer in ["--momentum 0.9", "--optimizer adamw"] {
        let flags = format!("{TINY} --global-batch-size 32 {optimizer}");
        let sandbox = Sandbox::new();
        sandbox.train(&format!("{flags} --epochs 4 --nproc 2")).ok();
        let whole = column(&sandbox, "loss");
        assert_eq!(whole.len(), 28);

        let sandbox = Sandbox::new();
        sandbox.train(&format!("{flags} --epochs 2 --nproc 2 --save saved")).ok();
        for (nproc, strategy) in [(4, "ddp"), (3, "simple_ddp"), (1, "single")] {
            fs::remove_dir_all(sandbox.path("runs")).unwrap();
            let more = format!("--epochs 4 --resume saved --nproc {nproc} --strategy {strategy}");
            let run = sandbox.train(&format!("{flags} {more}")).ok();
            run.line("Resumed from saved: 2 epochs and 14 steps are complete");
            let losses = column(&sandbox, "loss");
            assert_eq!(losses.len(), 14);
            for (step, (got, expected)) in losses.iter().zip(&whole[14..]).enumerate() {
                // Sums over the batch in another order, in f32, as between any two world sizes.
                let off = (got - expected).abs();
                assert!(off < 1e-4, "{nproc} ranks, step {}: {got}, {expected}", step + 15);
            }
        }
        // The test can fail: a step that starts elsewhere has another loss.
        assert!((whole[14] - whole[0]).abs() > 1e-2, "{whole:?}");
        let batch = flags.replace("--global-batch-size 32", "--batch-size 16");
        let words = ["--global-batch-size 32", "this run has 64", "pass the same"];
        sandbox.train(&format!("{batch} --epochs 4 --resume saved --nproc 4")).refused(&words);
    }
}

/// A command that a scheduler would repeat: the ranks are started by a launcher that is not that of
/// training, so each resolves its flags by itself.
fn under_a_launcher(sandbox: &Sandbox, flags: &str) -> Command {
    let mut command = sandbox.paceline();
    command.args(["launch", "-n", "2", "--", env!("CARGO_BIN_EXE_paceline"), "train"]);
    command.args(flags.split_whitespace()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

#[test]
fn one_command_begins_and_goes_on() {
    let flags = format!("{TINY} --global-batch-size 50 --lr-schedule cosine --lr-warmup-steps 30");
    let flags = format!("{flags} --optimizer adamw --clip-grad-norm 0.5 --epochs 100");
    let expected = Sandbox::new();
    let weights = expected.train(&format!("{flags} --nproc 2")).ok().weights().to_owned();

    let sandbox = Sandbox::new();
    let flags = format!("{flags} --save saved --resume auto");
    // What a run leaves that is killed while it writes its first checkpoint is none.
    sandbox.write("saved/checkpoint.safetensors.partial", b"half of");
    let begin = std::time::Instant::now();
    let child = under_a_launcher(&sandbox, &flags).spawn().unwrap();
    wait_until("a checkpoint", || sandbox.path("saved/checkpoint.safetensors").exists());
    signal(child.id(), rustix::process::Signal::KILL);
    let killed = Run::wait(child, begin);
    assert_ne!(killed.code, Some(0));
    assert!(killed.stdout.contains("No checkpoint in saved yet: training starts anew"));

    let rest = Run::of(under_a_launcher(&sandbox, &flags)).ok();
    assert_eq!(rest.line("Weights: sha256 "), weights);
    let resumed = rest.line("Resumed from saved: ");
    let epochs: u64 = resumed.split(' ').next().unwrap().parse().unwrap();
    assert!((1..100).contains(&epochs), "it was killed on its way: {resumed}");
    // Its learning rates go on where the other one's ended.
    assert_eq!(column(&sandbox, "lr"), column(&expected, "lr"));

    // Once more: there is nothing left to do, which is no mistake.
    let again = Run::of(under_a_launcher(&sandbox, &format!("{flags} --evaluate"))).ok();
    assert_eq!(again.line("Resumed from saved: "), "all 100 epochs are complete already");
    assert_eq!(again.line("Weights: sha256 "), weights);
    assert!(again.line("Evaluation loss: ").ends_with(", over 50 samples"));
}

#[test]
fn our_own_launcher_decides_the_same() {
    for transport in ["thread", "shm"] {
        let flags = format!("{TINY} --global-batch-size 50 --nproc 2 --transport {transport}");
        let sandbox = Sandbox::new();
        let auto = |epochs: usize| {
            let more = format!("--epochs {epochs} --save saved --resume auto");
            sandbox.train(&format!("{flags} {more}")).ok()
        };
        auto(1).line("No checkpoint in saved yet: training starts anew");
        let rest = auto(3);
        rest.line("Resumed from saved: 1 epoch and 4 steps are complete");
        let whole = Sandbox::new().train(&format!("{flags} --epochs 3")).ok();
        assert_eq!(rest.weights(), whole.weights());
    }
}

#[test]
fn rank_0_decides_for_ranks_that_see_other_folders() {
    let flags = format!("{TINY} --global-batch-size 50 --epochs 2 --save saved --resume auto");
    // Two hosts without a shared folder, in effect.
    let hosts = [Sandbox::new(), Sandbox::new()];
    let together = || {
        let meet = hosts[0].path("meet");
        let start = |rank: usize| {
            let mut command = hosts[rank].paceline();
            command.arg("train").args(flags.split_whitespace());
            command.arg("--init-method").arg(format!("file://{}", meet.display()));
            command.env("RANK", rank.to_string()).env("WORLD_SIZE", "2");
            command.stdout(Stdio::piped()).stderr(Stdio::piped());
            command.spawn().unwrap()
        };
        let begin = std::time::Instant::now();
        [0, 1].map(start).map(|child| Run::wait(child, begin))
    };
    // Checkpoints of one epoch that differ in nothing but the weights.
    let save = |host: &Sandbox, lr: &str| {
        let flags = flags.replace("--epochs 2", "--epochs 1").replace(" --resume auto", "");
        host.train(&format!("{flags} --nproc 1 --quiet --lr {lr}")).ok();
    };

    save(&hosts[1], "0.1");
    let anew = together().map(Run::ok);
    anew[0].line("No checkpoint in saved yet: ");
    assert_eq!(
        anew[0].weights(),
        Sandbox::new().train(&format!("{flags} --nproc 2")).ok().weights()
    );

    save(&hosts[0], "0.2");
    let [first, second] = together();
    assert_eq!((first.code, second.code), (Some(3), Some(1)), "{first:#?} {second:#?}");
    let words = "rank 1 finds another checkpoint there than rank 0";
    assert!(second.stderr.contains(words), "{second:#?}");

    fs::remove_dir_all(hosts[1].path("saved")).unwrap();
    let [_, second] = together();
    assert_eq!(second.code, Some(2), "{second:#?}");
    assert!(second.stderr.contains("--resume auto (--save saved)"), "{second:#?}");
}
