//! Standard output and standard error of this process.
//!
//! A command that prints a result waits for its reader (`paceline compare runs/* | less`). In a launcher ([`buffer`]) the
//! text goes to a buffer, and a thread writes it. When the buffer is full, [`Stream::piece`] waits for the reader, and so
//! does the rank that prints. A terminal that was stopped with Ctrl-S, or a stuck log collector, must not stop training:
//! once the reader has taken nothing for ten seconds, lines are lost, and a line that says how many takes their place. The
//! launcher's own lines wait for nobody, because it watches its ranks.
//!
//! A line may hold names that others chose, so it is made printable here. Progress bars and the output of a user's own
//! program go through [`Stream::bytes`] and [`Stream::piece`].

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use paceline_files::{printable_lines, printable_piece};
use paceline_table::fitted::wrapped;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::termios::isatty;

use crate::screen;
use crate::text::plural;

/// Exit code of a command, or of a rank, that has failed by itself.
pub const EXIT_RUN: u8 = 1;

/// Bytes that wait for a reader, at most.
const LIMIT_BYTES: usize = 4 << 20;
/// Bytes written at a time. A pipe takes as many as a whole, so it shows how far its reader is.
const PIECE_BYTES: usize = 4096;

/// How long a reader may take nothing before lines are lost.
const SLOW_READER: Duration = Duration::from_secs(10);
/// How long it may after a failure or a signal.
const STUCK_READER: Duration = Duration::from_millis(500);
/// How often a wait looks at the clock. A wait that takes much longer was a suspension of this process.
const STEP: Duration = Duration::from_millis(50);

static STDOUT: LazyLock<Stream> = LazyLock::new(|| Stream::new(Target::Stdout));
static STDERR: LazyLock<Stream> = LazyLock::new(|| Stream::new(Target::Stderr));
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

/// From now on a thread writes the text of either stream, and the reader has time.
pub fn buffer() {
    for stream in [&STDOUT, &STDERR] {
        stream.buffer();
        stream.lock().is_hurried = false;
    }
}

/// From now on a reader that stands still is hardly waited for: a run has failed, or its user wants it to end.
pub fn hurry() {
    STDOUT.lock().is_hurried = true;
    STDERR.lock().is_hurried = true;
}

/// Whether a piece waits for a reader to make room.
pub fn is_reader_awaited() -> bool {
    [&STDOUT, &STDERR].iter().any(|stream| stream.lock().num_awaiting_room > 0)
}

/// From now on a progress bar of this process, or of a rank that shares its terminal, may stand where the next line goes.
pub fn expect_bars() {
    BARS.store(true, Ordering::Relaxed);
}

/// Writes the remaining text at the end of a command that exits with `code`. Returns the code to exit with, which is not 0
/// if standard output could not be written or lines are lost.
pub fn finish(code: u8) -> u8 {
    // After a success the reader may be slow; after a failure its user waits.
    if code != 0 {
        hurry();
    }
    // A rank that was killed has left its bar there.
    STDOUT.bytes(STDOUT.erasure().as_bytes().to_vec());
    let problem = match STDOUT.finish() {
        Err(error) => Some(format!("cannot write to standard output: {error}")),
        Ok(lost) => STDOUT.loss(lost, "standard output"),
    };
    if let Some(problem) = &problem {
        STDERR.line(&format!("error: {problem}"));
    }
    // Nobody could be informed of an error here.
    let lost = STDERR.finish().unwrap_or(0);
    if let Some(loss) = STDERR.loss(lost, "standard error") {
        STDERR.line(&format!("error: {loss}"));
        let _ = STDERR.finish();
    }
    if code == 0 && (problem.is_some() || lost > 0) { EXIT_RUN } else { code }
}

#[derive(Debug)]
enum Target {
    Stdout,
    Stderr,
    #[cfg(test)]
    File(std::fs::File),
}

impl Target {
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

    /// Writes some of `bytes`, without the standard library's locks, which a thread stuck in a write would hold.
    fn write_some(&self, bytes: &[u8]) -> Result<usize, Errno> {
        let bytes = &bytes[..bytes.len().min(PIECE_BYTES)];
        loop {
            match self.with_fd(|fd| rustix::io::write(fd, bytes)) {
                Err(Errno::INTR) => {}
                // Whoever shares the stream with this process may have made it non-blocking.
                Err(Errno::AGAIN) => self.wait_writable()?,
                outcome => return outcome,
            }
        }
    }

    fn write_all(&self, mut bytes: &[u8]) -> Result<(), Errno> {
        while !bytes.is_empty() {
            bytes = &bytes[self.write_some(bytes)?..];
        }
        Ok(())
    }
}

