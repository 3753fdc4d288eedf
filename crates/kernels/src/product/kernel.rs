//! The micro-kernels: a panel of `a` times a panel of `b`, with all sums in registers.
//!
//! In: panels. Out: a tile of sums in a buffer. A packed panel is a sequence of units of 4 bytes: for each unit of k, one
//! for each lane (row of `a`, column of `b`). A unit holds one k as f32, or two as a pair of bf16, the first in the low
//! half. What is missing at the edges is zero.

use super::store::{SumTile, TileBuffer};
use super::{RawOperand, pack, store};
use crate::simd::{Portable, Vector};

/// The block of k of all kernels whose panels hold f32. It decides their order of sums.
const F32_K_BLOCK: usize = 256;

/// A micro-kernel, the format of its panels, and the functions that fill and empty them.
///
/// # Safety
///
/// The functions may only run on a processor that has the instructions of the kernel.
pub(super) unsafe trait MicroKernel {
    /// Where the sums of a tile wait until they are stored.
    type TileSums;
    /// Rows of a tile, and lanes of a panel of `a`.
    const ROWS: usize;
    /// Columns of a tile, and lanes of a panel of `b`.
    const COLUMNS: usize;
    /// The number of k in a unit: 1 (f32) or 2 (bf16).
    const K_PER_UNIT: usize;
    /// The units of a panel are a multiple of this. Units that are missing are zeros.
    const UNITS_STEP: usize = 1;
    /// The block of k.
    const K_BLOCK: usize;
    /// The largest packed block of `a`, in units.
    const A_LEN: usize;
    /// The largest packed block of `b`, in units.
    const B_LEN: usize;
    /// Whether the panel that is used for several tiles in a row is one of `b`, see [`super::blocks`].
    const B_STAYS: bool;
    /// [`MicroKernel::multiply`] also takes panels of f32 that are not packed, for an even number of rows and all columns. With
    /// more panels of the other operand than this, packing takes less time than it saves.
    const MOST_IN_PLACE: usize = 0;

    /// Prepares the thread for [`MicroKernel::multiply`]. [`MicroKernel::end`] follows.
    unsafe fn begin() -> Self::TileSums;
    /// Writes what is not at its place yet.
    unsafe fn end(_sums: Self::TileSums) {}
    /// Whether `lanes` lanes of `k_len` elements of a bf16 `a` lie in memory as [`MicroKernel::pack_a`] would pack them.
    fn are_panels(_a: &RawOperand, _lanes: usize, _k_len: usize) -> bool {
        false
    }
    /// Packs `k_len` elements of `lanes` lanes of `a` into panels, one after the other. May overwrite [`pack::SLACK`] elements after
    /// the last one.
    unsafe fn pack_a(a: &RawOperand, lanes: usize, k_len: usize, panels: *mut u32);
    /// The same for `b`.
    unsafe fn pack_b(b: &RawOperand, lanes: usize, k_len: usize, panels: *mut u32);
    /// Multiplies two panels, and writes the tile of sums to its place. Each sum starts at zero and adds
    /// unit after unit. A kernel may leave the tile in `sums` until the next call, and writes tiles in the order of calls.
    unsafe fn multiply(panels: Panels, sums: &mut Self::TileSums, tile: &SumTile);
}

/// A panel of `a` and one of `b`, of as many units.
#[derive(Clone, Copy)]
pub(super) struct Panels {
    pub(super) units: usize,
    pub(super) a: PanelAt,
    pub(super) b: PanelAt,
}

/// Where a panel begins, and the distances between its lanes and between its units. The lanes of `b` have the distance 1.
#[derive(Clone, Copy)]
pub(super) struct PanelAt {
    pub(super) start: *const u32,
    pub(super) lane: usize,
    pub(super) unit: usize,
}

impl PanelAt {
    pub(super) fn packed(start: *const u32, lanes: usize) -> Self {
        Self { start, lane: 1, unit: lanes }
    }

    /// The numbers, and both distances. If the panel is packed in `LANES` lanes, the compiler knows them.
    #[inline(always)]
    fn numbers<const LANES: usize, const IS_PACKED: bool>(self) -> (*const f32, usize, usize) {
        let (lane, unit) = if IS_PACKED { (1, LANES) } else { (self.lane, self.unit) };
        (self.start.cast(), lane, unit)
    }
}

impl Panels {
    /// Whether both panels are packed, in so many lanes.
    fn are_packed(&self, a_lanes: usize, b_lanes: usize) -> bool {
        (self.a.lane, self.a.unit, self.b.unit) == (1, a_lanes, b_lanes)
    }
}

