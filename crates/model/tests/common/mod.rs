//! Small networks, numbers and stored tensors for the tests of models.
#![allow(dead_code, reason = "not every test file uses all of it")]

use half::bf16;
use paceline_kernels::linear::Activation;
use paceline_kernels::{Compute, conv2d, pool2d};
use paceline_memory::{Allocator, Category, DType, Tensor};
use paceline_model::layers::{
    Conv2d, ConvReluPool, Flatten, Linear, MaxPool2d, Relu, Residual, RmsNorm, Sequence, SwiGlu,
};
use paceline_model::{
    Batch, Block, CnnConfig, Context, Init, Layer, LayoutBuilder, LlamaConfig, LlamaTask,
    MeanSquaredError, MlpConfig, Model, OpenUnits, Precision, SpecialTokens, Storage,
};
use safetensors::{Dtype, SafeTensors};

/// A convolution: image, channels in and out, kernel, stride, padding.
pub fn conv(
    [height, width]: [usize; 2],
    [c_in, c_out]: [usize; 2],
    kernel: (usize, usize),
    stride: usize,
    padding: usize,
) -> conv2d::Conv2d {
    conv2d::Conv2d {
        kernel,
        stride,
        padding,
        ..conv2d::Conv2d::same3x3(height, width, c_in, c_out)
    }
}

/// A pool: image, channels, window, stride.
pub fn pool(
    [height, width]: [usize; 2],
    channels: usize,
    window: usize,
    stride: usize,
) -> pool2d::MaxPool2d {
    pool2d::MaxPool2d { height, width, channels, window, stride, layout: Default::default() }
}

/// Inputs (n, 9, 8, 2), outputs (n, 5).
pub fn cnn() -> Model {
    cnn_config([9, 8, 2], &[3, 4], 6, 5).build(2).unwrap()
}

/// The same network with batch normalization.
pub fn cnn_with_batch_norm() -> Model {
    CnnConfig { batch_norm: true, ..cnn_config([9, 8, 2], &[3, 4], 6, 5) }.build(2).unwrap()
}

/// A network for images of this size, without batch normalization.
pub fn cnn_config(
    image: [usize; 3],
    channels: &[usize],
    hidden: usize,
    num_classes: usize,
) -> CnnConfig {
    CnnConfig {
        image,
        channels: channels.to_vec(),
        hidden,
        num_classes,
        batch_norm: false,
        unused_head: false,
        layout: Default::default(),
        direct_convolutions: false,
    }
}

/// A network with inputs, hidden layers and outputs of these sizes, whose layers are not tied.
pub fn mlp_config([input_dim, hidden_dim, output_dim]: [usize; 3], num_layers: usize) -> MlpConfig {
    MlpConfig { input_dim, hidden_dim, output_dim, num_layers, tie_layers: false }
}

/// Two layers, in which two heads share each head of keys and values.
pub fn llama_config() -> LlamaConfig {
    LlamaConfig {
        vocab_size: 50,
        hidden_size: 16,
        intermediate_size: 24,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 4,
        max_position_embeddings: 32,
        rope_theta: 1e4,
        rope_scaling: None,
        rms_norm_eps: 1e-5,
        initializer_range: 0.02,
        tie_word_embeddings: false,
        task: LlamaTask::LanguageModel,
        special_tokens: SpecialTokens::default(),
    }
}

/// Inputs (n, 6), outputs (n, 3).
pub fn mlp() -> Model {
    mlp_config([6, 7, 3], 2).build(2).unwrap()
}

