//! How processes of one host share memory, and how they notice each other's death.
//!
//! Every rank is connected to rank 0 by an abstract Unix socket, which has no name in any file system. Rank 0
//! creates anonymous memory files and sends their descriptors over the sockets, which stay open. If a socket
//! closes and its rank has not left in order, the rank is dead.
//!
//! Input: the addresses of the ranks. Output: shared mappings, and calls that report lost ranks.
//! This module knows no operations.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use paceline_memory::Mapping;
use paceline_rendezvous::{LONGEST_SLEEP, PeerAddress, PeerListener, SocketKind};
use paceline_trace::runtime::{before_join, poll};
use paceline_trace::{now_ns, thread_builder};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use super::control::Control;
use super::segment::{Inherited, Reach, Segments, SharedSegment};
use super::state::half_bytes;
use crate::context::Waited;
use crate::{CollectiveError, Result};

/// Alignment of large parts of a segment, in bytes, so that two ranks never share a large page.
const PART_ALIGNMENT: usize = 2 << 20;

/// The connections of one rank: from rank 0 to every other rank, in rank order, and from each of the others to rank 0.
#[derive(Debug)]
pub(crate) struct Links {
    rank: usize,
    world: usize,
    streams: Vec<Arc<UnixStream>>,
    /// How long to wait for a message.
    limit: Duration,
}

impl Links {
    /// Connects the ranks of this host, for at most `limit`.
    pub(crate) fn connect(
        listener: &PeerListener,
        addresses: &[PeerAddress],
        rank: usize,
        limit: Duration,
    ) -> Result<Self> {
        let world = addresses.len();
        let peers: Vec<usize> = if rank == 0 { (1..world).collect() } else { vec![0] };
        let sockets =
            listener.connect(SocketKind::Local, addresses, rank, &peers, limit, |_, _| {})?;
        let stream = |[socket]: [OwnedFd; 1]| Arc::new(UnixStream::from(socket));
        let streams: Vec<_> = sockets.into_iter().flatten().map(stream).collect();
        let links = Self { rank, world, streams, limit };
        for stream in &links.streams {
            stream.set_read_timeout(Some(LONGEST_SLEEP)).map_err(|e| links.fail(e.to_string()))?;
        }
        Ok(links)
    }

    /// Shares the control state and the staging segment.
    pub(crate) fn share_control(
        &self,
        inherited: Option<Inherited>,
    ) -> Result<(Arc<Mapping>, Reach)> {
        let (start_bytes, part_bytes) = (Control::bytes(self.world), 2 * half_bytes(self.world));
        let mapping = Arc::new(self.share(start_bytes + self.world * part_bytes)?);
        let staging = self.even(&mapping, start_bytes, part_bytes)?;
        Ok((mapping, Reach::Segments(Segments::new(staging, inherited).into())))
    }

    /// Shares a new segment with at least `len_bytes` bytes for every rank.
    pub(crate) fn share_segment(&self, len_bytes: usize) -> Result<SharedSegment> {
        let alignment = if len_bytes >= PART_ALIGNMENT { PART_ALIGNMENT } else { 4096 };
        let part_bytes = len_bytes.max(1).next_multiple_of(alignment);
        let mapping = Arc::new(self.share(self.world * part_bytes)?);
        self.even(&mapping, 0, part_bytes)
    }

    fn even(
        &self,
        mapping: &Arc<Mapping>,
        start_bytes: usize,
        part_bytes: usize,
    ) -> Result<SharedSegment> {
        let segment = SharedSegment::even(mapping, start_bytes, part_bytes, self.world);
        segment.ok_or_else(|| self.fail("the mapping is too small for a part of each rank".into()))
    }

    /// Rank 0 creates a mapping and passes it to all other ranks.
    fn share(&self, len_bytes: usize) -> Result<Mapping> {
        if self.rank == 0 {
            let made = Mapping::create(len_bytes);
            // Sent even after a failure, so that the others do not wait for it.
            for stream in &self.streams {
                self.send_file(stream, made.as_ref().ok(), len_bytes)?;
            }
            return Ok(made?);
        }
        let (file, theirs) = self.receive_file(&self.streams[0])?;
        if theirs != len_bytes {
            let reason = format!("rank 0 shares {theirs} bytes where this rank wants {len_bytes}");
            return Err(self.fail(reason));
        }
        let file =
            file.ok_or_else(|| self.fail(format!("rank 0 could not share {len_bytes} bytes")))?;
        Ok(Mapping::from_file(file, len_bytes)?)
    }

