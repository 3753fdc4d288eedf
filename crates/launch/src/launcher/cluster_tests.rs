//! Launchers of two hosts with their ranks in a simulated cluster, under faults: after a failure all ranks of a host end within the
//! promised time, the right rank is named, and both hosts start their ranks again. The ranks find each other and all-reduce.

#[path = "../../../rendezvous/tests/cluster/excuses.rs"]
#[allow(dead_code)] // Other tests use the rest.
mod excuses;
#[path = "../../../rendezvous/tests/cluster/schedules.rs"]
mod schedules;

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use excuses::{are_short, pauses};
use paceline_collectives::{CollectiveError, Group, GroupOptions, ReduceOp};
use paceline_failure::{EXIT_CONSEQUENCE, EXIT_RUN, Failure};
use paceline_rendezvous::Rendezvous;
use paceline_trace::runtime::{now, sleep};
use paceline_trace::simulation::{
    ChildProcess, ClusterFault, FaultOfHost, HostProgram, ProcessEnd, SplitMix, run,
};
use paceline_trace::{lock, thread_builder};
use rustix::process::{Pid, Signal};
use schedules::explore;

use super::dumps::Dumps;
use super::processes::Processes;
use super::rank::{LaunchEvent, Rank};
use super::watch::{Ended, Watch};
use super::{Hosts, Launch, Output, blame, restarts};

const HOSTS: usize = 2;
const RANKS: usize = 2;
const WORLD: usize = HOSTS * RANKS;
const MAX_RESTARTS: usize = 2;
const NUM_STEPS: usize = 5;
/// Of an operation, and of finding the others.
const LIMIT: Duration = Duration::from_secs(5);
const PATIENCE: Duration = Duration::from_secs(20);
/// The time that all attempts may take together.
const ALL: Duration = Duration::from_secs(200);
/// Within it all ranks have ended after a failure, with some time for the launcher's own threads.
const PROMISE: Duration = Duration::from_millis(700 + 300);
/// Part of the error of a rank whose store belongs to a later attempt.
const BEHIND: &str = "does not know the secret of this attempt";
/// A rank returns it if a sum is wrong.
const WRONG: u8 = 99;

/// A rank that does not do as the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Odd {
    Exits,
    /// It ends with success before a step.
    Leaves,
    Hangs,
}

#[derive(Clone, Debug)]
struct Script {
    /// In the first attempt: a rank, its last step, and how it ends.
    odd: Option<(usize, usize, Odd)>,
    /// The rank that SIGTERM does not end.
    stubborn: usize,
    folder: PathBuf,
}

/// A rank, which returns its exit code and its error, and the signal that ends it.
type Child = (ChildProcess<(u8, String)>, Arc<AtomicI32>);

/// The processes of a host.
struct Simulated {
    host: usize,
    script: Script,
    /// With the signal that ends the process if it is killed: a fault's, or the launcher's.
    children: Mutex<Vec<Child>>,
    said: Arc<Mutex<Vec<String>>>,
}

impl Simulated {
    fn child(&self, rank: Pid) -> Child {
        lock(&self.children)[rank.as_raw_nonzero().get() as usize - 1].clone()
    }

    fn start(&self, launch: &Launch, local: usize, events: &Sender<LaunchEvent>) -> Rank {
        let rank = launch.first_rank() + local;
        let folder = launch.output.dump_folder.as_deref().unwrap();
        let error_file = folder.join(format!("rank_{rank}.error.json"));
        let (made, script, file) = (launch.restarts.made, self.script.clone(), error_file.clone());
        let child = ChildProcess::start(self.host, move || work(rank, made, &script, &file));
        let signal = Arc::new(AtomicI32::new(Signal::KILL.as_raw()));
        let number = {
            let mut children = lock(&self.children);
            children.push((child.clone(), signal.clone()));
            children.len()
        };
        let (events, said) = (events.clone(), self.said.clone());
        let wait = move || {
            let status = match child.wait() {
                Some((code, error)) => {
                    lock(&said).push(format!("of rank {rank}: {error}"));
                    i32::from(code) << 8
                }
                None => signal.load(Ordering::Relaxed),
            };
            let status = ExitStatus::from_raw(status);
            let _ = events.send(LaunchEvent::Ended { local, status, at: now() });
        };
        thread_builder(format!("wait-{rank}")).spawn(wait).unwrap();
        Rank::new(Pid::from_raw(number as i32).unwrap(), Some(error_file))
    }
}

