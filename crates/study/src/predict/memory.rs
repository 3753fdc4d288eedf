//! `paceline predict --memory`: a rank's memory by strategy and number of ranks, and the largest batch and model that fit.
//!
//! Nothing is run. [`paceline_observe::insight::memory`] computes the numbers that a run prints, also for models larger than this
//! machine.

use std::collections::BTreeMap;

use paceline_choices::models::{MODELS, ModelConfig};
use paceline_choices::registry::read;
use paceline_choices::strategies::{STRATEGIES, Synchronizes};
use paceline_failure::{Failure, Result};
use paceline_host::resources;
use paceline_host::text::{line_width, say};
use paceline_memory::Category;
use paceline_model::Model;
use paceline_observe::insight::memory::{Need, Needs, Shape};
use paceline_run::parts::take_first;
use paceline_run::resolve::resolve_unchecked;
use paceline_run::shortage::{largest, with_strategy};
use paceline_settings::config::TrainConfig;
use paceline_settings::flags::RunFlags;
use paceline_settings::named::TransportName;
use paceline_settings::open_data::OpenData;
use paceline_table::table::{Columns, Table};
use serde::Serialize;

use super::PredictArgs;
use crate::spec::Spec;
use crate::study::write_files;
use crate::usage;

/// The name that stands for all strategies.
const ALL: &str = "all";
/// The default strategies. Other replicas need as much as `ddp`, or more for their buckets.
const DEFAULT: [&str; 7] = ["ddp", "zero1", "zero2", "zero3", "sharded1", "sharded2", "sharded3"];
const MAX_ROWS: usize = 1 << 40;
/// The largest factor, in percent of the model.
const MAX_FACTOR_PCT: usize = 1_000_000;
const MAX_WIDTH: usize = 1 << 20;

/// The needs of a rank with one strategy on one number of ranks.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The strategy.
    pub strategy: String,
    /// Number of ranks.
    pub ranks: usize,
    /// Parameters of the model.
    pub params: usize,
    /// Bytes of the rank that needs the most, by category.
    #[serde(flatten)]
    pub bytes: BTreeMap<String, u64>,
    /// Bytes of the data set, which each rank keeps.
    pub data_set: u64,
    /// Whether a rank fits.
    pub fits: bool,
    /// The largest number of samples per rank that fits; missing if no number does.
    pub largest_batch: Option<usize>,
    /// The largest fitting factor of the hidden layers' widths, in percent; missing if there is none, or if the model names no widths.
    pub largest_width_pct: Option<usize>,
    /// The parameters of the model with these widths.
    pub largest_params: Option<usize>,
}

#[derive(Serialize)]
struct Report<'a> {
    batch_size: usize,
    bytes_per_rank: Vec<(usize, u64)>,
    rows: &'a [Row],
}

/// Makes the table.
pub fn predict_memory(args: &PredictArgs) -> Result<u8> {
    let given = &args.train.0;
    let names = strategies(args)?;
    let global = given.number("global-batch-size");
    let single = given.without(&["strategy"]).with("nproc", 1);
    let (config, data, _) = resolve_unchecked(&single, None)?;
    let (mut rows, mut limits) = (Vec::new(), Vec::new());
    for &ranks in &args.nproc {
        let limit = limit(args.rank_gb, ranks)?;
        limits.push((ranks, limit as u64));
        // Ranks share the micro-batches of a step.
        let shared = given.has("micro-batch-size").then(|| single.with("nproc", ranks));
        let shared = shared.map(|spec| resolve_unchecked(&spec, None)).transpose()?;
        let config = shared.as_ref().map_or(&config, |(shared, ..)| shared);
        // A long run without checkpoints, whose ranks are processes.
        let mut config =
            TrainConfig { world_size: ranks, steps_per_epoch: usize::MAX, ..config.clone() };
        (config.transport, config.checkpoints.save) = (TransportName::Shm, None);
        let per_rank = global.filter(|_| config.micro_batches.is_none());
        let batch = per_rank.map_or(config.batch_size, |global| global.div_ceil(ranks));
        for name in &names {
            let case = Case::new(&config, &data, name, batch)?;
            rows.push(case.row(limit)?);
        }
    }
    print(&config, global, &rows, &limits, args);
    let report = Report { batch_size: config.batch_size, bytes_per_rank: limits, rows: &rows };
    write_files(&args.study, &report, &table(&rows).csv(), &[])?;
    Ok(0)
}

