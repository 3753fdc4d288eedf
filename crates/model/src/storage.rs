//! Flat storage of parameters, gradients and buffers.

use std::sync::Arc;

use paceline_memory::{Allocator, Buffer, Category, DType, Tensor};
use sha2::{Digest, Sha256};

use crate::{BufferId, Layout, ParamId, Precision, Result};

/// All parameters, gradients and buffers of a model, each in one flat tensor.
#[derive(Clone, Debug)]
pub struct Storage {
    layout: Arc<Layout>,
    precision: Precision,
    values: Tensor,
    grads: Tensor,
    buffers: Tensor,
}

impl Storage {
    /// Storage with parameters and gradients in the caller's memory, of [`Layout::num_bytes`] bytes in the master type
    /// and [`Layout::trained_bytes`] bytes in the gradients' type. The contents of that memory are kept. Buffers lie in
    /// private memory of this process.
    pub fn new(
        layout: Arc<Layout>,
        precision: impl Into<Precision>,
        values: Buffer,
        grads: Buffer,
        allocator: &Allocator,
    ) -> Result<Self> {
        let precision = precision.into();
        let values = Tensor::new(values, 0, precision.master, [layout.len()])?;
        let grads = Tensor::new(grads, 0, precision.grads, [layout.trained_len()])?;
        let len = layout.num_buffer_elems();
        let buffers = allocator.tensor(precision.master, [len], Category::Parameters)?;
        Ok(Self { layout, precision, values, grads, buffers })
    }

    /// Storage in private memory of this process.
    pub fn host(
        layout: Arc<Layout>,
        precision: impl Into<Precision>,
        allocator: &Allocator,
    ) -> Result<Self> {
        let precision = precision.into();
        let values = layout.num_bytes(precision.master);
        let values = allocator.host(values, Category::Parameters)?;
        let grads = layout.trained_bytes(precision.grads);
        let grads = allocator.host(grads, Category::Gradients)?;
        Self::new(layout, precision, values, grads, allocator)
    }

    /// Sets every parameter and buffer to its initial values, and gradients and padding to zero.
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
        for (at, buffer) in self.layout.buffers().iter().enumerate() {
            let to = self.buffer(BufferId(at))?;
            match to.dtype() {
                DType::F64 => to.write::<f64>()?.fill(buffer.init),
                _ => to.write::<f32>()?.fill(buffer.init as f32),
            }
        }
        Ok(())
    }

    /// The layout of this storage.
    pub fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// The element types.
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// All parameters, with padding.
    pub fn values(&self) -> &Tensor {
        &self.values
    }

    /// The trained parameters, with padding: as long as [`Storage::grads`].
    pub fn trained_values(&self) -> Result<Tensor> {
        Ok(self.values.slice(0..self.layout.trained_len())?)
    }

    /// All gradients, with padding.
    pub fn grads(&self) -> &Tensor {
        &self.grads
    }

    /// One parameter.
    pub fn value(&self, id: ParamId) -> Result<Tensor> {
        self.part(&self.values, id)
    }

    /// The gradient of one parameter. Errors if the parameter is frozen, since it has no gradient.
    pub fn grad(&self, id: ParamId) -> Result<Tensor> {
        self.part(&self.grads, id)
    }

    /// All buffers.
    pub fn buffers(&self) -> &Tensor {
        &self.buffers
    }

    /// One buffer.
    pub fn buffer(&self, id: BufferId) -> Result<Tensor> {
        let buffer = self.layout.buffer(id);
        Ok(self.buffers.slice(buffer.range())?.view(buffer.shape)?)
    }

    fn part(&self, all: &Tensor, id: ParamId) -> Result<Tensor> {
        let param = self.layout.param(id);
        Ok(all.slice(param.range())?.view(param.shape)?)
    }

    /// The SHA-256 of the parameters, in hexadecimal. Equal weights have equal digests. The digest covers
    /// the parameters without padding, little-endian, in order of registration. Buffers are left out, because
    /// ranks may differ in them.
    pub fn digest(&self) -> Result<String> {
        let mut hasher = Sha256::new();
        for at in 0..self.layout.params().len() {
            hasher.update(&*self.value(ParamId(at))?.as_bytes().read::<u8>()?);
        }
        Ok(hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
    }

    /// The name of the first parameter or buffer with a value that is not finite. `None` if all values are finite.
    pub fn first_not_finite(&self) -> Result<Option<&str>> {
        for (at, param) in self.layout.params().iter().enumerate() {
            if !is_finite(&self.value(ParamId(at))?)? {
                return Ok(Some(&param.name));
            }
        }
        for (at, buffer) in self.layout.buffers().iter().enumerate() {
            if !is_finite(&self.buffer(BufferId(at))?)? {
                return Ok(Some(&buffer.name));
            }
        }
        Ok(None)
    }
}

/// Whether all values of a tensor of floating-point numbers are finite.
pub(crate) fn is_finite(tensor: &Tensor) -> Result<bool> {
    Ok(match tensor.dtype() {
        DType::F64 => tensor.read::<f64>()?.iter().all(|value| value.is_finite()),
        _ => tensor.read::<f32>()?.iter().all(|value| value.is_finite()),
    })
}
