//! Looped breadth-first: GPipe with several stages on a rank (Lamy-Poirier, arXiv 2211.05953, 2022).

use crate::{Costs, Entry, Kind, List, Placement, Schedule, Shape};

/// All micro-batches pass through a stage before the rank turns to its next one. So the parameters of a stage are needed
/// twice in a step, which suits ranks that have to gather them. The backward passes run from the last micro-batch to the first.
#[derive(Clone, Copy, Debug)]
pub struct LoopedBreadthFirst {
    /// Stages of a rank.
    pub chunks: usize,
}

impl Schedule for LoopedBreadthFirst {
    fn name(&self) -> &'static str {
        "looped_bfs"
    }

    fn about(&self) -> &'static str {
        "GPipe with several stages on a rank, stage by stage (breadth-first, 2022)"
    }

    fn placement(&self, ranks: usize) -> Placement {
        Placement::looped(ranks, self.chunks)
    }

    fn list(&self, shape: &Shape, rank: usize, _: &Costs) -> Vec<Entry> {
        let mut list = List::new(shape, rank);
        for chunk in 0..self.chunks {
            (0..shape.micro_batches).for_each(|_| list.forward(chunk));
        }
        for chunk in (0..self.chunks).rev() {
            for micro_batch in (0..shape.micro_batches).rev() {
                list.push(chunk, Kind::Backward, micro_batch);
            }
        }
        list.finish()
    }
}
