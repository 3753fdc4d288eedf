//! A rehearsal on the device without contents sees the same memory as a real step.

use crate::common::{
    self, checkpointed, cnn_config, in_training, initialized, llama_config, mlp_config, sums,
};
use paceline_kernels::linear::Activation;
use paceline_kernels::{Compute, ImageLayout};
use paceline_memory::{Allocator, Category, DType, PhaseUsage};
use paceline_model::layers::{Linear, Sequence};
use paceline_model::{
    Batch, Block, CnnConfig, Layer, LayoutBuilder, LlamaConfig, LlamaTask, MeanSquaredError,
    MlpConfig, Model, Precision, Rehearsal,
};

/// Activations in bf16, everything else in f32.
const BF16: Precision = Precision { compute: DType::BF16, grads: DType::F32, master: DType::F32 };

/// The targets of a model: classes, or values with this many columns.
#[derive(Clone, Copy)]
enum Targets {
    Classes,
    Values(usize),
}

/// Inputs (n, ...) and targets. Their contents are unspecified, which on the host means zero.
fn batch(allocator: &Allocator, n: usize, input: &[usize], targets: Targets) -> Batch {
    let shape = [&[n], input].concat();
    let inputs = allocator.tensor(DType::F32, shape.as_slice(), Category::Data).unwrap();
    let targets = match targets {
        Targets::Classes => allocator.tensor(DType::I64, [n], Category::Data).unwrap(),
        Targets::Values(dim) => allocator.tensor(DType::F32, [n, dim], Category::Data).unwrap(),
    };
    Batch::new(inputs, targets)
}

/// The phases of a step on the host, without the code of the rehearsal.
fn measured(
    model: &Model,
    precision: Precision,
    n: usize,
    input: &[usize],
    targets: Targets,
) -> [PhaseUsage; 2] {
    let compute = Compute::new(1, Allocator::new()).unwrap();
    let allocator = &compute.allocator;
    let storage = initialized(model, precision, allocator, 1);
    let sums = sums(allocator);
    let batch = batch(allocator, n, input, targets);
    allocator.begin_phase();
    in_training(&compute, &storage, &batch, |cx| {
        let (output, saved) = model.network().forward(cx, batch.inputs().clone()).unwrap();
        let d_output = model.differentiate(cx, &output, 1.0, &sums, None).unwrap();
        drop(output);
        let forward = allocator.end_phase("forward");
        model.backward(cx, saved, d_output).unwrap();
        [forward, allocator.end_phase("backward")]
    })
}

fn rehearsed(
    model: &Model,
    precision: Precision,
    n: usize,
    input: &[usize],
    targets: Targets,
) -> Rehearsal {
    let compute = Compute::new(1, Allocator::meta()).unwrap();
    let batch = batch(&compute.allocator, n, input, targets);
    Rehearsal::of(model, precision, &compute, &[batch], None, false).unwrap()
}

/// Everything is equal: each category and the memory taken from the system, now and at the peak.
fn check(model: &Model, input: &[usize], targets: Targets) {
    check_in(Precision::F32, model, input, targets);
}

fn check_in(precision: Precision, model: &Model, input: &[usize], targets: Targets) {
    for n in [1, 3, 17, 64] {
        let Rehearsal { forward, backward, .. } = rehearsed(model, precision, n, input, targets);
        let measured = measured(model, precision, n, input, targets);
        assert_eq!([forward, backward], measured, "{model:?}, {precision:?}, {n}");
        assert!(forward.of(Category::Activations).peak_bytes > 0);
    }
}

fn cnn(batch_norm: bool) -> CnnConfig {
    CnnConfig { batch_norm, ..cnn_config([12, 12, 3], &[8, 16], 32, 10) }
}

/// With and without batch normalization, in both layouts.
fn variants() -> impl Iterator<Item = (bool, ImageLayout)> {
    let both = |batch_norm| ImageLayout::ALL.map(|layout| (batch_norm, layout));
    [false, true].into_iter().flat_map(both)
}

#[test]
fn a_cnn_needs_what_the_rehearsal_says() {
    for precision in [Precision::F32, BF16] {
        for (batch_norm, layout) in variants() {
            let model = CnnConfig { layout, ..cnn(batch_norm) }.build(2).unwrap();
            check_in(precision, &model, &[12, 12, 3], Targets::Classes);
        }
        // A number of channels that fills no vector register, and an odd image.
        let odd = CnnConfig { image: [13, 11, 1], channels: vec![3, 5, 7], ..cnn(true) };
        check_in(precision, &odd.build(1).unwrap(), &[13, 11, 1], Targets::Classes);
    }
}

