//! Pipelines of more stages than there are cores: each layer sleeps as long as it would compute. All else is real: the lists, the
//! executor, the messages and the waiting.
//!
//!     cargo run --release -p paceline-strategies --example sleeping_stages -- --ranks 4 --schedule zbv
//!
//! Prints a line of JSON for each schedule, the best by rehearsal first: the step by rehearsal and as measured, in
//! milliseconds, and where idle time comes from; also the largest part of a step of a rank that no cause explains.
//! Faults can be planted: `--slow STAGE,FACTOR` makes a stage slower, `--late STAGE,MS` delays one of its passes in every fourth
//! step, `--link MS` delays messages, and `--clip 1` makes all ranks wait for the norm of the gradients.

use std::error::Error;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use paceline_collectives::{Group, Link, Mesh};
use paceline_kernels::Compute;
use paceline_kernels::optimizer::Sgd;
use paceline_memory::{Allocator, Category, DType, Tensor};
use paceline_model::{
    Batch, Block, Context, Half, Layer, MlpConfig, Model, OptimizerConfig, Saved,
};
use paceline_strategies::schedule::{
    Action, BlockCosts, CutChoice, IdleCause, IdleLedger, Measured, MeasuredStep, Plan,
    RankAccount, SCHEDULES, Schedule, best_cut, named, usual,
};
use paceline_strategies::{
    MicroBatch, Replica, ReplicaOptions, Single, Stages, StepContext, StepState, Strategy,
    clip_factor, span, train_step,
};
use paceline_trace::{SpanTrack, now_ns};

/// Any error: this program only prints it.
type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// The settings of a run.
struct Settings {
    ranks: usize,
    micro_batches: usize,
    steps: usize,
    /// Forward pass, input half and weight half of all stages of a rank together, in milliseconds.
    costs: Vec<f64>,
    slow: Option<(usize, f64)>,
    late: Option<(usize, f64)>,
    link: f64,
    clips: bool,
    schedules: Vec<&'static dyn Schedule>,
}

/// Steps that are not measured.
const WARM_UP: usize = 2;

fn main() -> Result<()> {
    let settings = settings()?;
    let rehearsed = |of: &&'static dyn Schedule| -> Result<CutChoice> {
        let (ranks, micro_batches) = (settings.ranks, settings.micro_batches);
        let choice = best_cut(*of, ranks, micro_batches, &blocks(&settings, *of), (None, None))?;
        choice.ok_or_else(|| "a schedule needs as many stages as it has".into())
    };
    let mut choices = settings.schedules.iter().map(rehearsed).collect::<Result<Vec<_>>>()?;
    choices.sort_by(CutChoice::by_step);
    choices.iter().try_for_each(|choice| run(&settings, choice))
}

fn settings() -> Result<Settings> {
    let mut settings = Settings {
        ranks: 4,
        micro_batches: 8,
        steps: 12,
        costs: vec![4.0, 4.0, 4.0],
        slow: None,
        late: None,
        link: 0.0,
        clips: false,
        schedules: SCHEDULES.to_vec(),
    };
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    for pair in arguments.chunks(2) {
        let [flag, value] = pair else { return Err(format!("{}: no value", pair[0]).into()) };
        let numbers: Vec<f64> = value.split(',').filter_map(|text| text.parse().ok()).collect();
        let first = numbers.first().copied().unwrap_or(0.0);
        let fault = || match numbers.as_slice() {
            [stage, size] => Ok(Some((*stage as usize, *size))),
            _ => Err(format!("{flag} {value}: pass a stage and a number, such as 1,20")),
        };
        match flag.as_str() {
            "--ranks" => settings.ranks = first as usize,
            "--micro-batches" => settings.micro_batches = first as usize,
            "--steps" => settings.steps = first as usize,
            "--costs" if numbers.len() == 3 => settings.costs = numbers,
            "--slow" => settings.slow = fault()?,
            "--late" => settings.late = fault()?,
            "--link" => settings.link = first,
            "--clip" => settings.clips = first > 0.0,
            "--schedule" => {
                let found = named(value).ok_or_else(|| format!("there is no schedule {value}"))?;
                settings.schedules = vec![found];
            }
            _ => {
                return Err(
                    format!("{flag} {value}: there is no such flag, or no such value").into()
                );
            }
        }
    }
    Ok(settings)
}

