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

/// The stages of ZeRO, from none to all.
pub const STRATEGIES: [&str; 4] = ["ddp", "sharded1", "sharded2", "sharded3"];

/// The most micro-batches of a step of a pipeline.
const MAX_IN_PIPELINE: usize = 256;

/// A way to divide a step among the ranks.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepLayout {
    /// Ranks that divide each layer.
    pub tp: usize,
    /// Ranks that have stages of a pipeline.
    pub pp: usize,
    /// Ranks, or groups of ranks, that have samples of their own.
    pub dp: usize,
    /// How these keep their models equal.
    pub strategy: String,
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
        for (tp, pp) in divisors(ranks).flat_map(|tp| divisors(ranks / tp).map(move |pp| (tp, pp)))
        {
            let dp = ranks / tp / pp;
            if !samples.is_multiple_of(dp) || !stated.may_be(tp, pp) {
                continue;
            }
            for micro_batch in stated.sizes(samples / dp) {
                let accumulate = samples / dp / micro_batch;
                if pp > 1 && !(2..=MAX_IN_PIPELINE).contains(&accumulate) {
                    continue;
                }
                for (strategy, schedule, checkpoint_activations) in stated.choices(dp, pp, ranks) {
                    let with = |precision: &PrecisionName| Self {
                        tp,
                        pp,
                        dp,
                        strategy: strategy.clone(),
                        schedule,
                        micro_batch,
                        accumulate,
                        checkpoint_activations,
                        precision: *precision,
                    };
                    all.extend(precisions.iter().map(with));
                }
            }
        }
        if all.is_empty() {
            let size = stated.micro_batch;
            let of = size.map_or(String::new(), |size| {
                format!(" in micro-batches of {size} (--batch-size)")
            });
            return usage(format!(
                "--global-batch-size {samples}: no layout of {ranks} ranks divides it{of}; pass {}",
                samples.next_multiple_of(ranks * size.unwrap_or(1))
            ));
        }
        Ok(all)
    }

    /// The flags of `paceline train`.
    pub fn spec(&self, base: &Spec) -> Spec {
        let is_sharded = self.strategy.starts_with("sharded");
        let axes =
            [("pp", self.pp), (if is_sharded { "shard" } else { "dp" }, self.dp), ("tp", self.tp)];
        let axes: Vec<String> = axes
            .iter()
            .filter(|(_, size)| *size > 1)
            .map(|(axis, size)| format!("{axis}={size}"))
            .collect();
        let spec = base
            .without(&["batch-size", "mesh", "schedule"])
            .with("nproc", self.pp * self.dp * self.tp)
            .with("global-batch-size", self.micro_batch * self.dp)
            .with("strategy", &self.strategy)
            .with("precision", self.precision.name());
        let spec =
            if self.accumulate > 1 { spec.with("accumulate", self.accumulate) } else { spec };
        // An epoch has whole steps.
        let spec = spec
            .with_default("steps-per-epoch", self.accumulate * 20usize.div_ceil(self.accumulate));
        let spec = if self.pp * self.tp > 1 { spec.with("mesh", axes.join(",")) } else { spec };
        let spec = if self.checkpoint_activations {
            spec.with("checkpoint-activations", true)
        } else {
            spec
        };
        self.schedule.map_or(spec.clone(), |schedule| spec.with("schedule", schedule))
    }

    /// The grid of ranks in words.
    pub fn mesh(&self) -> String {
        let axes = [("pp", self.pp), ("dp", self.dp), ("tp", self.tp)];
        let axes: Vec<String> = axes
            .iter()
            .filter(|(_, size)| *size > 1)
            .map(|(axis, size)| format!("{axis}{size}"))
            .collect();
        if axes.is_empty() { "1".to_owned() } else { axes.join(" ") }
    }
}

/// The parts of a layout that the user has stated.
struct StatedLayout {
    mesh: Option<MeshShape>,
    strategy: Option<String>,
    schedule: Option<String>,
    micro_batch: Option<usize>,
    /// Whether activations are computed again: both, for a model that can.
    recomputes: Vec<bool>,
}

impl StatedLayout {
    fn of(base: &Spec, ranks: usize) -> Result<Self> {
        let word = |key: &str| base.get(key).and_then(<[String]>::first).cloned();
        let strategy = word("strategy");
        let is_unknown = |name: &&str| !STRATEGIES.contains(name) && *name != "single";
        if let Some(name) = strategy.as_deref().filter(is_unknown) {
            return usage(format!(
                "--strategy {name}: layouts are planned for {}; pass one of them, or leave it out",
                STRATEGIES.join(", ")
            ));
        }
        let mesh = word("mesh").map(|text| text.parse::<MeshShape>()).transpose();
        let mesh = mesh.map_err(|error| Failure::Usage(format!("--mesh: {error}")))?;
        if let Some(mesh) = mesh.as_ref().filter(|mesh| mesh.num_ranks() != Some(ranks)) {
            return usage(format!(
                "--mesh {mesh}: pass sizes whose product is {ranks}, the ranks of --on"
            ));
        }
        let (flag, is_llama) =
            ("checkpoint-activations", word("model").as_deref() == Some("llama"));
        let recomputes =
            if is_llama && !base.has(flag) { vec![false, true] } else { vec![base.has(flag)] };
        let (schedule, micro_batch) = (word("schedule"), base.number("batch-size"));
        Ok(Self { mesh, strategy, schedule, micro_batch, recomputes })
    }

    fn may_be(&self, tp: usize, pp: usize) -> bool {
        let sizes = |mesh: &MeshShape| (mesh.size(Axis::Tp), mesh.size(Axis::Pp)) == (tp, pp);
        self.mesh.as_ref().is_none_or(sizes) && (self.schedule.is_none() || pp > 1)
    }

    /// The sizes of micro-batches of so many samples: powers of two, and all of them.
    fn sizes(&self, samples: usize) -> Vec<usize> {
        let powers = (0..usize::BITS - 1).map(|bits| 1 << bits).take_while(|size| *size < samples);
        let fits = |size: &usize| samples.is_multiple_of(*size);
        match self.micro_batch {
            Some(size) => Some(size).filter(fits).into_iter().collect(),
            None => powers.filter(fits).chain([samples]).collect(),
        }
    }

    /// The strategies, with the schedules, and whether activations are computed again.
    fn choices(
        &self,
        dp: usize,
        pp: usize,
        ranks: usize,
    ) -> Vec<(String, Option<&'static str>, bool)> {
        let strategies: Vec<&str> = match (&self.strategy, dp, ranks) {
            (Some(name), ..) => vec![name],
            (None, 1, 1) => vec!["single"],
            (None, 1, _) => vec![STRATEGIES[0]],
            (None, ..) => STRATEGIES.to_vec(),
        };
        let is_meant = |name: &&str| self.schedule.as_ref().is_none_or(|only| only == name);
        let named = SCHEDULES.iter().map(|of| of.name()).filter(is_meant).map(Some);
        let schedules: Vec<_> = if pp == 1 { vec![None] } else { named.collect() };
        let mut all = Vec::new();
        for strategy in strategies {
            for &schedule in &schedules {
                all.extend(self.recomputes.iter().map(|of| (strategy.to_owned(), schedule, *of)));
            }
        }
        all
    }
}

/// All divisors, the smallest first.
fn divisors(of: usize) -> impl Iterator<Item = usize> {
    (1..=of).filter(move |size| of.is_multiple_of(*size))
}
