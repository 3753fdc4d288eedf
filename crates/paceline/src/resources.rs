//! The resources of this host (cores, memory, caches), and how many of them this process may use.

use std::fs;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::text::plural;
use crate::{Failure, Result};

/// The number of cores that this process may use.
pub fn num_cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The number in the file at `path`, if the file has nothing but a number.
fn number(path: &str) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// The value in the first line `name: value` of a file such as `/proc/meminfo`.
fn field(path: &str, name: &str) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let line = text.lines().find(|line| line.starts_with(name))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// The value in bytes of a line that is given in kB.
fn field_bytes(path: &str, name: &str) -> Option<u64> {
    Some(field(path, name)?.strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}

/// Bytes of memory that a new process could use without swapping, if the system says: the smaller of what
/// the kernel calls available and what the control group leaves.
pub fn available_bytes() -> Option<u64> {
    let available = field_bytes("/proc/meminfo", "MemAvailable")?;
    let used = number("/sys/fs/cgroup/memory.current").unwrap_or(0);
    let statistics = fs::read_to_string("/sys/fs/cgroup/memory.stat").unwrap_or_default();
    let group = memory_limit_bytes().map(|limit| left_in_group(limit, used, &statistics));
    Some(available.min(group.unwrap_or(u64::MAX)))
}

/// What a control group leaves of its `limit`. The pages of files that nobody has touched lately count as used,
/// but the kernel gives them up as soon as memory is needed.
fn left_in_group(limit: u64, used: u64, statistics: &str) -> u64 {
    let line = statistics.lines().find_map(|line| line.strip_prefix("inactive_file "));
    let given_up = line.and_then(|bytes| bytes.trim().parse().ok()).unwrap_or(0);
    limit.saturating_sub(used.saturating_sub(given_up))
}

/// The memory limit of this process's control group in bytes, if it sets one.
pub fn memory_limit_bytes() -> Option<u64> {
    number("/sys/fs/cgroup/memory.max")
}

/// Proportional set size of this process in bytes: its own pages, and its share of shared pages.
pub fn resident_bytes() -> Option<u64> {
    field_bytes("/proc/self/smaps_rollup", "Pss")
}

/// Size of the largest cache of the first core, in bytes.
pub fn last_level_cache_bytes() -> Option<usize> {
    let caches = fs::read_dir("/sys/devices/system/cpu/cpu0/cache").ok()?;
    let size = |folder: fs::DirEntry| {
        let text = fs::read_to_string(folder.path().join("size")).ok()?;
        let kib: usize = text.trim().strip_suffix('K')?.parse().ok()?;
        Some(kib * 1024)
    };
    caches.filter_map(std::result::Result::ok).filter_map(size).max()
}

/// This machine in a few words: the processor, the cores that this process may use, and the memory.
pub fn machine() -> String {
    let processor = field("/proc/cpuinfo", "model name").unwrap_or("unknown processor".into());
    let memory = field_bytes("/proc/meminfo", "MemTotal")
        .map_or(String::new(), |bytes| format!(", {:.1} GB", bytes as f64 / 1e9));
    format!("{processor}, {}{memory}", plural(num_cores(), "core"))
}

/// The cores that the calling thread may run on, as in `0-3,8`.
pub fn core_list() -> Option<String> {
    let allowed = sched_getaffinity(None).ok()?;
    let cores: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&core| allowed.is_set(core)).collect();
    let ranges = cores.chunk_by(|a, b| a + 1 == *b).map(|run| match run {
        [only] => only.to_string(),
        [first, .., last] => format!("{first}-{last}"),
        [] => String::new(),
    });
    Some(ranges.collect::<Vec<_>>().join(","))
}

/// Pins the calling thread, and the threads that it starts later, to `threads` cores: those that follow
/// the cores of the lower local ranks.
pub fn pin(local_rank: usize, threads: usize) -> Result<()> {
    let fail = |e: rustix::io::Errno| Failure::io("cannot pin this rank to its cores", e);
    let allowed = sched_getaffinity(None).map_err(fail)?;
    let cores = (0..CpuSet::MAX_CPU).filter(|&core| allowed.is_set(core));
    let mut own = CpuSet::new();
    for core in cores.skip(local_rank * threads).take(threads) {
        own.set(core);
    }
    sched_setaffinity(None, &own).map_err(fail)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_system_answers() {
        assert!(available_bytes().is_some());
        assert!(resident_bytes().unwrap() > 1 << 16);
        assert!(num_cores() >= 1);
    }

    #[test]
    fn files_that_the_kernel_gives_up_are_no_used_memory() {
        let statistics = "anon 300\nfile 500\nactive_file 100\ninactive_file 400\n";
        assert_eq!(left_in_group(1000, 900, statistics), 500);
        assert_eq!(left_in_group(1000, 900, ""), 100);
        assert_eq!(left_in_group(1000, 1001, ""), 0);
        assert_eq!(left_in_group(1000, 300, statistics), 1000);
    }

    #[test]
    fn a_pinned_thread_has_its_cores_only() {
        std::thread::spawn(|| {
            pin(0, 1).unwrap();
            assert_eq!(sched_getaffinity(None).unwrap().count(), 1);
        })
        .join()
        .unwrap();
    }
}
