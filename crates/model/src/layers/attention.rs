//! Causal self-attention with rotary positions and grouped queries.

use std::sync::{Arc, Mutex, PoisonError};

use paceline_kernels::attention::{self, AttentionSpec};
use paceline_kernels::rotary::{RotaryConfig, RotaryTable};
use paceline_memory::Tensor;

use crate::{Batch, Context, Half, Layer, Result, Saved};

/// Maps queries, keys and values, side by side as (batch * seq, (heads + 2 * kv_heads) * head_dim), to (batch * seq,
/// heads * head_dim). `batch` and `seq` are the extents of the batch's inputs. If the batch has lengths, the padding
/// after them is not read.
#[derive(Clone, Debug)]
pub struct Attention {
    heads: usize,
    kv_heads: usize,
    rotary: Arc<Rotary>,
}

/// The rotary positions of a model, whose layers share the tables.
#[derive(Debug)]
pub struct Rotary {
    config: RotaryConfig,
    max_len: usize,
    /// One for each device and element type that has been asked for.
    tables: Mutex<Vec<RotaryTable>>,
}

impl Rotary {
    /// Positions `0..max_len`. Their tables are made when a pass first needs them. Errors if the settings are invalid.
    pub fn new(config: RotaryConfig, max_len: usize) -> Result<Self> {
        config.frequencies()?;
        Ok(Self { config, max_len, tables: Mutex::default() })
    }

    fn table(&self, cx: &Context) -> Result<RotaryTable> {
        let mut tables = self.tables.lock().unwrap_or_else(PoisonError::into_inner);
        let dtype = cx.wide_dtype();
        let wanted = (cx.compute.device(), dtype);
        let is_wanted =
            |table: &&RotaryTable| (table.values().device(), table.values().dtype()) == wanted;
        if let Some(table) = tables.iter().find(is_wanted) {
            return Ok(table.clone());
        }
        let allocator = &cx.compute.allocator;
        let table = RotaryTable::new(allocator, self.config, self.max_len, dtype)?;
        tables.push(table.clone());
        Ok(table)
    }
}

impl Attention {
    /// Has no parameters.
    pub fn new(heads: usize, kv_heads: usize, rotary: Arc<Rotary>) -> Self {
        Self { heads, kv_heads, rotary }
    }

    fn spec(&self, cx: &Context) -> Result<AttentionSpec> {
        let Self { heads, kv_heads, .. } = *self;
        let head_dim = self.rotary.config.head_dim;
        let inputs = cx.batch(Batch::INPUTS)?;
        let (batch, seq) = (inputs.dims()[0], inputs.dims()[1]);
        Ok(AttentionSpec { batch, seq, heads, kv_heads, head_dim })
    }
}

impl Layer for Attention {
    fn has_parameters(&self) -> bool {
        false
    }

    fn forward(&self, cx: &mut Context, input: Tensor) -> Result<(Tensor, Saved)> {
        let spec = self.spec(cx)?;
        let output = cx.activation(spec.output_shape())?;
        let (compute, table) = (cx.compute, self.rotary.table(cx)?);
        if let Some(cache) = cx.cache() {
            cache.attend(compute, &spec, &input, &table, &output)?;
            return Ok((output, Saved::default()));
        }
        let log_sums = cx.wide_activation([spec.log_sums_len()])?;
        let lengths = cx.optional(Batch::LENGTHS);
        attention::forward(cx.compute, &input, lengths, &table, &spec, &output, &log_sums)?;
        Ok((output.clone(), Saved::of([input, output, log_sums])))
    }

    fn backward(
        &self,
        cx: &mut Context,
        saved: &mut Saved,
        d_output: Tensor,
        _: Half,
    ) -> Result<Option<Tensor>> {
        let spec = self.spec(cx)?;
        let [input, output, log_sums] = saved.tensors()?;
        let d_input = cx.gradient_of(input)?;
        let (lengths, table) = (cx.optional(Batch::LENGTHS), self.rotary.table(cx)?);
        attention::backward(
            cx.compute, input, lengths, &table, &spec, output, log_sums, &d_output, &d_input,
        )?;
        Ok(Some(d_input))
    }
}
