//! The messages that have not ended, and what the ranks tell each other about them.
//!
//! A sender *offers* a message. Once its receiver *wants* it, the data follow. So data go straight to where they belong, and
//! no rank keeps data that nobody has asked for. Input: calls of this rank, and the headers that arrive. Output: what has ended, and what is
//! to be sent. This file knows no sockets.

use std::time::{Duration, Instant};

use paceline_memory::DType;
use paceline_trace::runtime::now;

use super::{Message, OnDelivery};
use crate::{CollectiveError, RawMemory, Result};

/// Bytes of a header: tag, length, type and purpose, and number, as little-endian words.
pub(super) const HEADER_BYTES: usize = 32;

/// A message of this rank that has not ended.
pub(super) struct Letter {
    pub(super) op: &'static str,
    pub(super) message: Message,
    pub(super) seq: u32,
    pub(super) begun: Instant,
    /// `None` if it lies beyond what the clock can tell.
    pub(super) deadline: Option<Instant>,
    pub(super) on_end: OnDelivery,
    pub(super) stage: Stage,
}

/// How far a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// A send waits until the receiver wants it; a receive waits for an offer.
    Waiting,
    /// The data leave.
    Leaving,
    /// This rank has asked the sender for the data of its offer with this number.
    Wanted(usize, u64),
    /// The data arrive from this rank.
    Arriving(usize),
}

/// A message that has ended, and its outcome.
pub(super) struct Delivered(OnDelivery, Result<usize>);

impl Delivered {
    /// Calls the callback. The caller holds no lock.
    pub(super) fn report(self) {
        (self.0)(self.1);
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    Offer,
    Want,
    /// The data follow.
    Data,
    /// The sender leaves the group.
    Leave,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    tag: u64,
    len_bytes: u64,
    dtype: u8,
    purpose: Purpose,
    /// The number of the message on its sender.
    number: u64,
}

impl Header {
    fn of(letter: &Letter) -> Self {
        let Message { tag, dtype, memory, .. } = letter.message;
        let (len_bytes, number) = (memory.len_bytes as u64, u64::from(letter.seq));
        Self { tag, len_bytes, dtype: dtype as u8, purpose: Purpose::Offer, number }
    }

    /// Whether the sender's data are what this receive expects.
    fn fits(&self, letter: &Letter) -> bool {
        let expected = Header::of(letter);
        (self.len_bytes, self.dtype) == (expected.len_bytes, expected.dtype)
    }

    /// Bytes that follow the header.
    pub(super) fn body_bytes(&self) -> usize {
        if self.purpose == Purpose::Data { self.len_bytes as usize } else { 0 }
    }

    pub(super) fn encode(self) -> [u8; HEADER_BYTES] {
        let kind = u64::from(self.dtype) | (self.purpose as u64) << 8;
        let words = [self.tag, self.len_bytes, kind, self.number];
        let mut bytes = [0; HEADER_BYTES];
        for (to, word) in bytes.chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Reads a header. `None` if the bytes are not one: a peer with corrupted memory.
    pub(super) fn decode(bytes: &[u8; HEADER_BYTES]) -> Option<Self> {
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| bytes[8 * at + byte]));
        let purposes = [Purpose::Offer, Purpose::Want, Purpose::Data, Purpose::Leave];
        let purpose = *purposes.get(usize::try_from(word(2) >> 8).ok()?)?;
        let (tag, len_bytes, dtype, number) = (word(0), word(1), word(2) as u8, word(3));
        Some(Self { tag, len_bytes, dtype, purpose, number })
    }

    fn describe(&self) -> String {
        let dtype = DType::ALL.into_iter().find(|dtype| *dtype as u8 == self.dtype);
        let dtype = dtype.map_or("an unknown type", DType::name);
        format!("{} bytes of {dtype} with tag {}", self.len_bytes, self.tag)
    }
}

const LEAVING: Header =
    Header { tag: 0, len_bytes: 0, dtype: 0, purpose: Purpose::Leave, number: 0 };

/// A header on its way out, and the data that follow it.
pub(super) struct Outgoing {
    pub(super) header: [u8; HEADER_BYTES],
    pub(super) memory: RawMemory,
    /// The number of the message that has ended when the data have left.
    seq: Option<u32>,
    /// Bytes that have left.
    pub(super) done: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    Present,
    Left,
    Lost,
}

/// All messages of a rank that have not ended.
pub(super) struct Desk {
    pub(super) rank: usize,
    members: Box<[usize]>,
    standing: Vec<Standing>,
    pub(super) outgoing: Vec<Vec<Outgoing>>,
    letters: Vec<Letter>,
    /// Offers for which there is no receive yet, with their senders, in the order in which they came.
    offers: Vec<(usize, Header)>,
    num_letters: u32,
    /// Set when the rank leaves: until then it still sends the data that were asked for.
    pub(super) closes_by: Option<Instant>,
}

impl std::fmt::Debug for Desk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Desk").field("rank", &self.rank).finish_non_exhaustive()
    }
}

