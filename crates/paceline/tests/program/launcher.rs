//! The launcher: what it tells its ranks, and that all ranks end together, however a run ends.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::common::marked::{Marked, names_only_rank};
use crate::common::{Run, Sandbox, TINY, signal, wait_until};
use rustix::process::Signal;

// The ranks of these tests would run for many minutes. If a rank ends before the limit, the launcher ended it.

/// A program whose child would live on if only the program itself were stopped.
const SLEEP_WITH_CHILD: &str = "sleep 1000 & wait";

#[test]
fn too_few_files_for_all_ranks_are_told() {
    let sandbox = Sandbox::new();
    let mut command = sandbox.command("prlimit".as_ref());
    let program = env!("CARGO_BIN_EXE_paceline");
    command.args(["--nofile=40:40", "--", program, "launch", "-n", "60", "--", "sleep", "1000"]);
    let run = Run::of(command);
    run.ended_with(
        1,
        &["error: cannot start rank ", "; pass fewer --nproc, or allow more files with ulimit -n"],
    );
}

#[test]
fn ranks_are_told_their_place() {
    let sandbox = Sandbox::new();
    let script = "echo rank $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE, \
                  at $MASTER_ADDR $MASTER_PORT, $1; echo aside >&2";
    let run = sandbox.launch(&["-n", "3", "--", "sh", "-c", script, "sh", "two words"]).ok();
    for rank in 0..3 {
        let line = format!("[rank {rank}] rank {rank} of 3");
        assert!(run.stdout.contains(&line), "no {line:?} in {}", run.stdout);
    }
    let run = run.without_ranks();
    let lines: BTreeSet<&str> = run.stdout.lines().collect();
    let port = run.stdout.split_once("127.0.0.1 ").and_then(|(_, rest)| rest.split_once(','));
    let port = port.unwrap_or_else(|| panic!("{}", run.stdout)).0;
    assert!(port.parse::<u16>().is_ok_and(|port| port > 0), "{port:?} in {}", run.stdout);
    let expected: Vec<String> = (0..3)
        .map(|rank| format!("rank {rank} of 3, {rank} of 3, at 127.0.0.1 {port}, two words"))
        .collect();
    assert_eq!(lines, expected.iter().map(String::as_str).collect());
    for rank in 0..3 {
        assert!(run.stderr.contains(&format!("[rank {rank}] aside\n")), "{}", run.stderr);
    }
    assert_eq!(sandbox.contents(), [""; 0]);
}

#[test]
fn two_ranks_without_a_number_or_one_on_a_single_core() {
    let num_ranks = std::thread::available_parallelism().map_or(1, usize::from).min(2);
    let run = Sandbox::new().launch(&["--", "sh", "-c", "echo $WORLD_SIZE"]).ok().without_ranks();
    assert_eq!(run.stdout, format!("{num_ranks}\n").repeat(num_ranks));
}

#[test]
fn all_that_ranks_print_is_passed_on() {
    // The launcher once ended with its last rank, and lost output.
    let sandbox = Sandbox::new();
    let run = sandbox.launch(&["-n", "4", "--", "seq", "20000"]).ok().without_ranks();
    assert_eq!(run.stdout.lines().count(), 4 * 20000);
    assert_eq!(run.stdout.lines().filter(|line| *line == "20000").count(), 4);
}

#[test]
fn a_slow_reader_gets_everything() {
    let sandbox = Sandbox::new();
    let mut launcher = Marked::start(sandbox.given("launch -n 1 -- seq 50000"));
    // This is longer than the launcher waits for output that no one writes.
    std::thread::sleep(Duration::from_millis(1500));
    let run = launcher.end().ok();
    assert_eq!(run.stdout.lines().count(), 50000);
}

