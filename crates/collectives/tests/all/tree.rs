//! The order of sums: every transport gives the bits of a balanced tree over the ranks.
//!
//! Ranks are threads here, whatever connects them. Inputs differ so much in magnitude that another order of
//! summation changes the result.

use std::any::{Any, TypeId};
use std::collections::BTreeMap;
use std::net::TcpListener;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::limit::within_limit;
use crate::ranks::each;
use half::{bf16, f16};
use paceline_collectives::{Group, GroupOptions, ReduceElement, ReduceOp, Rendezvous};
use paceline_memory::{Allocator, Category, Tensor};

/// Lengths that leave some ranks without a share, and those that need several blocks.
const LENGTHS: [usize; 6] = [1, 3, 17, 1025, 5003, 20_011];

/// What connects the ranks.
#[derive(Clone, Copy, Debug)]
enum Transport {
    Thread,
    Shm,
    Tcp,
    /// With this many ranks per host.
    Hybrid(usize),
}

/// An element type, and the type in which its values are combined.
trait Value: ReduceElement {
    type Running: Copy;
    fn random(bits: u64) -> Self;
    fn widen(self) -> Self::Running;
    fn combine(op: ReduceOp, x: Self::Running, y: Self::Running) -> Self::Running;
    fn finish(op: ReduceOp, x: Self::Running, world: usize) -> Self;
    fn bits(self) -> u64;
}

/// Between -1 and 1, times a power of two from 2^-12 to 2^11.
fn float(bits: u64) -> f64 {
    let magnitude = 2f64.powi((bits % 24) as i32 - 12);
    ((bits >> 11) as f64 / 2f64.powi(52) - 1.0) * magnitude
}

macro_rules! float_value {
    ($($float:ty, $running:ty, $of:expr, $widen:expr, $narrow:expr;)*) => {$(
        impl Value for $float {
            type Running = $running;
            fn random(bits: u64) -> Self {
                $of(float(bits))
            }
            fn widen(self) -> $running {
                $widen(self)
            }
            fn combine(op: ReduceOp, x: $running, y: $running) -> $running {
                match op {
                    ReduceOp::Sum | ReduceOp::Mean => x + y,
                    ReduceOp::Product => x * y,
                    ReduceOp::Min => x.min(y),
                    ReduceOp::Max => x.max(y),
                }
            }
            fn finish(op: ReduceOp, x: $running, world: usize) -> Self {
                $narrow(if op == ReduceOp::Mean { x / world as $running } else { x })
            }
            fn bits(self) -> u64 {
                self.to_bits().into()
            }
        }
    )*};
}
float_value!(
    f32, f32, |x| x as f32, |x| x, |x| x;
    f64, f64, |x| x, |x| x, |x| x;
    f16, f32, f16::from_f64, f16::to_f32, f16::from_f32;
    bf16, f32, bf16::from_f64, bf16::to_f32, bf16::from_f32;
);

macro_rules! integer_value {
    ($($integer:ty),*) => {$(
        impl Value for $integer {
            type Running = $integer;
            fn random(bits: u64) -> Self {
                bits as $integer
            }
            fn widen(self) -> Self {
                self
            }
            fn combine(op: ReduceOp, x: Self, y: Self) -> Self {
                match op {
                    ReduceOp::Sum | ReduceOp::Mean => x.wrapping_add(y),
                    ReduceOp::Product => x.wrapping_mul(y),
                    ReduceOp::Min => x.min(y),
                    ReduceOp::Max => x.max(y),
                }
            }
            fn finish(op: ReduceOp, x: Self, world: usize) -> Self {
                if op == ReduceOp::Mean { x / world as $integer } else { x }
            }
            fn bits(self) -> u64 {
                self as u64
            }
        }
    )*};
}
integer_value!(i32, i64, u8);

