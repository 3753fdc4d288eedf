//! Standard output and standard error of this process.
//!
//! A command that prints a result waits for its reader, as `paceline compare runs/* | less` has to. Ranks and
//! their launcher never wait: a terminal that was stopped with Ctrl-S, or a stuck log collector, must not stop
//! training. After [`never_wait`] the text goes to a buffer, and a thread writes it. When the buffer is full, lines are
//! dropped, and a line that says how many takes their place.
//!
//! A line may hold names that others chose, in files, paths and command lines, so each is made printable here. What commands
//! the terminal (a progress bar) and what a user's own program writes go the other way, [`Stream::bytes`] and
//! [`Stream::piece`].
//!
//! This module does not know what is printed.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use paceline_files::{printable_lines, printable_piece};
use paceline_table::fitted::wrapped;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::termios::isatty;

use crate::screen;

/// Exit code of a command, or of a rank, that has failed by itself.
pub const EXIT_RUN: u8 = 1;

/// Bytes that wait for a reader, at most.
const LIMIT_BYTES: usize = 4 << 20;
/// Bytes that are written at a time. A pipe takes as many as a whole, so it shows how far its reader is.
const PIECE_BYTES: usize = 4096;

/// How long a command that has succeeded waits for a reader that takes nothing.
const SLOW_READER: Duration = Duration::from_secs(10);
/// How long a command that has failed does.
const STUCK_READER: Duration = Duration::from_millis(500);

static STDOUT: Stream = Stream::new(Target::Stdout);
static STDERR: Stream = Stream::new(Target::Stderr);
/// Whether a progress bar may stand where the next line goes.
static BARS: AtomicBool = AtomicBool::new(false);

/// Standard output.
pub fn stdout() -> &'static Stream {
    &STDOUT
}

/// Standard error.
pub fn stderr() -> &'static Stream {
    &STDERR
}

/// From now on neither stream waits for its reader.
pub fn never_wait() {
    STDOUT.never_wait();
    STDERR.never_wait();
}

/// From now on a progress bar may stand where the next line goes: one of this process, or of a rank that shares its
/// terminal.
pub fn expect_bars() {
    BARS.store(true, Ordering::Relaxed);
}

/// Writes what is left, at the end of a command that exits with `code`. Returns the code to exit with: if standard
/// output could not be written, because the disk is full for example, a success is none.
pub fn finish(code: u8) -> u8 {
    // After a success the reader may be slow; after a failure its user waits.
    let idle = if code == 0 { SLOW_READER } else { STUCK_READER };
    // A rank that was killed has left its bar there.
    STDOUT.bytes(STDOUT.erasure().as_bytes().to_vec());
    let outcome = STDOUT.finish(idle);
    let code = match outcome {
        Err(error) => {
            STDERR.line(&format!("error: cannot write to standard output: {error}"));
            if code == 0 { EXIT_RUN } else { code }
        }
        Ok(()) => code,
    };
    // Nobody could be told of an error here.
    let _ = STDERR.finish(idle);
    code
}

/// Where a stream goes.
#[derive(Debug)]
enum Target {
    Stdout,
    Stderr,
    #[cfg(test)]
    File(std::fs::File),
}

impl Target {
    /// Writes some of `bytes`, without the locks and buffers of the standard library, which a thread that is stuck
    /// in a write would hold.
    fn write(&self, bytes: &[u8]) -> rustix::io::Result<usize> {
        match self {
            Target::Stdout => rustix::io::write(io::stdout(), bytes),
            Target::Stderr => rustix::io::write(io::stderr(), bytes),
            #[cfg(test)]
            Target::File(file) => rustix::io::write(file, bytes),
        }
    }

    fn with_fd<T>(&self, f: impl FnOnce(BorrowedFd<'_>) -> T) -> T {
        match self {
            Target::Stdout => f(io::stdout().as_fd()),
            Target::Stderr => f(io::stderr().as_fd()),
            #[cfg(test)]
            Target::File(file) => f(file.as_fd()),
        }
    }

    fn wait_writable(&self) -> rustix::io::Result<()> {
        let ready = |fd: BorrowedFd<'_>| {
            poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::OUT)], None).map(drop)
        };
        self.with_fd(ready).or_else(|error| if error == Errno::INTR { Ok(()) } else { Err(error) })
    }

    fn write_all(&self, mut bytes: &[u8], mut wrote: impl FnMut()) -> Result<(), Errno> {
        while !bytes.is_empty() {
            match self.write(&bytes[..bytes.len().min(PIECE_BYTES)]) {
                Ok(written) => bytes = &bytes[written..],
                Err(Errno::INTR) => {}
                // Whoever shares the stream with this process may have made it non-blocking.
                Err(Errno::AGAIN) => self.wait_writable()?,
                Err(error) => return Err(error),
            }
            wrote();
        }
        Ok(())
    }
}

