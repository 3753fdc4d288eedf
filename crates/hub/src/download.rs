//! Fetches the files of a data set from where they are published.
//!
//! Each file appears complete and with the published checksum, or not at all.
//!
//! If several processes want the same file at once, one fetches it, and the others wait.

use std::fs::{self, File};
use std::io::{self, Seek, Write};
use std::path::Path;

use flate2::read::GzDecoder;
use md5::{Digest, Md5};
use paceline_files::Printable;
use paceline_host::bar::{CountUnit, TaskBar};
use paceline_host::disk::{Disk, partial};
use ureq::Agent;

use self::http::{Broken, Partial, Rate};
use crate::published::{Item, Source};

pub(crate) mod http;

impl Source {
    /// Fetches the files missing in `folder` from `address`, the published one or a mirror. Unless `quiet`, reports progress
    /// on standard error. An error has problem and remedy, without the flag or the command.
    pub fn fetch(&self, address: &str, folder: &Path, quiet: bool) -> Result<(), String> {
        let missing: Vec<&Item> =
            self.items.iter().filter(|item| !self.has(folder, item)).collect();
        if missing.is_empty() {
            return Ok(());
        }
        // If the download fails, new folders that are still empty are removed, innermost first.
        let is_new = |path: &&Path| !path.as_os_str().is_empty() && !path.exists();
        let new_folders: Vec<&Path> = folder.ancestors().take_while(is_new).collect();
        let fetched = fs::create_dir_all(folder)
            .map_err(|e| format!("cannot make the folder {}: {e}", folder.printable()))
            .and_then(|()| {
                let agent = http::agent(true);
                missing
                    .iter()
                    .try_for_each(|item| self.obtain(&agent, address, folder, item, quiet))
            });
        fetched.map_err(|problem| {
            for folder in new_folders {
                let _ = fs::remove_dir(folder);
            }
            let names: Vec<&str> = missing.iter().map(|item| item.name).collect();
            format!(
                "{problem}; try again, pass a --mirror that has the same files, or put {} into {} yourself{}",
                names.join(", "),
                folder.printable(),
                if missing.iter().any(|item| item.is_archive()) { ", unpacked," } else { "" }
            )
        })
    }

    /// Whether a file is there already, packed or unpacked.
    fn has(&self, folder: &Path, item: &Item) -> bool {
        let is_there = |name: &str| {
            [folder.to_owned(), folder.join(self.subfolder)].iter().any(|f| f.join(name).exists())
        };
        if item.is_archive() {
            return item.members.iter().all(|member| is_there(member));
        }
        is_there(item.name) || item.name.strip_suffix(".gz").is_some_and(is_there)
    }

    /// Fetches one file, unless another process has meanwhile.
    fn obtain(
        &self,
        agent: &Agent,
        address: &str,
        folder: &Path,
        item: &Item,
        quiet: bool,
    ) -> Result<(), String> {
        let partial = partial(&folder.join(item.name));
        let write = |e: io::Error| format!("cannot write {}: {e}", partial.printable());
        let claimed = claim(&partial, || self.has(folder, item)).map_err(write)?;
        let Some(mut file) = claimed else { return Ok(()) };
        let same = file.try_clone().map_err(write)?;
        let url = format!("{}/{}", address.trim_end_matches('/'), item.name);
        let fetched = receive(agent, &url, item, same, quiet).and_then(|()| {
            if item.is_archive() {
                self.unpack(folder, item, &mut file)
            } else {
                file.sync_all()
                    .and_then(|()| fs::rename(&partial, folder.join(item.name)))
                    .map_err(write)
            }
        });
        // An unpacked archive is no longer needed, and part of a file is useless.
        if item.is_archive() || fetched.is_err() {
            let _ = fs::remove_file(&partial);
        }
        fetched
    }

    /// Unpacks only the expected members of an archive, each complete or not at all.
    fn unpack(&self, folder: &Path, item: &Item, archive: &mut File) -> Result<(), String> {
        let target = folder.join(self.subfolder);
        let unpack = || -> io::Result<()> {
            archive.rewind()?;
            fs::create_dir_all(&target)?;
            for entry in tar::Archive::new(GzDecoder::new(archive)).entries()? {
                let mut entry = entry?;
                let path = entry.path()?.into_owned();
                let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
                if item.members.contains(&name) {
                    // An archive with the right digest has files of the right size.
                    let write = |out: &mut (dyn Write + Send)| io::copy(&mut entry, out);
                    Disk::default().replace(&target.join(name), None, write)?;
                }
            }
            Ok(())
        };
        unpack()
            .map_err(|e| format!("cannot unpack {} into {}: {e}", item.name, target.printable()))?;
        if self.has(folder, item) {
            return Ok(());
        }
        Err(format!("{} does not hold all of {}", item.name, item.members.join(", ")))
    }
}

/// Takes the right to fetch a file: a lock on its partial file, for which it waits. `None` if the file is there once the lock
/// is held.
fn claim(partial: &Path, is_there: impl Fn() -> bool) -> io::Result<Option<File>> {
    let file = http::locked(partial, || {})?;
    if is_there() {
        let _ = fs::remove_file(partial);
        return Ok(None);
    }
    file.set_len(0)?;
    Ok(Some(file))
}

/// Copies the response of `url` to a file, and checks its MD5 checksum.
fn receive(agent: &Agent, url: &str, item: &Item, file: File, quiet: bool) -> Result<(), String> {
    let fail = |e: &dyn std::fmt::Display| format!("cannot fetch {url}: {e}");
    let response = agent.get(url).call().map_err(|e| fail(&e))?;
    let body = response.into_body();
    let num_bytes = body.content_length();
    let mut bar = TaskBar::new(item.name, CountUnit::Bytes, quiet);
    if !quiet && !bar.is_drawn() {
        bar.say(&format!("fetching {url}"));
    }
    let mut rate = Rate::new();
    let watched = rate.watch(body.into_reader()).map_err(|e| fail(&e))?;
    let mut partial = Partial::new(file, Box::new(Md5::new()));
    let taken = partial.receive(watched, item.max_bytes, &mut bar, num_bytes);
    let other = match taken {
        Err(Broken::Connection(e)) => {
            return Err(fail(&format!("it ends after {} bytes: {e}", partial.received)));
        }
        Err(Broken::Disk(e)) => return Err(format!("cannot write {}: {e}", item.name)),
        Err(Broken::TooLong) => format!("it is longer than {} bytes", item.max_bytes),
        Ok(()) => match partial.digest() {
            md5 if md5 == item.md5 => return Ok(()),
            md5 => format!("its MD5 is {md5}, and not {}", item.md5),
        },
    };
    Err(format!("what {url} sends is not the published file: {other}"))
}

#[cfg(test)]
mod tests;