/// Standard output or standard error, shared by all threads.
#[derive(Debug)]
pub struct Stream {
    target: Target,
    state: Mutex<StreamState>,
    /// Signaled when the state has changed.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct StreamState {
    is_buffered: bool,
    /// Text that is not written yet, if the stream is buffered.
    waiting: VecDeque<u8>,
    num_awaiting_room: usize,
    /// Whether the end is near.
    is_hurried: bool,
    /// Whether the reader has stood still for too long, and has not moved since.
    is_stuck: bool,
    /// Lines that found no room since the last line that said so, and all of them.
    dropped: u64,
    lost: u64,
    num_pieces: u64,
    /// Whose line has no end yet.
    open: Option<usize>,
    /// Why nothing is written any more.
    failure: Option<Errno>,
}

impl Stream {
    fn new(target: Target) -> Self {
        Self { target, state: Mutex::default(), changed: Condvar::new() }
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

    /// Erases a progress bar, if one may stand here.
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

    /// Whether nothing more can be written: the reader is gone, or the disk is full.
    pub fn has_failed(&self) -> bool {
        self.lock().failure.is_some()
    }

    /// Writes bytes as they are, such as those that move the cursor.
    pub fn bytes(&self, bytes: Vec<u8>) {
        self.add(self.lock(), bytes);
    }

    /// Writes a line, or a part of one, from one of several sources. `prefix` begins each of its lines. A line of another
    /// source begins on a new line, even if the one before has no end yet. Waits for room. If the reader stands still for
    /// too long, the piece is lost.
    pub fn piece(&self, source: usize, prefix: &str, piece: &[u8]) {
        let erase = self.erasure();
        let mut state = self.await_room(prefix.len() + piece.len());
        if state.is_full(prefix.len() + piece.len()) {
            // The rest of a line that has begun is lost: the next text begins on a line of its own.
            if state.open.take().is_some() {
                state.waiting.push_back(b'\n');
            }
            state.dropped += 1;
            state.lost += 1;
            return;
        }
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

    /// Waits until the buffer has room for `num_bytes` bytes, or the reader has taken nothing for too long.
    fn await_room(&self, num_bytes: usize) -> MutexGuard<'_, StreamState> {
        let mut state = self.lock();
        let mut still = Still::of(&state);
        state.num_awaiting_room += 1;
        while state.is_full(num_bytes) && !state.is_stuck {
            state = self.step(state, &mut still);
        }
        state.num_awaiting_room -= 1;
        state
    }

    /// Waits for a moment, or until something changes. Notices a stuck reader.
    fn step<'a>(
        &'a self,
        state: MutexGuard<'a, StreamState>,
        still: &mut Still,
    ) -> MutexGuard<'a, StreamState> {
        let begin = Instant::now();
        let waited = self.changed.wait_timeout(state, STEP);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
        still.add(&state, begin.elapsed());
        state.is_stuck |= still.waited >= state.patience();
        state
    }

    fn add(&self, mut state: MutexGuard<'_, StreamState>, bytes: Vec<u8>) {
        if state.failure.is_some() {
            return;
        }
        if !state.is_buffered {
            state.failure = self.target.write_all(&bytes).err();
            return;
        }
        let dropped = std::mem::take(&mut state.dropped);
        if dropped > 0 {
            let lines = plural(dropped as usize, "line");
            let said = format!("paceline: {lines} lost here: nobody read them\n");
            state.waiting.extend(said.into_bytes());
        }
        state.waiting.extend(bytes);
        drop(state);
        self.changed.notify_all();
    }

    /// From now on a thread writes. If none can be started, the stream still waits for its reader.
    fn buffer(&'static self) {
        let mut state = self.lock();
        if !state.is_buffered {
            let thread = paceline_trace::thread_builder("output");
            state.is_buffered = thread.spawn(|| self.write_for_ever()).is_ok();
        }
    }

    fn write_for_ever(&self) {
        let mut piece = Vec::with_capacity(PIECE_BYTES);
        let mut state = self.lock();
        loop {
            piece.clear();
            piece.extend(state.waiting.iter().take(PIECE_BYTES));
            if piece.is_empty() {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            drop(state);
            let outcome = self.target.write_some(&piece);
            state = self.lock();
            match outcome {
                Ok(written) => drop(state.waiting.drain(..written)),
                Err(error) => {
                    state.failure = Some(error);
                    state.waiting.clear();
                }
            }
            state.num_pieces += 1;
            state.is_stuck = false;
            // Many ranks may wait: they wake up for more than a piece.
            if state.waiting.len() <= LIMIT_BYTES / 2 {
                self.changed.notify_all();
            }
        }
    }

    /// Waits until everything is written, or the reader has taken nothing for too long. Returns the number of lost lines. A
    /// reader that is gone, such as `head`, is not an error.
    fn finish(&self) -> io::Result<u64> {
        let mut state = self.lock();
        let mut still = Still::of(&state);
        while !state.waiting.is_empty() && !state.is_stuck {
            state = self.step(state, &mut still);
        }
        match state.failure {
            None | Some(Errno::PIPE) => {
                let ends = state.waiting.iter().filter(|byte| **byte == b'\n').count() as u64;
                let is_open = state.waiting.back().is_some_and(|last| *last != b'\n');
                Ok(state.lost + ends + u64::from(is_open))
            }
            Some(error) => Err(error.into()),
        }
    }

    fn loss(&self, lost: u64, name: &str) -> Option<String> {
        let (lines, seconds) =
            (plural(lost as usize, "line"), self.lock().patience().as_secs_f64());
        (lost > 0).then(|| format!("{lines} of {name} lost: nobody read them for {seconds} s"))
    }

    fn lock(&self) -> MutexGuard<'_, StreamState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl StreamState {
    fn is_full(&self, num_bytes: usize) -> bool {
        self.waiting.len() + num_bytes > LIMIT_BYTES
    }

    /// How long the reader may stand still.
    fn patience(&self) -> Duration {
        if self.is_hurried { STUCK_READER } else { SLOW_READER }
    }
}

