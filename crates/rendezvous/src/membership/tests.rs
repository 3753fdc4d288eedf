//! Members with threads as ranks: deaths, silence, joins, and what others may do to the list.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, channel};
use std::thread::{JoinHandle, sleep, spawn};

use super::agreement::{Agreement, Decision};
use super::*;
use crate::RendezvousError;
use crate::deadline::Deadline;
use crate::hello::{CHALLENGE_LIMIT, say_hello};

/// A limit that is reached only if something hangs.
const LIMIT: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(300);
const HERE: &str = "127.0.0.1";

fn terms(sizes: &[usize], expected: usize) -> Terms {
    Terms {
        sizes: sizes.into(),
        expected,
        first_host: None,
        settings: "lr=1".into(),
        evict_after: LIMIT,
        limit: LIMIT,
    }
}

fn listen(terms: Terms) -> (Members, Receiver<MemberEvent>) {
    let (sender, events) = channel();
    let report = move |event| drop(sender.send(event));
    (Members::listen((HERE, 0), "secret", terms, report).unwrap(), events)
}

fn join(members: &Members, number: Option<u64>) -> RunMember {
    RunMember::join(HERE, members.port(), "secret", number, "lr=1", LIMIT).unwrap()
}

/// Lets a member wait for the next generation in the background.
fn regroup(member: &RunMember) -> JoinHandle<Result<GenerationPlace, RendezvousError>> {
    let member = member.clone();
    spawn(move || member.regroup(&[]))
}

fn regroup_all(all: &[&RunMember]) -> Vec<GenerationPlace> {
    let waiting: Vec<_> = all.iter().map(|member| regroup(member)).collect();
    waiting.into_iter().map(|place| place.join().unwrap().unwrap()).collect()
}

/// The texts that all these members get if each sends its number.
fn exchange_all(all: &[&RunMember]) -> Vec<Result<Vec<String>, String>> {
    let exchange = |member: &&RunMember| {
        let member = (*member).clone();
        spawn(move || member.exchange("number", member.number().to_string()))
    };
    let waiting: Vec<_> = all.iter().map(exchange).collect();
    waiting.into_iter().map(|texts| texts.join().unwrap()).collect()
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Deadline::after(LIMIT);
    while !is_so() {
        assert!(!deadline.has_passed(), "{what} does not come");
        sleep(Duration::from_millis(1));
    }
}

/// A place in a generation without spares.
fn place_of(generation: u64, index: usize, members: Vec<u64>) -> GenerationPlace {
    let size = members.len();
    GenerationPlace { generation, index, members, size }
}

#[test]
fn members_go_on_after_a_death_and_become_more_when_somebody_joins() {
    let (list, events) = listen(terms(&[1, 2, 3], 3));
    let [a, b, c] = [0, 1, 2].map(|number| join(&list, Some(number)));
    for (rank, place) in regroup_all(&[&a, &b, &c]).into_iter().enumerate() {
        assert_eq!(place, place_of(1, rank, vec![0, 1, 2]));
    }
    for texts in exchange_all(&[&a, &b, &c]) {
        assert_eq!(texts.unwrap(), ["0", "1", "2"]);
    }
    drop(b);
    let places = regroup_all(&[&a, &c]);
    assert_eq!(places[1], place_of(2, 1, vec![0, 2]));
    for texts in exchange_all(&[&a, &c]) {
        assert_eq!(texts.unwrap(), ["0", "2"]);
    }
    assert!(!a.is_asked());
    let d = join(&list, None);
    assert_eq!(d.number(), 3);
    let waiting = regroup(&d);
    until("the question", || a.is_asked() && c.is_asked());
    let places = regroup_all(&[&a, &c]);
    assert_eq!(places[0].members, [0, 2, 3]);
    assert_eq!(waiting.join().unwrap().unwrap().index, 2);
    assert!(!a.is_asked());
    let seen: Vec<MemberEvent> = events.try_iter().collect();
    let how = Some("its connection ended".into());
    assert!(seen.contains(&MemberEvent::Gone { number: 1, how }), "{seen:?}");
}

