//! Matrix products.
//!
//! `c = a * b` or `c += a * b`, in f32 with register tiles over packed operands, after Goto and van
//! de Geijn ("Anatomy of high-performance matrix multiplication", 2008): a block of `b` is packed
//! into panels of the tile's width, of which one at a time stays in the first-level cache, while the
//! rows of `a`, packed so that they lie close together, stream past it from the second level.
//!
//! Rows that are contiguous in memory are packed by plain copies; the others must be turned round.
//! Where turning the whole product round (`c^T = b^T a^T`) turns fewer elements, that is what
//! happens; it is how `x w^T` avoids touching a large `w` twice.
//!
//! Order of summation: blocks of `k`, each from its first to its last element. It depends on the
//! sizes alone, not on the number of threads.

use std::ops::Range;

use crate::tile::{self, PACKED_STRIDE, ProductKernel, ProductTile, even_parts};
use crate::{Compute, Result, SimdLevel};

/// The most steps of a tile: a panel of 32 columns then takes 32 KB.
const K_BLOCK: usize = 256;

// Longer than a block of steps, so that packed rows do not compete for the same cache sets.
const _: () = assert!(K_BLOCK < PACKED_STRIDE);

/// The most rows of `a` packed at a time: about 290 KB, which stay in the second-level cache.
const M_BLOCK: usize = 266;
/// Columns of `b` packed at a time: at most 4 MB.
const N_BLOCK: usize = 4096;
/// Registers of columns in a tile: with two, a tile of 14 rows keeps 512-bit units busiest.
const WIDE: usize = 2;

