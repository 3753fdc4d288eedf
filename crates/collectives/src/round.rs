//! How one operation is carried out: pieces, rounds, and who does which unit.
//!
//! Data that every peer can reach is worked on in place, in one round. If any rank's data lies in
//! private memory of a process, the operation goes in pieces of [`STAGING_BYTES`] through the
//! staging segment, one round a piece; ranks whose data can be reached still work in place.
//!
//! Knows the order of events on a rank; what a unit does is the business of the file of each
//! operation.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use paceline_memory::{DType, Mapping};
use paceline_trace::now_ns;

use crate::control::{Control, Fate, Patience, WaitError};
use crate::record::{OpKind, OpRecord, OpTimes, Ring};
use crate::segment::{Place, Reach};
use crate::{CollectiveError, ReduceOp, all_reduce, barrier, broadcast, gather};

/// Staging area of each rank, in bytes.
pub(crate) const STAGING_BYTES: usize = 1 << 20;

/// Bytes that are claimed at a time: small enough to share out a megabyte, large enough that
/// claiming (one atomic addition) costs nothing beside the work.
pub(crate) const UNIT_BYTES: usize = 64 << 10;

/// The segment number that says "staged" in a slot.
const STAGED: u64 = u64::MAX;

/// A range of this rank's memory, claimed or borrowed for as long as the operation runs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Region {
    pub(crate) base: *mut u8,
    pub(crate) len_bytes: usize,
    /// Whether peers may work on it in place, where they can reach it: only while it is claimed,
    /// since a claim can outlive a failed operation and a borrowed slice cannot.
    pub(crate) is_claimed: bool,
}

// SAFETY: a region is used by whoever executes the operation, one thread at a time, while its
// memory is claimed (tensors) or borrowed by a caller that is blocked (slices).
unsafe impl Send for Region {}
// SAFETY: as for `Send`.
unsafe impl Sync for Region {}

impl Region {
    pub(crate) const EMPTY: Region =
        Region { base: std::ptr::null_mut(), len_bytes: 0, is_claimed: false };
}

/// One rank's call of an operation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    pub(crate) kind: OpKind,
    pub(crate) dtype: DType,
    /// Used by reductions only.
    pub(crate) op: ReduceOp,
    /// Used by operations with a root only.
    pub(crate) root: usize,
    pub(crate) data: Region,
    /// Where the root of a gather wants the parts, `world` times as large as `data`.
    pub(crate) recv: Region,
}

impl Call {
    fn signature(&self) -> u64 {
        u64::from(self.kind as u8)
            | u64::from(self.dtype as u8) << 8
            | u64::from(self.op as u8) << 16
            | (self.root as u64) << 32
    }

    fn describe(signature: u64, count: u64) -> String {
        const KINDS: [OpKind; 4] =
            [OpKind::AllReduce, OpKind::Broadcast, OpKind::Gather, OpKind::Barrier];
        const DTYPES: [DType; 4] = [DType::F32, DType::F64, DType::I64, DType::U8];
        const OPS: [ReduceOp; 4] = [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max, ReduceOp::Min];
        let byte = |at: u32| (signature >> at) as u8;
        let kind = KINDS.into_iter().find(|k| *k as u8 == byte(0));
        let dtype = DTYPES.into_iter().find(|d| *d as u8 == byte(8));
        let op = OPS.into_iter().find(|o| *o as u8 == byte(16));
        match (kind, dtype, op) {
            (Some(OpKind::Barrier), ..) => "barrier()".into(),
            (Some(OpKind::AllReduce), Some(dtype), Some(op)) => {
                format!("all_reduce({dtype}, {count}, {})", op.name())
            }
            (Some(kind), Some(dtype), _) => {
                format!("{}({dtype}, {count}, root {})", kind.name(), signature >> 32)
            }
            _ => format!("an unknown operation ({signature:#x})"),
        }
    }

    fn count(&self) -> u64 {
        (self.data.len_bytes / self.dtype.size_bytes()) as u64
    }
}

/// How an operation uses the rounds.
pub(crate) struct Plan {
    /// Staged data of this rank goes into the staging area first.
    pub(crate) copy_in: bool,
    /// Staged data of this rank comes back from the staging area afterwards.
    pub(crate) copy_out: bool,
    /// Whether this rank works on units; some operations are the root's alone.
    pub(crate) claims: bool,
    /// Bytes of a unit.
    pub(crate) unit_bytes: usize,
}

/// The shared state, in memory of this process or shared with others.
#[derive(Debug)]
pub(crate) enum ControlMemory {
    Threads(Arc<Control>),
    Shared(Arc<Mapping>),
}

impl std::ops::Deref for ControlMemory {
    type Target = Control;

    fn deref(&self) -> &Control {
        match self {
            ControlMemory::Threads(control) => control,
            // SAFETY: the mapping is page-aligned, larger than `Control` (both ends are made by
            // `shm`), starts zeroed, and `Control` is made of atomics for which zero is valid.
            ControlMemory::Shared(mapping) => unsafe { mapping.base().cast::<Control>().as_ref() },
        }
    }
}

