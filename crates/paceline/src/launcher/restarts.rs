//! Attempts of a launch: after a failure all ranks are started again, as often as the user allows.
//!
//! This file does not know what the ranks do, or how one attempt ends.

use super::watch::{Ended, launch_one_of_many, say};
use super::{Launch, signals};
use crate::Result;
use crate::failure::EXIT_USAGE;

/// Which attempt a launch is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Restarts {
    /// How many restarts there have been.
    pub made: usize,
    /// How many there may be.
    pub max: usize,
}

/// Launches what `attempt` returns for a number of restarts, until an attempt succeeds or must not be repeated, until
/// `attempt` fails, or until `max` restarts are used up. Returns the exit code of the last attempt.
pub fn launch_with_restarts(
    max: usize,
    mut attempt: impl FnMut(usize) -> Result<Launch>,
) -> Result<u8> {
    let mut made = 0;
    loop {
        let launch = Launch { restarts: Restarts { made, max }, ..attempt(made)? };
        if made > 0 {
            say(&format!("restart {made} of {max}"));
        }
        let Ended { code, have_all_ended, .. } = launch_one_of_many(&launch)?;
        // A signal counts also if it came when the ranks were ending already: the user wants an end.
        if made == max || matches!(code, 0 | EXIT_USAGE) || signals::last().is_some() {
            return Ok(code);
        }
        if !have_all_ended {
            say(
                "no restart: a rank of this attempt does not end, and two attempts must not run side by side",
            );
            return Ok(code);
        }
        made += 1;
    }
}
