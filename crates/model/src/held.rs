//! Ranges of flat storage that are in the memory of this rank.

use std::ops::Range;
use std::sync::Arc;

use paceline_memory::{DType, Tensor};

use crate::{Layout, ModelError, Result, UnitId};

/// A flat tensor that holds some ranges of a layout, one after the other. A replica holds everything as one range; a
/// rank with a shard of each unit holds as many ranges as there are units.
#[derive(Clone, Debug)]
pub struct Held {
    /// In order, without overlap.
    ranges: Arc<[Range<usize>]>,
    tensor: Tensor,
}

impl Held {
    /// The elements `ranges` of a layout, which are in order and do not overlap, in a flat tensor.
    ///
    /// Errors if the tensor has another number of elements.
    pub fn new(ranges: Vec<Range<usize>>, tensor: Tensor) -> Result<Self> {
        let len: usize = ranges.iter().map(Range::len).sum();
        let tensor = tensor.view([len])?;
        Ok(Self { ranges: ranges.into(), tensor })
    }

    /// One unit, with its padding, at the beginning of a flat tensor. Errors if the tensor is shorter than the unit.
    pub fn of_unit(layout: &Layout, unit: UnitId, tensor: &Tensor) -> Result<Self> {
        let range = layout.unit(unit).range.clone();
        let tensor = tensor.slice(0..range.len())?;
        Self::new(vec![range], tensor)
    }

    /// Whether this is the first `len` elements as one range.
    pub(crate) fn is_first(&self, len: usize) -> bool {
        self.ranges.len() == 1 && self.ranges[0] == (0..len)
    }

    /// The ranges, in order.
    pub fn ranges(&self) -> &[Range<usize>] {
        &self.ranges
    }

    /// All ranges as one flat tensor, one range after the other.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.tensor.dtype()
    }

    /// Some elements of the layout. Errors if they do not lie within one of the ranges.
    pub fn slice(&self, range: Range<usize>) -> Result<Tensor> {
        for (own, begin) in self.placed() {
            if own.start <= range.start && range.end <= own.end {
                let start = begin + range.start - own.start;
                return Ok(self.tensor.slice(start..start + range.len())?);
            }
        }
        Err(ModelError::NotHeld { range })
    }

    /// The parts of `range` that are held, with their elements of the layout.
    pub fn within(&self, range: &Range<usize>) -> Result<Vec<(Range<usize>, Tensor)>> {
        let mut parts = Vec::new();
        for (own, begin) in self.placed() {
            let common = own.start.max(range.start)..own.end.min(range.end);
            if !common.is_empty() {
                let start = begin + common.start - own.start;
                parts.push((common.clone(), self.tensor.slice(start..start + common.len())?));
            }
        }
        Ok(parts)
    }

    /// Each range, with its first element in the tensor.
    fn placed(&self) -> impl Iterator<Item = (&Range<usize>, usize)> {
        self.ranges.iter().scan(0, |begin, range| {
            let own = *begin;
            *begin += range.len();
            Some((range, own))
        })
    }
}

#[cfg(test)]
mod tests {
    use paceline_memory::{Allocator, Category};

    use super::*;

    fn held() -> Held {
        let tensor = Allocator::new().tensor(DType::F32, [6], Category::Parameters).unwrap();
        tensor.write::<f32>().unwrap().copy_from_slice(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
        Held::new(vec![10..12, 20..24], tensor).unwrap()
    }

    fn values(tensor: &Tensor) -> Vec<f32> {
        tensor.read::<f32>().unwrap().to_vec()
    }

    #[test]
    fn elements_are_found_by_their_place_in_the_layout() {
        let held = held();
        assert_eq!(values(&held.slice(11..12).unwrap()), [1.0]);
        assert_eq!(values(&held.slice(21..24).unwrap()), [3.0, 4.0, 5.0]);
        for range in [9..11, 11..13, 12..14, 10..24, 23..25] {
            let error = held.slice(range.clone()).unwrap_err().to_string();
            let (start, end) = (range.start, range.end);
            assert_eq!(error, format!("this rank does not hold the elements {start} to {end}"));
        }
    }

    #[test]
    fn parts_of_a_range_come_with_their_places() {
        let parts = held().within(&(11..22)).unwrap();
        let parts: Vec<_> = parts.into_iter().map(|(at, part)| (at, values(&part))).collect();
        assert_eq!(parts, [(11..12, vec![1.0]), (20..22, vec![2.0, 3.0])]);
        assert!(held().within(&(12..20)).unwrap().is_empty());
    }

    #[test]
    fn ranges_fill_the_tensor() {
        let tensor = Allocator::new().tensor(DType::F32, [6], Category::Parameters).unwrap();
        Held::new(vec![0..4, 8..11], tensor).unwrap_err();
    }
}
