//! The cache of keys and values of a text that is read a few tokens at a time.
//!
//! Input: queries, keys and values of the tokens that come next. Output: their attention to the text so far. This file does
//! not know the layers that make queries, or who chooses the tokens.

use paceline_kernels::Compute;
use paceline_kernels::attention::{self, AttentionSpec};
use paceline_kernels::rotary::RotaryTable;
use paceline_memory::{Category, DType, Tensor};

use crate::Result;

/// Keys and values of the tokens of one text.
#[derive(Debug)]
pub(crate) struct KeyValueCache {
    /// Of one text, whose `seq` is the largest number of tokens.
    spec: AttentionSpec,
    /// Rotated keys, and values, of each attention layer: [`AttentionSpec::cache_shape`].
    layers: Vec<[Tensor; 2]>,
    /// The attention layer that comes next in this pass.
    layer: usize,
    /// Tokens that were read in earlier passes.
    position: usize,
}

impl KeyValueCache {
    /// Memory for a text of `spec.seq` tokens.
    pub(crate) fn new(
        compute: &Compute,
        spec: AttentionSpec,
        num_layers: usize,
        dtype: DType,
    ) -> Result<Self> {
        let tensor = || compute.allocator.tensor(dtype, spec.cache_shape(), Category::Activations);
        let layers = (0..num_layers).map(|_| Ok([tensor()?, tensor()?]));
        Ok(Self { spec, layers: layers.collect::<Result<_>>()?, layer: 0, position: 0 })
    }

    /// The number of tokens that have been read.
    pub(crate) fn position(&self) -> usize {
        self.position
    }

    /// The text has this many tokens now. Those after them are forgotten.
    pub(crate) fn set_position(&mut self, position: usize) {
        (self.layer, self.position) = (0, position);
    }

    /// Writes the attention of the next tokens to themselves and to all tokens before them. `qkv` has a row for each. Their keys
    /// and values are kept for the next pass.
    pub(crate) fn attend(
        &mut self,
        compute: &Compute,
        qkv: &Tensor,
        table: &RotaryTable,
        output: &Tensor,
    ) -> Result<()> {
        let (spec, len) = (&self.spec, qkv.dims()[0]);
        let [keys, values] = &self.layers[self.layer];
        self.layer += 1;
        if self.position == 0 && len > 1 {
            let spec_here = AttentionSpec { seq: len, ..*spec };
            let (dtype, shape) = (table.values().dtype(), [spec_here.log_sums_len()]);
            let log_sums = compute.allocator.tensor(dtype, shape, Category::Activations)?;
            attention::forward(compute, qkv, None, table, &spec_here, output, &log_sums)?;
            attention::keep(compute, qkv, table, spec, len, keys, values)?;
            return Ok(());
        }
        // Each token attends to those before it, whose keys and values are in the cache by then.
        for at in 0..len {
            let row = |of: &Tensor| -> Result<Tensor> {
                let width = of.dims()[1];
                Ok(of.slice(at * width..(at + 1) * width)?.view([1, width])?)
            };
            let (position, qkv, output) = (self.position + at, row(qkv)?, row(output)?);
            attention::step(compute, &qkv, table, spec, position, keys, values, &output)?;
        }
        Ok(())
    }
}
