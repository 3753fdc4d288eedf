//! `paceline schedule`: the work of each rank of a pipeline in a step, drawn and counted before anything runs.

use std::path::{Path, PathBuf};

use clap::Args;
use paceline_failure::numbers::{at_least, part, within};
use paceline_failure::outputs::{check_file, write_stated_bytes};
use paceline_failure::{Failure, Result, usage};
use paceline_files::{Printable, read_text};
use paceline_host::disk::Disk;
use paceline_host::text::{line_width, plural, say, say_unbroken};
use paceline_schedule::{
    Costs, Entry, Placement, Plan, SCHEDULES, Schedule, Timeline, drawing, named,
};
use paceline_table::table::{Columns, Table, grouped};

/// The most actions of all ranks together. Nobody draws more, and the lists of all ranks are kept.
const MAX_ACTIONS: usize = 1 << 20;

/// The longest duration, in a unit that the user chooses.
const MAX_TIME: f64 = 1e9;

/// The most characters of a line of a drawing.
const MAX_WIDTH: usize = 400;

/// The most bytes of a file of lists.
const MAX_FILE_BYTES: u64 = 1 << 25;

/// Flags of `paceline schedule`.
#[derive(Debug, Args)]
pub struct ScheduleArgs {
    /// The schedule; without a name, all are compared
    #[arg(value_name = "NAME")]
    pub name: Option<String>,
    /// Ranks of the pipeline; some schedules give each of them two stages
    #[arg(long, value_name = "P", default_value_t = 4, value_parser = at_least::<usize>(1))]
    pub stages: usize,
    /// Into how many micro-batches a batch is divided
    #[arg(long, value_name = "M", default_value_t = 8, value_parser = at_least::<usize>(1))]
    pub micro_batches: usize,
    /// Durations of a rank's forward pass of a micro-batch, and of the input half and the weight half of its backward pass
    #[arg(long, value_name = "F,I,W", value_delimiter = ',', default_value = "1,1,1", value_parser = duration)]
    pub costs: Vec<f64>,
    /// Duration of a message between two ranks
    #[arg(long, value_name = "TIME", default_value = "0", value_parser = duration)]
    pub message: f64,
    /// A device runs the two passes of a pair side by side, in this part of the time of one after the other
    #[arg(long, value_name = "PART", value_parser = part)]
    pub side_by_side: Option<f64>,
    /// Write the lists to this file, in the form of PyTorch's pipelining: one row for each rank
    #[arg(long, value_name = "FILE")]
    pub csv: Option<PathBuf>,
    /// Check the lists in this file, in the form of PyTorch's pipelining with or without messages, then draw and count them
    #[arg(long, value_name = "FILE", conflicts_with_all = ["name", "stages", "micro_batches", "csv"])]
    pub check: Option<PathBuf>,
}

/// A duration, in a unit that the user chooses. A list of them may have blanks.
fn duration(text: &str) -> std::result::Result<f64, String> {
    within(0.0, MAX_TIME)(text.trim())
}

/// A plan and its rehearsal.
struct Rehearsed {
    schedule: &'static dyn Schedule,
    plan: Plan,
    timeline: Timeline,
}

/// The lists of a file, checked and rehearsed.
fn check(file: &Path, costs: impl Fn(&Placement) -> Costs) -> Result<(Plan, Timeline)> {
    let refused =
        |problem: String| Failure::Usage(format!("--check {}: {problem}", file.printable()));
    let text = read_text(file, MAX_FILE_BYTES).map_err(|error| refused(error.to_string()))?;
    let plan = Plan::of_csv(&text).map_err(|error| refused(error.to_string()))?;
    let timeline = Timeline::of(&plan, &costs(&plan.shape().placement));
    Ok((plan, timeline.map_err(|error| refused(error.to_string()))?))
}

/// Runs `paceline schedule`.
///
/// # Errors
///
/// If there is no schedule of this name, if it does not know such a step, or if the lists of a file cannot be carried out.
pub fn schedule(args: &ScheduleArgs) -> Result<u8> {
    let &[forward, input, weight] = args.costs.as_slice() else {
        return usage("--costs: pass three durations, such as 1,1,1");
    };
    if forward + input + weight == 0.0 {
        return usage("--costs 0,0,0: pass a duration above zero");
    }
    let (ranks, micro_batches) = (args.stages, args.micro_batches);
    if ranks.saturating_mul(micro_batches) > MAX_ACTIONS / 6 {
        return usage(format!(
            "--stages {ranks} --micro-batches {micro_batches}: more than a million actions; lower one of them"
        ));
    }
    if let Some(file) = &args.csv {
        check_file("--csv", file)?;
    }
    let costs = |stages: &_| Costs {
        message: args.message,
        side_by_side: args.side_by_side,
        ..Costs::even(stages, forward, input, weight)
    };
    if let Some(file) = &args.check {
        let (plan, timeline) = check(file, costs)?;
        check_pairs(args, "the file", &plan)?;
        say_one(&format!("{}: no fault", file.printable()), &plan, &timeline);
        return Ok(0);
    }
    let rehearse = |schedule: &'static dyn Schedule| {
        let plan = Plan::new(schedule, ranks, micro_batches, costs)?;
        let timeline = Timeline::of(&plan, &costs(&plan.shape().placement))?;
        Ok(Rehearsed { schedule, plan, timeline })
    };
    let Some(name) = &args.name else {
        if args.csv.is_some() {
            return usage("--csv writes the lists of one schedule; name it");
        }
        let all: Vec<_> = SCHEDULES.into_iter().map(|of| (of, rehearse(of))).collect();
        say_all(ranks, micro_batches, &all);
        return Ok(0);
    };
    let Some(schedule) = named(name) else {
        let names: Vec<&str> = SCHEDULES.iter().map(|schedule| schedule.name()).collect();
        return usage(format!("there is no schedule {name:?}; there are {}", names.join(", ")));
    };
    let of = rehearse(schedule).map_err(|error: paceline_schedule::PlanError| {
        Failure::Usage(format!("--micro-batches {micro_batches}: {error}"))
    })?;
    check_pairs(args, name, &of.plan)?;
    say_one(&format!("{}: {}", of.schedule.name(), of.schedule.about()), &of.plan, &of.timeline);
    if let Some(file) = &args.csv {
        write_stated_bytes(&Disk::default(), file, of.plan.csv().as_bytes())?;
    }
    Ok(0)
}

