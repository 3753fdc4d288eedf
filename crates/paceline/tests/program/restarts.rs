//! `--max-restarts`: after a failure all ranks are started again, and a training run goes on where it stands.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use crate::common::marked::Marked;
use crate::common::{Run, Sandbox, TINY, metrics, signal, wait_until};
use rustix::process::Signal;
use serde_json::Value;

/// The launcher's own lines.
fn verdicts(run: &Run) -> Vec<&str> {
    run.stderr.lines().filter_map(|line| line.strip_prefix("paceline: ")).collect()
}

#[test]
fn all_ranks_are_started_again_and_meet_elsewhere() {
    let sandbox = Sandbox::new();
    let script = "echo $TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS, at $MASTER_PORT $PACELINE_SECRET; \
                  test $RANK = 1 && test $TORCHELASTIC_RESTART_COUNT -lt 2 && exit 7; \
                  test $TORCHELASTIC_RESTART_COUNT = 2 || sleep 1000";
    let run = sandbox.launch(&["-n", "3", "--max-restarts", "5", "--", "sh", "-c", script]).ok();
    let said = verdicts(&run);
    assert_eq!(said.len(), 4, "{run:#?}");
    for restart in 0..2 {
        assert!(said[2 * restart].starts_with("rank 1 (process "), "{run:#?}");
        assert!(said[2 * restart].contains("exited with code 7"), "{run:#?}");
        assert_eq!(said[2 * restart + 1], format!("restart {} of 5", restart + 1));
    }
    let run = run.without_ranks();
    let lines: BTreeSet<&str> = run.stdout.lines().collect();
    // The ranks of an attempt have the same secret; another attempt has another.
    let secrets: BTreeSet<&str> =
        lines.iter().map(|line| line.rsplit_once(' ').unwrap().1).collect();
    assert_eq!((lines.len(), secrets.len()), (3, 3), "{run:#?}");
    for (restart, line) in lines.iter().enumerate() {
        assert!(line.starts_with(&format!("{restart} of 5, at ")), "{run:#?}");
    }
    assert_eq!(run.stdout.lines().filter(|line| line.starts_with("2 of 5")).count(), 3);
    assert_eq!(sandbox.contents(), [""; 0]);
}

#[test]
fn when_all_restarts_are_used_up_the_code_is_that_of_the_last_attempt() {
    let script = "exit $((40 + TORCHELASTIC_RESTART_COUNT))";
    let run = Sandbox::new().launch(&["-n", "2", "--max_restarts", "2", "--", "sh", "-c", script]);
    assert_eq!(run.code, Some(42), "{run:#?}");
    let restarts: Vec<&str> =
        verdicts(&run).into_iter().filter(|line| line.starts_with("restart")).collect();
    assert_eq!(restarts, ["restart 1 of 2", "restart 2 of 2"]);
}

#[test]
fn the_dumps_of_the_last_attempts_are_kept_and_listed() {
    let sandbox = Sandbox::new();
    let script = "echo '{}' > $PACELINE_DUMP_FOLDER/world-rank$RANK.jsonl; exit 7";
    let mut command = sandbox.given("launch -n 1 --max-restarts 6 -- sh -c");
    command.arg(script).env("TMPDIR", sandbox.path(""));
    let run = Run::of(command);
    assert_eq!(run.code, Some(7), "{run:#?}");
    let (_, listed) = run.stderr.split_once("of the last 4 attempts that failed are in:").unwrap();
    let listed: BTreeSet<PathBuf> = listed.lines().skip(1).map(|line| line.trim().into()).collect();
    let left = fs::read_dir(sandbox.path("")).unwrap().map(|entry| entry.unwrap().path());
    assert_eq!(left.collect::<BTreeSet<PathBuf>>(), listed);
    assert_eq!(listed.len(), 4, "{run:#?}");
}

#[test]
fn a_mistake_in_the_command_line_is_not_repeated() {
    let run =
        Sandbox::new().launch(&["-n", "2", "--max-restarts", "2", "--", "sh", "-c", "exit 2"]);
    assert_eq!(run.code, Some(2), "{run:#?}");
    assert!(!run.stderr.contains("restart"), "{run:#?}");
}

#[test]
fn an_attempt_begins_when_no_rank_of_the_one_before_is_left() {
    let sandbox = Sandbox::new();
    // The first rank 0 takes no signal but SIGKILL. Its successor looks for it.
    let script = "case $RANK$TORCHELASTIC_RESTART_COUNT in \
                  00) trap '' TERM; echo $$ > old.new; mv old.new old; sleep 1000; sleep 1000;; \
                  10) while ! test -e old; do sleep 0.02; done; exit 7;; \
                  01) kill -0 $(cat old) 2>/dev/null && echo still there; echo looked;; \
                  esac";
    let run = Marked::launch_with(&sandbox, &["--max-restarts", "1"], 2, script).end().ok();
    assert_eq!(run.stdout, "[rank 0] looked\n", "{run:#?}");
}

