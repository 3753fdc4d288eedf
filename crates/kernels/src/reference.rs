//! Plain implementations of the kernels that also exist in a fast form.
//!
//! They follow the formulas loop by loop, in f32 or f64. Tests compare the fast paths with them. They
//! also compute everything for f64 tensors, which gradient checks use.

use crate::Real;
use crate::activation::Activation;
pub use crate::attention::plain::{backward as attention_backward, forward as attention_forward};
use crate::batch_norm::BatchNorm;
use crate::conv2d::Conv2d;

/// Every product of the sum that defines a convolution: `(n, i, j, o)` of the output, the input
/// element and the weight element.
fn for_each_product(conv: &Conv2d, batch: usize, mut visit: impl FnMut(usize, usize, usize)) {
    let Conv2d { height, width, c_in, c_out, kernel: (kh, kw), stride, padding, layout, .. } =
        *conv;
    let [in_row, in_position, in_channel] = layout.strides(conv.input_image());
    let [out_row, out_position, out_channel] = layout.strides(conv.output_image());
    for n in 0..batch {
        for i in 0..conv.out_height() {
            for j in 0..conv.out_width() {
                let position = n * conv.output_elems() + i * out_row + j * out_position;
                for u in 0..kh {
                    for v in 0..kw {
                        let y = (i * stride + u).wrapping_sub(padding);
                        let x = (j * stride + v).wrapping_sub(padding);
                        if y >= height || x >= width {
                            continue;
                        }
                        for c in 0..c_in {
                            let input = n * conv.input_elems()
                                + y * in_row
                                + x * in_position
                                + c * in_channel;
                            let weight = ((u * kw + v) * c_in + c) * c_out;
                            for o in 0..c_out {
                                visit(position + o * out_channel, input, weight + o);
                            }
                        }
                    }
                }
            }
        }
    }
}

/// `y = conv(x, w) + b`; overwrites `y`.
pub fn conv2d_forward<T: Real>(conv: &Conv2d, x: &[T], w: &[T], b: &[T], y: &mut [T]) {
    let batch = x.len() / conv.input_elems();
    for (at, y) in y.iter_mut().enumerate() {
        *y = b[conv.layout.channel(conv.output_image(), at)];
    }
    for_each_product(conv, batch, |out, input, weight| y[out] += x[input] * w[weight]);
}

/// Adds the gradients of weight and bias to `dw` and `db`.
pub fn conv2d_backward_weight<T: Real>(
    conv: &Conv2d,
    x: &[T],
    dy: &[T],
    dw: &mut [T],
    db: &mut [T],
) {
    let batch = x.len() / conv.input_elems();
    for (at, dy) in dy.iter().enumerate() {
        db[conv.layout.channel(conv.output_image(), at)] += *dy;
    }
    for_each_product(conv, batch, |out, input, weight| dw[weight] += x[input] * dy[out]);
}

/// Writes the gradient of the input.
pub fn conv2d_backward_input<T: Real>(conv: &Conv2d, w: &[T], dy: &[T], dx: &mut [T]) {
    let batch = dx.len() / conv.input_elems();
    dx.fill(T::default());
    for_each_product(conv, batch, |out, input, weight| dx[input] += w[weight] * dy[out]);
}

/// Convolution, bias, ReLU and 2x2 max-pool; `winners` as in
/// [`conv_relu_pool`](crate::conv_relu_pool).
pub fn conv_relu_pool_forward<T: Real>(
    conv: &Conv2d,
    x: &[T],
    w: &[T],
    b: &[T],
    y: &mut [T],
    winners: &mut [u8],
) {
    let batch = x.len() / conv.input_elems();
    let mut full = vec![T::default(); batch * conv.output_elems()];
    conv2d_forward(conv, x, w, b, &mut full);
    for_each_window(conv, batch, |out, window| {
        let (mut most, mut winner) = (full[window[0]], 0);
        for (at, &position) in window.iter().enumerate().skip(1) {
            if full[position] > most || full[position].is_nan() {
                (most, winner) = (full[position], at as u8);
            }
        }
        let passes = most > T::default() || most.is_nan();
        y[out] = if passes { most } else { T::default() };
        winners[out] = if passes { winner } else { 4 };
    });
}

/// The gradient before pooling and ReLU, of [`Conv2d::output_shape`], from the gradient after them, `dy`.
pub fn unpool<T: Real>(conv: &Conv2d, dy: &[T], winners: &[u8]) -> Vec<T> {
    let pooled = conv.out_height() / 2 * (conv.out_width() / 2) * conv.c_out;
    let batch = dy.len() / pooled;
    let mut full = vec![T::default(); batch * conv.output_elems()];
    for_each_window(conv, batch, |out, window| {
        if let Some(&position) = window.get(usize::from(winners[out])) {
            full[position] = dy[out];
        }
    });
    full
}

