//! Communication overlapped with computation: an all-reduce runs while its rank computes.
//!
//!     paceline launch -n 2 -- target/release/examples/overlap
//!
//! A slow link is emulated, so that there is something to wait for. The first time, the rank waits for the
//! all-reduce and then computes. The second time, it does both at once.

use std::hint::black_box;
use std::time::Instant;

use paceline_collectives::{CollectiveError, Group, GroupOptions, OpTimes, ReduceOp};
use paceline_memory::{Allocator, Category, DType, MemoryError, Tensor};

const ELEMS: usize = 1 << 20;

fn main() -> Result<(), CollectiveError> {
    let link = Some("1gbit,200us".parse().expect("a link"));
    let options = GroupOptions { link, ..GroupOptions::for_local_ranks(1) };
    let group = Group::from_env(Some(options))?;

    // Memory that the ranks of a host share, so that the data are not staged.
    let buffer = group.allocate(&Allocator::new(), 4 * ELEMS, Category::Gradients)?;
    let gradients = Tensor::new(buffer, 0, DType::F32, [ELEMS])?;
    gradients.write::<f32>()?.fill(group.rank() as f32);

    group.barrier()?;
    let begin = Instant::now();
    let times = group.all_reduce(&gradients, ReduceOp::Mean)?;
    compute();
    say(&group, "one after the other", begin, &times);

    group.barrier()?;
    let begin = Instant::now();
    let work = group.all_reduce_async(&gradients, ReduceOp::Mean)?;
    let claimed: Option<MemoryError> = gradients.read::<f32>().err();
    compute();
    let times = work.wait()?;
    say(&group, "at the same time", begin, &times);

    if let Some(error) = claimed.filter(|_| group.rank() == 0) {
        println!("touched meanwhile: {error}");
    }
    // The work is finished, so its memory can be read again: the mean of 0, 1, 2, ...
    assert_eq!(gradients.read::<f32>()?[0], (group.world_size() - 1) as f32 / 2.0);
    Ok(())
}

/// Multiplies and adds for some tens of milliseconds.
fn compute() {
    let mut x = black_box(1.0f32);
    for _ in 0..5_000_000 {
        x = black_box(x * 0.999 + 0.001);
    }
}

fn say(group: &Group, how: &str, begin: Instant, times: &OpTimes) {
    if group.rank() == 0 {
        let ms = |ns: u64| ns as f64 / 1e6;
        println!(
            "{how}: {:.1} ms in all; the all-reduce was queued {:.1} ms, waited {:.1} ms for the other \
             ranks, moved for {:.1} ms",
            begin.elapsed().as_secs_f64() * 1e3,
            ms(times.queue_ns()),
            ms(times.wait_ns()),
            ms(times.move_ns()),
        );
    }
}
