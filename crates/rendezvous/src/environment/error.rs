//! Mistakes in the environment.

use std::fmt;

/// A variable that makes no sense, or variables that contradict each other.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
pub enum EnvironmentError {
    /// A variable that should hold a number holds something else.
    #[error("{name}={value:?} in the environment is not a number")]
    NotANumber {
        /// The variable.
        name: String,
        /// Its value.
        value: String,
    },
    /// Only one variable of a pair is set.
    #[error(
        "{there} is set in the environment, but {missing} is not; a launcher sets both: set \
         {missing}, or unset {there} to run without a launcher"
    )]
    HalfSet {
        /// The variable that is set.
        there: String,
        /// The variable that is not set.
        missing: String,
    },
    /// A rank that is too large for its world size.
    #[error("{name}={rank} does not fit {world_name}={world_size}: ranks count from 0 to {}",
        world_size.saturating_sub(1))]
    OutOfRange {
        /// The variable with the rank.
        name: String,
        /// The rank.
        rank: usize,
        /// The variable with the number of ranks.
        world_name: String,
        /// The number of ranks.
        world_size: usize,
    },
    /// A number that cannot be a port.
    #[error("MASTER_PORT={0} in the environment is not a port number")]
    NoPort(usize),
    /// A list of hosts or of tasks that cannot be read.
    #[error("{name}={value:?} in the environment cannot be read")]
    NotAList {
        /// The variable.
        name: String,
        /// Its value.
        value: String,
    },
    /// The environment does not say where the ranks meet.
    #[error("{0}")]
    NoRendezvous(String),
}

impl fmt::Debug for EnvironmentError {
    /// The message, because `main` and `unwrap` print this form.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
