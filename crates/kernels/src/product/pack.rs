//! Packs panels of f32 in plain code, which the compiler vectorizes for the instructions of its caller.

use half::bf16;
use paceline_numeric::bf16::{round, widen};

use super::{Elems, Operand};

/// Lanes are copied in strips of this many k, so that a strip of all lanes stays in the first-level cache.
const STRIP: usize = 16;

impl Operand {
    /// The same operand, starting at this lane and this k.
    pub(super) fn from(self, lane: usize, k: usize) -> Self {
        let elems = self.elems.at(lane * self.lane_stride + k * self.k_stride);
        Self { elems, ..self }
    }
}

/// Packs `lanes` lanes of `k_len` elements into panels of `LANES` lanes, rounded to bf16 and kept as f32.
///
/// # Safety
///
/// The operand has these elements, and the panels have room for `k_len` units of their lanes.
#[inline(always)]
pub(super) unsafe fn pack<const LANES: usize>(
    from: &Operand,
    lanes: usize,
    k_len: usize,
    panels: *mut u32,
) {
    for lane in (0..lanes).step_by(LANES) {
        let (from, lanes) = (&from.from(lane, 0), LANES.min(lanes - lane));
        let panel = panels.wrapping_add(lane * k_len).cast::<f32>();
        // SAFETY: the caller's contract.
        unsafe {
            match from.elems {
                Elems::F32(start) => {
                    copy::<f32, LANES>(start, from, lanes, k_len, panel, |x| widen(round(x)));
                }
                Elems::Bf16(start) => copy::<bf16, LANES>(start, from, lanes, k_len, panel, widen),
            }
        }
    }
}

/// Fills one panel.
///
/// # Safety
///
/// As for [`pack`].
#[inline(always)]
unsafe fn copy<T: Copy, const LANES: usize>(
    start: *const T,
    from: &Operand,
    lanes: usize,
    k_len: usize,
    panel: *mut f32,
    unit: impl Fn(T) -> f32,
) {
    let &Operand { lane_stride, k_stride, .. } = from;
    for k0 in (0..k_len).step_by(STRIP) {
        let len = STRIP.min(k_len - k0);
        let mut strip = [[0.0; LANES]; STRIP];
        // SAFETY: lanes below `lanes` and k below `k_len`, which the caller guarantees.
        let at = |lane: usize, k: usize| unsafe {
            unit(*start.add(lane * lane_stride + (k0 + k) * k_stride))
        };
        if k_stride == 1 {
            for lane in 0..lanes {
                for (k, strip) in strip[..len].iter_mut().enumerate() {
                    strip[lane] = at(lane, k);
                }
            }
        } else {
            for (k, strip) in strip[..len].iter_mut().enumerate() {
                for (lane, x) in strip[..lanes].iter_mut().enumerate() {
                    *x = at(lane, k);
                }
            }
        }
        // SAFETY: `len * LANES` units from `k0 * LANES` lie in the panel.
        unsafe {
            panel.add(k0 * LANES).copy_from_nonoverlapping(strip.as_ptr().cast(), len * LANES);
        }
    }
}
