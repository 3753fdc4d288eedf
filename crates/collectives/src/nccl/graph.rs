//! Operations that a card's graph has, and repeats with each of its launches.
//!
//! NCCL wants the ranks of an operation to capture it together, and to launch the graphs of the same capture. So the ranks compare
//! which graph they launch, and for which time, before each launch: one host operation instead of one for each captured call. The
//! calls themselves are compared one by one when the work runs for the first time, without memory of a graph's pool. After a launch the
//! host waits for the graph as for an operation: at most for the group's limit, and a rank that gives up ends its work on the card.
//!
//! Input: tensors of a card, while memory comes from the pool of a graph. Output: work of the stream `nccl`, for which the tensors'
//! own stream waits. This module does not know what else a graph has.

use paceline_memory::{Access, Allocator, Body, DType, Event, EventState, MemoryError};
use paceline_trace::{Shapes, now_ns};

use super::{Nccl, moves};
use crate::call::Call;
use crate::context::{OpContext, WaitPolicy};
use crate::core::Core;
use crate::engine::Engine;
use crate::meet::AgreedCalls;
use crate::staging::DeviceOperand;
use crate::{CollectiveError, Group, OpKind, OpTimes, Result, Work};

impl Group {
    /// Whether a graph of the card with this memory can have all-reduces of this group: NCCL carries them out, and no emulated link
    /// holds them up. See [`Group::agree_on_graph`].
    pub fn is_capturable(&self, memory: &Allocator) -> bool {
        let nccl = self.core().nccl.get().zip(memory.home());
        nccl.is_some_and(|(nccl, home)| nccl.reaches(home)) && self.link().is_none()
    }

    /// Compares the numbers of the graph and of the launch over all ranks. All of them call this before they launch, capture or prepare
    /// work with operations of this group, from its second run on ([`paceline_memory::GraphedWork`]). Errors if the numbers differ.
    pub fn agree_on_graph(&self, graph: u32, launch: u32) -> Result<OpTimes> {
        // A launch comes after a launch that has captured the same work, so later ones need no number.
        let root = 1 + graph as usize * 4 + launch.min(3) as usize;
        let call = Call { root, ..Call::new(OpKind::Barrier, DType::U8) };
        self.worker().run(call, Default::default(), None)
    }

    /// Blocks until all work of the memory's stream is done, in which other ranks take part. Errors as an operation of this group: if
    /// a rank is lost, the limit has passed, or the card or NCCL has failed. Then the work on the card is ended.
    pub fn await_graph(&self, memory: &Allocator) -> Result<()> {
        let core = self.core();
        let Some((nccl, home)) = core.nccl.get().zip(memory.home()) else { return Ok(()) };
        let options = self.options();
        let policy = WaitPolicy { spin: options.spin, limit: options.timeout };
        let call = Call::new(OpKind::AllReduce, DType::U8);
        let context = core.context(&call, core.num_operations(), now_ns(), policy);
        nccl.await_work(&context, &core.engine, &home.record()).map_err(|error| core.failed(error))
    }

    /// Puts a call into the stream `nccl`, after all work of its memory's stream.
    pub(crate) fn start_in_stream(&self, call: Call, operands: Vec<DeviceOperand>) -> Result<Work> {
        let (core, name) = (self.core().clone(), call.kind.name());
        let home = operands.first().and_then(|of| of.memory.buffer().allocator().home().cloned());
        let (Some(home), Some(nccl), OpKind::AllReduce) = (home, core.nccl.get(), call.kind) else {
            return self.refuse(call.kind, "a graph can have all-reduces by NCCL only");
        };
        let stream = nccl.stream.clone();
        stream.wait_for(&home)?;
        let event = stream.launch(name, Shapes::default(), |event| {
            for of in &operands {
                of.memory.queue(of.access, name, event)?;
            }
            nccl.queue_scratch(event)?;
            let core = core.clone();
            let body: Body = Box::new(move || core.put_into_stream(&call));
            Ok::<_, CollectiveError>(body)
        })?;
        Ok(Work::in_stream(event, [home, stream]))
    }
}

impl Core {
    /// Puts a call into the stream of this rank's card.
    fn put_into_stream(&self, call: &Call) -> Result<(), String> {
        let nccl = self.nccl.get().ok_or("NCCL is gone")?;
        let policy = WaitPolicy { spin: Default::default(), limit: Default::default() };
        let context = self.context(call, self.num_operations(), now_ns(), policy);
        // All-reduces are as long on all ranks.
        let calls = vec![call.header(); self.world];
        let met = AgreedCalls { present_ns: context.started_ns, calls, sent: Vec::new() };
        moves::queue(nccl, &context, &met).map_err(|error| self.failed(error).to_string())
    }
}

impl Nccl {
    /// Notes that captured work uses the scratch memory, which its graph then holds.
    fn queue_scratch(&self, event: &Event) -> Result<(), MemoryError> {
        let scratch = paceline_trace::lock(&self.scratch);
        let queued = scratch.as_ref().map(|of| of.queue(Access::Write, "all_reduce", event));
        queued.transpose().map(drop)
    }

    /// Waits for work of the card in which other ranks take part.
    fn await_work(&self, context: &OpContext, engine: &Engine, work: &Event) -> Result<()> {
        let is_done = || match work.state() {
            EventState::Pending => Ok(false),
            EventState::Complete => Ok(true),
            EventState::Failed => Err(match self.stream.accelerator().check() {
                Err(error) => error.to_string(),
                Ok(()) => "work of the card has failed".to_owned(),
            }),
        };
        let outcome = self.finish(context, engine, is_done);
        if outcome.is_err() {
            self.abort();
        }
        outcome
    }
}
