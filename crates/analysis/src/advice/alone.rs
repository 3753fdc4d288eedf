//! The steps of traces without their communication: how long each computed, and when its gradients were final.
//!
//! Input: the timelines of all ranks of PyTorch, or of a run of ours on the processor. Output: steps, and the size of each
//! gradient if the traces give it. The time in which the thread of the steps waited for communication, or the device did nothing
//! else, is taken out, so what is left can be put on any link. This module knows no links and no buckets.

mod device;

use std::collections::HashMap;

use super::reducer::{elem_bytes, finals, in_order, last_passes, sorted};
use crate::backward;
use crate::hta::{CollectiveKind, check_times, collective_kind};
use crate::steps::{self, Step};
use crate::timeline::{TimeRange, Timeline};
use paceline_trace::IntervalSet;

/// The key among the facts of a run under which its traces have the sizes of its gradients.
pub const GRADIENTS: &str = "gradients";

/// The program that wrote the traces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    /// PyTorch's profiler.
    Pytorch,
    /// The profiler of `paceline train`.
    Paceline,
}

/// A gradient.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gradient {
    /// The number of its parameter.
    pub param: u64,
    /// Its elements.
    pub num_elems: u64,
    /// The parameter's name; empty in traces of PyTorch.
    pub name: String,
}

impl Gradient {
    /// Gradients as a fact of a run: a line for each, with number, elements and name.
    pub fn fact<'a>(gradients: impl Iterator<Item = &'a Self>) -> String {
        let line = |of: &Self| format!("{} {} {}", of.param, of.num_elems, of.name);
        gradients.map(line).collect::<Vec<_>>().join("\n")
    }

    /// The gradients of such a fact. `None` if it has another form.
    fn of_fact(words: &str) -> Option<Vec<Self>> {
        let gradient = |line: &str| {
            let mut parts = line.splitn(3, ' ');
            let (param, num_elems) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
            Some(Self { param, num_elems, name: parts.next()?.to_owned() })
        };
        words.lines().map(gradient).collect()
    }
}

/// A step without its communication on one rank, or as the rank has it that comes last, in milliseconds since the step began on
/// each rank.
#[derive(Clone, Debug, PartialEq)]
pub struct AloneStep {
    /// The step as measured, communication included.
    pub measured_ms: f64,
    /// The step without the time that a rank waited for communication.
    pub alone_ms: f64,
    /// Start and end of the last backward pass.
    pub backward: [f64; 2],
    /// When each gradient was final, in the order of [`Alone::gradients`]. Empty if those are not known.
    pub ready: Vec<f64>,
}

/// A training run without its communication.
#[derive(Clone, Debug, PartialEq)]
pub struct Alone {
    /// The program that wrote the traces.
    pub program: Program,
    /// The number of ranks.
    pub ranks: usize,
    /// The gradients: those of PyTorch in the order in which they are final, others in the order of the model. `Err` says why
    /// they are not known.
    pub gradients: Result<Vec<Gradient>, &'static str>,
    /// Bytes of an element of a gradient.
    pub elem_bytes: u64,
    /// The steps that are known of all ranks.
    pub steps: Vec<AloneStep>,
    /// How many steps the traces have.
    pub num_traced: usize,
}

/// The time of a step without parts that are taken out of it.
struct Shortened {
    begin_ns: i64,
    /// The parts, counted from the start of the step.
    out: IntervalSet,
}

impl Shortened {
    fn new(begin_ns: i64, parts: impl Iterator<Item = TimeRange>) -> Self {
        Self { begin_ns, out: IntervalSet::union(parts.map(|part| part.since(begin_ns))) }
    }

    /// The milliseconds from the start of the step to this moment, without the parts.
    fn ms(&self, at_ns: i64) -> f64 {
        let until = TimeRange::between(self.begin_ns, at_ns).since(self.begin_ns);
        (until.end_ns - self.out.len_within_ns(until)) as f64 / 1e6
    }
}

impl AloneStep {
    /// A step of a rank that ends at this moment, with its last pass, and when each gradient was final.
    fn new(clock: &Shortened, end_ns: i64, pass: [i64; 2], ready: Vec<i64>) -> Self {
        Self {
            measured_ms: end_ns.saturating_sub(clock.begin_ns).max(0) as f64 / 1e6,
            alone_ms: clock.ms(end_ns),
            backward: pass.map(|at| clock.ms(at)),
            ready: ready.into_iter().map(|at| clock.ms(at)).collect(),
        }
    }
}

