//! The fields of a sample, and the tensors that a batch reads in them.
//!
//! Input: what a data set states about its samples. Output: names, element types and shapes. This module knows no values.

use paceline_memory::DType;

use crate::{DataError, Dataset};

/// A batch adds one extent, and a tensor has at most four.
const MAX_EXTENTS: usize = 3;

/// A named part of each sample: its element type and its extents.
///
/// The first extent of a *ragged* field varies from sample to sample. All ragged fields of a sample have the same
/// length, which [`Sample::set_length`](crate::Sample::set_length) states.
///
/// ```
/// use paceline_data::Field;
///
/// let image = Field::f32("inputs", [28, 28, 1]); // height, width, channels
/// assert_eq!(image.max_elems(), 784);
/// assert_eq!(Field::class(10).num_classes(), Some(10));
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Field {
    name: &'static str,
    extents: Vec<usize>,
    pub(crate) pad: Pad,
    is_ragged: bool,
    limit: Option<usize>,
}

/// The element type of a field, with the value that pads shorter samples.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Pad {
    F32(f32),
    I64(i64),
}

impl Field {
    /// The name of the field that a model takes.
    pub const INPUTS: &'static str = "inputs";
    /// The name of the field that most objectives compare the output with.
    pub const TARGETS: &'static str = "targets";
    /// The name of the tensor with the samples' lengths, which a batch has if a field is ragged.
    pub const LENGTHS: &'static str = "lengths";

    /// Real numbers: `[height, width, channels]` for images, `[dim]` for vectors, `[]` for one number. At most three
    /// extents, because a batch adds one.
    pub fn f32(name: &'static str, extents: impl Into<Vec<usize>>) -> Self {
        let extents = extents.into();
        Self { name, extents, pad: Pad::F32(0.0), is_ragged: false, limit: None }
    }

    /// Integers.
    pub fn i64(name: &'static str, extents: impl Into<Vec<usize>>) -> Self {
        let extents = extents.into();
        Self { name, extents, pad: Pad::I64(0), is_ragged: false, limit: None }
    }

    /// One of `num_classes` classes, counted from zero, as `targets`.
    pub fn class(num_classes: usize) -> Self {
        Self::i64(Self::TARGETS, []).below(num_classes)
    }

    /// From 1 to `max_length` integers. A batch pads them with `pad` to its longest sample.
    pub fn ragged_i64(name: &'static str, max_length: usize, pad: i64) -> Self {
        Self { pad: Pad::I64(pad), is_ragged: true, ..Self::i64(name, [max_length]) }
    }

    /// From 1 to `max_length` times `extents` real numbers. A batch pads them with `pad` to its longest sample.
    pub fn ragged_f32(name: &'static str, max_length: usize, extents: &[usize], pad: f32) -> Self {
        let extents = [&[max_length], extents].concat();
        Self { pad: Pad::F32(pad), is_ragged: true, ..Self::f32(name, extents) }
    }

    /// The same field, whose integers must be from 0 to `limit` - 1, which the loader checks. The padding may have any value.
    pub fn below(self, limit: usize) -> Self {
        Self { limit: Some(limit), ..self }
    }

    /// The name.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The extents of one sample. The first one of a ragged field is the largest length.
    pub fn extents(&self) -> &[usize] {
        &self.extents
    }

    /// f32 or i64.
    pub fn dtype(&self) -> DType {
        match self.pad {
            Pad::F32(_) => DType::F32,
            Pad::I64(_) => DType::I64,
        }
    }

    /// Whether the first extent varies from sample to sample.
    pub fn is_ragged(&self) -> bool {
        self.is_ragged
    }

    /// The number above all integers of the field, if stated: the number of classes, or of words.
    pub fn limit(&self) -> Option<usize> {
        self.limit
    }

    /// The number of classes, if the field is a class.
    pub fn num_classes(&self) -> Option<usize> {
        self.limit.filter(|_| self.extents.is_empty())
    }

    /// The most elements of a sample.
    pub fn max_elems(&self) -> usize {
        self.extents.iter().fold(1, |elems: usize, &extent| elems.saturating_mul(extent))
    }

    /// The elements for each unit of length, or of the whole sample if the field is not ragged.
    pub(crate) fn elems_per_length(&self) -> usize {
        let fixed = if self.is_ragged { &self.extents[1..] } else { &self.extents };
        fixed.iter().fold(1, |elems: usize, &extent| elems.saturating_mul(extent))
    }

    /// The most bytes of a sample.
    pub fn max_bytes(&self) -> usize {
        self.max_elems().saturating_mul(self.dtype().size_bytes())
    }

    /// The extents of `rows` samples whose longest one has this length.
    pub(crate) fn dims(&self, rows: usize, longest: usize) -> Vec<usize> {
        let mut dims = [&[rows], self.extents.as_slice()].concat();
        if self.is_ragged {
            dims[1] = longest;
        }
        dims
    }
}

/// The fields of a data set, and the tensors that a batch of its samples has.
#[derive(Clone, Debug, PartialEq)]
pub struct BatchShape {
    fields: Vec<Field>,
}

/// A tensor of a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorShape {
    /// The name.
    pub name: &'static str,
    /// The element type.
    pub dtype: DType,
    /// The extents; the first one is the number of samples.
    pub dims: Vec<usize>,
}

