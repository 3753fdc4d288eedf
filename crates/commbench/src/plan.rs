//! Turns the flags of `paceline bench` into a plan, which is checked as a whole before any rank starts.

use paceline_collectives::OpKind;
use paceline_failure::outputs::check_outputs;
use paceline_failure::{Failure, Result, usage};
use paceline_launch::comm::{self, CommConfig};
use paceline_launch::device::Device;
use paceline_launch::environment::Placement;
use paceline_launch::launcher::num_ranks;
use paceline_launch::{TransportName, pinning};
use paceline_memory::DType;

use super::operation::Operation;
use super::series::Measured;
use super::sizes::{Step, parse_size, parse_size_mb, sweep};
use super::{expect, load};
use crate::args::{BenchArgs, MAX_ITERS, MeasuringArgs, OutputArgs, RankArgs, SizeArgs};

/// The sizes of `--sweep` in MB, which are those of a published benchmark.
const SWEEP_MB: [u64; 4] = [1, 10, 100, 1024];

/// The measurements to take, and the destinations of their results.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The operation.
    pub operation: Operation,
    /// The requested sizes, in bytes.
    pub sizes: Vec<u64>,
    /// Numbers of ranks.
    pub nprocs: Vec<usize>,
    /// The transports.
    pub transports: Vec<TransportName>,
    /// How the ranks talk to each other.
    pub comm: CommConfig,
    /// How each size is measured.
    pub measuring: MeasuringArgs,
    /// The memory and the cores of the ranks.
    pub ranks: RankArgs,
    /// The screen and the files.
    pub output: OutputArgs,
    /// Measurements to compare with.
    pub compared: Vec<Measured>,
}

impl Plan {
    /// How often all sizes are measured.
    pub fn cycles(&self) -> usize {
        // Rounds in turns with another program are three, for a range.
        let default = if self.output.against.is_some() { 3 } else { 1 };
        self.measuring.run_cycles.unwrap_or(default)
    }

    /// Which processors of this host each of its ranks gets, in words, if they are pinned.
    pub fn pinned(&self, local_ranks: usize) -> Option<String> {
        let pinning = self.ranks.pin_cores.then(|| pinning::pinning(local_ranks, 1))?;
        pinning.ok().map(|pinning| pinning.who())
    }
}

/// Checks all flags together. `is_inner` means that a parent process has checked the flags and read the
/// files of `--compare` already, and will write the files.
pub fn resolve(args: &BenchArgs, placement: Option<&Placement>, is_inner: bool) -> Result<Plan> {
    let BenchArgs { op: kind, sizes, measuring, ranks, comm, output } = args;
    let dtype: DType =
        measuring.datatype.parse().map_err(|error| Failure::Usage(format!("-d: {error}")))?;
    let sizes = match kind {
        OpKind::Barrier => vec![0],
        _ => resolve_sizes(sizes, dtype.size_bytes() as u64)?,
    };
    check_iterations(measuring, &ranks.transport)?;
    let root = measuring.root;
    let nprocs = resolve_nprocs(&ranks.nproc, placement, is_inner)?;
    if let Some(few) = nprocs.iter().find(|&&nproc| root >= nproc) {
        return usage(format!(
            "-r {root}: there is no such rank among {few}; pass one below {few}"
        ));
    }
    let transports = resolve_transports(&ranks.transport, placement.filter(|_| !is_inner))?;
    let most_ranks = nprocs.iter().copied().max().unwrap_or(1);
    let local_ranks = placement.map_or(most_ranks, |placement| placement.place.local_world_size);
    ranks.device.check(&transports, local_ranks)?;
    if ranks.device != Device::Cpu && ranks.private {
        return usage("--private is about memory of the processor; leave it or --device out");
    }
    let comm = comm::resolve(comm, ranks.device, &transports)?;
    if *kind == OpKind::Barrier && output.charts.is_some() {
        return usage("--charts: a barrier has no sizes to draw; leave it out");
    }
    let mut compared = Vec::new();
    if !is_inner {
        for file in &output.compare {
            compared.extend(load::load(file)?);
        }
        check_outputs(&[("-J", &output.json), ("--csv", &output.csv)], output.charts.as_deref())?;
    }
    let plan = Plan {
        operation: Operation { kind: *kind, redop: measuring.redop, root, dtype },
        sizes,
        nprocs,
        transports,
        comm,
        measuring: measuring.clone(),
        ranks: ranks.clone(),
        output: output.clone(),
        compared,
    };
    if !is_inner {
        expect::check(&plan)?;
    }
    Ok(plan)
}

fn check_iterations(measuring: &MeasuringArgs, transports: &[TransportName]) -> Result<()> {
    let MeasuringArgs { iters, agg_iters, warmup_iters, .. } = *measuring;
    if !(1..=MAX_ITERS).contains(&iters) || warmup_iters > MAX_ITERS {
        return usage(format!(
            "--iters {iters} -w {warmup_iters}: time 1 to {MAX_ITERS} iterations, after at most as many others"
        ));
    }
    if agg_iters > 1 && transports.contains(&TransportName::Nccl) {
        return usage(format!(
            "-m {agg_iters}: nccl-tests merges these calls into one launch, which --transport nccl does not do; leave -m out"
        ));
    }
    Ok(())
}

fn resolve_sizes(args: &SizeArgs, elem_bytes: u64) -> Result<Vec<u64>> {
    let in_mb = if args.sweep {
        SWEEP_MB.iter().map(|mb| mb * 1_000_000).collect()
    } else {
        let sizes = args.size_mb.iter().map(|text| parse_size_mb("--size-mb", text));
        sizes.collect::<Result<Vec<u64>>>()?
    };
    if !in_mb.is_empty() {
        if let Some(small) = in_mb.iter().find(|&&bytes| bytes < elem_bytes) {
            return usage(format!(
                "--size-mb: {}, less than one element; pass more",
                paceline_host::text::plural(*small as usize, "byte")
            ));
        }
        return Ok(in_mb.into_iter().map(|bytes| bytes - bytes % elem_bytes).collect());
    }
    let begin = parse_size("-b", args.minbytes.as_deref().unwrap_or("1K"))?;
    let end = match &args.maxbytes {
        Some(text) => parse_size("-e", text)?,
        None => begin.max(64 << 20),
    };
    let step = match &args.stepbytes {
        Some(text) if text.trim() == "0" => Step::Increment(0),
        Some(text) => Step::Increment(parse_size("-i", text)?),
        None => Step::Factor(args.stepfactor.unwrap_or(2)),
    };
    sweep(begin, end, step, elem_bytes)
}

fn resolve_nprocs(
    given: &[usize],
    placement: Option<&Placement>,
    is_inner: bool,
) -> Result<Vec<usize>> {
    match given {
        [_, ..] if !is_inner => given.iter().map(|&n| num_ranks(Some(n), placement)).collect(),
        _ => Ok(vec![num_ranks(None, placement)?]),
    }
}

fn resolve_transports(
    given: &[TransportName],
    placement: Option<&Placement>,
) -> Result<Vec<TransportName>> {
    let Some(placement) = placement else {
        return Ok(if given.is_empty() { vec![TransportName::Shm] } else { given.to_vec() });
    };
    placement.check_transport(given.first().copied())?;
    match given[..] {
        [] => Ok(vec![placement.default_transport()]),
        [one] => Ok(vec![one]),
        _ => {
            usage("--transport: the ranks of another launcher can use one transport only; name one")
        }
    }
}
