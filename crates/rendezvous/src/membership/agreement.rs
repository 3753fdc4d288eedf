//! Decides who belongs to a generation, from what members say and from the time.
//!
//! Input: what members and launchers have said, and the time since the start. Decision: what members learn, and events.
//!
//! - The first generation waits for all ranks that launchers start. A later one is decided when all members of the last one
//!   are ready or gone. From the first of them that is ready, the others have `evict_after`; whoever is not ready then is left out.
//! - A generation has the largest allowed size, and the oldest members. The others are spares.
//! - If too few are ready, they wait for more for as long as the limit, if any may come.
//! - With several hosts, the members that go on must be more than half of those of the last generation that may still be there, or half
//!   of them with a rank of the first host. So a part that is cut off does not train on alone. Who has certainly ended does not count.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::generation::Generation;
use super::wire::{End, Notice};
use super::{GenerationPlace, MemberEvent, Terms};

/// A message or an event that follows from a decision.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Decision {
    Tell(Vec<u64>, Notice),
    /// The last notice for these members, which have gone from the list.
    End(Vec<u64>, End),
    Event(MemberEvent),
}

/// The members that are here and those that are on their way, by number.
#[derive(Debug, Default)]
struct Present {
    living: BTreeMap<u64, Living>,
    /// Those that a launcher has started or is about to start.
    coming: BTreeSet<u64>,
    /// All that the first host's launcher has started.
    of_first_host: BTreeSet<u64>,
    /// Those that have gone and may still train somewhere.
    silent: BTreeSet<u64>,
    /// The next number to give.
    next: u64,
}

#[derive(Debug, Default)]
struct Living {
    is_ready: bool,
    missed: Vec<u64>,
}

/// How far the run is.
#[derive(Clone, Debug, PartialEq, Eq)]
enum RunPhase {
    Going,
    /// A member has done its work, and the others are about to do so.
    Finishing,
    Over(End),
}

/// The longest settings in words.
const MAX_SETTINGS_BYTES: usize = 64 << 10;
/// All members hear and print a reason.
const MAX_REASON_CHARS: usize = 1000;

#[derive(Debug)]
pub(super) struct Agreement {
    terms: Terms,
    present: Present,
    last: Generation,
    progress: RunPhase,
    /// Whether processes may come that have no number yet.
    pub(super) may_come: bool,
    /// When the first member that others wait for became ready.
    since: Option<Duration>,
    /// Since when too few members are ready.
    short_since: Option<Duration>,
    decisions: Vec<Decision>,
}

impl Agreement {
    pub(super) fn new(terms: Terms) -> Self {
        let next = terms.expected as u64;
        let of_first_host = (0..terms.first_host.map_or(next, |count| count as u64)).collect();
        let coming = (0..next).collect();
        let present = Present { coming, of_first_host, next, ..Present::default() };
        let (last, decisions) = (Generation::default(), Vec::new());
        let (since, short_since) = (None, None);
        Self {
            terms,
            present,
            last,
            progress: RunPhase::Going,
            may_come: true,
            since,
            short_since,
            decisions,
        }
    }

    /// The number of a process that the first host's launcher is about to start.
    pub(super) fn next_number(&mut self) -> u64 {
        let number = self.give_number();
        self.present.coming.insert(number);
        self.present.of_first_host.insert(number);
        number
    }

    fn give_number(&mut self) -> u64 {
        self.present.next += 1;
        self.present.next - 1
    }

    /// A process wants to join. Returns its number, or why it may not.
    pub(super) fn join(
        &mut self,
        number: Option<u64>,
        settings: &str,
        from: &str,
    ) -> Result<u64, String> {
        match &self.progress {
            RunPhase::Going => {}
            RunPhase::Finishing => return Err("the run is about to end".into()),
            RunPhase::Over(_) => return Err("the run has ended".into()),
        }
        if settings.len() > MAX_SETTINGS_BYTES {
            return Err(format!("its settings are longer than {MAX_SETTINGS_BYTES} bytes"));
        }
        let own = &self.terms.settings;
        if settings != own {
            return Err(format!("the run has the settings {own}, and this process has {settings}"));
        }
        let Present { living, coming, .. } = &mut self.present;
        let number = match number {
            Some(number) if coming.remove(&number) => number,
            Some(number) if living.contains_key(&number) => {
                return Err(format!("another process has already come as member {number}"));
            }
            Some(number) => {
                return Err(format!(
                    "there is no member {number} any more; a process that comes back joins as a new member"
                ));
            }
            None => {
                let (now, most) = (living.len() + coming.len(), self.max());
                if now >= most {
                    return Err(format!("the run is full: it has {now} of at most {most} ranks"));
                }
                self.give_number()
            }
        };
        self.present.living.insert(number, Living::default());
        let from = from.to_owned();
        self.decisions.push(Decision::Event(MemberEvent::Joined { number, from }));
        Ok(number)
    }

