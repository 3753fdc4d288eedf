//! The times of a stream for a program that runs ahead of it.
//!
//! The host puts the passes of a step into a stream and goes on. When a pass was done follows from the work that had been
//! put into the stream before its end, as from events with times on a card.

use crate::Event;

/// What the host has put into a stream: when, and what is done with it.
#[derive(Debug, Default)]
pub(super) struct Log {
    put_in: Vec<(u64, Event)>,
    launching_ns: u64,
}

impl Log {
    /// Notes that the host has put something into the stream at `put_in_ns`, which took it `took_ns`.
    pub(super) fn push(&mut self, put_in_ns: u64, took_ns: u64, event: &Event) {
        self.put_in.push((put_in_ns, event.clone()));
        self.launching_ns += took_ns;
    }

    pub(super) fn done(self) -> DoneTimes {
        let mut last_ns = 0;
        let times = self.put_in.into_iter().map(|(put_in_ns, event)| {
            event.block();
            last_ns = event.ran().map_or(0, |ran| ran.end_ns).max(last_ns);
            (put_in_ns, last_ns)
        });
        DoneTimes { times: times.collect(), launching_ns: self.launching_ns }
    }
}

/// When a stream had done all that the host had put into it, for each moment of the host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DoneTimes {
    /// When work was put in, and when it and all before it was done, in nanoseconds. Both ascend.
    times: Vec<(u64, u64)>,
    /// What the host took to put it in.
    pub launching_ns: u64,
}

impl DoneTimes {
    /// When everything was done that the host had put in before `host_ns`; `host_ns` itself if that was earlier.
    pub fn at(&self, host_ns: u64) -> u64 {
        let before = self.times.partition_point(|(put_in_ns, _)| *put_in_ns <= host_ns);
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
