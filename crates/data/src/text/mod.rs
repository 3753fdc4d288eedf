//! Texts: read from files, tokenized with the tokenizer of a model, kept as tokens.
//!
//! | file | what it does |
//! |---|---|
//! | `files.rs` | finds the files of a folder |
//! | `rows.rs` | rows with a text and a class, from `parquet.rs`, `csv.rs` and `jsonl.rs` |
//! | `tokenizer.rs` | texts to tokens |
//! | `stream.rs` | tokens to text, one after the other |
//! | `cache.rs` | tokens in a file, so that texts are tokenized once |
//! | `dataset.rs` | tokens as samples |
//! | `source.rs` | all of it, from a folder to a data set |

mod cache;
mod csv;
mod dataset;
mod error;
mod files;
mod jsonl;
mod parquet;
mod rows;
mod source;
mod stream;
mod tokenizer;

pub use cache::TokenRows;
pub use dataset::{TokenBlocks, TokenDataset};
pub use error::TextError;
pub use files::{TextFiles, TextFormat};
pub use rows::TextRows;
pub use source::{Report, TextSettings, TextSource};
pub use stream::TextStream;
pub use tokenizer::{Progress, Tokenizer};
