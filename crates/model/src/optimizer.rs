//! Optimizers and their state, over the ranges of flat storage that a rank owns.

use std::ops::Range;
use std::sync::Arc;

use paceline_kernels::Compute;
use paceline_kernels::digest::{Digest, digest};
use paceline_kernels::optimizer::{AdamW, Sgd, StepNumbers, adamw, sgd};
use paceline_memory::{Allocator, Category, DType, GraphPool, GraphedWork, Tensor};

use crate::storage::is_finite;
use crate::{Held, Layout, Result, Storage};

/// An optimizer's kind and settings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum OptimizerConfig {
    /// Stochastic gradient descent.
    Sgd(Sgd),
    /// AdamW.
    AdamW(AdamW),
}

impl From<Sgd> for OptimizerConfig {
    fn from(sgd: Sgd) -> Self {
        Self::Sgd(sgd)
    }
}

impl From<AdamW> for OptimizerConfig {
    fn from(adamw: AdamW) -> Self {
        Self::AdamW(adamw)
    }
}

impl OptimizerConfig {
    /// The names of the state tensors, each as long as the trained parameters.
    pub fn state_names(&self) -> &'static [&'static str] {
        match self {
            OptimizerConfig::Sgd(Sgd { momentum: 0.0, .. }) => &[],
            OptimizerConfig::Sgd(_) => &["velocity"],
            OptimizerConfig::AdamW(_) => &["first_moment", "second_moment"],
        }
    }

    fn with_decay(mut self, decays: bool) -> Self {
        let (Self::Sgd(Sgd { weight_decay, .. }) | Self::AdamW(AdamW { weight_decay, .. })) =
            &mut self;
        if !decays {
            *weight_decay = 0.0;
        }
        self
    }
}

/// The pieces of a range that lie within one of `undecayed`, and those between them, for which this is `true`.
fn pieces(range: &Range<usize>, undecayed: &[Range<usize>]) -> Vec<(Range<usize>, bool)> {
    let (mut pieces, mut at) = (Vec::new(), range.start);
    for flat in undecayed {
        let (start, end) = (flat.start.max(at), flat.end.min(range.end));
        if start < end {
            pieces.push((at..start, true));
            pieces.push((start..end, false));
            at = end;
        }
    }
    pieces.push((at..range.end, true));
    pieces.retain(|(piece, _)| !piece.is_empty());
    pieces
}

/// An optimizer and its state.
#[derive(Debug)]
pub struct Optimizer {
    config: OptimizerConfig,
    /// The ranges of flat storage that the optimizer updates.
    ranges: Vec<Range<usize>>,
    /// For each name, the state of the ranges.
    state: Vec<Held>,
    steps: u64,
    /// By which gradients are multiplied: one over the scale of the loss.
    grad_factor: f64,
    /// Ranges of flat storage without weight decay, in their order.
    undecayed: Vec<Range<usize>>,
    /// The step as a graph, if it is launched as one.
    graph: Option<StepGraph>,
    /// The digests of the last step, if it is watched.
    watched: Option<WatchedStep>,
}

/// The parameters, and the digests of their gradients and their values after a step.
#[derive(Debug)]
struct WatchedStep {
    layout: Arc<Layout>,
    digests: Vec<[Digest; 2]>,
}

/// A step that is captured once and replayed.
#[derive(Debug)]
struct StepGraph {
    work: GraphedWork<()>,
    /// The numbers of the step: those with weight decay, then those without. Written before each launch.
    numbers: Tensor,
    /// The values and gradients of the captured work.
    parts: Vec<(Tensor, Tensor)>,
}

/// Elements that each thread updates before it reads them again for their digests: four tensors of them fit into a cache of 2 MB.
const WATCHED_ELEMS: usize = 1 << 16;

/// The most numbers that a step of an optimizer has.
const MOST_NUMBERS: usize = 9;

