//! What an emulated link costs the computation that runs beside it.
//!
//!     paceline launch -n 2 -- target/release/examples/beside [--pairs 20]
//!
//! Each rank repeats the same block of computation, a fixed number of multiply-adds, in two ways in turn:
//! alone, and while an emulated link of high latency holds a 4 KB all-reduce for 150 ms. Moving so short a
//! message costs almost nothing, so the difference is the cost of the emulation. Rank 0 prints one line of
//! JSON with the medians of the slowest rank, and with `cost`: the ratio of the two times minus 1.

use std::hint::black_box;
use std::time::{Duration, Instant};

use paceline_collectives::{CollectiveError, Group, GroupOptions, Link, ReduceOp};
use paceline_memory::{Allocator, Category, DType, Tensor};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// An all-reduce has three steps, the headers included, so it takes three times this latency.
const LINK: Link = Link { bytes_per_s: 12.5e9, latency_s: 0.05 };
/// How long a block of computation should take: less than the operation that it runs beside.
const BLOCK: Duration = Duration::from_millis(80);
const ELEMS: usize = 1024;
const LANES: usize = 32;

fn main() -> Result<(), CollectiveError> {
    let pairs = match std::env::args().skip(1).collect::<Vec<_>>().as_slice() {
        [] => Some(20),
        [flag, value] if flag == "--pairs" => value.parse().ok().filter(|&pairs| pairs > 0),
        _ => None,
    };
    let Some(pairs) = pairs else {
        eprintln!("error: the only argument is --pairs NUMBER, of at least 1");
        std::process::exit(2);
    };
    let options = GroupOptions { link: Some(LINK), ..GroupOptions::for_local_ranks(1) };
    let group = Group::from_env(Some(options))?;
    if group.world_size() < 2 {
        eprintln!("error: one rank has no link; start at least 2: paceline launch -n 2 -- ...");
        std::process::exit(2);
    }
    let is_pinned = pin_to_core(group.rank(), group.world_size());
    let buffer = group.allocate(&Allocator::new(), 4 * ELEMS, Category::Communication)?;
    let data = Tensor::new(buffer, 0, DType::F32, [ELEMS])?;

    let mut rounds = [calibrate() as i64];
    group.broadcast_slice(&mut rounds, 0)?;
    let rounds = rounds[0] as u64;
    let (mut alone, mut beside) = (Vec::new(), Vec::new());
    let mut num_covered = 0;
    for _ in 0..pairs {
        group.barrier()?;
        alone.push(compute(rounds).as_secs_f64());
        group.barrier()?;
        let work = group.all_reduce_async(&data, ReduceOp::Sum)?;
        beside.push(compute(rounds).as_secs_f64());
        num_covered += i32::from(!work.is_finished());
        work.wait()?;
    }
    let (alone, beside) = (median(alone), median(beside));
    let mut slowest = [alone, beside, beside / alone - 1.0];
    group.all_reduce_slice(&mut slowest, ReduceOp::Max)?;
    let mut fewest = [num_covered];
    group.all_reduce_slice(&mut fewest, ReduceOp::Min)?;
    if group.rank() == 0 {
        let line = serde_json::json!({
            "transport": group.transport().name(),
            "ranks": group.world_size(),
            "pinned": is_pinned,
            "pairs": pairs,
            // Blocks of computation during which the operation was in flight from beginning to end.
            "covered": fewest[0],
            "multiply_adds": rounds * LANES as u64,
            "alone_ms": slowest[0] * 1e3,
            "beside_ms": slowest[1] * 1e3,
            "cost": slowest[2],
        });
        println!("{line}");
    }
    Ok(())
}

/// The number of rounds that take about as long as a block, from the fastest of a few tries.
fn calibrate() -> u64 {
    const TRY: u64 = 1_000_000;
    let fastest = (0..5).map(|_| compute(TRY)).min().unwrap_or(BLOCK);
    (TRY as f64 * BLOCK.as_secs_f64() / fastest.as_secs_f64()) as u64
}

/// Multiplies and adds in registers, so that only the time on the core counts.
fn compute(rounds: u64) -> Duration {
    let begin = Instant::now();
    let mut lanes = black_box([1.0f32; LANES]);
    for _ in 0..rounds {
        for lane in &mut lanes {
            *lane = *lane * 0.999 + 0.001;
        }
    }
    black_box(lanes);
    begin.elapsed()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    let half = values.len() / 2;
    if values.len().is_multiple_of(2) {
        (values[half - 1] + values[half]) / 2.0
    } else {
        values[half]
    }
}

/// Gives every rank its own core, if there are enough cores. The communication thread already exists, so it
/// is not pinned, as in a training run.
fn pin_to_core(rank: usize, world: usize) -> bool {
    let Ok(allowed) = sched_getaffinity(None) else { return false };
    let cores: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&core| allowed.is_set(core)).collect();
    if cores.len() < world {
        return false;
    }
    let mut own = CpuSet::new();
    own.set(cores[rank]);
    sched_setaffinity(None, &own).is_ok()
}
