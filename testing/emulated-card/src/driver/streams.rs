//! Streams: queues of work, and waits that run exactly what comes before them.
//!
//! Nothing runs when it is submitted. A wait names pieces of work; they and what they wait for in other streams are
//! run, one after the other, and where several streams could go on the seed picks one.

use std::collections::{BTreeMap, VecDeque};
use std::sync::MutexGuard;
use std::time::{Duration, Instant};

use crate::boundary::{Outcome, Status};
use crate::cupti;
use crate::fault::Fault;

use super::state::{Driver, lock};
use super::work::{CardWork, TaskProgress, WorkContext};

/// A stream.
pub struct EmulatedStream {
    pub card: usize,
    /// Whether it is ordered with stream 0.
    pub blocking: bool,
    pub capture: Option<usize>,
    /// Destroyed streams live until their work is done.
    pub destroyed: bool,
    /// Each with the number of the call that submitted it.
    queue: VecDeque<(u32, CardWork)>,
    submitted: u64,
}

impl EmulatedStream {
    /// An empty stream.
    pub fn new(card: usize, blocking: bool) -> Self {
        Self {
            card,
            blocking,
            capture: None,
            destroyed: false,
            queue: VecDeque::new(),
            submitted: 0,
        }
    }

    /// How many pieces of work were submitted.
    pub fn submitted(&self) -> u64 {
        self.submitted
    }

    fn done(&self) -> u64 {
        self.submitted - self.queue.len() as u64
    }
}

/// Pieces of work by their streams: so many of each.
pub type Needed = BTreeMap<usize, u64>;

impl Driver {
    /// Puts work at the end of a stream, or into the capture that the stream takes part in.
    pub fn submit(&mut self, stream: usize, work: CardWork) -> Outcome {
        if Self::is_null_stream(stream) {
            self.refuse_null_stream(stream)?;
        }
        let Some(queue) = self.objects.streams.get(&stream) else {
            return Err(Status::INVALID_HANDLE);
        };
        let card = queue.card;
        if let Some(id) = queue.capture {
            let capture = self.objects.captures.get_mut(&id).ok_or(Status::UNKNOWN)?;
            if capture.invalid {
                return Err(Status::CAPTURE_INVALIDATED);
            }
            capture.push(stream, work);
            return Ok(());
        }
        self.counts.submissions +=
            u64::from(matches!(work, CardWork::Kernel(_) | CardWork::Task(_) | CardWork::Graph(_)));
        // Stream 0 waits for every blocking stream, and they wait for it.
        let null = Self::is_null_stream(stream);
        let blocking = queue.blocking;
        let is_before = |handle: usize, other: &EmulatedStream| {
            let ordered = if null { other.blocking } else { Self::is_null_stream(handle) };
            blocking && ordered && handle != stream && other.card == card && !other.queue.is_empty()
        };
        let waits: Vec<CardWork> = (self.objects.streams.iter())
            .filter(|(handle, other)| is_before(**handle, other))
            .map(|(handle, other)| CardWork::Wait { stream: *handle, number: other.submitted })
            .collect();
        let call = work.function().map_or(0, |function| cupti::called(function, || ()).1);
        let queue = self.objects.streams.get_mut(&stream).ok_or(Status::INVALID_HANDLE)?;
        for work in waits.into_iter().chain([work]) {
            queue.queue.push_back((call, work));
            queue.submitted += 1;
        }
        Ok(())
    }

    /// All work that was submitted to a stream so far.
    pub fn all_of(&self, stream: usize) -> Needed {
        let submitted = self.objects.streams.get(&stream).map_or(0, |s| s.submitted);
        Needed::from([(stream, submitted)])
    }

    /// Adds the work that the needed work waits for.
    fn with_dependencies(&self, mut needed: Needed) -> Needed {
        let mut open: Vec<(usize, u64)> = needed.iter().map(|(s, n)| (*s, *n)).collect();
        while let Some((handle, number)) = open.pop() {
            let Some(stream) = self.objects.streams.get(&handle) else { continue };
            let count = number.saturating_sub(stream.done()) as usize;
            for (_, work) in stream.queue.iter().take(count) {
                if let CardWork::Wait { stream, number } = work {
                    let known = needed.entry(*stream).or_insert(0);
                    if *known < *number {
                        *known = *number;
                        open.push((*stream, *number));
                    }
                }
            }
        }
        needed
    }

    /// Whether a stream has finished so many pieces of work. A stream that is gone has finished them all.
    pub fn is_done(&self, stream: usize, number: u64) -> bool {
        self.objects.streams.get(&stream).is_none_or(|s| s.done() >= number)
    }

    fn is_met(&self, needed: &Needed) -> bool {
        needed.iter().all(|(stream, number)| self.is_done(*stream, *number))
    }

