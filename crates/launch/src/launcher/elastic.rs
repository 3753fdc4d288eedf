//! Ranks that come and go: the list of members on the first host, replacements of ranks that have died, and the end of ranks that do
//! not answer.
//!
//! The list decides who belongs to the run (`paceline_rendezvous::Members`). This file knows the processes of this host.

use std::collections::BTreeSet;
use std::time::Duration;

use paceline_failure::{EXIT_USAGE, Failure, Result, usage};
use paceline_host::text::plural;
use paceline_rendezvous::{MemberEvent, Members, RendezvousError, RunMember, Terms};
use rustix::process::{Signal, kill_process_group};

use super::guard::Guard;
use super::hosts::{PATIENCE, check_address, check_port, read_secret};
use super::rank::{LaunchEvent, Rank};
use super::start::Starter;
use super::watch::say;
use super::{Restarts, blame};
use crate::StartFlags;
use crate::environment::{MEMBER, MEMBERS};

/// How long `--join` looks for the run.
const JOIN_LIMIT: Duration = Duration::from_secs(5);

/// A run whose ranks come and go.
#[derive(Clone, Debug)]
pub struct Elastic {
    /// The numbers of ranks that the run can have, ascending.
    pub sizes: Vec<usize>,
    /// Settings on which all ranks must agree, in words.
    pub settings: String,
    /// How long the others wait for a rank that does not answer.
    pub evict_after: Duration,
    /// How long too few ranks wait for more.
    pub limit: Duration,
    /// On a single host: where others join, if they may.
    pub(super) at: Option<JoinPoint>,
}

/// The port at which other processes join. It cannot be printed: the secret must not appear in a log.
#[derive(Clone)]
pub(super) struct JoinPoint {
    pub(super) address: String,
    pub(super) port: u16,
    pub(super) secret: String,
}

impl std::fmt::Debug for JoinPoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.address, self.port)
    }
}

impl Elastic {
    /// The run that flags state, if its ranks come and go. All sizes between the fewest and the most ranks are allowed.
    pub fn resolve(flags: &StartFlags) -> Result<Option<Self>> {
        let Some(sizes) = flags.elastic.clone() else { return Ok(None) };
        let at = match (flags.nnodes, &flags.master_addr, flags.master_port) {
            (Some(1), Some(address), Some(port)) => {
                let (address, port) = (address.clone(), check_port(port)?);
                check_address(&address, port)?;
                Some(JoinPoint { address, port, secret: read_secret()? })
            }
            (Some(1), None, Some(_)) => {
                return usage(
                    "--master-port: pass --master-addr too, by which other hosts reach this one",
                );
            }
            (Some(1), Some(_), None) => {
                return usage("--master-addr: pass --master-port too, a free port of this host");
            }
            _ => None,
        };
        let (sizes, evict_after) = (sizes.collect(), flags.evict_after());
        Ok(Some(Self { sizes, settings: String::new(), evict_after, limit: PATIENCE, at }))
    }
}

/// Joins the run of `--join`, with its settings.
pub fn join(flags: &StartFlags, settings: &str) -> Result<Option<RunMember>> {
    let Some((host, port)) = &flags.join else { return Ok(None) };
    let joined = RunMember::join(host, *port, &read_secret()?, None, settings, JOIN_LIMIT);
    let fix = |error: RendezvousError| {
        Failure::Usage(format!(
            "--join {host}:{port}: {error}; pass the --master-addr and --master-port of a run with --elastic that \
             has room, and its flags, and set PACELINE_SECRET to its secret"
        ))
    };
    joined.map(Some).map_err(fix)
}

/// Joins the run whose launcher has started this process, if its ranks come and go. Waits for the list of members at most `limit`.
/// Also returns the host and port of the list.
pub fn join_from_env(
    settings: &str,
    limit: Duration,
) -> Result<Option<(RunMember, (String, u16))>> {
    let Ok(members) = std::env::var(MEMBERS) else { return Ok(None) };
    let wrong = |name: &str, value: &str| {
        Failure::Usage(format!(
            "{name}={value}: this is not what paceline's launcher sets; unset it"
        ))
    };
    let at = members.rsplit_once(':');
    let at = at.and_then(|(host, port)| Some((host, port.parse().ok()?)));
    let (host, port) = at.ok_or_else(|| wrong(MEMBERS, &members))?;
    let number = match std::env::var(MEMBER) {
        Ok(number) => Some(number.parse().map_err(|_| wrong(MEMBER, &number))?),
        Err(_) => None,
    };
    let member = RunMember::join(host, port, &read_secret()?, number, settings, limit)?;
    Ok(Some((member, (host.to_owned(), port))))
}

