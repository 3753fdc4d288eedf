//! Half-open time intervals, and sets of them.

/// A half-open interval of time, `[start_ns, end_ns)`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Span {
    /// The first nanosecond of the interval.
    pub start_ns: u64,
    /// The first nanosecond after the interval.
    pub end_ns: u64,
}

impl Span {
    /// An instant.
    pub fn at(ns: u64) -> Self {
        Self { start_ns: ns, end_ns: ns }
    }

    /// Length in nanoseconds; zero if the end is not after the start.
    pub fn len_ns(&self) -> u64 {
        self.end_ns.saturating_sub(self.start_ns)
    }
}

/// A union of intervals, kept sorted and disjoint.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IntervalSet {
    spans: Vec<Span>,
}

impl IntervalSet {
    /// The union of `spans`, which may overlap, touch, be empty or come in any order.
    pub fn union(spans: impl IntoIterator<Item = Span>) -> Self {
        let mut sorted: Vec<Span> = spans.into_iter().filter(|s| s.len_ns() > 0).collect();
        sorted.sort_unstable_by_key(|s| s.start_ns);
        let mut merged: Vec<Span> = Vec::with_capacity(sorted.len());
        for span in sorted {
            match merged.last_mut() {
                Some(last) if span.start_ns <= last.end_ns => {
                    last.end_ns = last.end_ns.max(span.end_ns)
                }
                _ => merged.push(span),
            }
        }
        Self { spans: merged }
    }

    /// Total length in nanoseconds.
    pub fn len_ns(&self) -> u64 {
        self.spans.iter().map(Span::len_ns).sum()
    }

    /// How much of a span lies in this set, in nanoseconds.
    pub fn len_within_ns(&self, span: Span) -> u64 {
        let first = self.first_after(span.start_ns);
        let inside = self.spans[first..].iter().take_while(|own| own.start_ns < span.end_ns);
        inside
            .map(|own| own.end_ns.min(span.end_ns).saturating_sub(own.start_ns.max(span.start_ns)))
            .sum()
    }

    /// The index of the first interval that ends after `at_ns`.
    fn first_after(&self, at_ns: u64) -> usize {
        self.spans.partition_point(|span| span.end_ns <= at_ns)
    }

    /// The time that lies in both sets. If one set covers much more time than the other, only the part around
    /// the other is visited.
    pub fn intersection(&self, other: &Self) -> Self {
        let (Some(first), Some(other_first)) = (self.spans.first(), other.spans.first()) else {
            return Self::default();
        };
        let mut i = self.first_after(other_first.start_ns);
        let mut j = other.first_after(first.start_ns);
        let mut spans = Vec::new();
        while let (Some(a), Some(b)) = (self.spans.get(i), other.spans.get(j)) {
            let shared =
                Span { start_ns: a.start_ns.max(b.start_ns), end_ns: a.end_ns.min(b.end_ns) };
            if shared.len_ns() > 0 {
                spans.push(shared);
            }
            if a.end_ns <= b.end_ns {
                i += 1;
            } else {
                j += 1;
            }
        }
        Self { spans }
    }

    /// The time that lies in this set but not in the other.
    pub fn difference(&self, other: &Self) -> Self {
        let mut spans = Vec::new();
        let mut next = self.spans.first().map_or(0, |first| other.first_after(first.start_ns));
        for &span in &self.spans {
            let mut start_ns = span.start_ns;
            // A cut that ends after this span is used again for the next span.
            while other.spans.get(next).is_some_and(|cut| cut.end_ns <= start_ns) {
                next += 1;
            }
            for cut in &other.spans[next..] {
                if cut.start_ns >= span.end_ns {
                    break;
                }
                if cut.start_ns > start_ns {
                    spans.push(Span { start_ns, end_ns: cut.start_ns });
                }
                start_ns = cut.end_ns;
            }
            if start_ns < span.end_ns {
                spans.push(Span { start_ns, end_ns: span.end_ns });
            }
        }
        Self { spans }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(pairs: &[(u64, u64)]) -> IntervalSet {
        IntervalSet::union(pairs.iter().map(|&(start_ns, end_ns)| Span { start_ns, end_ns }))
    }

    #[test]
    fn union_merges_what_overlaps_or_touches() {
        assert_eq!(set(&[(5, 7), (0, 2), (2, 3), (6, 9), (4, 4)]), set(&[(0, 3), (5, 9)]));
        assert_eq!(set(&[(0, 10), (2, 3)]).len_ns(), 10);
        assert_eq!(set(&[(3, 1)]).len_ns(), 0);
    }

    #[test]
    fn a_span_is_measured_within_a_set() {
        let compute = set(&[(0, 10), (20, 30), (40, 50)]);
        let within = |start_ns, end_ns| compute.len_within_ns(Span { start_ns, end_ns });
        assert_eq!((within(0, 50), within(5, 25), within(10, 20)), (30, 10, 0));
        assert_eq!((within(22, 24), within(50, 90), within(30, 41)), (2, 0, 1));
        assert_eq!(within(24, 22), 0);
    }

    #[test]
    fn intersection_is_what_both_cover() {
        let compute = set(&[(0, 10), (20, 30), (40, 50)]);
        let both = compute.intersection(&set(&[(5, 25), (29, 41)]));
        assert_eq!(both, set(&[(5, 10), (20, 25), (29, 30), (40, 41)]));
        assert_eq!(compute.intersection(&set(&[(10, 20)])).len_ns(), 0);
        assert_eq!(compute.intersection(&compute), compute);
        assert_eq!(compute.intersection(&IntervalSet::default()).len_ns(), 0);
    }

    #[test]
    fn difference_leaves_what_the_other_does_not_cover() {
        let compute = set(&[(0, 10), (20, 30), (40, 50)]);
        let rest = compute.difference(&set(&[(2, 4), (5, 25), (30, 40), (45, 60)]));
        assert_eq!(rest, set(&[(0, 2), (4, 5), (25, 30), (40, 45)]));
        assert_eq!(compute.difference(&IntervalSet::default()), compute);
        assert_eq!(compute.difference(&compute).len_ns(), 0);
        // One cut over several spans, and several cuts in one.
        assert_eq!(compute.difference(&set(&[(5, 45)])), set(&[(0, 5), (45, 50)]));
        let holes = set(&[(1, 2), (3, 4), (25, 26), (28, 41)]);
        let left = set(&[(0, 1), (2, 3), (4, 10), (20, 25), (26, 28), (41, 50)]);
        assert_eq!(compute.difference(&holes), left);
    }
}
