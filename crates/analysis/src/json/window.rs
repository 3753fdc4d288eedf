//! A window on an input that is read once from front to back: the bytes around the current position.
//!
//! The window grows only if a single token is longer than the window. This module does not know JSON.

use std::io::{ErrorKind, Read, Result};

use super::MAX_TOKEN_BYTES;

/// Bytes per read. Large enough that the cost of a read is small, and small enough to stay in the cache.
const START_BYTES: usize = 256 << 10;

/// The bytes `bytes[pos..len]` are still to be read.
pub(super) struct Window<R> {
    input: R,
    pub(super) bytes: Vec<u8>,
    pub(super) pos: usize,
    pub(super) len: usize,
    dropped_bytes: u64,
}

impl<R: Read> Window<R> {
    pub(super) fn new(input: R) -> Self {
        Self::with_capacity(input, START_BYTES)
    }

    /// With a window of this size at first. Tests use small windows to test everything at the edges.
    pub(super) fn with_capacity(input: R, bytes: usize) -> Self {
        Self { input, bytes: vec![0; bytes.max(1)], pos: 0, len: 0, dropped_bytes: 0 }
    }

    /// The offset in the input of a position in the window.
    pub(super) fn offset_of(&self, place: usize) -> u64 {
        self.dropped_bytes + place as u64
    }

    /// The bytes still to be read.
    pub(super) fn rest(&self) -> &[u8] {
        &self.bytes[self.pos..self.len]
    }

    /// Reads more input and drops the bytes before `keep`, so that the byte at `keep` moves to index 0.
    /// Returns false at the end of the input.
    pub(super) fn more(&mut self, keep: usize) -> Result<bool> {
        self.bytes.copy_within(keep..self.len, 0);
        self.dropped_bytes += keep as u64;
        self.pos -= keep;
        self.len -= keep;
        if self.len == self.bytes.len() {
            self.bytes.resize((2 * self.len).min(MAX_TOKEN_BYTES), 0);
        }
        loop {
            match self.input.read(&mut self.bytes[self.len..]) {
                Ok(0) => return Ok(false),
                Ok(count) => {
                    self.len += count;
                    return Ok(true);
                }
                Err(err) if err.kind() == ErrorKind::Interrupted => {}
                Err(err) => return Err(err),
            }
        }
    }
}
