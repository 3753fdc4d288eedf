//! Pins ranks: which processors of this host each rank gets, for its compute threads and for those beside them.
//!
//! A *processor* is the kernel's unit of scheduling. A *core* has one or, with simultaneous multithreading, several, which
//! share its arithmetic. Cores are ordered by socket and last-level cache, and every rank gets equally many in a row: ranks
//! spread over caches and sockets, and the threads of a rank share theirs where they can.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use paceline_failure::{Failure, Result};
use paceline_files::Printable;
use paceline_host::text::plural;
use rustix::thread::{CpuSet, sched_getaffinity};

/// Processors have lower numbers: the size of a set in the kernel's interface.
const MAX_PROCESSORS: usize = 1024;

/// The processors of a rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RankProcessors {
    /// One for each thread that computes.
    pub compute: Vec<usize>,
    /// Those of the threads beside them, which communicate, load batches and write checkpoints.
    pub beside: Vec<usize>,
}

/// The processors of each rank of this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pinning {
    /// By local rank.
    pub ranks: Vec<RankProcessors>,
    /// The findings and decisions, in words.
    pub notes: Vec<String>,
}

impl Pinning {
    /// A sentence with the processors to which ranks are pinned.
    pub fn words(&self) -> String {
        format!("Pinned to processors: {}", self.who())
    }

    /// The processors of each rank, in words.
    pub fn who(&self) -> String {
        const SHOWN: usize = 8;
        let of = |(rank, processors): (usize, &RankProcessors)| {
            let RankProcessors { compute, beside } = processors;
            let others = if beside == compute {
                String::new()
            } else {
                format!(" (communication on {})", list(beside))
            };
            format!("rank {rank} computes on {}{others}", list(compute))
        };
        let mut words: Vec<String> = self.ranks.iter().enumerate().take(SHOWN).map(of).collect();
        if let more @ 1.. = self.ranks.len().saturating_sub(SHOWN) {
            words.push(format!("and so on for {more} more"));
        }
        words.extend(self.notes.iter().cloned());
        words.join("; ")
    }
}

/// The processors that the calling thread may run on.
fn allowed() -> rustix::io::Result<Vec<usize>> {
    let allowed = sched_getaffinity(None)?;
    Ok((0..CpuSet::MAX_CPU).filter(|&processor| allowed.is_set(processor)).collect())
}

/// The cores that the calling thread may run on, as in `0-3,8`.
pub fn core_list() -> Option<String> {
    Some(list(&allowed().ok()?))
}

/// The processors of each rank on this host. Errors, in words, if there are too few for their compute threads.
pub fn pinning(local_ranks: usize, threads: usize) -> std::result::Result<Pinning, String> {
    let allowed = allowed()
        .map_err(|error| format!("the system does not say which processors there are: {error}"))?;
    divide(Path::new("/sys/devices/system/cpu"), &allowed, local_ranks, threads)
}

/// Pins the calling thread, and the threads that it starts later, to a rank's compute processors. See [`paceline_trace::pin`]
/// for other threads. Changes nothing if processors are too few.
pub fn pin(local_rank: usize, local_ranks: usize, threads: usize) -> Result<()> {
    let Ok(pinning) = pinning(local_ranks, threads) else { return Ok(()) };
    let Some(rank) = pinning.ranks.get(local_rank) else { return Ok(()) };
    let set = |processors: &[usize]| {
        let mut set = CpuSet::new();
        processors.iter().for_each(|processor| set.set(*processor));
        set
    };
    paceline_trace::pin(&set(&rank.compute), set(&rank.beside))
        .map_err(|error| Failure::io("cannot pin this rank to its cores", error))
}

/// Divides `allowed` processors among `ranks` ranks with `threads` compute threads. Errors, in words, if there are fewer
/// processors than threads. `system` is `/sys/devices/system/cpu`.
fn divide(
    system: &Path,
    allowed: &[usize],
    ranks: usize,
    threads: usize,
) -> std::result::Result<Pinning, String> {
    let wanted = ranks.saturating_mul(threads);
    if wanted > allowed.len() {
        return Err(format!(
            "{ranks} x {}, but this process may use {}",
            plural(threads, "thread"),
            plural(allowed.len(), "processor")
        ));
    }
    let mut notes = Vec::new();
    let cores = cores(system, allowed).unwrap_or_else(|reason| {
        notes.push(format!("{reason}, so each processor counts as a core of its own"));
        allowed.iter().map(|processor| vec![*processor]).collect()
    });
    let share_cores = wanted > cores.len();
    let units: Vec<Vec<usize>> = if !share_cores {
        cores
    } else {
        // Threads of a rank lie side by side on the processors of its cores.
        cores.into_iter().flatten().map(|processor| vec![processor]).collect()
    };
    if share_cores && units.len() > wanted {
        notes.push("threads that compute share cores".into());
    } else if share_cores {
        notes.push("threads that compute share cores, and none is left for others".into());
    }
    let of_rank = |rank: usize| {
        let begin = rank * units.len() / ranks;
        let end = (rank + 1) * units.len() / ranks;
        let (own, spare) = units[begin..end].split_at(threads);
        let compute: Vec<usize> = own.iter().map(|unit| unit[0]).collect();
        let mut beside: Vec<usize> = spare.iter().flatten().copied().collect();
        if beside.is_empty() {
            beside = own.iter().flat_map(|unit| &unit[1..]).copied().collect();
        }
        if beside.is_empty() {
            beside.clone_from(&compute);
        }
        RankProcessors { compute, beside }
    };
    let ranks = (0..ranks).map(of_rank).collect();
    Ok(Pinning { ranks, notes })
}

