//! `paceline plan`: every layout of a training step on stated hardware, by predicted time, with the memory of a rank.
//!
//! The times come from the models of `paceline predict` ([`predict`](crate::predict)), the memory from that of a run
//! ([`paceline_observe::insight::memory`]). With `--measure`, the first layouts run here, on emulated links.
//!
//! | file | purpose |
//! |---|---|
//! | [`flags`] | the flags, and the hardware that they name |
//! | [`formulas`] | how large each axis can become before its messages take longest |
//! | [`layouts`] | the list of layouts |
//! | [`work`] | the work of a micro-batch: counted for a card, measured on this host |
//! | [`time`] | the time of a step |
//! | [`table`] | shows all of it |

pub mod flags;
pub mod formulas;
pub mod layouts;
pub mod table;
pub mod time;
pub mod work;

use std::collections::BTreeMap;

use paceline_data::BatchShape;
use paceline_failure::{Failure, Result};
use paceline_files::Printable;
use paceline_host::text::{plural, say, warn};
use paceline_launch::environment::Placement;
use paceline_memory::{Category, DType};
use paceline_model::{Decoder, Layout, LlamaConfig};
use paceline_observe::figures::run_summary::RunSummary;
use paceline_observe::insight::memory::{Needs, Shape};
use paceline_observe::record::memory::{RESIDENT, RankMemory, TOTAL};
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
pub use flags::PlanArgs;
use flags::RankHardware;
use formulas::{LayerSizes, RankSpeeds};
use layouts::StepLayout;
use time::{Case, StepTimes};
use work::{BlockWork, RankSpeed};

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
        let layout = StepLayout { strategy: self.layout.strategy, ..other.layout };
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
    let ranks = hardware.ranks;
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
    let samples = base.number("global-batch-size").unwrap_or(config.global_batch_size);
    if samples == 0 {
        return usage("--global-batch-size 0: a step has samples; pass at least 1");
    }
    let mut precisions = vec![config.precision];
    if hardware.card.is_some() && !base.has("precision") {
        precisions = vec![PrecisionName::F32, PrecisionName::Bf16];
        precisions.retain(|name| hardware.peak(*name, config.tf32).is_some());
    }
    let layouts = StepLayout::all(&base, ranks, samples, &precisions)?;
    config.warnings.iter().for_each(|warning| warn(warning));
    // Tokens of a sample, of a language model.
    let first = BatchShape::of(data.train.as_ref()).largest(1).swap_remove(0);
    let length = if first.dtype == DType::I64 { first.dims.iter().product() } else { 1 };
    let formulas = formulas(&hardware, &config, &model.layout, samples * length, &precisions);
    let num_params = model.layout.num_params() as u64;
    let mut found = Found {
        rows: Vec::new(),
        count: layouts.len(),
        refused: (0, None),
        params: decoder.as_ref().map_or(num_params, |of| of.params),
        samples,
        model: decoder.map_or(config.model.name(), |of| of.family).to_owned(),
        formulas: formulas.unwrap_or_default(),
    };
    let ratio = found.params as f64 / num_params as f64;
    let planner = Planner { args, base, hardware, ratio, caps: config.strategy.caps_for_ddp() };
    drop((config, data, model));
    planner.find(layouts, &mut found)?;
    planner.measure(&mut found)?;
    table::publish(args, &planner.hardware, &found)?;
    Ok(0)
}

/// The settings that all layouts share, and the model of `--config`.
fn base(args: &PlanArgs) -> Result<(Spec, Option<Decoder>)> {
    let typed = args.train.0.without(&["link"]);
    let Some(path) = &args.config else { return Ok((typed, None)) };
    let stated = "model pretrained llama-size layers width heads kv-heads head-dim intermediate vocab tie-embeddings num-labels";
    if let Some(flag) = stated.split(' ').find(|flag| typed.has(flag)) {
        return usage(format!("--{flag}: --config states the model; leave one of them out"));
    }
    let refused = |error: String| Failure::Usage(format!("--config {}: {error}", path.printable()));
    let text = paceline_files::read_text(path, LlamaConfig::MAX_FILE_BYTES);
    let text = text.map_err(|error| refused(error.to_string()))?;
    let decoder = Decoder::from_json(&text).map_err(|error| refused(error.to_string()))?;
    let of = &decoder.llama;
    let sizes = [
        ("layers", of.num_hidden_layers),
        ("width", of.hidden_size),
        ("heads", of.num_attention_heads),
        ("kv-heads", of.num_key_value_heads),
        ("head-dim", of.head_dim),
        ("intermediate", of.intermediate_size),
        ("vocab", of.vocab_size),
    ];
    let length = typed.number("seq-len").unwrap_or(0);
    if let Some(window) = decoder.window.filter(|window| *window < length) {
        return Err(refused(format!(
            "sliding_window is {window}, and attention within a window is not known; pass --seq-len {window} or less"
        )));
    }
    let tied = of.tie_word_embeddings.then_some(true);
    let spec = typed.with("model", "llama").set("tie-embeddings", tied);
    let spec = sizes.into_iter().fold(spec, |spec, (flag, size)| spec.with(flag, size));
    Ok((spec, Some(decoder)))
}

