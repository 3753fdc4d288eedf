//! The head on a card: the products of the vendor's library, and a kernel for the losses of a chunk of rows.
//!
//! In and out: addresses. Chunks are larger than the processor's. Factors of products in 16 bits are rounded into scratch memory,
//! the weight once for all chunks. Losses are summed in an order that depends on the number of rows only.

use paceline_cuda::kernel::{In, Out};
use paceline_cuda::{Grid, Result};
use paceline_memory::Element;

use super::CARD;
use crate::card::products::{
    CardMatrix, Multiplied, from_elem, from_elem_mut, multiply, narrow, retyped,
};
use crate::stored::Stored;
use crate::{Compute, OnCard, Scratch, scratch};

/// Scratch memory of a card: the weight and a chunk of gradients in 16 bits, if products round them; losses and marks.
pub(super) type Memory<S> =
    Option<(Option<Scratch<S>>, Option<Scratch<S>>, Scratch<f64>, Scratch<i32>)>;

/// The addresses of [`Memory`].
type Places<S> = Option<(Option<Out<S>>, Option<Out<S>>, Out<f64>, Out<i32>)>;

/// Gradients of input and weight, if they are wanted, and the sums.
type Results<S> = (Option<Out<S>>, Option<Out<<S as Stored>::Real>>, Out<f64>);

/// The outputs that are kept, if they are; else memory for a chunk of them; and the rest of the scratch memory.
type Spaces<S> = (Option<Out<<S as Stored>::Real>>, Out<<S as Stored>::Real>, Places<S>);

/// A card's scratch memory for factors that are rounded to `S`. `None` if they are `S` already.
pub(super) fn rounded<S: Stored>(compute: &Compute, len: usize) -> Option<Scratch<S>> {
    (compute.is_card() && S::DTYPE != <S as Stored>::Real::DTYPE).then(|| scratch(len))
}

pub(super) fn memory<S: Stored>(
    compute: &Compute,
    [rows, classes, inputs]: [usize; 3],
    chunk: usize,
    has_gradients: bool,
) -> Memory<S> {
    let dz = if has_gradients { rounded(compute, chunk * classes) } else { None };
    let memory = || (rounded(compute, classes * inputs), dz, scratch(rows), scratch(rows));
    compute.is_card().then(memory)
}

/// A factor as `S`: rounded, if it has scratch memory for that.
///
/// # Safety
///
/// Both have `len` elements.
unsafe fn factor<S: Stored>(
    card: &OnCard,
    elems: In<S::Real>,
    rounded: Option<Out<S>>,
    len: usize,
) -> Result<In<S>> {
    let Some(rounded) = rounded else { return Ok(retyped(elems)) };
    // SAFETY: the caller's.
    unsafe { narrow(card, retyped(elems), rounded, len)? };
    Ok(rounded.as_in())
}

/// The gradient of the weight, chunk by chunk.
///
/// # Safety
///
/// Sizes are rows, classes and inputs: x is (rows, inputs), dz (rows, classes), dw (classes, inputs), and `rounded` has a
/// chunk of classes.
pub(super) unsafe fn backward_weight<S: Stored<Real: Multiplied> + Multiplied>(
    card: &OnCard,
    [rows, classes, inputs]: [usize; 3],
    chunk: usize,
    (x, dz): (In<S>, In<S::Real>),
    (dw, mut accumulate): (Out<S::Real>, bool),
    rounded: Option<Out<S>>,
) -> Result<()> {
    // SAFETY: chunks lie within the rows.
    unsafe {
        if rows == 0 && !accumulate {
            return card.fill(dw, 0, classes * inputs);
        }
        for begin in (0..rows).step_by(chunk.max(1)) {
            let n = chunk.min(rows - begin);
            let dz = factor(card, from_elem(dz, begin * classes), rounded, n * classes)?;
            let x = CardMatrix::new(from_elem(x, begin * inputs), n, inputs);
            let dz = CardMatrix::new(dz, n, classes);
            multiply(card, dz.transposed(), x, dw, accumulate)?;
            accumulate = true;
        }
    }
    Ok(())
}

/// Where the gradient of the outputs goes: as in the kernel.
#[derive(Clone, Copy)]
enum GradientOf {
    Nowhere,
    Rounded,
    InPlace,
}

pub(super) struct CardHead {
    pub(super) rows: usize,
    pub(super) classes: usize,
    pub(super) inputs: usize,
    pub(super) chunk: usize,
    pub(super) scale: f64,
    pub(super) accumulate: bool,
}

impl CardHead {
    /// # Safety
    ///
    /// Shapes: x and dx (rows, inputs), w and dw (classes, inputs), labels (rows), sums (3), kept (rows, classes), z (chunk,
    /// classes) if nothing is kept; the memory is that of [`memory`].
    pub(super) unsafe fn run<S: Stored<Real: Multiplied> + Multiplied>(
        &self,
        card: &OnCard,
        (x, w, labels): (In<S>, In<S::Real>, In<i64>),
        (dx, dw, sums): Results<S>,
        (kept, scratch, memory): Spaces<S>,
    ) -> Result<()> {
        let Self { rows, classes, inputs, chunk, scale, mut accumulate } = *self;
        let (w_rounded, dz_rounded, losses, marks) = memory.expect("a card has this memory");
        // Nobody reads what is rounded, and not kept, a second time.
        let gradient = match (dx, dz_rounded, kept) {
            (None, ..) => GradientOf::Nowhere,
            (Some(_), Some(_), None) => GradientOf::Rounded,
            _ => GradientOf::InPlace,
        };
        // A thread has a few classes.
        let threads = classes.div_ceil(4).next_multiple_of(32).clamp(32, 512) as u32;
        // SAFETY: chunks lie within the rows; the caller's for the rest.
        unsafe {
            if let (Some(dw), 0, false) = (dw, rows, accumulate) {
                card.fill(dw, 0, classes * inputs)?;
            }
            let w = factor(card, w, w_rounded, classes * inputs)?;
            let w = CardMatrix::new(w, classes, inputs);
            for begin in (0..rows).step_by(chunk.max(1)) {
                let n = chunk.min(rows - begin);
                let z = kept.map_or(scratch, |kept| from_elem_mut(kept, begin * classes));
                let x = CardMatrix::new(from_elem(x, begin * inputs), n, inputs);
                multiply(card, x, w.transposed(), z, false)?;
                let arguments = (
                    from_elem(labels, begin),
                    classes as u64,
                    scale,
                    gradient as u32,
                    z,
                    dz_rounded.unwrap_or(Out::NONE),
                    from_elem_mut(losses, begin),
                    from_elem_mut(marks, begin),
                );
                let grid = Grid::blocks(n as u32, threads);
                card.launch(CARD.of::<S>("row_losses"), arguments, grid)?;
                let dz = dz_rounded.map_or(retyped(z.as_in()), Out::as_in);
                let dz = CardMatrix::new(dz, n, classes);
                if let Some(dx) = dx {
                    multiply(card, dz, w, from_elem_mut(dx, begin * inputs), false)?;
                }
                if let Some(dw) = dw {
                    multiply(card, dz.transposed(), x, dw, accumulate)?;
                    accumulate = true;
                }
            }
            let arguments = (losses.as_in(), marks.as_in(), rows as u64, sums);
            card.launch(CARD.kernel("add_losses"), arguments, Grid::blocks(1, 256))
        }
    }
}
