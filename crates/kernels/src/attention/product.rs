//! The products of attention, and how they are computed in registers.
//!
//! In: tiles of queries, keys and values, and squares. Out: sums in scratch memory. This file does not know what becomes of
//! them.
//!
//! In registers, each element of a product is one sum in the order of the inner index, started at zero, which is then stored or
//! added. So its bits depend neither on its place in a tile nor on the other elements.

use super::tile::{PairOperands, SIDE, at_level, lanes, transpose, width};
use crate::SimdLevel;
use crate::simd::{Vector, vectorized};
use crate::stored::Stored;

/// A square: queries of a tile and keys of a tile. Scores, and what is made of them, are stored transposed, (keys, queries).
#[derive(Clone, Copy)]
pub(super) struct ScoreSquare {
    /// The first key, and the real keys and queries from there on.
    pub(super) first_key: usize,
    pub(super) keys: usize,
    pub(super) queries: usize,
    /// Queries, rounded up to whole registers.
    pub(super) columns: usize,
    /// Whether queries do not attend to later keys: places (j, i) with `i < j`. Those far above the diagonal may be
    /// left out, and hold anything.
    pub(super) is_diagonal: bool,
    pub(super) head_dim: usize,
    /// Elements of a row of a tile.
    pub(super) width: usize,
}

impl ScoreSquare {
    /// The square of queries from `first` on and their own keys.
    #[inline(always)]
    pub(super) fn on_diagonal<S>(
        operands: &PairOperands<'_, S>,
        first: usize,
        queries: usize,
    ) -> Self {
        let (head_dim, width) = (operands.spec.head_dim, width(operands.spec));
        let columns = queries.next_multiple_of(lanes(operands.simd));
        let (first_key, keys, is_diagonal) = (first, queries, true);
        Self { first_key, keys, queries, columns, is_diagonal, head_dim, width }
    }

    /// The squares of a tile of queries: those before the diagonal, and then this one, which is on it.
    #[inline(always)]
    pub(super) fn up_to_diagonal(self) -> impl Iterator<Item = Self> {
        (0..=self.first_key).step_by(SIDE).map(move |first_key| {
            let is_diagonal = first_key == self.first_key;
            let keys = if is_diagonal { self.keys } else { SIDE };
            Self { first_key, keys, is_diagonal, ..self }
        })
    }
}

/// The real tokens of a row, and the column where a head of keys or of values begins.
#[derive(Clone, Copy)]
pub(super) struct HeadTokens {
    pub(super) row: usize,
    pub(super) len: usize,
    pub(super) column: usize,
}

/// The products of a pair of a row of the batch and a head of keys, and the forms of tiles that they need. Each form takes the
/// memory of the tile itself.
///
/// # Safety
///
/// All functions require the processor that an implementation is for, and tiles of 64 rows of `width` elements; in tiles, a width
/// that is a multiple of 32.
pub(super) unsafe trait Products {
    /// Writes the keys of all tokens, rotated, for scores, and also for [`Self::add_gradients`] if `for_gradients`. `spare` has the
    /// size of a tile.
    unsafe fn pack_keys<S: Stored<Real = f32>>(
        &mut self,
        operands: &PairOperands<'_, S>,
        tokens: HeadTokens,
        for_gradients: bool,
        spare: &mut [f32],
        keys: &mut [f32],
    );
    /// Writes the values of all tokens: for scores (`for_scores`), or for [`Self::add_values`].
    unsafe fn pack_values<S: Stored<Real = f32>>(
        &mut self,
        operands: &PairOperands<'_, S>,
        tokens: HeadTokens,
        for_scores: bool,
        spare: &mut [f32],
        values: &mut [f32],
    );
    /// Writes the form of a tile (SIDE, width) that scores need, and also [`Self::add_gradients`] if `for_gradients`.
    unsafe fn turn(&mut self, width: usize, for_gradients: bool, tile: &[f32], to: &mut [f32]);
    /// `to[j, i] = keys[j] . queries[i]`, from packed keys and turned queries.
    unsafe fn scores(&mut self, at: &ScoreSquare, keys: &[f32], queries: &[f32], to: &mut [f32]);
    /// `sums[i] = factors[i] sums[i] + sum over j of square[j, i] values[j]`; sums are zero before the first key.
    unsafe fn add_values(
        &mut self,
        at: &ScoreSquare,
        square: &mut [f32],
        values: &[f32],
        factors: &[f32; SIDE],
        sums: &mut [f32],
    );
    /// `d_values[j] += sum over i of p[j, i] dy[i]`, `d_keys[j] += sum over i of ds[j, i] q[i]` and `dq[i] += sum over j of
    /// ds[j, i] keys[j]`; dq is zero before the first key. Each tile comes as is and transposed.
    unsafe fn add_gradients(
        &mut self,
        at: &ScoreSquare,
        squares: [&mut [f32]; 2],
        keys: &[f32],
        queries_and_dy: [[&[f32]; 2]; 2],
        d_keys_values: [&mut [f32]; 2],
        dq: &mut [f32],
    );
    /// The rows of the sums that [`Self::add_values`] and [`Self::add_gradients`] have added up for queries. `spare` has the size of
    /// a tile.
    unsafe fn rows<'a>(&mut self, width: usize, sums: &'a [f32], spare: &'a mut [f32])
    -> &'a [f32];
}

