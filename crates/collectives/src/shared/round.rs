//! One round of the shared state machine: arrive, meet, compare, and finish.
//!
//! This module knows the order of events on a rank. The file of each operation defines what happens between
//! the two phases of the barrier.

use std::sync::atomic::Ordering;

use super::control::Slot;
use super::fate::{Fate, WaitError};
use super::segment::SegmentOffset;
use super::state::{SharedState, half_bytes};
use crate::call::{Call, CallHeader, Conflict, Region, Shares};
use crate::context::OpContext;
use crate::meet::{AgreedCalls, CallsOfAll, ShowCalls, meet, shares};
use crate::{CollectiveError, OpKind, Result};

/// A round in which all ranks have shown their calls.
pub(crate) struct Round {
    pub(super) number: u32,
    pub(crate) present_ns: u64,
    /// Each rank's call, and the call's sequence number on that rank, in rank order.
    pub(crate) calls: Vec<CallHeader>,
    pub(crate) operations: Vec<u32>,
    /// Whether any rank's data must be staged.
    pub(super) is_anyone_staged: bool,
}

impl Round {
    pub(super) fn shares(&self) -> Shares {
        shares(&self.calls)
    }
}

/// The ranks of a host, which show their calls in the shared block.
struct Slots<'a> {
    shared: &'a SharedState,
    /// The number of the round, and whether any rank's data must be staged.
    round: (u32, bool),
}

impl ShowCalls for Slots<'_> {
    #[inline(always)]
    fn show_call(&mut self, context: &OpContext) -> Result<CallsOfAll> {
        let Round { number, present_ns, calls, operations, is_anyone_staged } =
            self.shared.show(context, |round, is_staged| {
                self.shared.publish(context.call, round, is_staged);
            })?;
        self.round = (number, is_anyone_staged);
        Ok(CallsOfAll { present_ns, calls, operations })
    }

    fn show_blocks(&mut self, _: &OpContext, _: &[u64]) -> Result<Vec<Vec<u64>>> {
        // Each rank published its blocks before it arrived.
        let world = self.shared.world;
        let word = |rank, peer, side: usize| {
            let words = self.shared.control().blocks(self.round.0, rank, peer);
            words[side].load(Ordering::Relaxed)
        };
        let row = |rank| {
            let side = |side| (0..world).map(move |peer| word(rank, peer, side));
            side(0).chain(side(1)).collect()
        };
        Ok((0..world).map(row).collect())
    }
}

impl SharedState {
    /// Shows this rank's call, waits until all others have shown theirs, and compares them.
    pub(super) fn meet(&self, context: &OpContext) -> Result<Round> {
        let mut slots = Slots { shared: self, round: (0, false) };
        let AgreedCalls { present_ns, calls, .. } = meet(&mut slots, context)?;
        let (number, is_anyone_staged) = slots.round;
        Ok(Round { number, present_ns, calls, operations: Vec::new(), is_anyone_staged })
    }

    /// Like [`SharedState::meet`], but does not compare the calls. `publish` writes further data for the others. It takes the
    /// number of the round, and whether this rank's data must be staged.
    pub(crate) fn show(
        &self,
        context: &OpContext,
        publish: impl FnOnce(u32, bool),
    ) -> Result<Round> {
        let number = self.next_round();
        let places = self.own_places(context.call);
        publish(number, places[0].is_none());
        self.arrive_with(context, number, places);
        let present_ns = self.wait_present(context, number)?;
        let slots = (0..self.world).map(|peer| self.control().slot(number, peer));
        let begun = slots.clone().map(|slot| slot.started_ns.load(Ordering::Relaxed)).enumerate();
        let slowest = begun.max_by_key(|(_, started_ns)| *started_ns).map_or(0, |(rank, _)| rank);
        self.slowest.store(slowest, Ordering::Relaxed);
        Ok(Round {
            number,
            present_ns,
            calls: slots.clone().map(|slot| slot.call.load()).collect(),
            operations: slots.clone().map(|slot| slot.operation.load(Ordering::Relaxed)).collect(),
            is_anyone_staged: slots.clone().any(|slot| slot.send.load().is_none()),
        })
    }

    /// Writes the blocks of an all-to-all, or the first piece of data that the others reduce from the staging area.
    fn publish(&self, call: &Call, round: u32, is_staged: bool) {
        if let Some(blocks) = &call.blocks {
            for (peer, (&sent, &expected)) in blocks.send.iter().zip(&blocks.recv).enumerate() {
                let words = self.control().blocks(round, self.rank, peer);
                words[0].store(sent, Ordering::Relaxed);
                words[1].store(expected, Ordering::Relaxed);
            }
        }
        let is_reduced = matches!(call.kind, OpKind::AllReduce | OpKind::Reduce);
        if is_reduced && is_staged {
            self.stage_piece(call, round, 0);
        }
    }

    /// Copies the piece of this rank's data that begins at `start` to the staging area.
    pub(super) fn stage_piece(&self, call: &Call, round: u32, start: usize) {
        let len_bytes = half_bytes(self.world).min(call.send.len_bytes - start);
        self.count_staged(len_bytes);
        // SAFETY: both are valid for the piece. Nobody reads this half any longer, since all ranks have arrived in the
        // round after the one that used it last.
        unsafe {
            let from = call.send.base.add(start);
            std::ptr::copy_nonoverlapping(from, self.stage(self.rank, round), len_bytes);
        }
    }

    pub(super) fn next_round(&self) -> u32 {
        self.rounds.fetch_add(1, Ordering::Relaxed).wrapping_add(1)
    }

