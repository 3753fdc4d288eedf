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
pub struct Layout {
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

impl Layout {
    /// All layouts of `ranks` ranks for a step of `samples` samples. What `base` states is the same in all. Fails if there are none.
    pub fn all(
        base: &Spec,
        ranks: usize,
        samples: usize,
        precisions: &[PrecisionName],
    ) -> Result<Vec<Self>> {
        let stated = |key: &str| base.get(key).and_then(<[String]>::first).cloned();
        let named = stated("strategy");
        if let Some(name) =
            named.as_deref().filter(|name| !STRATEGIES.contains(name) && *name != "single")
        {
            return usage(format!(
                "--strategy {name}: layouts are planned for {}; pass one of them, or leave it out",
                STRATEGIES.join(", ")
            ));
        }
        let stated_size = base.number("batch-size");
        let is_llama = stated("model").as_deref() == Some("llama");
        let choices = if is_llama && !base.has("checkpoint-activations") {
            vec![false, true]
        } else {
            vec![base.has("checkpoint-activations")]
        };
        let mesh = stated("mesh").map(|text| text.parse::<MeshShape>()).transpose();
        let mesh = mesh.map_err(|error| Failure::Usage(format!("--mesh: {error}")))?;
        if let Some(mesh) = mesh.as_ref().filter(|mesh| mesh.num_ranks() != Some(ranks)) {
            return usage(format!(
                "--mesh {mesh}: pass sizes whose product is {ranks}, the ranks of --on"
            ));
        }
        let only = stated("schedule");
        let is_meant = |tp, pp| {
            mesh.as_ref().is_none_or(|mesh| (mesh.size(Axis::Tp), mesh.size(Axis::Pp)) == (tp, pp))
        };
        let mut all = Vec::new();
        for (tp, pp) in divisors(ranks).flat_map(|tp| divisors(ranks / tp).map(move |pp| (tp, pp)))
        {
            let dp = ranks / tp / pp;
            if !samples.is_multiple_of(dp) || !is_meant(tp, pp) || (only.is_some() && pp == 1) {
                continue;
            }
            let strategies: Vec<String> = match (&named, dp, ranks) {
                (Some(name), ..) => vec![name.clone()],
                (None, 1, 1) => vec!["single".to_owned()],
                (None, 1, _) => vec![STRATEGIES[0].to_owned()],
                (None, ..) => STRATEGIES.map(str::to_owned).to_vec(),
            };
            let own = samples / dp;
            let powers = (0..usize::BITS - 1).map(|bits| 1 << bits).take_while(|size| *size < own);
            let sizes: Vec<usize> = match stated_size {
                Some(size) => own.is_multiple_of(size).then_some(size).into_iter().collect(),
                None => powers.filter(|size| own.is_multiple_of(*size)).chain([own]).collect(),
            };
            let schedules: Vec<Option<&'static str>> = if pp == 1 {
                vec![None]
            } else {
                SCHEDULES
                    .iter()
                    .map(|of| of.name())
                    .filter(|name| only.as_ref().is_none_or(|only| only == name))
                    .map(Some)
                    .collect()
            };
            let variants = strategies.iter().flat_map(|strategy| {
                let own = schedules.iter().map(move |schedule| (strategy.clone(), *schedule));
                own.collect::<Vec<_>>()
            });
            for ((strategy, schedule), micro_batch) in
                variants.flat_map(|of| sizes.iter().map(move |size| (of.clone(), *size)))
            {
                let accumulate = own / micro_batch;
                if pp > 1 && !(2..=MAX_IN_PIPELINE).contains(&accumulate) {
                    continue;
                }
                for &checkpoint_activations in &choices {
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
            let of = stated_size.map_or(String::new(), |size| {
                format!(" in micro-batches of {size} (--batch-size)")
            });
            return usage(format!(
                "--global-batch-size {samples}: no layout of {ranks} ranks divides it{of}; pass {}",
                samples.next_multiple_of(ranks * stated_size.unwrap_or(1))
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

/// All divisors, the smallest first.
fn divisors(of: usize) -> impl Iterator<Item = usize> {
    (1..=of).filter(move |size| of.is_multiple_of(*size))
}
