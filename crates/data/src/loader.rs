//! The loader: an iterator over batches in order, made ahead of the training loop.
//!
//! Input: a data set, a sampler and where to start. Output: [`Batch`]es. A loader does not know how batches are used.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::JoinHandle;

use paceline_memory::Allocator;
use paceline_trace::{Track, beside, thread_builder};

use crate::batch::{Producer, panic_message};
use crate::{Batch, DataError, Dataset, Position, Sampler, ShareIter};

/// Whether batches are made before they are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prefetch {
    /// Each batch is made when it is asked for, on the thread that asks.
    None,
    /// A separate thread makes batches ahead of time.
    Background {
        /// The most finished batches that may wait.
        depth: usize,
    },
}

/// Where a [`Loader`] starts and ends, and how it works.
#[derive(Clone, Debug)]
pub struct LoaderConfig {
    /// The first batch. The position after the last batch of an epoch is the start of the next epoch.
    pub start: Position,
    /// The epoch before which the loader ends.
    pub end_epoch: u64,
    /// Whether to read ahead.
    pub prefetch: Prefetch,
    /// Where a span is recorded for each batch.
    pub track: Option<Arc<Track>>,
}

impl Default for LoaderConfig {
    /// The first epoch, reading two batches ahead, without a track.
    fn default() -> Self {
        let prefetch = Prefetch::Background { depth: 2 };
        Self { start: Position::default(), end_epoch: 1, prefetch, track: None }
    }
}

/// An iterator over one rank's batches.
///
/// The iterator ends after an error. The loader allocates its memory at construction, and reuses it as long as the caller
/// holds one batch at a time. Dropping the loader ends its thread as soon
/// as the sample that is being read is complete.
#[derive(Debug)]
pub struct Loader(BatchSource);

#[derive(Debug)]
enum BatchSource {
    /// Boxed, because it is much larger than the other variants.
    Inline(Box<Producer>),
    Thread(Prefetcher),
    Done,
}

impl Loader {
    /// Errors if the sampler is for another number of samples, if an input has more than three extents,
    /// if the start lies outside an epoch, or if memory or a thread cannot be allocated.
    pub fn new(
        dataset: Arc<dyn Dataset>,
        sampler: Sampler,
        allocator: Allocator,
        config: LoaderConfig,
    ) -> Result<Self, DataError> {
        let LoaderConfig { start, end_epoch, prefetch, track } = config;
        let shares = ShareIter::new(sampler, start, end_epoch)?;
        let producer = Producer::new(dataset, shares, allocator, track)?;
        Ok(Self(match prefetch {
            Prefetch::None => {
                producer.reserve(1)?;
                BatchSource::Inline(Box::new(producer))
            }
            Prefetch::Background { depth } => {
                // One batch that the caller holds, `depth` that wait, and one that is being made.
                producer.reserve(depth + 2)?;
                BatchSource::Thread(Prefetcher::start(producer, depth)?)
            }
        }))
    }
}

impl Iterator for Loader {
    type Item = Result<Batch, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        let next = match &mut self.0 {
            BatchSource::Inline(producer) => producer.next_batch(&AtomicBool::new(false)),
            BatchSource::Thread(prefetcher) => prefetcher.next_batch(),
            BatchSource::Done => None,
        };
        if !matches!(next, Some(Ok(_))) {
            self.0 = BatchSource::Done;
        }
        next
    }
}

/// The thread that makes batches, and the receiving end of their channel.
#[derive(Debug)]
struct Prefetcher {
    stop: Arc<AtomicBool>,
    /// Dropped to end the thread, whose next send then fails.
    batches: Option<Receiver<Result<Batch, DataError>>>,
    /// Taken when the thread is joined.
    thread: Option<JoinHandle<()>>,
}

impl Prefetcher {
    fn start(mut producer: Producer, depth: usize) -> Result<Self, DataError> {
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
        let thread = thread_builder("loader").spawn(beside(work));
        let thread = Some(thread.map_err(DataError::Thread)?);
        Ok(Self { stop, batches: Some(receiver), thread })
    }

    fn next_batch(&mut self) -> Option<Result<Batch, DataError>> {
        if let Ok(batch) = self.batches.as_ref()?.recv() {
            return Some(batch);
        }
        // The thread has ended: after its last batch, or because of a panic that it could not report.
        let panic = self.thread.take()?.join().err()?;
        Some(Err(DataError::ThreadPanicked { message: panic_message(&*panic) }))
    }
}

impl Drop for Prefetcher {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.batches = None;
        if let Some(thread) = self.thread.take() {
            // The caller has dropped the loader, so nobody can receive a panic.
            let _ = thread.join();
        }
    }
}