/// The left operand of a product: row `r` and inner index `k` are at `r * row + k * step`.
#[derive(Clone, Copy)]
struct Left<'a> {
    elems: &'a [f32],
    row: usize,
    step: usize,
}

/// The right operand of a product: inner index `k` and column `n` are at `k * row + n`.
#[derive(Clone, Copy)]
struct Right<'a> {
    elems: &'a [f32],
    row: usize,
}

/// The rows that [`product`] computes at a time: they divide a tile and the lanes. Rows times columns of registers are as many sums
/// as additions that a processor has under way.
const fn rows(lanes: usize) -> usize {
    if lanes == 16 { 8 } else { 4 }
}

/// Columns of registers that are computed at a time, at most.
const COLUMNS: usize = 2;

at_level! {
    /// `c[r, n] (+)= sum over k < steps of a[r, k] * b[k, n]` for as many rows as [`rows`] says and `columns` columns, a multiple of the
    /// lanes. The rows of `c` are `c_row` elements apart.
    fn product(
        a: Left<'_>,
        b: Right<'_>,
        steps: usize,
        columns: usize,
        c: &mut [f32],
        c_row: usize,
        accumulate: bool,
    ) = product_of
}

/// # Safety
///
/// The processor has the instructions of `V`.
#[inline(always)]
unsafe fn product_of<V: Vector>(
    a: Left<'_>,
    b: Right<'_>,
    steps: usize,
    columns: usize,
    c: &mut [f32],
    c_row: usize,
    accumulate: bool,
) {
    let rows = rows(V::LANES);
    // The tiles below read and write through addresses. These checks bound all of them.
    let last = steps.saturating_sub(1);
    assert!(steps == 0 || (rows - 1) * a.row + last * a.step < a.elems.len());
    assert!(steps == 0 || last * b.row + columns <= b.elems.len());
    assert!((rows - 1) * c_row + columns <= c.len());
    assert!(columns.is_multiple_of(V::LANES));
    let (mut n, end) = (0, columns);
    while n < end {
        let registers = ((end - n) / V::LANES).min(COLUMNS);
        // SAFETY: `registers` registers from column `n` on are within the columns that were checked; the caller
        // guarantees the processor.
        unsafe {
            let (b_at, c_at) = (b.elems.as_ptr().add(n), c.as_mut_ptr().add(n));
            let place = (a, b_at, b.row, steps, c_at, c_row, accumulate);
            match (rows, registers) {
                (8, 1) => registers_of::<V, 8, 1>(place),
                (8, _) => registers_of::<V, 8, COLUMNS>(place),
                (_, 1) => registers_of::<V, 4, 1>(place),
                (_, _) => registers_of::<V, 4, COLUMNS>(place),
            }
        }
        n += registers * V::LANES;
    }
}

