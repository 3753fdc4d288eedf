//! Models and data sets of the Hugging Face Hub, by name: the cache on this machine, and fetching into it.
//!
//! | file | knowledge |
//! |---|---|
//! | `name.rs` | names, aliases and revisions |
//! | `cache.rs` | how the cache of `huggingface_hub` and `transformers` is laid out, and where it is |
//! | `lookup.rs` | which folder a flag means by a name |
//! | `remote.rs` | the Hub's addresses and answers |
//! | `blob.rs` | how one file comes into the cache, complete and with its digest |
//! | `fetch.rs` | which files are needed, and what to do without a network |
//! | [`download`] | the files of a data set that is published elsewhere |
//!
//! Training only looks names up. Nothing but `paceline fetch` uses the network. Of the contents of the files, this crate knows only
//! the parts that an index of weights names.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

pub mod download;

mod blob;
mod cache;
mod fetch;
mod lookup;
mod name;
mod remote;

pub use fetch::fetch;
pub use lookup::{Found, Wanted, find, model_at_main, tokens_folder};
