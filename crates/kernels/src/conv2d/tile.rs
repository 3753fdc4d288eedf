//! Register tiles: the innermost loops of the convolution.
//!
//! A tile holds `P` x `C` registers of running sums and adds, for each of `len` steps, the product
//! of `P` broadcast values and `C` registers. Both kernels here keep the processor's multiply-add
//! units busy as long as the `C` registers come from the first-level cache.

use crate::SimdLevel;
#[cfg(target_arch = "x86_64")]
use crate::simd::{Avx2, Avx512};
use crate::simd::{Portable, Vector};
use crate::tiles::{self, Ways};

/// How channels are distributed over registers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ChannelColumns {
    /// Without padding.
    pub(crate) channels: usize,
    /// Those that are computed: `blocks * block`.
    pub(crate) padded: usize,
    /// Channels of one block: `wide` registers.
    pub(crate) block: usize,
    /// Registers of one block.
    pub(super) wide: usize,
    /// The largest number of rows of a tile.
    pub(super) tall: usize,
}

impl ChannelColumns {
    pub(super) fn new(ways: Ways, channels: usize) -> Self {
        if ways.tiles.is_some() {
            return Self::in_tiles(channels);
        }
        let level = ways.simd;
        let lanes = lanes(level);
        let registers = channels.div_ceil(lanes);
        let blocks = registers.div_ceil(WIDEST);
        let wide = registers.div_ceil(blocks);
        let block = wide * lanes;
        Self { channels, padded: blocks * block, block, wide, tall: tallest(level, wide) }
    }

    /// A tile is as wide as a register of AVX-512. A block is two of them, if there are so many channels.
    fn in_tiles(channels: usize) -> Self {
        let wide = channels.div_ceil(tiles::ROWS).min(2);
        let block = wide * tiles::ROWS;
        let padded = channels.next_multiple_of(block);
        Self { channels, padded, block, wide, tall: tiles::BLOCK }
    }

    pub(super) fn num_blocks(&self) -> usize {
        self.padded / self.block
    }
}

/// Arguments of a product tile: `sums[p][c] (+)= sum over u < kernel_rows and k < len of x[u, p, k] * w[u, k, c]`.
#[derive(Clone, Copy)]
pub(super) struct ProductTile {
    /// The first position; the next ones begin `x_stride` elements after each other.
    pub(super) x: *const f32,
    pub(super) x_stride: usize,
    /// A panel of weights: `len` rows of `C` registers for each kernel row.
    pub(super) w: *const f32,
    pub(super) kernel_rows: usize,
    /// From one kernel row of a position to the next.
    pub(super) x_row_stride: usize,
    pub(super) len: usize,
    /// Sums of the first position; the next ones begin `y_stride` elements after each other.
    pub(super) y: *mut f32,
    pub(super) y_stride: usize,
    /// Whether sums start from `y` instead of zero.
    pub(super) accumulate: bool,
}

/// Arguments of a gradient tile: `d_w[t][c] += sum over rows i and columns j of x[i, j, t] * dy[i, j, c]`.
#[derive(Clone, Copy)]
pub(super) struct GradientTile<'a> {
    /// For each row of positions: its first input value and its first output gradient.
    pub(super) rows: &'a [(*const f32, *const f32)],
    /// Offsets that are added to the addresses of every row: of the first weight, of the first column.
    pub(super) x_offset: usize,
    pub(super) dy_offset: usize,
    pub(super) positions: usize,
    pub(super) x_stride: usize,
    pub(super) dy_stride: usize,
    /// Gradients of the first of the `T` weights, which are `d_w_stride` elements apart.
    pub(super) d_w: *mut f32,
    pub(super) d_w_stride: usize,
}

