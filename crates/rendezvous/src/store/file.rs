//! The rendezvous file: rank 0's addresses and the run's secret, for ranks that see the same folder.
//!
//! The file only says where to connect. A rank that connects learns whether rank 0 is alive, so none joins a
//! dead run that has left its file.

use std::fs::OpenOptions;
use std::io::{self, Read, Write};
use std::net::{IpAddr, UdpSocket};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use crate::address::SocketAddress;

const FIRST_LINE: &str = "paceline rendezvous 2";
/// More bytes than any rendezvous file has.
const MAX_FILE_BYTES: u64 = 64 << 10;

/// The contents of a rendezvous file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RendezvousFile {
    /// Differs between hosts, and on one host from boot to boot.
    pub(crate) boot: String,
    pub(crate) addresses: Vec<SocketAddress>,
    pub(crate) secret: String,
}

impl RendezvousFile {
    /// Writes the file: readable only by this user, and visible only when complete. Replaces an older file.
    pub(crate) fn write(&self, path: &Path) -> io::Result<()> {
        let text = self.to_text();
        let mut partial = path.as_os_str().to_owned();
        partial.push(format!(".{}", std::process::id()));
        let write = || {
            let mut options = OpenOptions::new();
            let mut file = options.write(true).create_new(true).mode(0o600).open(&partial)?;
            file.write_all(text.as_bytes())?;
            std::fs::rename(&partial, path)
        };
        write().inspect_err(|_| {
            let _ = std::fs::remove_file(&partial);
        })
    }

    /// The contents of the file.
    pub(crate) fn to_text(&self) -> String {
        let mut text = format!("{FIRST_LINE}\nsecret {}\nboot {}\n", self.secret, self.boot);
        for address in &self.addresses {
            text += &match address {
                SocketAddress::Local(name) => format!("local {name}\n"),
                SocketAddress::Tcp(host, port) => format!("tcp {port} {host}\n"),
            };
        }
        text + "end\n"
    }

    /// Reads the file. The error says why it cannot be used now; a later attempt may succeed.
    pub(crate) fn read(path: &Path) -> Result<Self, String> {
        let read = || -> io::Result<(u32, String)> {
            let file = paceline_files::open(path)?;
            let owner = file.metadata()?.uid();
            let mut text = String::new();
            file.take(MAX_FILE_BYTES).read_to_string(&mut text)?;
            Ok((owner, text))
        };
        let (owner, text) = read().map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => "there is no rendezvous file".into(),
            _ => format!("the rendezvous file cannot be read: {error}"),
        })?;
        if owner != rustix::process::geteuid().as_raw() {
            return Err("the rendezvous file belongs to another user".into());
        }
        Self::parse(&text).ok_or_else(|| "the file there is not a rendezvous file".into())
    }

    /// Parses the contents of a file. `None` if the text is not that of a rendezvous file.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        // `str::lines` would take a carriage return off the end of a secret.
        let mut lines = text.split('\n');
        if lines.next() != Some(FIRST_LINE) {
            return None;
        }
        let mut found = Self { boot: String::new(), addresses: Vec::new(), secret: String::new() };
        for line in lines {
            let (key, value) = line.split_once(' ').unwrap_or((line, ""));
            match key {
                "secret" => found.secret = value.into(),
                "boot" => found.boot = value.into(),
                "local" => found.addresses.push(SocketAddress::Local(value.into())),
                "tcp" => {
                    let (port, host) = value.split_once(' ')?;
                    found.addresses.push(SocketAddress::Tcp(host.into(), port.parse().ok()?));
                }
                "end" => return (!found.secret.is_empty()).then_some(found),
                _ => return None,
            }
        }
        None
    }

    /// The addresses that this host can use, the best address first.
    pub(crate) fn reachable(&self) -> Vec<SocketAddress> {
        let is_same_host = !self.boot.is_empty() && self.boot == boot_id();
        // A container of the same host may have its own network, so all addresses stay.
        let usable =
            |address: &&SocketAddress| is_same_host || matches!(address, SocketAddress::Tcp(..));
        self.addresses.iter().filter(usable).cloned().collect()
    }
}

/// A text that differs between hosts and boots. Empty if unknown.
pub(crate) fn boot_id() -> String {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    text.trim().into()
}

/// The names that other hosts may use for this one.
pub(crate) fn own_hosts() -> Vec<String> {
    let mut hosts = Vec::new();
    // No packet is sent. The kernel only says which of this host's addresses it would use.
    let route = || -> io::Result<IpAddr> {
        let socket = UdpSocket::bind("0.0.0.0:0")?;
        socket.connect("192.0.2.1:9")?;
        Ok(socket.local_addr()?.ip())
    };
    if let Ok(ip) = route() {
        hosts.push(ip.to_string());
    }
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    if !name.is_empty() && !name.contains(char::is_whitespace) {
        hosts.push(name);
    }
    hosts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> RendezvousFile {
        let addresses =
            vec![SocketAddress::Local("paceline-abc".into()), SocketAddress::Tcp("::1".into(), 7)];
        RendezvousFile { boot: boot_id(), addresses, secret: "s3".into() }
    }

    #[test]
    fn what_is_written_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rendezvous");
        example().write(&path).unwrap();
        assert_eq!(RendezvousFile::read(&path).unwrap(), example());
        assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o600);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn other_hosts_use_tcp_only() {
        assert_eq!(example().reachable(), example().addresses);
        let elsewhere = RendezvousFile { boot: "another".into(), ..example() };
        assert_eq!(elsewhere.reachable(), [SocketAddress::Tcp("::1".into(), 7)]);
    }

    #[test]
    fn other_and_incomplete_files_are_refused() {
        for text in
            ["", "paceline-long-gone\nsecret\n", "paceline rendezvous 2\nsecret s\nboot b\n"]
        {
            assert_eq!(RendezvousFile::parse(text), None, "{text:?}");
        }
    }
}
