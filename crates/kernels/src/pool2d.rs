//! Max-pooling of images with any window and stride.
//!
//! `y[n, i, j, c] = max over u, v < window of x[n, i*s + u, j*s + v, c]`, without padding; rows and
//! columns that no window covers are ignored. Among equal values the first wins, and NaN always wins.
//!
//! Channels do not meet, so the planes of NCHW images are pooled as images of one channel.

use paceline_cuda::{Grid, KernelSource};
use paceline_memory::{Device, Element, Tensor};

use crate::card::NUMBERS;
use crate::simd::vectorized;
use crate::stored::{Stored, dispatch};
use crate::threads::shares;
use crate::{Compute, ImageLayout, KernelError, Op, Real, Result, SimdLevel, read, scratch, write};

pub(crate) static CARD: KernelSource =
    KernelSource::new("pool2d.cu", include_str!("pool2d.cu"), &[NUMBERS]);

/// The geometry of a max-pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MaxPool2d {
    /// Image height.
    pub height: usize,
    /// Image width.
    pub width: usize,
    /// Channels.
    pub channels: usize,
    /// Height and width of the window.
    pub window: usize,
    /// Distance between neighboring windows, in both directions.
    pub stride: usize,
    /// How the images of input and output lie in memory.
    pub layout: ImageLayout,
}

impl MaxPool2d {
    /// Checks that no size is zero, that a window fits into the image, and that its positions can be numbered
    /// with a byte.
    pub fn check(&self) -> Result<()> {
        let sizes = [self.height, self.width, self.channels, self.window, self.stride];
        let reason = if sizes.contains(&0) {
            format!("a size is zero in {self:?}")
        } else if self.window > self.height.min(self.width) {
            format!("the window is larger than the image in {self:?}")
        } else if self.window > 16 {
            format!("the window is larger than 16 in {self:?}")
        } else {
            return Ok(());
        };
        Err(KernelError::Geometry { op: "max_pool2d", reason })
    }

    /// Shape of a batch of inputs.
    pub fn input_shape(&self, batch: usize) -> [usize; 4] {
        self.layout.shape(batch, [self.height, self.width, self.channels])
    }

    /// Shape of a batch of outputs.
    pub fn output_shape(&self, batch: usize) -> [usize; 4] {
        let out = |size: usize| (size - self.window) / self.stride + 1;
        self.layout.shape(batch, [out(self.height), out(self.width), self.channels])
    }

    /// The same pool of images whose channels lie next to each other, and the number of these images.
    fn with_channels_last(self, batch: usize) -> (Self, usize) {
        let layout = ImageLayout::Nhwc;
        match self.layout {
            ImageLayout::Nhwc => (self, batch),
            ImageLayout::Nchw => (Self { channels: 1, layout, ..self }, batch * self.channels),
        }
    }

    /// Whether its windows are 2x2 and do not overlap.
    fn halves(&self) -> bool {
        self.window == 2 && self.stride == 2
    }

    /// Height, width, channels, window, stride, rows and columns of the output, for a card's kernels.
    fn words(&self) -> [u32; 7] {
        let Self { height, width, channels, window, stride, .. } = *self;
        let out = |size: usize| (size - window) / stride + 1;
        [height, width, channels, window, stride, out(height), out(width)].map(|size| size as u32)
    }

    /// Elements of one image of the input, and of the output.
    fn image_elems(&self) -> [usize; 2] {
        [self.input_shape(1), self.output_shape(1)].map(|dims| dims.iter().product())
    }

    /// Input element of channel 0 at position `at` of the window of output position `(n, i, j)`.
    fn input_at(&self, (n, i, j): (usize, usize, usize), at: usize) -> usize {
        let (y, x) = (i * self.stride + at / self.window, j * self.stride + at % self.window);
        ((n * self.height + y) * self.width + x) * self.channels
    }