#[test]
fn a_daemon_that_keeps_the_output_open_is_waited_for_until_the_grace_is_over() {
    let sandbox = Sandbox::new();
    let script = "setsid sleep 1000 & echo done";
    let mut launcher = Marked::launch_with(&sandbox, &["--grace", "1.1"], 1, script);
    let run = launcher.end();
    assert_eq!((run.code, run.stdout.as_str()), (Some(0), "[rank 0] done\n"), "{run:#?}");
    assert!(run.stderr.contains("what they have started has 1.1 s to end too"), "{run:#?}");
    launcher.left_nothing();
}

#[test]
fn what_a_rank_has_started_may_print_after_the_rank_has_ended_well() {
    let sandbox = Sandbox::new();
    let script = "(while kill -0 $$; do sleep 0.01; done 2>/dev/null; echo late) & echo early";
    let run = sandbox.launch(&["-n", "2", "--", "sh", "-c", script]).ok().without_ranks();
    assert_eq!(run.stdout.matches("early\n").count(), 2, "{run:#?}");
    assert_eq!(run.stdout.matches("late\n").count(), 2, "{run:#?}");
}

#[test]
fn a_rank_that_fails_ends_the_others_and_is_named() {
    let sandbox = Sandbox::new();
    // After the reason, the script writes more lines to standard output than the launcher repeats.
    let script = format!(
        "if [ $RANK = 1 ]; then sleep 0.3; echo the reason >&2; for i in 1 2 3 4 5 6 7 8 9 10 11 12; \
         do echo line $i; done; exit 7; fi; {SLEEP_WITH_CHILD}"
    );
    let mut launcher = Marked::launch(&sandbox, 3, &script);
    let run = launcher.end();
    assert_eq!(run.code, Some(7), "{run:#?}");
    names_only_rank(&run, 1, "exited with code 7");
    let (_, repeated) = run.stderr.split_once("its last lines:\n").unwrap();
    let repeated: Vec<&str> = repeated.lines().map(str::trim).collect();
    let mut expected: Vec<String> = (3..=12).map(|i| format!("line {i}")).collect();
    expected.push("the reason".into());
    assert_eq!(repeated, expected);
    assert!(run.stdout.contains("line 1\n"), "{}", run.stdout);
    launcher.left_nothing();
    assert_eq!(sandbox.contents(), [""; 0]);
}

#[test]
fn a_rank_that_is_killed_is_named_with_its_signal() {
    for (name, code) in [("KILL", 137), ("SEGV", 139)] {
        let sandbox = Sandbox::new();
        let script =
            format!("if [ $RANK = 2 ]; then sleep 0.3; kill -{name} $$; fi; {SLEEP_WITH_CHILD}");
        let mut launcher = Marked::launch(&sandbox, 3, &script);
        let run = launcher.end();
        assert_eq!(run.code, Some(code), "{run:#?}");
        names_only_rank(&run, 2, &format!("was killed by SIG{name}"));
        launcher.left_nothing();
    }
}

#[test]
fn what_a_rank_leaves_behind_is_ended_when_it_ends_well() {
    let sandbox = Sandbox::new();
    for script in ["sleep 1000 >/dev/null 2>&1 &", "setsid sleep 1000 >/dev/null 2>&1 &"] {
        let mut launcher = Marked::launch_with(&sandbox, &["--grace", "0.2"], 2, script);
        assert_eq!(launcher.end().code, Some(0));
        launcher.left_nothing();
    }
}

#[test]
fn what_left_the_group_of_its_rank_is_ended_when_a_rank_fails() {
    let sandbox = Sandbox::new();
    let script = "setsid sleep 1000 >/dev/null 2>&1 & test $RANK = 0 || exit 7; sleep 1000";
    let mut launcher = Marked::launch(&sandbox, 2, script);
    let run = launcher.end();
    assert_eq!(run.code, Some(7), "{run:#?}");
    launcher.left_nothing();
}

