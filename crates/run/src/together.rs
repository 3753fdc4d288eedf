//! Work of one or more ranks that may take longer than an operation may: writing or reading a checkpoint.
//!
//! Meanwhile the ranks signal again and again that they are alive, so each operation is short: a slow rank is waited for up to
//! the limit of the work, and a dead or stopped one up to `--timeout`.

use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use paceline_checkpoint::Saver;
use paceline_collectives::{CollectiveError, Group};
use paceline_failure::{Failure, Result};
use paceline_trace::runtime::{before_join, now, receive};
use paceline_trace::{awake, thread_builder};

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
        before_join(told.thread());
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

/// Waits until the save that all ranks have begun is complete. Collective.
pub fn complete(saver: &mut Saver, world: &Group) -> Result<()> {
    let limit = saver.limit();
    let parts =
        together(world, "write its part of the checkpoint", limit, || saver.wait_for_part());
    if parts.is_err() {
        // Rank 0 would wait for the part of a rank that has failed.
        saver.give_up();
    }
    parts?;
    // No rank continues, and perhaps dies, before the checkpoint is complete.
    together(world, "complete the checkpoint", limit, || saver.wait())
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
    let timeout = world.options().timeout;
    let pause = LONGEST_PAUSE.min(timeout / SIGNS_PER_TIMEOUT);
    let mut passed = Duration::ZERO;
    let mut own = WORKING;
    // Each rank's state, and whether the limit is over by rank 0's clock.
    let mut all = vec![0; 2 * world.world_size()];
    loop {
        let begin = now();
        if own == WORKING {
            own = match receive(ended, Some(pause)) {
                Ok(true) => DONE,
                Ok(false) | Err(RecvTimeoutError::Disconnected) => FAILED,
                Err(RecvTimeoutError::Timeout) => WORKING,
            };
        }
        world.all_gather_slice(&[own, u8::from(passed > limit)], &mut all)?;
        // Time in which all were suspended does not count.
        passed += awake(now() - begin, pause + timeout);
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
