//! The layers, one file each.

mod attention;
mod batch_norm;
mod chain;
mod checkpointed;
mod conv2d;
mod conv_relu_pool;
mod convert_layout;
mod elementwise;
mod embedding;
mod flatten;
mod linear;
mod max_pool2d;
mod relu;
mod residual;
mod rms_norm;
mod sequence;
mod swiglu;
mod tensor_parallel;

use std::ops::Range;

use paceline_memory::{Shape, Tensor};

use crate::Result;

pub use attention::{Attention, Rotary};
pub use batch_norm::BatchNorm;
pub use chain::Chain;
pub use checkpointed::Checkpointed;
pub use conv_relu_pool::ConvReluPool;
pub use conv2d::Conv2d;
pub use convert_layout::ConvertLayout;
pub use elementwise::Elementwise;
pub use embedding::Embedding;
pub use flatten::Flatten;
pub use linear::Linear;
pub use max_pool2d::MaxPool2d;
pub use relu::Relu;
pub use residual::Residual;
pub use rms_norm::RmsNorm;
pub use sequence::Sequence;
pub use swiglu::SwiGlu;
pub(crate) use tensor_parallel::ColumnsOfPart;
pub use tensor_parallel::{Bias, TensorParallel};

/// Some rows of a tensor.
pub(crate) fn part_of(tensor: &Tensor, rows: &Range<usize>) -> Result<Tensor> {
    let mut dims = tensor.dims().to_vec();
    let columns: usize = dims[1..].iter().product();
    dims[0] = rows.len();
    let elems = tensor.slice(rows.start * columns..rows.end * columns)?;
    Ok(elems.view(Shape::from(&dims[..]))?)
}
