//! How a command fails: message and exit code; the files that commands write ([`outputs`]) and the numbers that they take
//! ([`numbers`]).
//!
//! Any library's error becomes a [`Failure`] with its message. This crate knows only those that decide about the exit code: the
//! errors of ranks that talk to each other, and of the environment that places them. A crate that can name the flag that helps does
//! so where it calls the library.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

pub mod numbers;
pub mod outputs;

use std::error::Error;
use std::fmt;
use std::iter::successors;
use std::path::Path;

use paceline_collectives::CollectiveError;
use paceline_files::Printable;
use paceline_host::streams;
pub use paceline_host::streams::EXIT_RUN;
use paceline_rendezvous::{
    EnvironmentError, Placement, RendezvousError, write_consequence_file, write_error_file,
};

/// The result of everything above this crate that can fail.
pub type Result<T, E = Failure> = std::result::Result<T, E>;

/// A mistake of the user, with this answer.
pub fn usage<T>(message: impl Into<String>) -> Result<T> {
    Err(Failure::Usage(message.into()))
}

/// The reason why a command ended early. It is not an [`Error`], so that every error can become one.
///
/// ```
/// use paceline_failure::{Failure, Result};
///
/// fn read() -> Result<String> {
///     Err(std::io::Error::other("the disk is gone"))?
/// }
/// assert!(matches!(read(), Err(Failure::Run(_))));
/// ```
#[derive(Clone)]
pub enum Failure {
    /// The user asked for something impossible, found before any rank started or anything was written.
    Usage(String),
    /// Something went wrong while running.
    Run(String),
    /// A loss, a gradient norm or a weight of a step is not finite.
    NotFinite {
        /// The number of the step, from 1.
        step: u64,
        /// The finding, and the user's remedy.
        message: String,
    },
    /// This rank ended because another one failed, which reports the cause.
    Consequence(String),
    /// This rank ended because these ranks have ended, or did not come in time.
    Missing {
        /// The observation of this rank.
        message: String,
        /// The ranks that it is about.
        ranks: Vec<usize>,
    },
    /// A signal has asked this run to end, and it has ended in order.
    Stopped {
        /// The signal.
        signal: i32,
        /// A message for the user, on the rank that reports.
        message: Option<String>,
        /// The ranks that had the signal, if this rank had none.
        others: Vec<usize>,
    },
    /// The link cannot be emulated. All ranks find out together, and rank 0 reports.
    Link(String),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Failure::Usage(message)
            | Failure::Run(message)
            | Failure::NotFinite { message, .. }
            | Failure::Consequence(message)
            | Failure::Missing { message, .. }
            | Failure::Link(message) => message,
            Failure::Stopped { message, .. } => {
                message.as_deref().unwrap_or("the run was asked to end")
            }
        })
    }
}

impl fmt::Debug for Failure {
    /// The message, because `main` and `unwrap` print this form.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Exit code for a mistake in the command line or the environment.
pub const EXIT_USAGE: u8 = 2;
/// Exit code of a rank that ended because another one failed.
pub const EXIT_CONSEQUENCE: u8 = 3;
/// Exit code of a measurement that is below what the user expects of it.
pub const EXIT_BELOW: u8 = 4;

impl Failure {
    /// Reports the failure on standard error, and to torchrun if that started this process. Returns the exit code.
    pub fn report(self) -> u8 {
        if matches!(self, Failure::Link(_)) && !is_first_rank() {
            write_consequence_file(&self.to_string(), &[]);
            return EXIT_CONSEQUENCE;
        }
        let code = match &self {
            Failure::Usage(_) => EXIT_USAGE,
            Failure::Run(_) | Failure::NotFinite { .. } | Failure::Link(_) => EXIT_RUN,
            Failure::Consequence(_) | Failure::Missing { .. } => EXIT_CONSEQUENCE,
            Failure::Stopped { signal, .. } => 128 + *signal as u8,
        };
        match &self {
            Failure::Stopped { message: None, .. } => {}
            Failure::Stopped { message: Some(message), .. } => {
                streams::stderr().line(&format!("paceline: {message}"));
            }
            failure => streams::stderr().line(&format!("error: {failure}")),
        }
        match &self {
            Failure::Usage(message)
            | Failure::Run(message)
            | Failure::NotFinite { message, .. }
            | Failure::Link(message) => write_error_file(message),
            Failure::Consequence(message) => write_consequence_file(message, &[]),
            Failure::Missing { message, ranks } => write_consequence_file(message, ranks),
            Failure::Stopped { others, .. } if !others.is_empty() => {
                write_consequence_file("another rank was asked to end", others);
            }
            Failure::Stopped { .. } => {}
        }
        code
    }

