//! What the state machine is made of: atomic words, words to sleep on, and the clock.
//!
//! In a normal build these are the atomics of the standard library and the kernel's futex, valid when
//! zeroed and usable between processes. Under `cfg(loom)` they are models, with which loom tries the
//! orders in which the ranks may run and what each may see of the others' writes. Time stands still
//! there, so no limit and no nap hides a wake-up that was lost.

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

    /// How long to sleep at most before looking again: an alarm may be raised between a look at it
    /// and the sleep.
    const NAP: Duration = Duration::from_millis(50);

    /// A word that ranks can sleep on until it changes.
    #[repr(transparent)]
    #[derive(Debug, Default)]
    pub(crate) struct Word(AtomicU32);

    impl Word {
        /// Sleeps unless the word is no longer `seen`. May end early, so the caller looks again.
        pub(crate) fn sleep(&self, seen: u32, at_most: Duration) {
            let nap = at_most.min(NAP);
            let timeout = futex::Timespec { tv_sec: 0, tv_nsec: nap.as_nanos() as _ };
            // Whatever ends the nap, the caller looks again.
            let _ = futex::wait(&self.0, futex::Flags::empty(), seen, Some(&timeout));
        }

        pub(crate) fn wake(&self, at_most: u32) {
            // Fails only for an address that is not mapped, which a reference is.
            let _ = futex::wake(&self.0, futex::Flags::empty(), at_most);
        }
    }

    impl Deref for Word {
        type Target = AtomicU32;

        fn deref(&self) -> &AtomicU32 {
            &self.0
        }
    }

    /// Stands between a change and a look for those who must see it, both sequentially consistent,
    /// which is enough here; see the model.
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
        /// Only by being woken: a wake-up that gets lost is a deadlock, which loom reports.
        UntilWoken,
        /// At any time, without being woken and without learning anything from who might have
        /// woken it: what a rank sees it must have by the words alone.
        AnyTime,
    }

    thread_local! {
        /// Of the model that runs on this thread; its ranks are coroutines of the same thread.
        pub(crate) static SLEEP: Cell<Sleep> = const { Cell::new(Sleep::UntilWoken) };
    }

    /// The model of a futex: comparing with the word and falling asleep are one step for those who
    /// wake others.
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

        pub(crate) fn wake(&self, at_most: u32) {
            if SLEEP.get() == Sleep::AnyTime {
                return;
            }
            let queue = self.queue.lock().expect("no model panics while it holds this");
            if at_most == 1 {
                self.woken.notify_one();
            } else {
                self.woken.notify_all();
            }
            drop(queue);
        }
    }

    impl Deref for Word {
        type Target = AtomicU32;

        fn deref(&self) -> &AtomicU32 {
            &self.value
        }
    }

    /// Loom takes sequentially consistent accesses for acquire and release only, and knows the
    /// stronger order by fences alone; so the model has a fence where two such accesses follow each
    /// other in the code.
    pub(crate) fn before_looking_back() {
        loom::sync::atomic::fence(super::Ordering::SeqCst);
    }

    pub(crate) fn now_ns() -> u64 {
        0
    }
}

#[cfg(all(test, loom))]
pub(super) use imp::{SLEEP, Sleep};
