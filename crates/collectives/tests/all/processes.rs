//! The `shm` transport: each rank is a process, started from this test binary.

use crate::ranks;

use std::net::TcpListener;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::children::{Children, HANGS, end_with_parent};
use crate::common::{self, private, read};
use half::bf16;
use paceline_collectives::{CollectiveError, Group, GroupOptions, Placement, Rendezvous};
use tempfile::TempDir;

/// The environment variables of the ranks of one test, and the resources that reserve their rendezvous.
struct Place {
    variables: Vec<(&'static str, String)>,
    /// Keeps the port reserved.
    _listener: Option<TcpListener>,
    _folder: Option<TempDir>,
}

impl Place {
    /// Ranks meet by the number of a port, which is only a name: as long as a listener holds the port, no other test has that
    /// number.
    fn port() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let variables = vec![("RENDEZVOUS_PORT", port.to_string())];
        Self { variables, _listener: Some(listener), _folder: None }
    }

    /// Ranks meet by a file in a temporary folder, which is removed with this value.
    fn file() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rendezvous").to_str().unwrap().to_owned();
        Self { variables: vec![("RENDEZVOUS_FILE", path)], _listener: None, _folder: Some(folder) }
    }

    fn with(mut self, name: &'static str, value: impl ToString) -> Self {
        self.variables.push((name, value.to_string()));
        self
    }

    fn over(self, transport: &str, ranks_per_host: usize) -> Self {
        self.with("TRANSPORT", transport).with("RANKS_PER_HOST", ranks_per_host)
    }
}

fn start(scenario: &str, world: usize, place: &Place) -> Children {
    Children::start(module_path!(), world, |_, command| {
        command.env("SCENARIO", scenario);
        command.envs(place.variables.iter().map(|(key, value)| (*key, value.as_str())));
    })
}

/// Runs `scenario` to its end. Returns the output of each rank.
fn run(scenario: &str, world: usize, place: &Place) -> Vec<String> {
    let ranks: Vec<usize> = (0..world).collect();
    let outputs = start(scenario, world, place).finish(&ranks);
    outputs.into_iter().map(|output| output.stdout).collect()
}

/// Exchanges many messages between this rank and another one, in both directions.
fn exchange(group: &Group, other: usize) {
    for number in 0..300 {
        let got = private(&[0; 100]);
        group.send_recv(&private(&[number; 100]), other, &got, other).unwrap();
        assert_eq!(read::<i32>(&got), [number; 100]);
    }
}

#[test]
#[ignore = "the body of the processes that the other tests start"]
fn rank_process() {
    let Ok(scenario) = std::env::var("SCENARIO") else { return };
    end_with_parent();
    let number = |name: &str| std::env::var(name).unwrap().parse::<usize>().unwrap();
    let placement = Placement::from_env().unwrap().unwrap();
    let (rank, world) = (placement.rank, placement.world_size);
    let rendezvous = match std::env::var("RENDEZVOUS_FILE") {
        Ok(path) => Rendezvous::by_file(path),
        // Started by hand under another launcher, with SCENARIO=operations.
        Err(_) if std::env::var_os("RENDEZVOUS_PORT").is_none() => {
            placement.rendezvous().unwrap().clone()
        }
        Err(_) => {
            let secret = if scenario == "imposter" && rank == 1 { "wrong" } else { "right" };
            // By a port, ranks with another secret would meet elsewhere.
            Rendezvous::by_name(format!("paceline-test-{}", number("RENDEZVOUS_PORT")), secret)
        }
    };
    let mut options = GroupOptions::for_local_ranks(world);
    options.timeout = match scenario.as_str() {
        "alone" => Duration::from_millis(300),
        "imposter" if rank == 0 => Duration::from_millis(300),
        _ => Duration::MAX,
    };
    let same_options = options.clone();
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
            if world <= 3 {
                common::every_type(&group);
            } else {
                // Elements of each size, and of each way to round. Threads try all types at these numbers of ranks.
                common::every_operation::<f64>(&group);
                common::every_operation::<f32>(&group);
                common::every_operation::<bf16>(&group);
                common::every_operation::<u8>(&group);
            }
            common::objects(&group);
            common::operations_keep_their_order(&group);
            common::groups_divide(&group);
            if world > 2 {
                common::messages_of_two_pairs(&group);
            }
        }
        "order" => println!("bits {:?}", digest(&common::order_sensitive_sums(&group.unwrap()))),
        "death" => {
            let group = group.unwrap();
            group.barrier().unwrap();
            if rank == 1 {
                std::process::abort();
            }
            let error = group.barrier().unwrap_err();
            let CollectiveError::PeerLost { peer: 1, .. } = &error else {
                panic!("{error}");
            };
        }
        "leaves" => {
            let group = group.unwrap();
            group.barrier().unwrap();
            if rank < 2 {
                // Rank 2 takes no part in the following messages, and leaves at some moment during them.
                exchange(&group, 1 - rank);
                let error = group.recv_slice(&mut [0f32; 10], 2).unwrap_err();
                let CollectiveError::PeerLeft { peer: 2, .. } = &error else { panic!("{error}") };
            }
        }
        "death beside messages" => {
            let group = group.unwrap();
            group.barrier().unwrap();
            if rank == 1 {
                std::process::abort();
            }
            exchange(&group, 2 - rank);
            let error = group.recv_slice(&mut [0f32; 10], 1).unwrap_err();
            let CollectiveError::PeerLost { peer: 1, .. } = &error else { panic!("{error}") };
        }
        "imposter" | "alone" => {
            let mut error = group.unwrap_err().to_string();
            // Rank 0 keeps listening at its rendezvous until the other rank has tried to join.
            let deadline = Instant::now() + HANGS;
            if scenario == "imposter" && rank == 0 {
                let end_file = std::env::var("END_FILE").unwrap();
                while !Path::new(&end_file).exists() {
                    assert!(Instant::now() < deadline, "the other rank does not end");
                    let again = Group::shm(&rendezvous, rank, world, same_options.clone());
                    error = again.unwrap_err().to_string();
                }
            }
            println!("{error}");
        }
        other => panic!("unknown scenario {other}"),
    }
}

