//! Runs trainings, one after the other, in the order of a plan.
//!
//! A run is this program in a process of its own, exactly as a user would get it. Its outcome goes to a [`Ledger`].

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use paceline_failure::{Failure, Result};
use paceline_files::Printable;
use paceline_host::bar::{Bar, Progress, Speed, time_left};
use paceline_host::disk::Disk;
use paceline_host::streams;
use paceline_observe::figures::run_summary::RunSummary;
use paceline_observe::views::console::ONLY_PROGRESS;
use paceline_rendezvous::Rendezvous;
use paceline_run::folder::RUNS_VARIABLE;
use paceline_trace::thread_builder;
use rustix::fs::{Mode, mkdir};
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::ledger::{Ending, Ledger, Record};

use crate::cases::{Case, Planned};
use crate::spec::{self, Spec};
use crate::{command_line, quoted};

/// The interval at which a run is checked.
const POLL: Duration = Duration::from_millis(10);
/// How long a run may take to end after it was asked to.
const GRACE: Duration = Duration::from_secs(5);
/// How many of a failed run's last lines the error repeats.
const LAST_LINES: usize = 8;
/// How many bytes of its errors are kept, from their end.
const KEPT: usize = 16 << 10;
/// Attempts to remove a temporary folder.
const REMOVALS: usize = 5;

/// Makes runs in their order, except for those that the ledger has. With a ledger in a folder, run folders move
/// there, and failed runs are recorded. With one in memory, the first failure ends the sweep; run folders go to
/// `keep_in`, or are thrown away.
pub fn make(
    cases: &[Case],
    order: Vec<Planned>,
    limit: Duration,
    keep_in: Option<&Path>,
    ledger: &mut Ledger,
) -> Result<()> {
    let is_left = |(at, (_, case)): &Planned| !ledger.is_settled(*at, *case);
    let left: Vec<Planned> = order.into_iter().filter(is_left).collect();
    let folder = ledger.folder().map(Path::to_owned);
    let way_on = way_on(folder.as_deref(), keep_in);
    let mut runner = Runner::new(&ledger.disk, left.len(), way_on, folder.as_deref())?;
    if cases.iter().any(|case| spec::prints(&case.spec)) {
        runner.bar = None;
    }
    for (position, (round, case)) in left {
        if ledger.is_settled(position, case) {
            // The case has failed in an earlier round.
            continue;
        }
        let Case { name, spec, .. } = &cases[case];
        let started = paceline_host::text::now("%Y-%m-%dT%H:%M:%S%.3f%:z");
        let begin = Instant::now();
        let runs = keep_in.map_or_else(|| runner.scratch.path.join("runs"), Path::to_owned);
        let ending = match runner.train(name, spec, &runs, limit)? {
            Err(message) if folder.is_none() => return Err(Failure::Run(message)),
            Err(message) => Ending::Failure(message),
            Ok(summary) => Ending::Summary(summary),
        };
        let seconds = begin.elapsed().as_secs_f64();
        if let Some(folder) = &folder {
            let kept = folder.join("runs").join(format!("{case:03}-{}.{}", slug(name), round + 1));
            keep(&ledger.disk, &runs, &kept).map_err(|e| Failure::io(kept.printable(), e))?;
        }
        let name = name.clone();
        ledger.add(Record { position, round, case, name, started, seconds, ending })?;
    }
    Ok(())
}

/// The way to go on after an interruption.
fn way_on(folder: Option<&Path>, keep_in: Option<&Path>) -> String {
    let has_output = std::env::args_os()
        .any(|word| word == "--output" || word.to_string_lossy().starts_with("--output="));
    match (folder, keep_in) {
        (Some(folder), _) => {
            let folder = quoted(&folder.to_string_lossy());
            let output = if has_output { String::new() } else { format!(" --output {folder}") };
            format!("Stopped. This goes on where it ended: {}{output}", command_line())
        }
        (None, Some(runs)) => format!("Stopped. The finished runs are in {}", runs.printable()),
        (None, None) => "Stopped. A study with --output DIR goes on with the same command.".into(),
    }
}

/// Moves the run folder inside `runs` to `kept`, in place of a folder that a killed sweep has left.
fn keep(disk: &Disk, runs: &Path, kept: &Path) -> std::io::Result<()> {
    // A run that fails at once makes no run folder.
    let Ok(mut made) = std::fs::read_dir(runs) else { return Ok(()) };
    let Some(made) = made.next() else { return Ok(()) };
    let _ = std::fs::remove_dir_all(kept);
    kept.parent().map_or(Ok(()), |folder| disk.create_folder(folder))?;
    disk.rename(&made?.path(), kept)
}