    /// A failure to do something to a file, for `map_err`.
    pub fn cannot<E: fmt::Display>(what: &'static str, path: &Path) -> impl Fn(E) -> Self {
        move |error| Failure::io(format!("cannot {what} {}", path.printable()), error)
    }

    /// The failure that an error stands for, also one that has become a `Box<dyn Error>` or a source.
    pub fn of(error: &(dyn Error + 'static)) -> Self {
        let message = error.to_string();
        let mut causes = successors(Some(error), |cause| (*cause).source());
        causes.find_map(|cause| of_ranks(cause, &message)).unwrap_or(Failure::Run(message))
    }

    /// A failure while doing something to a file or the system.
    pub fn io(what: impl std::fmt::Display, error: impl std::fmt::Display) -> Self {
        Failure::Run(format!("{what}: {error}"))
    }
}

/// Whether this process is rank 0, or not a rank at all.
fn is_first_rank() -> bool {
    Placement::from_env().ok().flatten().is_none_or(|place| place.rank == 0)
}

impl<E: Error + 'static> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::of(&error)
    }
}

fn of_ranks(error: &(dyn Error + 'static), message: &str) -> Option<Failure> {
    let message = message.to_owned();
    if let Some(AsError(failure)) = error.downcast_ref() {
        return Some(failure.clone());
    }
    if error.is::<EnvironmentError>() {
        return Some(Failure::Usage(message));
    }
    let rendezvous = || {
        let error = error.downcast_ref::<RendezvousError>()?;
        Some(CollectiveError::Rendezvous(error.clone()))
    };
    let error = error.downcast_ref::<CollectiveError>().cloned().or_else(rendezvous)?;
    let ranks = error.culprits();
    Some(if matches!(error, CollectiveError::Link { .. }) {
        Failure::Link(format!("{message}; pass a slower --link, or a faster --transport"))
    } else if !ranks.is_empty() {
        Failure::Missing { message, ranks }
    } else if error.is_consequence() {
        Failure::Consequence(message)
    } else {
        Failure::Run(message)
    })
}

/// A failure as an error, for programs that use this library.
struct AsError(Failure);

impl fmt::Debug for AsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for AsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Error for AsError {}

impl From<Failure> for Box<dyn Error + Send + Sync> {
    fn from(failure: Failure) -> Self {
        Box::new(AsError(failure))
    }
}

impl From<Failure> for Box<dyn Error> {
    fn from(failure: Failure) -> Self {
        Box::new(AsError(failure))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The error of a library that wraps one of communication, as that of the strategies does.
    #[derive(Debug)]
    struct Wrapped(CollectiveError);

    impl fmt::Display for Wrapped {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            self.0.fmt(f)
        }
    }

    impl Error for Wrapped {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            Some(&self.0)
        }
    }

    #[test]
    fn the_source_of_an_error_says_who_is_to_blame() {
        let left = CollectiveError::PeerLeft { rank: 0, peer: 2, op: "barrier", seq: 1, bytes: 0 };
        let message = left.to_string();
        for failure in [Failure::from(left.clone()), Wrapped(left).into()] {
            let Failure::Missing { message: said, ranks } = failure else { panic!("{failure}") };
            assert_eq!((said, ranks), (message.clone(), vec![2]));
        }
        let (name, value) = ("RANK".to_owned(), "two".to_owned());
        let environment = EnvironmentError::NotANumber { name, value };
        assert!(matches!(environment.into(), Failure::Usage(_)));
        let passed: Box<dyn Error> = Failure::Usage("two".into()).into();
        assert!(matches!(Failure::of(&*passed), Failure::Usage(message) if message == "two"));
        assert!(matches!(std::io::Error::other("full").into(), Failure::Run(_)));
    }
}
