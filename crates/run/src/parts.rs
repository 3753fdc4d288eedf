//! Into how many parts the layers of a model are divided, of which each rank along the axis `tp` has some.

use std::sync::Arc;

use paceline_collectives::{Axis, MeshShape};
use paceline_failure::{Failure, Result, usage};
use paceline_launch::device::Device;
use paceline_model::{Divided, Model};
use paceline_settings::flags::RunFlags;
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
    let by_rows = flags.strategy.sequence_parallel;
    if parts == 1 {
        if spec.has("sequence-parallel") {
            return usage(
                "--sequence-parallel: no layer is divided; pass --mesh tp=2 too, or leave it out",
            );
        }
        return Ok(Divided::NOT);
    }
    if !parts.is_multiple_of(ranks) || ranks > 1 && !(parts / ranks).is_power_of_two() {
        return usage(format!(
            "--tp-parts {parts}: each of the {ranks} ranks along tp needs the same power of two of parts; pass {ranks} or {}, or              leave it out",
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
    for (flag, is_given) in [
        ("--rank-samples", flags.data.rank_samples.is_some()),
        ("--find-unused-parameters", strategy.options.find_unused_parameters),
        ("--freeze", !flags.freeze.is_empty()),
        ("--watch-passes", flags.output.watch_passes.is_some()),
        ("--watch-numerics", flags.output.watch_numerics),
        ("--sample-every", flags.evaluation.sample_every.is_some()),
    ] {
        if is_given {
            return refused(flag, "divided layers cannot do this yet");
        }
    }
    Ok(Divided { parts, by_rows, ..Divided::NOT })
}

/// Takes the parts of the first rank along `tp`. Those of the others are as large.
pub fn take_first(model: &mut Model, mesh: &MeshShape) -> Result<()> {
    let of_rank = model.layout.on_rank(0, mesh.size(Axis::Tp));
    model.layout = Arc::new(of_rank.map_err(|error| Failure::Usage(error.to_string()))?);
    Ok(())
}
