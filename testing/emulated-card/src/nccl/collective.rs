//! Collectives and point-to-point calls as work of a stream.
//!
//! When a call starts it sends what the other ranks need of it. It is over when everything that it needs has come. The
//! calls of a group wait together. A send is over when its message was taken, so two ranks that both send first wait
//! forever, as with NCCL.

use std::sync::{Arc, Mutex, PoisonError};

use crate::driver::{CardTask, TaskProgress};
use crate::fault::Fault;
use crate::memory::DeviceMemory;

use super::communicator::{Expected, INTERNAL_ERROR, NcclCommunicator, SYSTEM_ERROR, Sent};
use super::reduce::{Element, NcclReduction, reduce};

/// The operation of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum NcclOp {
    AllReduce(NcclReduction),
    AllGather,
    ReduceScatter(NcclReduction),
    Broadcast { root: usize },
    Reduce(NcclReduction, usize),
    Send { to: usize },
    Receive { from: usize },
}

/// One call.
#[derive(Clone, Debug)]
pub struct NcclCall {
    pub communicator: Arc<NcclCommunicator>,
    pub kind: NcclOp,
    pub send: u64,
    pub receive: u64,
    /// Elements: of all ranks together for a sum, of one rank where parts are gathered or scattered.
    pub count: usize,
    pub element: Element,
    /// Whether it was made during a capture: on all ranks, or on none.
    pub is_captured: bool,
}

#[derive(Default)]
struct CallState {
    started: bool,
    sent: Vec<Sent>,
    expected: Vec<Expected>,
    /// The contribution of each rank.
    parts: Vec<Vec<u8>>,
}

/// The calls of a group on one stream.
pub struct CallGroup(Vec<(NcclCall, Mutex<CallState>)>);

impl CallGroup {
    /// Work of these calls.
    pub fn new(calls: Vec<NcclCall>) -> Self {
        Self(calls.into_iter().map(|call| (call, Mutex::default())).collect())
    }
}

impl CardTask for CallGroup {
    fn name(&self) -> &'static str {
        "ncclDevKernel_emulated"
    }

    fn is_of(&self, communicator: usize) -> bool {
        self.0.iter().any(|(call, _)| Arc::as_ptr(&call.communicator).addr() == communicator)
    }

    fn advance(&self, memory: &mut DeviceMemory) -> Result<TaskProgress, Fault> {
        let mut all_done = true;
        for (call, state) in &self.0 {
            let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
            if !state.started && !call.communicator.is_aborted() {
                call.start(&mut state, memory).map_err(|fault| call.blame(fault))?;
                state.started = true;
            }
        }
        for (call, state) in &self.0 {
            let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
            all_done &= call.has_all(&mut state).map_err(|fault| call.blame(fault))?;
        }
        if !all_done {
            return Ok(TaskProgress::Pending);
        }
        for (call, state) in &self.0 {
            let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
            // A graph runs the same work again.
            let state = std::mem::take(&mut *state);
            if !call.communicator.is_aborted() {
                call.finish(&state.parts, memory).map_err(|fault| call.blame(fault))?;
            }
        }
        Ok(TaskProgress::Done)
    }
}

impl NcclCall {
    fn bytes(&self) -> usize {
        self.count * self.element.bytes()
    }

    /// The call as every rank that takes part must make it.
    fn text(&self) -> String {
        let kind = match self.kind {
            NcclOp::Send { .. } | NcclOp::Receive { .. } => "send".to_owned(),
            kind => format!("{kind:?}"),
        };
        let place = if self.is_captured { " in a graph" } else { "" };
        format!("{kind} of {} {:?}{place}", self.count, self.element)
    }

    fn blame(&self, fault: Fault) -> Fault {
        self.communicator.fail(INTERNAL_ERROR);
        fault.at(format!("NCCL, rank {}: {}", self.communicator.rank, self.text()))
    }

