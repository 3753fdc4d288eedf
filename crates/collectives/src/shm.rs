//! Processes of one host: how they meet, share memory, and notice each other's death.
//!
//! Rank 0 listens on an abstract Unix socket, which has no name in any file system. Every other
//! rank connects and presents the run's secret; both sides check that the other belongs to the same
//! user. Rank 0 then makes anonymous memory files and passes their descriptors along. The sockets
//! stay open: when one closes and its rank has not left in order, that rank is dead.

use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use paceline_memory::{Mapping, MemoryError};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg, sockopt::socket_peercred,
};

use crate::control::{Control, Fate};
use crate::meeting::{Address, SECRET_BYTES};
use crate::round::{ControlMemory, Core, STAGING_BYTES};
use crate::segment::{Reach, Segment};
use crate::{CollectiveError, Meeting, MeetingPoint};

const MAGIC: [u8; 8] = *b"pacelin1";
const HELLO_BYTES: usize = 8 + 4 + 4 + SECRET_BYTES;

/// Answers to a hello.
const WELCOME: u8 = 0;
const WRONG_SECRET: u8 = 1;
const WRONG_WORLD: u8 = 2;
const RANK_TAKEN: u8 = 3;

/// How long a stranger may take to say hello before the next connection is looked at.
const HELLO_LIMIT: Duration = Duration::from_millis(500);

/// Parts of a segment begin at large pages, so that ranks never share one.
const PART_ALIGNMENT: usize = 2 << 20;

/// The connections of one rank: rank 0 has one to every other rank, in rank order; the others have
/// one to rank 0.
#[derive(Debug)]
pub(crate) struct Links {
    rank: usize,
    world: usize,
    place: String,
    streams: Vec<UnixStream>,
}

impl Links {
    /// Meets the other ranks, for at most `limit`.
    pub(crate) fn connect(
        meeting: &Meeting,
        rank: usize,
        world: usize,
        limit: Duration,
    ) -> Result<Self, CollectiveError> {
        let deadline = Instant::now() + limit;
        let place = meeting.place();
        let fail = |reason: String| CollectiveError::Meeting {
            rank,
            world_size: world,
            place: place.clone(),
            reason,
        };
        let streams = if rank == 0 {
            let address = match &meeting.point {
                MeetingPoint::Port(port) => Address::of_port(*port, &meeting.secret),
                MeetingPoint::File(_) => Address::fresh(),
            };
            let listener = SocketAddr::from_abstract_name(&address.name)
                .and_then(|name| UnixListener::bind_addr(&name))
                .map_err(|e| fail(format!("rank 0 cannot listen there: {e}")))?;
            if let MeetingPoint::File(path) = &meeting.point {
                address.publish(path)?;
            }
            let streams = accept_all(&listener, &address, world, deadline).map_err(&fail);
            if let MeetingPoint::File(path) = &meeting.point {
                let _ = std::fs::remove_file(path);
            }
            streams?
        } else {
            vec![join(meeting, rank, world, deadline).map_err(&fail)?]
        };
        for stream in &streams {
            stream.set_read_timeout(Some(limit)).map_err(|e| fail(e.to_string()))?;
        }
        Ok(Self { rank, world, place, streams })
    }

    /// Shares the control state and the staging segment.
    pub(crate) fn share_control(&self) -> Result<(ControlMemory, Reach), CollectiveError> {
        let start_bytes = size_of::<Control>().next_multiple_of(4096);
        let mapping = Arc::new(self.share(start_bytes + self.world * STAGING_BYTES)?);
        let staging = Segment { mapping: mapping.clone(), start_bytes, part_bytes: STAGING_BYTES };
        Ok((ControlMemory::Shared(mapping), Reach::Segments(vec![staging].into())))
    }

    /// Shares a new segment with `len_bytes` bytes for every rank.
    pub(crate) fn share_segment(&self, len_bytes: usize) -> Result<Segment, CollectiveError> {
        let alignment = if len_bytes >= PART_ALIGNMENT { PART_ALIGNMENT } else { 4096 };
        let part_bytes = len_bytes.max(1).next_multiple_of(alignment);
        let mapping = Arc::new(self.share(self.world * part_bytes)?);
        Ok(Segment { mapping, start_bytes: 0, part_bytes })
    }

    /// Rank 0 makes a mapping and passes it to everybody.
    fn share(&self, len_bytes: usize) -> Result<Mapping, CollectiveError> {
        if self.rank == 0 {
            let made = Mapping::create(len_bytes);
            // A failure is passed on too: the others must not wait for what will not come.
            for stream in &self.streams {
                self.send_file(stream, made.as_ref().ok(), len_bytes)?;
            }
            return Ok(made?);
        }
        let file = self.receive_file(&self.streams[0], len_bytes)?;
        Ok(Mapping::from_file(file, len_bytes)?)
    }

