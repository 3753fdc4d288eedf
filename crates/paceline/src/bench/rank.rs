//! What every rank does for one configuration: allocate, warm up, take times, check.
//!
//! Before each timed call the ranks meet at a barrier. Every rank then measures its own call by the
//! clock on the wall, and the time of the iteration is the longest of them.

use std::time::Instant;

use paceline_collectives::{Algorithm, Group, OpKind, ReduceOp};
use paceline_memory::{Allocator, Category, Tensor};

use super::exchange::{Exchange, Operation};
use super::memory::{bandwidth_gb_s, bytes_touched};
use super::plan::Plan;
use super::result::{Row, Timing, bus_factor};
use crate::Result;
use crate::cli::TransportName;
use crate::metrics::quantile;

/// What a rank has to say while it measures. Every rank's is called, at the same points.
pub trait Listener {
    /// The ranks begin with a size of so many bytes.
    fn begins(&mut self, bytes: u64) -> Result<()>;
    /// A size is measured.
    fn row(&mut self, row: Row) -> Result<()>;
    /// What the memory delivers to all ranks at once, in GB/s.
    fn memory_bandwidth(&mut self, gb_s: f64) -> Result<()>;
}

/// Measures the plan's operation on all `sizes`. A collective call.
pub fn measure(
    plan: &Plan,
    transport: TransportName,
    sizes: &[u64],
    group: &Group,
    listener: &mut dyn Listener,
) -> Result<()> {
    let operation = plan.operation;
    let world = group.world_size();
    let shares_memory = matches!(transport, TransportName::Thread | TransportName::Shm);
    let memory = if shares_memory { bandwidth_gb_s(group)? } else { None };
    if let Some(gb_s) = memory {
        listener.memory_bandwidth(gb_s)?;
    }
    let most = sizes.iter().map(|&bytes| operation.elements(bytes, world)).max().unwrap_or(0);
    let allocator = Allocator::new();
    let buffer = || -> Result<Tensor> {
        let len = most * operation.dtype.size_bytes();
        let buffer = match plan.private {
            true => allocator.host(len, Category::Communication)?,
            false => group.allocate(&allocator, len, Category::Communication)?,
        };
        Ok(Tensor::new(buffer, 0, operation.dtype, [most])?)
    };
    let buffers = (buffer()?, buffer()?);
    for &size in sizes {
        let elements = operation.elements(size, world);
        let bytes = (elements * operation.dtype.size_bytes()) as u64;
        listener.begins(bytes)?;
        let timing = |in_place| {
            let exchange =
                Exchange::new(operation, group, (&buffers.0, &buffers.1), elements, in_place)?;
            time(plan, &exchange, group, bytes)
        };
        let out_of_place = timing(false)?;
        let in_place = if operation.has_in_place() { Some(timing(true)?) } else { None };
        // Staged data are read and written more often, and mostly in the caches.
        let memory_fraction = memory.filter(|_| !plan.private && bytes > 0).map(|gb_s| {
            let moved = bytes_touched(operation.kind, world, bytes) as f64;
            moved / out_of_place.median_us / 1e3 / gb_s
        });
        listener.row(Row {
            transport: transport.name().to_owned(),
            algorithm: algorithm(plan, transport).to_owned(),
            nproc: world,
            op: operation.kind.name().to_owned(),
            bytes,
            count: (if operation.has_shares() { elements / world } else { elements }) as u64,
            dtype: operation.dtype.name().to_owned(),
            redop: operation.is_reduction().then(|| operation.redop.nccl_name().to_owned()),
            root: operation.has_root().then_some(operation.root),
            out_of_place: Some(out_of_place),
            in_place,
            predicted_us: predicted_us(&operation, group, bytes),
            memory_fraction,
        })?;
    }
    Ok(())
}

/// Times one call, and checks the result of one more.
fn time(plan: &Plan, exchange: &Exchange<'_>, group: &Group, bytes: u64) -> Result<Timing> {
    exchange.fill()?;
    for _ in 0..plan.warmup_iters {
        group.barrier()?;
        exchange.call()?;
    }
    let mut own = Vec::with_capacity(plan.iters);
    for _ in 0..plan.iters {
        group.barrier()?;
        let begin = Instant::now();
        exchange.call()?;
        own.push(begin.elapsed().as_nanos() as i64);
    }
    let mut all = vec![0; plan.iters * group.world_size()];
    group.all_gather_slice(&own, &mut all)?;
    let longest = |at: usize| all.iter().skip(at).step_by(plan.iters).copied().max().unwrap_or(0);
    let times: Vec<u64> = (0..plan.iters).map(|at| longest(at) as u64).collect();
    let us = |part: f64| quantile(&times, part) as f64 / 1e3;
    let factor = bus_factor(plan.operation.kind.name(), group.world_size()).unwrap_or(0.0);
    let wrong = if plan.check { Some(count_wrong(exchange, group)?) } else { None };
    Ok(Timing::new(bytes, factor, (us(0.5), us(0.99), us(1.0)), wrong))
}

/// Wrong elements of one more call, on all ranks.
fn count_wrong(exchange: &Exchange<'_>, group: &Group) -> Result<u64> {
    exchange.fill()?;
    // No rank may write into another's memory while that one still fills it.
    group.barrier()?;
    exchange.call()?;
    let mut wrong = [exchange.count_wrong()? as i64];
    group.all_reduce_slice(&mut wrong, ReduceOp::Sum)?;
    Ok(wrong[0] as u64)
}

/// How the transport carries the operation out, in a word.
pub(super) fn algorithm(plan: &Plan, transport: TransportName) -> &'static str {
    let (operation, direct) = (&plan.operation, Algorithm::Direct.name());
    match transport {
        TransportName::Thread | TransportName::Shm if plan.private => "private",
        TransportName::Thread | TransportName::Shm => direct,
        // Other operations have no rings.
        TransportName::Tcp if operation.kind == OpKind::AllReduce => plan.comm.algorithm.name(),
        TransportName::Tcp => direct,
        TransportName::Hybrid if operation.is_reduction() => "prefix",
        TransportName::Hybrid => direct,
        TransportName::Mpi => "library",
    }
}

/// What the emulated link should need.
fn predicted_us(operation: &Operation, group: &Group, bytes: u64) -> Option<f64> {
    let (link, world, kind) = (group.link()?, group.world_size(), operation.kind);
    let algorithm = group.options().algorithm.recommended(kind, world, bytes, &link);
    Some(link.time(kind, algorithm, world, bytes).as_secs_f64() * 1e6)
}
