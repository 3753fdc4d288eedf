//! Runs the program that is recorded, with the streams, the terminal and the process group of this process.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::sleep;
use std::time::Duration;

use paceline_failure::{Failure, Result};
use paceline_files::Printable;
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

/// The process to which signals are forwarded, while it runs.
type Running = Arc<Mutex<Option<Pid>>>;

/// Runs the program to its end. Returns its exit code, as a shell counts it.
pub(super) fn run(command: &mut Command) -> Result<u8> {
    // A parent that ignores SIGCHLD would leave no exit code to wait for.
    let _ = signal_hook::flag::register(SIGCHLD, Arc::default());
    let mut child = command.spawn().map_err(|error| {
        let program = Path::new(command.get_program()).printable();
        Failure::Usage(format!("record: cannot start {program}: {error}"))
    })?;
    // Now that the program has inherited which signals are ignored, as under nohup.
    let pid = Pid::from_child(&child);
    let running = Arc::new(Mutex::new(Some(pid)));
    forward_signals(running.clone())?;
    // Until `wait` below, no other process can have its number.
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    while waitid(WaitId::Pid(pid), options).is_err_and(|error| error == Errno::INTR) {}
    *lock(&running) = None;
    child.wait().map(code).map_err(|error| Failure::io("cannot wait for the program", error))
}

fn code(status: ExitStatus) -> u8 {
    let killed = || 128 + status.signal().unwrap_or_default();
    status.code().unwrap_or_else(killed) as u8
}

fn forward_signals(running: Running) -> Result<()> {
    let failed = |error: std::io::Error| Failure::io("cannot listen for signals", error);
    let mut signals =
        Signals::new([SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2]).map_err(failed)?;
    let listen = move || {
        let mut witness = witness();
        while let Some(number) = signals.forever().next() {
            if lock(&running).is_some() {
                // The time suffices for the end of a process on a busy machine.
                sleep(Duration::from_millis(500));
                let has_got = |of: &mut Child| of.try_wait().is_ok_and(|status| status.is_some());
                if witness.as_mut().is_some_and(has_got) {
                    witness = self::witness();
                    // Those who signal a group may signal a process of it too.
                    signals.pending().for_each(drop);
                    continue;
                }
            }
            match *lock(&running) {
                Some(pid) => {
                    let _ = Signal::from_named_raw(number).map(|signal| kill_process(pid, signal));
                }
                None => {
                    let _ = emulate_default_handler(number);
                }
            }
        }
    };
    paceline_trace::thread_builder("signals").spawn(listen).map(drop).map_err(failed)
}

/// A process that waits for the end of this one, and ends by the signals that its process group gets. The program gets those
/// too. Without it, all signals are forwarded.
fn witness() -> Option<Child> {
    Command::new("cat").stdin(Stdio::piped()).spawn().ok()
}

fn lock(running: &Running) -> MutexGuard<'_, Option<Pid>> {
    running.lock().unwrap_or_else(PoisonError::into_inner)
}
