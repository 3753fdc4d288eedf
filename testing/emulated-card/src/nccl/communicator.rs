//! A communicator: who takes part, and messages between ranks as files in shared memory.
//!
//! A message is a file that is written under another name first, so a reader never sees a part of it. The reader
//! removes it. This module does not know what messages mean.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use std::{fs, io, thread};

use crate::boundary::Status;
use crate::driver::refuse;

/// `ncclSystemError`
pub const SYSTEM_ERROR: Status = Status(2);
/// `ncclInternalError`
pub const INTERNAL_ERROR: Status = Status(3);
/// `ncclInvalidArgument`
pub const INVALID_ARGUMENT: Status = Status(4);
/// `ncclInvalidUsage`
pub const INVALID_USAGE: Status = Status(5);
/// `ncclInProgress`
pub const IN_PROGRESS: Status = Status(7);

/// How long ranks wait for each other when a communicator begins, and its end for graphs.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// The version of the library: 2.28.9, unless `PACELINE_EMULATED_NCCL_VERSION` is set.
pub fn version() -> i32 {
    let version = std::env::var("PACELINE_EMULATED_NCCL_VERSION").ok();
    version.and_then(|text| text.parse().ok()).unwrap_or(22_809)
}

/// The two ends of a message. A rank may write to itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum MessageEnd {
    Sender,
    Receiver,
}

/// A group of ranks, seen by one of them.
#[derive(Debug)]
pub struct NcclCommunicator {
    folder: PathBuf,
    pub rank: usize,
    pub size: usize,
    /// Whether calls wait for other ranks. If not, they are in progress until somebody asks how far they are.
    pub blocks: bool,
    met: AtomicBool,
    aborted: AtomicBool,
    left: AtomicBool,
    error: AtomicU32,
    /// How many messages went to each rank and came from each rank.
    numbers: Mutex<HashMap<(MessageEnd, usize), u64>>,
}

impl NcclCommunicator {
    /// Enters the group. The card's number and the process say which card this rank uses.
    pub fn enter(
        id: &str,
        rank: usize,
        size: usize,
        card: usize,
        blocks: bool,
    ) -> Result<Self, Status> {
        let folder = root().join(id);
        let entry = format!("{} {size} {} {card}", version(), std::process::id());
        let system =
            |error: io::Error| refuse(SYSTEM_ERROR, format!("{}: {error}", folder.display()));
        fs::create_dir_all(&folder).map_err(system)?;
        write(&folder, &format!("rank-{rank}"), entry.as_bytes()).map_err(system)?;
        let [met, aborted, left] = [(); 3].map(|()| AtomicBool::new(false));
        let (error, numbers) = (AtomicU32::new(0), Mutex::default());
        Ok(Self { folder, rank, size, blocks, met, aborted, left, error, numbers })
    }

    /// Waits until all ranks have entered, and compares what they say.
    pub fn meet(&self) -> Result<(), Status> {
        let begin = Instant::now();
        while !self.has_met()? {
            if begin.elapsed() > PATIENCE {
                return Err(refuse(SYSTEM_ERROR, "not all ranks came"));
            }
            thread::sleep(Duration::from_micros(200));
        }
        Ok(())
    }

    /// Whether all ranks have entered. Compares what they say.
    pub fn has_met(&self) -> Result<bool, Status> {
        if self.met.load(Ordering::SeqCst) {
            return Ok(true);
        }
        let mut cards = HashMap::new();
        for rank in 0..self.size {
            let path = self.folder.join(format!("rank-{rank}"));
            let Ok(entry) = fs::read_to_string(&path) else { return Ok(false) };
            let fields: Vec<&str> = entry.split(' ').collect();
            let [other, size, process, card] = fields[..] else { return Err(INTERNAL_ERROR) };
            if size != self.size.to_string() {
                let why =
                    format!("rank {rank} counts {size} ranks, rank {} {}", self.rank, self.size);
                return Err(refuse(INVALID_ARGUMENT, why));
            }
            if other != version().to_string() {
                let why =
                    format!("rank {rank} has version {other}, rank {} {}", self.rank, version());
                return Err(refuse(INVALID_USAGE, why));
            }
            let shares = std::env::var("NCCL_MULTI_RANK_GPU_ENABLE").is_ok_and(|v| v == "1");
            if let Some(first) = cards.insert((process.to_owned(), card.to_owned()), rank)
                && !shares
            {
                let why =
                    format!("Duplicate GPU detected: ranks {first} and {rank} use card {card}");
                return Err(refuse(INVALID_USAGE, why));
            }
        }
        self.met.store(true, Ordering::SeqCst);
        Ok(true)
    }

