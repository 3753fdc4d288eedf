//! One file into the cache: complete and with the digest that the Hub states, or not at all.
//!
//! Input: a file of a listing. Output: a blob. Bytes that came before a connection breaks are kept, and the next attempt
//! asks for the rest. One process fetches a file, and others wait for it. This module does not know which files are needed.

use std::fs;
use std::io;
use std::time::Duration;

use paceline_files::Printable;
use paceline_host::bar::{CountUnit, TaskBar};
use paceline_host::streams;
use sha1::Sha1;
use sha2::digest::DynDigest;
use sha2::{Digest, Sha256};
use tracing::debug;

use super::cache::Cache;
use super::name::Name;
use super::remote::{Hub, RemoteFile, Trouble};
use crate::download::http::{Broken, Partial, Rate};

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

impl Fetcher<'_> {
    /// Whether a file is there already.
    pub fn has(&self, file: &RemoteFile) -> bool {
        let blob = self.cache.blob(self.name, &file.digest);
        fs::metadata(blob).is_ok_and(|there| there.is_file() && there.len() == file.num_bytes)
    }

    /// Fetches a file, unless it is there. Returns how many bytes came over the network.
    pub fn obtain(&self, file: &RemoteFile) -> Result<u64, Trouble> {
        if self.has(file) {
            return Ok(0);
        }
        let digest = &file.digest;
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
        let opened = paceline_files::open_or_create(&incomplete).map_err(write)?;
        let len = opened.metadata().map_err(write)?.len();
        let mut partial = Partial::new(opened, hasher(file));
        // The part that an earlier attempt has left.
        let kept =
            if len > file.num_bytes { partial.restart(hasher(file)) } else { partial.keep() };
        kept.map_err(write)?;
        let bar = self.bar(file, partial.received);
        let fetched = self.receive(file, &mut partial, bar)?;
        partial.file.sync_all().map_err(write)?;
        let found = partial.digest();
        if found != *digest {
            let _ = fs::remove_file(&incomplete);
            return Err(Trouble::Refused(format!(
                "{} is not the file that {} lists: its digest is {found}, and not {digest}; what was received has been \
                 removed, so try again",
                file.path, self.hub.endpoint
            )));
        }
        let blob = self.cache.blob(self.name, digest);
        debug!("{} is complete, with {fetched} bytes from the network", file.path);
        fs::rename(&incomplete, blob).map_err(write)?;
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
            let cannot = |e| Trouble::Refused(format!("cannot write {}: {e}", file.path));
            let (offset, body) = self.hub.open(self.name, self.commit, file, partial.received)?;
            if offset != partial.received {
                // This server sends whole files only.
                partial.restart(hasher(file)).map_err(cannot)?;
            }
            let (watched, before) = (rate.watch(body).map_err(cannot)?, partial.received);
            let taken = partial.receive(watched, file.num_bytes, &mut bar, Some(file.num_bytes));
            fetched += partial.received - before;
            let mut reason = match taken {
                Ok(()) => "the connection has ended".to_owned(),
                Err(Broken::Connection(e)) => e.to_string(),
                Err(Broken::Disk(e)) => return Err(cannot(e)),
                Err(Broken::TooLong) => {
                    let _ = fs::remove_file(self.cache.incomplete(self.name, &file.digest));
                    return Err(Trouble::Refused(format!(
                        "{} is not the file that {} lists: it is longer than {} bytes",
                        file.path, self.hub.endpoint, file.num_bytes
                    )));
                }
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

    fn bar(&self, file: &RemoteFile, received: u64) -> TaskBar {
        let mut bar = TaskBar::new(&file.path, CountUnit::Bytes, self.quiet);
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

/// The digest of the bytes that arrive.
fn hasher(of: &RemoteFile) -> Box<dyn DynDigest> {
    match of.digest.len() {
        64 => Box::new(Sha256::new()),
        _ => Box::new(Sha1::new().chain_update(format!("blob {}\0", of.num_bytes))),
    }
}
