//! How far a run has come on a rank, from one step to the next.
//!
//! This file knows no ranks, and nothing of how a step is made.

use std::time::{Duration, Instant};

use paceline_checkpoint::progress::{Best, EpochSums, LossScaling, Progress};
use paceline_host::resources::cpu_times::CpuTimes;
use paceline_observe::record::meter::Meter;
use paceline_observe::record::steps::StepLog;
use paceline_settings::config::TrainConfig;
use paceline_strategies::Stepped;
use paceline_trace::now_ns;
use serde::{Deserialize, Serialize};

/// How far the run has come on this rank.
pub(crate) struct Training {
    pub(crate) progress: Progress,
    pub(crate) steps: StepLog,
    pub(crate) meter: Meter,
    pub(crate) cpu: CpuWait,
    /// All steps of this process, measured or not.
    pub(crate) num_steps: u64,
    /// The last epoch and its sums, as far as it was trained.
    pub(crate) last: Option<(u64, EpochSums)>,
    /// The last step, until all that follows it before the next one is done.
    pub(crate) after: Option<AfterStep>,
    /// Whether the run ends early because somebody asked for it.
    pub(crate) is_stopped: bool,
    pub(crate) regroups: Regroups,
}

/// The wait of a rank's main thread for a core.
#[derive(Default)]
pub(crate) struct CpuWait {
    /// The processor times at the beginning of the first measured step.
    pub(crate) begin: Option<CpuTimes>,
    /// The percentage of the measured steps in which this rank had no core, if it is known.
    pub(crate) pct: Option<f64>,
}

/// How often the ranks have met again, in a run whose ranks come and go.
pub(crate) struct Regroups {
    /// Whether they do so after this step, because others wait to join them.
    pub(crate) are_due: bool,
    /// How often, and how long it took: because some were lost, and because others have joined.
    pub(crate) made: [(u64, Duration); 2],
    /// When the batches of the last step were requested.
    pub(crate) asked_ns: u64,
    /// The end of the last step.
    pub(crate) step_end: Instant,
    /// Its outcome.
    pub(crate) stepped: Option<Stepped>,
    /// The last step that the listeners know.
    pub(crate) reported: u64,
}

/// A step that is done: evaluations and checkpoints may be due.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct AfterStep {
    /// Its epoch.
    pub(crate) epoch: u64,
    /// The sums of the epoch, if this was its last step.
    pub(crate) ended: Option<EpochSums>,
    /// The evaluations before it.
    pub(crate) best: Best,
}

/// How the steps of a rank ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TrainedUntil {
    /// The run is over.
    Over,
    /// The ranks meet again.
    Regroup,
}

impl Training {
    pub(crate) fn new(progress: Progress, num_steps: u64) -> Self {
        Self {
            progress,
            steps: StepLog::new(num_steps),
            meter: Meter::default(),
            cpu: CpuWait::default(),
            num_steps: 0,
            last: None,
            after: None,
            is_stopped: false,
            regroups: Regroups {
                are_due: false,
                made: [(0, Duration::ZERO); 2],
                asked_ns: now_ns(),
                step_end: Instant::now(),
                stepped: None,
                reported: 0,
            },
        }
    }

    /// Advances by a step over `num_batches` batches of all ranks.
    pub(crate) fn advance(
        &mut self,
        config: &TrainConfig,
        num_batches: usize,
        samples: usize,
        stepped: &Stepped,
    ) {
        let Stepped { loss, is_updated, .. } = stepped;
        let epoch = self.progress.position.epoch;
        self.progress.scaling = rescaled(config, self.progress.scaling, !is_updated);
        let ended = self.progress.advance(num_batches, config.steps_per_epoch, samples, loss);
        self.after = Some(AfterStep { epoch, ended, best: self.progress.best });
        self.num_steps += 1;
        (self.regroups.step_end, self.regroups.stepped) = (Instant::now(), Some(*stepped));
    }
}

/// The number of batches of the step after `progress`.
pub(crate) fn batches_of_step(config: &TrainConfig, progress: &Progress) -> usize {
    config.strategy.accumulate.min(config.steps_per_epoch - progress.position.batch)
}

/// The loss scale of the next step.
fn rescaled(
    config: &TrainConfig,
    now: Option<LossScaling>,
    is_skipped: bool,
) -> Option<LossScaling> {
    let (setting, now) = config.loss_scale.as_ref().zip(now)?;
    let (scale, good_steps) = setting.after(now.scale, now.good_steps, is_skipped);
    let skipped_steps = now.skipped_steps.saturating_add(u64::from(is_skipped));
    let in_a_row = now.skipped_in_a_row.saturating_add(1);
    let skipped_in_a_row = if is_skipped { in_a_row } else { 0 };
    Some(LossScaling { scale, good_steps, skipped_steps, skipped_in_a_row })
}
