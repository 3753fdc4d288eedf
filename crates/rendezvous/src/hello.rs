//! How two ranks recognize each other on a new connection.
//!
//! The rank that connects sends a hello of fixed size: a magic number, its rank, the world size, and the
//! secret. The rank that listens sends a different magic number, so that neither an echo nor another program
//! is mistaken for a rank, and its [`HelloAnswer`]. The connections to the store and the connections between
//! peers both begin like this.

use std::io;
use std::os::fd::AsFd;

use crate::deadline::Deadline;
use crate::rendezvous::next_secret;
use crate::socket::{receive, transmit};

/// Length of the secret in a hello, in bytes. A shorter secret is padded with zeros.
pub(crate) const SECRET_BYTES: usize = 64;

const MAGIC: [u8; 8] = *b"pacelin2";
const ANSWER_MAGIC: [u8; 8] = *b"2nilecap";
/// How many attempts ahead of the listener a rank can be to be recognized.
const MAX_AHEAD: usize = 64;
const HELLO_BYTES: usize = 8 + 4 + 4 + SECRET_BYTES;
const ANSWER_BYTES: usize = 8 + 1;

/// The answer to a hello.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HelloAnswer {
    Welcome,
    WrongSecret,
    WrongWorld,
    RankTaken,
    /// The listener belongs to an earlier attempt of the run, which is over.
    Overtaken,
}

impl HelloAnswer {
    const ALL: [Self; 5] =
        [Self::Welcome, Self::WrongSecret, Self::WrongWorld, Self::RankTaken, Self::Overtaken];
}

/// Which rank the other side says it is, and whether it may join.
#[derive(Clone, Copy)]
pub(crate) struct Hello {
    pub(crate) rank: usize,
    /// What to answer: [`HelloAnswer::Welcome`], unless the secret or the world size differs.
    pub(crate) answer: HelloAnswer,
    /// The secret that the rank presents.
    secret: [u8; SECRET_BYTES],
}

impl Hello {
    /// Whether the rank belongs to a later attempt of the run than the listener, whose secret is `secret`.
    pub(crate) fn is_of_later_attempt(&self, secret: &str) -> bool {
        let mut later = secret.to_owned();
        self.answer == HelloAnswer::WrongSecret
            && (0..MAX_AHEAD).any(|_| {
                later = next_secret(&later);
                differs(&self.secret, &padded(&later)) == 0
            })
    }
}

/// Why a connection was not made.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// Trying again may help.
    NotYet(String),
    /// Trying again cannot help.
    Final(HelloAnswer),
}

impl Refusal {
    pub(crate) fn not_yet(error: impl std::fmt::Display) -> Self {
        Self::NotYet(error.to_string())
    }

    /// The reason in words, for the rank that was refused.
    pub(crate) fn reason(self, rank: usize, world: usize) -> String {
        match self {
            Self::NotYet(reason) => reason,
            Self::Final(HelloAnswer::WrongSecret) => {
                "the listener there belongs to another run, or to another attempt of this one (its secret \
                 differs)"
                    .into()
            }
            Self::Final(HelloAnswer::WrongWorld) => {
                format!(
                    "the listener there expects another world size than {world}; every host needs the same \
                     WORLD_SIZE (with paceline as the launcher: the same --nnodes and --nproc)"
                )
            }
            Self::Final(_) => format!("another process has already come as rank {rank}"),
        }
    }
}

/// Says hello and waits for the answer.
///
/// The deadline should be that of the whole rendezvous. The network may delay an answer that welcomes the rank. A
/// rank that has given up before this answer arrives is refused when it connects again.
pub(crate) fn say_hello(
    socket: impl AsFd,
    rank: usize,
    world: usize,
    secret: &str,
    deadline: &Deadline,
) -> Result<(), Refusal> {
    let mut hello = Vec::with_capacity(HELLO_BYTES);
    hello.extend_from_slice(&MAGIC);
    hello.extend_from_slice(&(rank as u32).to_le_bytes());
    hello.extend_from_slice(&(world as u32).to_le_bytes());
    hello.extend_from_slice(&padded(secret));
    let mut bytes = [0; ANSWER_BYTES];
    transmit(&socket, &hello, deadline)
        .and_then(|()| receive(&socket, &mut bytes, Some(deadline)))
        .map_err(|error| Refusal::NotYet(format!("what listens there does not answer: {error}")))?;
    let answer = HelloAnswer::ALL.get(usize::from(bytes[8]));
    match answer.filter(|_| bytes[..8] == ANSWER_MAGIC) {
        Some(HelloAnswer::Welcome) => Ok(()),
        Some(HelloAnswer::Overtaken) => {
            Err(Refusal::NotYet("the ranks there belong to an earlier attempt of this run".into()))
        }
        Some(&refusal) => Err(Refusal::Final(refusal)),
        None => Err(Refusal::NotYet("what listens there is another program".into())),
    }
}

/// Reads a hello. Errors if the bytes are not a rank's hello, or do not come before the deadline.
pub(crate) fn read_hello(
    socket: impl AsFd,
    world: usize,
    secret: &str,
    deadline: &Deadline,
) -> io::Result<Hello> {
    let mut hello = [0u8; HELLO_BYTES];
    // The magic number is checked first, so that a stranger with a shorter message is refused before
    // the deadline.
    receive(&socket, &mut hello[..8], Some(deadline))?;
    if hello[..8] != MAGIC {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "it does not send what a rank sends",
        ));
    }
    receive(&socket, &mut hello[8..], Some(deadline))?;
    let number = |at: usize| hello[at..at + 4].iter().rev().fold(0, |n, b| n << 8 | *b as usize);
    let offered = std::array::from_fn(|at| hello[16 + at]);
    let answer = match (differs(&offered, &padded(secret)), number(12)) {
        (0, their_world) if their_world == world => HelloAnswer::Welcome,
        (0, _) => HelloAnswer::WrongWorld,
        _ => HelloAnswer::WrongSecret,
    };
    Ok(Hello { rank: number(8), answer, secret: offered })
}

/// Zero if two secrets are the same. Every byte is compared, so that the time taken reveals nothing about them.
fn differs(one: &[u8; SECRET_BYTES], other: &[u8; SECRET_BYTES]) -> u8 {
    std::hint::black_box(one.iter().zip(other).fold(0, |acc, (a, b)| acc | (a ^ b)))
}

/// Sends the answer.
pub(crate) fn answer_hello(
    socket: impl AsFd,
    answer: HelloAnswer,
    deadline: &Deadline,
) -> io::Result<()> {
    let mut bytes = ANSWER_MAGIC.to_vec();
    bytes.push(answer as u8);
    transmit(socket, &bytes, deadline)
}

/// A secret as the fixed-size field of a hello.
fn padded(secret: &str) -> [u8; SECRET_BYTES] {
    let mut bytes = [0; SECRET_BYTES];
    for (to, from) in bytes.iter_mut().zip(secret.bytes()) {
        *to = from;
    }
    bytes
}
