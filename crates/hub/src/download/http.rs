//! The common part of all downloads: the client, the pieces of a body, the incomplete file, and the lock on it.

use std::fs::{File, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use paceline_host::bar::TaskBar;
use paceline_trace::thread_builder;
use sha2::digest::DynDigest;
use ureq::Agent;
use ureq::config::RedirectAuthHeaders;

/// How long to wait for a name, a connection, and a response.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long to wait for the next bytes of a body.
const READ_TIMEOUT: Duration = Duration::from_secs(30);
/// Bytes per read.
const PIECE_BYTES: usize = 1 << 16;
/// How long bodies may come more slowly than [`MIN_BYTES_PER_S`].
const WINDOW: Duration = Duration::from_secs(60);
/// The slowest that a server may be. At this rate, 100 MB take a day.
const MIN_BYTES_PER_S: u64 = 1000;
const MAX_REDIRECTS: u32 = 10;

/// A client without credentials. It follows redirects, and a status of 400 or more is an error; or it hands each response to
/// the caller.
pub(crate) fn agent(follows_redirects: bool) -> Agent {
    Agent::config_builder()
        .timeout_resolve(Some(CONNECT_TIMEOUT))
        .timeout_connect(Some(CONNECT_TIMEOUT))
        .timeout_recv_response(Some(CONNECT_TIMEOUT))
        .timeout_per_read(Some(READ_TIMEOUT))
        .max_redirects(if follows_redirects { MAX_REDIRECTS } else { 0 })
        .redirect_auth_headers(RedirectAuthHeaders::Never)
        .http_status_as_error(follows_redirects)
        .user_agent(concat!("paceline/", env!("CARGO_PKG_VERSION")))
        .build()
        .into()
}

/// Why a body was not received to its end.
pub(crate) enum Broken {
    /// The connection has failed.
    Connection(io::Error),
    TooLong,
    /// The file cannot be written.
    Disk(io::Error),
}

/// A file that is not complete yet.
pub(crate) struct Partial {
    pub(crate) file: File,
    hasher: Box<dyn DynDigest>,
    pub(crate) received: u64,
}

impl Partial {
    /// An empty file, or one that counts as such.
    pub(crate) fn new(file: File, hasher: Box<dyn DynDigest>) -> Self {
        Self { file, hasher, received: 0 }
    }

    /// Counts the bytes that are there.
    pub(crate) fn keep(&mut self) -> io::Result<()> {
        let mut piece = vec![0; PIECE_BYTES];
        loop {
            match self.file.read(&mut piece)? {
                0 => return Ok(()),
                count => self.count(&piece[..count]),
            }
        }
    }

    pub(crate) fn restart(&mut self, hasher: Box<dyn DynDigest>) -> io::Result<()> {
        self.file.set_len(0)?;
        self.file.rewind()?;
        (self.hasher, self.received) = (hasher, 0);
        Ok(())
    }

    fn count(&mut self, piece: &[u8]) {
        self.hasher.update(piece);
        self.received += piece.len() as u64;
    }

    /// Appends a body, up to `max_bytes` of the file. The bar shows how many of `of` there are.
    pub(crate) fn receive(
        &mut self,
        body: Watched<'_>,
        max_bytes: u64,
        bar: &mut TaskBar,
        of: Option<u64>,
    ) -> Result<(), Broken> {
        for piece in body {
            let piece = piece.map_err(Broken::Connection)?;
            if piece.len() as u64 > max_bytes - self.received {
                return Err(Broken::TooLong);
            }
            self.file.write_all(&piece).map_err(Broken::Disk)?;
            self.count(&piece);
            bar.show(self.received, of);
        }
        Ok(())
    }

    /// The digest of all bytes, in hexadecimal digits.
    pub(crate) fn digest(self) -> String {
        self.hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// How fast a file's bodies come, over all connections.
pub(crate) struct Rate {
    window: Duration,
    waited: Duration,
    num_bytes: u64,
    /// Set once a window had too few bytes. Another connection would not help.
    pub(crate) is_too_slow: bool,
}

impl Rate {
    pub(crate) fn new() -> Self {
        Self::over(WINDOW)
    }

    fn over(window: Duration) -> Self {
        Self { window, waited: Duration::ZERO, num_bytes: 0, is_too_slow: false }
    }

    /// `body`, which fails once it was too slow for a whole window. A thread reads it, because a read through the framing of
    /// a body is content with any progress and may last for ever.
    ///
    /// # Errors
    ///
    /// If the system refuses the thread.
    pub(crate) fn watch(
        &mut self,
        mut body: impl Read + Send + 'static,
    ) -> io::Result<Watched<'_>> {
        let (sender, pieces) = sync_channel(1);
        let receive = move || {
            let mut piece = vec![0; PIECE_BYTES];
            loop {
                let come = match body.read(&mut piece) {
                    Ok(0) => return,
                    Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                    come => come.map(|count| piece[..count].to_vec()),
                };
                // Nobody wants the rest, or the connection has failed.
                if come.is_err() | sender.send(come).is_err() {
                    return;
                }
            }
        };
        thread_builder("download").spawn(receive)?;
        Ok(Watched { pieces, rate: self })
    }

    /// Counts bytes that have come after this time.
    pub(crate) fn came(&mut self, num_bytes: usize, after: Duration) -> io::Result<()> {
        // A wait that lasts longer was a suspension of this process.
        self.waited += after.min(READ_TIMEOUT);
        self.num_bytes += num_bytes as u64;
        if self.waited < self.window {
            return Ok(());
        }
        let (waited_s, num_bytes) = (self.waited.as_secs_f64(), self.num_bytes);
        (self.waited, self.num_bytes) = (Duration::ZERO, 0);
        self.is_too_slow = (num_bytes as f64) < MIN_BYTES_PER_S as f64 * waited_s;
        if !self.is_too_slow {
            Ok(())
        } else {
            Err(io::Error::new(
                io::ErrorKind::TimedOut,
                format!(
                    "the server is too slow: {num_bytes} bytes came in {waited_s:.0} s, and the least is \
                     {MIN_BYTES_PER_S} per second"
                ),
            ))
        }
    }
}

/// The pieces of a body whose rate is watched.
pub(crate) struct Watched<'a> {
    pieces: Receiver<io::Result<Vec<u8>>>,
    rate: &'a mut Rate,
}

impl Iterator for Watched<'_> {
    type Item = io::Result<Vec<u8>>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let begin = Instant::now();
            let come = match self.pieces.recv_timeout(self.rate.window / 60) {
                Ok(Ok(come)) => come,
                Ok(Err(error)) => return Some(Err(error)),
                Err(RecvTimeoutError::Timeout) => Vec::new(),
                // The end of a body is not a sign of a slow server.
                Err(RecvTimeoutError::Disconnected) => return None,
            };
            match self.rate.came(come.len(), begin.elapsed()) {
                Ok(()) if come.is_empty() => {}
                outcome => return Some(outcome.map(|()| come)),
            }
        }
    }
}

