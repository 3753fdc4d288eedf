//! Refuses a run that does not fit into the memory of its host, before a rank starts, and names the strategies, or else the
//! largest batch, that would fit.
//!
//! [`paceline_observe::insight::memory`] computes the need.

use paceline_choices::models::MODELS;
use paceline_choices::registry::read;
use paceline_choices::strategies::{STRATEGIES, Synchronizes};
use paceline_collectives::MeshShape;
use paceline_failure::{Failure, Result};
use paceline_host::resources;
use paceline_memory::Category;
use paceline_model::Model;
use paceline_observe::insight::memory::{Need, Needs, Shape};
use paceline_settings::config::TrainConfig;
use paceline_settings::flags::RunFlags;
use paceline_settings::micro_batches::MicroBatches;
use paceline_settings::open_data::OpenData;
use paceline_settings::strategy::{self, StrategyConfig};

use crate::resolve_ranks::resolve_mesh;

/// Fails if the ranks of this host do not fit into its memory.
pub fn check(
    config: &TrainConfig,
    local_ranks: usize,
    model: &Model,
    data: &OpenData,
) -> Result<()> {
    let Some(available) = resources::available_bytes() else { return Ok(()) };
    let available = available as f64;
    let shape = Shape::of(config, data);
    let needs = Needs::of(&shape, model)?;
    let needed = needs.sum(local_ranks);
    if needed <= available {
        return Ok(());
    }
    let fits = |shape: &Shape| {
        Needs::of(shape, model).is_ok_and(|needs| needs.sum(local_ranks) <= available)
    };
    let strategies: Vec<&str> = alternatives(config)
        .filter(|(strategy, mesh)| fits(&Shape { strategy, mesh, ..shape.clone() }))
        .map(|(strategy, _)| strategy.name())
        .collect();
    let advice = match strategies.as_slice() {
        [] => match largest_batch(&shape, fits) {
            Some(1) => "a batch of 1 sample per rank would fit (--batch-size 1)".to_owned(),
            Some(rows) => {
                format!("a batch of {rows} samples per rank would fit (--batch-size {rows})")
            }
            None => format!(
                "no strategy and no smaller batch would fit: use a smaller model{}{}",
                sizes(config),
                if local_ranks == 1 { "" } else { " or fewer ranks (--nproc)" }
            ),
        },
        names => format!("with the same flags these would fit: --strategy {}", names.join(", ")),
    };
    let need = needs.largest();
    let ranks = if local_ranks == 1 {
        "1 rank needs".to_owned()
    } else {
        format!("{local_ranks} ranks need")
    };
    Err(Failure::Usage(format!(
        "not enough memory: {ranks} {} {}, and {} are available; a rank of {} needs {}; {advice}",
        if need.is_at_least { "at least" } else { "about" },
        gb(needed),
        gb(available),
        config.strategy.name(),
        in_words(need),
    )))
}

/// The flags that decide the size of the model, in parentheses: the stated ones, or else the widths, if any.
fn sizes(config: &TrainConfig) -> String {
    let stated = config.model.sizes();
    let widths = || MODELS.get(config.model.name()).map_or(&[][..], |model| model.of.width_flags);
    let flags = if stated.is_empty() {
        widths().iter().map(|flag| format!("--{flag}")).collect()
    } else {
        stated
    };
    if flags.is_empty() { String::new() } else { format!(" ({})", flags.join(", ")) }
}

/// The need of a rank by category, without the categories that take less than a hundredth of it.
fn in_words(need: &Need) -> String {
    let by_category = Category::ALL.map(|category| (category.name(), need.of(category) as f64));
    let besides = need.besides.map(|(name, bytes)| (name, bytes as f64));
    let all = by_category.into_iter().chain(besides);
    let whole = need.whole() as f64;
    let parts = all.filter(|(_, bytes)| *bytes * 100.0 >= whole);
    parts.map(|(name, bytes)| format!("{} for {name}", gb(bytes))).collect::<Vec<_>>().join(", ")
}

fn gb(bytes: f64) -> String {
    if bytes >= 1e15 { format!("{:.1e} GB", bytes / 1e9) } else { format!("{:.1} GB", bytes / 1e9) }
}

