//! Packs panels of f32: transposes in registers where k is contiguous, copies where the lanes are.

use paceline_numeric::bf16::{round, widen};

use super::{Elems, Operand};
use crate::simd::Vector;

const LINE_BYTES: usize = 64;
/// Lanes whose k is contiguous are transposed in strips of this many k, which stay in the first-level cache.
const STRIP: usize = 16;
/// The most lanes of a panel.
const MOST_LANES: usize = 16;
/// The number of panels that are filled side by side where the lanes are contiguous: more of each row is read while its page
/// and lines are at hand.
const TOGETHER: usize = 8;

impl Operand {
    /// The same operand, starting at this lane and this k.
    pub(super) fn from(self, lane: usize, k: usize) -> Self {
        let elems = self.elems.at(lane * self.lane_stride + k * self.k_stride);
        Self { elems, ..self }
    }
}

/// The cache lines of the next panel, and how far they have been prefetched.
pub(super) struct Ahead {
    /// The current run of contiguous elements, and the distance to the next one, in bytes.
    run: *const u8,
    stride: usize,
    /// The place in the run, and its length.
    at: usize,
    len: usize,
    runs_left: usize,
}

impl Ahead {
    /// Of `lanes` lanes of `k_len` elements.
    pub(super) fn new(from: Operand, lanes: usize, k_len: usize) -> Self {
        let (run, size) = match from.elems {
            Elems::F32(start) => (start.cast_const().cast(), 4),
            Elems::Bf16(start) => (start.cast_const().cast(), 2),
        };
        let (runs_left, len, stride) = match from.k_stride {
            1 => (lanes, k_len, from.lane_stride),
            stride => (k_len, lanes, stride),
        };
        Self { run, stride: stride * size, at: 0, len: len * size, runs_left }
    }

    pub(super) fn num_lines(&self) -> usize {
        self.runs_left * self.len.div_ceil(LINE_BYTES)
    }

    /// Prefetches up to `lines` more lines.
    #[inline(always)]
    pub(super) fn fetch(&mut self, lines: usize) {
        for _ in 0..lines {
            if self.runs_left == 0 {
                return;
            }
            // Of a run that begins within a line, the first line was read with the panel before. So each line is named by
            // its last byte.
            let at = (self.at + LINE_BYTES).min(self.len) - 1;
            // SAFETY: a prefetch touches no memory that the program can observe, at any address.
            #[cfg(target_arch = "x86_64")]
            unsafe {
                use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
                _mm_prefetch::<_MM_HINT_T0>(self.run.wrapping_add(at).cast());
            }
            self.at += LINE_BYTES;
            if self.at >= self.len {
                (self.run, self.at) = (self.run.wrapping_add(self.stride), 0);
                self.runs_left -= 1;
            }
        }
    }
}

/// Packs `lanes` lanes of `k_len` elements into panels of `LANES` lanes, as f32. Lanes that are missing in the last panel
/// become zeros.
///
/// # Safety
///
/// The operand has these elements, the panels have room for `k_len` units of their lanes, and the processor has the
/// instructions of `V`.
#[inline(always)]
pub(super) unsafe fn pack<V: Vector, const LANES: usize>(
    from: &Operand,
    lanes: usize,
    k_len: usize,
    panels: *mut u32,
) {
    const { assert!(LANES <= MOST_LANES && STRIP.is_multiple_of(V::LANES)) };
    let panels = panels.cast::<f32>();
    let round = |x| widen(round(x));
    // SAFETY: the caller's contract.
    unsafe {
        match (from.elems, from.in_bf16) {
            (Elems::F32(x), false) => {
                fill::<_, V, LANES, true>(x, from, lanes, k_len, panels, |x| x)
            }
            (Elems::F32(x), true) => {
                fill::<_, V, LANES, false>(x, from, lanes, k_len, panels, round)
            }
            (Elems::Bf16(x), _) => fill::<_, V, LANES, false>(x, from, lanes, k_len, panels, widen),
        }
    }
}

/// Fills panels from elements that `unit` turns into f32. `IS_EXACT`: they are f32, and `unit` returns them unchanged.
///
/// # Safety
///
/// As for [`pack`], and `T` is f32 if `IS_EXACT`.
#[inline(always)]
unsafe fn fill<T: Copy, V: Vector, const LANES: usize, const IS_EXACT: bool>(
    start: *const T,
    &Operand { lane_stride, k_stride, .. }: &Operand,
    lanes: usize,
    k_len: usize,
    panels: *mut f32,
    unit: impl Fn(T) -> f32 + Copy,
) {
    // SAFETY: the caller's contract.
    unsafe {
        if k_stride != 1 {
            return across_lanes::<_, LANES>(start, k_stride, lanes, k_len, panels, unit);
        }
        for lane in (0..lanes).step_by(LANES) {
            let (from, panel) = (start.add(lane * lane_stride), panels.add(lane * k_len));
            let is_whole = lanes - lane >= LANES.next_multiple_of(V::LANES);
            if IS_EXACT && is_whole && k_len.is_multiple_of(STRIP) {
                // Nothing has to be copied before.
                for k in (0..k_len).step_by(STRIP) {
                    let (from, to) = (from.cast::<f32>().add(k), panel.add(k * LANES));
                    transpose::<V, LANES>(from, lane_stride, STRIP, to);
                }
            } else {
                along_k::<_, V, LANES>(from, lane_stride, lanes - lane, k_len, panel, unit);
            }
        }
    }
}

