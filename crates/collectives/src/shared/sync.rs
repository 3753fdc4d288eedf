//! The primitives of the state machine: atomic words, words to sleep on, and the clock.
//!
//! In a normal build these are the atomics of the standard library and the kernel's futex, valid when zeroed
//! and usable between processes. Under `cfg(loom)` they are models, with which loom tries the orders in which
//! the ranks may run, and the values that each rank may see. The clock stands still in
//! these models, so a lost wake-up cannot be hidden by a time limit or a short sleep.

pub(crate) use imp::{AtomicU32, AtomicU64, Word, before_looking_back, now_ns, spin_loop};
pub(crate) use std::sync::atomic::Ordering;

#[cfg(not(loom))]
mod imp {
    use std::hint;
    use std::ops::Deref;
    use std::time::Duration;

    pub(crate) use paceline_trace::now_ns;
    use rustix::thread::futex;
    pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64};

    pub(crate) use hint::spin_loop;

    /// The longest sleep: an alarm may be raised between the check and the sleep.
    const NAP: Duration = Duration::from_millis(50);

    /// A word that ranks can sleep on until it changes.
    #[repr(transparent)]
    #[derive(Debug, Default)]
    pub(crate) struct Word(AtomicU32);

    impl Word {
        /// Sleeps if the word still has the value `seen`. May end early, so the caller checks again.
        pub(crate) fn sleep(&self, seen: u32, at_most: Duration) {
            let nap = at_most.min(NAP);
            let timeout = futex::Timespec { tv_sec: 0, tv_nsec: nap.as_nanos() as _ };
            // The result does not matter: the caller checks again in any case.
            let _ = futex::wait(&self.0, futex::Flags::empty(), seen, Some(&timeout));
        }

        pub(crate) fn wake_all(&self) {
            // Cannot fail: the call fails only for unmapped addresses, and a reference is always mapped.
            let _ = futex::wake(&self.0, futex::Flags::empty(), i32::MAX as u32);
        }
    }

    impl Deref for Word {
        type Target = AtomicU32;

        fn deref(&self) -> &AtomicU32 {
            &self.0
        }
    }

    /// Called between a change and a check for ranks that must see the change. Both accesses are sequentially
    /// consistent, which is enough here but not in the model below.
    #[inline(always)]
    pub(crate) fn before_looking_back() {}
}

#[cfg(loom)]
mod imp {
    use std::cell::Cell;
    use std::ops::Deref;
    use std::time::Duration;

    pub(crate) use loom::hint::spin_loop;
    pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64};
    use loom::sync::{Condvar, Mutex};

    /// How sleep ends in a model.
    #[derive(Clone, Copy, PartialEq, Eq)]
    pub(crate) enum Sleep {
        /// Only by being woken: a lost wake-up is a deadlock, which loom reports.
        UntilWoken,
        /// At any time, without being woken. Waking up then synchronizes with no other rank,
        /// so everything that the sleeper sees must be ordered by the atomic words alone.
        AnyTime,
    }

    thread_local! {
        /// The setting for the model that runs on this thread. Its ranks are coroutines of the same thread.
        pub(crate) static SLEEP: Cell<Sleep> = const { Cell::new(Sleep::UntilWoken) };
    }

    /// The model of a futex: comparing the word and falling asleep are one atomic step.
    #[derive(Debug, Default)]
    pub(crate) struct Word {
        value: AtomicU32,
        queue: Mutex<()>,
        woken: Condvar,
    }

    impl Word {
        pub(crate) fn sleep(&self, seen: u32, _at_most: Duration) {
            if SLEEP.get() == Sleep::AnyTime {
                loom::thread::yield_now();
                return;
            }
            let queue = self.queue.lock().expect("no model panics while it holds this");
            if self.value.load(super::Ordering::SeqCst) == seen {
                drop(self.woken.wait(queue));
            }
        }

        pub(crate) fn wake_all(&self) {
            if SLEEP.get() == Sleep::AnyTime {
                return;
            }
            let queue = self.queue.lock().expect("no model panics while it holds this");
            self.woken.notify_all();
            drop(queue);
        }
    }

    impl Deref for Word {
        type Target = AtomicU32;

        fn deref(&self) -> &AtomicU32 {
            &self.value
        }
    }

    /// Loom models the order of sequentially consistent accesses only for fences. So the model has a fence where two such
    /// accesses follow each other in the code.
    pub(crate) fn before_looking_back() {
        loom::sync::atomic::fence(super::Ordering::SeqCst);
    }

    pub(crate) fn now_ns() -> u64 {
        0
    }
}

#[cfg(all(test, loom))]
pub(super) use imp::{SLEEP, Sleep};
