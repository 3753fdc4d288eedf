//! Strangers at the doors of ranks that are about to connect to each other.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use crate::door::{Card, Door};
use crate::{Group, GroupOptions, Meeting, ReduceOp, Store};

const WORLD: usize = 3;
/// The rank that goes to the doors of all others.
const LAST: usize = 2;
const HOST: &str = "127.0.0.1";

/// Has ten strangers call at a door; those who stay on the line.
fn call_at(card: &Card) -> Vec<TcpStream> {
    let garbage: Vec<u8> = (0..5000u32).map(|i| ((i * i * 31) >> 3) as u8).collect();
    let words: [&[u8]; 4] = [&garbage, b"GET / HTTP/1.1\r\n\r\n", &[], b"p"];
    let mut held = Vec::new();
    for (number, words) in words.iter().cycle().take(10).enumerate() {
        let mut stranger = TcpStream::connect((&*card.tcp.0, card.tcp.1)).unwrap();
        stranger.write_all(words).unwrap();
        if number < 4 {
            held.push(stranger);
        }
    }
    held
}

/// Whether a stranger was sent away without a word.
fn is_turned_away(mut stranger: TcpStream, limit: Duration) -> bool {
    stranger.set_read_timeout(Some(limit)).unwrap();
    match stranger.read(&mut [0; 1]) {
        Ok(len) => len == 0,
        Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
    }
}

/// A door is open from when a rank shows its card until the last rank has come to it, so the last
/// rank decides for how long.
#[test]
fn strangers_at_the_door_do_no_harm() {
    let folder = tempfile::tempdir().unwrap();
    let meeting = &Meeting::by_file(folder.path().join("meet"));
    let options = GroupOptions::for_local_ranks(WORLD);
    let limit = options.timeout;
    let add_up = |group: Group| {
        let mut ranks = [group.rank() as i32];
        group.all_reduce_slice(&mut ranks, ReduceOp::Sum).unwrap();
        assert_eq!(ranks, [3]);
    };
    std::thread::scope(|scope| {
        for rank in (0..WORLD).filter(|&rank| rank != LAST) {
            let options = options.clone();
            scope.spawn(move || {
                add_up(Group::tcp(meeting, HOST, rank, WORLD, options).unwrap());
            });
        }
        let store = Store::open(meeting, LAST, WORLD, limit).unwrap();
        let door = Door::open(Some(HOST), LAST).unwrap();
        let mut held = Vec::new();
        for rank in (0..WORLD).filter(|&rank| rank != LAST) {
            let card = store.get(&format!("card/{rank}")).unwrap();
            held.extend(call_at(&postcard::from_bytes(&card).unwrap()));
        }
        // All strangers stand in the queue before this rank does.
        let cards = door.swap_at(&store, LAST, WORLD).unwrap();
        add_up(Group::form_tcp(&door, &cards, HOST, LAST, options, "world").unwrap());
        assert_eq!(held.len(), 8);
        assert!(held.into_iter().all(|stranger| is_turned_away(stranger, limit)));
    });
}
