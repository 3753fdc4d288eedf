//! A prediction from the traces of a run, ours or PyTorch's.
//!
//! It makes a calibration, as runs without communication would, and one for each traced step, for the range of a prediction. It
//! also predicts other ways to send the same gradients.

use std::path::PathBuf;

use paceline_analysis::advice::alone::{Alone, AloneStep, Gradient, Program};
use paceline_analysis::advice::replay::Bucket;
use paceline_analysis::read::{self, Select, Window};
use paceline_analysis::stats::{median, quantile};
use paceline_analysis::timeline::cpu_wait_pct;
use paceline_failure::{Failure, Result};
use paceline_files::Printable;
use paceline_host::text::{listed, plural};
use paceline_model::{Init, Layout, LayoutBuilder};
use paceline_observe::insight::anatomy::ReadyLine;
use paceline_observe::insight::buckets::ELEM_BYTES;
use paceline_strategies::BucketCaps;
use serde::Serialize;

use super::efficiency::efficiency_pct;
use super::flags::{self, PredictArgs};
use super::model::{Calibration, Step, TracedSteps};
use super::network::{Network, Route};
use super::stated::{MAX_BYTES, StatedModel, check_bytes};
use super::{Base, Row};

/// Of ten steps, eight are within these quantiles.
const RANGE: [f64; 2] = [0.1, 0.9];

/// How many times as long ranks may compute without a profiler; anything else is taken for a mistake.
const RECORDING: std::ops::RangeInclusive<f64> = 0.2..=1.2;

/// The part of a prediction that comes from traces.
#[derive(Clone, Debug)]
pub struct TracedRun {
    alone: Alone,
    /// The gradients, if the traces give them and no flag does.
    gradients: Option<Vec<Gradient>>,
    /// Bytes of all gradients.
    pub gradient_bytes: u64,
    scale: f64,
    folder: String,
    /// The part of its steps in which a rank had no core, if the traces say so.
    pub waited_pct: Option<f64>,
}

impl TracedRun {
    /// Reads the traces that the flags name.
    pub fn read(args: &PredictArgs) -> Result<Option<Self>> {
        let Some(folder) = &args.trace else { return Ok(None) };
        let refused =
            |why: String| Failure::Usage(format!("--trace {}: {why}", folder.printable()));
        let windows = read::find(&[PathBuf::from(folder)], Select::Latest);
        let windows = windows.map_err(|e| refused(e.to_string()))?;
        let window = windows.into_iter().next().ok_or_else(|| refused("no traces".to_owned()))?;
        check_whole(&window).map_err(&refused)?;
        let timelines = read::open_all(&window.files, read::open);
        let timelines = timelines.map_err(|e| refused(e.to_string()))?;
        let alone = Alone::of(&timelines).map_err(&refused)?;
        let (gradients, gradient_bytes) = match (args.gradient_bytes, &alone.gradients) {
            (Some(bytes), _) => (None, check_bytes(bytes)?),
            (None, Ok(gradients)) => {
                let bytes = gradients.iter().map(|of| of.num_elems).fold(0, u64::saturating_add);
                (Some(gradients.clone()), bytes.saturating_mul(alone.elem_bytes))
            }
            (None, Err(why)) => {
                return Err(refused(format!("{why}, or give --gradient-bytes")));
            }
        };
        if !(1.0..=MAX_BYTES).contains(&(gradient_bytes as f64)) {
            return Err(refused(format!("it claims {gradient_bytes} bytes of gradients")));
        }
        let recorded =
            args.step_ms.map_or(Ok(1.0), |step_ms| without_recording(&alone, step_ms))?;
        let (scale, folder) = (args.compute_scale * recorded, folder.printable().to_string());
        let waited_pct = cpu_wait_pct(&timelines);
        Ok(Some(Self { alone, gradients, gradient_bytes, scale, folder, waited_pct }))
    }

