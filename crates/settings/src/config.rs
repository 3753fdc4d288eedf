//! The resolved configuration of a run, which knows neither how it was resolved nor its use.

use paceline_choices::data::DataConfig;
use paceline_choices::models::ModelConfig;
use paceline_choices::optimizers::OptimizerSettings;
use paceline_collectives::MeshShape;
use paceline_launch::comm::CommConfig;
use paceline_launch::device::Device;
use paceline_strategies::ReplicaOptions;
use serde::Serialize;
use serde_json::{Value, json};

use super::flags::{CheckpointFlags, CopyFlags, EvaluationFlags, OutputFlags};
use super::loss_scale::LossScale;
use super::micro_batches::MicroBatches;
use super::named::{PrecisionName, TransportName};
use super::origin::Resume;
use super::pipeline::PipelineConfig;
use super::ranks::{InitMethod, Ranks};
use super::schedule::Schedule;
use super::spec::RunSpec;
use super::spec_file::VERSION;
use super::strategy::StrategyConfig;
use crate::profile::ProfileConfig;

/// All settings that determine a run, checked, with all defaults filled in.
#[derive(Clone, Debug, Serialize)]
pub struct TrainConfig {
    /// The settings that the user stated.
    #[serde(skip)]
    pub spec: RunSpec,
    /// The model.
    pub model: ModelConfig,
    /// How ranks keep their models equal.
    pub strategy: StrategyConfig,
    /// How ranks reach each other.
    pub transport: TransportName,
    /// How ranks talk to each other.
    pub comm: CommConfig,
    /// Where to compute.
    pub device: Device,
    /// How batches come to the device.
    pub copies: CopyFlags,
    /// Batches that a thread makes ahead of the step; with zero, the step makes them itself.
    pub load_ahead: usize,
    /// Additional microseconds per sample, as if it had to be decoded.
    pub decode_us: f64,
    /// The element type of products.
    pub precision: PrecisionName,
    /// Whether the processor emulates fp16.
    pub emulate_fp16: bool,
    /// Whether a card rounds the factors of products in f32 to TF32.
    pub tf32: bool,
    /// Whether a card launches the passes of a step as a graph.
    pub cuda_graph: bool,
    /// Number of ranks.
    pub world_size: usize,
    /// The grid of ranks.
    pub mesh: MeshShape,
    /// The stages of a pipeline, if the grid has any.
    pub pipeline: Option<PipelineConfig>,
    /// Compute threads per rank.
    pub threads: usize,
    /// The vector instructions that ranks are held to; `None` if each takes the best of its processor.
    pub simd: Option<&'static str>,
    /// Whether each rank has cores of its own.
    pub pin_cores: bool,
    /// Where ranks of another launcher meet.
    pub init_method: InitMethod,
    /// Passes over the data; the last one may be cut short by `steps`.
    pub epochs: usize,
    /// Optimizer steps after which the run ends, if not with the last epoch.
    pub steps: Option<u64>,
    /// Batches per epoch.
    pub steps_per_epoch: usize,
    /// Number of first steps that are not measured.
    pub warmup_steps: usize,
    /// Samples of a full batch on the rank that has the most.
    pub batch_size: usize,
    /// Samples of a full batch on all ranks.
    pub global_batch_size: usize,
    /// The micro-batches of a batch, if every layout of them is promised to end with the same bits.
    pub micro_batches: Option<MicroBatches>,
    /// Samples in each rank's shard of the training set; `None` if the ranks share every batch.
    pub rank_samples: Option<Vec<usize>>,
    /// The optimizer.
    pub optimizer: OptimizerSettings,
    /// How its learning rate changes.
    #[serde(flatten)]
    pub schedule: Schedule,
    /// The largest norm of the gradients, if they are clipped.
    pub clip_grad_norm: Option<f64>,
    /// How the loss is scaled, if it is.
    pub loss_scale: Option<LossScale>,
    /// The ranks that keep each shard of a sharded model.
    pub replicate_shards: usize,
    /// The seed of all random numbers.
    pub seed: u64,
    /// The data.
    pub data: DataConfig,
    /// The digest of the sources of the training data, if they are files.
    pub training_data: Option<String>,
    /// The names of the classes, in their order, if they have names.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub class_names: Vec<String>,
    /// Which steps to record.
    pub profile: Option<ProfileConfig>,
    /// Whether steps and their parts are marked in the trace of the kernel.
    pub mark_ranges: bool,
    /// The checkpoint to continue from.
    pub resume: Option<Resume>,
    /// When the model is evaluated.
    #[serde(flatten)]
    pub evaluation: EvaluationFlags,
    /// Checkpoints that the run writes.
    #[serde(flatten)]
    pub checkpoints: CheckpointFlags,
    /// Files and lines that the run writes.
    #[serde(flatten)]
    pub output: OutputFlags,
    /// Warnings, such as about flags without effect.
    pub warnings: Vec<String>,
}