#[test]
fn an_exchange_ends_when_a_member_goes_or_waits_for_the_next_generation() {
    let (list, _events) = listen(terms(&[1, 2, 3], 3));
    let [a, b, c] = [0, 1, 2].map(|number| join(&list, Some(number)));
    regroup_all(&[&a, &b, &c]);
    let waiting = spawn({
        let a = a.clone();
        move || a.exchange("x", "1".into())
    });
    drop(c);
    let error = waiting.join().unwrap().unwrap_err();
    assert_eq!(error, "member 2 has gone: its connection ended");
    assert!(b.exchange("x", "1".into()).is_err());
    regroup_all(&[&a, &b]);
    let waiting = regroup(&b);
    let error = a.exchange("x", "1".into()).unwrap_err();
    assert_eq!(error, "member 1 waits for the next generation");
    assert_eq!(a.regroup(&[]).unwrap(), {
        let place = waiting.join().unwrap().unwrap();
        GenerationPlace { index: 0, ..place }
    });
}

#[test]
fn a_silent_member_is_left_out_and_joins_again_as_a_new_one() {
    let (list, events) = listen(Terms { evict_after: SHORT, ..terms(&[1, 2], 2) });
    let [a, b] = [0, 1].map(|number| join(&list, Some(number)));
    regroup_all(&[&a, &b]);
    let error = a.exchange("x", "1".into()).unwrap_err();
    assert_eq!(error, "members [1] have not answered within 300ms");
    assert_eq!(a.regroup(&[1]).unwrap().members, [0]);
    let event = MemberEvent::LeftOut { number: 1, missed_by: vec![0] };
    until("the event", || events.try_iter().any(|of| of == event));
    let error = b.regroup(&[]).unwrap_err();
    assert!(matches!(error, RendezvousError::LeftOut { number: 1, .. }), "{error}");
    let port = list.port();
    let back = RunMember::join(HERE, port, "secret", Some(1), "lr=1", LIMIT).unwrap_err();
    assert!(back.to_string().contains("there is no member 1 any more"), "{back}");
    let waiting = regroup(&join(&list, None));
    until("the question", || a.is_asked());
    assert_eq!(a.regroup(&[]).unwrap().members, [0, 2]);
    assert_eq!(waiting.join().unwrap().unwrap().index, 1);
}

#[test]
fn members_beyond_an_allowed_size_are_spares_until_one_is_missed_or_all_have_finished() {
    let (list, _events) = listen(terms(&[2, 4], 3));
    let all = [0, 1, 2].map(|number| join(&list, Some(number)));
    let [a, b, c] = &all;
    let places = regroup_all(&[a, b, c]);
    assert_eq!((places[2].index, places[2].size), (2, 2));
    for texts in exchange_all(&[a, b, c]) {
        assert_eq!(texts.unwrap(), ["0", "1", "2"], "a spare hands over what it has");
    }
    let spare = regroup(c);
    list.gone(0, "was killed");
    assert_eq!(b.regroup(&[0]).unwrap().members, [1, 2]);
    assert_eq!(spare.join().unwrap().unwrap().index, 1);
    // 1 and 2 are members now, and the third is a spare again.
    let third = join(&list, None);
    let spare = regroup(&third);
    b.leave();
    c.leave();
    let error = spare.join().unwrap().unwrap_err();
    assert_eq!(error, RendezvousError::Finished { number: 3 });
    let late = RunMember::join(HERE, list.port(), "secret", None, "lr=1", LIMIT).unwrap_err();
    assert!(late.to_string().contains("the run has ended"), "{late}");
}

#[test]
fn too_few_members_wait_for_a_replacement_and_no_longer_than_the_limit() {
    let (list, events) = listen(Terms { limit: 2 * SHORT, ..terms(&[2], 2) });
    let [a, b] = [0, 1].map(|number| join(&list, Some(number)));
    regroup_all(&[&a, &b]);
    let number = list.next_number();
    list.set_may_come(false);
    drop(b);
    let waiting = regroup(&a);
    let event = MemberEvent::TooFew { left: 1, needed: 2 };
    until("the event", || events.try_iter().any(|of| of == event));
    let c = join(&list, Some(number));
    assert_eq!(c.regroup(&[]).unwrap().members, [0, 2]);
    waiting.join().unwrap().unwrap();
    drop(c);
    let error = a.regroup(&[]).unwrap_err().to_string();
    assert!(error.contains("too few members, 1 of at least 2; none can come"), "{error}");

    let (list, _events) = listen(Terms { limit: SHORT, ..terms(&[2], 2) });
    let a = join(&list, Some(0));
    let error = a.regroup(&[]).unwrap_err().to_string();
    assert!(error.contains("none has come within 300ms"), "{error}");
}

#[test]
fn a_list_that_has_ended_has_reported_the_end_of_its_last_member() {
    let (list, events) = listen(terms(&[1], 1));
    let a = join(&list, Some(0));
    regroup_all(&[&a]);
    a.leave();
    until("its end", || !list.has_members());
    drop(list);
    let end = MemberEvent::Gone { number: 0, how: None };
    assert!(events.try_iter().any(|of| of == end));
}

