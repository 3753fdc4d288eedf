//! What a kernel computes with: vector instructions, threads and scratch memory.

use paceline_memory::{Allocator, Category, DType, MemoryError, Tensor, WriteGuard};
use rayon::prelude::*;

use crate::SimdLevel;

/// The means of computation of one rank.
#[derive(Debug)]
pub struct Compute {
    pub(crate) simd: SimdLevel,
    /// How many threads share the work of a kernel.
    pub threads: Threads,
    /// Where scratch memory comes from.
    pub allocator: Allocator,
}

impl Compute {
    /// Computes with `num_threads` threads and the best vector instructions of this processor.
    pub fn new(num_threads: usize, allocator: Allocator) -> Self {
        Self { simd: SimdLevel::detect(), threads: Threads::new(num_threads), allocator }
    }

    /// The same with other vector instructions; `None` if this processor does not have them.
    pub fn with_simd(self, simd: SimdLevel) -> Option<Self> {
        SimdLevel::available().contains(&simd).then_some(Self { simd, ..self })
    }

    /// Which vector instructions fast paths use.
    pub fn simd(&self) -> SimdLevel {
        self.simd
    }

    /// Scratch memory of `len` elements with unspecified contents, for the time of one kernel.
    pub(crate) fn scratch(&self, len: usize) -> Result<WriteGuard<f32>, MemoryError> {
        self.tensor(DType::F32, len)?.write()
    }

    fn tensor(&self, dtype: DType, len: usize) -> Result<Tensor, MemoryError> {
        self.allocator.tensor(dtype, [len], Category::Workspace)
    }
}

/// The threads of one rank. A single one means that no pool exists and nothing is handed over.
#[derive(Debug)]
pub struct Threads {
    pool: Option<rayon::ThreadPool>,
}

impl Threads {
    /// `num_threads` threads. Panics if the system has no room for them: computing with fewer would
    /// change results and times without a word.
    pub fn new(num_threads: usize) -> Self {
        let build = || {
            rayon::ThreadPoolBuilder::new()
                .num_threads(num_threads)
                .thread_name(|index| format!("compute-{index}"))
                .build()
                .unwrap_or_else(|e| panic!("no room for {num_threads} threads: {e}"))
        };
        Self { pool: (num_threads > 1).then(build) }
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.pool.as_ref().map_or(1, rayon::ThreadPool::current_num_threads)
    }

    /// Runs `work` on every item, on all threads; returns the first error.
    pub(crate) fn for_each<T: Send, E: Send>(
        &self,
        items: Vec<T>,
        work: impl Fn(T) -> Result<(), E> + Send + Sync,
    ) -> Result<(), E> {
        match &self.pool {
            None => items.into_iter().try_for_each(work),
            Some(pool) => pool.install(|| items.into_par_iter().try_for_each(work)),
        }
    }

    /// Runs `work` where `rayon`'s current pool is this one.
    pub(crate) fn install<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        match &self.pool {
            None => work(),
            Some(pool) => pool.install(work),
        }
    }

    /// Splits `0..len` into one contiguous range per thread, the first ones longer by at most one.
    pub(crate) fn split(&self, len: usize) -> Vec<std::ops::Range<usize>> {
        let parts = self.count().min(len).max(1);
        (0..parts).map(|part| part * len / parts..(part + 1) * len / parts).collect()
    }
}
