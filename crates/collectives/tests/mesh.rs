//! Ranks in a mesh: a message that waits delays no other message, and a rank that dies breaks only its own groups.
//!
//! The groups have no time limit, so operations must end for other reasons. A test that hangs fails.

mod children;
mod limit;

use std::time::Duration;

use children::{Children, end_with_parent};
use paceline_collectives::{
    Axis, CollectiveError, DUMP_FOLDER, Group, GroupOptions, Mesh, MeshShape, Neighbor, ReduceOp,
    Rendezvous,
};
use paceline_memory::{Allocator, Category, DType, Tensor};
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
    let Ok(scenario) = std::env::var("SCENARIO") else { return };
    end_with_parent();
    let number = |name: &str| std::env::var(name).unwrap().parse::<usize>().unwrap();
    let (rank, world) = (number("RANK"), number("WORLD_SIZE"));
    let rendezvous = Rendezvous::by_file(std::env::var("RENDEZVOUS_FILE").unwrap());
    let group = match std::env::var("TRANSPORT").unwrap().as_str() {
        "shm" => Group::shm(&rendezvous, rank, world, options(world)),
        "tcp" => Group::tcp(&rendezvous, "127.0.0.1", rank, world, options(world)),
        "hybrid" => Group::hybrid(&rendezvous, "127.0.0.1", rank, world, 2, options(world)),
        other => panic!("unknown transport {other}"),
    };
    let group = group.unwrap();
    match scenario.as_str() {
        "neighbors" => neighbors(group),
        "neighbors in a ring" => ring(group),
        "a rank dies" => a_rank_dies(group),
        other => panic!("unknown scenario {other}"),
    }
}

/// Runs a scenario with processes. Ranks that are no survivors end by themselves. Returns the folder with the dumps.
fn run(scenario: &str, transport: &str, world: usize, survivors: &[usize]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let mut ranks = Children::start(world, |_, command| {
        command.env("SCENARIO", scenario).env("TRANSPORT", transport);
        command
            .env("RENDEZVOUS_FILE", folder.path().join("rendezvous"))
            .env(DUMP_FOLDER, folder.path());
    });
    ranks.finish(survivors);
    folder
}

fn on_threads(world: usize, body: fn(Group)) {
    let groups = Group::threads_with(world, options(world)).unwrap();
    limit::within_limit(move || {
        std::thread::scope(|scope| {
            for group in groups {
                scope.spawn(move || body(group));
            }
        });
    });
}

fn tensor(mesh: &Mesh, contents: usize) -> Tensor {
    let buffer = mesh.allocate(&Allocator::new(), 4 * ELEMS, Category::Activations).unwrap();
    let tensor = Tensor::new(buffer, 0, DType::F32, [ELEMS]).unwrap();
    tensor.write::<f32>().unwrap().fill(contents as f32);
    tensor
}

#[track_caller]
fn holds(tensor: &Tensor, contents: usize) {
    assert!(tensor.read::<f32>().unwrap().iter().all(|&x| x == contents as f32));
}

/// Rank 1 posts a receive from rank 0, which sends only when rank 1 tells it to. Before that, rank 1 exchanges messages
/// with rank 2, in both directions, and sends a message to rank 0. In one queue, all these messages would wait for the
/// receive.
fn neighbors(world: Group) {
    let rank = world.rank();
    let mesh = Mesh::new(world, &"pp=3".parse().unwrap()).unwrap();
    let [own, first, second] = [tensor(&mesh, rank), tensor(&mesh, 9), tensor(&mesh, 9)];
    let neighbors =
        || -> (&Neighbor, &Neighbor) { (mesh.next().unwrap(), mesh.previous().unwrap()) };
    let (next, previous) = neighbors();
    assert_eq!((next.rank(), previous.rank()), ((rank + 1) % 3, (rank + 2) % 3));
    match rank {
        0 => {
            // The word to begin comes from rank 1.
            next.recv(&first).unwrap();
            holds(&first, 1);
            next.send(&own).unwrap();
        }
        1 => {
            let early = previous.recv_async(&first).unwrap();
            let to_next = next.send_async(&own).unwrap();
            next.recv(&second).unwrap();
            holds(&second, 2);
            to_next.wait().unwrap();
            assert!(!early.is_finished());
            // A message does not wait for a message in the other direction either.
            previous.send(&own).unwrap();
            early.wait().unwrap();
            holds(&first, 0);
        }
        _ => {
            previous.recv(&first).unwrap();
            holds(&first, 1);
            previous.send(&own).unwrap();
        }
    }
    // The ends of the pipeline are neighbors too.
    match rank {
        0 => previous.send(&own).map(drop).unwrap(),
        2 => {
            next.recv(&second).unwrap();
            holds(&second, 0);
        }
        _ => {}
    }
    mesh.world().barrier().unwrap();
}

/// Every rank posts both receives before it sends anything.
fn ring(world: Group) {
    let (rank, size) = (world.rank(), world.world_size());
    let shape = MeshShape::new(&[(Axis::Pp, size)]).unwrap();
    let mesh = Mesh::new(world, &shape).unwrap();
    let own = tensor(&mesh, rank);
    let (next, previous) = (mesh.next().unwrap(), mesh.previous().unwrap());
    let got = [next, previous].map(|neighbor| (neighbor, tensor(&mesh, 99)));
    for _ in 0..20 {
        let early = got.each_ref().map(|(neighbor, tensor)| neighbor.recv_async(tensor).unwrap());
        let sent = [next.send_async(&own).unwrap(), previous.send_async(&own).unwrap()];
        early.into_iter().chain(sent).for_each(|work| {
            work.wait().unwrap();
        });
        for (neighbor, tensor) in &got {
            holds(tensor, neighbor.rank());
            tensor.write::<f32>().unwrap().fill(99.0);
        }
    }
    mesh.world().barrier().unwrap();
}

#[test]
fn a_message_to_one_neighbor_never_waits_behind_anothers() {
    on_threads(3, neighbors);
    for transport in ["shm", "tcp"] {
        run("neighbors", transport, 3, &[0, 1, 2]);
    }
}

#[test]
fn neighbors_exchange_messages_in_rings_of_any_length() {
    for world in [2, 3, 4, 5] {
        on_threads(world, ring);
    }
    for transport in ["shm", "tcp", "hybrid"] {
        run("neighbors in a ring", transport, 4, &[0, 1, 2, 3]);
    }
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
        let folder = run("a rank dies", transport, 4, &[0, 1, 2]);
        let dump = |name: &str| {
            let text = std::fs::read_to_string(folder.path().join(name)).unwrap();
            let lines = text.lines().map(|line| serde_json::from_str(line).unwrap());
            lines.collect::<Vec<serde_json::Value>>()
        };
        // Rank 1 is the first of its group on the axis `dp`. The file tells of its other groups too.
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