/// Refuses `--side-by-side` for a plan without pairs of passes.
fn check_pairs(args: &ScheduleArgs, name: &str, plan: &Plan) -> Result<()> {
    let mut entries = (0..plan.shape().placement.ranks()).flat_map(|rank| plan.list(rank));
    if args.side_by_side.is_some() && !entries.any(|entry| matches!(entry, Entry::Overlapped(..))) {
        return usage(format!("--side-by-side: {name} runs no passes in pairs; leave it out"));
    }
    Ok(())
}

/// Prints a plan: its drawing, and its cost for each rank.
fn say_one(title: &str, plan: &Plan, timeline: &Timeline) {
    let shape = plan.shape();
    let (ranks, stages) = (shape.placement.ranks(), shape.placement.stages());
    say(title);
    let counts = [(ranks, "rank"), (stages, "stage"), (shape.micro_batches, "micro-batch")];
    say(&counts.map(|(count, of)| plural(count, of)).join(", "));
    say("");
    let width = line_width().map_or(MAX_WIDTH, |width| width.min(MAX_WIDTH));
    drawing(plan, timeline, width).lines().for_each(say_unbroken);
    say("");
    let makespan = timeline.makespan;
    let rows = (0..ranks).map(|rank| (rank, timeline.busy(rank), plan.in_flight(rank)));
    let table = Columns::<(usize, f64, f64)>::new()
        .add("rank", "rank", ("", 0), "The rank.", |of| of.0)
        .add("busy", "computes", ("", 1), "The time in which the rank computes.", |of| of.1)
        .add(
            "idle",
            "idle",
            ("", 1),
            "The time until the last rank is done in which it does not.",
            move |of| makespan - of.1,
        )
        .add(
            "in_flight",
            "in flight",
            ("", 1),
            "The most micro-batches between their forward pass and the end of their backward pass.",
            |of| of.2,
        )
        .table(rows.collect::<Vec<_>>());
    say_table(&table);
    say("");
    say(&format!(
        "The step takes {}, of which {:.1} % are bubble; no rank takes longer than {} from its first action to its last.",
        grouped(makespan, 1),
        100.0 * timeline.bubble(),
        grouped(timeline.longest_rank(), 1)
    ));
}

/// Prints the costs of all schedules.
fn say_all(
    ranks: usize,
    micro_batches: usize,
    all: &[(&'static dyn Schedule, std::result::Result<Rehearsed, paceline_schedule::PlanError>)],
) {
    say(&format!("{}, {}", plural(ranks, "rank"), plural(micro_batches, "micro-batch")));
    say("");
    let most = move |plan: &Plan| (0..ranks).map(|rank| plan.in_flight(rank)).fold(0.0, f64::max);
    let table = Columns::new()
        .add("schedule", "schedule", ("", 0), "The schedule.", |of: &&Rehearsed| of.schedule.name())
        .add("step", "step", ("", 1), "The time until the last rank is done.", |of| {
            of.timeline.makespan
        })
        .add(
            "bubble",
            "bubble",
            ("%", 1),
            "The part of the ranks' time in which they do not compute.",
            |of| 100.0 * of.timeline.bubble(),
        )
        .add(
            "rank",
            "longest rank",
            ("", 1),
            "The longest time from a rank's first action to its last.",
            |of| of.timeline.longest_rank(),
        )
        .add(
            "in_flight",
            "in flight",
            ("", 1),
            "The most micro-batches in flight on a rank.",
            move |of| most(&of.plan),
        )
        .table(all.iter().filter_map(|(_, of)| of.as_ref().ok()).collect::<Vec<_>>());
    say_table(&table);
    for (schedule, error) in all.iter().filter_map(|(of, made)| Some((of, made.as_ref().err()?))) {
        say(&format!("{}: {error}", schedule.name()));
    }
}

fn say_table(table: &Table) {
    table.fitted(line_width()).lines().for_each(say_unbroken);
}
