//! How two ranks pass a message: four counters. Each side writes two of them.
//!
//! The sender counts the messages that it has begun and the pieces that it has made ready. The receiver
//! counts the messages that it has asked for and the pieces that it has taken. Each side writes its
//! data before it increases the counter, and may overwrite them only after the other side has
//! answered. The counters wrap around. This module knows nothing of the contents of messages; `models.rs`
//! checks it with loom.

use super::sync::{AtomicU32, Ordering};

/// The most pieces that can be ready at a time.
pub(super) const MAX_READY: u32 = 2;

/// The counters of the messages from one rank to another.
#[repr(C)]
#[derive(Debug, Default)]
pub(crate) struct MailCounts {
    /// Messages that the sender has begun.
    sent: AtomicU32,
    /// Messages that the receiver has asked for.
    asked: AtomicU32,
    /// Pieces that the sender has made ready.
    ready: AtomicU32,
    /// Pieces that the receiver has taken.
    taken: AtomicU32,
}

/// One side's view of one message.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OpenMessage {
    number: u32,
    /// The number of pieces before this message.
    first: u32,
}

impl MailCounts {
    /// Sets both sides to the state after `number` messages.
    #[cfg(all(test, not(loom)))]
    pub(super) fn begin_at(&self, number: u32) {
        self.sent.store(number, Ordering::Relaxed);
        self.asked.store(number, Ordering::Relaxed);
    }

    /// The sender begins a message that it has described.
    pub(crate) fn send(&self) -> OpenMessage {
        let number = self.sent.load(Ordering::Relaxed).wrapping_add(1);
        let first = self.ready.load(Ordering::Relaxed);
        // Release: a rank that sees the new count also sees what the sender wrote before.
        self.sent.store(number, Ordering::Release);
        OpenMessage { number, first }
    }

    /// The receiver asks for a message that it has described.
    pub(crate) fn ask(&self) -> OpenMessage {
        let number = self.asked.load(Ordering::Relaxed).wrapping_add(1);
        let first = self.taken.load(Ordering::Relaxed);
        self.asked.store(number, Ordering::Release);
        OpenMessage { number, first }
    }

    pub(crate) fn is_sent(&self, message: OpenMessage) -> bool {
        self.sent.load(Ordering::Acquire).wrapping_sub(message.number) as i32 >= 0
    }

    pub(crate) fn is_asked(&self, message: OpenMessage) -> bool {
        self.asked.load(Ordering::Acquire).wrapping_sub(message.number) as i32 >= 0
    }

    /// The numbers of messages that have been begun and asked for, for any rank to read.
    pub(crate) fn begun(&self) -> (u32, u32) {
        (self.sent.load(Ordering::Acquire), self.asked.load(Ordering::Acquire))
    }

    /// The numbers of pieces of the message that are ready and taken, as the sender reads them.
    pub(crate) fn sender_progress(&self, message: OpenMessage) -> (u32, u32) {
        let ready = self.ready.load(Ordering::Relaxed).wrapping_sub(message.first);
        (ready, self.taken.load(Ordering::Acquire).wrapping_sub(message.first))
    }

    /// The numbers of pieces of the message that are ready and taken, as the receiver reads them.
    pub(crate) fn receiver_progress(&self, message: OpenMessage) -> (u32, u32) {
        let ready = self.ready.load(Ordering::Acquire).wrapping_sub(message.first);
        (ready, self.taken.load(Ordering::Relaxed).wrapping_sub(message.first))
    }

    pub(crate) fn add_ready(&self) {
        self.ready.fetch_add(1, Ordering::Release);
    }

    pub(crate) fn add_taken(&self) {
        self.taken.fetch_add(1, Ordering::Release);
    }
}
