//! Decides which samples of each batch a rank reads.
//!
//! Input: the number of samples, the size of the global batch and the pair (rank, world). Output: indices.
//! The ranks do not communicate: each computes the same order from the seed and takes its share.
//! A sampler knows nothing of the samples themselves.

use std::cmp::Reverse;
use std::ops::Range;
use std::sync::Arc;

use rand::seq::SliceRandom;

use crate::random::{RandomPurpose, generator};
use crate::{DataError, Position};

/// Batches of a window of samples of like length: see [`Sampler::with_lengths`].
const WINDOW_STEPS: usize = 50;

/// The order of the samples within an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SampleOrder {
    /// The order of the data set.
    Sequential,
    /// A different random order in each epoch.
    Shuffled {
        /// Determines the order, together with the epoch.
        seed: u64,
    },
}

/// Divides each epoch into global batches, and each global batch into the shares of the ranks.
///
/// Batch `b` has the samples `b * global_batch..(b + 1) * global_batch` of the epoch's order; the last batch
/// may have fewer. A rank's share is a contiguous part of the batch, so the shares of all ranks, one after
/// the other, are what a single process would read. Shares differ by at most one sample, the first being the largest; if
/// a batch has fewer samples than there are ranks, the last ranks get none. Each sample occurs once per epoch.
#[derive(Clone, Debug)]
pub struct Sampler {
    len: usize,
    global_batch: usize,
    rank: usize,
    world: usize,
    order: SampleOrder,
    max_batches: usize,
    /// Consecutive batches whose samples are divided together: see [`Sampler::with_steps_of`].
    batches_per_step: usize,
    /// The micro-batches of a batch, if it is cut by the data alone: see [`Sampler::with_micro_batches`].
    micro_batches: Option<CutBatch>,
    /// The length of each sample, if samples of like length are to be together.
    lengths: Option<Arc<[u32]>>,
}

/// How a batch is cut into micro-batches, and which of them a rank reads.
#[derive(Clone, Debug, PartialEq, Eq)]
struct CutBatch {
    /// All micro-batches of a batch.
    count: usize,
    own: Range<usize>,
    /// The most that any rank reads.
    most: usize,
}

/// The order of one epoch.
#[derive(Clone, Debug)]
pub struct EpochPlan {
    sampler: Sampler,
    epoch: u64,
    order: Vec<u32>, // (len)
}

/// The part of one batch or micro-batch that one rank reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share<'a> {
    /// The indices of the rank's samples; may be empty.
    pub indices: &'a [u32],
    /// Samples of all ranks together. If the batch is cut into micro-batches, the first of a rank counts those of all of them,
    /// and the others none.
    pub global_count: usize,
}

/// Numbers of samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SampleCounts {
    /// Samples of this rank.
    pub own: u64,
    /// Samples of all ranks together.
    pub all: u64,
}

impl Sampler {
    /// A sampler for rank `rank` of `world` ranks, which share global batches of `global_batch` samples.
    ///
    /// Errors if `len` is zero or does not fit into 32 bits, if the batch or the world is empty, or if the
    /// rank is not below the world size.
    pub fn new(
        len: usize,
        global_batch: usize,
        rank: usize,
        world: usize,
        order: SampleOrder,
    ) -> Result<Self, DataError> {
        let setting = |setting, needs, got| Err(DataError::Setting { setting, needs, got });
        // Indices are 32-bit numbers, which takes half the memory. No data set here has more samples.
        if len == 0 || u32::try_from(len).is_err() {
            return setting("the number of samples", "from 1 to 2^32 - 1".to_owned(), len);
        }
        DataError::at_least_one("the global batch", global_batch)?;
        DataError::at_least_one("the world size", world)?;
        if rank >= world {
            return setting("the rank", format!("below the world size {world}"), rank);
        }
        let (max_batches, batches_per_step) = (usize::MAX, 1);
        let (micro_batches, lengths) = (None, None);
        Ok(Self {
            len,
            global_batch,
            rank,
            world,
            order,
            max_batches,
            batches_per_step,
            micro_batches,
            lengths,
        })
    }

    /// Limits each epoch to `max_batches` batches. Errors on zero.
    pub fn with_max_batches(self, max_batches: usize) -> Result<Self, DataError> {
        DataError::at_least_one("the number of batches per epoch", max_batches)?;
        Ok(Self { max_batches, ..self })
    }

    /// Divides the samples of each `batches` consecutive batches together, first among the ranks and then among the
    /// batches. So `k` ranks read in one batch each what one rank reads in `k` batches, in the same order. Errors on zero.
    pub fn with_steps_of(self, batches: usize) -> Result<Self, DataError> {
        DataError::at_least_one("the number of batches per step", batches)?;
        Ok(Self { batches_per_step: batches, ..self })
    }

