//! DualPipeV: ZBV's placement, with pairs of passes that a device may run side by side (DeepSeek-V3, arXiv 2412.19437, 2024; the
//! V of it in the repository DualPipe, 2025).

use crate::{Costs, Entry, List, Placement, PlanError, Schedule, Shape};

/// A forward pass hides the messages of a backward pass, and the other way round, where a device can run both.
#[derive(Clone, Copy, Debug)]
pub struct DualPipeV;

impl Schedule for DualPipeV {
    fn name(&self) -> &'static str {
        "dualpipev"
    }

    fn about(&self) -> &'static str {
        "zbv's stages, with forward and backward passes in pairs (DualPipe, 2024)"
    }

    fn placement(&self, ranks: usize) -> Placement {
        Placement::v(ranks)
    }

    fn check(&self, shape: &Shape) -> Result<(), PlanError> {
        let (stages, got) = (shape.placement.stages(), shape.micro_batches);
        if got >= stages {
            return Ok(());
        }
        let reason =
            format!("{stages} stages need as many micro-batches; {got} are too few, pass {stages}");
        Err(PlanError::Setting(reason))
    }

    fn list(&self, shape: &Shape, rank: usize, _: &Costs) -> Vec<Entry> {
        let (ranks, after) = (shape.placement.ranks(), shape.placement.ranks() - 1 - rank);
        let mut list = List::new(shape, rank);
        (0..2 * after).for_each(|_| list.forward(0));
        for _ in 0..=rank {
            list.forward(0);
            list.forward(1);
        }
        for _ in 0..after {
            list.backward_input(1);
            list.backward_weight();
            list.forward(1);
        }
        // The main part.
        for at in 0..shape.micro_batches + rank + 1 - 2 * ranks {
            if at == 0 && after == 0 {
                // Side by side, both would keep the rank before waiting.
                list.forward(0);
                list.backward(1);
            } else {
                list.overlapped(0, 1);
            }
            list.overlapped(1, 0);
        }
        for _ in 0..after {
            list.backward(1);
            list.overlapped(1, 0);
        }
        // From the middle of this part on, backward passes are in halves.
        for at in 0..=rank {
            for (chunk, turn) in [(1, 2 * at), (0, 2 * at + 1)] {
                if turn <= rank { list.backward(chunk) } else { list.backward_input(chunk) }
            }
        }
        for _ in 0..after {
            list.backward_weight();
            list.backward_input(0);
        }
        list.finish()
    }
}
