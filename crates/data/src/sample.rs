//! One sample, as a data set writes it.
//!
//! Input: the memory of a batch or of one sample, and a row of it. Output: slices of values, by field name.
//! This module knows no files and no order of samples.

use std::fmt;
use std::ops::{DerefMut, Range};

use crate::field::Pad;
use crate::{BatchShape, DataError, Dataset, Field};

/// The memory to which a data set writes one sample.
///
/// Its methods panic if a field does not exist, has another type, or is ragged and has no length yet. The loader turns a
/// panic into an error that names the sample.
#[derive(Debug)]
pub struct Sample<'a> {
    columns: &'a mut [FieldMemory],
    row: usize,
    length: Option<usize>,
}

impl<'a> Sample<'a> {
    /// Row `row` of the fields' memory.
    pub(crate) fn new(columns: &'a mut [FieldMemory], row: usize) -> Self {
        Self { columns, row, length: None }
    }

    /// States the length of the ragged fields. Must be called once, before any of them is written.
    pub fn set_length(&mut self, length: usize) {
        let ragged = self.columns.iter().find(|column| column.field.is_ragged());
        let Some(max) = ragged.map(|column| column.field.extents()[0]) else {
            panic!("a length was set, and no field is ragged");
        };
        assert!((1..=max).contains(&length), "the length {length} is not from 1 to {max}");
        self.length = Some(length);
    }

    /// The memory of a field of real numbers, row-major. Every element must be written over that of an earlier batch.
    pub fn f32(&mut self, name: &str) -> &mut [f32] {
        match self.memory(name) {
            (Values::F32(values), range) => &mut values[range],
            (Values::I64(_), _) => panic!("the field {name} has integers, not real numbers"),
        }
    }

    /// The memory of a field of integers, like [`Sample::f32`].
    pub fn i64(&mut self, name: &str) -> &mut [i64] {
        match self.memory(name) {
            (Values::I64(values), range) => &mut values[range],
            (Values::F32(_), _) => panic!("the field {name} has real numbers, not integers"),
        }
    }

    /// Writes the class of a sample whose `targets` are a class.
    pub fn set_class(&mut self, class: i64) {
        self.i64(Field::TARGETS)[0] = class;
    }

    /// The length that was stated.
    pub(crate) fn length(&self) -> Option<usize> {
        self.length
    }

    /// The values of a field, and where this sample lies in them.
    fn memory(&mut self, name: &str) -> (&mut Values, Range<usize>) {
        let column = self.columns.iter_mut().find(|column| column.field.name() == name);
        let column = column.unwrap_or_else(|| panic!("the data set has no field {name}"));
        let start = self.row * column.field.max_elems();
        let end = start + column.len(self.length);
        (&mut column.values, start..end)
    }
}

/// The memory of one field, for all samples of a batch.
pub(crate) struct FieldMemory {
    pub(crate) field: Field,
    /// A row has room for a sample of the largest length.
    pub(crate) values: Values,
}

/// Guards of a batch's tensors, or vectors.
pub(crate) enum Values {
    F32(Box<dyn DerefMut<Target = [f32]>>),
    I64(Box<dyn DerefMut<Target = [i64]>>),
}

impl fmt::Debug for FieldMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("FieldMemory").field(&self.field).finish()
    }
}

impl FieldMemory {
    /// The elements of a sample.
    fn len(&self, length: Option<usize>) -> usize {
        if !self.field.is_ragged() {
            return self.field.max_elems();
        }
        let name = self.field.name();
        let length = length.unwrap_or_else(|| panic!("{name} is ragged: call set_length first"));
        length * self.field.elems_per_length()
    }

    /// Checks the integers of a sample, here rather than in a kernel, so that the error can name the sample.
    pub(crate) fn check(
        &self,
        row: usize,
        length: Option<usize>,
        (epoch, index): (u64, usize),
    ) -> Result<(), DataError> {
        let (Values::I64(values), Some(limit)) = (&self.values, self.field.limit()) else {
            return Ok(());
        };
        let values = &values[row * self.field.max_elems()..][..self.len(length)];
        let is_outside = |value: &&i64| usize::try_from(**value).map_or(true, |v| v >= limit);
        let Some(value) = values.iter().find(is_outside) else { return Ok(()) };
        let problem = if self.field.num_classes().is_some() {
            format!("the class {value}, not one of 0..{limit}")
        } else {
            format!("{value} in {}, which is not from 0 to {limit} - 1", self.field.name())
        };
        Err(DataError::OutOfRange { epoch, index, problem })
    }

    /// Moves the samples of a ragged field together, so that a row has the length `longest`, and pads the shorter ones.
    pub(crate) fn pad(&mut self, lengths: &[i64], longest: usize) {
        if !self.field.is_ragged() {
            return;
        }
        let (from, per_length) = (self.field.max_elems(), self.field.elems_per_length());
        let layout = (from, longest * per_length, per_length);
        match (&mut self.values, self.field.pad) {
            (Values::F32(values), Pad::F32(pad)) => pack(values, lengths, layout, pad),
            (Values::I64(values), Pad::I64(pad)) => pack(values, lengths, layout, pad),
            _ => unreachable!("a column has the type of its field"),
        }
    }
}

/// Moves rows that begin every `from` elements to every `to` elements, at most as many, and pads them.
fn pack<T: Copy>(
    values: &mut [T],
    lengths: &[i64],
    (from, to, per_length): (usize, usize, usize),
    pad: T,
) {
    for (row, &length) in lengths.iter().enumerate() {
        let len = length as usize * per_length;
        // A row moves towards the front, so it overwrites no row that has not moved yet.
        values.copy_within(row * from..row * from + len, row * to);
        values[row * to + len..(row + 1) * to].fill(pad);
    }
}

/// One sample in memory of its own, to look at a data set without a loader.
#[derive(Debug)]
pub struct OwnedSample {
    columns: Vec<FieldMemory>,
    length: Option<usize>,
}

impl OwnedSample {
    /// Reads a sample. Panics if the data set does.
    pub fn read(dataset: &dyn Dataset, epoch: u64, index: usize) -> Result<Self, DataError> {
        let shape = BatchShape::of(dataset);
        shape.check()?;
        let column = |field: &Field| {
            let values = match field.pad {
                Pad::F32(_) => Values::F32(Box::new(vec![f32::NAN; field.max_elems()])),
                Pad::I64(_) => Values::I64(Box::new(vec![i64::MIN; field.max_elems()])),
            };
            FieldMemory { field: field.clone(), values }
        };
        let mut columns: Vec<FieldMemory> = shape.fields().iter().map(column).collect();
        let mut sample = Sample::new(&mut columns, 0);
        dataset.read(epoch, index, &mut sample);
        let length = sample.length();
        Ok(Self { columns, length })
    }

    /// The values of a field of real numbers. Panics like [`Sample::f32`].
    pub fn f32(&mut self, name: &str) -> Vec<f32> {
        self.sample().f32(name).to_vec()
    }

    /// The values of a field of integers. Panics like [`Sample::f32`].
    pub fn i64(&mut self, name: &str) -> Vec<i64> {
        self.sample().i64(name).to_vec()
    }

    /// The length of the ragged fields, if there are any.
    pub fn length(&self) -> Option<usize> {
        self.length
    }

    fn sample(&mut self) -> Sample<'_> {
        Sample { columns: &mut self.columns, row: 0, length: self.length }
    }
}
