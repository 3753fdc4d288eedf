//! What activation checkpointing saves: the peak of activations follows the stated formula.

use crate::common::{checkpointed, filled, initialized, train};
use paceline_kernels::Compute;
use paceline_kernels::linear::Activation;
use paceline_memory::{Allocator, Category, DType};
use paceline_model::layers::{Linear, Sequence};
use paceline_model::{Batch, Block, LayoutBuilder, MeanSquaredError, Model};

const ROWS: usize = 8;
const WIDTH: usize = 32;
/// Elements of the output of a layer.
const OUTPUT: usize = ROWS * WIDTH;

/// Blocks of equal layers.
fn model(num_blocks: usize, layers_per_block: usize) -> Model {
    let mut layout = LayoutBuilder::new();
    let mut blocks = Vec::new();
    for at in 0..num_blocks {
        let mut unit = layout.unit(format!("block{at}"));
        let mut block = Sequence::new();
        for _ in 0..layers_per_block {
            block.push(Linear::new(&mut unit, WIDTH, WIDTH, Activation::None));
        }
        blocks.push(Block::new(unit.id, block));
    }
    Model::new("deep", blocks, MeanSquaredError, layout.finish(1))
}

/// The peak of activations of one step, in elements.
fn peak(model: &Model) -> usize {
    let compute = Compute::new(1, Allocator::new()).unwrap();
    let allocator = &compute.allocator;
    let storage = initialized(model, DType::F32, allocator, 1);
    let [inputs, targets] = [(); 2].map(|()| filled(allocator, &[ROWS, WIDTH], 0.5));
    train(model, &compute, &storage, &Batch::new(inputs, targets), 1.0);
    allocator.usage(Category::Activations).peak_bytes as usize / size_of::<f32>()
}

#[test]
fn the_peak_of_activations_falls_to_the_inputs_of_all_blocks_and_the_layers_of_one() {
    for (num_blocks, layers_per_block) in [(6, 4), (3, 8), (10, 2)] {
        let plain = model(num_blocks, layers_per_block);
        // Without checkpointing, the inputs of all layers are kept. The first is the batch's own. The gradients of
        // the last layer's output and input come on top.
        let layers = num_blocks * layers_per_block;
        assert_eq!(peak(&plain), (layers - 1 + 2) * OUTPUT, "{num_blocks} x {layers_per_block}");
        let checkpointed = checkpointed(plain);
        // The inputs of all blocks are kept. The first is the batch's own. Then the last block is computed again:
        // the inputs of its other layers, beside the same two gradients.
        let kept = num_blocks - 1;
        let expected = (kept + layers_per_block - 1 + 2) * OUTPUT;
        assert_eq!(peak(&checkpointed), expected, "{num_blocks} x {layers_per_block}");
    }
}
