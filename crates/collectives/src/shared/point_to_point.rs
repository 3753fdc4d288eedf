//! Send, receive, and both at once: two ranks meet, and the receiver copies the data.
//!
//! Steps: both ranks announce their calls and compare them. Then the receiver copies directly from the
//! sender's memory, or, if it cannot reach that memory, piece by piece from the sender's staging area. `S`
//! bytes are read and written. A send is finished when the receiver has all data.

use std::sync::atomic::Ordering;

use paceline_trace::now_ns;

use super::control::Mail;
use super::fate::WaitError;
use super::mail::{MAX_READY, OpenMessage};
use super::segment::SegmentOffset;
use super::state::SharedState;
use crate::call::{CallHeader, Conflict, Region};
use crate::context::OpContext;
use crate::{OpKind, Result};

/// Bytes of a piece. Two lie in the free half of the staging area, so that one piece is filled while the other
/// is read.
const PIECE_BYTES: usize = 128 << 10;

pub(super) fn run(shared: &SharedState, context: &OpContext) -> Result<u64> {
    let mut sender =
        context.call.sending().map(|(to, data)| Sender::announce(shared, context, to, data));
    let mut receiver = context
        .call
        .receiving()
        .map(|(from, data)| Receiver::announce(shared, context, from, data));
    let is_met = || {
        sender.as_ref().is_none_or(Sender::is_expected)
            && receiver.as_ref().is_none_or(Receiver::is_expected)
    };
    // A peer that has met and gets nothing may leave.
    let awaited = || {
        let to = sender.as_ref().filter(|half| !half.is_expected() || half.num_pieces() > 0);
        let from = receiver.as_ref().filter(|half| !half.is_expected() || half.data.len_bytes > 0);
        to.map(|half| half.to).into_iter().chain(from.map(|half| half.from)).collect()
    };
    wait(shared, context, awaited, is_met, || {
        let to = sender.as_ref().filter(|half| !half.is_expected()).map(|half| half.to);
        let from = receiver.as_ref().filter(|half| !half.is_expected()).map(|half| half.from);
        to.into_iter().chain(from).find_map(|peer| shared.is_elsewhere(context, peer))
    })?;
    let present_ns = now_ns();
    if let Some(half) = &mut receiver {
        half.place = half.mail.place.load();
    }
    let differs = sender.as_ref().and_then(|half| half.disagreement(context));
    let differs = differs.or_else(|| receiver.as_ref()?.disagreement(context));
    if let Some(conflict) = differs {
        shared.control().report_mismatch(&conflict);
        let reason = shared.control().alarm_among(&peers(context));
        let reason = reason.unwrap_or(WaitError::Conflict(conflict));
        return Err(shared.explain(context, reason, Vec::new));
    }
    loop {
        let is_sent = sender.as_mut().is_none_or(|half| half.step(shared));
        let is_received = match &mut receiver {
            Some(half) => half.step(shared, context)?,
            None => true,
        };
        if is_sent && is_received {
            return Ok(present_ns);
        }
        let can_go_on = || {
            let sender = sender.as_ref().filter(|_| !is_sent);
            let receiver = receiver.as_ref().filter(|_| !is_received);
            sender.is_some_and(Sender::can_go_on) || receiver.is_some_and(Receiver::can_go_on)
        };
        // A peer whose half is done may leave while the other half goes on.
        let awaited = || {
            let to = sender.as_ref().filter(|_| !is_sent).map(|half| half.to);
            let from = receiver.as_ref().filter(|_| !is_received).map(|half| half.from);
            to.into_iter().chain(from).collect()
        };
        // Both sides have met, so the other side will do its part, and no reason to be stuck is looked for.
        wait(shared, context, awaited, can_go_on, || None)?;
    }
}

fn wait(
    shared: &SharedState,
    context: &OpContext,
    awaited: impl Fn() -> Vec<usize>,
    is_done: impl FnMut() -> bool,
    is_stuck: impl Fn() -> Option<Conflict>,
) -> Result<()> {
    let (control, policy) = (shared.control(), context.policy);
    let outcome = control.wait_for_wake_up(shared.rank, &awaited, policy, is_done, is_stuck);
    outcome.map_err(|error| shared.explain(context, error, awaited))
}

