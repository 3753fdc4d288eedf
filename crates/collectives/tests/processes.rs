//! The `shm` transport: each rank is a process, started from this very test binary.

mod common;

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use paceline_collectives::{CollectiveError, Group, GroupOptions, Meeting};

/// Starts `world` copies of this binary that run `scenario` in [`rank_process`].
fn start(scenario: &str, world: usize, meeting: &[(&str, String)]) -> Vec<Child> {
    (0..world)
        .map(|rank| {
            Command::new(std::env::current_exe().unwrap())
                .args(["rank_process", "--exact", "--nocapture", "--ignored"])
                .env("SCENARIO", scenario)
                .env("RANK", rank.to_string())
                .env("WORLD_SIZE", world.to_string())
                .envs(meeting.iter().map(|(key, value)| (*key, value.as_str())))
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect()
}

fn finish(ranks: Vec<Child>) -> Vec<String> {
    ranks
        .into_iter()
        .enumerate()
        .map(|(rank, child)| {
            let output = child.wait_with_output().unwrap();
            let stderr = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "rank {rank}: {stderr}");
            String::from_utf8_lossy(&output.stdout).into_owned()
        })
        .collect()
}

/// A port number that no other test of this run uses: nothing listens on it, it is only a name.
fn port(offset: u16) -> Vec<(&'static str, String)> {
    let base = 20_000 + (std::process::id() % 3000) as u16 * 10;
    vec![("MEET_PORT", (base + offset).to_string())]
}

#[test]
#[ignore = "the body of the processes that the other tests start"]
fn rank_process() {
    let Ok(scenario) = std::env::var("SCENARIO") else { return };
    let number = |name: &str| std::env::var(name).unwrap().parse::<usize>().unwrap();
    let (rank, world) = (number("RANK"), number("WORLD_SIZE"));
    let meeting = match std::env::var("MEET_FILE") {
        Ok(path) => Meeting::by_file(path),
        Err(_) => {
            let secret = if scenario == "imposter" && rank == 1 { "wrong" } else { "right" };
            Meeting::by_port(number("MEET_PORT") as u16, secret)
        }
    };
    let mut options = GroupOptions::for_local_ranks(world);
    if matches!(scenario.as_str(), "imposter" | "alone") {
        options.timeout = Duration::from_millis(300);
    }
    let group = Group::shm(&meeting, rank, world, options);
    match scenario.as_str() {
        "operations" => {
            let group = group.unwrap();
            common::every_operation(&group);
            common::operations_keep_their_order(&group);
        }
        "order" => println!("bits {:?}", common::order_sensitive_sum(&group.unwrap())),
        "death" => {
            let group = group.unwrap();
            group.barrier().unwrap();
            if rank == 1 {
                std::process::abort();
            }
            let error = group.barrier().unwrap_err();
            let CollectiveError::PeerLost { peer: 1, waited, .. } = &error else {
                panic!("{error}");
            };
            assert!(*waited < Duration::from_secs(20), "noticed by the time limit only: {error}");
        }
        "imposter" | "alone" => {
            let error = group.unwrap_err().to_string();
            println!("{error}");
        }
        other => panic!("unknown scenario {other}"),
    }
}

#[test]
fn every_operation_between_processes() {
    for world in [1, 2, 3, 4] {
        finish(start("operations", world, &port(world as u16)));
    }
}

#[test]
fn processes_meet_through_a_file_and_remove_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("meet");
    // What an earlier run that died may have left there.
    std::fs::write(&path, "paceline-long-gone\nsecret\n").unwrap();
    let meeting = [("MEET_FILE", path.to_str().unwrap().to_owned())];
    finish(start("operations", 3, &meeting));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn both_transports_give_the_same_bits() {
    let outputs = finish(start("order", 3, &port(5)));
    let threads = Group::threads(3);
    let expected = std::thread::scope(|scope| {
        let ranks: Vec<_> = threads
            .into_iter()
            .map(|group| scope.spawn(move || common::order_sensitive_sum(&group)))
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).next().unwrap()
    });
    for output in outputs {
        assert!(output.contains(&format!("bits {expected:?}")));
    }
}

#[test]
fn a_rank_that_dies_is_named_at_once() {
    let begin = Instant::now();
    for (rank, mut child) in start("death", 3, &port(6)).into_iter().enumerate() {
        assert_eq!(child.wait().unwrap().success(), rank != 1, "rank {rank}");
    }
    assert!(begin.elapsed() < Duration::from_secs(30));
}

#[test]
fn strangers_and_missing_ranks_are_named() {
    let outputs = finish(start("imposter", 2, &port(7)));
    assert!(outputs[0].contains("ranks [1] did not come in time"), "{}", outputs[0]);
    assert!(outputs[1].contains("its secret differs"), "{}", outputs[1]);
    let mut environment = port(8);
    environment.push(("RANK", "1".into()));
    // Both processes are rank 1, so rank 0 never comes.
    for output in finish(start("alone", 2, &environment)) {
        assert!(output.contains("rank 0 did not come in time"), "{output}");
    }
}
