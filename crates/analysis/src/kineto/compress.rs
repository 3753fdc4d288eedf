//! Compresses on a separate thread, while the next events are written as JSON.
//!
//! Input: where the compressed bytes go, and a function that writes text. This file does not know what the text is.

use std::io::{self, BufWriter, Write};
use std::sync::mpsc::{SyncSender, sync_channel};

use flate2::Compression;
use flate2::write::GzEncoder;
use paceline_trace::thread_builder;

/// The size in bytes of the chunks that go to the thread.
const CHUNK_BYTES: usize = 1 << 18;

/// The largest number of chunks that wait for the thread.
const DEPTH: usize = 4;

/// Calls `write`, and passes its text to `out` in compressed form. Everything is written when this returns.
/// If `out` fails, its error is the outcome, because `write` fails only as a consequence.
pub(crate) fn compressed<T, E: From<io::Error>>(
    out: &mut (dyn Write + Send),
    write: impl FnOnce(&mut dyn Write) -> Result<T, E>,
) -> Result<T, E> {
    let (full, filled) = sync_channel::<Vec<u8>>(DEPTH);
    let work = move || -> io::Result<()> {
        // Traces are repetitive: even the fastest level makes them a tenth as long.
        let mut encoder = GzEncoder::new(BufWriter::new(out), Compression::fast());
        for chunk in filled {
            encoder.write_all(&chunk)?;
        }
        encoder.finish()?.flush()
    };
    std::thread::scope(|scope| {
        let thread = thread_builder("compress").spawn_scoped(scope, work)?;
        let mut chunks = BufWriter::with_capacity(CHUNK_BYTES, Chunks(full));
        let written = write(&mut chunks).and_then(|written| {
            chunks.flush()?;
            Ok(written)
        });
        // The thread ends when no more chunks can come.
        drop(chunks);
        let panicked = |_| Err(io::Error::other("the thread that compresses has panicked"));
        thread.join().unwrap_or_else(panicked)?;
        written
    })
}

/// Hands each chunk to the thread.
struct Chunks(SyncSender<Vec<u8>>);

impl Write for Chunks {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // The thread ends early only with an error of its own, which replaces this one.
        self.0.send(bytes.to_vec()).map_err(|_| io::ErrorKind::BrokenPipe)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
