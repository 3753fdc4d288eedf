//! Idle time by cause as it is shown: causes that cancel each other are one number.

use crate::{IdleCause, RankAccount};

/// Times below this, in milliseconds, are shown as zero.
const LEAST_SHOWN_MS: f64 = 0.005;

/// Idle time shown as one number: of a cause, of several that cancel each other, or the rest (`None`).
#[derive(Clone, Debug, PartialEq)]
pub struct IdlePart(Vec<Option<IdleCause>>);

impl IdlePart {
    /// The parts of these ranks' idle time, none below zero on any rank. A cause that takes away idle time of the causes
    /// before it is one part with them.
    pub fn all(ranks: &[RankAccount]) -> Vec<Self> {
        let rehearsed = IdleCause::ALL.into_iter().filter(|of| *of != IdleCause::Barrier).map(Some);
        let mut parts: Vec<Self> = Vec::new();
        for cause in rehearsed.chain([None, Some(IdleCause::Barrier)]) {
            let mut part = Self(vec![cause]);
            while ranks.iter().any(|rank| part.sum(rank) < -LEAST_SHOWN_MS)
                && let Some(before) = parts.pop()
            {
                part.0.splice(..0, before.0);
            }
            parts.push(part);
        }
        parts
    }

    /// The names of its causes.
    pub fn name(&self) -> String {
        let names: Vec<&str> = self.0.iter().map(|of| of.map_or("rest", IdleCause::name)).collect();
        names.join(" + ")
    }

    /// The idle time of a rank, in milliseconds.
    pub fn of(&self, rank: &RankAccount) -> f64 {
        self.sum(rank).max(0.0)
    }

    fn sum(&self, rank: &RankAccount) -> f64 {
        self.0.iter().map(|of| of.map_or(rank.rest, |cause| rank.of(cause))).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_that_cancel_each_other_are_one_part_and_none_is_below_zero() {
        // Of two ranks, in the order of all causes, and the rest.
        let shown = |ranks: [([f64; 7], f64); 2]| {
            let account = |(idle, rest)| RankAccount { idle, rest, ..RankAccount::default() };
            let ranks = ranks.map(account);
            let shown = |part: IdlePart| (part.name(), ranks.each_ref().map(|rank| part.of(rank)));
            IdlePart::all(&ranks).into_iter().map(shown).collect::<Vec<_>>()
        };
        let positive = ([1.0, 0.0, 2.0, 0.0, 0.0, 3.0, 4.0], 0.5);
        let parts = shown([positive, positive]);
        let names = parts.iter().map(|(name, _)| &name[..]).collect::<Vec<_>>().join(", ");
        let each = "fill, drain, imbalance, transfer, head of line, late peer, rest, barrier";
        assert_eq!((&names[..], parts[5].1), (each, [3.0; 2]));
        // On one rank only, and over several causes.
        let negative = ([0.0, 1.0, -0.5, 2.0, -0.004, -2.25, 4.0], -0.125);
        let parts = shown([positive, negative]);
        let expected = [
            ("fill", [1.0, 0.0]),
            ("drain + imbalance + transfer + head of line + late peer + rest", [5.5, 0.121]),
            ("barrier", [4.0, 4.0]),
        ];
        let parts: Vec<_> = parts.iter().map(|(name, of)| (&name[..], *of)).collect();
        assert_eq!(parts.len(), expected.len(), "{parts:?}");
        for ((name, found), (expected_name, expected)) in parts.into_iter().zip(expected) {
            assert_eq!(name, expected_name);
            assert!(
                found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-9),
                "{name}: {found:?}"
            );
        }
        // Times that are shown as zero do not join others, and have no sign.
        let little = ([1.0, -0.004, 0.0, 0.0, 0.0, 0.0, 0.0], 0.0);
        assert_eq!(shown([little, little])[1], ("drain".to_owned(), [0.0; 2]));
    }
}
