//! Passes the ranks' output on, to the terminal and to files, and remembers the last lines of each rank.
//!
//! A slow reader slows the ranks down, as in a pipeline. One that stands still is waited for only so long
//! ([`paceline_host::streams`]).

use std::collections::VecDeque;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use paceline_host::streams;
use paceline_trace::runtime::sleep;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Lines of each stream of a failed rank that the launcher repeats.
const KEPT: usize = 10;
/// A line without an end, perhaps a question, is passed on after this time, or when it is this long.
const PART: (Timespec, usize) = (Timespec { tv_sec: 0, tv_nsec: 100_000_000 }, 64 << 10);

type Lines = Arc<Mutex<VecDeque<String>>>;

/// The last lines of one rank by stream: much standard output must not displace the reason for a failure.
#[derive(Clone, Debug, Default)]
pub(super) struct LastLines([Lines; 2]);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RankStream {
    Stdout,
    Stderr,
}

/// Where the output of a rank goes.
#[derive(Clone, Debug)]
pub(super) struct OutputRoute {
    pub(super) rank: usize,
    pub(super) is_printed: bool,
    /// Whether each line of standard output begins with the rank, as those of standard error do.
    pub(super) has_prefix: bool,
    /// The rank's log file, until a write fails.
    pub(super) log: Option<Arc<Mutex<Option<File>>>>,
}

impl LastLines {
    /// Starts to pass on the text that is read from `from`.
    ///
    /// # Errors
    ///
    /// If the system refuses a thread.
    pub(super) fn relay(
        &self,
        from: impl Read + AsFd + Send + 'static,
        source: RankStream,
        route: OutputRoute,
    ) -> std::io::Result<()> {
        let keeper = self.0[source as usize].clone();
        let name = format!("relay-{}", route.rank);
        let work = move || Relay { source, route, keeper, line: Vec::new() }.run(from);
        paceline_trace::thread_builder(name).spawn(work).map(drop)
    }

    /// Whether everything that the rank wrote has been read.
    pub(super) fn is_drained(&self) -> bool {
        // Each running relay holds a second reference, and drops it at the end of its input.
        self.0.iter().all(|lines| Arc::strong_count(lines) == 1)
    }

    /// The last lines, standard error at the end. Waits a moment for lines not read yet.
    pub(super) fn get(&self) -> Vec<String> {
        for _ in 0..20 {
            if self.is_drained() {
                break;
            }
            sleep(Duration::from_millis(5));
        }
        let get = |lines: &Lines| lines.lock().unwrap_or_else(PoisonError::into_inner).clone();
        self.0.iter().flat_map(get).collect()
    }
}

struct Relay {
    source: RankStream,
    route: OutputRoute,
    keeper: Lines,
    /// The line that has no end yet.
    line: Vec<u8>,
}

impl Relay {
    fn run(mut self, mut from: impl Read + AsFd) {
        let mut buffer = vec![0; 64 << 10];
        // How much of the line has been passed on.
        let mut passed = 0;
        loop {
            if self.line.len() > passed && !has_more(&from) {
                self.pass(&self.line[passed..]);
                passed = self.line.len();
            }
            let read = match from.read(&mut buffer) {
                Ok(0) => break,
                Ok(read) => read,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(_) => break,
            };
            // A carriage return, as of a progress bar, ends a line too.
            for piece in buffer[..read].split_inclusive(|byte| matches!(byte, b'\n' | b'\r')) {
                self.line.extend_from_slice(piece);
                let has_end = matches!(piece.last(), Some(b'\n' | b'\r'));
                if has_end || self.line.len() > PART.1 {
                    self.pass(&self.line[passed..]);
                    self.keep();
                    passed = 0;
                }
            }
        }
        if !self.line.is_empty() {
            self.line.push(b'\n');
            self.pass(&self.line[passed..]);
            self.keep();
        }
    }

    /// Passes on a line, or a part of one.
    fn pass(&self, piece: &[u8]) {
        let OutputRoute { rank, is_printed, has_prefix, log } = &self.route;
        if let Some(log) = log {
            let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(Err(error)) = log.as_mut().map(|file| file.write_all(piece)) {
                // This does not stop the rank.
                streams::stderr().line(&format!(
                    "warning: cannot write the log of rank {rank}, which ends here: {error}"
                ));
                *log = None;
            }
        }
        if *is_printed {
            let named = format!("[rank {rank}] ");
            let (to, prefix) = match self.source {
                RankStream::Stdout if !has_prefix => (streams::stdout(), ""),
                RankStream::Stdout => (streams::stdout(), &*named),
                RankStream::Stderr => (streams::stderr(), &*named),
            };
            to.piece(*rank, prefix, piece);
        }
    }

    /// Remembers the line, and begins a new one.
    fn keep(&mut self) {
        if self.line.last() != Some(&b'\r') {
            let text = String::from_utf8_lossy(&self.line).trim_end_matches('\n').to_owned();
            let mut kept = self.keeper.lock().unwrap_or_else(PoisonError::into_inner);
            if kept.len() == KEPT {
                kept.pop_front();
            }
            kept.push_back(text);
        }
        self.line.clear();
    }
}

/// Whether more, or the end, can be read within the time of [`PART`].
fn has_more(from: &impl AsFd) -> bool {
    poll(&mut [PollFd::new(from, PollFlags::IN)], Some(&PART.0)).is_ok_and(|ready| ready > 0)
}
