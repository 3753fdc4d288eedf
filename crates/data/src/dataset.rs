//! The trait that every data set implements, including the user's own.
//!
//! Input: an epoch and an index. Output: one sample, written to memory of the caller. A data set knows
//! nothing of batches, ranks or the order in which it is read.

/// Samples that can be read in any order, from any thread.
///
/// The crate's first page shows how to write one.
pub trait Dataset: Send + Sync {
    /// The number of samples of an epoch.
    fn len(&self) -> usize;

    /// The extents of one input: `[height, width, channels]` for images, `[dim]` for vectors. At most three,
    /// because a batch adds one in front.
    fn input_shape(&self) -> &[usize];

    /// The kind of target of each sample.
    fn target(&self) -> TargetSpec;

    /// Writes sample `index` of `epoch`. Must write every element, since the memory still holds an earlier
    /// batch. A data set that is the same in each epoch ignores `epoch`.
    ///
    /// `index` is below [`Dataset::len`]. `input` has as many elements as [`Dataset::input_shape`],
    /// row-major. `target` is of the kind that [`Dataset::target`] returns. The same epoch and index must
    /// always give the same sample, because each rank reads for itself. A panic ends the loader with an
    /// error.
    fn read(&self, epoch: u64, index: usize, input: &mut [f32], target: TargetMut<'_>);

    /// Whether there are no samples at all.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The kind of target of a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TargetSpec {
    /// One of `num_classes` classes, counted from zero.
    Class {
        /// The number of classes.
        num_classes: usize,
    },
    /// `dim` real numbers.
    Values {
        /// The number of values.
        dim: usize,
    },
}

/// The memory to which the target of one sample is written.
#[derive(Debug)]
pub enum TargetMut<'a> {
    /// The class.
    Class(&'a mut i64),
    /// The values.
    Values(&'a mut [f32]),
}

impl<'a> TargetMut<'a> {
    /// Writes the class. Panics if the target is values, that is, if [`Dataset::target`] returned a different
    /// kind.
    pub fn set_class(self, class: i64) {
        match self {
            TargetMut::Class(target) => *target = class,
            TargetMut::Values(_) => panic!("a class was written to a target of values"),
        }
    }

    /// The memory for the values. Panics if the target is a class, that is, if [`Dataset::target`] returned
    /// a different kind.
    pub fn values(self) -> &'a mut [f32] {
        match self {
            TargetMut::Values(target) => target,
            TargetMut::Class(_) => panic!("values were written to a target that is a class"),
        }
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
