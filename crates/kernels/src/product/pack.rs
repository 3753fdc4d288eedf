//! Packs panels of f32: transposes in registers where k is contiguous, copies where the lanes are.

use half::bf16;

use super::{ElemPtr, RawOperand};
use crate::simd::{Vector, prefetch};

const LINE_BYTES: usize = 64;
/// Lanes whose k is contiguous are transposed in strips of this many k, which stay in the first-level cache.
const STRIP: usize = 16;
const MOST_LANES: usize = 16;
/// The elements after the last panel that may be overwritten.
pub(super) const SLACK: usize = MOST_LANES;
/// The number of panels that are filled side by side where the lanes are contiguous: more of each row is read while its page
/// and lines are at hand.
const TOGETHER: usize = 8;
/// How many k ahead rows are fetched.
const K_AHEAD: usize = 12;

impl RawOperand {
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
    pub(super) fn new(from: RawOperand, lanes: usize, k_len: usize) -> Self {
        let (run, size) = match from.elems {
            ElemPtr::F32(start) => (start.cast_const().cast(), 4),
            ElemPtr::Bf16(start) => (start.cast_const().cast(), 2),
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

/// How the elements of an operand become numbers in a register.
///
/// # Safety
///
/// `load` may only run on a processor that has the instructions of `V`, and touches `V::LANES` elements.
unsafe trait Source<V: Vector> {
    type Elem: Copy;
    const ZERO: Self::Elem;
    unsafe fn load(from: *const Self::Elem) -> V;
}

/// f32, unchanged.
struct Exact;
/// f32, rounded to bf16.
struct Rounded;
/// bf16.
struct Widened;

// SAFETY: one load of a register, as are those below.
unsafe impl<V: Vector> Source<V> for Exact {
    type Elem = f32;
    const ZERO: f32 = 0.0;
    #[inline(always)]
    unsafe fn load(from: *const f32) -> V {
        // SAFETY: the caller's contract.
        unsafe { V::load(from) }
    }
}

// SAFETY: as above.
unsafe impl<V: Vector> Source<V> for Rounded {
    type Elem = f32;
    const ZERO: f32 = 0.0;
    #[inline(always)]
    unsafe fn load(from: *const f32) -> V {
        // SAFETY: the caller's contract.
        unsafe { V::load(from).round_to_bf16() }
    }
}

// SAFETY: as above.
unsafe impl<V: Vector> Source<V> for Widened {
    type Elem = bf16;
    const ZERO: bf16 = bf16::ZERO;
    #[inline(always)]
    unsafe fn load(from: *const bf16) -> V {
        // SAFETY: the caller's contract.
        unsafe { V::load_bf16(from) }
    }
}

/// Packs `lanes` lanes of `k_len` elements into panels of `LANES` lanes, as f32. Lanes that are missing in the last panel
/// become zeros. `FETCHES`: elements are fetched ahead, because nobody has done so before.
///
/// # Safety
///
/// The operand has these elements, the panels have room for `k_len` units of their lanes and [`SLACK`] more elements, and the
/// processor has the instructions of `V`.
#[inline(always)]
pub(super) unsafe fn pack<V: Vector, const LANES: usize, const FETCHES: bool>(
    from: &RawOperand,
    lanes: usize,
    k_len: usize,
    panels: *mut u32,
) {
    const { assert!(LANES <= MOST_LANES && STRIP.is_multiple_of(V::LANES)) };
    let to = panels.cast::<f32>();
    // SAFETY: the caller's contract.
    unsafe {
        match (from.elems, from.in_bf16) {
            (ElemPtr::F32(x), false) => fill::<Exact, V, LANES, FETCHES>(x, from, lanes, k_len, to),
            (ElemPtr::F32(x), true) => {
                fill::<Rounded, V, LANES, FETCHES>(x, from, lanes, k_len, to)
            }
            (ElemPtr::Bf16(x), _) => fill::<Widened, V, LANES, FETCHES>(x, from, lanes, k_len, to),
        }
    }
}

/// # Safety
///
/// As for [`pack`].
#[inline(always)]
unsafe fn fill<S: Source<V>, V: Vector, const LANES: usize, const FETCHES: bool>(
    start: *const S::Elem,
    &RawOperand { lane_stride, k_stride, .. }: &RawOperand,
    lanes: usize,
    k_len: usize,
    panels: *mut f32,
) {
    // SAFETY: the caller's contract.
    unsafe {
        if k_stride != 1 {
            let across_lanes = across_lanes::<S, V, LANES, FETCHES>;
            return across_lanes(start, k_stride, lanes, k_len, panels);
        }
        for lane in (0..lanes).step_by(LANES) {
            let (from, panel) = (start.add(lane * lane_stride), panels.add(lane * k_len));
            along_k::<S, V, LANES, FETCHES>(from, lane_stride, lanes - lane, k_len, panel);
        }
    }
}

/// Fills a panel from up to `lanes` lanes whose elements are contiguous.
///
/// # Safety
///
/// As for [`pack`].
#[inline(always)]
unsafe fn along_k<S: Source<V>, V: Vector, const LANES: usize, const FETCHES: bool>(
    from: *const S::Elem,
    lane_stride: usize,
    lanes: usize,
    k_len: usize,
    panel: *mut f32,
) {
    let has_all_lanes = lanes >= LANES.next_multiple_of(V::LANES);
    let mut rows = [[S::ZERO; STRIP]; MOST_LANES];
    // SAFETY: lanes below `lanes` and k below `k_len`, which the caller guarantees.
    unsafe {
        for k in (0..k_len).step_by(STRIP) {
            let (from, to) = (from.add(k), panel.add(k * LANES));
            let len = STRIP.min(k_len - k);
            if has_all_lanes && len == STRIP {
                if FETCHES {
                    // The same strip of the next panel.
                    for lane in LANES..2 * LANES {
                        prefetch(from.wrapping_add(lane * lane_stride), 1);
                    }
                }
                transpose::<S, V, LANES>(from, lane_stride, STRIP, to);
                continue;
            }
            for (lane, row) in rows[..LANES.min(lanes)].iter_mut().enumerate() {
                row.as_mut_ptr().copy_from_nonoverlapping(from.add(lane * lane_stride), len);
            }
            transpose::<S, V, LANES>(rows.as_ptr().cast(), STRIP, len, to);
        }
    }
}

/// Writes `len` units, up to a strip, of a panel from lanes that lie `stride` elements apart.
///
/// # Safety
///
/// At `from`, `LANES` lanes rounded up to a multiple of `V::LANES` have a strip of elements; `to` has room for `len` units and
/// [`SLACK`] more elements. The processor has the instructions of `V`.
#[inline(always)]
unsafe fn transpose<S: Source<V>, V: Vector, const LANES: usize>(
    from: *const S::Elem,
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
                let mut square = [0.0; MOST_LANES * MOST_LANES];
                for i in 0..V::LANES {
                    S::load(from.add(i * stride)).store(square.as_mut_ptr().add(i * V::LANES));
                }
                let (lanes, units) = (V::LANES.min(LANES - lane), V::LANES.min(len - k));
                // With fewer lanes than a register has, the surplus of a unit is overwritten by the next one.
                if (lanes == V::LANES || LANES < V::LANES) && units == V::LANES {
                    V::transpose(square.as_ptr(), V::LANES, to, LANES);
                    continue;
                }
                let mut turned = [0.0; MOST_LANES * MOST_LANES];
                V::transpose(square.as_ptr(), V::LANES, turned.as_mut_ptr(), V::LANES);
                for unit in 0..units {
                    let from = turned.as_ptr().add(unit * V::LANES);
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
unsafe fn across_lanes<S: Source<V>, V: Vector, const LANES: usize, const FETCHES: bool>(
    from: *const S::Elem,
    k_stride: usize,
    lanes: usize,
    k_len: usize,
    panels: *mut f32,
) {
    let surplus = LANES.next_multiple_of(V::LANES) - LANES;
    // The lanes of panels that whole registers can be read of.
    let whole = lanes.saturating_sub(surplus) / LANES * LANES;
    // The surplus of a unit is overwritten by the next one, that of a panel's last one is not written.
    let wide = if surplus == 0 { k_len } else { k_len.saturating_sub(1) };
    // SAFETY: lanes below `lanes` and k below `k_len`, which the caller guarantees, and their places in the panels.
    unsafe {
        let place = |lane: usize, k: usize| {
            (from.add(k * k_stride + lane), panels.add(lane * k_len + k * LANES))
        };
        for first in (0..whole).step_by(TOGETHER * LANES) {
            let end = whole.min(first + TOGETHER * LANES);
            for k in 0..wide {
                if FETCHES {
                    let ahead = from.wrapping_add((k + K_AHEAD) * k_stride + first);
                    prefetch(ahead, end - first);
                    prefetch(ahead.wrapping_add(end - first - 1), 1);
                }
                for lane in (first..end).step_by(LANES) {
                    let (from, to) = place(lane, k);
                    for i in (0..LANES).step_by(V::LANES) {
                        S::load(from.add(i)).store(to.add(i));
                    }
                }
            }
        }
        for lane in (0..lanes).step_by(LANES) {
            for k in if lane < whole { wide } else { 0 }..k_len {
                let (from, to) = place(lane, k);
                let mut elems = [S::ZERO; MOST_LANES];
                elems.as_mut_ptr().copy_from_nonoverlapping(from, LANES.min(lanes - lane));
                let mut unit = [0.0; MOST_LANES];
                for i in (0..LANES).step_by(V::LANES) {
                    S::load(elems.as_ptr().add(i)).store(unit.as_mut_ptr().add(i));
                }
                to.copy_from_nonoverlapping(unit.as_ptr(), LANES);
            }
        }
    }
}
