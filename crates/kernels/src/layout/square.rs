//! Transposes of matrices, in squares of 16 x 16 numbers that are transposed in registers.
//!
//! In an image with channels last, positions are the rows of a matrix and channels the columns. With planes, channels are
//! the rows and positions the columns. This file knows matrices only.

use crate::SimdLevel;
#[cfg(target_arch = "x86_64")]
use crate::simd::{Avx2, Avx512};
use crate::simd::{Portable, Vector};
use crate::stored::{SinglePrecision, operand};

/// Rows and columns of a square.
pub(crate) const SIDE: usize = 16;

/// Numbers of 32 bits, or smaller ones as the bits of an f32: moving an f32 changes no bit.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(crate) struct Square(pub(crate) [[f32; SIDE]; SIDE]);

impl Square {
    pub(crate) const ZERO: Self = Self([[0.0; SIDE]; SIDE]);

    /// Reads up to 16 rows and columns of a matrix that begins with `from`, and whose rows begin `stride` elements after
    /// each other. What lies in the other places of the square is not specified.
    #[inline(always)]
    pub(crate) fn gather<A: Copy>(
        &mut self,
        from: &[A],
        stride: usize,
        rows: usize,
        load: impl Fn(A) -> f32,
    ) {
        for (row, line) in self.0.iter_mut().enumerate().take(rows) {
            let from = &from[row * stride..];
            match from.first_chunk::<SIDE>() {
                Some(chunk) => {
                    for (to, x) in line.iter_mut().zip(chunk) {
                        *to = load(*x);
                    }
                }
                None => line.iter_mut().zip(from).for_each(|(to, x)| *to = load(*x)),
            }
        }
    }
}

/// Writes one line of a square to `to`, which has up to 16 elements.
#[inline(always)]
pub(crate) fn put<B>(line: &[f32; SIDE], to: &mut [B], store: impl Fn(f32) -> B) {
    match to.first_chunk_mut::<SIDE>() {
        Some(to) => {
            for (to, x) in to.iter_mut().zip(line) {
                *to = store(*x);
            }
        }
        None => to.iter_mut().zip(line).for_each(|(to, x)| *to = store(*x)),
    }
}