impl Optimizer {
    /// An optimizer of all trained parameters in `storage`, before its first step, with its state set to zero.
    pub fn new(config: OptimizerConfig, storage: &Storage, allocator: &Allocator) -> Result<Self> {
        let trained = 0..storage.layout().trained_len();
        Self::of_ranges(config, storage, vec![trained], allocator)
    }

    /// Like [`Optimizer::new`], but only for some ranges of flat storage, such as [`Owned::state`](crate::Owned::state).
    pub fn of_ranges(
        config: OptimizerConfig,
        storage: &Storage,
        ranges: Vec<Range<usize>>,
        allocator: &Allocator,
    ) -> Result<Self> {
        let len: usize = ranges.iter().map(Range::len).sum();
        let zeros = |_: &&str| {
            let state = allocator.tensor(storage.precision().master, [len], Category::Optimizer)?;
            state.fill_zero()?;
            Held::new(ranges.clone(), state)
        };
        let state = config.state_names().iter().map(zeros).collect::<Result<_>>()?;
        let (undecayed, graph, watched) = (Vec::new(), None, None);
        Ok(Self { config, ranges, state, steps: 0, grad_factor: 1.0, undecayed, graph, watched })
    }

    /// The same, with weight decay for matrices and convolutions only: parameters of one dimension, such as biases and norms, have
    /// none. The layout is that of the storage.
    pub fn decaying_matrices_only(mut self, layout: &Layout) -> Self {
        let params = layout.params().iter();
        let vectors = params.filter(|param| param.shape.dims().len() < 2);
        self.undecayed = vectors.map(|param| param.range()).collect();
        self.undecayed.sort_by_key(|range| range.start);
        self
    }

    /// The same, with digests of the gradients and of the updated values in each step.
    pub fn watched(mut self, layout: &Arc<Layout>) -> Self {
        let digests = vec![[Digest::default(); 2]; layout.params().len()];
        self.watched = Some(WatchedStep { layout: layout.clone(), digests });
        self
    }

    /// The digests of the gradients and of the updated values of the last step, by the number of the parameter: of those elements that
    /// this optimizer updates.
    pub fn digests(&self) -> Option<&[[Digest; 2]]> {
        self.watched.as_ref().map(|watched| &*watched.digests)
    }

    /// Updates the parameters of its ranges from their gradients, in `storage`.
    pub fn step(&mut self, compute: &Compute, storage: &Storage) -> Result<()> {
        let part = |range: &Range<usize>| -> Result<(Tensor, Tensor)> {
            let (values, grads) = (storage.values(), storage.grads());
            Ok((values.slice(range.clone())?, grads.slice(range.clone())?))
        };
        let parts = self.ranges.iter().map(part).collect::<Result<Vec<_>>>()?;
        self.step_on(compute, &parts)
    }

    /// Begins a step that is made piece by piece: each range that the optimizer updates, or a part of it, is then
    /// given once to [`Optimizer::update`]. The bits are those of [`Optimizer::step`].
    pub fn begin_step(&mut self) {
        self.steps += 1;
        self.watched.iter_mut().for_each(|of| of.digests.fill([Digest::default(); 2]));
    }

    /// Updates the parameters of a part of one of its ranges.
    pub fn update(
        &mut self,
        compute: &Compute,
        storage: &Storage,
        range: Range<usize>,
    ) -> Result<()> {
        let (values, grads) =
            (storage.values().slice(range.clone())?, storage.grads().slice(range.clone())?);
        self.update_part(compute, &range, &values, &grads)
    }

    /// The same, with each step launched as a graph of a card, in whose memory all tensors lie. The learning rate, the factor of
    /// gradients and what follows from the number of the step are written there before. Errors on other devices.
    pub fn as_graph(mut self, storage: &Storage, allocator: &Allocator) -> Result<Self> {
        let dtype = storage.precision().master;
        let numbers = allocator.tensor(dtype, [2 * MOST_NUMBERS], Category::Optimizer)?;
        let work = GraphedWork::new(&GraphPool::new(allocator)?);
        self.graph = Some(StepGraph { work, numbers, parts: Vec::new() });
        Ok(self)
    }

