//! `--elastic`: ranks come and go, and the others go on. The ranks are processes of this test's executable that only exchange
//! numbers; what a training run does with them is another matter.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use paceline::launch::launcher::join_from_env;
use rustix::process::Signal;

use crate::common::marked::Marked;
use crate::common::{Run, Sandbox, TINY, free_port, signal, wait_until};

/// A limit that is reached only if something hangs.
const LIMIT: Duration = Duration::from_secs(60);

/// What each rank does: steps, until there is a file `stop`. Afterward a file with the name of its number says `done`, and before
/// that its process, its generation and the numbers of all members.
#[test]
fn as_a_rank() {
    let Some((member, _)) = join_from_env("", LIMIT).unwrap() else {
        return println!("not started as a rank, so there is nothing to test");
    };
    let file = format!("member-{}", member.number());
    let mut missed = Vec::new();
    loop {
        let place = member.regroup(&missed).unwrap();
        missed.clear();
        let numbers: Vec<String> = place.members.iter().map(u64::to_string).collect();
        write(&file, &format!("{} {} {}", std::process::id(), place.generation, numbers.join(",")));
        if place.index >= place.size {
            continue;
        }
        loop {
            std::thread::sleep(Duration::from_millis(20));
            let own = format!("{} {}", Path::new("stop").exists(), member.is_asked());
            let Ok(all) = member.exchange("step", own) else { break };
            if all.iter().all(|text| text.starts_with("true")) {
                member.leave();
                return write(&file, "done");
            }
            if all.iter().any(|text| text.ends_with("true")) {
                break;
            }
        }
    }
}

/// Writes a file as a whole.
fn write(file: &str, text: &str) {
    let new = format!("{file}.new");
    fs::write(&new, text).unwrap();
    fs::rename(new, file).unwrap();
}

/// A launcher of such ranks.
struct Elastic {
    sandbox: Sandbox,
    launcher: Marked,
}

fn as_rank() -> [String; 4] {
    let test = std::env::current_exe().unwrap().to_string_lossy().into_owned();
    [test, "--exact".into(), "elastic::as_a_rank".into(), "--nocapture".into()]
}

impl Elastic {
    fn launch(flags: &str) -> Self {
        Self::launch_with(flags, |_| {})
    }

    fn launch_with(flags: &str, change: impl FnOnce(&mut Command)) -> Self {
        let sandbox = Sandbox::new();
        let mut command = sandbox.given(&format!("launch {flags} --"));
        command.args(as_rank()).env("TMPDIR", sandbox.path(""));
        change(&mut command);
        Self { launcher: Marked::start(command), sandbox }
    }

    /// Waits until a member belongs to a generation of these members. Returns its process.
    #[track_caller]
    fn member(&self, number: u64, members: &str) -> u32 {
        let path = self.sandbox.path(&format!("member-{number}"));
        let text = || fs::read_to_string(&path).unwrap_or_default();
        wait_until(&format!("member {number} among {members}"), || {
            text().split(' ').nth(2) == Some(members)
        });
        text().split(' ').next().unwrap().parse().unwrap()
    }

    fn stop(mut self) -> Run {
        fs::write(self.sandbox.path("stop"), "").unwrap();
        self.launcher.end()
    }
}

#[test]
fn the_others_go_on_after_a_death_and_a_replacement_makes_them_more() {
    let run = Elastic::launch("-n 3 --elastic 2:3 --max-restarts 1");
    run.member(2, "0,1,2");
    signal(run.member(0, "0,1,2"), Signal::KILL);
    // The replacement of rank 0 has a number of its own.
    run.member(3, "1,2,3");
    signal(run.member(1, "1,2,3"), Signal::KILL);
    run.member(2, "2,3");
    let run = run.stop().ok();
    for line in [
        " was killed by SIGKILL after ",
        "; 2 ranks are left on this host",
        "replacement 1 of 1 for rank 0 is process ",
        // Its number is 4 if the replacement has come after the others had gone on.
        " has 2 ranks",
    ] {
        assert!(run.stderr.contains(line), "no {line}: {run:#?}");
    }
}

