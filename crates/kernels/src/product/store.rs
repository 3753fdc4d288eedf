//! Writes a tile of sums to `c`: addend, bias, ReLU, and the one rounding if `c` is bf16.

use std::ops::Range;

use half::bf16;
use paceline_numeric::bf16::{round, widen};

use super::ElemPtr;
use crate::simd::Vector;

const MOST_COLUMNS: usize = 32;

/// The sums of the largest tile.
pub(super) const BUFFER_LEN: usize = 32 * MOST_COLUMNS;

#[repr(align(64))]
pub(super) struct TileBuffer(pub(super) [f32; BUFFER_LEN]);

impl Default for TileBuffer {
    fn default() -> Self {
        Self([0.0; BUFFER_LEN])
    }
}

/// Sums of earlier blocks of k, on a stack. Those that are merged with the sums of this block have the depths `merged`.
#[derive(Clone, Copy)]
pub(super) struct Stack {
    /// The sums at depth 0, and the stride of their rows.
    pub(super) bottom: (*mut f32, usize),
    /// Those at depth 1, and the stride of their rows.
    pub(super) above: (*mut f32, usize),
    /// Elements from one depth above the bottom to the next.
    pub(super) len: usize,
    pub(super) merged: (usize, usize),
}

impl Stack {
    /// The sums at a depth, and the stride of their rows.
    #[inline(always)]
    pub(super) fn at(&self, depth: usize) -> (*mut f32, usize) {
        let (above, stride) = self.above;
        if depth == 0 { self.bottom } else { (above.wrapping_add((depth - 1) * self.len), stride) }
    }

    /// The part that starts at this row and column.
    #[inline(always)]
    fn part(&self, i: usize, j: usize) -> Self {
        let part = |(at, stride): (*mut f32, usize)| (at.wrapping_add(i * stride + j), stride);
        Self { bottom: part(self.bottom), above: part(self.above), ..*self }
    }

    /// The addresses of the sums that are merged, at a row and column, in this order.
    #[inline(always)]
    fn merged(&self, i: usize, j: usize) -> impl Iterator<Item = *mut f32> {
        let (from, to) = self.merged;
        (from..to).rev().map(move |depth| {
            let (at, stride) = self.at(depth);
            at.wrapping_add(i * stride + j)
        })
    }
}

/// Where a tile of sums, or a block of tiles, goes and what is added to it, in this order: sums of earlier blocks of k, what `c`
/// holds, the bias.
#[derive(Clone, Copy)]
pub(super) struct SumTile {
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) stack: Stack,
    pub(super) to: ElemPtr,
    pub(super) stride: usize,
    /// Whether what is at `to` is added.
    pub(super) accumulate: bool,
    /// A number for each column.
    pub(super) bias: Option<*const f32>,
    pub(super) with_relu: bool,
}

impl SumTile {
    /// The part that starts at this row and column, of at most so many rows and columns.
    #[inline(always)]
    pub(super) fn part(&self, (i, j): (usize, usize), (rows, columns): (usize, usize)) -> Self {
        Self {
            rows: rows.min(self.rows - i),
            columns: columns.min(self.columns - j),
            stack: self.stack.part(i, j),
            to: self.to.at(i * self.stride + j),
            bias: self.bias.map(|bias| bias.wrapping_add(j)),
            ..*self
        }
    }

    /// Whether what a bf16 `c` holds is added.
    #[inline(always)]
    fn adds_to_bf16(&self) -> bool {
        self.accumulate && matches!(self.to, ElemPtr::Bf16(_))
    }

    /// Asks for the cache lines that the tile will be written to, while its sums are being made. `columns` is that of a whole
    /// tile.
    #[inline(always)]
    pub(super) fn prefetch(&self, columns: usize) {
        #[cfg(target_arch = "x86_64")]
        for row in 0..self.rows {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            let row = match self.to.at(row * self.stride) {
                ElemPtr::F32(to) => to.cast::<i8>(),
                ElemPtr::Bf16(to) => to.cast(),
            };
            let bytes = columns * if matches!(self.to, ElemPtr::Bf16(_)) { 2 } else { 4 };
            // SAFETY: a prefetch touches no memory that the program can observe, at any address.
            unsafe {
                for at in (0..bytes).step_by(64) {
                    _mm_prefetch::<_MM_HINT_T0>(row.wrapping_add(at));
                }
                // Rows that begin within a line end in one more.
                _mm_prefetch::<_MM_HINT_T0>(row.wrapping_add(bytes - 1));
            }
        }
    }
}

