//! Where the ranks of a run meet, and the secret by which they know each other.
//!
//! This file names the places only; `store` goes there.

use std::path::PathBuf;

/// Bytes of the random numbers behind a fresh secret.
const FRESH_SECRET_BYTES: usize = 16;

/// Where ranks meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MeetingPoint {
    /// At an abstract Unix socket of this host, which has no name in any file system. Rank 0 listens;
    /// both sides check that the other one belongs to the same user.
    Local {
        /// The socket's name.
        name: String,
    },
    /// At a TCP port on which rank 0 listens.
    Tcp {
        /// Rank 0's host.
        host: String,
        /// Its port.
        port: u16,
    },
    /// By a file in a folder that all ranks see. Rank 0 writes its address and a secret of its own
    /// there and removes the file once all have come.
    File(PathBuf),
    /// At a store that torchrun's agent serves. No rank listens.
    Agent {
        /// The agent's host.
        host: String,
        /// Its port.
        port: u16,
        /// What tells this run and this attempt from others that use the same store.
        round: String,
    },
}

/// A meeting point and the secret of the run.
#[derive(Clone, PartialEq, Eq)]
pub struct Meeting {
    /// Where.
    pub point: MeetingPoint,
    /// What every rank must present, at most 64 bytes. Meeting by a file or at an agent makes one of
    /// its own and ignores this one.
    pub secret: String,
}

impl Meeting {
    /// Meets on this host at a socket of that name.
    pub fn by_name(name: impl Into<String>, secret: impl Into<String>) -> Self {
        Self { point: MeetingPoint::Local { name: name.into() }, secret: secret.into() }
    }

    /// Meets on this host by a port number, as in `MASTER_PORT`. Nothing listens on the port itself:
    /// together with the user's number it names a socket.
    pub fn by_port(port: u16, secret: impl Into<String>) -> Self {
        Self::by_job(&port.to_string(), secret)
    }

    /// Meets on this host by the number of a job: unique per user and job.
    pub(crate) fn by_job(job: &str, secret: impl Into<String>) -> Self {
        let user = rustix::process::geteuid().as_raw();
        Self::by_name(format!("paceline-{user}-{job}"), secret)
    }

    /// Meets at a TCP port of rank 0's host.
    pub fn by_tcp(host: impl Into<String>, port: u16, secret: impl Into<String>) -> Self {
        Self { point: MeetingPoint::Tcp { host: host.into(), port }, secret: secret.into() }
    }

    /// Meets through a file in a folder that all ranks see.
    pub fn by_file(path: impl Into<PathBuf>) -> Self {
        Self { point: MeetingPoint::File(path.into()), secret: String::new() }
    }

    /// Meets at the store of torchrun's agent.
    pub fn by_agent(host: impl Into<String>, port: u16, round: impl Into<String>) -> Self {
        let (host, round) = (host.into(), round.into());
        Self { point: MeetingPoint::Agent { host, port, round }, secret: String::new() }
    }

    /// A secret that nobody can guess, as hexadecimal text.
    pub fn fresh_secret() -> String {
        let mut bytes = [0u8; FRESH_SECRET_BYTES];
        // The kernel's generator does not fail once the system is up; should it, ranks of one host
        // still check each other's user, and a secret of zeros only loses the second check.
        let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// For messages.
    pub(crate) fn place(&self) -> String {
        match &self.point {
            MeetingPoint::Local { name } => format!("the local socket {name}"),
            MeetingPoint::Tcp { host, port } => format!("{host}:{port}"),
            MeetingPoint::File(path) => path.display().to_string(),
            MeetingPoint::Agent { host, port, .. } => format!("torchrun's store at {host}:{port}"),
        }
    }
}

/// Without the secret, which has no business in a log.
impl std::fmt::Debug for Meeting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Meeting").field("point", &self.point).finish_non_exhaustive()
    }
}
