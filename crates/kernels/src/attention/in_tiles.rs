//! The products of attention over tiles, which AMX has.
//!
//! In and out: as in registers, see [`Products`]; but operands of products are rounded to bf16, also the weights of values and the
//! gradients of scores. Sums of queries are stored transposed, (width, SIDE). This file does not know what becomes of the sums.
//!
//! Packed keys and values have two forms, each in half of their memory, for each tile of 64: rows of bf16, and planes, a row for
//! each element of a head. A turned tile has two forms likewise: pairs of queries, and pairs of elements, in blocks of 32 columns.
#![cfg_attr(not(any(target_arch = "x86_64", test)), allow(dead_code, reason = "no tiles there"))]

use std::marker::PhantomData;

use half::bf16;
use paceline_numeric::bf16::round;

use super::product::{HeadTokens, Products, ScoreSquare};
use super::tile::{PairOperands, SIDE, transpose_of};
use crate::simd::Vector;
use crate::stored::Stored;
use crate::tiles::{self, BLOCK, Tiles, as_bf16, interleave, read_bf16};

/// Bytes of a row of a square in bf16, and in f32.
const ROW: usize = SIDE * size_of::<bf16>();
const ROW_F32: usize = SIDE * size_of::<f32>();
/// Pairs of a block of columns of a square, in elements of f32.
const PAIRS: usize = SIDE / 2 * BLOCK;

/// Products in tiles, for heads whose rows are a multiple of 32 elements. What lies between is computed with `V`.
#[repr(align(64))]
pub(super) struct InTiles<V, T> {
    tiles: T,
    /// Squares in bf16: rows of probabilities, rows of gradients of scores, and pairs of keys of one of them.
    p: Rounded,
    ds: Rounded,
    pairs: [f32; SIDE * SIDE / 2],
    registers: PhantomData<V>,
}

#[repr(align(64))]
struct Rounded([bf16; SIDE * SIDE]);

impl<V: Vector, T: Tiles> InTiles<V, T> {
    pub(super) fn new(tiles: T) -> Self {
        let [p, ds] = [(); 2].map(|()| Rounded([bf16::ZERO; SIDE * SIDE]));
        Self { tiles, p, ds, pairs: [0.0; SIDE * SIDE / 2], registers: PhantomData }
    }

    /// `sums[i] (+)= sum over j of square[j, i] rows[j]`, from the planes of the rows and the pairs of the square; the sums are
    /// zero before the first key.
    ///
    /// # Safety
    ///
    /// That of [`Products`].
    #[inline(always)]
    unsafe fn add_for_queries(&mut self, at: &ScoreSquare, planes: &[f32], sums: &mut [f32]) {
        assert!(sums.len() >= at.width * SIDE);
        let planes = read_bf16(&planes[at.first_key * at.width / 2..][..SIDE * at.width / 2]);
        for d in (0..at.width).step_by(BLOCK) {
            for i in (0..at.columns).step_by(BLOCK) {
                // SAFETY: the block lies in the sums; each part of the planes and of the pairs lies in their tile and square.
                unsafe {
                    let sum = sums.as_mut_ptr().add(d * SIDE + i).cast();
                    match at.first_key {
                        0 => tiles::zero_sums(&mut self.tiles),
                        _ => tiles::load_sums::<T, 2>(&mut self.tiles, sum, ROW_F32, true),
                    }
                    for j in at.blocks_of_keys(i) {
                        let a = [0, tiles::ROWS]
                            .map(|row| planes.as_ptr().add((d + row) * SIDE + j).cast());
                        let b = self.pairs.as_ptr().add((i * SIDE + j * BLOCK) / 2).cast();
                        tiles::add_block::<T, 2>(&mut self.tiles, a, ROW, b);
                    }
                    tiles::store_sums::<T, 2>(&mut self.tiles, sum, ROW_F32, true);
                }
            }
        }
    }
}

impl ScoreSquare {
    /// The first keys of the blocks that a block of queries attends to.
    fn blocks_of_keys(&self, query: usize) -> impl Iterator<Item = usize> {
        let end = if self.is_diagonal { self.keys.min(query + BLOCK) } else { self.keys };
        (0..end).step_by(BLOCK)
    }

    /// The first queries of the blocks that attend to a block of keys.
    fn blocks_of_queries(&self, key: usize) -> impl Iterator<Item = usize> {
        (if self.is_diagonal { key } else { 0 }..self.columns).step_by(BLOCK)
    }

    /// Sets to zero what was not computed: keys that are not there, and what lies far above the diagonal. Queries that are not there
    /// are zero themselves, and add nothing to keys whose numbers are finite.
    #[inline(always)]
    fn clear(&self, square: &mut [f32]) {
        let (rows, _) = square.as_chunks_mut::<SIDE>();
        let (real, missing) = rows.split_at_mut(self.keys);
        missing.as_flattened_mut().fill(0.0);
        if self.is_diagonal {
            real.iter_mut().enumerate().for_each(|(j, row)| row[..j].fill(0.0));
        }
    }
}

