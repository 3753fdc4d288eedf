//! Everything known about a run at its end, from which its figures are computed.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

use paceline_analysis::advice::Told;
use paceline_analysis::advice::cost::Cost;
use paceline_analysis::limit::Operations;
use paceline_checkpoint::progress::{EpochSums, Evaluation, LossScaling};
use paceline_choices::strategies::Advice;
use paceline_collectives::{Algorithm, Axis, Link, OpKind, Transport};
use paceline_host::text::ms;
use paceline_launch::device::Device;
use paceline_model::{BlockCost, Layout};
use paceline_settings::config::TrainConfig;
use paceline_strategies::SyncBlocks;
use paceline_strategies::schedule::IdleCause;
use paceline_table::stats::nearest_rank;
use serde::Serialize;

use crate::insight::advice::{Situation, advice};
use crate::insight::anatomy::Anatomy;
use crate::insight::conversion::Conversion;
use crate::insight::gathers::Uses;
use crate::insight::memory::{Need, Needs};
use crate::insight::observed::observed;
use crate::insight::pipeline::PipelineFacts;
use crate::insight::pipeline_advice;
use crate::record::card_use::CardUse;
use crate::record::memory::{Bytes, RESERVED, RankMemory};
use crate::record::rank_report::RankReport;
use crate::record::ranks::Ranks;
use crate::record::steps::{AllSteps, KeptStep};

/// The result of training.
#[derive(Debug)]
pub struct Outcome {
    /// The transport that was really used; a single rank needs no shared memory.
    pub transport: Transport,
    /// The link that was emulated.
    pub link: Option<Link>,
    /// Number of parameters.
    pub params: usize,
    /// Steps made, measured or not.
    pub num_steps: u64,
    /// All optimizer steps, those before a resumption included, if the run was asked to end early.
    pub stopped_after: Option<u64>,
    /// The sums over the last epoch of training.
    pub trained: Option<EpochSums>,
    /// Whether the model classifies.
    pub has_classes: bool,
    /// The memory that the ranks need by prediction.
    pub predicted: Needs,
    /// The loss scale at the end, if the loss is scaled.
    pub scaling: Option<LossScaling>,
    /// The evaluation at the end.
    pub evaluated: Option<Evaluation>,
    /// How often the ranks have met again, and how long it took: because some were lost, and because others have joined.
    pub regroups: [(u64, Duration); 2],
    /// Wall-clock time of the whole run on rank 0.
    pub total: Duration,
    /// Floating-point operations of the model's products for a sample in a step; `None` if they cannot be counted.
    pub flops_per_sample: Option<u64>,
    /// The arithmetic of each block, if the ranks are a pipeline.
    pub block_flops: Option<Vec<BlockCost>>,
    /// The unit of each block.
    pub block_names: Vec<String>,
}

/// Everything known about a run at its end.
#[derive(Debug)]
pub struct Facts<'a> {
    /// The configuration.
    pub config: &'a TrainConfig,
    /// The result of training.
    pub outcome: &'a Outcome,
    /// The reports of the ranks, in rank order.
    pub reports: &'a [RankReport],
    /// The measured steps of all ranks.
    pub steps: AllSteps<'a>,
    /// Where the time of a step went.
    pub anatomy: Anatomy,
    /// How much longer synchronized steps take than unsynchronized ones, if the two alternated.
    pub sync_cost: Option<SyncCost>,
    /// The uses of gathered units in a step, and how many are gathered ahead, if any.
    pub gathers: Option<(Uses, usize)>,
    /// The idle time of the ranks, if they are a pipeline.
    pub pipeline: Option<PipelineFacts>,
    /// The advice for the user, and its numbers.
    pub told: Option<Told>,
}

