//! `paceline plan`: every layout of a training step on stated hardware, by predicted time, with the memory of a rank.
//!
//! The times come from the models of `paceline predict` ([`predict`](crate::predict)), the memory from that of a run
//! ([`paceline_observe::insight::memory`]). With `--measure`, the first layouts run here, on emulated links.
//!
//! | file | purpose |
//! |---|---|
//! | [`flags`] | the flags, and the hardware that they name |
//! | [`formulas`] | how large each axis can become before its messages take longest |
//! | [`decoder`] | a model by its `config.json` alone |
//! | [`layouts`] | the list of layouts |
//! | [`work`] | the work of a micro-batch: counted for a card, measured on this host |
//! | [`time`] | the time of a step |
//! | [`table`] | shows all of it |

pub mod decoder;
pub mod flags;
pub mod formulas;
pub mod layouts;
pub mod table;
pub mod time;
pub mod work;

use std::collections::BTreeMap;

use paceline_analysis::doctor::cards::Card;
use paceline_data::BatchShape;
use paceline_failure::{Failure, Result};
use paceline_files::Printable;
use paceline_host::text::{plural, say, warn};
use paceline_launch::environment::Placement;
use paceline_memory::{Category, DType};
use paceline_model::{Layout, LlamaConfig};
use paceline_observe::figures::run_summary::RunSummary;
use paceline_observe::insight::memory::{Needs, Shape};
use paceline_observe::record::memory::{RankMemory, TOTAL};
use paceline_run::resolve::resolve_unchecked;
use paceline_settings::config::TrainConfig;
use paceline_settings::named::PrecisionName;
use paceline_strategies::BucketCaps;
use serde::Serialize;

use crate::cases::Case as RunCase;
use crate::noise::Spread;
use crate::predict::flags::MEASURED;
use crate::predict::link_of;
use crate::predict::model::Calibration;
use crate::predict::network::Route;
use crate::spec::{self, Spec};
use crate::study::{check, measuring, run_cases, spread_of};
use crate::{refuse_ranks, usage};
use decoder::Decoder;
pub use flags::PlanArgs;
use flags::{On, RankHardware};
use formulas::{LayerSizes, RankSpeeds};
use layouts::StepLayout;
use time::{Case, StepTimes};
use work::{BlockWork, HostSpeed, WorkKey};

/// How often the blocks of all layouts are measured on this host, in turn.
const ROUNDS: usize = 3;

/// The most samples of a rank in the run that shows how ranks slow each other down.
const MAX_ROWS: usize = 16;

/// A layout with its predictions.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The layout.
    #[serde(flatten)]
    pub layout: StepLayout,
    /// The step.
    #[serde(flatten)]
    pub times: StepTimes,
    /// Bytes of the rank that needs the most, by category.
    pub bytes: BTreeMap<String, u64>,
    /// All bytes that this rank takes of its memory.
    pub rank_bytes: u64,
    /// By how many bytes that is too much; 0 if it fits.
    pub over_bytes: u64,
    /// The flags of `paceline train`.
    pub command: String,
    /// The measured step here, in milliseconds.
    pub measured_ms: Option<Spread>,
    /// The most bytes in tensors of a rank in the steps of this run.
    pub measured_bytes: Option<u64>,
}

impl Row {
    /// Whether both differ only by their strategies.
    fn is_alike(&self, other: &Self) -> bool {
        let strategy = self.layout.strategy.clone();
        let layout = StepLayout { strategy, ..other.layout.clone() };
        self.layout == layout && self.times == other.times && self.bytes == other.bytes
    }
}

/// The result.
#[derive(Debug, Serialize)]
pub struct Found {
    /// The fastest layouts, until enough of them fit.
    pub rows: Vec<Row>,
    /// How many layouts there are.
    #[serde(rename = "layouts")]
    pub count: usize,
    /// Layouts that a run refuses, and the reason of the first.
    pub refused: (usize, Option<String>),
    /// The number of parameters.
    pub params: u64,
    /// Samples of a step.
    pub samples: usize,
    /// The model in words.
    pub model: String,
    /// The closed formulas with the numbers of a card put in.
    pub formulas: Vec<String>,
}

