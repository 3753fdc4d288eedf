//! Who waits for whom, and who is the cause. The rules are in the module above.
//!
//! The files of all ranks go in. This file opens none.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::dump::{Dump, Entry, State};
use super::{Cause, Culprit, Hang, Victim};

/// Rank `from` waits in `entry` for rank `to`.
#[derive(Clone, Copy)]
struct Wait<'a> {
    from: usize,
    to: usize,
    entry: &'a Entry,
}

/// All ranks of a job.
struct JobRanks<'a> {
    ranks: BTreeMap<usize, RankCalls<'a>>,
    groups: BTreeMap<&'a str, Vec<usize>>,
}

/// The calls of a rank.
struct RankCalls<'a> {
    dump: &'a Dump,
    /// The collectives that the file has, by group and number.
    collectives: HashMap<(&'a str, i64), &'a Entry>,
    /// The lowest and the highest number of each group.
    numbers: HashMap<&'a str, (i64, i64)>,
    unfinished: Vec<&'a Entry>,
    /// Whether files of this job tell which calls a device has begun.
    has_starts: bool,
}

impl<'a> RankCalls<'a> {
    fn new(dump: &'a Dump, has_starts: bool) -> Self {
        let of_groups = dump.entries.iter().filter(|of| !of.is_p2p());
        let mut numbers: HashMap<&str, (i64, i64)> = HashMap::new();
        for of in of_groups.clone() {
            let (low, high) = numbers.entry(&of.group).or_insert((of.number, of.number));
            (*low, *high) = (of.number.min(*low), of.number.max(*high));
        }
        let collectives = of_groups.map(|of| ((of.group.as_str(), of.number), of)).collect();
        let unfinished = dump.entries.iter().filter(|of| of.state != State::Completed).collect();
        Self { dump, collectives, numbers, unfinished, has_starts }
    }

    /// How far a collective came here; `None` if the host has not made the call.
    fn state(&self, group: &str, number: i64) -> Option<State> {
        if let Some(entry) = self.collectives.get(&(group, number)) {
            return Some(if self.has_begun(entry) {
                entry.state.max(State::Started)
            } else {
                entry.state
            });
        }
        if let Some((low, _)) = self.numbers.get(group) {
            // The buffer has lost older ones.
            return (number < *low).then_some(State::Completed);
        }
        let progress = self.dump.progress.get(group)?;
        match number {
            _ if number <= progress.completed => Some(State::Completed),
            _ if number <= progress.enqueued => Some(State::Scheduled),
            _ => None,
        }
    }

    /// Whether the device has begun a call.
    fn has_begun(&self, entry: &Entry) -> bool {
        let is_first = || self.unfinished.first().is_some_and(|first| std::ptr::eq(*first, entry));
        entry.state > State::Scheduled || (entry.is_gloo || !self.has_starts) && is_first()
    }

    fn begun(&self) -> impl Iterator<Item = &'a Entry> {
        self.unfinished.iter().copied().filter(|of| self.has_begun(of))
    }

    fn last_ns(&self) -> Option<i64> {
        self.dump.entries.iter().map(|of| of.last_ns).max()
    }
}

impl<'a> JobRanks<'a> {
    fn new(dumps: &'a [Dump]) -> Self {
        let has_starts = dumps.iter().any(|of| of.has_starts);
        let ranks = dumps.iter().map(|of| (of.rank, RankCalls::new(of, has_starts)));
        let ranks: BTreeMap<usize, RankCalls> = ranks.collect();
        let mut groups: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        let configured = dumps.iter().flat_map(|of| &of.groups);
        let highest = configured.clone().flat_map(|(_, members)| members).chain(ranks.keys()).max();
        for (name, members) in configured.filter(|(name, _)| !name.starts_with(' ')) {
            groups.entry(name).or_insert_with(|| members.clone());
        }
        // Gloo's files have no members. The default group, which has all ranks, is named 0.
        let all = || (0..=highest.copied().unwrap_or(0)).collect();
        for name in ranks.values().flat_map(|of| of.numbers.keys().copied()) {
            let has_calls = |of: &RankCalls| of.numbers.contains_key(name);
            let callers =
                || ranks.iter().filter(|(_, of)| has_calls(of)).map(|(rank, _)| *rank).collect();
            groups.entry(name).or_insert_with(|| if name == "0" { all() } else { callers() });
        }
        Self { ranks, groups }
    }

    fn missing(&self) -> Vec<usize> {
        let members: BTreeSet<usize> = self.groups.values().flatten().copied().collect();
        members.into_iter().filter(|rank| !self.ranks.contains_key(rank)).collect()
    }