/// How long a reader has taken nothing while someone waited for it.
struct Still {
    num_pieces: u64,
    waited: Duration,
}

impl Still {
    fn of(state: &StreamState) -> Self {
        Self { num_pieces: state.num_pieces, waited: Duration::ZERO }
    }

    fn add(&mut self, state: &StreamState, after: Duration) {
        if state.num_pieces != self.num_pieces {
            *self = Self::of(state);
        } else {
            self.waited += after.min(5 * STEP);
        }
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
    fn a_reader_that_reads_gets_everything_however_slow_it_is() {
        let (stream, mut reader) = piped();
        stream.buffer();
        let num_lines = 3 * LIMIT_BYTES / 1024;
        let writing = std::thread::spawn(move || {
            (0..num_lines)
                .for_each(|number| stream.piece(0, "", format!("{number:1023}\n").as_bytes()));
        });
        let mut text = vec![0; num_lines * 1024];
        let (first, rest) = text.split_at_mut(1 << 16);
        reader.read_exact(first).unwrap();
        // The reader stands still, and so does the writer.
        let begin = Instant::now();
        while stream.lock().num_awaiting_room == 0 {
            assert!(begin.elapsed() < FOREVER, "the writer does not wait");
            std::thread::sleep(STEP);
        }
        assert!(!writing.is_finished());
        reader.read_exact(rest).unwrap();
        writing.join().unwrap();
        assert_eq!(stream.finish().unwrap(), 0);
        let text = String::from_utf8(text).unwrap();
        assert!(text.lines().enumerate().all(|(number, line)| line.trim() == number.to_string()));
    }

    #[test]
    fn a_stuck_reader_loses_lines_and_learns_how_many() {
        let (stream, mut reader) = piped();
        stream.buffer();
        stream.lock().is_hurried = true;
        let line = "x".repeat(1023);
        let num_lines = 3 * LIMIT_BYTES / 1024;
        for _ in 0..num_lines {
            stream.piece(0, "", format!("{line}\n").as_bytes());
        }
        // Nothing moves, so this ends although nobody reads. What waits in the buffer is lost too.
        let lost = stream.finish().unwrap();
        assert!(lost > 2 * LIMIT_BYTES as u64 / 1024, "{lost}");
        assert_eq!(stream.loss(0, "it"), None);
        let loss = stream.loss(lost, "it").unwrap();
        assert_eq!(loss, format!("{lost} lines of it lost: nobody read them for 0.5 s"));
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
        assert_eq!(stream.finish().unwrap(), stream.lock().lost);
        text.extend(reading.join().unwrap());
        let text = String::from_utf8(text).unwrap();
        let kept = text.lines().filter(|read| **read == line).count();
        let said = text.lines().filter(|line| line.starts_with("paceline: "));
        let dropped = said.map(|line| line.split(' ').nth(1).unwrap().parse::<usize>().unwrap());
        let dropped: usize = dropped.sum();
        assert_eq!(kept + dropped, num_lines, "{kept} and {dropped}");
        assert!(
            dropped as u64 == stream.lock().lost && kept >= LIMIT_BYTES / 1024,
            "{kept} and {dropped}"
        );
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
        for is_buffered in [false, true] {
            let full = File::options().write(true).open("/dev/full").unwrap();
            let full: &'static Stream = Box::leak(Box::new(Stream::new(Target::File(full))));
            let (gone, reader) = piped();
            drop(reader);
            for stream in [full, gone] {
                if is_buffered {
                    stream.buffer();
                }
                stream.line("a");
            }
            let error = full.finish().unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::StorageFull);
            gone.finish().unwrap();
        }
    }
}
