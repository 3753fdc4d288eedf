//! Where the ranks of a run meet, and the secret by which they know each other.

use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::CollectiveError;

/// Length of a run's secret in bytes.
pub(crate) const SECRET_BYTES: usize = 32;

/// Where the ranks of one host meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MeetingPoint {
    /// By a port number that the launcher chose, as in `MASTER_PORT`. Nothing listens on the port
    /// itself: it names an abstract Unix socket.
    Port(u16),
    /// By a file that rank 0 writes and removes again once all have come.
    File(PathBuf),
}

/// A meeting point and the secret of the run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Meeting {
    /// Where.
    pub point: MeetingPoint,
    /// What every rank must present. Meeting by a file makes one of its own.
    pub secret: String,
}

impl Meeting {
    /// Meets by the launcher's port number and secret.
    pub fn by_port(port: u16, secret: impl Into<String>) -> Self {
        Self { point: MeetingPoint::Port(port), secret: secret.into() }
    }

    /// Meets through a file in a directory that all ranks see.
    pub fn by_file(path: impl Into<PathBuf>) -> Self {
        Self { point: MeetingPoint::File(path.into()), secret: String::new() }
    }

    /// A secret that nobody can guess, as hexadecimal text.
    pub fn fresh_secret() -> String {
        let mut bytes = [0u8; SECRET_BYTES / 2];
        // The kernel's generator does not fail once the system is up; should it, the ranks still
        // check each other's user, and a secret of zeros only loses the second check.
        let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// For messages.
    pub(crate) fn place(&self) -> String {
        match &self.point {
            MeetingPoint::Port(port) => format!("MASTER_PORT={port}"),
            MeetingPoint::File(path) => path.display().to_string(),
        }
    }
}

/// The name of an abstract socket, and the secret to present there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) name: String,
    pub(crate) secret: String,
}

impl Address {
    /// The address for a launcher's port: unique per user and port.
    pub(crate) fn of_port(port: u16, secret: &str) -> Self {
        let user = rustix::process::geteuid().as_raw();
        Self { name: format!("paceline-{user}-{port}"), secret: secret.into() }
    }

    /// A new address that nobody else uses.
    pub(crate) fn fresh() -> Self {
        let name = format!("paceline-{}", Meeting::fresh_secret());
        Self { name, secret: Meeting::fresh_secret() }
    }

    /// Writes the address where the other ranks look for it: readable by this user only, and
    /// visible only when complete.
    pub(crate) fn publish(&self, path: &Path) -> Result<(), CollectiveError> {
        let wrap = |e: std::io::Error| CollectiveError::MeetingFile {
            path: path.into(),
            reason: e.to_string(),
        };
        let mut partial = path.as_os_str().to_owned();
        partial.push(format!(".{}", std::process::id()));
        let write = || {
            let mut file = std::fs::OpenOptions::new()
                .write(true)
                .create_new(true)
                .mode(0o600)
                .open(&partial)?;
            use std::io::Write;
            writeln!(file, "{}\n{}", self.name, self.secret)?;
            std::fs::rename(&partial, path)
        };
        write().map_err(|e| {
            let _ = std::fs::remove_file(&partial);
            wrap(e)
        })
    }

    /// Reads a published address; `None` while there is no complete one.
    pub(crate) fn look_up(path: &Path) -> Option<Self> {
        let text = std::fs::read_to_string(path).ok()?;
        let (name, secret) = text.trim_end().split_once('\n')?;
        Some(Self { name: name.into(), secret: secret.into() })
    }
}
