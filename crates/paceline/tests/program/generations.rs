//! `train --elastic`: ranks are killed and others join. Every step is made once, and the result has the bits of a run that nobody has
//! disturbed.

use std::fs;
use std::path::Path;

use rustix::process::Signal;
use serde_json::Value;

use crate::common::marked::Marked;
use crate::common::{Run, Sandbox, free_port, metrics, signal, wait_until};
use crate::restarts::steps;

const STEPS: u64 = 60;

/// The flags of all runs. Samples take time to decode, so that there is time to disturb.
fn flags(others: &str) -> String {
    format!(
        "--channels 4 --hidden 8 --samples 320 --global-batch-size 32 --micro-batch-size 8 --steps {STEPS} --optimizer adamw \
         --decode-us 1000 --run-dir runs {others}"
    )
}

fn expected() -> String {
    expected_with("")
}

fn expected_with(others: &str) -> String {
    let quick = flags(&format!("--nproc 1 {others}")).replace("--decode-us 1000", "");
    Sandbox::new().train(&quick).ok().weights().to_owned()
}

fn has_steps(sandbox: &Sandbox, count: u64) -> bool {
    let Some(folder) = folder(sandbox) else { return false };
    folder.join("metrics.jsonl").exists() && steps(&folder).last() >= Some(&count)
}

fn folder(sandbox: &Sandbox) -> Option<std::path::PathBuf> {
    let mut folders = fs::read_dir(sandbox.path("runs")).ok()?;
    folders.next().map(|entry| entry.unwrap().path())
}

/// The changes of the ranks, as rank 0 saw them.
fn changes(folder: &Path) -> Vec<Value> {
    metrics(folder).into_iter().filter(|line| line.get("regroup_s").is_some()).collect()
}

/// Waits for a run, whose steps must all have been made, once.
fn complete(launcher: &mut Marked, sandbox: &Sandbox, expected: &str) -> Run {
    let run = launcher.end().ok();
    assert_eq!(run.weights(), expected, "{run:#?}");
    assert_eq!(steps(&sandbox.run_folder()), (1..=STEPS).collect::<Vec<u64>>(), "{run:#?}");
    run
}

/// Kills two ranks of three or four, one after the other, of a run in which others replace them.
fn with_deaths(others: &str, expected: &str) {
    let sandbox = Sandbox::new();
    let mut launcher = Marked::train(&sandbox, &flags(&format!("{others} --max-restarts 2")));
    for (count, victim) in [(3, 0), (20, 2)] {
        wait_until("some steps", || has_steps(&sandbox, count));
        signal(launcher.rank(victim), Signal::KILL);
    }
    let run = complete(&mut launcher, &sandbox, expected);
    run.says(&["was killed by SIGKILL", "replacement 2 of 2"]);
    let lost: Vec<u64> = changes(&sandbox.run_folder())
        .iter()
        .flat_map(|change| change["lost"].as_array().unwrap().clone())
        .map(|number| number.as_u64().unwrap())
        .collect();
    assert!(lost.contains(&0) && lost.contains(&2), "{lost:?}: {run:#?}");
}

#[test]
fn ranks_die_and_are_replaced_and_the_bits_stay() {
    let expected = expected();
    for others in [
        "--nproc 3 --elastic 1:3",
        "--nproc 3 --elastic 1:3 --transport tcp --strategy sharded3 --replicate-shards 2",
        "--nproc 4 --elastic 2:4 --mesh pp=2,dp=2 --schedule 1f1b",
    ] {
        with_deaths(others, &expected);
    }
    // Running statistics are taken back to those of the last step.
    with_deaths("--nproc 3 --elastic 1:3 --batch-norm", &expected_with("--batch-norm"));
}

#[test]
fn a_process_joins_with_the_same_flags_only() {
    let (expected, sandbox, port) = (expected(), Sandbox::new(), free_port());
    let own =
        format!("--nproc 2 --elastic 1:3 --nnodes 1 --master-addr 127.0.0.1 --master-port {port}");
    let mut command = sandbox.given(&format!("train {}", flags(&own)));
    command.env("PACELINE_SECRET", "of this run");
    let mut launcher = Marked::start(command);
    wait_until("some steps", || has_steps(&sandbox, 3));
    let other = Sandbox::new();
    let join = |words: &str, secret: &str| {
        let joins = flags(&format!("--join 127.0.0.1:{port} {words}"));
        let mut command = other.given(&format!("train {joins}"));
        command.env("PACELINE_SECRET", secret);
        Run::of(command)
    };
    join("--lr 0.5", "of this run").ended_with(2, &["the run has the settings", "--lr=0.5"]);
    join("--save here", "of this run").ended_with(2, &["the run has the settings", "--save=DIR"]);
    join("", "of another").ended_with(2, &["--join", "PACELINE_SECRET"]);
    join("", "of this run").ok();
    assert_eq!(other.contents(), [""; 0], "a member that is not rank 0 writes nothing");
    complete(&mut launcher, &sandbox, &expected);
    let changes = changes(&sandbox.run_folder());
    assert_eq!((&changes[0]["joined"][0], &changes[0]["members"]), (&2.into(), &3.into()));
}

