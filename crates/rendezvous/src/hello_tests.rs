//! Who does not know the secret learns nothing and joins nothing: strangers that listen, that connect, and that repeat what
//! they have heard.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use crate::deadline::{Deadline, MAX_LIMIT};
use crate::hello::{Hello, HelloAnswer, Incoming, MAX_ATTEMPTS, Refusal, Who, reason, say_hello};
use crate::key::RunKey;
use crate::{Rendezvous, Store};

const WORLD: usize = 3;
const SECRET: &str = "a secret that nobody hears";
/// Reached only when something hangs.
const LIMIT: Duration = Duration::from_secs(60);
/// A hello: a magic number and a random number.
const HELLO_BYTES: usize = 8 + 32;
/// A challenge with one proof.
const CHALLENGE_BYTES: usize = 8 + 1 + 32 + 32;
const PROOF_BYTES: usize = 1 + 4 + 4 + 4 + 16 + 32;
const WHO: Who = Who { rank: 1, world: WORLD, launch: None };

fn key() -> RunKey {
    RunKey::of_secret(SECRET)
}

fn deadline() -> Deadline {
    Deadline::after(LIMIT)
}

/// What the listener of a rank makes of a connection. Fails the test if that takes too long.
fn listen(socket: impl Into<OwnedFd>, keys: &[RunKey]) -> Result<Hello, String> {
    listen_for(socket, keys, LIMIT)
}

fn listen_for(
    socket: impl Into<OwnedFd>,
    keys: &[RunKey],
    limit: Duration,
) -> Result<Hello, String> {
    let mut incoming = Incoming::new(socket.into(), limit).unwrap();
    loop {
        match incoming.advance(keys, WORLD) {
            Ok(Some(hello)) => {
                incoming.answer(hello.answer).unwrap();
                return Ok(hello);
            }
            Ok(None) => std::thread::sleep(Duration::from_millis(1)),
            Err(error) => return Err(reason(&error)),
        }
    }
}

/// How a meeting ended for the rank that connects, and for the rank that listens.
type Outcomes = (Result<(), Refusal>, Result<Hello, String>);

/// A rank that connects and a rank that listens, with a stranger between them that passes everything on. Returns the
/// outcomes of both, and what the stranger has heard of each.
fn overheard() -> (Outcomes, [Vec<u8>; 2]) {
    let (near, far) = (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
    let (mut to_rank, mut to_listener) = (near.1, far.1);
    std::thread::scope(|scope| {
        let connects = scope.spawn(move || say_hello(&near.0, WHO, &key(), MAX_LIMIT, &deadline()));
        let listens = scope.spawn(move || listen(far.0, &[key()]));
        let mut heard = (Vec::new(), Vec::new());
        for (is_of_rank, count) in
            [(true, HELLO_BYTES), (false, CHALLENGE_BYTES), (true, PROOF_BYTES), (false, 1)]
        {
            let mut bytes = vec![0; count];
            let (from, to, all) = if is_of_rank {
                (&mut to_rank, &mut to_listener, &mut heard.0)
            } else {
                (&mut to_listener, &mut to_rank, &mut heard.1)
            };
            from.read_exact(&mut bytes).unwrap();
            to.write_all(&bytes).unwrap();
            all.extend(bytes);
        }
        ((connects.join().unwrap(), listens.join().unwrap()), [heard.0, heard.1])
    })
}

fn says_the_secret(bytes: &[u8]) -> bool {
    bytes.windows(SECRET.len()).any(|window| window == SECRET.as_bytes())
}

#[test]
fn who_knows_the_secret_is_welcome_and_whoever_listens_does_not_hear_it() {
    let ((connected, listened), [of_rank, of_listener]) = overheard();
    connected.unwrap();
    assert_eq!(listened, Ok(Hello { rank: 1, launch: None, answer: HelloAnswer::Welcome }));
    assert!(!says_the_secret(&of_rank) && !says_the_secret(&of_listener));
}

/// Another user of the host has taken the master port before rank 0.
#[test]
fn a_listener_that_took_the_port_first_learns_nothing_and_is_reported() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let stranger = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        let mut heard = vec![0; HELLO_BYTES];
        stream.read_exact(&mut heard).unwrap();
        // A challenge as a rank sends it, but with a proof that is made up.
        stream.write_all(b"3nilecap\x01").unwrap();
        stream.write_all(&[0x5a; 64]).unwrap();
        stream.read_to_end(&mut heard).unwrap();
        heard
    });
    let rendezvous = Rendezvous::by_tcp("127.0.0.1", port, SECRET);
    let message = Store::open(&rendezvous, 1, WORLD, LIMIT).unwrap_err().to_string();
    assert!(message.contains("does not know the secret"), "{message}");
    assert!(message.contains(&format!("127.0.0.1:{port}")), "{message}");
    let heard = stranger.join().unwrap();
    assert_eq!(heard.len(), HELLO_BYTES, "nothing follows a wrong proof");
    assert!(!says_the_secret(&heard));
}

