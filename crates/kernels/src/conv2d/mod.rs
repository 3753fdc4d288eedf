//! Two-dimensional convolution of NHWC images.
//!
//! `y[n, i, j, o] = b[o] + sum over u, v, c of x[n, i*s + u - p, j*s + v - p, c] * w[u, v, c, o]`
//!
//! with stride `s` and padding `p`, zeros outside the image. This is the cross-correlation that
//! deep-learning frameworks call convolution.
//!
//! Images are convolved directly, without a matrix of patches: positions are the rows and output
//! channels the columns of register tiles (see `tile`), and the order of loops keeps a panel of weights
//! in the first-level cache (see `direct`).

pub(crate) mod direct;
pub(crate) mod meta;
pub(crate) mod prepare;
mod tile;

use paceline_memory::{DType, Device, Tensor};

use crate::compute::batches;
use crate::error::expect_shape;
use crate::meta::Pretended;
use crate::{Compute, KernelError, Result, elementwise, reference};
use direct::{Columns, InputGradient, Product, WeightGradient};
use prepare::PaddedImage;

/// The geometry of a convolution: one image size, one kernel size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conv2d {
    /// Image height.
    pub height: usize,
    /// Image width.
    pub width: usize,
    /// Channels of the input.
    pub c_in: usize,
    /// Channels of the output.
    pub c_out: usize,
    /// Kernel height and width.
    pub kernel: (usize, usize),
    /// Distance between neighboring positions, in both directions.
    pub stride: usize,
    /// Rows and columns of zeros around the image, on every side.
    pub padding: usize,
}

impl Conv2d {
    /// A 3x3 convolution that keeps the image size.
    pub fn same3x3(height: usize, width: usize, c_in: usize, c_out: usize) -> Self {
        Self { height, width, c_in, c_out, kernel: (3, 3), stride: 1, padding: 1 }
    }

    /// Checks the sizes: none is zero, the kernel is not larger than the padded image, and the padding
    /// is smaller than the kernel.
    pub fn check(&self) -> Result<()> {
        let (kh, kw) = self.kernel;
        let sizes = [self.height, self.width, self.c_in, self.c_out, kh, kw, self.stride];
        let reason = if sizes.contains(&0) {
            format!("a size is zero in {self:?}")
        } else if kh > self.height + 2 * self.padding || kw > self.width + 2 * self.padding {
            format!("the kernel is larger than the padded image in {self:?}")
        } else if self.padding >= kh || self.padding >= kw {
            format!("the padding is not smaller than the kernel in {self:?}")
        } else {
            return Ok(());
        };
        Err(KernelError::Geometry { op: "conv2d", reason })
    }

    /// Rows of the output.
    pub fn out_height(&self) -> usize {
        (self.height + 2 * self.padding - self.kernel.0) / self.stride + 1
    }

    /// Columns of the output.
    pub fn out_width(&self) -> usize {
        (self.width + 2 * self.padding - self.kernel.1) / self.stride + 1
    }

    /// Shape of the weight: (kernel height, kernel width, channels in, channels out).
    pub fn weight_shape(&self) -> [usize; 4] {
        [self.kernel.0, self.kernel.1, self.c_in, self.c_out]
    }

    /// Shape of a batch of inputs.
    pub fn input_shape(&self, batch: usize) -> [usize; 4] {
        [batch, self.height, self.width, self.c_in]
    }

    /// Shape of a batch of outputs.
    pub fn output_shape(&self, batch: usize) -> [usize; 4] {
        [batch, self.out_height(), self.out_width(), self.c_out]
    }

    /// Elements of one input image.
    pub(crate) fn input_elems(&self) -> usize {
        self.height * self.width * self.c_in
    }

    /// Elements of one output image.
    pub(crate) fn output_elems(&self) -> usize {
        self.out_height() * self.out_width() * self.c_out
    }

