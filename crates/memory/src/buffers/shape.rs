//! Shapes of tensors.

use std::fmt;

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
