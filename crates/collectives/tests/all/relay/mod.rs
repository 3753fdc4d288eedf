//! A network between the ranks of a test, made of relays: threads that copy bytes from one socket to another.
//!
//! Each rank but rank 0 reaches the store through a relay of its own. It also replaces the addresses of the
//! other ranks in the store's answers by those of further relays, one for each two
//! ranks. So all bytes between two ranks pass through a relay, which can delay them, keep them without closing
//! anything, or end the connection. However a test ends, dropping the [`Net`] ends all threads and connections.

use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use paceline_collectives::Rendezvous;

/// How often a thread looks whether the network is over, and whether it may pass on what it holds.
const LOOK: Duration = Duration::from_millis(5);
/// The bytes of the store's challenge and of its answer to a proof, before its answers to requests.
const HELLO_ANSWER_BYTES: usize = 8 + 1 + 32 + 65 * 32 + 1;
/// The bytes of an answer's status and length.
const ANSWER_HEADER_BYTES: usize = 5;
const SECRET: &str = "through relays";

/// A way through the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Link {
    /// From this rank to the store of rank 0.
    Store(usize),
    /// Between these two ranks. The first one is higher, and connects to the lower one.
    Pair(usize, usize),
}

/// What happens on a link.
#[derive(Clone, Copy, Debug, Default)]
pub struct Fault {
    /// How much later each piece of data arrives.
    pub delay: Duration,
    /// After this many bytes, both directions together, nothing arrives any more, and nothing is closed.
    pub silent_after: Option<u64>,
    /// After this many bytes, both directions together, the connection ends.
    pub cut_after: Option<u64>,
}

#[derive(Default)]
struct State {
    faults: Mutex<HashMap<Link, Fault>>,
    passed: Mutex<HashMap<Link, u64>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    is_over: AtomicBool,
}

pub struct Net {
    state: Arc<State>,
    /// Where rank 0 serves the store.
    host: String,
    port: u16,
    /// Where each other rank finds it.
    stores: Vec<SocketAddr>,
}

impl Net {
    pub fn new(world: usize) -> Self {
        // An address of this test alone, so that nobody takes the port between here and rank 0.
        static COUNT: AtomicU8 = AtomicU8::new(1);
        let [high, low] = (std::process::id() as u16).to_be_bytes();
        let host = format!("127.{}.{low}.{}", 64 | high, COUNT.fetch_add(1, Ordering::Relaxed));
        let port = TcpListener::bind((&*host, 0)).unwrap().local_addr().unwrap().port();
        let state = Arc::new(State::default());
        let store: SocketAddr = format!("{host}:{port}").parse().unwrap();
        let relay = |rank| relay(&state, Link::Store(rank), store);
        let stores = (0..world).map(relay).collect();
        Self { state, host, port, stores }
    }

    /// Where `rank` meets the others.
    pub fn rendezvous(&self, rank: usize) -> Rendezvous {
        match rank {
            0 => Rendezvous::by_tcp(&*self.host, self.port, SECRET),
            _ => Rendezvous::by_tcp("127.0.0.1", self.stores[rank].port(), SECRET),
        }
    }

    /// From now on, this happens on this link.
    pub fn set(&self, link: Link, fault: Fault) {
        self.state.faults.lock().unwrap().insert(link, fault);
    }

    /// From now on, this happens between `rank` and all other ranks, but not on the way to the store.
    pub fn set_around(&self, rank: usize, world: usize, fault: Fault) {
        for other in (0..world).filter(|&other| other != rank) {
            self.set(Link::Pair(rank.max(other), rank.min(other)), fault);
        }
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        self.state.is_over.store(true, Ordering::Relaxed);
        loop {
            // A thread may have started others meanwhile.
            let Some(thread) = self.state.threads.lock().unwrap().pop() else { return };
            let outcome = thread.join();
            assert!(std::thread::panicking() || outcome.is_ok(), "a relay panicked");
        }
    }
}

impl State {
    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }

    fn spawn(&self, body: impl FnOnce() + Send + 'static) {
        self.threads.lock().unwrap().push(std::thread::spawn(body));
    }

    fn fault(&self, link: Link) -> Fault {
        self.faults.lock().unwrap().get(&link).copied().unwrap_or_default()
    }

    /// Counts bytes that have arrived at a link. Returns how many have passed it before.
    fn count(&self, link: Link, bytes: u64) -> u64 {
        let mut passed = self.passed.lock().unwrap();
        let sum = passed.entry(link).or_default();
        *sum += bytes;
        *sum - bytes
    }
}

/// Starts a relay to `target` and returns the address where it listens.
fn relay(state: &Arc<State>, link: Link, target: SocketAddr) -> SocketAddr {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let address = listener.local_addr().unwrap();
    listener.set_nonblocking(true).unwrap();
    let served = state.clone();
    state.spawn(move || {
        while !served.is_over() {
            match listener.accept() {
                Ok((near, _)) => connect(&served, link, near, target),
                Err(error) if error.kind() == ErrorKind::WouldBlock => std::thread::sleep(LOOK),
                Err(error) => panic!("{error}"),
            }
        }
    });
    address
}

