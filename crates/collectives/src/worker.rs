//! The queue of a group: operations run in the order in which they were submitted.
//!
//! Asynchronous operations run on the group's own thread. If the queue is idle, a blocking operation runs
//! on its caller's thread, which saves two thread switches.
//!
//! Input: calls whose memory is claimed, or queued in the group's stream. Output: the times of each operation. This module
//! knows nothing of transports.

use std::collections::VecDeque;
use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use paceline_memory::{Claim, DeviceStream, Event, EventState, Signal, Stream};
use paceline_trace::runtime::{Condvar, before_join};
use paceline_trace::{beside, lock, now_ns, thread_builder};

use crate::call::Call;
use crate::context::WaitPolicy;
use crate::core::Core;
use crate::record::OpTimes;
use crate::staging::DeviceOperand;

use crate::{CollectiveError, GroupOptions, Result};

/// An asynchronous operation that is queued, running or finished.
///
/// Its data stay in place until the operation is finished, even if this value is dropped.
///
/// ```
/// use paceline_collectives::{Group, ReduceOp};
/// use paceline_memory::{Allocator, Category, DType};
///
/// let group = Group::threads(1).remove(0);
/// let grads = Allocator::new().tensor(DType::F32, [4], Category::Gradients)?;
/// grads.write::<f32>()?.fill(2.0);
/// let work = group.all_reduce_async(&grads, ReduceOp::Mean)?;
/// // The rank computes something else here. It cannot write to `grads` before the work is finished.
/// work.wait()?;
/// assert_eq!(grads.read::<f32>()?[..], [2.0; 4]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Work {
    outcome: Arc<OnceLock<Outcome>>,
    event: Event,
    /// The copies around the operation, if its memory is that of an accelerator: to the host, and then back, which ends the work.
    copies: Vec<Event>,
    /// The stream of the memory and that of the operation, if a graph is to have it: the first waits for the second, and the host for none.
    streams: Option<[DeviceStream; 2]>,
}

type Outcome = Result<OpTimes>;

/// Called on the communication thread with the outcome of an operation, before the next operation begins.
pub(crate) type OnEnd = Box<dyn FnOnce(&Outcome) + Send>;

/// The claims on the memory of a call: what it reads and what it writes, or one claim on both.
pub(crate) type Claims = [Option<Claim>; 2];

impl Work {
    /// Blocks until the operation is finished. Returns its times, or its error. If a graph is to have the operation
    /// ([`Group::agree_on_graph`](crate::Group::agree_on_graph)), the memory's stream waits for it instead, and its times are zero.
    pub fn wait(&self) -> Result<OpTimes> {
        if let Some([home, stream]) = &self.streams {
            home.wait_for(stream)?;
            return Ok(OpTimes::default());
        }
        self.event.wait();
        self.copies.iter().for_each(|copy| {
            copy.wait();
        });
        self.outcome.get().expect("the outcome is known before the event has come").clone()
    }

    /// Whether [`Work::wait`] would return at once.
    pub fn is_finished(&self) -> bool {
        let mut events = self.copies.iter().chain([&self.event]);
        events.all(|event| event.state() != EventState::Pending)
    }

    /// Work of a stream, for which the stream of its memory waits.
    pub(crate) fn in_stream(event: Event, streams: [DeviceStream; 2]) -> Self {
        Self { outcome: Arc::default(), event, copies: Vec::new(), streams: Some(streams) }
    }

    /// The same work with the copies around it.
    pub(crate) fn between(self, copies: Vec<Event>) -> Self {
        Self { copies, ..self }
    }

    /// The event of the operation's end.
    pub fn event(&self) -> &Event {
        self.copies.last().unwrap_or(&self.event)
    }
}

/// The side of a [`Work`] that runs it.
struct Promise {
    outcome: Arc<OnceLock<Outcome>>,
    ends: [Option<(Event, Signal)>; 2],
    on_end: Option<OnEnd>,
}

/// The memory of operations that have failed.
#[derive(Debug, Default)]
pub(crate) struct Fenced {
    events: Vec<Event>,
    /// Never dropped, unless they are given back.
    claims: Vec<ManuallyDrop<Claims>>,
}

impl Fenced {
    pub(crate) fn is_empty(&self) -> bool {
        self.events.is_empty() && self.claims.is_empty()
    }

    /// Gives the memory back.
    ///
    /// # Safety
    ///
    /// No peer touches it any longer.
    pub(crate) unsafe fn give_back(own: &Mutex<Self>) {
        let Self { events, claims } = std::mem::take(&mut *lock(own));
        // SAFETY: the caller's; this rank has left the operations as well, since they have ended.
        events.iter().for_each(|event| unsafe { event.give_back() });
        claims.into_iter().map(ManuallyDrop::into_inner).for_each(drop);
    }
}