    fn is_ready(&self, stream: usize, number: u64) -> bool {
        let Some(stream) = self.objects.streams.get(&stream) else { return false };
        let waits = match stream.queue.front() {
            Some((_, CardWork::Wait { stream, number })) => !self.is_done(*stream, *number),
            Some(_) => false,
            None => true,
        };
        !waits && stream.done() < number
    }

    /// Runs one piece of the needed work. `false` if every piece waits for another rank, or after a fault.
    fn advance(&mut self, needed: &Needed) -> bool {
        let mut ready: Vec<usize> = (needed.iter())
            .filter(|(stream, number)| self.is_ready(**stream, **number))
            .map(|(stream, _)| *stream)
            .collect();
        if self.settings.seed != 0 {
            self.random.shuffle(&mut ready);
        }
        ready.into_iter().any(|stream| self.run_front(stream))
    }

    /// Runs the work at the front of a stream, or one node of it if it is a graph. `false` as in [`Self::run_work`].
    fn run_front(&mut self, handle: usize) -> bool {
        let Some(stream) = self.objects.streams.get(&handle) else { return false };
        let (card, Some((call, work))) = (stream.card, stream.queue.front().cloned()) else {
            return false;
        };
        let place = (card, handle, call);
        match work {
            CardWork::Graph(mut run) => {
                let mut ready = run.ready();
                if self.settings.seed != 0 {
                    self.random.shuffle(&mut ready);
                }
                let ran = ready.into_iter().find(|node| self.run_work(place, run.work(*node)));
                let Some(node) = ran else { return false };
                run.finish(node);
                if !run.is_done() {
                    if let Some(stream) = self.objects.streams.get_mut(&handle) {
                        stream.queue[0] = (call, CardWork::Graph(run));
                    }
                    return true;
                }
            }
            CardWork::Record { event } => {
                if let Some(event) = self.objects.events.get_mut(&event) {
                    event.at = Some(Instant::now());
                }
            }
            work => {
                if !self.run_work(place, &work) {
                    return false;
                }
            }
        }
        if let Some(stream) = self.objects.streams.get_mut(&handle) {
            stream.queue.pop_front();
        }
        self.bury(handle);
        true
    }

    /// Runs work of a card, in a stream, from a call of this number. `false` if the work waits for another rank, or after a fault, which the card remembers.
    fn run_work(&mut self, place: (usize, usize, u32), work: &CardWork) -> bool {
        let (card, start) = (place.0, cupti::now());
        let seed = if self.settings.seed == 0 { 0 } else { self.random.next() };
        let mut machine = WorkContext {
            memory: &mut self.cards[card].memory,
            pinned: &self.pinned,
            counts: &mut self.counts,
            seed,
            limit: self.settings.steps,
        };
        match machine.run(work) {
            Ok(TaskProgress::Pending) => false,
            Ok(TaskProgress::Done) => {
                if let Some(ran) = work.ran() {
                    cupti::ran(place, start, ran);
                }
                true
            }
            Err(fault) => {
                self.fail(card, fault);
                false
            }
        }
    }

    /// Breaks a card for good.
    pub fn fail(&mut self, card: usize, fault: Fault) {
        self.cards[card].fault.get_or_insert(fault);
    }

    /// Removes a destroyed stream that has no work left.
    pub fn bury(&mut self, handle: usize) {
        if self.objects.streams.get(&handle).is_some_and(|s| s.destroyed && s.queue.is_empty()) {
            self.objects.streams.remove(&handle);
        }
    }

    /// Everything that a card has to do.
    pub fn all_of_card(&self, card: usize) -> Needed {
        let streams = self.objects.streams.iter().filter(|(_, s)| s.card == card);
        streams.map(|(handle, s)| (*handle, s.submitted)).collect()
    }
}

/// Runs what is needed and returns when it is done, or when the card fails.
pub fn wait(mut driver: MutexGuard<'static, Driver>, card: usize, needed: Needed) -> Outcome {
    let needed = driver.with_dependencies(needed);
    loop {
        driver.healthy(card)?;
        if driver.is_met(&needed) {
            return Ok(());
        }
        if !driver.advance(&needed) {
            // Another rank may be a thread of this process, and needs the lock.
            drop(driver);
            std::thread::sleep(Duration::from_micros(50));
            driver = lock();
        }
    }
}

/// Runs one piece of what is needed, and says whether all of it is done. So a program that asks again and again gets
/// there, and one that asks too early learns that.
pub fn query(mut driver: MutexGuard<'static, Driver>, card: usize, needed: Needed) -> Outcome {
    if driver.is_met(&needed) {
        return driver.healthy(card);
    }
    let all = driver.with_dependencies(needed);
    driver.advance(&all);
    driver.healthy(card)?;
    Err(Status::NOT_READY)
}