    /// The ways to all-reduce; the fastest is predicted. PyTorch's Gloo works in a ring.
    pub fn ways(&self, args: &PredictArgs) -> Result<Vec<Route>> {
        let is_open = args.hosts.ranks_per_host == 1 && !args.train.0.has(flags::ALGORITHM);
        match self.alone.program {
            Program::Pytorch if is_open => Ok(vec![Route::Ring]),
            Program::Pytorch | Program::Paceline => flags::ways(args),
        }
    }

    /// The usual step for this many ranks, and each traced step with these buckets.
    pub(super) fn base(&self, ranks: usize, caps: BucketCaps) -> Result<Base> {
        let (steps, scale) = (&self.alone.steps, self.scale);
        let usual =
            |part: &dyn Fn(&AloneStep) -> f64| median(steps.iter().map(part)).unwrap_or(0.0);
        let usual_step = AloneStep {
            measured_ms: usual(&|of| of.measured_ms),
            alone_ms: usual(&|of| of.alone_ms),
            backward: [0, 1].map(|end| usual(&|of| of.backward[end])),
            ready: (0..steps[0].ready.len()).map(|at| usual(&|of| of.ready[at])).collect(),
        };
        let mut alone_ms: Vec<f64> = steps.iter().map(|of| scale * of.alone_ms).collect();
        let [low_ms, high_ms] = range(&mut alone_ms);
        let traced_ms = usual_step.measured_ms;
        let sums_loss = self.alone.program == Program::Paceline;
        let traced = TracedSteps { steps: steps.len(), low_ms, high_ms, traced_ms, sums_loss };
        let of_step = |step: &AloneStep| {
            let (layout, calibration) = self.of_step(step, ranks);
            (layout, Calibration { traced: Some(traced), ..calibration })
        };
        let (layout, calibration) = of_step(&usual_step);
        let step = |of: &AloneStep| {
            let (layout, calibration) = of_step(of);
            Step::new(&calibration, &layout, caps)
        };
        let steps = steps.iter().map(step).collect::<Result<_>>()?;
        Ok(Base {
            layout: layout.into(),
            calibration,
            steps,
            knows_gradients: self.gradients.is_some(),
        })
    }

    fn of_step(&self, step: &AloneStep, ranks: usize) -> (Layout, Calibration) {
        let [begin, end] = step.backward.map(|ms| self.scale * ms);
        let Some(gradients) = &self.gradients else {
            let (gradient_bytes, backward_ms) = (self.gradient_bytes, (end - begin).max(0.0));
            let given = StatedModel { gradient_bytes, compute_ms: end, backward_ms };
            let (layout, calibration) = given.model();
            return (layout, self.calibration(calibration.ready, step));
        };
        let mut builder = LayoutBuilder::new();
        let mut last = None;
        let mut add = |at: usize| {
            let (of_unit, name) = self.name(&gradients[at], at);
            let mut unit = match &last {
                Some((name, id)) if *name == of_unit => builder.continued(*id),
                _ => builder.unit(&of_unit),
            };
            last = Some((of_unit, unit.id));
            let bytes = gradients[at].num_elems.saturating_mul(self.alone.elem_bytes);
            let elems = bytes.div_ceil(ELEM_BYTES as u64) as usize;
            unit.param(&name, [elems], Init::Constant(0.0));
        };
        match self.alone.program {
            // They are in the order in which they become final, and buckets begin with the last parameter.
            Program::Pytorch => (0..gradients.len()).rev().for_each(&mut add),
            Program::Paceline => (0..gradients.len()).for_each(&mut add),
        }
        let line = |(at, ready_ms): (usize, &f64)| {
            let (unit, name) = self.name(&gradients[at], at);
            ReadyLine { param: format!("{unit}.{name}"), ready_ms: self.scale * ready_ms }
        };
        let mut ready: Vec<ReadyLine> = step.ready.iter().enumerate().map(line).collect();
        ready.sort_by(|a, b| a.ready_ms.total_cmp(&b.ready_ms));
        (builder.finish(ranks), self.calibration(ready, step))
    }

    /// The unit and the name of a parameter, which a number makes unique.
    fn name(&self, gradient: &Gradient, at: usize) -> (String, String) {
        let (unit, name) = gradient.name.rsplit_once('.').unwrap_or(("traced", &gradient.name));
        (unit.to_owned(), format!("{name} {at}"))
    }

