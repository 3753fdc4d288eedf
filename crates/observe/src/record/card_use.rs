//! The driver's data about a rank's card while it trains.
//!
//! Input: samples during the measured steps, or why they are missing. Output: a part of the rank's report. This module does not
//! know who asks the driver.

use serde::{Deserialize, Serialize};

/// The card of a rank in its measured steps. All processes that use the card count.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CardUse {
    /// For how much of the time the card ran a kernel, in percent: the sum and the number of the samples.
    busy: (u64, u64),
    /// The most bytes of its memory that were used.
    pub most_bytes: Option<u64>,
    /// The first reason, in words, why something is not known.
    pub missing: Option<String>,
}

impl CardUse {
    /// Adds the driver's answers.
    pub fn add(&mut self, busy_pct: Result<u32, String>, used_bytes: Result<u64, String>) {
        match busy_pct {
            Ok(pct) => self.busy = (self.busy.0 + u64::from(pct), self.busy.1 + 1),
            Err(reason) => self.is_missing(reason),
        }
        match used_bytes {
            Ok(bytes) => self.most_bytes = self.most_bytes.max(Some(bytes)),
            Err(reason) => self.is_missing(reason),
        }
    }

    /// Notes why something is not known.
    pub fn is_missing(&mut self, reason: String) {
        self.missing.get_or_insert(reason);
    }

    /// The mean of the samples, in percent.
    pub fn busy_pct(&self) -> Option<f64> {
        let (sum, count) = self.busy;
        (count > 0).then(|| sum as f64 / count as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_averaged_and_the_first_reason_is_kept() {
        let mut card = CardUse::default();
        assert_eq!((card.busy_pct(), card.most_bytes), (None, None));
        card.add(Ok(10), Ok(300));
        card.add(Ok(45), Ok(200));
        card.add(Err("not supported".to_owned()), Ok(100));
        card.add(Ok(20), Err("lost".to_owned()));
        assert_eq!((card.busy_pct(), card.most_bytes), (Some(25.0), Some(300)));
        assert_eq!(card.missing.as_deref(), Some("not supported"));
    }
}
