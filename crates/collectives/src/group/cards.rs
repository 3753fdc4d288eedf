//! How a group begins to use NCCL: the ranks compare their cards, and join NCCL together.
//!
//! Input: where each rank has its memory. Output: a group whose operations on cards go by NCCL, or the reason why not.

use paceline_cuda::CudaError;
use paceline_cuda::nccl::{UniqueId, version};
use paceline_memory::{Allocator, Tensor};
use rustix::system::uname;
use serde::{Deserialize, Serialize};

use super::Group;
use crate::nccl::{Nccl, NcclOrder, NotJoined};
use crate::{CollectiveError, Result};

/// A rank's card, as the rank describes it to the others.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct CardInfo {
    host: String,
    /// The card's place in its host; of an emulated card, in its process.
    card: String,
    version: i32,
    order: u8,
}

impl Group {
    /// From now on, operations on the memory of cards go from card to card by NCCL, instead of through memory of the host.
    /// `memory` is where this rank's tensors are. A collective call; groups that are split from this one later do the
    /// same. A second call changes nothing.
    ///
    /// Errors if the memory is not a card's, if NCCL is missing, if ranks share a card or have different versions of
    /// NCCL, or if it has not connected them within half of the group's timeout. Then every rank gets the error, and the group
    /// still goes through the host.
    pub fn use_nccl(&self, memory: &Allocator, order: NcclOrder) -> Result<()> {
        if self.nccl_order().is_some() {
            return Ok(());
        }
        let own = CardInfo::of(memory, order).map_err(|error| error.to_string());
        // Every rank reports, so that nobody waits for a rank that cannot join.
        let all: Vec<Result<CardInfo, String>> = self.all_gather_object(&own)?;
        let cards = all.into_iter().enumerate().map(|(rank, info)| {
            info.map_err(|reason| {
                self.no_nccl(format!("rank {}: {reason}", self.outermost_rank(rank)))
            })
        });
        let cards = cards.collect::<Result<Vec<CardInfo>, _>>()?;
        if let Some(why) = refusal(&cards, |rank| self.outermost_rank(rank)) {
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
        let nccl = Nccl::join(memory, id, place, self.options().timeout, order);
        // NCCL may have connected some ranks and not others.
        let all: Vec<Option<NotJoined>> = self.all_gather_object(&nccl.as_ref().err().cloned())?;
        let missing = all.into_iter().enumerate().filter_map(|(rank, why)| Some((rank, why?)));
        // The error of a rank that failed says more than that of a rank that waited for it.
        let missing = missing.min_by_key(|(_, why)| why.waited);
        match (nccl, missing) {
            (Ok(nccl), None) => {
                // What was set before stays.
                let _ = self.membership.core.nccl.set(nccl);
                Ok(())
            }
            (nccl, missing) => {
                if let Ok(nccl) = &nccl {
                    nccl.abort();
                }
                let (rank, why) = missing.expect("this rank reported its error too");
                Err(self.no_nccl(format!("rank {}: {}", self.outermost_rank(rank), why.reason)))
            }
        }
    }

    fn no_nccl(&self, reason: impl Into<String>) -> CollectiveError {
        let (rank, world_size) = (self.outermost_rank(self.rank()), self.world_size());
        let (what, reason) = ("NCCL", reason.into());
        CollectiveError::Setup { rank, world_size, what, reason }
    }

    /// The order in which NCCL's ranks add up; `None` if the group does not use NCCL.
    pub fn nccl_order(&self) -> Option<NcclOrder> {
        self.membership.core.nccl.get().map(|nccl| nccl.settings().1)
    }

    /// Whether operations on a tensor's memory are carried out by NCCL.
    pub(crate) fn reaches(&self, tensor: &Tensor) -> bool {
        let home = tensor.buffer().allocator().home();
        self.membership.core.nccl.get().zip(home).is_some_and(|(nccl, home)| nccl.reaches(home))
    }

    pub(super) fn like_this(&self, group: Self) -> Result<Self> {
        if let Some(nccl) = self.membership.core.nccl.get() {
            let (memory, order) = nccl.settings();
            group.use_nccl(memory, order)?;
        }
        Ok(group)
    }
}

impl CardInfo {
    fn of(memory: &Allocator, order: NcclOrder) -> Result<Self, CudaError> {
        let version = version()?;
        let card = memory.home().and_then(|home| home.accelerator().card());
        let card = card.map(|card| card.place()).transpose()?.unwrap_or_default();
        let host = uname().nodename().to_string_lossy().into_owned();
        Ok(Self { host, card, version, order: order as u8 })
    }
}

/// Why ranks with these cards cannot use NCCL together.
fn refusal(cards: &[CardInfo], named: impl Fn(usize) -> usize) -> Option<String> {
    let words =
        |version: i32| format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100);
    for (rank, info) in cards.iter().enumerate() {
        if info.card.is_empty() {
            return Some(format!("rank {}: its memory is not that of a card", named(rank)));
        }
        if info.version != cards[0].version {
            return Some(format!(
                "rank {} has NCCL {} and rank {} has {}; install the same version everywhere",
                named(0),
                words(cards[0].version),
                named(rank),
                words(info.version)
            ));
        }
        if info.order != cards[0].order {
            return Some(format!(
                "ranks {} and {} add up in different orders; pass the same --nccl-order to all",
                named(0),
                named(rank)
            ));
        }
        let is_same = |other: &CardInfo| (&other.host, &other.card) == (&info.host, &info.card);
        if let Some(other) = cards[..rank].iter().position(is_same) {
            return Some(format!(
                "ranks {} and {} share a card ({} of {}), which NCCL refuses",
                named(other),
                named(rank),
                info.card,
                info.host
            ));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(host: &str, card: &str, version: i32) -> CardInfo {
        CardInfo { host: host.to_owned(), card: card.to_owned(), version, order: 0 }
    }

    #[test]
    fn the_reason_says_who_cannot_use_it_together() {
        let says = |cards: &[CardInfo]| refusal(cards, |rank| rank + 10).unwrap_or_default();
        let two = |other| says(&[info("a", "01", 22_809), other]);
        assert_eq!(two(info("a", "02", 22_809)), "");
        assert_eq!(two(info("b", "01", 22_809)), "");
        assert_eq!(
            two(info("a", "01", 22_809)),
            "ranks 10 and 11 share a card (01 of a), which NCCL refuses"
        );
        assert_eq!(
            two(info("b", "01", 21_805)),
            "rank 10 has NCCL 2.28.9 and rank 11 has 2.18.5; install the same version everywhere"
        );
        assert!(two(info("b", "", 22_809)).contains("rank 11: its memory is not that of a card"));
        let ring = CardInfo { order: 1, ..info("b", "01", 22_809) };
        assert!(two(ring).contains("different orders"));
    }
}
