//! Allocates memory that the ranks of a host share, so that operations use it in place.

use paceline_memory::{Allocator, Buffer, Category, DType, Tensor};

use super::Group;
use super::ties::Ties;
use crate::CollectiveError;

impl Group {
    /// Allocates zeroed memory on every rank, which all operations use in place, without staging. A
    /// collective call: every rank passes the same size in bytes. Dropping the buffer returns the memory
    /// to the system. Its address range stays reserved until the group is dropped.
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
        let (mapping, part_bytes) = (segment.mapping.clone(), segment.part_bytes);
        // SAFETY: this is the only buffer made of this rank's part of a new segment; peers touch it
        // during collective operations only, in ranges that are claimed here for that time.
        let buffer = unsafe {
            Buffer::window(mapping, start..start + part_bytes, len_bytes, category, allocator)?
        };
        shared.reach.add(segment);
        self.barrier()?;
        Ok(buffer)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::time::Duration;

    use paceline_memory::{Allocator, Category, DType, Tensor};
    use paceline_rendezvous::Rendezvous;

    use crate::{Group, GroupOptions, ReduceOp};

    #[test]
    fn memory_goes_back_to_the_system_with_the_buffers_of_all_ranks() {
        const BYTES: usize = 3 << 20;
        let name = format!("paceline-test-{}", Rendezvous::fresh_secret().unwrap());
        let rendezvous = &Rendezvous::by_name(name, "");
        let rank = |rank: usize| {
            let timeout = Duration::from_secs(60);
            let options = GroupOptions { timeout, ..GroupOptions::for_local_ranks(2) };
            let group = Group::shm(rendezvous, rank, 2, options).unwrap();
            let allocator = Allocator::new();
            let buffer = group.allocate(&allocator, BYTES, Category::Gradients).unwrap();
            let data = Tensor::new(buffer, 0, DType::F32, [BYTES / 4]).unwrap();
            data.write::<f32>().unwrap().fill(1.0);
            group.all_reduce(&data, ReduceOp::Sum).unwrap();
            let held = group.shared().unwrap().reach.held_bytes();
            assert!(held.last().unwrap() >= &(2 * BYTES), "{held:?}");
            group.barrier().unwrap();
            drop(data);
            assert_eq!(allocator.usage(Category::Gradients).current_bytes, 0);
            group.barrier().unwrap();
            assert_eq!(group.shared().unwrap().reach.held_bytes().last(), Some(&0));
            // Memory that is allocated later is independent of the first.
            let buffer = group.allocate(&allocator, BYTES, Category::Gradients).unwrap();
            let data = Tensor::new(buffer, 0, DType::F32, [BYTES / 4]).unwrap();
            data.write::<f32>().unwrap().fill(2.0);
            group.all_reduce(&data, ReduceOp::Sum).unwrap();
            assert!(data.read::<f32>().unwrap().iter().all(|&sum| sum == 4.0));
        };
        std::thread::scope(|scope| {
            let ranks = [0, 1].map(|number| scope.spawn(move || rank(number)));
            ranks.into_iter().for_each(|rank| rank.join().unwrap());
        });
    }
}