/// A stream that everything in this process writes to.
#[derive(Debug)]
pub struct Stream {
    target: Target,
    state: Mutex<State>,
    /// Signaled when the state has changed.
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    never_waits: bool,
    /// Text that waits to be written, if the stream never waits.
    waiting: VecDeque<Vec<u8>>,
    waiting_bytes: usize,
    is_writing: bool,
    /// Lines that found no room since the last line that said so.
    dropped_lines: u64,
    /// Counts the pieces that have been written.
    num_pieces: u64,
    /// Whose line has no end yet.
    open: Option<usize>,
    /// Why nothing is written any more.
    failure: Option<Errno>,
}

impl Stream {
    const fn new(target: Target) -> Self {
        let state = State {
            never_waits: false,
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            is_writing: false,
            dropped_lines: 0,
            num_pieces: 0,
            open: None,
            failure: None,
        };
        Self { target, state: Mutex::new(state), changed: Condvar::new() }
    }

    /// How many characters a line of a table may have.
    pub fn width_of_table(&self) -> usize {
        self.target.with_fd(screen::width_of_table)
    }

    /// The width of the terminal, if a line of it can be drawn again and again. `None` if the text goes elsewhere.
    pub fn width_of_bar(&self) -> Option<usize> {
        self.target.with_fd(screen::width_of_bar)
    }

    /// Writes a line. On a terminal it is broken between words to fit, and takes the place of a progress bar.
    pub fn line(&self, text: &str) {
        let width = self.target.with_fd(screen::width_of_text);
        match width {
            Some(width) => self.unbroken(&wrapped(&printable_lines(text), width)),
            None => self.unbroken(text),
        }
    }

    /// Writes a line, however long. It takes the place of a progress bar.
    pub fn unbroken(&self, text: &str) {
        let text = printable_lines(text);
        let erase = self.erasure();
        let mut state = self.lock();
        let end = if state.open.take().is_some() { "\n" } else { "" };
        self.add(state, format!("{end}{erase}{text}\n").into_bytes());
    }

