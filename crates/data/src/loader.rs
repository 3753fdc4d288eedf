//! The loader: batches in order, made ahead of the training loop.
//!
//! In go a data set, a sampler and where to start; out come [`Batch`]es, from an iterator. A loader
//! knows nothing of what is done with them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::{Builder, JoinHandle};

use paceline_memory::Allocator;
use paceline_trace::Track;

use crate::batch::{Producer, panic_message};
use crate::{Batch, DataError, Dataset, Position, Sampler};

/// Whether batches are made before they are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prefetch {
    /// Each batch is made when it is asked for, on the thread that asks.
    None,
    /// A separate thread makes batches ahead of time.
    Background {
        /// The most finished batches that wait.
        depth: usize,
    },
}

/// Where a [`Loader`] starts and ends, and how it works.
#[derive(Clone, Debug)]
pub struct LoaderConfig {
    /// The first batch. One past the last batch of an epoch is the start of the next.
    pub start: Position,
    /// The epoch before which it ends.
    pub end_epoch: u64,
    /// Whether to read ahead.
    pub prefetch: Prefetch,
    /// Where the making of each batch is recorded.
    pub track: Option<Arc<Track>>,
}

impl Default for LoaderConfig {
    /// One epoch from its start, two batches ahead.
    fn default() -> Self {
        let prefetch = Prefetch::Background { depth: 2 };
        Self { start: Position::default(), end_epoch: 1, prefetch, track: None }
    }
}

/// An iterator over one rank's batches.
///
/// It ends after an error. Its memory is taken from the allocator once, at construction, and reused by
/// all batches as long as the caller holds one at a time. Dropping the loader ends its thread as soon as
/// the sample that is being read is complete.
#[derive(Debug)]
pub struct Loader(Source);

#[derive(Debug)]
enum Source {
    /// Boxed: it is much larger than the others.
    Inline(Box<Recorded>),
    Thread(Prefetcher),
    Done,
}

impl Loader {
    /// Errors when the sampler is for another number of samples, when an input has more than three
    /// extents, when the start lies outside an epoch, or when there is no memory or no thread left.
    pub fn new(
        dataset: Arc<dyn Dataset>,
        sampler: Sampler,
        allocator: Allocator,
        config: LoaderConfig,
    ) -> Result<Self, DataError> {
        let LoaderConfig { start, end_epoch, prefetch, track } = config;
        let producer = Producer::new(dataset, sampler, allocator, start, end_epoch)?;
        let producer = Recorded { producer, track };
        Ok(Self(match prefetch {
            Prefetch::None => {
                producer.producer.reserve(1)?;
                Source::Inline(Box::new(producer))
            }
            Prefetch::Background { depth } => {
                // One batch that the caller holds, `depth` that wait, and one that is being made.
                producer.producer.reserve(depth + 2)?;
                Source::Thread(Prefetcher::start(producer, depth)?)
            }
        }))
    }
}

impl Iterator for Loader {
    type Item = Result<Batch, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        let next = match &mut self.0 {
            Source::Inline(producer) => producer.next_batch(&AtomicBool::new(false)),
            Source::Thread(prefetcher) => prefetcher.next_batch(),
            Source::Done => None,
        };
        if !matches!(next, Some(Ok(_))) {
            self.0 = Source::Done;
        }
        next
    }
}

/// A producer, and the track on which the making of each batch is recorded.
#[derive(Debug)]
struct Recorded {
    producer: Producer,
    track: Option<Arc<Track>>,
}

impl Recorded {
    fn next_batch(&mut self, stopped: &AtomicBool) -> Option<Result<Batch, DataError>> {
        match &self.track {
            Some(track) => track.span("make batch", || self.producer.next_batch(stopped)),
            None => self.producer.next_batch(stopped),
        }
    }
}

/// The thread that makes batches, and the end of the channel on which they come.
#[derive(Debug)]
struct Prefetcher {
    stop: Arc<AtomicBool>,
    /// Taken when the thread is to end: its next send then fails.
    batches: Option<Receiver<Result<Batch, DataError>>>,
    /// Taken when it is joined.
    thread: Option<JoinHandle<()>>,
}

impl Prefetcher {
    fn start(mut producer: Recorded, depth: usize) -> Result<Self, DataError> {
        let stop = Arc::new(AtomicBool::new(false));
        let (sender, receiver) = sync_channel(depth);
        let stopped = stop.clone();
        let work = move || {
            while let Some(batch) = producer.next_batch(&stopped) {
                let failed = batch.is_err();
                if sender.send(batch).is_err() || failed {
                    break;
                }
            }
        };
        let thread = Builder::new().name("loader".to_owned()).spawn(work);
        let thread = Some(thread.map_err(DataError::Thread)?);
        Ok(Self { stop, batches: Some(receiver), thread })
    }

    fn next_batch(&mut self) -> Option<Result<Batch, DataError>> {
        if let Ok(batch) = self.batches.as_ref()?.recv() {
            return Some(batch);
        }
        // The thread is gone, after its last batch or by a panic that it could not report.
        let panic = self.thread.take()?.join().err()?;
        Some(Err(DataError::ThreadPanicked { message: panic_message(&*panic) }))
    }
}

impl Drop for Prefetcher {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.batches = None;
        if let Some(thread) = self.thread.take() {
            // The caller is gone, so nobody can be told of a panic.
            let _ = thread.join();
        }
    }
}
