//! Tensors: typed and shaped ranges of buffers.
//!
//! Input: a buffer, an offset, an element type and a shape. Output: slices of elements, under a claim. This
//! module knows nothing of arithmetic.

use std::fmt;
use std::ops::Range;

use crate::accelerator::DeviceStream;
use crate::buffer::{Access, Buffer, Claim, ReadGuard, WriteGuard};
use crate::{Category, DType, Device, Element, Event, MemoryError, Result};

const MAX_DIMS: usize = 4;

/// Up to four extents, outermost first.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    dims: [usize; MAX_DIMS],
    num_dims: usize,
}

impl Shape {
    /// The extents.
    pub fn dims(&self) -> &[usize] {
        &self.dims[..self.num_dims]
    }

    /// The product of the extents. If the product overflows `usize`, this is `usize::MAX`, which is more than
    /// any memory has.
    pub fn num_elems(&self) -> usize {
        if self.dims().contains(&0) {
            return 0;
        }
        self.dims().iter().fold(1, |product: usize, &dim| product.saturating_mul(dim))
    }
}

impl From<&[usize]> for Shape {
    /// Panics on more than four extents: no layer in this project needs more.
    fn from(dims: &[usize]) -> Self {
        assert!(dims.len() <= MAX_DIMS, "at most {MAX_DIMS} dimensions, got {dims:?}");
        let mut shape = Self { dims: [1; MAX_DIMS], num_dims: dims.len() };
        shape.dims[..dims.len()].copy_from_slice(dims);
        shape
    }
}

impl<const N: usize> From<[usize; N]> for Shape {
    fn from(dims: [usize; N]) -> Self {
        dims.as_slice().into()
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.dims(), f)
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A contiguous range of a buffer with an element type and a shape, row-major. Clones share memory.
#[derive(Clone, Debug)]
pub struct Tensor {
    buffer: Buffer,
    start_bytes: usize,
    dtype: DType,
    shape: Shape,
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

    /// Copies the elements of `from`; the shapes may differ. If one of the two lies on an accelerator, the copy is work of
    /// the stream of its memory, and this returns before it is done. Errors if the types or the numbers of elements differ,
    /// or if either tensor is in use.
    pub fn copy_from(&self, from: &Tensor) -> Result<()> {
        if from.dtype != self.dtype {
            return Err(MemoryError::WrongType { expected: self.dtype, got: from.dtype });
        }
        let from = from.view(self.shape)?;
        if let Some(stream) = self.home().or(from.home()) {
            stream.copy(&from, self)?;
            return Ok(());
        }
        self.as_bytes().write::<u8>()?.copy_from_slice(&from.as_bytes().read::<u8>()?);
        Ok(())
    }

    /// Sets all elements to zero, which is represented by zero bytes in every type. On an accelerator this is work of the
    /// stream of its memory. Errors while the tensor is in use.
    pub fn fill_zero(&self) -> Result<()> {
        self.fill_bytes(0)
    }

    /// Sets all bytes to a value. With 0xFF, every floating-point number is NaN, so that nobody reads it unnoticed. Works
    /// and errors as [`Tensor::fill_zero`].
    pub fn fill_bytes(&self, value: u8) -> Result<()> {
        match self.home() {
            Some(stream) => stream.fill(self, value).map(drop),
            None => {
                self.as_bytes().write::<u8>()?.fill(value);
                Ok(())
            }
        }
    }

    /// The tensor where the host can read it: itself, or a copy of what an accelerator holds once all work before is done.
    pub fn to_host(&self) -> Result<Tensor> {
        let Some(stream) = self.home() else { return Ok(self.clone()) };
        let host =
            stream.accelerator().host_memory().tensor(self.dtype, self.shape, Category::Data)?;
        stream.copy(self, &host)?.wait();
        stream.accelerator().check()?;
        Ok(host)
    }

    /// Overwrites all elements with what the host computes: `fill` gets elements with unspecified values. They are copied
    /// to an accelerator as work of the stream of its memory. Returns what `fill` returns. Errors if the tensor has another
    /// type, or while it is in use.
    pub fn overwrite<T: Element, R>(&self, fill: impl FnOnce(&mut [T]) -> R) -> Result<R> {
        let Some(stream) = self.home() else { return Ok(fill(&mut self.write()?)) };
        let host =
            stream.accelerator().host_memory().tensor(self.dtype, self.shape, Category::Data)?;
        let filled = fill(&mut host.write()?);
        stream.copy(&host, self)?;
        Ok(filled)
    }

    /// The stream of the accelerator's memory in which the tensor lies.
    fn home(&self) -> Option<&DeviceStream> {
        self.buffer.allocator().home()
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
    use crate::Allocator;

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
    fn elements_are_copied_whatever_the_shape() {
        let allocator = Allocator::new();
        let from = allocator.tensor(DType::F32, [2, 2], Category::Data).unwrap();
        from.write::<f32>().unwrap().copy_from_slice(&[1.0, 2.0, 3.0, 4.0]);
        let to = allocator.tensor(DType::F32, [6], Category::Data).unwrap();
        to.fill_zero().unwrap();
        to.slice(1..5).unwrap().copy_from(&from).unwrap();
        assert_eq!(&*to.read::<f32>().unwrap(), [0.0, 1.0, 2.0, 3.0, 4.0, 0.0]);
        assert!(matches!(to.copy_from(&from), Err(MemoryError::WrongShape { .. })));
        let ints = allocator.tensor(DType::I32, [4], Category::Data).unwrap();
        assert!(matches!(ints.copy_from(&from), Err(MemoryError::WrongType { .. })));
        let (upper, lower) = (to.slice(0..4).unwrap(), to.slice(2..6).unwrap());
        assert!(matches!(upper.copy_from(&lower), Err(MemoryError::Claimed { .. })));
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
