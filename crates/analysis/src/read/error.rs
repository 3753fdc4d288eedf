//! Why traces cannot be read; every message names the file.

use std::io;
use std::path::PathBuf;

use crate::json::JsonError;

/// Why a trace, or the traces of a folder, cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// A folder without traces.
    #[error(
        "No trace files found. (Looked in {} for files that end in .pt.trace.json or .pt.trace.json.gz.)",
        place.display()
    )]
    NoFiles {
        /// Where they were looked for.
        place: PathBuf,
    },
    /// Nothing says whose trace it is.
    #[error(
        "{} does not say which rank it is of: it has no \"distributedInfo\" with a \"rank\", and its path has \
         neither a folder rank_<n> nor a name that begins with worker_<n>.",
        path.display()
    )]
    NoRank {
        /// The file.
        path: PathBuf,
    },
    /// The rank or world size in a file is impossible.
    #[error(
        "{} claims {claim}, which no run can have; correct its \"distributedInfo\", or leave the file out",
        path.display()
    )]
    Absurd {
        /// The file.
        path: PathBuf,
        /// What it claims.
        claim: String,
    },
    /// Two files that would be the same rank in the same profiling window.
    #[error(
        "{} and {} are both of rank {rank}, in the same profiling window; give one of them",
        first.display(),
        second.display()
    )]
    TwoOfOneRank {
        /// Whose files they are.
        rank: usize,
        /// One of them.
        first: PathBuf,
        /// The other.
        second: PathBuf,
    },
    /// A folder that holds several runs.
    #[error(
        "there are traces of rank {rank} in {} and in {}, which look like two runs; name the folder of one",
        first.display(),
        second.display()
    )]
    SeveralRuns {
        /// Whose files they are.
        rank: usize,
        /// One folder.
        first: PathBuf,
        /// The other.
        second: PathBuf,
    },
    /// The file cannot be opened or read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// There is nothing in the file.
    #[error("{} is empty", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// The file is neither compressed, as its name says, nor JSON.
    #[error("{} is named .gz, but is no gzip file, nor JSON: {source}", path.display())]
    NotGzip {
        /// The file.
        path: PathBuf,
        /// Where and why it is no JSON.
        source: JsonError,
    },
    /// The compressed file ends early.
    #[error("{}: the gzip file is cut off, after {at} bytes of JSON", path.display())]
    TruncatedGzip {
        /// The file.
        path: PathBuf,
        /// How far the JSON could be read.
        at: u64,
    },
    /// The compressed file is damaged.
    #[error("{}: the gzip file is damaged, after {at} bytes of JSON: {source}", path.display())]
    BadGzip {
        /// The file.
        path: PathBuf,
        /// How far the JSON could be read.
        at: u64,
        /// What the decompressor says.
        source: io::Error,
    },
    /// The file is no JSON.
    #[error("{}: {source}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: JsonError,
    },
}
