//! The notes that each process of a recorded program has left, and what they come to, in words.
//!
//! A note is a line of JSON; later ones replace what earlier ones said. This file does not know how steps are counted.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use paceline_files::{Printable, read_text};
use paceline_host::text::{plural, say, warn};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::args::RecordArgs;

/// The most bytes of the notes of one process.
const MAX_BYTES: u64 = 1 << 20;

const NO_STEP: &str = "the program made no optimizer step, or made them in processes without the recorder, which start without \
                       PYTHONPATH or as python -S, -E or -I";

/// The notes of one process that has imported PyTorch.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Process {
    /// PyTorch's version.
    torch: String,
    /// The most optimizer steps that one optimizer made before a recording.
    pub(super) steps: u64,
    /// Whether the process came to its end; otherwise it may have made more steps.
    ended: bool,
    /// The file of the trace.
    trace: Option<String>,
    /// Whether it is recording.
    recording: bool,
    rank: usize,
    /// The steps in the trace, or with `--seconds` its seconds.
    recorded: f64,
    /// The last thing that went wrong, in words.
    problem: String,
    /// Its figures by name, if its steps were timed.
    pub(super) timed: BTreeMap<String, f64>,
}

/// The notes of all processes.
pub(super) struct Notes {
    /// Whether a Python has run the hook.
    has_python: bool,
    /// Whether all notes could be read.
    pub(super) is_whole: bool,
    pub(super) processes: Vec<Process>,
}

impl Notes {
    /// Reads the notes that can be read, and warns about others.
    pub(super) fn read(folder: &Path) -> Self {
        let mut notes = Self {
            has_python: folder.join("python").exists(),
            is_whole: true,
            processes: Vec::new(),
        };
        let mut cannot = |path: &Path, error: &std::io::Error| {
            warn(&format!("cannot read the notes in {}: {error}", path.printable()));
            notes.is_whole = false;
        };
        let entries: std::io::Result<Vec<_>> = fs::read_dir(folder).and_then(Iterator::collect);
        let entries = entries.inspect_err(|error| cannot(folder, error)).unwrap_or_default();
        for path in entries.into_iter().map(|entry| entry.path()) {
            if path.extension().is_some_and(|end| end == "note") {
                match read_text(&path, MAX_BYTES) {
                    Ok(text) => notes.processes.push(process(&text)),
                    Err(error) => cannot(&path, &error),
                }
            }
        }
        notes.processes.sort_by_key(|process| process.rank);
        notes
    }

    /// Says what was recorded, or why nothing was. Returns whether there are traces.
    pub(super) fn say(&self, args: &RecordArgs, output: &Path) -> bool {
        let mut recorded: Vec<&Process> =
            self.processes.iter().filter(|process| process.trace.is_some()).collect();
        let num_processes = recorded.len();
        // A rank that was started again records again, and its last trace is analyzed.
        recorded.sort_by_key(|of| (of.rank, Reverse(of.written_at())));
        recorded.dedup_by_key(|of| of.rank);
        let Some(first) = recorded.first() else {
            if self.is_whole {
                warn(&format!("nothing was recorded: {}", self.why_nothing(args)));
            }
            return false;
        };
        let fewest = recorded.iter().map(|process| process.recorded).fold(f64::INFINITY, f64::min);
        let of_each = match args.seconds {
            Some(_) => format!("{fewest:.2} s"),
            None => plural(fewest as usize, "step"),
        };
        // The program may have left its last line open.
        say("");
        let ranks = plural(recorded.len(), "rank");
        say(&format!(
            "Recorded {of_each} of {ranks} with PyTorch {}: {}",
            first.torch,
            output.join("").printable()
        ));
        if num_processes > recorded.len() {
            warn(&format!(
                "{num_processes} processes have recorded as {ranks}, the last of which is analyzed of each; if they are \
                 not one rank that was started again, set RANK to tell them apart"
            ));
        }
        let is_short = |of: &&&Process| args.seconds.is_none() && of.recorded < args.steps as f64;
        if let Some(short) = recorded.iter().find(is_short) {
            let (rank, steps) = (short.rank, plural(short.recorded as usize, "step"));
            warn(&format!("rank {rank} has recorded {steps} of {}", args.steps));
        }
        for process in &self.processes {
            if let Some(problem) = process.problem_in_words() {
                warn(&format!("rank {}: {problem}", process.rank));
            }
        }
        true
    }

    /// Why the hook could not work in any process; `None` if it could.
    pub(super) fn why_no_hook(&self) -> Option<&str> {
        if !self.has_python {
            return Some(
                "no Python has started with the recorder. python -S, -E and -I switch it off, and sudo, ssh and containers may",
            );
        }
        if self.processes.is_empty() {
            return Some("the program has not imported PyTorch");
        }
        self.processes.iter().find_map(Process::problem_in_words)
    }

    /// Why nothing was timed.
    pub(super) fn why_untimed(&self) -> &str {
        let has_steps = self.processes.iter().any(|process| process.steps > 0);
        let few = if has_steps { "the program made fewer than 8 optimizer steps" } else { NO_STEP };
        self.why_no_hook().unwrap_or(few)
    }

    fn why_nothing(&self, args: &RecordArgs) -> String {
        if let Some(why) = self.why_no_hook() {
            let advice = ". The program can start it itself: paceline record --print-hook > paceline_record.py, and in the \
                          program: import paceline_record; paceline_record.start()";
            return format!("{why}{}", if self.has_python { "" } else { advice });
        }
        if args.seconds.is_some() {
            return format!(
                "the program ended within {} s after it imported PyTorch, its main thread ran no line of Python, or no \
                 operator ran in the time of the recording; pass another --after or --seconds",
                args.after
            );
        }
        let most = self.processes.iter().max_by_key(|process| process.steps);
        let (steps, has_ended) = most.map_or((0, true), |process| (process.steps, process.ended));
        let count = format!(
            "{}{}",
            if has_ended { "" } else { "at least " },
            plural(steps as usize, "optimizer step")
        );
        match steps.saturating_sub(args.steps + 1) {
            _ if steps == 0 => {
                format!("{NO_STEP}; --seconds 2 records programs without an optimizer")
            }
            0 => format!("the program made {count}; a recording of {} needs more", args.steps),
            after => format!(
                "the program made {count}, and --after {} waits for more; pass --after {after}",
                args.after
            ),
        }
    }
}

impl Process {
    /// When the trace was written, in nanoseconds, which its name ends with.
    fn written_at(&self) -> Option<u64> {
        self.trace.as_ref()?.strip_suffix(".pt.trace.json")?.rsplit('.').next()?.parse().ok()
    }

    fn problem_in_words(&self) -> Option<&str> {
        match self.problem.as_str() {
            "" if self.recording => Some(
                "it was killed while it recorded, or left by os._exit(); pass a smaller --after or --steps",
            ),
            "" => None,
            problem => Some(problem),
        }
    }
}

fn process(text: &str) -> Process {
    let mut facts = Map::new();
    // The last line of a process that was killed may be cut off.
    for line in text.lines() {
        if let Ok(Value::Object(line)) = serde_json::from_str(line) {
            facts.extend(line);
        }
    }
    serde_json::from_value(Value::Object(facts)).unwrap_or_default()
}
