//! How two ranks recognize each other on a new connection, without sending their secret.
//!
//! | step | who | sends |
//! |---|---|---|
//! | hello | connects | a random number |
//! | challenge | listens | a random number, and proofs that it knows the secret |
//! | proof | connects | its rank, the world size, its launcher, and a proof that it knows the secret |
//! | answer | listens | whether the rank may join |
//!
//! A proof is an HMAC under the key of an attempt, over both random numbers, over who sends it, and over all that its sender
//! says with it. So it is of no use in another connection, direction or attempt. The rank
//! that connects sends nothing but its random number before it has checked the listener's proof, so a stranger who listens
//! there learns nothing. The connections to the store and between peers both begin like this.
//!
//! What follows is neither encrypted nor authenticated, so this does not protect against somebody who
//! can change what two hosts send each other.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

use crate::RendezvousError;
use crate::deadline::Deadline;
use crate::key::{NONCE_BYTES, Nonce, PROOF_BYTES, RunKey, fresh_nonce};
use crate::launch::{LAUNCH_BYTES, LauncherId};
use crate::socket::{receive, receive_vec, transmit};

const MAGIC: [u8; 8] = *b"pacelin3";
const ANSWER_MAGIC: [u8; 8] = *b"3nilecap";
const HELLO_BYTES: usize = 8 + NONCE_BYTES;
/// The challenge without its proofs: how many there are follows the magic number.
const CHALLENGE_BYTES: usize = 8 + 1 + NONCE_BYTES;
/// How many attempts ahead, 4 bytes each of rank, world size and host, the launcher's number.
const SAID_BYTES: usize = 1 + 4 + 4 + 4 + LAUNCH_BYTES;
const PROOF_MESSAGE_BYTES: usize = SAID_BYTES + PROOF_BYTES;
/// The most attempts that a listener recognizes: its own, and those after it.
pub(crate) const MAX_ATTEMPTS: usize = 65;
/// How long a new connection may take to prove which rank it is.
pub(crate) const HELLO_LIMIT: Duration = Duration::from_secs(2);
/// How many connections may be about to do so. Further connections are refused at once.
pub(crate) const MAX_STRANGERS: usize = 128;
/// How long a rank that connects to the store waits for the challenge before it tries again: a stranger may listen there
/// until rank 0 comes.
pub(crate) const CHALLENGE_LIMIT: Duration = Duration::from_secs(10);

/// The beginning of a proof: another one on each side, so that a proof cannot be sent back.
const LISTENER: &[u8] = b"paceline: the rank that listens";
const CONNECTOR: &[u8] = b"paceline: the rank that connects";

/// The answer to a rank that has proven that it knows the secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HelloAnswer {
    Welcome,
    WrongWorld,
    RankTaken,
    /// The listener belongs to an earlier attempt of the run, which is over.
    Overtaken,
    /// Another launcher has started the ranks of this host already.
    HostTaken,
}

impl HelloAnswer {
    const ALL: [Self; 5] =
        [Self::Welcome, Self::WrongWorld, Self::RankTaken, Self::Overtaken, Self::HostTaken];
}

/// Who connects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Who {
    pub(crate) rank: usize,
    /// The number of ranks that it expects.
    pub(crate) world: usize,
    /// The launcher that has started it, if known.
    pub(crate) launch: Option<LauncherId>,
}

/// Which rank the other side has proven to be, and whether it may join.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) rank: usize,
    pub(crate) launch: Option<LauncherId>,
    /// The answer to give: [`HelloAnswer::Welcome`], unless the attempt or the world size differs.
    pub(crate) answer: HelloAnswer,
}

/// Why a connection was not made.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// Trying again may help.
    NotYet(String),
    /// The listener there speaks as a rank does, and does not know the secret.
    Unproven,
    /// Trying again cannot help.
    Final(HelloAnswer),
}

impl Refusal {
    pub(crate) fn not_yet(error: impl std::fmt::Display) -> Self {
        Self::NotYet(error.to_string())
    }

    pub(crate) fn reason(self, Who { rank, world, launch }: Who) -> String {
        match self {
            Self::NotYet(reason) => reason,
            Self::Unproven => {
                "the listener there does not know the secret of this attempt: it belongs to another run, or to \
                 another attempt of this one (its secret differs), or to somebody else who listens there first"
                    .into()
            }
            Self::Final(HelloAnswer::WrongWorld) => {
                format!(
                    "the listener there expects another world size than {world}; every host needs the same \
                     WORLD_SIZE (with paceline as the launcher: the same --nnodes and --nproc)"
                )
            }
            Self::Final(HelloAnswer::HostTaken) => {
                let host = launch.map_or(0, |launch| launch.host);
                format!(
                    "the ranks of host {host} have been started by another launcher already, and that run goes on; \
                     if this is another host, pass it another --node-rank"
                )
            }
            Self::Final(_) => format!("another process has already come as rank {rank}"),
        }
    }
}

