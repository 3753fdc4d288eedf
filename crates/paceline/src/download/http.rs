//! What every download shares: the client, the pieces of a body, and the lock on a file.
//!
//! Input: addresses and files. Output: bytes. This module knows neither data sets nor the Hugging Face Hub.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use ureq::Agent;
use ureq::config::RedirectAuthHeaders;

/// How long to wait for a name, for a connection, and for the response to a request. Without a network nothing ever
/// answers.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long to wait for the next bytes of a body. However large a file is, a server that sends nothing has stopped.
const READ_TIMEOUT: Duration = Duration::from_secs(30);
/// Bytes per read.
const PIECE_BYTES: usize = 1 << 16;

/// A client. With `statuses_are_errors` it makes an error of a response with a status of 400 or more. Otherwise it hands the
/// response to the caller. It sends credentials to no other host than the one that they are for.
pub(crate) fn agent(statuses_are_errors: bool) -> Agent {
    Agent::config_builder()
        .timeout_resolve(Some(CONNECT_TIMEOUT))
        .timeout_connect(Some(CONNECT_TIMEOUT))
        .timeout_recv_response(Some(CONNECT_TIMEOUT))
        .timeout_per_read(Some(READ_TIMEOUT))
        .redirect_auth_headers(RedirectAuthHeaders::SameHost)
        .http_status_as_error(statuses_are_errors)
        .user_agent(concat!("paceline/", env!("CARGO_PKG_VERSION")))
        .build()
        .into()
}

/// Why a body was not consumed to its end.
pub(crate) enum Broken {
    /// The connection.
    Connection(io::Error),
    /// The consumer of the bytes failed.
    Consumer(String),
}

/// Hands the bytes of a body to `consume`, piece by piece.
pub(crate) fn pieces(
    mut body: impl Read,
    mut consume: impl FnMut(&[u8]) -> Result<(), String>,
) -> Result<(), Broken> {
    let mut piece = vec![0; PIECE_BYTES];
    loop {
        match body.read(&mut piece) {
            Ok(0) => return Ok(()),
            Ok(count) => consume(&piece[..count]).map_err(Broken::Consumer)?,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(Broken::Connection(e)),
        }
    }
}

/// Opens a file, which is made if it is not there, and locks it. Waits for the process that holds the lock, after
/// it has called `waits`.
pub(crate) fn locked(path: &Path, waits: impl Fn()) -> io::Result<File> {
    loop {
        let file = paceline_files::open_or_create(path)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) => {
                waits();
                flock(&file, FlockOperation::LockExclusive)?;
            }
            outcome => outcome?,
        }
        // The process that held the lock may have removed the file. Then another one has its name.
        if file.metadata()?.nlink() > 0 {
            return Ok(file);
        }
    }
}

/// Bytes as hexadecimal digits.
pub(crate) fn hex(bytes: impl AsRef<[u8]>) -> String {
    bytes.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}
