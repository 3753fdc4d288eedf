//! `paceline record --watch-hang`: says which rank the others wait for, while the program still runs.
//!
//! The hook of each rank writes into a folder how far its calls have come ([`Word`]), and the file of PyTorch's flight recorder once nothing has
//! changed for the time limit. A job hangs if all of this holds:
//!
//! - No rank has made or ended a call for the time limit, and a rank waits in one.
//! - Each rank that the files name as the cause has stood still for as long. Its main thread was at the same line in each look; if it waits in no
//!   call, it also ran less than once a second, and its process and their children used less than a fiftieth of a core.
//!
//! So a rank that computes, reads or evaluates while others wait for it is slow, and nothing is said. This file does not know the rules by which
//! a cause is found.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use paceline_analysis::hang;
use paceline_failure::{Failure, Result};
use paceline_files::{Printable, printable, read_text};
use paceline_host::text::{plural, say, warn};
use serde::Deserialize;

use crate::commands::hang::show;

/// How often the words of the ranks are read.
const EVERY: Duration = Duration::from_secs(1);
/// The most bytes of such a file.
const MAX_BYTES: u64 = 1 << 16;

/// The last look of a rank at itself.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Word {
    rank: usize,
    pid: u32,
    host: String,
    /// Nothing has changed in its calls for the time limit.
    is_quiet: bool,
    /// A call is unfinished.
    waits: bool,
    /// The program has stood still for the time limit.
    is_still: bool,
    /// The line of the program at which its main thread is.
    line: Option<String>,
    /// Why it cannot be watched.
    problem: Option<String>,
}

/// The last that was heard of a rank.
struct LastWord {
    text: String,
    word: Word,
    /// When the text last changed, and the processor time of the process then.
    at: Instant,
    ticks: Option<u64>,
}

impl LastWord {
    /// Whether the process has not computed since: it has ended, or used less than a fiftieth of a core. That of another host may have.
    fn is_idle(&self) -> bool {
        let is_here = *self.word.host == *rustix::system::uname().nodename().to_string_lossy();
        let most = 2 * self.at.elapsed().as_secs();
        let used = ticks(self.word.pid).zip(self.ticks).map(|(now, then)| now.saturating_sub(then));
        is_here && used.is_none_or(|used| used <= most)
    }
}

/// Starts a thread that watches the ranks that write into a folder, until the sender goes. It returns whether a rank was heard of.
pub(super) fn start(folder: &Path, limit_s: f64) -> Result<(Sender<()>, JoinHandle<bool>)> {
    let (stop, stopped) = channel();
    let limit = Duration::from_secs_f64(limit_s);
    let folder = folder.to_owned();
    let watcher =
        Watcher { folder, limit, ranks: BTreeMap::new(), has_heard: false, is_said: false };
    let thread = paceline_trace::thread_builder("watch").spawn(move || watcher.until(&stopped));
    Ok((stop, thread.map_err(|error| Failure::io("cannot start a thread", error))?))
}

struct Watcher {
    folder: PathBuf,
    limit: Duration,
    ranks: BTreeMap<usize, LastWord>,
    /// Whether a rank was ever heard of.
    has_heard: bool,
    /// Whether this hang has been reported.
    is_said: bool,
}

impl Watcher {
    fn until(mut self, stopped: &Receiver<()>) -> bool {
        while stopped.recv_timeout(EVERY) == Err(RecvTimeoutError::Timeout) {
            self.listen();
            self.judge();
        }
        // Those that were killed have left their words.
        for rank in self.ranks.keys() {
            let _ = fs::remove_file(self.folder.join(format!("rank_{rank}.watch")));
        }
        self.has_heard
    }

    /// Reads what the ranks say.
    fn listen(&mut self) {
        let entries = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        for path in entries.map(|entry| entry.path()) {
            if path.extension().is_none_or(|end| end != "watch") {
                continue;
            }
            let Ok(text) = read_text(&path, MAX_BYTES) else { continue };
            let Ok(word) = serde_json::from_str::<Word>(&text) else { continue };
            let before = self.ranks.get(&word.rank);
            if before.is_some_and(|of| of.text == text) {
                continue;
            }
            if let (None, Some(problem)) = (before, &word.problem) {
                warn(&format!("rank {} cannot be watched: {}", word.rank, printable(problem)));
            }
            self.has_heard = true;
            let (at, ticks) = (Instant::now(), ticks(word.pid));
            self.ranks.insert(word.rank, LastWord { text, word, at, ticks });
        }
        // A rank that has left its job has removed its file.
        self.ranks.retain(|rank, _| self.folder.join(format!("rank_{rank}.watch")).exists());
    }

    /// Whether the job hangs, and who is the cause.
    fn judge(&mut self) {
        let is_silent = |of: &LastWord| of.at.elapsed() > self.limit;
        if !self.ranks.values().all(|of| of.word.is_quiet || is_silent(of)) {
            self.is_said = false;
            return;
        }
        if self.is_said || !self.ranks.values().any(|of| of.word.waits) {
            return;
        }
        let Ok(found) = hang::read(&self.folder) else { return };
        let is_stuck = |of: &LastWord| if is_silent(of) { of.is_idle() } else { of.word.is_still };
        let causes = found.culprits.iter().map(|of| self.ranks.get(&of.rank));
        let causes: Vec<Option<&LastWord>> = causes.collect();
        // A rank that has just become quiet may still write its file.
        let has_all = self.ranks.values().filter(|of| !is_silent(of)).count() <= found.files;
        if !has_all || causes.is_empty() || !causes.iter().all(|of| of.is_some_and(is_stuck)) {
            return;
        }
        let place = |of: &&LastWord| {
            if is_silent(of) {
                return Some(format!(
                    "It has not been heard of for {:.0} s: it has ended, is stopped, or is in a call that holds Python's lock",
                    of.at.elapsed().as_secs_f64()
                ));
            }
            of.word.line.as_ref().map(|line| format!("Its program is at {line}"))
        };
        let places = causes.iter().flatten();
        let places = places.filter_map(|of| Some((of.word.rank, place(of)?))).collect();
        say(&format!(
            "\nThe job hangs: for {:.0} s, none of {} has made or ended a call, and some wait in one",
            self.limit.as_secs_f64(),
            plural(self.ranks.len(), "rank")
        ));
        show(&found, &places);
        say(&format!(
            "The program still runs. paceline hang {} reads these files again",
            self.folder.printable()
        ));
        self.is_said = true;
    }
}

/// The processor time of a process, in ticks; `None` if it has ended.
fn ticks(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let fields = stat.rsplit(')').next()?.split_whitespace().skip(11).take(2);
    fields.map(|of| of.parse::<u64>().ok()).sum()
}
