//! Packs panels with AVX-512: 16 lanes at a time, by transposes in registers where k is contiguous.

use std::arch::x86_64::*;
use std::mem::transmute;

use half::bf16;

use super::{ElemPtr, RawOperand};
use crate::simd::transpose_16x16;

/// How the elements of one type become units: 16 of them in a register.
///
/// # Safety
///
/// The functions may only run on a processor that has the instructions, and touch only the elements that their arguments name.
unsafe trait Units<T> {
    /// The number of k in a unit.
    const K: usize;
    /// 16 units from contiguous elements: those in `mask`, and zeros.
    unsafe fn contiguous(from: *const T, mask: u32) -> __m512i;
    /// The first unit of 16 contiguous lanes: `len` elements (up to `K`) of the lanes in `mask`, and zeros.
    #[inline(always)]
    unsafe fn across_lanes(
        from: *const T,
        _k_stride: usize,
        _len: usize,
        mask: __mmask16,
    ) -> __m512i {
        const { assert!(Self::K == 1) };
        // SAFETY: the caller's contract; an element is a unit.
        unsafe { Self::contiguous(from, mask.into()) }
    }
}

/// A unit is a pair of bf16. Needs AVX512-BF16.
struct Pairs;
/// A unit is a number, as f32. One that is f32 is rounded to bf16 first if `ROUNDS`.
struct Singles<const ROUNDS: bool>;

/// The bits of the first `len` of 32 places.
#[inline(always)]
fn first(len: usize) -> u32 {
    if len >= 32 { u32::MAX } else { (1 << len) - 1 }
}

// SAFETY: masked loads touch no element outside their mask.
unsafe impl Units<f32> for Pairs {
    const K: usize = 2;
    #[inline(always)]
    unsafe fn contiguous(from: *const f32, mask: u32) -> __m512i {
        // SAFETY: the caller guarantees the elements in `mask`, and the processor.
        unsafe {
            let low = _mm512_maskz_loadu_ps(mask as u16, from);
            let high = _mm512_maskz_loadu_ps((mask >> 16) as u16, from.wrapping_add(16));
            transmute(_mm512_cvtne2ps_pbh(high, low))
        }
    }
    #[inline(always)]
    unsafe fn across_lanes(
        from: *const f32,
        k_stride: usize,
        len: usize,
        mask: __mmask16,
    ) -> __m512i {
        // SAFETY: the caller guarantees the lanes in `mask` of `len` elements, and the processor.
        unsafe {
            let second = if len == 2 { mask } else { 0 };
            let low = _mm512_maskz_loadu_ps(mask, from);
            let high = _mm512_maskz_loadu_ps(second, from.wrapping_add(k_stride));
            interleave(transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low)))
        }
    }
}

// SAFETY: masked loads touch no element outside their mask.
unsafe impl Units<bf16> for Pairs {
    const K: usize = 2;
    #[inline(always)]
    unsafe fn contiguous(from: *const bf16, mask: u32) -> __m512i {
        // SAFETY: the caller guarantees the elements in `mask`, and the processor.
        unsafe { _mm512_maskz_loadu_epi16(mask, from.cast()) }
    }
    #[inline(always)]
    unsafe fn across_lanes(
        from: *const bf16,
        k_stride: usize,
        len: usize,
        mask: __mmask16,
    ) -> __m512i {
        // SAFETY: the caller guarantees the lanes in `mask` of `len` elements, and the processor.
        unsafe {
            let second = if len == 2 { mask } else { 0 };
            let low = _mm256_maskz_loadu_epi16(mask, from.cast());
            let high = _mm256_maskz_loadu_epi16(second, from.wrapping_add(k_stride).cast());
            let (low, high) = (_mm512_cvtepu16_epi32(low), _mm512_cvtepu16_epi32(high));
            _mm512_or_si512(low, _mm512_slli_epi32::<16>(high))
        }
    }
}

// SAFETY: masked loads touch no element outside their mask.
unsafe impl<const ROUNDS: bool> Units<f32> for Singles<ROUNDS> {
    const K: usize = 1;
    #[inline(always)]
    unsafe fn contiguous(from: *const f32, mask: u32) -> __m512i {
        // SAFETY: the caller guarantees the elements in `mask`, and the processor.
        unsafe {
            let x = _mm512_maskz_loadu_ps(mask as u16, from);
            if ROUNDS { round(x) } else { _mm512_castps_si512(x) }
        }
    }
}

// SAFETY: masked loads touch no element outside their mask.
unsafe impl Units<bf16> for Singles<true> {
    const K: usize = 1;
    #[inline(always)]
    unsafe fn contiguous(from: *const bf16, mask: u32) -> __m512i {
        // SAFETY: the caller guarantees the elements in `mask`, and the processor.
        unsafe { widen(_mm256_maskz_loadu_epi16(mask as u16, from.cast())) }
    }
}

/// Pairs of the bf16 at the same place of both halves of a register.
#[inline(always)]
unsafe fn interleave(halves: __m512i) -> __m512i {
    // SAFETY: the caller guarantees the processor.
    unsafe {
        let low = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(halves));
        let high = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64::<1>(halves));
        _mm512_or_si512(low, _mm512_slli_epi32::<16>(high))
    }
}

