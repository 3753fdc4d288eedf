//! The functions of cuBLASLt (`libcublasLt.so.13`) that paceline uses.
//!
//! Input: descriptors and addresses, as cublasLt.h has them. Output: a product that runs as work of a stream. TF32
//! rounds its operands as tensor cores do, which shows in a product that should be f32. What the library would
//! refuse, or would answer with other numbers, is refused with its codes. This module knows nothing of PTX.

mod api;
mod objects;
mod product;
