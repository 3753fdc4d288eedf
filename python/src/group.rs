//! A group of ranks, as Python sees it.
//!
//! Input: calls with addresses. The Python side keeps the memory as long as the object `keep` lives, and leaves it alone until the work
//! has ended. Output: works.

use std::collections::BTreeMap;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use paceline_collectives::{
    Group, GroupOptions, Mailbox, Meeting, Member, Message, OpKind, OpTimes, RawCall, RawMemory,
    ReduceOp, SharedHeap,
};
use paceline_memory::DType;
use paceline_trace::{lock, now_ns, thread_builder};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use crate::figures::{Figures, Sums};
use crate::interpreter::has_left;
use crate::work::{Failure, Held, Outcome, Progress, PyWork};

/// Memory of a tensor: address and length in bytes.
type Memory = (usize, usize);

/// A group of ranks. Only the process that has formed it can use it.
#[pyclass(frozen, name = "Group")]
pub(crate) struct PyGroup {
    /// `None` once the rank has left.
    handles: Mutex<Option<Handles>>,
    /// The process that has formed the group.
    process: u32,
    /// The sockets of the group, until a child has closed its copies.
    descriptors: Mutex<Vec<RawFd>>,
    figures: Arc<Figures>,
}

#[derive(Clone)]
struct Handles {
    // Dropped first: messages may be on their way when the last operation has ended.
    mailbox: Option<Arc<Mailbox>>,
    heap: Option<Arc<SharedHeap>>,
    group: Group,
}

fn memory((address, len_bytes): Memory) -> RawMemory {
    RawMemory { base: std::ptr::with_exposed_provenance_mut(address), len_bytes }
}

fn duration(seconds: f64) -> PyResult<Duration> {
    let refused = |_| PyValueError::new_err(format!("a time limit of {seconds} seconds"));
    Duration::try_from_secs_f64(seconds).map_err(refused)
}

/// The one of these values that has this name.
fn by_name<T: Copy>(all: &[T], name: &str, name_of: impl Fn(T) -> &'static str) -> PyResult<T> {
    let found = all.iter().copied().find(|value| name_of(*value) == name);
    found.ok_or_else(|| PyValueError::new_err(format!("{name:?} is not known here")))
}

#[pymethods]
impl PyGroup {
    /// Meets the other ranks, as a rank of so many, which errors call by these names. `exchange(name, text)` passes a text on
    /// and returns those of all ranks.
    #[new]
    fn form(
        py: Python<'_>,
        ranks: (usize, usize, Vec<usize>),
        limit_s: f64,
        threads: usize,
        server: Option<(String, u16)>,
        exchange: Py<PyAny>,
    ) -> PyResult<Self> {
        let (rank, world_size, names) = ranks;
        let timeout = duration(limit_s)?;
        let member = Member { rank, world_size, names };
        let mut raised = None;
        let formed = py.detach(|| {
            let mut exchange = |name: &str, text: String| {
                Python::attach(|py| {
                    let all = exchange.call1(py, (name, text)).and_then(|all| all.extract(py));
                    all.map_err(|error| {
                        let text = error.to_string();
                        raised = Some(error);
                        text
                    })
                })
            };
            let options =
                |local| GroupOptions { timeout, ..GroupOptions::for_ranks_of(local, threads) };
            Group::from_store(
                member,
                Meeting { exchange: &mut exchange, server, over: None },
                options,
            )
        });
        // An error of the store says more than ours.
        let (group, mailbox, heap) =
            formed.map_err(|error| raised.unwrap_or(Failure::from(error).into()))?;
        let mut descriptors = group.descriptors();
        descriptors.extend(mailbox.iter().flat_map(Mailbox::descriptors));
        let (mailbox, heap) = (mailbox.map(Arc::new), heap.map(Arc::new));
        let handles = Mutex::new(Some(Handles { mailbox, heap, group }));
        let (process, descriptors) = (std::process::id(), Mutex::new(descriptors));
        Ok(Self { handles, process, descriptors, figures: Arc::default() })
    }

