//! The tests of kernels on the processor, one program: each program is linked once more, with the whole crate.

mod attention;
mod attention_step;
mod batch_norm;
#[path = "../common/mod.rs"]
mod common;
mod fast_paths;
mod half_images;
mod half_language_model;
mod half_linear;
mod half_rows;
mod language_model;
mod layouts;
mod losses;
mod meta;
mod norm;
mod products;
mod rotary;
mod threads;
mod winograd;