/// The other strategies that keep the ranks' models equal, with the flags of this run.
fn alternatives(
    config: &TrainConfig,
) -> impl Iterator<Item = (StrategyConfig, MeshShape)> + use<'_> {
    let own = config.strategy.name();
    let names = STRATEGIES.all().into_iter().filter(move |choice| {
        choice.of.synchronizes == Synchronizes::EveryStep && choice.name != own
    });
    let is_alone = config.world_size == 1;
    names.filter(move |_| !is_alone).filter_map(|choice| with_strategy(config, choice.name).ok())
}

/// The configuration of another strategy with the flags of this run.
fn with_strategy(config: &TrainConfig, name: &str) -> Result<(StrategyConfig, MeshShape)> {
    let spec = config.spec.with(STRATEGIES.key, name);
    let settings = MicroBatches::settings(config.micro_batches.as_ref(), &spec)?;
    let flags: RunFlags = read(&settings)?;
    let (model, world) = (&config.model, config.world_size);
    let strategy = strategy::resolve(&flags, &spec, &settings, model, world, &mut Vec::new())?;
    let mesh = resolve_mesh(flags.strategy.mesh.as_ref(), &strategy, world)?;
    Ok((strategy, mesh))
}

/// The most samples per rank that fit, if fewer than the run's.
fn largest_batch(shape: &Shape, fits: impl Fn(&Shape) -> bool) -> Option<usize> {
    let most = shape.rows.iter().max().copied().unwrap_or(0);
    largest(most, |rows| fits(&Shape { rows: vec![rows; shape.rows.len()], ..shape.clone() }))
}

/// The largest number from 1 to `most` that fits, if any does. All smaller numbers fit too.
fn largest(most: usize, fits: impl Fn(usize) -> bool) -> Option<usize> {
    if most == 0 || !fits(1) {
        return None;
    }
    let (mut good, mut bad) = (1, most.saturating_add(1));
    while bad - good > 1 {
        let middle = good + (bad - good) / 2;
        if fits(middle) { good = middle } else { bad = middle }
    }
    Some(good)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resolve::resolve_inputs;
    use paceline_settings::spec::RunSpec;

    #[test]
    fn the_largest_that_fits_is_found() {
        for limit in [1, 2, 3, 7, 8, 9, 1000] {
            assert_eq!(largest(1000, |n| n <= limit), Some(limit));
        }
        assert_eq!(largest(1000, |_| false), None);
        assert_eq!(largest(0, |_| true), None);
        assert_eq!(largest(usize::MAX, |n| n < 1 << 62), Some((1 << 62) - 1));
    }

    /// One copy with gradients and optimizer state takes half of the memory: four replicas do not fit, four shards do.
    #[test]
    fn a_run_that_does_not_fit_is_refused_with_the_strategies_that_would() {
        let available = resources::available_bytes().unwrap() as f64;
        let num_layers = 50;
        // Parameters, gradients and two moments take 16 bytes per parameter.
        let width = (available / 32.0 / f64::from(num_layers - 1)).sqrt() as usize;
        let settings = [
            ("model", "mlp".to_owned()),
            ("nproc", "4".to_owned()),
            ("input-dim", "8".to_owned()),
            ("hidden-dim", width.to_string()),
            ("output-dim", "8".to_owned()),
            ("num-layers", num_layers.to_string()),
            ("batch-size", "1".to_owned()),
            ("optimizer", "adamw".to_owned()),
        ];
        let spec = RunSpec::default();
        let spec = settings.iter().fold(spec, |spec, (key, value)| spec.with(key, value));
        let refusal = resolve_inputs(&spec, None).err().unwrap().to_string();
        for part in
            ["not enough memory: 4 ranks need about", "a rank of ddp needs", "for gradients"]
        {
            assert!(refusal.contains(part), "{refusal}");
        }
        let (_, names) = refusal.split_once("these would fit: --strategy ").expect(&refusal);
        assert!(names.split(", ").any(|name| name == "sharded3"), "{refusal}");
        assert!(!names.split(", ").any(|name| name == "simple_ddp"), "{refusal}");
        assert!(resolve_inputs(&spec.with("strategy", "sharded3"), None).is_ok());
    }

    #[test]
    fn bytes_are_shown_in_gb() {
        assert_eq!([2.5e9, 1e18].map(gb), ["2.5 GB", "1.0e9 GB"]);
    }
}