impl TrainConfig {
    /// Whether the device makes the training data, instead of the host.
    pub fn makes_on_device(&self) -> bool {
        self.device.makes_data() && !self.copies.generate_on_host && self.data.is_synthetic()
    }

    /// Whether each step takes the gradient norm, for which all ranks wait.
    pub fn takes_grad_norm(&self) -> bool {
        self.clip_grad_norm.is_some() || self.loss_scale.is_some()
    }

    /// Whether the optimizer may work on some gradients while others travel, because nothing needs all of them first.
    pub fn steps_by_bucket(&self) -> bool {
        let ReplicaOptions { no_sync, as_graph, .. } = self.strategy.options;
        let has_all_first = self.takes_grad_norm() || self.replicate_shards > 1;
        !has_all_first && no_sync && !as_graph && self.pipeline.is_none()
    }

    /// The contents of `config.json`: the stated settings, which repeat the run, and the resolved ones.
    pub fn to_json(&self) -> Value {
        json!({ "version": VERSION, "stated": self.spec.to_json(), "resolved": self })
    }

    /// The settings that concern ranks.
    pub fn ranks(&self) -> Ranks<'_> {
        let TrainConfig { world_size, threads, pin_cores, transport, comm, init_method, .. } = self;
        Ranks {
            world_size: *world_size,
            threads: *threads,
            pin_cores: *pin_cores,
            transport: *transport,
            comm,
            init_method,
        }
    }

    /// Optimizer steps of the whole run.
    pub fn total_steps(&self) -> u64 {
        let per_epoch = self.steps_per_epoch.div_ceil(self.strategy.accumulate);
        self.steps.unwrap_or((self.epochs as u64).saturating_mul(per_epoch as u64))
    }

    /// The micro-batches of a full step on the rank that has the most.
    pub fn micro_batches_per_step(&self) -> usize {
        self.strategy.micro_batches_of(self.strategy.accumulate.min(self.steps_per_epoch))
    }

    /// Samples of a full step on all ranks together.
    pub fn samples_per_step(&self) -> f64 {
        self.strategy.accumulate.min(self.steps_per_epoch) as f64 * self.samples_per_batch()
    }

    /// Samples of a full batch on all ranks together. If ranks have their own shards, the mean over an epoch.
    pub fn samples_per_batch(&self) -> f64 {
        match &self.rank_samples {
            None => self.global_batch_size as f64,
            Some(samples) => {
                let most = self.steps_per_epoch.saturating_mul(self.batch_size);
                let sum: usize = samples.iter().map(|samples| most.min(*samples)).sum();
                sum as f64 / self.steps_per_epoch as f64
            }
        }
    }

    /// The learning rate of the optimizer step that follows `steps_made`.
    pub fn lr(&self, steps_made: u64) -> f64 {
        self.schedule.lr(self.optimizer.lr(), steps_made, self.lr_steps())
    }

    /// Optimizer steps over which the learning rate schedule runs.
    pub fn lr_steps(&self) -> u64 {
        self.schedule.lr_steps.unwrap_or_else(|| self.total_steps())
    }
}