#[inline(always)]
unsafe fn widen(x: __m256i) -> __m512i {
    // SAFETY: the caller guarantees the processor.
    unsafe { _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(x)) }
}

/// The nearest bf16 of each lane, ties to even, in the high half of the lane; NaN stays NaN.
#[inline(always)]
pub(super) unsafe fn round(x: __m512) -> __m512i {
    // SAFETY: the caller guarantees the processor.
    unsafe {
        let bits = _mm512_castps_si512(x);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let sum = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
        let quiet = _mm512_set1_epi32(0x40_0000);
        let nearest = _mm512_mask_or_epi32(sum, is_nan, bits, quiet);
        _mm512_and_si512(nearest, _mm512_set1_epi32(0xffff_0000_u32 as i32))
    }
}

/// Packs `lanes` lanes of `k_len` elements into panels of `LANES` lanes, as pairs. Panels have a multiple of `STEP` units, of which
/// those that are missing are zeros.
///
/// # Safety
///
/// The operand has `in_bf16` and these elements, the panels have room for their units, and the processor has the instructions.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub(super) unsafe fn pack_pairs<const LANES: usize, const STEP: usize>(
    from: &RawOperand,
    lanes: usize,
    k_len: usize,
    panels: *mut u32,
) {
    // SAFETY: the caller's contract.
    unsafe { pack::<Pairs, LANES, STEP>(from, lanes, k_len, panels) }
}

/// The same, as single numbers, for operands of any type.
///
/// # Safety
///
/// As for [`pack_pairs`], but for the type of the operand.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) unsafe fn pack_singles<const LANES: usize>(
    from: &RawOperand,
    lanes: usize,
    k_len: usize,
    panels: *mut u32,
) {
    // SAFETY: the caller's contract.
    unsafe { pack::<Singles<true>, LANES, 1>(from, lanes, k_len, panels) }
}

/// # Safety
///
/// As for [`pack_pairs`].
#[inline(always)]
unsafe fn pack<U: Units<f32> + Units<bf16>, const LANES: usize, const STEP: usize>(
    from: &RawOperand,
    lanes: usize,
    k_len: usize,
    panels: *mut u32,
) {
    // SAFETY: the caller's contract.
    unsafe {
        match (from.elems, from.in_bf16) {
            (ElemPtr::F32(start), false) => {
                copy::<f32, Singles<false>, LANES, STEP>(start, from, lanes, k_len, panels)
            }
            (ElemPtr::F32(start), true) => {
                copy::<f32, U, LANES, STEP>(start, from, lanes, k_len, panels)
            }
            (ElemPtr::Bf16(start), _) => {
                copy::<bf16, U, LANES, STEP>(start, from, lanes, k_len, panels)
            }
        }
    }
}

/// # Safety
///
/// As for [`pack_pairs`].
#[inline(always)]
unsafe fn copy<T, U: Units<T>, const LANES: usize, const STEP: usize>(
    start: *const T,
    from: &RawOperand,
    lanes: usize,
    k_len: usize,
    panels: *mut u32,
) {
    let &RawOperand { lane_stride, k_stride, .. } = from;
    let units = k_len.div_ceil(U::K).next_multiple_of(STEP);
    // The places of the panels in groups of up to 16 lanes: `(first lane, first unit)`.
    let groups =
        |lane: usize| (0..LANES).step_by(16).map(move |group| (lane + group, lane * units + group));
    let slots = first(LANES.min(16)) as u16;
    // SAFETY: loads are limited to the lanes and elements that are there, stores to the lanes of the panels.
    unsafe {
        if k_stride == 1 {
            for (lane, to) in (0..lanes).step_by(LANES).flat_map(groups) {
                let there = lanes.saturating_sub(lane).min(16.min(LANES));
                let start = start.wrapping_add(lane * lane_stride);
                for u0 in (0..units).step_by(16) {
                    let len = (k_len - u0 * U::K).min(16 * U::K);
                    let start = start.wrapping_add(u0 * U::K);
                    let mut rows = [_mm512_setzero_si512(); 16];
                    if there == 16.min(LANES) && len == 16 * U::K {
                        for (lane, row) in rows.iter_mut().enumerate().take(16.min(LANES)) {
                            let start = start.add(lane * lane_stride);
                            // The processor does not follow so many rows by itself.
                            let ahead = start.wrapping_add(SQUARES_AHEAD * 16 * U::K);
                            _mm_prefetch::<_MM_HINT_T0>(ahead.cast());
                            *row = U::contiguous(start, first(16 * U::K));
                        }
                    } else {
                        for (lane, row) in rows.iter_mut().enumerate().take(there) {
                            *row = U::contiguous(start.add(lane * lane_stride), first(len));
                        }
                    }
                    let to = panels.wrapping_add(to + u0 * LANES);
                    for (u, row) in transpose_16x16(rows).into_iter().enumerate() {
                        if u0 + u < units {
                            _mm512_mask_storeu_epi32(to.wrapping_add(u * LANES).cast(), slots, row);
                        }
                    }
                }
            }
        } else {
            // Several panels at a time: more of each row is read while its page and lines are at hand.
            for lane0 in (0..lanes).step_by(TOGETHER * LANES) {
                let end = lanes.min(lane0 + TOGETHER * LANES);
                for u in 0..units {
                    let len = k_len.saturating_sub(u * U::K).min(U::K);
                    let start = start.wrapping_add(u * U::K * k_stride);
                    for (lane, to) in (lane0..end).step_by(LANES).flat_map(groups) {
                        for k in 0..U::K {
                            let ahead = (AHEAD * U::K + k) * k_stride + lane;
                            _mm_prefetch::<_MM_HINT_T0>(start.wrapping_add(ahead).cast());
                        }
                        let there = if len == 0 { 0 } else { lanes.saturating_sub(lane) };
                        let row = U::across_lanes(
                            start.wrapping_add(lane),
                            k_stride,
                            len,
                            first(there) as u16,
                        );
                        _mm512_mask_storeu_epi32(
                            panels.wrapping_add(to + u * LANES).cast(),
                            slots,
                            row,
                        );
                    }
                }
            }
        }
    }
}