    /// Updates the parameters of its ranges, given as values and gradients of each range, in order.
    pub fn step_on(&mut self, compute: &Compute, parts: &[(Tensor, Tensor)]) -> Result<()> {
        self.begin_step();
        if self.graph.is_none() && self.watched.is_some() {
            let ranges = self.ranges.clone();
            let mut parts = ranges.iter().zip(parts);
            return parts.try_for_each(|(range, (values, grads))| {
                self.update_part(compute, range, values, grads)
            });
        }
        self.launch_step(compute, parts)?;
        let Some(watched) = &mut self.watched else { return Ok(()) };
        let mut parts = self.ranges.iter().zip(parts);
        parts.try_for_each(|(range, (values, grads))| watched.add(compute, range, [grads, values]))
    }

    /// Updates a range of flat storage, piece by piece if it is watched, so that the digests read what is still in the cache.
    fn update_part(
        &mut self,
        compute: &Compute,
        range: &Range<usize>,
        values: &Tensor,
        grads: &Tensor,
    ) -> Result<()> {
        if self.watched.is_none() {
            return self.launch(compute, range, values, grads, None);
        }
        let piece_elems = WATCHED_ELEMS * compute.threads().count();
        for begin in (0..range.len()).step_by(piece_elems) {
            let within = begin..range.len().min(begin + piece_elems);
            let piece = range.start + within.start..range.start + within.end;
            let [values, grads] = [values.slice(within.clone())?, grads.slice(within)?];
            self.launch(compute, &piece, &values, &grads, None)?;
            if let Some(watched) = &mut self.watched {
                watched.add(compute, &piece, [&grads, &values])?;
            }
        }
        Ok(())
    }

    fn launch_step(&mut self, compute: &Compute, parts: &[(Tensor, Tensor)]) -> Result<()> {
        let Some(mut graph) = self.graph.take() else {
            return self.launch_all(compute, parts, None);
        };
        let outcome = self.write(&graph.numbers).and_then(|()| {
            if !graph.is_about(parts) {
                return self.launch_all(compute, parts, Some(&graph.numbers));
            }
            let numbers = &graph.numbers;
            graph.work.run(|| self.launch_all(compute, parts, Some(numbers)))
        });
        self.graph = Some(graph);
        outcome
    }

    /// Writes the numbers of the step to where its work reads them.
    fn write(&self, numbers: &Tensor) -> Result<()> {
        let of_step = [true, false].map(|decays| match self.config.with_decay(decays) {
            OptimizerConfig::Sgd(config) => config.numbers(self.grad_factor).to_vec(),
            OptimizerConfig::AdamW(config) => config.numbers(self.steps, self.grad_factor).to_vec(),
        });
        let filled = of_step.into_iter().flat_map(|mut numbers| {
            numbers.resize(MOST_NUMBERS, 0.0);
            numbers
        });
        match numbers.dtype() {
            DType::F64 => numbers.overwrite::<f64, _>(|to| {
                to.iter_mut().zip(filled).for_each(|(to, number)| *to = number);
            })?,
            _ => numbers.overwrite::<f32, _>(|to| {
                to.iter_mut().zip(filled).for_each(|(to, number)| *to = number as f32);
            })?,
        }
        Ok(())
    }

    /// Launches the work of a step, whose numbers lie in memory for a graph.
    fn launch_all(
        &self,
        compute: &Compute,
        parts: &[(Tensor, Tensor)],
        numbers: Option<&Tensor>,
    ) -> Result<()> {
        let mut parts = self.ranges.iter().zip(parts);
        parts.try_for_each(|(range, (values, grads))| {
            self.launch(compute, range, values, grads, numbers)
        })
    }