impl Desk {
    pub(super) fn new(rank: usize, world_size: usize, members: &[usize]) -> Self {
        Self {
            rank,
            members: members.into(),
            standing: vec![Standing::Present; world_size],
            outgoing: (0..world_size).map(|_| Vec::new()).collect(),
            letters: Vec::new(),
            offers: Vec::new(),
            num_letters: 0,
            closes_by: None,
        }
    }

    pub(super) fn world_size(&self) -> usize {
        self.standing.len()
    }

    /// The sequence number of the next message of this rank.
    pub(super) fn number(&mut self) -> u32 {
        self.num_letters += 1;
        self.num_letters - 1
    }

    /// Sends what has been asked for, at most until the limit, and then a goodbye.
    pub(super) fn close(&mut self, limit: Duration) {
        let own = self.rank;
        for peer in (0..self.world_size()).filter(|peer| *peer != own) {
            self.push(peer, LEAVING, RawMemory::EMPTY, None);
        }
        self.closes_by = Some(now() + limit.min(Duration::from_secs(3600)));
    }

    /// Takes in a message of this rank, which may end at once.
    pub(super) fn take_in(&mut self, letter: Letter) -> Option<Delivered> {
        let is_send = letter.op == "send";
        if !is_send && let Some(at) = self.offers.iter().position(|of| is_for(&letter, of)) {
            let (from, offer) = self.offers.remove(at);
            return self.accept(from, offer, letter);
        }
        if let Some(gone) = self.missed_by(&letter) {
            return Some(self.gone(letter, gone));
        }
        if let (true, Some(to)) = (is_send, letter.message.peer) {
            self.push(to, Header::of(&letter), RawMemory::EMPTY, None);
        }
        self.letters.push(letter);
        None
    }

    fn push(&mut self, to: usize, header: Header, memory: RawMemory, seq: Option<u32>) {
        self.outgoing[to].push(Outgoing { header: header.encode(), memory, seq, done: 0 });
    }

    /// Asks for the data of an offer. If they do not fit the receive, it ends, and the data go nowhere.
    fn accept(&mut self, from: usize, offer: Header, mut letter: Letter) -> Option<Delivered> {
        let want = Header { purpose: Purpose::Want, ..offer };
        self.push(from, want, RawMemory::EMPTY, None);
        if !offer.fits(&letter) {
            let (rank, op, wanted) = (self.named(self.rank), letter.op, Header::of(&letter));
            let (wanted, from, sent) = (wanted.describe(), self.named(from), offer.describe());
            let reason = format!("wants {wanted}, but rank {from} sent {sent}");
            let refused = CollectiveError::Buffers { rank, op, reason };
            return Some(Delivered(letter.on_end, Err(refused)));
        }
        letter.stage = Stage::Wanted(from, offer.number);
        self.letters.push(letter);
        None
    }

    /// Handles a header that has come.
    pub(super) fn open(&mut self, from: usize, header: Header) -> Option<Delivered> {
        match header.purpose {
            Purpose::Offer => {
                let is_it = |letter: &Letter| {
                    (letter.op, letter.stage) == ("recv", Stage::Waiting)
                        && is_for(letter, &(from, header))
                };
                if let Some(at) = self.letters.iter().position(is_it) {
                    let letter = self.letters.remove(at);
                    return self.accept(from, header, letter);
                }
                self.offers.push((from, header));
            }
            Purpose::Want => {
                let is_it = |letter: &&mut Letter| {
                    let is_offered = (letter.op, letter.stage) == ("send", Stage::Waiting);
                    let key = (u64::from(letter.seq), letter.message.peer);
                    is_offered && key == (header.number, Some(from))
                };
                // One that is too late for its limit is no longer there.
                if let Some(letter) = self.letters.iter_mut().find(is_it) {
                    letter.stage = Stage::Leaving;
                    let (memory, seq) = (letter.message.memory, letter.seq);
                    self.push(from, Header { purpose: Purpose::Data, ..header }, memory, Some(seq));
                }
            }
            Purpose::Data => {
                let is_it = |letter: &&mut Letter| {
                    letter.stage == Stage::Wanted(from, header.number) && header.fits(letter)
                };
                if let Some(letter) = self.letters.iter_mut().find(is_it) {
                    letter.stage = Stage::Arriving(from);
                }
            }
            Purpose::Leave => self.standing[from] = Standing::Left,
        }
        None
    }

    /// The memory for the data that arrive from a rank. `None` if nobody waits for them any longer.
    pub(super) fn arriving(&self, from: usize) -> Option<RawMemory> {
        let letter = self.letters.iter().find(|letter| letter.stage == Stage::Arriving(from))?;
        Some(letter.message.memory)
    }

    /// Notes that all data that arrive from a rank are there.
    pub(super) fn arrived(&mut self, from: usize) -> Option<Delivered> {
        let is_it = |letter: &Letter| letter.stage == Stage::Arriving(from);
        let at = self.letters.iter().position(is_it)?;
        Some(Delivered(self.letters.remove(at).on_end, Ok(from)))
    }