    /// Members of a group whose unfinished collective differs from that of the majority.
    fn desynchronized(&self) -> Vec<Culprit> {
        let firsts =
            self.ranks.values().flat_map(|of| of.unfinished.iter().filter(|of| !of.is_p2p()));
        let calls: BTreeSet<(&str, i64)> =
            firsts.map(|of| (of.group.as_str(), of.number)).collect();
        let (mut found, mut done) = (Vec::new(), BTreeSet::new());
        for (group, number) in calls {
            if done.contains(group) {
                continue;
            }
            let mut variants: BTreeMap<String, Vec<usize>> = BTreeMap::new();
            for (rank, of) in &self.ranks {
                if let Some(entry) = of.collectives.get(&(group, number)) {
                    variants.entry(meaning(entry)).or_default().push(*rank);
                }
            }
            let most = variants.values().map(Vec::len).max().unwrap_or(0);
            let usual: Vec<&String> =
                variants.iter().filter(|(_, of)| of.len() == most).map(|(name, _)| name).collect();
            let theirs = if let [usual] = usual[..] { Some(usual) } else { None };
            if variants.len() < 2 {
                continue;
            }
            done.insert(group);
            for (own, ranks) in variants.iter().filter(|(own, _)| Some(*own) != theirs) {
                found.extend(ranks.iter().map(|rank| {
                    let entry = self.ranks[rank].collectives[&(group, number)];
                    let peers =
                        variants.values().flatten().copied().filter(|peer| !ranks.contains(peer));
                    Culprit {
                        own: Some(own.clone()),
                        theirs: theirs.cloned(),
                        peers: peers.collect(),
                        ..self.culprit(*rank, Cause::Desynchronized, entry)
                    }
                }));
            }
        }
        found
    }

    fn culprit(&self, rank: usize, cause: Cause, entry: &Entry) -> Culprit {
        let last_ns = self.ranks.get(&rank).and_then(RankCalls::last_ns);
        let (group, line) = (entry.label.clone(), entry.line.clone());
        let (call, peers) = (call(entry), BTreeSet::new());
        Culprit { rank, cause, group, call, line, own: None, theirs: None, last_ns, peers }
    }

