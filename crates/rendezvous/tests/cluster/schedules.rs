//! Many schedules of one test: their seeds, their faults, and a smaller list of faults for a schedule that fails.

use std::ops::Range;
use std::time::Duration;

use paceline_trace::simulation::{ClusterFault, FaultOfHost, SplitMix};

/// The variable with the seeds to run, as in `1000..2000`, in place of the first hundred.
const SEEDS: &str = "PACELINE_SEEDS";

/// Runs `check` for each seed, with random faults of this many hosts. It returns why a schedule fails.
///
/// Panics at the first schedule that fails, with its seed and with as few of its faults as make it fail.
pub fn explore(num_hosts: usize, check: impl Fn(u64, &[FaultOfHost]) -> Result<(), String>) {
    for seed in seeds() {
        let faults = faults(seed, num_hosts);
        if let Err(reason) = check(seed, &faults) {
            let (faults, reason) = shrink(faults, reason, |fewer| check(seed, fewer).err());
            panic!("{SEEDS}={seed}..{} fails with {faults:?}: {reason}", seed + 1);
        }
    }
}

fn seeds() -> Range<u64> {
    let Ok(text) = std::env::var(SEEDS) else { return 0..100 };
    let range =
        text.split_once("..").and_then(|(from, to)| Some(from.parse().ok()?..to.parse().ok()?));
    range.unwrap_or_else(|| panic!("{SEEDS}={text}: pass a range such as 1000..2000"))
}

/// Up to four faults, and often none: then nothing may fail.
fn faults(seed: u64, num_hosts: usize) -> Vec<FaultOfHost> {
    let mut random = SplitMix(!seed);
    let num = [0, 1, 1, 1, 2, 2, 3, 4][random.below(8) as usize];
    let fault = |random: &mut SplitMix| {
        let mut time =
            |most: Duration| Duration::from_nanos(random.time_ns(most.as_nanos() as u64));
        let (at, long) = (time(Duration::from_secs(30)), time(Duration::from_secs(60)));
        let slower = time(Duration::from_millis(30));
        let around_limits = time(Duration::from_secs(1)) + Duration::from_secs(5);
        let (kind, at, time) = match random.below(14) {
            0..4 => (ClusterFault::Kill, at, Duration::ZERO),
            // It is gone, and nothing tells the others.
            4 => (ClusterFault::Cut, at, Duration::from_secs(1 << 20)),
            5 | 6 => (ClusterFault::Freeze, at, long),
            // It starts late.
            7 => (ClusterFault::Freeze, Duration::ZERO, long),
            8 | 9 => (ClusterFault::Cut, at, long),
            13 => (ClusterFault::Cut, at, around_limits),
            10 => (ClusterFault::Jump, at, long),
            11 => (ClusterFault::Suspend, at, long),
            _ => (ClusterFault::Slow, at, slower),
        };
        FaultOfHost { at, host: random.below(num_hosts as u64) as usize, kind, time }
    };
    (0..num).map(|_| fault(&mut random)).collect()
}

/// Leaves faults out, one by one, for as long as the schedule fails without them.
fn shrink(
    mut faults: Vec<FaultOfHost>,
    mut reason: String,
    fails: impl Fn(&[FaultOfHost]) -> Option<String>,
) -> (Vec<FaultOfHost>, String) {
    let mut at = 0;
    while at < faults.len() {
        let mut fewer = faults.clone();
        fewer.remove(at);
        if let Some(why) = fails(&fewer) {
            (faults, reason) = (fewer, why);
        } else {
            at += 1;
        }
    }
    (faults, reason)
}
