//! The rules by which the values of the ranks are combined into one. This file knows no figure.

/// How the values of the ranks are combined into one. Figures are computed by this rule, and not only printed with it: a
/// figure with another rule is another number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ranks {
    /// The value of rank 0.
    First,
    /// All ranks have the same value, or the value belongs to no rank.
    Same,
    /// The mean over the ranks. A ratio is the ratio of the means.
    Mean,
    /// The mean over the samples or tokens of all ranks: sums of all ranks, divided.
    MeanOfSamples,
    /// In each step, the value of the rank where it is largest.
    SlowestOfStep,
    /// The value of the rank that takes longest in all.
    SlowestRank,
    /// The largest value of any rank.
    Max,
    /// The sum over the ranks.
    Sum,
    /// They are not combined: there is a value for each rank.
    Each,
}

impl Ranks {
    /// Combines one value of each rank, in rank order. A time is the time of the whole run. `None` if there are no ranks, or if
    /// this rule needs more than one value of each: its steps, its samples, or the values side by side.
    pub fn combine(self, values: impl IntoIterator<Item = f64>) -> Option<f64> {
        let mut values = values.into_iter();
        let first = values.next()?;
        match self {
            Self::First | Self::Same => Some(first),
            Self::Mean => {
                let add = |(count, sum): (f64, f64), value| (count + 1.0, sum + value);
                let (count, sum) = values.fold((1.0, first), add);
                Some(sum / count)
            }
            Self::Max | Self::SlowestRank => Some(values.fold(first, f64::max)),
            Self::Sum => Some(values.fold(first, |sum, value| sum + value)),
            Self::MeanOfSamples | Self::SlowestOfStep | Self::Each => None,
        }
    }
}
