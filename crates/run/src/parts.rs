//! Into how many parts the layers of a model are divided, of which each rank along the axis `tp` has some.

use std::sync::Arc;

use paceline_choices::data::DataConfig;
use paceline_choices::models::ModelConfig;
use paceline_collectives::{Axis, MeshShape};
use paceline_data::{BatchShape, Dataset};
use paceline_failure::{Failure, Result, usage};
use paceline_kernels::Compute;
use paceline_launch::device::Device;
use paceline_memory::Allocator;
use paceline_model::{Divided, Model, ModelError, Rehearsal};
use paceline_observe::insight::memory::batch_of;
use paceline_settings::config::TrainConfig;
use paceline_settings::flags::RunFlags;
use paceline_settings::named::TransportName;
use paceline_settings::spec::RunSpec;
use paceline_settings::strategy::StrategyConfig;

/// The parts of layers. Checks that the run's settings work with that.
pub fn resolve(
    flags: &RunFlags,
    spec: &RunSpec,
    strategy: &StrategyConfig,
    mesh: &MeshShape,
) -> Result<Divided> {
    let ranks = mesh.size(Axis::Tp);
    let parts = flags.strategy.tp_parts.unwrap_or(ranks);
    let (by_rows, overlaps) = (flags.strategy.sequence_parallel, flags.strategy.overlap_tp);
    if parts == 1 {
        let stated = ["sequence-parallel", "overlap-tp"].into_iter().find(|flag| spec.has(flag));
        return stated.map_or(Ok(Divided::NOT), |flag| {
            usage(format!("--{flag}: no layer is divided; pass --mesh tp=2 too, or leave it out"))
        });
    }
    if !parts.is_multiple_of(ranks) || ranks > 1 && !(parts / ranks).is_power_of_two() {
        return usage(format!(
            "--tp-parts {parts}: each of the {ranks} ranks along tp needs the same power of two of parts; pass {ranks} or {}, or leave it out",
            2 * ranks
        ));
    }
    let refused = |flag: &str, why: &str| {
        usage(format!("{flag}: {why}; leave it out, or the axis tp of --mesh and --tp-parts"))
    };
    if !strategy.keeps_replicas_equal() && !strategy.is_alone() {
        return refused(&strategy.words(), "ranks that divide a layer are equal after each step");
    }
    if let Device::Cuda(_) = flags.ranks.device {
        return refused("--device cuda", "layers are divided on processors only, so far");
    }
    if flags.data.rank_samples.is_some() {
        return refused("--rank-samples", "ranks that divide a layer have the same samples");
    }
    Ok(Divided { parts, by_rows, overlaps, ..Divided::NOT })
}

/// Builds the model, with the parts of the first rank along `tp`.
pub(crate) fn build(
    model: &ModelConfig,
    data: &DataConfig,
    dataset: &dyn Dataset,
    mesh: &MeshShape,
) -> Result<Model> {
    let world_size = mesh.num_ranks().unwrap_or(1);
    let mut built = model.build(dataset, world_size).map_err(|e| {
        if let (ModelError::TooLong { most, .. }, Some(flag)) = (&e, data.length_flag()) {
            return Failure::Usage(format!("{e}; pass {flag} {most} or less"));
        }
        if let parts @ 2.. = model.divided().parts {
            return Failure::Usage(format!("--mesh tp, --tp-parts {parts}: {e}; leave it out"));
        }
        let flags: String = model.sizes().into_iter().map(|flag| flag + ", ").collect();
        Failure::Usage(format!("{e}; choose other {flags}--freeze or data"))
    })?;
    take_first(&mut built, mesh)?;
    Ok(built)
}

/// Takes the parts of the first rank along `tp`. Those of the others are as large.
pub fn take_first(model: &mut Model, mesh: &MeshShape) -> Result<()> {
    let of_rank = model.layout.on_rank(0, mesh.size(Axis::Tp));
    model.layout = Arc::new(of_rank.map_err(|error| Failure::Usage(error.to_string()))?);
    Ok(())
}

/// A note about the exchanges within layers, if they cross an emulated link or hosts.
pub fn note(config: &TrainConfig, model: &Model, samples: &BatchShape) -> Result<Option<String>> {
    let ranks = config.mesh.size(Axis::Tp);
    let (link, hosts) = (config.comm.link, config.comm.hosts);
    let crosses_hosts = config.transport == TransportName::Hybrid && hosts > 1;
    if ranks == 1 || (link.is_none() && !crosses_hosts) {
        return Ok(None);
    }
    let rehearse = || -> std::result::Result<Rehearsal, ModelError> {
        let compute = Compute::new(1, Allocator::meta())?;
        let longest = samples.max_length().unwrap_or(1);
        let batch = batch_of(samples, &compute.allocator, config.batch_size, longest)?;
        let precision = config.strategy.options.precision;
        Rehearsal::of(model, precision, &compute, &[batch], None, false)
    };
    let (count, bytes) = rehearse().map_err(|error| Failure::Usage(error.to_string()))?.exchanged;
    let sent = bytes as f64 * (ranks - 1) as f64 / ranks as f64;
    let time = link.map_or(String::new(), |link| {
        let seconds = sent / link.bytes_per_s + count as f64 * link.latency_s;
        format!(", at least {:.1} ms on this link", 1e3 * seconds)
    });
    Ok(Some(format!(
        "--mesh tp={ranks}: for each micro-batch a rank sends {:.2} MB in {count} exchanges within layers{time}; ranks along tp \
         belong on one host",
        sent / 1e6
    )))
}
