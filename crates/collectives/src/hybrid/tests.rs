//! Checks that hosts send each other as many bytes as the cost model says, and that a dead rank is known.

use std::net::TcpListener;

use paceline_memory::DType;
use paceline_rendezvous::Rendezvous;

use crate::engine::Engine;
use crate::{Cost, Group, GroupOptions, OpKind, ReduceOp};

/// Runs `body` on each rank of `hosts` hosts of `local` ranks. Returns what the ranks return.
fn on_hosts<R: Send>(hosts: usize, local: usize, body: impl Fn(Group) -> R + Sync) -> Vec<R> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let name = format!("paceline-hosts-{}", listener.local_addr().unwrap().port());
    let world = hosts * local;
    let on_rank = |rank: usize| {
        let rendezvous = Rendezvous::by_name(name.as_str(), "secret");
        let options = GroupOptions::for_local_ranks(world);
        body(Group::hybrid(&rendezvous, "127.0.0.1", rank, world, local, options).unwrap())
    };
    std::thread::scope(|scope| {
        let on_rank = &on_rank;
        let ranks: Vec<_> = (0..world).map(|rank| scope.spawn(move || on_rank(rank))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// The bytes that the busiest rank sends or receives for a reduction of `elems` f32, in its busier direction.
fn moved_bytes(hosts: usize, local: usize, kind: OpKind, elems: usize) -> u64 {
    let moved = on_hosts(hosts, local, |group| {
        let Engine::Hybrid(hybrid) = group.engine() else { unreachable!("it is hybrid") };
        let posted = || hybrid.tcp.inner().wires.posted_bytes();
        let before = posted();
        let data = group.copy_of(&vec![1f32; elems]).unwrap();
        match kind {
            OpKind::Reduce => group.reduce(&data, ReduceOp::Sum, 0).unwrap(),
            OpKind::ReduceScatter => {
                let share = group.copy_of(&vec![0f32; elems / group.world_size()]).unwrap();
                group.reduce_scatter(&data, &share, ReduceOp::Sum).unwrap()
            }
            _ => group.all_reduce(&data, ReduceOp::Sum).unwrap(),
        };
        let after = posted();
        (after[0] - before[0]).max(after[1] - before[1])
    });
    moved.into_iter().max().unwrap()
}

/// NCCL waits for all ranks, and asks the engine whether one of them has died.
#[test]
fn a_dead_rank_of_the_same_host_is_known() {
    let all_see = std::sync::Barrier::new(4);
    let found = on_hosts(2, 2, |group| {
        if group.rank() == 3 {
            group.engine().abandon();
        }
        all_see.wait();
        let gone = group.engine().gone();
        all_see.wait();
        gone
    });
    assert_eq!(found, [None, None, Some(3), Some(3)]);
}

#[test]
fn hosts_send_what_the_cost_model_says() {
    for (hosts, local, num_nodes) in [(2, 1, 1), (2, 2, 1), (3, 2, 1), (2, 3, 2), (3, 4, 1)] {
        // Divisible by the number of ranks, and several blocks long.
        let elems = 36 * 40_000;
        for kind in [OpKind::AllReduce, OpKind::Reduce, OpKind::ReduceScatter] {
            let bytes = 4 * elems as u64;
            let cost = Cost::between_hosts(kind, hosts, local, bytes, DType::F32).unwrap();
            let what = format!("{kind:?} on {hosts} hosts of {local}");
            assert_eq!(moved_bytes(hosts, local, kind, elems), cost.bytes, "{what}");
            let share = bytes * (hosts as u64 - 1) / (hosts * local) as u64;
            let headers = 88 * (local * (hosts - 1)) as u64;
            let results = if kind == OpKind::ReduceScatter { 0 } else { share };
            assert_eq!(cost.bytes, headers + num_nodes * share + results, "{what}");
        }
    }
}

#[test]
fn a_short_slice_has_one_owner() {
    for (hosts, local, num_nodes) in [(2, 2, 1), (3, 2, 1), (2, 3, 2)] {
        let bytes = 4 * 3600;
        let cost = Cost::between_hosts(OpKind::AllReduce, hosts, local, bytes, DType::F32).unwrap();
        let what = format!("{hosts} hosts of {local}");
        assert_eq!(moved_bytes(hosts, local, OpKind::AllReduce, 3600), cost.bytes, "{what}");
        let headers = 88 * (local * (hosts - 1)) as u64;
        let partial = num_nodes * (hosts as u64 - 1) * bytes / local as u64;
        assert_eq!(cost.bytes, headers + partial, "{what}");
    }
}

#[test]
fn partial_sums_of_16_bit_floats_are_twice_as_long() {
    let of = |dtype| Cost::between_hosts(OpKind::ReduceScatter, 2, 2, 4000, dtype).unwrap();
    assert_eq!(of(DType::F32), Cost { steps: 2, bytes: 176 + 1000 });
    assert_eq!(of(DType::BF16), Cost { steps: 2, bytes: 176 + 2000 });
    let all = Cost::between_hosts(OpKind::AllReduce, 2, 2, 4_000_000, DType::BF16);
    assert_eq!(all, Some(Cost { steps: 3, bytes: 176 + 3_000_000 }));
    assert_eq!(Cost::between_hosts(OpKind::Broadcast, 2, 2, 4000, DType::F32), None);
    let single = Cost::between_hosts(OpKind::AllReduce, 1, 4, 4000, DType::F32);
    assert_eq!(single, Some(Cost { steps: 0, bytes: 0 }));
}
