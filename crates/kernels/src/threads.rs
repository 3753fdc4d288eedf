//! The threads of one rank, which share the work of each operation.
//!
//! In: a number of indices and a function. Out: the function has run once on each index; which thread ran it is not defined, so
//! no result may depend on it.
//!
//! The calling thread works too, and every thread takes the next index when it is free. So nobody waits for a thread that the
//! system does not run, unless it has begun an index. An operation of a small model takes ten microseconds, as long as it takes
//! to wake a thread: one that finds nothing to do looks for more a while before it sleeps.

use std::any::Any;
use std::cell::UnsafeCell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

use paceline_trace::{Track, lock, thread_builder};

use crate::{KernelError, Processor, Result};

/// The span of a thread's part of an operation.
const SHARE: &str = "share of a kernel";

/// How long a thread looks for work before it sleeps, at most: after each time in vain half as long.
const LOOK: Duration = Duration::from_micros(100);
const SHORTEST_LOOK: Duration = Duration::from_micros(3);

/// The threads of one rank. With one thread the caller does all work.
#[derive(Debug)]
pub struct Threads {
    count: usize,
    helpers: Option<Helpers>,
    /// Empty if the threads record nothing.
    pub(crate) tracks: Vec<Arc<Track>>,
}

/// The address of items. Each is taken by one thread.
struct Items<T>(*mut T);

// SAFETY: an address. Each item is taken by one thread, which may have it.
unsafe impl<T: Send> Sync for Items<T> {}

impl<T> Items<T> {
    fn at(&self, index: usize) -> *mut T {
        self.0.wrapping_add(index)
    }
}

impl Threads {
    /// `num_threads` threads, of which the calling thread of an operation is one. Errors if the system cannot start the
    /// others: fewer threads would silently change times.
    pub fn new(num_threads: usize) -> Result<Self> {
        let refused = |error: std::io::Error| KernelError::NoThreads {
            num_threads,
            reason: error.to_string(),
        };
        let helpers = (num_threads > 1).then(|| Helpers::start(num_threads - 1).map_err(refused));
        Ok(Self { helpers: helpers.transpose()?, ..Self::none(num_threads) })
    }

    /// A number of threads, none of them started.
    pub(crate) fn none(num_threads: usize) -> Self {
        Self { count: num_threads.max(1), helpers: None, tracks: Vec::new() }
    }

    /// The number of threads.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Runs `work` on every item, on all threads. A single item is done at once.
    pub(crate) fn for_each<T: Send>(&self, mut items: Vec<T>, work: impl Fn(T) + Sync) {
        let (first, count) = (Items(items.as_mut_ptr()), items.len());
        // SAFETY: no element is left that must be initialized. The items belong to the calls below; one that none has taken
        // when `work` panics is not dropped.
        unsafe { items.set_len(0) };
        self.for_each_index(count, &|index| {
            // SAFETY: each index below `count` comes once, and the vector outlives the calls.
            work(unsafe { first.at(index).read() });
        });
    }

    /// Runs `work` once on every index below `count`. Not generic, because every operation would have a copy of this code.
    fn for_each_index(&self, count: usize, work: &(dyn Fn(usize) + Sync)) {
        let helpers = self.helpers.as_ref().filter(|_| count > 1);
        let Some(helpers) = helpers else { return (0..count).for_each(work) };
        helpers.share(count, &|thread, index| match self.tracks.get(thread) {
            Some(track) => track.span(SHARE, || work(index)),
            None => work(index),
        });
    }

    /// The number of ranges into which [`Threads::split`] splits.
    pub(crate) fn num_parts(&self, len: usize) -> usize {
        self.count().min(len).max(1)
    }

    /// Splits `0..len` into one contiguous range per thread. The first ranges may be longer by one.
    pub(crate) fn split(&self, len: usize) -> Vec<Range<usize>> {
        let parts = self.num_parts(len);
        (0..parts).map(|part| part * len / parts..(part + 1) * len / parts).collect()
    }
}

