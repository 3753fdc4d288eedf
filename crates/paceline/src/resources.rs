//! What this host has, and how much of it this process uses.

use std::fs;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::{Failure, Result};

/// The number of cores that this process may use.
pub fn num_cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Bytes of memory that a new process could use without swapping, if the system says: what the kernel
/// calls available, or what the control group leaves, whichever is less.
pub fn available_bytes() -> Option<u64> {
    let meminfo = fs::read_to_string("/proc/meminfo").ok()?;
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    let number = |path: &str| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let group = number("/sys/fs/cgroup/memory.max")
        .map(|max| max.saturating_sub(number("/sys/fs/cgroup/memory.current").unwrap_or(0)));
    Some((kib * 1024).min(group.unwrap_or(u64::MAX)))
}

/// The memory limit of this process's control group in bytes, if it sets one.
pub fn memory_limit_bytes() -> Option<u64> {
    fs::read_to_string("/sys/fs/cgroup/memory.max").ok()?.trim().parse().ok()
}

/// Proportional set size of this process in bytes: its own pages, and its share of shared pages.
pub fn resident_bytes() -> Option<u64> {
    let text = fs::read_to_string("/proc/self/smaps_rollup").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("Pss:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
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
    let field = |path: &str, name: &str| {
        let text = fs::read_to_string(path).ok()?;
        let line = text.lines().find(|line| line.starts_with(name))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    let processor = field("/proc/cpuinfo", "model name").unwrap_or("unknown processor".into());
    let cores = num_cores();
    let memory = field("/proc/meminfo", "MemTotal")
        .and_then(|text| text.strip_suffix("kB")?.trim().parse::<u64>().ok())
        .map_or(String::new(), |kib| format!(", {:.1} GB", kib as f64 * 1024.0 / 1e9));
    format!("{processor}, {cores} core{}{memory}", if cores == 1 { "" } else { "s" })
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

/// Lets the calling thread, and the threads that it starts, run only on `threads` cores: those that
/// follow the cores of lower local ranks.
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
        assert!(available_bytes().unwrap() > 1 << 20);
        assert!(resident_bytes().unwrap() > 1 << 16);
        assert!(num_cores() >= 1);
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