/// Fills a panel from up to `lanes` lanes whose elements are contiguous.
///
/// # Safety
///
/// As for [`pack`].
#[inline(always)]
unsafe fn along_k<T: Copy, V: Vector, const LANES: usize>(
    from: *const T,
    lane_stride: usize,
    lanes: usize,
    k_len: usize,
    panel: *mut f32,
    unit: impl Fn(T) -> f32,
) {
    let mut rows = [[0.0; STRIP]; MOST_LANES];
    for k0 in (0..k_len).step_by(STRIP) {
        let len = STRIP.min(k_len - k0);
        // SAFETY: lanes below `lanes` and k below `k_len`, which the caller guarantees.
        unsafe {
            for (lane, row) in rows[..LANES.min(lanes)].iter_mut().enumerate() {
                let from = from.add(lane * lane_stride + k0);
                if len == STRIP {
                    let mut units = [0.0; STRIP];
                    for (k, x) in units.iter_mut().enumerate() {
                        *x = unit(*from.add(k));
                    }
                    *row = units;
                } else {
                    for (k, x) in row[..len].iter_mut().enumerate() {
                        *x = unit(*from.add(k));
                    }
                }
            }
            transpose::<V, LANES>(rows.as_ptr().cast(), STRIP, len, panel.add(k0 * LANES));
        }
    }
}

/// Writes `len` units, up to a strip, of a panel from lanes that lie `stride` elements apart.
///
/// # Safety
///
/// At `from`, `LANES` lanes rounded up to a multiple of `V::LANES` have a strip of elements; `to` has room for `len` units. The
/// processor has the instructions of `V`.
#[inline(always)]
unsafe fn transpose<V: Vector, const LANES: usize>(
    from: *const f32,
    stride: usize,
    len: usize,
    to: *mut f32,
) {
    for lane in (0..LANES).step_by(V::LANES) {
        for k in (0..len).step_by(V::LANES) {
            // SAFETY: the caller's contract; what is not written to the panel itself goes to a square, and from there as much
            // as there is.
            unsafe {
                let (from, to) = (from.add(lane * stride + k), to.add(k * LANES + lane));
                let (lanes, units) = (V::LANES.min(LANES - lane), V::LANES.min(len - k));
                if lanes == V::LANES && units == V::LANES {
                    V::transpose(from, stride, to, LANES);
                    continue;
                }
                let mut square = [0.0; MOST_LANES * MOST_LANES];
                V::transpose(from, stride, square.as_mut_ptr(), V::LANES);
                for unit in 0..units {
                    let from = square.as_ptr().add(unit * V::LANES);
                    to.add(unit * LANES).copy_from_nonoverlapping(from, lanes);
                }
            }
        }
    }
}

/// Fills panels from lanes that are contiguous.
///
/// # Safety
///
/// As for [`pack`].
#[inline(always)]
unsafe fn across_lanes<T: Copy, const LANES: usize>(
    from: *const T,
    k_stride: usize,
    lanes: usize,
    k_len: usize,
    panels: *mut f32,
    unit: impl Fn(T) -> f32,
) {
    // SAFETY: lanes below `lanes` and k below `k_len`, which the caller guarantees, and their places in the panels.
    unsafe {
        let whole = lanes - lanes % LANES;
        for first in (0..whole).step_by(TOGETHER * LANES) {
            let end = whole.min(first + TOGETHER * LANES);
            for k in 0..k_len {
                for lane in (first..end).step_by(LANES) {
                    let from = from.add(k * k_stride + lane);
                    let mut units = [0.0; LANES];
                    for (i, x) in units.iter_mut().enumerate() {
                        *x = unit(*from.add(i));
                    }
                    panels.add(lane * k_len + k * LANES).cast::<[f32; LANES]>().write(units);
                }
            }
        }
        if whole < lanes {
            for k in 0..k_len {
                let to = panels.add(whole * k_len + k * LANES);
                for lane in 0..LANES {
                    let from = from.wrapping_add(k * k_stride + whole + lane);
                    *to.add(lane) = if whole + lane < lanes { unit(*from) } else { 0.0 };
                }
            }
        }
    }
}
