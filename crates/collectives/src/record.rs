//! Records of operations: one per operation, with its times.
//!
//! Input: operations that begin and end. Output: the most recent records. This module knows nothing of how
//! operations work.

use std::collections::VecDeque;

use paceline_memory::DType;
use paceline_trace::{Operation, OperationTimes};

use crate::ReduceOp;

/// The kind of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OpKind {
    /// Every rank gets the reduction of all inputs.
    AllReduce,
    /// Every rank gets its share of the reduction of all inputs.
    ReduceScatter,
    /// Every rank gets the data of all ranks, in rank order.
    AllGather,
    /// Every rank gets the root's data.
    Broadcast,
    /// The root gets the reduction of all inputs.
    Reduce,
    /// The root gets the data of all ranks, in rank order.
    Gather,
    /// Every rank gets its share of the root's data.
    Scatter,
    /// Every rank gets a block from every rank.
    AllToAll,
    /// One rank sends data to another rank.
    Send,
    /// One rank receives data from another rank.
    Recv,
    /// A send and a receive at the same time.
    SendRecv,
    /// No rank goes on before all have arrived.
    Barrier,
}

impl OpKind {
    /// All kinds.
    pub const ALL: [OpKind; 12] = [
        OpKind::AllReduce,
        OpKind::ReduceScatter,
        OpKind::AllGather,
        OpKind::Broadcast,
        OpKind::Reduce,
        OpKind::Gather,
        OpKind::Scatter,
        OpKind::AllToAll,
        OpKind::Send,
        OpKind::Recv,
        OpKind::SendRecv,
        OpKind::Barrier,
    ];

    /// The name used on the command line, in errors and in reports.
    pub fn name(self) -> &'static str {
        match self {
            OpKind::AllReduce => "all_reduce",
            OpKind::ReduceScatter => "reduce_scatter",
            OpKind::AllGather => "all_gather",
            OpKind::Broadcast => "broadcast",
            OpKind::Reduce => "reduce",
            OpKind::Gather => "gather",
            OpKind::Scatter => "scatter",
            OpKind::AllToAll => "all_to_all",
            OpKind::Send => "send",
            OpKind::Recv => "recv",
            OpKind::SendRecv => "send_recv",
            OpKind::Barrier => "barrier",
        }
    }

    /// Whether the operation reduces data.
    pub fn reduces(self) -> bool {
        matches!(self, OpKind::AllReduce | OpKind::ReduceScatter | OpKind::Reduce)
    }

    /// Whether a call of the operation names a rank: a root, or the peer of a message.
    pub fn has_root(self) -> bool {
        use OpKind::*;
        matches!(self, Broadcast | Reduce | Gather | Scatter | Send | Recv | SendRecv)
    }

    /// Whether only two ranks take part.
    pub fn is_point_to_point(self) -> bool {
        matches!(self, OpKind::Send | OpKind::Recv | OpKind::SendRecv)
    }

    /// Whether each rank sends or receives a part of the whole.
    pub(crate) fn has_shares(self) -> bool {
        use OpKind::*;
        matches!(self, ReduceScatter | AllGather | Gather | Scatter)
    }
}

/// The purpose of an operation, as its caller states it ([`Group::for_purpose`](crate::Group::for_purpose)), for its record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Purpose {
    /// The caller stated no purpose.
    #[default]
    Other,
    /// The sums of the loss.
    Loss,
    /// The statistics of a synchronized batch norm.
    Statistics,
    /// The gradients of the bucket with this number, or of the unit, if each is sent alone.
    Bucket(usize),
    /// The parameters of the unit with this number are brought together.
    Gather(usize),
    /// Tensors within a layer that several ranks divide.
    Layer,
}

/// The four times of an operation on this rank, in nanoseconds of `CLOCK_MONOTONIC`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpTimes {
    /// When the operation was submitted to the group.
    pub submitted_ns: u64,
    /// When it started, after waiting in the queue.
    pub started_ns: u64,
    /// When the last rank had arrived.
    pub present_ns: u64,
    /// When the result was complete.
    pub finished_ns: u64,
    /// How much later that was than on the emulated link, because the transport or this machine is slower; otherwise zero.
    pub late_ns: u64,
    /// The rank of the group that arrived last, if the transport tells.
    pub slowest: Option<usize>,
}