// SAFETY: everything is computed with tiles and with `V`.
unsafe impl<V: Vector, T: Tiles> Products for InTiles<V, T> {
    #[inline(always)]
    unsafe fn pack_keys<S: Stored<Real = f32>>(
        &mut self,
        operands: &PairOperands<'_, S>,
        HeadTokens { row, len, column }: HeadTokens,
        for_gradients: bool,
        spare: &mut [f32],
        keys: &mut [f32],
    ) {
        for (first, (rows, planes)) in (0..len).step_by(SIDE).zip(forms(keys, spare.len())) {
            let tokens = first..len.min(first + SIDE);
            operands.pack_rotated(row, tokens, column, 1.0, spare);
            round_all(spare, as_bf16(rows));
            if for_gradients {
                // SAFETY: the caller guarantees the processor.
                unsafe { to_planes::<V>(spare, planes) }
            }
        }
    }
    #[inline(always)]
    unsafe fn pack_values<S: Stored<Real = f32>>(
        &mut self,
        operands: &PairOperands<'_, S>,
        HeadTokens { row, len, column }: HeadTokens,
        for_scores: bool,
        spare: &mut [f32],
        values: &mut [f32],
    ) {
        for (first, (rows, planes)) in (0..len).step_by(SIDE).zip(forms(values, spare.len())) {
            let tokens = first..len.min(first + SIDE);
            operands.pack(row, tokens, column, spare);
            if for_scores {
                round_all(spare, as_bf16(rows))
            } else {
                // SAFETY: the caller guarantees the processor.
                unsafe { to_planes::<V>(spare, planes) }
            }
        }
    }
    #[inline(always)]
    unsafe fn turn(&mut self, width: usize, for_gradients: bool, tile: &[f32], to: &mut [f32]) {
        // The loops of all products go over whole blocks.
        assert!(
            width.is_multiple_of(BLOCK) && tile.len() == SIDE * width && to.len() == tile.len()
        );
        let (by_query, by_element) = to.split_at_mut(tile.len() / 2);
        // A pair of elements is a number of 32 bits. So their pairs are the transpose of the rows.
        round_all(tile, as_bf16(by_query));
        for i in (0..SIDE).step_by(V::LANES) {
            for pair in (0..width / 2).step_by(V::LANES) {
                // SAFETY: both squares lie in their half; the caller guarantees the processor.
                unsafe {
                    let from = by_query.as_ptr().add(i * width / 2 + pair);
                    let to = by_element
                        .as_mut_ptr()
                        .add(i / BLOCK * BLOCK * width / 2 + pair * BLOCK + i % BLOCK);
                    V::transpose(from, width / 2, to, BLOCK);
                }
            }
        }
        if for_gradients {
            interleave(tile, width, BLOCK, by_query, round);
        }
    }
    #[inline(always)]
    unsafe fn scores(&mut self, at: &ScoreSquare, keys: &[f32], queries: &[f32], to: &mut [f32]) {
        let width = at.width;
        assert!(to.len() >= SIDE * SIDE && queries.len() == SIDE * width);
        let rows = read_bf16(&keys[at.first_key * width / 2..][..SIDE * width / 2]).as_ptr();
        let by_element = &queries[queries.len() / 2..];
        for j in (0..at.keys).step_by(BLOCK) {
            for i in at.blocks_of_queries(j) {
                // SAFETY: the rows lie in their tile, the pairs in their half, and the block in the square.
                unsafe {
                    tiles::zero_sums(&mut self.tiles);
                    for d in (0..width).step_by(BLOCK) {
                        let a = [0, tiles::ROWS].map(|row| rows.add((j + row) * width + d).cast());
                        let b = by_element.as_ptr().add((i * width + d * BLOCK) / 2).cast();
                        tiles::add_block::<T, 2>(&mut self.tiles, a, width * size_of::<bf16>(), b);
                    }
                    let to = to.as_mut_ptr().add(j * SIDE + i).cast();
                    tiles::store_sums::<T, 2>(&mut self.tiles, to, ROW_F32, true);
                }
            }
        }
    }
    #[inline(always)]
    unsafe fn add_values(
        &mut self,
        at: &ScoreSquare,
        square: &mut [f32],
        values: &[f32],
        factors: &[f32; SIDE],
        sums: &mut [f32],
    ) {
        if at.first_key > 0 {
            let (rows, _) = sums.as_chunks_mut::<SIDE>();
            for row in rows {
                row.iter_mut().zip(factors).for_each(|(sum, factor)| *sum *= factor);
            }
        }
        at.clear(square);
        round_all(square, &mut self.p.0);
        interleave(&self.p.0, SIDE, BLOCK, &mut self.pairs, |x| x);
        // SAFETY: the caller's contract.
        unsafe { self.add_for_queries(at, &values[values.len() / 2..], sums) }
    }
    #[inline(always)]
    unsafe fn add_gradients(
        &mut self,
        at: &ScoreSquare,
        [p, ds]: [&mut [f32]; 2],
        keys: &[f32],
        [[_, q], [_, dy]]: [[&[f32]; 2]; 2],
        [d_keys, d_values]: [&mut [f32]; 2],
        dq: &mut [f32],
    ) {
        let (width, stride) = (at.width, at.width * size_of::<f32>());
        at.clear(p);
        at.clear(ds);
        round_all(p, &mut self.p.0);
        round_all(ds, &mut self.ds.0);
        interleave(&self.ds.0, SIDE, BLOCK, &mut self.pairs, |x| x);
        for (square, by_query, to) in [(&self.p, dy, d_values), (&self.ds, q, d_keys)] {
            let to = &mut to[at.first_key * width..][..SIDE * width];
            assert_eq!(by_query.len(), SIDE * width);
            for j in (0..at.keys).step_by(BLOCK) {
                for d in (0..width).step_by(BLOCK) {
                    // SAFETY: the block lies in the tile of sums, and all parts in the square and in their half.
                    unsafe {
                        let sum = to.as_mut_ptr().add(j * width + d).cast();
                        tiles::load_sums::<T, 2>(&mut self.tiles, sum, stride, true);
                        for i in at.blocks_of_queries(j) {
                            let a = [0, tiles::ROWS]
                                .map(|row| square.0.as_ptr().add((j + row) * SIDE + i).cast());
                            let b = by_query.as_ptr().add(d / BLOCK * PAIRS + i / 2 * BLOCK).cast();
                            tiles::add_block::<T, 2>(&mut self.tiles, a, ROW, b);
                        }
                        tiles::store_sums::<T, 2>(&mut self.tiles, sum, stride, true);
                    }
                }
            }
        }
        // SAFETY: the caller's contract.
        unsafe { self.add_for_queries(at, &keys[keys.len() / 2..], dq) }
    }
    #[inline(always)]
    unsafe fn rows<'a>(
        &mut self,
        width: usize,
        sums: &'a [f32],
        spare: &'a mut [f32],
    ) -> &'a [f32] {
        // SAFETY: the caller guarantees the processor.
        unsafe { transpose_of::<V>([width, SIDE], sums, spare) };
        spare
    }
}

