//! Every kind of rendezvous, with threads as ranks, and what strangers may do to it.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener, TcpStream, ToSocketAddrs};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::path::Path;

use rustix::net::sockopt::set_socket_reuseaddr;
use rustix::net::{AddressFamily, SocketType, bind, socket};

use super::*;
use crate::hello::{Who, say_hello};

/// A limit that is reached only if something hangs.
const LIMIT: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(400);

/// Runs `body` on `world` ranks that meet at `rendezvous`.
fn ranks<T: Send>(
    rendezvous: &Rendezvous,
    world: usize,
    body: impl Fn(usize, Store) -> T + Sync,
) -> Vec<T> {
    std::thread::scope(|scope| {
        let start = |rank| {
            let body = &body;
            scope.spawn(move || body(rank, Store::open(rendezvous, rank, world, LIMIT).unwrap()))
        };
        let threads: Vec<_> = (0..world).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// What every store must do.
pub(super) fn exercise(rendezvous: &Rendezvous) {
    let keys = ranks(rendezvous, 8, |rank, store| {
        // Delays this rank, so that the others wait for a key that is not there yet.
        if rank == 3 {
            std::thread::sleep(Duration::from_millis(50));
        }
        store.set(&format!("key/{rank}"), &vec![rank as u8; 3000 * rank]).unwrap();
        for peer in 0..8 {
            assert_eq!(store.get(&format!("key/{peer}")).unwrap(), vec![peer as u8; 3000 * peer]);
        }
        let back = store.add("sum", rank as i64 - 10).unwrap();
        assert!(back < 0);
        assert_eq!(store.add("counted", 1 << 40).unwrap() % (1 << 40), 0);
        // The last rank to be counted sets the key. By then every rank has added to the sum.
        if store.add("number", 1).unwrap() == 8 {
            store.set("all", b"").unwrap();
        }
        assert_eq!(store.get("all").unwrap(), b"");
        assert_eq!(store.get("number").unwrap(), b"8");
        assert_eq!(store.get("sum").unwrap(), b"-52");
        let too_long = store.set(&"k".repeat(2000), b"").unwrap_err().to_string();
        assert!(too_long.contains("a key of 2000 bytes is too long"), "{too_long}");
        store.key().prove(&[b"this"])
    });
    assert!(keys.iter().all(|key| *key == keys[0]));
}

fn error(rendezvous: &Rendezvous, rank: usize, world: usize) -> String {
    Store::open(rendezvous, rank, world, SHORT).unwrap_err().to_string()
}

fn unused_name() -> String {
    format!("paceline-test-{}", Rendezvous::fresh_secret().unwrap())
}

/// A port on which no program listens. The system gives it to no other program as long as this process lives,
/// because a socket is bound to it, which does not listen, and lets a rank bind the same port.
fn unused_port() -> u16 {
    static TAKEN: Mutex<Vec<TcpListener>> = Mutex::new(Vec::new());
    let socket = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    set_socket_reuseaddr(&socket, true).unwrap();
    bind(&socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0)).unwrap();
    // For its methods: it is no listener, since nobody has told it to listen.
    let holder = TcpListener::from(socket);
    let port = holder.local_addr().unwrap().port();
    lock(&TAKEN).push(holder);
    port
}

/// Connects to an address at which a listener is about to start.
fn connect_soon<S>(connect: impl Fn() -> std::io::Result<S>) -> S {
    let deadline = Deadline::after(LIMIT);
    loop {
        match connect() {
            Ok(stream) => return stream,
            Err(error) => assert!(!deadline.has_passed(), "nobody listens: {error}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn local() -> Rendezvous {
    Rendezvous::by_name(unused_name(), "right")
}

fn tcp() -> Rendezvous {
    Rendezvous::by_tcp("127.0.0.1", unused_port(), "right")
}

#[test]
fn by_a_local_socket_again_and_again() {
    let rendezvous = local();
    for _ in 0..5 {
        exercise(&rendezvous);
    }
}

#[test]
fn by_tcp_again_and_again() {
    let rendezvous = tcp();
    for _ in 0..5 {
        exercise(&rendezvous);
    }
}

#[test]
fn by_tcp_on_all_interfaces() {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    if is_this_host(&host) {
        exercise(&Rendezvous::by_tcp(host, unused_port(), ""));
    } else {
        println!("skipped: this host does not know its own name, or takes it for another host's");
    }
}

/// Whether the name has addresses here, and all of them are this host's.
fn is_this_host(host: &str) -> bool {
    let Ok(found) = (host, 0).to_socket_addrs() else { return false };
    let found: Vec<_> = found.collect();
    !found.is_empty() && found.iter().all(|address| TcpListener::bind(address).is_ok())
}

#[test]
fn by_a_file_that_is_removed_when_all_are_there() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rendezvous");
    for stale in ["paceline-long-gone\nsecret\n", "", "paceline rendezvous 2\nsecret s\nend\n"] {
        std::fs::write(&path, stale).unwrap();
        exercise(&Rendezvous::by_file(&path));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}

#[test]
fn a_file_of_a_run_that_is_not_ours_is_not_joined() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rendezvous");
    let rendezvous = Rendezvous::by_file(&path);
    // Another run listens at the address in the file, as if the port had been assigned again.
    let other = local();
    let RendezvousPoint::Local { name } = other.point.clone() else { unreachable!() };
    std::thread::scope(|scope| {
        scope.spawn(|| Store::open(&other, 0, 2, Duration::from_secs(2)).unwrap_err());
        let stale = file::RendezvousFile {
            boot: file::boot_id(),
            addresses: vec![SocketAddress::Local(name)],
            secret: "of an earlier run".into(),
        };
        stale.write(&path).unwrap();
        let joining = scope.spawn(|| Store::open(&rendezvous, 1, 2, LIMIT));
        std::thread::sleep(Duration::from_millis(100));
        let host = Store::open(&rendezvous, 0, 2, LIMIT).unwrap();
        host.set("key", b"value").unwrap();
        assert_eq!(joining.join().unwrap().unwrap().get("key").unwrap(), b"value");
    });
}

#[test]
fn a_file_leads_other_hosts_to_the_port() {
    if !file::own_hosts().iter().any(|host| is_this_host(host)) {
        println!("skipped: this host has neither a route to others nor a name that it knows");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rendezvous");
    let rendezvous = Rendezvous::by_file(&path);
    std::thread::scope(|scope| {
        let host = scope.spawn(|| Store::open(&rendezvous, 0, 2, LIMIT).unwrap());
        let far = folder.path().join("far");
        let read = || file::RendezvousFile::read(&path).map_err(std::io::Error::other);
        let written = connect_soon(read);
        file::RendezvousFile { boot: "another host".into(), ..written }.write(&far).unwrap();
        let store = Store::open(&Rendezvous::by_file(&far), 1, 2, LIMIT).unwrap();
        host.join().unwrap().set("key", b"value").unwrap();
        assert_eq!(store.get("key").unwrap(), b"value");
    });
    assert!(!Path::new(&path).exists());
}

#[test]
fn who_may_not_join_is_told_why() {
    for rendezvous in [local(), tcp()] {
        std::thread::scope(|scope| {
            let host = scope.spawn(|| Store::open(&rendezvous, 0, 3, LIMIT).unwrap());
            let deadline = Deadline::after(LIMIT);
            let who = Who { rank: 1, world: 3, launch: None };
            let first = Connection::join(|| find_host(&rendezvous), who, &deadline).unwrap().0;
            // Rank 1 has joined now.
            let error = |rendezvous: &Rendezvous, rank, world| {
                Store::open(rendezvous, rank, world, LIMIT).unwrap_err().to_string()
            };
            let wrong = Rendezvous { secret: "wrong".into(), ..rendezvous.clone() };
            let message = error(&wrong, 2, 3);
            assert!(message.contains("its secret differs"), "{message}");
            let message = error(&rendezvous, 2, 4);
            assert!(message.contains("another world size than 4"), "{message}");
            let message = error(&rendezvous, 1, 3);
            assert!(message.contains("already come as rank 1"), "{message}");
            // The refused ranks have not disturbed the others.
            Store::open(&rendezvous, 2, 3, LIMIT).unwrap();
            host.join().unwrap();
            drop(first);
        });
    }
}

/// Somebody starts the launcher of host 1 twice, and of host 0.
#[test]
fn the_ranks_of_a_second_launcher_of_a_host_are_turned_away() {
    let rendezvous = tcp();
    let by = |launcher: &str, host| rendezvous.clone().started_by(launcher, host);
    let [zero, one, again, zero_again] = [by("a", 0), by("b", 1), by("c", 1), by("d", 0)];
    std::thread::scope(|scope| {
        let host = scope.spawn(|| Store::open(&zero, 0, 4, LIMIT).map(drop));
        let deadline = Deadline::after(LIMIT);
        let who = Who { rank: 2, world: 4, launch: one.launch };
        let joined = Connection::join(|| find_host(&one), who, &deadline).unwrap().0;
        for (rank, second) in [(2, &again), (3, &again), (1, &zero_again)] {
            let message = Store::open(second, rank, 4, LIMIT).unwrap_err().to_string();
            assert!(message.contains("started by another launcher already"), "{message}");
            assert!(message.contains("--node-rank"), "{message}");
        }
        // A launcher whose ranks have all left may be replaced.
        drop(joined);
        let replaced = |rank| {
            let again = &again;
            scope.spawn(move || {
                loop {
                    match Store::open(again, rank, 4, LIMIT) {
                        // The server notices a moment later that the connection has ended.
                        Err(error) if error.to_string().contains("another launcher") => {}
                        outcome => return outcome.map(drop),
                    }
                }
            })
        };
        let others = [replaced(2), replaced(3)];
        let last = scope.spawn(|| Store::open(&zero, 1, 4, LIMIT).map(drop));
        others.into_iter().for_each(|rank| rank.join().unwrap().unwrap());
        last.join().unwrap().unwrap();
        host.join().unwrap().unwrap();
    });
}

#[test]
fn ranks_of_a_later_attempt_end_an_earlier_one_and_meet_in_their_own() {
    let tcp = tcp();
    let of_attempt = |restart| {
        let secret = Rendezvous::secret_of_restart(&tcp.secret, restart);
        Rendezvous { secret, ..tcp.clone() }
    };
    let [first, second, third] = [0, 1, 2].map(of_attempt);
    let open = |rank, rendezvous| move || Store::open(rendezvous, rank, 2, LIMIT).map(drop);
    std::thread::scope(|scope| {
        // Rank 1 is on a host that has started it twice again.
        let ahead = scope.spawn(open(1, &third));
        let error = open(0, &first)().unwrap_err();
        assert!(matches!(error, RendezvousError::Overtaken { rank: 0, ahead: 1, .. }), "{error}");
        // The next attempt is behind, too.
        open(0, &second)().unwrap_err();
        open(0, &third)().unwrap();
        ahead.join().unwrap().unwrap();
    });
}

#[test]
fn a_rank_of_an_earlier_attempt_is_turned_away_and_disturbs_nobody() {
    let first = tcp();
    let secret = Rendezvous::secret_of_restart(&first.secret, 1);
    let second = Rendezvous { secret, ..first.clone() };
    std::thread::scope(|scope| {
        let host = scope.spawn(|| Store::open(&second, 0, 2, LIMIT).map(drop));
        let message = Store::open(&first, 1, 2, LIMIT).unwrap_err().to_string();
        assert!(message.contains("another attempt of this one"), "{message}");
        Store::open(&second, 1, 2, LIMIT).unwrap();
        host.join().unwrap().unwrap();
    });
}

fn assert_absent_ranks_are_named(rendezvous: &Rendezvous) {
    // Long enough for both to come within the limit of the other.
    let open = |rank| Store::open(rendezvous, rank, 3, Duration::from_secs(10));
    std::thread::scope(|scope| {
        let came = [0, 1].map(|rank| scope.spawn(move || open(rank)));
        for came in came {
            let message = came.join().unwrap().unwrap_err().to_string();
            assert!(message.contains("ranks [2] did not come in time"), "{message}");
        }
    });
    let message = error(rendezvous, 1, 2);
    assert!(message.contains("rank 0 did not come in time"), "{message}");
}

#[test]
fn who_does_not_come_is_named() {
    assert_absent_ranks_are_named(&local());
}

#[test]
fn who_does_not_come_is_named_by_tcp() {
    assert_absent_ranks_are_named(&tcp());
}

#[test]
fn a_key_that_nobody_sets_is_named_and_harms_nothing() {
    let rendezvous = local();
    let store = Store::open(&rendezvous, 0, 1, SHORT).unwrap();
    let message = store.get("nobody's").unwrap_err().to_string();
    assert!(message.contains("nobody has set the key \"nobody's\""), "{message}");
    store.set("text", b"no number").unwrap();
    let message = store.add("text", 1).unwrap_err().to_string();
    assert!(message.contains("holds no number"), "{message}");
    assert_eq!(store.get("text").unwrap(), b"no number");
}

#[test]
fn who_waits_for_ever_may() {
    let store = Store::open(&local(), 0, 1, Duration::MAX).unwrap();
    store.set("key", b"value").unwrap();
    assert_eq!(store.get("key").unwrap(), b"value");
}

#[test]
fn rank_0s_handle_may_go_first() {
    let rendezvous = tcp();
    ranks(&rendezvous, 3, |rank, store| {
        if rank == 0 {
            store.set("last words", b"bye").unwrap();
        } else {
            std::thread::sleep(Duration::from_millis(100));
            assert_eq!(store.get("last words").unwrap(), b"bye");
        }
    });
}

#[test]
fn a_port_in_use_is_said() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let rendezvous = Rendezvous::by_tcp("127.0.0.1", port, "s");
    let message = error(&rendezvous, 0, 2);
    assert!(message.contains("in use by another program"), "{message}");
    // The other ranks get an error too, whether that program echoes or hangs up.
    let echo = std::thread::spawn(move || {
        for mut stream in listener.incoming().take(200).flatten() {
            let mut bytes = [0u8; 40];
            if stream.read_exact(&mut bytes).is_ok() {
                let _ = stream.write_all(&bytes);
            }
        }
    });
    let message = error(&rendezvous, 1, 2);
    assert!(message.contains("another program"), "{message}");
    drop(echo);
}

/// Strangers of every kind connect to rank 0's listener while three ranks connect to it.
fn with_strangers<S: Read + Write + Send>(rendezvous: &Rendezvous, connect: impl Fn() -> S + Sync) {
    std::thread::scope(|scope| {
        let host = scope.spawn(|| Store::open(rendezvous, 0, 3, LIMIT).unwrap());
        // If the server waited for these silent connections one after the other, the ranks would time out.
        let slow: Vec<S> = (0..60).map(|_| connect()).collect();
        for garbage in [b"GET / HTTP/1.1\r\n\r\n".as_slice(), &[0xff; 4096], b"pacelin3", b"x"] {
            let _ = connect().write_all(garbage);
        }
        let mut trickling = connect();
        let others: Vec<_> = (1..3)
            .map(|rank| scope.spawn(move || Store::open(rendezvous, rank, 3, LIMIT).unwrap()))
            .collect();
        let _ = trickling.write_all(b"p");
        let mut stores = vec![host.join().unwrap()];
        stores.extend(others.into_iter().map(|rank| rank.join().unwrap()));
        stores[1].set("key", b"value").unwrap();
        assert_eq!(stores[2].get("key").unwrap(), b"value");
        drop(slow);
    });
}

#[test]
fn strangers_do_no_harm() {
    let rendezvous = tcp();
    let RendezvousPoint::Tcp { port, .. } = rendezvous.point else { unreachable!() };
    with_strangers(&rendezvous, || connect_soon(|| TcpStream::connect(("127.0.0.1", port))));
    let rendezvous = local();
    let RendezvousPoint::Local { name } = rendezvous.point.clone() else { unreachable!() };
    with_strangers(&rendezvous, || {
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        connect_soon(|| UnixStream::connect_addr(&address))
    });
}

/// A connection that knows the secret, but then announces lengths for which nobody should allocate memory.
#[test]
fn huge_lengths_end_the_connection_only() {
    let rendezvous = tcp();
    let RendezvousPoint::Tcp { port, .. } = rendezvous.point else { unreachable!() };
    std::thread::scope(|scope| {
        let host = scope.spawn(|| Store::open(&rendezvous, 0, 3, LIMIT).unwrap());
        let key = RunKey::of_secret("right");
        let who = Who { rank: 1, world: 3, launch: None };
        for header in [[0xff; 17], [0x7f; 17]] {
            // Tries until rank 0 listens and has noticed that the previous connection is gone.
            let mut stream = connect_soon(|| {
                let stream = TcpStream::connect(("127.0.0.1", port))?;
                let hello = say_hello(&stream, who, &key, LIMIT, &Deadline::after(LIMIT));
                hello.map_err(|refused| std::io::Error::other(refused.reason(who)))?;
                Ok(stream)
            });
            let _ = stream.write_all(&header);
            assert_eq!(stream.read(&mut [0; 8]).unwrap_or(0), 0, "it hung up");
        }
        // The server hung up after it had noted that rank 1 was gone.
        let join = |rank| Store::open(&rendezvous, rank, 3, LIMIT).unwrap();
        let second = scope.spawn(move || join(2));
        join(1).set("key", b"value").unwrap();
        assert_eq!(second.join().unwrap().get("key").unwrap(), b"value");
        assert_eq!(host.join().unwrap().get("key").unwrap(), b"value");
    });
}