#[test]
fn an_mlp_needs_what_the_rehearsal_says_tied_or_not() {
    for tie_layers in [false, true] {
        let config = MlpConfig { tie_layers, ..mlp_config([20, 48, 5], 4) };
        for precision in [Precision::F32, BF16] {
            check_in(precision, &config.build(2).unwrap(), &[20], Targets::Values(5));
        }
    }
}

#[test]
fn every_layer_needs_what_the_rehearsal_says() {
    check(&common::every_layer(), &[9, 9, 2], Targets::Values(3));
}

#[test]
fn checkpointed_blocks_need_what_the_rehearsal_says() {
    let mut layout = LayoutBuilder::new();
    let mut blocks = Vec::new();
    for at in 0..4 {
        let mut unit = layout.unit(format!("block{at}"));
        let mut block = Sequence::new();
        for _ in 0..3 {
            block.push(Linear::new(&mut unit, 24, 24, Activation::Relu));
        }
        blocks.push(Block::new(unit.id, block).checkpointed());
    }
    let deep = Model::new("deep", blocks, MeanSquaredError, layout.finish(1));
    check(&deep, &[24], Targets::Values(24));
    let cnn = checkpointed(cnn(true).build(1).unwrap());
    check(&cnn, &[12, 12, 3], Targets::Classes);
}

#[test]
fn a_model_larger_than_any_memory_is_rehearsed() {
    let (input_dim, hidden_dim, output_dim) = (1 << 10, 1 << 20, 10);
    let config = mlp_config([input_dim, hidden_dim, output_dim], 2);
    let model = config.build(8).unwrap();
    assert!(model.layout.num_params() > 1_000_000_000_000);
    let needed = rehearsed(&model, Precision::F32, 1 << 16, &[1 << 10], Targets::Values(10));
    let params = 4 * model.layout.num_params() as u64;
    assert!(needed.forward.of(Category::Parameters).current_bytes >= params);
    // Each hidden layer keeps its output: 2^16 rows of 2^20 f32.
    assert!(needed.peak_bytes(Category::Activations) >= 2 << 38);
}

/// The elements of all weights of products: matrices, and the kernels of convolutions.
fn weights(model: &Model, belongs: impl Fn(&str) -> bool) -> u64 {
    let params = model.layout.params().iter().filter(|param| belongs(&param.name));
    let matrices = params.filter(|param| param.shape.dims().len() > 1);
    matrices.map(|param| param.shape.num_elems() as u64).sum()
}

#[test]
fn forward_products_are_counted() {
    // In an MLP each weight takes part in a multiply-add per sample. Checkpointed blocks are not counted twice.
    let config = mlp_config([20, 48, 5], 3);
    let mlp = config.build(1).unwrap();
    let once = 2 * 4 * weights(&mlp, |_| true);
    let flops =
        |mlp: &Model| rehearsed(mlp, Precision::F32, 4, &[20], Targets::Values(5)).forward_flops;
    assert_eq!([flops(&mlp), flops(&checkpointed(mlp))], [once; 2]);

    // In a CNN, each weight of a kernel meets every position: 12 x 12, and 6 x 6 after the first pooling.
    for (batch_norm, layout) in variants() {
        let cnn = CnnConfig { layout, ..cnn(batch_norm) }.build(1).unwrap();
        let kernels = 144 * 9 * 3 * 8 + 36 * 9 * 8 * 16;
        let rest = 3 * 3 * 16 * 32 + 32 * 10;
        let flops =
            rehearsed(&cnn, Precision::F32, 7, &[12, 12, 3], Targets::Classes).forward_flops;
        assert_eq!(flops, 2 * 7 * (kernels + rest));
    }
}

