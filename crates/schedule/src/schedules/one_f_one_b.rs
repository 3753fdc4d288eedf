//! 1F1B: a backward pass as soon as there can be one (Narayanan and others, arXiv 2104.04473, 2021).

use crate::{Costs, Entry, List, Schedule, Shape};

/// As idle as GPipe, with as many micro-batches in flight as there are ranks after it, this one included.
#[derive(Clone, Copy, Debug)]
pub struct OneFOneB;

impl Schedule for OneFOneB {
    fn name(&self) -> &'static str {
        "1f1b"
    }

    fn about(&self) -> &'static str {
        "one forward, one backward pass in turns (PipeDream-Flush, 2021)"
    }

    fn list(&self, shape: &Shape, rank: usize, _: &Costs) -> Vec<Entry> {
        let mut list = List::new(shape, rank);
        let warm_up = shape.placement.ranks() - 1 - rank;
        (0..warm_up).for_each(|_| list.forward(0));
        for _ in 0..shape.micro_batches {
            list.forward(0);
            list.backward(0);
        }
        list.finish()
    }
}
