//! ZBV: two stages on each rank, from the first rank to the last and back (Qi and others, arXiv 2401.10241, section 6, 2023).

use crate::{Costs, Entry, List, Placement, Schedule, Shape};

/// No idle time between a rank's first and last action if all halves take as long, in the memory of 1F1B's first rank.
#[derive(Clone, Copy, Debug)]
pub struct Zbv;

impl Schedule for Zbv {
    fn name(&self) -> &'static str {
        "zbv"
    }

    fn about(&self) -> &'static str {
        "two stages on a rank, to the last rank and back, in halves (zero bubble, 2023)"
    }

    fn placement(&self, ranks: usize) -> Placement {
        Placement::v(ranks)
    }

    fn list(&self, shape: &Shape, rank: usize, _: &Costs) -> Vec<Entry> {
        let ranks = shape.placement.ranks();
        let mut list = List::new(shape, rank);
        let both_halves = |list: &mut List, chunk| {
            list.backward_input(chunk);
            list.backward_weight_of(chunk);
        };
        // Warm-up: as many forward passes as a micro-batch needs to the last rank and back.
        (0..2 * (ranks - rank) - 1).for_each(|_| list.forward(0));
        for _ in 0..rank {
            list.forward(1);
            list.forward(0);
        }
        for _ in rank..ranks {
            list.forward(1);
            both_halves(&mut list, 1);
        }
        // Steady: one pass each way through both stages.
        for _ in ranks..shape.micro_batches.max(2 * ranks - 1) {
            list.forward(0);
            both_halves(&mut list, 0);
            list.forward(1);
            both_halves(&mut list, 1);
        }
        // Cool-down: weight halves fill the time in which no gradient arrives.
        for _ in 0..rank {
            list.backward_input(0);
            list.backward_input(1);
        }
        for _ in rank..ranks {
            both_halves(&mut list, 0);
        }
        list.finish()
    }
}