/// Writes the rows of a tile, whose sums have rows of two registers: at once if only f32 are added and all columns are there,
/// otherwise by way of the buffer.
///
/// # Safety
///
/// All addresses of the tile may be read and written, and the processor has the instructions of `V`.
#[inline(always)]
pub(super) unsafe fn store<V: Vector, const ROWS: usize>(
    sums: [[V; 2]; ROWS],
    buffer: &mut TileBuffer,
    tile: &SumTile,
) {
    let columns = 2 * V::LANES;
    let has_more = tile.bias.is_some() || tile.with_relu || tile.adds_to_bf16();
    let is_plain = tile.columns == columns && !has_more;
    // SAFETY: the caller's contract; rows and columns lie in the tile.
    unsafe {
        if !is_plain {
            for (i, [x0, x1]) in sums.into_iter().enumerate() {
                x0.store(buffer.0.as_mut_ptr().add(i * columns));
                x1.store(buffer.0.as_mut_ptr().add(i * columns + V::LANES));
            }
            for i in 0..tile.rows {
                let sums = &mut buffer.0[i * columns..][..columns];
                // The same loops, of a length that the compiler knows.
                if tile.columns == columns {
                    store_row(sums, i, tile)
                } else {
                    store_row(&mut sums[..tile.columns], i, tile)
                }
            }
            return;
        }
        for (i, sums) in sums.into_iter().enumerate().take(tile.rows) {
            for (half, mut x) in sums.into_iter().enumerate() {
                let column = half * V::LANES;
                for addend in tile.stack.merged(i, column) {
                    x = V::load(addend).add(x);
                }
                match tile.to.at(i * tile.stride + column) {
                    ElemPtr::F32(to) if tile.accumulate => V::load(to).add(x).store(to),
                    ElemPtr::F32(to) => x.store(to),
                    ElemPtr::Bf16(to) => x.store_bf16(to),
                }
            }
        }
    }
}

/// Writes row `i` of a tile.
///
/// # Safety
///
/// As for [`store`].
#[inline(always)]
unsafe fn store_row(row: &mut [f32], i: usize, tile: &SumTile) {
    // SAFETY: the caller's contract; the row lies in the tile.
    unsafe {
        for addend in tile.stack.merged(i, 0) {
            for (j, x) in row.iter_mut().enumerate() {
                *x += *addend.add(j);
            }
        }
        match tile.to.at(i * tile.stride) {
            ElemPtr::F32(to) if tile.accumulate => {
                for (j, x) in row.iter_mut().enumerate() {
                    *x += *to.add(j);
                }
            }
            ElemPtr::Bf16(to) if tile.accumulate => {
                for (j, x) in row.iter_mut().enumerate() {
                    *x += widen(*to.add(j));
                }
            }
            _ => {}
        }
        if let Some(bias) = tile.bias {
            for (j, x) in row.iter_mut().enumerate() {
                *x += *bias.add(j);
            }
        }
        if tile.with_relu {
            for x in row.iter_mut() {
                *x = if *x > 0.0 || x.is_nan() { *x } else { 0.0 };
            }
        }
        match tile.to {
            ElemPtr::F32(to) => {
                to.add(i * tile.stride).copy_from_nonoverlapping(row.as_ptr(), row.len())
            }
            ElemPtr::Bf16(to) => {
                // In registers first: the compiler does not know that the sums lie elsewhere.
                let mut rounded = [bf16::ZERO; MOST_COLUMNS];
                for (to, x) in rounded.iter_mut().zip(row.iter()) {
                    *to = round(*x);
                }
                to.add(i * tile.stride).copy_from_nonoverlapping(rounded.as_ptr(), row.len());
            }
        }
    }
}

/// Writes sums from registers: at once if only f32 are added, otherwise by way of the buffer.
///
/// # Safety
///
/// As for [`store`]; the processor has AVX-512.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) unsafe fn store_registers<const ROWS: usize>(
    sums: [[std::arch::x86_64::__m512; 2]; ROWS],
    buffer: &mut TileBuffer,
    tile: &SumTile,
) {
    use std::arch::x86_64::*;

    let masks = [0, 16].map(|j| first(tile.columns.saturating_sub(j)));
    // SAFETY: the caller's contract; masked loads and stores touch the columns of the tile only.
    unsafe {
        if tile.bias.is_some() || tile.with_relu || tile.adds_to_bf16() {
            for (i, sums) in sums.into_iter().enumerate() {
                _mm512_store_ps(buffer.0.as_mut_ptr().add(i * 32), sums[0]);
                _mm512_store_ps(buffer.0.as_mut_ptr().add(i * 32 + 16), sums[1]);
            }
            return store_avx512(buffer.0.as_ptr(), tile);
        }
        for (i, sums) in sums.into_iter().enumerate() {
            if i >= tile.rows {
                break;
            }
            for (h, mut x) in sums.into_iter().enumerate() {
                let (at, mask) = (i * tile.stride + 16 * h, masks[h]);
                for addend in tile.stack.merged(i, 16 * h) {
                    x = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, addend), x);
                }
                match tile.to {
                    ElemPtr::F32(to) => {
                        let to = to.wrapping_add(at);
                        if tile.accumulate {
                            x = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, to), x);
                        }
                        _mm512_mask_storeu_ps(to, mask, x);
                    }
                    ElemPtr::Bf16(to) => {
                        let x = super::pack_avx512::round(x);
                        let x = _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(x));
                        _mm256_mask_storeu_epi16(to.wrapping_add(at).cast(), mask, x);
                    }
                }
            }
        }
    }
}

