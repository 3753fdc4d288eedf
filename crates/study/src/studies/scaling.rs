//! `paceline bench scaling`: training on more and more ranks, by weak scaling (constant batch per rank) and strong
//! scaling (constant global batch).
//!
//! [`laws`] has the formulas and the laws of Amdahl and Gustafson, [`verdict`] the conclusion, and `programs` the runs of the
//! user's own program.

pub mod laws;
mod programs;
pub mod verdict;

use clap::Args;
use laws::{Fit, Mode, Point, law, serial_fraction};
use paceline_collectives::MAX_RANKS;
use paceline_failure::{Failure, Result, numbers};
use paceline_host::text::plural;
use paceline_table::chart::{Axis, Picture, Series, Stroke};
use paceline_table::stats::BUSY_PCT;

use crate::flags::TrainFlags;
use crate::outcome::Row;
use crate::report::{Found, Report};
use crate::scene::Scene;
use crate::spec::{self, Spec};
use crate::study::{Setting, Study, StudyArgs, check, measuring, publish, run_scenes};
use crate::usage;

/// The study, as `paceline bench` knows it.
pub const STUDY: Study = Study::new::<ScalingArgs>(
    "scaling",
    "How training speeds up with the number of ranks, and what limits it",
    |matches| scaling(&crate::study::flags_of(matches)),
);

const EXAMPLES: &str = "\
Examples:
  paceline bench scaling                              1, 2 and 4 ranks, weak and strong
  paceline bench scaling --model mlp --hidden-dim 1024 --charts charts
  paceline bench scaling --link 10gbit,50us           on a network that this machine does not have
  paceline bench scaling --nproc 1,2,4,8 --mode strong --global-batch-size 256 --json scaling.json
  paceline bench scaling -- python train.py           a PyTorch program, by its optimizer steps
  paceline bench scaling --global-batch-size 256 -- python train.py --batch-size {batch}
  paceline bench scaling --throughput '([0-9.]+) samples/s' -- ./program    by a line that it prints
";

const PROGRAM: &str = "Your own program";

/// Flags of `paceline bench scaling`.
#[derive(Debug, Args)]
#[command(before_help = EXAMPLES, allow_negative_numbers = true, next_help_heading = "Study")]
pub struct ScalingArgs {
    /// Numbers of ranks, separated by commas; 1 has to be among them
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1,2,4", value_parser = numbers::within(1, MAX_RANKS))]
    pub nproc: Vec<usize>,
    /// Held constant when ranks are added: the batch of each rank, or the global batch. Both begin with the
    /// batch of --batch-size or --global-batch-size on one rank [default: one after the other; weak for a program
    /// that does not take {batch}]
    #[arg(long, value_enum)]
    pub mode: Option<Mode>,
    /// Optimizer steps after which each run of the program ends [default: 40; with --throughput its own end]
    #[arg(long, value_name = "N", requires = "command", help_heading = PROGRAM, value_parser = numbers::within(8_u64, 1_000_000_000))]
    pub steps: Option<u64>,
    /// Read the throughput from what the program prints: a regular expression, with the number in parentheses. The
    /// median counts, the first quarter left out. What several ranks print is added up; what one rank prints has to be
    /// of all ranks
    #[arg(long, value_name = "REGEX", requires = "command", help_heading = PROGRAM, value_parser = programs::pattern)]
    pub throughput: Option<String>,
    /// Your own program and its arguments, in place of paceline train and without a launcher: each rank gets RANK,
    /// WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. {nproc} becomes the number of ranks, and {batch} the batch
    /// of a rank, by --global-batch-size
    #[arg(last = true, value_name = "CMD", help_heading = PROGRAM)]
    pub command: Vec<String>,
    /// The flags of all studies.
    #[command(flatten)]
    pub study: StudyArgs,
    /// Flags of the runs.
    #[command(flatten)]
    pub train: TrainFlags,
}

/// The figures that people see.
const COLUMNS: [&str; 12] = [
    "samples_per_step",
    "step_ms_median",
    "samples_per_s_without_data",
    "speedup",
    "efficiency_pct",
    "t_comm_ms",
    "in_backward_ms",
    "comm_exposed_ms",
    "comm_hidden_ms",
    "comm_wait_ms",
    "compute_ms",
    "serial_pct",
];

