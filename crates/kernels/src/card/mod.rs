//! The kernels of cards: for each source (`.cu`) the names and arguments of what is in it. The sources describe the kernels.
//!
//! Element-wise operations and optimizers compute in the processor's order and round as it does, so they have its bits. Each
//! other operation says how far it may be off. The sources are compiled when a card first needs them.

pub(crate) mod attention;
pub(crate) mod batch_norm;
pub(crate) mod conv;
pub(crate) mod convolutions;
pub(crate) mod elementwise;
pub(crate) mod images;
pub(crate) mod linear_cross_entropy;
pub(crate) mod loss;
pub(crate) mod norm;
pub(crate) mod optimizer;
pub(crate) mod products;
pub(crate) mod rows;
pub(crate) mod top_k;

use paceline_cuda::kernel::NUMBERS;

/// The exponential function.
const EXP: &str = include_str!("exp.cuh");

/// Products on tensor cores.
const MMA: &str = include_str!("mma.cuh");

/// Sums over a block.
const REDUCE: &str = include_str!("reduce.cuh");

/// All sources, for tests that compile them.
pub static SOURCES: &[&paceline_cuda::KernelSource] = &[
    &attention::ATTENTION,
    &attention::ATTENTION_HALVES,
    &batch_norm::BATCH_NORM,
    &convolutions::CONV2D,
    &convolutions::CONV2D_WIDE,
    &convolutions::CONV_RELU_POOL,
    &convolutions::CONV_RELU_POOL_WIDE,
    &elementwise::ELEMENTWISE,
    &images::IMAGES,
    &linear_cross_entropy::LINEAR_CROSS_ENTROPY,
    &loss::LOSS,
    &norm::NORM,
    &optimizer::OPTIMIZER,
    &products::PRODUCTS,
    &rows::ROWS,
    &top_k::TOP_K,
];