#[test]
fn a_user_who_wants_an_end_gets_one() {
    for (sent, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let sandbox = Sandbox::new();
        // Ranks that fail when they are asked to end.
        let script = "trap 'exit 9' TERM; sleep 1000 & wait";
        let mut launcher = Marked::launch_with(&sandbox, &["--max-restarts", "3"], 2, script);
        launcher.wait_for("sleep 1000", 2);
        signal(launcher.pid(), sent);
        let run = launcher.end();
        assert_eq!(run.code, Some(code), "{run:#?}");
        assert!(!run.stderr.contains("restart"), "{run:#?}");
        launcher.left_nothing();
    }
}

#[test]
fn logs_of_all_attempts_are_kept() {
    let sandbox = Sandbox::new();
    let script = "echo attempt $TORCHELASTIC_RESTART_COUNT; exit 7";
    let args = ["-n", "1", "--max-restarts", "1", "--log-dir", "logs", "--", "sh", "-c", script];
    for _ in 0..2 {
        // A new launch begins a new log.
        assert_eq!(sandbox.launch(&args).code, Some(7));
        let log = fs::read_to_string(sandbox.path("logs/rank_0.log")).unwrap();
        assert_eq!(log, "attempt 0\npaceline: restart 1 of 1\nattempt 1\n");
    }
}

/// Flags of a run of 120 steps. Every operation takes 30 ms, so the run takes seconds. The link is slow enough for a
/// busy machine.
fn slow(saving: &str) -> String {
    format!("{} {saving} --link 100mbit,10ms --max-restarts 3", quick())
}

/// The same run on a fast link, which changes no weights.
fn quick() -> String {
    format!("{TINY} --global-batch-size 50 --epochs 30 --optimizer adamw --lr-schedule cosine")
}

/// Kills a rank of the first attempt once `is_time`, and returns what the launcher has said at its end.
#[track_caller]
fn kill_rank(
    sandbox: &Sandbox,
    flags: &str,
    rank: usize,
    what: &str,
    is_time: impl Fn() -> bool,
) -> Run {
    let mut launcher = Marked::train(sandbox, flags);
    wait_until(what, is_time);
    let pid = launcher.rank(rank);
    signal(pid, Signal::KILL);
    let run = launcher.end().ok();
    launcher.left_nothing();
    let killed = format!("rank {rank} (process {pid}) was killed by SIGKILL");
    let said = verdicts(&run);
    assert!(said.iter().any(|line| line.starts_with(&killed)), "{run:#?}");
    assert_eq!(said.iter().filter(|line| line.starts_with("restart")).count(), 1, "{run:#?}");
    assert!(said.contains(&"restart 1 of 3"), "{run:#?}");
    run
}

/// The run folders, in the order in which they were made.
fn folders(sandbox: &Sandbox) -> Vec<PathBuf> {
    let mut folders: Vec<_> =
        fs::read_dir(sandbox.path("runs")).unwrap().map(|entry| entry.unwrap().path()).collect();
    // The second folder of a second has a number after its name.
    folders
        .sort_by_key(|folder| folder.join("config.json").metadata().unwrap().modified().unwrap());
    folders
}

/// Whether the ranks have met: rank 0 then begins the list of steps.
fn has_begun(sandbox: &Sandbox) -> bool {
    let folders = fs::read_dir(sandbox.path("runs")).into_iter().flatten();
    folders.flatten().any(|folder| folder.path().join("metrics.jsonl").exists())
}

/// The numbers of the steps in a run folder. A killed rank 0 may leave half a line.
pub fn steps(folder: &Path) -> Vec<u64> {
    let text = fs::read_to_string(folder.join("metrics.jsonl")).unwrap();
    let whole = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
    whole
        .map(|line| serde_json::from_str::<Value>(line).unwrap())
        // Not those of saves.
        .filter(|line| line.get("loss").is_some())
        .map(|line| line["step"].as_u64().unwrap())
        .collect()
}

#[test]
fn training_goes_on_from_the_last_checkpoint_to_the_same_bits() {
    let whole = Sandbox::new();
    let expected = whole.train(&format!("{} --nproc 2", quick())).ok();
    let expected = expected.weights();
    std::thread::scope(|scope| {
        for victim in [1, 0] {
            scope.spawn(move || goes_on_without(victim, expected));
        }
    });
}

