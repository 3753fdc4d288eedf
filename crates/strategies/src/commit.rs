//! The commit point of a step: no rank makes its update before every rank has all that its update needs.
//!
//! A rank may be lost at any moment. The ranks that are left must then agree on the last step that all of them can reach, though some
//! have made their update and others have not. So a step waits for all ranks at a barrier between its gradients and its
//! update. If one rank has passed the barrier, then each rank has its final gradients and their factor, and completes the step
//! alone. If no rank has passed it, no rank has made its update, and the step can be made again by other ranks.
//!
//! The owner of a shard may be lost too. With two copies, the ranks that divide the model form a ring: each also keeps
//! the shard of the rank before it, with the optimizer's state. It receives the gradients of that shard in every step, before the
//! barrier, and makes the same update as the owner.
//!
//! Costs per step: a barrier and a copy of the running statistics. With two copies also the gradients of one shard on the
//! wire, one update more, and the memory of [`Commit::footprint`]. This file does not know who is lost, and who goes on.

use std::ops::Range;

use paceline_collectives::{Group, MeshShape};
use paceline_kernels::Compute;
use paceline_memory::{Category, Tensor};
use paceline_model::{Held, Layout, Model, Optimizer, Owned, Precision, Storage};
use paceline_trace::now_ns;

use crate::Trainer;
use crate::footprint::buffer_bytes;
use crate::sharding::gathers::exposed;
use crate::sharding::place::num_elems;
use crate::strategy::allocate;
use crate::{Footprint, Replica, Result, StepContext, Stepped, Strategy, StrategyError, span};

/// Makes each step end at a commit point: see [`Trainer::with_commit`](crate::Trainer::with_commit).
#[derive(Debug)]
pub struct Commit {
    peer: Option<PeerShard>,
    /// The running statistics after the last completed step.
    buffers: Tensor,
    /// The step that has all that its update needs, and has not ended.
    ready: Option<InterruptedStep>,
}

/// A step that has not ended, though this rank has all that its update needs.
#[derive(Clone, Copy, Debug)]
pub struct InterruptedStep {
    /// The outcome of the step, if it is completed.
    pub stepped: Stepped,
    /// Whether this rank has passed the commit point. Then every rank of the group can complete the step.
    pub has_passed: bool,
    /// The optimizer's steps after it.
    steps: u64,
}

/// This rank's copy of the shard of the rank before it.
#[derive(Debug)]
pub struct PeerShard {
    /// The elements of the copy.
    pub owned: Owned,
    /// Their values and gradients. The running statistics have no contents.
    pub storage: Storage,
    /// Their optimizer state.
    pub optimizer: Optimizer,
    /// The part of this rank's shard that the next rank keeps.
    sent: Owned,
    /// The messages of a rank with the most ranges.
    num_messages: usize,
}

impl Commit {
    /// Commit points for a replica between two steps, also after it has resumed, whose strategy has synchronized it
    /// ([`Strategy::sync_replicas`]). With two `copies`, each shard is kept twice: by its owner and, unless replicas have it
    /// anyway, by the next rank. A rank that is alone in its group has no other that could keep its shard. Collective.
    ///
    /// Errors if the gradients are not final before the update, or if a step cannot be made again because it changes more
    /// than parameters and running statistics.
    pub fn new(
        replica: &Replica,
        strategy: &dyn Strategy,
        optimizer: &Optimizer,
        copies: usize,
    ) -> Result<Self> {
        let refuse = |problem: &str| {
            Err(StrategyError::Setting(format!("a step with a commit point {problem}")))
        };
        let Replica { storage, compute, options, mesh, .. } = replica;
        if !(1..=2).contains(&copies) {
            return refuse(&format!("works with 1 or 2 copies of each shard, not {copies}"));
        }
        if options.steps_by_bucket || options.as_graph {
            let names = "ReplicaOptions::steps_by_bucket and ReplicaOptions::as_graph";
            return refuse(&format!(
                "needs all gradients before it updates any parameter: unset {names}"
            ));
        }
        let is_equal = strategy.exactness(mesh.shape()).keeps_replicas_equal();
        if !is_equal || !strategy.state().is_empty() {
            return refuse(&format!(
                "needs ranks with equal parameters, and a strategy without state of its own, unlike {}",
                strategy.name()
            ));
        }
        let peer = if copies > 1 { PeerShard::new(replica, strategy, optimizer)? } else { None };
        let (from, memory) = (storage.buffers(), &compute.allocator);
        let buffers = memory.tensor(from.dtype(), from.shape(), Category::Parameters)?;
        buffers.copy_from(from)?;
        Ok(Self { peer, buffers, ready: None })
    }