    fn send_file(
        &self,
        stream: &UnixStream,
        mapping: Option<&Mapping>,
        len_bytes: usize,
    ) -> Result<(), CollectiveError> {
        let message = (len_bytes as u64).to_le_bytes();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let files: Vec<_> = mapping.map(Mapping::file).into_iter().collect();
        if !files.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(&files));
        }
        sendmsg(stream, &[IoSlice::new(&message)], &mut ancillary, SendFlags::NOSIGNAL)
            .map_err(|e| self.fail(format!("passing memory to a rank failed: {e}")))?;
        Ok(())
    }

    fn receive_file(
        &self,
        stream: &UnixStream,
        len_bytes: usize,
    ) -> Result<OwnedFd, CollectiveError> {
        let mut message = [0u8; 8];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let received = recvmsg(
            stream,
            &mut [IoSliceMut::new(&mut message)],
            &mut ancillary,
            RecvFlags::CMSG_CLOEXEC | RecvFlags::WAITALL,
        )
        .map_err(|e| self.fail(format!("no memory came from rank 0: {e}")))?;
        if received.bytes == 0 {
            return Err(self.fail("rank 0 ended before it passed its memory on".into()));
        }
        if u64::from_le_bytes(message) != len_bytes as u64 {
            let theirs = u64::from_le_bytes(message);
            let reason = format!("rank 0 shares {theirs} bytes where this rank wants {len_bytes}");
            return Err(self.fail(reason));
        }
        let file = ancillary.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut files) => files.next(),
            _ => None,
        });
        file.ok_or_else(|| MemoryError::OutOfMemory { bytes: len_bytes }.into())
    }

    fn fail(&self, reason: String) -> CollectiveError {
        let (rank, world_size) = (self.rank, self.world);
        CollectiveError::Meeting { rank, world_size, place: self.place.clone(), reason }
    }

    /// The rank at the other end of stream `index`.
    fn peer(&self, index: usize) -> usize {
        if self.rank == 0 { index + 1 } else { 0 }
    }
}

/// Rank 0's side of the meeting: one accepted connection per other rank, in rank order.
fn accept_all(
    listener: &UnixListener,
    address: &Address,
    world: usize,
    deadline: Instant,
) -> Result<Vec<UnixStream>, String> {
    let mut accepted: Vec<Option<UnixStream>> = (1..world).map(|_| None).collect();
    while accepted.iter().any(Option::is_none) {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = rustix::event::Timespec::try_from(left).map_err(|e| e.to_string())?;
        let mut fds = [PollFd::new(listener, PollFlags::IN)];
        match poll(&mut fds, Some(&timeout)) {
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => return Err(error.to_string()),
            Ok(0) => {
                let absent: Vec<usize> = (1..world).filter(|r| accepted[r - 1].is_none()).collect();
                return Err(format!("ranks {absent:?} did not come in time"));
            }
            Ok(_) => {}
        }
        let (mut stream, _) = listener.accept().map_err(|e| e.to_string())?;
        // Strangers, and whatever else finds the socket, are turned away without ending the run.
        let Some((rank, answer)) = read_hello(&mut stream, address, world) else { continue };
        let answer = match (answer, accepted.get(rank.wrapping_sub(1))) {
            (WELCOME, Some(None)) => WELCOME,
            (WELCOME, _) => RANK_TAKEN,
            (refusal, _) => refusal,
        };
        if stream.write_all(&[answer]).is_ok() && answer == WELCOME {
            accepted[rank - 1] = Some(stream);
        }
    }
    Ok(accepted.into_iter().flatten().collect())
}

/// The rank that says hello and what to answer, or `None` if this is none of ours.
fn read_hello(stream: &mut UnixStream, address: &Address, world: usize) -> Option<(usize, u8)> {
    if !is_same_user(stream) {
        return None;
    }
    stream.set_read_timeout(Some(HELLO_LIMIT)).ok()?;
    let mut hello = [0u8; HELLO_BYTES];
    stream.read_exact(&mut hello).ok()?;
    let (magic, rest) = hello.split_at(8);
    let (numbers, secret) = rest.split_at(8);
    if magic != MAGIC {
        return None;
    }
    let number = |at: usize| numbers[at..at + 4].iter().rev().fold(0, |n, b| n << 8 | *b as usize);
    // Every byte is looked at, so that the time taken tells nothing about the secret.
    let expected = secret_bytes(&address.secret);
    let differs = secret.iter().zip(&expected).fold(0, |acc, (a, b)| acc | (a ^ b));
    let answer = if differs != 0 {
        WRONG_SECRET
    } else if number(4) != world {
        WRONG_WORLD
    } else {
        WELCOME
    };
    Some((number(0), answer))
}

