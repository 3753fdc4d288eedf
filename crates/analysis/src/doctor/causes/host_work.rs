//! The thread of the steps does work of its own on the processor, beside which the device, or PyTorch, has nothing to do: random
//! numbers, augmentation, logging.
//!
//! Seen: more than a millisecond without a call that launches work (on a processor: without an operator), at the same place of three
//! quarters of the steps, outside of the loader. Taken away: all of it at most, and half of it at least.

use foldhash::HashMap;

use super::interrupted::{Place, places};
use super::*;
use crate::timeline::NameId;

/// Shorter pauses are the overhead of Python between two calls.
const LONG_NS: i64 = 1_000_000;

/// The same in a trace of a single step.
const ONCE_NS: i64 = 5_000_000;

/// Operators that make a tensor, without the underscore of those that fill one, and the same on the device.
const MAKES: [(&str, &str); 9] = [
    ("bernoulli", "torch.bernoulli(p.to(device))"),
    ("full", "torch.full(..., device=device)"),
    ("multinomial", "torch.multinomial(p.to(device), ...)"),
    ("normal randn", "torch.randn(..., device=device)"),
    ("ones", "torch.ones(..., device=device)"),
    ("rand uniform", "torch.rand(..., device=device)"),
    ("randint random", "torch.randint(..., device=device)"),
    ("randperm", "torch.randperm(..., device=device)"),
    ("zeros", "torch.zeros(..., device=device)"),
];

pub(in super::super) const CAUSE: Cause = Cause {
    key: "host_work",
    title: "The program works on the processor within the step",
    gain: Known::Exactly,
    find: Find::Rank(find),
};

fn find(of: &Recorded, base: &Plan) -> Option<Found> {
    // On a processor, the thread may wait for transfers.
    let transfers = of.works.iter().filter(|_| !of.on_device()).map(|work| work.time);
    let elsewhere = loader::joined(loader::spans(of).into_iter().chain(transfers).collect());
    let mut groups: HashMap<Place, Vec<(usize, TimeRange)>> = HashMap::default();
    let places = places(of);
    let operators = if of.on_device() { operators(of) } else { Vec::new() };
    for (at, call) in of.calls.iter().enumerate() {
        let lag_ns = base.lag_ns[at];
        let pause = TimeRange { start_ns: call.time.start_ns - lag_ns, dur_ns: lag_ns };
        let is_of_optimizer = of.is_within(call, OPTIMIZER) || of.is_within(call, ZERO_GRAD);
        let is_long = unprepared(lag_ns) - loader::overlap_ns(&elsewhere, pause) >= LONG_NS;
        // Without a wait before it, work of Python would run ahead of the device.
        let is_ahead = || name_of(of, &operators, pause) == PYTHON && follows_wait(of, call);
        if is_long && !is_of_optimizer && !is_ahead() {
            groups.entry(places[at]).or_default().push((at, pause));
        }
    }
    groups.retain(|_, pauses| match pauses.as_slice() {
        [(at, pause)] if of.steps.len() == 1 => is_plain(of, &operators, *at, *pause),
        _ => pauses.len() > 1 && 4 * pauses.len() >= 3 * of.steps.len(),
    });
    let mut pauses: Vec<(usize, TimeRange)> = groups.into_values().flatten().collect();
    pauses.sort_unstable();
    let mut tally = Tally::default();
    let [mut least, mut most] = [base.clone(), base.clone()];
    for (at, pause) in pauses {
        let elsewhere_ns = loader::overlap_ns(&elsewhere, pause);
        let ns = unprepared(pause.dur_ns) - elsewhere_ns;
        let own = TimeRange { dur_ns: pause.dur_ns - elsewhere_ns, ..pause };
        tally.add_time(of, name_of(of, &operators, pause), own);
        most.lag_ns[at] -= ns;
        least.lag_ns[at] -= ns / 2;
    }
    tally.longest?;
    let most_of =
        tally.what.iter().max_by_key(|(name, ns)| (**ns, *name)).map(|of| of.0.clone())?;
    let (count, ms) = tally.per_step(of);
    let idle = if of.on_device() { "nothing is launched" } else { "PyTorch computes nothing" };
    let text =
        format!("{idle} for {ms:.2} ms per step ({count:.1} pauses), mostly because of {most_of}");
    let name = most_of.strip_prefix("aten::").unwrap_or_default().trim_end_matches('_');
    let made = MAKES.iter().find(|(names, _)| names.split(' ').any(|of| of == name));
    let change = match made {
        Some((_, on_device)) => {
            format!("{on_device}  (in the place of a tensor that is made on the processor)")
        }
        None => "move this work to the workers of the loader (Dataset.__getitem__), to the device (batch.to(device) before it), or do it \
                 every 100 steps"
            .to_owned(),
    };
    Some(tally.found(text, change, [least, most]))
}

