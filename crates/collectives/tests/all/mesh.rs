//! Ranks in a mesh: a rank that dies breaks only its own groups.
//!
//! The groups have no time limit, so operations must end for other reasons. A test that hangs fails.

use std::time::Duration;

use crate::children::{Children, end_with_parent};
use paceline_collectives::{
    Axis, CollectiveError, DUMP_FOLDER, Group, GroupOptions, Mesh, ReduceOp, Rendezvous,
};
use rustix::process::{Signal, getpid, kill_process};

/// The rank that dies.
const VICTIM: usize = 3;
/// Elements of a message.
const ELEMS: usize = 1000;

fn options(world: usize) -> GroupOptions {
    GroupOptions { timeout: Duration::from_secs(3600), ..GroupOptions::for_local_ranks(world) }
}

#[test]
#[ignore = "the body of the processes that the other tests start"]
fn rank_process() {
    let Ok(transport) = std::env::var("TRANSPORT") else { return };
    end_with_parent();
    let number = |name: &str| std::env::var(name).unwrap().parse::<usize>().unwrap();
    let (rank, world) = (number("RANK"), number("WORLD_SIZE"));
    let rendezvous = Rendezvous::by_file(std::env::var("RENDEZVOUS_FILE").unwrap());
    let group = match transport.as_str() {
        "shm" => Group::shm(&rendezvous, rank, world, options(world)),
        "tcp" => Group::tcp(&rendezvous, "127.0.0.1", rank, world, options(world)),
        "hybrid" => Group::hybrid(&rendezvous, "127.0.0.1", rank, world, 2, options(world)),
        other => panic!("unknown transport {other}"),
    };
    a_rank_dies(group.unwrap());
}

/// Lets a rank of four processes die. Returns the folder with the dumps of the others.
fn run(transport: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let mut ranks = Children::start(module_path!(), 4, |_, command| {
        command
            .env("TRANSPORT", transport)
            .env("RENDEZVOUS_FILE", folder.path().join("rendezvous"))
            .env(DUMP_FOLDER, folder.path());
    });
    ranks.finish(&[0, 1, 2]);
    folder
}

fn adds_up(group: &Group) {
    for _ in 0..50 {
        let mut sum = [group.outermost_rank(group.rank()) as f32; ELEMS];
        group.all_reduce_slice(&mut sum, ReduceOp::Sum).unwrap();
        let all = (0..group.world_size()).map(|rank| group.outermost_rank(rank)).sum::<usize>();
        assert_eq!(sum, [all as f32; ELEMS]);
    }
}

/// In a mesh of 2 x 2 ranks, rank 0 shares no axis with the victim, and each other rank shares one axis with it.
fn a_rank_dies(world: Group) {
    let rank = world.rank();
    let mesh = Mesh::new(world, &"dp=2,shard=2".parse().unwrap()).unwrap();
    let (dp, shard) = (mesh.group(Axis::Dp).unwrap(), mesh.group(Axis::Shard).unwrap());
    adds_up(dp);
    adds_up(shard);
    if rank == VICTIM {
        kill_process(getpid(), Signal::KILL).unwrap();
        loop {
            std::thread::park();
        }
    }
    let needs_victim: &[&Group] = match rank {
        1 => &[dp],
        2 => &[shard],
        _ => &[],
    };
    for group in needs_victim {
        let error = group.all_reduce_slice(&mut [1f32; ELEMS], ReduceOp::Sum).unwrap_err();
        let CollectiveError::PeerLost { rank: reporter, peer, seq: 51, .. } = error else {
            panic!("{error}");
        };
        assert_eq!((reporter, peer), (rank, VICTIM), "{error}");
        let error = group.barrier().unwrap_err();
        let CollectiveError::Broken { culprits, .. } = &error else { panic!("{error}") };
        assert_eq!(culprits, &[VICTIM]);
        assert!(error.to_string().contains("rank 3 died"), "{error}");
    }
    // The others have noticed the death, and go on.
    let healthy: &[&Group] = match rank {
        0 => &[dp, shard],
        1 => &[shard],
        _ => &[dp],
    };
    for group in healthy {
        adds_up(group);
    }
    // All three still have each other, but an operation of all ranks needs the victim.
    let error = mesh.world().barrier().unwrap_err();
    assert!(matches!(error, CollectiveError::PeerLost { peer: VICTIM, .. }), "{error}");
}

#[test]
fn a_rank_that_dies_ends_only_the_operations_of_the_axes_that_need_it() {
    for transport in ["shm", "tcp", "hybrid"] {
        let folder = run(transport);
        let dump = |name: &str| {
            let text = std::fs::read_to_string(folder.path().join(name)).unwrap();
            let lines = text.lines().map(|line| serde_json::from_str(line).unwrap());
            lines.collect::<Vec<serde_json::Value>>()
        };
        // Rank 1 is the first of its group on the axis `dp`. The file has its other groups, too.
        let lines = dump("world-dp.1-rank0.jsonl");
        assert_eq!((&lines[0]["group"], &lines[0]["number"]), (&"world/dp.1".into(), &1.into()));
        assert!(
            lines[0]["cause"].as_str().unwrap().contains("rank 1: rank 3 died"),
            "{}",
            lines[0]
        );
        let groups = lines[1..].iter().map(|line| line["group"].as_u64().unwrap());
        let mut groups: Vec<u64> = groups.collect();
        let last = &lines[lines.len() - 1];
        assert_eq!((&last["group"], &last["state"]), (&1.into(), &"running".into()), "{last}");
        groups.sort_unstable();
        groups.dedup();
        assert_eq!(groups, [0, 1, 2], "{transport}");
        // Rank 0 has lost a rank of the world only.
        for name in ["world-dp.0-rank0.jsonl", "world-shard.0-rank0.jsonl"] {
            assert!(!folder.path().join(name).exists(), "{transport}: {name}");
        }
    }
}
