//! Operations on memory for which the caller vouches, such as that of another library's tensors.
//!
//! Input: addresses, lengths and an element type that is known at run time. Output: the times of the operation, or its error,
//! which an asynchronous operation passes to a callback. This module claims no memory, and does not know who owns it.

use std::time::Duration;

use paceline_memory::DType;

use crate::call::{BlockCounts, Call, Region, fill};
use crate::{Group, OpKind, OpTimes, ReduceOp, Result};

/// A range of memory of this process: the address of its first byte, and its length.
#[derive(Clone, Copy, Debug)]
pub struct RawMemory {
    /// The first byte. Unused if the range is empty.
    pub base: *mut u8,
    /// The length in bytes.
    pub len_bytes: usize,
}

// SAFETY: this is an address. The caller of an operation vouches for the memory, from any thread.
unsafe impl Send for RawMemory {}

impl RawMemory {
    /// No memory.
    pub const EMPTY: RawMemory = RawMemory { base: std::ptr::null_mut(), len_bytes: 0 };
}

/// A collective operation on raw memory.
#[derive(Clone, Debug)]
pub struct RawCall {
    /// The operation. Messages between two ranks are refused.
    pub kind: OpKind,
    /// The type of the elements.
    pub dtype: DType,
    /// The reduction, if the operation reduces.
    pub op: ReduceOp,
    /// The root, if the operation has one.
    pub root: usize,
    /// The data that this rank contributes.
    pub send: RawMemory,
    /// The memory for the result: `send`, a part of `send`, memory around `send`, or memory apart from it.
    pub recv: RawMemory,
    /// Elements to and from each rank, for an all-to-all only.
    pub counts: Option<[Vec<usize>; 2]>,
    /// How long the operation may wait for other ranks, if not for the group's limit.
    pub limit: Option<Duration>,
}

impl RawCall {
    /// An operation without memory: a sum, if it reduces, and rank 0 as the root.
    pub fn new(kind: OpKind, dtype: DType) -> Self {
        let (send, recv) = (RawMemory::EMPTY, RawMemory::EMPTY);
        Self { kind, dtype, op: ReduceOp::Sum, root: 0, send, recv, counts: None, limit: None }
    }
}

impl Group {
    /// Runs an operation on raw memory, and returns when it is finished.
    ///
    /// # Safety
    ///
    /// The memory is valid, and nobody else writes to it, nor reads what the operation writes, until this returns. Between
    /// threads, and in memory from [`Group::allocate`], that holds after an error too, until all peers have left the group.
    pub unsafe fn run_raw(&self, call: RawCall) -> Result<OpTimes> {
        let limit = call.limit;
        self.worker().run(self.call_on_raw(call)?, [None, None], limit)
    }

    /// Like [`Group::run_raw`], in the background. `on_end` is called on the communication thread with the outcome, before the
    /// next operation begins. It may call operations of this group and wait for them: they run at once.
    ///
    /// Errors if the call is refused. Then nothing is submitted, and `on_end` is not called.
    ///
    /// # Safety
    ///
    /// As for [`Group::run_raw`], until `on_end` is called.
    pub unsafe fn start_raw(
        &self,
        call: RawCall,
        on_end: impl FnOnce(&Result<OpTimes>) + Send + 'static,
    ) -> Result<()> {
        let limit = call.limit;
        let call = self.call_on_raw(call)?;
        self.worker().submit(|_| Ok((call, Vec::new())), limit, Some(Box::new(on_end))).map(drop)
    }

    fn call_on_raw(&self, raw: RawCall) -> Result<Call> {
        let RawCall { kind, dtype, op, root, mut send, mut recv, counts, .. } = raw;
        if kind.is_point_to_point() {
            return self.refuse(kind, "is no operation of the whole group");
        }
        if kind.has_root() {
            self.check_rank(root)?;
        }
        if self.rank() != root {
            // Only the root needs memory for the whole.
            match kind {
                OpKind::Broadcast | OpKind::Scatter => send = RawMemory::EMPTY,
                OpKind::Reduce | OpKind::Gather => recv = RawMemory::EMPTY,
                _ => {}
            }
        }
        let region = |memory: RawMemory| Region::at(memory.base, memory.len_bytes);
        let (send, recv, purpose) = (region(send), region(recv), self.purpose);
        let call = Call { op, root, send, recv, purpose, ..Call::new(kind, dtype) };
        if let Some(reason) = misplaced(&call) {
            return self.refuse(kind, reason);
        }
        if kind != OpKind::AllToAll {
            return Ok(call);
        }
        let Some(counts) = counts else { return self.refuse(kind, "needs counts for each rank") };
        for (counts, memory) in counts.iter().zip([send, recv]) {
            let (world, elems) = (self.world_size(), memory.len_bytes / dtype.size_bytes());
            if !fill(counts, world, elems) {
                let reason =
                    format!("got counts {counts:?} for {world} ranks and {elems} elements");
                return self.refuse(kind, reason);
            }
        }
        let [send, recv] = counts.map(|of| of.into_iter().map(|count| count as u64).collect());
        Ok(Call { blocks: Some(Box::new(BlockCounts { send, recv })), ..call })
    }
}

