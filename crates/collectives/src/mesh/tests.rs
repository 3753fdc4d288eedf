//! Which groups a mesh forms, and whether they work on shared memory in place.

use std::time::Duration;

use paceline_memory::{Allocator, Buffer, Category, DType, Tensor};
use paceline_rendezvous::Rendezvous;

use super::{Axis, Mesh, MeshShape};
use crate::{CollectiveError, Group, GroupOptions, ReduceOp};

fn options(world: usize) -> GroupOptions {
    GroupOptions { timeout: Duration::from_secs(60), ..GroupOptions::for_local_ranks(world) }
}

/// Runs `body` on ranks that are threads, but share memory as processes do: on `hosts` hosts.
fn on_ranks<R: Send>(world: usize, hosts: usize, body: impl Fn(Group) -> R + Sync) -> Vec<R> {
    let name = format!("paceline-test-{}", Rendezvous::fresh_secret().unwrap());
    let rendezvous = &Rendezvous::by_name(name, "secret");
    let rank = |rank: usize| {
        let options = options(world);
        body(match hosts {
            1 => Group::shm(rendezvous, rank, world, options).unwrap(),
            _ => {
                let local = world / hosts;
                Group::hybrid(rendezvous, "127.0.0.1", rank, world, local, options).unwrap()
            }
        })
    };
    std::thread::scope(|scope| {
        let rank = &rank;
        let ranks: Vec<_> = (0..world).map(|number| scope.spawn(move || rank(number))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn floats(buffer: &Buffer) -> Tensor {
    Tensor::new(buffer.clone(), 0, DType::F32, [buffer.len_bytes() / 4]).unwrap()
}

fn staged_bytes(group: &Group) -> u64 {
    group.shared().unwrap().staged_bytes()
}

/// Checks that the group adds up `data` in place. Every member contributes its number in the world.
fn adds_up_in_place(group: &Group, data: &Tensor) {
    let before = staged_bytes(group);
    add_up(group, data);
    assert_eq!(staged_bytes(group), before, "{} copies to its staging area", group.name());
}

fn add_up(group: &Group, data: &Tensor) {
    data.write::<f32>().unwrap().fill(group.outermost_rank(group.rank()) as f32);
    group.all_reduce(data, ReduceOp::Sum).unwrap();
    let sum = (0..group.world_size()).map(|rank| group.outermost_rank(rank)).sum::<usize>();
    assert!(data.read::<f32>().unwrap().iter().all(|&x| x == sum as f32), "{}", group.name());
    // The others have read the data, so this rank may fill the memory again.
    group.barrier().unwrap();
}

#[test]
fn an_axis_has_a_group_of_the_ranks_along_it() {
    let shape: MeshShape = "dp=2,shard=3".parse().unwrap();
    let worlds = Group::threads_with(6, options(6)).unwrap();
    std::thread::scope(|scope| {
        for world in worlds {
            let shape = &shape;
            scope.spawn(move || {
                let rank = world.rank();
                let mesh = Mesh::new(world, shape).unwrap();
                let place = [Axis::Dp, Axis::Shard].map(|axis| mesh.coordinate(axis));
                assert_eq!(place, [rank / 3, rank % 3]);
                let (dp, shard) = (mesh.group(Axis::Dp).unwrap(), mesh.group(Axis::Shard).unwrap());
                assert_eq!((dp.rank(), dp.world_size()), (rank / 3, 2));
                assert_eq!((shard.rank(), shard.world_size()), (rank % 3, 3));
                assert_eq!(dp.name(), format!("world/dp.{}", rank % 3));
                assert_eq!(shard.name(), format!("world/shard.{}", rank / 3));
                let ranks = |group: &Group| {
                    let own = group.rank();
                    assert_eq!(group.outermost_rank(own), rank);
                    (0..group.world_size())
                        .map(|rank| group.outermost_rank(rank))
                        .collect::<Vec<_>>()
                };
                assert_eq!(ranks(dp), [rank % 3, rank % 3 + 3]);
                let first = rank / 3 * 3;
                assert_eq!(ranks(shard), [first, first + 1, first + 2]);
                assert!(mesh.group(Axis::Pp).is_none());
                let mut sum = [rank as i64];
                dp.all_reduce_slice(&mut sum, ReduceOp::Sum).unwrap();
                assert_eq!(sum, [(2 * (rank % 3) + 3) as i64]);
                shard.all_reduce_slice(&mut sum, ReduceOp::Max).unwrap();
                assert_eq!(sum, [7]);
            });
        }
    });
}

/// The sequence numbers of the world's operations show that no message was exchanged to form the groups.
#[test]
fn an_axis_of_all_ranks_and_axes_of_one_rank_cost_nothing() {
    let shape: MeshShape = "tp=1,dp=2,shard=1".parse().unwrap();
    std::thread::scope(|scope| {
        for world in Group::threads_with(2, options(2)).unwrap() {
            let shape = &shape;
            scope.spawn(move || {
                let mesh = Mesh::new(world, shape).unwrap();
                let mut records = Vec::new();
                mesh.world().fresh_records(&mut records);
                assert!(records.is_empty(), "{records:?}");
                let dp = mesh.group(Axis::Dp).unwrap();
                assert_eq!((dp.number(), dp.name(), dp.world_size()), (0, "world", 2));
                for axis in [Axis::Shard, Axis::Tp] {
                    let group = mesh.group(axis).unwrap();
                    assert_eq!((group.rank(), group.world_size()), (0, 1));
                    group.all_reduce_slice(&mut [1f32], ReduceOp::Sum).unwrap();
                    assert_eq!(group.split(Some(0)).unwrap().unwrap().world_size(), 1);
                }
            });
        }
    });
}

#[test]
fn a_mesh_of_another_number_of_ranks_is_refused_on_every_rank() {
    for world in Group::threads_with(3, options(3)).unwrap() {
        let error = Mesh::new(world, &"dp=2,shard=2".parse().unwrap()).unwrap_err();
        assert!(matches!(error, CollectiveError::Mesh(_)), "{error}");
        assert_eq!(error.to_string(), "the mesh dp=2,shard=2 has 4 ranks, but the group has 3");
    }
}

#[test]
fn groups_of_all_axes_use_the_memory_of_the_world_in_place() {
    // With two hosts: an axis within hosts, an axis whose ranks share no memory, and an axis with two ranks on each host.
    for (world, hosts, shape) in
        [(8, 1, "dp=2,tp=2,pp=2"), (8, 2, "dp=2,tp=2,pp=2"), (8, 2, "dp=4,pp=2")]
    {
        on_ranks(world, hosts, |world| {
            let shape: MeshShape = shape.parse().unwrap();
            let early = world.allocate(&Allocator::new(), 400_000, Category::Gradients).unwrap();
            let mesh = Mesh::new(world, &shape).unwrap();
            // The groups also reach memory that is allocated after they have formed.
            let late = mesh.allocate(&Allocator::new(), 400_000, Category::Gradients).unwrap();
            for buffer in [early, late] {
                let data = floats(&buffer);
                for &(axis, size) in shape.axes() {
                    let group = mesh.group(axis).unwrap();
                    match group.shared() {
                        Some(_) => adds_up_in_place(group, &data),
                        None => assert_eq!((hosts, axis, size), (2, Axis::Dp, 2)),
                    }
                }
                mesh.world().barrier().unwrap();
            }
        });
    }
}

#[test]
fn groups_of_a_rank_keep_one_record() {
    std::thread::scope(|scope| {
        for world in Group::threads_with(4, options(4)).unwrap() {
            scope.spawn(move || {
                let mesh = Mesh::new(world, &"dp=2,shard=2".parse().unwrap()).unwrap();
                let (world, dp) = (mesh.world(), mesh.group(Axis::Dp).unwrap());
                let shard = mesh.group(Axis::Shard).unwrap();
                let mut records = Vec::new();
                world.fresh_records(&mut records);
                dp.barrier().unwrap();
                shard.barrier().unwrap();
                world.barrier().unwrap();
                dp.barrier().unwrap();
                records.clear();
                shard.fresh_records(&mut records);
                let groups: Vec<u32> = records.iter().map(|record| record.group).collect();
                let expected = [dp, shard, world, dp].map(Group::number);
                assert_eq!(groups, expected);
                assert_eq!(expected[2], 0);
                assert_eq!((records[0].seq, records[3].seq), (0, 1));
                // Each record is returned once, whichever group is asked.
                records.clear();
                world.fresh_records(&mut records);
                assert!(records.is_empty(), "{records:?}");
            });
        }
    });
}
