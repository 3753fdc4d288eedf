//! Checks that arbitrary bytes do no harm in a rendezvous: at the store's server, at its clients, in a rendezvous file,
//! and in a hello.
//!
//! Input: bytes. Output: nothing if a reader accepts them, otherwise the message of the error. A panic is a bug of the
//! reader. The bytes come from a socket, as those of a real connection; its other end is closed after the last byte, so
//! nothing waits. `paceline-rendezvous` includes this file with its feature `fuzzing`, for the fuzzer and
//! `tests/corpus.rs`.

use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Mutex;
use std::time::Duration;

use paceline_trace::thread_builder;

use super::file::RendezvousFile;
use super::server::{ServerState, admit};
use super::wire::{Request, read_answer, read_request, send_answer, send_request};
use super::{Backend, Store, agent, client};
use crate::PeerAddress;
use crate::deadline::{Deadline, MAX_LIMIT};
use crate::hello::{HelloAnswer, Incoming, MAX_ATTEMPTS, Who, say_hello_with};
use crate::key::{NONCE_BYTES, RunKey};
use crate::socket::transmit;

const WORLD: usize = 4;
const SECRET: &str = "a secret";
/// In place of the random numbers of the rank that listens, and of the one that connects: a kept proof stays true.
const LISTENER_NONCE: [u8; NONCE_BYTES] = [7; NONCE_BYTES];
const CONNECTOR_NONCE: [u8; NONCE_BYTES] = [9; NONCE_BYTES];
/// Never reached, since nothing waits.
const LIMIT: Duration = Duration::from_secs(60);

/// Reads the bytes as requests to our server, as answers of our server and of torchrun's, and as a rendezvous file.
pub fn store_wire(bytes: &[u8]) -> Result<(), String> {
    let own = |socket| Backend::Own(client::Connection::over(socket));
    let torchrun = |socket| Backend::Agent(agent::Connection::over(socket, "/prefix/".into()));
    answer(bytes);
    let outcomes = [
        requests(bytes),
        answers_to_store(bytes, own),
        answers_to_store(bytes, torchrun),
        arrival_at_agent(bytes),
        rendezvous_file(bytes),
    ];
    first_accepted(outcomes)
}

/// Reads the bytes as the hello and the proof of a rank, and as the challenge and the answer of a listener.
pub fn hello(bytes: &[u8]) -> Result<(), String> {
    first_accepted([hello_of_rank(bytes), answer_to_hello(bytes)])
}

fn first_accepted<const N: usize>(outcomes: [Result<(), String>; N]) -> Result<(), String> {
    let mut messages = Vec::new();
    for outcome in outcomes {
        match outcome {
            Ok(()) => return Ok(()),
            Err(message) => messages.push(message),
        }
    }
    assert!(messages.iter().all(|message| message.contains(' ')), "no sentences: {messages:?}");
    Err(messages.swap_remove(0))
}

/// Two ends of a connection. At the second one, `bytes` come, and then the end.
fn connection_with(bytes: &[u8]) -> (OwnedFd, OwnedFd) {
    let (from, to) = UnixStream::pair().expect("a pair of sockets");
    transmit(&from, bytes, &deadline()).expect("the bytes fit into the buffer of a socket");
    from.shutdown(Shutdown::Write).expect("a connection");
    (from.into(), to.into())
}

fn deadline() -> Deadline {
    Deadline::after(LIMIT)
}

/// A server answers every request. Each request and each answer is the same at the other end of a connection.
fn requests(bytes: &[u8]) -> Result<(), String> {
    let (client, server) = connection_with(bytes);
    let (one, other) = UnixStream::pair().expect("a pair of sockets");
    let (shared, _closed) = ServerState::new(WORLD, SECRET).expect("a pair of sockets");
    let mut outcome = Err("no bytes came".to_owned());
    loop {
        let request = match read_request(&server) {
            Ok(request) => request,
            // A request counts, even if rubbish follows it.
            Err(error) => return outcome.map_err(|_| error.to_string()),
        };
        outcome = Ok(());
        send_request(&one, &request, &deadline()).expect("a request of a socket's length");
        let again = read_request(&other).expect("a request that was written");
        assert_eq!(again, request);
        let request = match request {
            Request::Get { key, .. } => Request::Get { key, limit: Duration::ZERO },
            Request::Arrive { .. } => Request::Arrive { limit: Duration::ZERO },
            request => request,
        };
        let answer = shared.answer(request, || false);
        send_answer(&server, &answer).expect("an answer of a socket's length");
        assert_eq!(read_answer(&client, &deadline()).expect("an answer that was written"), answer);
    }
}

