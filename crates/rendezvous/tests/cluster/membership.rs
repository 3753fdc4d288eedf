//! Members of a run that come and go: those of a generation agree who belongs to it, nobody waits beyond its limit, and nobody
//! who answers is left out.
//!
//! Host 0 has the list of members, hosts 1 to 4 have the ranks that were started with it, and a process of host 5 joins later.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use paceline_rendezvous::{
    GenerationPlace, MemberEvent, Members, RendezvousError, RunMember, Terms,
};
use paceline_trace::lock;
use paceline_trace::runtime::{now, sleep};
use paceline_trace::simulation::{ClusterFault, FaultOfHost, HostProgram, ProcessEnd, run};

use crate::excuses::{is_clock_right, pauses};
use crate::schedules::explore;

const STARTED: usize = 4;
const HOSTS: usize = STARTED + 2;
const STEPS: usize = 20;
const EVICT_AFTER: Duration = Duration::from_secs(3);
const LIMIT: Duration = Duration::from_secs(10);
/// The longest wait for a generation: for silent members, for more members, and for a sign of life.
const LONGEST: Duration = Duration::from_secs(3 + 10 + 16);
/// How long the list goes on after the last event. No wait of a member is longer, except a spare's.
const QUIET: Duration = Duration::from_secs(35);

/// How often the list's host looks for events.
const LOOK: Duration = Duration::from_secs(1);

/// The life of a process.
#[derive(Debug, Default, PartialEq)]
struct Life {
    number: Option<u64>,
    places: Vec<GenerationPlace>,
    longest_wait: Duration,
    /// Whether it got a text of another generation.
    is_mixed: bool,
    error: Option<RendezvousError>,
    /// Those of the list.
    events: Vec<MemberEvent>,
}

/// The sizes that a generation can have, and whether only a majority goes on.
fn rules(seed: u64) -> (Vec<usize>, bool) {
    let sizes = if seed.is_multiple_of(2) { (1..=STARTED + 1).collect() } else { vec![2, 4] };
    (sizes, seed.is_multiple_of(3))
}

fn keep_list(seed: u64) -> Life {
    let (sizes, needs_majority) = rules(seed);
    let terms = Terms {
        sizes,
        expected: STARTED,
        first_host: needs_majority.then_some(1),
        settings: "steps=20".into(),
        evict_after: EVICT_AFTER,
        limit: LIMIT,
    };
    let events = Arc::new(Mutex::new(Vec::new()));
    let reported = events.clone();
    let report = move |event| lock(&reported).push(event);
    let list = Members::listen(("10.0.0.1", 29_500), "secret", terms, report);
    let _list = match list {
        Ok(list) => list,
        Err(error) => return Life { error: Some(error), ..Life::default() },
    };
    let (mut count, mut quiet) = (0, Duration::ZERO);
    while quiet < QUIET {
        sleep(LOOK);
        let seen = lock(&events).len();
        quiet = if seen == count { quiet + LOOK } else { Duration::ZERO };
        count = seen;
    }
    let events = std::mem::take(&mut *lock(&events));
    Life { events, ..Life::default() }
}

/// Trains: in each step all members exchange how far they are.
fn train(host: usize, number: Option<u64>, begin: Duration) -> Life {
    let mut life = Life::default();
    sleep(begin);
    let joined = RunMember::join("10.0.0.1", 29_500, "secret", number, "steps=20", LIMIT);
    match joined {
        Ok(member) => {
            life.number = Some(member.number());
            life.error = steps(host, &member, &mut life).err();
        }
        Err(error) => life.error = Some(error),
    }
    life
}

fn steps(host: usize, member: &RunMember, life: &mut Life) -> Result<(), RendezvousError> {
    let mut step = 0;
    let mut is_new = true;
    loop {
        let begin = now();
        let place = member.regroup(&[]);
        if !is_new {
            life.longest_wait = life.longest_wait.max(now() - begin);
        }
        let place = place?;
        let (generation, is_spare) = (place.generation, place.index >= place.size);
        life.places.push(place);
        // Every text but that of a spare that waits already begins with its generation.
        let mut exchange = |name: &str, text: String| {
            let all = member.exchange(name, format!("{generation} {text}"))?;
            let all = all.iter().filter_map(|text| text.split_once(' '));
            let (generations, texts): (Vec<&str>, Vec<&str>) = all.unzip();
            life.is_mixed |= generations.iter().any(|of| *of != generation.to_string());
            Ok::<_, String>(texts.into_iter().map(String::from).collect::<Vec<_>>())
        };
        // A spare takes part in the first exchange, in which ranks hand over what they have.
        let met = exchange("meet", String::new());
        is_new = is_spare;
        if is_spare || met.is_err() {
            continue;
        }
        loop {
            sleep(Duration::from_millis(100 + 7 * host as u64));
            let own = format!("{step} {}", member.is_asked());
            let Ok(all) = exchange("step", own) else { break };
            let all: Vec<(usize, bool)> = all
                .iter()
                .filter_map(|text| text.split_once(' '))
                .map(|(step, is_asked)| (step.parse().unwrap(), is_asked == "true"))
                .collect();
            step = 1 + all.iter().map(|(step, _)| *step).max().unwrap_or_default();
            if step >= STEPS {
                member.leave();
                return Ok(());
            }
            if all.iter().any(|(_, is_asked)| *is_asked) {
                break;
            }
        }
    }
}

