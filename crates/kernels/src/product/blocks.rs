//! The loops over the blocks of a product, and the sizes of the blocks.
//!
//! In: the part of a product that one thread makes, and scratch memory. Out: its part of `c`. The arithmetic is that of a
//! [`MicroKernel`].
//!
//! For each block of columns, for each block of k: pack the block of `b`; for each block of rows: pack the block of `a`;
//! for each pair of panels: make a tile of `c`. A kernel chooses in which order, by [`MicroKernel::B_STAYS`]:
//!
//! - For each panel of `b`, for each of `a`, as in BLIS. The panel of `b` stays in the first-level cache, and the block of `a`
//!   in the second-level cache and, in part, the third. The block of `b` is read once for each block of `a`, so it may lie in the third-level cache.
//!   Its panels are packed one by one, just before they are first used, while the elements of the next one are fetched, so that
//!   the wait for memory hides behind arithmetic.
//! - For each panel of `a`, for each of `b`. The panel of `a` stays in the first-level cache, and both blocks in the
//!   second-level cache. The tiles lie side by side in `c`, so that long rows of it are written in order of memory.
//!
//! A block of `a` that is stored as the kernel's panels are is not packed.

use paceline_numeric::tree;

use super::kernel::{MicroKernel, PanelAt, Panels};
use super::pack::{Ahead, SLACK};
use super::store::{BUFFER_LEN, Stack, SumTile};
use super::{ElemPtr, Output, ProductSizes, RawOperand, RawProduct};

/// Lengths are rounded up to this number of elements, a cache line.
const LINE: usize = 16;
/// Blocks of k are a multiple of this, so that only the last one has units that are padded.
const K_STEP: usize = 32;

#[derive(Clone, Copy, Debug)]
pub(super) struct BlockSizes {
    m: usize,
    n: usize,
    k: usize,
    /// Whether all packed panels of a block of `b` are kept, or only the current one.
    keeps_b: bool,
    /// Lengths of the packed block of `b`, that of `a`, and the sums at a depth of the stack, in scratch memory.
    b_len: usize,
    a_len: usize,
    sums_len: usize,
    /// Depths of the stack in scratch memory.
    depths: usize,
}

impl BlockSizes {
    /// The blocks of a product. Blocks of k have a fixed size, and only the last one is shorter: they decide the order of sums.
    /// `keeps_c` says that `c` cannot hold sums of some blocks.
    pub(super) fn new<K: MicroKernel>(sizes: ProductSizes, keeps_c: bool) -> Self {
        let num_k = sizes.k.div_ceil(K::K_BLOCK).max(1);
        let k = sizes.k.next_multiple_of(K_STEP).clamp(K_STEP, K::K_BLOCK);
        // The most binary digits that are one in a number of blocks before the last one.
        let depths = num_k.ilog2() as usize;
        let depths = if keeps_c { depths } else { depths.saturating_sub(1) };
        let units = k / K::K_PER_UNIT;
        // As few blocks as possible, of the same number of panels.
        let block = |len: usize, panel: usize, most: usize| {
            let panels = len.div_ceil(panel).max(1);
            panels.div_ceil(panels.div_ceil((most / units / panel).max(1))) * panel
        };
        let m = block(sizes.m, K::ROWS, K::A_LEN);
        // A panel of `b` that no second block of `a` meets makes room for the next one.
        let keeps_b = !K::B_STAYS || m < sizes.m;
        let most = if keeps_b || depths > 0 { K::B_LEN } else { usize::MAX };
        let n = block(sizes.n, K::COLUMNS, most);
        let kept = if keeps_b { n } else { K::COLUMNS };
        Self {
            m,
            n,
            k,
            keeps_b,
            b_len: (kept * units).next_multiple_of(LINE),
            a_len: (m * units + SLACK).next_multiple_of(LINE),
            sums_len: (sizes.m * n).next_multiple_of(LINE),
            depths,
        }
    }

    /// The length of the scratch memory, in elements of 4 bytes.
    pub(super) fn len(&self) -> usize {
        self.b_len + self.a_len + self.depths * self.sums_len
    }

