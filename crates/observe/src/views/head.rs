//! The first lines of a run: the model and the strategy, and where they run.

use std::collections::BTreeMap;

use paceline_collectives::Group;
use paceline_host::text::{plural, thousands};
use paceline_kernels::Instructions;
use paceline_launch::device::Device;
use paceline_model::Model;
use paceline_settings::config::TrainConfig;

use crate::figures::event::Placed;

/// The model, the data and the strategy of the run.
pub(crate) fn title(config: &TrainConfig, group: &Group) -> String {
    let precision = config.precision.in_title(matches!(config.device, Device::Cuda(_)));
    let held = Instructions::held().map_or(String::new(), |of| format!(", held to {of}"));
    let link =
        group.link().map_or(String::new(), |link| format!(", on an emulated link of {link}"));
    let stages = config.pipeline.as_ref().map_or(String::new(), |of| {
        let count = plural(of.begins.len() + 1, "stage");
        let head = if of.head_at_once { ", the head at once" } else { "" };
        let chosen = match of.candidates.iter().find(|other| other.schedule != of.schedule) {
            Some(next) => {
                let step_ms = of.candidates[0].step_ms;
                let (other, other_ms) = (next.schedule, next.step_ms);
                format!(", {step_ms:.1} ms a step by rehearsal; {other} {other_ms:.1}")
            }
            None => String::new(),
        };
        let begins = of.begins.join(", ");
        format!(", a pipeline of {count} ({}, cut at {begins}{head}{chosen})", of.schedule)
    });
    format!(
        "paceline train: {}, {} over {}, {} x {}, {} at lr {}{stages}{precision}{held}{link}",
        config.model.name(),
        config.strategy.name(),
        group.transport().name(),
        plural(config.world_size, "rank"),
        plural(config.threads, "thread"),
        config.optimizer.name(),
        config.optimizer.lr(),
    )
}

/// Where the ranks are: a line for each, or, on one host and unless `each` is asked for, one line for all.
pub(crate) fn places(placements: &[Placed], device: Device, each: bool) -> Vec<String> {
    let mut on_host: BTreeMap<&str, usize> = BTreeMap::new();
    for Placed { host, .. } in placements {
        *on_host.entry(host).or_default() += 1;
    }
    match on_host.into_iter().next() {
        Some((host, count)) if count == placements.len() && !each => {
            vec![format!("Ranks: {count} on {host}, device {device}")]
        }
        _ => placements.iter().map(|placed| placed.device.clone()).collect(),
    }
}

/// The size of the model.
pub(crate) fn size(model: &Model) -> String {
    format!(
        "Parameters: {}, gradients: {:.2} MB",
        thousands(model.layout.num_params() as u64),
        model.layout.num_trained_params() as f64 * 4.0 / 1e6
    )
}

/// The samples of an optimizer step, and how they are divided.
pub(crate) fn samples(config: &TrainConfig) -> String {
    let batches = config.strategy.accumulate.min(config.steps_per_epoch);
    let ranks = plural(config.world_size, "rank");
    let each = match &config.rank_samples {
        None => thousands(config.global_batch_size as u64),
        Some(_) => format!("up to {}", thousands((config.batch_size * config.world_size) as u64)),
    };
    let samples = thousands(config.samples_per_step().round() as u64);
    if let Some(of) = &config.micro_batches {
        return format!("Samples of a step: {samples}, in {} on {ranks}", of.words());
    }
    format!("Samples of a step: {samples}, in {} of {each} on {ranks}", plural(batches, "batch"))
}
