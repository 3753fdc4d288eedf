//! Ranks that connect to each other, and strangers that connect to them first.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use crate::hello::CHALLENGE_LIMIT;
use crate::{PeerAddress, PeerListener, Rendezvous, RunKey, SocketKind, Store};

const WORLD: usize = 3;
/// The rank that connects to all others.
const LAST: usize = 2;
const HOST: &str = "127.0.0.1";
const LIMIT: Duration = Duration::from_secs(60);

fn pair() -> [PeerListener; 2] {
    [0, 1].map(|rank| PeerListener::bind(&RunKey::default(), Some(HOST), rank, 2).unwrap())
}

/// Fails a test that hangs.
fn within_limit(work: impl FnOnce() + Send + 'static) {
    let (sender, receiver) = channel();
    let thread = std::thread::spawn(move || {
        work();
        let _ = sender.send(());
    });
    let outcome = receiver.recv_timeout(LIMIT);
    assert_ne!(outcome, Err(RecvTimeoutError::Timeout), "it still ran after {LIMIT:?}");
    thread.join().unwrap();
}

#[test]
fn two_ranks_connect_by_either_network_and_may_wait_for_ever() {
    let connect_by = |network| {
        let listeners = pair();
        let addresses = listeners.each_ref().map(|listener| listener.address().clone());
        let connect = |rank: usize| {
            let (limit, peers) = (Duration::MAX, [1 - rank]);
            listeners[rank].connect::<2>(network, &addresses, rank, &peers, limit, |_, _| {})
        };
        let connections = std::thread::scope(|scope| {
            let first = scope.spawn(|| connect(0));
            let second = scope.spawn(|| connect(1));
            [first, second].map(|rank| rank.join().unwrap().unwrap())
        });
        assert!(connections[0][1].is_some() && connections[1][0].is_some(), "{network:?}");
    };
    within_limit(move || [SocketKind::Local, SocketKind::Tcp].into_iter().for_each(connect_by));
}

/// Whether they accept, connect, or do both.
#[test]
fn ranks_wait_for_nobody_once_one_of_them_has_gone() {
    let wait = |network, rank: usize, peers: &[usize]| {
        let over = Arc::new(AtomicBool::new(false));
        let listeners = [0, 1, 2].map(|rank| {
            let listener = PeerListener::bind(&RunKey::default(), Some(HOST), rank, WORLD);
            listener.unwrap().unless(Some(over.clone()))
        });
        let addresses = listeners.each_ref().map(|listener| listener.address().clone());
        let connect = || {
            let limit = Duration::MAX;
            listeners[rank].connect::<1>(network, &addresses, rank, peers, limit, |_, _| {})
        };
        std::thread::scope(|scope| {
            let waiting = scope.spawn(connect);
            over.store(true, Ordering::Relaxed);
            assert!(waiting.join().unwrap().is_err(), "{network:?}, rank {rank}");
        });
    };
    within_limit(move || {
        for network in [SocketKind::Local, SocketKind::Tcp] {
            for (rank, peers) in [(0, &[1][..]), (1, &[0]), (1, &[0, 2])] {
                wait(network, rank, peers);
            }
        }
    });
}

#[test]
fn a_rank_with_another_key_is_told_so_and_the_absent_rank_is_named() {
    let listeners = pair();
    let mut addresses = listeners.each_ref().map(|listener| listener.address().clone());
    addresses[0].name = "guessed".into();
    // Long enough for both to come within the limit of the other.
    let limit = Duration::from_secs(3);
    let errors = std::thread::scope(|scope| {
        let connect = |rank: usize| {
            let (listener, addresses) = (&listeners[rank], &addresses);
            scope.spawn(move || {
                let peers = [1 - rank];
                listener.connect::<1>(SocketKind::Tcp, addresses, rank, &peers, limit, |_, _| {})
            })
        };
        [connect(0), connect(1)].map(|rank| rank.join().unwrap().unwrap_err().to_string())
    });
    assert!(errors[0].contains("ranks [1] did not come in time"), "{}", errors[0]);
    assert!(errors[1].contains("does not know the secret"), "{}", errors[1]);
}

/// Connects ten strangers to a rank's listener. Returns the strangers that wait for an answer.
fn send_strangers_to(address: &PeerAddress) -> Vec<TcpStream> {
    let garbage: Vec<u8> = (0..5000u32).map(|i| ((i * i * 31) >> 3) as u8).collect();
    let words: [&[u8]; 4] = [&garbage, b"GET / HTTP/1.1\r\n\r\n", &[], b"p"];
    let mut held = Vec::new();
    for (number, words) in words.iter().cycle().take(10).enumerate() {
        let mut stranger = TcpStream::connect((&*address.tcp.0, address.tcp.1)).unwrap();
        stranger.write_all(words).unwrap();
        if number < 4 {
            held.push(stranger);
        }
    }
    held
}