/// The processors of each core, in order of socket, last-level cache and number.
fn cores(system: &Path, allowed: &[usize]) -> std::result::Result<Vec<Vec<usize>>, String> {
    let mut cores: BTreeMap<(usize, usize, usize), Vec<usize>> = BTreeMap::new();
    for &processor in allowed {
        let folder = system.join(format!("cpu{processor}"));
        let topology = folder.join("topology");
        let core = first(&topology.join("thread_siblings_list"), processor)?;
        // Without these files, a system has one socket, or one cache.
        let socket = number(&topology.join("physical_package_id")).unwrap_or(0);
        let cache = last_cache(&folder.join("cache"), processor).unwrap_or(0);
        cores.entry((socket, cache, core)).or_default().push(processor);
    }
    Ok(cores.into_values().collect())
}

/// The first of the processors that share the last-level cache with this one.
fn last_cache(folder: &Path, processor: usize) -> Option<usize> {
    let caches = fs::read_dir(folder).ok()?.filter_map(std::result::Result::ok);
    let caches = caches.filter_map(|cache| Some((number(&cache.path().join("level"))?, cache)));
    let (_, last) = caches.max_by_key(|(level, _)| *level)?;
    first(&last.path().join("shared_cpu_list"), processor).ok()
}

fn number(path: &Path) -> Option<usize> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// The first processor of a list that must have this one.
fn first(path: &Path, processor: usize) -> std::result::Result<usize, String> {
    let text = fs::read_to_string(path)
        .map_err(|error| format!("cannot read {}: {error}", path.printable()))?;
    let list = parse_list(text.trim()).filter(|list| list.contains(&processor));
    let first = list.and_then(|list| list.into_iter().min());
    first.ok_or_else(|| {
        let short: String = text.trim().chars().take(40).collect();
        format!("{} has {short:?} and no list with processor {processor}", path.printable())
    })
}

/// Reads a list such as `0-3,8`. `None` for anything else.
fn parse_list(text: &str) -> Option<Vec<usize>> {
    let mut all = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        if first > last || last >= MAX_PROCESSORS {
            return None;
        }
        all.extend(first..=last);
    }
    Some(all)
}

