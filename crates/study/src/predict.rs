//! `paceline predict`: the time of a step with more ranks on other links, from runs without communication.
//!
//! These runs show how long a step computes and when each gradient is final. On a link, the all-reduces of these gradients form a
//! queue ([`paceline_analysis::advice::replay`]). So the step, the overlap and the best buckets can be predicted for links and
//! strategies that were never run. With `--measure`, the same links are emulated, and the measured times are printed beside the
//! predicted ones.
//!
//! | file | purpose |
//! |---|---|
//! | [`flags`] | the flags, and how they fit together |
//! | [`traced`] | traces of a run, for which nothing is run either |
//! | [`stated`] | a model that is given as bytes and milliseconds, for which nothing is run |
//! | [`network`] | the cost of an operation on one link, or on hosts with a link inside and one between |
//! | [`model`] | the prediction |
//! | [`efficiency`] | the slowest link that keeps an efficiency |
//! | [`compression`] | the effect of compressing gradients |
//! | [`table`], [`chart`] | show all of it |

pub mod chart;
pub mod compression;
pub mod efficiency;
pub mod flags;
pub mod model;
pub mod network;
pub mod stated;
pub mod table;
pub mod traced;

use std::sync::Arc;

use compression::Compression;
use efficiency::efficiency_pct;
use paceline_collectives::{Link, NAMED_LINKS};
use paceline_commbench::processes::rows_of;
use paceline_failure::{Failure, Result};
use paceline_host::text::{line_width, say, thousands, warn};
use paceline_launch::environment::Placement;
use paceline_model::Layout;
use paceline_observe::figures::run_summary::RunSummary;
use paceline_settings::config::TrainConfig;
use paceline_table::table::Table;
use serde::Serialize;

use crate::cases::Case;
use crate::noise::Spread;
use crate::outcome::Origin;
use crate::refuse_ranks;
use crate::spec;
use crate::spec::Spec;
use crate::study::{Setting, check, layout_of, measuring, run_cases, spread_of, write_files};
use flags::MEASURED;
pub use flags::PredictArgs;
use model::{Calibration, Prediction, Step};
use network::{Network, Route};
use stated::StatedModel;
use traced::{Range, StrategyRow, TracedRun};

/// Sizes in bytes of the all-reduces from which the speed of the transport itself is fitted.
const PROBE_BYTES: [u64; 4] = [4 << 10, 256 << 10, 4 << 20, 32 << 20];

/// The prediction for one number of ranks on one link, and the measurement.
#[derive(Clone, Debug)]
pub struct Row {
    /// The link, or the link between hosts, as the user named it.
    pub link: String,
    /// The network, with the fastest way to all-reduce.
    pub network: Network,
    /// When the buckets are ready.
    pub step: Step,
    /// The prediction.
    pub prediction: Prediction,
    /// The lowest sufficient bandwidth in Gbit/s for the requested efficiency, at this latency; `None` if there is none.
    pub slowest_gbit_s: Option<f64>,
    /// The slowest named link with this efficiency.
    pub slowest_named: Option<&'static str>,
    /// The measured step of `ddp` on the emulated link over the rounds, in milliseconds.
    pub measured: Option<Spread>,
    /// How far the prediction varies from step to step of a trace.
    pub range: Option<Range>,
    /// The same with compressed gradients, if the parameters are known.
    pub compression: Option<Compression>,
}

#[derive(Debug, Serialize)]
struct Report<'a> {
    #[serde(flatten)]
    origin: &'a Origin,
    #[serde(flatten)]
    setting: &'a Setting,
    target_efficiency_pct: f64,
    ranks_per_host: usize,
    link_in_host: &'a Option<String>,
    calibrations: &'a [Calibration],
    #[serde(flatten)]
    rows: &'a Table,
    #[serde(skip_serializing_if = "<[StrategyRow]>::is_empty")]
    strategies: &'a [StrategyRow],
    #[serde(skip_serializing_if = "Option::is_none")]
    cpu_wait_pct: Option<f64>,
}

