//! The layout: where each parameter lies in flat storage.
//!
//! Parameters follow each other in the order in which they are registered, and each begins on a 64-byte
//! boundary. Parameters that are opened and closed together form a unit, padded so that it can be divided
//! into one slice of equal size per rank, each on a 64-byte boundary too. Gradients and optimizer state use
//! the same layout, so a bucket of gradients is a contiguous range. Frozen units have neither, and lie after all others.
//!
//! Buffers are further values of a model, such as running statistics, which the forward pass updates and
//! which have no gradient. They lie in separate storage, without padding.

use std::ops::Range;

use paceline_memory::{DType, Shape};

use crate::init::values_of;
use crate::{Divided, Init, ModelError, ParamPart, Result};

/// Alignment of the starts of parameters, in elements of any type: 64 bytes of f32.
const ALIGN_ELEMS: usize = 16;

/// A parameter's number, in order of registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ParamId(pub usize);

/// A buffer's number, in order of registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BufferId(pub usize);

/// A unit's number, in order of registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct UnitId(pub usize);

/// One parameter, or one part of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Param {
    /// The name, unit first: `conv0.weight`. All parts of a parameter have its name.
    pub name: String,
    /// The shape: that of the part, if the parameter is divided.
    pub shape: Shape,
    /// Which part it is, if the parameter is divided.
    pub part: Option<ParamPart>,
    /// First element in flat storage.
    pub start: usize,
    /// Its unit.
    pub unit: UnitId,
    /// The initial values.
    pub init: Init,
    /// The number of layers that use the parameter in one pass. Its gradient is final after that many uses.
    pub num_uses: u32,
    /// Whether the parameter does not change, and has no gradient and no optimizer state.
    pub is_frozen: bool,
    /// Whether the parameter belongs to another stage of a pipeline, or to another rank that divides its layer, and has no storage
    /// here.
    pub is_elsewhere: bool,
}

impl Param {
    /// The parameter's elements in flat storage, without padding. None if it is elsewhere.
    pub fn range(&self) -> Range<usize> {
        let len = if self.is_elsewhere { 0 } else { self.shape.num_elems() };
        self.start..self.start + len
    }
}

/// One buffer.
#[derive(Clone, Debug, PartialEq)]
pub struct StateBuffer {
    /// The name, unit first: `bn0.running_mean`.
    pub name: String,
    /// The shape.
    pub shape: Shape,
    /// First element in the storage of buffers.
    pub start: usize,
    /// Its unit.
    pub unit: UnitId,
    /// The initial value of all elements.
    pub init: f64,
}

impl StateBuffer {
    /// The buffer's elements in the storage of buffers.
    pub fn range(&self) -> Range<usize> {
        self.start..self.start + self.shape.num_elems()
    }
}

/// Parameters that are opened and closed together, usually those of one block.
#[derive(Clone, Debug, PartialEq)]
pub struct Unit {
    /// The name.
    pub name: String,
    /// The unit's elements in flat storage, with padding. They can be cut into one slice per rank.
    pub range: Range<usize>,
    /// Whether it stays open for the whole step, because several layers use one of its parameters.
    pub is_root: bool,
    /// Whether its parameters are frozen.
    pub is_frozen: bool,
    /// Whether another stage of a pipeline has it.
    pub is_elsewhere: bool,
}

impl Unit {
    fn new(name: String) -> Self {
        Self { name, range: 0..0, is_root: false, is_frozen: false, is_elsewhere: false }
    }
}

/// The finished layout.
#[derive(Clone, Debug, PartialEq)]
pub struct Layout {
    pub(crate) params: Vec<Param>,
    pub(crate) units: Vec<Unit>,
    /// Elements that have gradients, with padding. They come first.
    trained_len: usize,
    len: usize,
    world_size: usize,
    buffers: Vec<StateBuffer>,
    pub(crate) divided: Divided,
}

impl Layout {
    /// All parameters, in order of registration. The trained parameters have the same order in storage.
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

    /// One unit.
    pub fn unit(&self, id: UnitId) -> &Unit {
        &self.units[id.0]
    }

