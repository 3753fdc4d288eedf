//! The trait that every data set implements, ours and the user's own.
//!
//! In goes an epoch and an index; out comes one sample, written where the caller wants it. A data
//! set knows nothing of batches, ranks or the order in which it is read.

/// Samples that can be read in any order, from any thread.
///
/// The crate's first page shows how to write one.
pub trait Dataset: Send + Sync {
    /// The number of samples of an epoch.
    fn len(&self) -> usize;

    /// Extents of one input: `[height, width, channels]` for images, `[dim]` for vectors; at most
    /// three, because a batch adds one in front.
    fn input_shape(&self) -> &[usize];

    /// What one target is.
    fn target(&self) -> TargetSpec;

    /// Writes every element of sample `index` of `epoch`; the memory still holds an earlier batch. A data
    /// set that is the same in each epoch ignores `epoch`.
    ///
    /// `index` is below [`Dataset::len`], `input` has as many elements as [`Dataset::input_shape`],
    /// row-major, and `target` is of the kind that [`Dataset::target`] announced. The same epoch and
    /// index must always give the same sample, because each rank reads for itself. A panic ends the loader
    /// with an error.
    fn read(&self, epoch: u64, index: usize, input: &mut [f32], target: TargetMut<'_>);

    /// Whether there are no samples at all.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// What the target of one sample is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TargetSpec {
    /// One of `num_classes` classes, counted from zero.
    Class {
        /// How many there are.
        num_classes: usize,
    },
    /// `dim` real numbers.
    Values {
        /// How many there are.
        dim: usize,
    },
}

/// Where the target of one sample is to be written.
#[derive(Debug)]
pub enum TargetMut<'a> {
    /// The class.
    Class(&'a mut i64),
    /// The values.
    Values(&'a mut [f32]),
}

impl<'a> TargetMut<'a> {
    /// Writes the class. Panics on a target of values: the data set announced another kind than it
    /// writes.
    pub fn set_class(self, class: i64) {
        match self {
            TargetMut::Class(target) => *target = class,
            TargetMut::Values(_) => panic!("a class was written to a target of values"),
        }
    }

    /// The values to be written. Panics on a class, as [`TargetMut::set_class`] does on values.
    pub fn values(self) -> &'a mut [f32] {
        match self {
            TargetMut::Values(target) => target,
            TargetMut::Class(_) => panic!("values were written to a target that is a class"),
        }
    }
}

/// Which part of a data set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// The part to train on.
    Train,
    /// The part to evaluate on.
    Test,
}
