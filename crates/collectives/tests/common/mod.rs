//! What every transport must do. The tests of each transport run this.

use half::{bf16, f16};
use paceline_collectives::{Group, ReduceElement, ReduceOp};
use paceline_memory::{Allocator, Buffer, Category, DType, Element, Tensor};

pub const LENGTHS: [usize; 8] = [0, 1, 2, 3, 7, 100, 4096, 100_003];

/// An element type whose small integers are exact.
pub trait Exact: ReduceElement + PartialEq + std::fmt::Debug {
    fn of(x: i64) -> Self;
}

macro_rules! exact {
    ($($t:ty => $of:expr),* $(,)?) => {$(
        impl Exact for $t {
            fn of(x: i64) -> Self {
                $of(x)
            }
        }
    )*};
}
exact!(
    f32 => |x| x as f32,
    f64 => |x| x as f64,
    f16 => |x| f16::from_f32(x as f32),
    bf16 => |x| bf16::from_f32(x as f32),
    i64 => |x| x,
    i32 => |x| x as i32,
    u8 => |x| x as u8,
);

/// The input of a reduction repeats after 5 elements or 6, and so does its result. What is sent repeats after 100.
const PERIOD: usize = 300;

/// The input of `rank` at `index`: small enough that every result is exact in every type.
fn input(op: ReduceOp, world: usize, rank: usize, index: usize) -> i64 {
    let (r, i) = (rank as i64, index as i64);
    match op {
        ReduceOp::Sum | ReduceOp::Min | ReduceOp::Max => (r * 3 + i) % 5,
        // Three ranks of fifteen contribute a factor of 2, the others 1.
        ReduceOp::Product => 1 + i64::from((r + i) % 5 == 0),
        // The sum is a multiple of the number of ranks.
        ReduceOp::Mean => {
            let lean = i64::from(rank == 0) - i64::from(rank == world - 1);
            1 + i % 6 + lean
        }
    }
}

fn expected(op: ReduceOp, world: usize, index: usize) -> i64 {
    let all = (0..world).map(|rank| input(op, world, rank, index));
    match op {
        ReduceOp::Sum => all.sum(),
        ReduceOp::Mean => all.sum::<i64>() / world as i64,
        ReduceOp::Min => all.min().unwrap(),
        ReduceOp::Max => all.max().unwrap(),
        ReduceOp::Product => all.product(),
    }
}

/// What `rank` sends at `index` in operations that only move data.
fn sent(rank: usize, index: usize) -> i64 {
    ((rank * 31 + index * 7) % 100) as i64
}

/// Where the ragged shares of `len` elements begin; early ones are short, and some are empty.
fn starts(len: usize, world: usize) -> Vec<usize> {
    (0..=world).map(|rank| len * rank * rank / (world * world)).collect()
}

fn vector<T: Exact>(len: usize, x: impl Fn(usize) -> i64) -> Vec<T> {
    (0..len).map(|index| T::of(x(index))).collect()
}

/// The vector whose elements repeat after [`PERIOD`].
fn repeated<T: Exact>(len: usize, x: impl Fn(usize) -> i64) -> Vec<T> {
    let mut elements = vector(PERIOD, x).repeat(len.div_ceil(PERIOD));
    elements.truncate(len);
    elements
}

#[track_caller]
fn check<T: Exact>(got: &[T], what: &str, want: &[T]) {
    if got != want {
        let index = got.iter().zip(want).position(|(got, want)| got != want);
        let (x, want) = (index.map(|i| got[i]), index.map(|i| want[i]));
        let (dtype, len) = (T::DTYPE, got.len());
        panic!("{what}, {dtype} of {len}, element {index:?}: {x:?} instead of {want:?}");
    }
}

struct Area {
    buffer: Buffer,
    used_bytes: std::cell::Cell<usize>,
}