/// Why the memory of a call cannot be used, in words.
fn misplaced(call: &Call) -> Option<String> {
    let &Call { kind, dtype, send, recv, .. } = call;
    let size = dtype.size_bytes();
    for Region { base, len_bytes, .. } in [send, recv] {
        if !len_bytes.is_multiple_of(size) {
            return Some(format!("got {len_bytes} bytes for elements of {size}"));
        }
        if len_bytes > 0 && !base.addr().is_multiple_of(size) {
            return Some(format!("needs {dtype} elements at multiples of {size} bytes"));
        }
    }
    let is_same = matches!(kind, OpKind::AllReduce | OpKind::Reduce | OpKind::Broadcast);
    let is_root_only = send.base.is_null() || recv.base.is_null();
    if is_same && !is_root_only && send.len_bytes != recv.len_bytes {
        let (data, result) = (send.len_bytes / size, recv.len_bytes / size);
        return Some(format!(
            "needs a result as long as the data, got {result} for {data} elements"
        ));
    }
    let distance = call.overlap()?;
    let is_longer = send.len_bytes >= recv.len_bytes;
    let (outer, inner) = if is_longer { (send, recv) } else { (recv, send) };
    let is_within = outer.base <= inner.base && distance + inner.len_bytes <= outer.len_bytes;
    let may_overlap = is_within && kind != OpKind::AllToAll;
    (!may_overlap).then(|| "got memory for the data and for the result that overlap".into())
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;
    use crate::CollectiveError;

    fn memory<T>(data: &mut [T]) -> RawMemory {
        RawMemory { base: data.as_mut_ptr().cast(), len_bytes: size_of_val(data) }
    }

    fn all_reduce(data: &mut [f32]) -> RawCall {
        let memory = memory(data);
        RawCall { send: memory, recv: memory, ..RawCall::new(OpKind::AllReduce, DType::F32) }
    }

    /// Runs `rank` on each of two ranks.
    fn on_two(rank: impl Fn(&Group) + Sync) {
        std::thread::scope(|scope| {
            for group in Group::threads(2) {
                let rank = &rank;
                scope.spawn(move || rank(&group));
            }
        });
    }

    #[test]
    fn memory_of_the_caller_is_reduced_at_once_and_in_the_background() {
        on_two(|group| {
            let mut data = [group.rank() as f32, 1.0];
            let call = all_reduce(&mut data);
            let (sender, ended) = channel();
            // SAFETY: `data` outlives both operations, and is used again only after they have ended.
            unsafe {
                group.run_raw(call.clone()).unwrap();
                group
                    .start_raw(call, move |outcome| sender.send(outcome.clone()).unwrap())
                    .unwrap();
            }
            ended.recv().unwrap().unwrap();
            assert_eq!(data, [2.0, 4.0]);
        });
    }

    #[test]
    fn a_callback_may_wait_for_further_operations() {
        on_two(|group| {
            let (sender, ended) = channel();
            let (again, call) = (group.clone(), RawCall::new(OpKind::Barrier, DType::U8));
            let on_end = move |_: &_| sender.send(again.barrier()).unwrap();
            // SAFETY: a barrier has no memory.
            unsafe { group.start_raw(call, on_end) }.unwrap();
            ended.recv().unwrap().unwrap();
        });
    }

    #[test]
    fn an_operation_may_have_a_limit_of_its_own() {
        let groups = Group::threads(2);
        let limit = Some(Duration::from_millis(20));
        let call = RawCall { limit, ..RawCall::new(OpKind::Barrier, DType::U8) };
        // SAFETY: a barrier has no memory.
        let error = unsafe { groups[0].run_raw(call) }.unwrap_err();
        let CollectiveError::TimedOut { missing, .. } = &error else { panic!("{error}") };
        assert_eq!(*missing, [1]);
    }

    #[test]
    fn calls_that_no_memory_fits_are_refused() {
        let group = Group::single().unwrap();
        let refusal = |call: RawCall| {
            // SAFETY: the call is refused before its memory is used.
            unsafe { group.run_raw(call) }.unwrap_err().to_string()
        };
        let mut data = [0.0f32; 8];
        let whole = memory(&mut data);
        let part =
            |start: usize, len_bytes| RawMemory { base: whole.base.wrapping_add(start), len_bytes };
        let call =
            |send, recv| RawCall { send, recv, ..RawCall::new(OpKind::AllReduce, DType::F32) };
        assert!(refusal(call(part(0, 6), part(0, 6))).contains("6 bytes for elements of 4"));
        assert!(refusal(call(part(2, 8), part(2, 8))).contains("at multiples of 4 bytes"));
        assert!(refusal(call(part(0, 8), part(16, 12))).contains("as long as the data"));
        assert!(refusal(call(part(0, 16), part(8, 16))).contains("overlap"));
        let message = RawCall::new(OpKind::Send, DType::U8);
        assert!(refusal(message).contains("no operation of the whole group"));
        let exchange = RawCall {
            send: part(0, 8),
            recv: part(8, 8),
            ..RawCall::new(OpKind::AllToAll, DType::F32)
        };
        assert!(refusal(exchange.clone()).contains("needs counts"));
        let counts = Some([vec![usize::MAX], vec![2]]);
        assert!(refusal(RawCall { counts, ..exchange }).contains("got counts"));
        let broadcast = RawCall { root: 1, ..RawCall::new(OpKind::Broadcast, DType::U8) };
        assert!(refusal(broadcast).contains("no rank 1"));
    }
}