#[test]
fn members_notice_that_the_list_has_gone() {
    let (list, _events) = listen(terms(&[1, 2], 2));
    let a = join(&list, Some(0));
    let waiting = regroup(&a);
    drop(list);
    let error = waiting.join().unwrap().unwrap_err().to_string();
    assert!(error.contains("the launcher of the first host"), "{error}");
    assert!(a.regroup(&[]).is_err());
    assert!(a.exchange("x", String::new()).is_err());
}

#[test]
fn who_does_not_belong_to_the_run_is_refused() {
    let (list, _events) = listen(terms(&[1, 2], 2));
    let port = list.port();
    let join_as = |secret, number, settings| {
        let joined = RunMember::join(HERE, port, secret, number, settings, 10 * SHORT);
        joined.unwrap_err().to_string()
    };
    let says = |error: String, part: &str| assert!(error.contains(part), "{error}");
    says(join_as("other", None, "lr=1"), "does not know the secret");
    says(join_as("secret", Some(0), "lr=2"), "the settings lr=1, and this process has lr=2");
    says(join_as("secret", Some(7), "lr=1"), "there is no member 7 any more");
    let a = join(&list, Some(0));
    says(join_as("secret", Some(0), "lr=1"), "already come as member 0");
    says(join_as("secret", None, "lr=1"), "the run is full: it has 2 of at most 2 ranks");
    let nobody = RunMember::join(HERE, 1, "secret", None, "lr=1", SHORT).unwrap_err().to_string();
    says(nobody, "refused");
    let b = join(&list, Some(1));
    assert_eq!(regroup_all(&[&a, &b])[0].members, [0, 1]);
}

#[test]
fn strangers_and_broken_messages_end_their_own_connection_only() {
    let (list, _events) = listen(terms(&[2], 2));
    let connect = || TcpStream::connect((HERE, list.port())).unwrap();
    let mut closed = Vec::new();
    for words in [&b""[..], b"GET / HTTP/1.1\r\n\r\n", b"pacelin3"] {
        let mut stranger = connect();
        stranger.write_all(words).unwrap();
        closed.push(stranger);
    }
    let proven = || {
        let stream = connect();
        let deadline = Deadline::after(LIMIT);
        say_hello(&stream, WHO, &key("secret"), CHALLENGE_LIMIT, &deadline).unwrap();
        stream
    };
    let huge = &[255; 4][..];
    for words in [huge, &[1, 0, 0, 0, 99], &[9, 0, 0, 0, 0], &[]] {
        let mut stranger = proven();
        stranger.write_all(words).unwrap();
        closed.push(stranger);
    }
    // A text before it has joined.
    let early = wire::frame(&wire::Request::Ready { missed: vec![u64::MAX; 3] }).unwrap();
    let mut stranger = proven();
    stranger.write_all(&early).unwrap();
    closed.push(stranger);
    let [a, b] = [0, 1].map(|number| join(&list, Some(number)));
    assert_eq!(regroup_all(&[&a, &b])[1].members, [0, 1]);
    for mut stranger in closed {
        stranger.set_read_timeout(Some(LIMIT)).unwrap();
        // The end of the connection, perhaps after an answer or by a reset.
        let _ = stranger.read_to_end(&mut Vec::new());
    }
    // What is cut off after joining is a death.
    let mut one = proven();
    one.write_all(&wire::frame(&wire::Request::Leave).unwrap()[..2]).unwrap();
    drop(one);
    assert!(exchange_all(&[&a, &b])[0].is_ok());
}

#[test]
fn texts_that_are_too_long_for_a_message_end_the_exchange() {
    let (list, _events) = listen(terms(&[2], 2));
    let [a, b] = [0, 1].map(|number| join(&list, Some(number)));
    regroup_all(&[&a, &b]);
    let long = "x".repeat(9 << 20);
    let waiting = spawn({
        let (a, long) = (a.clone(), long.clone());
        move || a.exchange("x", long)
    });
    let error = b.exchange("x", long).unwrap_err();
    assert!(error.contains("too long for a message"), "{error}");
    assert!(waiting.join().unwrap().is_err());
    assert!(a.exchange("x", "x".repeat(17 << 20)).unwrap_err().contains("too long"));
    assert_eq!(regroup_all(&[&a, &b])[0].generation, 2);
}