/// How far each axis scales on this card in the fastest of these types. `None` for models and hardware without an answer.
fn formulas(
    hardware: &RankHardware,
    config: &TrainConfig,
    model: &Layout,
    tokens: usize,
    precisions: &[PrecisionName],
) -> Option<Vec<String>> {
    let precision = *precisions.last()?;
    let (_, link) = hardware.link.as_ref()?;
    let hosts = hardware.hosts.as_ref().map(|(_, hosts)| hosts);
    let (sharing, inside) = hosts.map_or((1, *link), |of| (of.ranks_per_host, of.inside));
    let speeds = RankSpeeds {
        flop_per_s: hardware.peak(precision, config.tf32)? * hardware.mfu,
        data_bytes_per_s: link.bytes_per_s / sharing as f64,
        tensor_bytes_per_s: inside.bytes_per_s,
    };
    let bytes = if precision == PrecisionName::F32 { 4.0 } else { 2.0 };
    Some(formulas::lines(&speeds, &LayerSizes::of(model, tokens as f64, bytes)?, 8))
}

struct Planner<'a> {
    args: &'a PlanArgs,
    base: Spec,
    hardware: RankHardware,
    /// The number of parameters, by that of the model that stands for it.
    ratio: f64,
    caps: BucketCaps,
}

/// The work of each layout of one stage, or why a run refuses it.
type Works = Vec<(StepLayout, Result<BlockWork>)>;

