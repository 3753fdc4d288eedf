//! The micro-kernel of AMX.
//!
//! In: panels of pairs of bf16, those of `b` as for AVX512-BF16. A panel of `a` holds lane after lane, each with all its units, like
//! a matrix whose rows are as long as a block of k. 16 units of 16 lanes are a tile; times a tile of `b` they are added to 16 x 16
//! sums. Panels have a multiple of 16 units; those that are missing are zeros.

use std::ops::Range;

use super::kernel::{MicroKernel, Panels};
use super::pack_avx512::{pack_pairs, pack_rows};
use super::store::{SumTile, TileBuffer, store_avx512_bf16};
use super::{RawOperand, kernel};
use crate::amx::Hardware;
use crate::tiles::{self, ROW_BYTES};

/// AMX for bf16: 2 x 2 tiles of sums.
pub(super) struct Amx;

/// Bytes of a unit.
const UNIT: usize = 4;

// SAFETY: each function uses AVX-512, AVX512-BF16 or AMX, which the caller guarantees.
unsafe impl MicroKernel for Amx {
    type TileSums = LateSums;
    const ROWS: usize = 2 * tiles::ROWS;
    const COLUMNS: usize = 32;
    const K_PER_UNIT: usize = 2;
    const UNITS_STEP: usize = 16;
    /// A panel takes 32 KiB.
    const K_BLOCK: usize = 512;
    const A_LEN: usize = kernel::HALF_MEBIBYTE;
    /// Twice as much as for `a`: products are so fast that packing `a` again for each block of `b` takes a large part of the time.
    const B_LEN: usize = 2 * kernel::HALF_MEBIBYTE;
    const B_STAYS: bool = false;

    unsafe fn begin() -> LateSums {
        // SAFETY: the caller guarantees that AMX may be used, and ends this product before the next one.
        let tiles = unsafe { Hardware::new() };
        LateSums { tiles, buffer: TileBuffer::default(), tile: None, rows: 0..0 }
    }
    unsafe fn end(mut late: LateSums) {
        // SAFETY: the caller guarantees the tile.
        unsafe { late.store(usize::MAX) }
    }
    fn are_panels(a: &RawOperand, lanes: usize, k_len: usize) -> bool {
        let is_contiguous = (a.k_stride, a.lane_stride) == (1, k_len);
        let is_whole =
            lanes.is_multiple_of(Self::ROWS) && k_len.is_multiple_of(2 * Self::UNITS_STEP);
        is_contiguous && is_whole
    }
    unsafe fn pack_a(a: &RawOperand, lanes: usize, k_len: usize, panels: *mut u32) {
        // SAFETY: the caller's contract.
        unsafe { pack_rows::<{ Self::ROWS }>(a, lanes, k_len, panels) }
    }
    unsafe fn pack_b(b: &RawOperand, lanes: usize, k_len: usize, panels: *mut u32) {
        // SAFETY: the caller's contract.
        unsafe { pack_pairs::<{ Self::COLUMNS }, { Self::UNITS_STEP }>(b, lanes, k_len, panels) }
    }
    unsafe fn multiply(panels: Panels, late: &mut LateSums, tile: &SumTile) {
        // SAFETY: the caller's contract.
        unsafe { multiply(panels, late, tile) }
    }
}

/// Sums that are stored while the next ones are computed. Tiles of one place of `c` are stored in their order.
pub(super) struct LateSums {
    tiles: Hardware,
    buffer: TileBuffer,
    tile: Option<SumTile>,
    /// The rows of the tile that are not stored yet.
    rows: Range<usize>,
}

impl LateSums {
    /// Stores up to `rows` more rows.
    ///
    /// # Safety
    ///
    /// As for [`store_avx512_bf16`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn store(&mut self, rows: usize) {
        let rows = self.rows.start..self.rows.end.min(self.rows.start.saturating_add(rows));
        if let Some(tile) = self.tile.as_ref().filter(|_| !rows.is_empty()) {
            self.rows.start = rows.end;
            // SAFETY: the caller's contract; the rows are those of the tile.
            unsafe { store_avx512_bf16(self.buffer.0.as_ptr(), tile, rows) }
        }
    }
}

/// # Safety
///
/// The contract of [`MicroKernel::multiply`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn multiply(Panels { units, a, b }: Panels, late: &mut LateSums, tile: &SumTile) {
    let turns = units / Amx::UNITS_STEP;
    let (stride, row) = (units * UNIT, Amx::COLUMNS * UNIT);
    let (mut a, mut b) = (a.start.cast::<u8>(), b.start.cast::<u8>());
    // The rows of the tile before are stored in turn with the products of this one: the processor looks ahead far enough to do
    // both at once, but not past all rows or all products.
    let share = late.rows.len().div_ceil(turns.max(1));
    // SAFETY: the caller's contract; the buffer has room for 32 x 32 sums.
    unsafe {
        tiles::zero_sums(&mut late.tiles);
        for _ in 0..turns {
            let rows = [a, a.wrapping_add(tiles::ROWS * stride)];
            tiles::add_block::<_, 2>(&mut late.tiles, rows, stride, b);
            late.store(share);
            a = a.wrapping_add(ROW_BYTES);
            b = b.wrapping_add(Amx::UNITS_STEP * row);
        }
        late.store(usize::MAX);
        tiles::store_sums::<_, 2>(&mut late.tiles, late.buffer.0.as_mut_ptr().cast(), row, true);
    }
    (late.tile, late.rows) = (Some(*tile), 0..tile.rows);
}
