//! The micro-kernel of AMX.
//!
//! In: panels of pairs of bf16, those of `b` as for AVX512-BF16. A panel of `a` holds, for 16 units after 16 units, the rows one
//! after the other, each with its 16 units. So a tile is 16 rows of 64 bytes in both, and a tile of `a` times a tile of `b`
//! adds 16 units to 16 x 16 sums. Panels have a multiple of 16 units; those that are missing are zeros.

use std::arch::asm;

use super::kernel::{MicroKernel, Panels};
use super::pack_avx512::{pack_pairs, pack_tiles};
use super::store::{Buffer, Tile, store_avx512_bf16};
use super::{Operand, kernel};
use crate::amx;

/// AMX for bf16: 2 x 2 tiles of sums, so that each tile that is loaded is used twice.
///
/// An instruction adds the first products of its 16 pairs to each other, starting from zero and rounding once with each product
/// (fused), and the second ones likewise; then both sums to each other, and then the result to the sum before. It reads denormal
/// numbers as zero, writes zero for denormal sums, and rounds to nearest, ties to even (Intel's manual, TDPBF16PS).
pub(super) struct Amx;

// SAFETY: each function uses AVX-512, AVX512-BF16 or AMX, which the caller guarantees.
unsafe impl MicroKernel for Amx {
    type TileSums = Late;
    const ROWS: usize = 2 * amx::ROWS;
    const COLUMNS: usize = 32;
    const K_PER_UNIT: usize = 2;
    const UNITS_STEP: usize = 16;
    /// A panel takes 32 KiB.
    const K_BLOCK: usize = 512;
    const A_LEN: usize = kernel::HALF_MEBIBYTE;
    /// Twice as much as for `a`: products are so fast that packing `a` again for each block of `b` takes a large part of the time.
    const B_LEN: usize = 2 * kernel::HALF_MEBIBYTE;
    const B_STAYS: bool = false;

    unsafe fn begin() {
        // SAFETY: the caller guarantees that AMX may be used, and calls `end`.
        unsafe { amx::configure() }
    }
    unsafe fn end(late: &mut Late) {
        // SAFETY: the caller guarantees that AMX may be used, and the tile.
        unsafe {
            late.store();
            amx::release();
        }
    }
    unsafe fn pack_a(a: &Operand, lanes: usize, k_len: usize, panels: *mut u32) {
        // SAFETY: the caller's contract.
        unsafe { pack_tiles::<{ Self::ROWS }>(a, lanes, k_len, panels) }
    }
    unsafe fn pack_b(b: &Operand, lanes: usize, k_len: usize, panels: *mut u32) {
        // SAFETY: the caller's contract.
        unsafe { pack_pairs::<{ Self::COLUMNS }, { Self::UNITS_STEP }>(b, lanes, k_len, panels) }
    }
    unsafe fn multiply(panels: Panels, late: &mut Late, tile: &Tile) {
        // SAFETY: the caller's contract; the buffer has room for 32 x 32 sums.
        unsafe {
            add_products(panels);
            // The processor does this while it still multiplies.
            late.store();
            store_tiles(late.buffer.0.as_mut_ptr());
        }
        late.tile = Some(*tile);
    }
}

/// Sums that are stored while the next ones are computed. Tiles of one place of `c` are stored in their order.
#[derive(Default)]
pub(super) struct Late {
    buffer: Buffer,
    tile: Option<Tile>,
}

impl Late {
    /// # Safety
    ///
    /// As for [`store_avx512_bf16`].
    #[inline(always)]
    unsafe fn store(&mut self) {
        if let Some(tile) = self.tile.take() {
            // SAFETY: the caller's contract.
            unsafe { store_avx512_bf16(self.buffer.0.as_ptr(), &tile) }
        }
    }
}

/// Makes the 32 x 32 sums of two panels, in tiles 0 to 3.
///
/// # Safety
///
/// The tiles are configured, and the panels have their units, a multiple of 16.
#[inline(always)]
unsafe fn add_products(Panels { units, a, b }: Panels) {
    // Tiles 0 to 3 are sums: rows 0 to 15 and columns 0 to 15, columns 16 to 31, and the same of rows 16 to 31. Tiles 4 and 5
    // are of `a`, tiles 6 and 7 of `b`.
    // A panel of `b` is read once for each panel of `a`, which is not to leave the first-level cache for it (`t1`).
    // SAFETY: each turn reads 16 units of 32 lanes, 2048 bytes, of each panel.
    unsafe {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "test {turns}, {turns}",
            "jz 3f",
            "2:",
            "tileloadd tmm4, [{a} + {a_row}*1]",
            "tileloaddt1 tmm6, [{b} + {row}*1]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloaddt1 tmm7, [{b} + {row}*1 + 64]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{a} + {a_row}*1 + 1024]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {a}, 2048",
            "add {b}, 2048",
            "dec {turns}",
            "jnz 2b",
            "3:",
            turns = inout(reg) units / 16 => _,
            a = inout(reg) a => _,
            b = inout(reg) b => _,
            // Bytes from row to row of a tile.
            a_row = in(reg) 64_usize,
            row = in(reg) 128_usize,
            options(nostack, readonly),
        );
    }
}

/// Writes the 32 x 32 sums to `to`, row by row.
///
/// # Safety
///
/// The tiles are configured, and `to` has room for the sums.
#[inline(always)]
unsafe fn store_tiles(to: *mut f32) {
    // SAFETY: the sums have 32 rows of 128 bytes.
    unsafe {
        asm!(
            "tilestored [{to} + {row}*1], tmm0",
            "tilestored [{to} + {row}*1 + 64], tmm1",
            "tilestored [{to} + {row}*1 + 2048], tmm2",
            "tilestored [{to} + {row}*1 + 2112], tmm3",
            to = in(reg) to,
            row = in(reg) 128_usize,
            options(nostack, preserves_flags),
        );
    }
}
