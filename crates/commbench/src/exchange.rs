//! The call that is timed: which parts of the buffers it reads and writes, out of place and in place, and
//! whether its result is right.
//!
//! A rank has two buffers, `a` and `b`, each as long as the message. Out of place, an operation reads `a` and writes `b`.
//! In place, it reads and writes `b`, with shares in rank order.

use std::ops::Range;

use paceline_collectives::{CollectiveError, Group, NcclOrder, OpKind, ReduceOp};
use paceline_failure::Result;
use paceline_launch::device::Device;
use paceline_memory::{Allocator, Category, MemoryError, Tensor};

use super::operation::Operation;
use super::pattern::Pattern;

/// Allocates two buffers for messages of up to `elements` elements: in memory of the device, on the processor in memory
/// that other ranks can reach, or in `private` memory. On cards, NCCL moves the messages if an order is given.
pub fn buffers(
    operation: Operation,
    group: &Group,
    elements: usize,
    (device, nccl): (Device, Option<NcclOrder>),
    private: bool,
) -> Result<(Tensor, Tensor)> {
    let allocator = device.memory(Allocator::new(), group.rank())?;
    if let Some(order) = nccl {
        group.use_nccl(&allocator, order)?;
    }
    let len = elements * operation.dtype.size_bytes();
    let buffer = || -> Result<Tensor> {
        if device != Device::Cpu {
            return Ok(allocator.tensor(operation.dtype, [elements], Category::Communication)?);
        }
        let buffer = if private {
            allocator.allocate(len, Category::Communication)?
        } else {
            group.allocate(&allocator, len, Category::Communication)?
        };
        Ok(Tensor::new(buffer, 0, operation.dtype, [elements])?)
    };
    Ok((buffer()?, buffer()?))
}

/// An operation on fixed buffers.
#[derive(Debug)]
pub struct Exchange<'a> {
    operation: Operation,
    group: &'a Group,
    in_place: bool,
    /// The whole message: the output, and in place also the input.
    b: Tensor,
    send: Tensor,
    recv: Tensor,
    share: usize,
}

impl<'a> Exchange<'a> {
    /// The call on the first `elements` elements of both buffers.
    pub fn new(
        operation: Operation,
        group: &'a Group,
        (a, b): &(Tensor, Tensor),
        elements: usize,
        in_place: bool,
    ) -> std::result::Result<Self, MemoryError> {
        let (a, b) = (a.slice(0..elements)?, b.slice(0..elements)?);
        let share = elements / group.world_size();
        let own = group.rank() * share..(group.rank() + 1) * share;
        let (sends_share, receives_share) = match operation.kind {
            OpKind::AllGather | OpKind::Gather => (true, false),
            OpKind::ReduceScatter | OpKind::Scatter => (false, true),
            _ => (false, false),
        };
        let source = if in_place { &b } else { &a };
        let part = |whole: &Tensor| whole.slice(if in_place { own.clone() } else { 0..share });
        let send = if sends_share { part(source)? } else { source.clone() };
        let recv = if receives_share { part(&b)? } else { b.clone() };
        Ok(Self { operation, group, in_place, b, send, recv, share })
    }

    /// Makes the call.
    pub fn call(&self) -> std::result::Result<(), CollectiveError> {
        let Self { group, send, recv, in_place, .. } = self;
        let Operation { kind, redop, root, .. } = self.operation;
        let (rank, world) = (group.rank(), group.world_size());
        let times = match kind {
            OpKind::AllReduce if *in_place => group.all_reduce(recv, redop),
            OpKind::AllReduce => group.all_reduce_into(send, recv, redop),
            OpKind::Reduce if *in_place => group.reduce(recv, redop, root),
            OpKind::Reduce => group.reduce_into(send, Some(recv), redop, root),
            OpKind::Broadcast if *in_place => group.broadcast(recv, root),
            OpKind::Broadcast => group.broadcast_into(Some(send), recv, root),
            OpKind::ReduceScatter => group.reduce_scatter(send, recv, redop),
            OpKind::AllGather => group.all_gather(send, recv),
            OpKind::Gather => group.gather(send, Some(recv), root),
            OpKind::Scatter => group.scatter(Some(send), recv, root),
            OpKind::AllToAll => group.all_to_all(send, recv),
            OpKind::Send | OpKind::Recv | OpKind::SendRecv => {
                group.send_recv(send, (rank + 1) % world, recv, (rank + world - 1) % world)
            }
            OpKind::Barrier => group.barrier(),
        };
        times.map(drop)
    }

