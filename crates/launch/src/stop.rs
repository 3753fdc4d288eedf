//! The request that a run ends early, by SIGTERM or Ctrl-C: the run ends its step, saves, and exits.
//!
//! The first signal is a request, which the training loop looks at before each step. The second ends the process at
//! once.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use paceline_collectives::Dumper;
use paceline_failure::{Failure, Result};
use paceline_files::Printable;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// Whether a signal has asked this process to end. All clones are the same request.
#[derive(Clone, Debug, Default)]
pub struct StopRequest(Arc<AtomicI32>);

impl StopRequest {
    /// The signal that asks this process to end, if one has come.
    pub fn signal(&self) -> Option<i32> {
        Some(self.0.load(Ordering::Relaxed)).filter(|&signal| signal != 0)
    }

    fn ask(&self, signal: i32) {
        self.0.store(signal, Ordering::Relaxed);
    }
}

/// A sentence about the state that an interrupted run leaves: `checkpoint` has the folder of `--save` and the steps of
/// its checkpoint, if any; `is_auto` says whether the run had `--resume auto`.
pub fn left(checkpoint: Option<(&Path, Option<u64>)>, is_auto: bool) -> String {
    match checkpoint {
        Some((folder, Some(steps))) => {
            let how =
                if is_auto { "the same command goes on" } else { "add --resume auto to go on" };
            format!("checkpoint after step {steps} in {}: {how} from there", folder.printable())
        }
        Some((folder, None)) => format!(
            "no checkpoint in {}: the run ended before one was complete, and starts from the beginning",
            folder.printable()
        ),
        None => "no checkpoint: nothing is kept without --save".to_owned(),
    }
}

/// Waits in a thread of its own for the signals that end a process, because the main thread may be blocked in an
/// operation that no rank will finish. At the first signal `dumper` writes this rank's last operations. Without a
/// `request`, the first signal ends the process, and Ctrl-C has its usual effect.
pub fn listen(dumper: Option<Dumper>, request: Option<StopRequest>) -> Result<()> {
    let failed = |e: std::io::Error| Failure::io("cannot listen for the signal to end", e);
    let signals: &[i32] = if request.is_some() { &[SIGTERM, SIGINT] } else { &[SIGTERM] };
    let mut signals = Signals::new(signals).map_err(failed)?;
    let listen = move || {
        for signal in signals.forever() {
            if let Some(dumper) = &dumper {
                dumper.dump("ended by the launcher");
            }
            match &request {
                Some(request) if request.signal().is_none() => request.ask(signal),
                // A launcher may repeat Ctrl-C as SIGTERM: the first signal counts.
                _ => std::process::exit(
                    128 + request.as_ref().and_then(StopRequest::signal).unwrap_or(signal),
                ),
            }
        }
    };
    let thread = paceline_trace::thread_builder("signals").spawn(listen);
    thread.map(drop).map_err(failed)
}