/// An answer is the same when it is written again.
fn answer(bytes: &[u8]) {
    let (_server, client) = connection_with(bytes);
    let Ok(answer) = read_answer(&client, &deadline()) else { return };
    let (one, other) = UnixStream::pair().expect("a pair of sockets");
    send_answer(&one, &answer).expect("an answer of a socket's length");
    assert_eq!(read_answer(&other, &deadline()).expect("an answer that was written"), answer);
}

/// A rank takes the bytes for the answers to its calls, one after the other.
fn answers_to_store(bytes: &[u8], backend: fn(OwnedFd) -> Backend) -> Result<(), String> {
    let (_server, client) = connection_with(bytes);
    let store = Store {
        rank: 0,
        world_size: 2,
        place: "a store".into(),
        limit: LIMIT,
        key: RunKey::of_secret(SECRET),
        connection: Mutex::new(backend(client)),
        server: None,
    };
    let calls = || {
        store.set("key", b"value")?;
        store.add("counter", 1)?;
        store.get("key")?;
        store.exchange("addresses", &PeerAddress::default())
    };
    let addresses = calls().map_err(|error| error.to_string())?;
    for address in addresses {
        let written = postcard::to_stdvec(&address).expect("an address is plain data");
        let again: PeerAddress = postcard::from_bytes(&written).expect("an address");
        assert_eq!(format!("{again:?}"), format!("{address:?}"));
    }
    Ok(())
}

/// A rank reports to torchrun's store that it has come, and asks for the secret.
fn arrival_at_agent(bytes: &[u8]) -> Result<(), String> {
    let (_server, client) = connection_with(bytes);
    let mut connection = agent::Connection::over(client, String::new());
    let secret =
        connection.arrive(0, WORLD, &deadline()).and_then(|()| connection.get("secret", LIMIT));
    secret.map(|_| ()).map_err(|failed| failed.error(0, WORLD, "a store".into()).to_string())
}

/// A rendezvous file is the same when it is written again.
fn rendezvous_file(bytes: &[u8]) -> Result<(), String> {
    let text = std::str::from_utf8(bytes).map_err(|error| error.to_string())?;
    let file = RendezvousFile::parse(text).ok_or("this is no rendezvous file")?;
    assert_eq!(RendezvousFile::parse(&file.to_text()).as_ref(), Some(&file));
    file.reachable();
    Ok(())
}

/// A rank that is welcome with these bytes is welcome again.
fn hello_of_rank(bytes: &[u8]) -> Result<(), String> {
    let keys = RunKey::of_attempts(SECRET, MAX_ATTEMPTS);
    let incoming = || {
        let (client, server) = connection_with(bytes);
        (client, Incoming::with(LISTENER_NONCE, server, LIMIT))
    };
    let (_client, mut first) = incoming();
    let hello = first.advance(&keys, WORLD).map_err(|error| error.to_string())?;
    let hello = hello.expect("all bytes have come, and then the end");
    first.answer(hello.answer).expect("a short answer");

    let (shared, _closed) = ServerState::new(WORLD, SECRET).expect("a pair of sockets");
    shared.warnings.be_silent();
    let (_client, again) = incoming();
    let Some((rank, launch, _)) = admit(again, "somebody", &shared) else {
        let is_beyond = hello.answer == HelloAnswer::Welcome && hello.rank >= WORLD;
        assert!(
            is_beyond || hello.answer != HelloAnswer::Welcome,
            "rank {} was refused",
            hello.rank
        );
        return Err(format!("rank {} may not join: {:?}", hello.rank, hello.answer));
    };
    assert!(
        rank == hello.rank && rank < WORLD && hello.answer == HelloAnswer::Welcome,
        "{rank}, {}",
        hello.rank
    );
    let (client, server) = UnixStream::pair().expect("a pair of sockets");
    std::thread::scope(|scope| {
        let listens = thread_builder("listener").spawn_scoped(scope, || {
            let listener = Incoming::with(LISTENER_NONCE, server.into(), LIMIT);
            admit(
                listener,
                "a rank",
                &ServerState::new(WORLD, SECRET).expect("a pair of sockets").0,
            )
        });
        listens.expect("a thread");
        let nonce = std::array::from_fn(|at| bytes[8 + at]);
        let key = RunKey::of_secret(SECRET);
        let who = Who { rank, world: WORLD, launch };
        say_hello_with(nonce, &client, who, &key, MAX_LIMIT, &deadline()).expect("a welcome");
    });
    Ok(())
}

/// A rank takes the bytes for those of a listener.
fn answer_to_hello(bytes: &[u8]) -> Result<(), String> {
    let (_listener, client) = connection_with(bytes);
    let key = RunKey::of_secret(SECRET);
    let who = Who { rank: 1, world: WORLD, launch: None };
    let outcome = say_hello_with(CONNECTOR_NONCE, &client, who, &key, MAX_LIMIT, &deadline());
    outcome.map_err(|refusal| refusal.reason(who))
}