impl Area {
    fn put<T: Exact>(&self, contents: &[T]) -> Tensor {
        let start = self.used_bytes.get();
        self.used_bytes.set((start + size_of_val(contents)).next_multiple_of(64));
        let tensor = Tensor::new(self.buffer.clone(), start, T::DTYPE, [contents.len()]).unwrap();
        tensor.write::<T>().unwrap().copy_from_slice(contents);
        tensor
    }
}

/// A tensor that no peer can reach.
pub fn private<T: Element>(contents: &[T]) -> Tensor {
    let memory = Allocator::new();
    let tensor = memory.tensor(T::DTYPE, [contents.len()], Category::Gradients).unwrap();
    tensor.write::<T>().unwrap().copy_from_slice(contents);
    tensor
}

pub fn read<T: Element>(tensor: &Tensor) -> Vec<T> {
    tensor.read::<T>().unwrap().to_vec()
}

/// Every operation on every length with elements of one type: on slices, on tensors that peers can reach and on tensors that
/// they cannot, blocking and asynchronous, in place and not in place.
pub fn every_operation<T: Exact>(group: &Group) {
    let allocator = Allocator::new();
    let longest = LENGTHS.into_iter().max().unwrap();
    let bytes = 4 * (longest + 64) * size_of::<T>();
    let buffer = group.allocate(&allocator, bytes, Category::Gradients).unwrap();
    let area = Area { buffer, used_bytes: 0.into() };
    for len in LENGTHS {
        for op in ReduceOp::ALL {
            area.used_bytes.set(0);
            reductions::<T>(group, &area, len, op);
        }
        area.used_bytes.set(0);
        copies::<T>(group, &area, len);
        area.used_bytes.set(0);
        pairs::<T>(group, &area, len);
    }
}

fn reductions<T: Exact>(group: &Group, area: &Area, len: usize, op: ReduceOp) {
    let (rank, world) = (group.rank(), group.world_size());
    let root = len % world;
    let own = repeated::<T>(len, |i| input(op, world, rank, i));
    let want = repeated::<T>(len, |i| expected(op, world, i));

    let mut slice = own.clone();
    group.all_reduce_slice(&mut slice, op).unwrap();
    check(&slice, "all_reduce of a slice", &want);
    let (data, result) = (area.put(&own), area.put(&own));
    let times = group.all_reduce_async(&data, op).unwrap().wait().unwrap();
    check(&read::<T>(&data), "all_reduce", &want);
    assert!(times.submitted_ns <= times.started_ns);
    assert!(times.started_ns <= times.present_ns);
    assert!(times.present_ns <= times.finished_ns);
    data.write::<T>().unwrap().copy_from_slice(&own);
    group.all_reduce_into(&data, &result, op).unwrap();
    check(&read::<T>(&result), "all_reduce_into", &want);
    check(&read::<T>(&data), "the input of all_reduce_into", &own);

    let at_root = |what, got: &[T]| {
        if rank == root { check(got, what, &want) } else { check(got, what, &own) }
    };
    let unreachable = private(&own);
    group.reduce(&unreachable, op, root).unwrap();
    at_root("reduce of private memory", &read::<T>(&unreachable));
    group.reduce(&data, op, root).unwrap();
    at_root("reduce", &read::<T>(&data));
    data.write::<T>().unwrap().copy_from_slice(&own);
    group.reduce_into(&data, (rank == root).then_some(&result), op, root).unwrap();
    check(&read::<T>(&data), "the input of reduce_into", &own);
    if rank == root {
        check(&read::<T>(&result), "reduce_into", &want);
    }

    let starts = starts(len, world);
    let (begin, end) = (starts[rank], starts[rank + 1]);
    let of_share = &want[begin..end];
    let empty = vec![T::of(0); end - begin];
    let share = private(&empty);
    group.reduce_scatter(&private(&own), &share, op).unwrap();
    check(&read::<T>(&share), "reduce_scatter of private memory", of_share);
    let share = area.put(&empty);
    group.reduce_scatter(&data, &share, op).unwrap();
    check(&read::<T>(&share), "reduce_scatter", of_share);
    check(&read::<T>(&data), "the input of reduce_scatter", &own);
    let in_place = data.slice(begin..end).unwrap();
    group.reduce_scatter_async(&data, &in_place, op).unwrap().wait().unwrap();
    check(&read::<T>(&in_place), "reduce_scatter in place", of_share);
    group.all_gather_async(&in_place, &data).unwrap().wait().unwrap();
    check(&read::<T>(&data), "all_gather after reduce_scatter", &want);
}

