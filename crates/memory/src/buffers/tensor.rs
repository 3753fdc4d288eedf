//! Tensors: typed and shaped ranges of buffers.
//!
//! Input: a buffer, an offset, an element type and a shape. Output: slices of elements, under a claim. This
//! module knows nothing of arithmetic.

use std::ops::Range;

use super::allocator::Allocator;
use super::buffer::{Buffer, Claim, ReadGuard, WriteGuard};
use crate::{Access, Category, DType, Device, Element, Event, MemoryError, Result, Shape};

/// A contiguous range of a buffer with an element type and a shape, row-major. Clones share memory.
///
/// Its elements are reached through guards: many readers, or one writer. A guard of another element type, or on elements that are in
/// use, is an error.
///
/// ```
/// use paceline_memory::{Allocator, Category, DType};
///
/// let x = Allocator::new().tensor(DType::F32, [2, 3], Category::Data)?;
/// x.write::<f32>()?.copy_from_slice(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
/// assert_eq!(x.slice(3..6)?.read::<f32>()?[..], [4.0, 5.0, 6.0]);
/// assert!(x.read::<f64>().is_err());
/// let reader = x.read::<f32>()?;
/// assert!(x.write::<f32>().is_err());
/// drop(reader);
/// assert!(x.write::<f32>().is_ok());
/// # Ok::<(), paceline_memory::MemoryError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Tensor {
    buffer: Buffer,
    start_bytes: usize,
    dtype: DType,
    shape: Shape,
}

impl Allocator {
    /// Allocates a tensor in its own buffer. The contents and errors are those of [`Allocator::allocate`].
    pub fn tensor(
        &self,
        dtype: DType,
        shape: impl Into<Shape>,
        category: Category,
    ) -> Result<Tensor> {
        let shape = shape.into();
        let len_bytes = shape.num_elems().saturating_mul(dtype.size_bytes());
        let buffer = self.allocate(len_bytes, category)?;
        Tensor::new(buffer, 0, dtype, shape)
    }
}

impl Tensor {
    /// The elements of `shape` in `buffer`, beginning at byte `start_bytes`.
    ///
    /// Errors if the buffer is too short, or if the start is not aligned to the element size.
    pub fn new(
        buffer: Buffer,
        start_bytes: usize,
        dtype: DType,
        shape: impl Into<Shape>,
    ) -> Result<Self> {
        let shape = shape.into();
        let len_bytes = shape.num_elems().saturating_mul(dtype.size_bytes());
        let range = start_bytes..start_bytes.saturating_add(len_bytes);
        if range.end > buffer.len_bytes() || !start_bytes.is_multiple_of(dtype.size_bytes()) {
            return Err(MemoryError::OutOfRange { range, len: buffer.len_bytes() });
        }
        Ok(Self { buffer, start_bytes, dtype, shape })
    }

    /// The device in whose memory the tensor lies.
    pub fn device(&self) -> Device {
        self.buffer.device()
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The extents.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Extents as a slice.
    pub fn dims(&self) -> &[usize] {
        self.shape.dims()
    }

    /// Number of elements.
    pub fn num_elems(&self) -> usize {
        self.shape.num_elems()
    }

    /// Size in bytes.
    pub fn num_bytes(&self) -> usize {
        self.num_elems() * self.dtype.size_bytes()
    }

    /// The buffer that holds the tensor.
    pub fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// The bytes of the buffer that the tensor covers.
    pub fn byte_range(&self) -> Range<usize> {
        self.start_bytes..self.start_bytes + self.num_bytes()
    }

    /// The same memory with another shape, which must have the same number of elements.
    pub fn view(&self, shape: impl Into<Shape>) -> Result<Self> {
        let shape = shape.into();
        if shape.num_elems() != self.num_elems() {
            return Err(MemoryError::WrongShape { from: self.shape, to: shape });
        }
        Ok(Self { shape, ..self.clone() })
    }

    /// The elements of `range` as a one-dimensional tensor. Errors if the range lies outside the tensor.
    pub fn slice(&self, range: Range<usize>) -> Result<Self> {
        let size = self.dtype.size_bytes();
        if range.start > range.end || range.end > self.num_elems() {
            let bytes = range.start * size..range.end * size;
            return Err(MemoryError::OutOfRange { range: bytes, len: self.num_bytes() });
        }
        let start_bytes = self.start_bytes + range.start * size;
        Ok(Self { shape: [range.len()].into(), start_bytes, ..self.clone() })
    }

    /// The same memory as plain bytes, in the byte order of the machine.
    pub fn as_bytes(&self) -> Self {
        Self { dtype: DType::U8, shape: [self.num_bytes()].into(), ..self.clone() }
    }

    /// Claims the whole tensor for `holder`.
    pub fn claim(&self, access: Access, holder: &'static str) -> Result<Claim> {
        self.buffer.claim(self.byte_range(), access, holder)
    }

    /// Notes that the work before an event uses the whole tensor, see [`Buffer::queue`].
    pub fn queue(&self, access: Access, op: &'static str, event: &Event) -> Result<Claim> {
        self.buffer.queue(self.byte_range(), access, op, event)
    }

    /// The elements, for reading. Errors if the tensor has a different type, or while it is being written to.
    pub fn read<T: Element>(&self) -> Result<ReadGuard<T>> {
        self.check::<T>()?;
        Ok(ReadGuard::new(self.claim(Access::Read, "reading")?))
    }

    /// The elements, for writing. Errors if the tensor has a different type, or while it is in use.
    pub fn write<T: Element>(&self) -> Result<WriteGuard<T>> {
        self.check::<T>()?;
        Ok(WriteGuard::new(self.claim(Access::Write, "writing")?))
    }

    /// Checks that the elements are a slice of `T` that the host can reach.
    fn check<T: Element>(&self) -> Result<()> {
        match self.device() {
            Device::Cpu => {}
            device @ Device::Meta => return Err(MemoryError::NoContents(device)),
            device @ (Device::Sim | Device::Cuda) => return Err(MemoryError::NotReachable(device)),
        }
        if self.dtype == T::DTYPE {
            return Ok(());
        }
        Err(MemoryError::WrongType { expected: T::DTYPE, got: self.dtype })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_and_views_share_memory() {
        let t = Allocator::new().tensor(DType::F32, [2, 3], Category::Data).unwrap();
        t.write::<f32>().unwrap().copy_from_slice(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
        assert_eq!(&*t.slice(2..5).unwrap().read::<f32>().unwrap(), [2.0, 3.0, 4.0]);
        assert_eq!(t.view([3, 2]).unwrap().dims(), [3, 2]);
        assert!(t.view([7]).is_err());
        assert!(t.slice(4..7).is_err());
        assert_eq!(
            t.read::<f64>().unwrap_err().to_string(),
            "expected elements of type f64, got f32"
        );
    }

    #[test]
    fn one_writer_or_many_readers() {
        let t = Allocator::new().tensor(DType::F64, [4], Category::Data).unwrap();
        let reader = t.read::<f64>().unwrap();
        assert!(t.read::<f64>().is_ok());
        assert!(t.write::<f64>().is_err());
        drop(reader);
        let _writer = t.write::<f64>().unwrap();
        assert!(t.read::<f64>().is_err());
    }
}
