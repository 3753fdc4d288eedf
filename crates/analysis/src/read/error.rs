//! Why traces cannot be read. Every message names the file.

use std::fmt;
use std::io;
use std::path::PathBuf;

use paceline_files::Printable;

use crate::json::JsonError;

/// Why a trace, or the traces of a folder, cannot be read.
#[derive(thiserror::Error)]
pub enum ReadError {
    /// A folder has no traces.
    #[error(
        "No trace files found. (Looked in {} for files that end in .json or .json.gz and hold \"traceEvents\".)",
        place.printable()
    )]
    NoFiles {
        /// The folder that was searched.
        place: PathBuf,
    },
    /// Neither the file nor its path names the rank, and it is not the only one.
    #[error(
        "{} does not say which rank it is of: it has no \"distributedInfo\" with a \"rank\", and its path has \
         neither a folder rank_<n> nor a name that begins with worker_<n>. (only a trace that is alone needs neither)",
        path.printable()
    )]
    NoRank {
        /// The file.
        path: PathBuf,
    },
    /// The rank or world size in a file is impossible.
    #[error(
        "{} claims {claim}, which no run can have; correct its \"distributedInfo\", or leave the file out",
        path.printable()
    )]
    Absurd {
        /// The file.
        path: PathBuf,
        /// The impossible claim.
        claim: String,
    },
    /// A file has the traces of several ranks, and does not say which event is of which.
    #[error(
        "{} has the traces of several ranks, merged for viewers by paceline trace merge; pass the folder of the ranks' own \
         files, without this one",
        path.printable()
    )]
    Merged {
        /// The file.
        path: PathBuf,
    },
    /// Two files belong to the same rank in the same profiling window.
    #[error(
        "{} and {} are both of rank {rank}, in the same profiling window; give one of them",
        first.printable(),
        second.printable()
    )]
    TwoOfOneRank {
        /// The rank of both files.
        rank: usize,
        /// One of them.
        first: PathBuf,
        /// The other.
        second: PathBuf,
    },
    /// A folder has the traces of several runs.
    #[error(
        "there are traces of rank {rank} in {} and in {}, which look like two runs; name the folder of one",
        first.printable(),
        second.printable()
    )]
    SeveralRuns {
        /// The rank of both files.
        rank: usize,
        /// One folder.
        first: PathBuf,
        /// The other.
        second: PathBuf,
    },
    /// The file cannot be opened or read.
    #[error("{}: {source}", path.printable())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The file is empty.
    #[error("{} is empty", path.printable())]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// The file is named as compressed, but is neither a gzip file nor JSON.
    #[error("{} is named .gz, but is no gzip file, nor JSON: {source}", path.printable())]
    NotGzip {
        /// The file.
        path: PathBuf,
        /// Where and why it is not JSON.
        source: JsonError,
    },
    /// The compressed file ends early.
    #[error("{}: the gzip file is cut off, after {at} bytes of JSON", path.printable())]
    TruncatedGzip {
        /// The file.
        path: PathBuf,
        /// The number of bytes of JSON that could be read.
        at: u64,
    },
    /// The compressed file is damaged.
    #[error("{}: the gzip file is damaged, after {at} bytes of JSON: {source}", path.printable())]
    BadGzip {
        /// The file.
        path: PathBuf,
        /// The number of bytes of JSON that could be read.
        at: u64,
        /// The error of the decompressor.
        source: io::Error,
    },
    /// The file is not JSON.
    #[error("{}: {source}", path.printable())]
    Json {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: JsonError,
    },
}

impl fmt::Debug for ReadError {
    /// The message, because `main` and `unwrap` print this form.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
