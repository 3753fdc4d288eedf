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
//! | [`published`], `download.rs` | the files of a data set that is published elsewhere |
//!
//! Training only looks names up. Nothing but `paceline fetch` uses the network. Of the contents of the files, this crate knows only
//! the parts that an index of weights names.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

pub mod published;

#[cfg(feature = "network")]
mod blob;
#[cfg_attr(not(feature = "network"), allow(dead_code))]
mod cache;
#[cfg(feature = "network")]
mod download;
#[cfg(feature = "network")]
mod fetch;
#[cfg(not(feature = "network"))]
#[path = "without_network.rs"]
mod fetch;
mod lookup;
#[cfg_attr(not(feature = "network"), allow(dead_code))]
mod name;
#[cfg(feature = "network")]
mod remote;

pub use fetch::fetch;
pub use lookup::{Found, Wanted, find, model_at_main, tokens_folder};