    /// Runs an operation of the whole group (by its name, those of type and reduction, and the root) on memory that `keep` owns: what
    /// is sent, what is received, and the elements for and from each rank in an all-to-all. Returns its work; or nothing, if it `blocks`. After it has succeeded, `finish()` is called, and only then the work ends.
    fn run(
        &self,
        py: Python<'_>,
        operation: (String, String, String, usize),
        data: (Memory, Memory, Option<[Vec<usize>; 2]>),
        held: (Py<PyAny>, Option<Py<PyAny>>),
        blocks: bool,
        limit_s: Option<f64>,
    ) -> PyResult<Option<PyWork>> {
        let ((kind, dtype, op, root), (send, recv, counts)) = (operation, data);
        let (keep, finish) = held;
        let Handles { group, .. } = self.handles()?;
        let call = RawCall {
            op: by_name(&ReduceOp::ALL, &op, ReduceOp::name)?,
            root,
            send: memory(send),
            recv: memory(recv),
            counts,
            limit: limit_s.map(duration).transpose()?,
            ..RawCall::new(
                by_name(&OpKind::ALL, &kind, OpKind::name)?,
                by_name(&DType::ALL, &dtype, DType::name)?,
            )
        };
        let (figures, name) = (self.figures.clone(), call.kind.name());
        let bytes = call.send.len_bytes.max(call.recv.len_bytes);
        if blocks && finish.is_none() {
            // SAFETY: the caller has `keep`, and waits here.
            let times = py.detach(move || unsafe { group.run_raw(call) }).map_err(Failure::from)?;
            figures.count(name, bytes, &times);
            return Ok(None);
        }
        let progress = Arc::new(Progress::default());
        let (ends, held) = (progress.clone(), Held { keep, finish });
        let on_end = move |outcome: &Result<OpTimes, paceline_collectives::CollectiveError>| {
            outcome.iter().for_each(|times| figures.count(name, bytes, times));
            let outcome: Outcome = outcome.as_ref().map(|_| None).map_err(|e| e.clone().into());
            ends.settle(held, outcome);
        };
        // SAFETY: `held` owns the memory until the operation has ended, and the Python side leaves it alone.
        py.detach(move || unsafe { group.start_raw(call, on_end) }).map_err(Failure::from)?;
        Ok(Some(PyWork { progress }))
    }

    /// Sends a message to `peer`, or receives one from `peer`, or from any rank if that is None. `held` is as for `run`.
    fn post(
        &self,
        py: Python<'_>,
        way: (bool, Option<usize>, u64),
        data: (String, Memory),
        held: (Py<PyAny>, Option<Py<PyAny>>),
        limit_s: Option<f64>,
    ) -> PyResult<PyWork> {
        let ((is_send, peer, tag), (dtype, data)) = (way, data);
        let Handles { mailbox, .. } = self.handles()?;
        let alone = || PyValueError::new_err("a group of one rank has nobody to talk to");
        let mailbox = mailbox.ok_or_else(alone)?;
        let dtype = by_name(&DType::ALL, &dtype, DType::name)?;
        let limit = limit_s.map(duration).transpose()?;
        let message = Message { peer, tag, dtype, memory: memory(data), limit };
        let progress = Arc::new(Progress::default());
        let (ends, held) = (progress.clone(), Held { keep: held.0, finish: held.1 });
        let (figures, bytes, begun) = (self.figures.clone(), message.memory.len_bytes, now_ns());
        let on_end = move |outcome: Result<usize, _>| {
            let mut times =
                OpTimes { submitted_ns: begun, started_ns: begun, ..OpTimes::default() };
            (times.present_ns, times.finished_ns) = (begun, now_ns());
            let kind = if is_send { OpKind::Send } else { OpKind::Recv };
            outcome.iter().for_each(|_| figures.count(kind.name(), bytes, &times));
            ends.settle(held, outcome.map(Some).map_err(Failure::from));
        };
        // SAFETY: `held` owns the memory until the message has ended, and the Python side leaves it alone.
        let posted = py.detach(move || unsafe { mailbox.post(is_send, message, on_end) });
        posted.map_err(Failure::from)?;
        Ok(PyWork { progress })
    }

