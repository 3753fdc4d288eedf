//! Memory that the ranks of a host share, so that operations use it in place.

use paceline_memory::{Allocator, Buffer, Category, DType, Tensor};

use super::Group;
use super::ties::Ties;
use crate::CollectiveError;

impl Group {
    /// Allocates zeroed memory on every rank that all operations use in place, without staging. A
    /// collective call: every rank passes the same size. The memory lives as long as the group.
    pub fn allocate(
        &self,
        allocator: &Allocator,
        len_bytes: usize,
        category: Category,
    ) -> Result<Buffer, CollectiveError> {
        let (Some(shared), Ties::Host { links, .. }) = (self.shared(), &self.ties) else {
            let buffer = allocator.host(len_bytes, category)?;
            let whole = Tensor::new(buffer.clone(), 0, DType::U8, [len_bytes])?;
            whole.write::<u8>()?.fill(0);
            return Ok(buffer);
        };
        let segment = links.share_segment(len_bytes)?;
        let start = segment.start_bytes + shared.rank * segment.part_bytes;
        let mapping = segment.mapping.clone();
        // SAFETY: this is the only buffer made of this rank's part of a new segment; peers touch it
        // during collective operations only, in ranges that are claimed here for that time.
        let buffer =
            unsafe { Buffer::window(mapping, start..start + len_bytes, category, allocator)? };
        shared.reach.add(segment);
        self.barrier()?;
        Ok(buffer)
    }
}