    /// Calls `visit` with the index of the first output element of every position, and with the position.
    #[inline(always)]
    fn for_each_position(&self, batch: usize, mut visit: impl FnMut(usize, (usize, usize, usize))) {
        let [_, rows, columns, channels] = self.output_shape(batch);
        for n in 0..batch {
            for i in 0..rows {
                for j in 0..columns {
                    visit(((n * rows + i) * columns + j) * channels, (n, i, j));
                }
            }
        }
    }
}

/// Writes `output` and `winners` (u8: the position of the largest value in its window, row-major),
/// both of [`MaxPool2d::output_shape`]. f32, f64 and bf16; overwrites.
pub fn forward(
    compute: &Compute,
    pool: &MaxPool2d,
    input: &Tensor,
    output: &Tensor,
    winners: &Tensor,
) -> Result<()> {
    pool.check()?;
    let (op, pool) = (Op::new("max_pool2d_forward").elementwise([1, input.num_elems()]), *pool);
    let batch = input.dims().first().copied().unwrap_or(0);
    dispatch!(op.name, input.dtype(), S => {
        let operands = (
            read::<S>("input", input, pool.input_shape(batch)),
            write::<S>("output", output, pool.output_shape(batch)),
            write::<u8>("winners", winners, pool.output_shape(batch)),
        );
        let (pool, batch) = pool.with_channels_last(batch);
        compute.launch_with_card(op, operands, move |cpu, (x, y, winners)| {
            let [in_elems, out_elems] = pool.image_elems();
            let y = shares(cpu, y, out_elems, batch, x.len());
            let winners = shares(cpu, winners, out_elems, batch, x.len());
            let parts = y.into_iter().zip(winners).collect();
            cpu.threads.for_each(parts, |((first, y), (_, winners))| {
                let (x, batch) = (&x[first * in_elems..], y.len() / out_elems.max(1));
                match pool.channels {
                    1 => vectorized!(cpu.simd, forward_of_planes::<S>, &pool, x, y, winners),
                    _ if pool.halves() => {
                        vectorized!(cpu.simd, forward_of_halves::<S>, &pool, batch, x, y, winners);
                    }
                    _ => forward_of::<S>(&pool, batch, x, y, winners),
                }
            });
            Ok(())
        }, move |card, (x, y, winners)| {
            let n = batch * pool.image_elems()[1];
            let arguments = (x, y, winners, pool.words(), n as u64);
            // SAFETY: the output has `n` elements, and the input those of `batch` images.
            unsafe { card.launch(CARD.of::<S>("pool"), arguments, Grid::elements(n)) }
        })
    })
}

/// Gradient of the input from `d_output`: each goes to the winner of its window. Where windows overlap,
/// gradients add up. f32, f64 and bf16, whose gradients add up in f32 and are rounded once; overwrites.
pub fn backward(
    compute: &Compute,
    pool: &MaxPool2d,
    winners: &Tensor,
    d_output: &Tensor,
    d_input: &Tensor,
) -> Result<()> {
    pool.check()?;
    let (op, pool) = (Op::new("max_pool2d_backward").elementwise([1, d_output.num_elems()]), *pool);
    let batch = d_input.dims().first().copied().unwrap_or(0);
    dispatch!(op.name, d_output.dtype(), S => {
        let is_rounded = S::DTYPE != <S as Stored>::Real::DTYPE;
        let (whole, shape) = (pool, pool.output_shape(batch));
        let (pool, num_images) = pool.with_channels_last(batch);
        let [in_elems, out_elems] = pool.image_elems();
        let sums_len = in_elems * compute.processor().threads.num_parts(num_images);
        let operands = (
            read::<u8>("winners", winners, shape),
            read::<S>("d_output", d_output, shape),
            write::<S>("d_input", d_input, whole.input_shape(batch)),
            (is_rounded && compute.device() != Device::Cuda)
                .then(|| scratch::<<S as Stored>::Real>(sums_len)),
        );
        compute.launch_with_card(op, operands, move |cpu, (winners, dy, dx, sums)| {
            let touched = dx.len();
            let dx = shares(cpu, dx, in_elems, num_images, touched);
            let sums = sums.map(|sums| sums.chunks_exact_mut(in_elems.max(1)));
            let sums = sums.into_iter().flatten().map(Some).chain(std::iter::repeat_with(|| None));
            cpu.threads.for_each(dx.into_iter().zip(sums).collect(), |((first, dx), sums)| {
                let batch = dx.len() / in_elems.max(1);
                let part = first * out_elems..(first + batch) * out_elems;
                let (winners, dy) = (&winners[part.clone()], &dy[part]);
                backward_rounded::<S>(cpu.simd, &pool, batch, winners, dy, dx, sums);
            });
            Ok(())
        }, move |card, (winners, dy, dx, _)| {
            let n = num_images * pool.image_elems()[0];
            let arguments = (winners, dy, dx, pool.words(), n as u64);
            // SAFETY: the input has `n` elements, and the output those of as many images.
            unsafe { card.launch(CARD.of::<S>("pool_backward"), arguments, Grid::elements(n)) }
        })
    })
}