    /// A member is ready for the next generation.
    pub(super) fn ready(&mut self, number: u64, missed: Vec<u64>, now: Duration) {
        if let RunPhase::Over(end) = self.progress.clone() {
            return self.dismiss(vec![number], &end);
        }
        let Some(living) = self.present.living.get_mut(&number) else { return };
        *living = Living { is_ready: true, missed };
        if self.last.number == 0 || self.last.ranks().contains(&number) {
            self.since.get_or_insert(now);
        } else if !self.last.wait(number) {
            return;
        }
        self.break_up(format!("member {number} waits for the next generation"));
    }

    /// A member's text for the others.
    pub(super) fn text(
        &mut self,
        from: u64,
        generation: u64,
        text: (String, String),
        now: Duration,
    ) {
        if generation == self.last.number
            && let Some(notice) = self.last.take(from, text, now)
        {
            self.decisions.push(Decision::Tell(self.living_of_last(), notice));
        }
    }

    /// A member's work is done.
    pub(super) fn leave(&mut self, number: u64) {
        if self.progress == RunPhase::Going && self.last.ranks().contains(&number) {
            self.progress = RunPhase::Finishing;
        }
        self.remove(number, None);
    }

    /// A member has found that nobody can go on.
    pub(super) fn give_up(&mut self, number: u64, reason: String) {
        self.remove(number, Some("nobody can go on".into()));
        if self.progress == RunPhase::Going && self.last.ranks().contains(&number) {
            self.fail(reason.chars().take(MAX_REASON_CHARS).collect());
        }
    }

    /// A member cannot be reached. It may still be there.
    pub(super) fn unreachable(&mut self, number: u64, how: &str) {
        self.present.silent.insert(number);
        self.remove(number, Some(how.into()));
    }

    /// A member has ended, or a process that was to become one.
    pub(super) fn gone(&mut self, number: u64, how: &str) {
        self.present.coming.remove(&number);
        self.present.silent.remove(&number);
        self.remove(number, Some(how.into()));
    }

    fn remove(&mut self, number: u64, how: Option<String>) {
        if self.present.living.remove(&number).is_none() {
            return;
        }
        let reason = match &how {
            Some(how) => format!("member {number} has gone: {how}"),
            None => format!("member {number} has done its work"),
        };
        self.decisions.push(Decision::Event(MemberEvent::Gone { number, how }));
        if self.last.everybody().contains(&number) {
            self.break_up(reason);
        }
        if !self.awaited_and_ready().1 {
            self.since = None;
        }
    }

    /// Ends the exchanges of the last generation.
    pub(super) fn break_up(&mut self, reason: String) {
        if let Some(notice) = self.last.end(reason) {
            self.decisions.push(Decision::Tell(self.living_of_last(), notice));
        }
    }

    /// Decides what is due, and returns what follows from this and all earlier calls.
    pub(super) fn settle(&mut self, now: Duration) -> Vec<Decision> {
        let missing = self.last.missing(now, self.terms.evict_after);
        if !missing.is_empty() {
            self.break_up(format!(
                "members {missing:?} have not answered within {:?}",
                self.terms.evict_after
            ));
        }
        // A rank leaves once the result is complete.
        let is_over = || self.living_ranks().is_empty() || !self.ready_members().is_empty();
        if self.progress == RunPhase::Finishing && is_over() {
            self.end(End::Finished);
        }
        if !matches!(self.progress, RunPhase::Over(_)) {
            self.decide(now);
            self.ask();
        }
        std::mem::take(&mut self.decisions)
    }

    /// Whether something may become due without another message.
    pub(super) fn is_waiting(&self) -> bool {
        self.since.is_some() || self.short_since.is_some() || self.last.has_open_rounds()
    }

    /// The members that the next generation waits for, and whether any of their kind is ready.
    fn awaited_and_ready(&self) -> (Vec<u64>, bool) {
        let Present { living, coming, .. } = &self.present;
        let is_first = self.last.number == 0;
        let counts = |number: &u64| is_first || self.last.ranks().contains(number);
        let mut awaited: Vec<u64> =
            if is_first { coming.iter().copied().collect() } else { Vec::new() };
        let unready = living.iter().filter(|(number, of)| counts(number) && !of.is_ready);
        awaited.extend(unready.map(|(number, _)| *number));
        let any_ready = living.iter().any(|(number, of)| counts(number) && of.is_ready);
        (awaited, any_ready)
    }

    fn decide(&mut self, now: Duration) {
        let (awaited, _) = self.awaited_and_ready();
        if !awaited.is_empty() {
            let is_first = self.last.number == 0;
            let patience = if is_first { self.terms.limit } else { self.terms.evict_after };
            if self.since.is_none_or(|since| now < since + patience) {
                return;
            }
            self.leave_out(&awaited, patience);
        }
        let ready = self.ready_members();
        if ready.is_empty() {
            self.short_since = None;
            return;
        }
        if let Some(reason) = self.is_minority(&ready) {
            return self.fail(reason);
        }
        let size = self.terms.sizes.iter().copied().filter(|&size| size <= ready.len()).max();
        match size {
            Some(size) => self.begin(ready, size),
            None => self.wait_for_more(ready.len(), now),
        }
    }

