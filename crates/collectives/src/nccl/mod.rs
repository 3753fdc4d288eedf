//! Operations on the memory of cards, by NCCL, without a way through the host.
//!
//! Before a byte moves, every rank shows the others its call over the group's own transport, since NCCL itself
//! waits forever if calls do not match. Then the work runs on a stream of its own, and this rank waits for its end, for at
//! most the group's limit; a rank that gives up ends its work on the card too.
//!
//! NCCL reduces in orders of its own, which depend on the number of ranks and on the version. With [`NcclOrder::Tree`] it
//! only moves bytes: each rank gets its share of all ranks' data, a kernel reduces it as a tree over the ranks, and the shares
//! are gathered. An all-reduce moves `2 (n-1)/n S` bytes in each direction of a rank, as a ring does, and needs `S` bytes of
//! scratch memory.
//!
//! | file | purpose |
//! |---|---|
//! | `agree` | shows the calls to all ranks |
//! | `graph` | operations that a graph of the card has |
//! | `moves` | which bytes go where, for each operation |
//! | `reduce` | the kernel of the tree |
//!
//! Input: a call whose memory is on a card. Output: the moment when all ranks had arrived.
//! This module does not know who waits for the result.

mod agree;
mod graph;
mod moves;
mod reduce;

use std::sync::Mutex;
use std::time::Duration;

use paceline_cuda::nccl::{Communicator, UniqueId};
use paceline_cuda::{CudaError, Event};
use paceline_memory::{Allocator, Category, DType, DeviceStream, Tensor};
use paceline_trace::{lock, now_ns};
use serde::{Deserialize, Serialize};

use crate::Result;
use crate::call::Region;
use crate::context::{OpContext, Waited};
use crate::engine::Engine;
use crate::meet::AgreedCalls;

/// The order in which NCCL's ranks add up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum NcclOrder {
    /// A tree over the ranks: the bits of every other transport.
    #[default]
    Tree,
    /// The library's own. Its bits differ with the number of ranks, the cards and the version.
    Ring,
}

impl NcclOrder {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            NcclOrder::Tree => "tree",
            NcclOrder::Ring => "ring",
        }
    }
}

impl std::str::FromStr for NcclOrder {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let all = [NcclOrder::Tree, NcclOrder::Ring];
        let found = all.into_iter().find(|order| order.name() == text);
        found.ok_or_else(|| format!("{text:?} is no order; pass tree or ring"))
    }
}

impl Serialize for NcclOrder {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// A rank's membership in NCCL, for operations on its card.
#[derive(Debug)]
pub(crate) struct Nccl {
    communicator: Communicator,
    stream: DeviceStream,
    /// Where a rank's program has its memory.
    memory: Allocator,
    scratch: Mutex<Option<Tensor>>,
    order: NcclOrder,
}

/// How often a rank that waits for the card looks after it has spun.
const LOOK_AGAIN: Duration = Duration::from_micros(50);

/// Why NCCL has not connected a rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct NotJoined {
    /// Whether it only waited for others, which did not come.
    pub(crate) waited: bool,
    pub(crate) reason: String,
}

impl Nccl {
    pub(crate) fn join(
        memory: &Allocator,
        id: UniqueId,
        place: (usize, usize),
        limit: Duration,
        order: NcclOrder,
    ) -> Result<Self, NotJoined> {
        let failed = |reason: String| NotJoined { waited: false, reason };
        let no_card = || failed("its memory is not that of a card".to_owned());
        let home = memory.home().ok_or_else(no_card)?;
        let stream =
            home.accelerator().stream("nccl").map_err(|error| failed(error.to_string()))?;
        let card = home.accelerator().card().ok_or_else(no_card)?;
        // A rank that NCCL cannot connect waits for the others to say so, which they do within its own limit.
        let joined = Communicator::join(card, id, place, limit / 2);
        let mut communicator = joined.map_err(|error| NotJoined {
            waited: matches!(error, CudaError::Late { .. }),
            reason: error.to_string(),
        })?;
        communicator.set_limit(limit);
        let (memory, scratch) = (memory.clone(), Mutex::default());
        Ok(Self { communicator, stream, memory, scratch, order })
    }

    /// Whether it reaches memory of this stream's device.
    pub(crate) fn reaches(&self, home: &DeviceStream) -> bool {
        let card = self.stream.accelerator().card();
        card.zip(home.accelerator().card()).is_some_and(|(own, other)| own.is_same(other))
    }

    /// The settings with which a descendant of this group uses NCCL too.
    pub(crate) fn settings(&self) -> (&Allocator, NcclOrder) {
        (&self.memory, self.order)
    }

    fn queue(&self) -> &paceline_cuda::Stream {
        self.stream.card().expect("the stream is that of a card")
    }

    /// Carries a call out. Returns the moment when the last rank had arrived.
    pub(crate) fn run(&self, context: &OpContext, engine: &Engine) -> Result<u64> {
        let met = agree::meet(context, engine)?;
        let outcome = self.start(context, &met).and_then(|done| {
            self.finish(context, engine, || done.is_done().map_err(|error| error.to_string()))
        });
        if outcome.is_err() {
            // Work that waits for other ranks would wait forever, and its memory with it.
            self.abort();
        }
        outcome.map(|()| met.present_ns)
    }

    pub(crate) fn abort(&self) {
        self.communicator.abort();
    }

    /// Queues the work. Returns the event of its end.
    fn start(&self, context: &OpContext, met: &AgreedCalls) -> Result<Event> {
        moves::queue(self, context, met)?;
        let done = Event::new(self.queue().card()).and_then(|done| {
            self.queue().record(&done)?;
            Ok(done)
        });
        done.map_err(|error| context.on_card(error.to_string()))
    }

    /// Waits until `is_done`, which says why the card has failed.
    fn finish(
        &self,
        context: &OpContext,
        engine: &Engine,
        is_done: impl Fn() -> Result<bool, String>,
    ) -> Result<()> {
        let begin_ns = now_ns();
        let mut waited = Waited::begin(begin_ns);
        loop {
            if is_done().map_err(|reason| context.on_card(reason))? {
                return Ok(());
            }
            self.communicator.check().map_err(|error| context.on_card(error.to_string()))?;
            if let Some(peer) = engine.gone() {
                return Err(context.lost(peer));
            }
            let so_far = waited.until(now_ns());
            if so_far > context.policy.limit {
                return Err(context.timed_out(Vec::new()));
            }
            if so_far < context.policy.spin {
                std::hint::spin_loop()
            } else {
                std::thread::sleep(LOOK_AGAIN)
            }
        }
    }

    /// The address of scratch memory of this size. Its contents are undefined.
    fn scratch(&self, len_bytes: usize) -> Result<u64> {
        let mut scratch = lock(&self.scratch);
        if scratch.as_ref().is_none_or(|old| old.num_bytes() < len_bytes) {
            // No work of an earlier operation is left, which might use it.
            *scratch = None;
            let shape = [len_bytes];
            *scratch = Some(self.memory.tensor(DType::U8, shape, Category::Communication)?);
            // Earlier users of the memory may still be at work in the stream of the program's memory.
            if let Some(home) = self.memory.home() {
                home.record().block();
            }
        }
        let Some(scratch) = &*scratch else { return Ok(0) };
        Ok(Region::on_card(scratch)?.base.addr() as u64)
    }
}