    /// The parameters that are trained here, in order of registration.
    pub fn trained(&self) -> impl DoubleEndedIterator<Item = (ParamId, &Param)> {
        let all = self.params.iter().enumerate().map(|(at, param)| (ParamId(at), param));
        all.filter(|(_, param)| !param.is_frozen && !param.is_elsewhere)
    }

    /// Elements of the trained parameters, with padding: the length of gradients and of optimizer state.
    pub fn trained_len(&self) -> usize {
        self.trained_len
    }

    /// Elements of flat storage, with padding.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no parameters.
    pub fn is_empty(&self) -> bool {
        self.params.is_empty()
    }

    /// Elements of all parameters, without padding. Those of other ranks and stages count too.
    pub fn num_params(&self) -> usize {
        self.params.iter().map(|p| p.shape.num_elems()).sum()
    }

    /// All buffers, in order of registration, which is also their order in storage.
    pub fn buffers(&self) -> &[StateBuffer] {
        &self.buffers
    }

    /// One buffer.
    pub fn buffer(&self, id: BufferId) -> &StateBuffer {
        &self.buffers[id.0]
    }

    /// Kind, name and shape of all parameters, and then of all buffers.
    pub fn tensors(&self) -> impl Iterator<Item = (&'static str, &str, Shape)> {
        let params = self.params.iter().filter(|param| param.is_first());
        let params = params.map(|param| ("parameter", &*param.name, param.whole_shape()));
        params.chain(self.buffers.iter().map(|buffer| ("buffer", &*buffer.name, buffer.shape)))
    }

    /// Elements of all buffers.
    pub fn num_buffer_elems(&self) -> usize {
        self.buffers.last().map_or(0, |buffer| buffer.range().end)
    }

    /// Elements of the parameters that are trained, without padding.
    pub fn num_trained_params(&self) -> usize {
        self.trained().map(|(_, param)| param.shape.num_elems()).sum()
    }

    /// Bytes of all parameters with elements of `dtype`, with padding.
    pub fn num_bytes(&self, dtype: DType) -> usize {
        self.len * dtype.size_bytes()
    }

    /// Bytes of all gradients with elements of `dtype`, with padding.
    pub fn trained_bytes(&self, dtype: DType) -> usize {
        self.trained_len * dtype.size_bytes()
    }

    /// The same layout, with the units of these names frozen. Errors if a unit does not exist, or if nothing is left to train.
    pub fn with_frozen(&self, units: &[String]) -> Result<Self> {
        let names = || self.units.iter().map(|unit| &*unit.name).collect::<Vec<_>>().join(", ");
        if let Some(unknown) = units.iter().find(|name| self.units.iter().all(|u| u.name != **name))
        {
            let reason = format!("there is no unit {unknown} to freeze; there are {}", names());
            return Err(ModelError::Config(reason));
        }
        let (mut params, mut all) = (self.params.clone(), self.units.clone());
        for unit in &mut all {
            unit.is_frozen |= units.contains(&unit.name);
        }
        for param in &mut params {
            param.is_frozen = all[param.unit.0].is_frozen;
        }
        if params.iter().all(|param| param.is_frozen) {
            return Err(ModelError::Config(format!(
                "all units are frozen ({}), so there is nothing to train",
                names()
            )));
        }
        Ok(self.laid_out_again(params, all))
    }

    pub(crate) fn laid_out_again(&self, params: Vec<Param>, units: Vec<Unit>) -> Self {
        let layout = Self::laid_out(params, units, self.world_size);
        Self { buffers: self.buffers.clone(), divided: self.divided, ..layout }
    }

    /// The part of these units, for a stage of a pipeline: parameters keep their numbers and initial values, and those of
    /// other units are elsewhere. `num_uses` is how often a pass uses a parameter here.
    pub fn part(
        &self,
        is_here: impl Fn(UnitId) -> bool,
        num_uses: impl Fn(ParamId) -> u32,
    ) -> Self {
        let (mut params, mut units) = (self.params.clone(), self.units.clone());
        for (at, unit) in units.iter_mut().enumerate() {
            unit.is_elsewhere = !is_here(UnitId(at));
        }
        for (at, param) in params.iter_mut().enumerate() {
            param.is_elsewhere |= units[param.unit.0].is_elsewhere;
            param.num_uses = num_uses(ParamId(at));
        }
        self.laid_out_again(params, units)
    }

