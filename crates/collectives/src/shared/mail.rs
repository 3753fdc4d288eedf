//! How two ranks pass a message: four counts, two of which each side writes.
//!
//! The sender counts the messages that it has begun and the pieces that lie ready; the receiver
//! counts the messages that it has asked for and the pieces that it has taken. What a count stands
//! for is written before the count, and may be written over only after the other side has answered.
//! Counts wrap around. Knows nothing of what the messages are; `models.rs` checks it with loom.

use super::sync::{AtomicU32, Ordering};

/// Pieces that lie ready at a time at most.
pub(super) const MAX_READY: u32 = 2;

/// One direction of the traffic between two ranks.
#[repr(C)]
#[derive(Debug, Default)]
pub(crate) struct Counts {
    /// Messages that the sender has begun, and that the receiver has asked for.
    sent: AtomicU32,
    asked: AtomicU32,
    /// Pieces that lie ready, and that the receiver has taken.
    ready: AtomicU32,
    taken: AtomicU32,
}

/// One side's view of one message.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Message {
    number: u32,
    /// Pieces before this message.
    first: u32,
}

impl Message {
    /// Its number in its direction.
    pub(crate) fn number(self) -> u32 {
        self.number
    }
}

impl Counts {
    /// Both sides stand as after `number` messages.
    #[cfg(all(test, not(loom)))]
    pub(super) fn begin_at(&self, number: u32) {
        self.sent.store(number, Ordering::Relaxed);
        self.asked.store(number, Ordering::Relaxed);
    }

    /// The sender begins a message, having said what it is.
    pub(crate) fn send(&self) -> Message {
        let number = self.sent.load(Ordering::Relaxed).wrapping_add(1);
        let first = self.ready.load(Ordering::Relaxed);
        // Release: who sees the count sees what was said.
        self.sent.store(number, Ordering::Release);
        Message { number, first }
    }

    /// The receiver asks for a message, having said what it expects.
    pub(crate) fn ask(&self) -> Message {
        let number = self.asked.load(Ordering::Relaxed).wrapping_add(1);
        let first = self.taken.load(Ordering::Relaxed);
        self.asked.store(number, Ordering::Release);
        Message { number, first }
    }

    pub(crate) fn is_sent(&self, message: Message) -> bool {
        self.sent.load(Ordering::Acquire).wrapping_sub(message.number) as i32 >= 0
    }

    pub(crate) fn is_asked(&self, message: Message) -> bool {
        self.asked.load(Ordering::Acquire).wrapping_sub(message.number) as i32 >= 0
    }

    /// Messages that are sent and that are asked for, as anybody may see them.
    pub(crate) fn begun(&self) -> (u32, u32) {
        (self.sent.load(Ordering::Acquire), self.asked.load(Ordering::Acquire))
    }

    /// Pieces of the message that are ready and taken, for the sender.
    pub(crate) fn sender_progress(&self, message: Message) -> (u32, u32) {
        let ready = self.ready.load(Ordering::Relaxed).wrapping_sub(message.first);
        (ready, self.taken.load(Ordering::Acquire).wrapping_sub(message.first))
    }

    /// Pieces of the message that are ready and taken, for the receiver.
    pub(crate) fn receiver_progress(&self, message: Message) -> (u32, u32) {
        let ready = self.ready.load(Ordering::Acquire).wrapping_sub(message.first);
        (ready, self.taken.load(Ordering::Relaxed).wrapping_sub(message.first))
    }

    /// The sender has made one more piece ready.
    pub(crate) fn add_ready(&self) {
        self.ready.fetch_add(1, Ordering::Release);
    }

    /// The receiver has taken one more piece.
    pub(crate) fn add_taken(&self) {
        self.taken.fetch_add(1, Ordering::Release);
    }
}
