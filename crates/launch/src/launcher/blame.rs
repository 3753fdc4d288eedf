//! Which rank a failure is about, and how it ended: the one that failed by itself, or else the one that others waited for in
//! vain.

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use paceline_failure::{EXIT_CONSEQUENCE, EXIT_RUN};
use paceline_rendezvous::read_culprits;
use rustix::process::Pid;
use signal_hook::consts::{SIGABRT, SIGPIPE};

use super::rank::{Rank, RankEnd};
use super::{orphans, signals};

#[derive(Debug, PartialEq, Eq)]
pub(super) struct Blame {
    /// Its number among the ranks of all hosts. On another host, the ranks of this host may name several or no ranks.
    pub(super) ranks: Vec<usize>,
    pub(super) what: String,
    /// The code to exit with.
    pub(super) code: u8,
}

impl Blame {
    fn of(ranks: impl IntoIterator<Item = usize>, what: &str, code: u8) -> Self {
        Self { ranks: ranks.into_iter().collect(), what: what.to_owned(), code }
    }
}

/// The activity of a rank that SIGSTOP has stopped.
pub(super) const STOPPED: &str = "is stopped";

/// The activity of a rank, according to the kernel.
pub(super) fn activity(pid: Pid) -> &'static str {
    match orphans::state(pid).map(|(state, _)| state) {
        Some('T') => STOPPED,
        Some('t') => "is stopped by a debugger",
        Some('D') => "waits for a device",
        Some('Z') | None => "has ended",
        _ => "runs, but did not take part",
    }
}

/// The cause of a failure, once all `ranks` of this host have ended; `first` is the first of them, `world` the number of all
/// hosts' ranks. `activities` has each rank's activity when the failure was noticed.
pub(super) fn cause(ranks: &[Rank], first: usize, world: usize, activities: &[&str]) -> Blame {
    // A rank whose peer was killed may exit before the kernel has taken the peer down.
    let by_itself = |rank: &Rank| {
        let end = rank.ended.as_ref().filter(|end| !end.was_asked && !end.status.success())?;
        let exits = !end.status.signal().is_some_and(is_cause);
        // When one rank is asked to end, all end with the same code at the same time.
        let is_consequence = end.status.code() == Some(i32::from(EXIT_CONSEQUENCE))
            || exits && !culprits(rank).is_empty();
        (!is_consequence).then_some((exits, end.at))
    };
    let earliest = (0..ranks.len()).filter_map(|at| Some((by_itself(&ranks[at])?, at))).min();
    if let Some((_, local)) = earliest {
        return ended(local, first, ranks);
    }
    // All ranks that ended by themselves blame others.
    let mut votes = vec![0; world];
    for rank in ranks {
        culprits(rank).into_iter().filter(|&rank| rank < world).for_each(|rank| votes[rank] += 1);
    }
    let here = |rank: usize| rank.checked_sub(first).filter(|&local| local < ranks.len());
    let has_complained = |rank: usize| {
        here(rank).is_some_and(|local| ranks[local].ended.is_some_and(|end| !end.was_asked))
    };
    // A rank that blames others is not the missing one.
    let most = (0..world).filter(|&rank| votes[rank] > 0);
    let most =
        most.max_by_key(|&rank| (!has_complained(rank), votes[rank], std::cmp::Reverse(rank)));
    if let Some(rank) = most {
        let Some(local) = here(rank) else {
            let most = votes[rank];
            let ranks = (0..world).filter(|&rank| votes[rank] == most && here(rank).is_none());
            return Blame::of(ranks, "ended or did not answer", EXIT_CONSEQUENCE);
        };
        if ranks[local].ended.is_some_and(|end| !end.was_asked && end.status.success()) {
            return Blame::of([rank], "ended with code 0 while others still needed it", EXIT_RUN);
        }
        if !has_complained(rank) {
            return Blame::of([rank], activities[local], EXIT_RUN);
        }
    }
    // Nobody has noticed a rank that is the only one of its host.
    let stopped = |at: &usize| activities[*at] == STOPPED && !has_complained(first + at);
    if let Some(local) = (0..ranks.len()).find(stopped) {
        return Blame::of([first + local], STOPPED, EXIT_RUN);
    }
    let has_said_why = |rank: &Rank| rank.error_file.as_deref().is_some_and(|file| file.exists());
    if world > ranks.len() && ranks.iter().any(has_said_why) {
        // The ranks of this host say that they are not the cause. Without a report, the exit code may mean something else.
        return Blame::of([], "failed", EXIT_CONSEQUENCE);
    }
    let failed =
        |local: &usize| Some((ranks[*local].ended.filter(|end| !end.status.success())?.at, *local));
    let earliest = (0..ranks.len()).filter_map(|local| failed(&local)).min();
    ended(earliest.map_or(0, |(_, local)| local), first, ranks)
}

