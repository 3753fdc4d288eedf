//! `paceline check`: checks whether ranks can start here, see their devices, and reach each other. Prints
//! one line per question, which begins with a status: ok, warn or FAIL.
//!
//! All ranks answer the same questions together; rank 0 prints the answers. `--numerics` asks another question, of two layouts.

pub mod args;
mod links;
mod numerics;
mod system;

use std::time::Instant;

use paceline_collectives::{Group, NcclOrder, OpKind, ReduceOp, measure_clock};
use paceline_commbench::exchange::{Exchange, buffers};
use paceline_commbench::operation::Operation;
use paceline_failure::{Failure, Result, usage};
use paceline_host::resources;
use paceline_host::text::{plural, say};
use paceline_launch::comm::{self, CommConfig};
use paceline_launch::connect::connect;
use paceline_launch::device::Device;
use paceline_launch::environment::Placement;
use paceline_launch::launcher::{self, Launch};
use paceline_launch::{pinning, threads};
use paceline_memory::DType;
use paceline_settings::named::TransportName;

use self::args::CheckArgs;

/// Numbers of elements of the all-reduces that are checked.
const SIZES: [usize; 3] = [1, 4099, 1_000_003];

/// The outcome of a question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Status {
    Ok,
    Warn,
    Fail,
}

/// Collects the answers. Only rank 0 prints them.
struct Answers {
    speaks: bool,
    has_failed: bool,
}

impl Answers {
    /// By how many characters details are indented.
    const INDENT: usize = 6;

    /// The answers of this rank. Rank 0 prints, the other ranks do not.
    fn of(rank: usize) -> Self {
        Self { speaks: rank == 0, has_failed: false }
    }

    fn add(&mut self, status: Status, question: &str, answer: &str) {
        self.has_failed |= status == Status::Fail;
        if self.speaks {
            let word = match status {
                Status::Ok => "ok",
                Status::Warn => "warn",
                Status::Fail => "FAIL",
            };
            say(&format!("{word:<4}  {question}: {answer}"));
        }
    }

    /// Prints details of the last answer.
    fn explain(&self, text: &str) {
        if self.speaks {
            text.lines().for_each(|line| say(&format!("{:1$}{line}", "", Self::INDENT)));
        }
    }
}

/// Runs `paceline check`: answers the questions as a rank, or starts the ranks.
pub fn check(args: &CheckArgs, placement: Option<Placement>) -> Result<u8> {
    if let Some([a, b]) = args.numerics.as_deref() {
        if let Some(placement) = &placement {
            let fix = placement.unset();
            return usage(format!(
                "--numerics starts ranks of its own, and another launcher has started this one; {fix}"
            ));
        }
        return numerics::check([a, b], args.steps);
    }
    let (world, transport) = resolve(args, placement.as_ref())?;
    let comm = comm::resolve(&args.comm, args.device, &[transport])?;
    let is_one_host = placement.as_ref().is_none_or(|placement| placement.place.is_one_host());
    if let Some(reason) = comm.refusal(transport, world).filter(|_| is_one_host) {
        return Err(Failure::Usage(format!("--transport {}: {reason}", transport.name())));
    }
    let local_ranks = placement.as_ref().map_or(world, |of| of.place.local_world_size);
    args.device.check(&[transport], local_ranks)?;
    let nccl = (transport == TransportName::Nccl).then_some(comm.nccl_order);
    let device = (args.device, nccl);
    if let Some(placement) = placement {
        return as_rank(&placement, transport, &comm, device);
    }
    if transport == TransportName::Thread {
        let begin = Instant::now();
        let asked = threads::run(world, comm.options(world), |group| {
            let rank = group.rank();
            ask(&group, begin, (rank, world), device)
        });
        // A link is refused before the first question.
        if let Err(Failure::Link(reason)) = &asked {
            Answers::of(0).add(Status::Fail, "group", reason);
        }
        return asked.map(u8::from);
    }
    let variables = vec![(paceline_launch::environment::STARTED, "1".into())];
    let launch = Launch::of_own_program(std::env::args_os().skip(1), world, variables)?;
    Ok(launcher::launch(&launch)?.code)
}

/// The number of ranks, and their transport.
fn resolve(args: &CheckArgs, placement: Option<&Placement>) -> Result<(usize, TransportName)> {
    let is_inner = placement.is_some_and(|placement| placement.is_started);
    let world = launcher::num_ranks(args.nproc.filter(|_| !is_inner), placement)?;
    let Some(placement) = placement else {
        return Ok((world, args.transport.unwrap_or(TransportName::Shm)));
    };
    placement.check_transport(args.transport)?;
    Ok((world, args.transport.unwrap_or(placement.default_transport())))
}

