//! Small networks and numbers for the tests of backward passes.
#![allow(dead_code, reason = "not every test file uses all of it")]

use std::sync::Arc;

use paceline_kernels::linear::Activation;
use paceline_kernels::{conv2d, pool2d};
use paceline_memory::{Allocator, Category, DType, Tensor};
use paceline_model::layers::{
    Conv2d, ConvReluPool, Flatten, Linear, MaxPool2d, Relu, Residual, RmsNorm, Sequence, SwiGlu,
};
use paceline_model::{Block, CnnConfig, Init, LayoutBuilder, MeanSquaredError, MlpConfig, Model};

/// A convolution: image, channels in and out, kernel, stride, padding.
pub fn conv(
    [height, width]: [usize; 2],
    [c_in, c_out]: [usize; 2],
    kernel: (usize, usize),
    stride: usize,
    padding: usize,
) -> conv2d::Conv2d {
    conv2d::Conv2d {
        height,
        width,
        c_in,
        c_out,
        kernel,
        stride,
        padding,
        layout: Default::default(),
    }
}

/// Inputs (n, 9, 8, 2), outputs (n, 5).
pub fn cnn() -> Model {
    cnn_config().build(2).unwrap()
}

/// The same network with batch normalization.
pub fn cnn_with_batch_norm() -> Model {
    CnnConfig { batch_norm: true, ..cnn_config() }.build(2).unwrap()
}

fn cnn_config() -> CnnConfig {
    CnnConfig {
        image: [9, 8, 2],
        channels: vec![3, 4],
        hidden: 6,
        num_classes: 5,
        batch_norm: false,
        unused_head: false,
        layout: Default::default(),
    }
}

/// Inputs (n, 6), outputs (n, 3).
pub fn mlp() -> Model {
    MlpConfig { input_dim: 6, hidden_dim: 7, output_dim: 3, num_layers: 2, tie_layers: false }
        .build(2)
        .unwrap()
}

/// Every layer at least once, including a sequence within the sequence. Inputs (n, 9, 9, 2), outputs (n, 3).
pub fn every_layer() -> Model {
    let mut layout = LayoutBuilder::new();
    let unit = layout.unit("conv0");
    let pool = pool2d::MaxPool2d {
        height: 9,
        width: 9,
        channels: 3,
        window: 3,
        stride: 2,
        layout: Default::default(),
    };
    let conv0 = Conv2d::new(&mut layout, conv([9, 9], [2, 3], (3, 3), 1, 1)).unwrap();
    let conv0 = Sequence::new().then(conv0).then(Relu).then(MaxPool2d::new(pool).unwrap());
    let mut blocks = vec![Block::new(unit, conv0)];
    let unit = layout.unit("conv1");
    let conv1 = ConvReluPool::new(&mut layout, conv([4, 4], [3, 4], (3, 3), 1, 1)).unwrap();
    blocks.push(Block::new(unit, conv1));
    let unit = layout.unit("fc0");
    let fc0 = Linear::new(&mut layout, 16, 5, Activation::Relu);
    blocks.push(Block::new(unit, Sequence::new().then(Flatten).then(Sequence::new().then(fc0))));
    let unit = layout.unit("feed_forward");
    let init = Init::Normal { std: 0.3 };
    let norm = RmsNorm::new(&mut layout, "norm", 5, 1e-5);
    let parts = [("gate", 16), ("up", 16)];
    let gate_up = Linear::projection(&mut layout, 5, &parts, init).unwrap();
    let down = Linear::projection(&mut layout, 16, &[("down", 5)], init).unwrap();
    let feed_forward = Sequence::new().then(norm).then(gate_up).then(SwiGlu).then(down);
    blocks.push(Block::new(unit, Residual(feed_forward)));
    let unit = layout.unit("fc1");
    blocks.push(Block::new(unit, Linear::new(&mut layout, 5, 3, Activation::None)));
    Model {
        name: "every layer",
        blocks,
        objective: Box::new(MeanSquaredError),
        layout: Arc::new(layout.finish(3)),
        activation_elems: 0,
    }
}

/// A tensor of pseudorandom numbers in -1..1, the same for every call with the same seed.
pub fn numbers(allocator: &Allocator, shape: &[usize], seed: u64) -> Tensor {
    let tensor = allocator.tensor(DType::F64, shape, Category::Data).unwrap();
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    for x in tensor.write::<f64>().unwrap().iter_mut() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        *x = (state >> 11) as f64 / (1u64 << 52) as f64 - 1.0;
    }
    tensor
}