/// The ranks that this one names in its error file.
fn culprits(rank: &Rank) -> Vec<usize> {
    rank.error_file.as_deref().map(read_culprits).unwrap_or_default()
}

/// Whether a signal kills a process for reasons of its own: one that has lost its peers may abort, or write to a closed
/// connection.
fn is_cause(signal: i32) -> bool {
    ![SIGABRT, SIGPIPE].contains(&signal)
}

fn ended(local: usize, first: usize, ranks: &[Rank]) -> Blame {
    let number = [first + local];
    let Some(RankEnd { status, .. }) = ranks[local].ended else {
        return Blame::of(number, "did not end", EXIT_RUN);
    };
    let (what, code) = how(status);
    Blame::of(number, &what, code)
}

/// How a process has ended, in words, and the code to exit with.
pub(super) fn how(status: ExitStatus) -> (String, u8) {
    match (status.code(), status.signal()) {
        (Some(code), _) => (format!("exited with code {code}"), code as u8),
        (None, Some(signal)) => {
            (format!("was killed by {}", signals::name(signal)), 128 + signal as u8)
        }
        (None, None) => (format!("ended ({status})"), EXIT_RUN),
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    struct Ranks {
        folder: tempfile::TempDir,
        ranks: Vec<Rank>,
        begin: Instant,
    }

    impl Ranks {
        fn new(count: usize) -> Self {
            let folder = tempfile::tempdir().unwrap();
            let file = |rank| folder.path().join(format!("rank{rank}"));
            let pid = rustix::process::getpid();
            let ranks = (0..count).map(|rank| Rank::new(pid, Some(file(rank)))).collect();
            Self { folder, ranks, begin: Instant::now() }
        }

        /// The rank ends after `ms`, with a wait status as the kernel gives it.
        fn ends(mut self, rank: usize, ms: u64, status: i32, was_asked: bool) -> Self {
            let at = self.begin + Duration::from_millis(ms);
            self.ranks[rank].ended =
                Some(RankEnd { status: ExitStatus::from_raw(status), at, was_asked });
            self
        }

        fn blames(self, rank: usize, culprits: &[usize]) -> Self {
            let text = serde_json::json!({ "message": { "extraInfo": { "culprits": culprits } } });
            std::fs::write(self.folder.path().join(format!("rank{rank}")), text.to_string())
                .unwrap();
            self
        }

        fn cause(&self) -> (usize, String, u8) {
            let Blame { ranks, what, code } = self.cause_among(0, self.ranks.len());
            let [rank] = ranks[..] else { panic!("{ranks:?}") };
            (rank, what, code)
        }

        fn cause_among(&self, first: usize, world: usize) -> Blame {
            let activities = vec!["is stopped"; self.ranks.len()];
            cause(&self.ranks, first, world, &activities)
        }
    }

    const KILLED: i32 = 9;
    const TERMINATED: i32 = 15;
    const CONSEQUENCE: i32 = 3 << 8;

    #[test]
    fn the_rank_that_was_killed_is_named_even_if_it_is_noticed_last() {
        let ranks = Ranks::new(3)
            .ends(0, 10, CONSEQUENCE, false)
            .ends(1, 20, CONSEQUENCE, false)
            .ends(2, 30, KILLED, false)
            .blames(0, &[1]);
        assert_eq!(ranks.cause(), (2, "was killed by SIGKILL".into(), 137));
    }

    #[test]
    fn a_rank_that_was_killed_is_named_before_one_that_exited_earlier() {
        // Rank 1 is not a program of ours: it exits with 1 when it has lost its peer.
        let ranks = Ranks::new(2).ends(0, 12, KILLED, false).ends(1, 10, 1 << 8, false);
        assert_eq!(ranks.cause(), (0, "was killed by SIGKILL".into(), 137));
        // A rank that aborts because its peer has exited is a consequence.
        for signal in [SIGABRT, SIGPIPE] {
            let ranks = Ranks::new(2).ends(0, 12, signal, false).ends(1, 10, 7 << 8, false);
            assert_eq!(ranks.cause(), (1, "exited with code 7".into(), 7));
        }
    }

    #[test]
    fn the_rank_that_was_asked_to_end_is_named_although_all_end_alike() {
        let (asked, other) = (143 << 8, 143 << 8);
        let ranks = Ranks::new(3).ends(2, 10, other, false).ends(1, 11, asked, false);
        let ranks = ranks.ends(0, 12, other, false).blames(2, &[1]).blames(0, &[1]);
        assert_eq!(ranks.cause(), (1, "exited with code 143".into(), 143));
    }

    #[test]
    fn a_stopped_rank_is_named_although_nobody_else_is_there_to_name_it() {
        let ranks = Ranks::new(1).ends(0, 900, KILLED, true);
        assert_eq!(ranks.cause_among(1, 2), Blame::of([1], STOPPED, 1));
    }

    #[test]
    fn a_rank_that_the_launcher_has_ended_is_not_the_cause() {
        let ranks = Ranks::new(3).ends(0, 50, TERMINATED, true).ends(1, 20, 7 << 8, false);
        let ranks = ranks.ends(2, 30, CONSEQUENCE, false);
        assert_eq!(ranks.cause(), (1, "exited with code 7".into(), 7));
    }

    #[test]
    fn the_rank_that_is_missing_is_named_and_not_those_that_noticed_it() {
        let ranks = Ranks::new(4)
            .ends(0, 10, CONSEQUENCE, false)
            .ends(1, 11, CONSEQUENCE, false)
            .ends(2, 900, KILLED, true)
            .ends(3, 12, CONSEQUENCE, false)
            .blames(0, &[2])
            .blames(1, &[2])
            // It saw rank 0 end, and does not know why.
            .blames(3, &[0]);
        assert_eq!(ranks.cause(), (2, "is stopped".into(), 1));
    }

    #[test]
    fn a_rank_that_left_too_early_is_named() {
        let ranks =
            Ranks::new(2).ends(0, 10, 0, false).ends(1, 11, CONSEQUENCE, false).blames(1, &[0]);
        let (rank, what, code) = ranks.cause();
        assert_eq!((rank, code), (0, 1));
        assert!(what.contains("code 0"), "{what}");
    }

    #[test]
    fn without_any_word_of_the_ranks_the_first_one_is_named() {
        let ranks = Ranks::new(2).ends(0, 20, CONSEQUENCE, false).ends(1, 10, CONSEQUENCE, false);
        assert_eq!(ranks.cause(), (1, "exited with code 3".into(), 3));
    }

    /// The two ranks of a host that both end as a consequence.
    fn both_complain() -> Ranks {
        Ranks::new(2).ends(0, 10, CONSEQUENCE, false).ends(1, 11, CONSEQUENCE, false)
    }

    #[test]
    fn a_rank_of_another_host_is_named_by_its_number_among_all() {
        let expected =
            |ranks: &[usize]| Blame::of(ranks.iter().copied(), "ended or did not answer", 3);
        // This host has ranks 2 and 3 of 6. Rank 2 has only seen that rank 3 ended.
        let ranks = both_complain().blames(0, &[3]).blames(1, &[5]);
        assert_eq!(ranks.cause_among(2, 6), expected(&[5]));
        let ranks = both_complain().blames(0, &[0]).blames(1, &[2]);
        assert_eq!(ranks.cause_among(2, 6), expected(&[0]));
        // Each knows only the rank that it has waited for.
        let ranks = both_complain().blames(0, &[4]).blames(1, &[5]);
        assert_eq!(ranks.cause_among(2, 6), expected(&[4, 5]));
    }

    #[test]
    fn a_rank_of_this_host_is_found_by_its_number_among_all() {
        let ranks = Ranks::new(2).ends(0, 10, CONSEQUENCE, false).ends(1, 900, KILLED, true);
        let cause = ranks.blames(0, &[5]).cause_among(4, 6);
        assert_eq!(cause, Blame::of([5], STOPPED, 1));
        let ranks = Ranks::new(2).ends(0, 10, CONSEQUENCE, false).ends(1, 20, KILLED, false);
        let cause = ranks.cause_among(4, 6);
        assert_eq!(cause, Blame::of([5], "was killed by SIGKILL", 137));
    }

    #[test]
    fn a_failure_elsewhere_of_which_nobody_knows_the_rank_is_not_blamed_on_this_host() {
        let nobody = Blame::of([], "failed", 3);
        assert_eq!(both_complain().blames(0, &[]).cause_among(2, 6), nobody);
        assert_eq!(both_complain().blames(0, &[3]).cause_among(2, 6), nobody);
    }

    #[test]
    fn a_program_that_exits_with_code_3_without_a_word_is_named() {
        let cause = both_complain().cause_among(2, 6);
        assert_eq!(cause, Blame::of([2], "exited with code 3", 3));
    }
}
