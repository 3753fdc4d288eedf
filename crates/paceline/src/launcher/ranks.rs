//! Starting the ranks, watching them, and ending them together.

use std::io::{self, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use paceline_collectives::DUMP_FOLDER;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

use super::dumps::Dumps;
use super::guard::Guard;
use super::relay::{LastLines, To};
use super::{Launch, own_program, rank_variables, rendezvous_point};
use crate::failure::EXIT_CONSEQUENCE;
use crate::{Failure, Result};

/// After the first failure, how long the other ranks may take to notice it and to end by themselves.
const GRACE: Duration = Duration::from_millis(200);
/// How long ranks may take to end after SIGTERM.
const POLITE_WAIT: Duration = Duration::from_millis(300);
/// How long the kernel may take to end ranks after SIGKILL.
const KILL_WAIT: Duration = Duration::from_millis(200);
/// After a success, how long the output of ended ranks may stay open without a new line.
const IDLE_WAIT: Duration = Duration::from_secs(1);
/// The same limit after a failure. It is shorter, because the launcher still has to report the failure.
const LAST_OUTPUT_WAIT: Duration = Duration::from_millis(100);

/// The channel of the launch in progress, to which signals are forwarded.
static LISTENER: Mutex<Option<Sender<Event>>> = Mutex::new(None);
/// The last signal that came during a launch; 0 before the first one.
static LAST_SIGNAL: AtomicI32 = AtomicI32::new(0);

/// How a launch ended.
#[derive(Clone, Copy, Debug)]
pub struct Ended {
    /// The code to exit with.
    pub code: u8,
    /// The signal that asked this process to end, if one came, however the ranks ended.
    pub signal: Option<i32>,
}

#[derive(Debug)]
enum Event {
    Ended { rank: usize, status: ExitStatus, at: Instant },
    Signal(i32),
}

#[derive(Debug)]
struct Rank {
    group: Pid,
    last_lines: LastLines,
    ended: Option<(ExitStatus, Instant)>,
}

/// Starts the ranks and waits for them. Returns 0 if all succeed. If a rank fails, stops the others,
/// reports the failure on standard error, and returns the code to exit with.
pub fn launch(launch: &Launch) -> Result<u8> {
    Ok(launch_one_of_many(launch)?.code)
}

/// Like [`launch`], for a command that starts several launches. The result tells apart ranks that failed,
/// after which the command may continue, from a signal, after which it has to end.
pub fn launch_one_of_many(launch: &Launch) -> Result<Ended> {
    let own_program = own_program()?;
    let (port, secret) = rendezvous_point()?;
    let (sender, events) = channel();
    forward_signals(sender.clone())?;
    let mut guard = Guard::start(&own_program)?;
    let dumps = Dumps::new(launch.dump_folder.as_deref())?;
    if let Some(folder) = dumps.temporary() {
        guard.watch_folder(folder)?;
    }
    let begin = Instant::now();
    let mut ranks = Vec::new();
    for rank in 0..launch.num_ranks {
        let variables = rank_variables(rank, launch.num_ranks, port, &secret);
        let started = start(&own_program, launch, rank, &variables, dumps.folder(), &sender)
            .map_err(|e| Failure::io(format!("cannot start rank {rank}"), e))
            .and_then(|started| {
                let group = started.group.as_raw_nonzero().get().unsigned_abs();
                ranks.push(started);
                guard.watch(group)
            });
        if let Err(failure) = started {
            stop(&mut ranks, &events, Instant::now());
            dumps.discard();
            guard.dismiss();
            return Err(failure);
        }
    }
    let code = watch(&mut ranks, &events, begin, &dumps);
    if code == 0 {
        dumps.discard();
    } else {
        dumps.keep_if_any();
    }
    guard.dismiss();
    let signal = Some(LAST_SIGNAL.load(Ordering::SeqCst)).filter(|&signal| signal != 0);
    Ok(Ended { code, signal })
}

fn start(
    own_program: &Path,
    launch: &Launch,
    rank: usize,
    variables: &[(&str, String)],
    dump_folder: &Path,
    events: &Sender<Event>,
) -> io::Result<Rank> {
    let owns_stdout = launch.rank_0_owns_stdout && rank == 0;
    let mut command = Command::new(own_program);
    // If torchrun has started this process, the new ranks must not use torchrun's store.
    for name in ["TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "GROUP_RANK"] {
        command.env_remove(name);
    }
    let mut child = command
        .arg("__rank")
        .arg(std::process::id().to_string())
        .arg("--")
        .args(&launch.command)
        .envs(variables.iter().map(|(name, value)| (name, value)))
        .env(DUMP_FOLDER, dump_folder)
        .envs(launch.variables.iter().map(|(name, value)| (name, value)))
        .stdin(Stdio::null())
        .stdout(if owns_stdout { Stdio::inherit() } else { Stdio::piped() })
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()?;
    let last_lines = LastLines::default();
    if let Some(stdout) = child.stdout.take() {
        last_lines.relay(stdout, To::Stdout);
    }
    if let Some(stderr) = child.stderr.take() {
        last_lines.relay(stderr, To::Stderr { rank });
    }
    let group = Pid::from_child(&child);
    let events = events.clone();
    std::thread::Builder::new()
        .name(format!("wait-{rank}"))
        .spawn(move || wait_for(rank, child, &events))?;
    Ok(Rank { group, last_lines, ended: None })
}

/// Waits until a rank ends, then kills the processes that it has left in its group.
fn wait_for(rank: usize, mut child: Child, events: &Sender<Event>) {
    let pid = Pid::from_child(&child);
    // Waits without reaping: until the rank is reaped, no other group can get its number.
    let _ = waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT);
    let at = Instant::now();
    let _ = kill_process_group(pid, Signal::KILL);
    if let Ok(status) = child.wait() {
        // No one receives this event once the launcher has decided to end.
        let _ = events.send(Event::Ended { rank, status, at });
    }
}