    /// Writes the input, and bytes that differ from any result where it will be.
    pub fn fill(&self) -> Result<()> {
        const POISON: u8 = 0xA5;
        self.b.fill_bytes(POISON)?;
        let input = self.input(self.group.rank());
        Ok(self.send.as_bytes().overwrite::<u8, _>(|bytes| input.fill(bytes, 0))?)
    }

    /// The input of `rank`.
    fn input(&self, rank: usize) -> Pattern {
        let Operation { kind, redop, dtype, .. } = self.operation;
        Pattern::input(dtype, kind.reduces().then_some(redop), rank)
    }

    /// Makes one more call, and counts the wrong elements of all ranks. Collective.
    pub fn check(&self) -> Result<u64> {
        self.fill()?;
        // No rank may write into memory that another still fills.
        self.group.barrier()?;
        self.call()?;
        let mut wrong = [self.count_wrong()? as i64];
        self.group.all_reduce_slice(&mut wrong, ReduceOp::Sum)?;
        Ok(wrong[0] as u64)
    }

    /// Number of wrong elements in this rank's result, after [`Exchange::fill`] and one call.
    pub fn count_wrong(&self) -> Result<u64> {
        let elem_bytes = self.operation.dtype.size_bytes();
        let result = self.recv.to_host()?.as_bytes();
        let result = result.read::<u8>()?;
        let wrong = |(range, pattern, start): (Range<usize>, Pattern, usize)| {
            let bytes = &result[range.start * elem_bytes..range.end * elem_bytes];
            pattern.count_wrong(bytes, start)
        };
        Ok(self.expected().into_iter().map(wrong).sum())
    }

    /// Ranges of the result, each with its pattern and the element with which the pattern begins.
    fn expected(&self) -> Vec<(Range<usize>, Pattern, usize)> {
        let (operation, share) = (&self.operation, self.share);
        let (rank, world) = (self.group.rank(), self.group.world_size());
        let whole = 0..self.recv.num_elems();
        let reduced = || Pattern::reduced(operation.dtype, operation.redop, world);
        let one_of_each = |start: usize| {
            (0..world)
                .map(|from| (from * share..(from + 1) * share, self.input(from), start))
                .collect()
        };
        match operation.kind {
            OpKind::Reduce | OpKind::Gather if rank != operation.root => Vec::new(),
            OpKind::AllReduce | OpKind::Reduce => vec![(whole, reduced(), 0)],
            OpKind::ReduceScatter => vec![(whole, reduced(), rank * share)],
            OpKind::Broadcast => vec![(whole, self.input(operation.root), 0)],
            OpKind::Scatter => vec![(whole, self.input(operation.root), rank * share)],
            OpKind::AllGather | OpKind::Gather => one_of_each(0),
            OpKind::AllToAll => one_of_each(rank * share),
            OpKind::Send | OpKind::Recv | OpKind::SendRecv => {
                vec![(whole, self.input((rank + world - 1) % world), 0)]
            }
            OpKind::Barrier => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use paceline_collectives::GroupOptions;
    use paceline_memory::DType;

    /// Number of wrong elements on all ranks after one call, and before it.
    fn wrong(operation: Operation, world: usize, elements: usize, in_place: bool) -> [u64; 2] {
        paceline_launch::threads::run(world, GroupOptions::for_local_ranks(world), |group| {
            let allocator = Allocator::new();
            let buffer = || allocator.tensor(operation.dtype, [elements], Category::Data);
            let buffers = (buffer()?, buffer()?);
            let exchange = Exchange::new(operation, &group, &buffers, elements, in_place)?;
            exchange.fill()?;
            group.barrier()?;
            let before = exchange.count_wrong()?;
            exchange.call()?;
            let mut wrong = [exchange.count_wrong()? as i64, before as i64];
            group.all_reduce_slice(&mut wrong, ReduceOp::Sum)?;
            Ok(wrong.map(|wrong| wrong as u64))
        })
        .unwrap()
    }

    #[test]
    fn every_operation_is_checked() {
        for kind in OpKind::ALL {
            if matches!(kind, OpKind::Send | OpKind::Recv | OpKind::Barrier) {
                continue;
            }
            for (dtype, redop) in [
                (DType::F32, ReduceOp::Sum),
                (DType::BF16, ReduceOp::Mean),
                (DType::U8, ReduceOp::Product),
                (DType::I64, ReduceOp::Max),
            ] {
                let operation = Operation { kind, redop, root: 1, dtype };
                for in_place in [false, true] {
                    if in_place && !operation.has_in_place() {
                        continue;
                    }
                    let [after, before] = wrong(operation, 3, 3000, in_place);
                    assert_eq!(after, 0, "{kind:?} {dtype} {redop:?} in place: {in_place}");
                    assert!(before > 500, "{kind:?} {dtype} {redop:?} in place: {in_place}");
                }
            }
        }
    }
}