fn connect(state: &Arc<State>, link: Link, near: TcpStream, target: SocketAddr) {
    // If nobody listens there yet, the near end is closed, and the rank tries again.
    let Ok(far) = TcpStream::connect(target) else { return };
    let (near, far) = (Arc::new(near), Arc::new(far));
    for stream in [&near, &far] {
        stream.set_nonblocking(false).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(LOOK)).unwrap();
        stream.set_write_timeout(Some(LOOK)).unwrap();
    }
    let answers = match link {
        Link::Store(rank) => Some(Answers::to(state.clone(), rank)),
        Link::Pair(..) => None,
    };
    for (from, to, mut change) in [(near.clone(), far.clone(), None), (far, near, answers)] {
        let carried = state.clone();
        state.spawn(move || {
            let state = &*carried;
            let end = carry(state, link, &from, &to, |bytes| match &mut change {
                Some(answers) => answers.change(bytes),
                None => bytes.to_vec(),
            });
            // An error is ignored: the connection has already ended.
            let _ = to.shutdown(end);
            if end == Shutdown::Both {
                let _ = from.shutdown(end);
            }
        });
    }
}

/// Carries bytes in one direction until it, the connection or the network ends. Returns what else is to end: only this
/// direction, or both.
fn carry(
    state: &State,
    link: Link,
    from: &TcpStream,
    to: &TcpStream,
    mut change: impl FnMut(&[u8]) -> Vec<u8>,
) -> Shutdown {
    let mut buffer = vec![0; 64 << 10];
    while !state.is_over() {
        let (received, end) = match { from }.read(&mut buffer) {
            Err(error) if is_no_end(&error) => continue,
            Err(_) => (0, Shutdown::Both),
            Ok(received) => (received, Shutdown::Write),
        };
        let before = state.count(link, received as u64);
        let is_beyond = |limit: Option<u64>| limit.is_some_and(|limit| before >= limit);
        // The end of a connection does not pass a silent link either.
        while is_beyond(state.fault(link).silent_after) && !state.is_over() {
            std::thread::sleep(LOOK);
        }
        if is_beyond(state.fault(link).cut_after) {
            return Shutdown::Both;
        }
        if received == 0 {
            return end;
        }
        std::thread::sleep(state.fault(link).delay);
        let bytes = change(&buffer[..received]);
        let mut left = bytes.as_slice();
        while !left.is_empty() && !state.is_over() {
            match { to }.write(left) {
                Ok(written) => left = &left[written..],
                Err(error) if is_no_end(&error) => {}
                Err(_) => return Shutdown::Both,
            }
        }
    }
    Shutdown::Both
}

fn is_no_end(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}

/// The answers of the store to one rank, in which the addresses of lower ranks are replaced by those of relays.
struct Answers {
    state: Arc<State>,
    rank: usize,
    /// Bytes that are not yet a whole answer.
    held: Vec<u8>,
    num_greeting_bytes: usize,
    /// The number of addresses that the rank has asked for. It asks in rank order.
    num_addresses: usize,
}

/// A rank's address as the store has it: a local name, a host and a port, the name of its key.
type PeerAddress = (String, (String, u16), String);

impl Answers {
    fn to(state: Arc<State>, rank: usize) -> Self {
        Self { state, rank, held: Vec::new(), num_greeting_bytes: 0, num_addresses: 0 }
    }

    /// Takes further bytes from the store, and returns what the rank is to receive.
    fn change(&mut self, bytes: &[u8]) -> Vec<u8> {
        self.held.extend(bytes);
        let mut out = Vec::new();
        if self.num_greeting_bytes < HELLO_ANSWER_BYTES {
            // The rank must have the challenge before it sends its proof.
            let count = self.held.len().min(HELLO_ANSWER_BYTES - self.num_greeting_bytes);
            out.extend(self.held.drain(..count));
            self.num_greeting_bytes += count;
            if self.num_greeting_bytes < HELLO_ANSWER_BYTES {
                return out;
            }
        }
        while let Some((header, rest)) = self.held.split_at_checked(ANSWER_HEADER_BYTES) {
            let len = u32::from_le_bytes(header[1..].try_into().unwrap()) as usize;
            let Some(payload) = rest.get(..len) else { break };
            let (status, payload) = (header[0], payload.to_vec());
            self.held.drain(..ANSWER_HEADER_BYTES + len);
            let payload = self.with_relay(payload);
            out.push(status);
            out.extend((payload.len() as u32).to_le_bytes());
            out.extend(payload);
        }
        out
    }

    fn with_relay(&mut self, payload: Vec<u8>) -> Vec<u8> {
        let Ok((local, (host, port), key_name)) = postcard::from_bytes::<PeerAddress>(&payload)
        else {
            return payload;
        };
        let peer = self.num_addresses;
        self.num_addresses += 1;
        if peer >= self.rank {
            return payload;
        }
        let target = format!("{host}:{port}").parse().unwrap();
        let relay = relay(&self.state, Link::Pair(self.rank, peer), target);
        let address: PeerAddress = (local, (relay.ip().to_string(), relay.port()), key_name);
        postcard::to_stdvec(&address).unwrap()
    }
}
