//! The operation that is measured, with its reduction, root and element type, and the names under which
//! operations and reductions are offered to the user.
//!
//! This file knows the properties of operations, but neither buffers nor clocks.

use paceline_collectives::{OpKind, ReduceOp};
use paceline_memory::DType;

/// The operations that can be measured, each with a description and its other names.
pub const OPS: [(OpKind, &str, &[&str]); 10] = [
    (OpKind::AllReduce, "Every rank gets the reduction of all inputs", &["all-reduce"]),
    (OpKind::ReduceScatter, "Every rank gets its share of the reduction", &["reduce-scatter"]),
    (OpKind::AllGather, "Every rank gets the shares of all ranks", &["all-gather"]),
    (OpKind::Broadcast, "Every rank gets the root's data", &[]),
    (OpKind::Reduce, "The root gets the reduction of all inputs", &[]),
    (OpKind::Gather, "The root gets the shares of all ranks", &[]),
    (OpKind::Scatter, "Every rank gets its share of the root's data", &[]),
    (OpKind::AllToAll, "Every rank gets a block from every rank", &["all-to-all", "alltoall"]),
    (
        OpKind::SendRecv,
        "Every rank sends to the next one and receives from the one before",
        &["send-recv", "sendrecv"],
    ),
    (OpKind::Barrier, "No rank continues before all have arrived", &[]),
];

/// The reductions, each with a description and its other names. Their names are those of nccl-tests.
pub const REDOPS: [(ReduceOp, &str, &[&str]); 5] = [
    (ReduceOp::Sum, "Sum", &[]),
    (ReduceOp::Product, "Product", &["product"]),
    (ReduceOp::Min, "Smallest", &[]),
    (ReduceOp::Max, "Largest", &[]),
    (ReduceOp::Mean, "Mean", &["mean"]),
];

/// An operation and its arguments.
#[derive(Clone, Copy, Debug)]
pub struct Operation {
    /// The operation.
    pub kind: OpKind,
    /// How it combines elements, if it is a reduction.
    pub redop: ReduceOp,
    /// Its root, if it has one.
    pub root: usize,
    /// Type of the elements.
    pub dtype: DType,
}

impl Operation {
    /// Whether it has a root. The peer of a point-to-point operation does not count as one.
    pub fn has_root(&self) -> bool {
        self.kind.has_root() && !self.kind.is_point_to_point()
    }

    /// Whether its message is cut into a share per rank.
    pub fn has_shares(&self) -> bool {
        use OpKind::{AllGather, AllToAll, Gather, ReduceScatter, Scatter};
        matches!(self.kind, ReduceScatter | AllGather | Gather | Scatter | AllToAll)
    }

    /// Whether it can write its result over its input.
    pub fn has_in_place(&self) -> bool {
        !matches!(self.kind, OpKind::AllToAll | OpKind::SendRecv | OpKind::Barrier)
    }

    /// Bytes of the whole message for a requested size.
    pub fn bytes(&self, bytes: u64, world: usize) -> u64 {
        (self.elements(bytes, world) * self.dtype.size_bytes()) as u64
    }

    /// Number of elements of the whole message for a requested size. If the message has shares, all
    /// shares have the same size, which is at least one element.
    pub fn elements(&self, bytes: u64, world: usize) -> usize {
        let elements = bytes as usize / self.dtype.size_bytes();
        if self.has_shares() { (elements / world).max(1) * world } else { elements }
    }
}
