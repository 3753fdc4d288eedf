//! Where each parameter lies in flat storage.
//!
//! Parameters follow each other in the order in which they are registered, each beginning on a
//! 64-byte boundary. Parameters that are used together form a unit; every unit is padded so that it
//! can be cut into one even slice per rank, each again on a 64-byte boundary. Gradients and
//! optimizer state use the same layout, so a bucket of gradients is a contiguous range.

use std::ops::Range;

use paceline_memory::{DType, Shape};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Elements to which starts are aligned: 64 bytes of f32. Other types use the same numbers.
const ALIGN_ELEMS: usize = 16;

/// A parameter's number, in order of registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ParamId(pub usize);

/// How a parameter begins.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// Uniform between `-bound` and `bound`.
    Uniform {
        /// The largest absolute value.
        bound: f64,
    },
    /// The same value everywhere.
    Constant(f64),
}

impl Init {
    /// What PyTorch does for linear and convolution layers, weight and bias alike: uniform within
    /// one over the square root of the number of inputs of each output.
    pub fn fan_in(inputs: usize) -> Self {
        Init::Uniform { bound: 1.0 / (inputs as f64).sqrt() }
    }
}

/// One parameter.
#[derive(Clone, Debug, PartialEq)]
pub struct Param {
    /// Its name, unit first: `conv0.weight`.
    pub name: String,
    /// Its extents.
    pub shape: Shape,
    /// First element in flat storage.
    pub start: usize,
    /// The unit it belongs to.
    pub unit: usize,
    /// How it begins.
    pub init: Init,
}

impl Param {
    /// Its elements in flat storage, without padding.
    pub fn range(&self) -> Range<usize> {
        self.start..self.start + self.shape.num_elems()
    }
}

/// Parameters that are used together, one layer as a rule.
#[derive(Clone, Debug, PartialEq)]
pub struct Unit {
    /// Its name.
    pub name: String,
    /// Its elements in flat storage, with padding.
    pub range: Range<usize>,
}

/// The finished layout.
#[derive(Clone, Debug, PartialEq)]
pub struct Layout {
    params: Vec<Param>,
    units: Vec<Unit>,
    len: usize,
}

impl Layout {
    /// All parameters, in order of registration, which is also their order in storage.
    pub fn params(&self) -> &[Param] {
        &self.params
    }

    /// One parameter.
    pub fn param(&self, id: ParamId) -> &Param {
        &self.params[id.0]
    }

    /// All units, in order.
    pub fn units(&self) -> &[Unit] {
        &self.units
    }

    /// Elements of flat storage, with padding.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no parameters at all.
    pub fn is_empty(&self) -> bool {
        self.params.is_empty()
    }

    /// Elements of all parameters, without padding.
    pub fn num_params(&self) -> usize {
        self.params.iter().map(|p| p.shape.num_elems()).sum()
    }

    /// Bytes of flat storage of one type.
    pub fn num_bytes(&self, dtype: DType) -> usize {
        self.len * dtype.size_bytes()
    }

    /// The elements with which a parameter begins. They depend on the seed and the parameter's
    /// number alone, so every rank can draw every part of them.
    pub fn initial_values(&self, id: ParamId, seed: u64) -> impl Iterator<Item = f64> {
        let param = self.param(id);
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        rng.set_stream(id.0 as u64);
        (0..param.shape.num_elems()).map(move |_| match param.init {
            Init::Uniform { bound } => (rng.random::<f64>() * 2.0 - 1.0) * bound,
            Init::Constant(value) => value,
        })
    }
}

/// Collects parameters while a model is built.
#[derive(Debug, Default)]
pub struct LayoutBuilder {
    units: Vec<String>,
    /// Unit, name, shape and initial values of each parameter.
    params: Vec<(usize, String, Shape, Init)>,
}

impl LayoutBuilder {
    /// No parameters yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Begins a unit; the parameters that follow belong to it.
    pub fn unit(&mut self, name: impl Into<String>) -> &mut Self {
        self.units.push(name.into());
        self
    }

    /// Registers a parameter of the current unit. Panics if no unit was begun.
    pub fn param(&mut self, name: &str, shape: impl Into<Shape>, init: Init) -> ParamId {
        let unit = self.units.len().checked_sub(1).expect("a parameter belongs to a unit");
        let name = format!("{}.{name}", self.units[unit]);
        self.params.push((unit, name, shape.into(), init));
        ParamId(self.params.len() - 1)
    }

    /// Lays everything out for `world_size` ranks.
    pub fn finish(self, world_size: usize) -> Layout {
        let mut layout = Layout { params: Vec::new(), units: Vec::new(), len: 0 };
        let mut params = self.params.into_iter().peekable();
        for (unit, name) in self.units.into_iter().enumerate() {
            let begin = layout.len;
            while let Some((_, name, shape, init)) = params.next_if(|param| param.0 == unit) {
                let start = layout.len.next_multiple_of(ALIGN_ELEMS);
                layout.len = start + shape.num_elems();
                layout.params.push(Param { name, shape, start, unit, init });
            }
            let padded = (layout.len - begin).next_multiple_of(ALIGN_ELEMS * world_size);
            layout.len = begin + padded;
            layout.units.push(Unit { name, range: begin..layout.len });
        }
        layout
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn starts_are_aligned_and_units_can_be_cut_evenly() {
        let mut builder = LayoutBuilder::new();
        builder.unit("a");
        builder.param("weight", [3, 5], Init::fan_in(5));
        let bias = builder.param("bias", [3], Init::fan_in(5));
        builder.unit("b");
        builder.param("weight", [100], Init::Constant(1.0));
        let layout = builder.finish(3);
        let starts: Vec<usize> = layout.params().iter().map(|p| p.start).collect();
        assert_eq!(starts, [0, 16, 48]);
        assert_eq!((layout.len(), layout.num_params()), (48 + 144, 118));
        assert_eq!(layout.units()[1].range, 48..192);
        assert_eq!(
            (layout.param(bias).name.as_str(), layout.param(bias).range()),
            ("a.bias", 16..19)
        );
    }

    #[test]
    fn initial_values_depend_on_seed_and_parameter() {
        let mut builder = LayoutBuilder::new();
        builder.unit("a");
        let a = builder.param("weight", [1000], Init::fan_in(25));
        let b = builder.param("bias", [1000], Init::fan_in(25));
        let layout = builder.finish(1);
        let draw = |id, seed| layout.initial_values(id, seed).collect::<Vec<f64>>();
        assert_eq!(draw(a, 1), draw(a, 1));
        assert_ne!(draw(a, 1), draw(a, 2));
        assert_ne!(draw(a, 1), draw(b, 1));
        assert!(draw(a, 1).iter().all(|x| x.abs() <= 0.2));
        assert!(draw(a, 1).iter().sum::<f64>().abs() < 20.0);
    }
}
