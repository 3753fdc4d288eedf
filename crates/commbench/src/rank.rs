//! The work of every rank for one configuration: allocate, warm up, take times, check.
//!
//! Before each timed call the ranks meet at a barrier. Every rank then takes the wall-clock time of its
//! own call. The time of the iteration is the longest of these times.

use std::time::Instant;

use paceline_collectives::{Group, ReduceOp};
use paceline_failure::Result;
use paceline_host::resources::cpu_times::CpuTimes;
use paceline_launch::TransportName;
use paceline_launch::device::Device;
use paceline_table::stats::nearest_rank;

use super::configuration::Configuration;
use super::exchange::{Exchange, buffers};
use super::memory::{bandwidth_gb_s, bytes_touched};
use super::plan::Plan;
use super::reporter::{Found, Reporter};
use super::result::{Row, Timing, bus_factor};
use crate::args::MeasuringArgs;

/// Measures the plan's operation on all `sizes`. All ranks call this together.
pub(super) fn measure(
    configuration: Configuration<'_>,
    sizes: &[u64],
    group: &Group,
    reporter: &mut Reporter,
) -> Result<()> {
    let Configuration { plan, transport, nproc: world } = configuration;
    let operation = plan.operation;
    let begin = CpuTimes::now();
    // Data that are copied to a device and back are read and written more often.
    let shares_memory = matches!(transport, TransportName::Thread | TransportName::Shm)
        && plan.ranks.device == Device::Cpu;
    let memory = if shares_memory { bandwidth_gb_s(group)? } else { None };
    if let Some(gb_s) = memory {
        reporter.report(Found::MemoryBandwidth(gb_s))?;
    }
    let most = sizes.iter().map(|&bytes| operation.elements(bytes, world)).max().unwrap_or(0);
    let nccl = (transport == TransportName::Nccl).then_some(plan.comm.nccl_order);
    let buffers = buffers(operation, group, most, (plan.ranks.device, nccl), plan.ranks.private)?;
    for &size in sizes {
        let elements = operation.elements(size, world);
        let bytes = operation.bytes(size, world);
        reporter.begins(bytes);
        let timing = |in_place| {
            time(
                plan,
                &Exchange::new(operation, group, &buffers, elements, in_place)?,
                group,
                bytes,
            )
        };
        let out_of_place = timing(false)?;
        let in_place = if operation.has_in_place() { Some(timing(true)?) } else { None };
        // No figure for private buffers: their data are staged, so they are read and written more often,
        // mostly in the caches.
        let memory_fraction = memory.filter(|_| !plan.ranks.private && bytes > 0).map(|gb_s| {
            let moved = bytes_touched(operation.kind, world, bytes) as f64;
            moved / out_of_place.median_us / 1e3 / gb_s
        });
        reporter.report(Found::Row(Box::new(Row {
            transport: transport.name().to_owned(),
            algorithm: configuration.algorithm().to_owned(),
            nproc: world,
            op: operation.kind.name().to_owned(),
            bytes,
            count: (if operation.has_shares() { elements / world } else { elements }) as u64,
            dtype: operation.dtype.name().to_owned(),
            redop: operation.kind.reduces().then(|| operation.redop.nccl_name().to_owned()),
            root: operation.has_root().then_some(operation.root),
            out_of_place,
            in_place,
            predicted_us: predicted_us(plan, group, bytes),
            memory_fraction,
        })))?;
    }
    let mut most = [CpuTimes::waited_pct(begin, world).unwrap_or(0.0)];
    group.all_reduce_slice(&mut most, ReduceOp::Max)?;
    reporter.report(Found::CpuWait(most[0]))
}

/// Times `--agg-iters` calls `--iters` times after the warm-up, and checks the result of one more call.
fn time(plan: &Plan, exchange: &Exchange<'_>, group: &Group, bytes: u64) -> Result<Timing> {
    exchange.fill()?;
    for _ in 0..plan.measuring.warmup_iters {
        group.barrier()?;
        exchange.call()?;
    }
    let MeasuringArgs { iters, agg_iters, .. } = plan.measuring;
    let mut own = Vec::with_capacity(iters);
    for _ in 0..iters {
        group.barrier()?;
        let begin = Instant::now();
        for _ in 0..agg_iters {
            exchange.call()?;
        }
        own.push(begin.elapsed().as_nanos() as i64);
    }
    let mut all = vec![0; iters * group.world_size()];
    group.all_gather_slice(&own, &mut all)?;
    let longest = |at: usize| all.iter().skip(at).step_by(iters).copied().max().unwrap_or(0);
    let times: Vec<u64> = (0..iters).map(|at| longest(at) as u64).collect();
    let in_us = |ns: u64| ns as f64 / 1e3 / agg_iters as f64;
    let us = |part: f64| in_us(nearest_rank(&times, part).unwrap_or(0));
    let factor = bus_factor(plan.operation.kind.name(), group.world_size()).unwrap_or(0.0);
    let wrong = if plan.measuring.check == 1 { Some(exchange.check()?) } else { None };
    let timing = Timing::new(bytes, factor, (us(0.5), us(0.99), us(1.0)), wrong);
    let is_kept = plan.measuring.per_iter_timing == 1;
    Ok(Timing { each_us: is_kept.then(|| times.into_iter().map(in_us).collect()), ..timing })
}

/// The time on the emulated link by the cost model.
fn predicted_us(plan: &Plan, group: &Group, bytes: u64) -> Option<f64> {
    let (link, world, kind) = (group.link()?, group.world_size(), plan.operation.kind);
    let algorithm = group.options().algorithm.recommended(kind, world, bytes, &link);
    Some(link.time(kind, algorithm, world, bytes).as_secs_f64() * 1e6)
}