impl Alone {
    /// Reads the steps of all ranks. Errors say what the traces do not show, and what to do.
    pub fn of(timelines: &[Timeline]) -> Result<Self, String> {
        let program = program_of(timelines)?;
        for timeline in timelines {
            check_times(timeline).map_err(|e| e.to_string())?;
            check_replicas(timeline)?;
        }
        let of_ranks: Vec<Vec<Step>> = timelines.iter().map(steps::of).collect();
        if of_ranks.iter().any(Vec::is_empty) {
            return Err(match program {
                Program::Pytorch => "there are no steps; call step() of torch.profiler.profile after each step",
                Program::Paceline => "there are no steps; trace a run that is long enough for its --profile-active steps",
            }
            .to_owned());
        }
        let gradients = match program {
            Program::Pytorch => pytorch_gradients(timelines),
            Program::Paceline => paceline_gradients(timelines),
        }?;
        let known = gradients.as_deref().ok();
        let read = |timeline: &Timeline| match program {
            Program::Pytorch if timeline.kernels.is_empty() => pytorch_steps(timeline, known),
            Program::Pytorch => device::steps(timeline, known),
            Program::Paceline => paceline_steps(timeline, known),
        };
        let ranks: Vec<HashMap<u64, AloneStep>> = timelines.iter().map(read).collect();
        let step = |step: &Step| {
            let ranks = ranks.iter().map(|of| of.get(&step.number)).collect::<Option<Vec<_>>>()?;
            Some(last(&ranks))
        };
        let steps: Vec<AloneStep> = of_ranks[0].iter().filter_map(step).collect();
        if steps.is_empty() {
            return Err(match known {
                Some(_) => "no step has a backward pass with all gradients on every rank",
                None => "no step has a backward pass on every rank",
            }
            .to_owned());
        }
        Ok(Self {
            program,
            ranks: timelines.len(),
            gradients,
            elem_bytes: elem_bytes(timelines),
            steps,
            num_traced: of_ranks[0].len(),
        })
    }
}

/// Finds the program that wrote the traces. Refuses work of a device in ours, which do not say when its kernels end.
fn program_of(timelines: &[Timeline]) -> Result<Program, String> {
    let is_ours = |of: &Timeline| !of.run_facts.is_empty();
    let Some(first) = timelines.first() else { return Err("there are no traces".to_owned()) };
    if timelines.iter().any(|of| is_ours(of) != is_ours(first)) {
        return Err(
            "some traces are of paceline and some are not; pass those of one run".to_owned()
        );
    }
    let is_of_device = |of: &Timeline| is_ours(of) && !of.run_facts.contains_key("lanes");
    if timelines.iter().any(is_of_device) {
        return Err("these traces of paceline have work of a device, whose gradients cannot be followed; pass \
                    --gradient-bytes and --compute-ms instead of --trace"
            .to_owned());
    }
    if timelines.iter().any(|of| of.kernels.is_empty() != first.kernels.is_empty()) {
        return Err("some traces have work of a device and some have none; pass those of one run"
            .to_owned());
    }
    Ok(if is_ours(first) { Program::Paceline } else { Program::Pytorch })
}

/// Fails if replicas would not call the collectives of the steps: then the ranks do not compute as replicas do.
fn check_replicas(timeline: &Timeline) -> Result<(), String> {
    use CollectiveKind::{AllReduce, Barrier, Broadcast, Unknown};
    let steps = steps::of(timeline);
    let (Some(first), Some(last)) = (steps.first(), steps.last()) else { return Ok(()) };
    let is_within = |at_ns: i64| (first.time.start_ns..last.time.end_ns()).contains(&at_ns);
    let operators = timeline.operators.iter().map(|of| (of.name, of.time, of.collective));
    let kernels = timeline.kernels.iter().map(|of| (of.name, of.time, of.collective));
    for (name, time, collective) in operators.chain(kernels) {
        let Some(collective) = collective.filter(|_| is_within(time.start_ns)) else { continue };
        let said = timeline.collectives.get(collective as usize).map_or("", |of| &of.name);
        let kind = collective_kind(said).or_else(|| collective_kind(timeline.names.text(name)));
        let kind = kind.unwrap_or(Unknown);
        if ![AllReduce, Broadcast, Barrier, Unknown].contains(&kind) {
            return Err(not_replicas(kind.name()));
        }
    }
    if timeline.names.iter().any(|name| name == "param broadcast") {
        Err(not_replicas("broadcasts of updated parameters"))
    } else {
        Ok(())
    }
}

