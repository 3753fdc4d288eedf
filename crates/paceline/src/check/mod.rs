//! `paceline check`: whether ranks can start here, see their devices, and reach each other; one line
//! per question, with its verdict.
//!
//! Every rank runs the same questions together; rank 0 says what came out.

mod links;
mod system;

use std::time::Instant;

use paceline_collectives::{Group, OpKind, ReduceOp};
use paceline_memory::{Allocator, Category, DType, Tensor};
use paceline_trace::now_ns;

use crate::bench::exchange::{Exchange, Operation};
use crate::bench::screen::say;
use crate::cli::{CheckArgs, TransportName};
use crate::comm::{self, CommConfig};
use crate::connect::connect;
use crate::environment::Placement;
use crate::launcher::{self, Launch};
use crate::{Failure, Result, resources, threads};

/// Elements of the all-reduces that are checked.
const SIZES: [usize; 3] = [1, 4099, 1_000_003];

/// Questions and answers of which the shortest counts, for the clocks.
const CLOCK_ROUNDS: usize = 50;

/// How a question is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Ok,
    Warn,
    Fail,
}

/// Prints the answers, on one rank.
struct Answers {
    speaks: bool,
    has_failed: bool,
}

impl Answers {
    fn add(&mut self, verdict: Verdict, question: &str, answer: &str) {
        self.has_failed |= verdict == Verdict::Fail;
        if self.speaks {
            let word = match verdict {
                Verdict::Ok => "ok",
                Verdict::Warn => "warn",
                Verdict::Fail => "FAIL",
            };
            say(&format!("{word:<4}  {question}: {answer}"));
        }
    }

    /// More about the last answer.
    fn explain(&self, text: &str) {
        if self.speaks {
            text.lines().for_each(|line| say(&format!("      {line}")));
        }
    }
}

/// `paceline check`: asks as a rank, or starts the ranks.
pub fn check(args: &CheckArgs, placement: Option<Placement>) -> Result<u8> {
    let inner = placement.as_ref().is_some_and(|placement| placement.is_of_check);
    let (world, transport) = resolve(args, placement.as_ref(), inner)?;
    let comm = comm::resolve(&args.comm, &[transport])?;
    let is_one_host = placement.as_ref().is_none_or(|placement| placement.place.is_one_host());
    if let Some(reason) = comm.refusal(transport, world).filter(|_| is_one_host) {
        return Err(Failure::Usage(format!("--transport {}: {reason}", transport.name())));
    }
    if let Some(placement) = placement {
        return as_rank(&placement, transport, &comm);
    }
    if transport == TransportName::Thread {
        let begin = Instant::now();
        let asked = threads::run(world, comm.options(world), |group| {
            let rank = group.rank();
            ask(&group, begin, rank, world)
        });
        // A link is refused before anything is asked.
        if let Err(Failure::Link(reason)) = &asked {
            let mut answers = Answers { speaks: true, has_failed: false };
            answers.add(Verdict::Fail, "group", reason);
        }
        return asked.map(u8::from);
    }
    let own_program = std::env::current_exe()
        .map_err(|e| Failure::io("cannot find the program to start ranks with", e))?;
    let mut command = vec![own_program.into_os_string()];
    command.extend(std::env::args_os().skip(1));
    launcher::launch(&Launch {
        command,
        num_ranks: world,
        variables: vec![(crate::environment::CHECK, "1".into())],
        rank_0_owns_stdout: true,
        dump_folder: None,
    })
}

/// The number of ranks, and their transport.
fn resolve(
    args: &CheckArgs,
    placement: Option<&Placement>,
    inner: bool,
) -> Result<(usize, TransportName)> {
    let Some(placement) = placement else {
        let world = args.nproc.unwrap_or(resources::num_cores().min(2));
        launcher::check_num_ranks("--nproc", world)?;
        return Ok((world, args.transport.unwrap_or(TransportName::Shm)));
    };
    let world = placement.place.world_size;
    launcher::check_num_ranks("WORLD_SIZE", world)?;
    if let Some(nproc) = args.nproc.filter(|_| !inner) {
        return Err(Failure::Usage(format!(
            "--nproc {nproc} starts ranks of its own, but another launcher has started {world}; leave \
             --nproc out, or unset RANK and WORLD_SIZE"
        )));
    }
    placement.check_transport(args.transport)?;
    Ok((world, args.transport.unwrap_or(placement.default_transport())))
}

fn as_rank(placement: &Placement, transport: TransportName, comm: &CommConfig) -> Result<u8> {
    let place = &placement.place;
    let begin = Instant::now();
    let group = match connect(transport, comm, place.rendezvous()?, place, None) {
        Ok(group) => group,
        Err(failure) => {
            let mut answers = Answers { speaks: place.rank == 0, has_failed: false };
            answers.add(Verdict::Fail, "group", &failure.to_string());
            return Err(failure);
        }
    };
    ask(&group, begin, place.local_rank, place.local_world_size).map(u8::from)
}