impl Processes for Simulated {
    fn signal(&self, rank: Pid, signal: Signal) {
        let (child, ended_by) = self.child(rank);
        let number = rank.as_raw_nonzero().get() as usize - 1;
        let is_stubborn = self.host * RANKS + number % RANKS == self.script.stubborn;
        // A stopped process takes no other signal.
        let ends =
            signal == Signal::KILL || signal == Signal::TERM && !is_stubborn && !child.is_frozen();
        if ends && child.kill() {
            ended_by.store(signal.as_raw(), Ordering::Relaxed);
        }
    }

    fn activity(&self, rank: Pid) -> &'static str {
        let is_frozen = self.child(rank).0.is_frozen();
        if is_frozen { blame::STOPPED } else { "runs, but did not take part" }
    }

    fn orphans(&self, _: &[Rank]) -> Vec<Pid> {
        Vec::new()
    }

    fn say(&self, text: &str) {
        lock(&self.said).push(text.to_owned());
    }
}

/// A rank of an attempt: finds the others, and all-reduces. Returns its exit code and its error.
fn work(rank: usize, made: usize, script: &Script, error_file: &Path) -> (u8, String) {
    let failure = match train(rank, made, script) {
        Ok(code) => return (code, String::new()),
        Err(error) => Failure::from(error),
    };
    let (code, culprits) = match &failure {
        Failure::Consequence(_) => (EXIT_CONSEQUENCE, &[][..]),
        Failure::Missing { ranks, .. } => (EXIT_CONSEQUENCE, &ranks[..]),
        _ => return (EXIT_RUN, failure.to_string()),
    };
    let text = serde_json::json!({ "message": { "extraInfo": { "culprits": culprits } } });
    std::fs::write(error_file, text.to_string()).unwrap();
    (code, failure.to_string())
}

fn train(rank: usize, made: usize, script: &Script) -> Result<u8, CollectiveError> {
    let secret = Rendezvous::secret_of_restart("secret", made);
    let launch = format!("attempt {made} of host {}", rank / RANKS);
    let rendezvous = Rendezvous::by_tcp("10.0.0.1", 29_500, secret).started_by(&launch, rank);
    let options = GroupOptions {
        timeout: LIMIT,
        spin: Duration::from_micros(5),
        worker_spin: Duration::ZERO,
        ..GroupOptions::for_local_ranks(RANKS)
    };
    let host = format!("10.0.0.{}", 1 + rank / RANKS);
    let group = Group::tcp(&rendezvous, &host, rank, WORLD, options)?;
    let number = |rank: usize, step: usize| (made * 1000 + step * 10 + rank) as f32;
    for step in 0..NUM_STEPS {
        sleep(Duration::from_millis(((rank * 70 + step * 30) % 200) as u64));
        match script.odd {
            Some((odd, last, how)) if (made, odd, last) == (0, rank, step) => match how {
                Odd::Exits => return Ok(7),
                Odd::Leaves => return Ok(0),
                Odd::Hangs => sleep(Duration::from_secs(1 << 20)),
            },
            _ => {}
        }
        let mut data = [number(rank, step); 100];
        group.all_reduce_slice(&mut data, ReduceOp::Sum)?;
        let sum: f32 = (0..WORLD).map(|rank| number(rank, step)).sum();
        if data.iter().any(|value| *value != sum) {
            return Ok(WRONG);
        }
    }
    group.barrier()?;
    Ok(0)
}

/// The end of an attempt of a host.
#[derive(Clone, Debug)]
struct Attempt {
    /// The restarts before it.
    made: usize,
    code: u8,
    said: Vec<String>,
    have_all_ended: bool,
    /// The time from the first failure of a rank of the host until the launcher has ended all.
    took: Option<Duration>,
}

