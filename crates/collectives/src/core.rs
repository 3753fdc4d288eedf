//! The state that every rank keeps, over any transport: the sequence number of its operations, their
//! records, and whether the group is broken.
//!
//! Input: calls. Output: the times of each operation, or an error that breaks the group. This module knows no transport.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use paceline_trace::{lock, now_ns};

use crate::call::Call;
use crate::context::{OpContext, WaitPolicy};
use crate::emulator::LinkEmulator;
use crate::engine::Engine;
use crate::flight_recorder::FlightRecorder;
use crate::nccl::Nccl;
use crate::record::OpTimes;
use crate::shared::Fate;
use crate::{CollectiveError, Result};

/// The state in which a rank executes operations. Only one thread at a time executes.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) rank: usize,
    pub(crate) world: usize,
    pub(crate) engine: Engine,
    /// Carries out the calls on memory of cards, once it is set.
    pub(crate) nccl: OnceLock<Nccl>,
    /// The emulated link, if one has been set.
    pub(crate) emulator: OnceLock<LinkEmulator>,
    pub(crate) recorder: FlightRecorder,
    /// The numbers of the ranks in the outermost group. Empty for the outermost group itself.
    members: Arc<[usize]>,
    operations: AtomicU32,
    broken: Breakage,
}

/// Whether a group is broken.
#[derive(Debug)]
struct Breakage {
    /// The text of the first error, and the ranks that caused it.
    cause: Mutex<Option<(String, Vec<usize>)>>,
    /// Whether any group of this rank is broken.
    is_any: Arc<AtomicBool>,
}

impl Core {
    pub(crate) fn new(
        rank: usize,
        world: usize,
        engine: Engine,
        recorder: FlightRecorder,
        members: Arc<[usize]>,
        is_any_broken: Arc<AtomicBool>,
    ) -> Self {
        Self {
            rank,
            world,
            engine,
            nccl: OnceLock::new(),
            emulator: OnceLock::new(),
            recorder,
            members,
            operations: AtomicU32::new(0),
            broken: Breakage { cause: Mutex::new(None), is_any: is_any_broken },
        }
    }

    fn attempt(&self, call: &Call, submitted_ns: u64, policy: WaitPolicy) -> Result<OpTimes> {
        if let Some((cause, culprits)) = &*lock(&self.broken.cause) {
            let (cause, culprits) = (cause.clone(), culprits.clone());
            let rank = self.outermost(self.rank);
            return Err(CollectiveError::Broken { rank, cause, culprits });
        }
        let seq = self.operations.fetch_add(1, Ordering::Relaxed);
        let started_ns = now_ns();
        let times = OpTimes { submitted_ns, started_ns, ..OpTimes::default() };
        self.recorder.begins(call, seq, times);
        let context = self.context(call, seq, started_ns, policy);
        let ran = match self.nccl.get().filter(|_| call.is_on_card()) {
            Some(nccl) => nccl.run(&context, &self.engine),
            None => self.engine.run(&context),
        };
        let outcome = ran.map(|present_ns| {
            // For the rank that arrives last, the recorded end of the barrier phase may lie just before its start.
            let present_ns = present_ns.max(started_ns);
            let due_ns =
                self.emulator.get().map(|on| on.hold_until_done(call, self.world, present_ns));
            let finished_ns = now_ns();
            let late_ns = due_ns.map_or(0, |due_ns| finished_ns.saturating_sub(due_ns));
            let slowest = self.engine.slowest();
            OpTimes { submitted_ns, started_ns, present_ns, finished_ns, late_ns, slowest }
        });
        match outcome {
            Ok(times) => {
                self.recorder.ends(call, seq, times);
                Ok(times)
            }
            Err(error) => Err(self.failed(error)),
        }
    }

    /// The context of a call that this rank makes.
    pub(crate) fn context<'a>(
        &'a self,
        call: &'a Call,
        seq: u32,
        started_ns: u64,
        policy: WaitPolicy,
    ) -> OpContext<'a> {
        let Self { rank, world, ref members, .. } = *self;
        OpContext { rank, world, first: 0, members, call, named: call, seq, started_ns, policy }
    }

    /// Executes a call that has been submitted. A panic becomes an error of the operation: the group is
    /// broken afterwards, the peers learn that this rank is lost, and the claims of the call are kept.
    pub(crate) fn execute(
        &self,
        call: &Call,
        submitted_ns: u64,
        policy: WaitPolicy,
    ) -> Result<OpTimes> {
        // Unwind safety: what the panic left half-done is not used, since the group is broken.
        let attempt = AssertUnwindSafe(|| self.attempt(call, submitted_ns, policy));
        catch_unwind(attempt).unwrap_or_else(|panic| {
            let texts = (panic.downcast_ref::<&str>(), panic.downcast_ref::<String>());
            let reason = match texts {
                (Some(text), _) => (*text).to_owned(),
                (_, Some(text)) => text.clone(),
                _ => "a panic without words".to_owned(),
            };
            let error = CollectiveError::Panicked {
                rank: self.outermost(self.rank),
                op: call.kind.name(),
                // Only one thread at a time executes, and this operation has already been counted.
                seq: self.operations.load(Ordering::Relaxed).wrapping_sub(1),
                bytes: call.message_bytes(),
                reason,
            };
            self.fail(&error);
            self.engine.abandon();
            Err(error)
        })
    }

    /// Called when the connection to a rank of this host has ended: the rank has died, unless it left in order before.
    pub(crate) fn lose(&self, place: usize) {
        let Some(shared) = self.engine.shared() else { return };
        if shared.control().fate(place) != Some(Fate::Left) {
            shared.control().depart(place, Fate::Lost);
            // This does not mark the group as broken. The next operation that needs the rank marks it.
            let first = self.rank - shared.rank;
            let (rank, lost) = (self.outermost(self.rank), self.outermost(first + place));
            self.recorder.dump(&format!("rank {rank}: rank {lost} died"));
        }
    }

    /// The number of operations so far.
    pub(crate) fn num_operations(&self) -> u32 {
        self.operations.load(Ordering::Relaxed)
    }

    /// Marks the group as broken by an error of an engine, and returns the error in the numbers of the outermost group.
    pub(crate) fn failed(&self, error: CollectiveError) -> CollectiveError {
        let error = error.named_by(&self.members);
        self.fail(&error);
        error
    }

    /// The number that a rank of this group has in the outermost group.
    fn outermost(&self, rank: usize) -> usize {
        self.members.get(rank).copied().unwrap_or(rank)
    }

    /// Marks the group as broken and writes the records to the dump folder.
    pub(crate) fn fail(&self, error: &CollectiveError) {
        // The cause is the earliest error.
        let cause = match error {
            CollectiveError::Broken { cause, .. } => cause.clone(),
            first => first.to_string(),
        };
        self.recorder.dump_again(&cause);
        lock(&self.broken.cause).get_or_insert_with(|| (cause, error.culprits()));
        self.broken.is_any.store(true, Ordering::Relaxed);
    }
}