/// What a rank needs to execute operations. One thread at a time does.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) rank: usize,
    pub(crate) world: usize,
    pub(crate) control: ControlMemory,
    pub(crate) reach: Reach,
    rounds: AtomicU32,
    operations: AtomicU32,
    broken: Mutex<Option<String>>,
    ring: Mutex<Ring>,
}

impl Core {
    pub(crate) fn new(rank: usize, world: usize, control: ControlMemory, reach: Reach) -> Self {
        Self {
            rank,
            world,
            control,
            reach,
            rounds: AtomicU32::new(0),
            operations: AtomicU32::new(0),
            broken: Mutex::new(None),
            ring: Mutex::new(Ring::new()),
        }
    }

    /// Executes a call that was submitted at `submitted_ns`.
    pub(crate) fn execute(
        &self,
        call: &Call,
        submitted_ns: u64,
        patience: Patience,
    ) -> Result<OpTimes, CollectiveError> {
        if let Some(cause) = &*self.broken.lock().unwrap_or_else(PoisonError::into_inner) {
            return Err(CollectiveError::Broken { rank: self.rank, cause: cause.clone() });
        }
        let seq = self.operations.fetch_add(1, Ordering::Relaxed);
        let started_ns = now_ns();
        let trip = Trip { core: self, call, seq, started_ns, patience };
        let present = match call.kind {
            OpKind::AllReduce => all_reduce::run(&trip),
            OpKind::Broadcast => broadcast::run(&trip),
            OpKind::Gather => gather::run(&trip),
            OpKind::Barrier => barrier::run(&trip),
        };
        let present_ns = present.inspect_err(|error| {
            let mut broken = self.broken.lock().unwrap_or_else(PoisonError::into_inner);
            *broken = Some(error.to_string());
        })?;
        // A rank that arrives last finds the gate opened a moment before it looked at its clock.
        let present_ns = present_ns.max(started_ns);
        let times = OpTimes { submitted_ns, started_ns, present_ns, finished_ns: now_ns() };
        let record = OpRecord { kind: call.kind, seq, bytes: call.data.len_bytes, times };
        self.ring.lock().unwrap_or_else(PoisonError::into_inner).push(record);
        Ok(times)
    }

    pub(crate) fn drain_records(&self, out: &mut Vec<OpRecord>) {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner).drain_into(out);
    }
}

/// One execution of one call.
pub(crate) struct Trip<'a> {
    pub(crate) core: &'a Core,
    pub(crate) call: &'a Call,
    seq: u32,
    started_ns: u64,
    patience: Patience,
}

