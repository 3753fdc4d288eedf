//! How members of a group to be find and connect to each other: each opens its door, tells the
//! others where it is, and lets those in who know its secret.
//!
//! The cards travel through the store where the ranks have met, or within the larger group that they
//! come from. Knows nothing of what the connections are used for.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};

use crate::store::{
    Address, Listener, Refusal, Verdict, answer_hello, listen_by_tcp, listen_locally, read_hello,
    say_hello,
};
use crate::warning::warn;
use crate::{CollectiveError, Group, Meeting, Store};

/// How long a stranger may take to say hello before the next connection is looked at.
const HELLO_LIMIT: Duration = Duration::from_millis(500);

/// Where a rank can be reached; empty where it does not listen.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Card {
    /// The name of an abstract socket of its host.
    local: String,
    /// Host and port.
    pub(crate) tcp: (String, u16),
    /// What to present there.
    secret: String,
}

/// What a rank listens on.
#[derive(Debug)]
pub(crate) struct Door {
    local: Listener,
    tcp: Option<Listener>,
    card: Card,
}

/// Which side of the door.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// The host's own processes.
    Local,
    /// Anybody.
    Tcp,
}

impl Door {
    /// Listens within the host, and, if `host` is given, on a TCP port of that address.
    pub(crate) fn open(host: Option<&str>, rank: usize) -> Result<Self, CollectiveError> {
        let fail = |reason| CollectiveError::Meeting {
            rank,
            world_size: 0,
            place: "its own door".into(),
            reason,
        };
        let now = Instant::now();
        let secret = Meeting::fresh_secret();
        let name = format!("paceline-{}", Meeting::fresh_secret());
        let local = listen_locally(&name, now).map_err(fail)?;
        let mut card = Card { local: name, secret, ..Card::default() };
        let tcp = match host {
            Some(host) => {
                let (listener, address) = listen_by_tcp(host, 0, now).map_err(fail)?;
                let port = match (&listener, address) {
                    (Listener::Tcp(listener), _) => listener.local_addr(),
                    _ => unreachable!("a TCP listener was asked for"),
                };
                let port = port.map_err(|e| fail(e.to_string()))?.port();
                card.tcp = (host.to_owned(), port);
                Some(listener)
            }
            None => None,
        };
        Ok(Self { local, tcp, card })
    }

    /// Everybody's cards, in rank order, through the store.
    pub(crate) fn swap_at(
        &self,
        store: &Store,
        rank: usize,
        world: usize,
    ) -> Result<Vec<Card>, CollectiveError> {
        let wrap = |e: postcard::Error| CollectiveError::Object(e.to_string());
        let own = postcard::to_stdvec(&self.card).map_err(wrap)?;
        store.set(&format!("card/{rank}"), &own)?;
        let card = |peer| postcard::from_bytes(&store.get(&format!("card/{peer}"))?).map_err(wrap);
        (0..world).map(card).collect()
    }

    /// The cards of a group's `members`, in their order. All ranks of the group call this.
    pub(crate) fn swap_within(
        &self,
        group: &Group,
        members: &[usize],
    ) -> Result<Vec<Card>, CollectiveError> {
        let cards = group.all_gather_object(&self.card)?;
        Ok(members.iter().map(|&member| cards[member].clone()).collect())
    }

    /// Connects this rank to others: it lets in those of `from`, and goes to those of `to`. The
    /// connections are in the order of `cards`.
    pub(crate) fn connect(
        &self,
        side: Side,
        cards: &[Card],
        rank: usize,
        (from, to): (&[usize], &[usize]),
        limit: Duration,
    ) -> Result<Vec<Option<OwnedFd>>, CollectiveError> {
        let deadline = Instant::now() + limit;
        let world = cards.len();
        let fail = |place: String, reason| CollectiveError::Meeting {
            rank,
            world_size: world,
            place,
            reason,
        };
        let mut connections: Vec<Option<OwnedFd>> = (0..world).map(|_| None).collect();
        for &peer in to {
            let card = &cards[peer];
            let address = match side {
                Side::Local => Address::Local(card.local.clone()),
                Side::Tcp => Address::Tcp(card.tcp.0.clone(), card.tcp.1),
            };
            let connected = knock(&address, rank, world, &card.secret, deadline);
            let place = || match side {
                Side::Local => format!("the door of rank {peer}"),
                Side::Tcp => format!("the door of rank {peer}, {}:{}", card.tcp.0, card.tcp.1),
            };
            connections[peer] = Some(connected.map_err(|reason| fail(place(), reason))?);
        }
        let listener = match side {
            Side::Local => Some(&self.local),
            Side::Tcp => self.tcp.as_ref(),
        };
        if let Some(listener) = listener {
            self.let_in(listener, from, &mut connections, deadline)
                .map_err(|reason| fail("its own door".into(), reason))?;
        }
        Ok(connections)
    }

    fn let_in(
        &self,
        listener: &Listener,
        awaited: &[usize],
        connections: &mut [Option<OwnedFd>],
        deadline: Instant,
    ) -> Result<(), String> {
        loop {
            let absent: Vec<usize> =
                awaited.iter().copied().filter(|&rank| connections[rank].is_none()).collect();
            if absent.is_empty() {
                return Ok(());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let timeout = Timespec::try_from(left).map_err(|e| e.to_string())?;
            let listening = listener.as_fd();
            let mut fds = [PollFd::new(&listening, PollFlags::IN)];
            match poll(&mut fds, Some(&timeout)) {
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(error.to_string()),
                Ok(0) => return Err(format!("ranks {absent:?} did not come in time")),
                Ok(_) => {}
            }
            let (socket, who) = listener.accept().map_err(|e| e.to_string())?;
            // Strangers, and whatever else finds the door, are turned away without ending the run.
            let Some(socket) = socket else {
                warn(&format!("turned away {who}"));
                continue;
            };
            let hello_deadline = Instant::now() + HELLO_LIMIT;
            let hello =
                match read_hello(&socket, connections.len(), &self.card.secret, hello_deadline) {
                    Ok(hello) => hello,
                    Err(error) => {
                        warn(&format!("turned away {who}: {error}"));
                        continue;
                    }
                };
            let verdict = match hello.verdict {
                Verdict::Welcome if !absent.contains(&hello.rank) => Verdict::RankTaken,
                verdict => verdict,
            };
            if answer_hello(&socket, verdict, hello_deadline).is_ok() && verdict == Verdict::Welcome
            {
                connections[hello.rank] = Some(socket);
            } else {
                warn(&format!("turned away {who}: {verdict:?}"));
            }
        }
    }
}

/// Connects and presents the secret. Whoever is asked has opened its door before it told where.
fn knock(
    address: &Address,
    rank: usize,
    world: usize,
    secret: &str,
    deadline: Instant,
) -> Result<OwnedFd, String> {
    loop {
        let refused = match address.connect(deadline).map_err(Refusal::not_yet) {
            Ok(socket) => match say_hello(&socket, rank, world, secret) {
                Ok(()) => return Ok(socket),
                Err(refused) => refused,
            },
            Err(refused) => refused,
        };
        match refused {
            // A full queue of connections, or a slow answer, may pass.
            Refusal::NotYet(_) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(5));
            }
            refused => return Err(refused.reason(rank, world)),
        }
    }
}
