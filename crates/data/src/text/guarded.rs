//! Calls a library that may panic where it should return an error.
//!
//! Input: a call. Output: what it returns, or the message of its panic, which is not printed. This module does not know
//! what is called.

use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;

use crate::batch::panic_message;

thread_local! {
    /// Whether this thread is in a guarded call.
    static IS_GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// Calls `call` on this thread. A panic of another thread that it waits for is printed like any other.
pub(super) fn guarded<T>(call: impl FnOnce() -> T) -> Result<T, String> {
    static FILTER: Once = Once::new();
    FILTER.call_once(|| {
        let report = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !IS_GUARDED.get() {
                report(info);
            }
        }));
    });
    let before = IS_GUARDED.replace(true);
    // Unwind safety: after a panic, the caller reports an error and does not use what the call has changed.
    let outcome = panic::catch_unwind(AssertUnwindSafe(call));
    IS_GUARDED.set(before);
    outcome.map_err(|panic| panic_message(&*panic))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_a_message() {
        assert_eq!(guarded(|| 3), Ok(3));
        assert_eq!(guarded(|| -> u8 { panic!("no {}", 4) }), Err("no 4".to_owned()));
        assert!(!IS_GUARDED.get());
        let nested = guarded(|| guarded(|| -> u8 { panic!("inner") }).unwrap_err());
        assert_eq!(nested, Ok("inner".to_owned()));
    }
}
