//! The trait that every data set implements, including the user's own.
//!
//! Input: an epoch and an index. Output: one sample of named fields, written to the caller's memory. A data set knows
//! nothing of batches, ranks or the order in which it is read.

use crate::{Field, Sample};

/// Samples that can be read in any order, from any thread.
///
/// The crate's first page reads one in batches.
///
/// ```
/// use paceline_data::{Dataset, Field, OwnedSample, Sample};
///
/// /// Numbers from 0 to 1 and their squares.
/// struct Squares;
///
/// impl Dataset for Squares {
///     fn len(&self) -> usize {
///         100
///     }
///
///     fn fields(&self) -> Vec<Field> {
///         vec![Field::f32("inputs", [1]), Field::f32("targets", [1])]
///     }
///
///     fn read(&self, _epoch: u64, index: usize, sample: &mut Sample<'_>) {
///         let x = index as f32 / 100.0;
///         sample.f32("inputs")[0] = x;
///         sample.f32("targets")[0] = x * x;
///     }
/// }
///
/// let mut sample = OwnedSample::read(&Squares, 0, 50)?;
/// assert_eq!((sample.f32("inputs"), sample.f32("targets")), (vec![0.5], vec![0.25]));
/// # Ok::<(), paceline_data::DataError>(())
/// ```
pub trait Dataset: Send + Sync {
    /// The number of samples of an epoch.
    fn len(&self) -> usize;

    /// The fields of each sample. The first one is `inputs`, which the model takes. Most objectives compare its output with
    /// the field `targets`. All are tensors of the batch, under their names.
    fn fields(&self) -> Vec<Field>;

    /// Writes sample `index` of `epoch`: every element of every field, since the memory still holds an
    /// earlier batch. A data set that is the same in each epoch ignores `epoch`.
    ///
    /// `index` is below [`Dataset::len`]. The same epoch and index must always give the same sample, because each rank
    /// reads for itself. A panic ends the loader with an error.
    fn read(&self, epoch: u64, index: usize, sample: &mut Sample<'_>);

    /// The length of each sample, if a field is ragged and the lengths are known without reading. A sampler can then make
    /// batches of samples of like length.
    fn lengths(&self) -> Option<Vec<u32>> {
        None
    }

    /// A digest of what the samples are read from, for files, which may change between two
    /// runs and differ between two hosts. It does not depend on where the files lie. All ranks of a run, and of its
    /// continuation, must have the same. The default, `None`, fits samples that are computed.
    fn digest(&self) -> Option<String> {
        None
    }

    /// The names of the classes in their order, if they have names.
    fn class_names(&self) -> Vec<String> {
        Vec::new()
    }

    /// Whether there are no samples at all.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl dyn Dataset + '_ {
    /// The extents of an input: `[height, width, channels]` for images, `[dim]` for vectors.
    pub fn input_shape(&self) -> Vec<usize> {
        self.field(Field::INPUTS).map_or_else(Vec::new, |field| field.extents().to_vec())
    }

    /// The number of classes, if the targets are a class.
    pub fn num_classes(&self) -> Option<usize> {
        self.field(Field::TARGETS).and_then(|field| field.num_classes())
    }

    /// The field of this name.
    pub fn field(&self, name: &str) -> Option<Field> {
        self.fields().into_iter().find(|field| field.name() == name)
    }
}

/// A part of a data set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// The part to train on.
    Train,
    /// The part to evaluate on.
    Test,
}