    fn leave_out(&mut self, awaited: &[u64], patience: Duration) {
        for &number in awaited {
            self.present.coming.remove(&number);
            self.present.living.remove(&number);
            self.present.silent.insert(number);
            let living = self.present.living.iter();
            let missed_by = living.filter(|(_, of)| of.missed.contains(&number));
            let missed_by = missed_by.map(|(number, _)| *number).collect();
            let reason = format!("it did not answer within {patience:?}");
            self.decisions.push(Decision::Event(MemberEvent::LeftOut { number, missed_by }));
            self.decisions.push(Decision::End(vec![number], End::LeftOut(reason)));
        }
    }

    fn begin(&mut self, mut ready: Vec<u64>, size: usize) {
        // Rank 0, which writes the files of the run, is on the first host.
        ready.sort_by_key(|number| !self.present.of_first_host.contains(number));
        let generation = self.last.number + 1;
        for (index, number) in ready.iter().enumerate() {
            let place = GenerationPlace { generation, index, members: ready.clone(), size };
            self.decisions.push(Decision::Tell(vec![*number], Notice::Next(place)));
            self.present.living.insert(*number, Living::default());
        }
        let (members, spares) = (ready[..size].to_vec(), ready[size..].to_vec());
        self.last = Generation::new(generation, ready, size);
        (self.since, self.short_since) = (None, None);
        self.present.silent.clear();
        self.decisions.push(Decision::Event(MemberEvent::Next { generation, members, spares }));
    }

    fn wait_for_more(&mut self, left: usize, now: Duration) {
        let needed = self.terms.sizes.first().copied().unwrap_or(1);
        let few = format!("too few members, {left} of at least {needed}");
        let Present { living, coming, .. } = &self.present;
        let is_here = living.values().any(|of| !of.is_ready);
        if !self.may_come && coming.is_empty() && !is_here {
            return self.fail(format!("{few}; none can come"));
        }
        if self.short_since.is_none() {
            self.decisions.push(Decision::Event(MemberEvent::TooFew { left, needed }));
        }
        let since = *self.short_since.get_or_insert(now);
        if now >= since + self.terms.limit {
            self.fail(format!("{few}; none has come within {:?}", self.terms.limit));
        }
    }

    /// Why these members do not go on, if they are the smaller part of several hosts' members.
    fn is_minority(&self, ready: &[u64]) -> Option<String> {
        self.terms.first_host?;
        let last = || self.last.ranks().iter();
        let silent = last().filter(|of| self.present.silent.contains(of)).count();
        let left: Vec<&u64> = last().filter(|of| ready.contains(of)).collect();
        let has_first = left.iter().any(|of| self.present.of_first_host.contains(of));
        let (left, all) = (left.len(), left.len() + silent);
        let needed = if has_first { all.div_ceil(2) } else { all / 2 + 1 };
        (silent > 0 && left < needed).then(|| {
            format!(
                "{left} of {all} members are left; a part that is cut off does not train on alone"
            )
        })
    }

    fn fail(&mut self, reason: String) {
        self.decisions.push(Decision::Event(MemberEvent::Failed { reason: reason.clone() }));
        self.end(End::Failed(reason));
    }

    /// Ends the run for all that wait, and for all that are ready later.
    fn end(&mut self, end: End) {
        self.progress = RunPhase::Over(end.clone());
        (self.since, self.short_since) = (None, None);
        self.dismiss(self.ready_members(), &end);
    }

    fn dismiss(&mut self, numbers: Vec<u64>, end: &End) {
        for &number in &numbers {
            self.present.living.remove(&number);
            let how = if *end == End::Finished { None } else { Some("nobody goes on".into()) };
            self.decisions.push(Decision::Event(MemberEvent::Gone { number, how }));
        }
        self.decisions.push(Decision::End(numbers, end.clone()));
    }

    /// Whether anybody belongs to the run or waits for it.
    pub(super) fn has_members(&self) -> bool {
        !self.present.living.is_empty()
    }

    /// Asks the members of the generation to meet again, if they would be more.
    fn ask(&mut self) {
        if self.last.number == 0 || self.last.is_asked {
            return;
        }
        let members = self.living_ranks();
        let waiting = self.ready_members().iter().filter(|of| !members.contains(of)).count();
        let reach = members.len() + waiting;
        let is_larger = |size: &usize| *size > self.last.ranks().len() && *size <= reach;
        if self.terms.sizes.iter().any(is_larger) {
            self.last.is_asked = true;
            self.decisions.push(Decision::Tell(members, Notice::Asked));
        }
    }

    fn living_ranks(&self) -> Vec<u64> {
        let living = &self.present.living;
        self.last.ranks().iter().copied().filter(|of| living.contains_key(of)).collect()
    }

    fn living_of_last(&self) -> Vec<u64> {
        let living = &self.present.living;
        self.last.everybody().iter().copied().filter(|of| living.contains_key(of)).collect()
    }

    fn ready_members(&self) -> Vec<u64> {
        let ready = self.present.living.iter().filter(|(_, of)| of.is_ready);
        ready.map(|(number, _)| *number).collect()
    }

    fn max(&self) -> usize {
        self.terms.sizes.last().copied().unwrap_or(self.terms.expected)
    }
}
