//! Watching the ranks of a launch, and ending them together.

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use paceline_failure::{EXIT_RUN, Failure, Result};
use paceline_host::{resources, streams};
use paceline_trace::runtime::{now, receive};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use signal_hook::consts::{SIGCHLD, SIGTSTP};
use tracing::debug;

use super::blame::{self, Blame};
use super::dumps::Dumps;
use super::elastic::ElasticRanks;
use super::guard::Guard;
use super::orphans::Orphans;
use super::processes::Processes;
use super::rank::{LaunchEvent, Rank, RankEnd};
use super::start::Starter;
use super::{Launch, own_program, rank_variables, signals};

/// How long other ranks may take to end by themselves after the first failure.
const GRACE: Duration = Duration::from_millis(200);
/// How long ranks may take to end after SIGTERM.
const POLITE_WAIT: Duration = Duration::from_millis(300);
/// How long the kernel may take to end ranks after SIGKILL.
const KILL_WAIT: Duration = Duration::from_millis(200);
/// How long a process that is not a descendant of the launcher may keep a rank's output open.
const OUTPUT_WAIT: Duration = Duration::from_secs(1);
/// After the ranks' success, how long their processes may go on before the launcher says that it waits.
const ORPHANS_WAIT: Duration = Duration::from_secs(1);
/// How often the launcher checks whether its ranks are stopped.
const LOOK: Duration = Duration::from_secs(1);

/// How a launch ended.
#[derive(Clone, Debug)]
pub struct Ended {
    /// The code to exit with.
    pub code: u8,
    /// The signal that asked this process to end, if one came, however the ranks ended.
    pub signal: Option<i32>,
    /// Whether all ranks have ended. A rank that waits for a device may not, even after SIGKILL.
    pub have_all_ended: bool,
    /// The last operations of ranks that have failed.
    pub dumps: Option<Dumps>,
}

/// Starts the ranks and waits for them. If a rank fails, stops the others and reports the failure on standard error.
/// After failed ranks a command may start others; after a signal it has to end.
pub fn launch(launch: &Launch) -> Result<Ended> {
    launch_within(launch, Duration::MAX)
}

/// Like [`launch()`], with a limit for the ranks of another program. Time in which this process was suspended does not count.
pub fn launch_within(launch: &Launch, limit: Duration) -> Result<Ended> {
    let own_program = own_program()?;
    let (variables, _held) = rank_variables(launch)?;
    let (sender, events) = channel();
    streams::buffer();
    if launch.rank_0_owns_stdout() {
        streams::expect_bars();
    }
    signals::forward(sender.clone())?;
    let mut guard = Guard::start(&own_program)?;
    let orphans = Orphans::adopt();
    let dumps = Dumps::new(launch.output.dump_folder.as_deref())?;
    if let Some(folder) = dumps.temporary() {
        guard.watch_folder(folder)?;
    }
    let starter = Starter {
        launch,
        variables: &variables,
        own_program: &own_program,
        dump_folder: dumps.folder(),
        events: &sender,
    };
    let mut watch = Watch::new(launch, &orphans, events, &dumps);
    watch.elastic = ElasticRanks::of(&starter)?;
    for local in 0..launch.num_ranks {
        let rank = launch.first_rank() + local;
        let number = launch.elastic.is_some().then_some(rank as u64);
        let started = starter
            .start(local, number, launch.restarts)
            .map_err(|error| cannot_start(rank, &error))
            .and_then(|started| {
                let group = started.group.as_raw_nonzero().get().unsigned_abs();
                watch.ranks.push(started);
                guard.watch(group)
            });
        if let Err(failure) = started {
            watch.stop();
            dumps.end(false);
            guard.dismiss();
            return Err(failure);
        }
    }
    let code = watch.until_all_have_ended(limit, Some(&mut guard));
    let have_all_ended = !watch.is_any_left();
    let dumps = dumps.end(code != 0);
    guard.dismiss();
    Ok(Ended { code, signal: signals::last(), have_all_ended, dumps })
}

fn cannot_start(rank: usize, error: &std::io::Error) -> Failure {
    let what = format!("cannot start rank {rank}");
    if Errno::from_io_error(error) != Some(Errno::MFILE) {
        return Failure::io(what, error);
    }
    let advice = "pass fewer --nproc, or allow more files with ulimit -n";
    Failure::Run(format!("{what}: {error}; {advice}"))
}