/// Says hello, checks that the listener knows the secret, proves that this rank does, and waits for the answer.
///
/// The deadline should be that of the whole rendezvous: the network may delay an answer that welcomes the rank, and a
/// rank that has given up before is refused when it connects again. The challenge must come within `challenge_limit`.
pub(crate) fn say_hello(
    socket: impl AsFd,
    who: Who,
    key: &RunKey,
    challenge_limit: Duration,
    deadline: &Deadline,
) -> Result<(), Refusal> {
    let nonce = fresh_nonce().map_err(Refusal::not_yet)?;
    say_hello_with(nonce, socket, who, key, challenge_limit, deadline)
}

/// [`say_hello`] with a chosen random number.
pub(crate) fn say_hello_with(
    own: Nonce,
    socket: impl AsFd,
    who: Who,
    key: &RunKey,
    challenge_limit: Duration,
    deadline: &Deadline,
) -> Result<(), Refusal> {
    let (theirs, proofs) =
        deadline.within(challenge_limit, |until| challenge_for(&own, &socket, until))?;
    let proofs = proofs.chunks_exact(PROOF_BYTES);
    // The listener may belong to an earlier attempt, from whose secret this one's follows.
    let proven = |(ahead, proof): (usize, &[u8])| {
        let is_true = key.verify(&[LISTENER, &own, &theirs, &[ahead as u8]], proof);
        is_true.then_some(ahead as u8)
    };
    let ahead = proofs.enumerate().find_map(proven).ok_or(Refusal::Unproven)?;

    let said = said_by_connector(ahead, who);
    let proof = key.prove(&[CONNECTOR, &own, &theirs, &said]);
    transmit(&socket, &[&said[..], &proof].concat(), deadline).map_err(silent)?;
    let mut answer = [0];
    receive(&socket, &mut answer, Some(deadline)).map_err(silent)?;
    match HelloAnswer::ALL.get(usize::from(answer[0])) {
        Some(HelloAnswer::Welcome) => Ok(()),
        Some(HelloAnswer::Overtaken) => {
            Err(Refusal::NotYet("the ranks there belong to an earlier attempt of this run".into()))
        }
        Some(&refusal) => Err(Refusal::Final(refusal)),
        None => Err(another()),
    }
}

fn silent(error: io::Error) -> Refusal {
    Refusal::NotYet(format!("what listens there does not answer: {error}"))
}

fn another() -> Refusal {
    Refusal::NotYet("what listens there is another program".into())
}

/// Says hello. Returns the listener's random number and its proofs.
fn challenge_for(
    own: &Nonce,
    socket: impl AsFd,
    deadline: &Deadline,
) -> Result<(Nonce, Vec<u8>), Refusal> {
    transmit(&socket, &[&MAGIC[..], own].concat(), deadline).map_err(silent)?;
    let mut challenge = [0; CHALLENGE_BYTES];
    // The magic number comes first: another program may send less than a challenge.
    let (magic, rest) = challenge.split_at_mut(ANSWER_MAGIC.len());
    receive(&socket, magic, Some(deadline)).map_err(silent)?;
    if *magic != ANSWER_MAGIC {
        return Err(another());
    }
    receive(&socket, rest, Some(deadline)).map_err(silent)?;
    let count = usize::from(rest[0]);
    if !(1..=MAX_ATTEMPTS).contains(&count) {
        return Err(another());
    }
    let theirs: Nonce = std::array::from_fn(|at| rest[1 + at]);
    let proofs = receive_vec(&socket, count * PROOF_BYTES, deadline).map_err(silent)?;
    Ok((theirs, proofs))
}

fn said_by_connector(ahead: u8, Who { rank, world, launch }: Who) -> Vec<u8> {
    // Host 0 is sent as 1, and no host as 0.
    let host = launch.map_or(0, |launch| launch.host + 1);
    let mut said = vec![ahead];
    for number in [rank as u32, world as u32, host] {
        said.extend_from_slice(&number.to_le_bytes());
    }
    said.extend_from_slice(&launch.map_or([0; LAUNCH_BYTES], |launch| launch.number));
    said
}

/// A connection that a listener has accepted, until the other side has proven which rank it is. Never waits.
#[derive(Debug)]
pub(crate) struct Incoming {
    pub(crate) socket: OwnedFd,
    /// The moment after which [`Incoming::advance`] gives up.
    pub(crate) deadline: Deadline,
    own: Nonce,
    /// The other side's random number, once its hello has come.
    theirs: Option<Nonce>,
    received: [u8; PROOF_MESSAGE_BYTES],
    len: usize,
}

