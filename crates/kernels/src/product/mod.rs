//! Matrix products of f32, or of operands in bf16 with sums in f32.
//!
//! In: the addresses and strides of `a`, `b` and `c` ([`RawOperand`], [`Output`]), whose sizes
//! [`matmul::product`](crate::matmul::product) has checked. Out: `c`. This module knows nothing of tensors.
//!
//! The frame is that of GotoBLAS and BLIS (Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication",
//! 2008), one file for each part:
//!
//! - `blocks`: the loops over blocks of n, k and m, and the sizes of the blocks;
//! - `pack`, `pack_avx512`: copy a block of an operand into panels, and round it on the way if it is to be bf16; panels of f32
//!   that few others meet, or that lie close together, are read where the operand has them instead;
//! - `kernel`, `kernel_amx`: multiply a panel of `a` with a panel of `b`, in registers;
//! - `store`: adds a finished tile to `c`, with bias and ReLU, and rounds it if `c` is bf16.
//!
//! A [`MicroKernel`](kernel::MicroKernel) chooses what the panels hold: f32, also for operands in bf16, which are widened. With
//! AVX512-BF16 and AMX a panel holds pairs of bf16 instead. Which is faster depends on the processor, see
//! [`Bf16Products`](crate::Bf16Products).
//!
//! **Order of sums.** k is cut into blocks of a fixed size. The products of a block are added one after the other (pair after pair
//! with AVX512-BF16, 16 pairs after 16 pairs with AMX), starting from zero, and the sums of the blocks by the tree of
//! [`paceline_numeric::tree`]; then what `c` holds is added. Neither m, n, the number of threads nor the place of a row or column
//! changes an element's bits. f32 has the same bits with AVX2 and AVX-512, which multiply and add with one rounding; plain code
//! on x86-64, AVX512-BF16 and AMX have others.

mod blocks;
mod kernel;
#[cfg(target_arch = "x86_64")]
mod kernel_amx;
mod pack;
#[cfg(target_arch = "x86_64")]
mod pack_avx512;
mod store;

use std::ops::Range;

use half::bf16;

#[cfg(target_arch = "x86_64")]
use crate::Bf16Products;
use crate::{Processor, SimdLevel};
use blocks::BlockSizes;
use kernel::PlainKernel;
#[cfg(target_arch = "x86_64")]
use kernel::{Avx2, Avx512, Dots};
#[cfg(target_arch = "x86_64")]
use kernel_amx::Amx;

/// The address of a matrix, and its element type.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ElemPtr {
    F32(*mut f32),
    Bf16(*mut bf16),
}

impl ElemPtr {
    /// The address `elems` elements further on.
    fn at(self, elems: usize) -> Self {
        match self {
            ElemPtr::F32(start) => ElemPtr::F32(start.wrapping_add(elems)),
            ElemPtr::Bf16(start) => ElemPtr::Bf16(start.wrapping_add(elems)),
        }
    }
}

/// `a` or `b`, as lanes: the rows of `a`, or the columns of `b`. One of the strides is 1.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RawOperand {
    pub(crate) elems: ElemPtr,
    /// Whether the product is of bf16: elements in f32 are rounded to it.
    pub(crate) in_bf16: bool,
    pub(crate) lane_stride: usize,
    pub(crate) k_stride: usize,
}

/// `c`, row-major, and what is done with each sum.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Output {
    pub(crate) elems: ElemPtr,
    pub(crate) row_stride: usize,
    /// Adds to what is there.
    pub(crate) accumulate: bool,
    /// A number for each column, which is added.
    pub(crate) bias: Option<*const f32>,
    pub(crate) with_relu: bool,
}

/// Rows, columns and inner dimension.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProductSizes {
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
}

/// A product whose matrices are described by addresses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RawProduct {
    pub(crate) sizes: ProductSizes,
    pub(crate) a: RawOperand,
    pub(crate) b: RawOperand,
    pub(crate) c: Output,
}

// SAFETY: addresses only; who follows them promises that the threads write disjoint parts of `c`.
unsafe impl Send for RawProduct {}
// SAFETY: as above.
unsafe impl Sync for RawProduct {}

impl RawProduct {
    /// The part of the product that makes these rows and columns of `c`.
    fn part(&self, rows: &Range<usize>, columns: &Range<usize>) -> Self {
        let Self { sizes, a, b, c } = *self;
        let bias = c.bias.map(|bias| bias.wrapping_add(columns.start));
        let c_start = c.elems.at(rows.start * c.row_stride + columns.start);
        Self {
            sizes: ProductSizes { m: rows.len(), n: columns.len(), ..sizes },
            a: RawOperand { elems: a.elems.at(rows.start * a.lane_stride), ..a },
            b: RawOperand { elems: b.elems.at(columns.start * b.lane_stride), ..b },
            c: Output { elems: c_start, bias, ..c },
        }
    }
}

/// Which matrices of a product are bf16; the others are f32.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InBf16 {
    /// Both operands, which may be rounded to it by the product.
    pub(crate) operands: bool,
    pub(crate) c: bool,
}