/// Where a tile of registers reads and writes: a, b, the row of b, the steps, c, the row of c, and whether it adds.
type TileOperands<'a> = (Left<'a>, *const f32, usize, usize, *mut f32, usize, bool);

/// `R` rows of `C` registers.
///
/// # Safety
///
/// All places that are described are valid, those of c for writing, and the processor has the instructions of `V`.
#[inline(always)]
unsafe fn registers_of<V: Vector, const R: usize, const C: usize>(place: TileOperands<'_>) {
    let (a, b, b_row, steps, c, c_row, accumulate) = place;
    // SAFETY: as required of the caller.
    unsafe {
        let mut sums = [[V::zero(); C]; R];
        for k in 0..steps {
            let mut right = [V::zero(); C];
            for (n, right) in right.iter_mut().enumerate() {
                *right = V::load(b.add(k * b_row + n * V::LANES));
            }
            let left = a.elems.as_ptr().add(k * a.step);
            for (r, row) in sums.iter_mut().enumerate() {
                let left = V::splat(*left.add(r * a.row));
                for (sum, right) in row.iter_mut().zip(right) {
                    *sum = left.mul_add(right, *sum);
                }
            }
        }
        for (r, row) in sums.into_iter().enumerate() {
            for (n, mut sum) in row.into_iter().enumerate() {
                let to = c.add(r * c_row + n * V::LANES);
                if accumulate {
                    sum = sum.mul_add(V::splat(1.0), V::load(to));
                }
                sum.store(to);
            }
        }
    }
}

/// Products in registers of f32.
pub(super) struct InRegisters(pub(super) SimdLevel);

// SAFETY: nothing is required but what the functions check themselves.
unsafe impl Products for InRegisters {
    #[inline(always)]
    unsafe fn pack_keys<S: Stored<Real = f32>>(
        &mut self,
        operands: &PairOperands<'_, S>,
        tokens: HeadTokens,
        _: bool,
        _: &mut [f32],
        keys: &mut [f32],
    ) {
        operands.pack_rotated(tokens.row, 0..tokens.len, tokens.column, 1.0, keys);
    }
    #[inline(always)]
    unsafe fn pack_values<S: Stored<Real = f32>>(
        &mut self,
        operands: &PairOperands<'_, S>,
        tokens: HeadTokens,
        _: bool,
        _: &mut [f32],
        values: &mut [f32],
    ) {
        operands.pack(tokens.row, 0..tokens.len, tokens.column, values);
    }
    #[inline(always)]
    unsafe fn turn(&mut self, width: usize, _: bool, tile: &[f32], to: &mut [f32]) {
        transpose(self.0, [SIDE, width], tile, to);
    }
    #[inline(always)]
    unsafe fn scores(&mut self, at: &ScoreSquare, keys: &[f32], queries: &[f32], to: &mut [f32]) {
        let keys = &keys[at.first_key * at.width..];
        let lanes = lanes(self.0);
        for j in (0..at.keys).step_by(rows(lanes)) {
            let from = if at.is_diagonal { j / lanes * lanes } else { 0 };
            let a = Left { elems: &keys[j * at.width..], row: at.width, step: 1 };
            let b = Right { elems: &queries[from..], row: SIDE };
            let to = &mut to[j * SIDE + from..];
            product(self.0, a, b, at.head_dim, at.columns - from, to, SIDE, false);
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
            vectorized!(self.0, scale_rows, &mut *sums, at.width, factors);
        }
        self.add_for_queries(at, square, values, sums);
    }
    #[inline(always)]
    unsafe fn add_gradients(
        &mut self,
        at: &ScoreSquare,
        [p, ds]: [&mut [f32]; 2],
        keys: &[f32],
        [[q, _], [dy, _]]: [[&[f32]; 2]; 2],
        [d_keys, d_values]: [&mut [f32]; 2],
        dq: &mut [f32],
    ) {
        let width = at.width;
        for j in (0..at.keys).step_by(rows(lanes(self.0))) {
            // Queries before the key do not attend to it.
            let start = if at.is_diagonal { j } else { 0 };
            let to = (at.first_key + j) * width;
            let of_values = (&*p, dy, &mut d_values[to..]);
            for (a, b, to) in [of_values, (&*ds, q, &mut d_keys[to..])] {
                let a = Left { elems: &a[j * SIDE + start..], row: SIDE, step: 1 };
                let b = Right { elems: &b[start * width..], row: width };
                product(self.0, a, b, at.queries - start, width, to, width, true);
            }
        }
        self.add_for_queries(at, ds, keys, dq);
    }
    #[inline(always)]
    unsafe fn rows<'a>(&mut self, _: usize, sums: &'a [f32], _: &'a mut [f32]) -> &'a [f32] {
        sums
    }
}

