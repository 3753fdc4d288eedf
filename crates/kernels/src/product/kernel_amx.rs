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
    const ROWS: usize = 2 * amx::ROWS;
    const COLUMNS: usize = 32;
    const K_PER_UNIT: usize = 2;
    const UNITS_STEP: usize = 16;
    /// A panel takes 32 KiB.
    const K_BLOCK: usize = 512;
    const A_LEN: usize = kernel::HALF_MEBIBYTE;
    /// Twice as much as for `a`: products are so fast that packing `a` anew for each block of `b` takes a large part of the time.
    const B_LEN: usize = 2 * kernel::HALF_MEBIBYTE;
    const B_STAYS: bool = false;

    unsafe fn begin() {
        // SAFETY: the caller guarantees that AMX may be used, and calls `end`.
        unsafe { amx::configure() }
    }
    unsafe fn end() {
        // SAFETY: the caller guarantees that AMX may be used.
        unsafe { amx::release() }
    }
    unsafe fn pack_a(a: &Operand, lanes: usize, k_len: usize, panels: *mut u32) {
        // SAFETY: the caller's contract.
        unsafe { pack_tiles::<{ Self::ROWS }>(a, lanes, k_len, panels) }
    }
    unsafe fn pack_b(b: &Operand, lanes: usize, k_len: usize, panels: *mut u32) {
        // SAFETY: the caller's contract.
        unsafe { pack_pairs::<{ Self::COLUMNS }, { Self::UNITS_STEP }>(b, lanes, k_len, panels) }
    }
    unsafe fn multiply(panels: Panels, buffer: &mut Buffer, tile: &Tile) {
        // SAFETY: the caller's contract; the buffer has room for 32 x 32 sums.
        unsafe {
            sums(panels, buffer.0.as_mut_ptr());
            store_avx512_bf16(buffer.0.as_ptr(), tile);
        }
    }
}

/// Writes the 32 x 32 sums of two panels to `to`, row by row.
///
/// # Safety
///
/// The tiles are configured, the panels have their units, a multiple of 16, and `to` has room for the sums.
unsafe fn sums(Panels { units, a, b }: Panels, to: *mut f32) {
    // Tiles 0 to 3 are sums: rows 0 to 15 and columns 0 to 15, columns 16 to 31, and the same of rows 16 to 31. Tiles 4 and 5
    // are of `a`, tiles 6 and 7 of `b`.
    // SAFETY: each turn reads 16 units of 32 lanes, 2048 bytes, of each panel; the sums have 32 rows of 128 bytes.
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
            "tileloadd tmm6, [{b} + {row}*1]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{b} + {row}*1 + 64]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{a} + {a_row}*1 + 1024]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {a}, 2048",
            "add {b}, 2048",
            "dec {turns}",
            "jnz 2b",
            "3:",
            "tilestored [{to} + {row}*1], tmm0",
            "tilestored [{to} + {row}*1 + 64], tmm1",
            "tilestored [{to} + {row}*1 + 2048], tmm2",
            "tilestored [{to} + {row}*1 + 2112], tmm3",
            turns = inout(reg) units / 16 => _,
            a = inout(reg) a => _,
            b = inout(reg) b => _,
            to = in(reg) to,
            // Bytes from row to row: of a tile of `a`, and of one of `b` or of sums.
            a_row = in(reg) 64_usize,
            row = in(reg) 128_usize,
            options(nostack),
        );
    }
}