/// The input of `rank` at `index`.
fn input<T: Value>(rank: usize, index: usize) -> T {
    // SplitMix64.
    let mut x = ((rank as u64) << 32 | index as u64).wrapping_add(0x9E37_79B9_7F4A_7C15);
    x = (x ^ x >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ x >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    T::random(x ^ x >> 31)
}

/// The tree over these ranks, by its definition: the left half has the largest power of two below their number.
fn tree<T: Value>(op: ReduceOp, ranks: std::ops::Range<usize>, index: usize) -> T::Running {
    if ranks.len() == 1 {
        return input::<T>(ranks.start, index).widen();
    }
    let middle = ranks.start + ranks.len().next_power_of_two() / 2;
    let (left, right) = (ranks.start..middle, middle..ranks.end);
    T::combine(op, tree::<T>(op, left, index), tree::<T>(op, right, index))
}

/// The results of reductions, by type, operation, number of ranks and length.
type Known = BTreeMap<(TypeId, &'static str, usize, usize), Arc<dyn Any + Send + Sync>>;

/// The result of a reduction. The first rank that asks computes it for all.
fn reference<T: Value>(op: ReduceOp, world: usize, len: usize) -> Arc<Vec<T>> {
    static KNOWN: Mutex<Known> = Mutex::new(BTreeMap::new());
    let mut known = KNOWN.lock().unwrap();
    let of = known.entry((TypeId::of::<T>(), op.name(), world, len)).or_insert_with(|| {
        let value = |index| T::finish(op, tree::<T>(op, 0..world, index), world);
        Arc::new((0..len).map(value).collect::<Vec<T>>())
    });
    of.clone().downcast().expect("the entry of a type has that type")
}

#[track_caller]
fn same_bits<T: Value>(got: &[T], want: &[T], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (index, (x, y)) in got.iter().zip(want).enumerate() {
        assert_eq!(x.bits(), y.bits(), "{what}, {} of {}, element {index}", T::DTYPE, want.len());
    }
}

fn on_ranks<R: Send>(
    transport: Transport,
    world: usize,
    body: impl Fn(Group) -> R + Sync,
) -> Vec<R> {
    // As long as the listener holds the port, no other test has its number.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let name = format!("paceline-tree-{}", listener.local_addr().unwrap().port());
    let mut options = GroupOptions::for_local_ranks(world);
    options.timeout = Duration::from_secs(240);
    let of_rank = |rank: usize| {
        let rendezvous = Rendezvous::by_name(name.as_str(), "right");
        let options = options.clone();
        match transport {
            Transport::Thread => unreachable!("threads form their groups together"),
            Transport::Shm => Group::shm(&rendezvous, rank, world, options).unwrap(),
            Transport::Tcp => Group::tcp(&rendezvous, "127.0.0.1", rank, world, options).unwrap(),
            Transport::Hybrid(local) => {
                Group::hybrid(&rendezvous, "127.0.0.1", rank, world, local, options).unwrap()
            }
        }
    };
    match transport {
        Transport::Thread => each(Group::threads_with(world, options.clone()).unwrap(), body),
        _ => each(0..world, |rank| body(of_rank(rank))),
    }
}

/// Every reduction of one type and length, on slices and on memory that all ranks can reach.
fn reductions<T: Value>(group: &Group, op: ReduceOp, len: usize) {
    let (rank, world) = (group.rank(), group.world_size());
    let want = reference::<T>(op, world, len);
    let own: Vec<T> = (0..len).map(|index| input(rank, index)).collect();
    let what = |name: &str| format!("{name} ({}) on {world} ranks", op.name());

    let mut slice = own.clone();
    group.all_reduce_slice(&mut slice, op).unwrap();
    same_bits(&slice, &want, &what("all_reduce of a slice"));
    let buffer =
        group.allocate(&Allocator::new(), len * size_of::<T>(), Category::Gradients).unwrap();
    let data = Tensor::new(buffer, 0, T::DTYPE, [len]).unwrap();
    let restore = || data.write::<T>().unwrap().copy_from_slice(&own);
    restore();
    group.all_reduce(&data, op).unwrap();
    same_bits(&data.read::<T>().unwrap(), &want, &what("all_reduce"));

    let root = len % world;
    restore();
    group.reduce(&data, op, root).unwrap();
    let at_root = if rank == root { &want[..] } else { &own };
    same_bits(&data.read::<T>().unwrap(), at_root, &what("reduce"));

    // Shares of uneven length, of which some are empty.
    let start = |rank: usize| len * rank * rank / (world * world);
    let share = start(rank)..start(rank + 1);
    let private = Allocator::new().tensor(T::DTYPE, [share.len()], Category::Gradients).unwrap();
    restore();
    group.reduce_scatter(&data, &private, op).unwrap();
    let apart = private.read::<T>().unwrap();
    same_bits(&apart, &want[share.clone()], &what("reduce_scatter to private memory"));
    let in_place = data.slice(share.clone()).unwrap();
    group.reduce_scatter(&data, &in_place, op).unwrap();
    same_bits(&in_place.read::<T>().unwrap(), &want[share], &what("reduce_scatter in place"));
}

/// All types and operations. Long messages only with sums and means, to save time.
fn every_reduction(group: &Group) {
    for len in LENGTHS {
        for op in ReduceOp::ALL {
            if len > 5003 && !matches!(op, ReduceOp::Sum | ReduceOp::Mean) {
                continue;
            }
            reductions::<f32>(group, op, len);
            reductions::<bf16>(group, op, len);
            if len > 5003 && op == ReduceOp::Mean {
                continue;
            }
            reductions::<f64>(group, op, len);
            reductions::<f16>(group, op, len);
            reductions::<i32>(group, op, len);
            reductions::<i64>(group, op, len);
            reductions::<u8>(group, op, len);
        }
    }
    // Several blocks, and several windows of staged data.
    reductions::<f32>(group, ReduceOp::Mean, 600_011);
}

fn check(transport: Transport, worlds: impl IntoIterator<Item = usize> + Send + 'static) {
    within_limit(move || {
        for world in worlds {
            on_ranks(transport, world, |group| every_reduction(&group));
        }
    });
}

#[test]
fn threads_sum_as_a_tree() {
    check(Transport::Thread, (1..=9).chain([16]));
}

#[test]
fn shared_memory_sums_as_a_tree() {
    check(Transport::Shm, [2, 3, 5, 6, 7, 9, 16]);
}

#[test]
fn tcp_sums_as_a_tree() {
    check(Transport::Tcp, [2, 3, 5, 6, 7, 9, 16]);
}

#[test]
fn two_and_three_hosts_sum_as_a_tree() {
    for local in 1..=4 {
        check(Transport::Hybrid(local), [2 * local, 3 * local]);
    }
}

/// As many ranks as need two words of bits.
#[test]
fn seventy_ranks_sum_as_a_tree() {
    within_limit(|| {
        for transport in [Transport::Thread, Transport::Shm] {
            on_ranks(transport, 70, |group| {
                for len in [1, 1025] {
                    reductions::<f32>(&group, ReduceOp::Sum, len);
                    reductions::<u8>(&group, ReduceOp::Mean, len);
                }
            });
        }
    });
}

/// Every rank holds the sum of the data of ranks `2 i` and `2 i + 1` of a group of twice as many.
#[test]
fn neighbors_that_are_added_beforehand_leave_the_bits_alone() {
    const LEN: usize = 5003;
    fn check<T: Value>(transport: Transport, group: &Group, op: ReduceOp, both: usize) {
        let rank = group.rank();
        let of_pair = |index| {
            T::combine(
                op,
                input::<T>(2 * rank, index).widen(),
                input::<T>(2 * rank + 1, index).widen(),
            )
        };
        let mut data: Vec<T> = (0..LEN).map(|index| T::finish(op, of_pair(index), 1)).collect();
        group.all_reduce_slice(&mut data, op).unwrap();
        same_bits(&data, &reference::<T>(op, both, LEN), &format!("{transport:?}, {both} shares"));
    }
    within_limit(|| {
        for both in [2, 4, 6, 8, 12] {
            let mut transports = vec![Transport::Thread, Transport::Shm, Transport::Tcp];
            transports.extend(
                [2, 3]
                    .into_iter()
                    .filter(|hosts| (both / 2usize).is_multiple_of(*hosts))
                    .map(|hosts| Transport::Hybrid(both / 2 / hosts)),
            );
            for transport in transports {
                on_ranks(transport, both / 2, |group| {
                    for op in [ReduceOp::Sum, ReduceOp::Product] {
                        check::<f32>(transport, &group, op, both);
                        check::<f64>(transport, &group, op, both);
                        check::<i64>(transport, &group, op, both);
                    }
                });
            }
        }
    });
}
