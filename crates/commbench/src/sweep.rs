//! `paceline bench`, from the command line to the files that it writes. Runs one configuration after the other, each
//! with its own ranks, and collects all rows in one report.

use std::time::{Duration, Instant};

use paceline_collectives::Group;
use paceline_failure::outputs::write_stated_bytes;
use paceline_failure::{EXIT_BELOW, EXIT_RUN, Failure, Result, usage};
use paceline_files::Printable;
use paceline_host::disk::Disk;
use paceline_host::resources;
use paceline_host::text::{line_width, say, say_unbroken};
use paceline_launch::connect::connect;
use paceline_launch::environment::Placement;
use paceline_launch::{TransportName, pinning, threads};

use super::against::Peer;
use super::configuration::Configuration;
use super::plan::{self, Plan};
use super::processes::{self, RankJob};
use super::rank::measure;
use super::reporter::{Found, Reporter};
use super::result::{BenchReport, Skipped, num_failed};
use super::series::series;
use super::{charts, compare, expect, files};
use crate::args::BenchArgs;

/// How long another program may take for a round: this time, and so many times as long as paceline.
const PEER_LIMIT: (Duration, u32) = (Duration::from_secs(120), 100);

/// Runs `paceline bench`: measures as a rank, or starts the ranks of each configuration.
pub fn bench(args: &BenchArgs, placement: Option<Placement>) -> Result<u8> {
    let job = RankJob::from_env(placement.as_ref())?;
    let plan = plan::resolve(args, placement.as_ref(), job.is_some())?;
    if plan.output.against.is_some() && placement.is_some() && job.is_none() {
        return usage(
            "--against torch starts ranks of its own; leave it, or the other launcher, out",
        );
    }
    match (placement, job) {
        (Some(placement), Some(job)) => as_rank_of_ours(&plan, &placement, &job),
        (Some(placement), None) => as_rank_of_others(&plan, &placement),
        (None, _) => as_parent(&plan, Peer::resolve(&plan)?.as_ref()),
    }
}

fn join(plan: &Plan, transport: TransportName, placement: &Placement) -> Result<Group> {
    let place = &placement.place;
    let threads = plan.ranks.pin_cores.then_some(1);
    connect(transport, &plan.comm, place.rendezvous()?, place, threads, None)
}

/// Runs as a rank that this command has started as a process.
fn as_rank_of_ours(plan: &Plan, placement: &Placement, job: &RankJob) -> Result<u8> {
    let mut reporter = Reporter::default();
    let (transport, nproc) = (job.transport, placement.place.world_size);
    if placement.place.rank == 0 {
        reporter.screen = (!job.is_quiet).then_some((plan.output.screen, transport, nproc));
        reporter.file = Some(job.file()?);
    }
    match join(plan, transport, placement) {
        // All ranks find this out, and their parent reports it, so no rank exits with an error.
        Err(Failure::Link(reason)) => reporter.report(Found::Failed(reason))?,
        group => {
            let configuration = Configuration { plan, transport, nproc };
            measure(configuration, &job.sizes, &group?, &mut reporter)?;
        }
    }
    Ok(0)
}

/// Runs as a rank that another launcher has started. Rank 0 prints, and writes the files.
fn as_rank_of_others(plan: &Plan, placement: &Placement) -> Result<u8> {
    let transport = plan.transports[0];
    let local_ranks = placement.place.local_world_size;
    // Before this rank is pinned to its own processors.
    let pinned = plan.pinned(local_ranks);
    let group = join(plan, transport, placement)?;
    let nproc = group.world_size();
    let configuration = Configuration { plan, transport, nproc };
    let (sizes, skipped) = configuration.fitting(local_ranks);
    // Ranks look at the available memory at different moments, so rank 0 decides which sizes fit.
    let sizes = group.broadcast_object(Some(&sizes), 0)?.repeat(plan.cycles());
    let mut reporter = Reporter::default();
    if group.rank() > 0 {
        return measure(configuration, &sizes, &group, &mut reporter).map(|()| 0);
    }
    let mut report = new_report(plan);
    begin(configuration, pinned, skipped, &mut report);
    reporter.screen = Some((plan.output.screen, transport, nproc));
    measure(configuration, &sizes, &group, &mut reporter)?;
    add(plan, &mut report, reporter);
    finish(plan, &report)
}

