//! Operations on the memory of cards, by NCCL, on cards that may be emulated: the bits of the host's transports, and what
//! becomes of mistakes.
//!
//! Without a card each test says so and passes, unless `PACELINE_CARD=1`.

mod ranks;

use std::time::Duration;

use paceline_collectives::{CollectiveError, Group, GroupOptions, NcclOrder, ReduceOp};
use paceline_cuda::nccl::{Communicator, UniqueId};
use paceline_cuda::{Card, CudaError};
use paceline_emulated_card::for_tests::is_ready;
use paceline_memory::{
    Accelerator, Allocator, Category, DType, Element, GraphPool, GraphedWork, Tensor,
};

/// The most ranks of these tests, each with a card of its own.
const CARDS: usize = 5;

/// Whether there are cards for `ranks` ranks, and NCCL.
fn has_cards(ranks: usize) -> bool {
    // Tests of this file run in one process, whose driver reads this once.
    static CARDS_SET: std::sync::Once = std::sync::Once::new();
    CARDS_SET.call_once(|| {
        // SAFETY: the first test to come sets it, and no other thread of this program reads the environment by then but
        // through the standard library, which locks it.
        unsafe { std::env::set_var("PACELINE_EMULATED_CARDS", CARDS.to_string()) };
    });
    if !is_ready() {
        return false;
    }
    let count = paceline_cuda::driver::count().unwrap_or_default();
    let found = paceline_cuda::nccl::version();
    if count < ranks || found.is_err() {
        println!("skipped: {count} cards for {ranks} ranks; NCCL: {found:?}");
    }
    count >= ranks && found.is_ok()
}

/// Runs a body on each of some ranks that are threads, with memory of a card of its own.
fn on_cards(world: usize, order: NcclOrder, body: impl Fn(Group, Allocator) + Sync) {
    let timeout = Duration::from_secs(60);
    let options = GroupOptions { timeout, ..GroupOptions::for_local_ranks(world) };
    ranks::each(Group::threads_with(world, options).unwrap(), |group| {
        let memory = of_card(group.rank());
        group.use_nccl(&memory, order).unwrap();
        body(group, memory);
    });
}

fn of_card(index: usize) -> Allocator {
    let accelerator = Accelerator::cuda(Card::open(index).unwrap());
    Allocator::on(&accelerator.stream("compute").unwrap())
}

#[test]
fn a_rank_that_never_joins_is_waited_for_within_a_limit() {
    if !has_cards(1) {
        return;
    }
    let (card, id) = (Card::open(0).unwrap(), UniqueId::new().unwrap());
    let limit = Duration::from_millis(50);
    let error = Communicator::join(&card, id, (0, 2), limit).unwrap_err();
    assert!(matches!(error, CudaError::Late { .. }), "{error}");
    assert!(error.to_string().contains("other ranks did not answer"), "{error}");
    // The card goes on.
    let id = UniqueId::new().unwrap();
    Communicator::join(&card, id, (0, 1), Duration::from_secs(60)).unwrap();
    let memory = of_card(0);
    let data = tensor::<f32>(&memory, 10, 0);
    assert_eq!(bits::<f32>(&data).len(), 10);
}

/// Elements that differ between ranks, some of them NaN, infinite or at the ends of their type.
trait Sample: Element + PartialEq + std::fmt::Debug {
    fn at(index: usize, rank: usize) -> Self;
    fn bits(self) -> u64;
}

