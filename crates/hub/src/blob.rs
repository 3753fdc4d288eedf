//! One file into the cache: complete and with the digest that the Hub states, or not at all.
//!
//! Input: a file of a listing. Output: a blob. Bytes that came before a connection breaks are kept, and the next attempt
//! asks for the rest. One process fetches a file, and others wait for it. This module does not know which files are needed.

use std::fs::{self, File};
use std::io::{self, Seek, SeekFrom, Write};
use std::time::Duration;

use paceline_files::Printable;
use paceline_host::bar::{TaskBar, Unit};
use paceline_host::streams;
use sha1::Sha1;
use sha2::digest::DynDigest;
use sha2::{Digest, Sha256};
use tracing::debug;

use super::cache::Cache;
use super::name::Name;
use super::remote::{FileDigest, Hub, RemoteFile, Trouble};
use crate::download::http::{self, Broken, Rate};

/// How long to wait before a broken connection is replaced.
const PAUSE: Duration = Duration::from_millis(300);

/// Files of a commit that are to be fetched.
pub(super) struct Fetcher<'a> {
    pub hub: &'a Hub,
    pub cache: &'a Cache,
    pub name: &'a Name,
    pub commit: &'a str,
    pub quiet: bool,
}

/// A file that is not complete yet.
struct Partial {
    file: File,
    hasher: Box<dyn DynDigest>,
    received: u64,
}

impl Fetcher<'_> {
    /// Whether a file is there already.
    pub fn has(&self, file: &RemoteFile) -> bool {
        let blob = self.cache.blob(self.name, file.digest.as_str());
        fs::metadata(blob).is_ok_and(|there| there.is_file() && there.len() == file.num_bytes)
    }

    /// Fetches a file, unless it is there. Returns how many bytes came over the network.
    pub fn obtain(&self, file: &RemoteFile) -> Result<u64, Trouble> {
        if self.has(file) {
            return Ok(0);
        }
        let digest = file.digest.as_str();
        let incomplete = self.cache.incomplete(self.name, digest);
        let write = |e: io::Error| {
            Trouble::Refused(format!("cannot write {}: {e}", incomplete.printable()))
        };
        let waits = || {
            if !self.quiet {
                let path = &file.path;
                streams::stderr().line(&format!("another process fetches {path}; waiting for it"));
            }
        };
        let _lock = self.cache.lock(self.name, digest, waits).map_err(write)?;
        if self.has(file) {
            return Ok(0);
        }
        let opened = paceline_files::open_or_create(&incomplete);
        let mut partial = Partial::of(opened.map_err(write)?, file).map_err(write)?;
        let bar = self.bar(file, partial.received);
        let fetched = self.receive(file, &mut partial, bar)?;
        let found = http::hex(partial.hasher.finalize());
        if found != digest {
            let _ = fs::remove_file(&incomplete);
            return Err(Trouble::Refused(format!(
                "{} is not the file that {} lists: its digest is {found}, and not {digest}; what was received has been \
                 removed, so try again",
                file.path,
                self.hub.endpoint()
            )));
        }
        let blob = self.cache.blob(self.name, digest);
        debug!("{} is complete, with {fetched} bytes from the network", file.path);
        partial.file.sync_all().and_then(|()| fs::rename(&incomplete, blob)).map_err(write)?;
        Ok(fetched)
    }

    /// Receives the missing bytes. A connection that breaks after it has come further than the one before is
    /// replaced by another one.
    fn receive(
        &self,
        file: &RemoteFile,
        partial: &mut Partial,
        mut bar: TaskBar,
    ) -> Result<u64, Trouble> {
        let (mut fetched, mut reached) = (0, partial.received);
        // Connections that each bring a few bytes and end are no faster than one that trickles.
        let mut rate = Rate::new();
        while partial.received < file.num_bytes {
            let opened = self.hub.open(self.name, self.commit, file, partial.received)?;
            if opened.offset != partial.received {
                // This server sends whole files only.
                partial.restart(file).map_err(|e| self.unwritten(file, &e))?;
            }
            let watched = rate.watch(opened.body).map_err(|e| self.unwritten(file, &e))?;
            let taken = http::pieces(watched, |piece| {
                if piece.len() as u64 > file.num_bytes - partial.received {
                    let digest = file.digest.as_str();
                    let _ = fs::remove_file(self.cache.incomplete(self.name, digest));
                    return Err(format!(
                        "{} is not the file that {} lists: it is longer than {} bytes",
                        file.path,
                        self.hub.endpoint(),
                        file.num_bytes
                    ));
                }
                partial.take(piece).map_err(|e| format!("cannot write {}: {e}", file.path))?;
                fetched += piece.len() as u64;
                bar.show(partial.received, Some(file.num_bytes));
                Ok(())
            });
            let mut reason = match taken {
                Err(Broken::Consumer(problem)) => return Err(Trouble::Refused(problem)),
                Err(Broken::Connection(e)) => e.to_string(),
                Ok(()) => "the connection has ended".to_owned(),
            };
            if partial.received < file.num_bytes {
                // The pause counts too, or a server that sends one byte per connection would never be given up.
                if let (false, Err(e)) = (rate.is_too_slow, rate.came(0, PAUSE)) {
                    reason = e.to_string();
                }
                if rate.is_too_slow || partial.received <= reached {
                    return Err(Trouble::Unreachable(format!(
                        "{} ends after {} of {} bytes: {reason}; run the same command again, and it fetches the rest",
                        file.path, partial.received, file.num_bytes
                    )));
                }
                reached = partial.received;
                std::thread::sleep(PAUSE);
            }
        }
        Ok(fetched)
    }

    fn unwritten(&self, file: &RemoteFile, error: &io::Error) -> Trouble {
        Trouble::Refused(format!("cannot write {}: {error}", file.path))
    }

    fn bar(&self, file: &RemoteFile, received: u64) -> TaskBar {
        let mut bar = TaskBar::new(&file.path, Unit::Bytes, self.quiet);
        if !self.quiet && !bar.is_drawn() {
            let from = match received {
                0 => String::new(),
                _ => format!(", from byte {received} on"),
            };
            bar.say(&format!("fetching {}, {} bytes{from}", file.path, file.num_bytes));
        }
        // The speed is that of the bytes that come now.
        bar.show(received, Some(file.num_bytes));
        bar
    }
}