/// Rows and planes of each tile, of `len` elements of f32, in packed keys or values.
fn forms(packed: &mut [f32], len: usize) -> impl Iterator<Item = (&mut [f32], &mut [f32])> {
    let (rows, planes) = packed.split_at_mut(packed.len() / 2);
    rows.chunks_exact_mut(len / 2).zip(planes.chunks_exact_mut(len / 2))
}

/// Writes the planes of a tile: a row of SIDE elements of bf16 for each column.
///
/// # Safety
///
/// The processor has the instructions of `V`.
#[inline(always)]
unsafe fn to_planes<V: Vector>(tile: &[f32], planes: &mut [f32]) {
    let (width, planes) = (tile.len() / SIDE, as_bf16(planes));
    assert!(planes.len() == tile.len() && width.is_multiple_of(V::LANES));
    let mut square = [0.0; 16 * 16];
    for i in (0..SIDE).step_by(V::LANES) {
        for d in (0..width).step_by(V::LANES) {
            // SAFETY: the square lies in the tile, and its columns in the planes; the caller guarantees the processor.
            unsafe {
                V::transpose(
                    tile.as_ptr().add(i * width + d),
                    width,
                    square.as_mut_ptr(),
                    V::LANES,
                );
                for row in 0..V::LANES {
                    let to = planes.as_mut_ptr().add((d + row) * SIDE + i);
                    V::load(square.as_ptr().add(row * V::LANES)).store_bf16(to);
                }
            }
        }
    }
}

#[inline(always)]
fn round_all(from: &[f32], to: &mut [bf16]) {
    to.iter_mut().zip(from).for_each(|(to, x)| *to = round(*x));
}

#[cfg(test)]
mod tests {
    use half::bf16;
    use paceline_memory::{Allocator, Category, DType, Element, Tensor};

    use super::super::{AttentionSpec, backward, forward};
    use crate::rotary::{RotaryConfig, RotaryTable};
    use crate::tiles::EMULATES;
    use crate::{Compute, reference};