    fn calibration(&self, ready: Vec<ReadyLine>, step: &AloneStep) -> Calibration {
        let [begin, end] = step.backward.map(|ms| self.scale * ms);
        Calibration {
            ranks: self.alone.ranks,
            step_ms: self.scale * step.alone_ms,
            compute_ms: self.scale * step.alone_ms,
            backward_begin_ms: begin,
            backward_end_ms: end,
            ready,
            ..Calibration::default()
        }
    }

    /// The input, in words.
    pub fn words(&self) -> String {
        let program = match self.alone.program {
            Program::Pytorch => "PyTorch",
            Program::Paceline => "paceline",
        };
        let Alone { ranks, steps, num_traced, .. } = &self.alone;
        let gradients = match &self.gradients {
            Some(all) => format!("{} of {:.2} MB", plural(all.len(), "gradient"), self.mb()),
            None => format!("{:.2} MB of gradients, which are final at an even pace", self.mb()),
        };
        let scaled = match self.scale {
            1.0 => String::new(),
            scale => format!(
                "\nComputing takes {} times what it took in the traces (--compute-scale, --step-ms).",
                // A factor that was passed is repeated unchanged.
                (scale * 1e4).round() / 1e4
            ),
        };
        let traced = plural(*num_traced, "step");
        format!(
            "{gradients}\nFrom {} of {traced} that {program} traced on {}{scaled}",
            steps.len(),
            plural(*ranks, "rank")
        )
    }

    /// The same for a chart.
    pub fn labels(&self) -> (String, String) {
        let place = format!("Predicted from the traces in {}; nothing was run", self.folder);
        (format!("{:.2} MB of gradients", self.mb()), place)
    }

    fn mb(&self) -> f64 {
        self.gradient_bytes as f64 / 1e6
    }
}

/// The factor of computing times without a profiler, if a step then takes `step_ms` and waits for communication as in the
/// traces.
fn without_recording(alone: &Alone, step_ms: f64) -> Result<f64> {
    let usual = |part: &dyn Fn(&AloneStep) -> f64| median(alone.steps.iter().map(part));
    let measured_ms = usual(&|of| of.measured_ms).unwrap_or(0.0);
    let alone_ms = usual(&|of| of.alone_ms).unwrap_or(0.0);
    let factor = (step_ms - (measured_ms - alone_ms)) / alone_ms;
    if RECORDING.contains(&factor) {
        Ok(factor)
    } else {
        Err(Failure::Usage(format!(
            "--step-ms {step_ms}: a step of the traces took {measured_ms:.2} ms, of which it waited for {:.2}; pass what it takes \
             without the profiler on the same ranks and network, or --compute-scale for other ranks",
            measured_ms - alone_ms
        )))
    }
}

/// Checks that the traces of all ranks are there, since the slowest rank decides.
fn check_whole(window: &Window) -> std::result::Result<(), String> {
    if let Some(doubt) = window.doubts.first() {
        return Err(doubt.clone());
    }
    if window.missing.is_empty() {
        return Ok(());
    }
    let missing: Vec<String> = window.missing.iter().map(usize::to_string).collect();
    Err(format!(
        "there is no trace of rank {}; pass a folder with the traces of all ranks",
        listed(&missing)
    ))
}

/// The smallest and the largest of eight of ten values. Sorts them.
fn range(values: &mut [f64]) -> [f64; 2] {
    values.sort_by(f64::total_cmp);
    RANGE.map(|part| quantile(values, part).unwrap_or(f64::NAN))
}

/// The bounds of a prediction in 8 of 10 traced steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Range {
    /// The shortest step, in milliseconds.
    pub step_low_ms: f64,
    /// The longest step, in milliseconds.
    pub step_high_ms: f64,
    /// The slowest link in Gbit/s with the requested efficiency. `None` if no bandwidth is enough.
    pub slowest_low_gbit_s: Option<f64>,
    /// The same for the step that needs the fastest link.
    pub slowest_high_gbit_s: Option<f64>,
}

