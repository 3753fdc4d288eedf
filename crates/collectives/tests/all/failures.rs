//! What ranks report when calls do not match, and when a rank dies or is stopped.
//!
//! Only the tests that stop a rank have short time limits. In all others, operations must end for other reasons. A rank that
//! hangs is killed at the end, and its test fails.

use crate::limit;
use crate::ranks;

use std::time::Duration;

use crate::children::{Children, end_with_parent};
use paceline_collectives::{
    CollectiveError, DUMP_FOLDER, Group, GroupOptions, ReduceOp, Rendezvous,
};
use rustix::process::{Pid, Signal, getpid, kill_process};

const WORLD: usize = 3;
/// The rank that dies or is stopped.
const VICTIM: usize = 1;
/// A rank that is stopped while the victim dies.
const STRAGGLER: usize = 2;
/// A limit that no test reaches.
const NEVER: Duration = Duration::from_secs(3600);
/// The limit of operations where a rank is stopped; the ranks must meet within it too.
const SHORT: Duration = Duration::from_secs(10);
/// Printed by a rank whose error names the rank that has died or is stopped.
const NAMES: &str = "names the victim";
/// Elements of an operation that takes a while.
const MANY: usize = 4 << 20;

/// Calls that do not match, and what the ranks must report about them.
const CONFLICTS: [(&str, &[&str]); 12] = [
    ("operations", &["rank 1 called broadcast(f32, 10, root 0) as #2", "all_reduce(f32, 12, sum)"]),
    ("counts", &["rank 2 called all_reduce(f32, 11, sum) as #2", "all_reduce(f32, 12, sum)"]),
    ("types", &["rank 1 called all_reduce(f64, 12, sum) as #2", "all_reduce(f32, 12, sum)"]),
    ("reductions", &["rank 2 called all_reduce(f32, 12, max) as #2", "all_reduce(f32, 12, sum)"]),
    ("roots", &["rank 2 called broadcast(f32, 10, root 1) as #2", "broadcast(f32, 10, root 0)"]),
    ("orders", &["rank 1 called all_reduce(f32, 12, sum) as #2", "barrier() as #2"]),
    ("send and barrier", &["rank 0 called send(f32, 10, to 1) as #2", "rank 1 called barrier()"]),
    ("receive and barrier", &["rank 1 called recv(f32, 10, from 2) as #2", "called barrier()"]),
    (
        "two sends",
        &["rank 0 called send(f32, 10, to 1) as #2", "rank 1 called send(f32, 10, to 0)"],
    ),
    ("long sends", &["rank 0 called send(f32, 4194304, to 1)", "rank 1 called send(f32, 4194304"]),
    (
        "messages",
        &["rank 0 called send(f32, 10, to 1) as #2", "rank 1 called recv(f32, 9, from 0)"],
    ),
    ("shares", &["all_gather(f32, ", "do not add up: all ranks together send 9 elements"]),
];

fn conflict(group: &Group, case: &str) -> CollectiveError {
    let mut data = [1f32; 12];
    let mut reduce =
        |len: usize, op| group.all_reduce_slice(&mut data[..len], op).map(|_| ()).map_err(Some);
    let sum = ReduceOp::Sum;
    let barrier = || group.barrier().map(|_| ()).map_err(Some);
    let send = |len, to| group.send_slice(&vec![1f32; len], to).map(|_| ()).map_err(Some);
    let recv = |len, from| group.recv_slice(&mut vec![1f32; len], from).map(|_| ()).map_err(Some);
    let broadcast = |root| group.broadcast_slice(&mut [1f32; 10], root).map(|_| ()).map_err(Some);
    let outcome = match (case, group.rank()) {
        ("operations", 1) => broadcast(0),
        ("counts", 2) => reduce(11, sum),
        ("types", 1) => group.all_reduce_slice(&mut [1f64; 12], sum).map(|_| ()).map_err(Some),
        ("reductions", 2) => reduce(12, ReduceOp::Max),
        ("operations" | "counts" | "types" | "reductions", _) => reduce(12, sum),
        ("roots", 2) => broadcast(1),
        ("roots", _) => broadcast(0),
        ("orders", 1) => reduce(12, sum).and_then(|()| barrier()),
        ("orders", _) => barrier().and_then(|()| reduce(12, sum)),
        ("send and barrier" | "two sends" | "messages", 0) => send(10, 1),
        ("receive and barrier", 1) => recv(10, 2),
        ("two sends", 1) => send(10, 0),
        ("long sends", 0) => send(MANY, 1),
        ("long sends", 1) => send(MANY, 0),
        ("messages", 1) => recv(9, 0),
        // The other rank or ranks wait for the two whose calls do not match.
        (
            "send and barrier" | "receive and barrier" | "two sends" | "long sends" | "messages",
            _,
        ) => barrier(),
        ("shares", rank) => {
            let share = vec![1f32; rank + 2];
            group.all_gather_slice(&share, &mut [0f32; 8]).map(|_| ()).map_err(Some)
        }
        (other, _) => panic!("unknown case {other}"),
    };
    outcome.expect_err("calls that do not fit together").expect("an error")
}

