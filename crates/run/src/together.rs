//! Work of one or more ranks that may take longer than an operation may: writing or reading a checkpoint.
//!
//! Input: the work of this rank, and its limit. Output: the result of the work, once all ranks have done theirs. Meanwhile the
//! ranks signal again and again that they are alive, so each operation is short: a rank that is slow is waited for
//! up to the limit of the work, and a rank that is dead or stopped up to `--timeout`. This file does not know the work.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use paceline_collectives::{CollectiveError, Group};
use paceline_failure::{Failure, Result};
use paceline_trace::thread_builder;

/// The longest time between two signals that a rank is alive.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// The number of such signals within the time limit of an operation.
const SIGNS_PER_TIMEOUT: u32 = 4;

/// The state that a rank reports of its work.
const WORKING: u8 = 0;
const DONE: u8 = 1;
const FAILED: u8 = 2;
/// The limit is over. Only rank 0 reports this, whose clock counts: while it works, and when it is done.
const LATE_WORKING: u8 = 3;
const LATE_DONE: u8 = 4;

/// How the work of all ranks ended.
#[derive(Debug)]
enum Outcome {
    AllDone,
    /// The first rank that has failed.
    Failed(usize),
    /// The ranks that were not done within the limit.
    Late(Vec<usize>),
}

/// The state of a rank's work, for the thread that informs the others.
#[derive(Debug, Default)]
struct State {
    ended: Mutex<Option<bool>>,
    changed: Condvar,
}

impl State {
    fn end(&self, is_good: bool) {
        self.ended.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(is_good);
        self.changed.notify_all();
    }

    /// How the work has ended, after a wait for its end.
    fn wait(&self, time: Duration) -> Option<bool> {
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_timeout_while(ended, time, |ended| ended.is_none());
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

/// Work that panics has failed.
struct End<'a>(&'a State);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.end(false);
    }
}

/// Does `work` as one of the ranks of `world`, which all call this together. Fails on all ranks if the work fails on one: on
/// that rank with its own error. `what` names the work for errors, as in "write its part of the checkpoint".
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
    let state = State::default();
    let (own, of_all) = std::thread::scope(|scope| {
        let told =
            thread_builder("alive").spawn_scoped(scope, || tell_each_other(world, limit, &state));
        let told = told.map_err(|e| Failure::io("cannot start a thread", e))?;
        let end = End(&state);
        let own = work();
        state.end(own.is_ok());
        drop(end);
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

/// Informs the other ranks about this rank's work, until all have ended theirs or one has failed.
fn tell_each_other(
    world: &Group,
    limit: Duration,
    state: &State,
) -> std::result::Result<Outcome, CollectiveError> {
    let begin = Instant::now();
    let pause = LONGEST_PAUSE.min(world.options().timeout / SIGNS_PER_TIMEOUT);
    let mut all = vec![WORKING; world.world_size()];
    loop {
        let own = match state.wait(pause) {
            Some(true) => DONE,
            Some(false) => FAILED,
            None => WORKING,
        };
        let is_late = world.rank() == 0 && begin.elapsed() > limit;
        let said = match own {
            WORKING if is_late => LATE_WORKING,
            DONE if is_late => LATE_DONE,
            own => own,
        };
        world.all_gather_slice(&[said], &mut all)?;
        if let Some(rank) = all.iter().position(|said| *said == FAILED) {
            return Ok(Outcome::Failed(rank));
        }
        let is_working = |rank: &usize| matches!(all[*rank], WORKING | LATE_WORKING);
        let working: Vec<usize> = (0..all.len()).filter(is_working).collect();
        if working.is_empty() {
            return Ok(Outcome::AllDone);
        }
        if matches!(all[0], LATE_WORKING | LATE_DONE) {
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
