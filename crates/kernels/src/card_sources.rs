//! The sources of all kernels for cards.

use paceline_cuda::KernelSource;

use crate::{
    attention, batch_norm, card, elementwise, embedding, layout, linear_cross_entropy, loss, norm,
    optimizer, pool2d, rms_norm, swiglu, top_k,
};

/// All sources, for tests that compile them.
pub static CARD_SOURCES: &[&KernelSource] = &[
    &attention::card::CARD,
    &attention::card::CARD_HALVES,
    &batch_norm::CARD,
    &card::conv::CONV2D,
    &card::conv::CONV2D_WIDE,
    &card::conv::CONV_RELU_POOL,
    &card::conv::CONV_RELU_POOL_WIDE,
    &elementwise::CARD,
    &embedding::CARD,
    &layout::convert::CARD,
    &linear_cross_entropy::CARD,
    &loss::CARD,
    &norm::CARD,
    &optimizer::CARD,
    &pool2d::CARD,
    &card::products::CARD,
    &rms_norm::CARD,
    &swiglu::CARD,
    &top_k::CARD,
];