pub(super) type ProductKernel = unsafe fn(ProductTile);
pub(super) type GradientKernel = unsafe fn(GradientTile<'_>);

/// # Safety
///
/// All addresses that the tile describes are valid, `y` for writing, and the processor has `V`.
#[inline(always)]
unsafe fn product_body<V: Vector, const P: usize, const C: usize>(tile: ProductTile) {
    // SAFETY: as required of the caller.
    unsafe {
        let mut sums = [[V::zero(); C]; P];
        if tile.accumulate {
            for (p, row) in sums.iter_mut().enumerate() {
                for (c, sum) in row.iter_mut().enumerate() {
                    *sum = V::load(tile.y.add(p * tile.y_stride + c * V::LANES));
                }
            }
        }
        let mut w = tile.w;
        for u in 0..tile.kernel_rows {
            let x = tile.x.add(u * tile.x_row_stride);
            for k in 0..tile.len {
                let mut panel = [V::zero(); C];
                for (c, register) in panel.iter_mut().enumerate() {
                    *register = V::load(w.add(c * V::LANES));
                }
                for (p, row) in sums.iter_mut().enumerate() {
                    let x = V::splat(*x.add(p * tile.x_stride + k));
                    for (sum, register) in row.iter_mut().zip(panel) {
                        *sum = x.mul_add(register, *sum);
                    }
                }
                w = w.wrapping_add(C * V::LANES);
            }
        }
        for (p, row) in sums.iter().enumerate() {
            for (c, sum) in row.iter().enumerate() {
                sum.store(tile.y.add(p * tile.y_stride + c * V::LANES));
            }
        }
    }
}

/// # Safety
///
/// All addresses that the tile describes are valid, `d_w` for writing, and the processor has `V`.
#[inline(always)]
unsafe fn gradient_body<V: Vector, const T: usize, const C: usize>(tile: GradientTile<'_>) {
    // SAFETY: as required of the caller.
    unsafe {
        let mut sums = [[V::zero(); C]; T];
        for (t, row) in sums.iter_mut().enumerate() {
            for (c, sum) in row.iter_mut().enumerate() {
                *sum = V::load(tile.d_w.add(t * tile.d_w_stride + c * V::LANES));
            }
        }
        for &(x, dy) in tile.rows {
            let (mut x, mut dy) = (x.add(tile.x_offset), dy.add(tile.dy_offset));
            for _ in 0..tile.positions {
                let mut gradient = [V::zero(); C];
                for (c, register) in gradient.iter_mut().enumerate() {
                    *register = V::load(dy.add(c * V::LANES));
                }
                for (t, row) in sums.iter_mut().enumerate() {
                    let value = V::splat(*x.add(t));
                    for (sum, register) in row.iter_mut().zip(gradient) {
                        *sum = value.mul_add(register, *sum);
                    }
                }
                x = x.wrapping_add(tile.x_stride);
                dy = dy.wrapping_add(tile.dy_stride);
            }
        }
        for (t, row) in sums.iter().enumerate() {
            for (c, sum) in row.iter().enumerate() {
                sum.store(tile.d_w.add(t * tile.d_w_stride + c * V::LANES));
            }
        }
    }
}

/// The kernels of one level, by tile size. `tall` is the number of positions or weights, `wide` the
/// number of registers of columns.
macro_rules! level_kernels {
    ($module:ident, $vector:ty, [$($feature:meta)?], { $($wide:literal: [$($tall:literal)*])* }) => {
        mod $module {
            use super::*;

            $(#[$feature])?
            unsafe fn product<const P: usize, const C: usize>(tile: ProductTile) {
                // SAFETY: as required of the caller, on a processor with this level.
                unsafe { product_body::<$vector, P, C>(tile) }
            }

            $(#[$feature])?
            unsafe fn gradient<const T: usize, const C: usize>(tile: GradientTile<'_>) {
                // SAFETY: as required of the caller, on a processor with this level.
                unsafe { gradient_body::<$vector, T, C>(tile) }
            }

            pub(super) fn product_kernel(tall: usize, wide: usize) -> Option<ProductKernel> {
                match (tall, wide) {
                    $($(($tall, $wide) => Some(product::<$tall, $wide>),)*)*
                    _ => None,
                }
            }

            pub(super) fn gradient_kernel(tall: usize, wide: usize) -> Option<GradientKernel> {
                match (tall, wide) {
                    $($(($tall, $wide) => Some(gradient::<$tall, $wide>),)*)*
                    _ => None,
                }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
level_kernels!(avx512, Avx512, [target_feature(enable = "avx512f")], {
    1: [1 2 3 4 5 6 7 8 9 10 11 12 13 14]
    2: [1 2 3 4 5 6 7 8 9 10 11 12 13 14]
});
#[cfg(target_arch = "x86_64")]
level_kernels!(avx2, Avx2, [target_feature(enable = "avx2,fma")], {
    1: [1 2 3 4 5 6 7 8 9 10 11 12]
    2: [1 2 3 4 5 6]
});
level_kernels!(portable, Portable, [], {
    1: [1 2 3 4 5 6 7 8 9 10 11 12]
    2: [1 2 3 4 5 6]
});

/// The largest number of registers of columns. Wider and lower tiles load more registers for each multiplication, and 64 channels
/// would be padded to a multiple of three registers.
const WIDEST: usize = 2;

/// For a number of registers, the largest number of rows of a tile. Of the processor's registers, one holds a broadcast value
/// and `wide` the columns; a tile whose sums need more than the rest would keep some of them on the stack, and run at half the
/// speed wherever the stack does not lie on a cache line.
fn tallest(level: SimdLevel, wide: usize) -> usize {
    let sums = match level {
        #[cfg(target_arch = "x86_64")]
        SimdLevel::Avx512 => Avx512::ACCUMULATORS,
        #[cfg(target_arch = "x86_64")]
        SimdLevel::Avx2 => Avx2::ACCUMULATORS,
        _ => Portable::ACCUMULATORS,
    };
    (sums / wide).min(14)
}

fn lanes(level: SimdLevel) -> usize {
    match level {
        #[cfg(target_arch = "x86_64")]
        SimdLevel::Avx512 => Avx512::LANES,
        #[cfg(target_arch = "x86_64")]
        SimdLevel::Avx2 => Avx2::LANES,
        _ => Portable::LANES,
    }
}

/// The kernel for a tile within [`WIDEST`] and [`tallest`].
pub(super) fn product_kernel(level: SimdLevel, tall: usize, wide: usize) -> ProductKernel {
    let kernel = match level {
        #[cfg(target_arch = "x86_64")]
        SimdLevel::Avx512 => avx512::product_kernel(tall, wide),
        #[cfg(target_arch = "x86_64")]
        SimdLevel::Avx2 => avx2::product_kernel(tall, wide),
        _ => portable::product_kernel(tall, wide),
    };
    kernel.expect("every tile within the limits has a kernel")
}

/// The kernel for a tile within [`WIDEST`] and [`tallest`].
pub(super) fn gradient_kernel(level: SimdLevel, tall: usize, wide: usize) -> GradientKernel {
    let kernel = match level {
        #[cfg(target_arch = "x86_64")]
        SimdLevel::Avx512 => avx512::gradient_kernel(tall, wide),
        #[cfg(target_arch = "x86_64")]
        SimdLevel::Avx2 => avx2::gradient_kernel(tall, wide),
        _ => portable::gradient_kernel(tall, wide),
    };
    kernel.expect("every tile within the limits has a kernel")
}
