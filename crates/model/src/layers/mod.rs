//! The layers, one file each.

mod batch_norm;
mod chain;
mod checkpointed;
mod conv2d;
mod conv_relu_pool;
mod flatten;
mod linear;
mod max_pool2d;
mod relu;
mod sequence;

pub use batch_norm::BatchNorm;
pub use chain::Chain;
pub use checkpointed::Checkpointed;
pub use conv_relu_pool::ConvReluPool;
pub use conv2d::Conv2d;
pub use flatten::Flatten;
pub use linear::Linear;
pub use max_pool2d::MaxPool2d;
pub use relu::Relu;
pub use sequence::Sequence;
