//! Collectives and point-to-point calls as work of a stream.
//!
//! When a call starts it sends what the other ranks need of it. It is over when everything that it needs has come. The
//! calls of a group wait together. A send is over when its message was taken, so two ranks that both send first wait
//! forever, as with NCCL.

use std::sync::{Arc, Mutex, PoisonError};

use crate::driver::{Progress, Task};
use crate::fault::Fault;
use crate::memory::DeviceMemory;

use super::communicator::{Communicator, Expected, INTERNAL_ERROR, SYSTEM_ERROR, Sent};
use super::reduce::{Element, Reduction, reduce};

/// What is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Kind {
    AllReduce(Reduction),
    AllGather,
    ReduceScatter(Reduction),
    Broadcast { root: usize },
    Reduce(Reduction, usize),
    Send { to: usize },
    Receive { from: usize },
}

/// One call.
#[derive(Clone, Debug)]
pub struct Call {
    /// The communicator.
    pub communicator: Arc<Communicator>,
    /// What is called.
    pub kind: Kind,
    /// Where it reads.
    pub send: u64,
    /// Where it writes.
    pub receive: u64,
    /// Elements: of all ranks together for a sum, of one rank where parts are gathered or scattered.
    pub count: usize,
    /// The elements' type.
    pub element: Element,
}

#[derive(Default)]
struct State {
    started: bool,
    sent: Vec<Sent>,
    expected: Vec<Expected>,
    /// What each rank gave.
    parts: Vec<Vec<u8>>,
}

/// The calls of a group on one stream.
pub struct Group(Vec<(Call, Mutex<State>)>);

impl Group {
    /// Work of these calls.
    pub fn new(calls: Vec<Call>) -> Self {
        Self(calls.into_iter().map(|call| (call, Mutex::default())).collect())
    }
}

impl Task for Group {
    fn advance(&self, memory: &mut DeviceMemory) -> Result<Progress, Fault> {
        let mut all_done = true;
        for (call, state) in &self.0 {
            let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
            if !state.started {
                call.start(&mut state, memory).map_err(|fault| call.blame(fault))?;
                state.started = true;
            }
        }
        for (call, state) in &self.0 {
            let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
            all_done &= call.has_all(&mut state).map_err(|fault| call.blame(fault))?;
        }
        if !all_done {
            return Ok(Progress::Pending);
        }
        for (call, state) in &self.0 {
            let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
            // A graph runs the same work again.
            let state = std::mem::take(&mut *state);
            if !call.communicator.is_aborted() {
                call.finish(&state.parts, memory).map_err(|fault| call.blame(fault))?;
            }
        }
        Ok(Progress::Done)
    }
}

impl Call {
    fn bytes(&self) -> usize {
        self.count * self.element.bytes()
    }

    /// The call as every rank that takes part must make it.
    fn text(&self) -> String {
        let kind = match self.kind {
            Kind::Send { .. } | Kind::Receive { .. } => "send".to_owned(),
            kind => format!("{kind:?}"),
        };
        format!("{kind} of {} {:?}", self.count, self.element)
    }

    fn blame(&self, fault: Fault) -> Fault {
        self.communicator.fail(INTERNAL_ERROR);
        fault.at(format!("NCCL, rank {}: {}", self.communicator.rank, self.text()))
    }

    /// What goes to a rank: an address, if anything does.
    fn outgoing(&self, to: usize) -> Option<u64> {
        let own = self.communicator.rank;
        match self.kind {
            Kind::Send { to: peer } => (to == peer).then_some(self.send),
            Kind::Receive { .. } => None,
            _ if to == own => None,
            Kind::AllReduce(_) | Kind::AllGather => Some(self.send),
            Kind::ReduceScatter(_) => Some(self.send + (to * self.bytes()) as u64),
            Kind::Broadcast { root } => (own == root).then_some(self.send),
            Kind::Reduce(_, root) => (to == root).then_some(self.send),
        }
    }

    fn comes_from(&self, from: usize) -> bool {
        let own = self.communicator.rank;
        match self.kind {
            Kind::Receive { from: peer } => from == peer,
            Kind::Send { .. } => false,
            _ if from == own => false,
            Kind::AllReduce(_) | Kind::AllGather | Kind::ReduceScatter(_) => true,
            Kind::Broadcast { root } => from == root,
            Kind::Reduce(_, root) => own == root,
        }
    }

    /// The own contribution's address, if there is one.
    fn own_part(&self) -> Option<u64> {
        let own = self.communicator.rank;
        match self.kind {
            Kind::AllReduce(_) | Kind::AllGather | Kind::Reduce(..) => Some(self.send),
            Kind::ReduceScatter(_) => Some(self.send + (own * self.bytes()) as u64),
            Kind::Broadcast { root } => (own == root).then_some(self.send),
            Kind::Send { .. } | Kind::Receive { .. } => None,
        }
    }

    fn start(&self, state: &mut State, memory: &DeviceMemory) -> Result<(), Fault> {
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
    fn has_all(&self, state: &mut State) -> Result<bool, Fault> {
        if self.communicator.is_aborted() {
            return Ok(true);
        }
        let State { expected, parts, .. } = state;
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
        let is_send = matches!(self.kind, Kind::Send { .. });
        let taken = !is_send || state.sent.iter().all(Sent::is_taken);
        Ok(state.expected.is_empty() && taken)
    }

    fn finish(&self, parts: &[Vec<u8>], memory: &mut DeviceMemory) -> Result<(), Fault> {
        let own = self.communicator.rank;
        match self.kind {
            Kind::AllReduce(op) | Kind::ReduceScatter(op) => {
                memory.store(self.receive, &reduce(self.element, op, parts))
            }
            Kind::Reduce(op, root) if own == root => {
                memory.store(self.receive, &reduce(self.element, op, parts))
            }
            Kind::AllGather => memory.store(self.receive, &parts.concat()),
            Kind::Broadcast { root: from } | Kind::Receive { from } => {
                memory.store(self.receive, &parts[from])
            }
            Kind::Reduce(..) | Kind::Send { .. } => Ok(()),
        }
    }
}