    /// Cuts each batch into as many equal micro-batches as all ranks have together. `shares` has those of each rank. So the
    /// micro-batches do not depend on the number of ranks. Each rank reads as many shares of a batch as the rank that has the
    /// most: first empty ones, then its own. Errors unless there is a share with a micro-batch for each rank.
    pub fn with_micro_batches(self, shares: &[Range<usize>]) -> Result<Self, DataError> {
        let (setting, got) = ("the number of shares", shares.len());
        let Some(own) = shares.get(self.rank).filter(|own| got == self.world && !own.is_empty())
        else {
            return Err(DataError::Setting { setting, needs: self.world.to_string(), got });
        };
        let count = shares.iter().map(Range::len).sum();
        let most = shares.iter().map(Range::len).max().unwrap_or(1);
        let micro_batches = Some(CutBatch { count, own: own.clone(), most });
        Ok(Self { micro_batches, ..self })
    }

    /// The number of shares that a rank reads of each batch.
    pub fn shares_per_batch(&self) -> usize {
        self.micro_batches.as_ref().map_or(1, |of| of.most)
    }

    /// Makes batches of samples of like length, so that little of them is padding.
    ///
    /// The order of the epoch is cut into windows of 50 steps. The samples of a window are sorted, the longest
    /// first, and cut into steps again; samples of one length stay in the order of the epoch. If the order is shuffled, the
    /// steps of a window are shuffled too, except for a last one with fewer samples. So each sample still
    /// occurs once per epoch, and shares are as large as without lengths.
    ///
    /// Errors unless there is a length for each sample.
    pub fn with_lengths(self, lengths: Vec<u32>) -> Result<Self, DataError> {
        if lengths.len() != self.len {
            let (setting, got) = ("the number of lengths", lengths.len());
            return Err(DataError::Setting { setting, needs: self.len.to_string(), got });
        }
        Ok(Self { lengths: Some(lengths.into()), ..self })
    }

    /// The number of samples of the data set, whatever the number of batches.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Always false: a sampler over no samples is refused.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Batches per epoch, the same on every rank.
    pub fn batches_per_epoch(&self) -> usize {
        self.len.div_ceil(self.global_batch).min(self.max_batches)
    }

    /// The most samples that this rank gets at once: its first share of the first batch.
    pub fn local_batch_max(&self) -> usize {
        let (at, parts) = match &self.micro_batches {
            Some(of) => (of.own.start, of.count),
            None => (self.rank, self.world),
        };
        part(self.global_batch.min(self.len), at, parts).len()
    }

    /// The order of an epoch, the same on every rank.
    pub fn epoch(&self, epoch: u64) -> EpochPlan {
        let mut order: Vec<u32> = (0..self.len as u32).collect();
        if let SampleOrder::Shuffled { seed } = self.order {
            order.shuffle(&mut generator(seed, RandomPurpose::Shuffle, epoch, 0));
        }
        if let Some(lengths) = &self.lengths {
            self.bring_together(&mut order, lengths, epoch);
        }
        EpochPlan { sampler: self.clone(), epoch, order }
    }

    /// Sorts the order of an epoch by length, within its windows.
    fn bring_together(&self, order: &mut [u32], lengths: &[u32], epoch: u64) {
        let of_step = self.global_batch.saturating_mul(self.batches_per_step);
        let windows = order.chunks_mut(of_step.saturating_mul(WINDOW_STEPS));
        for (number, window) in windows.enumerate() {
            window.sort_by_key(|index| Reverse(lengths[*index as usize]));
            let SampleOrder::Shuffled { seed } = self.order else { continue };
            let mut steps: Vec<Vec<u32>> =
                window.chunks_exact(of_step).map(<[u32]>::to_vec).collect();
            steps.shuffle(&mut generator(seed, RandomPurpose::Batches, epoch, number as u64));
            for (to, step) in window.chunks_exact_mut(of_step).zip(steps) {
                to.copy_from_slice(&step);
            }
        }
    }

    /// The number of samples in all batches before `position`, in this epoch and in earlier epochs.
    pub fn samples_before(&self, position: Position) -> SampleCounts {
        let of_epoch = |batches: usize| {
            let of_step = self.batches_per_step.saturating_mul(self.global_batch);
            // All steps of an epoch but the last are alike.
            let steps = (batches / self.batches_per_step).min(self.len / of_step);
            let count =
                |(own, all), share: ShareRange| (own + share.own.len(), all + share.global_count);
            let rest = steps * self.batches_per_step..batches;
            let (own, all) = rest.flat_map(|batch| self.shares_of(batch)).fold((0, 0), count);
            // A step is divided into `world * batches` parts, and the first of them get the extra samples. So a rank's
            // parts of a whole step are as large as its part of one batch.
            let own_of_step = match &self.micro_batches {
                Some(_) => self.shares_of(0).map(|share| share.own.len()).sum(),
                None => {
                    self.batches_per_step * part(self.global_batch, self.rank, self.world).len()
                }
            };
            SampleCounts {
                own: (steps * own_of_step + own) as u64,
                all: (steps * of_step + all) as u64,
            }
        };
        let complete = of_epoch(self.batches_per_epoch());
        let begun = of_epoch(position.batch.min(self.batches_per_epoch()));
        SampleCounts {
            own: position.epoch.saturating_mul(complete.own).saturating_add(begun.own),
            all: position.epoch.saturating_mul(complete.all).saturating_add(begun.all),
        }
    }

