//! `paceline train` where the system refuses threads and processes: the first one that is asked for, then the second one,
//! and so on, until the run gets all of them.
//!
//! The limit counts all processes and threads of a user. So the test makes the runs as a user who has no others, which only
//! root can do.

mod common;

use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::process::Command;

use common::{Run, Sandbox};

/// A user and group without processes.
const USER: u32 = 54_322;
/// More threads and processes than the run has.
const PLENTY: u32 = 64;

/// Runs `paceline train` with these flags as a user who may have `limit` processes and threads.
fn train(sandbox: &Sandbox, flags: &str, limit: u32) -> Run {
    let paceline = sandbox.paceline();
    let mut command = Command::new("prlimit");
    command.arg(format!("--nproc={limit}")).arg("--").arg(paceline.get_program()).arg("train");
    for (name, value) in paceline.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command.args(flags.split_whitespace()).current_dir(sandbox.path(""));
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
        let flags = format!(
            "--channels 4 --hidden 8 --samples 40 --epochs 1 --nproc 2 --threads 2 --transport {transport} \
             --strategy bucket_ddp_async --profile --profile-active 3 --profile-wait 0 --profile-warmup 0 \
             --global-batch-size 8 --timeout 3 --save saved"
        );
        let mut num_refused = 0;
        for limit in 1.. {
            assert!(limit < PLENTY, "{transport}: never enough");
            let sandbox = Sandbox::new();
            chown(sandbox.path(""), Some(USER), Some(USER)).unwrap();
            let run = train(&sandbox, &flags, limit);
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
