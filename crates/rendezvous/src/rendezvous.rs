//! The place where the ranks of a run meet, and the secret by which they recognize each other.
//!
//! This file only names places; `store` meets the other ranks there.

use std::path::PathBuf;

use paceline_files::Printable;
use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};
use sha2::{Digest, Sha256};

use crate::RendezvousError;
use crate::launch::LauncherId;

/// The longest secret, in bytes.
pub const MAX_SECRET_BYTES: usize = 64;

/// Random bytes in a new secret.
const SECRET_RANDOM_BYTES: usize = 16;

/// Where ranks meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RendezvousPoint {
    /// At an abstract Unix socket of this host, which has no name in any file system. Rank 0 listens, and
    /// both sides check that the other process belongs to the same user.
    Local {
        /// The socket's name.
        name: String,
    },
    /// At a TCP port on which rank 0 listens.
    Tcp {
        /// Rank 0's host.
        host: String,
        /// Rank 0's port.
        port: u16,
    },
    /// Through a file in a folder that all ranks see, to which rank 0 writes its address and a new secret, and
    /// which it removes once all ranks have come.
    File(PathBuf),
    /// At a store that torchrun's agent serves. No rank listens.
    Agent {
        /// The agent's host.
        host: String,
        /// The agent's port.
        port: u16,
        /// Distinguishes this run and this attempt from others that use the same store.
        round: String,
    },
}

/// A place to meet and the secret of the run.
#[derive(Clone, PartialEq, Eq)]
pub struct Rendezvous {
    /// The place.
    pub point: RendezvousPoint,
    /// The secret that every rank must know, at most [`MAX_SECRET_BYTES`]. It never leaves the process. A rendezvous through a
    /// file makes its own secret and ignores this one. At an agent, rank 0
    /// stores a secret that all clients of the agent can read, and this one is added to it.
    pub secret: String,
    /// The launcher that has started this rank, if known.
    pub(crate) launch: Option<LauncherId>,
}

impl Rendezvous {
    /// The same rendezvous for a rank that the launcher of this name has started, on the host of this number. A host has one
    /// launcher in a run: ranks of a second one are turned away.
    pub fn started_by(self, launcher: &str, host: usize) -> Self {
        Self { launch: LauncherId::named(launcher, host), ..self }
    }

    /// Ranks meet on this host, at a socket of that name.
    pub fn by_name(name: impl Into<String>, secret: impl Into<String>) -> Self {
        Self::at(RendezvousPoint::Local { name: name.into() }, secret.into())
    }

    /// Ranks meet on this host by a port number, as in `MASTER_PORT`, on which no process listens: the socket's name is made of
    /// the user's number, the port, and a hash of the secret. So runs
    /// with the same port do not meet, and nobody who does not know the secret can occupy the
    /// name beforehand.
    pub fn by_port(port: u16, secret: impl Into<String>) -> Self {
        Self::by_job(&port.to_string(), secret)
    }

    /// Ranks meet on this host by the number of a job, which is unique per user.
    pub(crate) fn by_job(job: &str, secret: impl Into<String>) -> Self {
        let (user, secret) = (rustix::process::geteuid().as_raw(), secret.into());
        let name = if secret.is_empty() {
            format!("paceline-{user}-{job}")
        } else {
            format!("paceline-{user}-{job}-{}", hash(&secret))
        };
        Self::by_name(name, secret)
    }

    /// Ranks meet at a TCP port of rank 0's host.
    pub fn by_tcp(host: impl Into<String>, port: u16, secret: impl Into<String>) -> Self {
        Self::at(RendezvousPoint::Tcp { host: host.into(), port }, secret.into())
    }

    /// Ranks meet through a file in a folder that all of them see.
    pub fn by_file(path: impl Into<PathBuf>) -> Self {
        Self::at(RendezvousPoint::File(path.into()), String::new())
    }

    /// Ranks meet at the store of torchrun's agent.
    pub fn by_agent(host: impl Into<String>, port: u16, round: impl Into<String>) -> Self {
        let (host, round) = (host.into(), round.into());
        Self::at(RendezvousPoint::Agent { host, port, round }, String::new())
    }

    fn at(point: RendezvousPoint, secret: String) -> Self {
        Self { point, secret, launch: None }
    }

    /// A new secret that cannot be guessed, as hexadecimal text. Errors if the kernel gives no random numbers: over TCP the
    /// secret is the only check.
    pub fn fresh_secret() -> Result<String, RendezvousError> {
        random_bytes::<SECRET_RANDOM_BYTES>().map(|bytes| hex(&bytes))
    }

