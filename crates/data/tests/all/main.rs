//! The tests of data sets and tokenizers, one program: each program is linked once more, with the whole crate.

mod cifar10;
mod common;
mod corpus;
mod loader;
mod mnist;
mod own_files;
mod own_text;
mod parquet_codecs;
mod sampler;
mod text;
mod text_limits;
mod tokenizer;
mod tokens;