fn mixed(index: usize, rank: usize) -> u64 {
    let seed = (index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let seed = seed.wrapping_add((rank as u64).wrapping_mul(0xbf58_476d_1ce4_e5b9));
    seed.rotate_left(31).wrapping_mul(0x94d0_49bb_1331_11eb)
}

macro_rules! samples {
    ($($ty:ty: $make:expr, $bits:expr;)*) => {$(
        impl Sample for $ty {
            fn at(index: usize, rank: usize) -> Self {
                $make(mixed(index, rank))
            }
            fn bits(self) -> u64 {
                $bits(self)
            }
        }
    )*};
}
samples! {
    f32: |x: u64| (x >> 40) as f32 / 1000.0 - 7000.0, |x: f32| u64::from(x.to_bits());
    f64: |x: u64| (x >> 11) as f64 / 1e12 - 4e3, |x: f64| x.to_bits();
    half::f16: |x: u64| half::f16::from_f32((x >> 48) as f32 / 1000.0 - 30.0), |x: half::f16| u64::from(x.to_bits());
    half::bf16: |x: u64| half::bf16::from_f32((x >> 48) as f32 / 10.0 - 3000.0), |x: half::bf16| u64::from(x.to_bits());
    i32: |x: u64| (x >> 32) as i32, |x: i32| x as u64;
    i64: |x: u64| x as i64, |x: i64| x as u64;
    u8: |x: u64| (x >> 56) as u8, u64::from;
}

fn tensor<T: Sample>(memory: &Allocator, len: usize, rank: usize) -> Tensor {
    let tensor = memory.tensor(T::DTYPE, [len], Category::Gradients).unwrap();
    let fill = |data: &mut [T]| {
        data.iter_mut().enumerate().for_each(|(index, x)| *x = T::at(index, rank));
    };
    tensor.overwrite::<T, _>(fill).unwrap();
    tensor
}

fn bits<T: Sample>(tensor: &Tensor) -> Vec<u64> {
    let host = tensor.to_host().unwrap();
    host.read::<T>().unwrap().iter().map(|x| x.bits()).collect()
}

/// All operations on tensors of a memory, and what they leave behind.
fn all_operations<T: Sample>(group: &Group, memory: &Allocator, len: usize) -> Vec<Vec<u64>> {
    let (rank, world) = (group.rank(), group.world_size());
    let mut results = Vec::new();
    let fresh = |len| tensor::<T>(memory, len, rank);
    for op in ReduceOp::ALL {
        let data = fresh(len);
        group.all_reduce(&data, op).unwrap();
        results.push(bits::<T>(&data));
        // Shares differ in length, the last one is empty if it can be.
        let share = if rank + 1 < world { len / world + rank } else { 0 };
        let whole: usize = (0..world - 1).map(|rank| len / world + rank).sum();
        let (whole, share) = if world == 1 { (len, len) } else { (whole, share) };
        let (data, part) = (fresh(whole), fresh(share));
        group.reduce_scatter(&data, &part, op).unwrap();
        results.push(bits::<T>(&part));
        let gathered = fresh(whole);
        group.all_gather(&part, &gathered).unwrap();
        results.push(bits::<T>(&gathered));
        let (data, into) = (fresh(len), fresh(len));
        group.reduce_into(&data, Some(&into), op, world - 1).unwrap();
        results.push(bits::<T>(&into));
    }
    // In place, with equal shares.
    let data = fresh(world * len);
    let part = data.slice(rank * len..(rank + 1) * len).unwrap();
    group.reduce_scatter(&data, &part, ReduceOp::Sum).unwrap();
    group.all_gather(&part, &data).unwrap();
    results.push(bits::<T>(&data));
    let data = fresh(len);
    group.broadcast(&data, world / 2).unwrap();
    results.push(bits::<T>(&data));
    let (share, whole) = (fresh(len + rank), fresh((0..world).map(|rank| len + rank).sum()));
    group.gather(&share, Some(&whole), 0).unwrap();
    results.push(bits::<T>(&whole));
    group.scatter(Some(&whole), &share, 0).unwrap();
    results.push(bits::<T>(&share));
    let (sent, received) = (fresh(world * len), fresh(world * len));
    group.all_to_all(&sent, &received).unwrap();
    results.push(bits::<T>(&received));
    let next = (rank + 1) % world;
    let before = (rank + world - 1) % world;
    let (sent, received) = (fresh(len), fresh(len));
    group.send_recv(&sent, next, &received, before).unwrap();
    results.push(bits::<T>(&received));
    if world > 1 && rank < 2 {
        match rank {
            0 => group.send(&sent, 1).unwrap(),
            _ => group.recv(&received, 0).unwrap(),
        };
        results.push(bits::<T>(&received));
    }
    results
}

fn same_as_on_the_host<T: Sample>(world: usize, len: usize) {
    on_cards(world, NcclOrder::Tree, |group, memory| {
        let on_card = all_operations::<T>(&group, &memory, len);
        let on_host = all_operations::<T>(&group, &Allocator::new(), len);
        for (number, (card, host)) in on_card.iter().zip(&on_host).enumerate() {
            assert_eq!(card, host, "result {number} of {} on {world} ranks", T::DTYPE);
        }
    });
}

#[test]
fn all_operations_have_the_bits_of_the_host() {
    for world in [1, 2, 3, 5] {
        if !has_cards(world) {
            return;
        }
        same_as_on_the_host::<f32>(world, 300);
    }
    same_as_on_the_host::<f64>(3, 7);
    same_as_on_the_host::<half::f16>(3, 300);
    same_as_on_the_host::<half::bf16>(3, 300);
    same_as_on_the_host::<i32>(3, 70);
    same_as_on_the_host::<i64>(3, 70);
    same_as_on_the_host::<u8>(3, 300);
}

/// Its sums are those of other orders, up to their rounding.
#[test]
fn the_library_s_own_order_is_near() {
    if !has_cards(3) {
        return;
    }
    on_cards(3, NcclOrder::Ring, |group, memory| {
        let (rank, host) = (group.rank(), Allocator::new());
        for op in ReduceOp::ALL {
            let (on_card, on_host) =
                (tensor::<f32>(&memory, 300, rank), tensor::<f32>(&host, 300, rank));
            group.all_reduce(&on_card, op).unwrap();
            group.all_reduce(&on_host, op).unwrap();
            let on_card = on_card.to_host().unwrap();
            let (a, b) = (on_card.read::<f32>().unwrap(), on_host.read::<f32>().unwrap());
            for (a, b) in a.iter().zip(b.iter()) {
                let scale = if op == ReduceOp::Product { b.abs() } else { 3e4 };
                assert!((a - b).abs() <= 3.0 * f32::EPSILON * scale, "{}: {a} and {b}", op.name());
            }
        }
        assert_eq!(group.nccl_order(), Some(NcclOrder::Ring));
    });
}

#[test]
fn groups_within_groups_use_it_too() {
    if !has_cards(4) {
        return;
    }
    on_cards(4, NcclOrder::Tree, |group, memory| {
        let pair = group.split(Some(group.rank() as u32 / 2)).unwrap().unwrap();
        assert_eq!(pair.nccl_order(), Some(NcclOrder::Tree));
        let data = memory.tensor(DType::F32, [10], Category::Gradients).unwrap();
        data.overwrite::<f32, _>(|data| data.fill(group.rank() as f32)).unwrap();
        // Two groups at the same time, on one card each.
        let first = pair.all_reduce_async(&data, ReduceOp::Sum).unwrap();
        first.wait().unwrap();
        group.all_reduce_async(&data, ReduceOp::Sum).unwrap().wait().unwrap();
        let sum = data.to_host().unwrap();
        assert_eq!(*sum.read::<f32>().unwrap(), [12.0; 10]);
    });
}

#[test]
fn calls_that_differ_are_told_instead_of_waiting() {
    if !has_cards(2) {
        return;
    }
    on_cards(2, NcclOrder::Tree, |group, memory| {
        let data = tensor::<f32>(&memory, 10 + group.rank(), 0);
        let error = group.all_reduce(&data, ReduceOp::Sum).unwrap_err();
        let words = error.to_string();
        assert!(matches!(error, CollectiveError::Mismatch { .. }), "{words}");
        assert!(words.contains("all_reduce(f32, 10, sum)") && words.contains("11"), "{words}");
    });
    on_cards(2, NcclOrder::Tree, |group, memory| {
        let data = tensor::<f32>(&memory, 10 + group.rank(), 0);
        let outcome = match group.rank() {
            0 => group.send(&data, 1),
            _ => group.recv(&data, 0),
        };
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains("elements, and this rank has"), "{error}");
    });
    // One of the calls has blocks, which the ranks show each other too.
    on_cards(2, NcclOrder::Tree, |group, memory| {
        let (data, received) = (tensor::<f32>(&memory, 10, 0), tensor::<f32>(&memory, 10, 0));
        let outcome = match group.rank() {
            0 => group.all_to_all(&data, &received),
            _ => group.all_reduce(&data, ReduceOp::Sum),
        };
        let words = outcome.unwrap_err().to_string();
        let calls = ["all_to_all(f32, 10 -> 10)", "all_reduce(f32, 10, sum)"];
        assert!(calls.iter().all(|call| words.contains(call)), "{words}");
    });
    // One rank's data is on the host.
    on_cards(2, NcclOrder::Tree, |group, memory| {
        let memory = if group.rank() == 0 { memory } else { Allocator::new() };
        let error = group.all_reduce(&tensor::<f32>(&memory, 10, 0), ReduceOp::Sum).unwrap_err();
        assert!(matches!(error, CollectiveError::Mismatch { .. }), "{error}");
    });
}

