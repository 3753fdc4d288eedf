//! A group whose ranks find each other through the store of another program, such as that of `torch.distributed`.
//!
//! Input: a rank's number, and a function by which all ranks exchange texts. Output: a group, and a mailbox for messages. The
//! ranks choose the transport themselves. This module does not know what the store is.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use paceline_rendezvous::{HostRoute, PeerAddress, PeerListener, Rendezvous, RunKey, SocketKind};
use rustix::process::{Resource, geteuid, getrlimit};
use serde::{Deserialize, Serialize};

use crate::from_env::{Spot, TRANSPORT, choose, refusal, wish};
use crate::group::{Connect, Lineage};
use crate::mailbox::Mailbox;
use crate::{CollectiveError, Group, GroupOptions, Result, SharedHeap, Transport};

/// A rank's number in the group that it forms.
#[derive(Clone, Debug)]
pub struct Member {
    /// The number of the rank in the group, from 0.
    pub rank: usize,
    /// The number of ranks in the group.
    pub world_size: usize,
    /// The number by which errors name each rank of the group. Empty if these are the numbers in the group.
    pub names: Vec<usize>,
}

/// A way to exchange texts: passes on a text under a name, and returns the texts of all ranks in rank order, or an error in words.
pub type Exchange<'a> = &'a mut dyn FnMut(&str, String) -> Result<Vec<String>, String>;

/// How the ranks of a new group meet.
pub struct Meeting<'a> {
    /// Passes a text to all ranks.
    pub exchange: Exchange<'a>,
    /// The host and port of a server that all ranks reach. The way there shows the address of this host.
    pub server: Option<(String, u16)>,
    /// Once it is set, the ranks that have come wait for the others no longer.
    pub over: Option<Arc<AtomicBool>>,
}

/// The text that each rank shows to all others.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Newcomer {
    /// The value of the environment variable that names the transport.
    wish: String,
    /// Ranks with the same text can share memory.
    host: String,
    route: HostRoute,
    /// The secret of rank 0 is that of the group.
    secret: String,
    /// The longest heaps, in bytes, that this rank can map for its host.
    heap_bytes: usize,
}

impl Group {
    /// Meets the other ranks through a store, and forms a group, a mailbox and a heap with them. Ranks of one host, user and network namespace
    /// share memory; otherwise they use `hybrid` or `tcp`, as with [`Group::from_env`], and PACELINE_TRANSPORT chooses otherwise.
    ///
    /// Everybody who can read the store can join the group. Errors if the ranks cannot be connected within the limit.
    pub fn from_store(
        member: Member,
        meeting: Meeting<'_>,
        options: impl FnOnce(usize) -> GroupOptions,
    ) -> Result<(Self, Option<Mailbox>, Option<SharedHeap>)> {
        let variable = std::env::var(TRANSPORT).unwrap_or_default();
        let (rank, names) = (member.rank, member.names.clone());
        let met = Self::meet(member, meeting, &variable, options)?;
        let Met { group, connections: Some((listener, addresses)), heap_bytes } = met else {
            return Ok((met.group, None, None));
        };
        let network =
            if group.transport() == Transport::Shm { SocketKind::Local } else { SocketKind::Tcp };
        let limit = group.options().timeout;
        // Only now, since all ranks have passed a barrier: the listener expects a rank once at a time.
        let mailbox = Mailbox::connect(&listener, network, &addresses, rank, &names, limit)?;
        let heap = group.heap(heap_bytes)?;
        Ok((group, Some(mailbox), heap))
    }

    /// Meets the other ranks by exchanging texts, and forms a group with them. `transport` names how they reach each other, as in
    /// PACELINE_TRANSPORT; an empty text leaves the choice to the ranks.
    ///
    /// Errors if the ranks cannot be connected within the limit of the options, which get the number of ranks of this host.
    pub fn from_exchange(
        member: Member,
        meeting: Meeting<'_>,
        transport: &str,
        options: impl FnOnce(usize) -> GroupOptions,
    ) -> Result<Self> {
        Ok(Self::meet(member, meeting, transport, options)?.group)
    }

