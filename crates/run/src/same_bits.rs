//! Whether a run keeps the promise of `--micro-batch-size`: the same bits from every layout.
//!
//! Input: a resolved configuration. Output: an error that names the setting that breaks the promise, before any rank starts.

use paceline_collectives::Algorithm;
use paceline_failure::{Result, usage};
use paceline_launch::device::Device;
use paceline_model::Model;
use paceline_settings::config::TrainConfig;
use paceline_settings::micro_batches::MicroBatches;
use paceline_settings::named::TransportName;
use paceline_settings::pipeline::AUTO;
use paceline_strategies::{Exactness, schedule};

/// Fails for settings with which the result would depend on the layout.
pub fn check(config: &TrainConfig, built: &Model) -> Result<()> {
    let Some(of) = &config.micro_batches else { return Ok(()) };
    match obstacle(config, built) {
        None => Ok(()),
        Some((setting, reason)) => usage(format!(
            "--micro-batch-size {}: every layout would have to end with the same bits, and {setting} {reason}; leave one of \
             them out",
            of.size
        )),
    }
}

/// A setting, and why it breaks the promise.
type Obstacle = (String, &'static str);

/// The reason of strategies that reduce each micro-batch. They end with the same bits as each other.
pub const RANKS_FIRST: &str = "adds up ranks before micro-batches";

/// The first setting with which the result would depend on the layout.
pub fn obstacle(config: &TrainConfig, built: &Model) -> Option<Obstacle> {
    of_strategy(config).or_else(|| of_ranks(config)).or_else(|| of_stages(config, built))
}

fn of_strategy(config: &TrainConfig) -> Option<Obstacle> {
    let (strategy, options) = (&config.strategy, &config.strategy.options);
    let own = |setting: &str, reason| Some((setting.to_owned(), reason));
    if options.sync_batch_norm {
        return own("--sync-batch-norm", "takes statistics over ranks");
    }
    if strategy.sync_blocks.is_some() {
        return own(&strategy.words(), "leaves out the sums over the ranks in some steps");
    }
    if !options.no_sync {
        return own("--no-sync=false", RANKS_FIRST);
    }
    if !strategy.is_known() {
        return own(&strategy.words(), "is not known to add up ranks instead of averaging them");
    }
    if strategy.kind() == Exactness::Exact.words() {
        return None;
    }
    if config.spec.get("accumulate-in").is_some_and(|words| words == ["shards"]) {
        return own("--accumulate-in shards", RANKS_FIRST);
    }
    // A lossy strategy, or a mesh on which an exact one adds up in another order.
    let words = format!("{} on the mesh {}", strategy.words(), config.mesh);
    own(&words, "does not end with the bits of one rank")
}

fn of_ranks(config: &TrainConfig) -> Option<Obstacle> {
    let is_stated = config.spec.has("transport");
    let is_card = matches!(config.device, Device::Cuda(_));
    match config.transport {
        _ if config.world_size == 1 => None,
        TransportName::Mpi | TransportName::Nccl => {
            let words = format!("--transport {}", config.transport.name());
            Some((words, "adds up ranks in an order of its own"))
        }
        // Cards are connected by NCCL unless the user says otherwise.
        _ if is_card && !is_stated => {
            Some(("--device cuda without --transport".into(), "lets NCCL choose the order of sums"))
        }
        TransportName::Tcp | TransportName::Hybrid
            if config.comm.algorithm != Algorithm::Direct =>
        {
            Some(("--algorithm".into(), "adds up ranks around a ring"))
        }
        _ => None,
    }
}

fn of_stages(config: &TrainConfig, built: &Model) -> Option<Obstacle> {
    let pipeline = config.pipeline.as_ref()?;
    let schedule = schedule::named(pipeline.schedule);
    let words = format!("--schedule {}", pipeline.schedule);
    // Empty micro-batches come first, and must not be the last in the sum.
    let are_even = config.micro_batches.as_ref().is_none_or(MicroBatches::are_even);
    if !are_even && (!pipeline.adds_in_order || pipeline.schedule == AUTO) {
        return Some((
            words,
            "may begin with the last of them, on ranks that have fewer than others",
        ));
    }
    let ends_together = schedule.is_some_and(|of| {
        let placement = of.placement(config.mesh.size(paceline_collectives::Axis::Pp));
        placement.rank(0) == placement.rank(placement.stages() - 1)
    });
    let is_tied = built.layout.units().iter().any(|unit| unit.is_root);
    (is_tied && !ends_together).then_some((
        words,
        "adds up the gradients of tied parameters over stages before it adds them to each other (zbv and dualpipev do not)",
    ))
}
