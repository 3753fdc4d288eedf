//! What a strategy works on: one rank's copy of the model.

use paceline_collectives::Group;
use paceline_kernels::Compute;
use paceline_memory::{Category, DType, Tensor};
use paceline_model::{Model, Storage};

use crate::{Result, Strategy};

/// One rank's share of a batch.
#[derive(Clone, Debug)]
pub struct MicroBatch {
    /// The rank's samples (n, ...); n may be zero at the tail of an epoch.
    pub inputs: Tensor,
    /// Their targets: labels (n) or values (n, columns).
    pub targets: Tensor,
    /// Samples in the shares of all ranks together.
    pub global_count: usize,
}

/// One rank's copy of the model, with its means of computing and communicating.
#[derive(Debug)]
pub struct Replica {
    /// The network and its loss.
    pub model: Model,
    /// Its parameters and gradients.
    pub storage: Storage,
    /// Threads, instructions and memory.
    pub compute: Compute,
    /// The ranks that train together.
    pub group: Group,
    /// Sums over the batch that all ranks agree on: loss, correct.
    pub(crate) sums: Tensor,
}

impl Replica {
    /// A replica in memory of the strategy's choice, with parameters as the seed gives them on rank
    /// 0, everywhere; the strategy is ready to train it.
    pub fn new(
        strategy: &mut dyn Strategy,
        model: Model,
        compute: Compute,
        group: Group,
        seed: u64,
    ) -> Result<Self> {
        let storage = strategy.backing(&model, &compute, &group)?;
        let bytes = 2 * size_of::<f64>();
        let sums = group.allocate(&compute.allocator, bytes, Category::Communication)?;
        let sums = Tensor::new(sums, 0, DType::F64, [2])?;
        storage.initialize(seed)?;
        group.broadcast(storage.values(), 0)?;
        let replica = Self { model, storage, compute, group, sums };
        strategy.prepare(&replica)?;
        Ok(replica)
    }
}
