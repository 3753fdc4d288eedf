//! Compresses on a separate thread, while the next events are written as JSON.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use flate2::Compression;
use flate2::write::GzEncoder;

/// The size in bytes of the chunks that go to the thread.
const CHUNK_BYTES: usize = 1 << 18;

/// The largest number of chunks that wait for the thread.
const DEPTH: usize = 4;

/// Compresses what is written to it, into a file.
pub(crate) struct Compressor {
    chunk: Vec<u8>,
    /// `None` once there is no more to come.
    full: Option<SyncSender<Vec<u8>>>,
    /// Chunks that can be reused.
    empty: Receiver<Vec<u8>>,
    thread: Option<JoinHandle<io::Result<()>>>,
}

impl Compressor {
    pub(crate) fn start(file: File) -> io::Result<Self> {
        let (full, filled) = sync_channel::<Vec<u8>>(DEPTH);
        let (emptied, empty) = sync_channel(DEPTH + 1);
        let work = move || {
            // Traces are repetitive: even the fastest level makes them a tenth as long.
            let mut encoder = GzEncoder::new(BufWriter::new(file), Compression::fast());
            for mut chunk in filled {
                encoder.write_all(&chunk)?;
                chunk.clear();
                // The receiver is gone if the writer has ended with an error.
                let _ = emptied.try_send(chunk);
            }
            encoder.finish()?.flush()
        };
        let thread = std::thread::Builder::new().name("compress".into()).spawn(work)?;
        let chunk = Vec::with_capacity(CHUNK_BYTES);
        Ok(Self { chunk, full: Some(full), empty, thread: Some(thread) })
    }

    /// Waits until everything is written.
    pub(crate) fn finish(mut self) -> io::Result<()> {
        self.hand_over()?;
        self.join()
    }

    fn hand_over(&mut self) -> io::Result<()> {
        let fresh = self.empty.try_recv().unwrap_or_else(|_| Vec::with_capacity(CHUNK_BYTES));
        let chunk = std::mem::replace(&mut self.chunk, fresh);
        let is_taken = self.full.as_ref().is_some_and(|full| full.send(chunk).is_ok());
        // The thread ends early only with an error, so that error is reported.
        if is_taken { Ok(()) } else { self.join() }
    }

    fn join(&mut self) -> io::Result<()> {
        self.full = None;
        let gone = || io::Error::other("the thread that compresses is gone");
        self.thread.take().ok_or_else(gone)?.join().map_err(|_| gone())?
    }
}

impl Write for Compressor {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.chunk.extend_from_slice(bytes);
        if self.chunk.len() >= CHUNK_BYTES {
            self.hand_over()?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.hand_over()
    }
}

impl Drop for Compressor {
    fn drop(&mut self) {
        self.full = None;
        if let Some(thread) = self.thread.take() {
            // If the compressor is dropped before it is finished, its owner already has an error to report.
            let _ = thread.join();
        }
    }
}