    /// Notes that the first of what is to be sent to a rank has left.
    pub(super) fn sent(&mut self, to: usize) -> Option<Delivered> {
        let seq = self.outgoing[to].remove(0).seq?;
        let at = self.letters.iter().position(|letter| (letter.op, letter.seq) == ("send", seq))?;
        Some(Delivered(self.letters.remove(at).on_end, Ok(self.rank)))
    }

    /// The rank whose absence keeps a message that waits from ever ending.
    fn missed_by(&self, letter: &Letter) -> Option<usize> {
        let is_gone = |peer: &usize| self.standing[*peer] != Standing::Present;
        if letter.message.peer.is_some() {
            return letter.message.peer.filter(is_gone);
        }
        let mut others = (0..self.world_size()).filter(|&peer| peer != self.rank);
        let lost = others.clone().find(|&peer| self.standing[peer] == Standing::Lost);
        let are_all_gone = others.clone().all(|peer| is_gone(&peer));
        lost.or_else(|| others.next().filter(|_| are_all_gone))
    }

    /// Notes that the connection to a peer has ended, and ends the messages that need it. A peer that has left in order is not lost.
    pub(super) fn lose(&mut self, peer: usize) -> Vec<Delivered> {
        if self.standing[peer] == Standing::Present {
            self.standing[peer] = Standing::Lost;
        }
        self.outgoing[peer].clear();
        self.offers.retain(|(from, _)| *from != peer);
        let mut ended = Vec::new();
        for letter in std::mem::take(&mut self.letters) {
            let gone = match letter.stage {
                Stage::Waiting => self.missed_by(&letter),
                Stage::Leaving => letter.message.peer.filter(|to| *to == peer),
                Stage::Wanted(from, _) | Stage::Arriving(from) => {
                    Some(from).filter(|from| *from == peer)
                }
            };
            match gone {
                Some(gone) => ended.push(self.gone(letter, gone)),
                None => self.letters.push(letter),
            }
        }
        ended
    }

    /// Ends the messages whose time is over. Returns the peers whose connections are useless, because data have left in part.
    pub(super) fn expire(&mut self, at: Instant) -> (Vec<Delivered>, Vec<usize>) {
        let is_late = |letter: &mut Letter| letter.deadline.is_some_and(|deadline| deadline <= at);
        let late: Vec<Letter> = self.letters.extract_if(.., is_late).collect();
        let mut broken = Vec::new();
        for letter in &late {
            let Some(to) = letter.message.peer.filter(|_| letter.stage == Stage::Leaving) else {
                continue;
            };
            let is_it = |of: &mut Outgoing| of.seq == Some(letter.seq);
            let torn = self.outgoing[to].extract_if(.., is_it).any(|of| of.done > 0);
            broken.extend(torn.then_some(to));
        }
        let timed_out = |letter: Letter| {
            let Letter { op, message, seq, begun, on_end, .. } = letter;
            let (bytes, waited) = (message.memory.len_bytes, now() - begun);
            let missing = message.peer.map(|peer| self.named(peer)).into_iter().collect();
            let rank = self.named(self.rank);
            let late = CollectiveError::TimedOut { rank, missing, op, seq, bytes, waited };
            Delivered(on_end, Err(late))
        };
        (late.into_iter().map(timed_out).collect(), broken)
    }

    /// Moves all deadlines by the time for which this process was suspended.
    pub(super) fn postpone(&mut self, by: Duration) {
        let deadlines = self.letters.iter_mut().filter_map(|letter| letter.deadline.as_mut());
        deadlines.chain(&mut self.closes_by).for_each(|deadline| *deadline += by);
    }

    /// When the next message is late.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.letters.iter().filter_map(|letter| letter.deadline).chain(self.closes_by).min()
    }

    /// Ends all messages, because this rank leaves.
    pub(super) fn give_up(&mut self) -> Vec<Delivered> {
        self.standing[self.rank] = Standing::Left;
        self.outgoing.iter_mut().for_each(Vec::clear);
        let letters = std::mem::take(&mut self.letters);
        letters.into_iter().map(|letter| self.gone(letter, self.rank)).collect()
    }

    fn named(&self, rank: usize) -> usize {
        self.members.get(rank).copied().unwrap_or(rank)
    }

    fn gone(&self, letter: Letter, peer: usize) -> Delivered {
        let Letter { op, message, seq, begun, on_end, .. } = letter;
        let (rank, bytes) = (self.named(self.rank), message.memory.len_bytes);
        let (is_lost, peer) = (self.standing[peer] == Standing::Lost, self.named(peer));
        let error = if is_lost {
            CollectiveError::PeerLost { rank, peer, op, seq, bytes, waited: now() - begun }
        } else {
            CollectiveError::PeerLeft { rank, peer, op, seq, bytes }
        };
        Delivered(on_end, Err(error))
    }
}

/// Whether a receive is for an offer.
fn is_for(letter: &Letter, (from, offer): &(usize, Header)) -> bool {
    letter.message.tag == offer.tag && letter.message.peer.is_none_or(|peer| peer == *from)
}