/// A launcher with its restarts. Returns its exit code and its attempts.
fn host(host: usize, script: &Script) -> (u8, Vec<Attempt>) {
    let processes = Simulated {
        host,
        script: script.clone(),
        children: Mutex::default(),
        said: Arc::default(),
    };
    let attempts = Mutex::new(Vec::new());
    let attempt = |made: usize| {
        let folder = script.folder.join(format!("host{host}-{made}"));
        std::fs::create_dir_all(&folder).unwrap();
        let hosts = Hosts {
            count: HOSTS,
            own: host,
            address: "10.0.0.1".into(),
            port: 29_500,
            secret: "secret".into(),
            patience: PATIENCE,
        };
        let (hosts, dump_folder) = (Some(hosts), Some(folder));
        let output = Output { dump_folder, ..Output::default() };
        Ok(Launch { num_ranks: RANKS, hosts, output, ..Launch::default() })
    };
    let launch = |launch: &Launch| {
        let (sender, events) = channel();
        let dumps = Dumps::new(launch.output.dump_folder.as_deref())?;
        let mut watch = Watch::new(launch, &processes, events, &dumps);
        for local in 0..RANKS {
            let started = processes.start(launch, local, &sender);
            watch.ranks.push(started);
        }
        let code = watch.until_all_have_ended(Duration::MAX, None);
        let have_all_ended = !watch.is_any_left();
        let ends = watch.ranks.iter().filter_map(|rank| rank.ended);
        let failed = ends.filter(|end| !end.was_asked && !end.status.success()).map(|end| end.at);
        let took = failed.min().map(|at| now() - at);
        let said = std::mem::take(&mut *lock(&processes.said));
        lock(&attempts).push(Attempt {
            made: launch.restarts.made,
            code,
            said,
            have_all_ended,
            took,
        });
        Ok(Ended { code, signal: None, have_all_ended, dumps: dumps.end(code != 0) })
    };
    let code = restarts::repeat(MAX_RESTARTS, attempt, launch, |_| {}).unwrap();
    (code, std::mem::take(&mut *lock(&attempts)))
}

/// The ranks that a message names.
fn named(text: &str) -> Vec<usize> {
    let Some(text) = text.strip_prefix("rank ") else { return Vec::new() };
    let end = text.find(|of: char| !of.is_ascii_digit() && !" or".contains(of));
    text[..end.unwrap_or(text.len())]
        .split(" or ")
        .map(|rank| rank.trim().parse().unwrap())
        .collect()
}

fn check_attempt(
    host: usize,
    number: usize,
    attempt: &Attempt,
    script: &Script,
    (faults, has_given_up): (&[FaultOfHost], &dyn Fn(usize) -> bool),
) -> Result<(), String> {
    let is_on_time = |fault: &FaultOfHost| {
        !matches!(fault.kind, ClusterFault::Freeze | ClusterFault::Suspend | ClusterFault::Jump)
    };
    let odd = script.odd.filter(|_| number == 0);
    let is_failed = attempt.code != 0;
    if attempt.code == WRONG {
        return Err("a sum is wrong".into());
    }
    if attempt.made != number {
        return Err(format!("its ranks are at restart {}", attempt.made));
    }
    if !attempt.have_all_ended {
        return Err("ranks are left".into());
    }
    if faults.iter().all(is_on_time) && attempt.took.is_some_and(|took| took > PROMISE) {
        return Err("its ranks end late".into());
    }
    for rank in attempt.said.iter().flat_map(|text| named(text)) {
        let of = rank / RANKS;
        let explains = |fault: &FaultOfHost| match fault.kind {
            ClusterFault::Kill | ClusterFault::Freeze | ClusterFault::Slow => fault.host == of,
            ClusterFault::Cut => [host, of].contains(&fault.host),
            ClusterFault::Jump | ClusterFault::Suspend => false,
        };
        // The other host is an attempt ahead, whose secret says nothing about the one before: this host follows at once.
        let is_behind =
            |text: &String| text.starts_with(&format!("of rank {rank}: ")) && text.contains(BEHIND);
        // Hosts may be apart by the limit of an operation when they start again.
        let is_apart = number > 0 && of != host && !faults.is_empty();
        let is_excused = faults.iter().any(explains)
            || is_apart
            || has_given_up(rank)
            || !faults.is_empty() && attempt.said.iter().any(is_behind);
        if odd.is_none_or(|odd| odd.0 != rank) && !is_excused {
            return Err(format!("it blames rank {rank}"));
        }
    }
    if let (true, Some((rank, _, how))) = (faults.is_empty(), odd) {
        let words = match how {
            _ if rank / RANKS != host => ", on another host, ended or did not answer",
            Odd::Exits => "exited with code 7",
            Odd::Leaves => "ended with code 0 while others still needed it",
            Odd::Hangs => "runs, but did not take part",
        };
        let is_right = |text: &String| named(text) == [rank] && text.contains(words);
        if !is_failed || !attempt.said.iter().any(is_right) {
            return Err(format!("it does not say that rank {rank} {words}"));
        }
    }
    Ok(())
}