fn forward_of<S: Stored>(pool: &MaxPool2d, batch: usize, x: &[S], y: &mut [S], winners: &mut [u8]) {
    let channels = pool.channels;
    pool.for_each_position(batch, |out, position| {
        let (y, winners) = (&mut y[out..][..channels], &mut winners[out..][..channels]);
        let first = pool.input_at(position, 0);
        y.copy_from_slice(&x[first..first + channels]);
        winners.fill(0);
        for at in 1..pool.window * pool.window {
            let from = &x[pool.input_at(position, at)..][..channels];
            for ((y, winner), x) in y.iter_mut().zip(winners.iter_mut()).zip(from) {
                let wins = x.load() > y.load() || x.load().is_nan();
                *y = if wins { *x } else { *y };
                *winner = if wins { at as u8 } else { *winner };
            }
        }
    });
}

/// [`forward_of`] for windows of 2x2 that do not overlap, in one pass over the channels.
#[inline(always)]
fn forward_of_halves<S: Stored>(
    pool: &MaxPool2d,
    batch: usize,
    x: &[S],
    y: &mut [S],
    winners: &mut [u8],
) {
    let channels = pool.channels;
    pool.for_each_position(batch, |out, position| {
        let (y, winners) = (&mut y[out..][..channels], &mut winners[out..][..channels]);
        let [a, b, c, d] = [0, 1, 2, 3].map(|at| &x[pool.input_at(position, at)..][..channels]);
        for o in 0..channels {
            let (mut most, mut winner) = (a[o], 0u32);
            for (candidate, at) in [b[o], c[o], d[o]].into_iter().zip(1u32..) {
                let wins = candidate.load() > most.load() || candidate.load().is_nan();
                most = if wins { candidate } else { most };
                winner = if wins { at } else { winner };
            }
            y[o] = most;
            winners[o] = winner as u8;
        }
    });
}

/// [`forward_of`] for images of one channel.
#[inline(always)]
fn forward_of_planes<S: Stored>(pool: &MaxPool2d, x: &[S], y: &mut [S], winners: &mut [u8]) {
    // A constant distance between the elements of a row lets the compiler use vector instructions.
    match pool.stride {
        1 => planes_with_stride(pool, 1, x, y, winners),
        2 => planes_with_stride(pool, 2, x, y, winners),
        stride => planes_with_stride(pool, stride, x, y, winners),
    }
}

#[inline(always)]
fn planes_with_stride<S: Stored>(
    pool: &MaxPool2d,
    stride: usize,
    x: &[S],
    y: &mut [S],
    winners: &mut [u8],
) {
    let [_, rows, columns, _] = pool.output_shape(1);
    let lines = y.chunks_exact_mut(columns).zip(winners.chunks_exact_mut(columns));
    for (line, (y, winners)) in lines.enumerate() {
        let first = (line / rows * pool.height + line % rows * stride) * pool.width;
        y.iter_mut().zip(x[first..].iter().step_by(stride)).for_each(|(y, x)| *y = *x);
        winners.fill(0);
        for at in 1..pool.window * pool.window {
            let from = &x[first + at / pool.window * pool.width + at % pool.window..];
            let from = &from[..(columns - 1) * stride + 1];
            for (j, (y, winner)) in y.iter_mut().zip(winners.iter_mut()).enumerate() {
                let x = from[j * stride];
                let wins = x.load() > y.load() || x.load().is_nan();
                *y = if wins { x } else { *y };
                *winner = if wins { at as u8 } else { *winner };
            }
        }
    }
}

