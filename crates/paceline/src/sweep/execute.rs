//! Training runs that other commands start, one after the other, and what each of them came to.
//!
//! A run is this program itself with the flags of `paceline train`, in a process of its own, so that
//! it is exactly what a user would get. It knows neither why the runs are made nor what follows from
//! them.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use paceline_rendezvous::Rendezvous;
use rustix::fs::{Mode, mkdir};
use rustix::process::{Pid, Signal, kill_process};
use serde::Deserialize;
use serde_json::Value;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::cli::Given;
use crate::config::{self, TrainConfig};
use crate::metrics::anatomy::Anatomy;
use crate::run::folder::RUNS_VARIABLE;
use crate::{Failure, Result};

/// How often a run is looked after.
const POLL: Duration = Duration::from_millis(10);
/// How long a run that was asked to end may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// How many of a run's last lines a message has.
const LAST_LINES: usize = 8;

/// What a run's summary says, as far as it is needed here.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct RunSummary {
    /// The strategy.
    pub strategy: String,
    /// Number of ranks.
    pub world_size: usize,
    /// Threads per rank.
    pub threads: usize,
    /// How the ranks reached each other.
    pub transport: String,
    /// The link that was emulated.
    pub link: Option<String>,
    /// Number of parameters.
    pub params: u64,
    /// Steps that were measured.
    pub steps: usize,
    /// Median of the slowest rank's step.
    pub step_ms_median: Option<f64>,
    /// Samples per second, with the wait for data.
    pub samples_per_s: Option<f64>,
    /// Samples per second if data were always there.
    pub samples_per_s_without_data: Option<f64>,
    /// Training loss of the last epoch.
    #[serde(alias = "train_loss")]
    pub loss: Option<f64>,
    /// Time that the main thread computed.
    pub compute_ms: Option<f64>,
    /// Time that the main thread was blocked on communication.
    pub comm_exposed_ms: Option<f64>,
    /// Communication, but for the sums of the loss, while the main thread computed.
    pub comm_hidden_ms: Option<f64>,
    /// Communication that waited for the slowest rank.
    pub comm_wait_ms: Option<f64>,
    /// The part of the communication that ran while the main thread computed, in percent.
    #[serde(default)]
    pub overlap_pct: Option<f64>,
    /// Operations of a step.
    #[serde(default)]
    pub comm_ops_per_step: Option<f64>,
    /// MB of a step, per rank.
    #[serde(default)]
    pub comm_mb_per_step: Option<f64>,
    /// The most bytes alive at once, by category.
    pub peak_bytes: BTreeMap<String, u64>,
    /// Digest of the final parameters.
    pub weights_sha256: String,
    /// Where the time of a step went.
    pub anatomy: Anatomy,
    /// Wall-clock time of the run, from its start to its end.
    #[serde(skip)]
    pub took: Duration,
    /// All of the summary.
    #[serde(skip)]
    pub whole: Value,
}

/// Resolves the flags of a run and checks them all, before anything starts.
pub fn resolve(flags: &Given) -> Result<TrainConfig> {
    let (config, _data) = config::resolve_inputs(&*flags.train_args()?, None)?;
    Ok(config)
}

/// Starts runs.
#[derive(Debug)]
pub struct Runs {
    program: PathBuf,
    scratch: Scratch,
    /// Where run folders are made, if they are to stay.
    keep_in: Option<PathBuf>,
    limit: Duration,
    /// The signal by which somebody asked us to end; 0 before that.
    asked_to_end: Arc<AtomicUsize>,
    progress: ProgressBar,
}