    /// The address of the data that goes to a rank, if any does.
    fn outgoing(&self, to: usize) -> Option<u64> {
        let own = self.communicator.rank;
        match self.kind {
            NcclOp::Send { to: peer } => (to == peer).then_some(self.send),
            NcclOp::Receive { .. } => None,
            _ if to == own => None,
            NcclOp::AllReduce(_) | NcclOp::AllGather => Some(self.send),
            NcclOp::ReduceScatter(_) => Some(self.send + (to * self.bytes()) as u64),
            NcclOp::Broadcast { root } => (own == root).then_some(self.send),
            NcclOp::Reduce(_, root) => (to == root).then_some(self.send),
        }
    }

    fn comes_from(&self, from: usize) -> bool {
        let own = self.communicator.rank;
        match self.kind {
            NcclOp::Receive { from: peer } => from == peer,
            NcclOp::Send { .. } => false,
            _ if from == own => false,
            NcclOp::AllReduce(_) | NcclOp::AllGather | NcclOp::ReduceScatter(_) => true,
            NcclOp::Broadcast { root } => from == root,
            NcclOp::Reduce(_, root) => own == root,
        }
    }

    /// The own contribution's address, if there is one.
    fn own_part(&self) -> Option<u64> {
        let own = self.communicator.rank;
        match self.kind {
            NcclOp::AllReduce(_) | NcclOp::AllGather | NcclOp::Reduce(..) => Some(self.send),
            NcclOp::ReduceScatter(_) => Some(self.send + (own * self.bytes()) as u64),
            NcclOp::Broadcast { root } => (own == root).then_some(self.send),
            NcclOp::Send { .. } | NcclOp::Receive { .. } => None,
        }
    }

    fn start(&self, state: &mut CallState, memory: &DeviceMemory) -> Result<(), Fault> {
        let read = |at: u64| {
            let mut data = vec![0; self.bytes()];
            memory.read_out(at, &mut data).map(|()| data)
        };
        let communicator = &self.communicator;
        state.parts = vec![Vec::new(); communicator.size];
        if let Some(at) = self.own_part() {
            state.parts[communicator.rank] = read(at)?;
        }
        for peer in 0..communicator.size {
            if let Some(at) = self.outgoing(peer) {
                let sent = communicator.send(peer, &self.text(), &read(at)?);
                let sent = sent.map_err(|error| {
                    communicator.fail(SYSTEM_ERROR);
                    Fault::failed(error.to_string())
                })?;
                state.sent.push(sent);
            }
            if self.comes_from(peer) {
                state.expected.push(communicator.expect(peer));
            }
        }
        Ok(())
    }

    /// Takes what has come. `true` if nothing is missing.
    fn has_all(&self, state: &mut CallState) -> Result<bool, Fault> {
        if self.communicator.is_aborted() {
            return Ok(true);
        }
        let CallState { expected, parts, .. } = state;
        let mut wrong = None;
        expected.retain(|message| match message.take() {
            Some((call, data)) => {
                if call != self.text() {
                    wrong = Some(format!("rank {} calls {call}", message.from));
                }
                parts[message.from] = data;
                false
            }
            None => true,
        });
        if let Some(wrong) = wrong {
            return Err(Fault::failed(wrong));
        }
        let is_send = matches!(self.kind, NcclOp::Send { .. });
        let taken = !is_send || state.sent.iter().all(Sent::is_taken);
        Ok(state.expected.is_empty() && taken)
    }

    fn finish(&self, parts: &[Vec<u8>], memory: &mut DeviceMemory) -> Result<(), Fault> {
        let own = self.communicator.rank;
        match self.kind {
            NcclOp::AllReduce(op) | NcclOp::ReduceScatter(op) => {
                memory.store(self.receive, &reduce(self.element, op, parts))
            }
            NcclOp::Reduce(op, root) if own == root => {
                memory.store(self.receive, &reduce(self.element, op, parts))
            }
            NcclOp::AllGather => memory.store(self.receive, &parts.concat()),
            NcclOp::Broadcast { root: from } | NcclOp::Receive { from } => {
                memory.store(self.receive, &parts[from])
            }
            NcclOp::Reduce(..) | NcclOp::Send { .. } => Ok(()),
        }
    }
}