#[test]
fn what_has_left_its_rank_is_reaped_while_the_rank_runs() {
    let sandbox = Sandbox::new();
    // Each child of the subshells outlives its parent. A process that is not reaped keeps its number.
    let script = "for i in 1 2 3; do (sh -c 'echo $$ >> pids; sleep 0.05' &); done; sleep 1000";
    let mut launcher = Marked::launch(&sandbox, 1, script);
    wait_until("three orphans that are gone", || {
        let pids = fs::read_to_string(sandbox.path("pids")).unwrap_or_default();
        let is_gone = |pid: &str| !Path::new("/proc").join(pid).exists();
        pids.lines().count() == 3 && pids.lines().all(is_gone)
    });
    signal(launcher.pid(), Signal::TERM);
    assert_eq!(launcher.end().code, Some(143));
    launcher.left_nothing();
}

#[test]
fn signals_to_the_launcher_end_all_ranks() {
    for (sent, name, code) in [(Signal::INT, "SIGINT", 130), (Signal::TERM, "SIGTERM", 143)] {
        let sandbox = Sandbox::new();
        let mut launcher = Marked::launch(&sandbox, 3, SLEEP_WITH_CHILD);
        launcher.wait_for("sleep 1000", 3);
        signal(launcher.pid(), sent);
        let run = launcher.end();
        assert_eq!(run.code, Some(code), "{run:#?}");
        assert!(run.stderr.contains(&format!("{name}; all ranks have ended")), "{run:#?}");
        launcher.left_nothing();
        assert_eq!(sandbox.contents(), [""; 0]);
    }
}

#[test]
fn ranks_that_will_not_listen_are_ended_too() {
    let sandbox = Sandbox::new();
    let script = "trap '' TERM INT HUP; sleep 1000; sleep 1000";
    let mut launcher = Marked::launch_with(&sandbox, &["--grace", "5"], 2, script);
    launcher.wait_for("sleep 1000", 2);
    signal(launcher.pid(), Signal::INT);
    assert_eq!(launcher.end().code, Some(130));
    launcher.left_nothing();
}

#[test]
fn a_killed_launcher_takes_everything_with_it() {
    let sandbox = Sandbox::new();
    let mut launcher = Marked::launch(&sandbox, 3, SLEEP_WITH_CHILD);
    launcher.wait_for("sleep 1000", 3);
    // The launcher, the guard, and three shells with a child each.
    let all = launcher.processes("");
    assert_eq!(all.len(), 8, "{all:?}");
    signal(launcher.pid(), Signal::KILL);
    launcher.left_nothing();
    assert_eq!(launcher.end().code, None);
    assert_eq!(sandbox.contents(), [""; 0]);
}

#[test]
fn a_killed_launcher_takes_its_ranks_with_it_even_without_its_guard() {
    let sandbox = Sandbox::new();
    let mut launcher = Marked::launch(&sandbox, 2, "exec sleep 1000");
    launcher.wait_for("sleep 1000", 2);
    let all = launcher.processes("");
    let guard = all.iter().find(|(_, command)| command.contains("__guard")).unwrap().0;
    signal(guard, Signal::KILL);
    wait_until("the end of the guard", || {
        !launcher.processes("").iter().any(|(_, command)| command.contains("__guard"))
    });
    signal(launcher.pid(), Signal::KILL);
    launcher.left_nothing();
    launcher.end();
}

/// Files that the shared-memory transport might have left where shared memory has names.
fn named_shared_memory() -> Vec<String> {
    let entries = fs::read_dir("/dev/shm").into_iter().flatten().filter_map(Result::ok);
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.contains("paceline")).collect()
}

/// Flags of a run that would take hours, and saves after every epoch.
fn endless() -> String {
    format!("{TINY} --nproc 3 --batch-size 10 --epochs 10000000 --save saved")
}

/// The cause in the dump of a rank that was told to end.
const ENDED_BY_LAUNCHER: &str = "\"cause\":\"ended by the launcher\"";

fn dump(folder: &Path, rank: usize) -> Option<String> {
    fs::read_to_string(folder.join(format!("world-rank{rank}.jsonl"))).ok()
}

/// Waits for a complete checkpoint, so all ranks are at work.
fn wait_for_checkpoint(sandbox: &Sandbox) {
    wait_until("a checkpoint", || sandbox.path("saved/latest").exists());
}