    /// Lays out the parameters: first the units that are trained, then the frozen units. The caller adds the buffers.
    fn laid_out(mut params: Vec<Param>, mut units: Vec<Unit>, world_size: usize) -> Self {
        let mut place = |is_frozen: bool, begin: usize| {
            let mut len = begin;
            for (at, unit) in units.iter_mut().enumerate().filter(|(_, u)| u.is_frozen == is_frozen)
            {
                let begin = len;
                for param in params.iter_mut().filter(|param| param.unit.0 == at) {
                    param.start = len.next_multiple_of(ALIGN_ELEMS);
                    len = param.range().end.max(len);
                }
                len = begin + (len - begin).next_multiple_of(ALIGN_ELEMS * world_size);
                unit.range = begin..len;
            }
            len
        };
        let trained_len = place(false, 0);
        let len = place(true, trained_len);
        let (buffers, divided) = (Vec::new(), Divided::NOT);
        Self { params, units, trained_len, len, world_size, buffers, divided }
    }

    /// The initial values of some of a parameter's elements. They depend only on the seed and on the numbers of the parameter and the
    /// element, so every rank can compute those that it holds. The elements of a part have the values that they have in the whole.
    pub fn initial_values(
        &self,
        id: ParamId,
        seed: u64,
        elems: Range<usize>,
    ) -> impl Iterator<Item = f64> {
        let (param, stream) = (self.param(id), self.number(id));
        let init = param.init;
        let runs = param.in_whole(elems);
        runs.flat_map(move |(run, start)| values_of(init, seed, stream, start..start + run.len()))
    }
}

/// Collects units and their parameters while a model is built.
///
/// ```
/// use paceline_model::{Init, LayoutBuilder};
///
/// let mut builder = LayoutBuilder::new();
/// let mut unit = builder.unit("scale");
/// let gain = unit.param("gain", [32], Init::Constant(1.0));
/// let layout = builder.finish(2); // for two ranks
/// assert_eq!((layout.param(gain).name.as_str(), layout.num_params()), ("scale.gain", 32));
/// ```
#[derive(Debug, Default)]
pub struct LayoutBuilder {
    units: Vec<Unit>,
    /// Not laid out yet.
    params: Vec<Param>,
    buffers: Vec<StateBuffer>,
}

impl LayoutBuilder {
    /// Each parameter begins at a multiple of this number of elements.
    pub const ALIGN_ELEMS: usize = ALIGN_ELEMS;

    /// A builder without parameters.
    pub fn new() -> Self {
        Self::default()
    }

    /// Begins a unit.
    pub fn unit(&mut self, name: impl Into<String>) -> UnitBuilder<'_> {
        self.units.push(Unit::new(name.into()));
        self.continued(UnitId(self.units.len() - 1))
    }

    /// Goes on with a unit.
    pub fn continued(&mut self, id: UnitId) -> UnitBuilder<'_> {
        let prefix = self.units[id.0].name.clone();
        UnitBuilder { id, layout: self, prefix, part: None }
    }

    /// Registers one more use of a parameter by another layer, which ties the two. The parameter stays
    /// in the unit that registered it, which becomes a root: it stays open for the whole step.
    pub fn tie(&mut self, id: ParamId) -> ParamId {
        let param = &mut self.params[id.0];
        param.num_uses += 1;
        self.units[param.unit.0].is_root = true;
        id
    }

    /// Errors if `world_size` is zero.
    pub fn check_world_size(world_size: usize) -> Result<()> {
        if world_size > 0 {
            return Ok(());
        }
        Err(ModelError::Config("a model is built for at least one rank, not for 0".into()))
    }

    /// Computes the layout for `world_size` ranks. Zero ranks count as one.
    pub fn finish(self, world_size: usize) -> Layout {
        self.finish_divided(world_size, Divided::NOT)
    }

    /// The same, for layers that are divided.
    pub(crate) fn finish_divided(self, world_size: usize, divided: Divided) -> Layout {
        let layout = Layout::laid_out(self.params, self.units, world_size.max(1));
        Layout { buffers: self.buffers, divided, ..layout }
    }
}

