//! What ranks and commands print: where it goes, and what happens if nobody takes it.

use std::collections::BTreeSet;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::common::traces::{Training, write_traces};
use crate::common::{Run, Running, Sandbox, signal};
use rustix::process::Signal;

#[test]
fn the_output_of_each_rank_goes_to_a_file_of_its_own() {
    let script = "printf 'half, '; printf 'then the rest\\r'; echo from $RANK; echo aside >&2";
    for tee in [false, true] {
        let sandbox = Sandbox::new();
        let mut words = vec!["-n", "2", "--log-dir", "logs/here"];
        words.extend(tee.then_some("--tee"));
        words.extend(["--", "sh", "-c", script]);
        let run = sandbox.launch(&words).ok();
        assert_eq!(
            sandbox.contents(),
            ["logs", "logs/here", "logs/here/rank_0.log", "logs/here/rank_1.log"]
        );
        for rank in 0..2 {
            let log = std::fs::read_to_string(sandbox.path(&format!("logs/here/rank_{rank}.log")))
                .unwrap();
            // The two streams of a rank meet in its file whole line by whole line, and a carriage return ends a line too.
            assert_eq!(log.matches("aside\n").count(), 1, "{log:?}");
            let output = log.replace("aside\n", "");
            assert_eq!(output, format!("half, then the rest\rfrom {rank}\n"), "{log:?}");
            let line = format!("[rank {rank}] from {rank}\n");
            assert_eq!(run.stdout.contains(&line), tee, "{run:?}");
            assert_eq!(run.stderr.contains(&format!("[rank {rank}] aside\n")), tee, "{run:?}");
        }
    }
}

#[test]
fn the_first_rank_reads_what_the_launcher_is_given() {
    let sandbox = Sandbox::new();
    sandbox.write("input", b"a line\n");
    let mut command = sandbox.paceline();
    command.args(["launch", "-n", "2", "--", "sh", "-c", "read line; echo $RANK got $line"]);
    command.stdin(std::fs::File::open(sandbox.path("input")).unwrap());
    let run = Run::of(command).ok().without_ranks();
    let lines: BTreeSet<&str> = run.stdout.lines().collect();
    assert_eq!(lines, ["0 got a line", "1 got"].into());
}

/// Starts ranks that print for ever, into pipes that nobody reads.
fn unread(sandbox: &Sandbox) -> Running {
    let mut command = sandbox.paceline();
    let script = "echo $$ > pid$RANK.part; mv pid$RANK.part pid$RANK; yes & yes >&2";
    command.args(["launch", "-n", "2", "--grace", "1", "--", "sh", "-c", script]);
    let mut running = Running::start(command);
    running.wait_until("both ranks", || {
        (0..2).all(|rank| sandbox.path(&format!("pid{rank}")).exists())
    });
    running
}

#[test]
fn a_reader_that_is_stuck_keeps_nobody_from_ending() {
    let sandbox = Sandbox::new();
    let running = unread(&sandbox);
    let pid = std::fs::read_to_string(sandbox.path("pid1")).unwrap();
    signal(pid.trim().parse().unwrap(), Signal::KILL);
    // Nothing is read before the launcher has ended.
    assert_eq!(running.end_unread(), Some(137));

    let sandbox = Sandbox::new();
    let running = unread(&sandbox);
    signal(running.id(), Signal::TERM);
    assert_eq!(running.end_unread(), Some(143));
}

/// A program that prints far more than a launcher keeps for a slow reader: so many lines of 300 digits.
const NUM_LINES: usize = 30_000;
const MUCH: [&str; 6] = ["-n", "2", "--", "seq", "-f%0300g", "30000"];

