//! What a strategy works on: one rank's copy of the model.

use paceline_collectives::Group;
use paceline_kernels::Compute;
use paceline_memory::{Category, DType, Tensor};
use paceline_model::{Model, Storage};

use crate::Result;

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
    /// A replica whose gradients and sums the group reduces in place, with parameters as the seed
    /// gives them on rank 0, everywhere.
    pub fn new(model: Model, compute: Compute, group: Group, seed: u64) -> Result<Self> {
        let dtype = DType::F32;
        let allocator = compute.allocator.clone();
        let bytes = model.layout.num_bytes(dtype);
        let values = allocator.host(bytes, Category::Parameters)?;
        let grads = group.allocate(&allocator, bytes, Category::Gradients)?;
        let sums = group.allocate(&allocator, 2 * size_of::<f64>(), Category::Communication)?;
        let sums = Tensor::new(sums, 0, DType::F64, [2])?;
        let storage = Storage::new(model.layout.clone(), dtype, values, grads)?;
        storage.initialize(seed)?;
        let replica = Self { model, storage, compute, group, sums };
        replica.broadcast_parameters()?;
        Ok(replica)
    }

    /// Gives every rank the parameters of rank 0.
    pub fn broadcast_parameters(&self) -> Result<()> {
        self.group.broadcast(self.storage.values(), 0)?;
        Ok(())
    }
}
