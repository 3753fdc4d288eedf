//! The sizes of a convolution, and the shapes that follow from them.

use crate::{ImageLayout, KernelError, Result};

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
    /// How the images of input and output lie in memory.
    pub layout: ImageLayout,
    /// Whether the processor multiplies each position with each weight in f32, and never by Winograd's minimal filtering, which
    /// it does by default where that takes less time.
    pub direct: bool,
}

impl Conv2d {
    /// A 3x3 convolution of NHWC images that keeps the image size.
    pub fn same3x3(height: usize, width: usize, c_in: usize, c_out: usize) -> Self {
        let (layout, direct) = (ImageLayout::Nhwc, false);
        Self { height, width, c_in, c_out, kernel: (3, 3), stride: 1, padding: 1, layout, direct }
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
        self.layout.shape(batch, self.input_image())
    }

    /// Shape of a batch of outputs.
    pub fn output_shape(&self, batch: usize) -> [usize; 4] {
        self.layout.shape(batch, self.output_image())
    }

    /// Height, width and channels of an input image.
    pub(crate) fn input_image(&self) -> [usize; 3] {
        [self.height, self.width, self.c_in]
    }

    /// Height, width and channels of an output image.
    pub(crate) fn output_image(&self) -> [usize; 3] {
        [self.out_height(), self.out_width(), self.c_out]
    }

    pub(crate) fn input_elems(&self) -> usize {
        self.input_image().iter().product()
    }

    pub(crate) fn output_elems(&self) -> usize {
        self.output_image().iter().product()
    }

    /// The factors of the number of multiply-adds of a forward pass; zeros of the padding count.
    pub(crate) fn products(&self, batch: usize) -> [usize; 7] {
        let (kh, kw) = self.kernel;
        [batch, self.out_height(), self.out_width(), kh, kw, self.c_in, self.c_out]
    }
}
