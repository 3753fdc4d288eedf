//! The parts that kernels of cards share: functions that sources begin with, products, and convolutions.
//!
//! The template of an operation's kernels stands beside the operation (`.cu`). It is their one statement: the name in a launch
//! selects the template, and the arguments are compared with its parameters. In templates, `S` is any type of stored numbers, `R`
//! one that kernels compute in (f32 or f64), and `H` one of 16 bits.
//!
//! Element-wise operations and optimizers compute in the processor's order and round as it does, so they have its bits. Each
//! other operation says how far it may be off. A kernel is compiled when a card first needs it.

pub(crate) mod conv;
pub(crate) mod products;

pub(crate) use paceline_cuda::kernel::NUMBERS;

/// The exponential function.
pub(crate) const EXP: &str = include_str!("exp.cuh");

/// Products on tensor cores.
pub(crate) const MMA: &str = include_str!("mma.cuh");

/// Sums over a block.
pub(crate) const REDUCE: &str = include_str!("reduce.cuh");
