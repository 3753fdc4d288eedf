//! What can go wrong with data: the files, the settings, and a data set of the user's own.

use std::io;
use std::path::PathBuf;

use paceline_memory::MemoryError;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// The data directory is missing, no directory, or not readable.
    #[error("cannot read the data directory {}: {source}", path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// The reason that the system gave.
        source: io::Error,
    },
    /// None of the names that a file may have exists.
    #[error("found no {} in {}; {hint}", names.join(" or "), paths(directories))]
    Missing {
        /// The names that were looked for.
        names: Vec<String>,
        /// Where they were looked for.
        directories: Vec<PathBuf>,
        /// Where the files come from.
        hint: &'static str,
    },
    /// A file is there but cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The reason that the system gave.
        source: io::Error,
    },
    /// A compressed file does not unpack.
    #[error("{}: broken gzip stream ({source}); fetch the file again", path.display())]
    Gzip {
        /// The file.
        path: PathBuf,
        /// What the decoder ran into.
        source: io::Error,
    },
    /// A file is of another kind than its name says.
    #[error(
        "{}: expected the magic number {expected:#010x}, found {found:#010x}; check that images and \
         labels were not swapped and that this is an IDX file at all",
        path.display()
    )]
    Magic {
        /// The file.
        path: PathBuf,
        /// What its first four bytes should say.
        expected: u32,
        /// What they say.
        found: u32,
    },
    /// The items in a file have another size than this data set's.
    #[error("{}: expected items of shape {expected:?}, found {found:?}", path.display())]
    ItemShape {
        /// The file.
        path: PathBuf,
        /// Extents of an item of this data set.
        expected: Vec<usize>,
        /// Extents that the file announces.
        found: Vec<usize>,
    },
    /// A file ends early.
    #[error(
        "{}: truncated: expected {expected} bytes (uncompressed), found {found}; fetch the file again",
        path.display()
    )]
    Truncated {
        /// The file.
        path: PathBuf,
        /// The size that its header announces, or that of the header itself.
        expected: u64,
        /// The size it has.
        found: u64,
    },
    /// A file goes on after its last item.
    #[error(
        "{}: has trailing bytes: it should end after {expected} bytes (uncompressed); fetch the file \
         again",
        path.display()
    )]
    TrailingBytes {
        /// The file.
        path: PathBuf,
        /// The size that its header announces.
        expected: u64,
    },
    /// A file of fixed-size records holds part of one, or none.
    #[error(
        "{}: {found} bytes are not a positive multiple of the {record_bytes} bytes of a record; fetch \
         the file again",
        path.display()
    )]
    RecordSize {
        /// The file.
        path: PathBuf,
        /// The size of a record.
        record_bytes: usize,
        /// The size of the file.
        found: usize,
    },
    /// Images and labels do not pair up.
    #[error(
        "{} has {num_images} images but {} has {num_labels} labels; take both files from one source",
        images.display(),
        labels.display()
    )]
    Counts {
        /// The file of images.
        images: PathBuf,
        /// How many it holds.
        num_images: usize,
        /// The file of labels.
        labels: PathBuf,
        /// How many it holds.
        num_labels: usize,
    },
    /// A label in a file names no class.
    #[error("{}: record {record} has the label {label}, above {largest}", path.display())]
    FileLabel {
        /// The file.
        path: PathBuf,
        /// Which record, counted from zero.
        record: usize,
        /// What it says.
        label: u8,
        /// The largest label of this data set.
        largest: u8,
    },
    /// A file is well-formed but holds nothing.
    #[error("{}: holds no samples", path.display())]
    NoSamples {
        /// The file.
        path: PathBuf,
    },
    /// A setting makes no sense.
    #[error("{setting} must be {needs}, got {got}")]
    Setting {
        /// What was set.
        setting: &'static str,
        /// What it has to be.
        needs: String,
        /// What it was.
        got: usize,
    },
    /// A data set of this size does not fit into memory.
    #[error("out of memory: a data set of {num_elems} elements does not fit")]
    TooLarge {
        /// Elements of all inputs together.
        num_elems: u128,
    },
    /// The user's data set gave a class that it did not announce.
    #[error("sample {index} of epoch {epoch} has the class {class}, not one of 0..{num_classes}")]
    Class {
        /// The epoch that was read.
        epoch: u64,
        /// The sample that was read.
        index: usize,
        /// What it gave.
        class: i64,
        /// How many it announced.
        num_classes: usize,
    },
    /// A data set panicked.
    #[error("the data set panicked when sample {index} of epoch {epoch} was read: {message}")]
    Panicked {
        /// The epoch that was read.
        epoch: u64,
        /// The sample that was read.
        index: usize,
        /// What the panic said.
        message: String,
    },
    /// The loader's thread could not be started.
    #[error("cannot start the loader thread: {0}")]
    Thread(#[source] io::Error),
    /// The loader's thread died outside of the data set's `read`.
    #[error("the loader thread panicked: {message}")]
    ThreadPanicked {
        /// What the panic said.
        message: String,
    },
    /// The batches do not fit into memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

impl DataError {
    /// Errors when a setting is zero.
    pub(crate) fn at_least_one(setting: &'static str, got: usize) -> Result<(), Self> {
        if got == 0 {
            return Err(Self::Setting { setting, needs: "at least 1".to_owned(), got });
        }
        Ok(())
    }
}

/// The paths in the form that error messages use.
fn paths(paths: &[PathBuf]) -> String {
    let shown: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
    shown.join(" or ")
}
