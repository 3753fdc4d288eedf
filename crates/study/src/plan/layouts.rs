//! Layouts: every way to divide a step among the ranks.
//!
//! Input: the number of ranks, the samples of a step, and the settings that the user has stated. Output: a list, and the flags of
//! `paceline train` for each. Whether a model can be divided like that is not known here.

use paceline_collectives::{Axis, MeshShape};
use paceline_failure::{Failure, Result};
use paceline_settings::named::PrecisionName;
use paceline_strategies::schedule::SCHEDULES;
use serde::Serialize;

use crate::spec::Spec;
use crate::usage;

/// The stages of ZeRO, from none to all, and the strategy of one rank.
const STRATEGIES: [&str; 5] = ["ddp", "sharded1", "sharded2", "sharded3", "single"];

/// The most micro-batches of a step of a pipeline.
const MAX_IN_PIPELINE: usize = 256;

/// A way to divide a step among the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct StepLayout {
    /// Ranks that divide each layer.
    pub tp: usize,
    /// Ranks that have stages of a pipeline.
    pub pp: usize,
    /// Ranks, or groups of ranks, that have samples of their own.
    pub dp: usize,
    /// How these keep their models equal.
    pub strategy: &'static str,
    /// The schedule of the pipeline.
    pub schedule: Option<&'static str>,
    /// Samples of a micro-batch on a rank.
    pub micro_batch: usize,
    /// Micro-batches of a step.
    pub accumulate: usize,
    /// Whether the backward pass computes activations again.
    pub checkpoint_activations: bool,
    /// The element type of products.
    pub precision: PrecisionName,
}

impl StepLayout {
    /// All layouts of `ranks` ranks for a step of `samples` samples. What `base` states is the same in all. Fails if there are none.
    pub fn all(
        base: &Spec,
        ranks: usize,
        samples: usize,
        precisions: &[PrecisionName],
    ) -> Result<Vec<Self>> {
        let stated = StatedLayout::of(base, ranks)?;
        let mut all = Vec::new();
        let grids = divisors(ranks).flat_map(|tp| divisors(ranks / tp).map(move |pp| (tp, pp)));
        for (tp, pp) in grids.filter(|(tp, pp)| stated.may_be(*tp, *pp)) {
            let dp = ranks / tp / pp;
            if !samples.is_multiple_of(dp) {
                continue;
            }
            for micro_batch in stated.sizes(samples / dp) {
                let accumulate = samples / dp / micro_batch;
                if pp > 1 && !(2..=MAX_IN_PIPELINE).contains(&accumulate) {
                    continue;
                }
                for strategy in stated.strategies(dp, ranks) {
                    for schedule in stated.schedules(pp) {
                        for &checkpoint_activations in &stated.recomputes {
                            let with = |&precision: &PrecisionName| Self {
                                tp,
                                pp,
                                dp,
                                strategy,
                                schedule,
                                micro_batch,
                                accumulate,
                                checkpoint_activations,
                                precision,
                            };
                            all.extend(precisions.iter().map(with));
                        }
                    }
                }
            }
        }
        if all.is_empty() {
            let size = stated.micro_batch;
            let of = size
                .map_or(String::new(), |of| format!(" in micro-batches of {of} (--batch-size)"));
            let least = samples.next_multiple_of(ranks * size.unwrap_or(1));
            return usage(format!(
                "--global-batch-size {samples}: no layout of {ranks} ranks divides it{of}; pass {least}"
            ));
        }
        Ok(all)
    }

    /// One micro-batch on a rank that has all stages, or on those that divide its layers.
    pub fn alone(&self) -> Self {
        let strategy = if self.tp > 1 { "ddp" } else { "single" };
        Self { pp: 1, dp: 1, accumulate: 1, schedule: None, strategy, ..*self }
    }

    /// The number of ranks that share the state of each parameter.
    pub fn shares(&self) -> usize {
        if self.strategy.starts_with("sharded") { self.dp } else { 1 }
    }

    /// The flags of `paceline train`.
    pub fn spec(&self, base: &Spec) -> Spec {
        let dp = if self.shares() > 1 { "shard" } else { "dp" };
        // An epoch has whole steps.
        let batches = self.accumulate * 20usize.div_ceil(self.accumulate);
        base.without(&["batch-size"])
            .with("nproc", self.pp * self.dp * self.tp)
            .with("global-batch-size", self.micro_batch * self.dp)
            .with("strategy", self.strategy)
            .with("precision", self.precision.name())
            .with_default("steps-per-epoch", batches)
            .set("accumulate", Some(self.accumulate).filter(|count| *count > 1))
            .set("mesh", (self.pp * self.tp > 1).then(|| self.axes(dp, "=", ",")))
            .set("schedule", self.schedule)
            .set("checkpoint-activations", self.checkpoint_activations.then_some(true))
    }

