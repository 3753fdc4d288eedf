//! Copies a rank's pieces, so that training can go on while they are written.
//!
//! Input: pieces in memory. Output: blocks of one chunk each, as they will follow each other in the file. Memory for
//! blocks is bounded: when the writer is slower, copying waits for it. This file knows nothing of disks.

use std::collections::BTreeMap;
use std::sync::mpsc::SyncSender;

use paceline_failure::Result;
use paceline_memory::{Allocator, Buffer, Category, DType, ReadGuard, Tensor, WriteGuard};

use super::index::{CHUNK_BYTES, PieceEntry, TensorEntry};
use super::pieces::Piece;

/// The smallest budget, in bytes: the writer has one block while the next one is filled.
pub const MIN_BUDGET_BYTES: usize = 2 * CHUNK_BYTES;

/// A block that is ready to be written.
#[derive(Debug)]
pub(super) struct Block {
    memory: Buffer,
    len: usize,
}

impl Block {
    /// The bytes.
    pub fn read(&self) -> Result<ReadGuard<u8>> {
        Ok(Tensor::new(self.memory.clone(), 0, DType::U8, [self.len])?.read()?)
    }
}

/// The number of bytes of all pieces.
pub(super) fn num_bytes(pieces: &[Piece]) -> usize {
    pieces.iter().map(|piece| piece.data.num_bytes()).sum()
}

/// The blocks that may wait for the writer if all blocks together may take `budget` bytes of memory.
pub(super) fn num_waiting(num_bytes: usize, budget: Option<usize>) -> usize {
    let all = num_bytes.div_ceil(CHUNK_BYTES);
    // One more is being filled, and one is being written.
    budget.map_or(all, |budget| all.min((budget / CHUNK_BYTES).saturating_sub(2)))
}

/// The tensors that these pieces belong to. The pieces follow each other in the file of this number.
pub fn entries(pieces: &[Piece], file: usize) -> BTreeMap<String, TensorEntry> {
    let mut offset = 0;
    let mut entries: BTreeMap<String, TensorEntry> = BTreeMap::new();
    for Piece { name, shape, start, data } in pieces {
        let entry = entries.entry(name.clone()).or_insert_with(|| TensorEntry {
            dtype: data.dtype().name().to_owned(),
            shape: shape.clone(),
            pieces: Vec::new(),
        });
        entry.pieces.push(PieceEntry { start: *start, len: data.num_elems(), file, offset });
        offset += data.num_bytes() as u64;
    }
    entries
}

/// Copies all pieces, one after the other, and sends a block whenever one is full. Ends early if nobody receives them.
pub(super) fn copy(pieces: &[Piece], allocator: &Allocator, to: &SyncSender<Block>) -> Result<()> {
    let mut left = num_bytes(pieces);
    let mut filling: Option<Filling> = None;
    for piece in pieces {
        let bytes = piece.data.to_host()?.as_bytes().read::<u8>()?;
        let mut from = &bytes[..];
        while !from.is_empty() {
            let mut block = match filling.take() {
                Some(block) => block,
                None => Filling::new(allocator, left.min(CHUNK_BYTES))?,
            };
            from = block.fill(from);
            if block.len < block.bytes.len() {
                filling = Some(block);
                continue;
            }
            left -= block.len;
            if to.send(block.finish()).is_err() {
                // The writer has failed, and its owner will learn why.
                return Ok(());
            }
        }
    }
    Ok(())
}

/// A block that is being filled.
struct Filling {
    memory: Buffer,
    bytes: WriteGuard<u8>,
    /// The bytes that it has so far.
    len: usize,
}

impl Filling {
    fn new(allocator: &Allocator, len: usize) -> Result<Self> {
        let memory = allocator.allocate(len, Category::Snapshots)?;
        let bytes = Tensor::new(memory.clone(), 0, DType::U8, [len])?.write()?;
        Ok(Self { memory, bytes, len: 0 })
    }

    /// Takes as many bytes as there is room for. Returns the others.
    fn fill<'a>(&mut self, from: &'a [u8]) -> &'a [u8] {
        let room = self.bytes.len() - self.len;
        let (now, rest) = from.split_at(room.min(from.len()));
        self.bytes[self.len..self.len + now.len()].copy_from_slice(now);
        self.len += now.len();
        rest
    }

    fn finish(self) -> Block {
        Block { memory: self.memory, len: self.len }
    }
}
