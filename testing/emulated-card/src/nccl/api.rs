//! The exported functions of NCCL.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::boundary::{InPtr, OutPtr, Outcome, StaticText, Status, export, stop_panics};
use crate::driver::{captures, current_card, has_graph_of, refuse, submit};

use super::collective::{CallGroup, NcclCall, NcclOp};
use super::communicator::*;
use super::reduce::{Element, NcclReduction};

/// `ncclUnhandledCudaError`
const CUDA_ERROR: Status = Status(1);

/// `ncclUniqueId`: a text and zeros.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct NcclId([u8; 128]);

/// `ncclConfig_t`, as far as it counts here.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct NcclConfig {
    size: usize,
    magic: u32,
    version: u32,
    blocking: i32,
}

/// `NCCL_API_MAGIC`
const MAGIC: u32 = 0xcafe_beef;

/// All communicators of the process. Handles are never used again.
#[derive(Default)]
struct Communicators {
    known: HashMap<usize, Arc<NcclCommunicator>>,
    /// The calls of those that do not block, which come into their streams when somebody asks.
    in_progress: Vec<(usize, Vec<NcclCall>)>,
    last: usize,
}

fn communicators() -> MutexGuard<'static, Communicators> {
    static COMMUNICATORS: LazyLock<Mutex<Communicators>> = LazyLock::new(Mutex::default);
    COMMUNICATORS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn find(handle: usize) -> Result<Arc<NcclCommunicator>, Status> {
    let found = communicators().known.get(&handle).cloned();
    found.ok_or_else(|| refuse(INVALID_ARGUMENT, "not a communicator"))
}

/// The calls of a thread since its outermost `ncclGroupStart`.
#[derive(Default)]
struct OpenGroup {
    depth: u32,
    calls: BTreeMap<usize, Vec<NcclCall>>,
    entered: Vec<Arc<NcclCommunicator>>,
}

thread_local! {
    static GROUP: RefCell<OpenGroup> = RefCell::default();
}

fn guard(body: impl FnOnce() -> Outcome) -> u32 {
    stop_panics(INTERNAL_ERROR.0, body)
}

/// Queues a call, now or when the group ends.
fn issue(
    kind: NcclOp,
    [send, receive]: [u64; 2],
    count: usize,
    element: u32,
    handle: usize,
    stream: usize,
) -> Outcome {
    let communicator = find(handle)?;
    let size = communicator.size;
    let peer = match kind {
        NcclOp::Broadcast { root } | NcclOp::Reduce(_, root) => root,
        NcclOp::Send { to: peer } | NcclOp::Receive { from: peer } => peer,
        NcclOp::AllReduce(_) | NcclOp::AllGather | NcclOp::ReduceScatter(_) => 0,
    };
    if peer >= size {
        return Err(refuse(INVALID_ARGUMENT, format!("rank {peer} of {size}")));
    }
    if communicator.is_aborted() {
        return Err(refuse(INVALID_USAGE, "the communicator was aborted"));
    }
    if !communicator.blocks && is_in_progress(&communicator)? {
        return Err(refuse(INVALID_USAGE, "the communicator is in progress with an earlier call"));
    }
    let element = Element::new(element)?;
    let is_captured = captures(stream);
    let call = NcclCall { communicator, kind, send, receive, count, element, is_captured };
    let in_group = GROUP.with_borrow_mut(|group| {
        if group.depth > 0 {
            group.calls.entry(stream).or_default().push(call.clone());
        }
        group.depth > 0
    });
    if in_group { Ok(()) } else { run(stream, vec![call]) }
}

/// Puts calls into a stream: now, or when somebody asks for a communicator that does not block.
fn run(stream: usize, calls: Vec<NcclCall>) -> Outcome {
    if calls.iter().any(|call| !call.communicator.blocks) {
        communicators().in_progress.push((stream, calls));
        return Err(IN_PROGRESS);
    }
    submit(stream, Arc::new(CallGroup::new(calls))).map_err(|_| CUDA_ERROR)
}

/// Whether calls are those of a communicator.
fn are_of(calls: &[NcclCall], communicator: &Arc<NcclCommunicator>) -> bool {
    calls.iter().any(|call| Arc::ptr_eq(&call.communicator, communicator))
}

/// Whether a communicator that does not block waits for other ranks, or has calls that are in no stream yet.
fn is_in_progress(communicator: &Arc<NcclCommunicator>) -> Result<bool, Status> {
    let calls = &communicators().in_progress;
    Ok(calls.iter().any(|(_, calls)| are_of(calls, communicator)) || !communicator.has_met()?)
}

