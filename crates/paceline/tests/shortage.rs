//! `paceline train` and `paceline analyze` where the system refuses threads and processes: the first one that is asked for,
//! then the second one, and so on, until they get all of them.
//!
//! The limit counts all processes and threads of a user. So the test makes the runs as a user who has no others, which only
//! root can do.

mod common;

use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::process::Command;

use common::traces::{Training, write_traces};
use common::{Run, Sandbox};

/// A user and group without processes.
const USER: u32 = 54_322;
/// More threads and processes than the run has.
const PLENTY: u32 = 64;

/// Runs `paceline` with these arguments as a user who may have `limit` processes and threads.
fn limited(sandbox: &Sandbox, args: &str, limit: u32) -> Run {
    chown(sandbox.path(""), Some(USER), Some(USER)).unwrap();
    let paceline = sandbox.paceline();
    let mut command = Command::new("prlimit");
    command.arg(format!("--nproc={limit}")).arg("--").arg(paceline.get_program());
    for (name, value) in paceline.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command.args(args.split_whitespace()).current_dir(sandbox.path(""));
    command.stdin(std::process::Stdio::null()).uid(USER).gid(USER);
    Run::of(command)
}

/// Whether runs can be made as that user; says why not.
fn can_be_limited() -> bool {
    let mut probe = Command::new("prlimit");
    let program = Sandbox::new().paceline().get_program().to_owned();
    probe.arg("--").arg(program).arg("--version").current_dir("/").uid(USER).gid(USER);
    let works = probe.output().is_ok_and(|output| output.status.success());
    if !works {
        eprintln!("left out: needs root, prlimit, and a program that every user may run");
    }
    works
}

#[test]
fn a_refused_thread_or_process_is_an_error_whichever_it_is() {
    if !can_be_limited() {
        return;
    }
    for transport in ["thread", "shm"] {
        let args = format!(
            "train --channels 4 --hidden 8 --samples 40 --epochs 1 --nproc 2 --threads 2 --transport {transport} \
             --strategy bucket_ddp_async --profile --profile-active 3 --profile-wait 0 --profile-warmup 0 \
             --global-batch-size 8 --timeout 3 --save saved"
        );
        let mut num_refused = 0;
        for limit in 1.. {
            assert!(limit < PLENTY, "{transport}: never enough");
            let sandbox = Sandbox::new();
            let run = limited(&sandbox, &args, limit);
            assert!(!run.stderr.contains("panicked"), "{transport} {limit}: {run:#?}");
            sandbox.wait_until_deserted();
            let contents = sandbox.contents();
            assert!(!contents.iter().any(|name| name.ends_with(".partial")), "{contents:?}");
            match run.code {
                Some(0) if !run.stderr.contains("the run goes on without") => break,
                // The thread that compresses a trace: the run can do without.
                Some(0) => run.line("Not written: rank "),
                Some(1 | 3) => {
                    run.stderr.lines().find(|line| line.contains("error: ")).expect(&run.stderr)
                }
                _ => panic!("{transport} {limit}: {run:#?}"),
            };
            num_refused += 1;
        }
        assert!(num_refused > 5, "{transport}: {num_refused}");
    }
}

#[test]
fn traces_are_analyzed_by_as_many_threads_as_there_may_be() {
    if !can_be_limited() {
        return;
    }
    // All on the calling thread; fewer threads than cores; all threads.
    let outputs = [1, 2, PLENTY].map(|limit| {
        let sandbox = Sandbox::new();
        write_traces(&sandbox, "traces", 4, Training::Ddp);
        limited(&sandbox, "analyze traces --output out", limit).ok().stdout
    });
    assert!(outputs.iter().all(|output| *output == outputs[0]), "{outputs:#?}");
}