/// Strangers that say nothing fill the time of a listener that hears them one after the other.
#[test]
fn silent_strangers_delay_no_rank() {
    within_limit(|| {
        let listeners = pair();
        let addresses = listeners.each_ref().map(|listener| listener.address().clone());
        let tcp = &addresses[0].tcp;
        let silent: Vec<_> =
            (0..40).map(|_| TcpStream::connect((&*tcp.0, tcp.1)).unwrap()).collect();
        // Before the strangers have used up half of the time that each of them has.
        let limit = Duration::from_secs(10);
        std::thread::scope(|scope| {
            let connect = |rank: usize| {
                let (listener, addresses) = (&listeners[rank], &addresses);
                scope.spawn(move || {
                    let peers = [1 - rank];
                    listener.connect::<2>(
                        SocketKind::Tcp,
                        addresses,
                        rank,
                        &peers,
                        limit,
                        |_, _| {},
                    )
                })
            };
            let [first, second] = [connect(0), connect(1)];
            assert!(first.join().unwrap().is_ok() && second.join().unwrap().is_ok());
        });
        drop(silent);
    });
}

/// A rank that gives up an unanswered connection and makes another one is no faster, and its peer has to turn away each.
#[test]
fn a_rank_waits_on_one_connection_for_a_peer_that_is_stopped() {
    let stopped = std::net::TcpListener::bind((HOST, 0)).unwrap();
    let port = stopped.local_addr().unwrap().port();
    let [_, own] = pair();
    let mut peer = PeerAddress::default();
    peer.tcp = (HOST.into(), port);
    let addresses = [peer, own.address().clone()];
    // Longer than a rank waits for the store's challenge.
    let limit = CHALLENGE_LIMIT + Duration::from_millis(500);
    let error =
        own.connect::<1>(SocketKind::Tcp, &addresses, 1, &[0], limit, |_, _| {}).unwrap_err();
    assert!(error.to_string().contains("does not answer"), "{error}");
    stopped.set_nonblocking(true).unwrap();
    let connections = std::iter::from_fn(|| stopped.accept().ok());
    assert_eq!(connections.count(), 1);
}

/// Whether a stranger was turned away without an answer.
fn is_turned_away(mut stranger: TcpStream) -> bool {
    stranger.set_read_timeout(Some(LIMIT)).unwrap();
    match stranger.read(&mut [0; 1]) {
        Ok(len) => len == 0,
        Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
    }
}

/// Connects every rank to all others. Then every rank sends its number to all others.
fn connect_all(listener: &PeerListener, addresses: &[PeerAddress], rank: usize) {
    let peers: Vec<usize> = (0..WORLD).filter(|&peer| peer != rank).collect();
    let connections =
        listener.connect(SocketKind::Tcp, addresses, rank, &peers, LIMIT, |_, _| {}).unwrap();
    let mut streams: Vec<Option<TcpStream>> = connections
        .into_iter()
        .map(|socket| socket.map(|[socket]| TcpStream::from(socket)))
        .collect();
    for stream in streams.iter_mut().flatten() {
        stream.write_all(&[rank as u8]).unwrap();
    }
    for (peer, stream) in streams.iter_mut().enumerate() {
        assert_eq!(stream.is_none(), peer == rank);
        if let Some(stream) = stream {
            stream.set_read_timeout(Some(LIMIT)).unwrap();
            let mut number = [0];
            stream.read_exact(&mut number).unwrap();
            assert_eq!(usize::from(number[0]), peer);
        }
    }
}

/// A rank listens from the moment when it publishes its address until the last rank has connected to it, which
/// determines for how long strangers can reach the others.
#[test]
fn strangers_do_no_harm_to_ranks_that_connect() {
    let folder = tempfile::tempdir().unwrap();
    let rendezvous = &Rendezvous::by_file(folder.path().join("rendezvous"));
    std::thread::scope(|scope| {
        for rank in (0..WORLD).filter(|&rank| rank != LAST) {
            scope.spawn(move || {
                let store = Store::open(rendezvous, rank, WORLD, LIMIT).unwrap();
                let listener = PeerListener::bind(store.key(), Some(HOST), rank, WORLD).unwrap();
                let addresses = store.exchange("address", listener.address()).unwrap();
                connect_all(&listener, &addresses, rank);
            });
        }
        let store = Store::open(rendezvous, LAST, WORLD, LIMIT).unwrap();
        let listener = PeerListener::bind(store.key(), Some(HOST), LAST, WORLD).unwrap();
        let mut held = Vec::new();
        for rank in (0..WORLD).filter(|&rank| rank != LAST) {
            let address = store.get(&format!("address/{rank}")).unwrap();
            held.extend(send_strangers_to(&postcard::from_bytes(&address).unwrap()));
        }
        // All strangers are in the queue before this rank is.
        let addresses = store.exchange("address", listener.address()).unwrap();
        connect_all(&listener, &addresses, LAST);
        assert_eq!(held.len(), 8);
        assert!(held.into_iter().all(is_turned_away));
    });
}
