//! Arithmetic on buffers.
//!
//! Input: [`Tensor`](paceline_memory::Tensor)s and the sizes of the problem. Output: results, written into
//! tensors of the caller. Every function states its formula, shapes and element types, and whether it
//! overwrites or accumulates. This crate knows nothing of layers, models or ranks.
//!
//! Every operation takes the [`Compute`] handle first and is launched through one door ([`Compute::launch`]). Tensors of another
//! device are refused. No operation returns a number that it has computed: sums stay in tensors until they are read.
//!
//! Activations may be stored in bf16 or f16 where an operation says so: it computes in f32, and rounds each result once, when it
//! stores it.
//!
//! Fast paths exist for f32, chosen at run time by [`SimdLevel`]. Each fast path has a plain implementation
//! in [`mod@reference`], which also computes in f64 for gradient checks.
//!
//! Layouts: images are NHWC (batch, height, width, channels) or NCHW, see [`ImageLayout`]; convolution weights are (kernel
//! height, kernel width, channels in, channels out); linear weights are (out, in).
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

pub mod attention;
pub mod batch_norm;

pub mod cast;
pub mod conv2d;
pub mod conv_relu_pool;
pub mod digest;
pub mod divided;
pub mod elementwise;
pub mod embedding;
pub mod function;
pub mod layout;
pub mod linear;
pub mod linear_cross_entropy;
pub mod loss;
pub mod matmul;
pub mod norm;
pub mod optimizer;
pub mod peak;
pub mod pool2d;
pub mod reference;
pub mod rms_norm;
pub mod rotary;
pub mod swiglu;
pub mod top_k;

mod activation;
#[cfg(target_arch = "x86_64")]
mod amx;
mod bf16_products;
mod card;
mod card_sources;
mod compute;
mod error;
mod exp;
mod lanes;
mod launch;
mod on_card;
mod operands;
mod product;
mod real;
mod rehearsal;
mod simd;
mod stored;
mod threads;
mod tiles;

pub use bf16_products::{Bf16Products, available as available_instructions, needed_for_same_bits};
pub use card_sources::CARD_SOURCES;
pub use compute::{Compute, Processor};
pub use error::KernelError;
pub use layout::ImageLayout;
pub use on_card::{CardNeeds, OnCard};
pub use operands::{Either, Operands, Read, Scratch, Write, read, scratch, update, write};
pub use paceline_numeric::{Instructions, SimdLevel};
pub use real::Real;
pub use rehearsal::Op;
pub use stored::Stored;
pub use threads::Threads;

/// The names that the macro [`dispatch`] uses.
#[doc(hidden)]
pub mod in_macro {
    pub use {
        core::primitive::{f32, f64, u8},
        half::{bf16, f16},
        paceline_memory::Element,
    };
}

/// The result of a kernel.
pub type Result<T> = std::result::Result<T, KernelError>;
