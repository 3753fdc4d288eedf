//! Random histories of the list of members, without sockets: after each event the list has decided all that its terms
//! promise, at the promised time, and nothing else.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use paceline_trace::simulation::SplitMix;

use super::agreement::{Agreement, Decision};
use super::wire::{End, Notice};
use super::{MemberEvent, Terms};

const EVICT_AFTER: Duration = Duration::from_secs(3);
const LIMIT: Duration = Duration::from_secs(10);
const STARTED: u64 = 4;
/// The ranks of the first host have the numbers below this one.
const OF_FIRST_HOST: u64 = 2;

/// The members as the test knows them.
#[derive(Debug, Default)]
struct Known {
    /// Those that have not come yet.
    coming: BTreeSet<u64>,
    /// The others, and whether they are ready.
    living: BTreeMap<u64, bool>,
    generation: u64,
    ranks: Vec<u64>,
    spares: Vec<u64>,
    is_broken: bool,
    /// The ranks that may still be there although the others do not wait for them.
    silent: BTreeSet<u64>,
    /// Since when a member is ready for which the others should not wait in vain.
    ready_since: Option<Duration>,
    /// Since when nobody is awaited, and too few are ready.
    few_since: Option<Duration>,
    is_finishing: bool,
}

impl Known {
    /// Whether the next generation waits for this member.
    fn counts(&self, number: u64) -> bool {
        self.generation == 0 || self.ranks.contains(&number)
    }

    fn ready(&self) -> Vec<u64> {
        self.living.iter().filter(|(_, is_ready)| **is_ready).map(|(of, _)| *of).collect()
    }

    fn of_last(&self) -> Vec<u64> {
        let all = self.ranks.iter().chain(&self.spares).copied();
        all.filter(|of| self.living.contains_key(of)).collect()
    }

    fn is_awaiting(&self) -> bool {
        let mut unready = self.living.iter().filter(|(_, is_ready)| !**is_ready);
        unready.any(|(of, _)| self.counts(*of)) || self.generation == 0 && !self.coming.is_empty()
    }

    fn patience(&self) -> Duration {
        if self.generation == 0 { LIMIT } else { EVICT_AFTER }
    }

    /// Keeps the times of waits, after members have changed.
    fn note(&mut self, now: Duration) {
        let is_ready = self.ready().iter().any(|of| self.counts(*of));
        self.ready_since = is_ready.then(|| self.ready_since.unwrap_or(now));
    }

    fn is_minority(&self, ready: &[u64]) -> bool {
        let left: Vec<&u64> = ready.iter().filter(|of| self.ranks.contains(of)).collect();
        let silent = self.ranks.iter().filter(|of| self.silent.contains(of)).count();
        let has_first = left.iter().any(|of| **of < OF_FIRST_HOST);
        silent > left.len() || silent > 0 && silent == left.len() && !has_first
    }
}

struct History {
    list: Agreement,
    terms: Terms,
    known: Known,
    now: Duration,
}

impl History {
    fn new(random: &mut SplitMix) -> Self {
        let sizes = [vec![1, 2, 3, 4, 5], vec![2, 4], vec![3]][random.below(3) as usize].clone();
        let first_host = (random.below(2) == 0).then_some(OF_FIRST_HOST as usize);
        let (expected, settings) = (STARTED as usize, String::new());
        let terms =
            Terms { sizes, expected, first_host, settings, evict_after: EVICT_AFTER, limit: LIMIT };
        let coming = (0..STARTED).collect();
        let known = Known { coming, ..Known::default() };
        Self { list: Agreement::new(terms.clone()), terms, known, now: Duration::ZERO }
    }

    /// One event, which the list hears at once. Returns whether the generation breaks up.
    fn event(&mut self, random: &mut SplitMix) -> bool {
        let Known { coming, living, ranks, spares, is_finishing, .. } = &mut self.known;
        let all: Vec<u64> = coming.iter().chain(living.keys()).copied().collect();
        let any = |random: &mut SplitMix| all.get(random.below(all.len() as u64 + 1) as usize);
        let what = random.below(12);
        let Some(&number) = any(random) else {
            if let Ok(number) = self.list.join(None, "", "here") {
                living.insert(number, false);
            }
            return false;
        };
        if what < 2 {
            coming.remove(&number);
            living.remove(&number);
            self.list.gone(number, "was killed");
            return ranks.contains(&number) || spares.contains(&number);
        }
        if coming.remove(&number) {
            self.list.join(Some(number), "", "here").unwrap();
            living.insert(number, false);
        } else if living[&number] {
            // It waits.
        } else if what == 2 && ranks.contains(&number) {
            living.remove(&number);
            *is_finishing = true;
            self.list.leave(number);
            return true;
        } else if what < 9 {
            living.insert(number, true);
            self.list.ready(number, Vec::new(), self.now);
            return ranks.contains(&number);
        }
        false
    }

