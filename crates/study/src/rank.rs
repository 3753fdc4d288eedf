//! Decides which case is better: by medians over the rounds, if the difference is more than noise.
//!
//! **The rule.** Two cases differ if their ranges, from the smallest to the largest value of all rounds,
//! have no value in common. Otherwise there is no difference, however far apart the medians are. If the
//! two cases were equal, `n` rounds of each would give disjoint ranges by chance once in `C(2n, n) / 2`
//! comparisons: with 3 rounds once in 10, with 5 once in 126. With fewer than 3 rounds, no difference is
//! reported.

use paceline_observe::figures::figure::Better;
use paceline_table::stats;

/// Below this number of rounds, chance parts the ranges of equal cases too often.
pub const MIN_ROUNDS: usize = 3;

/// A figure over the rounds of a case.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Spread {
    /// The median.
    pub median: f64,
    /// The smallest.
    pub min: f64,
    /// The largest.
    pub max: f64,
    /// How many values there are.
    pub rounds: usize,
}

impl Spread {
    /// The spread of `values`; `None` if any value is missing, or if there are no values.
    pub fn of(values: impl IntoIterator<Item = Option<f64>>) -> Option<Self> {
        let values = values.into_iter().collect::<Option<Vec<f64>>>()?;
        let median = stats::median(values.iter().copied())?;
        let (min, max) = (
            values.iter().copied().fold(median, f64::min),
            values.iter().copied().fold(median, f64::max),
        );
        Some(Self { median, min, max, rounds: values.len() })
    }

    /// Whether the difference between the two is more than noise.
    pub fn differs_from(&self, other: &Self) -> bool {
        let is_apart = self.max < other.min || other.max < self.min;
        is_apart && self.rounds.min(other.rounds) >= MIN_ROUNDS
    }
}

/// The median of `values`; `None` if any value is missing, or if there are no values.
pub fn median(values: impl IntoIterator<Item = Option<f64>>) -> Option<f64> {
    Spread::of(values).map(|spread| spread.median)
}

/// The place of each case: one plus the number of cases that are better by more than noise. Cases that do
/// not differ can share a place.
pub fn places(cases: &[Option<Spread>], better: Better) -> Vec<Option<usize>> {
    let beats = |one: &Spread, other: &Spread| {
        let is_better = match better {
            Better::Lower => one.median < other.median,
            Better::Higher => one.median > other.median,
        };
        is_better && one.differs_from(other)
    };
    let place = |of: &Spread| 1 + cases.iter().flatten().filter(|other| beats(other, of)).count();
    cases.iter().map(|of| of.as_ref().map(place)).collect()
}

/// The cases in the order in which they are shown: by place, then by median, those without a value last.
pub fn order(cases: &[Option<Spread>], better: Better) -> Vec<usize> {
    let places = places(cases, better);
    let mut order: Vec<usize> = (0..cases.len()).collect();
    order.sort_by(|&a, &b| {
        let key = |at: usize| {
            let median = cases[at].map_or(f64::INFINITY, |of| of.median);
            (
                places[at].unwrap_or(usize::MAX),
                if better == Better::Lower { median } else { -median },
            )
        };
        let (a, b) = (key(a), key(b));
        a.0.cmp(&b.0).then(a.1.total_cmp(&b.1))
    });
    order
}

/// The percentage of comparisons of equal cases in which the ranges of `rounds` rounds are disjoint by
/// chance.
pub fn chance_pct(rounds: usize) -> f64 {
    // C(2n, n) is the product of (n + i) / i.
    let ways = (1..=rounds).fold(1.0, |ways, i| ways * (rounds + i) as f64 / i as f64);
    200.0 / ways
}

/// The rule for when cases differ, in words.
pub fn rule(rounds: usize) -> String {
    if rounds < MIN_ROUNDS {
        return format!(
            "With fewer than {MIN_ROUNDS} rounds nothing is said to differ; pass more --rounds."
        );
    }
    let chance = chance_pct(rounds);
    format!(
        "Two cases differ if their ranges over {rounds} rounds have no value in common (by chance, equal ones do \
         so in {} % of comparisons).",
        if chance >= 0.1 { format!("{chance:.1}") } else { "less than 0.1".into() }
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spread(values: &[f64]) -> Option<Spread> {
        Spread::of(values.iter().copied().map(Some))
    }

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(median([Some(3.0), Some(1.0), Some(2.0)]), Some(2.0));
        assert_eq!(median([Some(1.0), Some(4.0)]), Some(2.5));
        assert_eq!(median([Some(1.0), None]), None);
        assert_eq!(median([]), None);
        let of = spread(&[3.0, 1.0, 2.5]).unwrap();
        assert_eq!((of.min, of.median, of.max, of.rounds), (1.0, 2.5, 3.0, 3));
    }

    #[test]
    fn ranges_that_meet_are_no_difference() {
        let differ = |a: &[f64], b: &[f64]| spread(a).unwrap().differs_from(&spread(b).unwrap());
        assert!(differ(&[1.0, 2.0, 3.0], &[3.1, 4.0, 5.0]));
        assert!(differ(&[3.1, 4.0, 5.0], &[1.0, 2.0, 3.0]), "either way round");
        assert!(!differ(&[1.0, 2.0, 3.0], &[3.0, 4.0, 5.0]), "one value in common");
        // The medians are far apart, but one round of each is not.
        assert!(!differ(&[1.0, 1.1, 9.0], &[8.0, 9.5, 9.6]));
        // Two rounds say nothing.
        assert!(!differ(&[1.0, 1.1], &[8.0, 9.5]));
        // A value that is the same in every round, such as a loss, differs by any amount.
        assert!(differ(&[0.5; 3], &[0.6; 3]) && !differ(&[0.5; 3], &[0.5; 3]));
    }

    #[test]
    fn equal_cases_share_a_place() {
        let cases = [
            spread(&[10.0, 11.0, 12.0]),
            spread(&[20.0, 21.0, 22.0]),
            None,
            spread(&[11.5, 12.5, 13.0]),
            spread(&[12.5, 13.0, 14.0]),
        ];
        let lower = places(&cases, Better::Lower);
        // The last case is after the first one only, because its range overlaps that of the case in
        // between.
        assert_eq!(lower, [Some(1), Some(4), None, Some(1), Some(2)]);
        assert_eq!(order(&cases, Better::Lower), [0, 3, 4, 1, 2]);
        let higher = places(&cases, Better::Higher);
        assert_eq!(higher, [Some(3), Some(1), None, Some(2), Some(2)]);
        assert_eq!(order(&cases, Better::Higher), [1, 4, 3, 0, 2]);
    }

    #[test]
    fn chance_is_what_the_rule_says() {
        for (rounds, once_in) in [(1, 1.0), (2, 3.0), (3, 10.0), (5, 126.0)] {
            assert!((chance_pct(rounds) - 100.0 / once_in).abs() < 1e-9, "{rounds}");
        }
    }
}