/// Packs `lanes` lanes of `k_len` elements into panels of `LANES` lanes, as pairs, for the tiles of AMX: lane after lane, each with
/// all its units, a multiple of 16. Lanes and units that are missing are zeros.
///
/// # Safety
///
/// As for [`pack_pairs`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub(super) unsafe fn pack_rows<const LANES: usize>(
    from: &RawOperand,
    lanes: usize,
    k_len: usize,
    panels: *mut u32,
) {
    // SAFETY: the caller's contract.
    unsafe {
        match from.elems {
            ElemPtr::F32(start) => rows::<f32, Pairs, LANES>(start, from, lanes, k_len, panels),
            ElemPtr::Bf16(start) => rows::<bf16, Pairs, LANES>(start, from, lanes, k_len, panels),
        }
    }
}

/// # Safety
///
/// As for [`pack_pairs`].
#[inline(always)]
unsafe fn rows<T, U: Units<T>, const LANES: usize>(
    start: *const T,
    from: &RawOperand,
    lanes: usize,
    k_len: usize,
    panels: *mut u32,
) {
    let &RawOperand { lane_stride, k_stride, .. } = from;
    let units = k_len.div_ceil(U::K).next_multiple_of(16);
    // Where the lanes are contiguous, several panels at a time, as in `copy`.
    let together = if k_stride == 1 { LANES } else { TOGETHER * LANES };
    for lane0 in (0..lanes).step_by(together) {
        let end = lanes.min(lane0 + together).next_multiple_of(LANES);
        for u0 in (0..units).step_by(16) {
            for lane in (lane0..end).step_by(16) {
                let (lanes, k_len) = (lanes.saturating_sub(lane), k_len - u0 * U::K);
                let start = start.wrapping_add(lane * lane_stride + u0 * U::K * k_stride);
                let to = panels.wrapping_add(lane * units + u0);
                // SAFETY: the caller's contract; the panel has room for the square.
                unsafe { square::<T, U>(start, from, lanes, k_len, to, units) }
            }
        }
    }
}

/// Packs 16 units of 16 lanes, which are `stride` units apart. There may be fewer lanes, down to none, and fewer elements.
///
/// # Safety
///
/// As for [`pack_pairs`].
#[inline(always)]
unsafe fn square<T, U: Units<T>>(
    start: *const T,
    &RawOperand { lane_stride, k_stride, .. }: &RawOperand,
    lanes: usize,
    k_len: usize,
    to: *mut u32,
    stride: usize,
) {
    // SAFETY: loads are limited to the lanes and elements that are there; the caller guarantees room for 256 units.
    unsafe {
        let mut rows = [_mm512_setzero_si512(); 16];
        for (i, row) in rows.iter_mut().enumerate() {
            if k_stride == 1 {
                let mask = first(if i < lanes { k_len } else { 0 });
                *row = U::contiguous(start.wrapping_add(i * lane_stride), mask);
            } else {
                let len = k_len.saturating_sub(i * U::K).min(U::K);
                let mask = first(if len > 0 { lanes } else { 0 }) as u16;
                let start = start.wrapping_add(i * U::K * k_stride);
                for k in 0..U::K {
                    let ahead = (16 * U::K + k) * k_stride;
                    _mm_prefetch::<_MM_HINT_T0>(start.wrapping_add(ahead).cast());
                }
                *row = U::across_lanes(start, k_stride, len, mask);
            }
        }
        if k_stride != 1 {
            rows = transpose_16x16(rows);
        }
        for (i, row) in rows.into_iter().enumerate() {
            _mm512_storeu_si512(to.wrapping_add(i * stride).cast(), row);
        }
    }
}

/// Lanes whose elements are contiguous are fetched so many squares before they are needed.
const SQUARES_AHEAD: usize = 4;
/// Rows that are far apart are fetched this many units before they are needed: the processor does not foresee them.
const AHEAD: usize = 8;
/// The number of panels that are filled side by side.
const TOGETHER: usize = 4;