/// The strategies that the user requested.
fn strategies(args: &PredictArgs) -> Result<Vec<String>> {
    let typed = args.train.0.get(STRATEGIES.key).and_then(<[String]>::first);
    if let (Some(name), [_, ..]) = (typed, args.strategies.as_slice()) {
        return usage(format!("--strategy {name} and --strategies: pass one of them"));
    }
    let asked = match (args.strategies.as_slice(), typed) {
        ([], None) => DEFAULT.map(str::to_owned).to_vec(),
        ([], Some(name)) => vec![name.clone()],
        ([all], _) if all == ALL => {
            let meant = STRATEGIES.all().into_iter();
            let meant = meant.filter(|choice| choice.of.synchronizes != Synchronizes::Alone);
            meant.map(|choice| choice.name.to_owned()).collect()
        }
        (names, _) => names.to_vec(),
    };
    asked.iter().map(|name| Ok(STRATEGIES.get(name)?.name.to_owned())).collect()
}

/// The bytes that a rank may take.
fn limit(rank_gb: Option<f64>, ranks: usize) -> Result<f64> {
    if let Some(gb) = rank_gb {
        return Ok(gb * 1e9);
    }
    let available = resources::available_bytes().ok_or_else(|| {
        Failure::Usage(
            "this system does not say how much memory is available; pass --rank-gb".into(),
        )
    })?;
    Ok(available as f64 / ranks as f64)
}

struct Case<'a> {
    config: &'a TrainConfig,
    data: &'a OpenData,
    /// The shape with the strategy of the run.
    base: Shape<'a>,
    strategy: paceline_settings::strategy::StrategyConfig,
    mesh: paceline_collectives::MeshShape,
    batch: usize,
}

impl<'a> Case<'a> {
    fn new(config: &'a TrainConfig, data: &'a OpenData, name: &str, batch: usize) -> Result<Self> {
        let (strategy, mesh) = with_strategy(config, name)?;
        Ok(Self { config, data, base: Shape::of(config, data), strategy, mesh, batch })
    }

    fn shape(&self, rows: usize) -> Shape<'_> {
        let Self { strategy, mesh, base, .. } = self;
        Shape { strategy, mesh, rows: vec![rows; self.config.world_size], ..base.clone() }
    }

    fn build(&self, model: &ModelConfig) -> Result<Model> {
        let built = model.build(self.data.train.as_ref(), self.config.world_size);
        let mut built = built.map_err(|error| Failure::Usage(error.to_string()))?;
        take_first(&mut built, &self.mesh)?;
        Ok(built)
    }

    fn row(&self, limit: f64) -> Result<Row> {
        let model = self.build(&self.config.model)?;
        let needs = Needs::of(&self.shape(self.batch), &model)?;
        let rank = needs.largest_rank();
        let need = &needs.ranks[rank];
        let data_set = self.config.data.resident_bytes(self.data.train.as_ref());
        let fits = |need: &Need| need.whole() as f64 <= limit;
        // The rank that needs the most is the same for every batch.
        let batch_fits =
            |rows| Needs::of_rank(&self.shape(rows), &model, rank).is_ok_and(|need| fits(&need));
        let model_fits = |factor_pct| {
            self.scaled(factor_pct).is_some_and(|model| {
                Needs::of_rank(&self.shape(self.batch), &model, rank).is_ok_and(|need| fits(&need))
            })
        };
        let widths = widths(&self.config.model);
        let widest = widths.iter().flat_map(|(_, widths)| widths).max();
        let most = widest.map_or(0, |widest| (100 * MAX_WIDTH / widest).min(MAX_FACTOR_PCT));
        let largest_width_pct = largest(most, model_fits);
        let largest_model = largest_width_pct.and_then(|factor_pct| self.scaled(factor_pct));
        Ok(Row {
            strategy: self.strategy.name().to_owned(),
            ranks: self.config.world_size,
            params: model.layout.num_params(),
            bytes: need.bytes(),
            data_set: data_set as u64,
            fits: fits(need),
            largest_batch: largest(MAX_ROWS, batch_fits),
            largest_width_pct,
            largest_params: largest_model.map(|model| model.layout.num_params()),
        })
    }

    /// The model with its widths at this percentage, rounded down, at least 1. `None` if there is none.
    fn scaled(&self, factor_pct: usize) -> Option<Model> {
        let mut spec: Spec = self.config.spec.clone();
        for (flag, widths) in widths(&self.config.model) {
            let scaled = widths.iter().map(|width| (width * factor_pct / 100).max(1));
            spec = spec.with_values(flag, scaled);
        }
        let settings = spec.parse().ok()?;
        let flags: RunFlags = read(&settings).ok()?;
        let model = ModelConfig::resolve(&flags.model, flags.freeze, &settings).ok()?;
        self.build(&model.in_parts(self.config.model.divided())).ok()
    }
}

