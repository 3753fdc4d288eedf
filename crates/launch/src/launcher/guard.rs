//! The guard: a process that outlives a killed launcher just long enough to kill the ranks' process
//! groups.

use std::fmt::Display;
use std::io::{BufRead, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use paceline_failure::{Failure, Result};
use rustix::process::{Pid, Signal, kill_process_group};

/// The line that informs the guard that all ranks have ended.
const FAREWELL: &str = "done";
/// How long the guard may take to end after that.
const FAREWELL_WAIT: Duration = Duration::from_secs(1);

/// The prefix of a line that names a folder.
const FOLDER: &str = "folder ";

/// The launcher's handle of the guard process.
#[derive(Debug)]
pub(super) struct Guard {
    child: Child,
    pipe: ChildStdin,
}

impl Guard {
    pub(super) fn start(own_program: &Path) -> Result<Self> {
        // In a process group of its own, so that Ctrl-C in the terminal does not end it too early.
        let mut child = Command::new(own_program)
            .arg("__guard")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .map_err(|e| Failure::io("cannot start the guard process", e))?;
        let pipe = child.stdin.take();
        let pipe = pipe.ok_or_else(|| Failure::Run("the guard process has no pipe".into()))?;
        Ok(Self { child, pipe })
    }

    /// Adds a folder to those that the guard removes if the launcher dies.
    pub(super) fn watch_folder(&mut self, folder: &Path) -> Result<()> {
        self.watch(format_args!("{FOLDER}{}", folder.display()))
    }

    /// Adds a rank's process group to those that it kills then.
    pub(super) fn watch(&mut self, it: impl Display) -> Result<()> {
        writeln!(self.pipe, "{it}").map_err(|e| Failure::io("the guard process is gone", e))
    }

    /// Ends the guard, because nothing is left to watch.
    pub(super) fn dismiss(mut self) {
        // It does not matter if the guard has ended already.
        let _ = writeln!(self.pipe, "{FAREWELL}");
        drop(self.pipe);
        // It may have been stopped, and has nothing left to do.
        let begin = Instant::now();
        while begin.elapsed() < FAREWELL_WAIT && matches!(self.child.try_wait(), Ok(None)) {
            std::thread::sleep(Duration::from_millis(1));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// `paceline __guard`: reads process groups and temporary folders, one per line. If the pipe closes
/// without a farewell, it kills the groups and removes the folders.
pub fn guard_groups() -> Result<u8> {
    let mut groups = Vec::new();
    let mut folders = Vec::new();
    for line in std::io::stdin().lock().lines().map_while(std::io::Result::ok) {
        match line.parse().ok().and_then(Pid::from_raw) {
            Some(group) => groups.push(group),
            None if line == FAREWELL => return Ok(0),
            None => folders.extend(line.strip_prefix(FOLDER).map(PathBuf::from)),
        }
    }
    for group in groups {
        // It does not matter if a group has ended by itself.
        let _ = kill_process_group(group, Signal::KILL);
    }
    for folder in folders {
        // The folder has only the files that ranks wrote while they were being killed.
        let _ = std::fs::remove_dir_all(folder);
    }
    Ok(0)
}