/// Runs `paceline predict`.
pub fn predict(args: &PredictArgs, placement: Option<Placement>) -> Result<u8> {
    refuse_ranks("a study", placement)?;
    check(&args.study)?;
    if args.links.is_empty() {
        let is_given = args.measure || args.trace.is_some() || args.gradient_bytes.is_some();
        if is_given || args.train.0.keys().next().is_some() {
            let text = "--links without a value lists the links: pass a link, or no other flag";
            return Err(Failure::Usage(text.into()));
        }
        say(&table::speeds(&NAMED_LINKS));
        say(
            "Each is in one direction; both can be used at once. Bandwidths are nominal, latencies \
             what well-tuned systems reach.",
        );
        return Ok(0);
    }
    let runs = flags::resolve(args)?;
    if let Some(traced) = TracedRun::read(args)? {
        return of_traces(args, &traced, &runs);
    }
    match StatedModel::of(args)? {
        Some(given) => of_numbers(args, &given, &runs),
        None => of_runs(args, &runs),
    }
}

fn of_numbers(args: &PredictArgs, given: &StatedModel, flags: &Spec) -> Result<u8> {
    let config = config_of_given(flags)?;
    let (layout, calibration) = given.model();
    let layout = Arc::new(layout);
    // The parameters of these bytes are not known.
    let base = Base { layout, calibration, steps: Vec::new(), knows_gradients: false };
    let (mut found, ways) = (Found::default(), flags::ways(args)?);
    for &ranks in &args.nproc {
        found.add(args, &config, &ways, ranks, &base)?;
    }
    let setting = setting_of_given("given", &config, given.num_params());
    let heading = format!(
        "Predicted steps: {}, of which the backward pass is the last {:.2}\nNothing was run.",
        given.words(),
        given.backward_ms
    );
    let labels = (given.words(), "Predicted; nothing was run".to_owned());
    publish(args, &setting, &found, heading, labels)
}

fn of_traces(args: &PredictArgs, traced: &TracedRun, flags: &Spec) -> Result<u8> {
    let config = config_of_given(flags)?;
    let mut found = Found { waited_pct: traced.waited_pct, ..Found::default() };
    let ways = traced.ways(args)?;
    for &ranks in &args.nproc {
        let base = traced.base(ranks, config.strategy.caps_for_ddp())?;
        found.add(args, &config, &ways, ranks, &base)?;
    }
    let params = traced.gradient_bytes.div_ceil(4);
    let setting = setting_of_given("traced", &config, params);
    let heading = format!("Predicted steps: {}\nNothing was run.", traced.words());
    publish(args, &setting, &found, heading, traced.labels())
}

/// The configuration for a model that is not run: the sizes of buckets do not depend on the model, so this takes the default one.
fn config_of_given(flags: &Spec) -> Result<TrainConfig> {
    spec::resolve(&flags.with("nproc", 1).with("strategy", "ddp"))
}

fn setting_of_given(model: &str, config: &TrainConfig, params: u64) -> (Origin, Setting) {
    (Origin::of(0), Setting { model: model.to_owned(), ..Setting::new(config, params) })
}