/// Lets a communicator that does not block go on. Returns whether it is in progress still.
fn go_on(communicator: &Arc<NcclCommunicator>) -> Result<bool, Status> {
    if !communicator.has_met()? {
        return Ok(true);
    }
    let is_own = |(_, calls): &mut (usize, Vec<NcclCall>)| are_of(calls, communicator);
    let own: Vec<_> = communicators().in_progress.extract_if(.., is_own).collect();
    for (stream, calls) in own {
        submit(stream, Arc::new(CallGroup::new(calls))).map_err(|_| CUDA_ERROR)?;
    }
    Ok(false)
}

/// Enters a communicator. If it blocks, waits for the other ranks; in a group, its end waits.
fn init(communicator: OutPtr<usize>, size: i32, id: NcclId, rank: i32, blocks: bool) -> Outcome {
    let card = current_card().map_err(|_| CUDA_ERROR)?;
    if size < 1 || rank < 0 || rank >= size || communicator.is_null() {
        return Err(refuse(INVALID_ARGUMENT, format!("rank {rank} of {size}")));
    }
    let end = id.0.iter().position(|byte| *byte == 0).unwrap_or(128);
    let name = String::from_utf8_lossy(&id.0[..end]).into_owned();
    if !is_name(&name) {
        return Err(refuse(INVALID_ARGUMENT, "an id that ncclGetUniqueId did not give"));
    }
    let failing = std::env::var("PACELINE_EMULATED_NCCL_FAILS");
    if failing.is_ok_and(|of| of == rank.to_string()) {
        return Err(refuse(SYSTEM_ERROR, format!("rank {rank} is not to connect")));
    }
    let entered = NcclCommunicator::enter(&name, rank as usize, size as usize, card, blocks)?;
    let entered = Arc::new(entered);
    let in_group = GROUP.with_borrow_mut(|group| {
        if group.depth > 0 && blocks {
            group.entered.push(entered.clone());
        }
        group.depth > 0
    });
    if !in_group && blocks {
        entered.meet()?;
    }
    let mut communicators = communicators();
    communicators.last += 16;
    let handle = 0x2c_0000 + communicators.last;
    communicators.known.insert(handle, entered);
    communicator.set(handle);
    if blocks { Ok(()) } else { Err(IN_PROGRESS) }
}

fn peer(rank: i32) -> Result<usize, Status> {
    usize::try_from(rank).map_err(|_| refuse(INVALID_ARGUMENT, format!("rank {rank}")))
}

fn remove(handle: usize) -> Result<Arc<NcclCommunicator>, Status> {
    communicators().known.remove(&handle).ok_or(INVALID_ARGUMENT)
}

