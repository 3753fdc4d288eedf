//! The kernels of cards: for each source (`.cu`) the names and arguments of what is in it.
//!
//! Element-wise operations and optimizers compute in the processor's order and round as it does, so they have its bits. Each
//! other operation says how far it may be off. The sources are compiled when a card first needs them.

pub(crate) mod attention;
pub(crate) mod attention_halves;
pub(crate) mod batch_norm;
pub(crate) mod conv;
pub(crate) mod conv_relu_pool;
pub(crate) mod conv_wide;
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
    &attention_halves::ATTENTION_HALVES,
    &batch_norm::BATCH_NORM,
    &conv::CONV2D,
    &conv_relu_pool::CONV_RELU_POOL,
    &conv_wide::CONV2D_WIDE,
    &conv_wide::CONV_RELU_POOL_WIDE,
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
