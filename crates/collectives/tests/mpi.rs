//! The `mpi` transport: each rank is a process that `mpirun` starts from this test binary.

#![cfg(feature = "mpi")]

mod children;
mod common;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use half::f16;
use paceline_collectives::{CollectiveError, Group, GroupOptions, Link, ReduceOp, Transport};

/// The variable with the folder where ranks write what they say, and that they are done: a rank that
/// ends may destroy what others have printed.
const FOLDER: &str = "RANKS_FOLDER";

/// How long ranks wait for each other's last words. Reached only when something hangs.
const END_LIMIT: Duration = Duration::from_secs(60);

/// After this time a run counts as hanging.
const HANGS: Duration = Duration::from_secs(300);

/// How long `mpirun` may take to end after its ranks. Open MPI 4.1's sometimes waits for itself in
/// `PMIx_server_finalize` for good, if ranks have ended without ending MPI.
const MPIRUN_LIMIT: Duration = Duration::from_secs(20);

/// Runs `world` copies of this binary with `scenario` in [`rank_process`], and returns whether all
/// went well and what they said. None where there is no `mpirun`.
fn mpirun(scenario: &str, world: usize) -> Option<(bool, String)> {
    let folder = tempfile::tempdir().unwrap();
    let printed = File::create(folder.path().join("printed")).unwrap();
    let child = Command::new("mpirun")
        .args(["-n", &world.to_string()])
        .arg(std::env::current_exe().unwrap())
        .args(["rank_process", "--exact", "--nocapture", "--ignored"])
        .env("SCENARIO", scenario)
        .env(FOLDER, folder.path())
        // By default Open MPI refuses to run more ranks than cores, and to run as root.
        .env("OMPI_MCA_rmaps_base_oversubscribe", "1")
        .env("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe")
        .envs(["OMPI_", "PRTE_"].map(|by| (format!("{by}ALLOW_RUN_AS_ROOT"), "1")))
        .envs(["OMPI_", "PRTE_"].map(|by| (format!("{by}ALLOW_RUN_AS_ROOT_CONFIRM"), "1")))
        .stdin(Stdio::null())
        .stdout(printed.try_clone().unwrap())
        .stderr(printed)
        .spawn();
    let mut child = match child {
        Ok(child) => child,
        Err(error) => {
            println!("skipped: cannot run mpirun: {error}");
            return None;
        }
    };
    let (begin, mut alone_since) = (Instant::now(), None);
    let is_fine = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status.success();
        }
        let is_alone = ended_ranks(folder.path()) == world;
        alone_since = is_alone.then(|| alone_since.unwrap_or_else(Instant::now));
        let is_stuck = alone_since.is_some_and(|since| since.elapsed() > MPIRUN_LIMIT);
        let hangs = begin.elapsed() > HANGS;
        if is_stuck || hangs {
            child.kill().unwrap();
            child.wait().unwrap();
            assert!(!hangs, "{scenario} hangs: {}", words(folder.path(), world));
            break false;
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    Some((is_fine, words(folder.path(), world)))
}

/// What the ranks said, then what all have printed.
fn words(folder: &Path, world: usize) -> String {
    let said = (0..world).map(|rank| folder.join(format!("{rank} says")));
    let read = |path: PathBuf| std::fs::read(path).unwrap_or_default();
    let text: Vec<u8> = said.chain([folder.join("printed")]).flat_map(read).collect();
    String::from_utf8_lossy(&text).into_owned()
}

/// The file by which the process of a rank shows that it has begun. It holds a lock of it until it ends.
const RUNS: &str = "runs ";

/// How many processes have begun and ended.
fn ended_ranks(folder: &Path) -> usize {
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    let begun = files.filter(|file| file.file_name().to_string_lossy().starts_with(RUNS));
    begun.filter(|file| File::open(file.path()).unwrap().try_lock().is_ok()).count()
}

