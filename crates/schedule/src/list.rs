//! How a schedule writes down what a rank does.
//!
//! A schedule says which chunk is next; the list knows which micro-batch of it, since each chunk takes them in order. Anything
//! beyond the last micro-batch is left out, so small steps are no special case.

use std::collections::VecDeque;

use crate::{Action, Kind, Shape};

/// One action, or two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// One action.
    One(Action),
    /// A forward and a backward pass which a device may run side by side, or else in this order.
    Overlapped(Action, Action),
}

impl Entry {
    /// Its actions, in order.
    pub fn actions(self) -> impl Iterator<Item = Action> {
        let (first, second) = match self {
            Entry::One(action) => (action, None),
            Entry::Overlapped(first, second) => (first, Some(second)),
        };
        std::iter::once(first).chain(second)
    }
}

/// The list of a rank while it is written.
#[derive(Debug)]
pub struct List<'a> {
    shape: &'a Shape,
    rank: usize,
    entries: Vec<Entry>,
    /// The next micro-batch of each chunk, forward and backward.
    next: Vec<[usize; 2]>,
    /// Weight halves that were put off, oldest first: chunk and micro-batch.
    put_off: VecDeque<(usize, usize)>,
}

const FORWARD: usize = 0;
const BACKWARD: usize = 1;

impl<'a> List<'a> {
    /// An empty one.
    pub fn new(shape: &'a Shape, rank: usize) -> Self {
        let next = vec![[0; 2]; shape.placement.chunks()];
        Self { shape, rank, entries: Vec::new(), next, put_off: VecDeque::new() }
    }

    /// The forward pass of the next micro-batch through a chunk.
    pub fn forward(&mut self, chunk: usize) {
        if let Some(micro_batch) = self.take(chunk, FORWARD) {
            self.push(chunk, Kind::Forward, micro_batch);
        }
    }

    /// Both halves of the backward pass of the next micro-batch.
    pub fn backward(&mut self, chunk: usize) {
        if let Some(micro_batch) = self.take(chunk, BACKWARD) {
            self.push(chunk, Kind::Backward, micro_batch);
        }
    }

    /// A forward pass of one chunk and a backward pass of another, which may run side by side.
    pub fn overlapped(&mut self, forward: usize, backward: usize) {
        match (self.take(forward, FORWARD), self.take(backward, BACKWARD)) {
            (Some(first), Some(second)) => {
                let action = |chunk, kind, micro_batch| {
                    let stage = self.shape.placement.stage(self.rank, chunk);
                    Action::new(stage, kind, micro_batch)
                };
                let first = action(forward, Kind::Forward, first);
                let second = action(backward, Kind::Backward, second);
                self.entries.push(Entry::Overlapped(first, second));
            }
            (Some(first), None) => self.push(forward, Kind::Forward, first),
            (None, Some(second)) => self.push(backward, Kind::Backward, second),
            (None, None) => {}
        }
    }

    /// The input half of the backward pass of the next micro-batch. The weight half is put off.
    pub fn backward_input(&mut self, chunk: usize) {
        if let Some(micro_batch) = self.take(chunk, BACKWARD) {
            self.push(chunk, Kind::BackwardInput, micro_batch);
            self.put_off.push_back((chunk, micro_batch));
        }
    }

    /// The oldest weight half that was put off, if there is one.
    pub fn backward_weight(&mut self) {
        if let Some((chunk, micro_batch)) = self.put_off.pop_front() {
            self.push(chunk, Kind::BackwardWeight, micro_batch);
        }
    }

    /// The oldest weight half of a chunk that was put off, if there is one.
    pub fn backward_weight_of(&mut self, chunk: usize) {
        if let Some(at) = self.put_off.iter().position(|(own, _)| *own == chunk) {
            let (_, micro_batch) = self.put_off.remove(at).expect("it is there");
            self.push(chunk, Kind::BackwardWeight, micro_batch);
        }
    }

    /// Any action.
    pub fn push(&mut self, chunk: usize, kind: Kind, micro_batch: usize) {
        let stage = self.shape.placement.stage(self.rank, chunk);
        self.entries.push(Entry::One(Action::new(stage, kind, micro_batch)));
    }

    /// The list, with all weight halves that are still put off.
    pub fn finish(mut self) -> Vec<Entry> {
        while !self.put_off.is_empty() {
            self.backward_weight();
        }
        self.entries
    }

    fn take(&mut self, chunk: usize, direction: usize) -> Option<usize> {
        let next = &mut self.next[chunk][direction];
        (*next < self.shape.micro_batches).then(|| {
            *next += 1;
            *next - 1
        })
    }
}