/// A model's widths of hidden layers, by flag.
fn widths(model: &ModelConfig) -> Vec<(&'static str, Vec<usize>)> {
    let Ok(choice) = MODELS.get(model.name()) else { return Vec::new() };
    let typed = model.flags();
    let of_flag = |flag: &&'static str| {
        let (_, values) = typed.iter().find(|(name, _)| name.trim_start_matches("--") == *flag)?;
        let widths = values.split(' ').map(str::parse).collect::<std::result::Result<_, _>>();
        Some((*flag, widths.ok()?))
    };
    choice.of.width_flags.iter().filter_map(of_flag).collect()
}

/// The categories that some row has.
fn used(rows: &[Row]) -> Vec<&'static str> {
    let is_used = |name: &&str| rows.iter().any(|row| row.bytes.get(*name).is_some_and(|b| *b > 0));
    Category::ALL.into_iter().map(Category::name).filter(is_used).collect()
}

fn table(rows: &[Row]) -> Table {
    let largest = rows.iter().map(|row| row.bytes["total"]).max().unwrap_or(0);
    let (unit, factor) = if largest >= 100_000_000_000 { ("GB", 1e-9) } else { ("MB", 1e-6) };
    let mut columns = Columns::new()
        .add("strategy", "strategy", ("", 0), "", |row: &Row| row.strategy.clone())
        .add("ranks", "ranks", ("", 0), "", |row| row.ranks);
    for name in used(rows).into_iter().chain(["total"]) {
        columns =
            columns.add(name, name, (unit, 2), "", move |row| row.bytes[name] as f64 * factor);
    }
    columns
        .add("fits", "fits", ("", 0), "", |row| if row.fits { "yes" } else { "no" })
        .add("largest batch", "largest batch", ("", 0), "", |row| row.largest_batch)
        .add("widest, %", "widest, %", ("", 0), "", |row| row.largest_width_pct)
        .add("with parameters", "with parameters", ("", 0), "", |row| row.largest_params)
        .table(rows)
}

fn print(
    config: &TrainConfig,
    global: Option<usize>,
    rows: &[Row],
    limits: &[(usize, u64)],
    args: &PredictArgs,
) {
    let params = rows.first().map_or(0, |row| row.params);
    let batch = match global {
        Some(global) => format!("batches of {global} samples on all ranks together"),
        None => format!("batches of {} samples per rank", config.batch_size),
    };
    say(&format!(
        "Predicted memory of the rank that needs the most, in a step: {}, {} parameters, {batch}",
        config.model.name(),
        paceline_host::text::thousands(params as u64)
    ));
    say(&format!("\n{}", table(rows).fitted(line_width())));
    for (ranks, bytes) in limits {
        let source = match args.rank_gb {
            Some(_) => "--rank-gb",
            None => {
                "what this host has available, divided by the ranks; --rank-gb states another limit"
            }
        };
        say(&format!(
            "{}: {:.2} GB per rank ({source})",
            paceline_host::text::plural(*ranks, "rank"),
            *bytes as f64 / 1e9
        ));
    }
    let flags = MODELS.get(config.model.name()).map_or(&[][..], |choice| choice.of.width_flags);
    if !flags.is_empty() {
        let flags: Vec<String> = flags.iter().map(|flag| format!("--{flag}")).collect();
        say(&format!(
            "widest: the largest percentage of {} with which a rank fits, and the parameters of that model",
            flags.join(" and ")
        ));
    }
}