/// A form of `name` that can be part of a path.
fn slug(name: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "=._-".contains(c);
    let short = name.chars().take(80);
    short.filter(|c| *c != ' ').map(|c| if is_plain(c) { c } else { '_' }).collect()
}

/// Makes runs, and removes what they leave if a signal ends this process.
#[derive(Debug)]
pub struct Runner {
    disk: Disk,
    program: PathBuf,
    /// Where run folders may go that nobody wants later.
    pub scratch: Scratch,
    /// The signal that asked this process to end; 0 before that.
    asked_to_end: Arc<AtomicUsize>,
    num_runs: u64,
    begun: u64,
    runs_per_s: Speed,
    bar: Option<Bar>,
    /// Printed when the user ends it.
    way_on: String,
}

impl Runner {
    /// A runner for at most `num_runs` runs. Scratch files go to `folder`, or among temporary
    /// files, and are removed.
    pub fn new(
        disk: &Disk,
        num_runs: usize,
        way_on: String,
        folder: Option<&Path>,
    ) -> Result<Self> {
        let program = std::env::current_exe()
            .map_err(|e| Failure::io("cannot find the program to start runs with", e))?;
        let asked_to_end = Arc::new(AtomicUsize::new(0));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            signal_hook::flag::register_usize(signal, asked_to_end.clone(), signal as usize)
                .map_err(|e| Failure::io("cannot listen for signals", e))?;
        }
        Ok(Self {
            disk: disk.clone(),
            program,
            scratch: Scratch::new(folder)?,
            asked_to_end,
            num_runs: num_runs as u64,
            begun: 0,
            runs_per_s: Speed::default(),
            bar: Bar::new(streams::stderr()),
            way_on,
        })
    }

    fn show(&mut self, what: &str) {
        self.runs_per_s.mark(Instant::now(), self.begun);
        let left = (self.num_runs - self.begun) as f64;
        self.begun += 1;
        let Some(bar) = &mut self.bar else { return };
        let mut facts = vec![format!("{}/{}", self.begun, self.num_runs)];
        facts.extend(self.runs_per_s.per_s().map(|per_s| time_left(left / per_s)));
        facts.push(what.to_owned());
        bar.show(Progress { name: "Run".to_owned(), done: self.begun, of: self.num_runs, facts });
    }

    /// Starts a run, whose summary goes into `file` and whose run folder into `runs`.
    fn start(&self, spec: &Spec, file: &Path, runs: &Path) -> Result<Child> {
        // `__rank` ties the run's life to this process, so that no run survives it.
        Command::new(&self.program)
            .arg("__rank")
            .arg(std::process::id().to_string())
            .arg("--")
            .arg(&self.program)
            .args(spec::arguments(&self.disk, spec, file)?)
            .env(RUNS_VARIABLE, runs)
            .env(ONLY_PROGRESS, "1")
            .stdin(Stdio::null())
            .stdout(if spec::prints(spec) { Stdio::piped() } else { Stdio::null() })
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|e| Failure::io("cannot start a run", e))
    }

    /// Makes one run, with its run folder in `runs`. The inner error is a failure of the run itself.
    pub fn train(
        &mut self,
        what: &str,
        spec: &Spec,
        runs: &Path,
        limit: Duration,
    ) -> Result<std::result::Result<RunSummary, String>> {
        self.show(what);
        let file = self.scratch.path.join("summary.json");
        let shown = spec::shown(spec);
        let mut child = self.start(spec, &file, runs)?;
        let reader = child.stderr.take().map(|mut pipe| {
            let thread = paceline_trace::thread_builder("errors");
            thread.spawn(move || {
                let (mut bytes, mut buffer) = (Vec::new(), [0; KEPT]);
                // Text that was read before an error is still worth showing.
                while let Ok(read @ 1..) = pipe.read(&mut buffer) {
                    bytes.extend_from_slice(&buffer[..read]);
                    bytes.drain(..bytes.len().saturating_sub(KEPT));
                }
                String::from_utf8_lossy(&bytes).into_owned()
            })
        });
        let lines = child.stdout.take().map(|pipe| {
            let name = what.to_owned();
            thread_builder("lines").spawn(move || pass_on(pipe, &name))
        });
        let readers = reader.transpose().and_then(|reader| Ok((reader, lines.transpose()?)));
        let (reader, lines) = readers.map_err(|e| {
            stop(&mut child);
            Failure::io("cannot start a run: the system refuses a thread that reads its output", e)
        })?;
        let ended = self.watch(&mut child, limit)?;
        // The table comes after the last line.
        lines.map(|lines| lines.join());
        let said = reader.and_then(|reader| reader.join().ok()).unwrap_or_default();
        Ok(match ended {
            Some(status) if status.success() => {
                let summary = RunSummary::read(&file).map_err(|e| format!("{shown}: {e}"));
                // Otherwise the next run's summary could be mistaken for this one.
                let _ = std::fs::remove_file(&file);
                summary
            }
            Some(status) => {
                let lines: Vec<&str> = said.lines().filter(|line| !line.is_empty()).collect();
                let last = lines[lines.len().saturating_sub(LAST_LINES)..].join("\n    ");
                Err(format!("{shown} failed ({status}):\n    {last}"))
            }
            None => Err(format!(
                "{shown} was stopped after {} s; raise --run-limit, or make fewer steps",
                limit.as_secs_f64()
            )),
        })
    }

    /// Waits for a run; `None` if it took too long and was stopped. A signal to this process ends both.
    fn watch(&mut self, child: &mut Child, limit: Duration) -> Result<Option<ExitStatus>> {
        let begin = Instant::now();
        loop {
            let ended = child.try_wait().map_err(|e| Failure::io("cannot wait for a run", e))?;
            let signal = self.asked_to_end.load(Ordering::SeqCst);
            if signal != 0 {
                stop(child);
                drop(self.bar.take());
                self.scratch.remove();
                streams::stderr().line(&self.way_on);
                let _ = signal_hook::low_level::emulate_default_handler(signal as i32);
            }
            if ended.is_some() {
                return Ok(ended);
            }
            if begin.elapsed() > limit {
                stop(child);
                return Ok(None);
            }
            std::thread::sleep(POLL);
        }
    }
}

