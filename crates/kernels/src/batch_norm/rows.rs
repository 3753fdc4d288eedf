//! The loops of batch normalization over rows of channels, in plain code that is compiled for every
//! level of vector instructions and for every type in which the rows are stored.

use super::BatchNorm;
use crate::Real;
use crate::activation::Activation;
use crate::stored::Stored;

/// The numbers of the formulas for each channel, (c) each, in the type of the values.
pub(super) struct Factors<T> {
    mean: Vec<T>,
    /// The part of the mean that is lost when the mean is rounded to its type. Subtracting this part
    /// too keeps all digits of values that lie close together and far from zero.
    mean_rest: Vec<T>,
    inv_std: Vec<T>,
    weight: Vec<T>,
    bias: Vec<T>,
    /// Means over the batch of `dz` and of `dz * x_hat`; zero until they are set.
    mean_dz: Vec<T>,
    mean_dz_x_hat: Vec<T>,
    with_relu: bool,
}

impl<T: Real> Factors<T> {
    pub(super) fn new(config: &BatchNorm, (moments, weight, bias): (&[f64], &[T], &[T])) -> Self {
        let (means, variances) = moments[1..].split_at(config.channels);
        let mean: Vec<T> = means.iter().map(|&mean| T::from_f64(mean)).collect();
        let rest = |(mean, rounded): (&f64, &T)| T::from_f64(mean - rounded.to_f64());
        Self {
            mean_rest: means.iter().zip(&mean).map(rest).collect(),
            mean,
            inv_std: variances.iter().map(|v| T::from_f64(1.0 / (v + config.eps).sqrt())).collect(),
            weight: weight.to_vec(),
            bias: bias.to_vec(),
            mean_dz: vec![T::default(); config.channels],
            mean_dz_x_hat: vec![T::default(); config.channels],
            with_relu: config.activation == Activation::Relu,
        }
    }

    /// For the gradient of the input: the sums over all `count` values.
    pub(super) fn set_means(&mut self, gradient_sums: &[f64], count: f64) {
        let (of_dz, of_dz_x_hat) = gradient_sums.split_at(self.mean.len());
        for (means, sums) in [(&mut self.mean_dz, of_dz), (&mut self.mean_dz_x_hat, of_dz_x_hat)] {
            means.iter_mut().zip(sums).for_each(|(mean, sum)| *mean = T::from_f64(sum / count));
        }
    }

    /// The factors of `N` channels, beginning with `first`, to be kept in registers.
    #[inline(always)]
    fn group<const N: usize>(&self, first: usize) -> ChannelGroup<T, N> {
        ChannelGroup {
            mean: columns(&self.mean, first),
            mean_rest: columns(&self.mean_rest, first),
            inv_std: columns(&self.inv_std, first),
            weight: columns(&self.weight, first),
            bias: columns(&self.bias, first),
            with_relu: self.with_relu,
        }
    }
}

struct ChannelGroup<T, const N: usize> {
    mean: [T; N],
    mean_rest: [T; N],
    inv_std: [T; N],
    weight: [T; N],
    bias: [T; N],
    with_relu: bool,
}

impl<T: Real, const N: usize> ChannelGroup<T, N> {
    #[inline(always)]
    fn x_hat(&self, j: usize, x: T) -> T {
        ((x - self.mean[j]) - self.mean_rest[j]) * self.inv_std[j]
    }

    /// Before the activation.
    #[inline(always)]
    fn z(&self, j: usize, x_hat: T) -> T {
        x_hat * self.weight[j] + self.bias[j]
    }

    /// Whether the activation turns this value into zero. It leaves NaN unchanged.
    #[inline(always)]
    fn is_cut(&self, z: T) -> bool {
        self.with_relu && z <= T::default()
    }
}

#[inline(always)]
fn columns<T: Copy, const N: usize>(row: &[T], first: usize) -> [T; N] {
    let columns: &[T; N] = row[first..].first_chunk().expect("a group lies within the channels");
    *columns
}

/// Calls `group::<_, N>(first, ..)` for all channels in groups of `N`, each beginning with `first`: few
/// enough that their factors and sums stay in registers over all rows.
macro_rules! in_groups {
    ($channels:expr, $group:ident($($arg:expr),*)) => {{
        let (channels, mut first) = ($channels, 0);
        while first < channels {
            first += match channels - first {
                16.. => { $group::<_, 16>(first, $($arg),*); 16 }
                4.. => { $group::<_, 4>(first, $($arg),*); 4 }
                _ => { $group::<_, 1>(first, $($arg),*); 1 }
            };
        }
    }};
}

#[inline(always)]
pub(super) fn add_sums<S: Stored>(x: &[S], sums: &mut [f64]) {
    let (sum, squares) = sums.split_at_mut(sums.len() / 2);
    in_groups!(sum.len(), sums_group(x, sum, squares));
}

