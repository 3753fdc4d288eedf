//! Work of one or more ranks that may take longer than an operation may: writing or reading a checkpoint.
//!
//! Meanwhile the ranks signal again and again that they are alive, so each operation is short: a slow rank is waited for up to
//! the limit of the work, and a dead or stopped one up to `--timeout`.

use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use paceline_collectives::{CollectiveError, Group};
use paceline_failure::{Failure, Result};
use paceline_trace::thread_builder;

/// The longest time between two signals that a rank is alive.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// Signals within the time limit of an operation.
const SIGNS_PER_TIMEOUT: u32 = 4;

/// The state that a rank reports of its work.
const WORKING: u8 = 0;
const DONE: u8 = 1;
const FAILED: u8 = 2;

/// How the work of all ranks ended.
#[derive(Debug)]
enum Outcome {
    AllDone,
    /// The first rank that has failed.
    Failed(usize),
    /// The ranks that were not done within the limit.
    Late(Vec<usize>),
}

/// Does `work`; a collective of `world`. Fails on all ranks if the work fails on one, there with its own error. `what` names
/// the work for errors, as in "write its part of the checkpoint".
///
/// # Errors
///
/// Those of the work, and that of a rank which has not ended its work within `limit`.
pub fn together<T>(
    world: &Group,
    what: &str,
    limit: Duration,
    work: impl FnOnce() -> Result<T>,
) -> Result<T> {
    if world.world_size() == 1 {
        return work();
    }
    let (end, ended) = channel();
    // If the work panics, `end` is dropped, which counts as failure.
    let (own, of_all) = std::thread::scope(move |scope| {
        let tell = move || tell_each_other(world, limit, &ended);
        let told = thread_builder("alive").spawn_scoped(scope, tell);
        let told = told.map_err(|e| Failure::io("cannot start a thread", e))?;
        let own = work();
        // Nobody receives it if an operation of the other thread has failed.
        let _ = end.send(own.is_ok());
        let panicked = |_| Failure::Run("the thread that waits for the ranks has panicked".into());
        Ok::<_, Failure>((own, told.join().map_err(panicked)?))
    })?;
    let own = own?;
    match of_all? {
        Outcome::AllDone => Ok(own),
        Outcome::Failed(rank) => Err(Failure::Consequence(format!("rank {rank} cannot {what}"))),
        Outcome::Late(ranks) => Err(late(world.rank(), what, limit, ranks)),
    }
}

fn late(rank: usize, what: &str, limit: Duration, ranks: Vec<usize>) -> Failure {
    let (who, is) = match ranks[..] {
        [one] => (format!("rank {one}"), "does"),
        _ => (format!("ranks {ranks:?}"), "do"),
    };
    let message = format!(
        "rank {rank}: {who} {is} not {what} within {} s, the limit for this work; look whether its disk is full or slow (--timeout does not change this limit)",
        limit.as_secs_f64()
    );
    Failure::Missing { message, ranks }
}

/// Informs the other ranks about this rank's work, until all have ended or one has failed. `ended` gets whether this rank's
/// work succeeded.
fn tell_each_other(
    world: &Group,
    limit: Duration,
    ended: &Receiver<bool>,
) -> std::result::Result<Outcome, CollectiveError> {
    let begin = Instant::now();
    let pause = LONGEST_PAUSE.min(world.options().timeout / SIGNS_PER_TIMEOUT);
    let mut own = WORKING;
    // Each rank's state, and whether the limit is over by rank 0's clock.
    let mut all = vec![0; 2 * world.world_size()];
    loop {
        if own == WORKING {
            own = match ended.recv_timeout(pause) {
                Ok(true) => DONE,
                Ok(false) | Err(RecvTimeoutError::Disconnected) => FAILED,
                Err(RecvTimeoutError::Timeout) => WORKING,
            };
        }
        world.all_gather_slice(&[own, u8::from(begin.elapsed() > limit)], &mut all)?;
        let states: Vec<u8> = all.iter().step_by(2).copied().collect();
        if let Some(rank) = states.iter().position(|state| *state == FAILED) {
            return Ok(Outcome::Failed(rank));
        }
        let working = (0..states.len()).filter(|rank| states[*rank] == WORKING);
        let working: Vec<usize> = working.collect();
        if working.is_empty() {
            return Ok(Outcome::AllDone);
        }
        if all[1] > 0 {
            return Ok(Outcome::Late(working));
        }
    }
}

#[cfg(test)]
mod tests {
    use paceline_collectives::GroupOptions;

    use super::*;

    /// The results of two ranks whose operations may take a second, and whose work takes this long.
    fn outcomes(work: [(Duration, bool); 2], limit: Duration) -> Vec<Result<usize>> {
        let timeout = Duration::from_secs(1);
        let options = GroupOptions { timeout, ..GroupOptions::for_local_ranks(2) };
        let groups = Group::threads_with(2, options).unwrap();
        std::thread::scope(|scope| {
            let ranks = groups.into_iter().zip(work).map(|(world, (time, is_good))| {
                scope.spawn(move || {
                    together(&world, "write its part", limit, || {
                        std::thread::sleep(time);
                        let own = world.rank();
                        is_good.then_some(own).ok_or_else(|| Failure::Run("no space".into()))
                    })
                })
            });
            let ranks: Vec<_> = ranks.collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    const LONG: Duration = Duration::from_millis(2500);
    const LIMIT: Duration = Duration::from_secs(600);

    #[test]
    fn work_may_take_longer_than_an_operation() {
        for slow in [0, 1] {
            let mut work = [(Duration::ZERO, true); 2];
            work[slow].0 = LONG;
            let found = outcomes(work, LIMIT);
            assert!(matches!(found[..], [Ok(0), Ok(1)]), "{slow}: {found:?}");
        }
    }

    #[test]
    fn all_ranks_learn_that_one_has_failed() {
        let found = outcomes([(Duration::ZERO, true), (Duration::ZERO, false)], LIMIT);
        assert!(matches!(&found[1], Err(Failure::Run(text)) if text == "no space"), "{found:?}");
        let said = found[0].as_ref().unwrap_err().to_string();
        assert_eq!(said, "rank 1 cannot write its part");
    }

    #[test]
    fn work_that_panics_has_failed() {
        let groups = Group::threads_with(2, GroupOptions::for_local_ranks(2)).unwrap();
        let ranks = groups.into_iter().map(|world| {
            std::thread::spawn(move || {
                together(&world, "read", LIMIT, || match world.rank() {
                    0 => Ok(()),
                    _ => panic!("a mistake"),
                })
            })
        });
        let ranks: Vec<_> = ranks.collect();
        let found: Vec<_> = ranks.into_iter().map(|rank| rank.join()).collect();
        let said = found[0].as_ref().unwrap().as_ref().unwrap_err().to_string();
        assert_eq!(said, "rank 1 cannot read");
        assert!(found[1].is_err(), "the panic goes on");
    }

    #[test]
    fn work_has_a_limit_of_its_own_which_the_error_states() {
        let found = outcomes([(Duration::ZERO, true), (LONG, true)], Duration::from_millis(500));
        for (rank, outcome) in found.iter().enumerate() {
            let Err(Failure::Missing { message, ranks }) = outcome else { panic!("{found:?}") };
            assert_eq!(ranks, &[1]);
            let words =
                format!("rank {rank}: rank 1 does not write its part within 0.5 s, the limit");
            assert!(message.contains(&words), "{message}");
        }
    }
}