impl OpTimes {
    /// Time in the queue, after earlier operations, in nanoseconds.
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

/// The record of one operation.
#[derive(Clone, Copy, Debug)]
pub struct OpRecord {
    /// The kind of operation.
    pub kind: OpKind,
    /// The number of the group on this rank ([`Group::number`](crate::Group::number)).
    pub group: u32,
    /// The sequence number in the group.
    pub seq: u32,
    /// The number of ranks of the group. In a group of one, nothing is sent.
    pub ranks: usize,
    /// Size of the message in bytes.
    pub bytes: usize,
    /// Element type.
    pub dtype: DType,
    /// The reduction, if the operation reduces.
    pub op: ReduceOp,
    /// Bytes that this rank contributes.
    pub send_bytes: usize,
    /// Bytes that this rank receives.
    pub recv_bytes: usize,
    /// The purpose of the operation.
    pub purpose: Purpose,
    /// The times of the operation; those that have not come yet are zero.
    pub times: OpTimes,
}

impl OpRecord {
    /// The record in the form that a trace uses.
    pub fn traced(&self) -> Operation {
        let elems = |bytes: usize| (bytes / self.dtype.size_bytes()) as u64;
        let OpTimes { submitted_ns, started_ns, present_ns, finished_ns, .. } = self.times;
        Operation {
            name: self.kind.name(),
            reduction: if self.kind.reduces() { self.op.name() } else { "" },
            dtype: self.dtype.name(),
            group: self.group,
            seq: self.seq,
            in_elems: elems(self.send_bytes),
            out_elems: elems(self.recv_bytes),
            times: OperationTimes { submitted_ns, started_ns, present_ns, finished_ns },
        }
    }
}

/// The most recent records of a rank, up to a fixed number, and the operations that are running: one at most in
/// each group.
#[derive(Debug)]
pub(crate) struct RecentRecords {
    records: VecDeque<OpRecord>,
    /// Records at the end that `fresh_into` has not returned yet.
    num_fresh: usize,
    /// Records that were dropped before `fresh_into` could return them.
    num_lost: u64,
    running: Vec<OpRecord>,
}

const RING_CAPACITY: usize = 1000;

impl Default for RecentRecords {
    fn default() -> Self {
        Self {
            records: VecDeque::with_capacity(RING_CAPACITY),
            num_fresh: 0,
            num_lost: 0,
            running: Vec::with_capacity(8),
        }
    }
}

impl RecentRecords {
    pub(crate) fn begin(&mut self, record: OpRecord) {
        self.running.push(record);
    }

    /// The running operation of this group has finished.
    pub(crate) fn end(&mut self, group: u32, times: OpTimes) {
        let Some(place) = self.running.iter().position(|record| record.group == group) else {
            return;
        };
        let record = self.running.swap_remove(place);
        if self.records.len() == RING_CAPACITY {
            self.records.pop_front();
        }
        self.records.push_back(OpRecord { times, ..record });
        if self.num_fresh == RING_CAPACITY {
            self.num_lost += 1;
        } else {
            self.num_fresh += 1;
        }
    }

    /// This group has ended, and so has an operation of it that never finished.
    pub(crate) fn forget(&mut self, group: u32) {
        self.running.retain(|record| record.group != group);
    }

    /// The most recent records, oldest first, at most [`RING_CAPACITY`]. The running operations come last.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &OpRecord> {
        let num_records = self.records.len() + self.running.len();
        let surplus = num_records.saturating_sub(RING_CAPACITY);
        self.records.iter().chain(&self.running).skip(surplus)
    }

    /// Appends to `out` the records that this method has not returned before. They stay here too. Returns
    /// how many more were lost.
    pub(crate) fn fresh_into(&mut self, out: &mut Vec<OpRecord>) -> u64 {
        let known = self.records.len() - self.num_fresh;
        out.extend(self.records.range(known..));
        self.num_fresh = 0;
        std::mem::take(&mut self.num_lost)
    }
}