pub(super) struct Watch<'a> {
    launch: &'a Launch,
    pub(super) ranks: Vec<Rank>,
    processes: &'a dyn Processes,
    events: Receiver<LaunchEvent>,
    begin: Instant,
    dumps: &'a Dumps,
    /// Processes of this control group killed for lack of memory before the launch.
    oom_kills: u64,
    /// The ranks, if they come and go.
    elastic: Option<ElasticRanks<'a>>,
}

impl<'a> Watch<'a> {
    /// A watch without ranks, which `events` are about.
    pub(super) fn new(
        launch: &'a Launch,
        processes: &'a dyn Processes,
        events: Receiver<LaunchEvent>,
        dumps: &'a Dumps,
    ) -> Self {
        let (ranks, begin, oom_kills) = (Vec::new(), now(), resources::oom_kills());
        Self { launch, ranks, processes, events, begin, dumps, oom_kills, elastic: None }
    }

    /// Returns the code to exit with.
    pub(super) fn until_all_have_ended(
        &mut self,
        limit: Duration,
        mut guard: Option<&mut Guard>,
    ) -> u8 {
        let (mut stopped, mut waited) = (Duration::ZERO, Duration::ZERO);
        while self.is_any_running() || self.elastic.as_ref().is_some_and(ElasticRanks::is_awaited) {
            let begin = now();
            match receive(&self.events, Some(LOOK)) {
                Ok(LaunchEvent::Signal(SIGTSTP)) => self.pause(),
                Ok(LaunchEvent::Signal(SIGCHLD)) => drop(self.processes.orphans(&self.ranks)),
                Ok(LaunchEvent::Signal(signal)) => return self.end_by(signal),
                Ok(LaunchEvent::Ended { local, status, at }) => {
                    self.ended(local, status, at);
                    if !status.success() && !self.goes_on(local, at, guard.as_deref_mut()) {
                        return self.fail(at);
                    }
                }
                Ok(LaunchEvent::Member(event)) => {
                    let elastic = self.elastic.as_mut();
                    if elastic.is_some_and(|elastic| elastic.learn(&mut self.ranks, event)) {
                        return self.fail(Instant::now());
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            // A longer wait was a suspension of the launcher.
            let passed = (now() - begin).min(2 * LOOK);
            if let Some(elastic) = &mut self.elastic {
                elastic.end_stopped(&mut self.ranks, passed);
            }
            waited += passed;
            if waited > limit {
                self.say(&format!(
                    "the ranks were stopped: they have not ended in {} s",
                    limit.as_secs()
                ));
                self.stop();
                return EXIT_RUN;
            }
            let Some(hosts) = self.launch.hosts.as_ref().filter(|_| self.are_all_stopped()) else {
                stopped = Duration::ZERO;
                continue;
            };
            stopped += passed;
            if stopped > hosts.patience {
                return self.fail(now());
            }
        }
        if !self.is_elastic_success() {
            return self.fail(Instant::now());
        }
        self.await_orphans()
    }

    /// Whether a run whose ranks come and go has succeeded. The last member may have said so since the last look.
    fn is_elastic_success(&mut self) -> bool {
        let Some(elastic) = &mut self.elastic else { return true };
        elastic.close();
        let mut can_go_on = true;
        while let Ok(event) = receive(&self.events, Some(Duration::ZERO)) {
            if let LaunchEvent::Member(event) = event {
                can_go_on &= !elastic.learn(&mut self.ranks, event);
            }
        }
        can_go_on && elastic.is_success(&self.ranks)
    }

    /// Whether the other ranks go on although this one has failed.
    fn goes_on(&mut self, local: usize, at: Instant, guard: Option<&mut Guard>) -> bool {
        let after = at.saturating_duration_since(self.begin);
        let elastic = self.elastic.as_mut();
        elastic.is_some_and(|elastic| elastic.lose(&mut self.ranks, local, after, guard))
    }

    /// Waits for the processes that the ranks have started: they may end by themselves after the ranks have ended well.
    fn await_orphans(&mut self) -> u8 {
        let (begin, grace) = (now(), self.launch.grace);
        let mut is_asked = self.await_ends(begin + grace.min(ORPHANS_WAIT));
        if !is_asked && self.is_any_left() && grace > ORPHANS_WAIT {
            let pids = self.processes.orphans(&self.ranks).into_iter();
            let pids: Vec<String> = pids.map(|pid| pid.as_raw_nonzero().to_string()).collect();
            self.say(&format!(
                "all ranks have ended; what they have started has {} s to end too (--grace): process {}",
                grace.as_secs_f64(),
                pids.join(", ")
            ));
            is_asked = self.await_ends(begin + grace);
        }
        if self.is_any_left() {
            self.stop();
        }
        is_asked |= self.drain();
        signals::last().filter(|_| is_asked).map_or(0, |signal| 128 + signal as u8)
    }

    /// Ends all ranks after a failure at `at`, and reports it.
    fn fail(&mut self, at: Instant) -> u8 {
        streams::hurry();
        self.await_ends(at + GRACE);
        let activity = |rank: &Rank| self.processes.activity(rank.group);
        let activities: Vec<_> = self.ranks.iter().map(activity).collect();
        self.stop();
        // The other ranks' reports about the failure come before the launcher's message.
        self.drain();
        let cause = blame::cause(
            &self.ranks,
            self.launch.first_rank(),
            self.launch.world_size(),
            &activities,
        );
        self.report(&cause);
        cause.code
    }

    /// The user asks the ranks to end. They may finish their current work, such as a step and its checkpoint. A second
    /// signal ends them at once.
    fn end_by(&mut self, signal: i32) -> u8 {
        streams::hurry();
        self.send(Signal::TERM);
        let (name, grace) = (signals::name(signal), self.launch.grace.as_secs_f64());
        self.say(&format!(
            "{name}: the ranks have {grace} s to end; a second signal ends them at once"
        ));
        let deadline = now() + self.launch.grace;
        let is_asked_again = self.await_ends(deadline);
        let must_be_stopped = self.is_any_running();
        if self.is_any_left() {
            self.stop();
        }
        self.drain();
        let dumped = if self.dumps.has_any() { place_of(self.dumps) } else { String::new() };
        let how = if is_asked_again { ", twice" } else { "" };
        let ended = if must_be_stopped { "were stopped" } else { "have ended" };
        self.say(&format!("{name}{how}; all ranks {ended}{dumped}"));
        128 + signal as u8
    }

    /// Ctrl-Z: the ranks stop with this process, and go on with it.
    fn pause(&self) {
        self.signal(Signal::STOP);
        signals::stop_here();
        self.signal(Signal::CONT);
    }

    fn running(&self) -> impl Iterator<Item = &Rank> {
        self.ranks.iter().filter(|rank| rank.ended.is_none())
    }

    fn is_any_running(&self) -> bool {
        self.running().next().is_some()
    }

    /// Whether a rank runs, or a process that a rank has left.
    pub(super) fn is_any_left(&self) -> bool {
        self.is_any_running() || !self.processes.orphans(&self.ranks).is_empty()
    }

    fn are_all_stopped(&self) -> bool {
        self.is_any_running()
            && self.running().all(|rank| self.processes.activity(rank.group) == blame::STOPPED)
    }

    fn ended(&mut self, local: usize, status: ExitStatus, at: Instant) {
        debug!("rank {} has ended: {status}", self.launch.first_rank() + local);
        // A rank that was only sent SIGTERM, but died otherwise, ended by itself: this process was late to hear of it.
        let was_asked = self.ranks[local].asked.is_some_and(|asked| {
            let signal = status.signal();
            signal.is_none() || signal == Some(asked.as_raw()) || asked == Signal::KILL
        });
        self.ranks[local].ended = Some(RankEnd { status, at, was_asked });
    }

    fn signal(&self, signal: Signal) {
        // It does not matter if a process has just ended.
        for rank in self.running() {
            self.processes.signal(rank.group, signal);
        }
        for orphan in self.processes.orphans(&self.ranks) {
            let _ = kill_process(orphan, signal);
        }
    }

    /// Asks all processes that still run to end.
    fn send(&mut self, signal: Signal) {
        self.signal(signal);
        let running = self.ranks.iter_mut().filter(|rank| rank.ended.is_none());
        running.for_each(|rank| rank.asked = Some(signal));
    }

    /// Ends all processes that still run: with SIGTERM, and a moment later with SIGKILL.
    fn stop(&mut self) {
        // A process that ended before now did so by itself.
        while let Ok(event) = self.events.try_recv() {
            if let LaunchEvent::Ended { local, status, at } = event {
                self.ended(local, status, at);
            }
        }
        self.send(Signal::TERM);
        // A rank that SIGSTOP has stopped takes no other signal before it goes on.
        self.await_ends(now() + POLITE_WAIT);
        let deadline = now() + KILL_WAIT;
        while self.is_any_left() && now() < deadline {
            // The processes that this kills may leave processes in turn.
            self.send(Signal::KILL);
            self.await_ends(now() + KILL_WAIT / 20);
        }
    }

    /// Records which ranks end, until no process is left or `deadline` has passed. Returns early, with true, if the user
    /// asks again.
    fn await_ends(&mut self, deadline: Instant) -> bool {
        while self.is_any_left() {
            let left = deadline.saturating_duration_since(now());
            if left.is_zero() {
                return false;
            }
            if self.is_asked_within(left) {
                return true;
            }
        }
        false
    }

    /// Waits until the ranks' output has reached its reader, as long as the reader takes something. Returns early, with
    /// true, if the user asks again. Does not wait for a process that is no descendant of this one and keeps a rank's
    /// output open.
    fn drain(&mut self) -> bool {
        let mut since = now();
        while now() - since < OUTPUT_WAIT
            && !self.ranks.iter().all(|rank| rank.last_lines.is_drained())
        {
            if self.is_asked_within(Duration::from_millis(1)) {
                return true;
            }
            if streams::is_reader_awaited() {
                since = now();
            }
        }
        false
    }

    /// Waits for the next event, at most `limit`, and records it. Returns whether the user asks the run to end.
    fn is_asked_within(&mut self, limit: Duration) -> bool {
        match receive(&self.events, Some(limit)) {
            Ok(LaunchEvent::Ended { local, status, at }) => self.ended(local, status, at),
            Ok(LaunchEvent::Signal(signal)) => return !matches!(signal, SIGTSTP | SIGCHLD),
            // All ranks are about to end.
            Ok(LaunchEvent::Member(_)) => {}
            // The launch itself holds a sender.
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
        }
        false
    }

    fn report(&self, cause: &Blame) {
        let here = match cause.ranks[..] {
            [rank] => {
                rank.checked_sub(self.launch.first_rank()).and_then(|local| self.ranks.get(local))
            }
            _ => None,
        };
        let at = here.and_then(|rank| rank.ended).filter(|end| !end.was_asked);
        let at = at.map_or_else(now, |end| end.at);
        let after = at.saturating_duration_since(self.begin).as_secs_f64();
        let numbers: Vec<String> = cause.ranks.iter().map(usize::to_string).collect();
        let numbers = numbers.join(" or ");
        let who = match here {
            Some(rank) => format!("rank {numbers} (process {})", rank.group.as_raw_nonzero()),
            None if numbers.is_empty() => "a rank on another host".into(),
            None => format!("rank {numbers}, on another host,"),
        };
        let stopped = if here.is_some() { "all ranks" } else { "all ranks of this host" };
        let mut text = format!("{who} {} after {after:.1} s; {stopped} were stopped", cause.what);
        let oom_kills = resources::oom_kills().saturating_sub(self.oom_kills);
        if oom_kills > 0 {
            text += &format!(
                "; the control group ran out of memory (oom_kill rose by {oom_kills}): raise its limit, or use less"
            );
        }
        if self.dumps.has_any() {
            text += &place_of(self.dumps);
        }
        let lines = here.map(|rank| rank.last_lines.get()).unwrap_or_default();
        if !lines.is_empty() {
            text.push_str("; its last lines:");
            for line in lines {
                text.push_str("\n    ");
                text.push_str(&line);
            }
        }
        self.say(&text);
    }

    fn say(&self, text: &str) {
        self.processes.say(text);
    }
}

impl Processes for Orphans {
    fn signal(&self, rank: Pid, signal: Signal) {
        // It does not matter if it has just ended.
        let _ = kill_process_group(rank, signal);
    }

    fn activity(&self, rank: Pid) -> &'static str {
        blame::activity(rank)
    }

    fn orphans(&self, ranks: &[Rank]) -> Vec<Pid> {
        self.running(ranks)
    }

    fn say(&self, text: &str) {
        say(text);
    }
}

fn place_of(dumps: &Dumps) -> String {
    format!("; their last operations are in {}", dumps.place())
}

pub(super) fn say(text: &str) {
    streams::stderr().line(&format!("paceline: {text}"));
}
