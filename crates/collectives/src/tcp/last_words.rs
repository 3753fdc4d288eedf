//! The last message of a rank before it hangs up: it leaves in order, or gives up because of other ranks.
//!
//! Every pair of ranks has a second connection for nothing else. When a rank gives up, the connection for data may be full,
//! or in the middle of a message, and a peer that was stopped may look at it only after the rank has ended. The
//! second connection is always empty, so the words always fit, and the peer's host keeps them. A rank whose connections end
//! without words has died. This module knows no operations.

use std::os::fd::AsFd;

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use serde::{Deserialize, Serialize};

/// Room for the words: two calls in words, or a number for each rank.
const MAX_BYTES: usize = 8 << 10;

/// The last words of a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum LastWords {
    /// It leaves the group in order.
    Leaves,
    /// It gives up because this rank has died.
    Lost(usize),
    /// It gives up because it has waited for these ranks, which did not come.
    Missing(Vec<usize>),
    /// It gives up because the calls of two ranks, in words, do not match.
    Conflict { ranks: [usize; 2], operations: [u32; 2], calls: [String; 2] },
}

/// The bytes that have come over the connection for last words, as far as they can be read.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Heard {
    Nothing,
    Words(LastWords),
    /// The connection has ended without words.
    End,
}

impl LastWords {
    /// Says the words to a peer. A peer that is gone does not hear them.
    pub(super) fn say_to(&self, peer: impl AsFd) {
        if let Ok(bytes) = postcard::to_allocvec(self) {
            let _ = rustix::net::send(peer, &bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
        }
    }

    /// The words of a peer, if they have come. Does not wait, and can be called again.
    pub(super) fn of(peer: impl AsFd) -> Heard {
        let mut bytes = [0; MAX_BYTES];
        match rustix::net::recv(peer, &mut bytes, RecvFlags::PEEK | RecvFlags::DONTWAIT) {
            Ok((0, _)) => Heard::End,
            // Words that have come only in part cannot be read yet.
            Ok((received, _)) => {
                postcard::from_bytes(&bytes[..received]).map_or(Heard::Nothing, Heard::Words)
            }
            Err(Errno::AGAIN | Errno::INTR) => Heard::Nothing,
            Err(_) => Heard::End,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};

    use super::*;

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (one, listener.accept().unwrap().0)
    }

    #[test]
    fn words_are_heard_even_after_the_rank_has_ended() {
        let everybody = LastWords::Missing((0..crate::MAX_RANKS).collect());
        let calls = ["all_reduce of 4 x f32".into(), "barrier".into()];
        let conflict = LastWords::Conflict { ranks: [1, 2], operations: [7, 8], calls };
        for words in [LastWords::Leaves, LastWords::Lost(3), everybody, conflict] {
            let (here, there) = pair();
            here.set_nonblocking(true).unwrap();
            assert_eq!(LastWords::of(&here), Heard::Nothing);
            // Both give up at once, and one ends before it has read what the other says.
            words.say_to(&here);
            words.say_to(&there);
            drop(there);
            assert_eq!(LastWords::of(&here), Heard::Words(words.clone()));
            assert_eq!(LastWords::of(&here), Heard::Words(words), "asked again");
        }
    }

    #[test]
    fn a_rank_that_ends_without_words_has_died() {
        let (here, there) = pair();
        drop(there);
        assert_eq!(LastWords::of(&here), Heard::End);
    }

    #[test]
    fn half_of_the_words_are_no_words() {
        let (here, mut there) = pair();
        let bytes = postcard::to_allocvec(&LastWords::Missing(vec![1, 2])).unwrap();
        for byte in &bytes[..bytes.len() - 1] {
            there.write_all(&[*byte]).unwrap();
            assert_eq!(LastWords::of(&here), Heard::Nothing);
        }
        there.write_all(&bytes[bytes.len() - 1..]).unwrap();
        assert_eq!(LastWords::of(&here), Heard::Words(LastWords::Missing(vec![1, 2])));
    }
}