/// Multiplies each row by its factor.
#[inline(always)]
fn scale_rows(rows: &mut [f32], width: usize, factors: &[f32; SIDE]) {
    for (row, factor) in rows.chunks_exact_mut(width).zip(factors) {
        row.iter_mut().for_each(|x| *x *= factor);
    }
}

impl InRegisters {
    /// `sums[i] (+)= sum over j of square[j, i] rows[j]`, the sums being zero before the first key.
    fn add_for_queries(&self, at: &ScoreSquare, square: &[f32], values: &[f32], sums: &mut [f32]) {
        let (width, is_later, rows) = (at.width, at.first_key > 0, rows(lanes(self.0)));
        for i in (0..at.queries).step_by(rows) {
            let steps = if at.is_diagonal { at.keys.min(i + rows) } else { at.keys };
            let a = Left { elems: &square[i..], row: 1, step: SIDE };
            let b = Right { elems: &values[at.first_key * width..], row: width };
            product(self.0, a, b, steps, width, &mut sums[i * width..], width, is_later);
        }
    }
}

/// Makes a function of the stored type from one of [`Products`], and one that chooses tiles where there are some:
/// `ways_of!(fn name, in_tiles<S>(a: A, ...) = body)`.
macro_rules! ways_of {
    ($(#[$doc:meta])* fn $name:ident, $in_tiles:ident<$stored:ident>($($arg:ident: $ty:ty),* $(,)?) = $body:ident) => {
        $(#[$doc])*
        #[allow(clippy::too_many_arguments)]
        pub(super) fn $name<$stored: $crate::stored::Stored<Real = f32>>(
            ways: $crate::tiles::Ways,
            $($arg: $ty),*
        ) {
            let products = $crate::attention::product::InRegisters(ways.simd);
            // SAFETY: a level is only chosen where it is.
            unsafe { $body::<_, $stored>(products, $($arg),*) }
        }

        $(#[$doc])*
        #[allow(clippy::too_many_arguments)]
        pub(super) fn $in_tiles<$stored: $crate::stored::Stored<Real = f32>>(
            ways: $crate::tiles::Ways,
            $($arg: $ty),*
        ) {
            #[cfg(any(target_arch = "x86_64", test))]
            use $crate::attention::in_tiles::InTiles;
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
            #[allow(clippy::too_many_arguments)]
            unsafe fn on_processor<$stored: $crate::stored::Stored<Real = f32>>($($arg: $ty),*) {
                // SAFETY: the caller guarantees AMX and AVX-512, and this thread has no other tiles now; the rest is required
                // of the caller.
                unsafe {
                    let tiles = $crate::amx::Hardware::new();
                    $body::<_, $stored>(InTiles::<$crate::simd::Avx512, _>::new(tiles), $($arg),*)
                }
            }
            // SAFETY: levels and tiles are only chosen where there are some.
            unsafe {
                match ways.tiles {
                    None => $name::<$stored>(ways, $($arg),*),
                    #[cfg(target_arch = "x86_64")]
                    Some($crate::tiles::TilesOf::Processor) => on_processor::<$stored>($($arg),*),
                    #[cfg(test)]
                    Some($crate::tiles::TilesOf::Emulated) => {
                        let tiles = $crate::tiles::EmulatedTiles::default();
                        $body::<_, $stored>(InTiles::<$crate::simd::Portable, _>::new(tiles), $($arg),*)
                    }
                }
            }
        }
    };
}
pub(super) use ways_of;