/// The ranks of this host in such a run.
pub(super) struct ElasticRanks<'a> {
    starter: Starter<'a>,
    elastic: &'a Elastic,
    /// On the first host.
    list: Option<Members>,
    /// Whether processes that others start may join.
    is_open: bool,
    /// The members that were ranks of this host.
    own: BTreeSet<u64>,
    /// How many ranks were replaced.
    replaced: usize,
    /// For how long each rank has been stopped.
    stopped: Vec<Duration>,
    /// For how long no rank of this host has run.
    idle: Duration,
    /// Whether a member has done its work.
    is_finished: bool,
}

impl<'a> ElasticRanks<'a> {
    /// Begins to listen for members, if this is the first host. `None` if the ranks do not come and go.
    pub(super) fn of(starter: &Starter<'a>) -> Result<Option<Self>> {
        let launch = starter.launch;
        let Some(elastic) = &launch.elastic else { return Ok(None) };
        let is_first = launch.hosts.as_ref().is_none_or(|hosts| hosts.own == 0);
        let first = launch.first_rank();
        let all = Self {
            starter: *starter,
            elastic,
            list: is_first.then(|| listen(starter, elastic)).transpose()?,
            is_open: launch.hosts.is_some() || elastic.at.is_some(),
            own: (first..first + launch.num_ranks).map(|rank| rank as u64).collect(),
            replaced: 0,
            stopped: vec![Duration::ZERO; launch.num_ranks],
            idle: Duration::ZERO,
            is_finished: false,
        };
        all.set_may_come();
        Ok(Some(all))
    }

    /// A rank of this host has failed. Says how, and starts another in its place if that is allowed. Returns whether the others
    /// go on.
    pub(super) fn lose(
        &mut self,
        ranks: &mut [Rank],
        local: usize,
        after: Duration,
        guard: Option<&mut Guard>,
    ) -> bool {
        let lost = &ranks[local];
        let Some(end) = lost.ended else { return true };
        if end.status.code().is_some_and(|code| code == i32::from(EXIT_USAGE) || code > 128) {
            // All others will find the same mistake, or end too, because one of them was asked to.
            return false;
        }
        let how = if lost.asked == Some(Signal::KILL) {
            "did not answer in time and was left out".into()
        } else {
            blame::how(end.status).0
        };
        if let (Some(list), Some(number)) = (&self.list, lost.number) {
            list.gone(number, &how);
        }
        let running = ranks.iter().filter(|rank| rank.ended.is_none()).count();
        let (rank, process) = (self.starter.launch.first_rank() + local, lost.group);
        let process = process.as_raw_nonzero();
        say(&format!(
            "rank {rank} (process {process}) {how} after {:.1} s; {} left on this host",
            after.as_secs_f64(),
            are(running)
        ));
        if !self.is_success(ranks) && self.replaced < self.starter.launch.restarts.max {
            self.replace(&mut ranks[local], local, guard);
        }
        true
    }

    fn replace(&mut self, lost: &mut Rank, local: usize, guard: Option<&mut Guard>) {
        self.replaced += 1;
        let restarts = Restarts { made: self.replaced, ..self.starter.launch.restarts };
        let number = self.list.as_ref().map(Members::next_number);
        self.set_may_come();
        let started = self.starter.start(local, number, restarts);
        let rank = self.starter.launch.first_rank() + local;
        match started {
            Ok(started) => {
                let process = started.group.as_raw_nonzero();
                say(&format!(
                    "replacement {} of {} for rank {rank} is process {process}",
                    restarts.made, restarts.max
                ));
                // Without the guard, the kernel still ends the rank with this process.
                let _ = guard.map(|guard| guard.watch(process.get().unsigned_abs()));
                self.own.extend(number);
                self.stopped[local] = Duration::ZERO;
                *lost = started;
            }
            Err(error) => {
                say(&format!("cannot start a replacement for rank {rank}: {error}"));
                if let (Some(list), Some(number)) = (&self.list, number) {
                    list.gone(number, "it could not be started");
                }
            }
        }
    }

    /// Replacements join as new members; on another host the list does not know them before.
    fn set_may_come(&self) {
        let may_come = self.is_open || self.replaced < self.starter.launch.restarts.max;
        if let Some(list) = &self.list {
            list.set_may_come(may_come);
        }
    }

    /// Whether members on other hosts need the list, although no rank of this host runs.
    pub(super) fn is_awaited(&self) -> bool {
        let is_late = self.is_finished && self.idle > self.elastic.evict_after;
        !is_late && self.list.as_ref().is_some_and(Members::has_members)
    }

    /// Ends the list of members. Its events about all that members have said are there afterward.
    pub(super) fn close(&mut self) {
        self.list = None;
    }