#[test]
#[ignore = "the body of the processes that the other tests start"]
fn rank_process() {
    let Ok(scenario) = std::env::var("SCENARIO") else { return };
    children::end_with_parent();
    let runs = File::create(folder().join(format!("{RUNS}{}", std::process::id()))).unwrap();
    runs.lock().unwrap();
    // The number of ranks is not known before MPI runs. Two are enough to tell whether ranks share cores.
    let mut options = GroupOptions::for_local_ranks(2);
    if matches!(scenario.as_str(), "absence" | "pair_absence") {
        // Long enough for ranks on fewer cores than ranks to form the group, too.
        options.timeout = Duration::from_secs(10);
    }
    if scenario == "link" {
        options.link = Some(SLOW);
    }
    let group = Group::mpi(options).unwrap();
    let (rank, world) = (group.rank(), group.world_size());
    assert_eq!(group.transport(), Transport::Mpi);
    match scenario.as_str() {
        "operations" => {
            common::every_type(&group);
            common::objects(&group);
            common::operations_keep_their_order(&group);
            common::groups_divide(&group);
            extremes_keep_nan(&group);
            drop(group);
            let error = Group::mpi(GroupOptions::for_local_ranks(2)).unwrap_err().to_string();
            assert!(error.contains("cannot be started twice"), "{error}");
        }
        "link" => {
            let mut data = vec![rank as f32; 25_000];
            let times = group.all_reduce_slice(&mut data, ReduceOp::Sum).unwrap();
            assert_eq!(group.link(), Some(SLOW));
            // Each of two ranks sends half of the message twice, in two steps after the step of the headers.
            assert!(times.move_ns() >= 6_000_000 + 10_000_000, "{times:?}");
            let part = group.split(Some(0)).unwrap().unwrap();
            assert_eq!(part.link(), Some(SLOW));
        }
        "other_length" => {
            let mut data = vec![0f32; 10 + usize::from(rank == 1)];
            mismatch(rank, group.all_reduce_slice(&mut data, ReduceOp::Sum).unwrap_err());
        }
        "other_operation" => {
            let outcome = match rank {
                0 => group.barrier(),
                _ => group.broadcast_slice(&mut [1u8, 2], 0),
            };
            mismatch(rank, outcome.unwrap_err());
        }
        "pair_in_between" => {
            let outcome = match rank {
                1 => group.send_slice(&[1i32, 2, 3], 0),
                _ => group.barrier(),
            };
            mismatch(rank, outcome.unwrap_err());
            await_the_end(rank, world);
        }
        "other_pair" => {
            let outcome = match rank {
                0 => group.send_slice(&[1i32, 2, 3], 1),
                1 => group.recv_slice(&mut [0i32; 4], 0),
                _ => group.barrier(),
            };
            mismatch(rank, outcome.unwrap_err());
            await_the_end(rank, world);
        }
        "other_counts" => {
            let share = vec![1f64; rank + 1];
            let error = group.all_gather_slice(&share, &mut vec![0f64; world]).unwrap_err();
            say(rank, &error);
        }
        "absence" | "pair_absence" if rank == 1 => await_the_end(rank, world),
        "absence" => {
            let error = group.barrier().unwrap_err();
            say(rank, &error);
            assert!(matches!(&error, CollectiveError::TimedOut { missing, .. } if *missing == [1]));
            let error = group.barrier().unwrap_err();
            assert!(matches!(error, CollectiveError::Broken { .. }), "{error}");
            await_the_end(rank, world);
        }
        "pair_absence" => {
            if rank == 0 {
                let error = group.recv_slice(&mut [0u8; 5], 1).unwrap_err();
                say(rank, &error);
            }
            await_the_end(rank, world);
        }
        other => panic!("unknown scenario {other}"),
    }
}

/// 10 MB/s and 2 ms.
const SLOW: Link = Link { bytes_per_s: 1e7, latency_s: 2e-3 };

