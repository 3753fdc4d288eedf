//! Opens a trace file, which may be compressed, and reads all of it or only the facts about its run.

use std::io::{self, BufRead, BufReader, Cursor, Read};
use std::num::NonZero;
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use flate2::bufread::MultiGzDecoder;
use paceline_files::Printable;
use paceline_trace::{STACK_BYTES, thread_builder};
use rayon::prelude::*;

use super::top::{self, Header};
use super::{foreign, names};
use crate::TraceError;
use crate::json::{Fault, JsonError, Pull, WINDOW_BYTES};
use crate::steps;
use crate::timeline::Timeline;

/// Reads a whole trace. Its rank comes from `distributedInfo`, or from the path if that is missing.
pub fn open(path: &Path) -> Result<Timeline, TraceError> {
    named(path, with_json(path, |input| top::parse(input))?)
}

/// Like [`open`], but keeps the events before the cut of a trace that is cut off, and the oddities say so.
pub fn open_beginning(path: &Path) -> Result<Timeline, TraceError> {
    named(path, with_json(path, |input| top::parse_beginning(input))?)
}

/// How many of these traces are read or analyzed at a time: one for each core.
pub fn at_a_time(num_traces: usize) -> usize {
    thread::available_parallelism().map_or(1, NonZero::get).min(num_traces)
}

/// Applies `of` to each item and its index, on as many threads as there are cores. If the system refuses one, the caller does
/// all of it: that takes longer and changes nothing else. rayon's own pool would panic.
pub(crate) fn on_all_cores<T: Sync, R: Send>(
    items: &[T],
    of: impl Fn((usize, &T)) -> R + Send + Sync,
) -> Vec<R> {
    let num_threads = at_a_time(items.len());
    let builder = rayon::ThreadPoolBuilder::new().num_threads(num_threads).stack_size(STACK_BYTES);
    let pool = if num_threads > 1 { builder.build().ok() } else { None };
    match pool {
        Some(pool) => pool.install(|| items.par_iter().enumerate().map(of).collect()),
        None => items.iter().enumerate().map(of).collect(),
    }
}

/// The trace with what its path says about it. Fails for a file of another program, and for several ranks in one file.
fn named(path: &Path, mut timeline: Timeline) -> Result<Timeline, TraceError> {
    let file = path.printable();
    if timeline.extent().is_none()
        && let Some(what) = foreign::of_keys(path)
    {
        return Err(TraceError::Unfit(format!("{file} {what}")));
    }
    if steps::are_merged(&timeline) {
        return Err(TraceError::Unfit(format!(
            "{file} has steps of several processes, or steps that overlap: traces of several ranks, merged into one file; pass the \
             ranks' own files"
        )));
    }
    timeline.source = path.display().to_string();
    timeline.rank = timeline.rank.or_else(|| names::rank_of_path(path));
    timeline.host = names::host_of_path(path);
    timeline.find_steps(None);
    Ok(timeline)
}

/// Reads only the facts about the run of a trace. Reading stops as soon as they are found. Profilers write
/// them before the events. Whatever comes before them is skipped.
pub fn header(path: &Path) -> Result<Header, TraceError> {
    with_json(path, |input| Header::first(&mut Pull::new(input)))
}

/// Whether a file holds events, as a list of them or under the name that all profilers give it. A file that is not JSON,
/// as far as it has to be read for that, holds no events.
pub(super) fn is_trace(path: &Path) -> Result<bool, TraceError> {
    match with_json(path, |input| top::holds_events(&mut Pull::new(input))) {
        Err(TraceError::NoJson(_)) => Ok(false),
        other => other,
    }
}