    /// The memory that [`Commit::new`] takes on a rank of a mesh, apart from the state of the copied shard
    /// ([`PeerShard::owned_by`]).
    pub fn footprint(
        (strategy, copies): (&dyn Strategy, usize),
        model: &Model,
        precision: Precision,
        mesh: &MeshShape,
        rank: usize,
    ) -> Footprint {
        let buffers = buffer_bytes(&model.layout, precision);
        let peer = (copies > 1).then(|| PeerShard::owned_by(strategy, model, mesh, rank)).flatten();
        let Some(Owned { values, grads, .. }) = peer else {
            return Footprint { parameters: buffers, ..Footprint::default() };
        };
        Footprint {
            parameters: num_elems(&values) * precision.master.size_bytes() + 2 * buffers,
            gradients: num_elems(&grads) * precision.grads.size_bytes(),
            ..Footprint::default()
        }
    }

    /// The step that was interrupted after this rank had all that its update needs. `None` before that, and between steps.
    pub fn interrupted(&self) -> Option<InterruptedStep> {
        self.ready
    }

    /// The copy of another rank's shard.
    pub fn peer(&self) -> Option<&PeerShard> {
        self.peer.as_ref()
    }

    /// The running statistics after the last completed step, the same on all ranks of the group.
    pub fn buffers(&self) -> &Tensor {
        &self.buffers
    }

    pub(crate) fn begin_step(&mut self) {
        self.ready = None;
    }

    /// Waits until all ranks have all that the update of this step needs. The optimizer has the settings of the update.
    pub(crate) fn reach(
        &mut self,
        cx: &mut StepContext,
        optimizer: &Optimizer,
        stepped: Stepped,
    ) -> Result<()> {
        cx.sync_buffers()?;
        let replica = cx.replica;
        if let Some(peer) = &mut self.peer {
            peer.optimizer.follow(optimizer);
            if stepped.is_updated {
                exposed(cx.track, span::GRAD_SYNC, || peer.receive_grads(replica))?;
            }
        }
        replica.compute.synchronize()?;
        let steps = optimizer.steps() + u64::from(stepped.is_updated);
        let ready = self.ready.insert(InterruptedStep { stepped, has_passed: false, steps });
        let start_ns = now_ns();
        cx.track.record(span::EXPOSED, || replica.world.barrier())?;
        ready.has_passed = true;
        cx.end_barrier(start_ns);
        Ok(())
    }

    /// Ends the step: makes the updates that were not made. Does not communicate.
    pub(crate) fn end_step(
        &mut self,
        compute: &Compute,
        own: &Storage,
        optimizer: &mut Optimizer,
    ) -> Result<()> {
        let Some(InterruptedStep { steps, .. }) = self.ready else { return Ok(()) };
        let peer = self.peer.as_mut().map(|peer| (&mut peer.optimizer, &peer.storage));
        for (optimizer, storage) in [(optimizer, own)].into_iter().chain(peer) {
            if optimizer.steps() < steps {
                optimizer.step(compute, storage)?;
            }
        }
        self.buffers.copy_from(own.buffers())?;
        self.ready = None;
        Ok(())
    }
}

impl PeerShard {
    /// The elements that `rank` of a mesh keeps for the rank before it. `None` if each shard has several owners anyway, or if
    /// there is no other rank.
    pub fn owned_by(
        strategy: &dyn Strategy,
        model: &Model,
        mesh: &MeshShape,
        rank: usize,
    ) -> Option<Owned> {
        Self::all_owned(strategy, model, mesh).map(|mut all| all.swap_remove(rank))
    }

    /// The same for all ranks.
    fn all_owned(strategy: &dyn Strategy, model: &Model, mesh: &MeshShape) -> Option<Vec<Owned>> {
        let count = mesh.num_ranks().unwrap_or(1);
        let all: Vec<Owned> = (0..count).map(|rank| strategy.owned(model, mesh, rank)).collect();
        let has_other =
            |own: usize| (0..count).any(|of| of != own && all[of].state == all[own].state);
        if count == 1 || (0..count).all(has_other) {
            return None;
        }
        let kept = |rank: usize| {
            let (own, peer) = (&all[rank], &all[(rank + count - 1) % count]);
            let mut values = certain(peer, &model.layout);
            if own.values == peer.values {
                // Both hold the frozen values.
                values.truncate(peer.state.len());
            }
            Owned { values, grads: peer.state.clone(), state: peer.state.clone() }
        };
        Some((0..count).map(kept).collect())
    }