    /// The same for a range of flat storage, with its values and gradients.
    fn launch(
        &self,
        compute: &Compute,
        range: &Range<usize>,
        values: &Tensor,
        grads: &Tensor,
        numbers: Option<&Tensor>,
    ) -> Result<()> {
        for (piece, decays) in pieces(range, &self.undecayed) {
            let within = piece.start - range.start..piece.end - range.start;
            let (values, grads) = (values.slice(within.clone())?, grads.slice(within)?);
            let state = self.state_of(piece)?;
            let begin = if decays { 0 } else { MOST_NUMBERS };
            let of = |count| numbers.map(|all| all.slice(begin..begin + count)).transpose();
            match (self.config.with_decay(decays), state.as_slice()) {
                (OptimizerConfig::Sgd(config), state) => {
                    let (here, there) = (config.numbers(self.grad_factor), of(4)?);
                    let numbers =
                        there.as_ref().map_or(StepNumbers::Here(here), StepNumbers::InMemory);
                    let velocity = state.first().map(|(_, velocity)| velocity);
                    sgd(compute, numbers, &values, &grads, velocity)?;
                }
                (OptimizerConfig::AdamW(config), [(_, first), (_, second)]) => {
                    let (here, there) =
                        (config.numbers(self.steps, self.grad_factor), of(MOST_NUMBERS)?);
                    let numbers =
                        there.as_ref().map_or(StepNumbers::Here(here), StepNumbers::InMemory);
                    adamw(compute, numbers, &values, &grads, first, second)?;
                }
                (OptimizerConfig::AdamW(_), state) => {
                    unreachable!("AdamW is made with two moments, not {}", state.len())
                }
            }
        }
        Ok(())
    }

    /// Sets the learning rate from the next step on.
    pub fn set_lr(&mut self, rate: f64) {
        match &mut self.config {
            OptimizerConfig::Sgd(Sgd { lr, .. }) | OptimizerConfig::AdamW(AdamW { lr, .. }) => {
                *lr = rate;
            }
        }
    }

    /// Sets the factor of gradients from the next step on, applied in the same pass as the update. 1 by default.
    pub fn set_grad_factor(&mut self, factor: f64) {
        self.grad_factor = factor;
    }

    /// The number of steps so far, including those before a checkpoint.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Continues after `steps` steps, whose state the caller has put into [`Optimizer::state_of`].
    pub fn resume_after(&mut self, steps: u64) {
        self.steps = steps;
    }

    /// Takes over the settings and the number of steps of an optimizer that has other ranges of the same layout.
    pub fn follow(&mut self, other: &Self) {
        self.config = other.config;
        self.steps = other.steps;
        self.grad_factor = other.grad_factor;
        self.undecayed.clone_from(&other.undecayed);
    }

    /// The state of all its ranges, in the order of [`OptimizerConfig::state_names`].
    pub fn state(&self) -> &[Held] {
        &self.state
    }

    /// The state of a range of flat storage, by name. Errors if the range does not lie within one of the optimizer's.
    pub fn state_of(&self, range: Range<usize>) -> Result<Vec<(&'static str, Tensor)>> {
        let part = |(name, state): (&&'static str, &Held)| Ok((*name, state.slice(range.clone())?));
        self.config.state_names().iter().zip(&self.state).map(part).collect()
    }

    /// The first tensor of the state with a value that is not finite, by name.
    pub fn first_not_finite(&self) -> Result<Option<&'static str>> {
        for (name, state) in self.config.state_names().iter().zip(&self.state) {
            if !is_finite(state.tensor())? {
                return Ok(Some(name));
            }
        }
        Ok(None)
    }

    /// The optimizer's settings.
    pub fn config(&self) -> &OptimizerConfig {
        &self.config
    }
}