/// `paceline bench scaling`.
fn scaling(args: &ScalingArgs) -> Result<u8> {
    check(&args.study)?;
    let ranks = resolve_ranks(&args.nproc)?;
    let is_program = !args.command.is_empty();
    let (setting, batch) = if is_program {
        programs::check(args)?
    } else {
        let base = spec::resolve(&at(&args.train.0, 1, None))?;
        (Setting::new(&base, 0), base.global_batch_size)
    };
    let is_whole = is_program && !programs::is_divisible(args);
    let default = if is_whole { vec![Mode::Weak] } else { vec![Mode::Weak, Mode::Strong] };
    let modes = args.mode.map_or(default, |mode| vec![mode]);
    let scenes = modes.iter().map(|mode| scene(*mode, batch, &ranks, args, &setting));
    let scenes = scenes.collect::<Result<Vec<Scene>>>()?;
    let mut outcome = run_scenes(&args.study, STUDY.name, &scenes)?;
    if is_program {
        outcome.compared_by = "throughput".to_owned();
        outcome.compare();
    }
    // A single rank may train without a strategy, so a run with the most ranks has the name.
    let most = outcome.runs.last().and_then(|runs| runs.first()).cloned().unwrap_or_default();
    let threads = most.number("threads").unwrap_or(0.0) as usize;
    let is_busy = outcome.waited_pct().is_some_and(|pct| pct >= BUSY_PCT);
    let setting = Setting { params: most.count("params"), threads, is_busy, ..setting };
    let strategy = most.text("strategy");
    let [of, whose] = if is_program {
        [setting.model.clone(), String::new()]
    } else {
        [
            format!("{}, {strategy} over {}", setting.model, setting.transport),
            format!(" of {strategy}"),
        ]
    };
    let (mut found, mut charts) = (Vec::new(), Vec::new());
    for (at, mode) in modes.iter().enumerate() {
        let rows = &mut outcome.rows[at * ranks.len()..][..ranks.len()];
        let points = points(rows, &setting, *mode)?;
        let fit = Fit::of(*mode, &points);
        found.push(conclusions(*mode, &points, &fit, &setting));
        let name = format!("{}_scaling", mode.names()[0].to_lowercase());
        let place = setting.place(&outcome.origin);
        let chart = chart(*mode, &points, fit.ok(), (of.clone(), place), setting.cores);
        charts.push((name, chart));
    }
    let report = Report {
        title: format!("Scaling{whose}: {}", setting.words(&outcome.origin)),
        question: STUDY.about.to_owned(),
        columns: COLUMNS.to_vec(),
        found,
        charts,
        setting: Some(setting),
        outcome,
        ..Report::default()
    };
    publish(&args.study, report)
}

/// The runs of a way of scaling.
fn scene(
    mode: Mode,
    batch: usize,
    ranks: &[usize],
    args: &ScalingArgs,
    setting: &Setting,
) -> Result<Scene> {
    let kept = if mode == Mode::Weak { "batch of each rank" } else { "global batch" };
    let name = format!("{} scaling: the {kept} stays{}", mode.names()[0], setting.on_link());
    let mut scene = Scene::new(name);
    for &ranks in ranks {
        let global_batch = mode.global_batch(batch, ranks)?;
        let spec = if setting.is_program() {
            programs::spec(args, global_batch, ranks)?
        } else {
            measuring(&at(&args.train.0, ranks, Some(global_batch)))?.0
        };
        scene = scene.with(plural(ranks, "rank"), spec);
    }
    Ok(scene)
}

/// The points of these rows, the first of one rank. Marks rows without enough cores, and adds speed-up and efficiency.
fn points(rows: &mut [Row], setting: &Setting, mode: Mode) -> Result<Vec<Point>> {
    let point = |row: &Row| Point::of(row, setting.threads, setting.cores);
    let points: Option<Vec<Point>> = rows.iter().map(point).collect();
    let points =
        points.ok_or_else(|| Failure::Run("a summary lacks a time of its steps".into()))?;
    for (row, point) in rows.iter_mut().zip(&points) {
        let (single, ranks) = (&points[0], point.ranks);
        let speedup = point.speedup(single);
        if point.is_crowded {
            row.variant.insert(0, '*');
        }
        row.add("speedup", speedup);
        row.add("efficiency_pct", point.efficiency_pct(single));
        if ranks > 1 {
            if point.step_ms > 0.0 {
                row.add("t_comm_ms", point.step_ms - mode.ideal_ms(single.step_ms, ranks));
            }
            row.add("serial_pct", 100.0 * serial_fraction(mode, ranks, speedup));
        }
    }
    Ok(points)
}

