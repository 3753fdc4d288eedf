//! The errors that can occur while ranks find each other.

use std::fmt;

use crate::environment::EnvironmentError;

/// An error while ranks find each other.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
pub enum RendezvousError {
    /// A rank that does not exist.
    #[error("there is no rank {rank} among {world_size} ranks")]
    NoSuchRank {
        /// The rank that was named.
        rank: usize,
        /// How many ranks there are.
        world_size: usize,
    },
    /// The ranks could not meet, or could not connect to each other.
    #[error("rank {rank} of {world_size} could not meet the others at {place}: {reason}")]
    Failed {
        /// The rank that reports.
        rank: usize,
        /// How many ranks were to meet.
        world_size: usize,
        /// Where they were to meet.
        place: String,
        /// Why they did not.
        reason: String,
        /// The ranks that did not come in time, or ended meanwhile, as far as this rank can tell.
        missing: Vec<usize>,
    },
    /// A rank has been started again by its launcher, so the attempt that this rank belongs to is over.
    #[error(
        "rank {rank} of {world_size} waits for the others at {place} in vain: rank {ahead} has come for a later \
         attempt of the run, so this one is over"
    )]
    Overtaken {
        /// The rank that reports.
        rank: usize,
        /// How many ranks were to meet.
        world_size: usize,
        /// Where they were to meet.
        place: String,
        /// The rank that has come for a later attempt.
        ahead: usize,
    },
    /// The list of members of a run whose ranks come and go cannot listen.
    #[error("cannot listen for the members of the run at {place}: {reason}")]
    NoMembers {
        /// Where the list was to listen.
        place: String,
        /// Why it does not.
        reason: String,
    },
    /// This process may not join a run whose ranks come and go, or cannot reach it.
    #[error("cannot join the run at {place}: {reason}")]
    NotJoined {
        /// Where the list of members is.
        place: String,
        /// Why this process has not joined.
        reason: String,
    },
    /// The other members go on without this one.
    #[error("the others have left out member {number}: {reason}")]
    LeftOut {
        /// The number of this member.
        number: u64,
        /// Why, in words.
        reason: String,
    },
    /// No generation follows: too few members are left, or the list of members has gone.
    #[error("the run does not go on, says member {number}: {reason}")]
    NoGeneration {
        /// The number of this member.
        number: u64,
        /// Why, in words.
        reason: String,
    },
    /// The others have done their work, so this member is not needed any more.
    #[error("the run has ended, and member {number} is not needed any more")]
    Finished {
        /// The number of this member.
        number: u64,
    },
    /// The kernel refused random numbers, so this rank has no secret.
    #[error("cannot make a secret: the kernel gave no random numbers: {0}")]
    NoRandomNumbers(String),
    /// A value that ranks exchange could not be turned into bytes, or back.
    #[error("cannot encode or decode a value that ranks exchange: {0}")]
    Encoding(String),
    /// The environment does not say who the ranks are, or contradicts itself.
    #[error(transparent)]
    Environment(#[from] EnvironmentError),
}

impl fmt::Debug for RendezvousError {
    /// The message, because `main` and `unwrap` print this form.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl From<postcard::Error> for RendezvousError {
    fn from(error: postcard::Error) -> Self {
        RendezvousError::Encoding(error.to_string())
    }
}
