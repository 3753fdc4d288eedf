//! Everything that is known of a run at its end. The figures of a run are computed from it.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use paceline_analysis::stats::nearest_rank;
use paceline_collectives::{Algorithm, Link, OpKind, Transport};
use paceline_model::Layout;
use paceline_strategies::Alternating;
use serde::Serialize;

use super::anatomy::Anatomy;
use super::rank_report::RankReport;
use super::steps::{AllSteps, KeptStep};
use crate::insight::advice::{self, Cost};
use crate::run::config::TrainConfig;
use crate::run::progress::{EpochSums, Evaluation};
use crate::text::ms;

/// What training came to.
#[derive(Debug)]
pub struct Outcome {
    /// How the ranks did reach each other; a single one needs no shared memory.
    pub transport: Transport,
    /// The link that was emulated.
    pub link: Option<Link>,
    /// Number of parameters.
    pub params: usize,
    /// Steps made, measured or not.
    pub num_steps: u64,
    /// The samples of the last epoch, as they were trained on.
    pub trained: Option<EpochSums>,
    /// The evaluation at the end.
    pub evaluated: Option<Evaluation>,
    /// Wall-clock time of the whole run on rank 0.
    pub total: Duration,
}

/// Everything that is known of a run at its end.
#[derive(Debug)]
pub struct Facts<'a> {
    /// What was asked for.
    pub config: &'a TrainConfig,
    /// What training came to.
    pub outcome: &'a Outcome,
    /// What the ranks say, in their order.
    pub reports: &'a [RankReport],
    /// The measured steps of all ranks.
    pub steps: AllSteps<'a>,
    /// Where the time of a step went.
    pub anatomy: Anatomy,
    /// What synchronised steps take longer than unsynchronised ones, if the two took turns.
    pub sync_cost: Option<SyncCost>,
    /// What follows for the user.
    pub advice: Option<String>,
}

impl<'a> Facts<'a> {
    /// Puts the reports of the ranks together.
    pub fn new(
        config: &'a TrainConfig,
        outcome: &'a Outcome,
        reports: &'a [RankReport],
        layout: &Layout,
    ) -> Self {
        let steps = AllSteps::new(reports.iter().map(|report| &report.steps));
        let strategy = &config.strategy;
        let anatomy = Anatomy::new(&steps, reports, layout, &strategy.bucket_units(layout));
        let cost: Cost = match outcome.link {
            Some(link) => on_link(link, config.world_size),
            None => advice::measured_cost(&anatomy.ops),
        };
        let advice = match strategy.sync_blocks {
            None => {
                let (kind, caps) = (strategy.settings().advice(), strategy.caps_for_ddp());
                advice::advice(strategy.name(), kind, caps, &anatomy, layout, &cost)
            }
            Some(_) => None,
        };
        let sync_cost = strategy.sync_blocks.and_then(|block| SyncCost::new(&steps, block));
        Self { config, outcome, reports, steps, anatomy, sync_cost, advice }
    }

    /// Whether all ranks hold the same parameters.
    pub fn replicas_agree(&self) -> bool {
        self.reports.windows(2).all(|pair| pair[0].weights_sha256 == pair[1].weights_sha256)
    }

    /// The most bytes alive at once on any rank, by category.
    pub fn peak_bytes(&self) -> BTreeMap<&str, u64> {
        let mut peaks = BTreeMap::new();
        for (category, &bytes) in self.reports.iter().flat_map(|report| &report.peak_bytes) {
            let peak = peaks.entry(category.as_str()).or_insert(0);
            *peak = bytes.max(*peak);
        }
        peaks
    }

    /// The traces of the ranks that wrote one.
    pub fn traces(&self) -> Vec<&Path> {
        self.reports.iter().filter_map(|report| report.trace.as_deref()).collect()
    }

    /// The greatest value of any rank.
    pub fn max(&self, part: impl Fn(&RankReport) -> u64) -> u64 {
        self.reports.iter().map(part).max().unwrap_or(0)
    }

    /// The sum over all ranks.
    pub fn sum(&self, part: impl Fn(&RankReport) -> u64) -> u64 {
        self.reports.iter().map(part).sum()
    }
}

/// What an all-reduce takes on an emulated link.
fn on_link(link: Link, world_size: usize) -> Cost {
    Box::new(move |bytes| {
        let time = link.time(OpKind::AllReduce, Algorithm::Direct, world_size, bytes);
        time.as_secs_f64() * 1e3
    })
}

/// What synchronisation adds to a step, from blocks of steps with and without it that took turns.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct SyncCost {
    /// Median step with it.
    pub synchronised_ms: f64,
    /// Median step without.
    pub unsynchronised_ms: f64,
    /// The difference in percent of the step without.
    pub added_pct: f64,
}

impl SyncCost {
    fn new(steps: &AllSteps, block: usize) -> Option<Self> {
        let median = |is_synchronised: bool| {
            let belongs = |number: u64| {
                let step = number as usize;
                // The first step of a block also waits for what the ranks have drifted apart before.
                let is_first = step.is_multiple_of(block);
                Alternating::is_synchronised(block, step) == is_synchronised && !is_first
            };
            let ranks = steps.each().filter(|ranks| belongs(ranks[0].number));
            let mean = |ranks: Vec<_>| {
                ranks.iter().map(|step: &KeptStep| step.step).sum::<u64>() / ranks.len() as u64
            };
            let steps: Vec<u64> = ranks.map(mean).collect();
            nearest_rank(&steps, 0.5).map(ms)
        };
        let (synchronised_ms, unsynchronised_ms) = (median(true)?, median(false)?);
        let added_pct = 100.0 * (synchronised_ms / unsynchronised_ms - 1.0);
        Some(Self { synchronised_ms, unsynchronised_ms, added_pct })
    }
}