    /// The stack of sums of a block of `c` when block `index` of k is done: how many of them it is merged with follows from the
    /// tree of sums. `sums` has those in scratch memory, of which the lowest lie in `c` if it can hold them.
    fn stack(
        &self,
        c: &Output,
        (row, column): (usize, usize),
        (sums, stride): (*mut f32, usize),
        index: usize,
        is_last: bool,
    ) -> Stack {
        let num_sums = index.count_ones() as usize;
        let num_merged = if is_last { num_sums } else { tree::merges_before_last(index) };
        let bottom = match c.elems.at(row * c.row_stride + column) {
            ElemPtr::F32(c_block) if !c.accumulate => Some((c_block, c.row_stride)),
            _ => None,
        };
        let above = if bottom.is_some() { sums } else { sums.wrapping_add(self.sums_len) };
        Stack {
            bottom: bottom.unwrap_or((sums, stride)),
            above: (above, stride),
            len: self.sums_len,
            merged: (num_sums - num_merged, num_sums),
        }
    }

    /// Makes a part of a product.
    ///
    /// # Safety
    ///
    /// The contract of [`super::run`], and of `K`. `self` is made from the sizes of the part.
    pub(super) unsafe fn run<K: MicroKernel>(&self, part: &RawProduct, scratch: &mut [f32]) {
        const {
            assert!(K::ROWS * K::COLUMNS <= BUFFER_LEN);
            assert!((K_STEP / K::K_PER_UNIT).is_multiple_of(K::UNITS_STEP));
        };
        assert_eq!(scratch.len(), self.len(), "scratch memory of a product");
        let RawProduct { sizes: ProductSizes { m, n, k }, a, b, c } = *part;
        let start = scratch.as_mut_ptr();
        let packed_b = start.cast::<u32>();
        let packed_a = start.wrapping_add(self.b_len).cast::<u32>();
        let sums = start.wrapping_add(self.b_len + self.a_len);
        let [a_in_place, b_in_place] = [
            m.is_multiple_of(2) && in_place::<K>(&a, n.div_ceil(K::COLUMNS)),
            n.is_multiple_of(K::COLUMNS)
                && b.lane_stride == 1
                && in_place::<K>(&b, m.div_ceil(K::ROWS)),
        ];
        // The block of `a` that is packed: with a single block of k and of m, it serves all columns.
        let mut a_holds = None;
        // SAFETY: the caller guarantees the processor, and `end` follows.
        let mut tile_sums = unsafe { K::begin() };
        for n0 in (0..n).step_by(self.n) {
            let n_len = self.n.min(n - n0);
            // A product over nothing still writes its zeros.
            for k0 in (0..k.max(1)).step_by(self.k) {
                let k_len = self.k.min(k - k0);
                let units = k_len.div_ceil(K::K_PER_UNIT).next_multiple_of(K::UNITS_STEP);
                let index = k0 / self.k;
                let is_last = k0 + self.k >= k;
                // SAFETY: the columns and the range of k lie in `b`, and the block has room for its panels.
                let pack_b = |j: usize, columns: usize, to: *mut u32| unsafe {
                    K::pack_b(&b.from(n0 + j, k0), columns, k_len, to);
                };
                if !K::B_STAYS && !b_in_place {
                    pack_b(0, n_len, packed_b);
                }
                for m0 in (0..m).step_by(self.m) {
                    let m_len = self.m.min(m - m0);
                    let block_a = a.from(m0, k0);
                    let panels_a = match block_a.elems {
                        ElemPtr::Bf16(a) if K::are_panels(&block_a, m_len, k_len) => a.cast(),
                        _ => packed_a,
                    };
                    if !a_in_place && panels_a == packed_a && a_holds != Some((m0, k0)) {
                        // SAFETY: as for `b`.
                        unsafe { K::pack_a(&block_a, m_len, k_len, packed_a) };
                        a_holds = Some((m0, k0));
                    }
                    let sums = (sums.wrapping_add(m0 * self.n), self.n);
                    let stack = self.stack(&c, (m0, n0), sums, index, is_last);
                    let block = block(&c, (m0, n0), (m_len, n_len), stack, is_last);
                    let panel_a = |i: usize| {
                        if a_in_place {
                            block_a.panel(i)
                        } else {
                            PanelAt::packed(panels_a.wrapping_add(i * units), K::ROWS)
                        }
                    };
                    let packed_b =
                        |j: usize| packed_b.wrapping_add(if self.keeps_b { j * units } else { 0 });
                    let panel_b = |j: usize| {
                        if b_in_place {
                            b.from(n0, k0).panel(j)
                        } else {
                            PanelAt::packed(packed_b(j), K::COLUMNS)
                        }
                    };
                    let mut make = |i: usize, j: usize| {
                        let tile = block.part((i, j), (K::ROWS, K::COLUMNS));
                        tile.prefetch(K::COLUMNS);
                        let (a, b) = (panel_a(i), panel_b(j));
                        // SAFETY: both panels have `units` units, packed or in the operands, and the tile lies in `c` or in
                        // the sums.
                        unsafe { K::multiply(Panels { units, a, b }, &mut tile_sums, &tile) };
                    };
                    let (rows, columns) =
                        (|| (0..m_len).step_by(K::ROWS), || (0..n_len).step_by(K::COLUMNS));
                    if !K::B_STAYS {
                        rows().for_each(|i| columns().for_each(|j| make(i, j)));
                        continue;
                    }
                    for j in columns() {
                        if m0 > 0 {
                            rows().for_each(|i| make(i, j));
                            continue;
                        }
                        if !b_in_place {
                            pack_b(j, K::COLUMNS.min(n_len - j), packed_b(j));
                        }
                        let next = j + K::COLUMNS;
                        let lanes = K::COLUMNS.min(n_len.saturating_sub(next));
                        let mut ahead = Ahead::new(b.from(n0 + next, k0), lanes, k_len);
                        let share = ahead.num_lines().div_ceil(rows().len());
                        for i in rows() {
                            ahead.fetch(share);
                            make(i, j);
                        }
                    }
                }
            }
        }
        // SAFETY: as for `begin`, and all tiles lie in `c` or in the sums.
        unsafe { K::end(tile_sums) };
    }
}