    /// Whether the run has succeeded, given the ranks of this host, which have ended.
    pub(super) fn is_success(&self, ranks: &[Rank]) -> bool {
        self.is_finished
            || ranks.iter().any(|rank| rank.ended.is_some_and(|end| end.status.success()))
    }

    /// Ends ranks that have been stopped for too long. `passed` is the time since the last look.
    pub(super) fn end_stopped(&mut self, ranks: &mut [Rank], passed: Duration) {
        if ranks.iter().all(|rank| rank.ended.is_some()) {
            self.idle += passed;
        }
        for (rank, stopped) in ranks.iter_mut().zip(&mut self.stopped) {
            if rank.ended.is_some() || blame::activity(rank.group) != blame::STOPPED {
                *stopped = Duration::ZERO;
                continue;
            }
            *stopped += passed;
            if *stopped > self.elastic.evict_after {
                leave_out(rank);
            }
        }
    }

    /// Says what has changed among the members. Returns whether the run cannot go on.
    pub(super) fn learn(&mut self, ranks: &mut [Rank], event: MemberEvent) -> bool {
        let is_own = |number: &u64| self.own.contains(number);
        let started = self.starter.launch.world_size() as u64;
        match event {
            MemberEvent::Joined { number, from } if number >= started && !is_own(&number) => {
                say(&format!("member {number} has joined from {from}"));
            }
            MemberEvent::Gone { how: None, .. } => self.is_finished = true,
            MemberEvent::Gone { number, how: Some(how) } if !is_own(&number) => {
                say(&format!("member {number}, on another host, has gone: {how}"));
            }
            MemberEvent::LeftOut { number, .. } => {
                let own = ranks.iter_mut().find(|rank| rank.number == Some(number));
                match own.filter(|rank| rank.ended.is_none()) {
                    // The message about its end follows.
                    Some(own) => leave_out(own),
                    None => say(&format!("member {number} did not answer and was left out")),
                }
            }
            MemberEvent::Next { generation, members, spares } if generation > 1 => {
                let goes_on = |number| members.contains(&number) || spares.contains(&number);
                // The others go on without these, so they are not to blame for what comes later.
                let lost = ranks.iter_mut().filter(|rank| !rank.number.is_some_and(goes_on));
                lost.filter_map(|rank| rank.ended.as_mut()).for_each(|end| end.was_asked = true);
                let spares = match spares.len() {
                    0 => String::new(),
                    count => format!(", and {} until needed", plural(count, "spare")),
                };
                let ranks = plural(members.len(), "rank");
                say(&format!("generation {generation} has {ranks}{spares}"));
            }
            MemberEvent::TooFew { left, needed } => {
                let limit = self.elastic.limit.as_secs_f64();
                say(&format!(
                    "too few ranks, {left} of at least {needed}; waiting up to {limit} s for more"
                ));
            }
            MemberEvent::Failed { reason } => {
                say(&format!("the run cannot go on: {reason}"));
                return true;
            }
            MemberEvent::Joined { .. } | MemberEvent::Gone { .. } | MemberEvent::Next { .. } => {}
        }
        false
    }
}

/// So many ranks, with the verb.
fn are(ranks: usize) -> String {
    format!("{} {}", plural(ranks, "rank"), if ranks == 1 { "is" } else { "are" })
}

/// Kills a rank: one that is stopped takes no other signal.
fn leave_out(rank: &mut Rank) {
    rank.asked = Some(Signal::KILL);
    // It does not matter if it has just ended.
    let _ = kill_process_group(rank.group, Signal::KILL);
}

/// The list of members, at the port where ranks of other runs would meet.
fn listen(starter: &Starter<'_>, elastic: &Elastic) -> Result<Members> {
    let launch = starter.launch;
    let of = |name: &str| {
        let found = starter.variables.iter().find(|(of, _)| *of == name);
        found.map_or("", |(_, value)| value.as_str())
    };
    let (address, secret) = (of("MASTER_ADDR"), of(crate::environment::SECRET));
    let port = of("MASTER_PORT").parse().unwrap_or_default();
    if secret.is_empty() {
        say(&format!(
            "anybody who can reach {address}:{port} may join this run; set PACELINE_SECRET to the same random text for \
             all ranks"
        ));
    }
    let terms = Terms {
        sizes: elastic.sizes.clone(),
        expected: launch.world_size(),
        first_host: launch.hosts.as_ref().map(|_| launch.num_ranks),
        settings: elastic.settings.clone(),
        evict_after: elastic.evict_after,
        limit: elastic.limit,
    };
    let events = starter.events.clone();
    // Nobody receives events once the launcher has decided to end.
    let report = move |event| drop(events.send(LaunchEvent::Member(event)));
    Members::listen((address, port), secret, terms, report)
        .map_err(|error| Failure::Usage(format!("--elastic: {error}; pass another --master-port")))
}