/// The times of the blocks, one for each stage.
fn blocks(settings: &Settings, schedule: &dyn Schedule) -> BlockCosts {
    let placement = schedule.placement(settings.ranks);
    let each = |whole: f64| {
        let of = |stage: usize| {
            let slow =
                settings.slow.filter(|(slow, _)| *slow == stage).map_or(1.0, |(_, factor)| factor);
            whole / placement.chunks() as f64 * slow
        };
        (0..placement.stages()).map(of).collect::<Vec<f64>>()
    };
    let mut backward_input = each(settings.costs[1]);
    // The first block has no gradient to pass on.
    backward_input[0] = 0.0;
    BlockCosts {
        forward: each(settings.costs[0]),
        backward_input,
        backward_weight: each(settings.costs[2]),
        // Each rank has as much of a micro-batch.
        kept: vec![1.0 / placement.chunks() as f64; placement.stages()],
        message: settings.link,
        has_barrier: settings.clips,
    }
}

/// Trains with a schedule, and prints what was measured.
fn run(settings: &Settings, choice: &CutChoice) -> Result<()> {
    let (ranks, micro_batches, schedule) =
        (settings.ranks, settings.micro_batches, choice.schedule);
    let blocks = blocks(settings, schedule);
    let costs = blocks.costs(&choice.cut);
    let plan = Plan::new(schedule, ranks, micro_batches, |_| costs.clone())?;
    let stages = Stages { costs: Some(costs), ..Stages::even(schedule, micro_batches) };
    let measured = thread::scope(|scope| {
        let ranks = Group::threads(ranks).into_iter();
        let train = |group| scope.spawn(|| train(settings, &stages, &blocks, group));
        let ranks: Vec<_> = ranks.map(train).collect();
        let ends = ranks.into_iter().map(|rank| rank.join().expect("a rank panicked"));
        ends.collect::<Result<Vec<_>>>()
    })?;
    let step = |at: usize| measured.iter().map(|(own, _)| own[at].clone()).collect::<Vec<_>>();
    let steps: Vec<Vec<MeasuredStep>> = (WARM_UP..settings.steps).map(step).collect();
    let usual = usual(&plan, steps.iter().map(Vec::as_slice));
    let ledgers = steps.iter().map(|step| IdleLedger::of(&plan, step, &usual));
    let ledgers = ledgers.collect::<std::result::Result<Vec<_>, _>>()?;
    let accounts = || ledgers.iter().flat_map(|ledger| &ledger.ranks);
    let mean = RankAccount::mean(accounts());
    let most_rest = accounts().map(|of| 100.0 * (of.rest / of.step).abs()).fold(0.0, f64::max);
    let last = |step: &Vec<MeasuredStep>| step.iter().map(|own| own.end).fold(0.0, f64::max);
    let mut lengths: Vec<f64> =
        steps.windows(2).map(|pair| last(&pair[1]) - last(&pair[0])).collect();
    lengths.sort_by(f64::total_cmp);
    let median = lengths.get(lengths.len() / 2).copied().unwrap_or(0.0);
    let order = (0..ranks).all(|rank| measured[rank].1 == plan.actions(rank));
    let idle: Vec<String> = IdleCause::ALL
        .iter()
        .map(|cause| format!("\"{}\": {:.3}", cause.name(), mean.of(*cause)))
        .collect();
    println!(
        "{{\"schedule\": \"{}\", \"ranks\": {ranks}, \"micro_batches\": {micro_batches}, \"rehearsed_ms\": {:.3}, \
         \"step_ms\": {median:.3}, \"as_planned\": {order}, \"busy\": {:.3}, {}, \"rest\": {:.3}, \"rest_most_pct\": {most_rest:.3}}}",
        schedule.name(),
        choice.step,
        mean.busy,
        idle.join(", "),
        mean.rest
    );
    Ok(())
}

/// The work of every rank. Returns its steps, and the actions of the last one.
fn train(
    settings: &Settings,
    stages: &Stages,
    blocks: &BlockCosts,
    group: Group,
) -> Result<(Vec<MeasuredStep>, Vec<Action>)> {
    if settings.link > 0.0 {
        group.emulate(Link { bytes_per_s: 1e12, latency_s: settings.link / 1e3 })?;
    }
    let mesh = Mesh::new(group, &format!("pp={}", settings.ranks).parse()?)?;
    let compute = Compute::new(1, Allocator::new())?;
    let model = sleeping(settings, blocks)?;
    let (mut strategy, seed) = (Single, 42);
    let options = (seed, ReplicaOptions::default());
    let replica = Replica::in_stages(&mut strategy, model, compute, mesh, stages, options)?;
    let sgd = Sgd { lr: 0.01, momentum: 0.0, weight_decay: 0.0 };
    let mut optimizer = replica.optimizer(OptimizerConfig::Sgd(sgd))?;
    let mut state = StepState::new(&replica)?;
    let mut track = SpanTrack::with_capacity(1 << 12);
    let cx = &mut StepContext { replica: &replica, state: &mut state, track: &mut track };
    let mut steps = Vec::new();
    for _ in 0..settings.steps {
        cx.track.clear();
        let memory = &replica.compute.allocator;
        let batches = (0..settings.micro_batches).map(|_| micro_batch(memory));
        let batches = batches.collect::<Result<Vec<_>>>()?;
        let begin_ns = now_ns();
        train_step(&mut strategy, cx, &batches)?;
        if settings.clips {
            let (_, factor) = clip_factor(&mut strategy, cx, 1.0)?;
            optimizer.set_grad_factor(factor);
        }
        strategy.optimizer_step(cx, &mut optimizer)?;
        steps.push(measured(cx.state, begin_ns..now_ns(), cx.track));
    }
    Ok((steps, cx.state.actions().iter().map(|of| of.action).collect()))
}