#[test]
fn what_a_stranger_has_overheard_is_of_no_use_to_it_again() {
    let (_, [of_rank, of_listener]) = overheard();
    // The stranger says what the rank has said.
    let (mut stranger, listener) = UnixStream::pair().unwrap();
    stranger.write_all(&of_rank).unwrap();
    let refused = listen(listener, &[key()]).unwrap_err();
    assert!(refused.contains("proof that it knows the secret is wrong"), "{refused}");
    // And what the listener has said.
    let (mut stranger, rank) = UnixStream::pair().unwrap();
    stranger.write_all(&of_listener).unwrap();
    let refused = say_hello(&rank, WHO, &key(), MAX_LIMIT, &deadline()).unwrap_err();
    assert!(matches!(refused, Refusal::Unproven), "{refused:?}");
}

#[test]
fn a_proof_is_of_no_use_in_the_other_direction() {
    // The stranger sends the listener's own proof back to it, in place of one of its own.
    let (mut stranger, listener) = UnixStream::pair().unwrap();
    std::thread::scope(|scope| {
        let listens = scope.spawn(move || listen(listener, &[key()]));
        stranger.write_all(b"pacelin3").unwrap();
        stranger.write_all(&[3; 32]).unwrap();
        let mut challenge = [0; CHALLENGE_BYTES];
        stranger.read_exact(&mut challenge).unwrap();
        stranger.write_all(&[0; PROOF_BYTES - 32]).unwrap();
        stranger.write_all(&challenge[CHALLENGE_BYTES - 32..]).unwrap();
        let refused = listens.join().unwrap().unwrap_err();
        assert!(refused.contains("proof that it knows the secret is wrong"), "{refused}");
    });
    // The stranger sends the random number of a rank to a listener as its own, and so passes the listener's true proof on.
    // But what the rank then proves is of no use in a second connection.
    let (near, far) = (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
    let (mut to_rank, mut to_listener) = (near.1, far.1);
    std::thread::scope(|scope| {
        let connects = scope.spawn(move || say_hello(&near.0, WHO, &key(), MAX_LIMIT, &deadline()));
        let listens = scope.spawn(move || listen(far.0, &[key()]));
        let mut hello = [0; HELLO_BYTES];
        to_rank.read_exact(&mut hello).unwrap();
        to_listener.write_all(&hello).unwrap();
        let mut challenge = [0; CHALLENGE_BYTES];
        to_listener.read_exact(&mut challenge).unwrap();
        to_rank.write_all(&challenge).unwrap();
        let mut proof = [0; PROOF_BYTES];
        to_rank.read_exact(&mut proof).unwrap();
        // As another rank than the one that has proven itself.
        proof[1] = 2;
        to_listener.write_all(&proof).unwrap();
        let refused = listens.join().unwrap().unwrap_err();
        assert!(refused.contains("proof that it knows the secret is wrong"), "{refused}");
        drop(to_rank);
        assert!(matches!(connects.join().unwrap(), Err(Refusal::NotYet(_))));
    });
}

/// What a rank of one attempt and the listener of another one make of each other.
fn between_attempts(
    of_rank: usize,
    of_listener: usize,
) -> (Result<(), Refusal>, Result<Hello, String>) {
    let secret = |attempt| Rendezvous::secret_of_restart(SECRET, attempt);
    let (rank, listener) = UnixStream::pair().unwrap();
    std::thread::scope(|scope| {
        let keys = RunKey::of_attempts(&secret(of_listener), MAX_ATTEMPTS);
        let listens = scope.spawn(move || listen(listener, &keys));
        let key = RunKey::of_secret(&secret(of_rank));
        let connected = say_hello(&rank, WHO, &key, MAX_LIMIT, &deadline());
        drop(rank);
        (connected, listens.join().unwrap())
    })
}

#[test]
fn the_key_of_another_attempt_opens_nothing() {
    let (connected, listened) = between_attempts(2, 2);
    connected.unwrap();
    assert_eq!(listened.unwrap().answer, HelloAnswer::Welcome);
    let (connected, listened) = between_attempts(0, 1);
    assert!(matches!(connected, Err(Refusal::Unproven)), "{connected:?}");
    assert!(listened.unwrap_err().contains("its secret differs"));
    // The listener learns that a later attempt has begun, and the rank tries again.
    let (connected, listened) = between_attempts(3, 1);
    assert!(matches!(connected, Err(Refusal::NotYet(_))), "{connected:?}");
    assert_eq!(listened, Ok(Hello { rank: 1, launch: None, answer: HelloAnswer::Overtaken }));
    // Each listener has a key of its own.
    let words: &[&[u8]] = &[b"words"];
    let proof = key().of_listener("one").prove(words);
    assert!(!key().of_listener("other").verify(words, &proof) && !key().verify(words, &proof));
    assert!(!RunKey::default().of_listener("one").verify(words, &proof));
    assert!(key().of_listener("one").verify(words, &proof));
}

#[test]
fn a_stranger_that_connects_is_heard_for_a_short_time_and_a_few_bytes() {
    let short = Duration::from_millis(50);
    let said: [(&[u8], &str); 4] = [
        (b"", "it did not say who it is"),
        (b"pacelin", "it did not say who it is"),
        (b"pacelin2", "does not send what a rank sends"),
        (b"GET / HTTP/1.1\r\n\r\n", "does not send what a rank sends"),
    ];
    for (bytes, why) in said {
        let (mut stranger, listener) = UnixStream::pair().unwrap();
        stranger.write_all(bytes).unwrap();
        let refused = listen_for(listener, &[key()], short).unwrap_err();
        assert!(refused.contains(why), "{bytes:?}: {refused}");
    }
    // Bytes without an end, which begin like a hello.
    let (mut stranger, listener) = UnixStream::pair().unwrap();
    let endless = std::thread::spawn(move || {
        let sent = stranger.write_all(b"pacelin3");
        while sent.is_ok() && stranger.write_all(&[0; 4096]).is_ok() {}
    });
    let refused = listen(listener, &[key()]).unwrap_err();
    assert!(refused.contains("proof that it knows the secret is wrong"), "{refused}");
    endless.join().unwrap();
}

#[test]
fn a_stranger_that_listens_holds_a_rank_no_longer_than_its_limit() {
    // It says nothing; it repeats what it hears; it sends bytes without an end.
    let strangers: [fn(TcpStream); 3] = [
        |mut stream| drop(stream.read_to_end(&mut Vec::new())),
        |mut stream| {
            let mut heard = [0; HELLO_BYTES];
            while stream.read_exact(&mut heard).is_ok() && stream.write_all(&heard).is_ok() {}
        },
        |mut stream| while stream.write_all(&[0xff; 4096]).is_ok() {},
    ];
    for stranger in strangers {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                std::thread::spawn(move || stranger(stream));
            }
        });
        let rendezvous = Rendezvous::by_tcp("127.0.0.1", port, SECRET);
        let message = Store::open(&rendezvous, 1, WORLD, Duration::from_millis(300)).unwrap_err();
        let message = message.to_string();
        assert!(message.contains("rank 0 did not come in time"), "{message}");
        assert!(message.contains("what listens there"), "{message}");
    }
}
