//! The times of a stream for a program that runs ahead of it.
//!
//! The host submits the passes of a step to a stream and goes on. A pass was done when all work was done that had been
//! submitted before its end, as with timed events of a card.

use paceline_trace::now_ns;

use super::event::Event;

/// The submissions of the host to a stream: their times and events.
#[derive(Default)]
pub(super) struct SubmissionLog {
    submitted: Vec<(u64, Event)>,
    launching_ns: u64,
}

impl SubmissionLog {
    /// Notes a submission that began at `started_ns` and ends now.
    pub(super) fn push(&mut self, started_ns: u64, event: &Event) {
        let now_ns = now_ns();
        self.submitted.push((now_ns, event.clone()));
        self.launching_ns += now_ns - started_ns;
    }

    pub(super) fn done(self) -> DoneTimes {
        let mut last_ns = 0;
        let times = self.submitted.into_iter().map(|(submitted_ns, event)| {
            event.block();
            last_ns = event.ran().map_or(0, |ran| ran.end_ns).max(last_ns);
            (submitted_ns, last_ns)
        });
        DoneTimes { times: times.collect(), launching_ns: self.launching_ns }
    }
}

/// When a stream had done all work that the host had submitted, for each moment of the host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DoneTimes {
    /// When work was submitted, and when it and all work before it was done, in nanoseconds. Both ascend.
    times: Vec<(u64, u64)>,
    /// Time of the host for the submissions.
    pub launching_ns: u64,
}

impl DoneTimes {
    /// When all work was done that the host had submitted before `host_ns`; `host_ns` itself if that was earlier.
    pub fn at(&self, host_ns: u64) -> u64 {
        let before = self.times.partition_point(|(submitted_ns, _)| *submitted_ns <= host_ns);
        before.checked_sub(1).map_or(host_ns, |last| host_ns.max(self.times[last].1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moment_of_the_host_is_as_late_as_the_work_before_it() {
        let times = DoneTimes { times: vec![(10, 100), (20, 130), (300, 310)], launching_ns: 0 };
        let at = [5, 10, 15, 20, 250, 305, 400].map(|ns| times.at(ns));
        assert_eq!(at, [5, 100, 100, 130, 250, 310, 400]);
    }
}