fn copies<T: Exact>(group: &Group, area: &Area, len: usize) {
    let (rank, world) = (group.rank(), group.world_size());
    let root = (len + 1) % world;
    let starts = starts(len, world);
    let (begin, end) = (starts[rank], starts[rank + 1]);
    let whole = |rank| repeated::<T>(len, |i| sent(rank, i));
    let (own, by_root) = (whole(rank), whole(root));
    // The contents of the whole if each rank's share comes from that rank.
    let shares = (0..world).map(|r| (r, starts[r]..starts[r + 1]));
    let by_owner: Vec<T> = shares.clone().flat_map(|(r, share)| whole(r)[share].to_vec()).collect();
    let share = &own[begin..end];
    let zeros = vec![T::of(0); len];

    let mut slice = own.clone();
    group.broadcast_slice(&mut slice, root).unwrap();
    check(&slice, "broadcast of a slice", &by_root);
    let (data, result) = (area.put(&own), area.put(&zeros));
    group.broadcast_into((rank == root).then_some(&data), &result, root).unwrap();
    check(&read::<T>(&result), "broadcast_into", &by_root);
    group.broadcast(&data, root).unwrap();
    check(&read::<T>(&data), "broadcast", &by_root);

    let mut slice = zeros.clone();
    group.all_gather_slice(share, &mut slice).unwrap();
    check(&slice, "all_gather of slices", &by_owner);
    let part = area.put(share);
    data.write::<T>().unwrap().fill(T::of(0));
    group.all_gather(&part, &data).unwrap();
    check(&read::<T>(&data), "all_gather", &by_owner);

    let gathered = if rank == root { &by_owner } else { &zeros };
    let unreachable = private(&zeros);
    group.gather(&private(share), Some(&unreachable), root).unwrap();
    check(&read::<T>(&unreachable), "gather of private memory", gathered);
    data.write::<T>().unwrap().fill(T::of(0));
    group.gather(&part, (rank == root).then_some(&data), root).unwrap();
    check(&read::<T>(&data), "gather", gathered);

    let unreachable = private(share);
    group.scatter(Some(&private(&own)), &unreachable, root).unwrap();
    check(&read::<T>(&unreachable), "scatter of private memory", &by_root[begin..end]);
    data.write::<T>().unwrap().copy_from_slice(&own);
    group.scatter((rank == root).then_some(&data), &part, root).unwrap();
    check(&read::<T>(&part), "scatter", &by_root[begin..end]);

    // Rank r sends every rank the same number of elements: the length of its own share.
    let counts = vec![end - begin; world];
    let received_counts: Vec<usize> = (0..world).map(|r| starts[r + 1] - starts[r]).collect();
    let blocks = repeated::<T>(world * (end - begin), |i| sent(rank, i));
    let from_owner: Vec<T> = shares
        .flat_map(|(r, share)| {
            repeated::<T>((rank + 1) * share.len(), |i| sent(r, i)).split_off(rank * share.len())
        })
        .collect();
    let unreachable = private(&zeros);
    group.all_to_all_ragged(&private(&blocks), &counts, &unreachable, &received_counts).unwrap();
    check(&read::<T>(&unreachable), "all_to_all_ragged of private memory", &from_owner);
    if len <= 4096 {
        let blocks = area.put(&blocks);
        group.all_to_all_ragged(&blocks, &counts, &result, &received_counts).unwrap();
        check(&read::<T>(&result), "all_to_all_ragged", &from_owner);
    }
    let even = len / world * world;
    let (from, to) = (data.slice(0..even).unwrap(), result.slice(0..even).unwrap());
    group.all_to_all(&from, &to).unwrap();
    let block = len / world;
    let from_each: Vec<T> =
        (0..world).flat_map(|r| whole(r)[rank * block..(rank + 1) * block].to_vec()).collect();
    check(&read::<T>(&to), "all_to_all", &from_each);
}