/// The side of every other rank: tries until rank 0 is there.
fn join(
    meeting: &Meeting,
    rank: usize,
    world: usize,
    deadline: Instant,
) -> Result<UnixStream, String> {
    let mut pause = Duration::from_millis(1);
    loop {
        let address = match &meeting.point {
            MeetingPoint::Port(port) => Some(Address::of_port(*port, &meeting.secret)),
            MeetingPoint::File(path) => Address::look_up(path),
        };
        let missing = match address.map(|address| try_join(&address, rank, world)) {
            Some(Ok(stream)) => return Ok(stream),
            Some(Err(Refusal::Final(reason))) => return Err(reason),
            Some(Err(Refusal::NotYet)) | None => "rank 0 did not come in time",
        };
        if Instant::now() + pause >= deadline {
            return Err(missing.into());
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(50));
    }
}

enum Refusal {
    NotYet,
    Final(String),
}

fn try_join(address: &Address, rank: usize, world: usize) -> Result<UnixStream, Refusal> {
    let connect = || -> std::io::Result<(UnixStream, u8)> {
        let name = SocketAddr::from_abstract_name(&address.name)?;
        let mut stream = UnixStream::connect_addr(&name)?;
        if !is_same_user(&stream) {
            return Err(std::io::ErrorKind::PermissionDenied.into());
        }
        let mut hello = Vec::with_capacity(HELLO_BYTES);
        hello.extend_from_slice(&MAGIC);
        hello.extend_from_slice(&(rank as u32).to_le_bytes());
        hello.extend_from_slice(&(world as u32).to_le_bytes());
        hello.extend_from_slice(&secret_bytes(&address.secret));
        stream.write_all(&hello)?;
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        let mut answer = [0u8];
        stream.read_exact(&mut answer)?;
        Ok((stream, answer[0]))
    };
    match connect() {
        Ok((stream, WELCOME)) => Ok(stream),
        Ok((_, WRONG_SECRET)) => {
            Err(Refusal::Final("rank 0 there belongs to another run (its secret differs)".into()))
        }
        Ok((_, WRONG_WORLD)) => {
            Err(Refusal::Final(format!("rank 0 expects another world size than {world}")))
        }
        Ok((_, RANK_TAKEN)) => {
            Err(Refusal::Final(format!("another process has already come as rank {rank}")))
        }
        Ok((_, other)) => Err(Refusal::Final(format!("rank 0 gave an unknown answer ({other})"))),
        Err(_) => Err(Refusal::NotYet),
    }
}

fn is_same_user(stream: &UnixStream) -> bool {
    socket_peercred(stream).is_ok_and(|peer| peer.uid == rustix::process::geteuid())
}

/// A secret as the fixed-size field of a hello.
fn secret_bytes(secret: &str) -> [u8; SECRET_BYTES] {
    let mut bytes = [0; SECRET_BYTES];
    for (to, from) in bytes.iter_mut().zip(secret.bytes()) {
        *to = from;
    }
    bytes
}

/// The thread that watches the connections and raises the alarm when a rank dies.
#[derive(Debug)]
pub(crate) struct Monitor {
    closing: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Monitor {
    pub(crate) fn start(links: &Links, core: Arc<Core>) -> Result<Self, CollectiveError> {
        let closing = Arc::new(AtomicBool::new(false));
        let streams = links
            .streams
            .iter()
            .enumerate()
            .map(|(index, stream)| Ok((links.peer(index), stream.try_clone()?)))
            .collect::<std::io::Result<Vec<_>>>()
            .map_err(|e| links.fail(e.to_string()))?;
        let thread = {
            let closing = closing.clone();
            std::thread::Builder::new()
                .name(format!("peers-{}", core.rank))
                .spawn(move || watch(streams, &core, &closing))
                .map_err(|e| links.fail(format!("no thread to watch the peers: {e}")))?
        };
        Ok(Self { closing, thread })
    }

    /// Ends the watch; closing the connections wakes it.
    pub(crate) fn stop(self, links: Option<&Links>) {
        self.closing.store(true, Ordering::Relaxed);
        for stream in links.iter().flat_map(|links| &links.streams) {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
        let _ = self.thread.join();
    }
}

fn watch(mut streams: Vec<(usize, UnixStream)>, core: &Core, closing: &AtomicBool) {
    while !streams.is_empty() {
        // Hang-ups only: what is sent on these connections is for others to read.
        let mut fds: Vec<PollFd> =
            streams.iter().map(|(_, stream)| PollFd::new(stream, PollFlags::RDHUP)).collect();
        match poll(&mut fds, None) {
            Err(rustix::io::Errno::INTR) => continue,
            Err(_) => return,
            Ok(_) => {}
        }
        let closed: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        if closing.load(Ordering::Relaxed) {
            return;
        }
        let mut closed = closed.into_iter();
        streams.retain(|(peer, _)| {
            let is_closed = closed.next().unwrap_or(false);
            if is_closed && !core.control.has_left(*peer) {
                core.control.depart(*peer, Fate::Lost);
            }
            !is_closed
        });
    }
}