impl Runs {
    /// Starts `num_runs` runs at most, each of which may take `limit`. Their run folders are made in
    /// `keep_in`, or thrown away.
    pub fn new(num_runs: usize, limit: Duration, keep_in: Option<PathBuf>) -> Result<Self> {
        let program = std::env::current_exe()
            .map_err(|e| Failure::io("cannot find the program to start runs with", e))?;
        let asked_to_end = Arc::new(AtomicUsize::new(0));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            signal_hook::flag::register_usize(signal, asked_to_end.clone(), signal as usize)
                .map_err(|e| Failure::io("cannot listen for signals", e))?;
        }
        let style = ProgressStyle::with_template("[{bar:30}] run {pos} of {len}, {elapsed}: {msg}");
        // Draws nothing where standard error is no terminal.
        let progress =
            ProgressBar::with_draw_target(Some(num_runs as u64), ProgressDrawTarget::stderr())
                .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        Ok(Self { program, scratch: Scratch::new()?, keep_in, limit, asked_to_end, progress })
    }

    /// Makes a run, of which `what` says in words what it is.
    pub fn train(&self, what: &str, flags: &Given) -> Result<RunSummary> {
        self.progress.inc(1);
        self.progress.set_message(what.to_owned());
        let file = self.scratch.path.join("summary.json");
        let mut words = vec![OsString::from("train")];
        words.extend(flags.with("json", file.display()).words());
        words.push("--quiet".into());
        let shown = || {
            let words: Vec<_> = flags.words().iter().map(|w| w.display().to_string()).collect();
            format!("paceline train {}", words.join(" "))
        };
        let begin = Instant::now();
        // Through the program that ties a rank's life to its launcher's, so that no run survives us.
        let mut child = Command::new(&self.program)
            .arg("__rank")
            .arg(std::process::id().to_string())
            .arg("--")
            .arg(&self.program)
            .args(&words)
            .env(RUNS_VARIABLE, self.keep_in.as_ref().unwrap_or(&self.scratch.path.join("runs")))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|e| Failure::io("cannot start a run", e))?;
        let said = child.stderr.take().map(|mut pipe| {
            std::thread::spawn(move || {
                let mut bytes = Vec::new();
                // What was read before an error is still worth showing.
                let _ = pipe.read_to_end(&mut bytes);
                String::from_utf8_lossy(&bytes).into_owned()
            })
        });
        let ended = self.watch(&mut child)?;
        let took = begin.elapsed();
        let said = said.and_then(|reader| reader.join().ok()).unwrap_or_default();
        match ended {
            Some(status) if status.success() => {
                let text = std::fs::read_to_string(&file)
                    .map_err(|e| Failure::io(format!("{}: no summary", shown()), e))?;
                // Not to be mistaken for the next run's.
                let _ = std::fs::remove_file(&file);
                let unreadable = |e| Failure::io(format!("{}: the summary", shown()), e);
                let whole: Value = serde_json::from_str(&text).map_err(unreadable)?;
                let summary = RunSummary::deserialize(&whole).map_err(unreadable)?;
                Ok(RunSummary { took, whole, ..summary })
            }
            Some(status) => {
                let lines: Vec<&str> = said.lines().filter(|line| !line.is_empty()).collect();
                let last = lines[lines.len().saturating_sub(LAST_LINES)..].join("\n    ");
                Err(Failure::Run(format!("{} failed ({status}):\n    {last}", shown())))
            }
            None => Err(Failure::Run(format!(
                "{} was stopped after {} s; raise --run-limit, or make fewer steps",
                shown(),
                self.limit.as_secs_f64()
            ))),
        }
    }

    /// Waits for a run; `None` if it took too long and was stopped. Ends this process where somebody
    /// asks for that.
    fn watch(&self, child: &mut Child) -> Result<Option<ExitStatus>> {
        let begin = Instant::now();
        loop {
            let ended = child.try_wait().map_err(|e| Failure::io("cannot wait for a run", e))?;
            let signal = self.asked_to_end.load(Ordering::SeqCst);
            if signal != 0 {
                stop(child);
                self.progress.finish_and_clear();
                self.scratch.remove();
                let _ = signal_hook::low_level::emulate_default_handler(signal as i32);
            }
            if ended.is_some() {
                return Ok(ended);
            }
            if begin.elapsed() > self.limit {
                stop(child);
                return Ok(None);
            }
            std::thread::sleep(POLL);
        }
    }

    /// All runs are made.
    pub fn finish(self) {
        self.progress.finish_and_clear();
    }
}

/// Asks a run to end, so that it ends its ranks; then makes it.
fn stop(child: &mut Child) {
    let _ = kill_process(Pid::from_child(child), Signal::TERM);
    let begin = Instant::now();
    while begin.elapsed() < PATIENCE {
        if !matches!(child.try_wait(), Ok(None)) {
            return;
        }
        std::thread::sleep(POLL);
    }
    let _ = child.kill();
    let _ = child.wait();
}

/// A folder among the system's temporary ones that goes away with this value.
#[derive(Debug)]
struct Scratch {
    path: PathBuf,
}

impl Scratch {
    fn new() -> Result<Self> {
        let path: PathBuf =
            std::env::temp_dir().join(format!("paceline-{}", Rendezvous::fresh_secret()?));
        mkdir(&path, Mode::RWXU)
            .map_err(|e| Failure::io(format!("cannot make {} for runs", path.display()), e))?;
        Ok(Self { path })
    }

    fn remove(&self) {
        // Left behind, it would be a folder among temporary files.
        let _ = std::fs::remove_dir_all(Path::new(&self.path));
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        self.remove();
    }
}

/// The median of what several rounds found; `None` where a round found nothing.
pub fn median(values: impl IntoIterator<Item = Option<f64>>) -> Option<f64> {
    let mut values = values.into_iter().collect::<Option<Vec<f64>>>()?;
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => None,
        len if len % 2 == 1 => Some(values[middle]),
        _ => Some((values[middle - 1] + values[middle]) / 2.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(median([Some(3.0), Some(1.0), Some(2.0)]), Some(2.0));
        assert_eq!(median([Some(1.0), Some(4.0)]), Some(2.5));
        assert_eq!(median([Some(1.0), None]), None);
        assert_eq!(median([]), None);
    }

    #[test]
    fn the_scratch_folder_goes_away() {
        let scratch = Scratch::new().unwrap();
        let path = scratch.path.clone();
        std::fs::write(path.join("file"), b"x").unwrap();
        drop(scratch);
        assert!(!path.exists());
    }
}
