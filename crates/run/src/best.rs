//! The lowest evaluation loss of a run: whether an evaluation has improved it, and whether it no longer falls.
//!
//! Input: losses, which all ranks have in common. This file knows neither checkpoints nor how a run ends.

/// The lowest loss so far.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Best {
    /// The loss, and the optimizer steps before its evaluation.
    lowest: Option<(f64, u64)>,
    /// Evaluations since then.
    since: u64,
}

impl Best {
    /// The lowest loss of an earlier part of the run.
    pub fn of_earlier(lowest: Option<(f64, u64)>) -> Self {
        Self { lowest, since: 0 }
    }

    /// Notes the loss of an evaluation after `steps` steps. True if it is lower than all before.
    pub fn note(&mut self, loss: f64, steps: u64) -> bool {
        let is_lower = self.lowest.is_none_or(|(lowest, _)| loss < lowest);
        if is_lower {
            self.lowest = Some((loss, steps));
        }
        self.since = if is_lower { 0 } else { self.since + 1 };
        is_lower
    }

    /// The lowest loss and its steps, if as many evaluations in a row as `patience` were not lower.
    pub fn no_longer_falls(&self, patience: Option<u64>) -> Option<(f64, u64)> {
        self.lowest.filter(|_| patience.is_some_and(|patience| self.since >= patience))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lower_loss_begins_the_count_again() {
        let mut best = Best::default();
        let noted =
            [(2.0, true), (1.5, true), (1.5, false), (1.4, true), (1.6, false), (1.4, false)];
        for (at, (loss, is_lower)) in (1..).zip(noted) {
            assert_eq!(best.note(loss, at), is_lower, "{loss}");
            assert_eq!(best.no_longer_falls(None), None);
            let expected = (at == 6).then_some((1.4, 4));
            assert_eq!(best.no_longer_falls(Some(2)), expected, "after {at}");
        }
        let mut best = Best::of_earlier(Some((1.0, 7)));
        assert!(!best.note(1.2, 9));
        assert_eq!(best.no_longer_falls(Some(1)), Some((1.0, 7)));
    }
}
