//! Matrix products on a card, and the kernels that go with them.
//!
//! In and out: addresses of matrices that lie row after row. Products are those of the vendor's library; f32 keeps all its
//! bits. This file does not know which operation multiplies.

use half::{bf16, f16};
use paceline_cuda::kernel::{In, Out, Scalar};
use paceline_cuda::{
    Epilogue, Factor, Grid, KernelSource, Matmul, MatmulSizes, MatrixType, Result,
};

use super::NUMBERS;
use crate::OnCard;
use crate::activation::Activation;

pub(crate) static CARD: KernelSource =
    KernelSource::new("products.cu", include_str!("products.cu"), &[NUMBERS]);

/// A type of elements that the library multiplies.
pub(crate) trait Multiplied: Scalar {
    const TYPE: MatrixType;
}

impl Multiplied for f32 {
    const TYPE: MatrixType = MatrixType::F32;
}

impl Multiplied for f64 {
    const TYPE: MatrixType = MatrixType::F64;
}

impl Multiplied for f16 {
    const TYPE: MatrixType = MatrixType::F16;
}

impl Multiplied for bf16 {
    const TYPE: MatrixType = MatrixType::Bf16;
}

/// The same elements under another type, which the caller knows to be theirs.
pub(crate) fn retyped<T, U>(elems: In<T>) -> In<U> {
    In(elems.0, std::marker::PhantomData)
}

/// The elements from `first` on.
pub(crate) fn from_elem<T>(elems: In<T>, first: usize) -> In<T> {
    In(elems.0 + (first * size_of::<T>()) as u64, std::marker::PhantomData)
}

pub(crate) fn from_elem_mut<T>(elems: Out<T>, first: usize) -> Out<T> {
    Out(elems.0 + (first * size_of::<T>()) as u64, std::marker::PhantomData)
}

/// A matrix on a card, row after row, or its transpose.
#[derive(Clone, Copy)]
pub(crate) struct CardMatrix<T> {
    elems: In<T>,
    rows: usize,
    columns: usize,
    is_transposed: bool,
}

impl<T: Multiplied> CardMatrix<T> {
    pub(crate) fn new(elems: In<T>, rows: usize, columns: usize) -> Self {
        Self { elems, rows, columns, is_transposed: false }
    }

    pub(crate) fn transposed(self) -> Self {
        let Self { elems, rows, columns, is_transposed } = self;
        Self { elems, rows: columns, columns: rows, is_transposed: !is_transposed }
    }

    fn factor(&self) -> Factor {
        let stride = if self.is_transposed { self.rows } else { self.columns };
        let (address, is_transposed) = (self.elems.0, self.is_transposed);
        Factor { address, stride, batch_stride: 0, is_transposed }
    }
}

/// `c = a b`, or `c += a b` if `accumulate`. Sums of no products are zero.
///
/// # Safety
///
/// The elements are those of operands of the operation, `c` (rows of a, columns of b) of one that is written.
pub(crate) unsafe fn multiply<S: Multiplied, C: Multiplied>(
    card: &OnCard,
    a: CardMatrix<S>,
    b: CardMatrix<S>,
    c: Out<C>,
    accumulate: bool,
) -> Result<()> {
    let added = accumulate.then(|| c.as_in());
    // SAFETY: the caller's.
    unsafe { multiply_with(card, a, b, c, added, Epilogue::None) }
}

/// `c = a b + added`, and then the epilogue.
///
/// # Safety
///
/// As for [`multiply`]; `added` has the elements of c, and the bias one for each column of b.
pub(crate) unsafe fn multiply_with<S: Multiplied, C: Multiplied>(
    card: &OnCard,
    a: CardMatrix<S>,
    b: CardMatrix<S>,
    c: Out<C>,
    added: Option<In<C>>,
    epilogue: Epilogue,
) -> Result<()> {
    let (rows, inner, columns) = (a.rows, a.columns, b.columns);
    debug_assert_eq!(inner, b.rows, "the sizes of a product");
    if inner == 0 {
        // The library has no empty matrices.
        return match added {
            Some(added) if added.0 == c.0 => Ok(()),
            // SAFETY: both have so many elements.
            Some(added) => unsafe { card.copy(added, c, rows * columns) },
            // SAFETY: `c` has so many elements.
            None => unsafe { card.fill(c, 0, rows * columns) },
        };
    }
    let matmul = Matmul {
        factors: S::TYPE,
        result: C::TYPE,
        sizes: MatmulSizes { rows, inner, columns, batch: 1 },
        a: a.factor(),
        b: b.factor(),
        c: CardMatrix::new(c.as_in(), rows, columns).factor(),
        alpha: 1.0,
        added: added.map(|added| added.0),
        epilogue,
    };
    // SAFETY: the caller's.
    unsafe { card.multiply(&matmul) }
}

