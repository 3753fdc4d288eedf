//! What operations beside a computation gain while each rank has a core to spare: their worker keeps it busy for a while
//! instead of sleeping at once.
//!
//!     spinning [--ranks 4]
//!
//! Ranks are threads. In each step a rank starts an all-reduce, computes for 200 us and waits for the all-reduce. Workers sleep at once
//! or spin, in turn, 20 rounds of 200 steps. Prints a line of JSON for each size: medians over the rounds of the time from the start
//! to the end of an all-reduce, and of a step, on the slowest rank, in us.

use std::hint::spin_loop;
use std::time::{Duration, Instant};

use paceline_collectives::{CollectiveError, Group, GroupOptions, ReduceOp};
use paceline_memory::{Allocator, Category, DType};

const ROUNDS: usize = 20;
const STEPS: u32 = 200;
const COMPUTATION: Duration = Duration::from_micros(200);

fn main() -> Result<(), CollectiveError> {
    let ranks = match std::env::args().skip(1).collect::<Vec<_>>().as_slice() {
        [] => Some(4),
        [flag, value] if flag == "--ranks" => value.parse().ok().filter(|&ranks| ranks > 1),
        _ => None,
    };
    let Some(ranks) = ranks else {
        eprintln!("error: the only argument is --ranks NUMBER, of at least 2");
        std::process::exit(2);
    };
    let default = GroupOptions::for_local_ranks(ranks);
    if default.worker_spin.is_zero() {
        eprintln!("error: {ranks} ranks have no cores to spare here; use fewer");
        std::process::exit(2);
    }
    for elems in [1 << 10, 1 << 16, 1 << 20] {
        let mut figures = [(); 2].map(|()| (Vec::new(), Vec::new()));
        for round in 0..2 * ROUNDS {
            let spins = round % 2;
            let worker_spin = if spins == 1 { default.worker_spin } else { Duration::ZERO };
            let (operation, step) =
                steps(ranks, elems, GroupOptions { worker_spin, ..default.clone() })?;
            figures[spins].0.push(operation);
            figures[spins].1.push(step);
        }
        let [sleeping, spinning] =
            figures.map(|(operation, step)| (median(operation), median(step)));
        println!(
            r#"{{"ranks": {ranks}, "bytes": {}, "all_reduce_us": {{"sleeping": {:.1}, "spinning": {:.1}}}, "step_us": {{"sleeping": {:.1}, "spinning": {:.1}}}}}"#,
            4 * elems,
            sleeping.0,
            spinning.0,
            sleeping.1,
            spinning.1,
        );
    }
    Ok(())
}

/// Means of a round, of the slowest rank: microseconds of an all-reduce, and of a step.
fn steps(ranks: usize, elems: usize, options: GroupOptions) -> Result<(f64, f64), CollectiveError> {
    let all = std::thread::scope(|scope| {
        let groups = Group::threads_with(ranks, options)?;
        let ranks: Vec<_> =
            groups.into_iter().map(|group| scope.spawn(|| steps_of(group, elems))).collect();
        ranks
            .into_iter()
            .map(|rank| rank.join().expect("a rank panicked"))
            .collect::<Result<Vec<_>, _>>()
    })?;
    Ok(all.into_iter().fold((0.0, 0.0), |(a, b): (f64, f64), (c, d)| (a.max(c), b.max(d))))
}

fn steps_of(group: Group, elems: usize) -> Result<(f64, f64), CollectiveError> {
    let data = Allocator::new().tensor(DType::F32, [elems], Category::Gradients)?;
    data.fill_zero()?;
    group.barrier()?;
    let (begin, mut moved_ns) = (Instant::now(), 0);
    for _ in 0..STEPS {
        let work = group.all_reduce_async(&data, ReduceOp::Mean)?;
        let computing = Instant::now();
        while computing.elapsed() < COMPUTATION {
            spin_loop();
        }
        let times = work.wait()?;
        moved_ns += times.queue_ns() + times.wait_ns() + times.move_ns();
    }
    let us = |ns: f64| ns / 1e3 / f64::from(STEPS);
    Ok((us(moved_ns as f64), us(begin.elapsed().as_nanos() as f64)))
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
