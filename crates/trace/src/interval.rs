//! Half-open time intervals and sets of them.

/// A half-open interval of time, `[start_ns, end_ns)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// First nanosecond inside.
    pub start_ns: u64,
    /// First nanosecond after.
    pub end_ns: u64,
}

impl Span {
    /// Length in nanoseconds; zero where the end does not lie after the start.
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

    /// Length in nanoseconds of what lies in both sets.
    pub fn overlap_ns(&self, other: &Self) -> u64 {
        let (mut i, mut j, mut total) = (0, 0, 0);
        while let (Some(a), Some(b)) = (self.spans.get(i), other.spans.get(j)) {
            let shared =
                Span { start_ns: a.start_ns.max(b.start_ns), end_ns: a.end_ns.min(b.end_ns) };
            total += shared.len_ns();
            if a.end_ns <= b.end_ns {
                i += 1;
            } else {
                j += 1;
            }
        }
        total
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
    fn overlap_counts_each_nanosecond_once() {
        let compute = set(&[(0, 10), (20, 30), (40, 50)]);
        assert_eq!(compute.overlap_ns(&set(&[(5, 25), (29, 41)])), 5 + 5 + 1 + 1);
        assert_eq!(compute.overlap_ns(&set(&[(10, 20)])), 0);
        assert_eq!(compute.overlap_ns(&compute), compute.len_ns());
        assert_eq!(compute.overlap_ns(&IntervalSet::default()), 0);
    }
}