/// Writes the gradient of the input. If that is stored in another type than gradients add up in, they add up in `sums`, one
/// image at a time.
fn backward_rounded<S: Stored>(
    simd: SimdLevel,
    pool: &MaxPool2d,
    batch: usize,
    winners: &[u8],
    dy: &[S],
    dx: &mut [S],
    sums: Option<&mut [S::Real]>,
) {
    let Some(sums) = sums else {
        let dx = S::as_reals(dx).expect("what is not rounded adds up in place");
        return backward_of::<S>(simd, pool, batch, winners, dy, dx);
    };
    let [in_elems, out_elems] = pool.image_elems();
    let images = dy.chunks_exact(out_elems).zip(winners.chunks_exact(out_elems));
    for ((dy, winners), dx) in images.zip(dx.chunks_exact_mut(in_elems)) {
        backward_of::<S>(simd, pool, 1, winners, dy, sums);
        dx.iter_mut().zip(&*sums).for_each(|(dx, sum)| *dx = S::store(*sum));
    }
}

fn backward_of<S: Stored>(
    simd: SimdLevel,
    pool: &MaxPool2d,
    batch: usize,
    winners: &[u8],
    dy: &[S],
    dx: &mut [S::Real],
) {
    if pool.halves() {
        return vectorized!(simd, backward_of_halves::<S>, pool, batch, winners, dy, dx);
    }
    dx.fill(S::Real::default());
    pool.for_each_position(batch, |out, position| {
        for c in 0..pool.channels {
            let at = usize::from(winners[out + c]);
            dx[pool.input_at(position, at) + c] += dy[out + c].load();
        }
    });
}

/// [`backward_of`] for windows of 2x2 that do not overlap: each gradient of the input is written once.
#[inline(always)]
fn backward_of_halves<S: Stored>(
    pool: &MaxPool2d,
    batch: usize,
    winners: &[u8],
    dy: &[S],
    dx: &mut [S::Real],
) {
    let zero = S::Real::default();
    // A sum with zero, as where windows overlap: it makes zero of minus zero.
    let won = |winner: u8, at: u8, dy: S| if winner == at { zero + dy.load() } else { zero };
    let [_, rows, columns, channels] = pool.output_shape(batch);
    let row_elems = pool.width * channels;
    if 2 * rows < pool.height || 2 * columns < pool.width {
        // No window covers the last row or column.
        dx.fill(zero);
    }
    let lines = dy.chunks_exact(columns * channels).zip(winners.chunks_exact(columns * channels));
    for (line, (dy, winners)) in lines.enumerate() {
        let first = (line / rows * pool.height + line % rows * 2) * row_elems;
        for (u, at) in [(0, 0u8), (1, 2)] {
            let dx = &mut dx[first + u * row_elems..][..2 * columns * channels];
            if channels == 1 {
                for ((dx, dy), winner) in dx.chunks_exact_mut(2).zip(dy).zip(winners) {
                    (dx[0], dx[1]) = (won(*winner, at, *dy), won(*winner, at + 1, *dy));
                }
                continue;
            }
            let windows = dy.chunks_exact(channels).zip(winners.chunks_exact(channels));
            for (dx, (dy, winners)) in dx.chunks_exact_mut(2 * channels).zip(windows) {
                let (left, right) = dx.split_at_mut(channels);
                for (dx, at) in [(left, at), (right, at + 1)] {
                    for ((dx, dy), winner) in dx.iter_mut().zip(dy).zip(winners) {
                        *dx = won(*winner, at, *dy);
                    }
                }
            }
        }
    }
}