/// The fit and the verdict of a way of scaling.
fn conclusions(
    mode: Mode,
    points: &[Point],
    fit: &std::result::Result<Fit, String>,
    setting: &Setting,
) -> Found {
    let (t_comm, of_law) = match mode {
        Mode::Weak => ("T_N - T_1", "speed-up = N - f (N - 1)"),
        Mode::Strong => ("T_N - T_1 / N", "speed-up = 1 / (f + (1 - f) / N)"),
    };
    let [name, law] = mode.names();
    let mut lines =
        vec![format!("{name}: T_comm = {t_comm}; serial: the fraction f for which {of_law}")];
    if points.iter().any(|point| point.is_crowded) {
        lines.push(format!(
            "* more ranks x threads than the {} here: left out of the fit",
            plural(setting.cores, "core")
        ));
    }
    lines.push(format!("{law}: {}", fit.as_ref().map_or_else(Clone::clone, Fit::words)));
    lines.push(verdict::verdict(mode, points, setting));
    Found { id: "conclusions", lines, ..Found::default() }
}

const CURVE: u32 = 64;

/// The chart of speed-up against ranks, with the ideal line and the fit.
fn chart(
    mode: Mode,
    points: &[Point],
    fit: Option<Fit>,
    (of, subtitle): (String, String),
    cores: usize,
) -> Picture {
    let most = points.iter().map(|of| of.ranks).max().unwrap_or(1) as f64;
    let place = |of: &Point| (of.ranks as f64, of.speedup(&points[0]));
    let (with_cores, without): (Vec<Point>, Vec<Point>) =
        points.iter().partition(|of| !of.is_crowded);
    let ideal = [(1.0, 1.0), (most, most)];
    let mut series = vec![Series::line("ideal", ideal).stroke(Stroke::Dotted).look(4)];
    if !without.is_empty() {
        // The line is joined to the last point with enough cores.
        let joined = with_cores.last().into_iter().chain(&without).map(place);
        let crowded = Series::line(format!("*more than {cores} cores"), joined);
        series.push(crowded.stroke(Stroke::Dashed).look(1));
    }
    series.push(Series::line("measured", with_cores.iter().map(place)));
    let [name, of_law] = mode.names();
    // Any law fits a single point.
    if let Some(Fit { serial, residual: Some(_), .. }) = fit {
        let at = |at: u32| 1.0 + (most - 1.0) * f64::from(at) / f64::from(CURVE);
        let curve = (0..=CURVE).map(at).map(|n| (n, law(mode, serial, n)));
        let curve = Series::line(format!("{of_law}, f = {:.1} %", 100.0 * serial), curve);
        series.push(curve.stroke(Stroke::Dotted).look(2));
    }
    let axes = [Axis::linear("Ranks", ""), Axis::linear("Speed-up", "")];
    Picture::lines(format!("{name} scaling: {of}"), subtitle, axes, series)
}

/// The numbers of ranks, ascending, each once.
fn resolve_ranks(nproc: &[usize]) -> Result<Vec<usize>> {
    let mut ranks = nproc.to_vec();
    ranks.sort_unstable();
    ranks.dedup();
    match ranks.as_slice() {
        [1, _, ..] => Ok(ranks),
        [1] => usage(
            "--nproc 1: nothing scales with one number of ranks; pass another one too, as 1,2",
        ),
        _ => {
            let listed = ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
            usage(format!("--nproc {listed}: speed-up is against one rank; pass 1,{listed}"))
        }
    }
}

/// The flags for `ranks` ranks, with the user's own batch or with this one.
fn at(given: &Spec, ranks: usize, global_batch: Option<usize>) -> Spec {
    let flags = given.with("nproc", ranks);
    match global_batch {
        Some(batch) => flags.without(&["batch-size"]).with("global-batch-size", batch),
        None => flags,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_sorted_and_begin_with_one() {
        assert_eq!(resolve_ranks(&[4, 1, 2, 2]).unwrap(), [1, 2, 4]);
        for (bad, word) in [(&[2, 4][..], "pass 1,2,4"), (&[1], "1,2"), (&[0, 1], "--nproc 0")] {
            let error = resolve_ranks(bad).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
    }

    #[test]
    fn the_ideal_line_the_fit_and_the_marked_points_are_drawn() {
        let lines = |points: &[Point]| {
            let fit = Fit::of(Mode::Strong, points).ok();
            let chart = chart(Mode::Strong, points, fit, Default::default(), 4);
            chart
                .series()
                .iter()
                .map(|line| (line.name.clone(), line.points.len()))
                .collect::<Vec<_>>()
        };
        let all = [(1, 100.0), (2, 55.0), (4, 32.5), (8, 60.0)];
        let all = all.map(|(n, ms)| laws::tests::point(n, 64, ms, 4));
        let expected =
            [("ideal", 2), ("*more than 4 cores", 2), ("measured", 3), ("Amdahl, f = 10.0 %", 65)];
        assert_eq!(lines(&all), expected.map(|(name, count)| (name.to_owned(), count)));
        let names: Vec<String> = lines(&all[..2]).into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["ideal", "measured"], "any law fits a single point");
    }
}