/// Asks everything; whether something failed. A collective call.
fn ask(group: &Group, begin: Instant, local_rank: usize, local_ranks: usize) -> Result<bool> {
    let mut answers = Answers { speaks: group.rank() == 0, has_failed: false };
    let (world, transport) = (group.world_size(), group.transport().name());
    let ranks = if world == 1 { "rank" } else { "ranks" };
    let ms = begin.elapsed().as_secs_f64() * 1e3;
    answers.add(
        Verdict::Ok,
        "group",
        &format!("{world} {ranks} met over {transport} in {ms:.1} ms"),
    );
    if let Some(link) = group.link() {
        answers.add(Verdict::Ok, "link", &format!("a link of {link} is emulated"));
    }
    type Question = fn(&Group, &mut Answers) -> Result<()>;
    let questions: [(&str, Question); 3] =
        [("clock", clock), ("links", links::links), ("all-reduce", all_reduce)];
    devices(group, local_rank, local_ranks, &mut answers)?;
    system::memory(local_ranks, &mut answers);
    system::limits(world, &mut answers);
    for (name, question) in questions {
        if let Err(failure) = question(group, &mut answers) {
            answers.add(Verdict::Fail, name, &failure.to_string());
            return Err(failure);
        }
    }
    Ok(answers.has_failed)
}

/// What each rank computes on.
fn devices(
    group: &Group,
    local_rank: usize,
    local_ranks: usize,
    answers: &mut Answers,
) -> Result<()> {
    let own = crate::text::placement_line(group.rank(), local_rank);
    let own = (own, resources::core_list().unwrap_or("unknown".into()));
    let Some(all) = group.gather_object(&own, 0)? else { return Ok(()) };
    for (line, cores) in &all {
        answers.add(Verdict::Ok, "device", &format!("{line}, cores {cores}"));
    }
    // Launchers may have given each rank cores of its own already.
    let sharing = all.iter().filter(|(_, cores)| *cores == own.1).count().min(local_ranks);
    let cores = resources::num_cores();
    if sharing > cores {
        let text = format!("{sharing} ranks share {cores} cores of this host; they take turns");
        answers.add(Verdict::Warn, "device", &text);
    }
    Ok(())
}

/// How far the other ranks' clocks are from rank 0's: their answer, less the middle of the time that
/// it took.
fn clock(group: &Group, answers: &mut Answers) -> Result<()> {
    let mut furthest = (0_i64, 0_i64, 0);
    for peer in 1..group.world_size() {
        let mut best = (i64::MAX, 0);
        for _ in 0..CLOCK_ROUNDS {
            let mut theirs = [0_i64];
            if group.rank() == 0 {
                let asked = now_ns() as i64;
                group.send_slice(&[asked], peer)?;
                group.recv_slice(&mut theirs, peer)?;
                let answered = now_ns() as i64;
                let offset = theirs[0] - (asked + (answered - asked) / 2);
                best = best.min((answered - asked, offset));
            } else if group.rank() == peer {
                group.recv_slice(&mut theirs, 0)?;
                group.send_slice(&[now_ns() as i64], 0)?;
            }
        }
        if best.1.abs() >= furthest.0.abs() {
            furthest = (best.1, best.0, peer);
        }
    }
    let (offset, trip, peer) = furthest;
    let us = |ns: i64| ns as f64 / 1e3;
    let text = match group.world_size() {
        1 => "one rank, one clock".to_owned(),
        _ => format!(
            "at most {:.1} us from rank 0 (rank {peer}), by a round trip of {:.1} us",
            us(offset.abs()),
            us(trip)
        ),
    };
    answers.add(Verdict::Ok, "clock", &text);
    Ok(())
}

/// Whether every element is right on every rank.
fn all_reduce(group: &Group, answers: &mut Answers) -> Result<()> {
    let operation =
        Operation { kind: OpKind::AllReduce, redop: ReduceOp::Sum, root: 0, dtype: DType::F32 };
    let most = SIZES.into_iter().max().unwrap_or(0);
    let allocator = Allocator::new();
    let buffer = || -> Result<Tensor> {
        let len = most * operation.dtype.size_bytes();
        let buffer = group.allocate(&allocator, len, Category::Communication)?;
        Ok(Tensor::new(buffer, 0, operation.dtype, [most])?)
    };
    let (a, b) = (buffer()?, buffer()?);
    let mut wrong = [0_i64];
    for elements in SIZES {
        let exchange = Exchange::new(operation, group, (&a, &b), elements, true)?;
        exchange.fill()?;
        group.barrier()?;
        exchange.call()?;
        wrong[0] += exchange.count_wrong()? as i64;
    }
    group.all_reduce_slice(&mut wrong, ReduceOp::Sum)?;
    match wrong[0] {
        0 => {
            let text = format!("{} sizes, every element right on every rank", SIZES.len());
            answers.add(Verdict::Ok, "all-reduce", &text);
        }
        wrong => answers.add(Verdict::Fail, "all-reduce", &format!("{wrong} elements are wrong")),
    }
    Ok(())
}