#[inline(always)]
fn sums_group<S: Stored, const N: usize>(
    first: usize,
    x: &[S],
    sum: &mut [f64],
    squares: &mut [f64],
) {
    let (mut s, mut q) = ([0.0; N], [0.0; N]);
    for row in x.chunks_exact(sum.len()) {
        let x: [S; N] = columns(row, first);
        for j in 0..N {
            let x = x[j].load().to_f64();
            s[j] += x;
            q[j] += x * x;
        }
    }
    sum[first..first + N].copy_from_slice(&s);
    squares[first..first + N].copy_from_slice(&q);
}

/// Number of rows that stay in the first-level cache while all groups of channels are computed.
const ROWS_AT_ONCE: usize = 64;

#[inline(always)]
pub(super) fn normalize_rows<S: Stored>(factors: &Factors<S::Real>, x: &[S], y: &mut [S]) {
    let channels = factors.mean.len();
    let elems = ROWS_AT_ONCE * channels;
    for (x, y) in x.chunks(elems).zip(y.chunks_mut(elems)) {
        in_groups!(channels, normalize_group(factors, x, &mut *y));
    }
}

#[inline(always)]
fn normalize_group<S: Stored, const N: usize>(
    first: usize,
    factors: &Factors<S::Real>,
    x: &[S],
    y: &mut [S],
) {
    let (group, channels) = (factors.group::<N>(first), factors.mean.len());
    for (x, y) in x.chunks_exact(channels).zip(y.chunks_exact_mut(channels)) {
        let x: [S; N] = columns(x, first);
        let y = &mut y[first..first + N];
        for j in 0..N {
            let z = group.z(j, group.x_hat(j, x[j].load()));
            y[j] = S::store(if group.is_cut(z) { S::Real::default() } else { z });
        }
    }
}

#[inline(always)]
pub(super) fn add_gradient_sums<S: Stored>(
    factors: &Factors<S::Real>,
    x: &[S],
    dy: &[S],
    sums: &mut [f64],
) {
    let (of_dz, of_dz_x_hat) = sums.split_at_mut(sums.len() / 2);
    in_groups!(of_dz.len(), gradient_sums_group(factors, x, dy, of_dz, of_dz_x_hat));
}

#[inline(always)]
fn gradient_sums_group<S: Stored, const N: usize>(
    first: usize,
    factors: &Factors<S::Real>,
    x: &[S],
    dy: &[S],
    of_dz: &mut [f64],
    of_dz_x_hat: &mut [f64],
) {
    let (group, channels) = (factors.group::<N>(first), factors.mean.len());
    let (mut s, mut q) = ([0.0; N], [0.0; N]);
    for (x, dy) in x.chunks_exact(channels).zip(dy.chunks_exact(channels)) {
        let (x, dy): ([S; N], [S; N]) = (columns(x, first), columns(dy, first));
        for j in 0..N {
            let x_hat = group.x_hat(j, x[j].load());
            let is_cut = group.is_cut(group.z(j, x_hat));
            let dz = if is_cut { 0.0 } else { dy[j].load().to_f64() };
            s[j] += dz;
            q[j] += dz * x_hat.to_f64();
        }
    }
    of_dz[first..first + N].copy_from_slice(&s);
    of_dz_x_hat[first..first + N].copy_from_slice(&q);
}

#[inline(always)]
pub(super) fn input_rows<S: Stored>(factors: &Factors<S::Real>, x: &[S], dy: &[S], dx: &mut [S]) {
    let channels = factors.mean.len();
    let elems = ROWS_AT_ONCE * channels;
    for ((x, dy), dx) in x.chunks(elems).zip(dy.chunks(elems)).zip(dx.chunks_mut(elems)) {
        in_groups!(channels, input_group(factors, x, dy, &mut *dx));
    }
}

#[inline(always)]
fn input_group<S: Stored, const N: usize>(
    first: usize,
    factors: &Factors<S::Real>,
    x: &[S],
    dy: &[S],
    dx: &mut [S],
) {
    let (group, channels) = (factors.group::<N>(first), factors.mean.len());
    let mean_dz: [S::Real; N] = columns(&factors.mean_dz, first);
    let mean_dz_x_hat: [S::Real; N] = columns(&factors.mean_dz_x_hat, first);
    let inputs = x.chunks_exact(channels).zip(dy.chunks_exact(channels));
    for ((x, dy), dx) in inputs.zip(dx.chunks_exact_mut(channels)) {
        let (x, dy): ([S; N], [S; N]) = (columns(x, first), columns(dy, first));
        let dx = &mut dx[first..first + N];
        for j in 0..N {
            let x_hat = group.x_hat(j, x[j].load());
            let is_cut = group.is_cut(group.z(j, x_hat));
            let dz = if is_cut { S::Real::default() } else { dy[j].load() };
            let centered = dz - mean_dz[j] - x_hat * mean_dz_x_hat[j];
            dx[j] = S::store(group.weight[j] * group.inv_std[j] * centered);
        }
    }
}