/// Checks that the checkpoint is complete, and that training continues from it.
#[track_caller]
fn can_be_resumed(sandbox: &Sandbox) {
    let flags = format!("{TINY} --nproc 3 --batch-size 10 --resume saved");
    let refused =
        sandbox.train(&format!("{flags} --epochs 1")).refused(&["complete epochs already"]);
    let words: Vec<&str> = refused.stderr.split_whitespace().collect();
    let at = words.iter().position(|word| *word == "complete").unwrap();
    let epochs: u64 = words[at - 1].parse().unwrap();
    let end = epochs + 1;
    let run = sandbox.train(&format!("{flags} --epochs {end}")).ok();
    run.line(&format!("Epoch {end}/{end}: "));
}

#[test]
fn a_training_rank_that_is_killed_ends_the_run_and_spares_the_checkpoint() {
    for victim in [1, 0] {
        let sandbox = Sandbox::new();
        let mut launcher = Marked::train(&sandbox, &endless());
        wait_for_checkpoint(&sandbox);
        signal(launcher.rank(victim), Signal::KILL);
        let run = launcher.end();
        assert_eq!(run.code, Some(137), "{run:#?}");
        names_only_rank(&run, victim, "was killed by SIGKILL");
        launcher.left_nothing();
        assert_eq!(named_shared_memory(), [""; 0]);
        let folder = sandbox.run_folder();
        let place =
            format!("their last operations are in {}", folder.canonicalize().unwrap().display());
        assert!(run.stderr.contains(&place), "{}", run.stderr);
        let dumps: Vec<_> = (0..3).map(|rank| dump(&folder, rank)).collect();
        for (rank, dump) in dumps.iter().enumerate() {
            let Some(dump) = dump else { continue };
            assert!(dump.contains("\"op\":\"all_reduce\""), "rank {rank}: {dump}");
            // If a rank notices the death late, the launcher's request to end comes first.
            let has_noticed = dump.contains(&format!("rank {victim} died"));
            assert!(has_noticed || dump.contains(ENDED_BY_LAUNCHER), "rank {rank}: {dump}");
        }
        assert_eq!(dumps[victim], None);
        assert_eq!(dumps.iter().flatten().count(), 2, "{dumps:?}");
        fs::remove_dir_all(sandbox.path("runs")).unwrap();
        can_be_resumed(&sandbox);
    }
}

/// A launcher whose temporary folder is `tmp` in the sandbox.
fn with_temporary_folder(sandbox: &Sandbox, args: &str) -> Command {
    fs::create_dir_all(sandbox.path("tmp")).unwrap();
    let mut command = sandbox.given(args);
    command.env("TMPDIR", sandbox.path("tmp"));
    command
}

#[test]
fn a_run_that_ends_well_leaves_nothing_among_temporary_files() {
    for args in [
        "launch -n 2 -- true",
        "launch -n 1 -- false",
        "bench all_reduce --nproc 2 -b 1K -e 1K --iters 2",
        "check --nproc 2",
    ] {
        let sandbox = Sandbox::new();
        Run::of(with_temporary_folder(&sandbox, args));
        assert_eq!(sandbox.contents(), ["tmp"], "{args}");
    }
}

