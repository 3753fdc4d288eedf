//! How long a thread waited for a core: another program had it, or the host of a virtual machine took it away.

use std::fs;

use super::num_cores;

/// The processor time of the calling thread, and of this machine.
#[derive(Clone, Copy, Debug)]
pub struct CpuTimes {
    /// Nanoseconds in which the thread ran, and in which it was ready to run and had no core.
    thread: [u64; 2],
    /// Ticks in which the cores of this machine ran something, and which their host took from them.
    machine: [u64; 2],
}

impl CpuTimes {
    /// The times so far; `None` where the kernel does not count them.
    pub fn now() -> Option<Self> {
        let [thread, machine] = ["/proc/thread-self/schedstat", "/proc/stat"].map(|path| {
            let text = fs::read_to_string(path).ok()?;
            let numbers = text.lines().next()?.split_whitespace();
            Some(numbers.filter_map(|word| word.parse().ok()).collect::<Vec<u64>>())
        });
        Self::of(&thread?, &machine?)
    }

    fn of(thread: &[u64], machine: &[u64]) -> Option<Self> {
        let [ran, waited, ..] = *thread else { return None };
        let [user, nice, system, _, _, irq, softirq, stolen, ..] = *machine else { return None };
        let busy = user + nice + system + irq + softirq;
        Some(Self { thread: [ran, waited], machine: [busy, stolen] })
    }

    /// The percentage of this thread's time, from `begin` on, in which it had no core: `%wait` as `pidstat` counts it, and
    /// `%steal`. `None` where the kernel does not say, and with more threads at work than cores, which wait for each other.
    pub fn waited_pct(begin: Option<Self>, num_threads: usize) -> Option<f64> {
        let are_enough = num_threads <= num_cores();
        begin.zip(Self::now()).filter(|_| are_enough).map(|(begin, end)| end.since(&begin))
    }

    fn since(&self, begin: &Self) -> f64 {
        let part = |now: [u64; 2], begin: [u64; 2]| {
            let [used, lost] = [0, 1].map(|at| now[at].saturating_sub(begin[at]) as f64);
            100.0 * lost / (used + lost).max(1.0)
        };
        part(self.thread, begin.thread) + part(self.machine, begin.machine)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_waits_for_other_programs_and_for_the_host() {
        let begin = CpuTimes::of(&[100, 10, 3], &[10, 0, 0, 70, 5, 0, 0, 1, 0, 0]).unwrap();
        let end = CpuTimes::of(&[190, 20, 9], &[40, 10, 5, 99, 9, 2, 1, 3, 0, 0]).unwrap();
        assert!((end.since(&begin) - (10.0 + 4.0)).abs() < 1e-9, "{}", end.since(&begin));
        assert_eq!(end.since(&end), 0.0);
        assert!(CpuTimes::of(&[1], &[1, 2, 3]).is_none());
    }

    #[test]
    fn this_thread_has_times() {
        let begin = CpuTimes::now();
        assert!((0.0..=200.0).contains(&CpuTimes::waited_pct(begin, 1).unwrap()));
        assert_eq!(CpuTimes::waited_pct(begin, num_cores() + 1), None);
    }
}