fn peers(context: &OpContext) -> Vec<usize> {
    let halves = [context.call.sending(), context.call.receiving()];
    halves.into_iter().flatten().map(|half| half.0).collect()
}

impl SharedState {
    /// Finds a call that keeps a peer from ever answering this rank's message: a collective call that
    /// needs this rank too, or a message that this rank would have to answer first.
    fn is_elsewhere(&self, context: &OpContext, peer: usize) -> Option<Conflict> {
        let (operation, call) = match self.ahead(peer) {
            Some(slot) => (slot.operation.load(Ordering::Relaxed), slot.call.load()),
            None => self.unanswered(peer)?,
        };
        Some(context.conflict_with(peer, context.call.header(), operation, call))
    }

    /// A peer's call, with its sequence number, that sends to or expects from this rank a message that this rank has not called.
    pub(super) fn unanswered(&self, peer: usize) -> Option<(u32, CallHeader)> {
        let (incoming, outgoing) =
            (self.control().mail(peer, self.rank), self.control().mail(self.rank, peer));
        let (sent, asked) = incoming.counts.begun();
        if sent.wrapping_sub(asked) as i32 > 0 {
            return Some((
                incoming.sender_operation.load(Ordering::Relaxed),
                incoming.sender.load(),
            ));
        }
        let (sent, asked) = outgoing.counts.begun();
        (asked.wrapping_sub(sent) as i32 > 0).then(|| {
            (outgoing.receiver_operation.load(Ordering::Relaxed), outgoing.receiver.load())
        })
    }
}

/// The header of one half of a call. Each peer of a send-and-receive sees only the half that concerns it.
fn half(context: &OpContext, kind: OpKind, peer: usize) -> CallHeader {
    let mut call = context.call.clone();
    (call.kind, call.root) = (kind, peer);
    call.header()
}

struct Sender<'a> {
    mail: &'a Mail,
    to: usize,
    data: Region,
    message: OpenMessage,
    is_staged: bool,
}

impl<'a> Sender<'a> {
    fn announce(shared: &'a SharedState, context: &OpContext, to: usize, data: Region) -> Self {
        let mail = shared.control().mail(shared.rank, to);
        let place = shared.locate(&data);
        mail.sender.store(&half(context, OpKind::Send, to));
        mail.sender_operation.store(context.seq, Ordering::Relaxed);
        mail.place.store(place);
        let message = mail.counts.send();
        shared.control().wake(to);
        Self { mail, to, data, message, is_staged: place.is_none() }
    }

    fn is_expected(&self) -> bool {
        self.mail.counts.is_asked(self.message)
    }

    fn disagreement(&self, context: &OpContext) -> Option<Conflict> {
        let (ours, theirs) = (self.mail.sender.load(), self.mail.receiver.load());
        let operation = self.mail.receiver_operation.load(Ordering::Relaxed);
        let conflict = || context.conflict_with(self.to, ours, operation, theirs);
        (!ours.fits(&theirs)).then(conflict)
    }

    fn num_pieces(&self) -> u32 {
        num_pieces(self.data.len_bytes, self.is_staged)
    }

    fn progress(&self) -> (u32, u32) {
        self.mail.counts.sender_progress(self.message)
    }

    fn can_go_on(&self) -> bool {
        let (ready, taken) = self.progress();
        taken == self.num_pieces() || (ready < self.num_pieces() && ready - taken < MAX_READY)
    }

    /// Makes as many pieces ready as possible. Returns true if the receiver has taken all pieces.
    fn step(&mut self, shared: &SharedState) -> bool {
        loop {
            let (ready, taken) = self.progress();
            if ready == self.num_pieces() || ready - taken == MAX_READY {
                return taken == self.num_pieces();
            }
            if self.is_staged {
                let start = ready as usize * PIECE_BYTES;
                let piece = self.data.part(start..self.data.len_bytes.min(start + PIECE_BYTES));
                shared.count_staged(piece.len_bytes);
                let stage = piece_stage(shared, shared.rank, shared.latest_round(), ready);
                // SAFETY: both are valid for the piece. The receiver has taken the piece that lay there
                // before. No collective operation uses this half of the staging area: all ranks have arrived
                // in the latest round, which used the other half.
                unsafe { std::ptr::copy_nonoverlapping(piece.base, stage, piece.len_bytes) };
            }
            self.mail.round.store(shared.latest_round(), Ordering::Relaxed);
            self.mail.counts.add_ready();
            shared.control().wake(self.to);
        }
    }
}

