//! Steps of small models on a card, which may be emulated: how many instructions they take, so that tests of training stay short.

mod common;

use common::{cnn_config, initialized, llama_config, mlp_config, train};
use paceline_cuda::Card;
use paceline_emulated_card::for_tests::{instructions, is_ready};
use paceline_kernels::Compute;
use paceline_memory::{Accelerator, Allocator, Category, DType};
use paceline_model::{Batch, LlamaConfig, Model};

/// The instructions of a training step on one batch, without the optimizer's; `None` on a real card.
fn instructions_of(
    model: &Model,
    inputs: (DType, &[usize]),
    targets: (DType, &[usize]),
) -> Option<u64> {
    let accelerator = Accelerator::cuda(Card::open(0).unwrap());
    let allocator = Allocator::on(&accelerator.stream("compute").unwrap());
    let compute = Compute::new(1, allocator.clone()).unwrap();
    let storage = initialized(model, DType::F32, &allocator, 1);
    let tensor = |(dtype, shape): (DType, &[usize])| {
        let tensor = allocator.tensor(dtype, shape, Category::Data).unwrap();
        match dtype {
            DType::I64 => tensor.overwrite::<i64, _>(|to| to.fill(3)).unwrap(),
            _ => tensor.overwrite::<f32, _>(|to| to.fill(0.5)).unwrap(),
        }
        tensor
    };
    let batch = Batch::new(tensor(inputs), tensor(targets));
    compute.synchronize().unwrap();
    let before = instructions()?;
    train(model, &compute, &storage, &batch, 0.25);
    compute.synchronize().unwrap();
    Some(instructions()? - before)
}

#[test]
fn steps_of_small_models_take_few_instructions() {
    if !is_ready() {
        return;
    }
    let cnn = cnn_config([8, 8, 3], &[4, 8], 16, 10);
    let mlp = mlp_config([16, 16, 4], 2);
    let llama = LlamaConfig {
        vocab_size: 64,
        hidden_size: 32,
        intermediate_size: 48,
        head_dim: 8,
        ..llama_config()
    };
    let (cnn, mlp, llama) = (cnn.build(1).unwrap(), mlp.build(1).unwrap(), llama.build(1).unwrap());
    // Attention in tiles leaves most lanes idle where heads are as narrow as these.
    for (name, model, inputs, targets, most) in [
        ("cnn", &cnn, (DType::F32, &[4, 8, 8, 3][..]), (DType::I64, &[4][..]), 2_000_000),
        ("mlp", &mlp, (DType::F32, &[4, 16]), (DType::F32, &[4, 4]), 2_000_000),
        ("llama", &llama, (DType::I64, &[1, 32]), (DType::I64, &[1, 32]), 7_000_000),
    ] {
        let Some(count) = instructions_of(model, inputs, targets) else { return };
        println!("{name}: {count} instructions of threads");
        assert!(count <= most, "{name}: {count} instructions, {most} at most");
    }
}