impl WatchedStep {
    /// Adds the digests of a range of flat storage, given as gradients and values.
    fn add(
        &mut self,
        compute: &Compute,
        range: &Range<usize>,
        tensors: [&Tensor; 2],
    ) -> Result<()> {
        for (id, param) in self.layout.trained() {
            let own = param.range();
            let (start, end) = (own.start.max(range.start), own.end.min(range.end));
            if start >= end {
                continue;
            }
            for (sum, tensor) in self.digests[id.0].iter_mut().zip(tensors) {
                let part = tensor.slice(start - range.start..end - range.start)?;
                *sum += digest(compute, &part, start - own.start)?;
            }
        }
        Ok(())
    }
}

impl StepGraph {
    /// Whether these values and gradients are those of the graph, or the first that it sees.
    fn is_about(&mut self, parts: &[(Tensor, Tensor)]) -> bool {
        if self.parts.is_empty() {
            self.parts = parts.to_vec();
        }
        let is_same = |a: &Tensor, b: &Tensor| {
            a.buffer().is_same(b.buffer()) && a.byte_range() == b.byte_range()
        };
        self.parts.len() == parts.len()
            && self
                .parts
                .iter()
                .zip(parts)
                .all(|(of, to)| is_same(&of.0, &to.0) && is_same(&of.1, &to.1))
    }
}

#[cfg(test)]
mod tests {
    use paceline_memory::DType;

    use super::*;
    use crate::{Init, LayoutBuilder, ParamId};

    #[test]
    fn a_range_is_divided_at_parameters_without_decay() {
        let undecayed = [2..4, 4..5, 8..12];
        let all = [(0..2, true), (2..4, false), (4..5, false), (5..8, true), (8..10, false)];
        assert_eq!(pieces(&(0..10), &undecayed), all);
        assert_eq!(pieces(&(3..4), &undecayed), [(3..4, false)]);
        assert_eq!(pieces(&(5..8), &undecayed), [(5..8, true)]);
        assert_eq!(pieces(&(6..6), &undecayed), []);
        assert_eq!(pieces(&(1..9), &[]), [(1..9, true)]);
    }

    #[test]
    fn only_matrices_decay_whatever_ranges_a_rank_has() {
        let mut layout = LayoutBuilder::new();
        let mut unit = layout.unit("unit");
        let init = Init::Normal { std: 1.0 };
        let params = [
            unit.param("norm", [3], init),
            unit.param("weight", [5, 4], init),
            unit.param("bias", [5], init),
        ];
        let layout = Arc::new(layout.finish(1));
        let compute = Compute::new(1, Allocator::new()).unwrap();
        let adamw = AdamW { lr: 0.1, beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.5 };
        let sgd = Sgd { lr: 0.1, momentum: 0.5, weight_decay: 0.5 };
        for config in [OptimizerConfig::AdamW(adamw), OptimizerConfig::Sgd(sgd)] {
            let whole = 0..layout.len();
            for ranges in [vec![whole.clone()], vec![0..1, 1..18, 18..whole.end]] {
                let storage =
                    Storage::private(layout.clone(), DType::F32, &compute.allocator).unwrap();
                storage.initialize(1).unwrap();
                storage.grads().tensor().fill_zero().unwrap();
                let value =
                    |id: ParamId| storage.value(id).unwrap().read::<f32>().unwrap().to_vec();
                let before = params.map(value);
                let optimizer = Optimizer::of_ranges(config, &storage, ranges, &compute.allocator);
                let mut optimizer = optimizer.unwrap().decaying_matrices_only(&layout);
                optimizer.step(&compute, &storage).unwrap();
                let [norm, weight, bias] = params.map(value);
                assert_eq!((&norm, &bias), (&before[0], &before[2]), "without a gradient");
                for (now, before) in weight.iter().zip(&before[1]) {
                    // One step multiplies by 1 - 0.1 * 0.5, rounded once or twice.
                    assert!((now - 0.95 * before).abs() <= 1e-6 * before.abs(), "{now} {before}");
                }
            }
        }
    }
}
