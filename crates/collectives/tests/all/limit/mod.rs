//! An end for tests whose groups have no time limit, or one that no test waits for.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

/// Reached only when something hangs.
const LIMIT: Duration = Duration::from_secs(300);

/// Fails a test that hangs, instead of hanging with it.
#[track_caller]
pub fn within_limit(work: impl FnOnce() + Send + 'static) {
    let (sender, receiver) = channel();
    let thread = std::thread::spawn(move || {
        work();
        let _ = sender.send(());
    });
    let outcome = receiver.recv_timeout(LIMIT);
    assert_ne!(outcome, Err(RecvTimeoutError::Timeout), "it still ran after {LIMIT:?}");
    // A panic of the work is one of the test.
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}
