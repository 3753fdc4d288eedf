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

use super::kernel::{MicroKernel, Panels};
use super::pack::{Ahead, SLACK};
use super::store::{BUFFER_LEN, SumTile};
use super::{ElemPtr, Output, ProductSizes, RawProduct};

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
    /// Lengths of the packed block of `b`, that of `a`, and the sums, in scratch memory.
    b_len: usize,
    a_len: usize,
    sums_len: usize,
}

impl BlockSizes {
    /// The blocks of a product. The block of k depends on k only: it decides the order of sums.
    pub(super) fn new<K: MicroKernel>(sizes: ProductSizes, is_c_bf16: bool) -> Self {
        let num_k = sizes.k.div_ceil(K::K_BLOCK).max(1);
        let k = sizes.k.div_ceil(num_k).next_multiple_of(K_STEP).max(K_STEP);
        let units = k / K::K_PER_UNIT;
        // As few blocks as possible, of the same number of panels.
        let block = |len: usize, panel: usize, most: usize| {
            let panels = len.div_ceil(panel).max(1);
            panels.div_ceil(panels.div_ceil((most / units / panel).max(1))) * panel
        };
        let has_sums = is_c_bf16 && num_k > 1;
        let m = block(sizes.m, K::ROWS, K::A_LEN);
        // A panel of `b` that no second block of `a` meets makes room for the next one.
        let keeps_b = !K::B_STAYS || m < sizes.m;
        let most = if keeps_b || has_sums { K::B_LEN } else { usize::MAX };
        let n = block(sizes.n, K::COLUMNS, most);
        let kept = if keeps_b { n } else { K::COLUMNS };
        Self {
            m,
            n,
            k,
            keeps_b,
            b_len: (kept * units).next_multiple_of(LINE),
            a_len: (m * units + SLACK).next_multiple_of(LINE),
            sums_len: if has_sums { (sizes.m * n).next_multiple_of(LINE) } else { 0 },
        }
    }

    /// The length of the scratch memory, in elements of 4 bytes.
    pub(super) fn len(&self) -> usize {
        self.b_len + self.a_len + self.sums_len
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
        let sums = (self.sums_len > 0).then(|| start.wrapping_add(self.b_len + self.a_len));
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
                let is_last = k0 + self.k >= k;
                // SAFETY: the columns and the range of k lie in `b`, and the block has room for its panels.
                let pack_b = |j: usize, columns: usize, to: *mut u32| unsafe {
                    K::pack_b(&b.from(n0 + j, k0), columns, k_len, to);
                };
                if !K::B_STAYS {
                    pack_b(0, n_len, packed_b);
                }
                for m0 in (0..m).step_by(self.m) {
                    let m_len = self.m.min(m - m0);
                    let block_a = a.from(m0, k0);
                    let panels_a = match block_a.elems {
                        ElemPtr::Bf16(a) if K::are_panels(&block_a, m_len, k_len) => a.cast(),
                        _ => packed_a,
                    };
                    if panels_a == packed_a && a_holds != Some((m0, k0)) {
                        // SAFETY: as for `b`.
                        unsafe { K::pack_a(&block_a, m_len, k_len, packed_a) };
                        a_holds = Some((m0, k0));
                    }
                    let sums = sums.map(|s| (s.wrapping_add(m0 * self.n), self.n));
                    let block = block(&c, (m0, n0), (m_len, n_len), sums, k0 == 0, is_last);
                    let panel_b =
                        |j: usize| packed_b.wrapping_add(if self.keeps_b { j * units } else { 0 });
                    let mut make = |i: usize, j: usize| {
                        let tile = block.part((i, j), (K::ROWS, K::COLUMNS));
                        tile.prefetch(K::COLUMNS);
                        let (a, b) = (panels_a.wrapping_add(i * units), panel_b(j));
                        // SAFETY: both panels are packed with `units` units, and the tile lies in `c` or in the sums.
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
                        pack_b(j, K::COLUMNS.min(n_len - j), panel_b(j));
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

/// Where a block of `c` that starts at `(row, column)` goes after a block of k. `sums` are its place in the sums between blocks,
/// if there are any; an f32 `c` holds these sums itself.
fn block(
    c: &Output,
    (row, column): (usize, usize),
    (rows, columns): (usize, usize),
    sums: Option<(*mut f32, usize)>,
    is_first: bool,
    is_last: bool,
) -> SumTile {
    let to = c.elems.at(row * c.row_stride + column);
    let mut block = SumTile {
        rows,
        columns,
        addend: sums.filter(|_| !is_first),
        to,
        stride: c.row_stride,
        adds_to_bf16: is_last && c.accumulate && matches!(to, ElemPtr::Bf16(_)),
        bias: c.bias.filter(|_| is_last).map(|bias| bias.wrapping_add(column)),
        with_relu: is_last && c.with_relu,
    };
    match (to, sums) {
        (ElemPtr::F32(c_block), _) if !is_first || c.accumulate => {
            block.addend = Some((c_block, c.row_stride));
        }
        (ElemPtr::Bf16(_), Some((sums, stride))) if !is_last => {
            (block.to, block.stride) = (ElemPtr::F32(sums), stride);
        }
        _ => {}
    }
    block
}
