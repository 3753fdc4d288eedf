//! Flat storage of parameters and gradients.

use std::sync::Arc;

use paceline_memory::{Allocator, Buffer, Category, DType, Tensor};
use sha2::{Digest, Sha256};

use crate::{Layout, ParamId, Result};

/// All parameters and gradients of a model, each in one flat tensor.
#[derive(Clone, Debug)]
pub struct Storage {
    layout: Arc<Layout>,
    values: Tensor,
    grads: Tensor,
}

impl Storage {
    /// Storage in buffers of the caller's choice, each of [`Layout::num_bytes`]; what they hold is
    /// kept.
    pub fn new(layout: Arc<Layout>, dtype: DType, values: Buffer, grads: Buffer) -> Result<Self> {
        let values = Tensor::new(values, 0, dtype, [layout.len()])?;
        let grads = Tensor::new(grads, 0, dtype, [layout.len()])?;
        Ok(Self { layout, values, grads })
    }

    /// Storage in memory of this process.
    pub fn host(layout: Arc<Layout>, dtype: DType, allocator: &Allocator) -> Result<Self> {
        let bytes = layout.num_bytes(dtype);
        let values = allocator.host(bytes, Category::Parameters)?;
        let grads = allocator.host(bytes, Category::Gradients)?;
        Self::new(layout, dtype, values, grads)
    }

    /// Gives every parameter its initial values, and zero to gradients and padding.
    pub fn initialize(&self, seed: u64) -> Result<()> {
        self.values.as_bytes().write::<u8>()?.fill(0);
        self.grads.as_bytes().write::<u8>()?.fill(0);
        for at in 0..self.layout.params().len() {
            let values = self.layout.initial_values(ParamId(at), seed);
            let param = self.value(ParamId(at))?;
            match param.dtype() {
                DType::F64 => {
                    param.write::<f64>()?.iter_mut().zip(values).for_each(|(x, v)| *x = v);
                }
                _ => {
                    param.write::<f32>()?.iter_mut().zip(values).for_each(|(x, v)| *x = v as f32);
                }
            }
        }
        Ok(())
    }

    /// Where everything lies.
    pub fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// All parameters, with padding.
    pub fn values(&self) -> &Tensor {
        &self.values
    }

    /// All gradients, with padding.
    pub fn grads(&self) -> &Tensor {
        &self.grads
    }

    /// One parameter.
    pub fn value(&self, id: ParamId) -> Result<Tensor> {
        self.part(&self.values, id)
    }

    /// The gradient of one parameter.
    pub fn grad(&self, id: ParamId) -> Result<Tensor> {
        self.part(&self.grads, id)
    }

    fn part(&self, all: &Tensor, id: ParamId) -> Result<Tensor> {
        let param = self.layout.param(id);
        Ok(all.slice(param.range())?.view(param.shape)?)
    }

    /// SHA-256, in hexadecimal, of the parameters without padding, little-endian, in order of
    /// registration: equal weights show at a glance.
    pub fn digest(&self) -> Result<String> {
        let mut hasher = Sha256::new();
        for at in 0..self.layout.params().len() {
            hasher.update(&*self.value(ParamId(at))?.as_bytes().read::<u8>()?);
        }
        Ok(hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
    }
}
