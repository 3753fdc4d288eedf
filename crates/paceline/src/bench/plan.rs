//! From the flags of `paceline bench` to what is to be measured, checked as a whole before any rank
//! starts.

use std::path::PathBuf;

use paceline_collectives::OpKind;
use paceline_memory::DType;

use super::exchange::Operation;
use super::load;
use super::series::Series;
use super::sizes::{Step, parse_size, parse_size_mb, sweep};
use super::table::Columns;
use crate::cli::{BenchArgs, ColumnsName, StyleName, TransportName};
use crate::comm::{self, CommConfig};
use crate::environment::Placement;
use crate::outputs::{check_file, check_folder};
use crate::{Failure, Result, launcher, resources};

/// The published sweep, in MB.
const SWEEP_MB: [u64; 4] = [1, 10, 100, 1024];

/// Iterations at most: their times are kept, for every rank.
const MAX_ITERS: usize = 1_000_000;

/// What is to be measured, and where it goes.
#[derive(Clone, Debug)]
pub struct Plan {
    /// What to call.
    pub operation: Operation,
    /// The sizes asked for, in bytes.
    pub sizes: Vec<u64>,
    /// Calls that are timed.
    pub iters: usize,
    /// Calls before those.
    pub warmup_iters: usize,
    /// Whether to compare results.
    pub check: bool,
    /// Numbers of ranks.
    pub nprocs: Vec<usize>,
    /// How the ranks reach each other.
    pub transports: Vec<TransportName>,
    /// Whether buffers are out of the reach of other processes.
    pub private: bool,
    /// Whether each rank has a core of its own.
    pub pin_cores: bool,
    /// How the ranks talk to each other.
    pub comm: CommConfig,
    /// What is printed.
    pub style: StyleName,
    /// Which columns the table has.
    pub columns: Columns,
    /// File for the report.
    pub json: Option<PathBuf>,
    /// File for the rows.
    pub csv: Option<PathBuf>,
    /// Folder for charts.
    pub charts: Option<PathBuf>,
    /// Measurements of others.
    pub compared: Vec<Series>,
}

/// Checks all flags together. `is_inner` says that another process has done so already, read what
/// is to be compared, and will write the files.
pub fn resolve(args: &BenchArgs, placement: Option<&Placement>, is_inner: bool) -> Result<Plan> {
    let kind = args.op.kind();
    let dtype: DType =
        args.datatype.parse().map_err(|error| Failure::Usage(format!("-d: {error}")))?;
    let sizes = match kind {
        OpKind::Barrier => vec![0],
        _ => resolve_sizes(args, dtype.size_bytes() as u64)?,
    };
    if !(1..=MAX_ITERS).contains(&args.iters) || args.warmup_iters > MAX_ITERS {
        return usage(format!(
            "-n {} -w {}: time 1 to {MAX_ITERS} iterations, after at most as many others",
            args.iters, args.warmup_iters
        ));
    }
    let nprocs = resolve_nprocs(args, placement, is_inner)?;
    if let Some(few) = nprocs.iter().find(|&&nproc| args.root >= nproc) {
        return usage(format!(
            "-r {}: there is no such rank among {few}; pass one below {few}",
            args.root
        ));
    }
    let transports = resolve_transports(args, placement.filter(|_| !is_inner))?;
    let comm = comm::resolve(&args.comm, &transports)?;
    if kind == OpKind::Barrier && args.charts.is_some() {
        return usage("--charts: a barrier has no sizes to draw; leave it out".into());
    }
    let operation = Operation { kind, redop: args.redop.op(), root: args.root, dtype };
    let mut plan = Plan {
        operation,
        sizes,
        iters: args.iters,
        warmup_iters: args.warmup_iters,
        check: args.check == 1,
        nprocs,
        transports,
        private: args.private,
        pin_cores: args.pin_cores,
        comm,
        style: args.style,
        columns: match args.columns {
            ColumnsName::Standard => Columns::Standard,
            ColumnsName::Extended => Columns::Extended,
        },
        json: args.json.clone(),
        csv: args.csv.clone(),
        charts: args.charts.clone(),
        compared: Vec::new(),
    };
    if !is_inner {
        for file in &args.compare {
            plan.compared.extend(load::load(file)?);
        }
        for (flag, file) in [("-J", &plan.json), ("--csv", &plan.csv)] {
            file.as_deref().map_or(Ok(()), |file| check_file(flag, file))?;
        }
        if let Some(folder) = &plan.charts {
            check_folder("--charts", folder, "pass a folder that you can write to")?;
        }
    }
    Ok(plan)
}

fn resolve_sizes(args: &BenchArgs, elem_bytes: u64) -> Result<Vec<u64>> {
    let in_mb = match args.sweep {
        true => SWEEP_MB.iter().map(|mb| mb * 1_000_000).collect(),
        false => {
            let sizes = args.size_mb.iter().map(|text| parse_size_mb("--size-mb", text));
            sizes.collect::<Result<Vec<u64>>>()?
        }
    };
    if !in_mb.is_empty() {
        if let Some(small) = in_mb.iter().find(|&&bytes| bytes < elem_bytes) {
            return usage(format!("--size-mb: {small} bytes are less than one element; pass more"));
        }
        return Ok(in_mb.into_iter().map(|bytes| bytes - bytes % elem_bytes).collect());
    }
    let size = |flag: &str, text: &Option<String>, default: &str| {
        parse_size(flag, text.as_deref().unwrap_or(default))
    };
    let begin = size("-b", &args.minbytes, "1K")?;
    let end = match &args.maxbytes {
        Some(text) => parse_size("-e", text)?,
        None => parse_size("-e", "64M")?.max(begin),
    };
    let step = match &args.stepbytes {
        Some(text) if text.trim() == "0" => Step::Increment(0),
        Some(text) => Step::Increment(parse_size("-i", text)?),
        None => Step::Factor(args.stepfactor.unwrap_or(2)),
    };
    sweep(begin, end, step, elem_bytes)
}

fn resolve_nprocs(
    args: &BenchArgs,
    placement: Option<&Placement>,
    is_inner: bool,
) -> Result<Vec<usize>> {
    if let Some(placement) = placement {
        let world = placement.place.world_size;
        launcher::check_num_ranks("WORLD_SIZE", world)?;
        if !args.nproc.is_empty() && !is_inner {
            return usage(format!(
                "--nproc starts ranks of its own, but another launcher has started {world}; leave \
                 --nproc out, or unset RANK and WORLD_SIZE"
            ));
        }
        return Ok(vec![world]);
    }
    for &nproc in &args.nproc {
        launcher::check_num_ranks("--nproc", nproc)?;
    }
    match args.nproc.is_empty() {
        true => Ok(vec![resources::num_cores().min(2)]),
        false => Ok(args.nproc.clone()),
    }
}

fn resolve_transports(
    args: &BenchArgs,
    placement: Option<&Placement>,
) -> Result<Vec<TransportName>> {
    let given = &args.transport;
    let Some(placement) = placement else {
        return Ok(if given.is_empty() { vec![TransportName::Shm] } else { given.clone() });
    };
    placement.check_transport(given.first().copied())?;
    match given[..] {
        [] => Ok(vec![placement.default_transport()]),
        [one] => Ok(vec![one]),
        _ => usage(
            "--transport: the ranks of another launcher can use one transport only; name one"
                .into(),
        ),
    }
}

fn usage<T>(message: String) -> Result<T> {
    Err(Failure::Usage(message))
}