/// Passes the JSON of a file to `read`. A compressed file is decompressed on a second thread at the same
/// time.
pub(crate) fn with_json<T>(
    path: &Path,
    read: impl FnOnce(&mut dyn Read) -> Result<T, JsonError>,
) -> Result<T, TraceError> {
    let io = |source| TraceError::Io { path: path.to_owned(), source };
    // Of any size: it is read piece by piece, so memory is bounded by the events that are kept.
    let file = paceline_files::open(path).map_err(io)?;
    // As large as the parser's reads, which then go to its window without a copy.
    let mut file = BufReader::with_capacity(WINDOW_BYTES, file);
    let start = file.fill_buf().map_err(io)?;
    if start.is_empty() {
        return Err(TraceError::NoJson(format!("{} is empty", path.printable())));
    }
    let is_packed = start.starts_with(&GZIP_MAGIC);
    // A mark of UTF-8, as editors write it.
    if start.starts_with(b"\xef\xbb\xbf") {
        file.consume(3);
    }
    let result = if is_packed {
        let decoder = MultiGzDecoder::new(file);
        thread::scope(|scope| {
            let (sender, receiver) = sync_channel(CHUNKS);
            let (spent, spare) = sync_channel(CHUNKS + 2);
            let work = move || unpack(decoder, &sender, &spare);
            thread_builder("unpack").spawn_scoped(scope, work)?;
            // The receiver is dropped before the scope ends. That stops the thread, even before the end of
            // the file.
            Ok(read(&mut Chunks { receiver, spent, chunk: Cursor::default() }))
        })
        .map_err(|e: io::Error| {
            io(io::Error::new(e.kind(), format!("no thread to unpack it: {e}")))
        })?
    } else {
        read(&mut file)
    };
    result.map_err(|source| {
        let (file, at) = (path.printable(), source.at);
        match source.fault {
            _ if let Some(what) = foreign::of_keys(path) => {
                TraceError::NoJson(format!("{file} {what}"))
            }
            Fault::Input(err) if is_packed && err.kind() == io::ErrorKind::UnexpectedEof => {
                TraceError::Unfit(format!(
                    "{file}: the gzip file is cut off, after {at} bytes of JSON"
                ))
            }
            Fault::Input(err) if is_packed => TraceError::Unfit(format!(
                "{file}: the gzip file is damaged, after {at} bytes of JSON: {err}"
            )),
            Fault::Input(source) => io(source),
            _ if let Some(what) = foreign::of_bytes(path) => {
                TraceError::NoJson(format!("{file} {what}"))
            }
            _ if !is_packed && path.extension().is_some_and(|of| of == "gz") => TraceError::NoJson(
                format!("{file} is named .gz, but is no gzip file, nor JSON: {source}"),
            ),
            _ => TraceError::NoJson(format!("{file}: {source}")),
        }
    })
}

pub(super) const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// The size of a chunk of decompressed bytes.
const CHUNK_BYTES: usize = 256 << 10;

/// The largest number of chunks that wait for the parser.
const CHUNKS: usize = 4;

/// Decompresses until the end or an error, or until the receiver is gone.
fn unpack(
    mut decoder: impl Read,
    sender: &SyncSender<io::Result<Vec<u8>>>,
    spare: &Receiver<Vec<u8>>,
) {
    loop {
        let mut chunk = spare.try_recv().unwrap_or_default();
        chunk.clear();
        chunk.reserve(CHUNK_BYTES);
        let read = decoder.by_ref().take(CHUNK_BYTES as u64).read_to_end(&mut chunk);
        // The bytes before an error are good, and may be all that the caller needs.
        if sender.send(Ok(chunk)).is_err() {
            return;
        }
        if read.as_ref().is_ok_and(|count| *count == CHUNK_BYTES) {
            continue;
        }
        // An empty chunk marks the end. It does not matter if the receiver is gone.
        let _ = sender.send(read.map(|_| Vec::new()));
        return;
    }
}

/// Reads the bytes that another thread decompresses.
struct Chunks {
    receiver: Receiver<io::Result<Vec<u8>>>,
    spent: SyncSender<Vec<u8>>,
    chunk: Cursor<Vec<u8>>,
}

impl Read for Chunks {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.chunk.position() == self.chunk.get_ref().len() as u64 {
            // The thread ends after an empty chunk or an error, and then the parser reads no further.
            let next = self.receiver.recv().map_err(|_| io::ErrorKind::UnexpectedEof)??;
            let spent = std::mem::replace(&mut self.chunk, Cursor::new(next));
            // If the channel is full or closed, the chunk is freed.
            let _ = self.spent.try_send(spent.into_inner());
        }
        self.chunk.read(into)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_item_is_done_once_in_its_place() {
        let all = |count: usize| on_all_cores(&vec![1; count], |(at, item)| at + item);
        for count in [0, 1, 2, 100] {
            assert_eq!(all(count), (1..=count).collect::<Vec<_>>());
        }
        let own = thread::current().id();
        assert_eq!(on_all_cores(&[()], |_| thread::current().id()), [own]);
    }
}
