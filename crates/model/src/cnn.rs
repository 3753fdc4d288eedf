//! A small convolutional classifier whose sizes the caller chooses.

use paceline_kernels::conv2d::Conv2d;
use paceline_kernels::linear::Activation;
use paceline_kernels::{ImageLayout, pool2d};

use crate::layers;
use crate::layers::{
    BatchNorm, ConvReluPool, ConvertLayout, Flatten, Linear, MaxPool2d, Relu, Sequence,
};
use crate::{
    Block, CrossEntropy, Layer, LayoutBuilder, Model, ModelError, Result, UnitBuilder, UnitId,
};

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
    /// task. Its parameters get no gradient.
    pub unused_head: bool,
    /// How images lie in memory between the convolutions. Inputs are NHWC in any case. The layout changes neither
    /// parameters nor bits.
    pub layout: ImageLayout,
    /// Whether the processor never convolves by Winograd's minimal filtering.
    pub direct_convolutions: bool,
}

impl CnnConfig {
    /// Builds the model for `world_size` ranks. Errors if a size or the number of ranks is zero, or if the
    /// image is too small for the number of pools.
    pub fn build(&self, world_size: usize) -> Result<Model> {
        self.build_of(world_size, true)
    }

    /// The same model of operations that are not fused: each convolution, bias, activation, pool and normalization writes its
    /// result to memory.
    pub fn build_unfused(&self, world_size: usize) -> Result<Model> {
        self.build_of(world_size, false)
    }

    fn build_of(&self, world_size: usize, is_fused: bool) -> Result<Model> {
        self.check()?;
        LayoutBuilder::check_world_size(world_size)?;
        let mut layout = LayoutBuilder::new();
        let mut blocks = Vec::new();
        let [mut height, mut width, mut c_in] = self.image;
        for (at, &c_out) in self.channels.iter().enumerate() {
            let sizes = [height, width, c_in, c_out];
            blocks.extend(self.convolution(&mut layout, at, sizes, is_fused)?);
            (height, width, c_in) = (height / 2, width / 2, c_out);
        }
        let mut unit = layout.unit("fc0");
        let flat = height * width * c_in;
        let linear = |of| Linear::new(&mut unit, flat, self.hidden, of);
        let parts = Sequence::new().then(Flatten).then_relu(is_fused, linear);
        blocks.push(block(unit.id, self.to_rows(), parts));
        let head = |unit: &mut UnitBuilder| {
            Linear::new(unit, self.hidden, self.num_classes, Activation::None)
        };
        blocks.push(layout.block("fc1", head));
        if self.unused_head {
            layout.block("unused_head", head);
        }
        Ok(Model::new("cnn", blocks, CrossEntropy, layout.finish(world_size)))
    }

    /// Errors if a size is zero, or if the image is too small for the number of pools.
    fn check(&self) -> Result<()> {
        if self.channels.is_empty() || self.channels.contains(&0) || self.hidden == 0 {
            let reason = format!("a CNN needs channels and a hidden width above zero: {self:?}");
            return Err(ModelError::Config(reason));
        }
        let [height, width, _] = self.image;
        let num_convolutions = self.channels.len();
        let is_small = |at: &usize| (height >> at) < 2 || (width >> at) < 2;
        match (0..num_convolutions).find(is_small) {
            Some(at) => Err(ModelError::Config(format!(
                "a {height}x{width} image is too small for {num_convolutions} convolutions with a 2x2 pool each: after \
                 {at} of them it is {}x{}",
                height >> at,
                width >> at
            ))),
            None => Ok(()),
        }
    }

    /// The layout to which planes are converted for batch normalization, which adds up rows of channels, and for the first
    /// linear layer, whose weights are in the order of NHWC.
    fn to_rows(&self) -> Option<ImageLayout> {
        (self.layout == ImageLayout::Nchw).then_some(ImageLayout::Nhwc)
    }

    /// The blocks of convolution number `at`, up to its pool. `sizes` are the height and the width of the image, and the channels
    /// before and after.
    fn convolution(
        &self,
        layout: &mut LayoutBuilder,
        at: usize,
        [height, width, c_in, c_out]: [usize; 4],
        is_fused: bool,
    ) -> Result<Vec<Block>> {
        let mut unit = layout.unit(format!("conv{at}"));
        let id = unit.id;
        let geometry = Conv2d::same3x3(height, width, c_in, c_out);
        let geometry = Conv2d { layout: self.layout, direct: self.direct_convolutions, ..geometry };
        let to_planes = self.to_rows().filter(|_| at == 0).map(|_| ImageLayout::Nchw);
        if self.batch_norm {
            let conv = block(id, to_planes, layers::Conv2d::new(&mut unit, geometry)?);
            let mut unit = layout.unit(format!("bn{at}"));
            let norm = |of| BatchNorm::new(&mut unit, c_out, of);
            let norm = Sequence::new().then_relu(is_fused, norm);
            let mut layers = norm.then(pool_of([height, width, c_out], ImageLayout::Nhwc)?);
            if self.to_rows().is_some() {
                layers.push(ConvertLayout(ImageLayout::Nchw));
            }
            return Ok(vec![conv, block(unit.id, self.to_rows(), layers)]);
        }
        if is_fused {
            let fused = ConvReluPool::new(&mut unit, geometry)?;
            return Ok(vec![block(id, to_planes, fused)]);
        }
        let convolution = layers::Conv2d::new(&mut unit, geometry)?;
        let pool = pool_of([height, width, c_out], self.layout)?;
        let parts = Sequence::new().then(convolution).then(Relu).then(pool);
        Ok(vec![block(id, to_planes, parts)])
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
