//! `paceline bench`, from the command line to the files it writes: one configuration after the
//! other, each with ranks of its own, and the rows of all of them in one report.
//!
//! Ranks that are processes write their rows to a memory file of this process, which has no name in
//! any folder.

use std::ffi::OsString;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::path::PathBuf;

use paceline_collectives::Group;
use rustix::fs::{MemfdFlags, memfd_create};
use serde::{Deserialize, Serialize};

use super::fitting::Fitting;
use super::plan::{self, Plan};
use super::rank::{Listener, algorithm, measure};
use super::result::{BenchReport, Row, Skipped, num_failed};
use super::screen::{Screen, say};
use super::{charts, compare, csv, json};
use crate::cli::{BenchArgs, TransportName};
use crate::connect::connect;
use crate::environment::Placement;
use crate::failure::EXIT_RUN;
use crate::launcher::{self, Ended, Launch};
use crate::{Failure, Result, resources, threads};

/// The variable by which the ranks of a sweep learn what they are to measure.
const JOB: &str = "PACELINE_BENCH";

/// What the ranks of one configuration are to do.
#[derive(Serialize, Deserialize)]
struct Job {
    transport: TransportName,
    sizes: Vec<u64>,
    /// Whether rank 0 prints nothing.
    is_quiet: bool,
    /// Where rank 0 adds a line for everything it finds.
    lines: PathBuf,
}

/// What rank 0 finds.
#[derive(Serialize, Deserialize)]
enum Line {
    Row(Box<Row>),
    MemoryBandwidth(f64),
    /// Why nothing can be measured on the emulated link.
    Refused(String),
}

/// The rows of one configuration, as they come.
#[derive(Default)]
struct Reporter {
    /// Where they are shown, on one rank.
    screen: Option<(Screen, TransportName, usize)>,
    /// Where they are written.
    file: Option<File>,
    rows: Vec<Row>,
    memory_bandwidth_gb_s: Option<f64>,
    refused: Option<String>,
}

impl Reporter {
    fn write(&mut self, line: &Line) -> Result<()> {
        let Some(file) = &mut self.file else { return Ok(()) };
        let text = serde_json::to_string(line).map_err(|e| Failure::io("a row is no text", e))?;
        writeln!(file, "{text}").map_err(|e| Failure::io("cannot pass a row on", e))
    }

    fn add(&mut self, line: Line) {
        match line {
            Line::Row(row) => self.rows.push(*row),
            Line::MemoryBandwidth(gb_s) => self.memory_bandwidth_gb_s = Some(gb_s),
            Line::Refused(reason) => self.refused = Some(reason),
        }
    }
}

impl Listener for Reporter {
    fn begins(&mut self, bytes: u64) -> Result<()> {
        if let Some((screen, transport, nproc)) = &self.screen {
            screen.begins(transport.name(), *nproc, bytes);
        }
        Ok(())
    }

    fn row(&mut self, row: Row) -> Result<()> {
        if let Some((screen, ..)) = &self.screen {
            screen.row(&row);
        }
        let line = Line::Row(Box::new(row));
        self.write(&line)?;
        self.add(line);
        Ok(())
    }

    fn memory_bandwidth(&mut self, gb_s: f64) -> Result<()> {
        let line = Line::MemoryBandwidth(gb_s);
        self.write(&line)?;
        self.add(line);
        Ok(())
    }
}

/// `paceline bench`: measures as a rank, or starts the ranks of each configuration.
pub fn bench(args: &BenchArgs, placement: Option<Placement>) -> Result<u8> {
    let job = std::env::var(JOB).ok().filter(|_| placement.is_some());
    let plan = plan::resolve(args, placement.as_ref(), job.is_some())?;
    match (placement, job) {
        (Some(placement), Some(job)) => {
            let job: Job = serde_json::from_str(&job)
                .map_err(|e| Failure::Usage(format!("{JOB} in the environment: {e}")))?;
            as_rank_of_ours(&plan, &placement, &job)
        }
        (Some(placement), None) => as_rank_of_others(&plan, &placement),
        (None, _) => as_parent(&plan),
    }
}

fn screen(plan: &Plan) -> Screen {
    Screen { style: plan.style, columns: plan.columns }
}

fn join(plan: &Plan, transport: TransportName, placement: &Placement) -> Result<Group> {
    let place = &placement.place;
    let threads = plan.pin_cores.then_some(1);
    connect(transport, &plan.comm, place.rendezvous()?, place, threads)
}

/// A rank that this command has started in another process.
fn as_rank_of_ours(plan: &Plan, placement: &Placement, job: &Job) -> Result<u8> {
    let mut reporter = Reporter::default();
    let place = &placement.place;
    if place.rank == 0 {
        reporter.screen = (!job.is_quiet).then(|| (screen(plan), job.transport, place.world_size));
        let opened = File::options().append(true).open(&job.lines);
        reporter.file = Some(opened.map_err(|e| Failure::io("cannot pass rows on", e))?);
    }
    let group = match join(plan, job.transport, placement) {
        // All ranks find this together, and the process above them says it, so none has failed.
        Err(Failure::Link(reason)) => return reporter.write(&Line::Refused(reason)).map(|()| 0),
        joined => joined?,
    };
    measure(plan, job.transport, &job.sizes, &group, &mut reporter)?;
    Ok(0)
}