/// Opens or makes a file, and locks it. Calls `waits` before it waits for another process.
pub(crate) fn locked(path: &Path, waits: impl Fn()) -> io::Result<File> {
    loop {
        let file = paceline_files::open_or_create(path)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                waits();
                file.lock()?;
            }
            Err(TryLockError::Error(error)) => return Err(error),
        }
        // The process that held the lock may have removed the file.
        if file.metadata()?.nlink() > 0 {
            return Ok(file);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server that sends a byte at a time.
    struct Trickle {
        pause: Duration,
        left: usize,
    }

    impl Read for Trickle {
        fn read(&mut self, piece: &mut [u8]) -> io::Result<usize> {
            if self.left == 0 {
                return Ok(0);
            }
            std::thread::sleep(self.pause);
            self.left -= 1;
            piece[0] = b'x';
            Ok(1)
        }
    }

    #[test]
    fn a_server_that_trickles_is_given_up_over_all_connections() {
        let mut rate = Rate::over(Duration::from_millis(100));
        let slow = Duration::from_millis(10);
        let (mut taken, mut reason) = (0, None);
        // Each connection brings three bytes.
        for _ in 0..1000 {
            let body = rate.watch(Trickle { pause: slow, left: 3 }).unwrap();
            let outcome: io::Result<Vec<_>> = body.inspect(|_| taken += 1).collect();
            if let Err(error) = outcome {
                reason = Some(error.to_string());
                break;
            }
        }
        let reason = reason.expect("it went on");
        assert!(reason.contains("the server is too slow"), "{reason}");
        assert!(rate.is_too_slow && taken < 20, "{taken}");
    }

    #[test]
    fn a_read_that_never_ends_is_given_up() {
        let (body, server) = std::io::pipe().unwrap();
        let mut rate = Rate::over(Duration::from_millis(100));
        let error = rate.watch(body).unwrap().next().expect("it ended").unwrap_err();
        assert!(error.to_string().contains("the server is too slow: 0 bytes"), "{error}");
        assert!(rate.is_too_slow);
        drop(server);
    }

    #[test]
    fn a_suspended_process_does_not_blame_the_server() {
        let mut rate = Rate::new();
        rate.came(1, Duration::from_secs(3600)).unwrap();
        rate.came(1 << 20, Duration::from_secs(40)).unwrap();
        rate.came(30_000, Duration::from_secs(29)).unwrap();
        rate.came(1, Duration::from_secs(29)).unwrap();
        rate.came(1, Duration::from_secs(29)).unwrap_err();
    }
}