    fn meet(
        member: Member,
        mut meeting: Meeting<'_>,
        transport: &str,
        options: impl FnOnce(usize) -> GroupOptions,
    ) -> Result<Met> {
        let Member { rank, world_size: world, names } = member;
        Self::check_world(rank, world)?;
        let own_wish = wish(Some(transport))?;
        if own_wish == Some(Transport::Mpi) {
            return Err(refusal(
                "mpi",
                "ranks that meet at a store are not MPI's; use shm, hybrid or tcp",
            ));
        }
        if world == 1 {
            let group = Self::threads_with(1, options(1))?.remove(0);
            return Ok(Met { group, connections: None, heap_bytes: 0 });
        }
        let (world_size, what) = (world, "its connections");
        let failed = |reason| CollectiveError::Setup { rank, world_size, what, reason };
        let (host, port) = meeting.server.unwrap_or((String::from("127.0.0.1"), 1));
        let route = HostRoute::to(&Rendezvous::by_tcp(host, port, ""), rank, world)?;
        let secret = if rank == 0 { Rendezvous::fresh_secret()? } else { String::new() };
        let (host, heap_bytes) = (host_id().map_err(failed)?, heap_bytes());
        let own = Newcomer { wish: transport.into(), host, route, secret, heap_bytes };
        let arrivals: Vec<Newcomer> =
            exchange(&mut meeting.exchange, "arrival", &own, world).map_err(failed)?;
        if arrivals[0].secret.is_empty() {
            return Err(failed("the store has no secret of rank 0".into()));
        }
        let spots = spots(&arrivals);
        let transport = choose(&spots, own_wish)?;
        let local_world = spots[rank].local_world;
        let address = address_of(rank, transport, &arrivals).map_err(failed)?;
        let by = match transport {
            Transport::Shm => Connect::Shm,
            Transport::Hybrid => Connect::Hybrid(&address, local_world),
            _ => Connect::Tcp(&address),
        };
        let key = RunKey::of_secret(&arrivals[0].secret);
        let listener = PeerListener::bind(&key, by.host(), rank, world)?.unless(meeting.over);
        let addresses: Vec<PeerAddress> =
            exchange(&mut meeting.exchange, "address", listener.address(), world)
                .map_err(failed)?;
        let lineage = Lineage { members: names.into(), ..Lineage::of_processes(&key) };
        let group = Self::form(&listener, &addresses, by, rank, options(local_world), lineage)?;
        let all_heaps = arrivals.iter().map(|of| of.heap_bytes).min().unwrap_or(0);
        let heap_bytes = all_heaps / local_world;
        Ok(Met { group, connections: Some((listener, addresses)), heap_bytes })
    }
}

/// A group that has formed, and what is left of its meeting if it has several ranks.
struct Met {
    group: Group,
    connections: Option<(PeerListener, Vec<PeerAddress>)>,
    /// The longest heap that each rank of this host can have.
    heap_bytes: usize,
}

/// The most addresses of a group's heaps, so that a program on a large host has room for hundreds of groups.
const MOST_HEAP_BYTES: usize = 1 << 38;

/// As many addresses as this host has memory. None if they are limited for this process.
fn heap_bytes() -> usize {
    let limits = [Resource::As, Resource::Fsize].map(|of| getrlimit(of).current);
    let system = rustix::system::sysinfo();
    let memory = system.totalram as usize * system.mem_unit as usize;
    if limits == [None, None] { memory.min(MOST_HEAP_BYTES) } else { 0 }
}