impl Partial {
    /// The part that an earlier attempt has left, or nothing.
    fn of(file: File, of: &RemoteFile) -> io::Result<Self> {
        let received = file.metadata()?.len();
        let mut partial = Self { file, hasher: hasher(of), received };
        if received > of.num_bytes {
            partial.restart(of)?;
        }
        let hashed = http::pieces(&partial.file, |piece| {
            partial.hasher.update(piece);
            Ok(())
        });
        match hashed {
            Err(Broken::Connection(e)) => Err(e),
            _ => Ok(partial),
        }
    }

    fn restart(&mut self, of: &RemoteFile) -> io::Result<()> {
        self.file.set_len(0)?;
        self.file.seek(SeekFrom::Start(0))?;
        (self.hasher, self.received) = (hasher(of), 0);
        Ok(())
    }

    fn take(&mut self, piece: &[u8]) -> io::Result<()> {
        self.file.write_all(piece)?;
        self.hasher.update(piece);
        self.received += piece.len() as u64;
        Ok(())
    }
}

/// The digest of the bytes that arrive.
fn hasher(of: &RemoteFile) -> Box<dyn DynDigest> {
    match of.digest {
        FileDigest::Sha256(_) => Box::new(Sha256::new()),
        FileDigest::GitSha1(_) => {
            Box::new(Sha1::new().chain_update(format!("blob {}\0", of.num_bytes)))
        }
    }
}