fn not_replicas(what: &str) -> String {
    format!(
        "the steps have {what}, so these ranks are not plain replicas, and compute something else than replicas would; \
         trace a run of ddp, or of PyTorch's DistributedDataParallel"
    )
}

type Gradients = Result<Result<Vec<Gradient>, &'static str>, String>;

/// The gradients of PyTorch, in the order in which they are final in the first step that has them all on every rank.
fn pytorch_gradients(timelines: &[Timeline]) -> Gradients {
    if timelines.iter().any(|timeline| timeline.gradients.is_empty()) {
        return Ok(Err(
            "no gradient has a size; pass record_shapes=True to torch.profiler.profile",
        ));
    }
    // The largest number in a step: a step that was cut off has fewer.
    let of_rank = |timeline: &Timeline| {
        let sorted = sorted(timeline);
        let passes = last_passes(timeline);
        let first_of_most = |best: Vec<u64>, step: &Step| {
            let pass = passes.get(&step.number);
            let of_step = pass.map_or(&[][..], |pass| finals(&sorted, pass));
            if of_step.len() > best.len() {
                of_step.iter().map(|of| of.num_elems).collect()
            } else {
                best
            }
        };
        steps::of(timeline).iter().fold(Vec::new(), first_of_most)
    };
    let of_ranks: Vec<Vec<u64>> = timelines.iter().map(of_rank).collect();
    let mut by_size = of_ranks.clone();
    by_size.iter_mut().for_each(|sizes| sizes.sort_unstable());
    check_same(&by_size)?;
    let gradient = |(param, num_elems): (u64, &u64)| Gradient {
        param,
        num_elems: *num_elems,
        name: String::new(),
    };
    Ok(Ok((0..).zip(&of_ranks[0]).map(gradient).collect()))
}

/// The gradients that the facts of the run name.
fn paceline_gradients(timelines: &[Timeline]) -> Gradients {
    let of_rank = |of: &Timeline| of.run_facts.get(GRADIENTS).map(|words| Gradient::of_fact(words));
    let Some(of_ranks) = timelines.iter().map(of_rank).collect::<Option<Vec<_>>>() else {
        return Ok(Err(
            "the traces do not say how large gradients are; trace the run with this version",
        ));
    };
    let Some(mut of_ranks) = of_ranks.into_iter().collect::<Option<Vec<_>>>() else {
        return Err(format!("the fact {GRADIENTS:?} about the run has an unknown form"));
    };
    check_same(&of_ranks)?;
    Ok(Ok(of_ranks.swap_remove(0)))
}

fn check_same<T: PartialEq>(of_ranks: &[T]) -> Result<(), String> {
    if of_ranks.windows(2).all(|pair| pair[0] == pair[1]) {
        Ok(())
    } else {
        Err("the ranks have different gradients; trace replicas of one model".to_owned())
    }
}

/// The steps of a rank of PyTorch, by number. It waits for communication when `backward` would return otherwise.
fn pytorch_steps(timeline: &Timeline, known: Option<&[Gradient]>) -> HashMap<u64, AloneStep> {
    let (passes, all_passes) = (last_passes(timeline), backward::passes(timeline));
    let sorted = sorted(timeline);
    let sizes: Option<Vec<u64>> = known.map(|all| all.iter().map(|of| of.num_elems).collect());
    let read = |step: Step| {
        let pass = passes.get(&step.number)?;
        let (begin_ns, end_ns) = (step.time.start_ns, step.time.end_ns());
        let waits = all_passes.iter().map(|of| of.wait);
        let waits = waits.filter(|of| of.start_ns >= begin_ns && of.end_ns() <= end_ns);
        let clock = Shortened::new(begin_ns, waits);
        let ready = match &sizes {
            Some(sizes) => in_order(sizes, finals(&sorted, pass))?,
            None => Vec::new(),
        };
        let pass = [pass.time.start_ns, pass.time.end_ns()];
        Some((step.number, AloneStep::new(&clock, end_ns, pass, ready)))
    };
    steps::of(timeline).into_iter().filter_map(read).collect()
}