fn exchange<T: Serialize + for<'de> Deserialize<'de>>(
    by: &mut Exchange<'_>,
    name: &str,
    own: &T,
    world_size: usize,
) -> Result<Vec<T>, String> {
    let own = serde_json::to_string(own).map_err(|error| error.to_string())?;
    let all = by(name, own)?;
    if all.len() != world_size {
        return Err(format!("the store has {} texts of {world_size} ranks", all.len()));
    }
    let read = |text: &String| {
        serde_json::from_str(text).map_err(|error| format!("the {name} of a rank: {error}"))
    };
    all.iter().map(read).collect()
}

/// A text that is the same for processes that can share memory: the running kernel, the network namespace, in which abstract sockets
/// have their names, and the user.
fn host_id() -> Result<String, String> {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    let boot = boot.map_err(|error| format!("the kernel does not identify itself: {error}"))?;
    let network = std::fs::read_link("/proc/self/ns/net");
    let network = network.map_err(|error| format!("no network namespace: {error}"))?;
    Ok(format!("{} {network:?} {}", boot.trim(), geteuid().as_raw()))
}

/// Where each rank runs, counted from the hosts of all ranks.
fn spots(arrivals: &[Newcomer]) -> Vec<Spot> {
    let on = |host: &str, among: &[Newcomer]| among.iter().filter(|of| of.host == host).count();
    let spot = |(rank, of): (usize, &Newcomer)| Spot {
        wish: of.wish.clone(),
        local_rank: on(&of.host, &arrivals[..rank]),
        local_world: on(&of.host, arrivals),
        route: of.route,
    };
    arrivals.iter().enumerate().map(spot).collect()
}