fn pairs<T: Exact>(group: &Group, area: &Area, len: usize) {
    let (rank, world) = (group.rank(), group.world_size());
    let (next, previous) = ((rank + 1) % world, (rank + world - 1) % world);
    let whole = |rank| repeated::<T>(len, |i| sent(rank, i));
    let own = whole(rank);
    let mut slice = vec![T::of(0); len];
    let unreachable = private(&slice);
    group.send_recv(&private(&own), next, &unreachable, previous).unwrap();
    check(&read::<T>(&unreachable), "send_recv of private memory", &whole(previous));
    let (data, received) = (area.put(&own), area.put(&slice));
    group.send_recv(&data, previous, &received, next).unwrap();
    check(&read::<T>(&received), "send_recv", &whole(next));
    if world == 1 {
        return;
    }
    // A chain: the first rank only sends, the last one only receives.
    if rank > 0 {
        if rank % 2 == 0 {
            group.recv(&received, rank - 1).unwrap();
        } else {
            group.recv_async(&received, rank - 1).unwrap().wait().unwrap();
        }
        check(&read::<T>(&received), "recv", &whole(rank - 1));
    }
    if rank < world - 1 {
        group.send_async(&data, rank + 1).unwrap().wait().unwrap();
    }
    // Only between the first and the last rank, in both directions.
    if rank == 0 {
        group.send_slice(&own, world - 1).unwrap();
        group.recv_slice(&mut slice, world - 1).unwrap();
        check(&slice, "recv of a slice", &whole(world - 1));
    } else if rank == world - 1 {
        group.recv_slice(&mut slice, 0).unwrap();
        check(&slice, "recv of a slice", &whole(0));
        group.send_slice(&own, 0).unwrap();
    }
}

pub fn every_type(group: &Group) {
    every_operation::<f32>(group);
    every_operation::<f64>(group);
    every_operation::<f16>(group);
    every_operation::<bf16>(group);
    every_operation::<i32>(group);
    every_operation::<i64>(group);
    every_operation::<u8>(group);
}

pub fn objects(group: &Group) {
    let (rank, world) = (group.rank(), group.world_size());
    group.barrier().unwrap();
    let want: Vec<String> = (0..world).map(|r| "x".repeat(r * 300)).collect();
    let root = world - 1;
    let gathered = group.gather_object(&want[rank], root).unwrap();
    assert_eq!(gathered, (rank == root).then(|| want.clone()));
    assert_eq!(group.all_gather_object(&want[rank]).unwrap(), want);
    let object = group.broadcast_object((rank == 0).then_some(&want), 0).unwrap();
    assert_eq!(object, want);
}