/// The minimum and maximum of numbers and one NaN are NaN, whichever rank the NaN comes from.
fn extremes_keep_nan(group: &Group) {
    let (rank, world) = (group.rank(), group.world_size());
    for op in [ReduceOp::Min, ReduceOp::Max] {
        for from in 0..world {
            let x = |i: usize| if rank == from && i == 1 { f32::NAN } else { i as f32 };
            let mut singles: Vec<f32> = (0..3).map(x).collect();
            let mut doubles: Vec<f64> = (0..3).map(|i| x(i).into()).collect();
            let mut halves: Vec<f16> = (0..3).map(|i| f16::from_f32(x(i))).collect();
            group.all_reduce_slice(&mut singles, op).unwrap();
            group.all_reduce_slice(&mut doubles, op).unwrap();
            group.all_reduce_slice(&mut halves, op).unwrap();
            for i in 0..3 {
                let halves = f64::from(halves[i]);
                for result in [f64::from(singles[i]), doubles[i], halves] {
                    assert!(if i == 1 { result.is_nan() } else { result == i as f64 }, "{result}");
                }
            }
        }
    }
}

fn mismatch(rank: usize, error: CollectiveError) {
    assert!(matches!(error, CollectiveError::Mismatch { .. }), "rank {rank}: {error}");
    say(rank, &error);
}

fn folder() -> PathBuf {
    std::env::var_os(FOLDER).expect("a folder for what ranks say").into()
}

fn say(rank: usize, error: &CollectiveError) {
    let line = format!("rank {rank} says: {error}\n");
    std::fs::write(folder().join(format!("{rank} says")), line).unwrap();
}

/// A rank that ends without having ended MPI takes the others with it, so all wait for each other's last words.
fn await_the_end(rank: usize, world: usize) {
    let (folder, begin) = (folder(), Instant::now());
    let is_done = |rank: usize| folder.join(format!("{rank} is done"));
    std::fs::write(is_done(rank), "").unwrap();
    loop {
        let others: Vec<usize> = (0..world).filter(|&rank| !is_done(rank).exists()).collect();
        if others.is_empty() {
            return;
        }
        assert!(begin.elapsed() < END_LIMIT, "rank {rank} waits for ranks {others:?} to be done");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[track_caller]
fn all_say(scenario: &str, world: usize, ranks: &[usize], what: &str) {
    let Some((_, text)) = mpirun(scenario, world) else { return };
    for rank in ranks {
        let said = format!("rank {rank} says: ");
        let line = text.lines().find_map(|line| line.split_once(&said));
        assert!(line.is_some_and(|(_, error)| error.contains(what)), "rank {rank}: {text}");
    }
    assert!(!text.contains("panicked"), "{text}");
}

#[test]
fn every_operation_by_mpi() {
    for world in 1..=4 {
        let Some((is_fine, text)) = mpirun("operations", world) else { return };
        assert!(is_fine, "{world} ranks: {text}");
    }
}

#[test]
fn a_slower_link_is_emulated() {
    let Some((is_fine, text)) = mpirun("link", 2) else { return };
    assert!(is_fine, "{text}");
}

#[test]
fn different_calls_are_named_on_every_rank() {
    all_say("other_length", 3, &[0, 1, 2], "rank 1 called all_reduce(f32, 11, sum) as #1");
    all_say("other_operation", 3, &[0, 1, 2], "rank 1 called broadcast(u8, 2, root 0) as #1");
    all_say("other_counts", 2, &[0, 1], "all ranks together send 3 elements");
}

#[test]
fn pairs_that_do_not_fit_are_named_on_every_rank() {
    all_say("pair_in_between", 3, &[0, 1, 2], "rank 1 called send(i32, 3, to 0) as #1");
    all_say("other_pair", 3, &[0, 1, 2], "rank 1 called recv(i32, 4, from 0) as #1");
}

#[test]
fn a_rank_that_does_not_call_is_named() {
    all_say("absence", 3, &[0, 2], "timed out");
    all_say("pair_absence", 2, &[0], "waiting for ranks [1]");
}