impl Range {
    /// The range of these steps for this network and target efficiency; `None` without steps.
    pub fn of(steps: &[Step], network: &Network, target: f64) -> Option<Self> {
        steps.first()?;
        let mut all_ms: Vec<f64> = steps.iter().map(|step| step.on(network)).collect();
        let least = |step: &Step| step.slowest_gbit_s(network, target).unwrap_or(f64::INFINITY);
        let mut least: Vec<f64> = steps.iter().map(least).collect();
        let [step_low_ms, step_high_ms] = range(&mut all_ms);
        let [slowest_low_gbit_s, slowest_high_gbit_s] =
            range(&mut least).map(|gbit_s| Some(gbit_s).filter(|of| of.is_finite()));
        Some(Self { step_low_ms, step_high_ms, slowest_low_gbit_s, slowest_high_gbit_s })
    }
}

/// The step of one strategy on one link, in milliseconds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StrategyRow {
    /// Number of ranks.
    pub ranks: usize,
    /// The link.
    pub link: String,
    /// The strategy.
    pub strategy: &'static str,
    /// The step.
    pub step_ms: f64,
    /// The shortest of eight of ten steps.
    pub step_low_ms: f64,
    /// The longest of eight of ten steps.
    pub step_high_ms: f64,
    /// The step without communication, in percent of this one.
    pub efficiency_pct: f64,
}

/// A strategy that gradients and times determine. The costs of compression and of sharded models are in no trace.
struct Sending {
    name: &'static str,
    /// Whether it sends gradients one by one.
    is_one_by_one: bool,
    step_ms: StepMs,
}

/// The step, if gradients travel in these messages or all in one, each for `cost(bytes)` milliseconds.
type StepMs = fn(&Step, &[Bucket], u64, &dyn Fn(u64) -> f64) -> f64;

#[rustfmt::skip]
const SENDING: [Sending; 4] = [
    Sending { name: "ddp", is_one_by_one: false, step_ms: |step, _, _, cost| step.step_ms(cost) },
    Sending { name: "flat_ddp", is_one_by_one: false,
        step_ms: |step, _, all_bytes, cost| step.alone_ms + step.loss_ms(cost) + cost(all_bytes) },
    Sending { name: "simple_ddp_async", is_one_by_one: true,
        step_ms: |step, each, _, cost| step.alone_ms + step.backward.play(each, cost).exposed() },
    Sending { name: "simple_ddp", is_one_by_one: true,
        step_ms: |step, each, _, cost| {
            step.alone_ms + step.loss_ms(cost) + each.iter().map(|of| cost(of.bytes)).sum::<f64>()
        } },
];

/// The steps of all strategies on one link; none without the steps of a trace.
pub(super) fn strategies(of: &Row, base: &Base) -> Vec<StrategyRow> {
    let (Row { network, step: usual, .. }, Base { layout, steps, .. }) = (of, base);
    if steps.is_empty() {
        return Vec::new();
    }
    let bytes_of = |elems: usize| (elems * ELEM_BYTES) as u64;
    let each = layout
        .trained()
        .rev()
        .map(|(id, param)| Bucket { gradients: vec![id.0], bytes: bytes_of(param.range().len()) });
    let each: Vec<Bucket> = each.collect();
    let all_bytes = bytes_of(layout.trained_len());
    let cost = |bytes: u64| network.all_reduce_ms(bytes);
    let row = |way: Sending| {
        let ms = |step: &Step| (way.step_ms)(step, &each, all_bytes, &cost);
        let [step_low_ms, step_high_ms] = range(&mut steps.iter().map(ms).collect::<Vec<_>>());
        let step_ms = ms(usual);
        StrategyRow {
            ranks: network.ranks,
            link: of.link.clone(),
            strategy: way.name,
            step_ms,
            step_low_ms,
            step_high_ms,
            efficiency_pct: efficiency_pct(usual.alone_ms, step_ms),
        }
    };
    let known = SENDING.into_iter().filter(|way| base.knows_gradients || !way.is_one_by_one);
    known.map(row).collect()
}
