//! The signals that ask the launcher to end, to stop, or to go on, or that say that a child has ended.

use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Mutex, MutexGuard, PoisonError};

use paceline_failure::{Failure, Result};
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM, SIGTSTP};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

use super::rank::LaunchEvent;

/// The channel of the launch in progress, to which signals are forwarded.
static LISTENER: Mutex<Option<Sender<LaunchEvent>>> = Mutex::new(None);
/// The last signal that asked to end during a launch; 0 before the first one.
static LAST_SIGNAL: AtomicI32 = AtomicI32::new(0);

/// From now on `events` gets the signals that ask this process to end or to stop, and SIGCHLD. When no launch is in
/// progress, they have their default effect.
pub(super) fn forward(events: Sender<LaunchEvent>) -> Result<()> {
    let is_first = listener().replace(events).is_none();
    if !is_first {
        return Ok(());
    }
    let failed = |e: std::io::Error| Failure::io("cannot listen for signals", e);
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP, SIGTSTP, SIGCHLD]).map_err(failed)?;
    let listen = move || {
        for signal in signals.forever() {
            let events = listener();
            if !matches!(signal, SIGTSTP | SIGCHLD) {
                LAST_SIGNAL.store(signal, Ordering::SeqCst);
            }
            if events
                .as_ref()
                .is_none_or(|events| events.send(LaunchEvent::Signal(signal)).is_err())
            {
                let _ = emulate_default_handler(signal);
            }
        }
    };
    paceline_trace::thread_builder("signals").spawn(listen).map_err(failed)?;
    Ok(())
}

/// The last signal that asked this process to end.
pub fn last() -> Option<i32> {
    Some(LAST_SIGNAL.load(Ordering::SeqCst)).filter(|&signal| signal != 0)
}

/// Stops this process as Ctrl-Z does. Returns when it goes on.
pub(super) fn stop_here() {
    let _ = emulate_default_handler(SIGTSTP);
}

/// The name of a signal.
pub(super) fn name(signal: i32) -> String {
    let name = signal_hook::low_level::signal_name(signal);
    name.map_or_else(|| format!("signal {signal}"), str::to_owned)
}

fn listener() -> MutexGuard<'static, Option<Sender<LaunchEvent>>> {
    LISTENER.lock().unwrap_or_else(PoisonError::into_inner)
}
