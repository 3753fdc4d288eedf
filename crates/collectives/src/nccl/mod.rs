//! Operations on the memory of cards, by NCCL, without a way through the host.
//!
//! Before a byte moves, every rank shows the others its call over the group's own transport, as everywhere: NCCL itself
//! waits forever if calls do not match. Then the work runs on a stream of its own, and this rank waits for its end, for at
//! most the group's limit; a rank that gives up ends its work on the card too.
//!
//! NCCL reduces in orders of its own, which depend on the number of ranks and on the version. With [`NcclOrder::Tree`] it
//! only moves bytes: each rank gets its share of all ranks' data, a kernel reduces it as a tree over the ranks, and the shares
//! are gathered. An all-reduce moves `2 (n-1)/n S` bytes in each direction of a rank, as a ring does, and takes `S` bytes of
//! memory besides.
//!
//! | file | what it does |
//! |---|---|
//! | `agree` | shows the calls to all ranks |
//! | `moves` | which bytes go where, for each operation |
//! | `reduce` | the kernel of the tree |
//!
//! Input: a call whose memory is on a card. Output: the moment when all ranks had arrived. This module does not know who
//! waits for the result.

mod agree;
mod moves;
mod reduce;

use std::sync::Mutex;
use std::time::Duration;

use paceline_cuda::nccl::{Communicator, UniqueId, version};
use paceline_cuda::{CudaError, Event};
use paceline_memory::{Allocator, Category, DType, DeviceStream, Tensor};
use paceline_trace::{lock, now_ns};
use rustix::system::uname;
use serde::{Deserialize, Serialize};

use crate::context::{OpContext, Waited};
use crate::engine::Engine;
use crate::{CollectiveError, Group, Result};

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

/// What a rank's operations on a card need.
#[derive(Debug)]
pub(crate) struct Nccl {
    communicator: Communicator,
    stream: DeviceStream,
    /// Where a rank's program has its memory.
    memory: Allocator,
    scratch: Mutex<Option<Tensor>>,
    order: NcclOrder,
}

/// What a rank tells the others about its card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Seat {
    host: String,
    /// The card's place in its host; of an emulated card, in its process.
    card: String,
    version: i32,
    order: u8,
}

/// How often a rank that waits for the card looks, after it has spun.
const LOOK_AGAIN: Duration = Duration::from_micros(50);

impl Group {
    /// From now on, operations on the memory of cards go from card to card by NCCL, instead of through memory of the host.
    /// `memory` is where this rank's tensors are. A collective call; the groups that are split from this one later do the
    /// same by themselves. A second call changes nothing.
    ///
    /// Errors if the memory is not a card's, if NCCL is missing, if ranks share a card, or if they have different versions of
    /// NCCL, or if it has not connected them within half of the group's timeout. Then every rank gets the error, and the group goes on
    /// through the host.
    pub fn use_nccl(&self, memory: &Allocator, order: NcclOrder) -> Result<()> {
        if self.nccl_order().is_some() {
            return Ok(());
        }
        let own = Seat::of(memory, order).map_err(|error| error.to_string());
        // Every rank tells, so that nobody waits for one that cannot.
        let all: Vec<Result<Seat, String>> = self.all_gather_object(&own)?;
        let seats = all.into_iter().enumerate().map(|(rank, seat)| {
            seat.map_err(|reason| {
                self.no_nccl(format!("rank {}: {reason}", self.outermost_rank(rank)))
            })
        });
        let seats = seats.collect::<Result<Vec<Seat>, _>>()?;
        if let Some(why) = refusal(&seats, |rank| self.outermost_rank(rank)) {
            return Err(self.no_nccl(why));
        }
        let id = match self.rank() {
            0 => Some(UniqueId::new().map(|id| id.bytes().to_vec()).map_err(|e| e.to_string())),
            _ => None,
        };
        let id: Result<Vec<u8>, String> = self.broadcast_object(id.as_ref(), 0)?;
        let id = id.map_err(|reason| self.no_nccl(reason))?;
        let id = UniqueId::of(id.try_into().map_err(|_| self.no_nccl("a name of no length"))?);
        let place = (self.rank(), self.world_size());
        let nccl = Nccl::join(memory, id, place, self.timeout(), order);
        // NCCL may have connected some ranks and not others.
        let all: Vec<Option<NotJoined>> = self.all_gather_object(&nccl.as_ref().err().cloned())?;
        let missing = all.into_iter().enumerate().filter_map(|(rank, why)| Some((rank, why?)));
        // A rank that waited in vain says less than one that failed.
        let missing = missing.min_by_key(|(_, why)| why.waited);
        match (nccl, missing) {
            (Ok(nccl), None) => {
                self.set_nccl(nccl);
                Ok(())
            }
            (nccl, missing) => {
                if let Ok(nccl) = &nccl {
                    nccl.communicator.abort();
                }
                let (rank, why) = missing.expect("this rank told, too");
                Err(self.no_nccl(format!("rank {}: {}", self.outermost_rank(rank), why.reason)))
            }
        }
    }

