//! Plans that cannot be carried out.

use std::fmt;

use crate::Action;

/// Why there is no such plan. Ranks, stages and micro-batches are counted from zero.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlanError {
    /// The schedule does not know steps of this size.
    Setting(String),
    /// An action does not belong where it is, or is not there.
    Action {
        /// The rank in whose list it is or should be.
        rank: usize,
        /// The action.
        action: Action,
        /// The problem.
        problem: &'static str,
    },
    /// Messages of one rank to another come in another order than they are awaited.
    Order {
        /// The rank that sends, and the rank that receives.
        ranks: (usize, usize),
        /// The message that is sent, and the one that is awaited instead; `None` if there is no message.
        messages: (Option<Action>, Option<Action>),
    },
    /// Ranks wait for each other: each for the next one, and the last one for the first.
    Deadlock(Vec<Waiting>),
}

/// A rank that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// The rank.
    pub rank: usize,
    /// The action that waits.
    pub action: Action,
    /// The action that must be done before.
    pub needs: Action,
    /// The rank that has to do it.
    pub of: usize,
}

impl fmt::Display for PlanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PlanError::Setting(problem) => f.write_str(problem),
            PlanError::Action { rank, action, problem } => {
                write!(f, "{action} in the list of rank {rank}: {problem}")
            }
            PlanError::Order { ranks: (from, to), messages } => match messages {
                (Some(sent), Some(awaited)) => write!(
                    f,
                    "rank {from} sends {sent} where rank {to} awaits {awaited}; messages between two ranks are received in \
                     the order in which they are sent"
                ),
                (Some(sent), None) => {
                    write!(f, "rank {from} sends {sent}, and rank {to} never receives it")
                }
                (None, Some(awaited)) => {
                    write!(f, "rank {to} awaits {awaited}, and rank {from} never sends it")
                }
                (None, None) => f.write_str("messages do not match"),
            },
            PlanError::Deadlock(cycle) => {
                f.write_str("the ranks wait for each other: ")?;
                for (at, Waiting { rank, action, needs, of }) in cycle.iter().enumerate() {
                    let before = if at == 0 { "" } else { ", " };
                    write!(
                        f,
                        "{before}rank {rank} cannot do {action} before {needs} of rank {of}"
                    )?;
                }
                Ok(())
            }
        }
    }
}

impl std::error::Error for PlanError {}
