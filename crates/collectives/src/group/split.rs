//! How a group divides into sub-groups.
//!
//! The members of a sub-group exchange their addresses within the parent group, so no store has to outlive
//! the rendezvous.

use std::sync::atomic::Ordering;

use paceline_rendezvous::{PeerAddress, PeerListener};

use super::form::Connect;
use super::host_links::HostLinks;
use super::{Group, Lineage, Membership};
use crate::engine::Engine;
use crate::shared::{Inherited, Reach, SharedState};
use crate::{GroupOptions, Result};

impl Group {
    /// Divides the group: ranks that pass the same color form a new group, in which they keep their order.
    /// A collective call; ranks that pass `None` take part and get no group.
    ///
    /// The operations of the new group are independent of those of this group. The new group emulates the
    /// same link, and both share this rank's emulated network card: together they move no more bytes
    /// than the link carries.
    ///
    /// Both groups keep one record of this rank's operations ([`Group::fresh_records`]), and operations of the new group use
    /// the memory that this group has allocated in place. Errors of the new
    /// group name ranks by their numbers in the group from which both descend.
    pub fn split(&self, color: Option<u32>) -> Result<Option<Self>> {
        self.split_as(color, None)
    }

    /// Like [`Group::split`]. `label` is the name of this split, by default its number.
    pub(crate) fn split_as(&self, color: Option<u32>, label: Option<&str>) -> Result<Option<Self>> {
        let group = self.divide(color, label, &self.membership.lineage)?;
        if let (Some(group), Some(emulator)) = (&group, self.membership.core.emulator.get()) {
            // The parent's transport was fast enough for this link, and the sub-group's is no slower.
            group.set_emulator(emulator.link);
        }
        Ok(group)
    }

    /// Like [`Group::split`], but the new group has a record of its own and emulates no link. For measurements, whose
    /// operations must not appear in the record of this rank.
    pub(crate) fn split_apart(&self, color: Option<u32>) -> Result<Option<Self>> {
        self.divide(color, None, &self.membership.lineage.apart())
    }

    /// Like [`Group::split_as`], as a sub-group of `lineage`, but the new group emulates no link.
    fn divide(
        &self,
        color: Option<u32>,
        label: Option<&str>,
        lineage: &Lineage,
    ) -> Result<Option<Self>> {
        let split = self.membership.num_splits.fetch_add(1, Ordering::Relaxed);
        let mut colors = vec![0i64; self.world_size()];
        let own = color.map_or(-1, i64::from);
        self.all_gather_slice(&[own], &mut colors)?;
        let same = |rank: &usize| colors[*rank] == own;
        let members: Vec<usize> = (0..self.world_size()).filter(same).collect();
        let rank = members.iter().filter(|&&member| member < self.rank()).count();
        let options = GroupOptions { link: None, ..self.membership.options.clone() };
        let label = format!("{}.{own}", label.map_or_else(|| split.to_string(), str::to_owned));
        let inherited = self.inherited(&members);
        // A rank without a group does not count this split.
        let lineage = || lineage.sub_group(&label, &members, inherited);
        let Membership { host_links, core, transport, .. } = &*self.membership;
        let world = members.len();
        let (engine, host_links) = match (host_links, &core.engine) {
            (HostLinks::Threads(_), _) if color.is_none() => return Ok(None),
            (HostLinks::Threads(registry), _) => {
                let (memory, registry) = registry.join((split, own), world)?;
                let engine = SharedState::new(rank, world, memory, Reach::Threads);
                // Splits are numbered within each group.
                (Engine::Shared(engine), HostLinks::Threads(registry))
            }
            #[cfg(feature = "mpi")]
            (_, Engine::Mpi(mpi)) => {
                // MPI's colors have fewer bits than ours, so the first member's rank is the color.
                let Some(engine) = mpi.split(color.map(|_| members[0]))? else { return Ok(None) };
                (Engine::Mpi(engine), HostLinks::None)
            }
            _ => {
                let by = self.connects_by(&members);
                let key = &self.membership.lineage.key;
                let listener = PeerListener::bind(key, by.host(), self.rank(), self.world_size())?;
                let all = self.all_gather_object(listener.address())?;
                if color.is_none() {
                    return Ok(None);
                }
                let addresses: Vec<PeerAddress> =
                    members.iter().map(|&member| all[member].clone()).collect();
                let lineage = lineage();
                let names = lineage.members.clone();
                let group = Self::form(&listener, &addresses, by, rank, options, lineage)
                    .map_err(|error| error.named_by(&names))?;
                return self.like_this(group).map(Some);
            }
        };
        let group =
            Self::assemble(rank, world, engine, *transport, host_links, options, lineage())?;
        self.like_this(group).map(Some)
    }

    /// How these members connect, which are processes. Those of a hybrid group may be on one host, or unevenly on several hosts.
    fn connects_by(&self, members: &[usize]) -> Connect<'_> {
        match &self.membership.core.engine {
            Engine::Tcp(tcp) => Connect::Tcp(tcp.host()),
            Engine::Hybrid(hybrid) => match hybrid.local_world(members) {
                Some(local) if local > 1 && local == members.len() => Connect::Shm,
                Some(local) if local > 1 => Connect::Hybrid(hybrid.tcp.host(), local),
                _ => Connect::Tcp(hybrid.tcp.host()),
            },
            _ => Connect::Shm,
        }
    }

    /// The memory of this group that a sub-group of these members can reach.
    fn inherited(&self, members: &[usize]) -> Option<Inherited> {
        let shared = self.shared()?;
        let Reach::Segments(segments) = &shared.reach else { return None };
        let first = self.rank() - shared.rank;
        let here = members.iter().filter_map(|member| member.checked_sub(first));
        let ranks = here.filter(|&rank| rank < shared.world).collect();
        Some(Inherited { segments: segments.clone(), ranks })
    }
}
