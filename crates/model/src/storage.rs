//! Flat storage of parameters, gradients and buffers: all of them, or the ranges that a rank holds.

use std::ops::Range;
use std::sync::Arc;

use paceline_memory::{Allocator, Buffer, Category, DType, Tensor};
use sha2::{Digest, Sha256};

use crate::{BufferId, Held, Layout, ParamId, Precision, Result};

/// The parameters, gradients and buffers of a model that a rank holds, each in one flat tensor.
#[derive(Clone, Debug)]
pub struct Storage {
    layout: Arc<Layout>,
    precision: Precision,
    values: Held,
    grads: Held,
    buffers: Tensor,
}

impl Storage {
    /// Storage with parameters and gradients in the caller's memory, of [`Layout::num_bytes`] bytes in the master type
    /// and [`Layout::trained_bytes`] bytes in the gradients' type, whose contents are kept. Buffers lie in
    /// private memory of this process.
    pub fn new(
        layout: Arc<Layout>,
        precision: impl Into<Precision>,
        values: Buffer,
        grads: Buffer,
        allocator: &Allocator,
    ) -> Result<Self> {
        let (all, trained) = (0..layout.len(), 0..layout.trained_len());
        let (values, grads) = ((values, vec![all]), (grads, vec![trained]));
        Self::of_ranges(layout, precision, values, grads, allocator)
    }

    /// Like [`Storage::new`], but values and gradients are held only for some ranges of the layout, one after the other.
    /// Errors if the memory is too short.
    pub fn of_ranges(
        layout: Arc<Layout>,
        precision: impl Into<Precision>,
        values: (Buffer, Vec<Range<usize>>),
        grads: (Buffer, Vec<Range<usize>>),
        allocator: &Allocator,
    ) -> Result<Self> {
        let precision = precision.into();
        let held = |(buffer, ranges): (Buffer, Vec<Range<usize>>), dtype| {
            let len: usize = ranges.iter().map(Range::len).sum();
            Held::new(ranges, Tensor::new(buffer, 0, dtype, [len])?)
        };
        let values = held(values, precision.master)?;
        let grads = held(grads, precision.grads)?;
        let len = layout.num_buffer_elems();
        let buffers = allocator.tensor(precision.master, [len], Category::Parameters)?;
        Ok(Self { layout, precision, values, grads, buffers })
    }

    /// Storage in memory that no other rank sees.
    pub fn private(
        layout: Arc<Layout>,
        precision: impl Into<Precision>,
        allocator: &Allocator,
    ) -> Result<Self> {
        let precision = precision.into();
        let values = layout.num_bytes(precision.master);
        let values = allocator.allocate(values, Category::Parameters)?;
        let grads = layout.trained_bytes(precision.grads);
        let grads = allocator.allocate(grads, Category::Gradients)?;
        Self::new(layout, precision, values, grads, allocator)
    }

    /// Sets all values that are held, and every buffer, to their initial values, and gradients and padding to zero. The values
    /// do not depend on which others are held.
    pub fn initialize(&self, seed: u64) -> Result<()> {
        self.values.tensor().fill_zero()?;
        self.grads.tensor().fill_zero()?;
        for (at, param) in self.layout.params().iter().enumerate() {
            for (range, part) in self.values.within(&param.range())? {
                let elems = range.start - param.start..range.end - param.start;
                let values = self.layout.initial_values(ParamId(at), seed, elems);
                overwrite(&part, values)?;
            }
        }
        for (at, buffer) in self.layout.buffers().iter().enumerate() {
            overwrite(&self.buffer(BufferId(at))?, std::iter::repeat(buffer.init))?;
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

    /// The values that are held, with padding.
    pub fn values(&self) -> &Held {
        &self.values
    }

    /// The gradients that are held, with padding.
    pub fn grads(&self) -> &Held {
        &self.grads
    }

    /// Whether all gradients are held.
    pub fn has_all_grads(&self) -> bool {
        self.grads.is_first(self.layout.trained_len())
    }

    /// One parameter. Errors if it is not held as a whole.
    pub fn value(&self, id: ParamId) -> Result<Tensor> {
        self.part(&self.values, id)
    }

    /// The gradient of one parameter. Errors if the gradient is not held as a whole. A frozen parameter has no gradient.
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

    /// All parameters, and then all buffers, by name. Errors if a parameter is not held as a whole.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = Result<(&str, Tensor)>> {
        let params = self.layout.params().iter().enumerate();
        let params = params.map(|(at, param)| Ok((&*param.name, self.value(ParamId(at))?)));
        let buffers = self.layout.buffers().iter().enumerate();
        params.chain(buffers.map(|(at, own)| Ok((&*own.name, self.buffer(BufferId(at))?))))
    }

    fn part(&self, all: &Held, id: ParamId) -> Result<Tensor> {
        let param = self.layout.param(id);
        Ok(all.slice(param.range())?.view(param.shape)?)
    }

    /// The SHA-256 of the parameters, in hexadecimal. It covers
    /// the parameters without padding, little-endian, in order of registration. Buffers are left out, because
    /// ranks may differ in them. Errors if not all parameters are held.
    pub fn digest(&self) -> Result<String> {
        let mut digest = WeightsDigest::default();
        for at in 0..self.layout.params().len() {
            digest.add(&self.value(ParamId(at))?)?;
        }
        Ok(digest.finish())
    }

    /// The first parameter or buffer with a value that is not finite, by name. `None` if all values that are held are finite.
    pub fn first_not_finite(&self) -> Result<Option<&str>> {
        for param in self.layout.params() {
            for (_, part) in self.values.within(&param.range())? {
                if !is_finite(&part)? {
                    return Ok(Some(&param.name));
                }
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

/// The digest of all parameters, one after the other. See [`Storage::digest`].
#[derive(Debug, Default)]
pub struct WeightsDigest(Sha256);

impl WeightsDigest {
    /// Adds the next parameter in order of registration.
    pub fn add(&mut self, param: &Tensor) -> Result<()> {
        self.0.update(&*param.to_host()?.as_bytes().read::<u8>()?);
        Ok(())
    }

    /// The digest in hexadecimal.
    pub fn finish(self) -> String {
        self.0.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// Overwrites a tensor of f32 or f64 with these numbers.
fn overwrite(tensor: &Tensor, numbers: impl IntoIterator<Item = f64>) -> Result<()> {
    match tensor.dtype() {
        DType::F64 => tensor.overwrite::<f64, _>(|to| {
            to.iter_mut().zip(numbers).for_each(|(to, number)| *to = number);
        })?,
        _ => tensor.overwrite::<f32, _>(|to| {
            to.iter_mut().zip(numbers).for_each(|(to, number)| *to = number as f32);
        })?,
    }
    Ok(())
}

/// Whether all values of a tensor of floating-point numbers are finite.
pub(crate) fn is_finite(tensor: &Tensor) -> Result<bool> {
    let tensor = tensor.to_host()?;
    Ok(match tensor.dtype() {
        DType::F64 => tensor.read::<f64>()?.iter().all(|value| value.is_finite()),
        _ => tensor.read::<f32>()?.iter().all(|value| value.is_finite()),
    })
}