    /// The secret with which the ranks of a restart meet, made of the secret of the first attempt, so that ranks of different
    /// attempts never meet, not even at the same port.
    ///
    /// Each attempt's secret follows from the one before. So ranks that wait for others recognize those of
    /// a later attempt, and stop waiting.
    pub fn secret_of_restart(secret: &str, restart: usize) -> String {
        (0..restart).fold(secret.to_owned(), |secret, _| next_secret(&secret))
    }

    /// The place, for messages.
    pub(crate) fn place(&self) -> String {
        match &self.point {
            RendezvousPoint::Local { name } => format!("the local socket {name}"),
            RendezvousPoint::Tcp { host, port } => format!("{host}:{port}"),
            RendezvousPoint::File(path) => path.printable().to_string(),
            RendezvousPoint::Agent { host, port, .. } => {
                format!("torchrun's store at {host}:{port}")
            }
        }
    }
}

/// The first 64 bits of the secret's SHA-256, as hexadecimal text: names of sockets are public (`/proc/net/unix`).
fn hash(secret: &str) -> String {
    hex(&Sha256::digest(secret.as_bytes())[..8])
}

/// The secret of the attempt after the one with this secret.
pub(crate) fn next_secret(secret: &str) -> String {
    hex(&Sha256::digest(format!("{secret}/restart")))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Random bytes of the kernel's.
pub(crate) fn random_bytes<const N: usize>() -> Result<[u8; N], RendezvousError> {
    random_from(|bytes| getrandom(bytes, GetRandomFlags::empty()))
}

/// Bytes from a source of random bytes, which may fill only a part of the slice per call.
fn random_from<const N: usize>(
    source: impl Fn(&mut [u8]) -> rustix::io::Result<usize>,
) -> Result<[u8; N], RendezvousError> {
    let mut bytes = [0u8; N];
    let mut len = 0;
    while len < bytes.len() {
        match source(&mut bytes[len..]) {
            Ok(0) => return Err(RendezvousError::NoRandomNumbers("it returned no bytes".into())),
            Ok(filled) => len += filled,
            Err(Errno::INTR) => {}
            Err(error) => return Err(RendezvousError::NoRandomNumbers(error.to_string())),
        }
    }
    Ok(bytes)
}

/// Leaves out the secret, which must not appear in a log.
impl std::fmt::Debug for Rendezvous {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rendezvous").field("point", &self.point).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn secrets_differ_and_have_32_digits() {
        let [a, b] = [(); 2].map(|()| Rendezvous::fresh_secret().unwrap());
        assert_eq!((a.len(), b.len()), (32, 32));
        assert_ne!(a, b);
    }

    #[test]
    fn runs_with_one_port_and_different_secrets_meet_in_different_places() {
        let [a, b, again] = ["a", "b", "a"].map(|secret| Rendezvous::by_port(29500, secret));
        assert_ne!(a.point, b.point);
        assert_eq!(a.point, again.point);
        let RendezvousPoint::Local { name } = a.point else { panic!("{a:?}") };
        // `printf a | sha256sum` begins with these digits.
        assert!(name.ends_with("-29500-ca978112ca1bbdca"), "{name}");
    }

    #[test]
    fn each_attempt_has_a_secret_of_its_own() {
        let of = |secret, restart| Rendezvous::secret_of_restart(secret, restart);
        assert_eq!(of("a", 0), "a");
        assert_ne!(of("a", 1), of("a", 2));
        assert_ne!(of("a", 1), of("b", 1));
        assert_eq!(of("a", 1), of("a", 1));
        assert!(of("a", 1).len() <= MAX_SECRET_BYTES);
    }

    #[test]
    fn without_random_numbers_there_is_no_secret() {
        let error = random_from::<16>(|_| Err(Errno::NOSYS)).unwrap_err();
        assert!(matches!(error, RendezvousError::NoRandomNumbers(_)), "{error}");
        let error = random_from::<16>(|_| Ok(0)).unwrap_err();
        assert!(matches!(error, RendezvousError::NoRandomNumbers(_)), "{error}");
    }

    #[test]
    fn a_source_that_is_interrupted_or_gives_a_part_is_asked_again() {
        let calls = Cell::new(0);
        let random = random_from(|bytes| {
            calls.set(calls.get() + 1);
            if calls.get() == 1 {
                return Err(Errno::INTR);
            }
            let len = bytes.len().min(10);
            bytes[..len].fill(0xab);
            Ok(len)
        });
        assert_eq!(random.unwrap(), [0xab; 16]);
        assert_eq!(calls.get(), 3);
    }
}