/// The address at which other hosts reach this rank. An error in words, if they would look for it at their own loopback address.
fn address_of(rank: usize, by: Transport, arrivals: &[Newcomer]) -> Result<String, String> {
    let routes: Vec<HostRoute> = arrivals.iter().map(|of| of.route).collect();
    let own = HostRoute::address_of(&routes, rank);
    let kernel = |of: &Newcomer| of.host.split(' ').next().map(str::to_owned);
    let is_one_kernel = arrivals.iter().all(|of| kernel(of) == kernel(&arrivals[0]));
    if by != Transport::Shm && own.is_loopback() && !is_one_kernel {
        let reason = "the store does not tell at which address other hosts reach this one; meet at \
                      tcp://HOST:PORT or by MASTER_ADDR and MASTER_PORT";
        return Err(reason.into());
    }
    Ok(own.to_string())
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::HashMap;
    use std::sync::mpsc::{Receiver, channel};
    use std::sync::{Condvar, Mutex};
    use std::time::Duration;

    use paceline_memory::DType;

    use super::*;
    use crate::{Message, RawMemory, ReduceOp};

    /// A store within this process.
    #[derive(Default)]
    struct Shelf(Mutex<HashMap<(String, usize), String>>, Condvar);

    impl Shelf {
        fn exchange(&self, name: &str, own: String, rank: usize, world: usize) -> Vec<String> {
            let mut texts = self.0.lock().unwrap();
            texts.insert((name.into(), rank), own);
            self.1.notify_all();
            let get = |texts: &HashMap<_, String>, of| texts.get(&(name.to_owned(), of)).cloned();
            loop {
                if let Some(all) = (0..world).map(|of| get(&texts, of)).collect() {
                    return all;
                }
                let limit = Duration::from_secs(20);
                let (next, waited) = self.1.wait_timeout(texts, limit).unwrap();
                assert!(!waited.timed_out(), "a rank did not come");
                texts = next;
            }
        }
    }

    /// Runs `rank` on each of `world` ranks that have met at a shelf.
    fn on_ranks(world: usize, names: &[usize], rank: impl Fn(usize, Group, Mailbox) + Sync) {
        let shelf = Shelf::default();
        std::thread::scope(|scope| {
            for number in 0..world {
                let (shelf, rank) = (&shelf, &rank);
                scope.spawn(move || {
                    let member = Member { rank: number, world_size: world, names: names.into() };
                    let mut exchange =
                        |name: &str, own| Ok(shelf.exchange(name, own, number, world));
                    let meeting = Meeting { exchange: &mut exchange, server: None, over: None };
                    let options = |local| GroupOptions {
                        timeout: Duration::from_secs(20),
                        ..GroupOptions::for_local_ranks(local)
                    };
                    let (group, mailbox, _) = Group::from_store(member, meeting, options).unwrap();
                    rank(number, group, mailbox.unwrap());
                });
            }
        });
    }

    fn message<T>(peer: Option<usize>, tag: u64, data: &mut [T]) -> Message {
        let memory = RawMemory { base: data.as_mut_ptr().cast(), len_bytes: size_of_val(data) };
        Message { peer, tag, dtype: DType::U8, memory, limit: Some(Duration::from_secs(20)) }
    }

    /// Sends or receives in the background.
    fn start<T>(
        mailbox: &Mailbox,
        is_send: bool,
        (peer, tag): (Option<usize>, u64),
        data: &mut [T],
    ) -> Result<Receiver<Result<usize>>> {
        let (sender, ended) = channel();
        let message = message(peer, tag, data);
        let on_end = move |outcome| sender.send(outcome).unwrap();
        // SAFETY: the tests wait for the end before the data go.
        unsafe { mailbox.post(is_send, message, on_end) }?;
        Ok(ended)
    }

    /// Sends or receives, and waits for the end.
    fn post<T>(
        mailbox: &Mailbox,
        is_send: bool,
        peer: Option<usize>,
        tag: u64,
        data: &mut [T],
    ) -> Result<usize> {
        start(mailbox, is_send, (peer, tag), data)?.recv().unwrap()
    }

    #[test]
    fn ranks_that_meet_at_a_store_share_memory_and_names() {
        on_ranks(3, &[4, 6, 9], |rank, group, mailbox| {
            assert_eq!(group.transport(), Transport::Shm);
            let mut data = vec![rank as f32; 1000];
            group.all_reduce_slice(&mut data, ReduceOp::Sum).unwrap();
            assert_eq!(data[999], 3.0);
            if rank == 2 {
                return;
            }
            drop(mailbox);
            let error = group.barrier().unwrap_err().to_string();
            assert!(error.contains(&format!("rank {}: rank 9 left", [4, 6][rank])), "{error}");
        });
    }

    #[test]
    fn messages_find_their_receives_by_sender_and_tag_in_any_order() {
        on_ranks(3, &[], |rank, group, mailbox| {
            // More than any socket holds, so the sender needs a reader.
            let large = 3 << 20;
            if rank == 0 {
                let mut data = vec![7u8; large];
                let first = start(&mailbox, true, (Some(1), 5), &mut data).unwrap();
                post(&mailbox, true, Some(1), 6, &mut [1u8]).unwrap();
                first.recv().unwrap().unwrap();
            } else if rank == 1 {
                let (mut data, mut late, mut any) = (vec![0u8; large], [0u8], [0u8]);
                assert_eq!(post(&mailbox, false, Some(0), 6, &mut late).unwrap(), 0);
                assert_eq!(post(&mailbox, false, Some(0), 5, &mut data).unwrap(), 0);
                assert_eq!(post(&mailbox, false, None, 7, &mut any).unwrap(), 2);
                assert!(data.iter().all(|byte| *byte == 7) && (late, any) == ([1], [9]));
            } else {
                post(&mailbox, true, Some(1), 7, &mut [9u8]).unwrap();
            }
            group.barrier().unwrap();
        });
    }

    #[test]
    fn a_message_of_another_length_is_an_error_that_names_both() {
        on_ranks(2, &[], |rank, group, mailbox| {
            if rank == 0 {
                post(&mailbox, true, Some(1), 1, &mut [1u8; 8]).unwrap();
                post(&mailbox, true, Some(1), 1, &mut [2u8; 4]).unwrap();
            } else {
                let mut data = [0u8; 4];
                let error = post(&mailbox, false, Some(0), 1, &mut data).unwrap_err().to_string();
                assert!(
                    error.contains("4 bytes") && error.contains("rank 0 sent 8 bytes"),
                    "{error}"
                );
                post(&mailbox, false, Some(0), 1, &mut data).unwrap();
                assert_eq!(data, [2; 4]);
            }
            group.barrier().unwrap();
        });
    }

    #[test]
    fn a_receive_ends_with_its_sender_and_with_its_limit() {
        on_ranks(2, &[3, 5], |rank, group, mailbox| {
            let mut data = [0u8; 4];
            if rank == 1 {
                let short = Message {
                    limit: Some(Duration::from_millis(20)),
                    ..message(Some(0), 1, &mut data)
                };
                let (sender, ended) = channel();
                // SAFETY: the data outlive the wait for the end.
                unsafe { mailbox.post(false, short, move |outcome| sender.send(outcome).unwrap()) }
                    .unwrap();
                let error = ended.recv().unwrap().unwrap_err().to_string();
                assert!(
                    error.contains("timed out") && error.contains("waiting for ranks [3]"),
                    "{error}"
                );
            }
            group.barrier().unwrap();
            if rank == 1 {
                let error = post(&mailbox, false, Some(0), 1, &mut data).unwrap_err().to_string();
                assert!(
                    error.contains("rank 5: rank 3 left the group, but recv #1 (4 bytes)"),
                    "{error}"
                );
            }
        });
    }

    #[test]
    fn messages_to_nobody_are_refused() {
        on_ranks(2, &[], |rank, group, mailbox| {
            let says = |is_send, peer| {
                post(&mailbox, is_send, peer, 0, &mut [0u8]).unwrap_err().to_string()
            };
            assert!(says(true, Some(2)).contains("no rank 2"));
            assert!(says(false, Some(rank)).contains("names this very rank"));
            assert!(says(true, None).contains("names no rank"));
            group.barrier().unwrap();
        });
    }

    #[test]
    fn a_store_that_gives_something_else_is_refused() {
        let refusal = |answer: &dyn Fn(String) -> Vec<String>| {
            let member = Member { rank: 1, world_size: 2, names: Vec::new() };
            let mut exchange = |_: &str, own: String| Ok(answer(own));
            let meeting = Meeting { exchange: &mut exchange, server: None, over: None };
            Group::from_store(member, meeting, GroupOptions::for_local_ranks)
                .unwrap_err()
                .to_string()
        };
        let text = refusal(&|own| vec![own]);
        assert!(text.contains("has 1 texts of 2 ranks"), "{text}");
        let text = refusal(&|own| vec![own.clone(), own]);
        assert!(text.contains("no secret of rank 0"), "{text}");
        let text = refusal(&|own| vec!["\u{1b}[2J".into(), own]);
        assert!(text.contains("the arrival of a rank: expected value"), "{text}");
    }

    #[test]
    fn ranks_of_a_host_are_counted_in_their_order() {
        let route = HostRoute { own: [127, 0, 0, 1].into(), rendezvous: [127, 0, 0, 1].into() };
        let on = |host: &str| Newcomer {
            wish: String::new(),
            host: host.into(),
            route,
            secret: String::new(),
            heap_bytes: 0,
        };
        let all = ["a", "b", "a"].map(on);
        let found: Vec<(usize, usize)> =
            spots(&all).iter().map(|spot| (spot.local_rank, spot.local_world)).collect();
        assert_eq!(found, [(0, 2), (0, 1), (1, 2)]);
        assert!(
            address_of(0, Transport::Tcp, &all).unwrap_err().contains("meet at tcp://HOST:PORT")
        );
        assert_eq!(address_of(0, Transport::Tcp, &all[..1]).unwrap(), "127.0.0.1");
    }
}