#[test]
fn with_too_few_ranks_the_run_fails_and_the_first_death_is_named() {
    let mut run = Elastic::launch("-n 2 --elastic 2:2");
    run.member(0, "0,1");
    signal(run.member(1, "0,1"), Signal::KILL);
    let run = run.launcher.end();
    assert_eq!(run.code, Some(137), "{run:#?}");
    for line in ["too few members, 1 of at least 2; none can come", "rank 1 (process "] {
        assert!(run.stderr.contains(line), "no {line}: {run:#?}");
    }
}

#[test]
fn a_replacement_that_ends_before_it_has_joined_is_not_awaited() {
    let sandbox = Sandbox::new();
    let mut command = sandbox.given("launch -n 2 --elastic 2:2 --max-restarts 1 -- sh -c");
    let script = "test $PACELINE_MEMBER = 2 && exit 1; exec \"$@\"";
    command.args([script, "sh"]).args(as_rank()).env("TMPDIR", sandbox.path(""));
    let mut run = Elastic { launcher: Marked::start(command), sandbox };
    run.member(0, "0,1");
    signal(run.member(1, "0,1"), Signal::KILL);
    let run = run.launcher.end();
    for line in ["replacement 1 of 1 for rank 1", "1 of at least 2; none can come"] {
        assert!(run.stderr.contains(line), "no {line}: {run:#?}");
    }
}

#[test]
fn a_death_after_which_the_others_went_on_is_not_why_the_run_ends() {
    let mut run = Elastic::launch("-n 2 --elastic 1:2");
    signal(run.member(1, "0,1"), Signal::KILL);
    signal(run.member(0, "0"), Signal::KILL);
    let run = run.launcher.end();
    assert_eq!(run.code, Some(137), "{run:#?}");
    let last = run.stderr.lines().find(|line| line.contains("all ranks were stopped"));
    assert!(last.is_some_and(|line| line.contains("rank 0 (process ")), "{run:#?}");
}

#[test]
fn a_stopped_rank_is_left_out_and_killed() {
    let run = Elastic::launch("-n 3 --elastic 1:3 --evict-after 1");
    run.member(2, "0,1,2");
    signal(run.member(1, "0,1,2"), Signal::STOP);
    run.member(2, "0,2");
    let run = run.stop().ok();
    let line = "did not answer in time and was left out";
    assert!(run.stderr.contains(line), "{run:#?}");
}

#[test]
fn a_process_joins_by_itself_and_one_with_another_secret_does_not() {
    let port = free_port();
    let flags = format!(
        "-n 1 --elastic 1:2 --evict-after 2 --nnodes 1 --master-addr 127.0.0.1 --master-port {port}"
    );
    let run = Elastic::launch_with(&flags, |command| {
        command.env("PACELINE_SECRET", "of this run");
    });
    run.member(0, "0");
    let join = |secret: &str| {
        let [test, rest @ ..] = as_rank();
        let mut command = run.sandbox.command(Path::new(&test));
        command.args(rest).env("PACELINE_MEMBERS", format!("127.0.0.1:{port}"));
        command.env("PACELINE_SECRET", secret);
        command
    };
    let stranger = Run::of(join("of another run"));
    assert_eq!(stranger.code, Some(101), "{stranger:#?}");
    let mut joined = Marked::start(join("of this run"));
    run.member(1, "0,1");
    signal(run.member(0, "0,1"), Signal::KILL);
    run.member(1, "1");
    // The launcher has no rank any more, and keeps the list until the last member has done its work, also for longer than it
    // waits for one that is silent.
    std::thread::sleep(Duration::from_secs(3));
    let run = run.stop().ok();
    assert!(run.stderr.contains("member 1 has joined from 127.0.0.1"), "{run:#?}");
    joined.end().ok();
}

#[test]
fn a_mistake_of_a_rank_ends_the_run_and_is_not_repeated() {
    let script = "exit 2";
    let words = ["-n", "2", "--elastic", "1:2", "--max-restarts", "3", "--", "sh", "-c", script];
    let run = Sandbox::new().launch(&words);
    assert_eq!(run.code, Some(2), "{run:#?}");
    assert!(!run.stderr.contains("replacement"), "{run:#?}");
}

#[test]
fn ranks_of_another_launcher_do_not_come_and_go() {
    let ranks = [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_PORT", "29400")];
    for flags in ["--elastic 1:2", "--join 127.0.0.1:1"] {
        let run = Sandbox::new().train_with(&format!("{TINY} {flags}"), &ranks);
        run.refused(&[flags.split(' ').next().unwrap(), "another launcher"]);
    }
}