fn of_runs(args: &PredictArgs, given: &Spec) -> Result<u8> {
    let ways = flags::ways(args)?;
    let (single, _) = measuring(&given.with("nproc", 1))?;
    // Ranks of one host slow each other down. Measured runs have all ranks on this host, so the runs for their prediction must,
    // too. Without --measure the ranks are assumed to be on other hosts, so one rank runs alone.
    let places: Vec<usize> = if args.measure { args.nproc.clone() } else { vec![1] };
    let mut cases = Vec::new();
    for &ranks in &places {
        let strategy = if ranks == 1 { "single" } else { "no_sync" };
        let flags = at(&single, ranks).with("strategy", strategy);
        cases.push(Case::new(format!("{ranks} without communication"), flags)?);
    }
    let config = spec::resolve(&single.with("strategy", "ddp"))?;
    config.warnings.iter().for_each(|warning| warn(warning));
    for &ranks in &args.nproc {
        for link in args.links.iter().filter(|_| args.measure) {
            let flags = at(&single, ranks).with("strategy", "ddp");
            let flags = if link == MEASURED { flags } else { flags.with("link", link) };
            cases.push(Case::new(format!("{ranks} on {link}"), flags)?);
        }
    }
    let ledger = run_cases(&args.study, &cases)?;
    let runs: Vec<_> = (0..cases.len()).map(|case| ledger.of_case(case, usize::MAX).0).collect();
    let waited = runs.iter().flatten().filter_map(|run| run.number("cpu_wait_pct"));
    let mut found = Found { waited_pct: waited.reduce(f64::max), ..Found::default() };
    let (alone, measured) = runs.split_at(places.len());
    let calibration =
        |(ranks, runs): (&usize, &Vec<RunSummary>)| Calibration::of(&config, *ranks, runs);
    let calibrations = places.iter().zip(alone).map(calibration).collect::<Result<Vec<_>>>()?;
    let (mut measured, mut params) = (measured.iter(), 0);
    for &ranks in &args.nproc {
        let at = places.iter().position(|place| *place == ranks).unwrap_or(0);
        let (layout, calibration) = (layout_of(&config, ranks)?, calibrations[at].clone());
        let base = Base { layout, calibration, steps: Vec::new(), knows_gradients: true };
        params = base.layout.num_params() as u64;
        let costs = compression::costs(&base.layout, &config)?;
        let first = found.rows.len();
        found.add(args, &config, &ways, ranks, &base)?;
        for row in &mut found.rows[first..] {
            row.measured = measured.next().and_then(|of| spread_of(of, "step_ms_median"));
            row.compression = Some(Compression::new(row, &base.layout, &costs));
        }
    }
    let of = (Origin::of(args.study.rounds), Setting::new(&config, params));
    let heading = format!(
        "Predicted steps: {}\n{} parameters, {:.2} MB of gradients",
        of.1.words(&of.0),
        thousands(params),
        4e-6 * params as f64
    );
    let labels = (of.1.model.clone(), of.1.place(&of.0));
    publish(args, &of, &found, heading, labels)
}

/// The predictions, row by row.
#[derive(Debug, Default)]
pub struct Found {
    calibrations: Vec<Calibration>,
    rows: Vec<Row>,
    strategies: Vec<StrategyRow>,
    /// The part of the measured steps in which a rank had no core: the most of any run.
    waited_pct: Option<f64>,
}

/// A model, and the times of its step without communication.
struct Base {
    layout: Arc<Layout>,
    calibration: Calibration,
    /// Each step of the traces from which these come; empty without traces.
    steps: Vec<Step>,
    knows_gradients: bool,
}

impl Found {
    /// Adds the rows of this many ranks on each link. The fastest of these ways to all-reduce is predicted.
    fn add(
        &mut self,
        args: &PredictArgs,
        config: &TrainConfig,
        ways: &[Route],
        ranks: usize,
        base: &Base,
    ) -> Result<()> {
        let caps = config.strategy.caps_for_ddp();
        let step = Step::new(&base.calibration, &base.layout, caps)?;
        if !self.calibrations.contains(&base.calibration) {
            self.calibrations.push(base.calibration.clone());
        }
        for name in &args.links {
            let networks = networks(args, ranks, name, config, ways)?;
            let fastest = networks.into_iter().min_by(|a, b| step.on(a).total_cmp(&step.on(b)));
            let network =
                fastest.ok_or_else(|| Failure::Usage("no algorithm to predict".into()))?;
            let row = Row::new(args.efficiency, name, base, step.clone(), network);
            self.strategies.extend(traced::strategies(&row, base));
            self.rows.push(row);
        }
        Ok(())
    }
}