/// The event after some of four members on two hosts have ended, and others are silent, all at once.
fn after(ended: &[u64], silent: &[u64]) -> MemberEvent {
    let mut list = Agreement::new(Terms { first_host: Some(2), ..terms(&[1, 2, 3, 4], 4) });
    let now = Duration::ZERO;
    for number in 0..4 {
        list.join(Some(number), "lr=1", "here").unwrap();
        list.ready(number, Vec::new(), now);
    }
    list.settle(now);
    let gone = [ended, silent].concat();
    ended.iter().for_each(|number| list.gone(*number, "was killed"));
    silent.iter().for_each(|number| list.unreachable(*number, "no route to host"));
    (0..4).filter(|of| !gone.contains(of)).for_each(|of| list.ready(of, gone.clone(), now));
    let mut events = list.settle(now).into_iter().filter_map(|decision| match decision {
        Decision::Event(event) => Some(event),
        _ => None,
    });
    events.nth(gone.len()).unwrap()
}

#[test]
fn a_part_of_several_hosts_goes_on_if_it_is_larger_or_has_the_first_host() {
    let go_on = |members: &[u64]| {
        let (members, spares) = (members.into(), Vec::new());
        MemberEvent::Next { generation: 2, members, spares }
    };
    let is_cut_off = |left: usize, all: usize| {
        let reason = format!(
            "{left} of {all} members are left; a part that is cut off does not train on alone"
        );
        MemberEvent::Failed { reason }
    };
    assert_eq!(after(&[], &[0]), go_on(&[1, 2, 3]));
    assert_eq!(after(&[], &[2, 3]), go_on(&[0, 1]));
    assert_eq!(after(&[], &[1, 3]), go_on(&[0, 2]));
    assert_eq!(after(&[], &[0, 1]), is_cut_off(2, 4));
    assert_eq!(after(&[], &[1, 2, 3]), is_cut_off(1, 4));
    // Who has ended does not train elsewhere.
    assert_eq!(after(&[1, 2, 3], &[]), go_on(&[0]));
    assert_eq!(after(&[0], &[1]), go_on(&[2, 3]));
    assert_eq!(after(&[0, 2], &[1]), is_cut_off(1, 2));
}

#[test]
fn nobody_is_left_out_before_its_time_or_because_of_a_member_that_has_gone() {
    let patience = Duration::from_secs(10);
    let mut list = Agreement::new(Terms { evict_after: patience, ..terms(&[1, 2, 3], 3) });
    let at = Duration::from_secs;
    for number in 0..3 {
        list.join(Some(number), "lr=1", "here").unwrap();
        list.ready(number, Vec::new(), at(0));
    }
    assert_eq!(list.settle(at(0)).len(), 7);
    list.ready(0, Vec::new(), at(5));
    assert_eq!(list.settle(at(14)).len(), 1, "only the end of exchanges");
    // Nobody waits any more, so the time of the others begins with the next one.
    list.gone(0, "was killed");
    assert_eq!(list.settle(at(20)).len(), 1);
    list.ready(1, vec![0], at(30));
    assert_eq!(list.settle(at(39)), []);
    let decisions = list.settle(at(40));
    let is_out = Decision::Event(MemberEvent::LeftOut { number: 2, missed_by: Vec::new() });
    assert_eq!(decisions[0], is_out);
    let place = place_of(2, 0, vec![1]);
    assert!(
        decisions.contains(&Decision::Tell(vec![1], wire::Notice::Next(place))),
        "{decisions:?}"
    );
}

#[test]
fn a_member_that_gives_up_ends_the_run_for_all() {
    let (list, events) = listen(terms(&[1, 2], 2));
    let [a, b] = [0, 1].map(|number| join(&list, Some(number)));
    regroup_all(&[&a, &b]);
    let over = a.is_broken();
    assert!(!over.load(Ordering::Relaxed) && !a.breaks_within(Duration::ZERO));
    let waiting = regroup(&b);
    // It has to meet again too.
    assert!(a.breaks_within(LIMIT) && over.load(Ordering::Relaxed));
    a.give_up(&format!("the state is lost{}", " ".repeat(15 << 20)));
    let error = waiting.join().unwrap().unwrap_err();
    assert!(error.to_string().contains("the state is lost"), "{error}");
    let reason = format!("{:1000}", "the state is lost");
    let failed = MemberEvent::Failed { reason };
    until("the event", || events.try_iter().any(|of| of == failed));
    let error = RunMember::join(HERE, list.port(), "secret", None, "lr=1", LIMIT).unwrap_err();
    assert!(error.to_string().contains("the run has ended"), "{error}");
}
