//! The sizes of an attention, and the shapes that follow from them.

use crate::{KernelError, Op, Processor, Result};

/// The sizes of an attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionSpec {
    /// Rows of the batch.
    pub batch: usize,
    /// Tokens of a row, with padding.
    pub seq: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values; divides `heads`. Head `h` attends to keys and values of head `h / (heads / kv_heads)`.
    pub kv_heads: usize,
    /// Elements of a head; even.
    pub head_dim: usize,
}

impl AttentionSpec {
    /// Shape of queries, keys and values, and of their gradient: (batch * seq, (heads + 2 * kv_heads) * head_dim). The
    /// columns are the queries of all heads, then their keys, then their values.
    pub fn qkv_shape(&self) -> [usize; 2] {
        [self.batch * self.seq, (self.heads + 2 * self.kv_heads) * self.head_dim]
    }

    /// Shape of the output and of its gradient: (batch * seq, heads * head_dim).
    pub fn output_shape(&self) -> [usize; 2] {
        [self.batch * self.seq, self.heads * self.head_dim]
    }

    /// Number of elements of the logarithms: batch * heads * seq, in this order.
    pub fn log_sums_len(&self) -> usize {
        self.batch * self.heads * self.seq
    }

    /// Shape of the cache of keys, and of that of values: (batch, kv_heads, seq, head_dim). Here `seq` is the largest
    /// number of tokens.
    pub fn cache_shape(&self) -> [usize; 4] {
        [self.batch, self.kv_heads, self.seq, self.head_dim]
    }

    /// Heads of queries that share a head of keys.
    pub(crate) fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Pairs of a row of the batch and a head of keys, which threads share.
    pub(super) fn pairs(&self) -> usize {
        self.batch * self.kv_heads
    }

    /// Parts into which threads divide the pairs. Each has scratch memory of its own.
    pub(super) fn num_parts(&self, cpu: &Processor) -> usize {
        cpu.threads.num_parts(self.pairs())
    }

    /// `1 / sqrt(head_dim)`.
    pub(crate) fn scale(&self) -> f64 {
        1.0 / (self.head_dim as f64).sqrt()
    }

    pub(super) fn check(&self, op: Op) -> Result<()> {
        let Self { heads, kv_heads, head_dim, .. } = *self;
        let reason = if heads == 0 || kv_heads == 0 || heads % kv_heads != 0 {
            format!("kv_heads must divide heads, got {kv_heads} and {heads}")
        } else if head_dim == 0 || head_dim % 2 != 0 {
            format!("head_dim must be even and not zero, got {head_dim}")
        } else {
            return Ok(());
        };
        Err(KernelError::Geometry { op: op.name, reason })
    }
}
