//! What every transport must do, run by each of them.

use paceline_collectives::{Group, ReduceOp};
use paceline_memory::{Allocator, Category, DType, Tensor};

const LENGTHS: [usize; 9] = [0, 1, 2, 3, 7, 100, 4096, 100_003, 600_000];

/// The input of `rank` at `index`: small integers, so that sums are exact.
fn input(rank: usize, index: usize) -> f64 {
    ((rank * 7 + index * 3) % 31) as f64 - 11.0
}

fn expected(world: usize, index: usize, op: ReduceOp) -> f64 {
    let all = (0..world).map(|rank| input(rank, index));
    match op {
        ReduceOp::Sum => all.sum(),
        ReduceOp::Mean => all.sum::<f64>() / world as f64,
        ReduceOp::Max => all.fold(f64::MIN, f64::max),
        ReduceOp::Min => all.fold(f64::MAX, f64::min),
    }
}

/// Calls every operation on every length, in private memory and in place.
pub fn every_operation(group: &Group) {
    let (rank, world) = (group.rank(), group.world_size());
    let allocator = Allocator::new();
    let longest = LENGTHS.into_iter().max().unwrap();
    let shared = group.allocate(&allocator, longest * 8, Category::Gradients).unwrap();
    for len in LENGTHS {
        for op in [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max, ReduceOp::Min] {
            let mut private: Vec<f32> = (0..len).map(|i| input(rank, i) as f32).collect();
            group.all_reduce_slice(&mut private, op).unwrap();
            let in_place = Tensor::new(shared.clone(), 0, DType::F64, [len]).unwrap();
            for (i, x) in in_place.write::<f64>().unwrap().iter_mut().enumerate() {
                *x = input(rank, i);
            }
            let work = group.all_reduce_async(&in_place, op).unwrap();
            let times = work.wait().unwrap();
            assert!(times.submitted_ns <= times.started_ns);
            assert!(times.started_ns <= times.present_ns);
            assert!(times.present_ns <= times.finished_ns);
            let in_place = in_place.read::<f64>().unwrap();
            for i in 0..len {
                let want = expected(world, i, op);
                assert_eq!(private[i], want as f32, "f32 {op:?} of {len}, element {i}");
                assert_eq!(in_place[i], want, "f64 {op:?} of {len}, element {i}");
            }
        }
        let root = len % world;
        let mut data: Vec<i64> = (0..len).map(|i| (rank * 1000 + i) as i64).collect();
        let gathered = group.gather_slice(&data, root).unwrap();
        group.broadcast_slice(&mut data, root).unwrap();
        for (i, x) in data.iter().enumerate() {
            assert_eq!(*x, (root * 1000 + i) as i64, "broadcast of {len}");
        }
        assert_eq!(gathered.is_some(), rank == root);
        for (from, part) in gathered.iter().flat_map(|g| g.chunks(len.max(1)).enumerate()) {
            assert_eq!(part[len - 1], (from * 1000 + len - 1) as i64, "gather of {len}");
        }
    }
    // The same in the background, on tensors; the root's own data and the gathered ones are apart.
    let part = Tensor::new(shared.clone(), 0, DType::I64, [50]).unwrap();
    part.write::<i64>().unwrap().fill(rank as i64);
    let all = allocator.tensor(DType::I64, [50 * world], Category::Communication).unwrap();
    let root = world / 2;
    let to = (rank == root).then_some(&all);
    let gathered = group.gather_async(&part, to, root).unwrap();
    let met = group.barrier_async().unwrap();
    gathered.wait().unwrap();
    assert!(met.wait().unwrap().queue_ns() < u64::MAX);
    if rank == root {
        for (from, part) in all.read::<i64>().unwrap().chunks(50).enumerate() {
            assert!(part.iter().all(|x| *x == from as i64));
        }
        assert!(group.gather(&part, Some(&part), root).is_err() || world == 1);
    }
    group.broadcast_async(&part, root).unwrap().wait().unwrap();
    assert!(part.read::<i64>().unwrap().iter().all(|x| *x == root as i64));
    let objects = group.gather_object(&"x".repeat(rank * 3), world - 1).unwrap();
    if rank == world - 1 {
        let want: Vec<String> = (0..world).map(|r| "x".repeat(r * 3)).collect();
        assert_eq!(objects, Some(want));
    }
    group.barrier().unwrap();
}

/// Several operations in flight, one rank late, then a mix of blocking and asynchronous ones.
pub fn operations_keep_their_order(group: &Group) {
    let (rank, world) = (group.rank(), group.world_size());
    let allocator = Allocator::new();
    let shared = group.allocate(&allocator, 4 * 1000, Category::Gradients).unwrap();
    let whole = Tensor::new(shared, 0, DType::F32, [1000]).unwrap();
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

/// Floating-point sums whose value depends on the order: equal digests mean an equal order.
#[allow(dead_code, reason = "not every test file compares orders")]
pub fn order_sensitive_sum(group: &Group) -> Vec<u32> {
    let mut data: Vec<f32> =
        (0..5000).map(|i| ((i * 37 + group.rank() * 101) % 1009) as f32 * 0.1).collect();
    group.all_reduce_slice(&mut data, ReduceOp::Mean).unwrap();
    data.iter().map(|x| x.to_bits()).collect()
}
