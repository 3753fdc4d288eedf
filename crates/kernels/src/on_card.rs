//! Commands of an operation's body on a card: kernels, products, copies.
//!
//! Input: kernels with their arguments, products, addresses of operands. Output: work in the operation's stream. This file
//! does not know what the kernels compute.

use paceline_cuda::kernel::{In, Out};
use paceline_cuda::{Arguments, CardKernel, Grid, Matmul, MatrixType};
use paceline_memory::{DType, Element};

use crate::stored::Stored;

/// Properties of a card that operations need, and that not every card has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CardNeeds {
    /// The least compute capability.
    pub capability: (u32, u32),
    /// Shared memory of a block, in bytes.
    pub shared_bytes: u32,
    /// An operation that no card can run, because it has no kernel.
    pub missing: Option<&'static str>,
}

impl CardNeeds {
    /// Those of products of 16-bit elements on tensor cores (`mma.m16n8k16`); no property for wider elements.
    pub(crate) fn of_products<S: Stored>() -> Self {
        let is_half = S::DTYPE != <S::Real as Element>::DTYPE;
        Self { capability: if is_half { (8, 0) } else { (0, 0) }, ..Self::default() }
    }

    /// These, and those of a launch with this grid.
    pub(crate) fn and_grid(self, grid: Grid) -> Self {
        self.and(Self { shared_bytes: grid.shared_bytes, ..self })
    }

    pub(crate) fn and(self, other: Self) -> Self {
        Self {
            capability: self.capability.max(other.capability),
            shared_bytes: self.shared_bytes.max(other.shared_bytes),
            missing: self.missing.or(other.missing),
        }
    }
}

/// Where the body of an operation puts its kernels.
#[derive(Debug)]
pub struct OnCard {
    stream: paceline_cuda::Stream,
    rounds_to_tf32: bool,
}

impl OnCard {
    pub(crate) fn new(stream: paceline_cuda::Stream, rounds_to_tf32: bool) -> Self {
        Self { stream, rounds_to_tf32 }
    }

    /// Whether kernels that can multiply f32 in TF32 do so: it is allowed, and the card has it.
    pub(crate) fn rounds<S: Stored>(&self) -> bool {
        self.rounds_to_tf32 && S::DTYPE == DType::F32 && self.card().capability() >= (8, 0)
    }

    /// Puts a kernel into the stream.
    ///
    /// # Safety
    ///
    /// The kernel touches nothing but the elements of the operands that its arguments name, and writes to none that were
    /// stated to be read.
    pub unsafe fn launch(
        &self,
        kernel: CardKernel,
        arguments: impl Arguments,
        grid: Grid,
    ) -> paceline_cuda::Result<()> {
        // SAFETY: the caller's, and the operands are queued for this operation.
        unsafe { self.stream.launch(kernel, arguments, grid) }
    }

    /// Puts a matrix product into the stream.
    ///
    /// # Safety
    ///
    /// As for [`OnCard::launch`].
    pub unsafe fn multiply(&self, matmul: &Matmul) -> paceline_cuda::Result<()> {
        let factors = match matmul.factors {
            MatrixType::F32 if self.rounds_to_tf32 => MatrixType::Tf32,
            factors => factors,
        };
        // SAFETY: as for `launch`.
        unsafe { self.stream.multiply(&Matmul { factors, ..*matmul }) }
    }

    /// Sets all bytes of elements.
    ///
    /// # Safety
    ///
    /// There are so many elements.
    pub unsafe fn fill<T>(
        &self,
        elems: Out<T>,
        value: u8,
        count: usize,
    ) -> paceline_cuda::Result<()> {
        // SAFETY: the caller's.
        unsafe { self.stream.fill(elems.0, value, count * size_of::<T>()) }
    }

    /// Copies elements.
    ///
    /// # Safety
    ///
    /// There are so many on each side.
    pub unsafe fn copy<T>(
        &self,
        from: In<T>,
        to: Out<T>,
        count: usize,
    ) -> paceline_cuda::Result<()> {
        // SAFETY: the caller's.
        unsafe { self.stream.copy_on_card(from.0, to.0, count * size_of::<T>()) }
    }

    /// The card.
    pub fn card(&self) -> &paceline_cuda::Card {
        self.stream.card()
    }
}