/// Waits until no graph has work of a communicator, as the library does without a limit. The process ends where a program would hang.
#[allow(clippy::print_stderr, reason = "nobody would see why the process ends")]
fn outlive_graphs(communicator: &Arc<NcclCommunicator>) {
    let begin = Instant::now();
    while has_graph_of(Arc::as_ptr(communicator).addr()) {
        if begin.elapsed() > PATIENCE {
            eprintln!(
                "a communicator of NCCL ends before the graphs with its work, and would wait forever"
            );
            std::process::abort();
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A sentence about a result.
#[unsafe(no_mangle)]
#[allow(non_snake_case)]
pub extern "C" fn ncclGetErrorString(result: u32) -> StaticText {
    StaticText::new(match result {
        0 => c"no error",
        1 => c"unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        2 => c"unhandled system error (run with NCCL_DEBUG=INFO for details)",
        3 => c"internal error",
        4 => c"invalid argument (run with NCCL_DEBUG=WARN for details)",
        5 => c"invalid usage (run with NCCL_DEBUG=WARN for details)",
        6 => c"remote process exited or there was a network error",
        7 => c"NCCL operation in progress",
        _ => c"unknown result code",
    })
}

export! { guard;
fn ncclGetVersion(number: OutPtr<i32>) {
    number.give(version(), INVALID_ARGUMENT)
}
fn ncclGetUniqueId(id: OutPtr<NcclId>) {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let text = new_name(NEXT.fetch_add(1, Ordering::SeqCst));
    let mut bytes = [0; 128];
    bytes[..text.len()].copy_from_slice(text.as_bytes());
    id.give(NcclId(bytes), INVALID_ARGUMENT)
}
/// Enters a communicator and waits for the other ranks; in a group, its end waits.
fn ncclCommInitRank(communicator: OutPtr<usize>, size: i32, id: NcclId, rank: i32) {
    init(communicator, size, id, rank, true)
}
/// The same, without waiting if the configuration says so.
fn ncclCommInitRankConfig(communicator: OutPtr<usize>, size: i32, id: NcclId, rank: i32, config: InPtr<NcclConfig>) {
    let config = config.get().filter(|of| of.magic == MAGIC && of.size >= size_of::<NcclConfig>());
    let config = config.ok_or_else(|| refuse(INVALID_ARGUMENT, "not an ncclConfig_t"))?;
    init(communicator, size, id, rank, config.version < 21_400 || config.blocking != 0)
}
fn ncclCommDestroy(communicator: usize) {
    let communicator = remove(communicator)?;
    outlive_graphs(&communicator);
    communicator.leave();
    Ok(())
}
/// Leaves a communicator and ends its waiting work.
fn ncclCommAbort(communicator: usize) {
    let communicator = remove(communicator)?;
    let is_own = |(_, calls): &mut (usize, Vec<NcclCall>)| are_of(calls, &communicator);
    communicators().in_progress.retain_mut(|calls| !is_own(calls));
    communicator.abort();
    outlive_graphs(&communicator);
    communicator.leave();
    Ok(())
}
fn ncclCommGetAsyncError(communicator: usize, result: OutPtr<u32>) {
    let communicator = find(communicator)?;
    let mut error = communicator.error();
    if error == 0 && !communicator.blocks {
        error = match go_on(&communicator) {
            Ok(is_in_progress) => if is_in_progress { IN_PROGRESS.0 } else { 0 },
            Err(Status(status)) => status,
        };
    }
    result.give(error, INVALID_ARGUMENT)
}
fn ncclCommCount(communicator: usize, count: OutPtr<i32>) {
    count.give(find(communicator)?.size as i32, INVALID_ARGUMENT)
}
fn ncclCommUserRank(communicator: usize, rank: OutPtr<i32>) {
    rank.give(find(communicator)?.rank as i32, INVALID_ARGUMENT)
}
/// Later calls of this thread wait together.
fn ncclGroupStart() {
    GROUP.with_borrow_mut(|group| group.depth += 1);
    Ok(())
}
fn ncclGroupEnd() {
    let group = GROUP.with_borrow_mut(|group| {
        group.depth = group.depth.checked_sub(1)?;
        Some(if group.depth == 0 { std::mem::take(group) } else { OpenGroup::default() })
    });
    let group = group.ok_or_else(|| refuse(INVALID_USAGE, "ncclGroupEnd without a start"))?;
    for communicator in &group.entered {
        communicator.meet()?;
    }
    // All of them are submitted, also if one is in progress.
    let mut ended = Ok(());
    for (stream, calls) in group.calls {
        match run(stream, calls) {
            Err(IN_PROGRESS) => ended = Err(IN_PROGRESS),
            outcome => outcome?,
        }
    }
    ended
}
fn ncclAllReduce(send: u64, receive: u64, count: usize, element: u32, op: u32, comm: usize, stream: usize) {
    issue(NcclOp::AllReduce(NcclReduction::new(op)?), [send, receive], count, element, comm, stream)
}
fn ncclAllGather(send: u64, receive: u64, count: usize, element: u32, comm: usize, stream: usize) {
    issue(NcclOp::AllGather, [send, receive], count, element, comm, stream)
}
fn ncclReduceScatter(send: u64, receive: u64, count: usize, element: u32, op: u32, comm: usize, stream: usize) {
    issue(NcclOp::ReduceScatter(NcclReduction::new(op)?), [send, receive], count, element, comm, stream)
}
fn ncclBroadcast(send: u64, receive: u64, count: usize, element: u32, root: i32, comm: usize, stream: usize) {
    issue(NcclOp::Broadcast { root: peer(root)? }, [send, receive], count, element, comm, stream)
}
fn ncclReduce(send: u64, receive: u64, count: usize, element: u32, op: u32, root: i32, comm: usize, stream: usize) {
    let kind = NcclOp::Reduce(NcclReduction::new(op)?, peer(root)?);
    issue(kind, [send, receive], count, element, comm, stream)
}
fn ncclSend(send: u64, count: usize, element: u32, to: i32, comm: usize, stream: usize) {
    issue(NcclOp::Send { to: peer(to)? }, [send, 0], count, element, comm, stream)
}
fn ncclRecv(receive: u64, count: usize, element: u32, from: i32, comm: usize, stream: usize) {
    issue(NcclOp::Receive { from: peer(from)? }, [0, receive], count, element, comm, stream)
}
}