/// The steps of a rank of ours, by number, from when their batch was there. Its main thread says when it is blocked.
fn paceline_steps(timeline: &Timeline, known: Option<&[Gradient]>) -> HashMap<u64, AloneStep> {
    let lane = steps::lane(timeline);
    // The spans with this name, by start.
    let spans = |name: &str| {
        let spans = timeline.annotations.iter().filter(|of| Some(of.lane) == lane && !of.is_device);
        let spans = spans.filter(|of| timeline.names.text(of.name) == name);
        let mut all: Vec<TimeRange> = spans.map(|of| of.time).collect();
        all.sort_unstable();
        all
    };
    let [waits, blocked, passes] = ["data wait", "exposed", "backward"].map(spans);
    let mut marks = timeline.gradient_marks.clone();
    marks.sort_unstable();
    let read = |step: Step| {
        let (asked_ns, end_ns) = (step.time.start_ns, step.time.end_ns());
        let in_step = |all: &[TimeRange]| {
            let begin = all.partition_point(|of| of.start_ns < asked_ns);
            let end = all.partition_point(|of| of.start_ns < end_ns);
            begin..end.max(begin)
        };
        let begin_ns = waits[in_step(&waits)].first().map_or(asked_ns, TimeRange::end_ns);
        let pass = passes[in_step(&passes)].last()?;
        let clock = Shortened::new(begin_ns, blocked[in_step(&blocked)].iter().copied());
        let first = marks.partition_point(|of| of.at_ns < begin_ns);
        let after = marks.partition_point(|of| of.at_ns <= end_ns);
        // The last of several micro-batches makes a gradient final.
        let of_step = &marks[first.min(after)..after];
        let ready: HashMap<u64, i64> = of_step.iter().map(|of| (of.param, of.at_ns)).collect();
        let ready = match known {
            Some(all) => {
                all.iter().map(|of| ready.get(&of.param).copied()).collect::<Option<_>>()?
            }
            None => Vec::new(),
        };
        Some((step.number, AloneStep::new(&clock, end_ns, [pass.start_ns, pass.end_ns()], ready)))
    };
    steps::of(timeline).into_iter().filter_map(read).collect()
}