/// Runs as the process that starts all ranks.
fn as_parent(plan: &Plan, peer: Option<&Peer>) -> Result<u8> {
    let mut report = new_report(plan);
    if let Some(Peer { name, backend, .. }) = peer {
        say_unbroken(&format!("# in turns with {name} over {backend}, one thread for each rank"));
    }
    let mut code = 0;
    for configuration in plan.configurations() {
        let skip = |report: &mut BenchReport, reason| {
            let skipped = configuration.skipped(None, reason);
            plan.output.screen.skipped(&skipped);
            report.skipped.push(skipped);
        };
        if let Some(reason) = configuration.refusal() {
            skip(&mut report, reason);
            continue;
        }
        let (sizes, skipped) = configuration.fitting(configuration.nproc);
        if sizes.is_empty() {
            skipped.iter().for_each(|skipped| plan.output.screen.skipped(skipped));
            report.skipped.extend(skipped);
            continue;
        }
        begin(configuration, plan.pinned(configuration.nproc), skipped, &mut report);
        let (mut reporter, its_code) = in_turns(configuration, &sizes, peer)?;
        let failed = reporter.failed.take();
        add(plan, &mut report, reporter);
        if let Some(reason) = failed {
            code = its_code.max(EXIT_RUN);
            skip(&mut report, reason);
        }
    }
    if report.rows.is_empty() && code > EXIT_RUN {
        // The launcher has said which rank failed, and its exit code says how that rank ended.
        plan.output.screen.ends(&report);
        return Ok(code);
    }
    let finished = finish(plan, &report)?;
    Ok(if code == 0 { finished } else { code })
}

/// Measures all cycles, each followed by one of the other program if there is one. Returns the exit code of the ranks too.
fn in_turns(
    configuration: Configuration<'_>,
    sizes: &[u64],
    peer: Option<&Peer>,
) -> Result<(Reporter, u8)> {
    let cycles = configuration.plan.cycles();
    let Some(peer) = peer else { return with_ranks(configuration, &sizes.repeat(cycles)) };
    let mut all = Reporter::default();
    for _ in 0..cycles {
        let begin = Instant::now();
        let (found, code) = with_ranks(configuration, sizes)?;
        all.rows.extend(found.rows);
        all.memory_bandwidth_gb_s = found.memory_bandwidth_gb_s;
        all.cpu_wait_pct = all.cpu_wait_pct.into_iter().chain(found.cpu_wait_pct).reduce(f64::max);
        if found.failed.is_some() {
            return Ok((Reporter { failed: found.failed, ..all }, code));
        }
        let limit = PEER_LIMIT.0 + PEER_LIMIT.1 * begin.elapsed();
        all.theirs.extend(peer.measure(configuration, sizes, limit)?);
    }
    Ok((all, 0))
}

/// Measures with ranks that this process starts.
fn with_ranks(configuration: Configuration<'_>, sizes: &[u64]) -> Result<(Reporter, u8)> {
    let Configuration { transport, nproc, .. } = configuration;
    if transport == TransportName::Thread {
        return Ok((in_threads(configuration, sizes), 0));
    }
    let args = std::env::args_os().skip(1);
    let (reporter, ended) = processes::launch(args, transport, sizes, nproc, false)?;
    match ended.signal {
        // Someone has asked this process to end.
        Some(signal) => Err(Failure::Stopped { signal, message: None, others: Vec::new() }),
        None => Ok((reporter, ended.code)),
    }
}