    pub(crate) fn check_operands(
        &self,
        op: &'static str,
        input: &Tensor,
        weight: &Tensor,
        bias: &Tensor,
    ) -> Result<usize> {
        self.check()?;
        let batch = input.dims().first().copied().unwrap_or(0);
        expect_shape(op, "input", input.shape(), self.input_shape(batch))?;
        expect_shape(op, "weight", weight.shape(), self.weight_shape())?;
        expect_shape(op, "bias", bias.shape(), [self.c_out])?;
        Ok(batch)
    }
}

/// Writes the convolution of `input` (n, h, w, c_in) with `weight` and `bias` into `output` (n, h',
/// w', c_out). f32 and f64; overwrites.
pub fn forward(
    compute: &Compute,
    conv: &Conv2d,
    input: &Tensor,
    weight: &Tensor,
    bias: &Tensor,
    output: &Tensor,
) -> Result<()> {
    let _time = compute.time("conv2d_forward", [input, weight]);
    let batch = conv.check_operands("conv2d", input, weight, bias)?;
    expect_shape("conv2d", "output", output.shape(), conv.output_shape(batch))?;
    match compute.device_of("conv2d", [input, weight, bias, output])? {
        Device::Cpu => match input.dtype() {
            DType::F32 => {
                let (x, b) = (input.read::<f32>()?, bias.read::<f32>()?);
                let product = Product::forward(compute, conv, &weight.read()?)?;
                let mut y = output.write::<f32>()?;
                let (in_elems, out_elems) = (conv.input_elems(), conv.output_elems());
                let items = batches(compute, &mut y, out_elems, batch);
                compute.threads.for_each(items, |(first, y)| {
                    let mut padded = PaddedImage::new(compute, conv)?;
                    let mut raw = compute.scratch(product.output_elems())?;
                    for (n, y) in y.chunks_exact_mut(out_elems).enumerate() {
                        let at = (first + n) * in_elems;
                        padded.fill(compute.simd, &x[at..at + in_elems]);
                        product.run(compute.simd, padded.elems(), &mut raw);
                        let columns = raw.chunks_exact(product.columns.padded);
                        for (y, raw) in y.chunks_exact_mut(conv.c_out).zip(columns) {
                            for ((y, raw), b) in y.iter_mut().zip(raw).zip(b.iter()) {
                                *y = raw + b;
                            }
                        }
                    }
                    Ok(())
                })
            }
            DType::F64 => {
                let (x, w, b) = (input.read()?, weight.read()?, bias.read()?);
                reference::conv2d_forward::<f64>(conv, &x, &w, &b, &mut output.write()?);
                Ok(())
            }
            dtype => Err(KernelError::DType { op: "conv2d", dtype }),
        },
        Device::Meta => {
            let dtype = crate::meta::float("conv2d", input)?;
            let mut pretended = Pretended::new(compute, "conv2d")
                .reads(dtype, [input, weight, bias])?
                .writes(dtype, [output])?;
            if dtype == DType::F32 {
                let grid = (conv.out_height(), conv.out_width());
                self::meta::forward(&mut pretended, compute, conv, grid, batch)?;
            }
            Ok(())
        }
    }
}