/// A unit, to which layers add their parameters.
#[derive(Debug)]
pub struct UnitBuilder<'b> {
    /// Its number.
    pub id: UnitId,
    layout: &'b mut LayoutBuilder,
    /// The beginning of the names of its parameters.
    prefix: String,
    /// The parameters that follow are such parts.
    part: Option<ParamPart>,
}

impl UnitBuilder<'_> {
    /// The same unit, for parameters whose names begin with `prefix`, and which are such parts.
    pub(crate) fn of_part(&mut self, prefix: &str, part: Option<ParamPart>) -> UnitBuilder<'_> {
        UnitBuilder { id: self.id, layout: self.layout, prefix: prefix.to_owned(), part }
    }

    /// The parameters that follow are divided along this dimension, if they are divided.
    pub(crate) fn divide(&mut self, along: usize) {
        self.part = self.part.map(|part| ParamPart { dim: along, ..part });
    }

    /// Registers a parameter.
    pub fn param(&mut self, name: &str, shape: impl Into<Shape>, init: Init) -> ParamId {
        self.layout.params.push(Param {
            name: self.name_of(name),
            part: self.part,
            shape: shape.into(),
            start: 0,
            unit: self.id,
            init,
            num_uses: 1,
            is_frozen: false,
            is_elsewhere: false,
        });
        ParamId(self.layout.params.len() - 1)
    }

    /// Registers a buffer, whose elements all begin as `init`.
    pub fn buffer(&mut self, name: &str, shape: impl Into<Shape>, init: f64) -> BufferId {
        let (name, shape, unit) = (self.name_of(name), shape.into(), self.id);
        let buffers = &mut self.layout.buffers;
        let start = buffers.last().map_or(0, |buffer| buffer.range().end);
        buffers.push(StateBuffer { name, shape, start, unit, init });
        BufferId(buffers.len() - 1)
    }

    fn name_of(&self, name: &str) -> String {
        format!("{}.{name}", self.prefix)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CnnConfig, MlpConfig};

    #[test]
    fn starts_are_aligned_and_units_can_be_cut_evenly() {
        let mut builder = LayoutBuilder::new();
        let mut unit = builder.unit("a");
        unit.param("weight", [3, 5], Init::fan_in(5));
        let bias = unit.param("bias", [3], Init::fan_in(5));
        let mut unit = builder.unit("b");
        unit.param("weight", [100], Init::Constant(1.0));
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
    fn a_layout_for_no_ranks_is_that_for_one() {
        let layout = |world_size| {
            let mut builder = LayoutBuilder::new();
            let mut unit = builder.unit("a");
            unit.param("weight", [100], Init::Constant(1.0));
            builder.finish(world_size)
        };
        assert_eq!(layout(0), layout(1));
    }

    #[test]
    fn models_for_no_ranks_are_refused() {
        let (input_dim, hidden_dim, output_dim, num_layers) = (3, 4, 2, 1);
        let mlp = MlpConfig { input_dim, hidden_dim, output_dim, num_layers, tie_layers: false };
        let (image, channels, num_classes) = ([12, 12, 1], vec![4], 10);
        let (batch_norm, unused_head) = (false, false);
        let cnn = CnnConfig {
            image,
            channels,
            hidden: 4,
            num_classes,
            batch_norm,
            unused_head,
            layout: Default::default(),
            direct_convolutions: false,
        };
        for built in [mlp.build(0), cnn.build(0)] {
            let error = built.err().unwrap().to_string();
            assert_eq!(error, "a model is built for at least one rank, not for 0");
        }
    }

    #[test]
    fn buffers_lie_apart_from_parameters() {
        let build = |with_buffers: bool| {
            let mut builder = LayoutBuilder::new();
            for unit in ["a", "b"] {
                let mut unit = builder.unit(unit);
                unit.param("weight", [5], Init::Constant(1.0));
                if with_buffers {
                    unit.buffer("running_mean", [3], 0.0);
                    unit.buffer("running_var", [3], 1.0);
                }
            }
            builder.finish(2)
        };
        let (layout, without) = (build(true), build(false));
        assert_eq!((layout.params(), layout.units()), (without.params(), without.units()));
        assert_eq!((layout.len(), layout.num_params()), (without.len(), without.num_params()));
        assert_eq!((layout.num_buffer_elems(), without.num_buffer_elems()), (12, 0));
        let last = layout.buffer(BufferId(3));
        assert_eq!((last.name.as_str(), last.range(), last.init), ("b.running_var", 9..12, 1.0));
    }

    #[test]
    fn frozen_units_lie_behind_the_others() {
        let mut builder = LayoutBuilder::new();
        for name in ["a", "b", "c"] {
            let mut unit = builder.unit(name);
            unit.param("weight", [20], Init::Constant(1.0));
        }
        let layout = builder.finish(2);
        let frozen = layout.with_frozen(&["a".into()]).unwrap();
        let starts: Vec<usize> = frozen.params().iter().map(|p| p.start).collect();
        assert_eq!((starts, frozen.trained_len(), frozen.len()), (vec![64, 0, 32], 64, 96));
        assert_eq!(frozen.units()[0].range, 64..96);
        assert_eq!(frozen.trained().map(|(id, _)| id.0).collect::<Vec<_>>(), [1, 2]);
        let refused = |units: &[&str]| {
            let units: Vec<String> = units.iter().map(|name| name.to_string()).collect();
            layout.with_frozen(&units).unwrap_err().to_string()
        };
        assert_eq!(refused(&["d"]), "there is no unit d to freeze; there are a, b, c");
        assert!(refused(&["a", "b", "c"]).starts_with("all units are frozen"));
    }

    #[test]
    fn initial_values_depend_on_seed_and_parameter() {
        let mut builder = LayoutBuilder::new();
        let mut unit = builder.unit("a");
        let a = unit.param("weight", [1000], Init::fan_in(25));
        let b = unit.param("bias", [1000], Init::fan_in(25));
        let layout = builder.finish(1);
        let draw = |id, seed| layout.initial_values(id, seed, 0..1000).collect::<Vec<f64>>();
        assert_eq!(draw(a, 1), draw(a, 1));
        assert_ne!(draw(a, 1), draw(a, 2));
        assert_ne!(draw(a, 1), draw(b, 1));
        assert!(draw(a, 1).iter().all(|x| x.abs() <= 0.2));
        assert!(draw(a, 1).iter().sum::<f64>().abs() < 20.0);
    }

    #[test]
    fn an_element_has_the_same_initial_value_whatever_comes_before_it() {
        for init in [Init::fan_in(9), Init::Normal { std: 0.5 }, Init::Constant(2.0)] {
            let mut builder = LayoutBuilder::new();
            let mut unit = builder.unit("a");
            let a = unit.param("weight", [300], init);
            let layout = builder.finish(1);
            let all: Vec<f64> = layout.initial_values(a, 7, 0..300).collect();
            for range in [0..1, 1..2, 7..300, 64..200, 299..300, 5..5] {
                let some: Vec<f64> = layout.initial_values(a, 7, range.clone()).collect();
                assert_eq!(some, all[range.clone()], "{init:?} {range:?}");
            }
        }
    }

    #[test]
    fn normal_values_have_the_moments_of_a_normal_distribution() {
        let mut builder = LayoutBuilder::new();
        let mut unit = builder.unit("a");
        let a = unit.param("weight", [20_000], Init::Normal { std: 0.5 });
        let values: Vec<f64> =
            builder.finish(1).initial_values(a, 1, 0..20_000).map(|x| x / 0.5).collect();
        let moment = |power| values.iter().map(|x| x.powi(power)).sum::<f64>() / 20_000.0;
        // The seed is fixed. The bounds are five standard errors: sqrt(1, 2, 15, 96 / 20,000) times five.
        assert!(moment(1).abs() < 0.036, "{}", moment(1));
        assert!((moment(2) - 1.0).abs() < 0.05, "{}", moment(2));
        assert!(moment(3).abs() < 0.14, "{}", moment(3));
        assert!((moment(4) - 3.0).abs() < 0.35, "{}", moment(4));
    }
}