/// Evaluates `$call` with `$name` as the smallest even number of rows that is enough.
#[cfg(target_arch = "x86_64")]
macro_rules! with_rows {
    ($rows:expr, $($candidate:literal)*, $name:ident => $call:expr) => {
        match $rows {
            $(..=$candidate => {
                const $name: usize = $candidate;
                $call
            })*
            _ => unreachable!("a tile has no more rows"),
        }
    };
}

/// Sums of f32 products, each rounded once with its addition if the processor has a fused form.
///
/// # Safety
///
/// The contract of [`MicroKernel::multiply`], for panels of `LANES` and `B_LANES` lanes, two registers.
#[inline(always)]
unsafe fn fused<
    V: Vector,
    const ROWS: usize,
    const LANES: usize,
    const B_LANES: usize,
    const IS_PACKED: bool,
>(
    Panels { units, a, b }: Panels,
) -> [[V; 2]; ROWS] {
    // Several units per turn of the loop. No closure: it would be compiled without the instructions if it were not inlined.
    const TOGETHER: usize = 4;
    let (mut a, a_lane, a_unit) = a.numbers::<LANES, IS_PACKED>();
    let (mut b, _, b_unit) = b.numbers::<B_LANES, IS_PACKED>();
    // SAFETY: the caller's contract; the addresses move from unit to unit.
    unsafe {
        let mut acc = [[V::zero(); 2]; ROWS];
        for _ in 0..units / TOGETHER {
            for _ in 0..TOGETHER {
                add(a, a_lane, b, &mut acc);
                (a, b) = (a.wrapping_add(a_unit), b.wrapping_add(b_unit));
            }
        }
        for _ in 0..units % TOGETHER {
            add(a, a_lane, b, &mut acc);
            (a, b) = (a.wrapping_add(a_unit), b.wrapping_add(b_unit));
        }
        acc
    }
}

/// Adds the products of a unit.
///
/// # Safety
///
/// The unit has `ROWS` lanes at `a`, `a_lane` apart, and `2 * V::LANES` lanes at `b`, and the processor has the instructions of `V`.
#[inline(always)]
unsafe fn add<V: Vector, const ROWS: usize>(
    a: *const f32,
    a_lane: usize,
    b: *const f32,
    acc: &mut [[V; 2]; ROWS],
) {
    // SAFETY: the caller's contract.
    unsafe {
        let (b0, b1) = (V::load(b), V::load(b.add(V::LANES)));
        for (i, acc) in acc.iter_mut().enumerate() {
            let a = V::splat(*a.add(i * a_lane));
            acc[0] = a.mul_add(b0, acc[0]);
            acc[1] = a.mul_add(b1, acc[1]);
        }
    }
}

/// Plain code, for every processor.
pub(super) struct PlainKernel;

// SAFETY: plain code runs everywhere.
unsafe impl MicroKernel for PlainKernel {
    type TileSums = TileBuffer;
    const ROWS: usize = 6;
    const COLUMNS: usize = 2 * Portable::LANES;
    const K_PER_UNIT: usize = 1;
    const K_BLOCK: usize = F32_K_BLOCK;
    const A_LEN: usize = 1 << 15;
    const B_LEN: usize = 1 << 17;
    const B_STAYS: bool = true;

