//! All-reduces of several sizes by MPI. Checks the results and prints the best time for each size, on the
//! rank where it is longest:
//!
//! ```text
//! cargo build --release -p paceline-collectives --features mpi --example mpi_all_reduce
//! mpirun -n 2 target/release/examples/mpi_all_reduce
//! ```

use paceline_collectives::{CollectiveError, Group, GroupOptions, ReduceOp};
use paceline_memory::{Allocator, Category, DType, Tensor};

const SIZES: [usize; 4] = [4 << 10, 64 << 10, 1 << 20, 16 << 20];
const REPETITIONS: usize = 50;

fn main() -> Result<(), CollectiveError> {
    let group = Group::mpi(GroupOptions::for_local_ranks(2))?;
    let (rank, world) = (group.rank(), group.world_size());
    let allocator = Allocator::new();
    for bytes in SIZES {
        let buffer = group.allocate(&allocator, bytes, Category::Gradients)?;
        let data = Tensor::new(buffer, 0, DType::F32, [bytes / 4])?;
        let (mut waited, mut moved) = (f64::INFINITY, f64::INFINITY);
        for _ in 0..REPETITIONS {
            data.write::<f32>()?.fill(rank as f32 + 1.0);
            group.barrier()?;
            let times = group.all_reduce(&data, ReduceOp::Sum)?;
            waited = waited.min(times.wait_ns() as f64 / 1e3);
            moved = moved.min(times.move_ns() as f64 / 1e3);
            let want = (1..=world).sum::<usize>() as f32;
            assert!(data.read::<f32>()?.iter().all(|&x| x == want), "the sum is {want}");
        }
        let mut slowest = [waited, moved];
        group.all_reduce_slice(&mut slowest, ReduceOp::Max)?;
        if rank == 0 {
            let [waited, moved] = slowest;
            println!("{bytes:>9} bytes, {world} ranks: headers {waited:.1} us, data {moved:.1} us");
        }
    }
    Ok(())
}
