//! Measures how fast the transport is. The result decides which algorithm an all-reduce uses, and whether a link can be
//! emulated.

use std::time::Duration;

use paceline_memory::{Allocator, Category, DType, Tensor};

use super::Group;
use crate::engine::Engine;
use crate::tcp::NEVER;
use crate::{ReduceOp, Result};

impl Group {
    /// Measures both algorithms at several sizes. From the smallest size at which the ring is faster, all-reduces use the
    /// ring.
    pub(super) fn choose_algorithm(&self) -> Result<()> {
        let Engine::Tcp(tcp) = &self.membership.core.engine else { return Ok(()) };
        let mut from = NEVER;
        for bytes in [16_000_000, 1_000_000, 64_000] {
            tcp.set_ring_from(NEVER);
            let direct = self.measure_all_reduce(bytes)?;
            tcp.set_ring_from(0);
            let ring = self.measure_all_reduce(bytes)?;
            if ring >= direct {
                break;
            }
            from = bytes as u64;
        }
        tcp.set_ring_from(from);
        Ok(())
    }

    /// Each rank takes its best time of a few all-reduces in place. Returns the longest of these times, the same on every
    /// rank.
    pub(super) fn measure_all_reduce(&self, bytes: usize) -> Result<Duration> {
        let buffer = self.allocate(&Allocator::new(), bytes, Category::Communication)?;
        let data = Tensor::new(buffer, 0, DType::F32, [bytes / 4])?;
        let mut best = f64::INFINITY;
        // Scheduling delays disturb small messages most, so these get more repetitions.
        let rounds = if bytes < 100_000 { 100 } else { 6 };
        for _ in 0..rounds {
            let times = self.all_reduce(&data, ReduceOp::Sum)?;
            best = best.min(times.move_ns() as f64);
        }
        let mut slowest = [best];
        self.all_reduce_slice(&mut slowest, ReduceOp::Max)?;
        Ok(Duration::from_nanos(slowest[0] as u64))
    }
}
