//! Cuts a row of blocks into stages.

/// The first block of each stage but the first one, so that the stage that costs most costs as little as can be. Each stage has
/// at least one block. `None` if there are fewer blocks than stages, or no stage. Time: the square of the number of blocks, for
/// each stage.
pub fn cut(costs: &[f64], stages: usize) -> Option<Vec<usize>> {
    if stages == 0 || costs.len() < stages {
        return None;
    }
    let mut before = vec![0.0];
    for cost in costs {
        before.push(before[before.len() - 1] + cost);
    }
    // For the first `end` blocks in so many stages: the most that a stage costs, and where the last stage begins.
    let mut best: Vec<(f64, usize)> = before.iter().map(|cost| (*cost, 0)).collect();
    let mut begins = Vec::new();
    for stage in 1..stages {
        let next = |end: usize| {
            let most = |begin: usize| best[begin].0.max(before[end] - before[begin]);
            let by_cost = |a: &usize, b: &usize| most(*a).total_cmp(&most(*b));
            // Of cuts that are as good, the last one.
            let begin = (stage..end).rev().min_by(by_cost);
            begin.map_or((f64::INFINITY, 0), |begin| (most(begin), begin))
        };
        let found: Vec<(f64, usize)> = (0..=costs.len()).map(next).collect();
        begins.push(found.iter().map(|(_, begin)| *begin).collect::<Vec<_>>());
        best = found;
    }
    let mut end = costs.len();
    let mut cut: Vec<usize> = Vec::new();
    for begins in begins.iter().rev() {
        end = begins[end];
        cut.push(end);
    }
    cut.reverse();
    Some(cut)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The most that a stage costs.
    fn most(costs: &[f64], cut: &[usize]) -> f64 {
        let bounds: Vec<usize> =
            std::iter::once(0).chain(cut.iter().copied()).chain([costs.len()]).collect();
        let stages = bounds.windows(2).map(|pair| costs[pair[0]..pair[1]].iter().sum::<f64>());
        stages.fold(0.0, f64::max)
    }

    /// All cuts of `len` blocks into so many stages, from `first` on.
    fn all(first: usize, len: usize, stages: usize) -> Vec<Vec<usize>> {
        if stages == 1 {
            return vec![Vec::new()];
        }
        let cuts = (first + 1..len).flat_map(|at| {
            all(at, len, stages - 1).into_iter().map(move |rest| [vec![at], rest].concat())
        });
        cuts.collect()
    }

    #[test]
    fn no_other_cut_is_better() {
        let mut state = 7u64;
        let mut cost = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            ((state >> 40) % 20) as f64
        };
        for len in 1..9 {
            for stages in 1..=len {
                let costs: Vec<f64> = (0..len).map(|_| cost()).collect();
                let found = cut(&costs, stages).unwrap();
                assert!(found.is_sorted_by(|a, b| a < b) && found.len() == stages - 1, "{found:?}");
                let best = all(0, len, stages)
                    .iter()
                    .map(|cut| most(&costs, cut))
                    .fold(f64::MAX, f64::min);
                assert_eq!(most(&costs, &found), best, "{costs:?} in {stages}: {found:?}");
            }
        }
    }

    #[test]
    fn what_cannot_be_cut_is_not() {
        assert_eq!(cut(&[1.0, 1.0], 3), None);
        assert_eq!(cut(&[1.0], 0), None);
        assert_eq!(cut(&[1.0, 5.0, 1.0, 1.0], 2), Some(vec![2]));
        assert_eq!(cut(&[0.0; 4], 4), Some(vec![1, 2, 3]));
    }
}