impl fmt::Debug for Promise {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Promise").field("ends", &self.ends).finish_non_exhaustive()
    }
}

impl Promise {
    /// A promise and its `Work`. `event` is that of the last end.
    fn new(
        event: Event,
        ends: [Option<(Event, Signal)>; 2],
        on_end: Option<OnEnd>,
    ) -> (Self, Work) {
        ends.iter().flatten().for_each(|(_, signal)| signal.commit());
        let outcome = Arc::new(OnceLock::new());
        let promise = Self { outcome: outcome.clone(), ends, on_end };
        (promise, Work { outcome, event, copies: Vec::new(), streams: None })
    }

    /// Ends the work. If the operation failed, its memory is fenced.
    fn keep(self, outcome: Outcome, fenced: &Mutex<Fenced>) {
        let is_complete = outcome.is_ok();
        let outcome = self.outcome.get_or_init(|| outcome);
        for (event, signal) in self.ends.into_iter().flatten() {
            if is_complete {
                signal.complete()
            } else {
                // First, so that whoever finds the failure finds the fence.
                lock(fenced).events.push(event);
                signal.fail();
            }
        }
        if let Some(on_end) = self.on_end {
            on_end(outcome);
        }
    }
}

#[derive(Debug)]
struct QueuedCall {
    /// Memory that is used after work of an accelerator.
    operands: Vec<DeviceOperand>,
    call: Call,
    limit: Option<Duration>,
    submitted_ns: u64,
    promise: Promise,
}

#[derive(Debug, Default)]
struct PendingCalls {
    jobs: VecDeque<QueuedCall>,
    busy: bool,
    stop: bool,
}

#[derive(Debug)]
struct OpQueue {
    core: Arc<Core>,
    state: Mutex<PendingCalls>,
    changed: Condvar,
    options: GroupOptions,
    fenced: Arc<Mutex<Fenced>>,
}

