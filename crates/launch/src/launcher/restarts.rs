//! Attempts of a launch: after a failure all ranks are started again, as often as the user allows.
//!
//! This file does not know what the ranks do, or how one attempt ends.

use paceline_failure::{EXIT_USAGE, Result};

use super::dumps::{Dumps, MAX_KEPT};
use super::watch::{self, Ended, say};
use super::{Launch, Restarts, signals};

/// Launches what `attempt` returns for a number of restarts, until an attempt succeeds or must not be repeated, until
/// `attempt` fails, or until `max` restarts are used up. Returns the exit code of the last attempt. The last operations of
/// the last few attempts that failed are kept, and their folders are named at the end.
pub fn launch_with_restarts(
    max: usize,
    attempt: impl FnMut(usize) -> Result<Launch>,
) -> Result<u8> {
    repeat(max, attempt, watch::launch, say)
}

/// The same with another way to launch, and to tell the user.
pub(super) fn repeat(
    max: usize,
    mut attempt: impl FnMut(usize) -> Result<Launch>,
    launch: impl Fn(&Launch) -> Result<Ended>,
    say: impl Fn(&str),
) -> Result<u8> {
    let mut made = 0;
    let mut kept: Vec<Dumps> = Vec::new();
    loop {
        let next = attempt(made).inspect_err(|_| list(made, &kept, &say))?;
        let of_attempt = Launch { restarts: Restarts { made, max }, ..next };
        if made > 0 {
            say(&format!("restart {made} of {max}"));
        }
        let Ended { code, have_all_ended, dumps, .. } = launch(&of_attempt)?;
        // All attempts write to the same folder if the user has named one.
        kept.extend(dumps.filter(|dumps| kept.last() != Some(dumps)));
        if kept.len() > MAX_KEPT {
            kept.remove(0).remove();
        }
        // A signal counts also if it came when the ranks were ending already: the user wants the run to end.
        // Ranks that come and go have been replaced one by one.
        let is_last = made == max || of_attempt.elastic.is_some();
        if is_last || matches!(code, 0 | EXIT_USAGE) || signals::last().is_some() {
            list(made, &kept, &say);
            return Ok(code);
        }
        if !have_all_ended {
            say(
                "no restart: a rank of this attempt, or a process that it has started, does not end, and two attempts must not run \
                 side by side",
            );
            return Ok(code);
        }
        made += 1;
    }
}

/// Says after a restart where the last operations of failed attempts are.
fn list(made: usize, kept: &[Dumps], say: impl Fn(&str)) {
    if made == 0 || kept.is_empty() {
        return;
    }
    let folders: Vec<String> = kept.iter().map(|kept| format!("\n    {}", kept.place())).collect();
    let last = if kept.len() == MAX_KEPT { format!("last {MAX_KEPT} ") } else { String::new() };
    say(&format!(
        "the last operations of the {last}attempts that failed are in:{}",
        folders.concat()
    ));
}
