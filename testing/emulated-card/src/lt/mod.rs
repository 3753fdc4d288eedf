//! The functions of cuBLASLt (`libcublasLt.so.13`) that paceline uses.
//!
//! Input: descriptors and addresses, as cublasLt.h has them. Output: a product that runs as work of a stream. TF32
//! rounds its operands as tensor cores do, so that a product that should be f32 and is not is seen. What the
//! library would refuse, or would answer with other numbers, is refused with its codes. This module knows nothing of
//! PTX.

mod api;
mod objects;
mod product;