/// Several operations in flight, one rank late, then a mix of blocking and asynchronous ones.
pub fn operations_keep_their_order(group: &Group) {
    let (rank, world) = (group.rank(), group.world_size());
    let allocator = Allocator::new();
    let shared = group.allocate(&allocator, 4 * 1000, Category::Gradients).unwrap();
    let whole = Tensor::new(shared, 0, f32::DTYPE, [1000]).unwrap();
    for round in 0..20 {
        whole.write::<f32>().unwrap().fill((rank + round) as f32);
        if rank == round % world {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        let buckets: Vec<_> = (0..10)
            .rev()
            .map(|b| whole.slice(b * 100..(b + 1) * 100).unwrap())
            .map(|bucket| group.all_reduce_async(&bucket, ReduceOp::Sum).unwrap())
            .collect();
        let mut flag = [rank as f64];
        group.all_reduce_slice(&mut flag, ReduceOp::Max).unwrap();
        assert_eq!(flag[0], (world - 1) as f64);
        for bucket in buckets {
            assert!(bucket.is_finished(), "a later operation finished before an earlier one");
            bucket.wait().unwrap();
        }
        let want = (0..world).map(|r| (r + round) as f32).sum::<f32>();
        assert!(whole.read::<f32>().unwrap().iter().all(|x| *x == want));
    }
}

/// Even and odd ranks form sub-groups, which divide again. The whole group is used meanwhile.
pub fn groups_divide(group: &Group) {
    let (rank, world) = (group.rank(), group.world_size());
    let half = group.split(Some((rank % 2) as u32)).unwrap().unwrap();
    assert_eq!(half.rank(), rank / 2);
    assert_eq!(half.world_size(), if rank % 2 == 0 { world.div_ceil(2) } else { world / 2 });
    let mut sum = [rank as i64];
    half.all_reduce_slice(&mut sum, ReduceOp::Sum).unwrap();
    assert_eq!(sum[0], (0..world).filter(|r| r % 2 == rank % 2).sum::<usize>() as i64);
    let mut all = [1i64];
    group.all_reduce_slice(&mut all, ReduceOp::Sum).unwrap();
    assert_eq!(all[0], world as i64);
    // Only rank 0 of each half forms another group.
    let first = half.split((half.rank() == 0).then_some(7)).unwrap();
    assert_eq!(first.map(|group| group.world_size()), (half.rank() == 0).then_some(1));
    every_operation::<f32>(&half);
    group.barrier().unwrap();
}

/// A message of one group never waits for another group: rank 0 sends only when rank 1 has the message of rank 2, for which
/// it waits later than for that of rank 0.
#[allow(dead_code, reason = "an MPI library may wait for messages in turn")]
pub fn messages_of_two_pairs(group: &Group) {
    let rank = group.rank();
    let [left, right] =
        [0, 1].map(|first| group.split((first..first + 2).contains(&rank).then_some(0)).unwrap());
    match (rank, left, right) {
        (0, Some(left), _) => {
            group.recv_slice(&mut [0i64], 1).unwrap();
            left.send_slice(&[7i64], 1).unwrap();
        }
        (1, Some(left), Some(right)) => {
            let received = Allocator::new().tensor(DType::I64, [1], Category::Gradients).unwrap();
            let early = left.recv_async(&received, 0).unwrap();
            let mut word = [0i64];
            right.recv_slice(&mut word, 1).unwrap();
            assert!(!early.is_finished());
            group.send_slice(&word, 0).unwrap();
            early.wait().unwrap();
            assert_eq!((word, read::<i64>(&received)), ([9], vec![7]));
        }
        (2, _, Some(right)) => drop(right.send_slice(&[9i64], 0).unwrap()),
        _ => {}
    }
}

/// Floating-point sums that depend on the order of summation: equal bits mean an equal order.
#[allow(dead_code, reason = "not every test file compares orders")]
pub fn order_sensitive_sums(group: &Group) -> Vec<u32> {
    let x = |i: usize| ((i * 37 + group.rank() * 101) % 1009) as f32 * 0.1;
    let mut bits = Vec::new();
    for len in [5000, 300_000] {
        let mut data: Vec<f32> = (0..len).map(x).collect();
        group.all_reduce_slice(&mut data, ReduceOp::Mean).unwrap();
        bits.extend(data.iter().map(|x| x.to_bits()));
        let data = private::<f32>(&(0..len).map(x).collect::<Vec<_>>());
        group.reduce(&data, ReduceOp::Sum, 0).unwrap();
        group.broadcast(&data, 0).unwrap();
        bits.extend(read::<f32>(&data).iter().map(|x| x.to_bits()));
        let mut data: Vec<bf16> = (0..len).map(|i| bf16::from_f32(x(i))).collect();
        group.all_reduce_slice(&mut data, ReduceOp::Sum).unwrap();
        bits.extend(data.iter().map(|x| u32::from(x.to_bits())));
    }
    bits
}