#[test]
fn a_benchmark_whose_rank_is_killed_keeps_the_last_operations_of_the_others() {
    let sandbox = Sandbox::new();
    let args =
        "bench all_reduce --nproc 3 --transport shm,mpi -b 1M -e 1M --iters 1000000 -w 1000000";
    let mut launcher = Marked::start(with_temporary_folder(&sandbox, args));
    launcher.wait_for(env!("CARGO_BIN_EXE_paceline"), 5);
    // From now on every rank notices another's death.
    wait_until("all ranks to watch each other", || {
        (0..3).all(|rank| launcher.has_thread(&format!("RANK={rank}"), "peers-"))
    });
    signal(launcher.rank(1), Signal::KILL);
    let run = launcher.end();
    assert_eq!(run.code, Some(137), "{run:#?}");
    names_only_rank(&run, 1, "was killed by SIGKILL");
    // The sweep continues after it.
    run.line("# skipped all sizes over shm between 3 ranks: a rank was killed by signal 9");
    run.line("# skipped all sizes over mpi between 3 ranks: ");
    launcher.left_nothing();
    let names = sandbox.names("tmp");
    let [name] = &names[..] else { panic!("{names:?}") };
    let folder = sandbox.path("tmp").join(name);
    run.says(&[&folder.display().to_string()]);
    for rank in [0, 2] {
        let dump = dump(&folder, rank).unwrap();
        // Either the rank notices the death, or the launcher ends it. The launcher ends ranks one by one, so a rank can also
        // notice the other's end.
        let ended = format!("rank {} died", 2 - rank);
        let causes = ["rank 1 died", "ended by the launcher", &ended];
        assert!(causes.iter().any(|cause| dump.contains(cause)), "{dump}");
        assert!(dump.contains("\"op\":\"barrier\""), "{dump}");
    }
}

#[test]
fn a_training_rank_that_stops_answering_is_not_waited_for_when_interrupted() {
    let sandbox = Sandbox::new();
    let mut launcher = Marked::train(&sandbox, &format!("{} --grace 10", endless()));
    wait_for_checkpoint(&sandbox);
    signal(launcher.rank(1), Signal::STOP);
    signal(launcher.pid(), Signal::INT);
    assert_eq!(launcher.end().code, Some(130));
    launcher.left_nothing();
    // Ranks that still respond write their last operations.
    for rank in [0, 2] {
        let dump = dump(&sandbox.run_folder(), rank).unwrap();
        let has_heard = dump.contains(ENDED_BY_LAUNCHER);
        assert!(has_heard || dump.contains(&format!("rank {} died", 2 - rank)), "{dump}");
    }
    assert_eq!(dump(&sandbox.run_folder(), 1), None);
    can_be_resumed(&sandbox);
}

#[test]
fn the_training_rank_that_was_asked_to_end_is_named_and_not_one_that_ended_with_it() {
    let sandbox = Sandbox::new();
    let mut launcher = Marked::train(&sandbox, &endless());
    wait_for_checkpoint(&sandbox);
    signal(launcher.rank(1), Signal::TERM);
    let run = launcher.end();
    assert_eq!(run.code, Some(143), "{run:#?}");
    names_only_rank(&run, 1, "exited with code 143");
    can_be_resumed(&sandbox);
}

#[test]
fn a_killed_training_launcher_leaves_no_rank() {
    let sandbox = Sandbox::new();
    let mut launcher = Marked::train(&sandbox, &endless());
    wait_for_checkpoint(&sandbox);
    signal(launcher.pid(), Signal::KILL);
    launcher.left_nothing();
    launcher.end();
    assert_eq!(named_shared_memory(), [""; 0]);
    can_be_resumed(&sandbox);
}

#[test]
fn training_works_under_the_launcher_of_any_program() {
    let sandbox = Sandbox::new();
    let binary = env!("CARGO_BIN_EXE_paceline");
    let train = |more: &[&'static str]| {
        let mut args = vec!["-n", "2", "--", binary, "train"];
        args.extend(TINY.split_whitespace().chain(more.iter().copied()));
        sandbox.launch(&args)
    };
    let run = train(&[]).ok().without_ranks();
    let expected = Sandbox::new().train(&format!("{TINY} --nproc 2")).ok();
    assert_eq!(run.weights(), expected.weights());

    // Rank 0 prints the warning once, because no launcher of training could.
    let run = train(&["--steps-per-epoch", "900"]).ok();
    assert_eq!(run.stderr.matches("warning: --steps-per-epoch 900").count(), 1, "{}", run.stderr);

    let run = train(&["--nproc", "4"]);
    run.ended_with(2, &["--nproc 4 starts ranks of its own"]);
}