#[test]
fn a_reader_that_lags_behind_gets_every_line() {
    let sandbox = Sandbox::new();
    let mut command = sandbox.paceline();
    command.arg("launch").args(MUCH);
    let running = Running::start(command);
    // By now the launcher has all that it can keep.
    std::thread::sleep(Duration::from_secs(1));
    let run = running.end().ok();
    for rank in 0..2 {
        let start = format!("[rank {rank}] ");
        let numbers = run.stdout.lines().filter_map(|line| line.strip_prefix(&start));
        let numbers: Vec<usize> = numbers.map(|number| number.parse().unwrap()).collect();
        assert_eq!(numbers, (1..=NUM_LINES).collect::<Vec<_>>());
    }
}

#[test]
fn lines_that_nobody_reads_are_counted_and_no_success() {
    let sandbox = Sandbox::new();
    let mut command = sandbox.command("sh".as_ref());
    command.args(["-c", "exec \"$@\" 2> said", "sh", env!("CARGO_BIN_EXE_paceline"), "launch"]);
    command.args(MUCH);
    assert_eq!(Running::start(command).end_unread(), Some(1));
    let said = std::fs::read_to_string(sandbox.path("said")).unwrap();
    let lost = said.strip_prefix("error: ").and_then(|said| said.split(' ').next()).unwrap();
    let lost: usize = lost.parse().unwrap_or_else(|_| panic!("{said}"));
    // All but what lies in the pipe.
    assert!((2 * NUM_LINES - 1000..2 * NUM_LINES).contains(&lost), "{said}");
    assert!(said.contains("lines of standard output lost: nobody read them for 10 s"), "{said}");
}

#[test]
fn a_log_that_cannot_be_written_is_no_secret() {
    let sandbox = Sandbox::new();
    let mut command = sandbox.command("prlimit".as_ref());
    command.args(["--fsize=4096:4096", "--", env!("CARGO_BIN_EXE_paceline"), "launch"]);
    command.args(["-n", "1", "--log-dir", "logs", "--", "seq", "20000"]);
    let run = Run::of(command).ok();
    let warning = "warning: cannot write the log of rank 0, which ends here: ";
    assert_eq!(run.stderr.matches(warning).count(), 1, "{run:#?}");
}

/// A pipe whose reader has gone.
fn deserted() -> std::io::PipeWriter {
    std::io::pipe().unwrap().1
}

#[test]
fn a_reader_that_has_gone_ends_no_command() {
    let sandbox = Sandbox::new();
    write_traces(&sandbox, "profile/ddp", 2, Training::Ddp);
    for line in [
        "trace merge profile/ddp -o merged.json",
        "analyze profile/ddp",
        "predict --links",
        "train --help",
        "launch -n 2 -- echo text",
        "launch --nnodes 1 --master-port 29500 -n 1 -- true",
    ] {
        let run = |closed: fn(&mut Command)| {
            let _ = std::fs::remove_file(sandbox.path("merged.json"));
            let mut command = sandbox.paceline();
            command.args(line.split_whitespace()).stdout(Stdio::piped()).stderr(Stdio::piped());
            closed(&mut command);
            Run::wait(command.spawn().unwrap())
        };
        let out = run(|command| {
            command.stdout(deserted());
        });
        assert_eq!(out.code, Some(0), "{line}: {out:#?}");
        assert!(!out.stderr.contains("panicked"), "{line}: {out:#?}");
        let err = run(|command| {
            command.stderr(deserted());
        });
        assert_eq!(err.code, Some(0), "{line}: {err:#?}");
    }
}

#[test]
fn a_full_disk_is_no_success() {
    let sandbox = Sandbox::new();
    let mut command = sandbox.paceline();
    command.args(["predict", "--links"]);
    command.stdout(std::fs::File::options().write(true).open("/dev/full").unwrap());
    let output = command.output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("cannot write to standard output"), "{stderr}");
}

#[test]
fn without_a_folder_for_temporary_files_ranks_run_all_the_same() {
    let sandbox = Sandbox::new();
    let mut command = sandbox.given("launch -n 2 -- true");
    command.env("TMPDIR", "/proc/none");
    Run::of(command).ok().says(&["cannot make /proc/none/paceline-", "TMPDIR"]);
}