/// Gradients of weight and bias from `d_output` (n, h', w', c_out). Overwrites, or adds to what is
/// there if `accumulate`. f32 and f64.
pub fn backward_weight(
    compute: &Compute,
    conv: &Conv2d,
    input: &Tensor,
    d_output: &Tensor,
    d_weight: &Tensor,
    d_bias: &Tensor,
    accumulate: bool,
) -> Result<()> {
    let _time = compute.time("conv2d_backward_weight", [input, d_output]);
    let op = "conv2d backward";
    let batch = conv.check_operands(op, input, d_weight, d_bias)?;
    expect_shape(op, "d_output", d_output.shape(), conv.output_shape(batch))?;
    match compute.device_of(op, [input, d_output, d_weight, d_bias])? {
        Device::Cpu => match input.dtype() {
            DType::F32 => {
                let (x, dy) = (input.read::<f32>()?, d_output.read::<f32>()?);
                let (in_elems, out_elems) = (conv.input_elems(), conv.output_elems());
                let gradient =
                    WeightGradient::new(compute, conv, conv.out_height(), conv.out_width());
                gradient.run(
                    compute,
                    batch,
                    |n| &x[n * in_elems..(n + 1) * in_elems],
                    |n, mut grid| {
                        let dy = &dy[n * out_elems..(n + 1) * out_elems];
                        grid.copy_from(dy, conv.out_width(), conv.c_out);
                    },
                    &mut d_weight.write()?,
                    accumulate,
                )?;
                let mut db = d_bias.write::<f32>()?;
                elementwise::add_rows(compute.simd, &dy, &mut db, accumulate);
                Ok(())
            }
            DType::F64 => {
                let (x, dy) = (input.read()?, d_output.read()?);
                let (mut dw, mut db) = (d_weight.write()?, d_bias.write()?);
                if !accumulate {
                    dw.fill(0.0);
                    db.fill(0.0);
                }
                reference::conv2d_backward_weight::<f64>(conv, &x, &dy, &mut dw, &mut db);
                Ok(())
            }
            dtype => Err(KernelError::DType { op, dtype }),
        },
        Device::Meta => {
            let dtype = crate::meta::float(op, input)?;
            let mut pretended = Pretended::new(compute, op)
                .reads(dtype, [input, d_output])?
                .writes(dtype, [d_weight, d_bias])?;
            if dtype == DType::F32 {
                let grid = (conv.out_height(), conv.out_width());
                self::meta::backward_weight(&mut pretended, compute, conv, grid, batch)?;
            }
            Ok(())
        }
    }
}

/// Gradient of the input (n, h, w, c_in) from `d_output` (n, h', w', c_out). Overwrites. f32 and
/// f64.
pub fn backward_input(
    compute: &Compute,
    conv: &Conv2d,
    weight: &Tensor,
    d_output: &Tensor,
    d_input: &Tensor,
) -> Result<()> {
    let _time = compute.time("conv2d_backward_input", [weight, d_output]);
    let op = "conv2d backward";
    conv.check()?;
    let batch = d_output.dims().first().copied().unwrap_or(0);
    expect_shape(op, "weight", weight.shape(), conv.weight_shape())?;
    expect_shape(op, "d_output", d_output.shape(), conv.output_shape(batch))?;
    expect_shape(op, "d_input", d_input.shape(), conv.input_shape(batch))?;
    match compute.device_of(op, [weight, d_output, d_input])? {
        Device::Cpu => match d_output.dtype() {
            DType::F32 => {
                let dy = d_output.read::<f32>()?;
                let out_elems = conv.output_elems();
                let gradient =
                    InputGradient::new(compute, conv, conv.out_height(), &weight.read()?)?;
                gradient.run(
                    compute,
                    |n, mut grid| {
                        let dy = &dy[n * out_elems..(n + 1) * out_elems];
                        grid.copy_from(dy, conv.out_width(), conv.c_out);
                    },
                    &mut d_input.write()?,
                )
            }
            DType::F64 => {
                let (w, dy) = (weight.read()?, d_output.read()?);
                reference::conv2d_backward_input::<f64>(conv, &w, &dy, &mut d_input.write()?);
                Ok(())
            }
            dtype => Err(KernelError::DType { op, dtype }),
        },
        Device::Meta => {
            let dtype = crate::meta::float(op, d_output)?;
            let mut pretended = Pretended::new(compute, op)
                .reads(dtype, [weight, d_output])?
                .writes(dtype, [d_input])?;
            if dtype == DType::F32 {
                let live_rows = conv.out_height();
                self::meta::backward_input(&mut pretended, compute, conv, live_rows, batch)?;
            }
            Ok(())
        }
    }
}

/// How the output channels of a product are distributed over vector registers at this level.
pub(crate) fn columns_for(compute: &Compute, channels: usize) -> Columns {
    Columns::new(compute.simd, channels)
}
