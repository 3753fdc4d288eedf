//! Tests the client of torchrun's store against threads that speak the store's protocol.

use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use paceline_trace::runtime::PassiveSocket;
use paceline_trace::{lock, thread_builder};
use rustix::event::{PollFd, PollFlags};
use rustix::net::sockopt::{Timeout, set_socket_timeout};

use super::Store;
use super::agent::Connection;
use super::client::Failed;
use crate::Rendezvous;
use crate::address::SocketAddress;
use crate::deadline::Deadline;
use crate::socket::{poll_until, receive, receive_vec, transmit};

/// Reached only when something hangs.
const LIMIT: Duration = Duration::from_secs(60);
const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// A listener for one connection, which it does not await for ever, and its port.
fn listen() -> (TcpListener, u16) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    set_socket_timeout(&listener, Timeout::Recv, Some(LIMIT)).unwrap();
    let port = listener.local_addr().unwrap().port();
    (listener, port)
}

/// A server that expects exactly these bytes, and answers with those.
fn scripted(script: Vec<(Vec<u8>, Vec<u8>)>) -> (SocketAddress, std::thread::JoinHandle<()>) {
    let (listener, port) = listen();
    let server = std::thread::spawn(move || {
        let mut stream = listener.accept().unwrap().0;
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        for (step, (expected, answer)) in script.into_iter().enumerate() {
            let mut bytes = vec![0; expected.len()];
            stream.read_exact(&mut bytes).unwrap();
            assert_eq!(bytes, expected, "step {step}");
            stream.write_all(&answer).unwrap();
        }
        assert_eq!(stream.read(&mut [0]).unwrap(), 0, "nothing more is asked");
    });
    (SocketAddress::Tcp("127.0.0.1".into(), port), server)
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

fn query(op: u8, arguments: &[&[u8]]) -> Vec<u8> {
    [&[op], arguments.concat().as_slice()].concat()
}

/// How a connection begins: with VALIDATE, and with counting how often this rank has come.
fn opening() -> Vec<(Vec<u8>, Vec<u8>)> {
    let attempts = query(4, &[&text("/paceline/run/0/2/attempts/1"), &[1, 0, 0, 0, 0, 0, 0, 0]]);
    vec![(vec![0, 0xce, 0xf7, 0x85, 0x3c], vec![]), (attempts, vec![1, 0, 0, 0, 0, 0, 0, 0])]
}

fn join(address: &SocketAddress) -> Connection {
    Connection::join(address, "run/0", 1, 2, &Deadline::after(LIMIT)).unwrap()
}

#[test]
fn the_bytes_are_pytorchs() {
    let key = text("/paceline/run/0/2/1/k");
    let one = &1u64.to_le_bytes();
    let mut script = opening();
    script.push((query(1, &[&key, &text("value")]), vec![]));
    script.push((query(6, &[one, &key]), vec![0]));
    script.push((query(3, &[&key]), text("value")));
    script.push((query(4, &[&key, &(-2i64).to_le_bytes()]), (-5i64).to_le_bytes().to_vec()));
    let (address, server) = scripted(script);
    let mut connection = join(&address);
    connection.set("k", b"value", &Deadline::after(LIMIT)).unwrap();
    assert_eq!(connection.get("k", LIMIT).unwrap(), b"value");
    assert_eq!(connection.add("k", -2, &Deadline::after(LIMIT)).unwrap(), -5);
    drop(connection);
    server.join().unwrap();
}

#[test]
fn a_wait_that_took_too_long_is_called_off() {
    let key = text("/paceline/run/0/2/1/k");
    let wait = query(6, &[&1u64.to_le_bytes(), &key]);
    let mut script = opening();
    // First the key does not come. Then it comes at the moment at which the wait is canceled.
    script.push((wait.clone(), vec![]));
    script.push((vec![12], vec![1]));
    script.push((wait, vec![]));
    script.push((vec![12], vec![0, 1]));
    script.push((query(3, &[&key]), text("late")));
    let (address, server) = scripted(script);
    let mut connection = join(&address);
    let short = Duration::from_millis(50);
    assert!(matches!(connection.get("k", short), Err(Failed::TimedOut(_))));
    assert_eq!(connection.get("k", short).unwrap(), b"late");
    drop(connection);
    server.join().unwrap();
}

#[test]
fn answers_of_another_program_are_errors() {
    let (listener, port) = listen();
    let closing = SocketAddress::Tcp("127.0.0.1".into(), port);
    let hang_up = std::thread::spawn(move || drop(listener.accept().unwrap()));
    let error = Connection::join(&closing, "r", 0, 1, &Deadline::after(LIMIT)).unwrap_err();
    assert!(error.contains("is not a PyTorch store"), "{error}");
    hang_up.join().unwrap();

    let key = text("/paceline/run/0/2/1/k");
    let mut script = opening();
    script.push((query(6, &[&1u64.to_le_bytes(), &key]), b"H".to_vec()));
    let (address, server) = scripted(script);
    let mut connection = join(&address);
    let outcome = connection.get("k", LIMIT);
    assert!(matches!(outcome, Err(Failed::Other(reason)) if reason.contains("unknown answer")));
    // Further bytes could belong to that answer, so the client sends no more queries.
    let outcome = connection.set("k", b"", &Deadline::after(LIMIT));
    assert!(matches!(outcome, Err(Failed::Other(reason)) if reason.contains("was lost")));
    server.join().unwrap();
}

type Values = Arc<Mutex<HashMap<Vec<u8>, Vec<u8>>>>;

/// A complete store, as far as ranks use it, in this process or in a simulated cluster. Returns its port, and serves until it is
/// no longer needed.
pub(super) fn fake_agent(at: IpAddr, port: u16) -> u16 {
    let (listener, address) = PassiveSocket::tcp(at, port).unwrap();
    let values = Values::default();
    let accept = move || {
        loop {
            poll_until(&mut [PollFd::new(&listener, PollFlags::IN)], None).unwrap();
            let (socket, _) = listener.accept().unwrap();
            let values = values.clone();
            thread_builder("agent").spawn(move || serve(&socket, &values)).unwrap();
        }
    };
    thread_builder("agent").spawn(accept).unwrap();
    address.port()
}

/// Returns when the other side hangs up, by `None`.
fn serve(socket: &OwnedFd, values: &Values) -> Option<()> {
    assert_eq!(read(socket, 5)?, [0, 0xce, 0xf7, 0x85, 0x3c]);
    loop {
        let answer = match read(socket, 1)?[0] {
            1 => {
                let (key, value) = (read_text(socket)?, read_text(socket)?);
                lock(values).insert(key, value);
                vec![]
            }
            3 => {
                let key = read_text(socket)?;
                let value = lock(values)[&key].clone();
                [&(value.len() as u64).to_le_bytes(), value.as_slice()].concat()
            }
            4 => {
                let (key, amount) = (read_text(socket)?, read_number(socket)? as i64);
                let mut values = lock(values);
                let value = values.entry(key).or_insert_with(|| b"0".to_vec());
                let sum = std::str::from_utf8(value).unwrap().parse::<i64>().unwrap() + amount;
                *value = sum.to_string().into_bytes();
                sum.to_le_bytes().to_vec()
            }
            5 => vec![u8::from(!has_all(&read_list(socket)?, values))],
            6 => wait(socket, &read_list(socket)?, values)?,
            other => panic!("query {other} is not used"),
        };
        transmit(socket, &answer, &Deadline::after(LIMIT)).ok()?;
    }
}

/// Waits for keys until they are there or the wait is canceled.
fn wait(socket: &OwnedFd, keys: &[Vec<u8>], values: &Values) -> Option<Vec<u8>> {
    while !has_all(keys, values) {
        let mut query = [0];
        let limit = Deadline::after(Duration::from_millis(3));
        match receive(socket, &mut query, Some(&limit)) {
            Ok(()) => {
                assert_eq!(query, [12]);
                return Some(vec![1]);
            }
            Err(error) if error.kind() == ErrorKind::TimedOut => {}
            Err(_) => return None,
        }
    }
    Some(vec![0])
}

fn has_all(keys: &[Vec<u8>], values: &Values) -> bool {
    let values = lock(values);
    keys.iter().all(|key| values.contains_key(key))
}

fn read(socket: &OwnedFd, len: usize) -> Option<Vec<u8>> {
    receive_vec(socket, len, &Deadline::after(LIMIT)).ok()
}

fn read_number(socket: &OwnedFd) -> Option<u64> {
    Some(u64::from_le_bytes(read(socket, 8)?.try_into().ok()?))
}

fn read_text(socket: &OwnedFd) -> Option<Vec<u8>> {
    let len = read_number(socket)?;
    read(socket, len as usize)
}

fn read_list(socket: &OwnedFd) -> Option<Vec<Vec<u8>>> {
    (0..read_number(socket)?).map(|_| read_text(socket)).collect()
}

#[test]
fn ranks_meet_at_an_agent_round_after_round() {
    let port = fake_agent(HERE, 0);
    let mut secrets = Vec::new();
    for round in ["run/0", "run/1", "run/1"] {
        let rendezvous = Rendezvous::by_agent("127.0.0.1", port, round);
        super::tests::exercise(&rendezvous);
        secrets.push(Store::open(&Rendezvous::by_agent("127.0.0.1", port, "single"), 0, 1, LIMIT));
    }
    let keys = secrets.iter().map(|store| store.as_ref().unwrap().key().prove(&[b"this"]));
    let keys: Vec<_> = keys.collect();
    assert!(keys[0] != keys[1] && keys[1] != keys[2]);
}

#[test]
fn a_secret_of_the_users_own_is_added_to_the_one_that_all_can_read() {
    let key = |own| super::agent_key(own, "that all can read").prove(&[b"this"]);
    assert!(key("own") == key("own") && key("own") != key("") && key("own") != key("other"));
    assert_ne!(key("own"), super::agent_key("own", "of another round").prove(&[b"this"]));
}

#[test]
fn ranks_that_do_not_come_to_the_agent_are_named() {
    let rendezvous = Rendezvous::by_agent("127.0.0.1", fake_agent(HERE, 0), "run/0");
    // Long enough for both to come within the limit of the other.
    let open = |rank| Store::open(&rendezvous, rank, 4, Duration::from_secs(10));
    std::thread::scope(|scope| {
        let came = [0, 2].map(|rank| scope.spawn(move || open(rank)));
        for came in came {
            let message = came.join().unwrap().unwrap_err().to_string();
            assert!(message.contains("ranks [1, 3] did not come in time"), "{message}");
        }
    });
    let nowhere = Rendezvous::by_agent("127.0.0.1", 1, "run/0");
    let message = Store::open(&nowhere, 0, 1, Duration::from_millis(100)).unwrap_err().to_string();
    assert!(message.contains("torchrun's agent cannot be reached"), "{message}");
}
