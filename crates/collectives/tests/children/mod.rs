//! Ranks that are processes, started from the same test binary that waits for them.
//!
//! However a test ends, its processes end with it, and every wait has a limit. This module knows nothing of
//! what the ranks do.
#![allow(dead_code, reason = "not every test file uses all of it")]

use std::ffi::OsString;
use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Signal, set_parent_process_death_signal};

/// After this time a process counts as hanging. Eight ranks on two busy cores need minutes.
pub const HANGS: Duration = Duration::from_secs(600);

/// Makes the process of a rank end with the test that has started it. Each rank calls this first.
pub fn end_with_parent() {
    set_parent_process_death_signal(Some(Signal::KILL)).unwrap();
}

/// What a rank wrote before it ended.
#[derive(Debug)]
pub struct Output {
    pub stdout: String,
    pub stderr: String,
}

/// The processes of one test, in rank order.
pub struct Children(Vec<Child>);

impl Children {
    /// Starts `world` copies of this binary, which run the test `rank_process` of a module of it; `prepare` sets the
    /// environment of each rank. What they write must fit into a pipe.
    pub fn start(module: &str, world: usize, prepare: impl Fn(usize, &mut Command)) -> Self {
        let mut children = Self(Vec::new());
        let (_, module) = module.split_once("::").unwrap();
        let test = format!("{module}::rank_process");
        for rank in 0..world {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args([&test, "--exact", "--nocapture", "--ignored"]);
            // What somebody has set for runs of their own decides nothing here.
            let is_ours = |name: &OsString| name.to_string_lossy().starts_with("PACELINE_");
            for (name, _) in std::env::vars_os().filter(|(name, _)| is_ours(name)) {
                command.env_remove(name);
            }
            command.env("RANK", rank.to_string()).env("WORLD_SIZE", world.to_string());
            prepare(rank, &mut command);
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
            children.0.push(command.spawn().unwrap());
        }
        children
    }

    pub fn rank(&self, rank: usize) -> &Child {
        &self.0[rank]
    }

    /// Waits until `rank` writes a line that ends with `ready`.
    pub fn wait_ready(&mut self, rank: usize) {
        let stdout = self.0[rank].stdout.as_mut().unwrap();
        let deadline = Instant::now() + HANGS;
        let mut said = Vec::new();
        while !said.ends_with(b"ready\n") {
            let left = deadline.saturating_duration_since(Instant::now());
            let limit = Timespec::try_from(left).unwrap();
            let mut bytes = [0; 1000];
            let len = match poll(&mut [PollFd::new(stdout, PollFlags::IN)], Some(&limit)).unwrap() {
                0 => 0,
                _ => stdout.read(&mut bytes).unwrap(),
            };
            said.extend(&bytes[..len]);
            let text = String::from_utf8_lossy(&said);
            assert!(len > 0, "rank {rank} ended or hangs before it was ready: {text}");
        }
    }

    /// Waits for the processes of `ranks`, which must succeed, and ends the others.
    pub fn finish(&mut self, ranks: &[usize]) -> Vec<Output> {
        let outputs = self.finish_some(ranks);
        self.kill();
        outputs
    }

    /// Waits for the processes of `ranks`, which must succeed. The others go on.
    pub fn finish_some(&mut self, ranks: &[usize]) -> Vec<Output> {
        let deadline = Instant::now() + HANGS;
        let mut hanging = ranks.to_vec();
        while !hanging.is_empty() && Instant::now() < deadline {
            hanging.retain(|&rank| self.0[rank].try_wait().unwrap().is_none());
            std::thread::sleep(Duration::from_millis(5));
        }
        if !hanging.is_empty() {
            self.kill();
        }
        let outputs = ranks.iter().map(|&rank| {
            let child = &mut self.0[rank];
            let status = child.wait().unwrap();
            let (mut stdout, mut stderr) = (String::new(), String::new());
            child.stdout.as_mut().unwrap().read_to_string(&mut stdout).unwrap();
            child.stderr.as_mut().unwrap().read_to_string(&mut stderr).unwrap();
            assert!(!hanging.contains(&rank), "rank {rank} hangs: {stdout}{stderr}");
            assert!(status.success(), "rank {rank}: {stdout}{stderr}");
            Output { stdout, stderr }
        });
        outputs.collect()
    }

    fn kill(&mut self) {
        for child in &mut self.0 {
            // The process may already have ended.
            let _ = child.kill();
        }
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        self.kill();
        for child in &mut self.0 {
            let _ = child.wait();
        }
    }
}
