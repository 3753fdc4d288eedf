//! Interleaved schedules: several stages on a rank, a few micro-batches at a time through each of them (Narayanan and others,
//! arXiv 2104.04473, 2021; with backward passes in halves, Qi and others, arXiv 2401.10241, 2023).

use crate::{Costs, Entry, List, Placement, PlanError, Schedule, Shape};

/// 1F1B over several stages on a rank: less idle by their number, and more messages.
#[derive(Clone, Copy, Debug)]
pub struct Interleaved1F1B {
    /// Stages of a rank.
    pub chunks: usize,
}

/// The same with backward passes in halves: the weight halves fill the time in which a rank would wait.
#[derive(Clone, Copy, Debug)]
pub struct InterleavedZeroBubble {
    /// Stages of a rank.
    pub chunks: usize,
}

/// The stages of a rank in the order in which micro-batches take them: a round of about as many micro-batches
/// as there are ranks passes through the first stage, then through the next one.
struct Rounds {
    chunks: usize,
    micro_batches_per_round: usize,
}

impl Rounds {
    /// Errors unless all rounds are equal.
    fn of(shape: &Shape) -> Result<Self, PlanError> {
        let (ranks, micro_batches) = (shape.placement.ranks(), shape.micro_batches);
        let rounds = (micro_batches / ranks).max(1);
        if !micro_batches.is_multiple_of(rounds) {
            let reason = format!(
                "{micro_batches} micro-batches on {ranks} ranks make {rounds} rounds, which are not equal; pass {} or {} \
                 micro-batches",
                micro_batches / rounds * rounds,
                micro_batches.next_multiple_of(rounds)
            );
            return Err(PlanError::Setting(reason));
        }
        let micro_batches_per_round = micro_batches / rounds;
        Ok(Self { chunks: shape.placement.chunks(), micro_batches_per_round })
    }

    /// The chunk of the `at`-th forward pass of a rank.
    fn forward(&self, at: usize) -> usize {
        at / self.micro_batches_per_round % self.chunks
    }

    /// The chunk of its `at`-th backward pass.
    fn backward(&self, at: usize) -> usize {
        self.chunks - 1 - self.forward(at)
    }

    /// The forward passes of a rank before its first turn, if the next rank lags by `per_rank` of them.
    fn warm_up(&self, shape: &Shape, rank: usize, per_rank: usize) -> usize {
        let of_last = (self.chunks - 1) * self.micro_batches_per_round;
        let all = self.chunks * shape.micro_batches;
        (of_last + per_rank * (shape.placement.ranks() - 1 - rank)).min(all)
    }
}

impl Schedule for Interleaved1F1B {
    fn name(&self) -> &'static str {
        "interleaved_1f1b"
    }

    fn about(&self) -> &'static str {
        "1f1b over several stages on a rank (Megatron-LM, 2021)"
    }

    fn placement(&self, ranks: usize) -> Placement {
        Placement::looped(ranks, self.chunks)
    }

    fn check(&self, shape: &Shape) -> Result<(), PlanError> {
        Rounds::of(shape).map(drop)
    }

    fn list(&self, shape: &Shape, rank: usize, _: &Costs) -> Vec<Entry> {
        let Ok(rounds) = Rounds::of(shape) else { return Vec::new() };
        let mut list = List::new(shape, rank);
        let warm_up = rounds.warm_up(shape, rank, 2);
        (0..warm_up).for_each(|at| list.forward(rounds.forward(at)));
        for at in 0..self.chunks * shape.micro_batches {
            list.forward(rounds.forward(warm_up + at));
            list.backward(rounds.backward(at));
        }
        list.finish()
    }
}

impl Schedule for InterleavedZeroBubble {
    fn name(&self) -> &'static str {
        "interleaved_zb"
    }

    fn about(&self) -> &'static str {
        "interleaved_1f1b with backward passes in halves (zero bubble, 2023)"
    }

    fn placement(&self, ranks: usize) -> Placement {
        Placement::looped(ranks, self.chunks)
    }

    fn check(&self, shape: &Shape) -> Result<(), PlanError> {
        Rounds::of(shape).map(drop)
    }

    fn list(&self, shape: &Shape, rank: usize, _: &Costs) -> Vec<Entry> {
        let Ok(rounds) = Rounds::of(shape) else { return Vec::new() };
        let mut list = List::new(shape, rank);
        let warm_up = rounds.warm_up(shape, rank, 1);
        (0..warm_up).for_each(|at| list.forward(rounds.forward(at)));
        for at in 0..self.chunks * shape.micro_batches {
            list.forward(rounds.forward(warm_up + at));
            list.backward_input(rounds.backward(at));
            if at >= rank {
                list.backward_weight();
            }
        }
        list.finish()
    }
}
