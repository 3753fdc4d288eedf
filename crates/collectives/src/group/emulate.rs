//! Makes a group emulate a slower link.
//!
//! This file decides whether the transport is fast enough to emulate a link. `emulator.rs` delays the operations.

use super::Group;
use crate::cost::Link;
use crate::emulator::LinkEmulator;
use crate::{CollectiveError, Result};

impl Group {
    /// Makes every later operation take as long as it would on this link. A collective call.
    ///
    /// The transport is measured first. Errors if the link is not at least 1.25 times as slow as the
    /// transport, or if the link cannot exist.
    pub fn emulate(&self, link: Link) -> Result<()> {
        if !link.is_possible() {
            let (rank, link) = (self.rank(), link.to_string());
            return Err(CollectiveError::ImpossibleLink { rank, link });
        }
        for bytes in [4096, 4_000_000] {
            let measured = self.measure_all_reduce(bytes)?;
            let kind = crate::OpKind::AllReduce;
            let algorithm = self.membership.options.algorithm;
            let algorithm = algorithm.recommended(kind, self.world_size(), bytes as u64, &link);
            let emulated = link.time(kind, algorithm, self.world_size(), bytes as u64);
            if self.world_size() > 1 && emulated < measured.mul_f64(1.25) {
                let link = link.to_string();
                return Err(CollectiveError::Link { link, bytes, emulated, measured });
            }
        }
        self.set_emulator(link);
        Ok(())
    }

    pub(crate) fn set_emulator(&self, link: Link) {
        // If a link has been set before, it stays.
        let _ = self.membership.core.emulator.set(LinkEmulator::new(
            link,
            self.membership.options.algorithm,
            self.membership.lineage.rank.card.clone(),
        ));
    }

    pub(crate) fn emulate_if_asked(self, link: Option<Link>) -> Result<Self> {
        if let Some(link) = link {
            self.emulate(link)?;
        }
        Ok(self)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use paceline_memory::{Allocator, Category, DType, Tensor};

    use crate::{Group, Link, ReduceOp};

    /// Two sub-groups of the same ranks reduce at the same time. Their bytes go through one network card,
    /// so the two operations take as long as if one followed the other.
    #[test]
    fn concurrent_groups_share_the_bandwidth_of_the_link() {
        const ELEMS: usize = 100_000;
        let link = Link { bytes_per_s: 8e6, latency_s: 0.0 };
        // An all-reduce of two ranks moves the message once through each rank.
        let each_ns = (4 * ELEMS) as f64 / link.bytes_per_s * 1e9;
        let rank = |group: &Group| {
            group.set_emulator(link);
            let parts = [(); 2].map(|()| group.split(Some(0)).unwrap().unwrap());
            group.barrier().unwrap();
            let works = parts.each_ref().map(|part| {
                let buffer = Allocator::new().allocate(4 * ELEMS, Category::Communication).unwrap();
                let data = Tensor::new(buffer, 0, DType::F32, [ELEMS]).unwrap();
                data.write::<f32>().unwrap().fill(1.0);
                part.all_reduce_async(&data, ReduceOp::Sum).unwrap()
            });
            let times = works.map(|work| work.wait().unwrap());
            let begin = times.iter().map(|times| times.present_ns).min().unwrap();
            let end = times.iter().map(|times| times.finished_ns).max().unwrap();
            (end - begin) as f64
        };
        let taken = std::thread::scope(|scope| {
            let ranks =
                Group::threads(2).into_iter().map(|group| scope.spawn(move || rank(&group)));
            let ranks: Vec<_> = ranks.collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<f64>>()
        });
        // Operations never end early, so this holds on any machine.
        assert!(taken.iter().all(|&ns| ns >= 2.0 * each_ns), "{taken:?} of twice {each_ns} ns");
    }
}