impl Trip<'_> {
    /// Waits for all ranks, and does nothing else. Returns when the last one arrived.
    pub(crate) fn meet(&self) -> Result<u64, CollectiveError> {
        let round = self.arrive(Some(Place { segment: 0, offset: 0 }));
        let present_ns = self.wait_present(round)?;
        self.compare_calls(round)?;
        Ok(present_ns)
    }

    /// Carries the call out by `plan`. `work` gets every rank's data of the current piece, the
    /// bytes of the unit within the piece, and the piece's start within the message; it may touch
    /// exactly that unit of every rank's data, and nobody else does at that time. Returns when the
    /// last rank arrived.
    pub(crate) fn in_pieces(
        &self,
        plan: &Plan,
        work: impl Fn(&[*mut u8], Range<usize>, usize),
    ) -> Result<u64, CollectiveError> {
        let Core { rank, control, reach, .. } = self.core;
        let data = self.call.data;
        let place = match reach {
            Reach::Segments(_) if !data.is_claimed => None,
            _ => reach.locate(*rank, data.base, data.len_bytes),
        };
        let staging = Place { segment: 0, offset: 0 };
        let stage = match place {
            Some(_) => std::ptr::null_mut(),
            None => self.resolve(*rank, staging, STAGING_BYTES)?,
        };
        let mut first_present_ns = None;
        let mut start = 0;
        let mut piece_bytes = STAGING_BYTES;
        let mut peers = Vec::with_capacity(self.core.world);
        loop {
            let staged_bytes = STAGING_BYTES.min(data.len_bytes - start);
            if place.is_none() && plan.copy_in {
                // SAFETY: both ranges are valid for `staged_bytes`; the staging area is this rank's
                // own until it arrives, and does not overlap private memory.
                unsafe { std::ptr::copy_nonoverlapping(data.base.add(start), stage, staged_bytes) };
            }
            let round = self.arrive(place);
            let present_ns = self.wait_present(round)?;
            if first_present_ns.is_none() {
                first_present_ns = Some(present_ns);
                self.compare_calls(round)?;
                let anyone_staged = (0..self.core.world).any(|peer| {
                    control.slot(round, peer).segment.load(Ordering::Relaxed) == STAGED
                });
                if !anyone_staged {
                    piece_bytes = data.len_bytes;
                }
            }
            let len_bytes = piece_bytes.min(data.len_bytes - start);
            peers.clear();
            for peer in 0..self.core.world {
                peers.push(self.peer_data(round, peer, start, len_bytes)?);
            }
            let num_units = len_bytes.div_ceil(plan.unit_bytes) as u32;
            if num_units > 0 {
                while plan.claims
                    && let Some(unit) = control.claim_unit(num_units)
                {
                    let begin = unit as usize * plan.unit_bytes;
                    work(&peers, begin..len_bytes.min(begin + plan.unit_bytes), start);
                    control.complete_unit(round, num_units);
                }
                // Threads that have claimed units finish them, and their memory is borrowed until
                // then; a process may die or be stopped in the middle of one.
                let limit = match reach {
                    Reach::Threads => Duration::MAX,
                    Reach::Segments(_) => self.patience.limit,
                };
                let patience = Patience { limit, ..self.patience };
                self.explain(round, control.wait_done(round, patience))?;
            }
            if place.is_none() && plan.copy_out {
                // SAFETY: as above; all units are done, and nobody writes to this rank's staging
                // area before this rank arrives again.
                unsafe { std::ptr::copy_nonoverlapping(stage, data.base.add(start), len_bytes) };
            }
            start += len_bytes;
            if start == data.len_bytes {
                return Ok(first_present_ns.unwrap_or(self.started_ns));
            }
        }
    }

    fn arrive(&self, place: Option<Place>) -> u32 {
        let Core { rank, world, control, rounds, .. } = self.core;
        let round = rounds.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        let slot = control.slot(round, *rank);
        let place = place.unwrap_or(Place { segment: STAGED, offset: 0 });
        slot.signature.store(self.call.signature(), Ordering::Relaxed);
        slot.count.store(self.call.count(), Ordering::Relaxed);
        slot.segment.store(place.segment, Ordering::Relaxed);
        slot.offset.store(place.offset, Ordering::Relaxed);
        slot.seq.store(round, Ordering::Relaxed);
        control.arrive(round, *world);
        round
    }

    fn wait_present(&self, round: u32) -> Result<u64, CollectiveError> {
        self.explain(round, self.core.control.wait_present(round, self.patience))
    }

    /// The address of a peer's data of the piece that begins `start` bytes into the message.
    fn peer_data(
        &self,
        round: u32,
        peer: usize,
        start: usize,
        len_bytes: usize,
    ) -> Result<*mut u8, CollectiveError> {
        let slot = self.core.control.slot(round, peer);
        let place = Place {
            segment: slot.segment.load(Ordering::Relaxed),
            offset: slot.offset.load(Ordering::Relaxed),
        };
        let place = match place.segment {
            STAGED => Place { segment: 0, offset: 0 },
            _ => Place { offset: place.offset + start as u64, ..place },
        };
        self.resolve(peer, place, len_bytes)
    }

    fn resolve(
        &self,
        rank: usize,
        place: Place,
        len_bytes: usize,
    ) -> Result<*mut u8, CollectiveError> {
        self.core.reach.resolve(rank, place, len_bytes).ok_or_else(|| CollectiveError::Mismatch {
            rank: self.core.rank,
            peer: rank,
            seq: self.seq,
            ours: Call::describe(self.call.signature(), self.call.count()),
            theirs: format!("it with data at an unknown place ({place:?})"),
        })
    }

    /// All ranks see the same slots, so either all find a difference or none does.
    fn compare_calls(&self, round: u32) -> Result<(), CollectiveError> {
        let (signature, count) = (self.call.signature(), self.call.count());
        let Core { rank, world, control, .. } = self.core;
        let called = |peer: usize| {
            let slot = control.slot(round, peer);
            (slot.signature.load(Ordering::Relaxed), slot.count.load(Ordering::Relaxed))
        };
        let Some(peer) = (0..*world).find(|&peer| called(peer) != (signature, count)) else {
            return Ok(());
        };
        Err(CollectiveError::Mismatch {
            rank: *rank,
            peer,
            seq: self.seq,
            ours: Call::describe(signature, count),
            theirs: Call::describe(called(peer).0, called(peer).1),
        })
    }

    fn explain<T>(&self, round: u32, result: Result<T, WaitError>) -> Result<T, CollectiveError> {
        let Core { rank, world, control, .. } = self.core;
        let (rank, seq, bytes) = (*rank, self.seq, self.call.data.len_bytes);
        let op = self.call.kind.name();
        let waited = Duration::from_nanos(now_ns() - self.started_ns);
        result.map_err(|error| match error {
            WaitError::Gone { peer, fate: Fate::Lost } => {
                CollectiveError::PeerLost { rank, peer, op, seq, bytes, waited }
            }
            WaitError::Gone { peer, fate: Fate::Left } => {
                CollectiveError::PeerLeft { rank, peer, op, seq, bytes }
            }
            WaitError::TimedOut => {
                let missing = control.missing(round, *world);
                CollectiveError::TimedOut { rank, missing, op, seq, bytes, waited }
            }
            WaitError::GivenUp => {
                let cause = format!("another rank stopped waiting in {op} #{seq}");
                CollectiveError::Broken { rank, cause }
            }
        })
    }
}