#[test]
fn lost_state_comes_from_a_checkpoint_or_ends_the_run() {
    let sandbox = Sandbox::new();
    // A replacement would find no state either.
    let loses = "--nproc 2 --elastic 1:2 --strategy sharded3 --max-restarts 9";
    let mut launcher = Marked::train(&sandbox, &flags(loses));
    wait_until("some steps", || has_steps(&sandbox, 3));
    signal(launcher.rank(1), Signal::KILL);
    let run = launcher.end();
    assert_eq!(run.code, Some(1), "{run:#?}");
    run.says(&[
        "the run cannot go on",
        "has the whole state of the run; pass",
        "--replicate-shards 2",
        "--save DIR",
    ]);

    let (expected, sandbox) = (expected(), Sandbox::new());
    let saves = "--nproc 2 --elastic 1:2 --strategy sharded3 --save saved --save-every 5";
    let mut launcher = Marked::train(&sandbox, &flags(saves));
    wait_until("a checkpoint", || sandbox.path("saved/latest").exists());
    lose_one(&sandbox, &mut launcher, &expected);
    // Without one, it begins again: at first at the first weights, then where `--resume` says, which also states the other flags.
    let none = flags("--nproc 2 --elastic 1:2 --strategy sharded3 --save none --save-every 50");
    let begun = flags("--nproc 1 --save begun").replace(&format!("--steps {STEPS}"), "--steps 4");
    for (before, words) in [
        ("", none),
        (
            &begun[..],
            format!(
                "--resume begun --save other --save-every 50 --steps {STEPS} --nproc 2 --elastic 1:2 --strategy sharded3 \
                 --decode-us 1000 --run-dir runs"
            ),
        ),
    ] {
        let sandbox = Sandbox::new();
        if !before.is_empty() {
            sandbox.train(before).ok();
            fs::remove_dir_all(sandbox.path("runs")).unwrap();
        }
        let mut launcher = Marked::train(&sandbox, &words);
        wait_until("some steps", || has_steps(&sandbox, 7));
        lose_one(&sandbox, &mut launcher, &expected);
    }
}

/// Kills a rank whose shard no other has.
fn lose_one(sandbox: &Sandbox, launcher: &mut Marked, expected: &str) {
    signal(launcher.rank(1), Signal::KILL);
    let run = launcher.end().ok();
    assert_eq!(run.weights(), expected, "{run:#?}");
    assert_eq!(changes(&sandbox.run_folder()).len(), 1, "{run:#?}");
}

#[test]
fn an_evaluation_that_is_repeated_counts_once() {
    let flags = |ranks: &str| {
        format!(
            "--model llama --layers 2 --width 32 --heads 2 --intermediate 32 --vocab 258 --data text --data-dir texts --tokenizer bytes \
             --seq-len 32 --test-samples 4 --global-batch-size 8 --micro-batch-size 2 --steps 12 --optimizer adamw --eval-every 4 \
             --early-stop 1 --sample-every 4 --run-dir runs {ranks}"
        )
    };
    let with_texts = || {
        let sandbox = Sandbox::new();
        fs::create_dir(sandbox.path("texts")).unwrap();
        let text = "Each step is made once, and each evaluation counts once.\n".repeat(200);
        fs::write(sandbox.path("texts/train.txt"), text).unwrap();
        sandbox
    };
    let alone = with_texts().train(&flags("--nproc 1")).ok();
    let sandbox = with_texts();
    let elastic = "--nproc 3 --elastic 1:3 --strategy sharded3 --replicate-shards 2";
    let mut launcher = Marked::train(&sandbox, &flags(elastic));
    wait_until("an evaluation", || {
        let file = folder(&sandbox).map(|folder| fs::read_to_string(folder.join("metrics.jsonl")));
        file.is_some_and(|text| text.is_ok_and(|text| text.contains("eval_loss")))
    });
    // The ranks now make a text together.
    signal(launcher.rank(2), Signal::KILL);
    let run = launcher.end().ok();
    assert_eq!(run.weights(), alone.weights(), "{run:#?}");
}

#[test]
fn what_cannot_be_elastic_is_refused() {
    let sandbox = Sandbox::new();
    for (words, said) in [
        ("--elastic 1:2 --nproc 2", ["--elastic", "--micro-batch-size"]),
        (
            "--elastic 3:3 --nproc 3 --global-batch-size 16 --micro-batch-size 8",
            ["a global batch of 16", "3 ranks"],
        ),
        (
            "--elastic 1:2 --nproc 2 --global-batch-size 16 --micro-batch-size 8 --steps 40 --profile",
            ["--elastic, --profile", "leave one of them out"],
        ),
    ] {
        sandbox.run(&format!("train --channels 4 --hidden 8 --samples 64 {words}")).refused(&said);
    }
    assert_eq!(sandbox.contents(), [""; 0]);
}