    /// What erases a progress bar of this process, or of one that shares its terminal.
    fn erasure(&self) -> &'static str {
        let is_needed = BARS.load(Ordering::Relaxed) && self.width_of_bar().is_some();
        if is_needed { screen::ERASE } else { "" }
    }

    /// Writes a part of a text that a model makes. Elsewhere than on a terminal it is data, and stays as it is.
    pub fn part(&self, text: &str) {
        let is_terminal = self.target.with_fd(|fd| isatty(fd));
        let text = if is_terminal { printable_piece(text) } else { text.into() };
        self.add(self.lock(), text.into_owned().into_bytes());
    }

    /// Writes bytes as they are, such as those that move the cursor.
    pub fn bytes(&self, bytes: Vec<u8>) {
        self.add(self.lock(), bytes);
    }

    /// Writes what one of several sources has said: a whole line, or a part of one. `prefix` stands in front of each
    /// of its lines. A line of another source begins on a new line, even if the one before has no end yet.
    pub fn piece(&self, source: usize, prefix: &str, piece: &[u8]) {
        let erase = self.erasure();
        let mut state = self.lock();
        let mut bytes = Vec::with_capacity(prefix.len() + piece.len() + 1);
        if state.open != Some(source) {
            bytes.extend(state.open.map(|_| b'\n'));
            bytes.extend(erase.as_bytes());
            bytes.extend(prefix.as_bytes());
        }
        bytes.extend(piece);
        let has_end = piece.last().is_some_and(|last| matches!(last, b'\n' | b'\r'));
        state.open = if has_end { None } else { Some(source) };
        self.add(state, bytes);
    }

    fn add(&self, mut state: MutexGuard<'_, State>, bytes: Vec<u8>) {
        if state.failure.is_some() {
            return;
        }
        if !state.never_waits {
            state.failure = self.target.write_all(&bytes, || ()).err();
            return;
        }
        if state.waiting_bytes + bytes.len() > LIMIT_BYTES {
            state.dropped_lines += bytes.iter().filter(|byte| **byte == b'\n').count() as u64;
            return;
        }
        if state.dropped_lines > 0 {
            let dropped = std::mem::take(&mut state.dropped_lines);
            let said = format!("paceline: {dropped} lines were dropped here: nobody read them\n");
            state.add(said.into_bytes());
        }
        state.add(bytes);
        drop(state);
        self.changed.notify_all();
    }

    /// From now on this stream does not wait for its reader. Without a thread for that it goes on waiting.
    fn never_wait(&'static self) {
        let mut state = self.lock();
        if !state.never_waits {
            let thread = paceline_trace::thread_builder("output");
            state.never_waits = thread.spawn(|| self.write_for_ever()).is_ok();
        }
    }

    /// What the thread does.
    fn write_for_ever(&self) {
        let mut state = self.lock();
        loop {
            let Some(bytes) = state.waiting.pop_front() else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            state.waiting_bytes -= bytes.len();
            state.is_writing = true;
            drop(state);
            let outcome = self.target.write_all(&bytes, || self.lock().num_pieces += 1);
            state = self.lock();
            state.is_writing = false;
            if let Err(error) = outcome {
                state.failure = Some(error);
                state.waiting.clear();
                state.waiting_bytes = 0;
            }
            self.changed.notify_all();
        }
    }

    /// Waits until everything is written, or the reader has taken nothing for as long as `idle`. A reader that is
    /// gone, such as `head`, is no error.
    fn finish(&self, idle: Duration) -> io::Result<()> {
        let mut state = self.lock();
        let (mut num_pieces, mut since) = (state.num_pieces, Instant::now());
        while state.is_writing || !state.waiting.is_empty() {
            if state.num_pieces != num_pieces {
                (num_pieces, since) = (state.num_pieces, Instant::now());
            }
            let left = idle.saturating_sub(since.elapsed());
            if left.is_zero() {
                break;
            }
            let step = left.min(Duration::from_millis(20));
            state =
                self.changed.wait_timeout(state, step).unwrap_or_else(PoisonError::into_inner).0;
        }
        match state.failure {
            None | Some(Errno::PIPE) => Ok(()),
            Some(error) => Err(error.into()),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn add(&mut self, bytes: Vec<u8>) {
        self.waiting_bytes += bytes.len();
        self.waiting.push_back(bytes);
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read;

    use super::*;

    /// A stream into a pipe that nobody reads yet.
    fn piped() -> (&'static Stream, File) {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let stream = Box::leak(Box::new(Stream::new(Target::File(writer.into()))));
        (stream, reader.into())
    }

    const FOREVER: Duration = Duration::from_secs(60);

    #[test]
    fn a_stuck_reader_is_not_waited_for_and_learns_what_it_missed() {
        let (stream, mut reader) = piped();
        stream.never_wait();
        let line = "x".repeat(1023);
        let num_lines = 3 * LIMIT_BYTES / 1024;
        for _ in 0..num_lines {
            stream.line(&line);
        }
        // Nothing moves, so this ends although nobody reads.
        stream.finish(Duration::from_millis(10)).unwrap();
        let mut text = vec![0; 1 << 20];
        reader.read_exact(&mut text).unwrap();
        stream.line("the end");
        let reading = std::thread::spawn(move || {
            let mut rest = Vec::new();
            let mut buffer = [0; 65536];
            while !rest.ends_with(b"the end\n") {
                let read = reader.read(&mut buffer).unwrap();
                rest.extend_from_slice(&buffer[..read]);
            }
            rest
        });
        stream.finish(FOREVER).unwrap();
        text.extend(reading.join().unwrap());
        let text = String::from_utf8(text).unwrap();
        let kept = text.lines().filter(|read| **read == line).count();
        let said = text.lines().filter(|line| line.starts_with("paceline: "));
        let dropped = said.map(|line| line.split(' ').nth(1).unwrap().parse::<usize>().unwrap());
        let dropped: usize = dropped.sum();
        assert_eq!(kept + dropped, num_lines, "{kept} and {dropped}");
        assert!(dropped > 0 && kept >= LIMIT_BYTES / 1024, "{kept} and {dropped}");
    }

    #[test]
    fn lines_of_several_sources_stay_lines() {
        let (stream, mut reader) = piped();
        stream.piece(0, "[0] ", b"10 %\r");
        stream.piece(0, "[0] ", b"name? ");
        stream.piece(1, "[1] ", b"hello\n");
        stream.piece(0, "[0] ", b"a");
        stream.piece(0, "[0] ", b"b\n");
        stream.piece(1, "[1] ", b"c");
        stream.line("the end");
        let expected = "[0] 10 %\r[0] name? \n[1] hello\n[0] ab\n[1] c\nthe end\n";
        let mut text = vec![0; expected.len()];
        reader.read_exact(&mut text).unwrap();
        assert_eq!(String::from_utf8(text).unwrap(), expected);
    }

    #[test]
    fn a_full_disk_is_an_error_and_a_reader_that_is_gone_is_none() {
        for never_waits in [false, true] {
            let full = File::options().write(true).open("/dev/full").unwrap();
            let full: &'static Stream = Box::leak(Box::new(Stream::new(Target::File(full))));
            let (gone, reader) = piped();
            drop(reader);
            for stream in [full, gone] {
                if never_waits {
                    stream.never_wait();
                }
                stream.line("a");
            }
            let error = full.finish(FOREVER).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::StorageFull);
            gone.finish(FOREVER).unwrap();
        }
    }
}