/// A rank that another launcher has started: rank 0 does what is to be done once.
fn as_rank_of_others(plan: &Plan, placement: &Placement) -> Result<u8> {
    let (transport, place) = (plan.transports[0], &placement.place);
    let group = join(plan, transport, placement)?;
    let (nproc, is_first) = (group.world_size(), group.rank() == 0);
    let fitting = Fitting::of(plan, transport, nproc, place.local_world_size);
    // Ranks look at the memory at different moments, so one of them decides.
    let sizes = group.broadcast_object(Some(&fitting.sizes), 0)?;
    let mut report = new_report(plan);
    let mut reporter = Reporter::default();
    if is_first {
        reporter.screen = Some((screen(plan), transport, nproc));
        screen(plan).opens();
        let about = about(plan, transport);
        screen(plan).configuration(transport.name(), nproc, &about, &fitting.skipped);
        report.skipped = fitting.skipped;
    }
    measure(plan, transport, &sizes, &group, &mut reporter)?;
    if !is_first {
        return Ok(0);
    }
    screen(plan).configuration_ends(&reporter.rows, plan.operation.kind.name());
    report.rows = reporter.rows;
    report.memory_bandwidth_gb_s = reporter.memory_bandwidth_gb_s;
    finish(plan, &report)
}

/// The process that starts all ranks.
fn as_parent(plan: &Plan) -> Result<u8> {
    let screen = screen(plan);
    let mut report = new_report(plan);
    let mut code = 0;
    screen.opens();
    for &transport in &plan.transports {
        for &nproc in &plan.nprocs {
            let skip = |bytes, reason| Skipped {
                transport: transport.name().to_owned(),
                nproc,
                bytes,
                reason,
            };
            if let Some(reason) = refusal(plan, transport, nproc) {
                let skipped = skip(None, reason);
                screen.skipped(&skipped);
                report.skipped.push(skipped);
                continue;
            }
            let Fitting { sizes, skipped } = Fitting::of(plan, transport, nproc, nproc);
            if sizes.is_empty() {
                skipped.iter().for_each(|skipped| screen.skipped(skipped));
                report.skipped.extend(skipped);
                continue;
            }
            screen.configuration(transport.name(), nproc, &about(plan, transport), &skipped);
            report.skipped.extend(skipped);
            let (reporter, failure) = match transport {
                TransportName::Thread => {
                    let (reporter, failure) = in_threads(plan, &sizes, nproc);
                    (reporter, failure.map(|reason| (reason, EXIT_RUN)))
                }
                _ => {
                    let (reporter, ended) = in_processes(transport, &sizes, nproc)?;
                    if let Some(signal) = ended.signal {
                        // Somebody wants us to end.
                        return Ok(128 + signal as u8);
                    }
                    let failed = || Some((why_failed(ended.code)?, ended.code));
                    let refused = reporter.refused.clone().map(|reason| (reason, EXIT_RUN));
                    (reporter, refused.or_else(failed))
                }
            };
            screen.configuration_ends(&reporter.rows, plan.operation.kind.name());
            report.rows.extend(reporter.rows);
            let best =
                report.memory_bandwidth_gb_s.into_iter().chain(reporter.memory_bandwidth_gb_s);
            report.memory_bandwidth_gb_s = best.reduce(f64::max);
            if let Some((reason, its_code)) = failure {
                code = its_code;
                let skipped = skip(None, reason);
                screen.skipped(&skipped);
                report.skipped.push(skipped);
            }
        }
    }
    if report.rows.is_empty() && code > EXIT_RUN {
        // The launcher has said which rank it was; its code says how it ended.
        screen.ends(&report);
        return Ok(code);
    }
    let finished = finish(plan, &report)?;
    Ok(if code == 0 { finished } else { code })
}

/// Why ranks that are processes failed, if they did; they have said more themselves.
fn why_failed(code: u8) -> Option<String> {
    let how = match code {
        0 => return None,
        // By the custom of shells.
        129.. => format!("was killed by signal {}", code - 128),
        _ => format!("exited with code {code}"),
    };
    Some(format!("a rank {how}; what it said is on standard error"))
}

/// What ranks that are threads find, or why they failed.
fn in_threads(plan: &Plan, sizes: &[u64], nproc: usize) -> (Reporter, Option<String>) {
    let outcome = threads::run(nproc, plan.comm.options(nproc), |group| {
        let rank = group.rank();
        if plan.pin_cores {
            resources::pin(rank, 1)?;
        }
        let transport = TransportName::Thread;
        let screen = (rank == 0).then(|| (screen(plan), transport, nproc));
        let mut reporter = Reporter { screen, ..Reporter::default() };
        measure(plan, transport, sizes, &group, &mut reporter)?;
        Ok(reporter)
    });
    match outcome {
        Ok(reporter) => (reporter, None),
        Err(failure) => (Reporter::default(), Some(failure.to_string())),
    }
}

