//! Computes how long passes would wait for gathered units with another prefetch.
//!
//! Operations form a queue: each starts when it is submitted and the operation before it is done. A pass that needs a
//! unit submits the gathers of the next ones, and waits for its own. So the times of a run give the wait with more or
//! fewer units gathered ahead.

use crate::insight::anatomy::GatherLine;

/// One use of a unit, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Use {
    /// How long its gather takes. `None` if the unit is still there.
    pub gather: Option<f64>,
    /// From when the unit is there until the next one is needed.
    pub compute: f64,
    /// How long the reduction of its gradients takes, submitted after the use. Zero in a forward pass.
    pub reduce: f64,
}

/// A step as a sequence of uses.
#[derive(Clone, Debug, PartialEq)]
pub struct Uses {
    /// In order.
    pub uses: Vec<Use>,
    /// How long before the first use the first gathers can be submitted, after the previous step.
    pub lead: f64,
}

impl Uses {
    /// From the measurements of a run. `None` if nothing was gathered.
    pub fn measured(lines: &[GatherLine], backward_end_ms: f64) -> Option<Self> {
        let first = lines.first()?;
        let next_needed = lines.iter().skip(1).map(|line| line.needed_ms).chain([backward_end_ms]);
        let uses = lines.iter().zip(next_needed).map(|(line, next)| Use {
            gather: (line.op.bytes > 0).then_some(line.op.move_ms()),
            compute: (next - line.needed_ms - line.exposed_ms).max(0.0),
            reduce: line.reduce_ms,
        });
        let lead = (first.needed_ms - first.op.ready_ms).max(0.0);
        Some(Self { uses: uses.collect(), lead })
    }

    /// All time that gathers take.
    pub fn gathering(&self) -> f64 {
        self.uses.iter().filter_map(|of| of.gather).sum()
    }

    /// The wait of the passes if `prefetch` units are gathered ahead.
    pub fn exposed(&self, prefetch: usize) -> f64 {
        self.played(prefetch).0
    }

    /// The same, and the time from the end of the passes until the last reduction is done.
    pub fn played(&self, prefetch: usize) -> (f64, f64) {
        // The first need is at 0. The gathers of the first units were submitted before.
        let num_forward = self.uses.iter().take_while(|of| of.reduce == 0.0).count();
        let mut done: Vec<Option<f64>> = vec![None; self.uses.len()];
        let mut free = -self.lead;
        let submit = |at: usize, now: f64, done: &mut Vec<Option<f64>>, free: &mut f64| {
            if let Some(gather) = self.uses[at].gather
                && done[at].is_none()
            {
                *free = free.max(now) + gather;
                done[at] = Some(*free);
            }
        };
        for at in 0..prefetch.min(num_forward) {
            submit(at, -self.lead, &mut done, &mut free);
        }
        let (mut now, mut exposed) = (0.0f64, 0.0);
        for (at, of) in self.uses.iter().enumerate() {
            for ahead in at..(at + prefetch + 1).min(self.uses.len()) {
                submit(ahead, now, &mut done, &mut free);
            }
            if let Some(done) = done[at] {
                exposed += (done - now).max(0.0);
                now = now.max(done);
            }
            now += of.compute;
            if of.reduce > 0.0 {
                free = free.max(now) + of.reduce;
            }
        }
        (exposed, (free - now).max(0.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uses(gather: f64, compute: f64, count: usize) -> Uses {
        let forward = Use { gather: Some(gather), compute, reduce: 0.0 };
        Uses { uses: vec![forward; count], lead: 0.0 }
    }

    #[test]
    fn what_is_gathered_ahead_hides_behind_the_unit_in_use() {
        // Without a prefetch, every gather is exposed.
        assert_eq!(uses(2.0, 3.0, 4).exposed(0), 8.0);
        // With one unit ahead, only the first is.
        assert_eq!(uses(2.0, 3.0, 4).exposed(1), 2.0);
        // Gathers longer than the computation that hides them stay exposed in part.
        assert_eq!(uses(5.0, 3.0, 4).exposed(1), 5.0 + 3.0 * 2.0);
        assert_eq!(uses(5.0, 3.0, 4).exposed(3), 5.0 + 3.0 * 2.0);
    }

    #[test]
    fn the_first_unit_hides_behind_the_end_of_the_step_before() {
        let early = Uses { lead: 1.5, ..uses(2.0, 3.0, 4) };
        assert_eq!((early.exposed(0), early.exposed(1)), (8.0, 0.5));
    }

    #[test]
    fn a_large_unit_needs_a_longer_lead() {
        let mut uneven = uses(1.0, 3.0, 4);
        uneven.uses[3].gather = Some(8.0);
        // One ahead: the gather of 8 ms hides behind 3 ms. Two ahead: behind 6 ms.
        assert_eq!(uneven.exposed(1), 1.0 + 5.0);
        assert_eq!(uneven.exposed(2), 1.0 + 2.0);
    }

    #[test]
    fn reductions_take_their_turn() {
        let backward = Use { gather: Some(2.0), compute: 3.0, reduce: 4.0 };
        let uses = Uses { uses: vec![backward; 3], lead: 0.0 };
        // The second gather is there at 4, needed at 5. The third waits for the first reduction until 9, and is there at
        // 11, needed at 8.
        assert_eq!(uses.exposed(1), 2.0 + 3.0);
        // Without a prefetch each gather waits for the reduction before it.
        assert_eq!(uses.exposed(0), 2.0 + (4.0 + 2.0) * 2.0);
    }
}
