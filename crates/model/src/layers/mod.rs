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
