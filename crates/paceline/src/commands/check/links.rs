//! Measures latency and bandwidth between every two ranks, one pair at a time while the others wait.

use std::time::Instant;

use paceline_collectives::Group;
use paceline_failure::Result;
use paceline_host::text::line_width;
use paceline_memory::{Allocator, Category, DType, Tensor};
use paceline_table::fitted::fitted;
use paceline_table::stats::nearest_rank;
use serde::{Deserialize, Serialize};

use super::{Answers, Status};

/// Number of round trips of 8 bytes that are timed for the latency.
const PINGS: usize = 50;
/// Bytes of the message that is timed for the bandwidth, and how many times it is sent.
const LARGE_BYTES: usize = 16_000_000;
const LARGE_ROUNDS: usize = 3;
/// Warm-up messages of each size. They are not counted, because they touch memory for the first time.
const UNCOUNTED: usize = 1;

/// The measurements of rank `from` when it sends to rank `to`.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Direction {
    from: usize,
    to: usize,
    latency_us: f64,
    gb_s: f64,
}

/// Measures every pair in both directions. All ranks call this together.
pub(super) fn links(group: &Group, answers: &mut Answers) -> Result<()> {
    let (rank, world) = (group.rank(), group.world_size());
    if world == 1 {
        answers.add(Status::Ok, "links", "one rank, no links");
        return Ok(());
    }
    let allocator = Allocator::new();
    let large = group.allocate(&allocator, LARGE_BYTES, Category::Communication)?;
    let large = Tensor::new(large, 0, DType::U8, [LARGE_BYTES])?;
    let mut own = Vec::new();
    for from in 0..world {
        for to in (0..world).filter(|&to| to != from) {
            group.barrier()?;
            if rank == from {
                own.push(measure(group, &large, from, to)?);
            } else if rank == to {
                answer(group, &large, from)?;
            }
        }
    }
    let Some(ways) = group.gather_object(&own, 0)? else { return Ok(()) };
    let ways: Vec<Direction> = ways.concat();
    let speeds = || ways.iter().map(|way| way.gb_s);
    let slowest = speeds().fold(f64::INFINITY, f64::min);
    let fastest = speeds().fold(0.0, f64::max);
    let longest = ways.iter().map(|way| way.latency_us).fold(0.0, f64::max);
    let text = format!(
        "latency {longest:.1} us at most, {slowest:.2} to {fastest:.2} GB/s between all pairs"
    );
    // Ranks that take turns on a core differ by up to this much by chance.
    let status = if slowest < fastest / 4.0 { Status::Warn } else { Status::Ok };
    answers.add(status, "links", &text);
    let width = line_width().map(|width| width.saturating_sub(Answers::INDENT));
    answers.explain("latency of 8 bytes in us (half of a round trip), from row to column:");
    answers.explain(&matrix(&ways, world, width, |way| format!("{:.1}", way.latency_us)));
    answers.explain("GB/s of 16 MB, from row to column:");
    answers.explain(&matrix(&ways, world, width, |way| format!("{:.2}", way.gb_s)));
    Ok(())
}

fn measure(group: &Group, large: &Tensor, from: usize, to: usize) -> Result<Direction> {
    let mut trips = Vec::with_capacity(PINGS);
    let small = large.slice(0..8)?;
    for _ in 0..UNCOUNTED + PINGS {
        let begin = Instant::now();
        group.send(&small, to)?;
        group.recv(&small, to)?;
        trips.push(begin.elapsed().as_nanos() as u64);
    }
    let mut times = Vec::with_capacity(LARGE_ROUNDS);
    for _ in 0..UNCOUNTED + LARGE_ROUNDS {
        let begin = Instant::now();
        group.send(large, to)?;
        times.push(begin.elapsed().as_nanos() as u64);
    }
    let latency_us = median_ns(&trips) / 2e3;
    let gb_s = LARGE_BYTES as f64 / median_ns(&times);
    Ok(Direction { from, to, latency_us, gb_s })
}

fn median_ns(times: &[u64]) -> f64 {
    nearest_rank(&times[UNCOUNTED..], 0.5).unwrap_or(0) as f64
}

fn answer(group: &Group, large: &Tensor, from: usize) -> Result<()> {
    let small = large.slice(0..8)?;
    for _ in 0..UNCOUNTED + PINGS {
        group.recv(&small, from)?;
        group.send(&small, from)?;
    }
    for _ in 0..UNCOUNTED + LARGE_ROUNDS {
        group.recv(large, from)?;
    }
    Ok(())
}

/// A table with a row and a column per rank, whose lines have at most `width` characters.
fn matrix(
    ways: &[Direction],
    world: usize,
    width: Option<usize>,
    cell: impl Fn(&Direction) -> String,
) -> String {
    let ranks = (0..world).map(|rank| format!("rank {rank}"));
    let head: Vec<String> = std::iter::once(String::new()).chain(ranks).collect();
    let row = |from: usize| {
        let cells = (0..world).map(|to| {
            let way = ways.iter().find(|way| (way.from, way.to) == (from, to));
            way.map_or("-".to_owned(), &cell)
        });
        std::iter::once(format!("rank {from}")).chain(cells).collect::<Vec<_>>()
    };
    let rows: Vec<Vec<String>> = std::iter::once(head).chain((0..world).map(row)).collect();
    fitted(&[""; 0], &rows, |_| false, width)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_stand_in_a_matrix() {
        let way = |from, to, latency_us| Direction { from, to, latency_us, gb_s: 1.0 };
        let ways = [way(0, 1, 1.25), way(1, 0, 10.5)];
        insta::assert_snapshot!(matrix(&ways, 2, None, |way| format!("{:.1}", way.latency_us)), @r"
                rank 0  rank 1
        rank 0       -     1.2
        rank 1    10.5       -
        ");
    }
}