#[test]
fn a_rank_that_is_gone_or_late_ends_the_wait() {
    if !has_cards(2) {
        return;
    }
    on_cards(2, NcclOrder::Tree, |group, memory| {
        if group.rank() == 1 {
            return;
        }
        let error = group.all_reduce(&tensor::<f32>(&memory, 10, 0), ReduceOp::Sum).unwrap_err();
        let words = error.to_string();
        assert!(words.contains("rank 1") && words.contains("all_reduce #"), "{words}");
    });
}

/// Adds up over the ranks in work that is a graph from the third run on.
fn sum_in_graph(group: &Group, work: &mut GraphedWork<()>, data: &Tensor) {
    let sum = || group.all_reduce_async(data, ReduceOp::Sum)?.wait().map(drop);
    work.run(sum).unwrap();
}

#[test]
fn a_graph_adds_up_over_the_ranks_in_each_launch() {
    if !has_cards(3) {
        return;
    }
    for order in [NcclOrder::Tree, NcclOrder::Ring] {
        on_cards(3, order, |group, memory| {
            let mut work = GraphedWork::new(&GraphPool::new(&memory).unwrap());
            let data = tensor::<f32>(&memory, 1000, 0);
            assert!(group.is_capturable(&memory));
            for launch in 0..6 {
                let fill = |x: &mut [f32]| x.fill((group.rank() + launch as usize) as f32);
                data.overwrite::<f32, _>(fill).unwrap();
                if launch > 0 {
                    group.agree_on_graph(7, launch).unwrap();
                }
                sum_in_graph(&group, &mut work, &data);
                group.await_graph(&memory).unwrap();
                // A longer operation gets scratch memory of its own.
                let other = tensor::<f32>(&memory, 1000 * (1 + launch as usize), 0);
                group.all_reduce(&other, ReduceOp::Max).unwrap();
                let sums = data.to_host().unwrap();
                assert_eq!(sums.read::<f32>().unwrap()[..], [(3 + 3 * launch) as f32; 1000]);
            }
            // What is not captured goes on.
            group.all_reduce(&data, ReduceOp::Max).unwrap();
            let error = group.agree_on_graph(7, group.rank() as u32).unwrap_err().to_string();
            assert!(error.contains("barrier(before launch 1 of graph 7)"), "{error}");
        });
    }
}