/// Every pooled element, and the four elements of its window.
fn for_each_window(conv: &Conv2d, batch: usize, mut visit: impl FnMut(usize, [usize; 4])) {
    let [height, width, c] = conv.output_image();
    let pooled = [height / 2, width / 2, c];
    let [row, position, channel] = conv.layout.strides([height, width, c]);
    let out = conv.layout.strides(pooled);
    for n in 0..batch {
        for i in 0..pooled[0] {
            for j in 0..pooled[1] {
                for o in 0..c {
                    let at = |y: usize, x: usize| {
                        n * conv.output_elems() + y * row + x * position + o * channel
                    };
                    let (y, x) = (2 * i, 2 * j);
                    let pooled_at =
                        n * pooled.iter().product::<usize>() + i * out[0] + j * out[1] + o * out[2];
                    visit(pooled_at, [at(y, x), at(y, x + 1), at(y + 1, x), at(y + 1, x + 1)]);
                }
            }
        }
    }
}

/// `c (m, n) (+)= a (m, k) * b (k, n)`, all row-major after the caller's index functions.
pub fn matmul<T: Real>(
    (m, n, k): (usize, usize, usize),
    a: impl Fn(usize, usize) -> T,
    b: impl Fn(usize, usize) -> T,
    c: &mut [T],
    accumulate: bool,
) {
    for i in 0..m {
        for j in 0..n {
            let mut sum = T::default();
            for p in 0..k {
                sum += a(i, p) * b(p, j);
            }
            let c = &mut c[i * n + j];
            *c = if accumulate { *c + sum } else { sum };
        }
    }
}

/// Mean, variance and count of the values of channel `c`, the variance from a second pass.
fn moments<T: Real>(x: &[T], channels: usize, c: usize) -> (T, T, T) {
    let values = || x.iter().skip(c).step_by(channels);
    let (mut sum, mut squares) = (T::default(), T::default());
    let count = T::from_f64((x.len() / channels) as f64);
    values().for_each(|x| sum += *x);
    let mean = sum / count;
    values().for_each(|x| squares += (*x - mean) * (*x - mean));
    (mean, squares / count, count)
}

/// Batch normalization with the statistics of the batch, optionally followed by ReLU.
pub fn batch_norm_forward<T: Real>(
    config: &BatchNorm,
    x: &[T],
    weight: &[T],
    bias: &[T],
    y: &mut [T],
) {
    for c in 0..config.channels {
        let (mean, variance, _) = moments(x, config.channels, c);
        let std = (variance + T::from_f64(config.eps)).sqrt();
        for at in (c..x.len()).step_by(config.channels) {
            let z = (x[at] - mean) / std * weight[c] + bias[c];
            let passes = config.activation == Activation::None || z > T::default() || z.is_nan();
            y[at] = if passes { z } else { T::default() };
        }
    }
}

/// Adds the gradients of weight and bias to `dw` and `db`, and writes the gradient of the input. `y` is the
/// result of [`batch_norm_forward`].
#[allow(clippy::too_many_arguments, reason = "the operands of the formula")]
pub fn batch_norm_backward<T: Real>(
    config: &BatchNorm,
    x: &[T],
    y: &[T],
    weight: &[T],
    dy: &[T],
    dw: &mut [T],
    db: &mut [T],
    dx: &mut [T],
) {
    for c in 0..config.channels {
        let (mean, variance, count) = moments(x, config.channels, c);
        let std = (variance + T::from_f64(config.eps)).sqrt();
        let with_relu = config.activation == Activation::Relu;
        let dz = |at: usize| if with_relu && y[at] == T::default() { T::default() } else { dy[at] };
        let x_hat = |at: usize| (x[at] - mean) / std;
        let places = || (c..x.len()).step_by(config.channels);
        let (mut sum, mut product) = (T::default(), T::default());
        for at in places() {
            sum += dz(at);
            product += dz(at) * x_hat(at);
        }
        for at in places() {
            dx[at] = weight[c] / std * (dz(at) - sum / count - x_hat(at) * product / count);
        }
        dw[c] += product;
        db[c] += sum;
    }
}

/// The sum of the squares, added one after the other, in f64.
pub fn sum_of_squares<T: Real>(x: &[T]) -> f64 {
    x.iter().fold(0.0, |sum, x| sum + x.to_f64() * x.to_f64())
}
