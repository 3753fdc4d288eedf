//! How rank 0 hosts the store of a rendezvous, and how the other ranks find rank 0.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use paceline_files::Printable;

use super::client::Candidates;
use super::file::{RendezvousFile, boot_id, own_hosts};
use super::server::Server;
use crate::address::{SocketAddress, listen_by_tcp, listen_locally};
use crate::deadline::Deadline;
use crate::key::RunKey;
use crate::warning::warn;
use crate::{Rendezvous, RendezvousPoint};

/// A server that listens where the other ranks will look for it.
#[derive(Debug)]
pub(crate) struct HostedStore {
    pub(crate) server: Server,
    own_address: SocketAddress,
    secret: String,
    /// Removed when the rendezvous has succeeded or failed.
    _file: Option<WrittenFile>,
}

impl HostedStore {
    pub(crate) fn start(
        rendezvous: &Rendezvous,
        world: usize,
        deadline: &Deadline,
    ) -> Result<Self, String> {
        let (mut secret, mut file) = (rendezvous.secret.clone(), None);
        let (listeners, own_address) = match &rendezvous.point {
            RendezvousPoint::Local { name } => {
                (vec![listen_locally(name, deadline)?], SocketAddress::Local(name.clone()))
            }
            RendezvousPoint::Tcp { host, port } => {
                let (listener, own) = listen_by_tcp(host, *port, deadline)?;
                if secret.is_empty() && world > 1 {
                    warn(&format!(
                        "anybody who can reach {host}:{port} may join this run; set \
                         PACELINE_SECRET to the same random text for all ranks"
                    ));
                }
                (vec![listener], SocketAddress::Tcp(own.ip().to_string(), own.port()))
            }
            RendezvousPoint::File(path) => {
                // No other process can know this name before the file is there, so it is free.
                let fresh = || Rendezvous::fresh_secret().map_err(|error| error.to_string());
                let name = format!("paceline-{}", fresh()?);
                secret = fresh()?;
                let own_address = SocketAddress::Local(name.clone());
                let mut listeners = vec![listen_locally(&name, deadline)?];
                let mut addresses = vec![own_address.clone()];
                // Even a host without a network can have several ranks, which find each other at the local socket.
                if let Ok((listener, own)) = listen_by_tcp("", 0, deadline) {
                    listeners.push(listener);
                    let reached_by = |host| SocketAddress::Tcp(host, own.port());
                    addresses.extend(own_hosts().into_iter().map(reached_by));
                }
                let secret = secret.clone();
                file = Some((path, RendezvousFile { boot: boot_id(), addresses, secret }));
                (listeners, own_address)
            }
            RendezvousPoint::Agent { .. } => {
                return Err("torchrun's agent hosts the store there".into());
            }
        };
        let server = Server::start(listeners, world, &secret, rendezvous.launch)
            .map_err(|e| format!("rank 0 cannot serve: {e}"))?;
        let file = file.map(|(path, contents)| WrittenFile::new(path, contents)).transpose()?;
        Ok(Self { server, own_address, secret, _file: file })
    }

    /// How rank 0 itself reaches its server.
    pub(crate) fn candidates(&self) -> Candidates {
        let (addresses, key) = (vec![self.own_address.clone()], RunKey::of_secret(&self.secret));
        Candidates { addresses, key, may_be_stale: false }
    }
}

/// The addresses at which the other ranks can look for rank 0 now. The error says why there is no address yet.
pub(crate) fn find_host(rendezvous: &Rendezvous) -> Result<Candidates, String> {
    let address = match &rendezvous.point {
        RendezvousPoint::File(path) => {
            let file = RendezvousFile::read(path)?;
            let (addresses, key) = (file.reachable(), RunKey::of_secret(&file.secret));
            return Ok(Candidates { addresses, key, may_be_stale: true });
        }
        RendezvousPoint::Local { name } => SocketAddress::Local(name.clone()),
        RendezvousPoint::Tcp { host, port } | RendezvousPoint::Agent { host, port, .. } => {
            SocketAddress::Tcp(host.clone(), *port)
        }
    };
    let (addresses, key) = (vec![address], RunKey::of_secret(&rendezvous.secret));
    Ok(Candidates { addresses, key, may_be_stale: false })
}

/// The rendezvous file that rank 0 has written. Dropping this value removes the file.
#[derive(Debug)]
struct WrittenFile {
    path: PathBuf,
    contents: RendezvousFile,
}

impl WrittenFile {
    fn new(path: &Path, contents: RendezvousFile) -> Result<Self, String> {
        let written = contents.write(path);
        written.map_err(|e| format!("rank 0 cannot write the rendezvous file: {e}"))?;
        // Some file systems know no permissions.
        if path.metadata().is_ok_and(|file| file.mode() & 0o077 != 0) {
            warn(&format!(
                "other users may read {}, and with the secret in it they may join this run; use a folder whose \
                 file system keeps permissions",
                path.printable()
            ));
        }
        Ok(Self { path: path.into(), contents })
    }
}

impl Drop for WrittenFile {
    fn drop(&mut self) {
        // Meanwhile another run may have written its own file there.
        if RendezvousFile::read(&self.path).is_ok_and(|there| there == self.contents) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}