#[inline(always)]
pub(crate) fn transpose(level: SimdLevel, from: &Square, to: &mut Square) {
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    fn avx512(from: &Square, to: &mut Square) {
        // SAFETY: the processor has the instructions, as this function requires.
        unsafe { in_registers::<Avx512>(from, to) }
    }
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma")]
    fn avx2(from: &Square, to: &mut Square) {
        // SAFETY: as above.
        unsafe { in_registers::<Avx2>(from, to) }
    }
    match level {
        // SAFETY: a level is only ever chosen from `SimdLevel::available`.
        #[cfg(target_arch = "x86_64")]
        SimdLevel::Avx512 => unsafe { avx512(from, to) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        SimdLevel::Avx2 => unsafe { avx2(from, to) },
        // SAFETY: plain code runs on every processor.
        _ => unsafe { in_registers::<Portable>(from, to) },
    }
}

/// # Safety
///
/// The processor has the instructions of `V`.
#[inline(always)]
unsafe fn in_registers<V: Vector>(from: &Square, to: &mut Square) {
    let (from, to) = (from.0.as_flattened().as_ptr(), to.0.as_flattened_mut().as_mut_ptr());
    for i in (0..SIDE).step_by(V::LANES) {
        for j in (0..SIDE).step_by(V::LANES) {
            // SAFETY: LANES divides SIDE, so both blocks lie within the squares, which are different ones.
            unsafe { V::transpose(from.add(i * SIDE + j), SIDE, to.add(j * SIDE + i), SIDE) };
        }
    }
}

/// Writes the columns of a matrix as rows. Column `k` becomes `to[start(k)..][..rows]`. The rows of `from` begin `stride`
/// elements after each other.
#[inline(always)]
pub(crate) fn columns_to_rows<A: Copy, B>(
    level: SimdLevel,
    (from, stride): (&[A], usize),
    [rows, columns]: [usize; 2],
    to: &mut [B],
    start: impl Fn(usize) -> usize,
    load: impl Fn(A) -> f32,
    store: impl Fn(f32, usize) -> B,
) {
    let (mut square, mut turned) = (Square::ZERO, Square::ZERO);
    for column in (0..columns).step_by(SIDE) {
        let mut starts = [0; SIDE];
        (column..).zip(&mut starts).for_each(|(column, to)| *to = start(column));
        let width = SIDE.min(columns - column);
        for row in (0..rows).step_by(SIDE) {
            let height = SIDE.min(rows - row);
            square.gather(&from[row * stride + column..], stride, height, &load);
            transpose(level, &square, &mut turned);
            for (k, line) in turned.0.iter().enumerate().take(width) {
                let to = &mut to[starts[k] + row..][..height];
                put(line, to, |x| store(x, column + k));
            }
        }
    }
}

/// Copies an image of (planes, positions), which are its `sizes`, into a rectangle of positions with the channels of a
/// position next to each other, rounded to `S`. `to` begins with the first position. Rows of `width` positions begin
/// `strides[0]` elements after each other, and positions `strides[1]`.
#[inline(always)]
pub(crate) fn planes_to_positions<X: SinglePrecision, S: SinglePrecision>(
    simd: SimdLevel,
    planes: &[X],
    sizes: [usize; 2],
    width: usize,
    strides: [usize; 2],
    to: &mut [f32],
) {
    let start = |p: usize| p / width * strides[0] + p % width * strides[1];
    columns_to_rows(simd, (planes, sizes[1]), sizes, to, start, operand::<X, S>, |x, _| x);
}

/// Writes planes from `sums`, the channels of each position, which begin `stride` elements after those of the position
/// before. `sizes` are the numbers of positions and of planes. Adds the channel's bias if there is one.
#[inline(always)]
pub(crate) fn positions_to_planes<S: SinglePrecision>(
    simd: SimdLevel,
    sums: &[f32],
    stride: usize,
    sizes: [usize; 2],
    bias: Option<&[f32]>,
    planes: &mut [S],
) {
    let (from, start) = ((sums, stride), |plane: usize| plane * sizes[0]);
    match bias {
        Some(bias) => {
            let store = |x, plane: usize| S::store(x + bias[plane]);
            columns_to_rows(simd, from, sizes, planes, start, |x| x, store);
        }
        None => columns_to_rows(simd, from, sizes, planes, start, |x| x, |x, _| S::store(x)),
    }
}

/// Adds each position of the planes of a batch to `sums`, one number for each plane of an image: image by image, and
/// position by position, as with the channels of a position next to each other. With `cut`, a value counts as zero if its
/// byte is this one.
#[inline(always)]
pub(crate) fn add_positions<S: SinglePrecision>(
    simd: SimdLevel,
    planes: &[S],
    cut: Option<(&[u8], u8)>,
    positions: usize,
    sums: &mut [f32],
) {
    let [mut square, mut turned, mut bytes] = [Square::ZERO; 3];
    for image in (0..planes.len()).step_by(positions * sums.len()) {
        for (group, sums) in sums.chunks_mut(SIDE).enumerate() {
            let mut own = [0.0; SIDE];
            own[..sums.len()].copy_from_slice(sums);
            for first in (0..positions).step_by(SIDE) {
                let at = image + group * SIDE * positions + first;
                square.gather(&planes[at..], positions, sums.len(), S::load);
                if let Some((all, byte)) = cut {
                    bytes.gather(&all[at..], positions, sums.len(), byte_to_lane);
                    let values = square.0.as_flattened_mut().iter_mut();
                    for (x, found) in values.zip(bytes.0.as_flattened()) {
                        *x = if found.to_bits() == u32::from(byte) { 0.0 } else { *x };
                    }
                }
                transpose(simd, &square, &mut turned);
                for line in turned.0.iter().take(positions - first) {
                    own.iter_mut().zip(line).for_each(|(sum, x)| *sum += x);
                }
            }
            sums.copy_from_slice(&own[..sums.len()]);
        }
    }
}

/// A byte as the bits of an f32, which a square holds.
#[inline(always)]
pub(crate) fn byte_to_lane(byte: u8) -> f32 {
    f32::from_bits(byte.into())
}