impl Planner<'_> {
    /// Predicts the time of all layouts, and the memory of the fastest until enough of them fit.
    fn find(&self, layouts: Vec<StepLayout>, found: &mut Found) -> Result<()> {
        let works = self.works(&layouts)?;
        let speed = self.speed(layouts[0], found.samples)?;
        let mut timed = Vec::new();
        for layout in layouts {
            let times = self.times(&layout, &works, speed);
            timed.extend(found.unless_refused(times)?.map(|times| (layout, times)));
        }
        timed.sort_by(|a, b| a.1.step_ms.total_cmp(&b.1.step_ms));
        let mut num_fit = 0;
        for (layout, times) in timed {
            let Some(row) = found.unless_refused(self.row(layout, times))? else { continue };
            // Stages of sharding are often predicted alike. The first stands for all.
            if !found.rows.iter().any(|other| other.is_alike(&row)) {
                num_fit += usize::from(row.over_bytes == 0);
                found.rows.push(row);
            }
            if num_fit == self.args.top {
                break;
            }
        }
        match &found.refused.1 {
            Some(reason) if found.rows.is_empty() => usage(format!(
                "--on: the model cannot be divided among {} ranks for steps of {}: {reason}; pass other ranks, or another \
                 --global-batch-size",
                self.hardware.ranks,
                plural(found.samples, "sample")
            )),
            _ => Ok(()),
        }
    }

    /// The work of all layouts. Blocks are measured in rounds, and the shortest times count: this host may be slower for a while.
    fn works(&self, layouts: &[StepLayout]) -> Result<Works> {
        let work = |alone: &StepLayout| BlockWork::of(&self.base, alone, &self.hardware);
        let mut works = Works::new();
        for alone in layouts.iter().map(StepLayout::alone) {
            if !works.iter().any(|(known, _)| *known == alone) {
                works.push((alone, work(&alone)));
            }
        }
        let rounds = if self.hardware.card.is_some() { 1 } else { ROUNDS };
        for _ in 1..rounds {
            for (alone, known) in &mut works {
                if let Ok(known) = known {
                    let again = work(alone)?;
                    if again.total() < known.total() {
                        *known = again;
                    }
                }
            }
        }
        Ok(works)
    }

    fn times(&self, layout: &StepLayout, works: &Works, speed: RankSpeed) -> Result<StepTimes> {
        let alone = layout.alone();
        let work = works.iter().find(|(known, _)| *known == alone).map(|(_, work)| work.as_ref());
        let work = work.ok_or_else(|| Failure::Run("no work was counted".into()))?;
        let work = work.map_err(Failure::clone)?;
        Case { layout, work, hardware: &self.hardware, speed, caps: self.caps }.times()
    }

    /// The speed of a rank. On this host, a run without communication shows it, while all ranks compute.
    fn speed(&self, like: StepLayout, samples: usize) -> Result<RankSpeed> {
        let (ranks, base) = (self.hardware.ranks, &self.base);
        if let Some(card) = self.hardware.card {
            let optimizer_bytes_per_s = card.bytes_per_s;
            return Ok(RankSpeed { scale: 1.0, sharing: 1.0, optimizer_bytes_per_s });
        }
        let share = (samples / ranks).clamp(1, MAX_ROWS);
        let rows = base.number("batch-size").unwrap_or(share);
        let strategy = if ranks == 1 { "single" } else { "no_sync" };
        let spec = base
            .without(&["batch-size", "checkpoint-activations", "mesh", "schedule"])
            .with("nproc", ranks)
            .with("global-batch-size", rows * ranks)
            .with("strategy", strategy);
        let (spec, config) = measuring(&spec)?;
        let ledger = run_cases(&self.args.study, &[RunCase::new("without communication", spec)?])?;
        let run = Calibration::of(&config, ranks, &ledger.of_case(0, usize::MAX).0)?;
        let alone = StepLayout { tp: 1, micro_batch: rows, checkpoint_activations: false, ..like };
        let (_, work) = self.works(&[alone])?.swap_remove(0);
        Ok(RankSpeed::of(&self.hardware, &run, &work?))
    }

    /// The memory of a layout. Parameters that only the model of `--config` has count by their number.
    fn row(&self, layout: StepLayout, times: StepTimes) -> Result<Row> {
        let spec = layout.spec(&self.base);
        let (mut config, data, model) = resolve_unchecked(&spec, None)?;
        config.checkpoints.save = None;
        let needs = Needs::of(&Shape::of(&config, &data), &model)?;
        let need = needs.largest();
        let mut bytes = need.bytes();
        // The memory of a process changes from moment to moment, and a card holds neither it nor the data set.
        bytes.remove(RESIDENT);
        let mut rank_bytes = if self.hardware.card.is_some() { need.total } else { need.whole() };
        for category in
            [Category::Parameters, Category::Gradients, Category::Optimizer, Category::Unsharded]
        {
            let more = (need.of(category) as f64 * (self.ratio - 1.0)) as i64;
            for name in [category.name(), TOTAL] {
                let more = |bytes: &mut u64| *bytes = bytes.saturating_add_signed(more);
                bytes.entry(name.to_owned()).and_modify(more);
            }
            rank_bytes = rank_bytes.saturating_add_signed(more);
        }
        let over_bytes = (rank_bytes as f64 - self.hardware.rank_bytes).max(0.0) as u64;
        let command = spec::shown(&self.with_link(&spec));
        let (measured_ms, measured_bytes) = (None, None);
        Ok(Row {
            layout,
            times,
            bytes,
            rank_bytes,
            over_bytes,
            command,
            measured_ms,
            measured_bytes,
        })
    }

    /// The same on the emulated link.
    fn with_link(&self, spec: &Spec) -> Spec {
        let name = self.hardware.link.as_ref().map(|(name, _)| name);
        let is_emulated = |name: &&String| *name != MEASURED && self.hardware.card.is_none();
        spec.set("link", name.filter(is_emulated))
    }

    /// Runs the first layouts that fit, as many as `--measure` says.
    fn measure(&self, found: &mut Found) -> Result<()> {
        let Some(count) = self.args.measure else { return Ok(()) };
        let fitting = found.rows.iter_mut().filter(|row| row.over_bytes == 0);
        let mut rows: Vec<&mut Row> = fitting.take(count).collect();
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
    /// The result, unless a run refuses the layout.
    fn unless_refused<T>(&mut self, result: Result<T>) -> Result<Option<T>> {
        match result {
            Err(Failure::Usage(reason)) => {
                self.refused.0 += 1;
                self.refused.1.get_or_insert(reason);
                Ok(None)
            }
            other => other.map(Some),
        }
    }
}