/// `y = x w^T`, plus the bias, and then the activation. Shapes: x (m, k), w (n, k), bias (n), y (m, n).
///
/// # Safety
///
/// As for [`multiply`]; the bias has n elements.
pub(crate) unsafe fn linear<S: Multiplied, C: Multiplied>(
    card: &OnCard,
    x: CardMatrix<S>,
    w: CardMatrix<S>,
    bias: Option<In<C>>,
    activation: Activation,
    y: Out<C>,
) -> Result<()> {
    /// The alignment of a bias that the library's vector instructions need. A plan is chosen for the addresses of the matrices,
    /// and then serves any bias.
    const ALIGNMENT: u64 = 16;
    let with_relu = activation == Activation::Relu;
    let is_aligned = bias.is_none_or(|bias| bias.0.is_multiple_of(ALIGNMENT));
    // The library has epilogues for sums in f32 only.
    let is_fused = C::TYPE != MatrixType::F64 && is_aligned && x.columns > 0;
    let epilogue = match bias {
        Some(bias) if is_fused && with_relu => Epilogue::BiasRelu(bias.0),
        Some(bias) if is_fused => Epilogue::Bias(bias.0),
        None if is_fused && with_relu => Epilogue::Relu,
        _ => Epilogue::None,
    };
    let (n, count) = (w.rows, x.rows * w.rows);
    // SAFETY: the caller's; `y` has `count` elements.
    unsafe {
        multiply_with(card, x, w.transposed(), y, None, epilogue)?;
        match bias {
            _ if is_fused => Ok(()),
            Some(bias) => {
                let arguments = (bias, u32::from(with_relu), y, n as u64, count as u64);
                card.launch(CARD.of::<C>("add_bias"), arguments, Grid::elements(count))
            }
            None if with_relu => {
                card.launch(CARD.of::<C>("cut"), (y, count as u64), Grid::elements(count))
            }
            None => Ok(()),
        }
    }
}

/// `sums (+)= sum over the parts of partials`, which are (parts, n).
///
/// # Safety
///
/// As for [`multiply`].
pub(crate) unsafe fn add_parts<T: Scalar>(
    card: &OnCard,
    parts: usize,
    n: usize,
    partials: In<T::Wide>,
    accumulate: bool,
    sums: Out<T>,
) -> Result<()> {
    /// With fewer parts, a thread adds all of an element.
    const MANY: usize = 64;
    let grid = if parts < MANY {
        Grid::elements(n)
    } else {
        Grid { blocks: [n.div_ceil(32) as u32, 1, 1], threads: [32, 8, 1], shared_bytes: 0 }
    };
    let arguments = (partials, parts as u64, n as u64, u32::from(accumulate), sums);
    // SAFETY: the caller's.
    unsafe { card.launch(CARD.of::<T>("add_parts"), arguments, grid) }
}

/// The elements in 16 bits.
///
/// # Safety
///
/// Both have `len` elements.
pub(crate) unsafe fn narrow<H: Scalar>(
    card: &OnCard,
    elems: In<f32>,
    rounded: Out<H>,
    len: usize,
) -> Result<()> {
    // SAFETY: the caller's.
    unsafe { card.launch(CARD.of::<H>("narrow"), (elems, rounded, len as u64), Grid::fours(len)) }
}

/// How rows are divided for sums over them. It follows from the shape, so the bits do too.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowParts {
    rows: usize,
    columns: usize,
    parts: usize,
}

impl RowParts {
    pub(crate) fn new(rows: usize, columns: usize) -> Self {
        /// Blocks that keep a large card busy.
        const BLOCKS: usize = 512;
        /// The fewest rows that are worth a block.
        const FEWEST_ROWS: usize = 64;
        let blocks = columns.div_ceil(32).max(1);
        let parts = (BLOCKS / blocks).min(rows.div_ceil(FEWEST_ROWS)).max(1);
        Self { rows, columns, parts }
    }

    /// The elements of [`sum_over_rows`]'s scratch memory.
    pub(crate) fn scratch_len(&self) -> usize {
        self.parts * self.columns
    }
}

/// `sums (+)= sum over rows of x`.
///
/// # Safety
///
/// `x` has the elements of all rows, `partials` [`RowParts::scratch_len`] in the type that kernels compute in, and `sums` an
/// element for each column.
pub(crate) unsafe fn sum_over_rows<S: Multiplied, T: Multiplied<Wide = S::Wide>>(
    card: &OnCard,
    sizes: RowParts,
    x: In<S>,
    partials: Out<S::Wide>,
    accumulate: bool,
    sums: Out<T>,
) -> Result<()> {
    let RowParts { rows, columns, parts } = sizes;
    let [rows, n] = [rows, columns].map(|size| size as u64);
    let rows_of_part = rows.div_ceil(parts as u64);
    let grid = Grid {
        blocks: [columns.div_ceil(32) as u32, parts as u32, 1],
        threads: [32, 8, 1],
        shared_bytes: 0,
    };
    // SAFETY: a block reads rows below `rows` and writes a row of `partials` (parts, columns), which the second kernel reads.
    unsafe {
        card.launch(CARD.of::<S>("sum_rows"), (x, rows, n, rows_of_part, partials), grid)?;
        add_parts(card, parts, columns, partials.as_in(), accumulate, sums)
    }
}