/// Both ranks go on from the last checkpoint after one of them has been killed.
fn goes_on_without(victim: usize, expected: &str) {
    let sandbox = Sandbox::new();
    let flags = format!("{} --nproc 2", slow("--save saved --save-every 3"));
    let checkpoint = sandbox.path("saved/latest");
    let run = kill_rank(&sandbox, &flags, victim, "a checkpoint", || checkpoint.exists());
    assert_eq!(run.weights(), expected);
    let resumed = run.line("Resumed from saved: ");
    assert!(resumed.ends_with("no sample is repeated or skipped"), "{resumed}");
    // Each attempt has a run folder. The second begins at the checkpoint, and is complete.
    let folders = folders(&sandbox);
    let [first, second] = &folders[..] else { panic!("{folders:?}") };
    let (before, after) = (steps(first), steps(second));
    assert_eq!(before[0], 1);
    assert!(after[0] > 1 && after[0] <= before.len() as u64 + 1, "{before:?} {after:?}");
    assert_eq!(after, (after[0]..=120).collect::<Vec<u64>>());
    let lines = metrics(second);
    let num_saves = lines.iter().filter(|line| line.get("save_s").is_some()).count();
    assert_eq!(lines.len(), after.len() + num_saves);
    assert!(second.join("summary.json").exists() && !first.join("summary.json").exists());
    // The last operations of the other rank are still there.
    assert!(first.join(format!("world-rank{}.jsonl", 1 - victim)).exists());
}

#[test]
fn a_run_without_a_checkpoint_begins_anew() {
    let expected = Sandbox::new().train(&format!("{} --nproc 2", quick())).ok();
    let sandbox = Sandbox::new();
    let flags = format!("{} --nproc 2", slow("--save saved --save-every 100000"));
    let run = kill_rank(&sandbox, &flags, 1, "the first attempt", || has_begun(&sandbox));
    run.line("No checkpoint in saved yet: training starts from the beginning");
    assert_eq!(run.weights(), expected.weights());
    assert_eq!(steps(&folders(&sandbox)[1]), (1..=120).collect::<Vec<u64>>());
}

#[test]
fn a_run_that_began_at_a_checkpoint_of_another_one_begins_there_again() {
    let sandbox = Sandbox::new();
    let steps_of_first = quick().replace("--epochs 30", "--steps 10") + " --lr-steps 120";
    sandbox.train(&format!("{steps_of_first} --nproc 2 --save other")).ok();
    let more = "--lr-steps 120 --resume other --nproc 2";
    let whole = Sandbox::new();
    let expected = whole.train(&format!("{} --nproc 2", quick())).ok();
    fs::remove_dir_all(sandbox.path("runs")).unwrap();
    let flags = format!("{} {more}", slow("--save saved --save-every 100000"));
    let run = kill_rank(&sandbox, &flags, 0, "the first attempt", || has_begun(&sandbox));
    assert_eq!(run.weights(), expected.weights());
    assert_eq!(steps(&folders(&sandbox)[1]), (11..=120).collect::<Vec<u64>>());
}

#[test]
fn a_single_rank_is_restarted_too() {
    // A link slows down nothing on one rank, so the run is longer. It saves after every step.
    let long = quick().replace("--epochs 30", "--epochs 150");
    let expected = Sandbox::new().train(&format!("{long} --nproc 1")).ok();
    let sandbox = Sandbox::new();
    let flags = format!("{long} --nproc 1 --save saved --save-every 1 --max-restarts 3");
    let checkpoint = sandbox.path("saved/latest");
    let run = kill_rank(&sandbox, &flags, 0, "a checkpoint", || checkpoint.exists());
    run.line("Resumed from saved: ");
    assert_eq!(run.weights(), expected.weights());
}

#[test]
fn what_cannot_be_restarted_is_refused() {
    let sandbox = Sandbox::new();
    let ranks = [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_PORT", "29400")];
    let flags = format!("{TINY} --max-restarts 2 --save s");
    sandbox.train_with(&flags, &ranks).refused(&["--max-restarts", "another launcher"]);
    // A restart would go on from this checkpoint before its own run has written one.
    sandbox.train(&format!("{TINY} --nproc 1 --epochs 1 --save s")).ok();
    let holds = ["--save s: s holds a checkpoint", "--resume auto"];
    sandbox.train(&flags).refused(&holds);
    sandbox
        .train(&format!("{flags} --nproc 2 --epochs 2 --resume auto --global-batch-size 64"))
        .ok();
}