/// The step as the rank has it that comes last: an operation begins when all ranks have come to it.
fn last(ranks: &[&AloneStep]) -> AloneStep {
    let latest =
        |part: &dyn Fn(&AloneStep) -> f64| ranks.iter().map(|rank| part(rank)).fold(0.0, f64::max);
    let num_ready = ranks.iter().map(|rank| rank.ready.len()).min().unwrap_or(0);
    AloneStep {
        measured_ms: latest(&|of| of.measured_ms),
        alone_ms: latest(&|of| of.alone_ms),
        backward: [0, 1].map(|end| latest(&|of| of.backward[end])),
        ready: (0..num_ready).map(|at| latest(&|of| of.ready[at])).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::{Build, timeline};
    use crate::timeline::{FinalGradient, GradientMark};

    /// A step of ours of 100 us, whose batch arrives at 10, and whose main thread is blocked from 60 to 80.
    fn ours(rank: usize, late_us: i64) -> Timeline {
        let mut of = timeline(rank).step(4, 0, 100 + late_us).span("data wait", 0, 10);
        of = of.span("backward", 30, 60).span("exposed", 60, 80).span("exposed", 70, 80);
        let mark = |param, at_us: i64| GradientMark { at_ns: (at_us + late_us) * 1000, param };
        of.gradient_marks = vec![mark(7, 40), mark(3, 55)];
        let fact = "3 16 a.weight\n7 4 a.bias".to_owned();
        of.run_facts = [("lanes".to_owned(), String::new()), (GRADIENTS.to_owned(), fact)].into();
        of
    }

    #[test]
    fn steps_of_ours_lose_what_they_waited_for() {
        let alone = Alone::of(&[ours(0, 0), ours(1, 2)]).unwrap();
        assert_eq!((alone.program, alone.ranks, alone.num_traced), (Program::Paceline, 2, 1));
        let names: Vec<_> = alone.gradients.unwrap().into_iter().map(|of| of.name).collect();
        assert_eq!(names, ["a.weight", "a.bias"]);
        let ms = |us: f64| us / 1000.0;
        let close = |a: f64, us: f64| assert!((a - ms(us)).abs() < 1e-9, "{a}, not {us} us");
        let step = &alone.steps[0];
        close(step.measured_ms, 92.0);
        close(step.alone_ms, 72.0);
        close(step.backward[0], 20.0);
        close(step.backward[1], 50.0);
        close(step.ready[0], 47.0);
        close(step.ready[1], 32.0);
    }

    #[test]
    fn what_traces_lack_is_told() {
        let error = |timelines: &[Timeline]| Alone::of(timelines).unwrap_err();
        assert!(error(&[]).contains("no traces"));
        let pytorch = timeline(0).operator("aten::mul", 0, 20);
        assert!(error(std::slice::from_ref(&pytorch)).contains("call step() of torch.profiler"));
        let pytorch = pytorch.step(0, 0, 100);
        assert!(error(std::slice::from_ref(&pytorch)).contains("no step has a backward pass"));
        assert!(error(&[ours(0, 0), pytorch.clone()]).contains("some traces are of paceline"));
        let on_device = pytorch.clone().compute("gemm", 0, 20);
        assert!(error(&[on_device, pytorch]).contains("some traces have work of a device"));
        let mut ours_on_device = ours(0, 0);
        ours_on_device.run_facts.remove("lanes");
        assert!(error(&[ours_on_device]).contains("traces of paceline have work of a device"));
        let mut other = ours(1, 0);
        other.run_facts.insert(GRADIENTS.to_owned(), "3 15 a.weight\n7 4 a.bias".to_owned());
        assert!(error(&[ours(0, 0), other.clone()]).contains("different gradients"));
        other.run_facts.insert(GRADIENTS.to_owned(), "x".to_owned());
        assert!(error(&[other.clone()]).contains("unknown form"));
        other.run_facts.remove(GRADIENTS);
        let alone = Alone::of(&[other]).unwrap();
        assert!(alone.gradients.is_err() && alone.steps[0].ready.is_empty());
        let mut unmarked = ours(0, 0);
        unmarked.gradient_marks.pop();
        assert!(error(&[unmarked]).contains("all gradients"));
        let mut divided = ours(0, 0).all_reduce(1, 20, 30);
        assert!(Alone::of(std::slice::from_ref(&divided)).is_ok());
        divided.collectives[0].name = "reduce_scatter".to_owned();
        assert!(
            error(&[divided]).contains("reduce_scatter, so these ranks are not plain replicas")
        );
    }

    #[test]
    fn steps_of_pytorch_lose_the_wait_at_the_end_of_the_pass() {
        let function = |timeline: Timeline, start_us: i64, end_us: i64| {
            timeline.operator("autograd::engine::evaluate_function: A", start_us, end_us)
        };
        let of = function(function(timeline(0).step(0, 0, 100), 20, 30), 31, 50);
        let mut of = of.operator("gloo:all_reduce", 45, 75).operator("aten::add_", 85, 95);
        for operator in &mut of.operators {
            let is_transfer = of.names.text(operator.name).starts_with("gloo");
            operator.lane = crate::timeline::TrackId(if is_transfer { 2 } else { 0 });
        }
        let alone = Alone::of(std::slice::from_ref(&of)).unwrap();
        assert_eq!(
            alone.gradients,
            Err("no gradient has a size; pass record_shapes=True to torch.profiler.profile")
        );
        assert_eq!((alone.steps[0].measured_ms, alone.steps[0].alone_ms), (0.1, 0.075));
        let gradient = |at_us: i64, num_elems| FinalGradient { at_ns: at_us * 1000, num_elems };
        of.gradients = vec![gradient(50, 3), gradient(30, 9)];
        let alone = Alone::of(&[of]).unwrap();
        let sizes: Vec<u64> = alone.gradients.unwrap().iter().map(|of| of.num_elems).collect();
        assert_eq!((sizes, &alone.steps[0].ready), (vec![9, 3], &vec![0.03, 0.05]));
    }
}