struct Receiver<'a> {
    mail: &'a Mail,
    from: usize,
    data: Region,
    message: OpenMessage,
    /// Where the sender's data lie, copied from the mailbox when both have met: the sender may announce
    /// its next message as soon as this one is taken.
    place: Option<SegmentOffset>,
}

impl<'a> Receiver<'a> {
    fn announce(shared: &'a SharedState, context: &OpContext, from: usize, data: Region) -> Self {
        let mail = shared.control().mail(from, shared.rank);
        mail.receiver.store(&half(context, OpKind::Recv, from));
        mail.receiver_operation.store(context.seq, Ordering::Relaxed);
        let message = mail.counts.ask();
        shared.control().wake(from);
        Self { mail, from, data, message, place: None }
    }

    fn is_expected(&self) -> bool {
        self.mail.counts.is_sent(self.message)
    }

    fn disagreement(&self, context: &OpContext) -> Option<Conflict> {
        let (ours, theirs) = (self.mail.receiver.load(), self.mail.sender.load());
        let operation = self.mail.sender_operation.load(Ordering::Relaxed);
        let conflict = || context.conflict_with(self.from, ours, operation, theirs);
        (!theirs.fits(&ours)).then(conflict)
    }

    fn progress(&self) -> (u32, u32) {
        self.mail.counts.receiver_progress(self.message)
    }

    fn can_go_on(&self) -> bool {
        let (ready, taken) = self.progress();
        ready > taken
    }

    /// Takes all pieces that are ready. Returns true if this rank has all pieces.
    fn step(&mut self, shared: &SharedState, context: &OpContext) -> Result<bool> {
        let place = self.place;
        let num_pieces = num_pieces(self.data.len_bytes, place.is_none());
        loop {
            let (ready, taken) = self.progress();
            if ready == taken {
                return Ok(taken == num_pieces);
            }
            let (from, piece) = match place {
                Some(place) => {
                    let len_bytes = self.data.len_bytes;
                    (shared.resolve(context, self.from, Some(place), len_bytes)?, self.data)
                }
                None => {
                    let start = taken as usize * PIECE_BYTES;
                    let round = self.mail.round.load(Ordering::Relaxed);
                    let end = self.data.len_bytes.min(start + PIECE_BYTES);
                    (piece_stage(shared, self.from, round, taken), self.data.part(start..end))
                }
            };
            // SAFETY: the sender keeps the piece unchanged until it is taken: a sender that gives up before keeps the
            // claim on its memory, and stages nothing more in this group. The receiving memory is this rank's own. The
            // two do not overlap, since they belong to different ranks.
            unsafe { std::ptr::copy_nonoverlapping(from, piece.base, piece.len_bytes) };
            self.mail.counts.add_taken();
            shared.control().wake(self.from);
        }
    }
}

/// The number of pieces of a message. Without staging, even an empty message is one piece, so that the sender learns that
/// it was received.
fn num_pieces(len_bytes: usize, is_staged: bool) -> u32 {
    if is_staged { len_bytes.div_ceil(PIECE_BYTES) as u32 } else { 1 }
}

/// The address at which `rank`, whose latest round is `round`, stages a piece of a message.
fn piece_stage(shared: &SharedState, rank: usize, round: u32, piece: u32) -> *mut u8 {
    let half = shared.stage(rank, round.wrapping_add(1));
    // SAFETY: two pieces fill one half of a staging area.
    unsafe { half.add((piece % 2) as usize * PIECE_BYTES) }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use crate::Group;

    #[test]
    fn messages_arrive_when_their_numbers_wrap_around() {
        let groups = Group::threads(2);
        let control = groups[0].shared().unwrap().control();
        control.mail(0, 1).counts.begin_at(u32::MAX - 3);
        std::thread::scope(|scope| {
            for group in &groups {
                scope.spawn(move || {
                    for number in 0..6 {
                        let mut word = [number];
                        if group.rank() == 0 {
                            group.send_slice(&word, 1).unwrap();
                        } else {
                            word = [-1];
                            group.recv_slice(&mut word, 0).unwrap();
                        }
                        assert_eq!(word, [number]);
                    }
                });
            }
        });
    }
}