    /// Closes the copies of the group's sockets in a child that was just forked. Nothing else uses them there.
    fn close_in_child(&self) {
        if self.process != std::process::id() {
            for descriptor in std::mem::take(&mut *lock(&self.descriptors)) {
                // SAFETY: the descriptor is this process's copy, and its owners are never dropped or used in this process.
                drop(unsafe { OwnedFd::from_raw_fd(descriptor) });
            }
        }
    }

    /// How the ranks reach each other.
    fn transport(&self) -> PyResult<&'static str> {
        Ok(self.handles()?.group.transport().name())
    }

    /// By the name of each operation: its calls and bytes, the seconds in the queue, waiting for the last rank and moving, and
    /// the seconds of waiting for each rank that was the last. A message only moves.
    fn figures(&self) -> BTreeMap<&'static str, Sums> {
        self.figures.all()
    }

    /// Moves memory to the group's heap, and returns its address there; or nothing, if there is no heap, or no room. It is the whole of a
    /// mapping, which nobody uses meanwhile.
    fn adopt(&self, data: Memory) -> PyResult<Option<usize>> {
        let Some(heap) = self.handles()?.heap else { return Ok(None) };
        let RawMemory { base, len_bytes } = memory(data);
        // SAFETY: the caller vouches for the mapping.
        let adopted = unsafe { heap.adopt(base, len_bytes) }.map_err(Failure::from)?;
        Ok(adopted.map(|at| at.expose_provenance()))
    }

    /// Gives memory of the heap back that nobody uses any longer.
    fn give_back(&self, at: usize) -> PyResult<()> {
        if let Some(heap) = self.handles()?.heap {
            // SAFETY: the caller vouches for it.
            unsafe { heap.give_back(std::ptr::with_exposed_provenance_mut(at)) };
        }
        Ok(())
    }

    /// Leaves the group, after all that has been submitted has ended; `at_once`, in the background.
    fn close(&self, py: Python<'_>, at_once: bool) {
        let Some(handles) = lock(&self.handles).take() else { return };
        lock(&self.descriptors).clear();
        if self.is_elsewhere() {
            return std::mem::forget(handles);
        }
        if at_once {
            // Without a thread, this one waits.
            let _ = thread_builder("leave").spawn(move || drop(handles));
        } else {
            py.detach(move || drop(handles));
        }
    }
}

impl PyGroup {
    /// Whether this is not the process that has formed the group, or its interpreter ends: nobody may then leave the group in order.
    fn is_elsewhere(&self) -> bool {
        self.process != std::process::id() || has_left()
    }

    fn handles(&self) -> PyResult<Handles> {
        let (formed_by, process) = (self.process, std::process::id());
        if formed_by != process {
            return Err(PyRuntimeError::new_err(format!(
                "process {formed_by} has formed this group, and its child {process} cannot use it: call \
                 init_process_group after the fork, or start processes by spawn"
            )));
        }
        let left = || PyRuntimeError::new_err("this rank has left the group");
        lock(&self.handles).clone().ok_or_else(left)
    }
}

impl Drop for PyGroup {
    fn drop(&mut self) {
        let handles = lock(&self.handles).take();
        if self.is_elsewhere() {
            std::mem::forget(handles);
        } else if handles.is_some() {
            // The collector runs this with Python's lock held, which callbacks of the last operations may need.
            Python::attach(|py| py.detach(move || drop(handles)));
        }
    }
}
