//! Which samples each rank reads in each step.
//!
//! In go the number of samples, the size of the global batch and the pair (rank, world); out come
//! indices. Nothing is agreed upon between ranks: each works out the same order from the seed and
//! takes its share. It knows nothing of the samples themselves.

use std::ops::Range;

use rand::seq::SliceRandom;

use crate::random::{Purpose, generator};
use crate::{DataError, Position};

/// The order of the samples within an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// As the data set has them.
    Sequential,
    /// Another random order in each epoch.
    Shuffled {
        /// Decides all of the orders, together with the epoch.
        seed: u64,
    },
}

/// Cuts each epoch into global batches and each global batch into the shares of the ranks.
///
/// Step `s` takes the samples `s * global_batch..(s + 1) * global_batch` of the epoch's order, fewer
/// at the end. A rank's share is a contiguous piece of them, so the shares of all ranks one after
/// the other are what a single process would read. Shares differ by one sample at most, lower ranks
/// having the larger ones; where a batch has fewer samples than there are ranks, the last ranks get
/// none. Each sample occurs once per epoch.
#[derive(Clone, Debug)]
pub struct Sampler {
    len: usize,
    global_batch: usize,
    rank: usize,
    world: usize,
    order: Order,
    max_steps: usize,
}

/// The order of one epoch.
#[derive(Clone, Debug)]
pub struct EpochPlan {
    sampler: Sampler,
    epoch: u64,
    order: Vec<u32>, // (len)
}

/// What one rank reads in one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share<'a> {
    /// Its samples, which may be none.
    pub indices: &'a [u32],
    /// Samples of all ranks together.
    pub global_count: usize,
}

/// Numbers of samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SampleCounts {
    /// Those of this rank.
    pub own: u64,
    /// Those of all ranks together.
    pub all: u64,
}

impl Sampler {
    /// Shares for `rank` of `world`, of batches of `global_batch` samples over all ranks.
    ///
    /// Errors when there is nothing to sample, when the batch or the world is empty, or when the
    /// rank is not below the world size.
    pub fn new(
        len: usize,
        global_batch: usize,
        rank: usize,
        world: usize,
        order: Order,
    ) -> Result<Self, DataError> {
        let setting = |setting, needs, got| Err(DataError::Setting { setting, needs, got });
        // Indices are kept in 32 bits: half the memory, and no data set here has more samples.
        if len == 0 || u32::try_from(len).is_err() {
            return setting("the number of samples", "from 1 to 2^32 - 1".to_owned(), len);
        }
        DataError::at_least_one("the global batch", global_batch)?;
        DataError::at_least_one("the world size", world)?;
        if rank >= world {
            return setting("the rank", format!("below the world size {world}"), rank);
        }
        Ok(Self { len, global_batch, rank, world, order, max_steps: usize::MAX })
    }

    /// Ends each epoch after `max_steps` steps where it would have more; what is left over is not
    /// read in that epoch. Errors on zero.
    pub fn with_max_steps(self, max_steps: usize) -> Result<Self, DataError> {
        DataError::at_least_one("the number of steps per epoch", max_steps)?;
        Ok(Self { max_steps, ..self })
    }

    /// Samples per epoch, whatever the number of steps.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never: a sampler over nothing cannot be made.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Steps per epoch, the same on every rank.
    pub fn steps_per_epoch(&self) -> usize {
        self.len.div_ceil(self.global_batch).min(self.max_steps)
    }

    /// The most samples that this rank gets in one step, which is what it gets in the first.
    pub fn local_batch_max(&self) -> usize {
        self.share_of(self.global_batch.min(self.len)).len()
    }

    /// The order of an epoch, the same on every rank.
    pub fn epoch(&self, epoch: u64) -> EpochPlan {
        let mut order: Vec<u32> = (0..self.len as u32).collect();
        if let Order::Shuffled { seed } = self.order {
            order.shuffle(&mut generator(seed, Purpose::Shuffle, epoch, 0));
        }
        EpochPlan { sampler: self.clone(), epoch, order }
    }

    /// The samples of all steps that lie before `position`, in this epoch and in those before it.
    pub fn samples_before(&self, position: Position) -> SampleCounts {
        let of_epoch = |steps: usize| {
            let full = steps.min(self.len / self.global_batch);
            let tail = if steps > full { self.len % self.global_batch } else { 0 };
            let own = full * self.share_of(self.global_batch).len() + self.share_of(tail).len();
            SampleCounts { own: own as u64, all: (full * self.global_batch + tail) as u64 }
        };
        let complete = of_epoch(self.steps_per_epoch());
        let begun = of_epoch(position.step.min(self.steps_per_epoch()));
        SampleCounts {
            own: position.epoch.saturating_mul(complete.own).saturating_add(begun.own),
            all: position.epoch.saturating_mul(complete.all).saturating_add(begun.all),
        }
    }

    /// The part of `count` samples that is this rank's.
    fn share_of(&self, count: usize) -> Range<usize> {
        let (base, extra) = (count / self.world, count % self.world);
        let start = self.rank * base + self.rank.min(extra);
        start..start + base + usize::from(self.rank < extra)
    }
}

impl EpochPlan {
    /// The epoch.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// What this rank reads in `step`; nothing from [`Sampler::steps_per_epoch`] on.
    pub fn step(&self, step: usize) -> Option<Share<'_>> {
        if step >= self.sampler.steps_per_epoch() {
            return None;
        }
        let start = step * self.sampler.global_batch;
        let global_count = self.sampler.global_batch.min(self.order.len() - start);
        let share = self.sampler.share_of(global_count);
        Some(Share { indices: &self.order[start..][share], global_count })
    }
}