    /// Numbers between -2 and 2, and NaN as the padding.
    fn numbers(
        [rows, columns]: [usize; 2],
        seed: u32,
        is_padding: impl Fn(usize) -> bool,
    ) -> Vec<f64> {
        let mut state = seed;
        let mut next = |row| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let x = bf16::from_f32((state >> 8) as f32 / (1 << 22) as f32 - 2.0).to_f64();
            if is_padding(row) { f64::NAN } else { x }
        };
        (0..rows * columns).map(|at| next(at / columns)).collect()
    }

    fn tensor<T: Element>(elems: &[T], shape: &[usize]) -> Tensor {
        let tensor = Allocator::new().tensor(T::DTYPE, shape, Category::Data).unwrap();
        tensor.write::<T>().unwrap().copy_from_slice(elems);
        tensor
    }

    fn halves(elems: &[f64], shape: &[usize]) -> Tensor {
        tensor(&elems.iter().map(|x| bf16::from_f64(*x)).collect::<Vec<_>>(), shape)
    }

    /// The distance to the expected numbers, relative to their length. NaN if a number is.
    fn off(found: impl Iterator<Item = f64>, expected: &[f64]) -> f64 {
        let (mut off, mut length) = (0.0, 0.0);
        for (found, expected) in found.zip(expected) {
            off += (found - expected).powi(2);
            length += expected.powi(2);
        }
        (off / length).sqrt()
    }

    #[test]
    fn tiles_are_as_close_as_operands_of_bf16_allow() {
        EMULATES.set(true);
        // A rounding to bf16 is off by 2^-9 at most. A missing or a wrong key, query or element is off by far more.
        const CLOSE: f64 = 6e-3;
        for (heads, kv_heads, head_dim, seq) in [
            (1, 1, 32, 1),
            (2, 1, 32, 33),
            (2, 2, 64, 64),
            (1, 1, 32, 65),
            (2, 1, 96, 70),
            (1, 1, 18, 161),
        ] {
            let spec = AttentionSpec { batch: 3, seq, heads, kv_heads, head_dim };
            let lengths = [seq as i64, 0, (seq as i64 * 2 + 2) / 3];
            let is_padding = |row: usize| row % seq >= lengths[row / seq] as usize;
            let config = RotaryConfig { head_dim, theta: 10_000.0, scaling: None };
            let table = |dtype| RotaryTable::new(&Allocator::new(), config, seq, dtype).unwrap();
            let (wide, narrow) = (table(DType::F64), table(DType::F32));
            let angles = wide.values().read::<f64>().unwrap();
            let qkv = numbers(spec.qkv_shape(), 1, is_padding);
            let dy = numbers(spec.output_shape(), 2, is_padding);
            let (mut y, mut log_sums) = (vec![0.0; dy.len()], vec![0.0; spec.log_sums_len()]);
            reference::attention_forward(&spec, &qkv, &lengths, &angles, &mut y, &mut log_sums);
            let mut d_qkv = vec![0.0; qkv.len()];
            let results = (&*y, &*log_sums, &*dy);
            reference::attention_backward(&spec, &qkv, &lengths, &angles, results, &mut d_qkv);

            let mut bits = None;
            for threads in [1, 2] {
                let compute = Compute::new(threads, Allocator::new()).unwrap();
                let qkvs = halves(&qkv, &spec.qkv_shape());
                let (dys, ids) = (halves(&dy, &spec.output_shape()), tensor(&lengths, &[3]));
                let ys = halves(&vec![f64::NAN; y.len()], &spec.output_shape());
                let sums = tensor(&vec![f32::NAN; log_sums.len()], &[log_sums.len()]);
                let d_qkvs = halves(&vec![f64::NAN; qkv.len()], &spec.qkv_shape());
                forward(&compute, &qkvs, Some(&ids), &narrow, &spec, &ys, &sums).unwrap();
                backward(&compute, &qkvs, Some(&ids), &narrow, &spec, &ys, &sums, &dys, &d_qkvs)
                    .unwrap();
                let of = |tensor: &Tensor| -> Vec<f64> {
                    tensor.read::<bf16>().unwrap().iter().map(|x| x.to_f64()).collect()
                };
                let sums = sums.read::<f32>().unwrap();
                let found = [
                    off(of(&ys).into_iter(), &y),
                    off(sums.iter().map(|x| f64::from(*x)), &log_sums),
                    off(of(&d_qkvs).into_iter(), &d_qkv),
                ];
                // With a single token the gradients of queries and keys are zero, and nearly so here.
                assert!(found.iter().all(|off| *off < CLOSE), "{found:?} of {spec:?}");
                let now =
                    [ys, d_qkvs].map(|tensor| tensor.as_bytes().read::<u8>().unwrap().to_vec());
                assert_eq!(bits.get_or_insert_with(|| now.clone()), &now, "{spec:?}");
            }
        }
    }
}
