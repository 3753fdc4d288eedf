//! The tests of models on the processor, one program: each program is linked once more, with the whole crate.

mod backward_rules;
mod batch_norm;
mod checkpointing;
#[path = "../common/mod.rs"]
mod common;
mod corpus;
mod generate;
mod gradients;
mod halves;
mod layouts;
mod llama;
mod meta;
mod pretrained;
mod pytorch;
mod steady_state;
mod weight_files;
