//! GPipe: all forward passes, then all backward passes (Huang and others, arXiv 1811.06965, 2018).

use crate::{Costs, Entry, List, Schedule, Shape};

/// The simplest order. Every micro-batch is in flight at once.
#[derive(Clone, Copy, Debug)]
pub struct Gpipe;

impl Schedule for Gpipe {
    fn name(&self) -> &'static str {
        "gpipe"
    }

    fn about(&self) -> &'static str {
        "all forward passes, then all backward passes (GPipe, 2018)"
    }

    fn list(&self, shape: &Shape, rank: usize, _: &Costs) -> Vec<Entry> {
        let mut list = List::new(shape, rank);
        (0..shape.micro_batches).for_each(|_| list.forward(0));
        (0..shape.micro_batches).for_each(|_| list.backward(0));
        list.finish()
    }
}