#[test]
fn backward_products_are_those_that_a_step_needs() {
    let flops = |model: &Model, dims: &[usize], targets: Targets| {
        let rehearsal = rehearsed(model, Precision::F32, 4, dims, targets);
        let bf16 = rehearsed(model, Precision::BF16, 4, dims, targets);
        assert_eq!(rehearsal.backward_flops, bf16.backward_flops);
        rehearsal.backward_flops
    };
    let config = mlp_config([20, 48, 5], 2);
    let mut mlp = config.build(1).unwrap();
    let [first, second, last] = [20 * 48, 48 * 48, 48 * 5].map(|weight| 2 * 4 * weight);
    let dims = [20];
    // Nobody needs the gradient of the model's input.
    let all = first + 2 * (second + last);
    assert_eq!(flops(&mlp, &dims, Targets::Values(5)), all);
    // A frozen layer hands on the gradient of its input, and has none of its weight. Nobody needs what the second layer
    // hands to the first, but the backward pass goes through all layers but the first.
    let names: Vec<String> = mlp.layout.units().iter().map(|unit| unit.name.clone()).collect();
    mlp.freeze(&names[..1]).unwrap();
    assert_eq!(flops(&mlp, &dims, Targets::Values(5)), all - first);
    mlp.freeze(&names[..2]).unwrap();
    assert_eq!(flops(&mlp, &dims, Targets::Values(5)), second + 2 * last);
    // Blocks that are computed again in their backward pass have the same products.
    let mlp = checkpointed(mlp);
    assert_eq!(flops(&mlp, &dims, Targets::Values(5)), second + 2 * last);

    for (batch_norm, layout) in variants() {
        let mut cnn = CnnConfig { layout, ..cnn(batch_norm) }.build(1).unwrap();
        let kernels = [144 * 9 * 3 * 8, 36 * 9 * 8 * 16].map(|pairs| 2 * 4 * pairs);
        let rest = 2 * 4 * (3 * 3 * 16 * 32 + 32 * 10);
        let dims = [12, 12, 3];
        let whole = kernels[0] + 2 * (kernels[1] + rest);
        assert_eq!(flops(&cnn, &dims, Targets::Classes), whole);
        cnn.freeze(&["conv0".to_owned()]).unwrap();
        assert_eq!(flops(&cnn, &dims, Targets::Classes), whole - kernels[0]);
    }
}

#[test]
fn forward_products_of_a_llama_are_those_of_its_weights_and_of_attention() {
    let (rows, seq) = (3, 10);
    let tokens = (rows * seq) as u64;
    // Two products of a head for each pair of positions that the causal mask leaves.
    let attention = 2 * 2 * (rows * 2 * 4 * 4 * (seq * (seq + 1) / 2)) as u64;
    for task in [LlamaTask::LanguageModel, LlamaTask::Classification { num_labels: 5 }] {
        let model = LlamaConfig { task, ..llama_config() }.build(1).unwrap();
        let compute = Compute::new(1, Allocator::meta()).unwrap();
        let ids =
            |dims: &[usize]| compute.allocator.tensor(DType::I64, dims, Category::Data).unwrap();
        let (targets, head): (&[usize], u64) = match task {
            LlamaTask::LanguageModel => (&[rows, seq], tokens),
            // Only the last token of a row reaches the head.
            LlamaTask::Classification { .. } => (&[rows], rows as u64),
        };
        let named =
            [("inputs", ids(&[rows, seq])), ("targets", ids(targets)), ("lengths", ids(&[rows]))];
        let has_lengths = matches!(task, LlamaTask::Classification { .. });
        let batch = named.into_iter().filter(|(name, _)| has_lengths || *name != "lengths");
        let batch = Batch::of(batch.collect());
        let rehearsal = Rehearsal::of(&model, Precision::F32, &compute, &[batch], None, false);
        let is_head = |name: &str| name.starts_with("lm_head") || name.starts_with("score");
        let blocks = weights(&model, |name| !is_head(name) && !name.contains("embed_tokens"));
        let expected = 2 * (tokens * blocks + head * weights(&model, is_head)) + attention;
        let Rehearsal { forward_flops, backward_flops, .. } = rehearsal.unwrap();
        assert_eq!((forward_flops, backward_flops), (expected, 2 * expected), "{task:?}");
    }
}

#[test]
fn a_rehearsal_on_the_host_is_refused() {
    let model = cnn(false).build(1).unwrap();
    let compute = Compute::new(1, Allocator::new()).unwrap();
    let batch = batch(&compute.allocator, 1, &[12, 12, 3], Targets::Classes);
    let error = Rehearsal::of(&model, Precision::F32, &compute, &[batch], None, false);
    let text = error.unwrap_err().to_string();
    assert!(text.contains("a rehearsal needs the device meta, not cpu"), "{text}");
}