    fn new(
        replica: &Replica,
        strategy: &dyn Strategy,
        optimizer: &Optimizer,
    ) -> Result<Option<Self>> {
        let Replica { model, storage, compute, group, mesh, options, .. } = replica;
        let Some(all) = Self::all_owned(strategy, model, mesh.shape()) else {
            return Ok(None);
        };
        let [owned, sent] = [0, 1].map(|ahead| all[(group.rank() + ahead) % all.len()].clone());
        let num_messages = all.iter().map(|of| of.values.len()).max().unwrap_or(0);
        let held = (owned.clone(), [false; 2]);
        let copy = allocate(model, options.precision, compute, mesh, held)?;
        let (config, memory) = (*optimizer.config(), &compute.allocator);
        let of_copy = Optimizer::of_ranges(config, &copy, owned.state.clone(), memory)?;
        let copy = Self { owned, storage: copy, optimizer: of_copy, sent, num_messages };
        let values =
            [(storage.values(), &copy.sent.values), (copy.storage.values(), &copy.owned.values)];
        copy.pass(group, values)?;
        for (own, kept) in optimizer.state().iter().zip(copy.optimizer.state()) {
            copy.pass(group, [(own, &copy.sent.state), (kept, &copy.owned.state)])?;
        }
        Ok(Some(copy))
    }

    fn receive_grads(&self, replica: &Replica) -> Result<()> {
        let (own, kept) = (replica.storage.grads(), self.storage.grads());
        self.pass(&replica.group, [(own, &self.sent.grads), (kept, &self.owned.grads)])
    }

    /// Sends these ranges to the next rank, and receives those of the rank before: one message each. All ranks send equally
    /// many, so a rank with fewer ranges sends empty ones.
    fn pass(&self, group: &Group, ranges: [(&Held, &Vec<Range<usize>>); 2]) -> Result<()> {
        let (rank, count) = (group.rank(), group.world_size());
        let part = |(held, ranges): (&Held, &Vec<Range<usize>>), at: usize| match ranges.get(at) {
            Some(range) => held.slice(range.clone()),
            None => Ok(held.tensor().slice(0..0)?),
        };
        for at in 0..self.num_messages {
            let [sent, received] = [part(ranges[0], at)?, part(ranges[1], at)?];
            group.send_recv(&sent, (rank + 1) % count, &received, (rank + count - 1) % count)?;
        }
        Ok(())
    }
}

/// The state of a rank that has left its group, whose other ranks may be lost.
#[derive(Debug)]
pub struct LeftTrainer {
    /// The elements of [`Trainer::valid`].
    pub valid: Owned,
    /// The parameters, and the running statistics of the last completed step.
    pub storage: Storage,
    /// The state of the elements that the rank owned.
    pub optimizer: Optimizer,
    commit: Option<Commit>,
    compute: Compute,
}

impl LeftTrainer {
    pub(crate) fn new(trainer: Trainer) -> Self {
        let valid = trainer.valid();
        let Trainer { replica: Replica { storage, compute, .. }, optimizer, commit, .. } = trainer;
        Self { valid, storage, optimizer, commit, compute }
    }

    /// The step that was interrupted after this rank had all that its update needs, if any.
    pub fn interrupted(&self) -> Option<InterruptedStep> {
        self.commit.as_ref().and_then(Commit::interrupted)
    }

    /// The copy of another rank's shard.
    pub fn peer(&self) -> Option<&PeerShard> {
        self.commit.as_ref().and_then(Commit::peer)
    }

    /// Completes the interrupted step: makes the updates that were not made. A rank must have passed the commit point.
    /// Errors if this rank does not have all that the updates need.
    pub fn complete(&mut self) -> Result<()> {
        match &mut self.commit {
            Some(commit) if commit.ready.is_some() => {
                commit.end_step(&self.compute, &self.storage, &mut self.optimizer)
            }
            _ => Err(StrategyError::Setting("no step has reached its commit point".to_owned())),
        }
    }

    /// Takes the running statistics back to those after the last completed step.
    pub fn restore_buffers(&self) -> Result<()> {
        match &self.commit {
            Some(commit) => Ok(self.storage.buffers().copy_from(&commit.buffers)?),
            None => Ok(()),
        }
    }
}

/// The values that a rank surely holds between two updates: those that it updates itself, and frozen ones.
pub(crate) fn certain(owned: &Owned, layout: &Layout) -> Vec<Range<usize>> {
    let frozen = owned.values.iter().map(|range| range.start.max(layout.trained_len())..range.end);
    let frozen = frozen.filter(|range| !range.is_empty());
    owned.state.iter().cloned().chain(frozen).collect()
}