/// Forwards the signals that ask this process to end to `events` from now on. When no launch is in
/// progress, they have their default effect.
fn forward_signals(events: Sender<Event>) -> Result<()> {
    let is_first = listener().replace(events).is_none();
    if !is_first {
        return Ok(());
    }
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])
        .map_err(|e| Failure::io("cannot listen for signals", e))?;
    std::thread::spawn(move || {
        for signal in signals.forever() {
            let events = listener();
            LAST_SIGNAL.store(signal, Ordering::SeqCst);
            if events.as_ref().is_none_or(|events| events.send(Event::Signal(signal)).is_err()) {
                let _ = emulate_default_handler(signal);
            }
        }
    });
    Ok(())
}

fn listener() -> MutexGuard<'static, Option<Sender<Event>>> {
    LISTENER.lock().unwrap_or_else(PoisonError::into_inner)
}

fn watch(ranks: &mut [Rank], events: &Receiver<Event>, begin: Instant, dumps: &Dumps) -> u8 {
    while ranks.iter().any(|rank| rank.ended.is_none()) {
        let Ok(event) = events.recv() else { break };
        match event {
            Event::Signal(signal) => {
                stop(ranks, events, Instant::now());
                let dumped = if dumps.has_any() { place_of(dumps) } else { String::new() };
                say(&format!("{}; all ranks were stopped{dumped}", signal_name(signal)));
                return 128 + signal as u8;
            }
            Event::Ended { rank, status, at } => {
                ranks[rank].ended = Some((status, at));
                if !status.success() {
                    let culprit = find_cause(rank, ranks, events, at + GRACE);
                    stop(ranks, events, at + GRACE);
                    // The other ranks' output about the failure comes before the launcher's message.
                    drain(ranks, events, LAST_OUTPUT_WAIT);
                    return report(culprit, &ranks[culprit], begin, dumps);
                }
            }
        }
    }
    drain(ranks, events, IDLE_WAIT)
}

