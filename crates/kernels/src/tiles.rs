//! Tiles: registers of 16 rows of 64 bytes, as AMX has them, and products of blocks of 2 x 2 of them.
//!
//! This file does not know what is multiplied, nor where the tiles are.
#![cfg_attr(not(any(target_arch = "x86_64", test)), allow(dead_code, reason = "no tiles there"))]

use half::bf16;
use paceline_memory::DType;

use crate::SimdLevel;

pub(crate) const ROWS: usize = 16;
/// Bytes of a row: 16 numbers of 4 bytes, or 16 pairs of bf16.
pub(crate) const ROW_BYTES: usize = 64;
/// Rows, and columns, of a block of 2 x 2 tiles of sums; and the products that [`add_block`] adds to each of them.
pub(crate) const BLOCK: usize = 32;

/// Where tiles are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TilesOf {
    /// In the processor, which has AMX.
    #[cfg(target_arch = "x86_64")]
    Processor,
    /// In memory.
    #[cfg(test)]
    Emulated,
}

/// The instructions of an operation that may use tiles.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ways {
    pub(crate) simd: SimdLevel,
    /// Tiles, if products are computed with them.
    pub(crate) tiles: Option<TilesOf>,
    /// The type of results.
    pub(crate) dtype: DType,
}

#[cfg(test)]
thread_local! {
    /// Whether operations that this thread launches use tiles in memory.
    pub(crate) static EMULATES: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Calls `$run::<tiles, tiles side by side>`.
macro_rules! with_tiles {
    ($of:expr, $wide:expr, $run:ident($($arg:expr),* $(,)?)) => {
        match $of {
            #[cfg(target_arch = "x86_64")]
            $crate::tiles::TilesOf::Processor => {
                // SAFETY: this is only chosen where `Bf16Products` has found AMX, and this thread has no other tiles now.
                let mut tiles = unsafe { $crate::amx::Hardware::new() };
                match $wide {
                    1 => $run::<_, 1>(&mut tiles, $($arg),*),
                    _ => $run::<_, 2>(&mut tiles, $($arg),*),
                }
            }
            #[cfg(test)]
            $crate::tiles::TilesOf::Emulated => {
                let mut tiles = $crate::tiles::EmulatedTiles::default();
                match $wide {
                    1 => $run::<_, 1>(&mut tiles, $($arg),*),
                    _ => $run::<_, 2>(&mut tiles, $($arg),*),
                }
            }
        }
    };
}
pub(crate) use with_tiles;

/// Eight tiles of full size, which belong to a thread. `TILE` and the like are numbers of tiles, from 0 to 7.
///
/// # Safety
///
/// The functions read and write 16 rows of 64 bytes, `stride` bytes after each other.
pub(crate) unsafe trait Tiles {
    unsafe fn zero<const TILE: usize>(&mut self);
    unsafe fn load<const TILE: usize>(&mut self, from: *const u8, stride: usize);
    /// Reads a tile that is not to drive others out of the first-level cache.
    unsafe fn load_past_cache<const TILE: usize>(&mut self, from: *const u8, stride: usize);
    unsafe fn store<const TILE: usize>(&mut self, to: *mut u8, stride: usize);
    /// Adds to 16 x 16 sums in f32 the products of 16 rows of 16 pairs of bf16 (`A`) and 16 pairs of 16 columns (`B`).
    ///
    /// An instruction adds the first products of its 16 pairs to each other, starting from zero and rounding once with each
    /// product (fused), and the second ones likewise; then both sums to each other, and then the result to the sum before. It
    /// reads denormal numbers as zero, writes zero for denormal sums, and rounds to nearest, ties to even (Intel's manual,
    /// TDPBF16PS).
    unsafe fn add_products<const SUMS: usize, const A: usize, const B: usize>(&mut self);
}

/// Tiles in memory, for tests on processors that have none. The order of additions is that of the instruction; rounding and
/// denormal numbers are those of f32.
#[cfg(test)]
#[derive(Default)]
pub(crate) struct EmulatedTiles([[[u32; ROW_BYTES / 4]; ROWS]; 8]);

#[cfg(test)]
// SAFETY: each function touches the rows that its arguments name.
unsafe impl Tiles for EmulatedTiles {
    unsafe fn zero<const TILE: usize>(&mut self) {
        self.0[TILE] = Default::default();
    }
    unsafe fn load<const TILE: usize>(&mut self, from: *const u8, stride: usize) {
        for (i, row) in self.0[TILE].iter_mut().enumerate() {
            // SAFETY: the caller's contract.
            *row = unsafe { from.add(i * stride).cast::<[u32; ROW_BYTES / 4]>().read_unaligned() };
        }
    }
    unsafe fn load_past_cache<const TILE: usize>(&mut self, from: *const u8, stride: usize) {
        // SAFETY: the caller's contract.
        unsafe { self.load::<TILE>(from, stride) }
    }
    unsafe fn store<const TILE: usize>(&mut self, to: *mut u8, stride: usize) {
        for (i, row) in self.0[TILE].iter().enumerate() {
            // SAFETY: the caller's contract.
            unsafe { to.add(i * stride).cast::<[u32; ROW_BYTES / 4]>().write_unaligned(*row) };
        }
    }
    unsafe fn add_products<const SUMS: usize, const A: usize, const B: usize>(&mut self) {
        let half = |pair: u32, which: u32| f32::from_bits(pair << (16 * (1 - which)) & 0xffff_0000);
        for i in 0..ROWS {
            for j in 0..ROW_BYTES / 4 {
                let of = |which| {
                    (0..16).fold(0.0f32, |sum, k| {
                        half(self.0[A][i][k], which).mul_add(half(self.0[B][k][j], which), sum)
                    })
                };
                let sum = f32::from_bits(self.0[SUMS][i][j]) + (of(0) + of(1));
                self.0[SUMS][i][j] = sum.to_bits();
            }
        }
    }
}

pub(crate) fn as_bf16(elems: &mut [f32]) -> &mut [bf16] {
    // SAFETY: an f32 is two bf16, and any bits are a bf16.
    unsafe { elems.align_to_mut().1 }
}

pub(crate) fn read_bf16(elems: &[f32]) -> &[bf16] {
    // SAFETY: as above.
    unsafe { elems.align_to().1 }
}

/// The bf16 that an f32 holds.
#[inline(always)]
pub(crate) fn narrow(x: f32) -> bf16 {
    bf16::from_bits((x.to_bits() >> 16) as u16)
}

/// Two bf16 in 32 bits, the first in the low half.
#[inline(always)]
pub(crate) fn pair(first: bf16, second: bf16) -> f32 {
    f32::from_bits(u32::from(second.to_bits()) << 16 | u32::from(first.to_bits()))
}

/// Writes pairs of rows, which are `stride` elements long: for each block of columns and each two rows, the pairs of the columns.
#[inline(always)]
pub(crate) fn interleave<A: Copy>(
    from: &[A],
    stride: usize,
    block: usize,
    to: &mut [f32],
    convert: impl Fn(A) -> bf16,
) {
    let block_len = from.len() / stride / 2 * block;
    for (column, to) in (0..stride).step_by(block).zip(to.chunks_exact_mut(block_len)) {
        for (from, to) in from.chunks_exact(2 * stride).zip(to.chunks_exact_mut(block)) {
            let (first, second) = (&from[column..][..block], &from[stride + column..][..block]);
            for ((to, a), b) in to.iter_mut().zip(first).zip(second) {
                *to = pair(convert(*a), convert(*b));
            }
        }
    }
}

/// Makes the sums of two rows of `C` tiles zero: tiles 0 and 1, 2 and 3.
///
/// # Safety
///
/// That of [`Tiles`].
#[inline(always)]
pub(crate) unsafe fn zero_sums<T: Tiles>(tiles: &mut T) {
    // SAFETY: the caller's contract.
    unsafe {
        tiles.zero::<0>();
        tiles.zero::<1>();
        tiles.zero::<2>();
        tiles.zero::<3>();
    }
}

/// Adds the products of 2 x 16 rows and `C` times 16 columns to the sums. The rows begin at `a`, each 16 rows `a_stride` bytes
/// after each other, with 16 pairs each; the pairs of the columns begin at `b`, in rows of `C` times 64 bytes. Each tile that is
/// loaded is used twice, if `C` is 2.
///
/// # Safety
///
/// That of [`Tiles`].
#[inline(always)]
pub(crate) unsafe fn add_block<T: Tiles, const C: usize>(
    tiles: &mut T,
    a: [*const u8; 2],
    a_stride: usize,
    b: *const u8,
) {
    const { assert!(C == 1 || C == 2) };
    // Tiles 0 to 3 are sums: rows 0 to 15 and columns 0 to 15, columns 16 to 31, and the same of rows 16 to 31. Tiles 4 and 5
    // are of `a`, tiles 6 and 7 of `b`.
    // SAFETY: the caller's contract.
    unsafe {
        tiles.load::<4>(a[0], a_stride);
        tiles.load_past_cache::<6>(b, C * ROW_BYTES);
        tiles.add_products::<0, 4, 6>();
        if C == 2 {
            tiles.load_past_cache::<7>(b.wrapping_add(ROW_BYTES), C * ROW_BYTES);
            tiles.add_products::<1, 4, 7>();
        }
        tiles.load::<5>(a[1], a_stride);
        tiles.add_products::<2, 5, 6>();
        if C == 2 {
            tiles.add_products::<3, 5, 7>();
        }
    }
}

/// Writes the sums of 32 rows, or of the first 16, which are `stride` bytes apart.
///
/// # Safety
///
/// That of [`Tiles`].
#[inline(always)]
pub(crate) unsafe fn store_sums<T: Tiles, const C: usize>(
    tiles: &mut T,
    to: *mut u8,
    stride: usize,
    has_32_rows: bool,
) {
    // SAFETY: the caller's contract.
    unsafe {
        tiles.store::<0>(to, stride);
        if C == 2 {
            tiles.store::<1>(to.wrapping_add(ROW_BYTES), stride);
        }
        if has_32_rows {
            let to = to.wrapping_add(ROWS * stride);
            tiles.store::<2>(to, stride);
            if C == 2 {
                tiles.store::<3>(to.wrapping_add(ROW_BYTES), stride);
            }
        }
    }
}

/// Reads sums, as [`store_sums`] writes them.
///
/// # Safety
///
/// That of [`Tiles`].
#[inline(always)]
pub(crate) unsafe fn load_sums<T: Tiles, const C: usize>(
    tiles: &mut T,
    from: *const u8,
    stride: usize,
    has_32_rows: bool,
) {
    // SAFETY: the caller's contract.
    unsafe {
        tiles.load::<0>(from, stride);
        if C == 2 {
            tiles.load::<1>(from.wrapping_add(ROW_BYTES), stride);
        }
        if has_32_rows {
            let from = from.wrapping_add(ROWS * stride);
            tiles.load::<2>(from, stride);
            if C == 2 {
                tiles.load::<3>(from.wrapping_add(ROW_BYTES), stride);
            }
        }
    }
}
