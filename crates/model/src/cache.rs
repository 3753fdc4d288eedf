//! The cache of keys and values of a text that is read a few tokens at a time.
//!
//! Input: queries, keys and values of the tokens that come next. Output: their attention to the text so far. This file does
//! not know the layers that make queries, or who chooses the tokens.

use paceline_kernels::Compute;
use paceline_kernels::attention::{self, AttentionSpec};
use paceline_kernels::rotary::RotaryTable;
use paceline_memory::{Category, Tensor};

use crate::Result;

/// Keys and values of the tokens of one text.
#[derive(Debug)]
pub(crate) struct KeyValueCache {
    /// The largest number of tokens.
    pub max_len: usize,
    /// Tokens that were read in earlier passes.
    pub position: usize,
    /// The attention layer that comes next in this pass.
    pub layer: usize,
    /// Rotated keys, and values, of each attention layer: [`AttentionSpec::cache_shape`].
    pub layers: Vec<[Tensor; 2]>,
}

impl KeyValueCache {
    /// Writes the attention of the next tokens to themselves and to all tokens before them. `spec` and `qkv` are those of the
    /// next tokens alone. Their keys and values are kept for the next pass.
    pub fn attend(
        &mut self,
        compute: &Compute,
        spec: &AttentionSpec,
        qkv: &Tensor,
        table: &RotaryTable,
        output: &Tensor,
    ) -> Result<()> {
        let (len, position) = (spec.seq, self.position);
        let whole = AttentionSpec { seq: self.max_len, ..*spec };
        let tensor =
            |dtype, shape: &[usize]| compute.allocator.tensor(dtype, shape, Category::Activations);
        if self.layer == self.layers.len() {
            let cache = || tensor(qkv.dtype(), &whole.cache_shape());
            self.layers.push([cache()?, cache()?]);
        }
        let [keys, values] = &self.layers[self.layer];
        self.layer += 1;
        if position == 0 && len > 1 {
            let log_sums = tensor(table.values().dtype(), &[spec.log_sums_len()])?;
            attention::forward(compute, qkv, None, table, spec, output, &log_sums)?;
            attention::keep(compute, qkv, table, &whole, len, keys, values)?;
            return Ok(());
        }
        // Each token attends to those before it, whose keys and values are in the cache by then.
        for at in 0..len {
            let row = |of: &Tensor| -> Result<Tensor> {
                let width = of.dims()[1];
                Ok(of.slice(at * width..(at + 1) * width)?.view([1, width])?)
            };
            let (qkv, output) = (row(qkv)?, row(output)?);
            attention::step(compute, &qkv, table, &whole, position + at, keys, values, &output)?;
        }
        Ok(())
    }
}
