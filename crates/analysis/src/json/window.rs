//! A window on an input that is read once from front to back: the bytes around the current position, and the
//! marks of the next piece of it.
//!
//! The window grows only if a single token is longer than the window. This module does not know JSON.

use std::io::{ErrorKind, Read, Result};

use super::MAX_TOKEN_BYTES;
use super::index::{Index, PIECE_BYTES};

/// Bytes per read. Large enough that the cost of a read is small, and small enough that they are still in the
/// cache when the parser comes to them.
pub(crate) const WINDOW_BYTES: usize = 64 << 10;

/// The bytes `bytes[pos..len]` are still to be read.
pub(super) struct Window<R> {
    input: R,
    pub(super) bytes: Vec<u8>,
    pub(super) pos: usize,
    pub(super) len: usize,
    /// The marks of the last piece, which ends at `indexed`. The parser does not look at bytes after it.
    pub(super) index: Index,
    pub(super) indexed: usize,
    dropped_bytes: u64,
}

impl<R: Read> Window<R> {
    /// With a window of this size at first. Tests use small windows to test everything at the edges.
    pub(super) fn with_capacity(input: R, bytes: usize) -> Self {
        let bytes = vec![0; bytes.max(1)];
        Self { input, bytes, pos: 0, len: 0, index: Index::new(), indexed: 0, dropped_bytes: 0 }
    }

    /// The offset in the input of a position in the window.
    pub(super) fn offset_of(&self, place: usize) -> u64 {
        self.dropped_bytes + place as u64
    }

    /// The indexed bytes still to be read.
    pub(super) fn rest(&self) -> &[u8] {
        &self.bytes[self.pos..self.indexed]
    }

    /// Whether [`Window::more`] has to read input.
    pub(super) fn is_all_indexed(&self) -> bool {
        self.indexed == self.len
    }

    /// Indexes the next piece, once all marks of the last one are used. If the window has no more bytes, this
    /// first drops the bytes before `pos`, so that the byte at `pos` moves to index 0, and reads input.
    /// Returns false at the end of the input.
    pub(super) fn more(&mut self) -> Result<bool> {
        debug_assert_eq!(self.index.mark(), None);
        if self.is_all_indexed() && !self.read()? {
            return Ok(false);
        }
        let end = self.len.min(self.indexed + PIECE_BYTES);
        self.index.read(&self.bytes[..end], self.indexed);
        self.indexed = end;
        Ok(true)
    }

    fn read(&mut self) -> Result<bool> {
        self.bytes.copy_within(self.pos..self.len, 0);
        self.dropped_bytes += self.pos as u64;
        self.len -= self.pos;
        self.indexed = self.len;
        self.pos = 0;
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