fn check_conflict(group: &Group, case: &str) {
    let error = conflict(group, case);
    let text = error.to_string();
    match (case, &error) {
        ("shares", CollectiveError::Counts { .. }) => {}
        (_, CollectiveError::Mismatch { .. }) if case != "shares" => {}
        _ => panic!("{case}: rank {} has {text}", group.rank()),
    }
    let (_, parts) = CONFLICTS.iter().find(|(name, _)| *name == case).unwrap();
    for part in *parts {
        assert!(text.contains(part), "{case}: rank {} has {text}, not {part}", group.rank());
    }
    is_broken(group);
}

fn is_broken(group: &Group) {
    let error = group.barrier().unwrap_err();
    assert!(matches!(error, CollectiveError::Broken { .. }), "after an error: {error}");
}

#[test]
#[ignore = "the body of the processes that the other tests start"]
fn rank_process() {
    let Ok(scenario) = std::env::var("SCENARIO") else { return };
    end_with_parent();
    let number = |name: &str| std::env::var(name).unwrap().parse::<usize>().unwrap();
    let rank = number("RANK");
    let rendezvous = Rendezvous::by_file(std::env::var("RENDEZVOUS_FILE").unwrap());
    let mut options = GroupOptions::for_local_ranks(WORLD);
    options.timeout = if scenario.contains("stopped") { SHORT } else { NEVER };
    let group = match std::env::var("TRANSPORT").unwrap().as_str() {
        "shm" => Group::shm(&rendezvous, rank, WORLD, options),
        "tcp" => Group::tcp(&rendezvous, "127.0.0.1", rank, WORLD, options),
        other => panic!("unknown transport {other}"),
    };
    let group = group.unwrap();
    match scenario.as_str() {
        "dies outside" => {
            for _ in 0..1200 {
                group.barrier().unwrap();
            }
            if rank == VICTIM {
                kill_process(getpid(), Signal::KILL).unwrap();
            }
            let error = group.all_reduce_slice(&mut [0f32; 1000], ReduceOp::Sum).unwrap_err();
            names_lost(&error, 1201, 4000);
            is_broken(&group);
        }
        "dies inside" => {
            let (error, seq) = work_until_error(&group);
            names_lost(&error, seq, 4 * MANY);
            is_broken(&group);
        }
        "dies beside a straggler" => {
            group.barrier().unwrap();
            match rank {
                VICTIM => loop {
                    std::thread::park();
                },
                STRAGGLER => {
                    println!("ready");
                    kill_process(getpid(), Signal::STOP).unwrap();
                }
                _ => {}
            }
            let error = group.all_reduce_slice(&mut [0f32; 1000], ReduceOp::Sum).unwrap_err();
            names_lost(&error, 2, 4000);
        }
        "is stopped before" => {
            group.barrier().unwrap();
            if rank == VICTIM {
                println!("ready");
                kill_process(getpid(), Signal::STOP).unwrap();
                // The signal may stop another thread first, and this one a moment later.
                loop {
                    std::thread::park();
                }
            }
            let error = group.all_reduce_slice(&mut [0f32; 1000], ReduceOp::Sum).unwrap_err();
            // No rank has all the data that it needs from a victim that does not arrive.
            assert!(names_stopped(&error, 2, 4000), "{error}");
            say_if(true);
            is_broken(&group);
        }
        "is stopped inside" => {
            let (error, seq) = work_until_error(&group);
            // A rank that has all the data that it needs from the victim waits for another survivor, which may not be at fault.
            say_if(names_stopped(&error, seq, 4 * MANY));
            is_broken(&group);
        }
        case => {
            group.barrier().unwrap();
            check_conflict(&group, case);
        }
    }
}