/// A matrix in a slice, row-major or transposed.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a, T> {
    elems: &'a [T],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a, T: Copy> Matrix<'a, T> {
    /// `elems` as (rows, columns), row-major. Panics if the sizes do not agree.
    pub fn new(elems: &'a [T], rows: usize, columns: usize) -> Self {
        assert_eq!(elems.len(), rows * columns, "a matrix of {rows} x {columns}");
        Self { elems, rows, columns, row_stride: columns, column_stride: 1 }
    }

    /// Rows and columns exchanged; moves nothing.
    pub fn transposed(self) -> Self {
        Self {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }

    /// Rows and columns.
    pub fn size(&self) -> (usize, usize) {
        (self.rows, self.columns)
    }

    /// One element.
    pub fn at(&self, row: usize, column: usize) -> T {
        self.elems[row * self.row_stride + column * self.column_stride]
    }

    /// Elements that packing its rows must turn round.
    fn turned(&self) -> usize {
        if self.column_stride == 1 { 0 } else { self.rows * self.columns }
    }
}

/// `c = a * b`, or `c += a * b` if `accumulate`; `c` is row-major (rows of `a`, columns of `b`).
/// Panics if the sizes do not agree; errors when there is no memory for packing.
pub fn matmul(
    compute: &Compute,
    a: Matrix<'_, f32>,
    b: Matrix<'_, f32>,
    c: &mut [f32],
    accumulate: bool,
) -> Result<()> {
    assert_eq!(a.columns, b.rows, "inner dimensions");
    assert_eq!(c.len(), a.rows * b.columns, "size of the product");
    if a.columns == 0 && !accumulate {
        // An empty sum, as a rank without samples has.
        c.fill(0.0);
    }
    if c.is_empty() || a.columns == 0 {
        return Ok(());
    }
    let (m, n) = (a.rows, b.columns);
    let (a_turned, b_turned) = (a.transposed(), b.transposed());
    if a.turned() + b.turned() <= a_turned.turned() + b_turned.turned() + m * n {
        return product(compute, a, b, c, accumulate);
    }
    let mut turned = compute.scratch(m * n)?;
    product(compute, b_turned, a_turned, &mut turned, false)?;
    if accumulate {
        turn(&turned, c, n, m, |c, x| *c += x);
    } else {
        turn(&turned, c, n, m, |c, x| *c = x);
    }
    Ok(())
}

/// Puts element (i, j) of `from` (rows, columns) into place (j, i) of `to`.
fn turn(from: &[f32], to: &mut [f32], rows: usize, columns: usize, put: impl Fn(&mut f32, f32)) {
    // Both sides of a square this large stay in the first-level cache.
    const SIDE: usize = 32;
    for i in (0..rows).step_by(SIDE) {
        for j in (0..columns).step_by(SIDE) {
            for j in j..columns.min(j + SIDE) {
                for i in i..rows.min(i + SIDE) {
                    put(&mut to[j * rows + i], from[i * columns + j]);
                }
            }
        }
    }
}

/// The product in the given orientation, shared out between the threads along its longer side.
fn product(
    compute: &Compute,
    a: Matrix<'_, f32>,
    b: Matrix<'_, f32>,
    c: &mut [f32],
    accumulate: bool,
) -> Result<()> {
    let (m, n) = (a.rows, b.columns);
    let out = Out { elems: c.as_mut_ptr(), stride: n };
    let whole = (0..m, 0..n);
    let parts: Vec<_> = if m >= n {
        compute.threads.split(m).into_iter().map(|rows| (rows, whole.1.clone())).collect()
    } else {
        // Whole tiles, so that no two threads share one.
        let width = WIDE * tile::lanes(compute.simd);
        let tiles = compute.threads.split(n.div_ceil(width)).into_iter();
        let columns = tiles.map(|t| t.start * width..n.min(t.end * width));
        columns.map(|columns| (whole.0.clone(), columns)).collect()
    };
    compute
        .threads
        .for_each(parts, |(rows, columns)| part(compute, a, b, out, rows, columns, accumulate))
}

/// The destination, shared by threads that write to different parts of it.
#[derive(Clone, Copy)]
struct Out {
    elems: *mut f32,
    stride: usize,
}

// SAFETY: it points into a slice that `matmul` borrows for writing until all threads are done, and
// the parts that threads write to are disjoint.
unsafe impl Send for Out {}
// SAFETY: as for `Send`.
unsafe impl Sync for Out {}

/// The block of `c` at `rows` x `columns`, both within the product.
fn part(
    compute: &Compute,
    a: Matrix<'_, f32>,
    b: Matrix<'_, f32>,
    out: Out,
    rows: Range<usize>,
    columns: Range<usize>,
    accumulate: bool,
) -> Result<()> {
    if rows.is_empty() || columns.is_empty() {
        return Ok(());
    }
    let tiling = Tiling::new(compute.simd, columns.len());
    let k_most = a.columns.min(K_BLOCK);
    let n_most = columns.len().min(N_BLOCK).next_multiple_of(tiling.width);
    let m_most = rows.len().min(M_BLOCK);
    let mut panels = compute.scratch(k_most * n_most)?;
    let mut packed = compute.scratch(m_most * PACKED_STRIDE)?;
    for ks in even_parts(a.columns, K_BLOCK) {
        let adds = accumulate || ks.start > 0;
        for n0 in columns.clone().step_by(N_BLOCK) {
            let ns = n0..columns.end.min(n0 + N_BLOCK);
            pack_panels(&b, ks.clone(), ns.clone(), tiling.width, &mut panels);
            for ms in even_parts(rows.len(), M_BLOCK) {
                let ms = rows.start + ms.start..rows.start + ms.end;
                pack_rows(&a, ms.clone(), ks.clone(), &mut packed);
                tiling.block(&packed, &panels, ks.len(), ms, ns.clone(), out, adds);
            }
        }
    }
    Ok(())
}

/// The size of the tiles and their kernels.
struct Tiling {
    level: SimdLevel,
    wide: usize,
    tall: usize,
    width: usize,
}

impl Tiling {
    fn new(level: SimdLevel, columns: usize) -> Self {
        let lanes = tile::lanes(level);
        let wide = WIDE.min(columns.div_ceil(lanes));
        let (_, tallest) = tile::limits(level);
        Self { level, wide, tall: tallest(wide), width: wide * lanes }
    }

    fn kernel(&self, tall: usize) -> ProductKernel {
        tile::product_kernel(self.level, tall, self.wide, PACKED_STRIDE)
    }

    /// Adds the product of packed rows and panels to the block of `out` at `ms` x `ns`, or writes
    /// it there if not `adds`.
    #[allow(clippy::too_many_arguments, reason = "the operands of the formula")]
    fn block(
        &self,
        packed: &[f32],
        panels: &[f32],
        len: usize,
        ms: Range<usize>,
        ns: Range<usize>,
        out: Out,
        adds: bool,
    ) {
        let tiles: Vec<(Range<usize>, ProductKernel)> = even_parts(ms.len(), self.tall)
            .map(|part| (part.clone(), self.kernel(part.len())))
            .collect();
        // The tiles below read through addresses; these two checks bound them all.
        assert!(len <= K_BLOCK && packed.len() >= ms.len() * PACKED_STRIDE);
        assert!(panels.len() >= ns.len().next_multiple_of(self.width) * len);
        for (panel, j) in panels.chunks_exact(len * self.width).zip(ns.clone().step_by(self.width))
        {
            let valid = self.width.min(ns.end - j);
            for (part, kernel) in &tiles {
                // SAFETY: the tile's first element lies within the destination.
                let to = unsafe { out.elems.add((ms.start + part.start) * out.stride + j) };
                let mut edge = [0.0f32; MAX_TILE];
                let is_edge = valid < self.width;
                let tile = ProductTile {
                    x: packed[part.start * PACKED_STRIDE..].as_ptr(),
                    x_stride: PACKED_STRIDE,
                    w: panel.as_ptr(),
                    len,
                    y: if is_edge { edge.as_mut_ptr() } else { to },
                    y_stride: if is_edge { self.width } else { out.stride },
                    accumulate: adds && !is_edge,
                };
                // SAFETY: `x` and `w` are bounded by the assertions; `y` is the edge buffer, which
                // holds the largest tile, or a tile that lies in this part of the destination as a
                // whole; `level` is this processor's.
                unsafe { kernel(tile) }
                if is_edge {
                    for (row, from) in edge.chunks_exact(self.width).take(part.len()).enumerate() {
                        // SAFETY: the valid columns of this row lie in this part of the destination,
                        // which no other thread touches.
                        let to = unsafe {
                            std::slice::from_raw_parts_mut(to.add(row * out.stride), valid)
                        };
                        for (to, from) in to.iter_mut().zip(from) {
                            *to = if adds { *to + from } else { *from };
                        }
                    }
                }
            }
        }
    }
}

/// Elements of the largest tile of any level.
const MAX_TILE: usize = 14 * WIDE * 16;

/// Rows `ms` of `a`, columns `ks`, one after the other with a gap.
fn pack_rows(a: &Matrix<'_, f32>, ms: Range<usize>, ks: Range<usize>, packed: &mut [f32]) {
    if a.column_stride == 1 {
        for (row, to) in ms.zip(packed.chunks_exact_mut(PACKED_STRIDE)) {
            let from = &a.elems[row * a.row_stride + ks.start..][..ks.len()];
            to[..ks.len()].copy_from_slice(from);
        }
        return;
    }
    // Sixteen rows at a time: a cache line of the source, and sixteen of the destination.
    for first in (0..ms.len()).step_by(16) {
        let count = 16.min(ms.len() - first);
        for (at, k) in ks.clone().enumerate() {
            let from = &a.elems[k * a.column_stride + ms.start + first..][..count];
            for (row, value) in from.iter().enumerate() {
                packed[(first + row) * PACKED_STRIDE + at] = *value;
            }
        }
    }
}

/// Rows `ks` of `b`, columns `ns`, as panels of `width` columns, the last one padded with zeros.
fn pack_panels(
    b: &Matrix<'_, f32>,
    ks: Range<usize>,
    ns: Range<usize>,
    width: usize,
    panels: &mut [f32],
) {
    let len = ks.len();
    if b.column_stride == 1 {
        // Row by row, as it lies in memory.
        for (at, k) in ks.enumerate() {
            let row = &b.elems[k * b.row_stride + ns.start..][..ns.len()];
            for (panel, from) in panels.chunks_exact_mut(len * width).zip(row.chunks(width)) {
                let to = &mut panel[at * width..][..width];
                match (<&mut [f32; 32]>::try_from(&mut *to), <&[f32; 32]>::try_from(from)) {
                    // A size known to the compiler makes a copy of a few instructions.
                    (Ok(to), Ok(from)) => *to = *from,
                    _ => {
                        to[..from.len()].copy_from_slice(from);
                        to[from.len()..].fill(0.0);
                    }
                }
            }
        }
        return;
    }
    let columns = ns.clone().step_by(width);
    for (panel, j) in panels.chunks_exact_mut(len * width).zip(columns) {
        let valid = width.min(ns.end - j);
        if valid < width {
            panel.fill(0.0);
        }
        for column in 0..valid {
            let from = &b.elems[(j + column) * b.column_stride + ks.start..][..len];
            for (to, value) in panel[column..].iter_mut().step_by(width).zip(from) {
                *to = *value;
            }
        }
    }
}
