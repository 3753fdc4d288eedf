//! Passes the ranks' output on, line by line, and remembers the last lines of each.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// How many lines of each stream of a failed rank the launcher repeats.
const KEPT: usize = 10;

type Lines = Arc<Mutex<VecDeque<String>>>;

/// The last lines of one rank, separately for each stream: the streams arrive in no particular order, and
/// a lot of standard output must not displace the reason for a failure.
#[derive(Clone, Debug, Default)]
pub(super) struct LastLines {
    stdout: Lines,
    stderr: Lines,
    /// Relays that are writing a line at this moment.
    writing: Arc<AtomicUsize>,
}

/// Where lines go.
#[derive(Clone, Copy, Debug)]
pub(super) enum To {
    /// Standard output, unchanged.
    Stdout,
    /// Standard error, with the rank in front of each line.
    Stderr { rank: usize },
}

impl LastLines {
    /// Starts to pass on what is read from `from`.
    pub(super) fn relay(&self, from: impl Read + Send + 'static, to: To) {
        let keeper = match to {
            To::Stdout => self.stdout.clone(),
            To::Stderr { .. } => self.stderr.clone(),
        };
        let writing = self.writing.clone();
        std::thread::spawn(move || {
            let mut from = BufReader::new(from);
            let mut line = Vec::new();
            while from.read_until(b'\n', &mut line).is_ok_and(|read| read > 0) {
                let text = String::from_utf8_lossy(&line).trim_end_matches('\n').to_owned();
                writing.fetch_add(1, Ordering::SeqCst);
                // A closed terminal must not stop the rank, so errors of writing are ignored.
                match to {
                    To::Stdout => drop(writeln!(std::io::stdout().lock(), "{text}")),
                    To::Stderr { rank } => {
                        drop(writeln!(std::io::stderr().lock(), "[rank {rank}] {text}"));
                    }
                }
                writing.fetch_sub(1, Ordering::SeqCst);
                let mut kept = keeper.lock().unwrap_or_else(PoisonError::into_inner);
                if kept.len() == KEPT {
                    kept.pop_front();
                }
                kept.push_back(text);
                line.clear();
            }
        });
    }

    /// Whether everything that the rank wrote has been passed on.
    pub(super) fn is_drained(&self) -> bool {
        // Each running relay holds a second reference, and drops it at the end of its input.
        [&self.stdout, &self.stderr].iter().all(|lines| Arc::strong_count(lines) == 1)
    }

    /// Whether a line is being passed on, to a reader that may be slow.
    pub(super) fn is_writing(&self) -> bool {
        self.writing.load(Ordering::SeqCst) > 0
    }

    /// The last lines, those of standard error at the end. Waits a moment for lines that are written but
    /// not passed on yet.
    pub(super) fn get(&self) -> Vec<String> {
        for _ in 0..20 {
            if self.is_drained() {
                break;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let get = |lines: &Lines| lines.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let (stdout, stderr) = (get(&self.stdout), get(&self.stderr));
        stdout.into_iter().chain(stderr).collect()
    }
}
