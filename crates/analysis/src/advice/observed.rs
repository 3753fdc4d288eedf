//! Steps as all ranks saw them, on one clock: when each rank had its gradients final and its operations done.
//!
//! So the rank that all others wait for is known in each step, and means over all hide it. All times are in
//! milliseconds since a moment that all ranks share, such as the start of the step on rank 0. This module does not know
//! where the times come from, nor what follows from them.

/// A step as one rank saw it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RankStep {
    /// Start and end of the last backward pass.
    pub backward: [f64; 2],
    /// When each gradient was final, in the order of [`Observed::gradients`].
    pub ready: Vec<f64>,
    /// When each operation was submitted, started, had all ranks, and was done, in the order of [`Observed::bytes`].
    pub ops: Vec<[f64; 4]>,
    /// How long this rank was exposed to waiting for the slowest one.
    pub waiting: f64,
}

/// A step as all ranks saw it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Seen {
    /// Whether it has the operations and gradients of the first measured step.
    pub is_alike: bool,
    /// Exposed communication: mean over the ranks.
    pub exposed: f64,
    /// The part of it in which operations waited for the slowest rank: mean over the ranks.
    pub waiting: f64,
    /// Arithmetic and copies that synchronization adds: mean over the ranks.
    pub sync: f64,
    /// The ranks.
    pub ranks: Vec<RankStep>,
}

impl Seen {
    /// The latest of the ranks' times of an operation: when the last of them had submitted (0), started (1), ... or done it (3).
    pub fn latest(&self, op: usize, part: usize) -> f64 {
        self.ranks.iter().map(|rank| rank.ops[op][part]).fold(f64::NEG_INFINITY, f64::max)
    }
}

/// The steps that are known of all ranks, in order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Observed {
    /// The steps.
    pub steps: Vec<Seen>,
    /// The number of each gradient, in the order in which they are final.
    pub gradients: Vec<usize>,
    /// The bytes of each operation.
    pub bytes: Vec<u64>,
    /// The operations that carry buckets.
    pub bucket_ops: Vec<usize>,
    /// The operations that a pass waits for before it goes on, such as the sums of a synchronized batch norm.
    pub blocking_ops: Vec<usize>,
}

impl Observed {
    /// The steps whose operations and gradients are known on all ranks.
    pub fn alike(&self) -> impl Iterator<Item = &Seen> {
        self.steps.iter().filter(|step| self.is_whole(step))
    }

    /// Whether the operations and gradients of a step are known on all ranks.
    pub fn is_whole(&self, step: &Seen) -> bool {
        let is_whole = |rank: &RankStep| {
            rank.ready.len() == self.gradients.len() && rank.ops.len() == self.bytes.len()
        };
        step.is_alike && step.ranks.iter().all(is_whole)
    }
}
