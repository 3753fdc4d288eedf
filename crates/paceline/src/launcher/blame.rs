//! Which rank a failed run is about, and how it ended.
//!
//! In go the ranks as they have ended. Out comes the rank that the user has to look at: the one that failed by itself,
//! or else the one that the others have waited for in vain.

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::Instant;

use paceline_rendezvous::read_culprits;
use rustix::process::Pid;

use super::signals;
use super::start::Rank;
use crate::failure::{EXIT_CONSEQUENCE, EXIT_RUN};

/// The end of a rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct End {
    pub(super) status: ExitStatus,
    pub(super) at: Instant,
    /// Whether it is the answer to a signal of the launcher.
    pub(super) was_asked: bool,
}

/// The rank that a failure is about.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Cause {
    pub(super) rank: usize,
    /// What happened to it, for the message.
    pub(super) what: String,
    /// The code to exit with.
    pub(super) code: u8,
}

/// What a stopped or busy rank does, as the kernel says.
pub(super) fn activity(pid: Pid) -> &'static str {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()));
    // The state follows the name of the program, which may hold anything.
    let state = stat.ok().and_then(|stat| stat.rsplit_once(") ")?.1.chars().next());
    match state {
        Some('T' | 't') => "is stopped",
        Some('D') => "waits for a device",
        Some('Z') | None => "has ended",
        _ => "runs, but did not take part",
    }
}

/// The cause of a failure, once all ranks have ended. `activities` says what each rank did when the failure was
/// noticed.
pub(super) fn cause(ranks: &[Rank], activities: &[&str]) -> Cause {
    let by_itself = |rank: &Rank| {
        let end = rank.ended.as_ref().filter(|end| !end.was_asked && !end.status.success())?;
        (end.status.code() != Some(i32::from(EXIT_CONSEQUENCE))).then_some(end.at)
    };
    let first = (0..ranks.len()).filter_map(|rank| Some((by_itself(&ranks[rank])?, rank))).min();
    if let Some((_, rank)) = first {
        return ended(rank, ranks);
    }
    // All that ended by themselves say that others were the cause.
    let mut votes = vec![0; ranks.len()];
    for rank in ranks {
        let culprits = rank.error_file.as_deref().map(read_culprits).unwrap_or_default();
        culprits.into_iter().filter(|&rank| rank < ranks.len()).for_each(|rank| votes[rank] += 1);
    }
    let has_complained = |rank: usize| ranks[rank].ended.is_some_and(|end| !end.was_asked);
    // A rank that says itself that others are missing is not the one that is missing.
    let most = (0..ranks.len()).filter(|&rank| votes[rank] > 0);
    let most =
        most.max_by_key(|&rank| (!has_complained(rank), votes[rank], std::cmp::Reverse(rank)));
    if let Some(rank) = most {
        if ranks[rank].ended.is_some_and(|end| !end.was_asked && end.status.success()) {
            let what = "ended with code 0 while others still needed it".to_owned();
            return Cause { rank, what, code: EXIT_RUN };
        }
        if !has_complained(rank) {
            return Cause { rank, what: activities[rank].to_owned(), code: EXIT_RUN };
        }
    }
    let failed =
        |rank: &usize| Some((ranks[*rank].ended.filter(|end| !end.status.success())?.at, *rank));
    let first = (0..ranks.len()).filter_map(|rank| failed(&rank)).min();
    ended(first.map_or(0, |(_, rank)| rank), ranks)
}

/// A rank that has ended, as a cause.
fn ended(rank: usize, ranks: &[Rank]) -> Cause {
    let Some(End { status, .. }) = ranks[rank].ended else {
        return Cause { rank, what: "did not end".to_owned(), code: EXIT_RUN };
    };
    let (what, code) = match (status.code(), status.signal()) {
        (Some(code), _) => (format!("exited with code {code}"), code as u8),
        (None, Some(signal)) => {
            (format!("was killed by {}", signals::name(signal)), 128 + signal as u8)
        }
        (None, None) => (format!("ended ({status})"), EXIT_RUN),
    };
    Cause { rank, what, code }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

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
                Some(End { status: ExitStatus::from_raw(status), at, was_asked });
            self
        }

        fn blames(self, rank: usize, culprits: &[usize]) -> Self {
            let text = serde_json::json!({ "message": { "extraInfo": { "culprits": culprits } } });
            std::fs::write(self.folder.path().join(format!("rank{rank}")), text.to_string())
                .unwrap();
            self
        }

        fn cause(&self) -> (usize, String, u8) {
            let activities = vec!["is stopped"; self.ranks.len()];
            let Cause { rank, what, code } = cause(&self.ranks, &activities);
            (rank, what, code)
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
    fn a_rank_that_the_launcher_has_ended_is_not_the_cause() {
        let ranks = Ranks::new(3).ends(0, 50, TERMINATED, true).ends(1, 20, 7 << 8, false).ends(
            2,
            30,
            CONSEQUENCE,
            false,
        );
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
}