    /// The waits of a rank in a call that its device has begun. Fails for a collective that others have ended.
    fn waits(&self, from: usize, entry: &'a Entry) -> Result<Vec<Wait<'a>>, ()> {
        let none = Vec::new();
        let members = self.groups.get(entry.group.as_str()).unwrap_or(&none);
        if entry.is_p2p() {
            let peer = peer(entry).and_then(|place| members.get(place).copied());
            let waits = peer.filter(|to| !self.has_met(from, *to, entry));
            return Ok(waits.map(|to| Wait { from, to, entry }).into_iter().collect());
        }
        let mut waits = Vec::new();
        for to in members.iter().copied().filter(|to| *to != from) {
            match self.ranks.get(&to).and_then(|of| of.state(&entry.group, entry.number)) {
                Some(State::Completed) => return Err(()),
                Some(State::Started) => {}
                _ => waits.push(Wait { from, to, entry }),
            }
        }
        Ok(waits)
    }

    /// Whether the other end of a send or receive has begun its half: the same one among those that are unfinished.
    fn has_met(&self, from: usize, to: usize, entry: &Entry) -> bool {
        let before =
            self.ranks[&from].unfinished.iter().take_while(|of| !std::ptr::eq(**of, entry));
        let place = before.filter(|of| of.name == entry.name && of.group == entry.group).count();
        let Some(peer) = self.ranks.get(&to) else { return false };
        let half = mirrored(&entry.name);
        let mut halves =
            peer.unfinished.iter().filter(|of| of.name == half && of.group == entry.group);
        halves.nth(place).is_some_and(|of| peer.has_begun(of))
    }

    /// Waits of all ranks, and the culprits that they tell without a look at other waits: their peers have ended what they have not.
    fn all_waits(&self) -> (Vec<Wait<'a>>, Vec<Culprit>) {
        let (mut waits, mut behind) = (Vec::new(), Vec::new());
        for (rank, of) in &self.ranks {
            for entry in of.begun() {
                match self.waits(*rank, entry) {
                    Ok(of) => waits.extend(of),
                    Err(()) => {
                        let peers = self.groups[entry.group.as_str()].iter().copied();
                        let peers = peers.filter(|peer| peer != rank).collect();
                        behind.push(Culprit { peers, ..self.culprit(*rank, Cause::Device, entry) });
                        break;
                    }
                }
            }
        }
        (waits, behind)
    }
}

/// Applies the rules.
pub(super) fn explain(dumps: &[Dump]) -> Hang {
    let job = JobRanks::new(dumps);
    let (waits, behind) = job.all_waits();
    let mut culprits = job.desynchronized();
    if culprits.is_empty() {
        culprits = if behind.is_empty() { waited_for(&job, &waits) } else { behind };
    }
    let is_culprit = |rank: &usize| culprits.iter().any(|of| of.rank == *rank);
    let victims =
        job.ranks.iter().filter(|(rank, _)| !is_culprit(rank)).filter_map(|(rank, of)| {
            let own = waits.iter().filter(|wait| wait.from == *rank);
            let entry = own
                .clone()
                .next()
                .map_or_else(|| of.unfinished.first().copied(), |of| Some(of.entry))?;
            let mut waits_for: BTreeSet<usize> = own.map(|wait| wait.to).collect();
            if waits_for.is_empty() {
                waits_for = culprits
                    .iter()
                    .filter(|of| of.group == entry.group)
                    .map(|of| of.rank)
                    .collect();
            }
            Some(Victim { rank: *rank, call: call(entry), group: entry.label.clone(), waits_for })
        });
    Hang {
        files: dumps.len(),
        missing: job.missing(),
        victims: victims.collect(),
        culprits: culprits.clone(),
    }
}

/// The ranks that others wait for and that wait for nobody. If there are none, the ranks that wait for each other, or those that have begun a
/// call that nobody ends.
fn waited_for(job: &JobRanks, waits: &[Wait]) -> Vec<Culprit> {
    let from: BTreeSet<usize> = waits.iter().map(|wait| wait.from).collect();
    let to: BTreeSet<usize> = waits.iter().map(|wait| wait.to).collect();
    let mut ranks: BTreeSet<usize> = to.difference(&from).copied().collect();
    let is_order = ranks.is_empty();
    if is_order {
        ranks = in_circles(waits, &from);
    }
    let cause = |rank: usize| match job.ranks.get(&rank) {
        None => Cause::NoFile,
        Some(_) if is_order => Cause::Order,
        Some(of) if of.unfinished.is_empty() => Cause::Host,
        Some(_) => Cause::Device,
    };
    let named = ranks.iter().filter_map(|rank| {
        let own = waits.iter().filter(|wait| wait.to == *rank);
        let entry = own.clone().map(|wait| wait.entry).min_by_key(|entry| entry.last_ns)?;
        let is_same =
            |wait: &&Wait| call(wait.entry) == call(entry) && wait.entry.group == entry.group;
        let peers = own.filter(is_same).map(|wait| wait.from).collect();
        Some(Culprit { peers, ..job.culprit(*rank, cause(*rank), entry) })
    });
    let mut culprits: Vec<Culprit> = named.collect();
    if waits.is_empty() {
        let begun = job.ranks.iter().filter_map(|(rank, of)| Some((*rank, of.begun().next()?)));
        culprits = begun.map(|(rank, entry)| job.culprit(rank, Cause::Network, entry)).collect();
    }
    culprits
}

/// Those of `ranks` from which waits lead back to them.
fn in_circles(waits: &[Wait], ranks: &BTreeSet<usize>) -> BTreeSet<usize> {
    let mut left = ranks.clone();
    loop {
        let within =
            || waits.iter().filter(|wait| left.contains(&wait.from) && left.contains(&wait.to));
        let from: BTreeSet<usize> = within().map(|wait| wait.from).collect();
        let to: BTreeSet<usize> = within().map(|wait| wait.to).collect();
        let next: BTreeSet<usize> = from.intersection(&to).copied().collect();
        if next == left {
            return left;
        }
        left = next;
    }
}

/// As in `all_reduce #37`, or `send 0->3`.
fn call(entry: &Entry) -> String {
    if entry.is_p2p() { entry.name.clone() } else { format!("{} #{}", entry.name, entry.number) }
}

/// The part of a call on which all members of a group have to agree. Sizes may differ where each rank gives or gets its own part.
fn meaning(entry: &Entry) -> String {
    let has_parts =
        ["all_to_all", "gather", "scatter"].iter().any(|part| entry.name.contains(part));
    if entry.inputs.is_empty() || has_parts && !entry.name.ends_with("_base") {
        return entry.name.clone();
    }
    format!("{} of {}", entry.name, entry.inputs)
}

/// The place within the group at the other end of `send 0->3` or `recv 3<-0`.
fn peer(entry: &Entry) -> Option<usize> {
    entry.name.rsplit(['>', '-']).next()?.trim().parse().ok()
}

/// The other half of `send 0->3`: `recv 3<-0`.
fn mirrored(name: &str) -> String {
    match name
        .split_once(' ')
        .map(|(kind, ways)| (kind, ways.split_once("->"), ways.split_once("<-")))
    {
        Some(("send", Some((own, peer)), _)) => format!("recv {peer}<-{own}"),
        Some(("recv", _, Some((own, peer)))) => format!("send {peer}->{own}"),
        _ => String::new(),
    }
}
