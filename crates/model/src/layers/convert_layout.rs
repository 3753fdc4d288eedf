//! Images of another layout.

use paceline_kernels::{ImageLayout, layout};
use paceline_memory::Tensor;

use crate::{Context, Half, Layer, Result, Saved};

/// Maps images of the other layout to images of this layout, in the type of its input: (n, h, w, c) to (n, c, h, w) for
/// [`ImageLayout::Nchw`], and back for [`ImageLayout::Nhwc`]. Copies nothing if there is one channel or one position.
#[derive(Debug)]
pub struct ConvertLayout(pub ImageLayout);

impl ConvertLayout {
    /// The images of `input`, whose layout is the other one, in the layout `to`.
    fn convert(cx: &Context, to: ImageLayout, input: &Tensor) -> Result<Tensor> {
        let [batch, height, width, channels] = match (to, input.dims()) {
            (ImageLayout::Nchw, &[n, h, w, c]) | (ImageLayout::Nhwc, &[n, c, h, w]) => [n, h, w, c],
            // The kernel refuses it.
            _ => [0; 4],
        };
        let shape = to.shape(batch, [height, width, channels]);
        if channels == 1 || height * width == 1 {
            return Ok(input.view(shape)?);
        }
        let output = cx.scratch(input.dtype(), shape)?;
        layout::convert(cx.compute, to, input, &output)?;
        Ok(output)
    }
}

impl Layer for ConvertLayout {
    fn has_parameters(&self) -> bool {
        false
    }

    fn forward(&self, cx: &mut Context, input: Tensor) -> Result<(Tensor, Saved)> {
        Ok((Self::convert(cx, self.0, &input)?, Saved::default()))
    }

    fn backward(
        &self,
        cx: &mut Context,
        _: &mut Saved,
        d_output: Tensor,
        _: Half,
    ) -> Result<Option<Tensor>> {
        let Self(layout) = self;
        let other = ImageLayout::ALL.into_iter().find(|other| other != layout);
        Self::convert(cx, other.unwrap_or_default(), &d_output).map(Some)
    }
}