    /// The number of the latest round in which this rank has arrived.
    pub(super) fn latest_round(&self) -> u32 {
        self.rounds.load(Ordering::Relaxed)
    }

    /// Arrives in `round`, after publishing this rank's call and where its data lie.
    pub(super) fn arrive(&self, context: &OpContext, round: u32) {
        self.arrive_with(context, round, self.own_places(context.call));
    }

    /// Where the two sides of this rank's data lie, if peers can reach them.
    fn own_places(&self, call: &Call) -> [Option<SegmentOffset>; 2] {
        let (send, recv) = (self.locate(&call.send), self.locate(&call.recv));
        // In operations in which peers also write to the receiving side, either both sides of a rank are used
        // in place or neither is.
        let is_shared_out =
            matches!(call.kind, OpKind::AllReduce | OpKind::Reduce | OpKind::AllGather);
        [send.filter(|_| recv.is_some() || !is_shared_out), recv.filter(|_| send.is_some())]
    }

    fn arrive_with(
        &self,
        context: &OpContext,
        round: u32,
        [send, recv]: [Option<SegmentOffset>; 2],
    ) {
        let slot = self.control().slot(round, self.rank);
        slot.call.store(&context.call.header());
        slot.send.store(send);
        slot.recv.store(recv);
        slot.operation.store(context.seq, Ordering::Relaxed);
        slot.started_ns.store(context.started_ns, Ordering::Relaxed);
        slot.working.store(1, Ordering::Relaxed);
        // Release: a rank that sees this number also sees the rest of the slot, even before the phase completes.
        slot.seq.store(round, Ordering::Release);
        self.control().barrier.arrive(round, self.world);
    }

    pub(super) fn locate(&self, region: &Region) -> Option<SegmentOffset> {
        if region.len_bytes == 0 {
            return Some(SegmentOffset { segment: 0, offset: 0 });
        }
        self.reach.locate(self.rank, region.base, region.len_bytes)
    }

    pub(super) fn wait_present(&self, context: &OpContext, round: u32) -> Result<u64> {
        let is_stuck = || self.who_waits_for_me_elsewhere(round);
        let outcome = self.control().wait_present(round, context.policy, is_stuck);
        outcome.map_err(|error| {
            self.explain(context, error, || self.control().missing(round, self.world))
        })
    }

    /// Ends this rank's part of the round, and waits until all ranks have done theirs and nobody
    /// touches this rank's memory.
    pub(super) fn finish(&self, context: &OpContext, round: u32) -> Result<()> {
        self.done_with(round);
        self.control().barrier.complete_chunk(round, self.world as u32);
        self.wait_done(context, round)
    }

    pub(super) fn done_with(&self, round: u32) {
        // Release: a rank that sees this knows that this rank no longer touches its memory.
        self.control().slot(round, self.rank).working.store(0, Ordering::Release);
    }

    pub(super) fn wait_done(&self, context: &OpContext, round: u32) -> Result<()> {
        self.control().wait_done(round, context.policy).map_err(|error| {
            self.explain(context, error, || self.control().working(round, self.world))
        })
    }

    pub(super) fn explain(
        &self,
        context: &OpContext,
        error: WaitError,
        missing: impl FnOnce() -> Vec<usize>,
    ) -> CollectiveError {
        match error {
            WaitError::Gone { peer, fate: Fate::Lost } => context.lost(peer),
            WaitError::Gone { peer, fate: Fate::Left } => context.left(peer),
            WaitError::TimedOut => context.timed_out(missing()),
            WaitError::GivenUp => context.given_up(missing()),
            WaitError::Conflict(conflict) => context.conflict(&conflict),
        }
    }

    /// Finds a rank that has not arrived because it waits for a message to or from this rank, which waits here.
    fn who_waits_for_me_elsewhere(&self, round: u32) -> Option<Conflict> {
        let control = self.control();
        let own = control.slot(round, self.rank);
        control.missing(round, self.world).into_iter().find_map(|peer| {
            let (operation, call) = self.unanswered(peer)?;
            Some(Conflict {
                ranks: [self.rank, peer],
                operations: [own.operation.load(Ordering::Relaxed), operation],
                calls: [own.call.load(), call],
            })
        })
    }

    /// The slot of a peer that has arrived in the round after this rank's latest one.
    pub(super) fn ahead(&self, peer: usize) -> Option<&Slot> {
        let next = self.latest_round().wrapping_add(1);
        let slot = self.control().slot(next, peer);
        (slot.seq.load(Ordering::Acquire) == next).then_some(slot)
    }

    /// The address in this process of `len_bytes` bytes at `place` in the memory of `rank`.
    pub(super) fn resolve(
        &self,
        context: &OpContext,
        rank: usize,
        place: Option<SegmentOffset>,
        len_bytes: usize,
    ) -> Result<*mut u8> {
        if len_bytes == 0 {
            return Ok(std::ptr::null_mut());
        }
        let address = place.and_then(|place| self.reach.resolve(rank, place, len_bytes));
        address.ok_or_else(|| CollectiveError::Buffers {
            rank: self.rank,
            op: context.call.kind.name(),
            reason: format!("cannot reach the data of rank {rank} ({place:?}, {len_bytes} bytes)"),
        })
    }

    /// The half of a rank's staging area that belongs to `round`.
    pub(super) fn stage(&self, rank: usize, round: u32) -> *mut u8 {
        let stage = self.reach.staging(rank, (round % 2) as usize * half_bytes(self.world));
        stage.expect("only processes stage, and they have memory for it")
    }
}
