//! Allocates memory that the ranks of a host share, so that operations use it in place.

use paceline_memory::{Allocator, Buffer, Category, DType, Device, Tensor};

use super::Group;
use super::host_links::HostLinks;
use crate::shared::{Reach, Segments, SharedState};
use crate::{ReduceOp, Result};

fn zeroed(buffer: Buffer) -> Result<Buffer> {
    Tensor::new(buffer.clone(), 0, DType::U8, [buffer.len_bytes()])?.fill_zero()?;
    Ok(buffer)
}

impl Group {
    /// Allocates zeroed memory on every rank, which all operations use in place. A
    /// collective call: every rank passes the same size in bytes. Dropping the buffer returns the memory
    /// to the system, and a later call of this function its address range, once all ranks have dropped theirs.
    pub fn allocate(
        &self,
        allocator: &Allocator,
        len_bytes: usize,
        category: Category,
    ) -> Result<Buffer> {
        let (Some(shared), HostLinks::Host { links, .. }) =
            (self.shared(), &self.membership.host_links)
        else {
            let buffer = allocator.allocate(len_bytes, category)?;
            return zeroed(buffer);
        };
        // Operations on the memory of an accelerator are staged.
        if allocator.device() != Device::Cpu {
            return zeroed(allocator.allocate(len_bytes, category)?);
        }
        let segment = links.share_segment(len_bytes)?;
        let part = segment.parts[shared.rank].clone();
        let extent = part.range();
        // SAFETY: this is the only buffer made of this rank's part of a new segment; peers touch it
        // during collective operations only, in ranges that are claimed here for that time.
        let buffer = unsafe {
            Buffer::window(part.mapping.clone(), extent, len_bytes, category, allocator)?
        };
        let segments = self.reachable(shared);
        segments.add(segment);
        self.forget_dropped(segments, shared.rank)?;
        Ok(buffer)
    }

    /// Forgets the segments whose buffers all ranks have dropped. Also a barrier.
    fn forget_dropped(&self, segments: &Segments, rank: usize) -> Result<()> {
        let mut dropped = segments.dropped(rank);
        self.all_reduce_slice(&mut dropped, ReduceOp::Min)?;
        segments.forget(&dropped);
        Ok(())
    }

    pub(super) fn reachable<'a>(&self, shared: &'a SharedState) -> &'a Segments {
        match &shared.reach {
            Reach::Segments(segments) => segments,
            Reach::Threads => unreachable!("ranks with connections to their host are processes"),
        }
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
            assert_eq!(group.shared().unwrap().reach.held_bytes().len(), 1);
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

    /// The mappings and files of this process that ranks share.
    fn num_shared_files() -> usize {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines().filter(|line| line.contains("memfd:paceline")).count()
    }

    /// Two ranks of a group of their own, each on a thread.
    fn on_two_ranks(rank: impl Fn(Group) + Sync) {
        let name = format!("paceline-test-{}", Rendezvous::fresh_secret().unwrap());
        let rendezvous = &Rendezvous::by_name(name, "");
        let run = |number: usize| {
            let timeout = Duration::from_secs(60);
            let options = GroupOptions { timeout, ..GroupOptions::for_local_ranks(2) };
            rank(Group::shm(rendezvous, number, 2, options).unwrap());
        };
        std::thread::scope(|scope| {
            let ranks = [0, 1].map(|number| scope.spawn(move || run(number)));
            ranks.into_iter().for_each(|rank| rank.join().unwrap());
        });
    }

    #[test]
    fn freed_allocations_leave_nothing_behind() {
        on_two_ranks(|group| {
            let allocator = Allocator::new();
            let allocate = || group.allocate(&allocator, 4096, Category::Gradients).unwrap();
            let held = || group.shared().unwrap().reach.held_bytes().len();
            let stays = allocate();
            // A part of the group reaches the memory that stays, even when the rest is gone.
            let part = group.split(Some(0)).unwrap().unwrap();
            // Dropped on one rank only, and so kept.
            let mut of_one = Some(allocate());
            if group.rank() == 0 {
                of_one = None;
            }
            for _ in 0..100 {
                drop(allocate());
            }
            group.barrier().unwrap();
            assert_eq!(held(), 3, "what stays, what one rank has, and the last one");
            let data = Tensor::new(stays, 0, DType::F32, [1024]).unwrap();
            for group in [&group, &part] {
                data.write::<f32>().unwrap().fill(1.0);
                group.all_reduce(&data, ReduceOp::Sum).unwrap();
                assert!(data.read::<f32>().unwrap().iter().all(|&sum| sum == 2.0));
            }
            drop(of_one);
            let last = allocate();
            assert_eq!(held(), 2);
            drop(last);
        });
        assert!(num_shared_files() < 100, "{} mappings are left", num_shared_files());
    }
}
