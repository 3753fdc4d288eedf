//! Texts: read from files, tokenized with the tokenizer of a model, kept as tokens.
//!
//! | file | what it does |
//! |---|---|
//! | `bytes.rs` | the tokenizer that the program carries: a token for each byte |
//! | `files.rs` | finds the files of a folder |
//! | `formats.rs` | the formats of files, one line each, and their readers |
//! | `rows.rs` | rows with a text and a class |
//! | `table.rs` | which columns of a table are read, and which rows are left out |
//! | `tokenizer.rs` | texts to tokens |
//! | `train.rs` | a tokenizer from texts, by the pairs of `merges.rs` |
//! | `cuts.rs` | where a text can be cut without other tokens |
//! | `guarded.rs` | calls of a library that may panic |
//! | `stream.rs` | tokens to text, one after the other |
//! | `cache.rs` | tokens in a file, so that texts are tokenized once |
//! | `dataset.rs` | tokens as samples |
//! | `source.rs` | all of it, from a folder to a data set |

mod bytes;
mod cache;
#[cfg(feature = "tokenizers")]
mod cuts;
mod dataset;
mod error;
mod files;
mod formats;
#[cfg(feature = "fuzzing")]
#[path = "../../../../fuzz/checks/text_rows.rs"]
pub(crate) mod fuzzing;
#[cfg(any(feature = "parquet", feature = "tokenizers"))]
mod guarded;
#[cfg(feature = "tokenizers")]
mod merges;
mod row;
mod rows;
mod source;
mod stream;
mod table;
#[cfg(feature = "tokenizers")]
mod tokenizer;
#[cfg(not(feature = "tokenizers"))]
#[path = "without_tokenizers.rs"]
mod tokenizer;
#[cfg(feature = "tokenizers")]
mod train;

pub use bytes::TokenizerSource;
pub use cache::TokenRows;
pub use dataset::{TokenBlocks, TokenDataset};
pub use error::TextError;
pub use files::TextFiles;
pub use formats::{FORMATS, TextFormat};
pub use rows::{TextRows, each_text};
pub use source::{TextReport, TextSettings, TextSource};
pub use stream::TextStream;
pub use table::TableSettings;
pub use tokenizer::{Progress, Tokenizer};
