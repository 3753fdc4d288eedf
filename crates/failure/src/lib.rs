//! How a command fails: its message and its exit code; and the files that commands write ([`outputs`]), which fail in these
//! words.
//!
//! This crate knows the errors of all crates below, and nothing of commands, runs or launchers.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

pub mod outputs;

use std::fmt;

use paceline_collectives::CollectiveError;
use paceline_host::streams;
pub use paceline_host::streams::EXIT_RUN;
use paceline_rendezvous::{
    EnvironmentError, Placement, RendezvousError, write_consequence_file, write_error_file,
};
use paceline_strategies::StrategyError;

/// The result of everything above this crate that can fail.
pub type Result<T> = std::result::Result<T, Failure>;

/// The reason why a command ended early.
#[derive(thiserror::Error)]
pub enum Failure {
    /// The user asked for something impossible. Found before any rank started and before anything was
    /// written.
    #[error("{0}")]
    Usage(String),
    /// Something went wrong while running.
    #[error("{0}")]
    Run(String),
    /// A loss, a gradient norm or a weight of a step is not finite.
    #[error("{message}")]
    NotFinite {
        /// The number of the step, from 1.
        step: u64,
        /// The finding, and the user's remedy.
        message: String,
    },
    /// This rank ended only because another rank failed. The other rank reports the cause.
    #[error("{0}")]
    Consequence(String),
    /// This rank ended only because these ranks have ended, or did not come in time.
    #[error("{message}")]
    Missing {
        /// The observation of this rank.
        message: String,
        /// The ranks that it is about.
        ranks: Vec<usize>,
    },
    /// A signal has asked this run to end, and it has ended in order.
    #[error("{}", message.as_deref().unwrap_or("the run was asked to end"))]
    Stopped {
        /// The signal.
        signal: i32,
        /// Information for the user, on the rank that reports it.
        message: Option<String>,
        /// The ranks that had the signal, if this rank had none.
        others: Vec<usize>,
    },
    /// The link cannot be emulated. All ranks find this out together, so only rank 0 reports it.
    #[error("{0}")]
    Link(String),
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

impl Failure {
    /// Reports the failure on standard error, and also to torchrun if that started this process. Returns
    /// the exit code.
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

    /// A failure that is about other ranks, if any are known.
    fn about(ranks: Vec<usize>, is_consequence: bool, error: &dyn std::fmt::Display) -> Self {
        let message = error.to_string();
        match (ranks.is_empty(), is_consequence) {
            (false, _) => Failure::Missing { message, ranks },
            (true, true) => Failure::Consequence(message),
            (true, false) => Failure::Run(message),
        }
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

impl From<StrategyError> for Failure {
    fn from(error: StrategyError) -> Self {
        match error {
            StrategyError::Collective(error) => error.into(),
            StrategyError::Unused { is_new: false, .. } => {
                Failure::Run(format!("{error} (--find-unused-parameters)"))
            }
            StrategyError::Unused { .. } | StrategyError::UsedAfterAll { .. } => {
                Failure::Run(format!("{error} (--no-static-graph)"))
            }
            other => Failure::Run(other.to_string()),
        }
    }
}

impl From<CollectiveError> for Failure {
    fn from(error: CollectiveError) -> Self {
        if let CollectiveError::Link { .. } = &error {
            Failure::Link(format!("{error}; pass a slower --link, or a faster --transport"))
        } else {
            Failure::about(error.culprits(), error.is_consequence(), &error)
        }
    }
}

impl From<RendezvousError> for Failure {
    fn from(error: RendezvousError) -> Self {
        let missing = match &error {
            RendezvousError::Failed { missing, .. } => missing.clone(),
            _ => Vec::new(),
        };
        let is_consequence = matches!(error, RendezvousError::Overtaken { .. });
        Failure::about(missing, is_consequence, &error)
    }
}

impl From<EnvironmentError> for Failure {
    fn from(error: EnvironmentError) -> Self {
        Failure::Usage(error.to_string())
    }
}

macro_rules! failure_while_running {
    ($($error:ty),*) => {$(
        impl From<$error> for Failure {
            fn from(error: $error) -> Self {
                Failure::Run(error.to_string())
            }
        }
    )*};
}
failure_while_running!(
    std::io::Error,
    paceline_data::DataError,
    paceline_kernels::KernelError,
    paceline_memory::MemoryError,
    paceline_model::ModelError,
    paceline_analysis::hta::AnalysisError,
    paceline_analysis::read::ReadError,
    paceline_analysis::report::ReportError
);