/// Processors as a list such as `0-3,8`.
fn list(processors: &[usize]) -> String {
    let run = |run: &[usize]| match run {
        [first, .., last] => format!("{first}-{last}"),
        _ => run[0].to_string(),
    };
    processors.chunk_by(|a, b| a + 1 == *b).map(run).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A host: for each processor its core's processors, its socket, and the processors of its last cache.
    fn host(processors: &[(&str, usize, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (number, (core, socket, cache)) in processors.iter().enumerate() {
            let folder = root.path().join(format!("cpu{number}"));
            let write = |file: &str, text: &str| {
                let path = folder.join(file);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, format!("{text}\n")).unwrap();
            };
            write("topology/thread_siblings_list", core);
            write("topology/physical_package_id", &socket.to_string());
            write("cache/index0/level", "1");
            write("cache/index0/shared_cpu_list", core);
            write("cache/index3/level", "3");
            write("cache/index3/shared_cpu_list", cache);
        }
        root
    }

    /// The compute processors and those beside them, of each rank.
    fn divided(root: &Path, allowed: &[usize], ranks: usize, threads: usize) -> Vec<String> {
        let pinning = divide(root, allowed, ranks, threads).unwrap();
        let of = |rank: &RankProcessors| format!("{} {}", list(&rank.compute), list(&rank.beside));
        pinning.ranks.iter().map(of).chain(pinning.notes).collect()
    }

    /// A laptop: four cores of two processors each, whose numbers are far apart.
    fn laptop() -> tempfile::TempDir {
        let cores = ["0,4", "1,5", "2,6", "3,7"];
        host(&[0, 1, 2, 3, 0, 1, 2, 3].map(|core: usize| (cores[core], 0, "0-7")))
    }

    #[test]
    fn ranks_get_cores_and_not_halves_of_a_core() {
        let (host, all) = (laptop(), [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(divided(host.path(), &all, 2, 1), ["0 1,5", "2 3,7"]);
        assert_eq!(divided(host.path(), &all, 2, 2), ["0-1 4-5", "2-3 6-7"]);
        assert_eq!(divided(host.path(), &all, 4, 1), ["0 4", "1 5", "2 6", "3 7"]);
        assert_eq!(divided(host.path(), &all, 3, 1), ["0 4", "1 5", "2 3,7"]);
        // Neighbors by number may be of one core, too.
        let host = self::host(&["0-1", "0-1", "2-3", "2-3"].map(|core| (core, 0, "0-3")));
        assert_eq!(divided(host.path(), &[0, 1, 2, 3], 2, 1), ["0 1", "2 3"]);
    }

    #[test]
    fn threads_share_cores_only_if_they_must() {
        let (host, all) = (laptop(), [0, 1, 2, 3, 4, 5, 6, 7]);
        let notes = "threads that compute share cores, and none is left for others";
        assert_eq!(divided(host.path(), &all, 2, 4), ["0,4,1,5 0,4,1,5", "2,6,3,7 2,6,3,7", notes]);
        let notes = "threads that compute share cores";
        assert_eq!(divided(host.path(), &all, 2, 3), ["0,4,1 5", "2,6,3 7", notes]);
        let error = divide(host.path(), &all, 3, 3).unwrap_err();
        assert_eq!(error, "3 x 3 threads, but this process may use 8 processors");
        assert!(divide(host.path(), &all, usize::MAX, 2).is_err());
    }

    #[test]
    fn ranks_are_spread_over_sockets_and_stay_within_caches() {
        // Two sockets of two caches of two cores each, numbered across the sockets.
        let caches = ["0,4", "1,5", "2,6", "3,7"];
        let of = |at: usize| (["0", "1", "2", "3", "4", "5", "6", "7"][at], at % 2, caches[at % 4]);
        let host = host(&[0, 1, 2, 3, 4, 5, 6, 7].map(of));
        let all = [0, 1, 2, 3, 4, 5, 6, 7];
        assert_eq!(divided(host.path(), &all, 2, 2), ["0,4 2,6", "1,5 3,7"]);
        assert_eq!(divided(host.path(), &all, 4, 1), ["0 4", "2 6", "1 5", "3 7"]);
        // The processors that another launcher has left.
        assert_eq!(divided(host.path(), &[2, 3], 1, 1), ["2 3"]);
    }

    #[test]
    fn an_odd_system_is_said_and_its_processors_are_used() {
        let nothing = tempfile::tempdir().unwrap();
        let notes = divided(nothing.path(), &[0, 1], 2, 1);
        assert_eq!(notes[..2], ["0 0", "1 1"]);
        assert!(notes[2].contains("cpu0/topology/thread_siblings_list: No such file"), "{notes:?}");
        for odd in ["", "x", "7", "1-0", "0-4294967295", "0,", "-", "0-18446744073709551616"] {
            let host = host(&[(odd, 0, "0-1"), ("1", 0, "0-1")]);
            let notes = divided(host.path(), &[0, 1], 2, 1);
            assert_eq!(notes[..2], ["0 0", "1 1"], "{odd}");
            assert!(notes[2].contains("no list with processor 0, so each"), "{notes:?}");
        }
        // Without sockets and caches, cores are known all the same.
        let host = laptop();
        for processor in 0..8 {
            let folder = host.path().join(format!("cpu{processor}"));
            fs::remove_dir_all(folder.join("cache")).unwrap();
            fs::write(folder.join("topology/physical_package_id"), "-1").unwrap();
        }
        assert_eq!(divided(host.path(), &[0, 1, 4, 5], 2, 1), ["0 4", "1 5"]);
    }

    #[test]
    fn what_was_decided_is_said() {
        let (host, all) = (laptop(), [0, 1, 2, 3, 4, 5, 6, 7]);
        let words = |ranks, threads| divide(host.path(), &all, ranks, threads).unwrap().words();
        assert_eq!(
            words(2, 1),
            "Pinned to processors: rank 0 computes on 0 (communication on 1,5); rank 1 computes on 2 (communication on 3,7)"
        );
        assert_eq!(
            words(1, 8),
            "Pinned to processors: rank 0 computes on 0,4,1,5,2,6,3,7; \
             threads that compute share cores, and none is left for others"
        );
        let nothing = tempfile::tempdir().unwrap();
        let many: Vec<usize> = (0..100).collect();
        let words = divide(nothing.path(), &many, 100, 1).unwrap().words();
        assert!(
            words.contains("rank 7 computes on 7; and so on for 92 more; cannot read"),
            "{words}"
        );
    }

    #[test]
    fn lists_are_as_the_system_writes_them() {
        for text in ["0", "0-3,8", "1,3,5-6"] {
            assert_eq!(list(&parse_list(text).unwrap()), text);
        }
        assert_eq!(list(&[]), "");
    }

    #[test]
    fn a_pinned_thread_has_its_cores_only() {
        std::thread::spawn(|| {
            pin(0, 1, 1).unwrap();
            assert_eq!(sched_getaffinity(None).unwrap().count(), 1);
        })
        .join()
        .unwrap();
    }
}