/// The bits of the first `len` of 16 places.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn first(len: usize) -> u16 {
    if len >= 16 { u16::MAX } else { (1 << len) - 1 }
}

/// The same as [`store`] for sums in memory, with rows of 32, that begin on a cache line.
///
/// # Safety
///
/// As for [`store`]; the processor has AVX-512.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) unsafe fn store_avx512(sums: *const f32, tile: &SumTile) {
    // SAFETY: the caller's contract.
    unsafe { store_rows::<false>(sums, tile, 0..tile.rows) }
}

/// The same for some rows, with the rounding of AVX512-BF16, which writes zero for denormal numbers.
///
/// # Safety
///
/// As for [`store`]; the processor has AVX512-BF16.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub(super) unsafe fn store_avx512_bf16(sums: *const f32, tile: &SumTile, rows: Range<usize>) {
    // SAFETY: the caller's contract.
    unsafe { store_rows::<true>(sums, tile, rows) }
}

/// The values of `c` at the places of a mask.
///
/// # Safety
///
/// These places may be read, and the processor has AVX-512.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn held(c: ElemPtr, mask: u16) -> std::arch::x86_64::__m512 {
    use std::arch::x86_64::*;

    // SAFETY: the caller's contract.
    unsafe {
        match c {
            ElemPtr::F32(c) => _mm512_maskz_loadu_ps(mask, c),
            ElemPtr::Bf16(c) => {
                let elems = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, c.cast()));
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(elems))
            }
        }
    }
}

/// # Safety
///
/// As for [`store_avx512`], and for [`store_avx512_bf16`] if `CONVERTS`.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn store_rows<const CONVERTS: bool>(sums: *const f32, tile: &SumTile, rows: Range<usize>) {
    use std::arch::x86_64::*;

    let masks = [first(tile.columns), first(tile.columns.saturating_sub(16))];
    // SAFETY: the caller's contract; masked loads and stores touch the columns of the tile only.
    unsafe {
        let zero = _mm512_setzero_ps();
        let mut bias = [zero; 2];
        if let Some(from) = tile.bias {
            for (h, bias) in bias.iter_mut().enumerate() {
                *bias = _mm512_maskz_loadu_ps(masks[h], from.wrapping_add(16 * h));
            }
        }
        for i in rows {
            let to = tile.to.at(i * tile.stride);
            let mut row = [zero; 2];
            for (h, x) in row.iter_mut().enumerate() {
                *x = _mm512_load_ps(sums.add(i * 32 + 16 * h));
                for addend in tile.stack.merged(i, 16 * h) {
                    *x = _mm512_add_ps(_mm512_maskz_loadu_ps(masks[h], addend), *x);
                }
                if tile.accumulate {
                    *x = _mm512_add_ps(held(to.at(16 * h), masks[h]), *x);
                }
                if tile.bias.is_some() {
                    *x = _mm512_add_ps(*x, bias[h]);
                }
                if tile.with_relu {
                    // Not less or equal: above zero, or NaN.
                    *x = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_NLE_UQ>(*x, zero), *x);
                }
            }
            match to {
                ElemPtr::F32(to) => {
                    for (h, x) in row.into_iter().enumerate() {
                        _mm512_mask_storeu_ps(to.wrapping_add(16 * h), masks[h], x);
                    }
                }
                ElemPtr::Bf16(to) if CONVERTS => {
                    let row: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(row[1], row[0]));
                    let mask = u32::from(masks[1]) << 16 | u32::from(masks[0]);
                    _mm512_mask_storeu_epi16(to.cast(), mask, row);
                }
                ElemPtr::Bf16(to) => {
                    for (h, x) in row.into_iter().enumerate() {
                        let high = super::pack_avx512::round(x);
                        let x = _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(high));
                        _mm256_mask_storeu_epi16(to.wrapping_add(16 * h).cast(), masks[h], x);
                    }
                }
            }
        }
    }
}