impl<'a> Facts<'a> {
    /// Combines the reports of the ranks.
    pub fn new(
        config: &'a TrainConfig,
        outcome: &'a Outcome,
        reports: &'a [RankReport],
        layout: &Layout,
    ) -> Self {
        let steps = AllSteps::new(reports.iter().map(|report| &report.steps));
        let strategy = &config.strategy;
        // Stages have different buckets, of which there is no mean.
        let buckets = config.pipeline.is_none().then(|| strategy.bucket_units(layout));
        let anatomy = Anatomy::new(&steps, reports, layout, &buckets.unwrap_or_default());
        let (observed, moments) = observed(reports);
        let told = match (strategy.sync_blocks, config.device, &config.pipeline) {
            (None, Device::Cpu, None) => advice(Situation {
                strategy: strategy.name(),
                kind: strategy.settings().advice(),
                caps: strategy.caps_for_ddp(),
                anatomy: &anatomy,
                observed: &observed,
                moments: &moments,
                layout,
                link: outcome.link.map(|link| {
                    let cost = on_link(link, config.comm.algorithm, config.world_size);
                    let is_divided = config.mesh.size(Axis::Tp) > 1;
                    (cost, is_divided && !config.model.divided().overlaps)
                }),
                conversion: &|| Conversion::measured(layout.trained_len(), config.threads),
            }),
            // Times of the host show when work for an accelerator was launched, not when it ran. In a pipeline ranks wait
            // by plan.
            _ => None,
        };
        let pipeline = PipelineFacts::new(config, reports);
        let told = told.or_else(|| {
            let (facts, flops) = (pipeline.as_ref()?, outcome.block_flops.as_ref()?);
            let name = |block: usize| outcome.block_names[block].clone();
            pipeline_advice::advise(facts, config, &anatomy.means, flops, name)
        });
        let sync_cost = strategy.sync_blocks.and_then(|block| SyncCost::new(&steps, block));
        let ahead = match strategy.settings().advice() {
            Advice::ChooseGathers { prefetch: Some(prefetch) } => prefetch,
            _ => anatomy.gathers.len(),
        };
        let gathers = Uses::measured(&anatomy.gathers, anatomy.backward_end_ms);
        let gathers = gathers.map(|uses| (uses, ahead));
        Self { config, outcome, reports, steps, anatomy, sync_cost, gathers, pipeline, told }
    }

    /// A part of the idle time of a pipeline, in milliseconds per step and rank.
    pub fn idle(&self, cause: IdleCause) -> Option<f64> {
        Some(self.pipeline.as_ref()?.mean().of(cause))
    }

    /// Whether all ranks hold the same parameters.
    pub fn replicas_agree(&self) -> bool {
        self.reports.windows(2).all(|pair| pair[0].weights_sha256 == pair[1].weights_sha256)
    }

    /// The most bytes alive at once, by category.
    pub fn peak_bytes(&self, ranks: Ranks) -> BTreeMap<&str, u64> {
        let all = self.reports.iter().flat_map(|report| report.memory.peak_bytes.keys());
        // Free memory of a pool is in no tensor.
        let names: BTreeSet<&str> = all.map(String::as_str).filter(|of| *of != RESERVED).collect();
        let of = |name: &str, report: &RankReport| {
            report.memory.peak_bytes.get(name).copied().unwrap_or(0)
        };
        let peak = |name| Some((name, self.combine(ranks, |report| of(name, report))?));
        names.into_iter().filter_map(peak).collect()
    }

    /// The memory of each rank by phase.
    pub fn memory(&self) -> Vec<&RankMemory> {
        self.reports.iter().map(|report| &report.memory).collect()
    }

    /// The memory that each rank needs by prediction, by category.
    pub fn memory_predicted(&self) -> Vec<Bytes> {
        self.outcome.predicted.ranks.iter().map(Need::bytes).collect()
    }

    /// The predicted mean PSS of a rank, if each rank is a process.
    pub fn predicted_resident_bytes(&self) -> Option<f64> {
        let ranks = &self.outcome.predicted.ranks;
        let all = ranks.iter().map(|need| need.resident).collect::<Option<Vec<u64>>>()?;
        (!all.is_empty()).then(|| all.iter().sum::<u64>() as f64 / all.len() as f64)
    }