/// Whether a pause of a single step shows what the program does in it. Such a step may have work that is done once, and the host may wait
/// for its end in a way that is not recorded.
fn is_plain(of: &Recorded, operators: &[(TimeRange, NameId)], at: usize, pause: TimeRange) -> bool {
    let middle_ns = pause.start_ns + pause.dur_ns / 2;
    let is_known = name_of(of, operators, pause) != PYTHON
        || of.context.code.line_of_steps(middle_ns).is_some();
    is_known && pause.dur_ns >= ONCE_NS && of.calls[at].kind != CallKind::Mark
}

/// Whether the call before a call waited for the device.
fn follows_wait(of: &Recorded, call: &Call) -> bool {
    let mut before = std::iter::successors(call.before, |at| of.calls[*at as usize].before);
    let of_program = before.find(|at| of.calls[*at as usize].kind != CallKind::Mark);
    of.on_device() && of_program.is_some_and(|at| of.calls[at as usize].waits_for.is_some())
}

/// Work of the program itself.
const PYTHON: &str = "Python";

/// The operator that takes most of a pause, if it is half of it.
fn name_of(of: &Recorded, operators: &[(TimeRange, NameId)], pause: TimeRange) -> String {
    let first = operators.partition_point(|(time, _)| time.start_ns < pause.start_ns);
    let within = operators[first..].iter().take_while(|(time, _)| time.start_ns < pause.end_ns());
    let mut names: HashMap<&str, i64> = HashMap::default();
    within.for_each(|(time, name)| *names.entry(of.text(*name)).or_default() += time.dur_ns);
    let total: i64 = names.values().sum();
    let most = names.into_iter().max_by_key(|(name, ns)| (*ns, *name));
    most.filter(|_| 2 * total > pause.dur_ns).map_or(PYTHON.to_owned(), |(name, _)| name.to_owned())
}

/// The outermost operators of the steps' thread that launch nothing, by start.
fn operators(of: &Recorded) -> Vec<(TimeRange, NameId)> {
    let Some(lane) = crate::steps::lane(of.timeline) else { return Vec::new() };
    let launches =
        of.calls.iter().filter(|call| call.kind == CallKind::Launch && call.lane == lane);
    let launches: Vec<i64> = launches.map(|call| call.time.start_ns).collect();
    let all = of.timeline.operators.iter().filter(|operator| operator.lane == lane);
    let mut all: Vec<(TimeRange, NameId)> = all
        .filter(|operator| {
            let first = launches.partition_point(|ns| *ns < operator.time.start_ns);
            launches.get(first).is_none_or(|ns| *ns >= operator.time.end_ns())
        })
        .map(|operator| (operator.time, operator.name))
        .collect();
    all.sort_unstable_by_key(|(time, _)| (time.start_ns, std::cmp::Reverse(time.end_ns())));
    let mut until_ns = i64::MIN;
    all.retain(|(time, _)| {
        let is_outermost = time.start_ns >= until_ns;
        until_ns = until_ns.max(time.end_ns());
        is_outermost
    });
    all
}
