//! Tests the client of torchrun's store against threads that speak the store's protocol.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::net::sockopt::{Timeout, set_socket_timeout};

use super::Store;
use super::agent::Connection;
use super::client::Failed;
use crate::Rendezvous;
use crate::address::SocketAddress;
use crate::deadline::Deadline;

/// Reached only when something hangs.
const LIMIT: Duration = Duration::from_secs(60);

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
    connection.set("k", b"value").unwrap();
    assert_eq!(connection.get("k", LIMIT).unwrap(), b"value");
    assert_eq!(connection.add("k", -2).unwrap(), -5);
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
    let outcome = connection.set("k", b"");
    assert!(matches!(outcome, Err(Failed::Other(reason)) if reason.contains("was lost")));
    server.join().unwrap();
}

type Values = Arc<Mutex<HashMap<Vec<u8>, Vec<u8>>>>;

/// A complete store, as far as ranks use it.
fn fake_agent() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let values = Values::default();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let values = values.clone();
            std::thread::spawn(move || serve(stream, &values));
        }
    });
    port
}

/// Returns when the other side hangs up, by `None`.
fn serve(mut stream: TcpStream, values: &Values) -> Option<()> {
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    let mut validate = [0u8; 5];
    stream.read_exact(&mut validate).ok()?;
    assert_eq!(validate, [0, 0xce, 0xf7, 0x85, 0x3c]);
    loop {
        let mut op = [0u8];
        stream.read_exact(&mut op).ok()?;
        let answer = match op[0] {
            1 => {
                let (key, value) = (read_text(&mut stream), read_text(&mut stream));
                values.lock().unwrap().insert(key, value);
                vec![]
            }
            3 => {
                let value = values.lock().unwrap()[&read_text(&mut stream)].clone();
                [&(value.len() as u64).to_le_bytes(), value.as_slice()].concat()
            }
            4 => {
                let key = read_text(&mut stream);
                let amount = read_number(&mut stream) as i64;
                let mut values = values.lock().unwrap();
                let value = values.entry(key).or_insert_with(|| b"0".to_vec());
                let sum = std::str::from_utf8(value).unwrap().parse::<i64>().unwrap() + amount;
                *value = sum.to_string().into_bytes();
                sum.to_le_bytes().to_vec()
            }
            5 => vec![u8::from(!has_all(&read_list(&mut stream), values))],
            6 => {
                let keys = read_list(&mut stream);
                wait(&mut stream, &keys, values)
            }
            other => panic!("query {other} is not used"),
        };
        stream.write_all(&answer).ok()?;
    }
}

/// Waits for keys until they are there or the wait is canceled.
fn wait(stream: &mut TcpStream, keys: &[Vec<u8>], values: &Values) -> Vec<u8> {
    stream.set_read_timeout(Some(Duration::from_millis(3))).unwrap();
    let answer = loop {
        if has_all(keys, values) {
            break vec![0];
        }
        let mut op = [0u8];
        match stream.read(&mut op) {
            Ok(1) => {
                assert_eq!(op, [12]);
                break vec![1];
            }
            Ok(_) => break vec![],
            Err(_) => {}
        }
    };
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    answer
}

fn has_all(keys: &[Vec<u8>], values: &Values) -> bool {
    let values = values.lock().unwrap();
    keys.iter().all(|key| values.contains_key(key))
}

fn read_number(stream: &mut TcpStream) -> u64 {
    let mut bytes = [0u8; 8];
    stream.read_exact(&mut bytes).unwrap();
    u64::from_le_bytes(bytes)
}

fn read_text(stream: &mut TcpStream) -> Vec<u8> {
    let mut bytes = vec![0; read_number(stream) as usize];
    stream.read_exact(&mut bytes).unwrap();
    bytes
}

fn read_list(stream: &mut TcpStream) -> Vec<Vec<u8>> {
    (0..read_number(stream)).map(|_| read_text(stream)).collect()
}

#[test]
fn ranks_meet_at_an_agent_round_after_round() {
    let port = fake_agent();
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
    let rendezvous = Rendezvous::by_agent("127.0.0.1", fake_agent(), "run/0");
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