fn cluster(seed: u64, faults: &[FaultOfHost]) -> Vec<ProcessEnd<Life>> {
    let list = HostProgram { host: 0, main: Box::new(move || keep_list(seed)) };
    let rank = |host: usize| {
        let is_started = host <= STARTED;
        let number = is_started.then(|| host as u64 - 1);
        let begin = if is_started { 0 } else { 200 + seed % 29 * 100 };
        let begin = Duration::from_millis(begin);
        HostProgram { host, main: Box::new(move || train(host, number, begin)) as Box<_> }
    };
    let all = std::iter::once(list).chain((1..HOSTS).map(rank)).collect();
    run(seed, faults, Duration::from_secs(300) + pauses(faults), all)
}

fn is_silence(fault: &FaultOfHost) -> bool {
    matches!(fault.kind, ClusterFault::Kill | ClusterFault::Freeze | ClusterFault::Cut)
}

/// Whether a fault of the list's host or of its own host explains that a process fails.
fn is_excused(host: usize, faults: &[FaultOfHost]) -> bool {
    faults.iter().any(|fault| is_silence(fault) && [0, host].contains(&fault.host))
}

fn check(seed: u64, faults: &[FaultOfHost]) -> Result<(), String> {
    let ends = cluster(seed, faults);
    let mut generations = BTreeMap::new();
    let (sizes, needs_majority) = rules(seed);
    for (host, end) in ends.iter().enumerate() {
        let life = match end {
            ProcessEnd::Killed => continue,
            ProcessEnd::Hung(waits) => return Err(format!("host {host} hangs: {waits:?}")),
            ProcessEnd::Returned(life, _) => life,
        };
        let fails = |how: &str| Err(format!("host {host} {how}: {life:?}; all: {ends:?}"));
        for GenerationPlace { generation, index, members, size, .. } in &life.places {
            if generations.entry(*generation).or_insert(members) != &members {
                return fails("belongs to another generation than others");
            }
            let own = members.iter().position(|of| Some(*of) == life.number);
            if own != Some(*index) || !sizes.contains(size) || *size > members.len() {
                return fails("has a wrong rank");
            }
        }
        if life.is_mixed {
            return fails("gets texts of another generation");
        }
        if is_clock_right(host, faults) && life.longest_wait > LONGEST {
            return fails("waits too long");
        }
        let left_out = life.events.iter().find_map(|event| match event {
            MemberEvent::LeftOut { number, .. } => Some(*number),
            _ => None,
        });
        if let Some(number) = left_out
            && !is_excused((number + 1).min(HOSTS as u64 - 1) as usize, faults)
        {
            return fails(&format!("leaves out {number} without a reason"));
        }
        let may_fail = match &life.error {
            None | Some(RendezvousError::Finished { .. }) => true,
            Some(RendezvousError::NotJoined { .. }) => host > STARTED || is_excused(host, faults),
            Some(RendezvousError::NoGeneration { .. }) => {
                is_excused(host, faults)
                    || faults.iter().any(is_silence) && (needs_majority || sizes[0] > 1)
            }
            Some(RendezvousError::LeftOut { .. }) => is_excused(host, faults),
            Some(_) => false,
        };
        if !may_fail {
            return fails("fails without a reason");
        }
    }
    Ok(())
}

#[test]
fn members_agree_who_belongs_to_a_generation() {
    explore(HOSTS, check);
}

#[test]
fn a_run_without_faults_begins_with_all_and_takes_in_who_joins() {
    let ends = cluster(2, &[]);
    for (host, end) in ends.iter().enumerate().skip(1) {
        let ProcessEnd::Returned(life, _) = end else { panic!("host {host}: {end:?}") };
        assert_eq!(life.error, None, "host {host}: {life:?}");
        assert_eq!(life.places.last().unwrap().members, [0, 1, 2, 3, 4], "host {host}");
    }
}