/// Measures `args`, a command line of `paceline bench`, for other commands, and prints nothing.
pub(crate) fn rows_of(
    args: &[String],
    transport: TransportName,
    sizes: &[u64],
    nproc: usize,
) -> Result<Vec<Row>> {
    let args = args.iter().map(OsString::from).collect();
    let (reporter, ended) = launch(args, transport, sizes, nproc, true)?;
    match (reporter.refused, why_failed(ended.code)) {
        (Some(reason), _) => Err(Failure::Link(reason)),
        (None, Some(reason)) => Err(Failure::Run(reason)),
        (None, None) => Ok(reporter.rows),
    }
}

fn in_processes(
    transport: TransportName,
    sizes: &[u64],
    nproc: usize,
) -> Result<(Reporter, Ended)> {
    launch(std::env::args_os().skip(1).collect(), transport, sizes, nproc, false)
}

/// The rows that ranks with these arguments find, and how the launch of them ended.
fn launch(
    args: Vec<OsString>,
    transport: TransportName,
    sizes: &[u64],
    nproc: usize,
    is_quiet: bool,
) -> Result<(Reporter, Ended)> {
    let own_program = std::env::current_exe()
        .map_err(|e| Failure::io("cannot find the program to start ranks with", e))?;
    let lines = memfd_create("rows", MemfdFlags::CLOEXEC)
        .map_err(|e| Failure::io("no memory for the rows", e))?;
    let path = format!("/proc/{}/fd/{}", std::process::id(), lines.as_raw_fd());
    let job = Job { transport, sizes: sizes.to_vec(), is_quiet, lines: path.into() };
    let job = serde_json::to_string(&job).map_err(|e| Failure::io("a job is no text", e))?;
    let mut command = vec![own_program.into_os_string()];
    command.extend(args);
    let ended = launcher::launch_one_of_many(&Launch {
        command,
        num_ranks: nproc,
        variables: vec![(JOB, job.into())],
        rank_0_owns_stdout: true,
        dump_folder: None,
    })?;
    let mut reporter = Reporter::default();
    for line in BufReader::new(File::from(lines)).lines() {
        // A rank that is killed may leave half a line.
        let line = line.map_err(|e| Failure::io("cannot read the rows", e))?;
        if let Ok(line) = serde_json::from_str(&line) {
            reporter.add(line);
        }
    }
    Ok((reporter, ended))
}

/// Why a configuration cannot run at all.
fn refusal(plan: &Plan, transport: TransportName, nproc: usize) -> Option<String> {
    let cores = resources::num_cores();
    if plan.pin_cores && nproc > cores {
        return Some(format!("--pin-cores: {nproc} ranks, but {cores} cores"));
    }
    plan.comm.refusal(transport, nproc)
}

/// How a configuration is measured, in words after its transport.
fn about(plan: &Plan, transport: TransportName) -> String {
    let mut words = format!(
        ": medians of {} iterations after {}, each the slowest rank's",
        plan.iters, plan.warmup_iters
    );
    if plan.private {
        words += "; private buffers";
    }
    let name = algorithm(plan, transport);
    words += &format!("; algorithm {name}");
    if plan.operation.is_reduction() && matches!(name, "ring" | "auto" | "library") {
        words += " (not in rank order: the last bits of sums may differ)";
    }
    if let Some(link) = plan.comm.link {
        words += &format!("; on an emulated link of {link}");
    }
    words
}

fn new_report(plan: &Plan) -> BenchReport {
    let command: Vec<String> =
        std::env::args_os().map(|arg| arg.to_string_lossy().into_owned()).collect();
    BenchReport {
        machine: resources::machine(),
        date: jiff::Zoned::now().strftime("%Y-%m-%d %H:%M:%S").to_string(),
        command: command.join(" "),
        link: plan.comm.link.map(|link| link.to_string()),
        memory_bandwidth_gb_s: None,
        rows: Vec::new(),
        skipped: Vec::new(),
    }
}

/// Writes and prints what all configurations make together. The code is 1 if a result was wrong, or
/// nothing was measured.
fn finish(plan: &Plan, report: &BenchReport) -> Result<u8> {
    screen(plan).ends(report);
    if report.rows.is_empty() {
        return Err(Failure::Run("nothing was measured; the reasons are above".into()));
    }
    let write = |file: &PathBuf, text: String| {
        let failed = |e| Failure::io(format!("cannot write {}", file.display()), e);
        std::fs::write(file, text).map_err(failed)
    };
    if let Some(file) = &plan.json {
        write(file, json::text(report))?;
    }
    if let Some(file) = &plan.csv {
        let text = csv::text(&report.rows).map_err(|e| Failure::io("cannot make CSV", e))?;
        write(file, text)?;
    }
    if let Some(folder) = &plan.charts {
        for file in charts::write(report, &plan.compared, folder)? {
            say(&format!("# chart: {}", file.display()));
        }
    }
    if !plan.compared.is_empty() {
        say(&compare::table(report, &plan.compared));
    }
    Ok(u8::from(num_failed(&report.rows) > 0))
}
