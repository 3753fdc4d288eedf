//! Measures the bandwidth of the machine's memory when all ranks use it at once, and computes how much an
//! operation has to read and write at least.

use std::time::Instant;

use paceline_collectives::{Group, OpKind, ReduceOp};
use paceline_failure::Result;
use paceline_host::resources;

/// Number of copies that are timed. The fastest one counts.
const ROUNDS: usize = 4;

/// The smallest size of a rank's buffer, which is also used if the size of the cache is not known, and
/// the largest size.
const BUFFER_BYTES: (usize, usize) = (32 << 20, 256 << 20);

/// Measures the GB/s that all ranks together read and write while each of them copies one large array of
/// its own to another. Returns `None` if the memory has no room for these arrays. All ranks call this
/// together.
///
/// Each array is as large as the last-level cache, so that all of them together are far larger. Data
/// that a processor reads only because it is about to overwrite them are not counted.
pub fn bandwidth_gb_s(group: &Group) -> Result<Option<f64>> {
    let cache = resources::last_level_cache_bytes().unwrap_or(BUFFER_BYTES.0);
    let len = cache.clamp(BUFFER_BYTES.0, BUFFER_BYTES.1);
    // Rank 0 decides for all ranks, because the available memory changes from one look to the next.
    let needed = (2 * len * group.world_size()) as u64;
    let fits = resources::available_bytes().is_none_or(|available| needed < available / 2);
    if !group.broadcast_object(Some(&fits), 0)? {
        return Ok(None);
    }
    let (source, mut target) = (vec![1_u8; len], vec![2_u8; len]);
    let mut best = f64::INFINITY;
    for _ in 0..ROUNDS {
        group.barrier()?;
        let begin = Instant::now();
        target.copy_from_slice(&source);
        let mut seconds = [begin.elapsed().as_secs_f64()];
        std::hint::black_box(&mut target);
        group.all_reduce_slice(&mut seconds, ReduceOp::Max)?;
        best = best.min(seconds[0]);
    }
    Ok(Some(needed as f64 / best / 1e9))
}

/// Bytes that `world` ranks with shared memory read and write together, out of place, for a message of
/// `bytes` bytes. The source files of the transport explain the number for each operation.
pub fn bytes_touched(kind: OpKind, world: usize, bytes: u64) -> u64 {
    let world = world as u64;
    match kind {
        OpKind::AllReduce
        | OpKind::Broadcast
        | OpKind::AllGather
        | OpKind::AllToAll
        | OpKind::Send
        | OpKind::Recv
        | OpKind::SendRecv => 2 * world * bytes,
        OpKind::ReduceScatter | OpKind::Reduce => (world + 1) * bytes,
        OpKind::Gather | OpKind::Scatter => 2 * bytes,
        OpKind::Barrier => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use paceline_collectives::GroupOptions;

    #[test]
    fn memory_delivers_something_that_all_ranks_agree_on() {
        let found = paceline_launch::threads::run(2, GroupOptions::for_local_ranks(2), |group| {
            let found = bandwidth_gb_s(&group)?;
            Ok(group.all_gather_object(&found)?)
        });
        let found = found.unwrap();
        assert_eq!(found[0], found[1]);
        assert!(found[0].is_none_or(|bandwidth| bandwidth > 0.01), "{found:?}");
    }
}