/// The threads besides the caller. They end with this value.
#[derive(Debug)]
struct Helpers {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

/// The current job, and which threads sleep.
#[derive(Debug)]
struct Shared {
    /// The number of the current job in the high half, and of its indices that nobody has taken in the low half.
    ticket: AtomicU64,
    /// The current job. Written by the caller while no index is taken or left; read by who has taken one.
    job: UnsafeCell<Option<SharedWork>>,
    /// The indices that are not done.
    pending: AtomicUsize,
    /// Whether a caller has a job. Another one, or one from within a job, works alone meanwhile.
    is_busy: AtomicBool,
    /// Whether each helper sleeps, or is about to.
    asleep: Vec<AtomicBool>,
    has_ended: AtomicBool,
    /// The panic of a helper.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

/// An operation's work on a thread's number and an index, how many indices there are, and who waits for them.
#[derive(Debug)]
struct SharedWork {
    work: *const Work<'static>,
    count: usize,
    caller: Thread,
}

type Work<'a> = dyn Fn(usize, usize) + Sync + 'a;

// SAFETY: `job` is written and read as its comment says, in the order that `ticket` and `pending` make; its address leads to
// what is `Sync`, and which the caller keeps until no index is pending.
unsafe impl Sync for Shared {}
// SAFETY: as above.
unsafe impl Send for Shared {}

impl Helpers {
    fn start(count: usize) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            ticket: AtomicU64::new(0),
            job: UnsafeCell::new(None),
            pending: AtomicUsize::new(0),
            is_busy: AtomicBool::new(false),
            asleep: (0..count).map(|_| AtomicBool::new(false)).collect(),
            has_ended: AtomicBool::new(false),
            panic: Mutex::default(),
        });
        // Those that have started end with it if the system refuses one.
        let mut helpers = Self { shared, threads: Vec::new() };
        for number in 1..=count {
            let shared = helpers.shared.clone();
            let builder = thread_builder(format!("compute-{number}"));
            let helper = builder.spawn(move || shared.help(number))?;
            helpers.threads.push(helper);
        }
        Ok(helpers)
    }

    /// Runs `work` once on every index below `count`, on the caller's thread, whose number is 0, and those that are free.
    fn share(&self, count: usize, work: &Work<'_>) {
        let shared = &*self.shared;
        if shared.is_busy.swap(true, Ordering::Acquire) {
            return (0..count).for_each(|index| work(0, index));
        }
        let caller = thread::current();
        // SAFETY: only the lifetime changes. No helper follows the address once no index is pending, and until then this
        // call does not return.
        let work = unsafe { std::mem::transmute::<&Work<'_>, &'static Work<'static>>(work) };
        // SAFETY: this thread has `is_busy`, and of an earlier job no index was left or pending when its caller gave it back.
        unsafe { *shared.job.get() = Some(SharedWork { work, count, caller }) };
        shared.pending.store(count, Ordering::Relaxed);
        let number = (shared.ticket.load(Ordering::Relaxed) >> 32) + 1;
        shared.ticket.store(number << 32 | count as u64, Ordering::Release);
        self.wake(count - 1);
        let mut outcome = Ok(());
        while let Some((_, index)) = shared.take() {
            let run = || work(0, index);
            outcome = outcome.and(catch_unwind(AssertUnwindSafe(run)));
            shared.pending.fetch_sub(1, Ordering::Release);
        }
        shared.wait_for_others();
        let theirs = lock(&shared.panic).take();
        shared.is_busy.store(false, Ordering::Release);
        if let Some(panic) = outcome.err().or(theirs) {
            resume_unwind(panic);
        }
    }

    /// Wakes so many helpers, if they sleep.
    fn wake(&self, most: usize) {
        // Either this thread sees that a helper is about to sleep, or the helper sees the job.
        fence(Ordering::SeqCst);
        for (asleep, helper) in self.shared.asleep.iter().zip(&self.threads).take(most) {
            if asleep.load(Ordering::Relaxed) && asleep.swap(false, Ordering::Relaxed) {
                helper.thread().unpark();
            }
        }
    }
}

impl Drop for Helpers {
    fn drop(&mut self) {
        self.shared.has_ended.store(true, Ordering::Release);
        self.threads.iter().for_each(|helper| helper.thread().unpark());
        // A panic in a job was the caller's already.
        self.threads.drain(..).for_each(|helper| drop(helper.join()));
    }
}

impl Shared {
    /// Takes an index of the current job, if one is left.
    fn take(&self) -> Option<(&SharedWork, usize)> {
        let mut ticket = self.ticket.load(Ordering::Acquire);
        while ticket as u32 > 0 {
            let (success, failure) = (Ordering::AcqRel, Ordering::Acquire);
            match self.ticket.compare_exchange_weak(ticket, ticket - 1, success, failure) {
                Ok(_) => {
                    // SAFETY: the job was written before its ticket, and stays until the index is done.
                    let job = unsafe { (*self.job.get()).as_ref() };
                    let job = job.expect("a ticket comes after its job");
                    return Some((job, job.count - ticket as u32 as usize));
                }
                Err(now) => ticket = now,
            }
        }
        None
    }