    /// The grid of ranks in words.
    pub fn mesh(&self) -> String {
        let axes = self.axes("dp", "", " ");
        if axes.is_empty() { "1".to_owned() } else { axes }
    }

    /// The axes of several ranks.
    fn axes(&self, dp: &str, equals: &str, separator: &str) -> String {
        let axes = [("pp", self.pp), (dp, self.dp), ("tp", self.tp)];
        let axes = axes.into_iter().filter(|(_, size)| *size > 1);
        let axes = axes.map(|(axis, size)| format!("{axis}{equals}{size}"));
        axes.collect::<Vec<_>>().join(separator)
    }
}

/// The parts of a layout that the user has stated.
struct StatedLayout {
    mesh: Option<MeshShape>,
    strategy: Option<&'static str>,
    schedule: Option<String>,
    micro_batch: Option<usize>,
    /// Whether activations are computed again: both, for a model that can.
    recomputes: Vec<bool>,
}

impl StatedLayout {
    fn of(base: &Spec, ranks: usize) -> Result<Self> {
        let word = |key: &str| base.get(key).and_then(<[String]>::first).cloned();
        let known = |name: String| {
            STRATEGIES.into_iter().find(|known| *known == name).ok_or_else(|| {
                let all = STRATEGIES[..4].join(", ");
                Failure::Usage(format!(
                    "--strategy {name}: layouts are planned for {all}; pass one of them, or leave it out"
                ))
            })
        };
        let strategy = word("strategy").map(known).transpose()?;
        let mesh = word("mesh").map(|text| text.parse::<MeshShape>()).transpose();
        let mesh = mesh.map_err(|error| Failure::Usage(format!("--mesh: {error}")))?;
        if let Some(mesh) = mesh.as_ref().filter(|mesh| mesh.num_ranks() != Some(ranks)) {
            return usage(format!(
                "--mesh {mesh}: pass sizes whose product is {ranks}, the ranks of --on"
            ));
        }
        let recomputes = match word("checkpoint-activations") {
            None if word("model").as_deref() == Some("llama") => vec![false, true],
            stated => vec![stated.as_deref() == Some("true")],
        };
        let (schedule, micro_batch) = (word("schedule"), base.number("batch-size"));
        Ok(Self { mesh, strategy, schedule, micro_batch, recomputes })
    }

    fn may_be(&self, tp: usize, pp: usize) -> bool {
        let sizes = |mesh: &MeshShape| (mesh.size(Axis::Tp), mesh.size(Axis::Pp)) == (tp, pp);
        self.mesh.as_ref().is_none_or(sizes) && (self.schedule.is_none() || pp > 1)
    }

    /// The sizes of micro-batches of so many samples: powers of two, and all of them.
    fn sizes(&self, samples: usize) -> Vec<usize> {
        let powers = (0..usize::BITS).map(|bit| 1usize << bit).take_while(|size| *size < samples);
        let sizes = self.micro_batch.map_or(powers.chain([samples]).collect(), |size| vec![size]);
        sizes.into_iter().filter(|size| samples.is_multiple_of(*size)).collect()
    }

    fn strategies(&self, dp: usize, ranks: usize) -> Vec<&'static str> {
        match (self.strategy, dp) {
            (Some(strategy), _) => vec![strategy],
            (None, 1) if ranks == 1 => vec!["single"],
            (None, 1) => vec!["ddp"],
            (None, _) => STRATEGIES[..4].to_vec(),
        }
    }

    fn schedules(&self, pp: usize) -> Vec<Option<&'static str>> {
        let is_meant = |name: &&str| self.schedule.as_ref().is_none_or(|only| only == name);
        let named = SCHEDULES.iter().map(|of| of.name()).filter(is_meant).map(Some);
        if pp == 1 { vec![None] } else { named.collect() }
    }
}

/// All divisors, the smallest first.
fn divisors(of: usize) -> impl Iterator<Item = usize> {
    (1..=of).filter(move |size| of.is_multiple_of(*size))
}
