//! The environment variables by which paceline's own launcher informs a rank.
//!
//! `paceline_rendezvous::Placement` reads its place, under any launcher.

use std::ffi::OsString;
use std::path::PathBuf;

use paceline_rendezvous::Launcher;
pub use paceline_rendezvous::{LAUNCH, SECRET};

use crate::TransportName;
use paceline_failure::{Result, usage};

/// The variable with the run folder, empty on a host without rank 0.
pub const RUN_FOLDER: &str = "PACELINE_RUN_FOLDER";
/// The variable that marks the ranks that `paceline evaluate` and `paceline check` have started.
pub const STARTED: &str = "PACELINE_STARTED";
/// The variable with the host and port of the list of members, in a run whose ranks come and go.
pub const MEMBERS: &str = "PACELINE_MEMBERS";
/// The variable with the number of this rank in that list. Without it, a rank joins as a new member.
pub const MEMBER: &str = "PACELINE_MEMBER";

/// This process's place among the ranks, and the run it belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Its place.
    pub place: paceline_rendezvous::Placement,
    /// The run folder that paceline's launcher made.
    pub run_folder: Option<PathBuf>,
    /// Whether the same `paceline evaluate` or `paceline check` started this rank.
    pub is_started: bool,
    /// Whether this process is the launcher of one of several hosts, at the place of its first rank.
    pub is_launcher: bool,
}

impl Placement {
    /// Whether `paceline train` started this rank, checked its flags and printed its warnings. `paceline launch` does
    /// not count: it is like any other launcher.
    pub fn is_of_train(&self) -> bool {
        self.run_folder.is_some()
    }

    /// Whether a launcher of paceline started this rank.
    pub fn is_of_paceline(&self) -> bool {
        self.place.launcher == Launcher::Paceline
    }

    /// Whether this rank's own command started it, or will. Then `--nproc` is the number of ranks that it starts on
    /// this host.
    pub fn is_ours(&self) -> bool {
        self.is_of_train() || self.is_started || self.is_launcher
    }

    /// Advice for a user who did not want this process to be a rank of another launcher.
    pub fn unset(&self) -> String {
        format!("unset {}", self.place.variables.join(" and "))
    }

    /// The transport if no flag names one.
    pub fn default_transport(&self) -> TransportName {
        // Only our launcher surely gives every host equally many ranks, in order, as hybrid needs.
        if self.place.is_one_host() {
            TransportName::Shm
        } else if self.is_of_paceline() && self.place.local_world_size > 1 {
            TransportName::Hybrid
        } else {
            TransportName::Tcp
        }
    }

    /// The transport of a run for which `transport` was chosen, by the user if `is_stated`. Under our own launcher a
    /// run chooses for itself.
    pub fn transport_of_run(&self, transport: TransportName, is_stated: bool) -> TransportName {
        let chooses = !is_stated && self.is_of_paceline();
        if chooses { self.default_transport() } else { transport }
    }

    /// Checks that this rank, which a launcher has started as a process, can use a transport.
    pub fn check_transport(&self, transport: Option<TransportName>) -> Result<()> {
        let place = &self.place;
        match transport {
            Some(TransportName::Thread) if !place.is_one_host() => usage(
                "--transport thread runs all ranks in one process, but they are on several hosts; leave it \
                 out, or use --transport tcp or hybrid",
            ),
            Some(TransportName::Thread) => usage(
                "--transport thread runs all ranks in one process, but a launcher has started this \
                 one as a rank of several; use --transport shm",
            ),
            Some(TransportName::Shm) if !place.is_one_host() => usage(format!(
                "{} of {} ranks are on this host: --transport shm connects the ranks of one host only; use \
                 --transport tcp or hybrid",
                place.local_world_size, place.world_size
            )),
            _ => Ok(()),
        }
    }
}

/// Reads the placement, if a launcher set one. The error of an incomplete one names the missing variable.
pub fn read(variable: impl Fn(&str) -> Option<OsString>) -> Result<Option<Placement>> {
    let place =
        paceline_rendezvous::Placement::from_lookup(|name| variable(name)?.into_string().ok())?;
    Ok(place.map(|place| Placement {
        place,
        run_folder: variable(RUN_FOLDER).map(PathBuf::from),
        is_started: variable(STARTED).is_some(),
        is_launcher: false,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_from(variables: &[(&str, &str)]) -> Result<Option<Placement>> {
        let find = |name: &str| variables.iter().find(|(n, _)| *n == name);
        read(|name| find(name).map(|(_, value)| value.into()))
    }

    #[test]
    fn only_the_run_folder_tells_our_training_run() {
        let rank = [("RANK", "1"), ("WORLD_SIZE", "2"), ("PACELINE_SECRET", "x")];
        assert!(!read_from(&rank).unwrap().unwrap().is_of_train());
        let of_train = [rank.as_slice(), &[("PACELINE_RUN_FOLDER", "runs/x")]].concat();
        assert!(read_from(&of_train).unwrap().unwrap().is_of_train());
        assert_eq!(read_from(&[]).unwrap(), None);
    }
}