/// Measures with ranks that are threads.
fn in_threads(configuration: Configuration<'_>, sizes: &[u64]) -> Reporter {
    let Configuration { plan, transport, nproc } = configuration;
    let outcome = threads::run(nproc, plan.comm.options(nproc), |group| {
        let rank = group.rank();
        if plan.ranks.pin_cores {
            pinning::pin(rank, nproc, 1)?;
        }
        let screen = (rank == 0).then_some((plan.output.screen, transport, nproc));
        let mut reporter = Reporter { screen, ..Reporter::default() };
        measure(configuration, sizes, &group, &mut reporter)?;
        Ok(reporter)
    });
    outcome.unwrap_or_else(|failure| Reporter {
        failed: Some(failure.to_string()),
        ..Reporter::default()
    })
}

/// Begins the table of a configuration, and adds the sizes that are skipped to the report.
fn begin(
    configuration: Configuration<'_>,
    pinned: Option<String>,
    skipped: Vec<Skipped>,
    report: &mut BenchReport,
) {
    let Configuration { plan, transport, nproc } = configuration;
    let about = configuration.about(pinned);
    plan.output.screen.configuration(transport.name(), nproc, &about, &skipped);
    report.skipped.extend(skipped);
}

/// Adds the results of a configuration to the report, and ends its table.
fn add(plan: &Plan, report: &mut BenchReport, found: Reporter) {
    plan.output.screen.configuration_ends(
        &found.rows,
        plan.operation.kind.name(),
        found.cpu_wait_pct,
    );
    report.rows.extend(found.rows);
    report.theirs.extend(found.theirs);
    let bandwidths = report.memory_bandwidth_gb_s.into_iter().chain(found.memory_bandwidth_gb_s);
    report.memory_bandwidth_gb_s = bandwidths.reduce(f64::max);
}

/// An empty report, and the lines before the first configuration.
fn new_report(plan: &Plan) -> BenchReport {
    plan.output.screen.opens();
    BenchReport {
        machine: resources::machine(),
        date: paceline_host::text::now("%Y-%m-%d %H:%M:%S"),
        command: std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect(),
        link: plan.comm.link.map(|link| link.to_string()),
        device: plan.ranks.device,
        memory_bandwidth_gb_s: None,
        rows: Vec::new(),
        theirs: Vec::new(),
        skipped: Vec::new(),
    }
}

/// Writes the files and prints the end of the report. Returns 1 if a result was wrong, 4 if a bus bandwidth is below
/// what is expected, otherwise 0.
fn finish(plan: &Plan, report: &BenchReport) -> Result<u8> {
    plan.output.screen.ends(report);
    if report.rows.is_empty() {
        return Err(Failure::Run("nothing was measured; the reasons are above".into()));
    }
    let disk = Disk::default();
    if let Some(file) = &plan.output.json {
        write_stated_bytes(&disk, file, files::json(report).as_bytes())?;
    }
    if let Some(file) = &plan.output.csv {
        write_stated_bytes(&disk, file, files::csv(&report.rows).as_bytes())?;
    }
    if let Some(folder) = &plan.output.charts {
        let compared = [plan.compared.clone(), series(report.theirs.clone())].concat();
        for file in charts::write(&disk, report, &compared, folder)? {
            say_unbroken(&format!("# chart: {}", file.printable()));
        }
    }
    if !plan.compared.is_empty() || !report.theirs.is_empty() {
        say(&compare::table(report, &plan.compared, line_width()));
    }
    let verdict = plan.output.expect.map(|part| expect::verdict(plan, &report.rows, part));
    if let Some((text, _)) = &verdict {
        say_unbroken(text);
    }
    if num_failed(&report.rows) > 0 {
        return Ok(EXIT_RUN);
    }
    Ok(if verdict.is_some_and(|(_, is_reached)| !is_reached) { EXIT_BELOW } else { 0 })
}
