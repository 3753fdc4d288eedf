//! A small convolutional classifier whose sizes the caller chooses.

use std::sync::Arc;

use paceline_kernels::conv2d::Conv2d;
use paceline_kernels::linear::Activation;
use paceline_kernels::{ImageLayout, pool2d};

use crate::layers;
use crate::layers::{
    BatchNorm, ConvReluPool, ConvertLayout, Flatten, Linear, MaxPool2d, Relu, Sequence,
};
use crate::{Block, CrossEntropy, Layer, LayoutBuilder, Model, ModelError, Result, UnitId};

/// Convolutions (3x3, padding 1), each followed by ReLU and a 2x2 max-pool, then a hidden layer with ReLU,
/// then one logit per class. Optionally with batch normalization between convolution and ReLU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CnnConfig {
    /// Height, width and channels of the images.
    pub image: [usize; 3],
    /// Output channels of each convolution.
    pub channels: Vec<usize>,
    /// Width of the hidden layer.
    pub hidden: usize,
    /// Number of classes.
    pub num_classes: usize,
    /// Whether batch normalization follows each convolution.
    pub batch_norm: bool,
    /// Whether there is a second head that the loss does not use, as in a network that is reused for another
    /// task. The parameters of this head get no gradient.
    pub unused_head: bool,
    /// How images lie in memory between the convolutions. Inputs are NHWC in any case. The layout changes neither the
    /// parameters nor a bit of any result.
    pub layout: ImageLayout,
}

impl CnnConfig {
    /// Builds the model for `world_size` ranks. Errors if a size or the number of ranks is zero, or if the
    /// image is too small for the number of pools.
    pub fn build(&self, world_size: usize) -> Result<Model> {
        self.build_of(world_size, true)
    }

    /// The same model of operations that are not fused: each convolution, bias, activation, pool and normalization writes its
    /// result to memory, where the next one reads it.
    pub fn build_unfused(&self, world_size: usize) -> Result<Model> {
        self.build_of(world_size, false)
    }

    fn build_of(&self, world_size: usize, is_fused: bool) -> Result<Model> {
        let [mut height, mut width, mut c_in] = self.image;
        if self.channels.is_empty() || self.channels.contains(&0) || self.hidden == 0 {
            let reason = format!("a CNN needs channels and a hidden width above zero: {self:?}");
            return Err(ModelError::Config(reason));
        }
        LayoutBuilder::check_world_size(world_size)?;
        let mut layout = LayoutBuilder::new();
        let mut blocks = Vec::new();
        let has_planes = self.layout == ImageLayout::Nchw;
        // Batch normalization adds up rows of channels, and the weights of the first linear layer are in the order of NHWC.
        let to_rows = has_planes.then_some(ImageLayout::Nhwc);
        let mut activation_elems = height * width * c_in;
        if has_planes && c_in > 1 {
            // The first convolution keeps the converted image.
            activation_elems *= 2;
        }
        for (at, &c_out) in self.channels.iter().enumerate() {
            if height < 2 || width < 2 {
                let [h, w, _] = self.image;
                let reason = format!(
                    "a {h}x{w} image is too small for {} convolutions with a 2x2 pool each: after \
                     {at} of them it is {height}x{width}",
                    self.channels.len()
                );
                return Err(ModelError::Config(reason));
            }
            let unit = layout.unit(format!("conv{at}"));
            let geometry = Conv2d::same3x3(height, width, c_in, c_out);
            let geometry = Conv2d { layout: self.layout, ..geometry };
            let to_planes = (has_planes && at == 0).then_some(ImageLayout::Nchw);
            if self.batch_norm {
                let conv = layers::Conv2d::new(&mut layout, geometry)?;
                blocks.push(block(unit, to_planes, conv));
                let unit = layout.unit(format!("bn{at}"));
                let norm = |of| BatchNorm::new(&mut layout, c_out, of);
                let norm = Sequence::new().then_relu(is_fused, norm);
                let mut layers = norm.then(pool_of([height, width, c_out], ImageLayout::Nhwc)?);
                if has_planes {
                    layers.push(ConvertLayout(ImageLayout::Nchw));
                }
                blocks.push(block(unit, to_rows, layers));
                // The normalization keeps the image from before the pool until the backward pass.
                activation_elems += height * width * c_out;
            } else if is_fused {
                blocks.push(block(unit, to_planes, ConvReluPool::new(&mut layout, geometry)?));
            } else {
                let convolution = layers::Conv2d::new(&mut layout, geometry)?;
                let pool = pool_of([height, width, c_out], self.layout)?;
                let parts = Sequence::new().then(convolution).then(Relu).then(pool);
                blocks.push(block(unit, to_planes, parts));
                activation_elems += 2 * height * width * c_out;
            }
            (height, width, c_in) = (height / 2, width / 2, c_out);
            activation_elems += height * width * c_out;
        }
        let unit = layout.unit("fc0");
        let flat = height * width * c_in;
        let linear = |of| Linear::new(&mut layout, flat, self.hidden, of);
        let parts = Sequence::new().then(Flatten).then_relu(is_fused, linear);
        blocks.push(block(unit, to_rows, parts));
        let unit = layout.unit("fc1");
        let head = Linear::new(&mut layout, self.hidden, self.num_classes, Activation::None);
        blocks.push(Block::new(unit, head));
        if self.unused_head {
            layout.unit("unused_head");
            Linear::new(&mut layout, self.hidden, self.num_classes, Activation::None);
        }
        Ok(Model {
            name: "cnn",
            blocks,
            objective: Box::new(CrossEntropy),
            layout: Arc::new(layout.finish(world_size)),
            activation_elems: activation_elems + self.hidden + self.num_classes,
        })
    }
}

/// A 2x2 max-pool of images of this height, width and channels.
fn pool_of([height, width, channels]: [usize; 3], layout: ImageLayout) -> Result<MaxPool2d> {
    MaxPool2d::new(pool2d::MaxPool2d { height, width, channels, window: 2, stride: 2, layout })
}

/// A block of this layer, which comes after the conversion of its input to a layout if it needs one.
fn block(unit: UnitId, converted: Option<ImageLayout>, layer: impl Layer + 'static) -> Block {
    match converted {
        Some(layout) => Block::new(unit, Sequence::new().then(ConvertLayout(layout)).then(layer)),
        None => Block::new(unit, layer),
    }
}