impl Incoming {
    /// A new connection, which may take `limit` to prove which rank it is.
    pub(crate) fn new(socket: OwnedFd, limit: Duration) -> Result<Self, RendezvousError> {
        Ok(Self::with(fresh_nonce()?, socket, limit))
    }

    /// [`Incoming::new`] with a chosen random number.
    pub(crate) fn with(own: Nonce, socket: OwnedFd, limit: Duration) -> Self {
        let deadline = Deadline::after(limit);
        Self { socket, deadline, own, theirs: None, received: [0; PROOF_MESSAGE_BYTES], len: 0 }
    }

    /// Reads what has come. Returns the hello once it is proven. Errors if the bytes are not those of a rank of this run, or
    /// come too late. `keys` are those of the listener's attempt and of later ones; `world` is the number of ranks.
    pub(crate) fn advance(&mut self, keys: &[RunKey], world: usize) -> io::Result<Option<Hello>> {
        loop {
            let need = if self.theirs.is_some() { PROOF_MESSAGE_BYTES } else { HELLO_BYTES };
            match recv(&self.socket, &mut self.received[self.len..need], RecvFlags::DONTWAIT) {
                Ok((0, _)) if self.theirs.is_some() => {
                    return Err(stranger(
                        "it hung up without a proof that it knows the secret: it belongs to another run, or to an \
                         earlier attempt of this one (its secret differs), or it is no rank",
                    ));
                }
                Ok((0, _)) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok((count, _)) => self.len += count,
                Err(Errno::AGAIN) if self.deadline.has_passed() => {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            }
            // Checked first, so that a stranger with a shorter message is refused before the deadline.
            let magic = self.len.min(MAGIC.len());
            if self.theirs.is_none() && self.received[..magic] != MAGIC[..magic] {
                return Err(stranger("it does not send what a rank sends"));
            }
            if self.len < need {
                continue;
            }
            self.len = 0;
            match self.theirs {
                None => {
                    let theirs = std::array::from_fn(|at| self.received[MAGIC.len() + at]);
                    self.theirs = Some(theirs);
                    // It fits into the buffer of a socket on which nothing has been sent yet.
                    transmit(
                        &self.socket,
                        &self.challenge(keys, &theirs),
                        &Deadline::after(Duration::ZERO),
                    )?;
                }
                Some(theirs) => return self.check(keys, &theirs, world).map(Some),
            }
        }
    }

    fn challenge(&self, keys: &[RunKey], theirs: &Nonce) -> Vec<u8> {
        let keys = &keys[..keys.len().min(MAX_ATTEMPTS)];
        let mut bytes = ANSWER_MAGIC.to_vec();
        bytes.push(keys.len() as u8);
        bytes.extend_from_slice(&self.own);
        for (ahead, key) in keys.iter().enumerate() {
            bytes.extend_from_slice(&key.prove(&[LISTENER, theirs, &self.own, &[ahead as u8]]));
        }
        bytes
    }

    fn check(&self, keys: &[RunKey], theirs: &Nonce, world: usize) -> io::Result<Hello> {
        let (said, proof) = self.received.split_at(SAID_BYTES);
        let key = keys.get(usize::from(said[0]));
        if !key.is_some_and(|key| key.verify(&[CONNECTOR, theirs, &self.own, said], proof)) {
            return Err(stranger("its proof that it knows the secret is wrong"));
        }
        let number =
            |at: usize| said[at..at + 4].iter().rev().fold(0, |n, b| n << 8 | usize::from(*b));
        let answer = match (said[0], number(5)) {
            (0, their_world) if their_world == world => HelloAnswer::Welcome,
            (0, _) => HelloAnswer::WrongWorld,
            _ => HelloAnswer::Overtaken,
        };
        let launch = number(9).checked_sub(1).map(|host| LauncherId {
            host: host as u32,
            number: std::array::from_fn(|at| said[13 + at]),
        });
        Ok(Hello { rank: number(1), launch, answer })
    }

    /// Sends the answer to a proven hello.
    pub(crate) fn answer(&self, answer: HelloAnswer) -> io::Result<()> {
        transmit(&self.socket, &[answer as u8], &self.deadline)
    }
}

/// Why a new connection was turned away, in words.
pub(crate) fn reason(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => "it hung up before it said who it is".into(),
        io::ErrorKind::TimedOut => "it did not say who it is".into(),
        _ => error.to_string(),
    }
}

fn stranger(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}