#[test]
fn a_rank_that_does_not_launch_its_graph_ends_those_of_the_others() {
    if !has_cards(2) {
        return;
    }
    let timeout = Duration::from_secs(3);
    let options = GroupOptions { timeout, ..GroupOptions::for_local_ranks(2) };
    ranks::each(Group::threads_with(2, options).unwrap(), |group| {
        let memory = of_card(group.rank());
        group.use_nccl(&memory, NcclOrder::Tree).unwrap();
        let mut work = GraphedWork::new(&GraphPool::new(&memory).unwrap());
        let data = tensor::<f32>(&memory, 1000, 0);
        for launch in 0..5 {
            if launch > 0 {
                group.agree_on_graph(0, launch).unwrap();
            }
            if launch == 4 && group.rank() == 1 {
                return;
            }
            sum_in_graph(&group, &mut work, &data);
            let waited = group.await_graph(&memory);
            if launch < 4 {
                waited.unwrap();
                continue;
            }
            let error = waited.unwrap_err();
            assert!(matches!(error, CollectiveError::TimedOut { .. }), "{error}");
            let error = group.barrier().unwrap_err();
            assert!(matches!(error, CollectiveError::Broken { .. }), "{error}");
        }
    });
}

#[test]
fn ranks_that_share_a_card_are_told() {
    if !has_cards(2) {
        return;
    }
    ranks::each(Group::threads(2), |group| {
        let memory = of_card(0);
        let error = group.use_nccl(&memory, NcclOrder::Tree).unwrap_err().to_string();
        assert!(error.contains("ranks 0 and 1 share a card"), "{error}");
        // The group goes on through the host.
        let data = tensor::<f32>(&memory, 10, 0);
        group.all_reduce(&data, ReduceOp::Max).unwrap();
        let error = group.use_nccl(&Allocator::new(), NcclOrder::Tree).unwrap_err();
        assert!(error.to_string().contains("not that of a card"), "{error}");
    });
}