    fn send_file(
        &self,
        stream: &UnixStream,
        mapping: Option<&Mapping>,
        len_bytes: usize,
    ) -> Result<()> {
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

    fn receive_file(&self, stream: &UnixStream) -> Result<(Option<OwnedFd>, usize)> {
        let mut message = [0u8; 8];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::WAITALL;
        let mut waited = Waited::begin(now_ns());
        let received = loop {
            let mut parts = [IoSliceMut::new(&mut message)];
            match recvmsg(stream, &mut parts, &mut ancillary, flags) {
                Ok(received) => break received,
                Err(Errno::AGAIN | Errno::INTR) if waited.until(now_ns()) < self.limit => {}
                Err(Errno::AGAIN | Errno::INTR) => {
                    return Err(self.nothing_came("it did not come in time".into()));
                }
                Err(error) => return Err(self.nothing_came(error.to_string())),
            }
        };
        if received.bytes == 0 {
            return Err(self.nothing_came("it has ended".into()));
        }
        let file = ancillary.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut files) => files.next(),
            _ => None,
        });
        Ok((file, u64::from_le_bytes(message) as usize))
    }

    fn nothing_came(&self, reason: String) -> CollectiveError {
        if self.rank == 0 {
            return self.fail(format!("a rank of this host passed no memory on: {reason}"));
        }
        CollectiveError::NoMemory { rank: self.rank, world_size: self.world, reason }
    }

    fn fail(&self, reason: String) -> CollectiveError {
        let (rank, world_size) = (self.rank, self.world);
        CollectiveError::Setup { rank, world_size, what: "shared memory", reason }
    }

    /// The sockets of the connections.
    pub(crate) fn descriptors(&self) -> impl Iterator<Item = RawFd> + '_ {
        self.streams.iter().map(AsRawFd::as_raw_fd)
    }

    /// The rank at the other end of stream `index`.
    fn peer(&self, index: usize) -> usize {
        if self.rank == 0 { index + 1 } else { 0 }
    }
}

/// The thread that watches the connections and reports when a rank dies.
#[derive(Debug)]
pub(crate) struct PeerMonitor {
    closing: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl PeerMonitor {
    /// Starts the thread. It calls `lost` with the rank (within this host) whose connection closes.
    pub(crate) fn start(links: &Links, lost: impl Fn(usize) + Send + 'static) -> Result<Self> {
        let closing = Arc::new(AtomicBool::new(false));
        let streams = links.streams.iter().enumerate();
        let streams = streams.map(|(index, stream)| (links.peer(index), stream.clone())).collect();
        let thread = {
            let closing = closing.clone();
            thread_builder(format!("peers-{}", links.rank))
                .spawn(move || watch(streams, &lost, &closing))
                .map_err(|e| links.fail(format!("no thread to watch the peers: {e}")))?
        };
        Ok(Self { closing, thread })
    }

    /// Ends the thread. Closing the connections wakes it.
    pub(crate) fn stop(self, links: &Links) {
        self.closing.store(true, Ordering::Relaxed);
        for stream in &links.streams {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
        before_join(self.thread.thread());
        let _ = self.thread.join();
    }
}

fn watch(mut streams: Vec<(usize, Arc<UnixStream>)>, lost: &dyn Fn(usize), closing: &AtomicBool) {
    while !streams.is_empty() {
        // Watches for hang-ups only: other code reads the data on these connections.
        let mut fds: Vec<PollFd> =
            streams.iter().map(|(_, stream)| PollFd::new(stream, PollFlags::RDHUP)).collect();
        match poll(&mut fds, None) {
            Err(Errno::INTR) => continue,
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
            if is_closed {
                lost(*peer);
            }
            !is_closed
        });
    }
}