/// A step as a ledger takes it, in milliseconds.
fn measured(state: &StepState, step: Range<u64>, track: &SpanTrack) -> MeasuredStep {
    let ms = |ns: u64| ns as f64 / 1e6;
    let arithmetic = state.actions().iter().filter(|of| of.action.kind.computes());
    let actions = arithmetic.map(|of| Measured {
        asked: ms(of.awaited.map_or(of.span.start_ns, |(asked_ns, _)| asked_ns)),
        start: ms(of.span.start_ns),
        end: ms(of.span.end_ns),
        message: of.awaited.map_or((0.0, 0.0), |(asked_ns, times)| {
            let is_late = times.finished_ns > asked_ns;
            let arrived_ns = if is_late { of.span.start_ns } else { times.finished_ns };
            (ms(times.submitted_ns), ms(arrived_ns))
        }),
        held: 0.0,
    });
    MeasuredStep {
        asked: ms(step.start),
        begin: ms(step.start),
        actions: actions.collect(),
        barrier: ms(track.named(span::BARRIER).map(|span| span.len_ns()).sum()),
        end: ms(step.end),
    }
}

/// A network with a block for each stage, which sleeps.
fn sleeping(settings: &Settings, blocks: &BlockCosts) -> Result<Model> {
    // And a block for the output.
    let num_layers = blocks.forward.len() - 1;
    let config =
        MlpConfig { input_dim: 4, hidden_dim: 4, output_dim: 4, num_layers, tie_layers: false };
    let mut model = config.build(2)?;
    let of = |ms: &[f64], at: usize| Duration::from_secs_f64(ms[at] / 1e3);
    let sleeps = |(at, inner): (usize, Block)| {
        let late = settings.late.filter(|(stage, _)| *stage == at);
        let sleeping = Sleeping {
            forward: of(&blocks.forward, at),
            input: of(&blocks.backward_input, at),
            weight: of(&blocks.backward_weight, at),
            late: late.map(|(_, ms)| Duration::from_secs_f64(ms / 1e3)),
            // Once in every fourth step, in the middle of its forward passes.
            period: 4 * settings.micro_batches,
            passes: AtomicUsize::new(settings.micro_batches / 2),
            inner,
        };
        Block::new(sleeping.inner.unit, sleeping)
    };
    model.blocks = model.blocks.into_iter().enumerate().map(sleeps).collect();
    Ok(model)
}

/// A block that takes a stated time.
struct Sleeping {
    inner: Block,
    forward: Duration,
    input: Duration,
    weight: Duration,
    late: Option<Duration>,
    period: usize,
    passes: AtomicUsize,
}

impl Layer for Sleeping {
    fn forward(&self, cx: &mut Context, input: Tensor) -> paceline_model::Result<(Tensor, Saved)> {
        thread::sleep(self.forward);
        let pass = self.passes.fetch_add(1, Ordering::Relaxed);
        if let Some(late) = self.late.filter(|_| pass.is_multiple_of(self.period)) {
            thread::sleep(late);
        }
        self.inner.forward(cx, input)
    }

    fn backward(
        &self,
        cx: &mut Context,
        saved: &mut Saved,
        d_output: Tensor,
        half: Half,
    ) -> paceline_model::Result<Option<Tensor>> {
        thread::sleep(if half.writes_weights() { self.weight } else { Duration::ZERO });
        thread::sleep(if half.wants_input() { self.input } else { Duration::ZERO });
        self.inner.backward(cx, saved, d_output, half)
    }
}

/// Eight samples, the same on all stages.
fn micro_batch(memory: &Allocator) -> Result<MicroBatch> {
    let tensor = || -> Result<Tensor> {
        let tensor = memory.tensor(DType::F32, [8, 4], Category::Data)?;
        tensor.write::<f32>()?.fill(0.5);
        Ok(tensor)
    };
    Ok(MicroBatch { batch: Batch::new(tensor()?, tensor()?), global_count: 8 })
}