/// Waits until the output of the ranks, which have all ended, has been passed on, however slow its reader
/// is. Gives up after `idle_wait` without a line: a process that has left its rank's group may keep the
/// rank's output open. Returns 0, or 128 plus the number of a signal that ended the waiting.
fn drain(ranks: &[Rank], events: &Receiver<Event>, idle_wait: Duration) -> u8 {
    let mut idle_since = Instant::now();
    while !ranks.iter().all(|rank| rank.last_lines.is_drained()) {
        if ranks.iter().any(|rank| rank.last_lines.is_writing()) {
            idle_since = Instant::now();
        }
        if idle_since.elapsed() > idle_wait {
            break;
        }
        if let Ok(Event::Signal(signal)) = events.recv_timeout(Duration::from_millis(1)) {
            return 128 + signal as u8;
        }
    }
    0
}

/// Returns the rank that caused the failure: the first one that failed and did not itself blame another
/// rank. The other ranks have until `deadline` to notice the failure and to exit.
fn find_cause(
    first: usize,
    ranks: &mut [Rank],
    events: &Receiver<Event>,
    deadline: Instant,
) -> usize {
    await_ends(ranks, events, deadline);
    let is_cause = |status: &ExitStatus| {
        !status.success() && status.code() != Some(i32::from(EXIT_CONSEQUENCE))
    };
    let failed = |rank: &usize| ranks[*rank].ended.filter(|(status, _)| is_cause(status));
    let causes = (0..ranks.len()).filter_map(|rank| Some((failed(&rank)?.1, rank)));
    causes.min().map_or(first, |(_, rank)| rank)
}

/// Records which ranks end, until all have ended or `deadline` has passed. Signals are ignored, because
/// the launcher is already ending the ranks.
fn await_ends(ranks: &mut [Rank], events: &Receiver<Event>, deadline: Instant) {
    while ranks.iter().any(|rank| rank.ended.is_none()) {
        match events.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(Event::Ended { rank, status, at }) => ranks[rank].ended = Some((status, at)),
            Ok(Event::Signal(_)) => {}
            Err(_) => return,
        }
    }
}

/// Ends all ranks that still run: with SIGTERM at `begin`, later with SIGKILL.
fn stop(ranks: &mut [Rank], events: &Receiver<Event>, begin: Instant) {
    let mut deadline = begin;
    for (signal, patience) in [(Signal::TERM, POLITE_WAIT), (Signal::KILL, KILL_WAIT)] {
        for rank in ranks.iter().filter(|rank| rank.ended.is_none()) {
            // A group that has just ended is no error.
            let _ = kill_process_group(rank.group, signal);
        }
        deadline += patience;
        await_ends(ranks, events, deadline);
    }
}

fn report(culprit: usize, rank: &Rank, begin: Instant, dumps: &Dumps) -> u8 {
    let Some((status, at)) = rank.ended else { return 1 };
    let (how, code) = match (status.code(), status.signal()) {
        (Some(code), _) => (format!("exited with code {code}"), code as u8),
        (None, Some(signal)) => {
            (format!("was killed by {}", signal_name(signal)), 128 + signal as u8)
        }
        (None, None) => (format!("ended ({status})"), 1),
    };
    let after = at.saturating_duration_since(begin).as_secs_f64();
    let pid = rank.group.as_raw_nonzero();
    let mut text =
        format!("rank {culprit} (process {pid}) {how} after {after:.1} s; all ranks were stopped");
    if dumps.has_any() {
        text += &place_of(dumps);
    }
    let lines = rank.last_lines.get();
    if !lines.is_empty() {
        text.push_str("; its last lines:");
        for line in lines {
            text.push_str("\n    ");
            text.push_str(&line);
        }
    }
    say(&text);
    code
}

/// The end of a message: where the last operations are.
fn place_of(dumps: &Dumps) -> String {
    format!("; their last operations are in {}", dumps.folder().display())
}

fn say(text: &str) {
    // If standard error is closed, the launcher must still return its exit code.
    let _ = writeln!(io::stderr().lock(), "paceline: {text}");
}

fn signal_name(signal: i32) -> String {
    let name = signal_hook::low_level::signal_name(signal);
    name.map_or_else(|| format!("signal {signal}"), str::to_owned)
}
