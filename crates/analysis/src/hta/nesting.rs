//! Nested spans of one thread. At every moment, only the innermost span counts.

/// A span, and its meaning.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Nested<T> {
    pub start_ns: i64,
    pub end_ns: i64,
    pub what: T,
}

/// Cuts the time that `spans` cover into pieces and passes them to `emit` in order of time. A piece belongs
/// to the span that started last among those still open. If two spans start together, the longer one is the
/// outer one. A span may end after the span in which it started; it keeps the time until its own end.
pub(crate) fn innermost<T: Copy>(spans: &mut [Nested<T>], mut emit: impl FnMut(Nested<T>)) {
    spans.sort_by_key(|span| (span.start_ns, std::cmp::Reverse(span.end_ns)));
    let mut open: Vec<Nested<T>> = Vec::new();
    let mut at_ns = i64::MIN;
    for &span in spans.iter() {
        close(&mut open, &mut at_ns, span.start_ns, &mut emit);
        if let Some(around) = open.last() {
            piece(around, at_ns, span.start_ns, &mut emit);
        }
        at_ns = at_ns.max(span.start_ns);
        open.push(span);
    }
    close(&mut open, &mut at_ns, i64::MAX, &mut emit);
}

/// Closes the spans that end by `until_ns`, from the innermost outward.
fn close<T: Copy>(
    open: &mut Vec<Nested<T>>,
    at_ns: &mut i64,
    until_ns: i64,
    emit: &mut impl FnMut(Nested<T>),
) {
    while let Some(last) = open.pop_if(|last| last.end_ns <= until_ns) {
        piece(&last, *at_ns, last.end_ns, emit);
        *at_ns = (*at_ns).max(last.end_ns);
    }
}

fn piece<T: Copy>(of: &Nested<T>, from_ns: i64, to_ns: i64, emit: &mut impl FnMut(Nested<T>)) {
    let start_ns = from_ns.max(of.start_ns);
    if start_ns < to_ns {
        emit(Nested { start_ns, end_ns: to_ns, what: of.what });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(spans: &[(i64, i64, char)]) -> Vec<(i64, i64, char)> {
        let spans = spans.iter().map(|&(start_ns, end_ns, what)| Nested { start_ns, end_ns, what });
        let mut out = Vec::new();
        innermost(&mut spans.collect::<Vec<_>>(), |piece| {
            out.push((piece.start_ns, piece.end_ns, piece.what))
        });
        out
    }

    #[test]
    fn the_innermost_span_counts() {
        let spans = [(2, 4, 'b'), (0, 10, 'a'), (4, 6, 'c'), (5, 6, 'd'), (12, 13, 'e')];
        let expected =
            [(0, 2, 'a'), (2, 4, 'b'), (4, 5, 'c'), (5, 6, 'd'), (6, 10, 'a'), (12, 13, 'e')];
        assert_eq!(pieces(&spans), expected);
    }

    #[test]
    fn nothing_is_counted_twice_where_spans_cross() {
        assert_eq!(pieces(&[(0, 5, 'a'), (3, 8, 'b')]), [(0, 3, 'a'), (3, 8, 'b')]);
        assert_eq!(pieces(&[(0, 5, 'a'), (5, 5, 'b')]), [(0, 5, 'a')]);
        assert_eq!(pieces(&[(0, 5, 'a'), (0, 5, 'b')]), [(0, 5, 'b')]);
    }
}