/// Every layer at least once, including a sequence within the sequence. Inputs (n, 9, 9, 2), outputs (n, 3).
pub fn every_layer() -> Model {
    let mut layout = LayoutBuilder::new();
    let mut unit = layout.unit("conv0");
    let conv0 = Conv2d::new(&mut unit, conv([9, 9], [2, 3], (3, 3), 1, 1)).unwrap();
    let conv0 =
        Sequence::new().then(conv0).then(Relu).then(MaxPool2d::new(pool([9, 9], 3, 3, 2)).unwrap());
    let mut blocks = vec![Block::new(unit.id, conv0)];
    let mut unit = layout.unit("conv1");
    let conv1 = ConvReluPool::new(&mut unit, conv([4, 4], [3, 4], (3, 3), 1, 1)).unwrap();
    blocks.push(Block::new(unit.id, conv1));
    let mut unit = layout.unit("fc0");
    let fc0 = Linear::new(&mut unit, 16, 5, Activation::Relu);
    blocks.push(Block::new(unit.id, Sequence::new().then(Flatten).then(Sequence::new().then(fc0))));
    let mut unit = layout.unit("feed_forward");
    let init = Init::Normal { std: 0.3 };
    let norm = RmsNorm::new(&mut unit, "norm", 5, 1e-5);
    let parts = [("gate", 16), ("up", 16)];
    let gate_up = Linear::projection(&mut unit, 5, &parts, init).unwrap();
    let down = Linear::projection(&mut unit, 16, &[("down", 5)], init).unwrap();
    let feed_forward = Sequence::new().then(norm).then(gate_up).then(SwiGlu).then(down);
    blocks.push(Block::new(unit.id, Residual(feed_forward)));
    let mut unit = layout.unit("fc1");
    blocks.push(Block::new(unit.id, Linear::new(&mut unit, 5, 3, Activation::None)));
    Model::new("every layer", blocks, MeanSquaredError, layout.finish(3))
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

pub fn integers(allocator: &Allocator, shape: &[usize], values: &[i64]) -> Tensor {
    let tensor = allocator.tensor(DType::I64, shape, Category::Data).unwrap();
    tensor.write::<i64>().unwrap().copy_from_slice(values);
    tensor
}

/// A tensor of f32 that is the same number everywhere.
pub fn filled(allocator: &Allocator, shape: &[usize], value: f32) -> Tensor {
    let tensor = allocator.tensor(DType::F32, shape, Category::Data).unwrap();
    tensor.write::<f32>().unwrap().fill(value);
    tensor
}

/// Parameters with the initial values of this seed.
pub fn initialized(
    model: &Model,
    precision: impl Into<Precision>,
    allocator: &Allocator,
    seed: u64,
) -> Storage {
    let storage = Storage::private(model.layout.clone(), precision, allocator).unwrap();
    storage.initialize(seed).unwrap();
    storage
}

/// The model with each block computed again in its backward pass.
pub fn checkpointed(mut model: Model) -> Model {
    model.blocks = model.blocks.drain(..).map(Block::checkpointed).collect();
    model
}

pub fn sums(allocator: &Allocator) -> Tensor {
    let sums = allocator.tensor(DType::F64, [3], Category::Workspace).unwrap();
    sums.fill_zero().unwrap();
    sums
}

/// What `run` gives in a training step, in which the roots are open.
pub fn in_training<T>(
    compute: &Compute,
    storage: &Storage,
    batch: &Batch,
    run: impl FnOnce(&mut Context) -> T,
) -> T {
    let (mut units, mut ready) = (OpenUnits::new(storage.layout()), |_| Ok(()));
    let cx = Context::training(compute, storage, &mut units, &mut ready);
    let mut cx = cx.with_batch(batch);
    cx.open_roots().unwrap();
    run(&mut cx)
}

/// Both passes of a training step over a batch. Returns the sums of the loss.
pub fn train(
    model: &Model,
    compute: &Compute,
    storage: &Storage,
    batch: &Batch,
    scale: f64,
) -> Vec<f64> {
    let sums = sums(&compute.allocator);
    in_training(compute, storage, batch, |cx| {
        let (output, saved) = model.network().forward(cx, batch.inputs().clone()).unwrap();
        let d_output = model.differentiate(cx, &output, scale, &sums, None).unwrap();
        drop(output);
        model.backward(cx, saved, d_output).unwrap();
        cx.close_roots().unwrap();
    });
    sums.to_host().unwrap().read::<f64>().unwrap().to_vec()
}

/// Shape and elements of a stored tensor, exactly.
pub fn stored(file: &[u8], name: &str) -> (Vec<usize>, Vec<f64>) {
    let file = SafeTensors::deserialize(file).unwrap();
    let tensor = file.tensor(name).unwrap_or_else(|_| panic!("{name} is not in the file"));
    let single = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().unwrap()).into();
    let double = |bytes: &[u8]| f64::from_le_bytes(bytes.try_into().unwrap());
    let elems = match tensor.dtype() {
        Dtype::F32 => tensor.data().chunks_exact(4).map(single).collect(),
        _ => tensor.data().chunks_exact(8).map(double).collect(),
    };
    (tensor.shape().to_vec(), elems)
}

/// Rounds to the type of the tensor.
pub fn write(to: &Tensor, values: &[f64]) {
    assert_eq!(to.num_elems(), values.len());
    match to.dtype() {
        DType::F64 => to.write::<f64>().unwrap().copy_from_slice(values),
        DType::BF16 => {
            let mut to = to.write::<bf16>().unwrap();
            to.iter_mut().zip(values).for_each(|(to, from)| *to = bf16::from_f64(*from));
        }
        _ => {
            let mut to = to.write::<f32>().unwrap();
            to.iter_mut().zip(values).for_each(|(to, from)| *to = *from as f32);
        }
    }
}

/// The elements of a tensor of f64 or f32.
pub fn values(tensor: &Tensor) -> Vec<f64> {
    match tensor.dtype() {
        DType::F64 => tensor.read::<f64>().unwrap().to_vec(),
        _ => tensor.read::<f32>().unwrap().iter().map(|x| f64::from(*x)).collect(),
    }
}