#[derive(Debug)]
pub(crate) struct Worker {
    shared: Arc<OpQueue>,
    /// The stream of the operations. Locked while one is queued, so that positions follow the order of the queue.
    stream: Mutex<Stream>,
    /// Started by the first operation that needs it.
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Worker {
    /// The worker of the group called `name`.
    pub(crate) fn new(core: Arc<Core>, name: &str, options: GroupOptions) -> Self {
        let (state, changed, fenced) = (Mutex::default(), Condvar::default(), Arc::default());
        let shared = Arc::new(OpQueue { core, state, changed, options, fenced });
        let stream = Mutex::new(Stream::new(name));
        Self { shared, stream, thread: Mutex::default() }
    }

    /// Starts the thread, unless it runs.
    fn ensure_thread(&self) -> Result<()> {
        let mut thread = lock(&self.thread);
        if thread.is_none() {
            let shared = self.shared.clone();
            let rank = shared.core.rank;
            let builder = thread_builder(format!("comm-{rank}"));
            let started = builder.spawn(beside(move || shared.serve()));
            let refused = |error: std::io::Error| CollectiveError::NoThread {
                rank,
                reason: error.to_string(),
            };
            *thread = Some(started.map_err(refused)?);
        }
        Ok(())
    }

    /// Runs a call and returns when it is finished. If it fails or panics, the claims
    /// stay until [`Worker::give_back`]: a peer that does not know of the failure yet may still write to the memory. `limit` is how
    /// long the call may wait for other ranks, if not as long as all calls of the group.
    pub(crate) fn run(
        &self,
        call: Call,
        claims: Claims,
        limit: Option<Duration>,
    ) -> Result<OpTimes> {
        let shared = &*self.shared;
        {
            let mut state = lock(&shared.state);
            if state.busy || !state.jobs.is_empty() {
                drop(state);
                // The host's claims are held until the operation is done.
                let outcome = self.submit(|_| Ok((call, Vec::new())), limit, None)?.wait();
                return shared.ended(outcome, claims);
            }
            state.busy = true;
        }
        let submitted_ns = now_ns();
        let turn = Turn(shared);
        let policy = shared.policy(shared.options.spin, limit);
        let outcome = shared.core.execute(&call, submitted_ns, policy);
        drop(turn);
        shared.ended(outcome, claims)
    }

    /// Gives back the memory of all operations that have failed.
    ///
    /// # Safety
    ///
    /// No peer touches it any longer.
    pub(crate) unsafe fn give_back(&self) {
        // SAFETY: the caller's.
        unsafe { Fenced::give_back(&self.shared.fenced) }
    }

    /// The memory of operations that have failed.
    pub(crate) fn fenced(&self) -> &Arc<Mutex<Fenced>> {
        &self.shared.fenced
    }

    /// Queues the call that `prepare` makes for the event of its end, with the memory that it uses after work of an accelerator.
    /// `on_end` may call further operations of this group and wait for them: on the communication thread, this
    /// carries out all that is queued before it returns.
    pub(crate) fn submit(
        &self,
        prepare: impl FnOnce(&Event) -> Result<(Call, Vec<DeviceOperand>)>,
        limit: Option<Duration>,
        on_end: Option<OnEnd>,
    ) -> Result<Work> {
        let stream = lock(&self.stream);
        let (event, signal) = stream.submit();
        let (call, operands) = match prepare(&event) {
            Ok(prepared) => prepared,
            Err(refused) => {
                signal.withdraw();
                return Err(refused);
            }
        };
        let mut ends = [Some((event.clone(), signal)), None];
        let mut event = event;
        if !operands.is_empty() {
            // The uses of this memory have a position of their own in the stream, after the work before.
            operands.iter().for_each(|of| stream.wait(&of.ready));
            let (after, signal) = stream.submit();
            event = after;
            ends[1] = Some((event.clone(), signal));
            let name = call.kind.name();
            let queued = operands
                .iter()
                .try_for_each(|of| of.memory.queue(of.access, name, &event).map(drop));
            if let Err(refused) = queued {
                // The stream has noted that later operations come after the copies, and no operation waits for them.
                await_copies(&operands);
                // Nothing is submitted, so these uses of the memory are over, and those before them count again.
                ends.into_iter().flatten().for_each(|(_, signal)| signal.withdraw());
                return Err(refused.into());
            }
        }
        let (promise, work) = Promise::new(event, ends, on_end);
        if let Err(error) = self.ensure_thread() {
            // The memory may be given back, so the copies end first.
            await_copies(&operands);
            // The peers go on to this operation, so this rank cannot go on without it.
            self.shared.core.fail(&error);
            drop(stream);
            promise.keep(Err(error), &self.shared.fenced);
            return Ok(work);
        }
        let job = QueuedCall { operands, call, limit, submitted_ns: now_ns(), promise };
        lock(&self.shared.state).jobs.push_back(job);
        drop(stream);
        if self.is_current_thread() {
            self.shared.drain();
        } else {
            self.shared.changed.notify_all();
        }
        Ok(work)
    }

    /// Whether this is the communication thread.
    fn is_current_thread(&self) -> bool {
        let current = std::thread::current().id();
        lock(&self.thread).as_ref().is_some_and(|thread| thread.thread().id() == current)
    }
}

/// Blocks until the work of an accelerator before an operation is done.
fn await_copies(operands: &[DeviceOperand]) {
    for of in operands {
        of.ready.block();
    }
}

/// The right to execute an operation, which a panic gives back too, so that no thread waits forever.
struct Turn<'a>(&'a OpQueue);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.0.state);
        state.busy = false;
        if !state.jobs.is_empty() || state.stop {
            self.0.changed.notify_all();
        }
    }
}

impl OpQueue {
    /// Passes the outcome of a blocking operation on. If it failed, its memory stays claimed.
    fn ended(&self, outcome: Outcome, claims: Claims) -> Outcome {
        if outcome.is_err() {
            lock(&self.fenced).claims.push(ManuallyDrop::new(claims));
        }
        outcome
    }

    fn policy(&self, spin: Duration, limit: Option<Duration>) -> WaitPolicy {
        WaitPolicy { spin, limit: limit.unwrap_or(self.options.timeout) }
    }

    /// Executes a queued call on the communication thread, which has the turn.
    fn carry_out(&self, job: QueuedCall) {
        let policy = self.policy(self.options.worker_spin, job.limit);
        await_copies(&job.operands);
        let outcome = self.core.execute(&job.call, job.submitted_ns, policy);
        job.promise.keep(outcome, &self.fenced);
    }

    /// Executes all queued calls on the communication thread, in the midst of another call's end.
    fn drain(&self) {
        while let Some(job) = { lock(&self.state).jobs.pop_front() } {
            self.carry_out(job);
        }
    }