    /// Writes a message to a rank. Returns a handle that knows whether it was taken.
    pub fn send(&self, to: usize, call: &str, data: &[u8]) -> io::Result<Sent> {
        let name = self.next_name(MessageEnd::Sender, to);
        let message = [call.as_bytes(), b"\n", data].concat();
        write(&self.folder, &name, &message)?;
        Ok(Sent(self.folder.join(name)))
    }

    /// Reserves the next message of a rank.
    pub fn expect(&self, from: usize) -> Expected {
        Expected { from, path: self.folder.join(self.next_name(MessageEnd::Receiver, from)) }
    }

    fn next_name(&self, end: MessageEnd, peer: usize) -> String {
        let mut numbers = self.numbers.lock().unwrap_or_else(PoisonError::into_inner);
        let number = numbers.entry((end, peer)).or_default();
        *number += 1;
        match end {
            MessageEnd::Sender => format!("{}-{peer}-{number}", self.rank),
            MessageEnd::Receiver => format!("{peer}-{}-{number}", self.rank),
        }
    }

    /// Ends all waiting.
    pub fn abort(&self) {
        self.aborted.store(true, Ordering::SeqCst);
    }

    /// Whether it was aborted.
    pub fn is_aborted(&self) -> bool {
        self.aborted.load(Ordering::SeqCst)
    }

    /// Notes an error that happened while work ran.
    pub fn fail(&self, status: Status) {
        self.error.store(status.0, Ordering::SeqCst);
    }

    /// The error that happened while work ran, or 0.
    pub fn error(&self) -> u32 {
        self.error.load(Ordering::SeqCst)
    }
}

impl NcclCommunicator {
    /// Leaves the group. The last rank that leaves removes the folder; until then a rank that comes late finds all
    /// entries.
    pub fn leave(&self) {
        if self.left.swap(true, Ordering::SeqCst) {
            return;
        }
        let _ = write(&self.folder, &format!("left-{}", self.rank), b"");
        let names = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        let left = names.filter(|entry| entry.file_name().to_string_lossy().starts_with("left-"));
        if left.count() == self.size {
            // Two ranks may be the last. Only one of them can rename the folder, and two that removed it would stop each other.
            let removed = self.folder.with_extension("removed");
            if fs::rename(&self.folder, &removed).is_ok() {
                let _ = fs::remove_dir_all(removed);
            }
        }
    }
}

impl Drop for NcclCommunicator {
    fn drop(&mut self) {
        self.leave();
    }
}

/// The folder of all communicators.
fn root() -> PathBuf {
    let shared = Path::new("/dev/shm");
    if shared.is_dir() { shared.to_owned() } else { std::env::temp_dir() }
}

/// Every communicator's name begins with this, and the process that named it follows.
const PREFIX: &str = "emulated-nccl-";

/// A name for a new communicator. The folders of processes that no longer exist are removed.
pub fn new_name(number: u64) -> String {
    for entry in fs::read_dir(root()).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let process = name.strip_prefix(PREFIX).and_then(|rest| rest.split('-').next());
        if process.is_some_and(|process| !Path::new("/proc").join(process).exists()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
    let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos());
    format!("{PREFIX}{}-{time:x}-{number}", std::process::id())
}

/// Whether a text is such a name.
pub fn is_name(text: &str) -> bool {
    text.starts_with(PREFIX) && !text.contains('/')
}

fn write(folder: &Path, name: &str, data: &[u8]) -> io::Result<()> {
    let unfinished = folder.join(format!("unfinished-{name}"));
    fs::write(&unfinished, data)?;
    fs::rename(unfinished, folder.join(name))
}

/// A message that was sent.
#[derive(Debug)]
pub struct Sent(PathBuf);

impl Sent {
    /// Whether the receiver has taken it.
    pub fn is_taken(&self) -> bool {
        !self.0.exists()
    }
}

/// A message that will come.
#[derive(Debug)]
pub struct Expected {
    pub from: usize,
    path: PathBuf,
}

impl Expected {
    /// The message's call and data, once it is there.
    pub fn take(&self) -> Option<(String, Vec<u8>)> {
        let message = fs::read(&self.path).ok()?;
        let end = message.iter().position(|byte| *byte == b'\n')?;
        let _ = fs::remove_file(&self.path);
        Some((String::from_utf8_lossy(&message[..end]).into_owned(), message[end + 1..].to_vec()))
    }
}