    /// This rank's shares of a batch.
    fn shares_of(&self, batch: usize) -> impl Iterator<Item = ShareRange> {
        (0..self.shares_per_batch()).map(move |at| self.share_of(batch, at))
    }

    /// This rank's samples of a batch, or of its micro-batch number `at`, as positions in the order of the epoch.
    fn share_of(&self, batch: usize, at: usize) -> ShareRange {
        if let Some(CutBatch { count, own, most }) = &self.micro_batches {
            let begin = batch * self.global_batch;
            let len = self.global_batch.min(self.len - begin);
            let own = match at.checked_sub(most - own.len()) {
                Some(at) => part(len, own.start + at, *count),
                None => 0..0,
            };
            let global_count = if at == 0 { len } else { 0 };
            return ShareRange { own: begin + own.start..begin + own.end, global_count };
        }
        let first = batch - batch % self.batches_per_step;
        let num_batches = self.batches_per_step.min(self.batches_per_epoch() - first);
        let begin = first * self.global_batch;
        let len = (num_batches.saturating_mul(self.global_batch)).min(self.len - begin);
        let of_rank =
            |rank: usize| part(len, rank * num_batches + batch - first, self.world * num_batches);
        let own = of_rank(self.rank);
        let global_count = match num_batches {
            1 => len,
            _ => (0..self.world).map(|rank| of_rank(rank).len()).sum(),
        };
        ShareRange { own: begin + own.start..begin + own.end, global_count }
    }
}

struct ShareRange {
    /// Those of this rank.
    own: Range<usize>,
    /// The number of samples of all ranks together.
    global_count: usize,
}

/// Part number `at` of `parts` equal parts of `count` samples. The first parts may have one sample more.
fn part(count: usize, at: usize, parts: usize) -> Range<usize> {
    let (base, extra) = (count / parts, count % parts);
    let start = at * base + at.min(extra);
    start..start + base + usize::from(at < extra)
}

impl EpochPlan {
    /// This rank's share of a batch, the first one if there are several. `None` if `batch` is not below
    /// [`Sampler::batches_per_epoch`].
    pub fn batch(&self, batch: usize) -> Option<Share<'_>> {
        self.share(batch, 0)
    }

    /// Share number `at` of a batch.
    fn share(&self, batch: usize, at: usize) -> Option<Share<'_>> {
        if batch >= self.sampler.batches_per_epoch() {
            return None;
        }
        let ShareRange { own, global_count } = self.sampler.share_of(batch, at);
        Some(Share { indices: &self.order[own], global_count })
    }
}

/// The shares of a rank in order, from a position up to the start of an epoch.
#[derive(Debug)]
pub struct ShareIter {
    sampler: Sampler,
    next: Position,
    /// The next share of the next batch.
    next_share: usize,
    end_epoch: u64,
    plan: EpochPlan,
}

impl ShareIter {
    /// Errors if the position lies outside an epoch.
    pub fn new(sampler: Sampler, start: Position, end_epoch: u64) -> Result<Self, DataError> {
        let (batches, got) = (sampler.batches_per_epoch(), start.batch);
        if got > batches {
            let needs = format!("at most {batches}");
            return Err(DataError::Setting { setting: "the first batch", needs, got });
        }
        let plan = sampler.epoch(start.epoch);
        Ok(Self { sampler, next: start, next_share: 0, end_epoch, plan })
    }

    /// Where the shares come from.
    pub fn sampler(&self) -> &Sampler {
        &self.sampler
    }

    /// The next share, and the position of its batch. `None` after the last one.
    #[expect(clippy::should_implement_trait, reason = "an iterator cannot lend")]
    pub fn next(&mut self) -> Option<(Position, Share<'_>)> {
        if self.next.batch >= self.sampler.batches_per_epoch() {
            self.next = Position { epoch: self.next.epoch + 1, batch: 0 };
        }
        let position = self.next;
        if position.epoch >= self.end_epoch {
            return None;
        }
        let at = self.next_share;
        self.next_share = (at + 1) % self.sampler.shares_per_batch();
        self.next.batch += usize::from(self.next_share == 0);
        if self.plan.epoch != position.epoch {
            self.plan = self.sampler.epoch(position.epoch);
        }
        Some((position, self.plan.share(position.batch, at)?))
    }
}
