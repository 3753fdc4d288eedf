//! The operations on plain slices. They are blocking, and between processes the data are staged.

use paceline_memory::Element;

use crate::call::{Blocks, Call, Region, fill};
use crate::{Group, OpKind, OpTimes, ReduceElement, ReduceOp, Result};

type Outcome = Result<OpTimes>;

impl Group {
    /// Like [`Group::all_reduce`], for a slice in private memory.
    pub fn all_reduce_slice<T: ReduceElement>(&self, data: &mut [T], op: ReduceOp) -> Outcome {
        let region = written(data);
        let call = Call::new(OpKind::AllReduce, T::DTYPE);
        self.run_slice(Call { op, send: region, recv: region, ..call })
    }

    /// Like [`Group::reduce`], for a slice in private memory.
    pub fn reduce_slice<T: ReduceElement>(
        &self,
        data: &mut [T],
        op: ReduceOp,
        root: usize,
    ) -> Outcome {
        self.check_rank(root)?;
        let send = written(data);
        let recv = if self.rank() == root { send } else { Region::EMPTY };
        self.run_slice(Call { op, root, send, recv, ..Call::new(OpKind::Reduce, T::DTYPE) })
    }

    /// Like [`Group::broadcast`], for a slice in private memory.
    pub fn broadcast_slice<T: Element>(&self, data: &mut [T], root: usize) -> Outcome {
        self.check_rank(root)?;
        let recv = written(data);
        let send = if self.rank() == root { recv } else { Region::EMPTY };
        self.run_slice(Call { root, send, recv, ..Call::new(OpKind::Broadcast, T::DTYPE) })
    }

    /// Like [`Group::reduce_scatter`], for slices in private memory.
    pub fn reduce_scatter_slice<T: ReduceElement>(
        &self,
        data: &[T],
        share: &mut [T],
        op: ReduceOp,
    ) -> Outcome {
        let (send, recv) = (read(data), written(share));
        self.run_slice(Call { op, send, recv, ..Call::new(OpKind::ReduceScatter, T::DTYPE) })
    }

    /// Like [`Group::all_gather`], for slices in private memory.
    pub fn all_gather_slice<T: Element>(&self, share: &[T], gathered: &mut [T]) -> Outcome {
        let (send, recv) = (read(share), written(gathered));
        self.run_slice(Call { send, recv, ..Call::new(OpKind::AllGather, T::DTYPE) })
    }

    /// Like [`Group::gather`], for slices in private memory. `gathered` is ignored on ranks other than the
    /// root, and may be empty there.
    pub fn gather_slice<T: Element>(
        &self,
        share: &[T],
        gathered: &mut [T],
        root: usize,
    ) -> Outcome {
        self.check_rank(root)?;
        let recv = if self.rank() == root { written(gathered) } else { Region::EMPTY };
        let call = Call::new(OpKind::Gather, T::DTYPE);
        self.run_slice(Call { root, send: read(share), recv, ..call })
    }

    /// Like [`Group::scatter`], for slices in private memory. `data` is ignored on ranks other than the root,
    /// and may be empty there.
    pub fn scatter_slice<T: Element>(&self, data: &[T], share: &mut [T], root: usize) -> Outcome {
        self.check_rank(root)?;
        let send = if self.rank() == root { read(data) } else { Region::EMPTY };
        let call = Call::new(OpKind::Scatter, T::DTYPE);
        self.run_slice(Call { root, send, recv: written(share), ..call })
    }

    /// Like [`Group::all_to_all_ragged`], for slices in private memory.
    pub fn all_to_all_slice<T: Element>(
        &self,
        data: &[T],
        counts: &[usize],
        received: &mut [T],
        received_counts: &[usize],
    ) -> Outcome {
        let kind = OpKind::AllToAll;
        for (counts, elems) in [(counts, data.len()), (received_counts, received.len())] {
            if !fill(counts, self.world_size(), elems) {
                return self.refuse(kind, format!("got counts {counts:?} for {elems} elements"));
            }
        }
        let cut = |counts: &[usize]| counts.iter().map(|&count| count as u64).collect();
        let blocks = Blocks { send: cut(counts), recv: cut(received_counts) };
        let (send, recv) = (read(data), written(received));
        let blocks = Some(Box::new(blocks));
        self.run_slice(Call { send, recv, blocks, ..Call::new(kind, T::DTYPE) })
    }

    /// Like [`Group::send`], for a slice in private memory.
    pub fn send_slice<T: Element>(&self, data: &[T], to: usize) -> Outcome {
        self.check_pair(OpKind::Send, Some(to), None)?;
        let call = Call::new(OpKind::Send, T::DTYPE);
        self.run_slice(Call { root: to, send: read(data), ..call })
    }

    /// Like [`Group::recv`], for a slice in private memory.
    pub fn recv_slice<T: Element>(&self, data: &mut [T], from: usize) -> Outcome {
        self.check_pair(OpKind::Recv, None, Some(from))?;
        let call = Call::new(OpKind::Recv, T::DTYPE);
        self.run_slice(Call { root: from, from, recv: written(data), ..call })
    }

    /// Like [`Group::send_recv`], for slices in private memory.
    pub fn send_recv_slice<T: Element>(
        &self,
        data: &[T],
        to: usize,
        received: &mut [T],
        from: usize,
    ) -> Outcome {
        self.check_pair(OpKind::SendRecv, Some(to), Some(from))?;
        let (send, recv) = (read(data), written(received));
        self.run_slice(Call { root: to, from, send, recv, ..Call::new(OpKind::SendRecv, T::DTYPE) })
    }

    /// The caller keeps the slices borrowed until the call is finished.
    fn run_slice(&self, mut call: Call) -> Outcome {
        call.purpose = self.purpose;
        self.worker().run(call, [None, None])
    }
}

fn written<T: Element>(data: &mut [T]) -> Region {
    let len_bytes = size_of_val(data);
    Region { base: data.as_mut_ptr().cast(), len_bytes, is_claimed: false }
}

/// A region that operations only read: no operation writes to its sending side, unless both sides are the
/// same region.
fn read<T: Element>(data: &[T]) -> Region {
    let len_bytes = size_of_val(data);
    Region { base: data.as_ptr().cast_mut().cast(), len_bytes, is_claimed: false }
}