fn as_rank(
    placement: &Placement,
    transport: TransportName,
    comm: &CommConfig,
    device: OnDevice,
) -> Result<u8> {
    let place = &placement.place;
    let begin = Instant::now();
    let group = match connect(transport, comm, place.rendezvous()?, place, None, None) {
        Ok(group) => group,
        Err(failure) => {
            Answers::of(place.rank).add(Status::Fail, "group", &failure.to_string());
            return Err(failure);
        }
    };
    ask(&group, begin, (place.local_rank, place.local_world_size), device).map(u8::from)
}

/// Where the ranks compute, and how NCCL adds up there, if it is used.
type OnDevice = (Device, Option<NcclOrder>);

/// Answers all questions. Returns whether any answer was FAIL. All ranks call this together.
fn ask(
    group: &Group,
    begin: Instant,
    (local_rank, local_ranks): (usize, usize),
    device: OnDevice,
) -> Result<bool> {
    let mut answers = Answers::of(group.rank());
    let (world, transport) = (group.world_size(), group.transport().name());
    let ms = begin.elapsed().as_secs_f64() * 1e3;
    let text = format!("{} met over {transport} in {ms:.1} ms", plural(world, "rank"));
    answers.add(Status::Ok, "group", &text);
    if let Some(link) = group.link() {
        answers.add(Status::Ok, "link", &format!("a link of {link} is emulated"));
    }
    let all_reduce = |group: &Group, answers: &mut Answers| all_reduce(group, device, answers);
    type Question<'a> = &'a dyn Fn(&Group, &mut Answers) -> Result<()>;
    let questions: [(&str, Question); 3] =
        [("clock", &clock), ("links", &links::links), ("all-reduce", &all_reduce)];
    devices(group, (local_rank, local_ranks), device.0, &mut answers)?;
    system::memory(local_ranks, &mut answers);
    system::limits(world, device.0, &mut answers);
    for (name, question) in questions {
        if let Err(failure) = question(group, &mut answers) {
            answers.add(Status::Fail, name, &failure.to_string());
            return Err(failure);
        }
    }
    Ok(answers.has_failed)
}

/// Which device and cores each rank computes on.
fn devices(
    group: &Group,
    (local_rank, local_ranks): (usize, usize),
    device: Device,
    answers: &mut Answers,
) -> Result<()> {
    let own = device.place(group.rank(), local_rank);
    let own = (own, pinning::core_list().unwrap_or("unknown".into()));
    let Some(all) = group.gather_object(&own, 0)? else { return Ok(()) };
    for (line, cores) in &all {
        answers.add(Status::Ok, "device", &format!("{line}, cores {cores}"));
    }
    // Only ranks with the same list of cores share them. Launchers may have given each rank cores of its
    // own.
    let sharing = all.iter().filter(|(_, cores)| *cores == own.1).count().min(local_ranks);
    let cores = resources::num_cores();
    if sharing > cores {
        let text = format!("{sharing} ranks share {cores} cores of this host; they take turns");
        answers.add(Status::Warn, "device", &text);
    }
    Ok(())
}

/// Reports the largest offset of the other ranks' clocks from rank 0's, as measured by messages.
fn clock(group: &Group, answers: &mut Answers) -> Result<()> {
    let measured = measure_clock(group)?.measured;
    let own = (measured.offset_ns.unsigned_abs(), measured.round_trip_ns);
    let Some(all) = group.gather_object(&own, 0)? else { return Ok(()) };
    let us = |ns: u64| ns as f64 / 1e3;
    let furthest = all.iter().enumerate().skip(1).max_by_key(|(_, (offset_ns, _))| *offset_ns);
    let text = match furthest {
        None => "one rank, one clock".to_owned(),
        Some((rank, &(offset_ns, round_trip_ns))) => format!(
            "at most {:.1} us from rank 0 (rank {rank}), by a round trip of {:.1} us",
            us(offset_ns),
            us(round_trip_ns)
        ),
    };
    answers.add(Status::Ok, "clock", &text);
    Ok(())
}

/// Checks that every element of an all-reduce in the device's memory is right on every rank.
fn all_reduce(group: &Group, device: OnDevice, answers: &mut Answers) -> Result<()> {
    let operation =
        Operation { kind: OpKind::AllReduce, redop: ReduceOp::Sum, root: 0, dtype: DType::F32 };
    let most = SIZES.into_iter().max().unwrap_or(0);
    let buffers = buffers(operation, group, most, device, false)?;
    let mut wrong = 0;
    for elements in SIZES {
        wrong += Exchange::new(operation, group, &buffers, elements, true)?.check()?;
    }
    match wrong {
        0 => {
            let text = format!("{} sizes, every element right on every rank", SIZES.len());
            answers.add(Status::Ok, "all-reduce", &text);
        }
        wrong => answers.add(Status::Fail, "all-reduce", &format!("{wrong} elements are wrong")),
    }
    Ok(())
}