fn is_freeze_of(fault: &FaultOfHost, host: usize) -> bool {
    fault.kind == ClusterFault::Freeze && fault.host == host
}

/// Whether a rank has given up because a rank of this host, which was frozen for as long as others wait, did not come.
fn has_missed(attempt: &Attempt, rank: usize, host: usize) -> bool {
    let of_host = |text: &str| (0..RANKS).any(|of| text.contains(&(host * RANKS + of).to_string()));
    let (begin, end) = (format!("of rank {rank}: "), " did not come in time");
    attempt.said.iter().filter(|text| text.starts_with(&begin)).any(|text| {
        let list = text.strip_suffix(end).and_then(|text| Some(text.rsplit_once(": ranks ")?.1));
        list.is_some_and(of_host)
    })
}

fn check(seed: u64, faults: &[FaultOfHost]) -> Result<(), String> {
    let mut random = SplitMix(seed ^ 0x1A07);
    let mut below = |bound: usize| random.below(bound as u64) as usize;
    let odds = [None, None, Some(Odd::Exits), Some(Odd::Leaves), Some(Odd::Hangs)];
    let odd = odds[below(odds.len())].map(|how| (below(WORLD), below(NUM_STEPS), how));
    let folder = tempfile::tempdir().unwrap();
    let script = Script { odd, stubborn: below(2 * WORLD), folder: folder.path().to_owned() };
    let launcher = |number: usize| {
        let script = script.clone();
        HostProgram { host: number, main: Box::new(move || host(number, &script)) }
    };
    let programs = (0..HOSTS).map(launcher).collect();
    let ends = run(seed, faults, ALL + pauses(faults), programs);
    for (host, end) in ends.iter().enumerate() {
        let ((code, attempts), at) = match end {
            ProcessEnd::Killed => continue,
            ProcessEnd::Hung(waits) => return Err(format!("host {host} hangs: {waits:?}")),
            ProcessEnd::Returned(ended, at) => (ended, at),
        };
        for (number, attempt) in attempts.iter().enumerate() {
            // It no longer comes, because those of this host have come too late.
            let has_given_up = |rank: usize| match &ends[rank / RANKS] {
                ProcessEnd::Returned((code, theirs), before) => {
                    let is_late = || faults.iter().any(|fault| is_freeze_of(fault, host));
                    let misses = |of: &Attempt| is_late() && has_missed(of, rank, host);
                    *code != 0 && before < at || theirs.get(number).is_some_and(misses)
                }
                ProcessEnd::Killed | ProcessEnd::Hung(_) => true,
            };
            let known = (faults, &has_given_up as &dyn Fn(usize) -> bool);
            check_attempt(host, number, attempt, &script, known).map_err(|reason| {
                format!("attempt {number} of host {host}: {reason} ({script:?}); all: {ends:?}")
            })?;
        }
        let is_killed = faults.iter().any(|fault| fault.kind == ClusterFault::Kill);
        let num = 1 + usize::from(script.odd.is_some());
        if !is_killed && are_short(faults) && (*code, attempts.len()) != (0, num) {
            return Err(format!("host {host} fails without a reason ({script:?}); all: {ends:?}"));
        }
    }
    Ok(())
}

#[test]
fn ranks_end_together_and_the_right_one_is_named() {
    explore(HOSTS, check);
}