    /// Checks the decisions of the list after an event. Returns whether the run goes on.
    fn settle(&mut self, breaks: bool) -> bool {
        let (of_last, generation) = (self.known.of_last(), self.known.generation);
        let is_first = breaks && !self.known.is_broken && !of_last.is_empty();
        self.known.note(self.now);
        let decisions = self.list.settle(self.now);
        let known = &mut self.known;
        let mut told = Vec::new();
        for decision in decisions {
            match decision {
                Decision::Tell(to, Notice::Broken { generation, .. }) => {
                    assert_eq!(generation, known.generation);
                    told.extend((!to.is_empty()).then_some(to));
                }
                Decision::Event(MemberEvent::LeftOut { number, .. }) => {
                    let is_late =
                        known.ready_since.is_some_and(|t| self.now >= t + known.patience());
                    assert!(is_late, "{number} is left out too early");
                    assert!(known.counts(number) && known.living.get(&number) != Some(&true));
                    known.coming.remove(&number);
                    known.living.remove(&number);
                    known.silent.insert(number);
                }
                Decision::Event(MemberEvent::Next { generation, members, spares }) => {
                    assert!(!known.is_finishing, "a run that has finished goes on");
                    check_next(known, &self.terms, (generation, &members, &spares));
                    known.living.values_mut().for_each(|is_ready| *is_ready = false);
                    (known.generation, known.ranks, known.spares) = (generation, members, spares);
                    (known.ready_since, known.few_since, known.is_broken) = (None, None, false);
                    known.silent.clear();
                }
                Decision::Event(MemberEvent::Failed { reason }) => {
                    let is_due = known.few_since.is_some_and(|t| self.now >= t + LIMIT);
                    let is_minority =
                        self.terms.first_host.is_some() && known.is_minority(&known.ready());
                    assert!(is_due || is_minority, "{reason}");
                    return false;
                }
                Decision::End(_, End::Finished) => {
                    assert!(known.is_finishing);
                    return false;
                }
                _ => {}
            }
        }
        assert_eq!(told, if is_first { vec![of_last] } else { Vec::new() }, "who hears of the end");
        known.is_broken |= breaks && known.generation == generation;
        self.is_done();
        true
    }

    /// Fails if something is due that the list has not decided.
    fn is_done(&mut self) {
        let Self { known, now, .. } = self;
        let ready = known.ready();
        assert!(
            !known.is_finishing || ready.is_empty(),
            "a member waits in a run that has finished"
        );
        if known.is_awaiting() {
            let is_late = known.ready_since.is_some_and(|t| *now >= t + known.patience());
            assert!(!is_late, "a silent member is not left out");
            return;
        }
        let is_enough = self.terms.sizes.iter().any(|size| *size <= ready.len());
        assert!(ready.is_empty() || !is_enough, "enough members are ready");
        known.few_since = (!ready.is_empty()).then(|| known.few_since.unwrap_or(*now));
        assert!(known.few_since.is_none_or(|t| *now < t + LIMIT), "too few wait too long");
    }
}

/// Whether this generation is the right one.
fn check_next(known: &Known, terms: &Terms, next: (u64, &[u64], &[u64])) {
    let (generation, members, spares) = next;
    let mut ready = known.ready();
    assert!(!known.is_awaiting(), "somebody is still awaited");
    assert!(terms.first_host.is_none() || !known.is_minority(&ready), "a minority goes on");
    if terms.first_host.is_some() {
        ready.sort_by_key(|of| *of >= OF_FIRST_HOST);
    }
    assert_eq!(generation, known.generation + 1);
    assert_eq!([members, spares].concat(), ready);
    let size = terms.sizes.iter().filter(|size| **size <= ready.len()).max();
    assert_eq!(Some(&members.len()), size);
}

#[test]
fn the_list_decides_what_is_due_and_nothing_else() {
    let mut generations = 0;
    for seed in 0..3000 {
        let mut random = SplitMix(seed);
        let mut history = History::new(&mut random);
        for _ in 0..80 {
            history.now += Duration::from_millis(random.below(4) * random.below(900));
            let breaks = history.event(&mut random);
            if !history.settle(breaks) {
                break;
            }
        }
        generations += history.known.generation;
    }
    assert!(generations > 1000, "{generations}");
}
