//! Passes the ranks' output on, line by line, and remembers the last lines of each.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// How many of the last lines of each stream the launcher repeats when a rank fails.
const KEPT: usize = 10;

type Lines = Arc<Mutex<VecDeque<String>>>;

/// The last lines of one rank. The two streams are kept apart, because they arrive in no particular
/// order, and because much standard output must not displace the reason for a failure.
#[derive(Clone, Debug, Default)]
pub(super) struct LastLines {
    stdout: Lines,
    stderr: Lines,
    /// Number of relay threads that are writing a line at this moment.
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
    /// Starts a thread that passes on the lines of `from`.
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
                // Errors of writing are ignored, because a closed terminal must not stop the rank.
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
        // Each running relay thread holds a second reference, and drops it at the end of its input.
        [&self.stdout, &self.stderr].iter().all(|lines| Arc::strong_count(lines) == 1)
    }

    /// Whether a line is being passed on, to a reader that may be slow.
    pub(super) fn is_writing(&self) -> bool {
        self.writing.load(Ordering::SeqCst) > 0
    }

    /// The last lines, first those of standard output, then those of standard error. Waits at most 100 ms
    /// for lines that were written but have not been passed on yet.
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