/// The number of f32 elements of scratch memory of a product: for each part of `c` that a thread makes, one packed block
/// of `a` and of `b`, and f32 sums of `part rows x block columns` for each depth of the tree over blocks of k that `c` cannot
/// hold: all if it is bf16 or `accumulate`, otherwise all but one.
pub(crate) fn scratch_len(
    cpu: &Processor,
    sizes: ProductSizes,
    in_bf16: InBf16,
    accumulate: bool,
) -> usize {
    let instructions = ChosenKernel::of(cpu, in_bf16.operands);
    parts(cpu, sizes)
        .map(|(rows, columns)| {
            instructions.blocks(sizes, &rows, &columns, in_bf16.c || accumulate).len()
        })
        .sum()
}

/// Computes the product on all threads.
///
/// # Safety
///
/// The addresses, strides and sizes describe memory that may be read, and written in the case of `c`; nobody else
/// writes to it meanwhile, and `c` overlaps neither `a`, `b` nor the bias. `a` and `b` have the same `in_bf16`, which is true
/// where elements are bf16.
pub(crate) unsafe fn run(cpu: &Processor, product: RawProduct, scratch: &mut [f32]) {
    let instructions = ChosenKernel::of(cpu, product.a.in_bf16);
    let keeps_c = product.c.accumulate || matches!(product.c.elems, ElemPtr::Bf16(_));
    let mut rest = scratch;
    let with_scratch = |(rows, columns): (Range<usize>, Range<usize>)| {
        let blocks = instructions.blocks(product.sizes, &rows, &columns, keeps_c);
        let (own, after) = std::mem::take(&mut rest).split_at_mut(blocks.len());
        rest = after;
        (product.part(&rows, &columns), blocks, own)
    };
    let items = parts(cpu, product.sizes).map(with_scratch).collect();
    cpu.threads.for_each(items, |(part, blocks, scratch)| {
        // SAFETY: the caller's promise; parts are disjoint, and the processor has the chosen instructions.
        unsafe {
            match instructions {
                #[cfg(target_arch = "x86_64")]
                ChosenKernel::Amx => blocks.run::<Amx>(&part, scratch),
                #[cfg(target_arch = "x86_64")]
                ChosenKernel::Dots => blocks.run::<Dots>(&part, scratch),
                #[cfg(target_arch = "x86_64")]
                ChosenKernel::Avx512 => blocks.run::<Avx512>(&part, scratch),
                #[cfg(target_arch = "x86_64")]
                ChosenKernel::Avx2 => blocks.run::<Avx2>(&part, scratch),
                ChosenKernel::Plain => blocks.run::<PlainKernel>(&part, scratch),
            }
        }
    });
}

#[derive(Clone, Copy)]
enum ChosenKernel {
    #[cfg(target_arch = "x86_64")]
    Amx,
    #[cfg(target_arch = "x86_64")]
    Dots,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    Plain,
}

impl ChosenKernel {
    fn of(cpu: &Processor, are_operands_bf16: bool) -> Self {
        match cpu.simd {
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Avx512 => match cpu.bf16_products() {
                Bf16Products::Amx if are_operands_bf16 => Self::Amx,
                Bf16Products::Dots if are_operands_bf16 => Self::Dots,
                _ => Self::Avx512,
            },
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Avx2 => Self::Avx2,
            _ => Self::Plain,
        }
    }

    fn blocks(
        self,
        sizes: ProductSizes,
        rows: &Range<usize>,
        columns: &Range<usize>,
        keeps_c: bool,
    ) -> BlockSizes {
        let sizes = ProductSizes { m: rows.len(), n: columns.len(), ..sizes };
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Amx => BlockSizes::new::<Amx>(sizes, keeps_c),
            #[cfg(target_arch = "x86_64")]
            Self::Dots => BlockSizes::new::<Dots>(sizes, keeps_c),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => BlockSizes::new::<Avx512>(sizes, keeps_c),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => BlockSizes::new::<Avx2>(sizes, keeps_c),
            Self::Plain => BlockSizes::new::<PlainKernel>(sizes, keeps_c),
        }
    }
}

/// Divides `c` into a grid with a part for each thread. Each thread packs the rows of `a` and the columns of `b` of its part,
/// so the grid with the fewest rows and columns per part is chosen. A part starts at a multiple of 64 rows and columns, so that
/// two threads share no cache line of a `c` whose rows start on cache lines.
fn parts(
    cpu: &Processor,
    sizes: ProductSizes,
) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
    const STEP: usize = 64;
    let threads = cpu.threads.count();
    let lines = |len: usize, parts: usize| len.div_ceil(parts).next_multiple_of(STEP);
    let grids = (1..=threads).filter(|down| threads.is_multiple_of(*down));
    let packed = |down: &usize| lines(sizes.m, *down) + lines(sizes.n, threads / down);
    let down = grids.min_by_key(packed).unwrap_or(1);
    let (rows, columns) = (lines(sizes.m, down), lines(sizes.n, threads / down));
    let ranges = |len: usize, step: usize| {
        (0..len).step_by(step.max(1)).map(move |start| start..len.min(start + step))
    };
    ranges(sizes.m, rows)
        .flat_map(move |rows| ranges(sizes.n, columns).map(move |c| (rows.clone(), c)))
}
