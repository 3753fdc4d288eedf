//! The `shm` transport: each rank is a process, started from this very test binary.

mod common;

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use paceline_collectives::{CollectiveError, Group, GroupOptions, Placement, Rendezvous};

/// Starts `world` copies of this binary that run `scenario` in [`rank_process`].
fn start(scenario: &str, world: usize, rendezvous: &[(&str, String)]) -> Vec<Child> {
    (0..world)
        .map(|rank| {
            Command::new(std::env::current_exe().unwrap())
                .args(["rank_process", "--exact", "--nocapture", "--ignored"])
                .env("SCENARIO", scenario)
                .env("RANK", rank.to_string())
                .env("WORLD_SIZE", world.to_string())
                .envs(rendezvous.iter().map(|(key, value)| (*key, value.as_str())))
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
    let base = 10_000 + (std::process::id() % 500) as u16 * 100;
    vec![("MEET_PORT", (base + offset).to_string())]
}

#[test]
#[ignore = "the body of the processes that the other tests start"]
fn rank_process() {
    let Ok(scenario) = std::env::var("SCENARIO") else { return };
    let number = |name: &str| std::env::var(name).unwrap().parse::<usize>().unwrap();
    let placement = Placement::from_env().unwrap().unwrap();
    let (rank, world) = (placement.rank, placement.world_size);
    let rendezvous = match std::env::var("MEET_FILE") {
        Ok(path) => Rendezvous::by_file(path),
        // Started by hand under a foreign launcher, to try that: with SCENARIO=operations.
        Err(_) if std::env::var_os("MEET_PORT").is_none() => {
            placement.rendezvous().unwrap().clone()
        }
        Err(_) => {
            let secret = if scenario == "imposter" && rank == 1 { "wrong" } else { "right" };
            Rendezvous::by_port(number("MEET_PORT") as u16, secret)
        }
    };
    let mut options = GroupOptions::for_local_ranks(world);
    if matches!(scenario.as_str(), "imposter" | "alone") {
        options.timeout = Duration::from_millis(300);
    }
    let transport = std::env::var("TRANSPORT").unwrap_or_else(|_| "shm".into());
    let group = match transport.as_str() {
        "shm" => Group::shm(&rendezvous, rank, world, options),
        "tcp" => Group::tcp(&rendezvous, "127.0.0.1", rank, world, options),
        "ring" | "auto" => {
            options.algorithm = transport.parse().unwrap();
            Group::tcp(&rendezvous, "127.0.0.1", rank, world, options)
        }
        "hybrid" => {
            let local = number("RANKS_PER_HOST");
            Group::hybrid(&rendezvous, "127.0.0.1", rank, world, local, options)
        }
        other => panic!("unknown transport {other}"),
    };
    match scenario.as_str() {
        "operations" => {
            let group = group.unwrap();
            common::every_type(&group);
            common::objects(&group);
            common::operations_keep_their_order(&group);
            common::groups_divide(&group);
        }
        "order" => println!("bits {:?}", digest(&common::order_sensitive_sums(&group.unwrap()))),
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

fn over(
    transport: &str,
    local_world: usize,
    mut rendezvous: Vec<(&'static str, String)>,
) -> Vec<(&'static str, String)> {
    rendezvous.push(("TRANSPORT", transport.into()));
    rendezvous.push(("RANKS_PER_HOST", local_world.to_string()));
    rendezvous
}

#[test]
fn every_operation_in_shared_memory() {
    for world in 1..=8 {
        finish(start("operations", world, &port(world as u16)));
    }
}

#[test]
fn every_operation_over_tcp() {
    for world in 1..=8 {
        finish(start("operations", world, &over("tcp", 1, port(10 + world as u16))));
    }
}

#[test]
fn every_operation_with_rings() {
    for world in 2..=8 {
        finish(start("operations", world, &over("ring", 1, port(20 + world as u16))));
    }
    finish(start("operations", 3, &over("auto", 1, port(29))));
}

#[test]
fn every_operation_on_emulated_hosts() {
    for (case, (world, local)) in
        [(2, 1), (3, 1), (4, 2), (5, 1), (6, 2), (6, 3), (7, 1), (8, 4)].into_iter().enumerate()
    {
        finish(start("operations", world, &over("hybrid", local, port(30 + case as u16))));
    }
}

#[test]
fn processes_meet_through_a_file_and_remove_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("meet");
    // What an earlier run that died may have left there.
    std::fs::write(&path, "paceline-long-gone\nsecret\n").unwrap();
    let rendezvous = [("MEET_FILE", path.to_str().unwrap().to_owned())];
    finish(start("operations", 3, &rendezvous));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

/// A short name for many bits.
fn digest(bits: &[u32]) -> u64 {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hasher = DefaultHasher::new();
    bits.hash(&mut hasher);
    hasher.finish()
}

#[test]
fn all_transports_give_the_same_bits() {
    for (case, world) in [2, 4, 6].into_iter().enumerate() {
        let expected = std::thread::scope(|scope| {
            let ranks: Vec<_> = Group::threads(world)
                .into_iter()
                .map(|group| scope.spawn(move || digest(&common::order_sensitive_sums(&group))))
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).next().unwrap()
        });
        for (n, transport) in ["shm", "tcp", "hybrid"].into_iter().enumerate() {
            let rendezvous = over(transport, world / 2, port(40 + (3 * case + n) as u16));
            for output in finish(start("order", world, &rendezvous)) {
                assert!(output.contains(&format!("bits {expected}")), "{transport}: {output}");
            }
        }
    }
}

#[test]
fn a_rank_that_dies_is_named_at_once() {
    let begin = Instant::now();
    for (rank, mut child) in start("death", 3, &port(96)).into_iter().enumerate() {
        assert_eq!(child.wait().unwrap().success(), rank != 1, "rank {rank}");
    }
    assert!(begin.elapsed() < Duration::from_secs(30));
}

#[test]
fn strangers_and_missing_ranks_are_named() {
    let outputs = finish(start("imposter", 2, &port(97)));
    assert!(outputs[0].contains("ranks [1] did not come in time"), "{}", outputs[0]);
    assert!(outputs[1].contains("its secret differs"), "{}", outputs[1]);
    let mut environment = port(98);
    environment.push(("RANK", "1".into()));
    // Both processes are rank 1, so rank 0 never comes.
    for output in finish(start("alone", 2, &environment)) {
        assert!(output.contains("rank 0 did not come in time"), "{output}");
    }
}
