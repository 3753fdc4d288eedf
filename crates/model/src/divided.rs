//! Layers in equal parts, of which each of several ranks has some: tensor parallelism.
//!
//! A divided parameter is as many parameters as there are parts, with one name and one shape of the whole. A rank holds its own, as the
//! stage of a pipeline holds those of its blocks; the others are elsewhere. Initial values, norms, checkpoints, weight files and digests follow
//! from the place of a part in the whole.

use std::borrow::Cow;
use std::ops::Range;

use paceline_memory::Shape;

use crate::{Layout, ModelError, Param, ParamId, Result};

/// The part of a parameter that one of several ranks computes with, in tensor parallelism.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParamPart {
    /// Its place among the parts.
    pub index: usize,
    /// The number of parts, which are equal.
    pub count: usize,
    /// The dimension that is divided: 0 or 1.
    pub dim: usize,
}

/// How layers are divided in tensor parallelism, and the parts of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Divided {
    /// The number of equal parts into which layers are divided. One if they are not.
    pub parts: usize,
    /// The rank among those that divide the layers.
    pub rank: usize,
    /// The number of these ranks. Each has as many parts, one after the other.
    pub ranks: usize,
    /// Whether the rows between divided layers are divided too (sequence parallelism).
    pub by_rows: bool,
    /// Whether a backward pass exchanges its input and its gradient while it computes: it takes the input half first.
    pub overlaps: bool,
}

impl Divided {
    /// Layers as they are.
    pub const NOT: Self = Self { parts: 1, rank: 0, ranks: 1, by_rows: false, overlaps: false };

    /// The parts of this rank.
    pub fn own(&self) -> Range<usize> {
        let count = self.parts / self.ranks;
        self.rank * count..(self.rank + 1) * count
    }

    /// The rows of this rank, of `rows`, where they are divided, in runs: a run for each part. Runs of the last parts may be shorter, or
    /// empty. All parts have a run on each rank if rows are not divided.
    pub fn runs(&self, rows: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let len = rows.div_ceil(self.parts);
        let parts = if self.by_rows { self.own() } else { 0..self.parts };
        parts.map(move |part| rows.min(part * len)..rows.min((part + 1) * len))
    }

    /// The same as one run.
    pub fn rows(&self, rows: usize) -> Range<usize> {
        let mut runs = self.runs(rows);
        let first = runs.next().unwrap_or(0..0);
        first.start..runs.last().unwrap_or(first).end
    }
}

impl Param {
    /// Whether it is a whole parameter, or the first part of one.
    pub fn is_first(&self) -> bool {
        self.part.is_none_or(|part| part.index == 0)
    }

    /// The name, with its place among the parts if it is one of several.
    pub fn label(&self) -> Cow<'_, str> {
        match self.part {
            None => Cow::Borrowed(&self.name),
            Some(ParamPart { index, count, .. }) => {
                Cow::Owned(format!("{}, part {} of {count}", self.name, index + 1))
            }
        }
    }

    /// The shape of all parts together.
    pub fn whole_shape(&self) -> Shape {
        let mut dims = self.shape.dims().to_vec();
        if let Some(ParamPart { count, dim, .. }) = self.part {
            dims[dim] *= count;
        }
        Shape::from(&dims[..])
    }

    /// These elements, counted within the parameter or the part of it, as runs of the whole parameter's: each with its place there.
    pub fn in_whole(&self, elems: Range<usize>) -> impl Iterator<Item = (Range<usize>, usize)> {
        let (own, stride, begin) = match (self.part, self.shape.dims()) {
            (Some(ParamPart { index, count, dim: 1 }), [_, columns]) => {
                (*columns, columns * count, columns * index)
            }
            (Some(ParamPart { index, .. }), _) => {
                let all = self.shape.num_elems();
                (all, 0, all * index)
            }
            (None, _) => (self.shape.num_elems(), 0, 0),
        };
        let mut next = elems.start;
        std::iter::from_fn(move || {
            let (row, column) = (next / own.max(1), next % own.max(1));
            let run = next..elems.end.min((row + 1) * own);
            next = run.end;
            (!run.is_empty()).then_some((run, row * stride + begin + column))
        })
    }
}

impl Layout {
    /// A parameter's number among those of the model, counting all parts as one: the stream of its initial values.
    pub(crate) fn number(&self, id: ParamId) -> u64 {
        let (params, param) = (self.params(), self.param(id));
        let first = || params.iter().position(|of| of.name == param.name);
        let first = param.part.and_then(|_| first()).unwrap_or(id.0);
        params[..first].iter().filter(|of| of.is_first()).count() as u64
    }

    /// How layers are divided.
    pub fn divided(&self) -> Divided {
        self.divided
    }

    /// The part of one of `ranks` that divide the layers: parameters keep their numbers and initial values, and the parts of other
    /// ranks are elsewhere.
    ///
    /// Errors unless the ranks can have equal shares of the parts that follow each other in the tree of sums.
    pub fn on_rank(&self, rank: usize, ranks: usize) -> Result<Self> {
        let parts = self.divided.parts;
        if !parts.is_multiple_of(ranks) || (ranks > 1 && !(parts / ranks).is_power_of_two()) {
            return Err(ModelError::Config(format!(
                "layers of {parts} parts cannot be divided among {ranks} ranks, each of which needs the same power of two of parts"
            )));
        }
        let divided = Divided { rank, ranks, ..self.divided };
        let mut params = self.params.clone();
        for param in &mut params {
            let is_own = |part: ParamPart| divided.own().contains(&part.index);
            let is_here = !self.unit(param.unit).is_elsewhere;
            param.is_elsewhere = !is_here || !param.part.is_none_or(is_own);
        }
        let mut layout = self.laid_out_again(params, self.units.clone());
        layout.divided = divided;
        Ok(layout)
    }

    /// The layout of all stages, and of all ranks that divide the layers.
    pub fn whole(&self) -> Self {
        let (mut params, mut units) = (self.params.clone(), self.units.clone());
        params.iter_mut().for_each(|param| param.is_elsewhere = false);
        units.iter_mut().for_each(|unit| unit.is_elsewhere = false);
        self.laid_out_again(params, units)
    }
}