impl Row {
    fn new(target: f64, link: &str, base: &Base, step: Step, network: Network) -> Self {
        let cost = |bytes| network.all_reduce_ms(bytes);
        let mut prediction = Prediction::new(&step, &base.layout, &cost);
        prediction.simple_step_ms = prediction.simple_step_ms.filter(|_| base.knows_gradients);
        let is_enough = |&&(_, gb_per_s, latency_us, _): &&(&str, f64, f64, &str)| {
            let link = Link { bytes_per_s: gb_per_s * 1e9, latency_s: latency_us * 1e-6 };
            step.efficiency_pct(&Network { link, ..network }) >= target
        };
        let enough = NAMED_LINKS.iter().filter(is_enough);
        let slowest_named = enough.min_by(|a, b| a.1.total_cmp(&b.1)).map(|(name, ..)| *name);
        Self {
            link: link.to_owned(),
            prediction,
            slowest_gbit_s: step.slowest_gbit_s(&network, target),
            slowest_named,
            measured: None,
            range: Range::of(&base.steps, &network, target),
            compression: None,
            network,
            step,
        }
    }

    /// The step without communication, in percent of the predicted step.
    pub fn efficiency_pct(&self) -> f64 {
        efficiency_pct(self.step.alone_ms, self.prediction.step_ms)
    }
}

/// Prints the predictions, and writes the files. Charts say `model` and `place`.
fn publish(
    args: &PredictArgs,
    (origin, setting): &(Origin, Setting),
    found: &Found,
    heading: String,
    (model, place): (String, String),
) -> Result<u8> {
    let Found { calibrations, rows, strategies, waited_pct } = found;
    let table = table::table(rows);
    let local = args.hosts.ranks_per_host;
    let hosts = args.hosts.link_in_host.as_ref().map(|inside| {
        format!(
            "Hosts have {local} ranks each: {inside} inside a host, the links of the tables between hosts."
        )
    });
    let labels = chart::Labels { model: &model, place: &place };
    say(&heading);
    hosts.iter().for_each(|line| say(line));
    say(&format!("\n{}", table::text(found, args.efficiency, line_width())));
    let report = Report {
        origin,
        setting,
        target_efficiency_pct: args.efficiency,
        ranks_per_host: local,
        link_in_host: &args.hosts.link_in_host,
        calibrations,
        rows: &table,
        strategies,
        cpu_wait_pct: *waited_pct,
    };
    let charts = chart::charts(rows, calibrations, args.efficiency, &labels);
    write_files(&args.study, &report, &table.csv(), &charts)?;
    Ok(0)
}

/// The flags with `ranks` ranks, each with the batch of the single rank.
fn at(single: &Spec, ranks: usize) -> Spec {
    match single.number("global-batch-size") {
        Some(batch) => single.with("nproc", ranks).with("global-batch-size", batch * ranks),
        None => single.with("nproc", ranks),
    }
}

/// The network of `ranks` ranks on this link, for each way to all-reduce.
fn networks(
    args: &PredictArgs,
    ranks: usize,
    link: &str,
    config: &TrainConfig,
    ways: &[Route],
) -> Result<Vec<Network>> {
    let hosts = args.hosts.hosts()?.map(|(_, hosts)| hosts);
    let of_way = |&way| Ok(Network { ranks, link: link_of(link, ranks, config, way)?, hosts, way });
    ways.iter().map(of_way).collect()
}

/// The link with this name. `measured` is fitted to all-reduces of a few sizes, measured here.
pub(crate) fn link_of(name: &str, ranks: usize, config: &TrainConfig, way: Route) -> Result<Link> {
    if name != MEASURED {
        return flags::link("--links", name);
    }
    let words = ["bench", "all_reduce", "--iters", "10", "-w", "2", "-c", "0", "--style", "lines"];
    let way_words = ["--algorithm", way.name(), "--transport", config.transport.name()];
    let words = words.into_iter().chain(way_words).map(str::to_owned);
    let words: Vec<String> = words.collect();
    let rows = rows_of(&words, config.transport, &PROBE_BYTES, ranks)?;
    let points = rows.iter().zip(PROBE_BYTES);
    let points = points.map(|(row, bytes)| (bytes as f64, row.timing().median_us * 1e-6));
    Ok(model::fit_link(&points.collect::<Vec<_>>(), way.algorithm(), ranks))
}
