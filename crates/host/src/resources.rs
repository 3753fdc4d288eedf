//! The resources of this host (cores, memory, caches), and how many of them this process may use.

mod cgroup;
pub mod cpu_times;

use std::fs;
use std::path::Path;

use crate::text::plural;

/// The number of cores that this process may use.
pub fn num_cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
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

/// Bytes of memory that a new process could use without swapping, if the system says: the smaller of the kernel's available
/// memory and the memory that the control groups of this process leave.
pub fn available_bytes() -> Option<u64> {
    let available = field_bytes("/proc/meminfo", "MemAvailable")?;
    let groups = cgroup::memory_groups(Path::new("/")).into_iter();
    Some(groups.map(|(_, left)| left).fold(available, u64::min))
}

/// The smallest memory limit of the control groups of this process in bytes, if they set one.
pub fn memory_limit_bytes() -> Option<u64> {
    cgroup::memory_groups(Path::new("/")).into_iter().map(|(limit, _)| limit).min()
}

/// How many processes of this process's control group the kernel has killed for lack of memory since the group was made.
pub fn oom_kills() -> u64 {
    cgroup::oom_kills(Path::new("/"))
}

/// Proportional set size of this process in bytes: its own pages, and its share of shared pages.
pub fn resident_bytes() -> Option<u64> {
    field_bytes("/proc/self/smaps_rollup", "Pss")
}

/// The part of [`resident_bytes`] that are pages of files: the program and its libraries, which processes share.
pub fn program_bytes() -> Option<u64> {
    field_bytes("/proc/self/smaps_rollup", "Pss_File")
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
