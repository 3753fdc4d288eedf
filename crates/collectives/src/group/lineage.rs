//! The lineage of a group: its name, its members, and the state that it shares with its parent group and its sub-groups.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use paceline_memory::Allocator;
use paceline_rendezvous::RunKey;
use paceline_trace::lock;

use crate::emulator::NetworkCard;
use crate::record::RecentRecords;
use crate::shared::Inherited;
use crate::worker::Fenced;

/// The state that all groups of a rank share, which descend from the same group.
#[derive(Debug, Default)]
pub(crate) struct RankState {
    /// The network card of this rank: all groups together move no more bytes than the link carries.
    pub(crate) card: Arc<NetworkCard>,
    /// The record of operations of this rank.
    pub(crate) records: Arc<Mutex<RecentRecords>>,
    /// For the data of slices and objects.
    pub(crate) memory: Allocator,
    /// Whether an operation of one of the groups has failed.
    pub(crate) is_broken: Arc<AtomicBool>,
    num_groups: AtomicU32,
    /// The memory of failed operations of each group.
    fences: Mutex<Vec<Arc<Mutex<Fenced>>>>,
}

impl RankState {
    /// The memory of failed operations of all groups.
    pub(super) fn fences(&self) -> Vec<Arc<Mutex<Fenced>>> {
        lock(&self.fences).clone()
    }

    pub(super) fn add_fence(&self, fence: &Arc<Mutex<Fenced>>) {
        let mut fences = lock(&self.fences);
        // This rank has left the groups of the others, and none of their operations had failed.
        fences.retain(|of| Arc::strong_count(of) > 1 || !lock(of).is_empty());
        fences.push(fence.clone());
    }
}

/// A group's name and members, and the state that it shares with related groups.
#[derive(Clone, Debug)]
pub(crate) struct Lineage {
    /// `world`, or `world/1.0` for the ranks of color 0 in the second split of `world`.
    pub(crate) name: String,
    /// 0 for the outermost group, then counted in the order in which this rank joined.
    pub(crate) number: u32,
    /// The number of each member in the outermost group; empty for that group.
    pub(crate) members: Arc<[usize]>,
    pub(crate) rank: Arc<RankState>,
    /// The memory that the group can reach because its parent group can reach it.
    pub(crate) inherited: Option<Inherited>,
    /// The key that proves to other processes that a rank belongs to the run. Empty for groups that make no connections.
    pub(crate) key: RunKey,
}

impl Lineage {
    /// The lineage of a group that is not split from another group.
    pub(crate) fn world() -> Self {
        Self {
            name: "world".into(),
            number: 0,
            members: Arc::default(),
            rank: Arc::default(),
            inherited: None,
            key: RunKey::default(),
        }
    }

    /// The lineage of such a group whose ranks are processes that have this key.
    pub(crate) fn of_processes(key: &RunKey) -> Self {
        Self { key: key.clone(), ..Self::world() }
    }

    /// Like this lineage, but sub-groups of the result have a record and a network card of their own. They
    /// share only the memory that this group can reach.
    pub(super) fn apart(&self) -> Self {
        Self { rank: Arc::default(), ..self.clone() }
    }

    /// The lineage of a sub-group. `members` are numbers of ranks in this group. `label` is the name of the sub-group within
    /// this group.
    pub(super) fn sub_group(
        &self,
        label: &str,
        members: &[usize],
        inherited: Option<Inherited>,
    ) -> Self {
        Self {
            name: format!("{}/{label}", self.name),
            number: self.rank.num_groups.fetch_add(1, Ordering::Relaxed) + 1,
            members: members.iter().map(|&member| self.outermost(member)).collect(),
            rank: self.rank.clone(),
            inherited,
            key: self.key.clone(),
        }
    }

    pub(super) fn outermost(&self, rank: usize) -> usize {
        self.members.get(rank).copied().unwrap_or(rank)
    }
}
