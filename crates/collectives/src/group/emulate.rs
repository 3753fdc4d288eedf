//! How a group comes to emulate a slower link.
//!
//! `pace.rs` holds operations back; this file decides whether a link can be emulated at all.

use super::Group;
use crate::CollectiveError;
use crate::cost::Link;
use crate::pace::Pace;

impl Group {
    /// Makes every later operation take as long as it would on this link. A collective call.
    ///
    /// The transport is measured first; a link that is not at least 1.25 times as slow is refused.
    pub fn emulate(&self, link: Link) -> Result<(), CollectiveError> {
        if !link.is_possible() {
            let (rank, link) = (self.rank(), link.to_string());
            return Err(CollectiveError::ImpossibleLink { rank, link });
        }
        for bytes in [4096, 4_000_000] {
            let measured = self.measure_all_reduce(bytes)?;
            let kind = crate::OpKind::AllReduce;
            let algorithm = self.options.algorithm;
            let algorithm = algorithm.recommended(kind, self.world_size(), bytes as u64, &link);
            let emulated = link.time(kind, algorithm, self.world_size(), bytes as u64);
            if self.world_size() > 1 && emulated < measured.mul_f64(1.25) {
                let link = link.to_string();
                return Err(CollectiveError::Link { link, bytes, emulated, measured });
            }
        }
        self.set_pace(link);
        Ok(())
    }

    pub(crate) fn set_pace(&self, link: Link) {
        // A second link would be refused here; the first one stays.
        let _ = self.core.pace.set(Pace::new(link, self.options.algorithm));
    }

    pub(crate) fn emulate_if_asked(self, link: Option<Link>) -> Result<Self, CollectiveError> {
        if let Some(link) = link {
            self.emulate(link)?;
        }
        Ok(self)
    }
}
