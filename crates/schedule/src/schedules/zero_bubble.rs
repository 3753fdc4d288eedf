//! ZB-H1 and ZB-H2: 1F1B with backward passes in halves (Qi and others, arXiv 2401.10241, 2023).
//!
//! The next rank back waits for the input half only. The weight halves are put off, into time in which the rank would wait.

use crate::{Costs, Entry, List, Schedule, Shape};

/// Less idle than 1F1B, with no more micro-batches in flight than its first rank.
#[derive(Clone, Copy, Debug)]
pub struct ZbH1;

/// No idle time between a rank's first and last action if all halves take as long, with almost twice the micro-batches in
/// flight. What comes after the step, such as the norm of all gradients, must not make the ranks wait for each other.
#[derive(Clone, Copy, Debug)]
pub struct ZbH2;

impl Schedule for ZbH1 {
    fn name(&self) -> &'static str {
        "zb_h1"
    }

    fn about(&self) -> &'static str {
        "1f1b with backward passes in halves, in its memory (zero bubble, 2023)"
    }

    fn list(&self, shape: &Shape, rank: usize, _: &Costs) -> Vec<Entry> {
        in_halves(shape, rank, 1)
    }
}

impl Schedule for ZbH2 {
    fn name(&self) -> &'static str {
        "zb_h2"
    }

    fn about(&self) -> &'static str {
        "zb_h1 with more micro-batches in flight and less idle time (zero bubble, 2023)"
    }

    fn list(&self, shape: &Shape, rank: usize, _: &Costs) -> Vec<Entry> {
        in_halves(shape, rank, 2)
    }
}

/// A rank begins `factor` forward passes before the next one. The last rank puts off as many weight halves as the first one
/// has forward passes in advance.
fn in_halves(shape: &Shape, rank: usize, factor: usize) -> Vec<Entry> {
    let mut list = List::new(shape, rank);
    let warm_up = factor * (shape.placement.ranks() - 1 - rank);
    (0..warm_up).for_each(|_| list.forward(0));
    for at in 0..shape.micro_batches {
        list.forward(0);
        list.backward_input(0);
        if at >= factor * rank {
            list.backward_weight();
        }
    }
    list.finish()
}
