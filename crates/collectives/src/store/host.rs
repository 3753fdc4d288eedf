//! Rank 0's side of a meeting, where it hosts the store, and how the others find it.

use std::path::{Path, PathBuf};
use std::time::Instant;

use super::address::{Address, Listener, listen_by_tcp, listen_locally};
use super::client::Candidates;
use super::file::{Published, boot_id, own_hosts};
use super::server::Server;
use crate::warning::warn;
use crate::{Meeting, MeetingPoint};

/// A server that listens where the others will look for it.
#[derive(Debug)]
pub(crate) struct Host {
    pub(crate) server: Server,
    own_address: Address,
    secret: String,
    /// Removed when the meeting is over, however it ended.
    _file: Option<MeetingFile>,
}

impl Host {
    pub(crate) fn start(
        meeting: &Meeting,
        world: usize,
        deadline: Instant,
    ) -> Result<Self, String> {
        let serve = |listeners: Vec<Listener>, secret: &str| {
            Server::start(listeners, world, secret).map_err(|e| format!("rank 0 cannot serve: {e}"))
        };
        let secret = meeting.secret.clone();
        match &meeting.point {
            MeetingPoint::Local { name } => {
                let server = serve(vec![listen_locally(name, deadline)?], &secret)?;
                Ok(Self { server, own_address: Address::Local(name.clone()), secret, _file: None })
            }
            MeetingPoint::Tcp { host, port } => {
                let (listener, own_address) = listen_by_tcp(host, *port, deadline)?;
                if secret.is_empty() && world > 1 {
                    warn(&format!(
                        "whoever reaches {host}:{port} may join this run; set PACELINE_SECRET to \
                         the same random text for all ranks"
                    ));
                }
                Ok(Self {
                    server: serve(vec![listener], &secret)?,
                    own_address,
                    secret,
                    _file: None,
                })
            }
            MeetingPoint::File(path) => {
                // Nobody can know of these before the file is there, so they cannot be taken.
                let name = format!("paceline-{}", Meeting::fresh_secret());
                let secret = Meeting::fresh_secret();
                let own_address = Address::Local(name.clone());
                let mut listeners = vec![listen_locally(&name, deadline)?];
                let mut addresses = vec![own_address.clone()];
                // A host without a network can still meet the ranks that it starts itself.
                if let Ok((listener, Address::Tcp(_, port))) = listen_by_tcp("", 0, deadline) {
                    listeners.push(listener);
                    addresses.extend(own_hosts().into_iter().map(|host| Address::Tcp(host, port)));
                }
                let server = serve(listeners, &secret)?;
                let published = Published { boot: boot_id(), addresses, secret: secret.clone() };
                let file = Some(MeetingFile::publish(path, published)?);
                Ok(Self { server, own_address, secret, _file: file })
            }
            MeetingPoint::Agent { .. } => Err("torchrun's agent hosts the store there".into()),
        }
    }

    /// How rank 0 itself reaches its server.
    pub(crate) fn candidates(&self) -> Candidates {
        let (addresses, secret) = (vec![self.own_address.clone()], self.secret.clone());
        Candidates { addresses, secret, may_be_stale: false }
    }
}

/// Where the other ranks look for rank 0 now; the error says why nowhere yet.
pub(crate) fn find_host(meeting: &Meeting) -> Result<Candidates, String> {
    let address = match &meeting.point {
        MeetingPoint::File(path) => {
            let published = Published::read(path)?;
            let addresses = published.reachable();
            return Ok(Candidates { addresses, secret: published.secret, may_be_stale: true });
        }
        MeetingPoint::Local { name } => Address::Local(name.clone()),
        MeetingPoint::Tcp { host, port } | MeetingPoint::Agent { host, port, .. } => {
            Address::Tcp(host.clone(), *port)
        }
    };
    let (addresses, secret) = (vec![address], meeting.secret.clone());
    Ok(Candidates { addresses, secret, may_be_stale: false })
}

/// A published meeting file.
#[derive(Debug)]
struct MeetingFile {
    path: PathBuf,
    published: Published,
}

impl MeetingFile {
    fn publish(path: &Path, published: Published) -> Result<Self, String> {
        let written = published.write(path);
        written.map_err(|e| format!("rank 0 cannot write the meeting file: {e}"))?;
        Ok(Self { path: path.into(), published })
    }
}

impl Drop for MeetingFile {
    fn drop(&mut self) {
        // By now, another run may have written its own there.
        if Published::read(&self.path).is_ok_and(|there| there == self.published) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}