impl BatchShape {
    /// The batches of a data set.
    pub fn of(dataset: &dyn Dataset) -> Self {
        Self { fields: dataset.fields() }
    }

    /// The fields.
    pub fn fields(&self) -> &[Field] {
        &self.fields
    }

    /// The largest length of a sample, if a field is ragged.
    pub fn max_length(&self) -> Option<usize> {
        self.fields.iter().find(|field| field.is_ragged).map(|field| field.extents[0])
    }

    /// The tensors of a batch of `rows` samples whose longest one has the length `longest`: all fields in their
    /// order, then the lengths if a field is ragged.
    pub fn tensors(&self, rows: usize, longest: usize) -> Vec<TensorShape> {
        let tensor = |field: &Field| TensorShape {
            name: field.name,
            dtype: field.dtype(),
            dims: field.dims(rows, longest),
        };
        let lengths = TensorShape { name: Field::LENGTHS, dtype: DType::I64, dims: vec![rows] };
        let lengths = self.max_length().map(|_| lengths);
        self.fields.iter().map(tensor).chain(lengths).collect()
    }

    /// The tensors of a batch of `rows` samples of the largest length.
    pub fn largest(&self, rows: usize) -> Vec<TensorShape> {
        self.tensors(rows, self.max_length().unwrap_or(1))
    }

    /// The tensors of a batch without samples. Ragged fields have the length 1, so that no other extent is zero.
    pub fn empty(&self) -> Vec<TensorShape> {
        self.tensors(0, 1)
    }

    /// The most bytes of one sample in a batch.
    pub fn max_bytes(&self) -> usize {
        let lengths = self.max_length().map_or(0, |_| DType::I64.size_bytes());
        self.fields.iter().map(Field::max_bytes).fold(lengths, usize::saturating_add)
    }

    /// Fails unless batches can be made of these fields.
    pub fn check(&self) -> Result<(), DataError> {
        self.problem().map_or(Ok(()), |problem| Err(DataError::Fields { problem }))
    }

    fn problem(&self) -> Option<String> {
        if self.fields.first().map(Field::name) != Some(Field::INPUTS) {
            return Some(format!("the first field must be {}", Field::INPUTS));
        }
        let mut names = vec![Field::LENGTHS];
        for field in &self.fields {
            let Field { name, extents, .. } = field;
            if names.contains(name) {
                return Some(format!("the name {name} is taken; choose another one"));
            }
            names.push(name);
            if extents.len() > MAX_EXTENTS {
                let got = extents.len();
                return Some(format!(
                    "{name} has {got} extents; at most {MAX_EXTENTS} are possible"
                ));
            }
            if field.limit.is_some() && field.dtype() != DType::I64 {
                return Some(format!("{name} has a limit, which is for integers only"));
            }
            if field.is_ragged && Some(extents[0]) != self.max_length() {
                let first = self.max_length().unwrap_or_default();
                return Some(format!(
                    "{name} has lengths up to {}, and another field up to {first}; all ragged fields of a \
                     sample have the same length",
                    extents[0]
                ));
            }
            if field.is_ragged && extents[0] == 0 {
                return Some(format!("{name} has lengths up to 0; pass at least 1"));
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(fields: Vec<Field>) -> BatchShape {
        BatchShape { fields }
    }

    #[test]
    fn a_batch_has_the_fields_and_the_lengths() {
        let inputs = Field::ragged_f32("inputs", 9, &[2], 0.0);
        let shape = shape(vec![inputs, Field::class(3), Field::i64("ids", [4])]);
        let tensors = shape.tensors(5, 7);
        let dims: Vec<_> = tensors.iter().map(|t| (t.name, t.dims.as_slice())).collect();
        let expected: [(&str, &[usize]); 4] =
            [("inputs", &[5, 7, 2]), ("targets", &[5]), ("ids", &[5, 4]), ("lengths", &[5])];
        assert_eq!(dims, expected);
        assert_eq!(shape.largest(5)[0].dims, [5, 9, 2]);
        assert_eq!(shape.empty()[0].dims, [0, 1, 2]);
        assert_eq!(shape.max_bytes(), 9 * 2 * 4 + 8 + 4 * 8 + 8);
        shape.check().unwrap();
    }

    #[test]
    fn fields_that_make_no_batch_are_refused() {
        let problem = |fields| shape(fields).check().unwrap_err().to_string();
        let inputs = || Field::f32("inputs", [1]);
        for (fields, expected) in [
            (vec![], "the first field must be inputs"),
            (vec![Field::class(2), inputs()], "the first field must be inputs"),
            (vec![inputs(), inputs()], "the name inputs is taken"),
            (vec![inputs(), Field::i64("lengths", [])], "the name lengths is taken"),
            (vec![Field::f32("inputs", [1; 4])], "inputs has 4 extents; at most 3 are possible"),
            (vec![inputs().below(3)], "inputs has a limit, which is for integers only"),
            (vec![Field::ragged_i64("inputs", 0, 0)], "inputs has lengths up to 0"),
            (
                vec![Field::ragged_i64("inputs", 3, 0), Field::ragged_i64("targets", 4, 0)],
                "targets has lengths up to 4, and another field up to 3",
            ),
        ] {
            let problem = problem(fields);
            assert!(problem.contains(expected), "{problem}");
        }
    }
}