/// Prints the progress of a run, with its name.
fn pass_on(pipe: impl Read, name: &str) {
    for line in BufReader::new(pipe).split(b'\n').map_while(std::io::Result::ok) {
        streams::stdout().line(&format!("{name}: {}", String::from_utf8_lossy(&line)));
    }
}

/// Asks a run to end, with its ranks. Kills it after [`GRACE`].
fn stop(child: &mut Child) {
    let _ = kill_process(Pid::from_child(child), Signal::TERM);
    let begin = Instant::now();
    while begin.elapsed() < GRACE {
        if !matches!(child.try_wait(), Ok(None)) {
            return;
        }
        std::thread::sleep(POLL);
    }
    let _ = child.kill();
    let _ = child.wait();
}

/// A folder that is removed when this value is dropped.
#[derive(Debug)]
pub struct Scratch {
    /// Where it is.
    pub path: PathBuf,
}

impl Scratch {
    /// A new folder: `unfinished` inside `folder`, in place of one left there; or a temporary one.
    fn new(folder: Option<&Path>) -> Result<Self> {
        let path = match folder {
            Some(folder) => std::path::absolute(folder.join("unfinished"))
                .map_err(|e| Failure::io("no folder for runs", e))?,
            None => std::env::temp_dir().join(format!("paceline-{}", Rendezvous::fresh_secret()?)),
        };
        let scratch = Self { path };
        scratch.remove();
        mkdir(&scratch.path, Mode::RWXU).map_err(|e| {
            Failure::io(format!("cannot make {} for runs", scratch.path.printable()), e)
        })?;
        Ok(scratch)
    }

    /// Removes the folder. A rank of a killed run may still be writing its last file, so this tries a few times.
    fn remove(&self) {
        for _ in 0..REMOVALS {
            match std::fs::remove_dir_all(&self.path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                _ => return,
            }
        }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        self.remove();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scratch_folder_goes_away() {
        let folder = tempfile::tempdir().unwrap();
        for place in [None, Some(folder.path()), Some(folder.path())] {
            let scratch = Scratch::new(place).unwrap();
            let path = scratch.path.clone();
            assert_eq!(std::fs::read_dir(&path).unwrap().count(), 0);
            std::fs::write(path.join("file"), b"x").unwrap();
            drop(scratch);
            assert!(!path.exists());
        }
    }

    #[test]
    fn a_name_becomes_part_of_a_path() {
        assert_eq!(slug("data-dir=/a b, lr=0.1"), "data-dir=_ab_lr=0.1");
    }
}