    /// The life of a helper.
    fn help(&self, number: usize) {
        let mut look = LOOK;
        while !self.has_ended.load(Ordering::Acquire) {
            let Some((job, index)) = self.take() else {
                self.rest(number, &mut look);
                continue;
            };
            let (work, caller) = (job.work, job.caller.clone());
            // SAFETY: the caller of the job waits until the index is done.
            let run = || unsafe { (*work)(number, index) };
            if let Err(panic) = catch_unwind(AssertUnwindSafe(run)) {
                *lock(&self.panic) = Some(panic);
            }
            // From here on the job may be gone.
            if self.pending.fetch_sub(1, Ordering::Release) == 1 {
                caller.unpark();
            }
        }
    }

    /// Returns when there may be something to do.
    fn rest(&self, number: usize, look: &mut Duration) {
        let is_over = || self.ticket.load(Ordering::Relaxed) as u32 > 0;
        if looked_until(*look, is_over) {
            *look = LOOK;
            return;
        }
        *look = (*look / 2).max(SHORTEST_LOOK);
        let asleep = &self.asleep[number - 1];
        asleep.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        while asleep.load(Ordering::Relaxed)
            && !is_over()
            && !self.has_ended.load(Ordering::Acquire)
        {
            thread::park();
        }
        asleep.store(false, Ordering::Relaxed);
    }

    /// Waits for the indices that other threads have taken.
    fn wait_for_others(&self) {
        let is_over = || self.pending.load(Ordering::Acquire) == 0;
        if !looked_until(LOOK, is_over) {
            while !is_over() {
                thread::park();
            }
        }
    }
}

/// Whether this becomes true within some time.
fn looked_until(limit: Duration, is_over: impl Fn() -> bool) -> bool {
    let begin = Instant::now();
    loop {
        for _ in 0..16 {
            if is_over() {
                return true;
            }
            std::hint::spin_loop();
        }
        if begin.elapsed() > limit {
            return false;
        }
    }
}

/// Elements that a thread touches at least: with fewer, waking it takes longer than its share of the work.
const ELEMS_OF_THREAD: usize = 1 << 14;

/// Splits elements as [`batches`] does, or leaves one part if the operation touches too few, `touched` of all operands together,
/// for several threads.
pub(crate) fn shares<'a, T>(
    cpu: &Processor,
    all: &'a mut [T],
    elems: usize,
    batch: usize,
    touched: usize,
) -> Vec<(usize, &'a mut [T])> {
    if touched < ELEMS_OF_THREAD * cpu.threads.count() {
        vec![(0, all)]
    } else {
        batches(cpu, all, elems, batch)
    }
}

/// Divides the images of a batch between the threads. Each part comes with the number of its first image.
pub(crate) fn batches<'a, T>(
    cpu: &Processor,
    all: &'a mut [T],
    elems: usize,
    batch: usize,
) -> Vec<(usize, &'a mut [T])> {
    let mut rest = all;
    let parts = cpu.threads.split(batch).into_iter();
    parts
        .map(|range| {
            let (part, after) = std::mem::take(&mut rest).split_at_mut(range.len() * elems);
            rest = after;
            (range.start, part)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How often `work` has run on each index below `count`, over so many operations.
    fn runs(threads: &Threads, count: usize, operations: usize) -> Vec<usize> {
        let runs: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
        for operation in 0..operations {
            threads.for_each(runs.iter().collect(), |runs| {
                runs.fetch_add(1, Ordering::Relaxed);
            });
            // Now and then the helpers fall asleep.
            if operation % 1000 == 999 {
                thread::sleep(2 * LOOK);
            }
        }
        runs.into_iter().map(AtomicUsize::into_inner).collect()
    }

    #[test]
    fn each_index_comes_once() {
        for (num_threads, count) in [(1, 3), (2, 2), (2, 7), (3, 2), (4, 4), (7, 100)] {
            let threads = Threads::new(num_threads).unwrap();
            let expected = vec![5000; count];
            assert_eq!(runs(&threads, count, 5000), expected, "{num_threads} threads");
        }
    }

    #[test]
    fn several_use_the_same_threads_and_a_job_may_have_jobs() {
        let threads = Threads::new(3).unwrap();
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| assert_eq!(runs(&threads, 4, 3000), [3000; 4]));
            }
        });
        let all = || runs(&threads, 2, 10);
        threads.for_each(vec![0; 5], |_| assert_eq!(all(), [10, 10]));
    }

    #[test]
    fn a_panic_is_the_callers_and_the_threads_go_on() {
        let threads = Threads::new(2).unwrap();
        for index in 0..200 {
            let run = || threads.for_each((0..8).collect(), |at: usize| assert!(at != index % 8));
            assert!(catch_unwind(AssertUnwindSafe(run)).is_err());
            assert_eq!(runs(&threads, 8, 1), [1; 8]);
        }
    }
}
