//! On which processors threads run, if ranks are pinned. This file does not know the work of threads.

use std::cell::Cell;

use rustix::io;
use rustix::thread::{CpuSet, sched_setaffinity};

thread_local! {
    /// The processors of the threads beside the calling thread, if that is pinned.
    static BESIDE: Cell<Option<CpuSet>> = const { Cell::new(None) };
}

/// Binds the calling thread, and the threads that it starts later, to the processors `own`. Those whose work is wrapped in
/// [`beside`] go to the processors `others`.
pub fn pin(own: &CpuSet, others: CpuSet) -> io::Result<()> {
    sched_setaffinity(None, own)?;
    BESIDE.set(Some(others));
    Ok(())
}

/// The work of a thread beside the calling one, such as communication. It runs on processors of its own, if the
/// calling thread is pinned and its rank has others.
pub fn beside<R>(work: impl FnOnce() -> R) -> impl FnOnce() -> R {
    let processors = BESIDE.get();
    move || {
        if let Some(processors) = processors {
            // If they are gone meanwhile, the thread stays with those that it inherits.
            let _ = sched_setaffinity(None, &processors);
        }
        work()
    }
}

#[cfg(test)]
mod tests {
    use rustix::thread::sched_getaffinity;

    use super::*;
    use crate::thread_builder;

    #[test]
    fn work_beside_a_pinned_thread_has_the_other_processors() {
        let allowed = sched_getaffinity(None).unwrap();
        let pinned = move || {
            let all = (0..CpuSet::MAX_CPU).filter(|processor| allowed.is_set(*processor));
            let mut own = CpuSet::new();
            own.set(all.min().unwrap());
            pin(&own, allowed).unwrap();
            let of = |work: fn() -> CpuSet| std::thread::spawn(work).join().unwrap();
            let affinity = || sched_getaffinity(None).unwrap();
            assert_eq!((affinity(), of(affinity)), (own, own));
            assert_eq!(std::thread::spawn(beside(affinity)).join().unwrap(), allowed);
        };
        std::thread::spawn(pinned).join().unwrap();
        // Another thread is not pinned.
        beside(|| assert_eq!(sched_getaffinity(None).unwrap(), allowed))();
    }

    /// Twice as much as the standard library's default.
    #[test]
    fn a_thread_has_room_for_large_frames() {
        let large = || std::hint::black_box([1u8; 4 << 20]).iter().map(|&x| usize::from(x)).sum();
        let sum: usize = thread_builder("large").spawn(large).unwrap().join().unwrap();
        assert_eq!(sum, 4 << 20);
    }
}