/// The most elements between two units that are read where the operand has them: others lie in as many pages.
const FAR: usize = 512;

/// Whether the panels of an operand, each of which meets so many others, are read where it has them.
fn in_place<K: MicroKernel>(operand: &RawOperand, others: usize) -> bool {
    let is_f32 = matches!(operand.elems, ElemPtr::F32(_)) && !operand.in_bf16;
    is_f32 && operand.k_stride <= FAR && others <= K::MOST_IN_PLACE
}

impl RawOperand {
    /// The panel that begins at a lane.
    fn panel(&self, lane: usize) -> PanelAt {
        let start = match self.from(lane, 0).elems {
            ElemPtr::F32(start) => start.cast_const().cast(),
            ElemPtr::Bf16(start) => start.cast_const().cast(),
        };
        PanelAt { start, lane: self.lane_stride, unit: self.k_stride }
    }
}

/// Where a block of `c` that starts at `(row, column)` goes after a block of k: onto the stack, or at its place after the last one.
fn block(
    c: &Output,
    (row, column): (usize, usize),
    (rows, columns): (usize, usize),
    stack: Stack,
    is_last: bool,
) -> SumTile {
    let (sums, stride) = stack.at(stack.merged.0);
    let (to, stride) = if is_last {
        (c.elems.at(row * c.row_stride + column), c.row_stride)
    } else {
        (ElemPtr::F32(sums), stride)
    };
    SumTile {
        rows,
        columns,
        stack,
        to,
        stride,
        accumulate: is_last && c.accumulate,
        bias: c.bias.filter(|_| is_last).map(|bias| bias.wrapping_add(column)),
        with_relu: is_last && c.with_relu,
    }
}