    fn no_nccl(&self, reason: impl Into<String>) -> CollectiveError {
        let (rank, world_size) = (self.outermost_rank(self.rank()), self.world_size());
        let (what, reason) = ("NCCL", reason.into());
        CollectiveError::Setup { rank, world_size, what, reason }
    }
}

/// Why NCCL has not connected a rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct NotJoined {
    /// Whether it waited for others in vain.
    waited: bool,
    reason: String,
}

impl Seat {
    fn of(memory: &Allocator, order: NcclOrder) -> Result<Self, CudaError> {
        let version = version()?;
        let card = memory.home().and_then(|home| home.accelerator().card());
        let card = card.map(|card| card.place()).transpose()?.unwrap_or_default();
        let host = uname().nodename().to_string_lossy().into_owned();
        Ok(Self { host, card, version, order: order as u8 })
    }
}

/// Why ranks with these seats cannot use NCCL together.
fn refusal(seats: &[Seat], named: impl Fn(usize) -> usize) -> Option<String> {
    let words =
        |version: i32| format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100);
    for (rank, seat) in seats.iter().enumerate() {
        if seat.card.is_empty() {
            return Some(format!("rank {}: its memory is not that of a card", named(rank)));
        }
        if seat.version != seats[0].version {
            return Some(format!(
                "rank {} has NCCL {} and rank {} has {}; install the same version everywhere",
                named(0),
                words(seats[0].version),
                named(rank),
                words(seat.version)
            ));
        }
        if seat.order != seats[0].order {
            return Some(format!(
                "ranks {} and {} add up in different orders; pass the same --nccl-order to all",
                named(0),
                named(rank)
            ));
        }
        let is_same = |other: &Seat| (&other.host, &other.card) == (&seat.host, &seat.card);
        if let Some(other) = seats[..rank].iter().position(is_same) {
            return Some(format!(
                "ranks {} and {} share a card ({} of {}), which NCCL refuses",
                named(other),
                named(rank),
                seat.card,
                seat.host
            ));
        }
    }
    None
}

impl Nccl {
    fn join(
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

    /// What a group that descends from this one needs to use NCCL too.
    pub(crate) fn like(&self) -> (&Allocator, NcclOrder) {
        (&self.memory, self.order)
    }

    fn queue(&self) -> &paceline_cuda::Stream {
        self.stream.card().expect("the stream is that of a card")
    }

    /// Carries a call out. Returns the moment when the last rank had arrived.
    pub(crate) fn run(&self, context: &OpContext, engine: &Engine) -> Result<u64> {
        let met = agree::meet(context, engine)?;
        let outcome =
            self.start(context, &met).and_then(|done| self.finish(context, engine, &done));
        if outcome.is_err() {
            // Work that waits for other ranks would wait forever, and its memory with it.
            self.communicator.abort();
        }
        outcome.map(|()| met.present_ns)
    }

    /// Puts the work into the stream. Returns the event behind it.
    fn start(&self, context: &OpContext, met: &agree::Met) -> Result<Event> {
        moves::queue(self, context, met)?;
        let done = Event::new(self.queue().card()).and_then(|done| {
            self.queue().record(&done)?;
            Ok(done)
        });
        done.map_err(|error| context.on_card(error.to_string()))
    }

    /// Waits until the work is done.
    fn finish(&self, context: &OpContext, engine: &Engine, done: &Event) -> Result<()> {
        let failed = |error: CudaError| context.on_card(error.to_string());
        let begin_ns = now_ns();
        let mut waited = Waited::begin(begin_ns);
        loop {
            if done.is_done().map_err(failed)? {
                return Ok(());
            }
            self.communicator.check().map_err(failed)?;
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
            // What had the memory before may still be at work in the stream of the program's memory.
            if let Some(home) = self.memory.home() {
                home.record().block();
            }
        }
        let Some(scratch) = &*scratch else { return Ok(0) };
        Ok(crate::ops::address(scratch)?.base.addr() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seat(host: &str, card: &str, version: i32) -> Seat {
        Seat { host: host.to_owned(), card: card.to_owned(), version, order: 0 }
    }

    #[test]
    fn who_cannot_use_it_together_is_told_why() {
        let says = |seats: &[Seat]| refusal(seats, |rank| rank + 10).unwrap_or_default();
        let two = |other| says(&[seat("a", "01", 22_809), other]);
        assert_eq!(two(seat("a", "02", 22_809)), "");
        assert_eq!(two(seat("b", "01", 22_809)), "");
        assert_eq!(
            two(seat("a", "01", 22_809)),
            "ranks 10 and 11 share a card (01 of a), which NCCL refuses"
        );
        assert_eq!(
            two(seat("b", "01", 21_805)),
            "rank 10 has NCCL 2.28.9 and rank 11 has 2.18.5; install the same version everywhere"
        );
        assert!(two(seat("b", "", 22_809)).contains("rank 11: its memory is not that of a card"));
        let ring = Seat { order: 1, ..seat("b", "01", 22_809) };
        assert!(two(ring).contains("different orders"));
    }
}
