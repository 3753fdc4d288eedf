//! Launchers whose processes a test can find, and which leave none behind when the test ends.

use std::fs;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::process::Signal;

use super::{Run, Sandbox, signal, wait_until};

/// A launcher whose descendants all have an identifying mark in their environment.
pub struct Marked {
    mark: String,
    child: Option<Child>,
}

impl Marked {
    pub fn start(mut command: Command) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let mark = format!("E2E_MARK={}-{number}-", std::process::id());
        let (name, value) = mark.split_once('=').unwrap();
        command.env(name, value).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = Some(command.spawn().unwrap());
        Self { mark, child }
    }

    pub fn launch(sandbox: &Sandbox, num_ranks: usize, script: &str) -> Self {
        Self::launch_with(sandbox, &[], num_ranks, script)
    }

    pub fn launch_with(sandbox: &Sandbox, flags: &[&str], num_ranks: usize, script: &str) -> Self {
        let mut command = sandbox.paceline();
        command.arg("launch").args(flags).args(["-n", &num_ranks.to_string()]);
        command.args(["--", "sh", "-c", script]);
        // Temporary files that it should remove again go here.
        command.env("TMPDIR", sandbox.path(""));
        Self::start(command)
    }

    pub fn train(sandbox: &Sandbox, flags: &str) -> Self {
        Self::start(sandbox.given(&format!("train {flags}")))
    }

    pub fn pid(&self) -> u32 {
        self.child.as_ref().unwrap().id()
    }

    /// The living processes that have the mark and `variable` in their environment, with their command
    /// lines.
    pub fn processes(&self, variable: &str) -> Vec<(u32, String)> {
        let mut found = Vec::new();
        for entry in fs::read_dir("/proc").unwrap().filter_map(Result::ok) {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
                continue;
            };
            // A process that has ended in the meantime has nothing to read, and a zombie has nothing
            // left.
            let read = |name: &str| {
                let bytes = fs::read(entry.path().join(name)).unwrap_or_default();
                String::from_utf8_lossy(&bytes).into_owned()
            };
            let environment = read("environ");
            let has = |wanted: &str| environment.split('\0').any(|found| found == wanted);
            if has(&self.mark) && (variable.is_empty() || has(variable)) {
                found.push((pid, read("cmdline").replace('\0', " ")));
            }
        }
        found
    }

    /// The process of a rank.
    #[track_caller]
    pub fn rank(&self, rank: usize) -> u32 {
        let found = self.processes(&format!("RANK={rank}"));
        let [(pid, _)] = found[..] else { panic!("{found:?}") };
        pid
    }

    /// Whether a process with `variable` in its environment has a thread whose name begins with `start`.
    pub fn has_thread(&self, variable: &str, start: &str) -> bool {
        let name = |task: fs::DirEntry| fs::read_to_string(task.path().join("comm"));
        self.processes(variable).iter().any(|(pid, _)| {
            let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten();
            tasks.flatten().any(|task| name(task).is_ok_and(|name| name.starts_with(start)))
        })
    }

    /// Waits until `count` processes run whose command line begins with `start`.
    pub fn wait_for(&self, start: &str, count: usize) {
        wait_until(&format!("{count} times {start:?}"), || {
            let all = self.processes("");
            all.iter().filter(|(_, command)| command.starts_with(start)).count() == count
        });
    }

    /// The exit code of the launcher itself, even if other processes still hold its output open.
    pub fn wait_for_exit(&mut self) -> Option<i32> {
        let mut code = None;
        let child = self.child.as_mut().unwrap();
        wait_until("the launcher's exit", || {
            child.try_wait().unwrap().map(|status| code = status.code()).is_some()
        });
        code
    }

    pub fn end(&mut self) -> Run {
        Run::wait(self.child.take().unwrap())
    }

    /// Checks that no descendant is left.
    #[track_caller]
    pub fn left_nothing(&self) {
        let mut left = Vec::new();
        // A killed process is still listed for a moment.
        wait_until("the end of all ranks and the guard", || {
            left = self.processes("");
            if !left.is_empty() {
                println!("still there: {left:?}");
            }
            left.is_empty()
        });
    }
}

impl Drop for Marked {
    fn drop(&mut self) {
        // A failed test must not leave anything behind either.
        for (pid, _) in self.processes("") {
            signal(pid, Signal::KILL);
        }
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Checks that the launcher named this rank as the culprit, and no other.
#[track_caller]
pub fn names_only_rank(run: &Run, rank: usize, how: &str) {
    let verdicts: Vec<&str> =
        run.stderr.lines().filter_map(|line| line.strip_prefix("paceline: ")).collect();
    let [verdict] = verdicts[..] else { panic!("{run:#?}") };
    assert!(verdict.starts_with(&format!("rank {rank} (process ")), "{verdict}");
    assert!(verdict.contains(how), "no {how:?} in {verdict}");
    assert!(verdict.contains("all ranks were stopped"), "{verdict}");
}