    unsafe fn begin() -> TileBuffer {
        TileBuffer::default()
    }
    unsafe fn pack_a(a: &RawOperand, lanes: usize, k_len: usize, panels: *mut u32) {
        // SAFETY: the caller's contract.
        unsafe { pack::pack::<Portable, { Self::ROWS }, true>(a, lanes, k_len, panels) }
    }
    unsafe fn pack_b(b: &RawOperand, lanes: usize, k_len: usize, panels: *mut u32) {
        // SAFETY: the caller's contract.
        unsafe { pack::pack::<Portable, { Self::COLUMNS }, false>(b, lanes, k_len, panels) }
    }
    unsafe fn multiply(panels: Panels, buffer: &mut TileBuffer, tile: &SumTile) {
        // SAFETY: the caller's contract.
        unsafe {
            store::store(fused::<Portable, 6, 6, { Self::COLUMNS }, true>(panels), buffer, tile);
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Avx2, Avx512, Dots, HALF_MEBIBYTE};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::super::pack_avx512::{pack_pairs, pack_singles};
    use super::super::{pack, store};
    use super::*;
    use crate::simd;

    /// Units of 4 bytes.
    pub(in super::super) const HALF_MEBIBYTE: usize = 1 << 17;

    /// AVX2 with fused multiply-add. The panels hold f32.
    pub(in super::super) struct Avx2;

    // SAFETY: each function enables the instructions that it needs, which the caller guarantees.
    unsafe impl MicroKernel for Avx2 {
        type TileSums = TileBuffer;
        const ROWS: usize = 6;
        const COLUMNS: usize = 16;
        const K_PER_UNIT: usize = 1;
        /// A panel of `b` takes 16 KiB.
        const K_BLOCK: usize = F32_K_BLOCK;
        /// 512 KiB: 512 rows. The third-level cache is fast enough for a panel of `a` per tile.
        const A_LEN: usize = 512 * Self::K_BLOCK;
        /// 3 MiB: 3072 columns.
        const B_LEN: usize = 3072 * Self::K_BLOCK;
        const B_STAYS: bool = true;
        const MOST_IN_PLACE: usize = 16;

        unsafe fn begin() -> TileBuffer {
            TileBuffer::default()
        }
        unsafe fn pack_a(a: &RawOperand, lanes: usize, k_len: usize, panels: *mut u32) {
            #[target_feature(enable = "avx2,fma")]
            unsafe fn inner(a: &RawOperand, lanes: usize, k_len: usize, panels: *mut u32) {
                // SAFETY: the caller's contract.
                unsafe { pack::pack::<simd::Avx2, 6, true>(a, lanes, k_len, panels) }
            }
            // SAFETY: the caller's contract.
            unsafe { inner(a, lanes, k_len, panels) }
        }
        unsafe fn pack_b(b: &RawOperand, lanes: usize, k_len: usize, panels: *mut u32) {
            #[target_feature(enable = "avx2,fma")]
            unsafe fn inner(b: &RawOperand, lanes: usize, k_len: usize, panels: *mut u32) {
                // SAFETY: the caller's contract.
                unsafe { pack::pack::<simd::Avx2, 16, false>(b, lanes, k_len, panels) }
            }
            // SAFETY: the caller's contract.
            unsafe { inner(b, lanes, k_len, panels) }
        }
        unsafe fn multiply(panels: Panels, buffer: &mut TileBuffer, tile: &SumTile) {
            #[target_feature(enable = "avx2,fma")]
            unsafe fn inner<const ROWS: usize, const IS_PACKED: bool>(
                panels: Panels,
                buffer: &mut TileBuffer,
                tile: &SumTile,
            ) {
                // SAFETY: the caller's contract.
                unsafe {
                    let sums = fused::<simd::Avx2, ROWS, 6, 16, IS_PACKED>(panels);
                    store::store(sums, buffer, tile);
                }
            }
            // SAFETY: the caller's contract.
            unsafe {
                if panels.are_packed(6, 16) {
                    with_rows!(tile.rows, 2 4 6, ROWS => inner::<ROWS, true>(panels, buffer, tile))
                } else {
                    with_rows!(tile.rows, 2 4 6, ROWS => inner::<ROWS, false>(panels, buffer, tile))
                }
            }
        }
    }

    /// AVX-512 without BF16. The panels hold f32.
    pub(in super::super) struct Avx512;

    // SAFETY: as for `Avx2`.
    unsafe impl MicroKernel for Avx512 {
        type TileSums = TileBuffer;
        const ROWS: usize = 14;
        const COLUMNS: usize = 32;
        const K_PER_UNIT: usize = 1;
        /// A panel of `a` takes 14 KiB.
        const K_BLOCK: usize = F32_K_BLOCK;
        const A_LEN: usize = HALF_MEBIBYTE;
        const B_LEN: usize = HALF_MEBIBYTE;
        const B_STAYS: bool = false;
        const MOST_IN_PLACE: usize = usize::MAX;

        unsafe fn begin() -> TileBuffer {
            TileBuffer::default()
        }
        unsafe fn pack_a(a: &RawOperand, lanes: usize, k_len: usize, panels: *mut u32) {
            // SAFETY: the caller's contract.
            unsafe { pack_singles::<14>(a, lanes, k_len, panels) }
        }
        unsafe fn pack_b(b: &RawOperand, lanes: usize, k_len: usize, panels: *mut u32) {
            // SAFETY: the caller's contract.
            unsafe { pack_singles::<32>(b, lanes, k_len, panels) }
        }
        unsafe fn multiply(panels: Panels, buffer: &mut TileBuffer, tile: &SumTile) {
            // SAFETY: the caller's contract.
            unsafe {
                if panels.are_packed(14, 32) {
                    with_rows!(tile.rows, 2 4 6 8 10 12 14, ROWS => widened::<ROWS, true>(panels, buffer, tile))
                } else {
                    with_rows!(tile.rows, 2 4 6 8 10 12 14, ROWS => widened::<ROWS, false>(panels, buffer, tile))
                }
            }
        }
    }

    /// AVX512-BF16: the panels hold pairs of bf16, and one instruction adds both products of a pair. It reads denormal
    /// numbers as zero, writes zero for denormal sums, and rounds to nearest, ties to even. The order of the two additions
    /// of a pair is the processor's.
    pub(in super::super) struct Dots;

    // SAFETY: as for `Avx2`.
    unsafe impl MicroKernel for Dots {
        type TileSums = TileBuffer;
        const ROWS: usize = 14;
        const COLUMNS: usize = 32;
        const K_PER_UNIT: usize = 2;
        const K_BLOCK: usize = 512;
        const A_LEN: usize = HALF_MEBIBYTE;
        const B_LEN: usize = HALF_MEBIBYTE;
        const B_STAYS: bool = false;

        unsafe fn begin() -> TileBuffer {
            TileBuffer::default()
        }
        unsafe fn pack_a(a: &RawOperand, lanes: usize, k_len: usize, panels: *mut u32) {
            // SAFETY: the caller's contract.
            unsafe { pack_pairs::<14, 1>(a, lanes, k_len, panels) }
        }
        unsafe fn pack_b(b: &RawOperand, lanes: usize, k_len: usize, panels: *mut u32) {
            // SAFETY: the caller's contract.
            unsafe { pack_pairs::<32, 1>(b, lanes, k_len, panels) }
        }
        unsafe fn multiply(panels: Panels, buffer: &mut TileBuffer, tile: &SumTile) {
            // SAFETY: the caller's contract.
            unsafe {
                with_rows!(tile.rows, 2 4 6 8 10 12 14, ROWS => dots::<ROWS>(panels, buffer, tile))
            }
        }
    }

    /// # Safety
    ///
    /// The contract of [`MicroKernel::multiply`], for panels of 14 and 32 lanes.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn widened<const ROWS: usize, const IS_PACKED: bool>(
        Panels { units, a, b }: Panels,
        buffer: &mut TileBuffer,
        tile: &SumTile,
    ) {
        let (a, a_lane, a_unit) = a.numbers::<14, IS_PACKED>();
        let (b, _, b_unit) = b.numbers::<32, IS_PACKED>();
        let mut acc = [[_mm512_setzero_ps(); 2]; ROWS];
        for u in 0..units {
            // SAFETY: the caller's contract.
            unsafe {
                let b = b.add(u * b_unit);
                let (b0, b1) = (_mm512_loadu_ps(b), _mm512_loadu_ps(b.add(16)));
                for (i, acc) in acc.iter_mut().enumerate() {
                    let a = _mm512_set1_ps(*a.add(u * a_unit + i * a_lane));
                    acc[0] = _mm512_fmadd_ps(a, b0, acc[0]);
                    acc[1] = _mm512_fmadd_ps(a, b1, acc[1]);
                }
            }
        }
        // SAFETY: the caller's contract.
        unsafe { store::store_registers(acc, buffer, tile) }
    }

    /// # Safety
    ///
    /// The contract of [`MicroKernel::multiply`], for panels of 14 and 32 lanes.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn dots<const ROWS: usize>(panels: Panels, buffer: &mut TileBuffer, tile: &SumTile) {
        let Panels { units, a, b } = panels;
        let (a, b) = (a.start, b.start);
        let mut acc = [[_mm512_setzero_ps(); 2]; ROWS];
        for u in 0..units {
            // SAFETY: the caller's contract; panels of `b` start on cache lines; a `__m512bh` is any 512 bits.
            unsafe {
                let b = b.add(u * 32).cast::<__m512bh>();
                let (b0, b1) = (b.read(), b.add(1).read());
                for (i, acc) in acc.iter_mut().enumerate() {
                    let a = _mm512_set1_epi32(a.add(u * 14 + i).cast::<i32>().read());
                    let a = std::mem::transmute::<__m512i, __m512bh>(a);
                    acc[0] = _mm512_dpbf16_ps(acc[0], a, b0);
                    acc[1] = _mm512_dpbf16_ps(acc[1], a, b1);
                }
            }
        }
        // SAFETY: the caller's contract.
        unsafe { store::store_registers(acc, buffer, tile) }
    }
}