    /// The traces of the ranks that wrote one.
    pub fn traces(&self) -> Vec<&Path> {
        self.reports.iter().filter_map(|report| report.trace.as_deref()).collect()
    }

    /// The files that could not be written, by rank.
    pub fn missing_files(&self) -> Vec<String> {
        let of_rank = |(rank, report): (usize, &RankReport)| {
            let missing = report.missing_files.iter();
            missing.map(move |what| format!("rank {rank}: {what}")).collect::<Vec<_>>()
        };
        self.reports.iter().enumerate().flat_map(of_rank).collect()
    }

    /// Floating-point operations of the model per second and rank, in the measured steps.
    pub fn model_flops_per_s(&self, ranks: Ranks) -> Option<f64> {
        let of_sample = self.outcome.flops_per_sample? as f64;
        Some(self.steps.samples_per_s(ranks)? * of_sample / self.config.world_size as f64)
    }

    /// The most floating-point operations per second that a rank can make.
    pub fn peak_flops_per_s(&self, ranks: Ranks) -> Option<f64> {
        let peaks = self.reports.iter().map(|report| report.peak_flops_per_s);
        ranks.combine(peaks).filter(|peak| *peak > 0.0)
    }

    /// The operations of the recorded steps of all ranks, if the run was profiled.
    pub fn operations(&self) -> Option<Operations> {
        let mut all = Operations::default();
        self.reports.iter().for_each(|report| all.add_rank(report.operations.clone()));
        (!all.all.is_empty()).then_some(all)
    }

    /// The driver's data about the ranks' cards.
    pub fn cards(&self) -> impl Iterator<Item = &CardUse> {
        self.reports.iter().filter_map(|report| report.card.as_ref())
    }

    /// A number of each rank's report, combined, without a fraction.
    pub fn combine(&self, ranks: Ranks, part: impl Fn(&RankReport) -> u64) -> Option<u64> {
        Some(ranks.combine(self.reports.iter().map(|report| part(report) as f64))? as u64)
    }
}

/// The time of an all-reduce on an emulated link.
fn on_link(link: Link, algorithm: Algorithm, world_size: usize) -> Cost {
    let kind = OpKind::AllReduce;
    Box::new(move |bytes| {
        let algorithm = algorithm.recommended(kind, world_size, bytes, &link);
        let time = link.time(kind, algorithm, world_size, bytes);
        time.as_secs_f64() * 1e3
    })
}

/// The time that synchronization adds to a step, from alternating blocks of steps with and without it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct SyncCost {
    /// Median step with synchronization, in milliseconds.
    #[serde(rename = "synchronised_ms")]
    pub synchronized_ms: f64,
    /// Median step without synchronization, in milliseconds.
    #[serde(rename = "unsynchronised_ms")]
    pub unsynchronized_ms: f64,
    /// The difference in percent of the step without.
    pub added_pct: f64,
}

impl SyncCost {
    fn new(steps: &AllSteps, block: usize) -> Option<Self> {
        let blocks = SyncBlocks::new(block).ok()?;
        let median = |is_synchronized: bool| {
            let belongs = |number: u64| {
                let step = number as usize;
                // In the first step of a block, ranks also wait because they drifted apart before.
                let is_first = step.is_multiple_of(block);
                blocks.is_synchronized(step) == is_synchronized && !is_first
            };
            let ranks = steps.each().filter(|ranks| belongs(ranks[0].number));
            let mean = |ranks: Vec<_>| {
                let times = ranks.iter().map(|step: &KeptStep| step.step as f64);
                Ranks::Mean.combine(times).unwrap_or(0.0) as u64
            };
            let steps: Vec<u64> = ranks.map(mean).collect();
            nearest_rank(&steps, 0.5).map(ms)
        };
        let (synchronized_ms, unsynchronized_ms) = (median(true)?, median(false)?);
        let added_pct = 100.0 * (synchronized_ms / unsynchronized_ms - 1.0);
        Some(Self { synchronized_ms, unsynchronized_ms, added_pct })
    }
}
