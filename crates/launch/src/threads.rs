//! Runs ranks as threads of this process.

use std::thread::ScopedJoinHandle;

use paceline_collectives::{Group, GroupOptions};
use paceline_failure::{Failure, Result};

/// Runs `rank` on `world_size` threads, each with its group, and returns the result of rank 0. If
/// `options` has an emulated link, the link is set up first.
///
/// If several ranks fail, the error is a failure that is not a consequence of another one.
pub fn run<T: Send>(
    world_size: usize,
    options: GroupOptions,
    rank: impl Fn(Group) -> Result<T> + Sync,
) -> Result<T> {
    let link = options.link;
    let run_rank = |group: Group| {
        if let Some(link) = link {
            group.emulate(link)?;
        }
        rank(group)
    };
    let groups = Group::threads_with(world_size, options)?;
    let outcomes: Vec<Result<T>> = std::thread::scope(|scope| {
        let run_rank = &run_rank;
        let start = |(rank, group): (usize, Group)| {
            let thread = paceline_trace::thread_builder(format!("rank-{rank}"));
            // A rank whose thread cannot start leaves its group, so the others do not wait for it.
            thread.spawn_scoped(scope, move || run_rank(group)).map_err(|error| {
                Failure::Run(format!(
                    "the system refuses a thread for rank {rank} ({error}); allow more processes (ulimit -u, \
                     or pids.max of the control group)"
                ))
            })
        };
        let ranks: Vec<_> = groups.into_iter().enumerate().map(start).collect();
        let join = |(rank, thread): (usize, Result<ScopedJoinHandle<'_, Result<T>>>)| {
            let panicked = |_| Err(Failure::Run(format!("rank {rank} panicked (see above)")));
            thread?.join().unwrap_or_else(panicked)
        };
        ranks.into_iter().enumerate().map(join).collect()
    });
    let mut results = Vec::with_capacity(world_size);
    let failures: Vec<Failure> =
        outcomes.into_iter().filter_map(|of| of.map(|of| results.push(of)).err()).collect();
    // The failure of the rank that failed by itself explains more than the failures that followed from
    // it.
    let is_consequence =
        |failure: &Failure| matches!(failure, Failure::Consequence(_) | Failure::Missing { .. });
    match failures.into_iter().min_by_key(is_consequence) {
        Some(failure) => Err(failure),
        None => Ok(results.swap_remove(0)),
    }
}