/// Reduces until an operation fails. Returns the error and the operation's sequence number.
fn work_until_error(group: &Group) -> (CollectiveError, u32) {
    let mut data = vec![0f32; MANY];
    // Operation 0 is the barrier with which the group formed.
    for seq in 1.. {
        if seq == 5 && group.rank() == VICTIM {
            println!("ready");
        }
        if let Err(error) = group.all_reduce_slice(&mut data, ReduceOp::Sum) {
            return (error, seq);
        }
    }
    unreachable!("the numbers do not end")
}

fn say_if(names_victim: bool) {
    println!("{}", if names_victim { NAMES } else { "" });
}

fn names_lost(error: &CollectiveError, at: u32, size: usize) {
    let CollectiveError::PeerLost { peer: VICTIM, op: "all_reduce", seq, bytes, .. } = error else {
        panic!("{error}")
    };
    assert_eq!((*seq, *bytes), (at, size), "{error}");
    say_if(true);
}

/// The ranks that another rank's end has left missing in all-reduce number `at`.
fn missing_in(cause: &str, at: u32) -> Vec<usize> {
    assert!(cause.contains(&format!("all_reduce #{at}")), "{cause}");
    let (_, missing) = cause.split_once("ranks [").unwrap();
    let (missing, _) = missing.split_once(']').unwrap();
    missing.split(", ").filter(|rank| !rank.is_empty()).map(|rank| rank.parse().unwrap()).collect()
}

/// Whether the error of a rank, after its own or another rank's time-out, names the stopped rank.
fn names_stopped(error: &CollectiveError, at: u32, size: usize) -> bool {
    match error {
        CollectiveError::TimedOut { missing, op: "all_reduce", seq, bytes, waited, .. } => {
            assert_eq!((*seq, *bytes), (at, size), "{error}");
            assert!(*waited >= SHORT, "{error}");
            missing.contains(&VICTIM)
        }
        // Another rank's time was over first.
        CollectiveError::Broken { cause, .. } => missing_in(cause, at).contains(&VICTIM),
        _ => panic!("{error}"),
    }
}

/// Processes of one test, and the folder where they meet and write.
struct Run {
    ranks: Children,
    folder: tempfile::TempDir,
}

impl Run {
    fn start(scenario: &str, transport: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let ranks = Children::start(module_path!(), WORLD, |_, command| {
            command.env("SCENARIO", scenario).env("TRANSPORT", transport);
            command
                .env("RENDEZVOUS_FILE", folder.path().join("rendezvous"))
                .env(DUMP_FOLDER, folder.path());
        });
        Self { ranks, folder }
    }

    fn signal_victim(&self, signal: Signal) {
        kill_process(Pid::from_child(self.ranks.rank(VICTIM)), signal).unwrap();
    }

    /// Waits for the survivors. At least one must name the victim.
    fn victim_is_named(&mut self) {
        let outputs = self.ranks.finish(&SURVIVORS);
        assert!(outputs.iter().any(|output| output.stdout.contains(NAMES)), "{outputs:?}");
    }

    /// The dumps of `ranks`, and of nobody else: their last line is the operation under way.
    fn check_dumps(&self, ranks: &[usize], operation: &str) {
        for rank in 0..WORLD {
            let path = self.folder.path().join(format!("world-rank{rank}.jsonl"));
            assert_eq!(path.exists(), ranks.contains(&rank), "{}", path.display());
            if !path.exists() {
                continue;
            }
            let text = std::fs::read_to_string(&path).unwrap();
            let lines: Vec<serde_json::Value> =
                text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
            assert_eq!(lines[0]["rank"], rank);
            assert!((2..=1001).contains(&lines.len()), "{} lines", lines.len());
            let last = &lines[lines.len() - 1];
            assert_eq!((&last["op"], &last["state"]), (&operation.into(), &"running".into()));
            let is_finished = |line: &serde_json::Value| line["state"] == "finished";
            assert!(lines[1..lines.len() - 1].iter().all(is_finished));
            let seq = |line: &serde_json::Value| line["seq"].as_u64().unwrap();
            assert!(lines[1..].windows(2).all(|pair| seq(&pair[0]) + 1 == seq(&pair[1])));
        }
    }
}