    fn serve(&self) {
        loop {
            let job = {
                let mut state = lock(&self.state);
                loop {
                    if !state.busy {
                        if let Some(job) = state.jobs.pop_front() {
                            state.busy = true;
                            break job;
                        }
                        if state.stop {
                            return;
                        }
                    }
                    state = self.changed.wait(&self.state, state, None);
                }
            };
            let turn = Turn(self);
            self.carry_out(job);
            // Only now may a later operation run, so that none is seen as finished before an earlier one.
            drop(turn);
        }
    }
}

impl Drop for Worker {
    /// Finishes all submitted operations, then ends the thread.
    fn drop(&mut self) {
        lock(&self.shared.state).stop = true;
        self.shared.changed.notify_all();
        if self.is_current_thread() {
            // The last handle goes in the midst of an operation's end. The thread ends on its own.
            return;
        }
        if let Some(thread) = lock(&self.thread).take() {
            // A panic of an operation becomes the error of its `Work`, so the thread itself does not panic.
            before_join(thread.thread());
            let _ = thread.join();
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use paceline_memory::{Access, Allocator, Category, DType, Event, Tensor};

    use crate::call::Call;
    use crate::staging::DeviceOperand;
    use crate::{CollectiveError, Group, MAX_RANKS, OpKind};

    #[test]
    fn a_refused_operand_gives_the_others_back() {
        let group = Group::single().unwrap();
        let allocator = Allocator::new();
        let tensor = || allocator.tensor(DType::F32, [4], Category::Gradients).unwrap();
        let (first, second) = (tensor(), tensor());
        let held = second.claim(Access::Write, "sgd").unwrap();
        let operand = |memory: &Tensor| DeviceOperand {
            memory: memory.clone(),
            access: Access::Write,
            ready: Event::complete(),
        };
        let operands = vec![operand(&first), operand(&second)];
        let call = Call::new(OpKind::Barrier, DType::U8);
        let refused =
            group.worker().submit(|_| Ok((call, operands)), None, None).unwrap_err().to_string();
        assert!(refused.contains("claimed for sgd"), "{refused}");
        drop(held);
        assert!(first.write::<f32>().is_ok() && second.write::<f32>().is_ok());
        group.barrier().unwrap();
    }

    #[test]
    fn a_panic_on_the_communication_thread_fails_the_works() {
        let mut groups = Group::threads(2);
        let (second, first) = (groups.pop().unwrap(), groups.pop().unwrap());
        // The public methods check ranks, so they never make such a call. The rank has no mailbox: the operation panics.
        let broken = Call { root: MAX_RANKS, ..Call::new(OpKind::Recv, DType::F32) };
        let panics = first.worker().submit(|_| Ok((broken, Vec::new())), None, None).unwrap();
        let follows = first
            .worker()
            .submit(|_| Ok((Call::new(OpKind::Barrier, DType::U8), Vec::new())), None, None)
            .unwrap();
        let error = panics.wait().unwrap_err();
        assert!(matches!(error, CollectiveError::Panicked { rank: 0, seq: 0, .. }), "{error}");
        assert!(error.to_string().contains("out of bounds"), "{error}");
        let error = follows.wait().unwrap_err();
        assert!(matches!(error, CollectiveError::Broken { .. }), "{error}");
        assert!(error.to_string().contains("recv #0 (0 bytes) panicked"), "{error}");
        let error = second.barrier().unwrap_err();
        assert!(matches!(error, CollectiveError::PeerLost { peer: 0, .. }), "{error}");
    }

    /// A peer that does not know of the panic may still write to the memory of the operation.
    #[test]
    fn a_panic_in_a_blocking_operation_keeps_its_claims() {
        let mut groups = Group::threads(2);
        let (second, first) = (groups.pop().unwrap(), groups.pop().unwrap());
        let data = Allocator::new().tensor(DType::F32, [16], Category::Gradients).unwrap();
        let claims = [Some(data.claim(Access::Write, "recv").unwrap()), None];
        // No mailbox has this number, so the operation panics on this thread.
        let broken = Call { root: MAX_RANKS, ..Call::new(OpKind::Recv, DType::F32) };
        let error = first.worker().run(broken, claims, None).unwrap_err();
        assert!(matches!(error, CollectiveError::Panicked { rank: 0, seq: 0, .. }), "{error}");
        let refusal = data.claim(Access::Write, "sgd").unwrap_err().to_string();
        assert!(refusal.contains("claimed for recv"), "{refusal}");
        // The group is broken on this rank, and its peer learns that the rank is lost.
        let error = first.barrier().unwrap_err();
        assert!(matches!(error, CollectiveError::Broken { .. }), "{error}");
        let error = second.barrier().unwrap_err();
        assert!(matches!(error, CollectiveError::PeerLost { peer: 0, .. }), "{error}");
    }
}