/// Runs `paceline plan`.
pub fn plan(args: &PlanArgs, placement: Option<Placement>) -> Result<u8> {
    refuse_ranks("a plan", placement)?;
    check(&args.study)?;
    let mut hardware = RankHardware::of(args)?;
    let (base, decoder) = base(args)?;
    let On { ranks, card } = hardware.on.clone();
    let strategy = if ranks == 1 { "single" } else { "ddp" };
    let whole = base
        .without(&["global-batch-size", "mesh", "schedule"])
        .with("nproc", ranks)
        .with_default("strategy", strategy);
    let (config, data, model) = resolve_unchecked(&whole, None)?;
    if hardware.link.is_none() && ranks > 1 {
        let link = link_of(MEASURED, ranks, &config, Route::Direct)?;
        hardware.link = Some((MEASURED.to_owned(), link));
    }
    let precisions = precisions(&base, card, &config);
    let samples = base.number("global-batch-size").unwrap_or(config.global_batch_size);
    if samples == 0 {
        return usage("--global-batch-size 0: a step has samples; pass at least 1");
    }
    let layouts = StepLayout::all(&base, ranks, samples, &precisions)?;
    config.warnings.iter().for_each(|warning| warn(warning));
    let mut planner = Planner {
        args,
        base,
        hardware,
        works: Vec::new(),
        samples,
        hosts: Vec::new(),
        caps: config.strategy.caps_for_ddp(),
    };
    let params = decoder.as_ref().map_or(model.layout.num_params() as u64, |of| of.params);
    let ratio = params as f64 / model.layout.num_params() as f64;
    let mut found = Found {
        rows: Vec::new(),
        count: layouts.len(),
        refused: (0, None),
        params,
        samples,
        model: decoder.map_or(config.model.name().to_owned(), |of| of.family.to_owned()),
        formulas: Vec::new(),
    };
    // Tokens of a sample, of a language model.
    let first = BatchShape::of(data.train.as_ref()).largest(1).swap_remove(0);
    let length = if first.dtype == DType::I64 { first.dims.iter().product() } else { 1 };
    let formulas = planner.formulas(&config, (&model.layout, length), &precisions);
    found.formulas = formulas.unwrap_or_default();
    drop((config, data, model));
    planner.find(layouts, ratio, &mut found)?;
    if let Some(count) = args.measure {
        planner.measure(count, &mut found)?;
    }
    table::publish(args, &planner.hardware, &found)?;
    Ok(0)
}

/// The types of products to plan with: all that the card multiplies in, unless one is stated.
fn precisions(base: &Spec, card: Option<Card>, config: &TrainConfig) -> Vec<PrecisionName> {
    let Some(card) = card.filter(|_| !base.has("precision")) else { return vec![config.precision] };
    let has =
        |name: &PrecisionName| RankHardware::flop_per_s(&card, *name, config.tf32, 1.0).is_some();
    [PrecisionName::F32, PrecisionName::Bf16].into_iter().filter(has).collect()
}

/// The settings that all layouts share, and the model of `--config`.
fn base(args: &PlanArgs) -> Result<(Spec, Option<Decoder>)> {
    let typed = args.train.0.without(&["link"]);
    let Some(path) = &args.config else { return Ok((typed, None)) };
    let stated = [
        "model",
        "pretrained",
        "llama-size",
        "layers",
        "width",
        "heads",
        "kv-heads",
        "head-dim",
        "intermediate",
        "vocab",
        "tie-embeddings",
        "num-labels",
    ];
    if let Some(flag) = stated.into_iter().find(|flag| typed.has(flag)) {
        return usage(format!("--{flag}: --config states the model; leave one of them out"));
    }
    let refused = |error: String| Failure::Usage(format!("--config {}: {error}", path.printable()));
    let text = paceline_files::read_text(path, LlamaConfig::MAX_FILE_BYTES)
        .map_err(|e| refused(e.to_string()))?;
    let decoder = Decoder::from_json(&text).map_err(refused)?;
    let length = typed.number("seq-len").unwrap_or(0);
    if let Some(window) = decoder.window.filter(|window| *window < length) {
        return Err(refused(format!(
            "sliding_window is {window}, and attention within a window is not known; pass --seq-len {window} or less"
        )));
    }
    let spec = decoder
        .flags()
        .into_iter()
        .fold(typed.with("model", "llama"), |spec, (flag, size)| spec.with(flag, size));
    let spec =
        if decoder.llama.tie_word_embeddings { spec.with("tie-embeddings", true) } else { spec };
    Ok((spec, Some(decoder)))
}

struct Planner<'a> {
    args: &'a PlanArgs,
    base: Spec,
    hardware: RankHardware,
    works: Vec<(WorkKey, Result<BlockWork, String>)>,
    /// Samples of a step.
    samples: usize,
    /// The speed of this host in each type.
    hosts: Vec<(PrecisionName, HostSpeed)>,
    caps: BucketCaps,
}

