//! What happened when: one record per operation.

use std::collections::VecDeque;

/// Which operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpKind {
    /// Every rank gets the reduction of all inputs.
    AllReduce,
    /// Every rank gets the root's data.
    Broadcast,
    /// The root gets everybody's data.
    Gather,
    /// Nobody goes on before all have arrived.
    Barrier,
}

impl OpKind {
    /// The name used in errors and reports.
    pub fn name(self) -> &'static str {
        match self {
            OpKind::AllReduce => "all_reduce",
            OpKind::Broadcast => "broadcast",
            OpKind::Gather => "gather",
            OpKind::Barrier => "barrier",
        }
    }
}

/// The four moments of an operation on this rank, in nanoseconds of `CLOCK_MONOTONIC`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpTimes {
    /// Handed to the group.
    pub submitted_ns: u64,
    /// Its turn came.
    pub started_ns: u64,
    /// The last rank had arrived.
    pub present_ns: u64,
    /// The result was there.
    pub finished_ns: u64,
}

impl OpTimes {
    /// Time in the queue behind earlier operations, in nanoseconds.
    pub fn queue_ns(&self) -> u64 {
        self.started_ns.saturating_sub(self.submitted_ns)
    }

    /// Time spent waiting for the slowest rank, in nanoseconds.
    pub fn wait_ns(&self) -> u64 {
        self.present_ns.saturating_sub(self.started_ns)
    }

    /// Time spent moving and reducing data once all were present, in nanoseconds.
    pub fn move_ns(&self) -> u64 {
        self.finished_ns.saturating_sub(self.present_ns)
    }
}

/// One finished operation.
#[derive(Clone, Copy, Debug)]
pub struct OpRecord {
    /// Which operation.
    pub kind: OpKind,
    /// Its place in the group's sequence; the same on every rank.
    pub seq: u32,
    /// Size of the message in bytes.
    pub bytes: usize,
    /// When it happened.
    pub times: OpTimes,
}

/// The most recent records, up to a fixed number.
#[derive(Debug)]
pub(crate) struct Ring {
    records: VecDeque<OpRecord>,
}

/// How many records a ring keeps.
const RING_CAPACITY: usize = 1000;

impl Ring {
    pub(crate) fn new() -> Self {
        Self { records: VecDeque::with_capacity(RING_CAPACITY) }
    }

    pub(crate) fn push(&mut self, record: OpRecord) {
        if self.records.len() == RING_CAPACITY {
            self.records.pop_front();
        }
        self.records.push_back(record);
    }

    pub(crate) fn drain_into(&mut self, out: &mut Vec<OpRecord>) {
        out.extend(self.records.drain(..));
    }
}