// Threads try every number of ranks up to 8, in `threads.rs`. Processes try those that make other trees and rings.

#[test]
fn every_operation_in_shared_memory() {
    for world in [1, 2, 3, 5, 8] {
        run("operations", world, &Place::port());
    }
}

#[test]
fn every_operation_over_tcp() {
    for world in [2, 3, 5, 8] {
        run("operations", world, &Place::port().over("tcp", 1));
    }
}

#[test]
fn every_operation_with_rings() {
    for world in [2, 4, 7] {
        run("operations", world, &Place::port().over("ring", 1));
    }
    run("operations", 3, &Place::port().over("auto", 1));
}

#[test]
fn every_operation_on_emulated_hosts() {
    for (world, local) in [(2, 1), (5, 1), (6, 2), (6, 3), (8, 4)] {
        run("operations", world, &Place::port().over("hybrid", local));
    }
}

#[test]
fn processes_meet_through_a_file_and_remove_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rendezvous");
    // A file that an earlier run may have left when it died.
    std::fs::write(&path, "paceline-long-gone\nsecret\n").unwrap();
    let variables = vec![("RENDEZVOUS_FILE", path.to_str().unwrap().to_owned())];
    run("operations", 3, &Place { variables, _listener: None, _folder: None });
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

/// A hash of many bits.
fn digest(bits: &[u32]) -> u64 {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hasher = DefaultHasher::new();
    bits.hash(&mut hasher);
    hasher.finish()
}

#[test]
fn all_transports_give_the_same_bits() {
    for world in [2, 4, 6] {
        let bits = |group| digest(&common::order_sensitive_sums(&group));
        let expected = ranks::each(Group::threads(world), bits)[0];
        for transport in ["shm", "tcp", "hybrid"] {
            for output in run("order", world, &Place::file().over(transport, world / 2)) {
                assert!(output.contains(&format!("bits {expected}")), "{transport}: {output}");
            }
        }
    }
}

#[test]
fn a_rank_that_dies_is_named() {
    // The time limit of the operations is far longer than that of the test, so the ranks must notice the
    // death itself.
    start("death", 3, &Place::file()).finish(&[0, 2]);
}

#[test]
fn a_rank_that_leaves_or_dies_ends_only_the_operations_that_need_it() {
    for transport in ["shm", "tcp"] {
        run("leaves", 3, &Place::file().over(transport, 1));
    }
    start("death beside messages", 3, &Place::file()).finish(&[0, 2]);
}

#[test]
fn strangers_and_missing_ranks_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let end = folder.path().join("end");
    let place = Place::port().with("END_FILE", end.to_str().unwrap());
    let mut ranks = start("imposter", 2, &place);
    let refused = ranks.finish_some(&[1]).remove(0).stdout;
    assert!(refused.contains("its secret differs"), "{refused}");
    std::fs::write(&end, "").unwrap();
    let waiting = ranks.finish(&[0]).remove(0).stdout;
    assert!(waiting.contains("ranks [1] did not come in time"), "{waiting}");
    // Both processes are rank 1, so rank 0 never comes.
    for output in run("alone", 2, &Place::port().with("RANK", 1)) {
        assert!(output.contains("rank 0 did not come in time"), "{output}");
    }
}