const SURVIVORS: [usize; 2] = [0, 2];

#[test]
fn conflicts_are_named_by_every_thread() {
    for (case, _) in CONFLICTS {
        let mut options = GroupOptions::for_local_ranks(WORLD);
        options.timeout = NEVER;
        limit::within_limit(move || {
            ranks::each(Group::threads_with(WORLD, options).unwrap(), |group| {
                // Processes have met once before, in a barrier.
                group.barrier().unwrap();
                group.barrier().unwrap();
                check_conflict(&group, case);
            });
        });
    }
}

fn conflicts_over(transport: &str) {
    for (case, _) in CONFLICTS {
        let mut run = Run::start(case, transport);
        run.ranks.finish(&[0, 1, 2]);
        let operation = |rank: usize| {
            let path = run.folder.path().join(format!("world-rank{rank}.jsonl"));
            let text = std::fs::read_to_string(path).unwrap();
            assert!(text.lines().last().unwrap().contains(r#""state":"running""#), "{text}");
        };
        (0..WORLD).for_each(operation);
    }
}

#[test]
fn conflicts_are_named_by_every_process_in_shared_memory() {
    conflicts_over("shm");
}

#[test]
fn conflicts_are_named_by_every_process_over_tcp() {
    conflicts_over("tcp");
}

#[test]
fn a_rank_that_dies_outside_of_an_operation_is_named() {
    for transport in ["shm", "tcp"] {
        let mut run = Run::start("dies outside", transport);
        run.victim_is_named();
        run.check_dumps(&SURVIVORS, "all_reduce");
    }
}

#[test]
fn a_rank_that_dies_inside_of_an_operation_is_named() {
    for transport in ["shm", "tcp"] {
        for pause_ms in [0, 3, 7, 20] {
            let mut run = Run::start("dies inside", transport);
            run.ranks.wait_ready(VICTIM);
            std::thread::sleep(Duration::from_millis(pause_ms));
            run.signal_victim(Signal::KILL);
            run.victim_is_named();
            run.check_dumps(&SURVIVORS, "all_reduce");
        }
    }
}

/// The straggler looks at its connections only after the other survivor has ended.
#[test]
fn a_straggler_blames_the_rank_that_died_and_not_the_one_that_noticed_it_first() {
    for transport in ["shm", "tcp"] {
        let mut run = Run::start("dies beside a straggler", transport);
        run.ranks.wait_ready(STRAGGLER);
        run.signal_victim(Signal::KILL);
        run.ranks.finish_some(&[0]);
        let straggler = Pid::from_child(run.ranks.rank(STRAGGLER));
        kill_process(straggler, Signal::CONT).unwrap();
        run.victim_is_named();
    }
}

#[test]
fn a_rank_that_is_stopped_before_it_arrives_is_named_at_the_limit() {
    // At the same time, since each lasts until its time limit.
    for mut run in ["shm", "tcp"].map(|transport| Run::start("is stopped before", transport)) {
        run.ranks.wait_ready(VICTIM);
        run.victim_is_named();
        run.check_dumps(&SURVIVORS, "all_reduce");
    }
}

/// The victims stop at three different moments, in three runs at a time.
fn stopped_inside(transport: &str) {
    let mut runs = [0, 5, 13].map(|pause_ms| {
        let mut run = Run::start("is stopped inside", transport);
        run.ranks.wait_ready(VICTIM);
        std::thread::sleep(Duration::from_millis(pause_ms));
        run.signal_victim(Signal::STOP);
        run
    });
    for run in &mut runs {
        run.victim_is_named();
        run.check_dumps(&SURVIVORS, "all_reduce");
    }
}

#[test]
fn a_rank_that_is_stopped_in_shared_memory_is_named_at_the_limit() {
    stopped_inside("shm");
}

#[test]
fn a_rank_that_is_stopped_over_tcp_is_named_at_the_limit() {
    stopped_inside("tcp");
}