impl Planner<'_> {
    /// How far each axis scales on this card in the fastest of these types. `None` for models and hardware without an answer.
    fn formulas(
        &self,
        config: &TrainConfig,
        (model, length): (&Layout, usize),
        precisions: &[PrecisionName],
    ) -> Option<Vec<String>> {
        let (card, precision) = (self.hardware.on.card?, *precisions.last()?);
        let (_, link) = self.hardware.link.as_ref()?;
        let hosts = self.hardware.hosts.as_ref().map(|(_, hosts)| hosts);
        let (sharing, inside) = hosts.map_or((1, *link), |of| (of.ranks_per_host, of.inside));
        let speeds = RankSpeeds {
            flop_per_s: RankHardware::flop_per_s(&card, precision, config.tf32, self.hardware.mfu)?,
            data_bytes_per_s: link.bytes_per_s / sharing as f64,
            tensor_bytes_per_s: inside.bytes_per_s,
        };
        let bytes = if precision == PrecisionName::F32 { 4.0 } else { 2.0 };
        let layer = LayerSizes::of(model, (self.samples * length) as f64, bytes)?;
        Some(formulas::lines(&speeds, &layer, 8))
    }

    /// Predicts the time of all layouts, and the memory of the fastest until enough of them fit.
    fn find(&mut self, layouts: Vec<StepLayout>, ratio: f64, found: &mut Found) -> Result<()> {
        for layout in &layouts {
            self.work(WorkKey::of(layout))?;
        }
        if self.hardware.on.card.is_none() {
            self.measure_again()?;
        }
        let mut timed = Vec::new();
        for layout in layouts {
            match self.times(&layout)? {
                Ok(times) => timed.push((layout, times)),
                Err(reason) => found.refuse(reason),
            }
        }
        timed.sort_by(|a, b| a.1.step_ms.total_cmp(&b.1.step_ms));
        let mut num_fit = 0;
        for (layout, times) in timed {
            match self.row(layout, times, ratio) {
                // Stages of sharding are often predicted alike. The first stands for all.
                Ok(row) if found.rows.iter().any(|other| other.is_alike(&row)) => {}
                Ok(row) => {
                    num_fit += usize::from(row.over_bytes == 0);
                    found.rows.push(row);
                }
                Err(Failure::Usage(reason)) => found.refuse(reason),
                Err(other) => return Err(other),
            }
            if num_fit == self.args.top {
                break;
            }
        }
        match &found.refused.1 {
            Some(reason) if found.rows.is_empty() => usage(format!(
                "--on: the model cannot be divided among {} ranks for steps of {}: {reason}; pass other ranks, or another \
                 --global-batch-size",
                self.hardware.on.ranks,
                plural(found.samples, "sample")
            )),
            _ => Ok(()),
        }
    }

    /// Measures all blocks again, in rounds, and keeps the shortest: this host may be slower for a while.
    fn measure_again(&mut self) -> Result<()> {
        for _ in 1..ROUNDS {
            for (key, work) in &mut self.works {
                if let Ok(known) = work {
                    let again = BlockWork::of(&self.base, *key, &self.hardware)?;
                    if again.total() < known.total() {
                        *known = again;
                    }
                }
            }
        }
        Ok(())
    }

    /// The step of a layout, or why a run refuses it.
    fn times(&mut self, layout: &StepLayout) -> Result<Result<StepTimes, String>> {
        let key = WorkKey::of(layout);
        let at = self.work(key)?;
        let host = match self.hardware.on.card {
            Some(_) => None,
            None => Some(self.host(layout.precision)?),
        };
        let (_, work) = &self.works[at];
        let work = match work {
            Ok(work) => work,
            Err(reason) => return Ok(Err(reason.clone())),
        };
        let case = Case { layout, work, hardware: &self.hardware, host, caps: self.caps };
        match case.times() {
            Ok(times) => Ok(Ok(times)),
            Err(Failure::Usage(reason)) => Ok(Err(reason)),
            Err(other) => Err(other),
        }
    }

    /// The place of the work with this key.
    fn work(&mut self, key: WorkKey) -> Result<usize> {
        if let Some(at) = self.works.iter().position(|(known, _)| *known == key) {
            return Ok(at);
        }
        let work = match BlockWork::of(&self.base, key, &self.hardware) {
            Ok(work) => Ok(work),
            Err(Failure::Usage(reason)) => Err(reason),
            Err(other) => return Err(other),
        };
        self.works.push((key, work));
        Ok(self.works.len() - 1)
    }

    /// The speed of this host while all ranks compute, from runs without communication.
    fn host(&mut self, precision: PrecisionName) -> Result<HostSpeed> {
        if let Some((_, known)) = self.hosts.iter().find(|(name, _)| *name == precision) {
            return Ok(*known);
        }
        let ranks = self.hardware.on.ranks;
        let share = (self.samples / ranks).clamp(1, MAX_ROWS);
        let rows = self.base.number("batch-size").unwrap_or(share);
        let strategy = if ranks == 1 { "single" } else { "no_sync" };
        let spec = self
            .base
            .without(&["batch-size", "checkpoint-activations", "mesh", "schedule"])
            .with("nproc", ranks);
        let spec = spec
            .with("global-batch-size", rows * ranks)
            .with("strategy", strategy)
            .with("precision", precision.name());
        let (spec, config) = measuring(&spec)?;
        let case = RunCase::new("without communication", spec)?;
        let ledger = run_cases(&self.args.study, &[case])?;
        let run = Calibration::of(&config, ranks, &ledger.of_case(0, usize::MAX).0)?;
        let key = WorkKey { tp: 1, rows, is_checkpointed: false, precision };
        let at = self.work(key)?;
        let work = self.works[at].1.as_ref().map_err(|reason| Failure::Usage(reason.clone()))?;
        let speed = HostSpeed::of(&run, work);
        self.hosts.push((precision, speed));
        Ok(speed)
    }

    /// The memory of a layout. Parameters that only the model of `--config` has count by their number.
    fn row(&self, layout: StepLayout, times: StepTimes, ratio: f64) -> Result<Row> {
        let spec = layout.spec(&self.base);
        let (mut config, data, model) = resolve_unchecked(&spec, None)?;
        config.checkpoints.save = None;
        let needs = Needs::of(&Shape::of(&config, &data), &model)?;
        let need = needs.largest();
        let mut bytes = need.bytes();
        let scaled =
            [Category::Parameters, Category::Gradients, Category::Optimizer, Category::Unsharded];
        let mut more = 0;
        for category in scaled {
            let of = (need.of(category) as f64 * (ratio - 1.0)) as i64;
            bytes
                .entry(category.name().to_owned())
                .and_modify(|bytes| *bytes = bytes.saturating_add_signed(of));
            more += of;
        }
        bytes
            .entry("total".to_owned())
            .and_modify(|bytes| *bytes = bytes.saturating_add_signed(more));
        // A card holds neither the process nor the data set.
        let whole = if self.hardware.on.card.is_some() { need.total } else { need.whole() };
        let rank_bytes = whole.saturating_add_signed(more);
        let over_bytes = (rank_bytes as f64 - self.hardware.rank_bytes).max(0.0) as u64;
        let command = spec::shown(&self.with_link(&spec));
        Ok(Row {
            layout,
            times,
            bytes,
            rank_bytes,
            over_bytes,
            command,
            measured_ms: None,
            measured_bytes: None,
        })
    }

    /// The same on the emulated link.
    fn with_link(&self, spec: &Spec) -> Spec {
        let link = self.hardware.link.as_ref().filter(|(name, _)| name != MEASURED);
        link.filter(|_| self.hardware.on.card.is_none())
            .map_or(spec.clone(), |(name, _)| spec.with("link", name))
    }

    /// Runs the first layouts that fit.
    fn measure(&self, count: usize, found: &mut Found) -> Result<()> {
        let mut rows: Vec<&mut Row> =
            found.rows.iter_mut().filter(|row| row.over_bytes == 0).take(count).collect();
        if rows.len() < count {
            return usage(format!(
                "--measure {count}: {} of the layouts fit; pass as many, or --top {count}",
                rows.len()
            ));
        }
        let case = |row: &&mut Row| {
            // An epoch of whole steps, as planned.
            let spec = self.with_link(&row.layout.spec(&self.base)).with_default("steps", 30);
            RunCase::new(format!("{} {}", row.layout.mesh(), row.layout.strategy), spec)
        };
        let cases = rows.iter().map(case).collect::<Result<Vec<_>>>()?;
        say(&format!("Runs of {count} layouts, {} rounds", self.args.study.rounds));
        let ledger = run_cases(&self.args.study, &cases)?;
        for (at, row) in rows.iter_mut().enumerate() {
            let runs: Vec<RunSummary> = ledger.of_case(at, usize::MAX).0;
            row.measured_ms = spread_of(&runs, "step_ms_median");
            let ranks = runs.iter().flat_map(|run| run.part::<Vec<RankMemory>>("memory"));
            let peaks = ranks.filter_map(|rank| rank.peak_of_step().get(TOTAL).copied());
            row.measured_bytes = peaks.max();
        }
        Ok(())
    }
}

impl Found {
    fn refuse(&mut self, reason: String) {
        self.refused.0 += 1;
        self.refused.1.get_or_insert(reason);
    }
}
