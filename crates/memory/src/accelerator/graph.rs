//! Work of a card that is told once and launched again, as one piece of work.
//!
//! A graph has the addresses of its memory, so a launch is right only if what lay there still does. Memory of two kinds sees to
//! this. What the work takes and gives back lies in an [`Arena`], which nothing else uses. All other memory that it has used is
//! held by the graph, and each launch states these uses again, as the work itself would: what else uses the memory is ordered by
//! events, or refused.
//!
//! What changes from launch to launch has to come from the memory of the card, written there before. Nothing that the host computes
//! may be an argument, and nothing may bring memory of the host.
//!
//! Input: work as it is put into a stream. Output: the same work, launched. This module does not know what the work computes.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use paceline_cuda as cuda;
use paceline_trace::Shapes;

use super::{Body, DeviceStream, QueueState, Runs, What, lock};
use crate::event::{Event, Signal};
use crate::{Access, Allocator, Buffer, Category, MemoryError, Result};

/// The name of a launch, in traces and errors.
const NAME: &str = "graph";

/// Memory for work that is launched again: blocks that nothing else takes. Clones are the same arena.
///
/// Work of different graphs may share an arena if all of it goes to one stream, and if none of it leaves something there.
#[derive(Clone, Debug)]
pub struct Arena(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    memory: Allocator,
    stream: DeviceStream,
    number: u32,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.memory.0.heap().dissolve(self.number);
    }
}

/// Work that is captured when it is made for the third time, and launched from then on.
///
/// The first time it is work like any other, and what it needs only once comes into being: compiled kernels, plans of products,
/// tables. The second time, the arena gets as much memory as the work takes. A capture forbids to ask for any of these.
#[derive(Debug)]
pub struct Segment<T> {
    arena: Arena,
    state: State<T>,
}

#[derive(Debug)]
enum State<T> {
    New,
    Known,
    Warm,
    Captured(Graph, T),
}

#[derive(Debug)]
struct Graph {
    graph: Arc<cuda::Graph>,
    arena: Arena,
    /// What the work does with memory outside of the arena.
    uses: Vec<Use>,
}

/// A use of memory by captured work.
#[derive(Clone, Debug)]
struct Use {
    buffer: Buffer,
    range: Range<usize>,
    access: Access,
    op: &'static str,
}

/// The uses of memory outside of the arena by work that is captured.
#[derive(Clone, Debug)]
pub(crate) struct Noted {
    arena: u32,
    uses: Arc<Mutex<Vec<Use>>>,
}

impl Noted {
    /// Notes a use. Memory of the arena goes back to it within the work.
    pub(crate) fn note(
        &self,
        buffer: &Buffer,
        range: &Range<usize>,
        access: Access,
        op: &'static str,
    ) {
        if buffer.arena() != Some(self.arena) {
            lock(&self.uses).push(Use { buffer: buffer.clone(), range: range.clone(), access, op });
        }
    }

    fn take(&self) -> Vec<Use> {
        std::mem::take(&mut *lock(&self.uses))
    }
}

/// What a stream knows of a capture.
#[derive(Debug)]
pub(super) struct Capture {
    thread: std::thread::ThreadId,
    noted: Noted,
    /// What was put into the stream last.
    before: Option<Event>,
    /// The work, which is done when the graph is.
    work: Vec<(Event, Signal)>,
}

/// A capture that has begun. It ends with this value, also if something panics.
struct Capturing<'a> {
    stream: &'a DeviceStream,
    on_card: &'a cuda::Stream,
    is_open: bool,
}

impl Capturing<'_> {
    /// The work, its uses of memory, and the graph.
    fn end(&mut self) -> (Vec<(Event, Signal)>, Vec<Use>, cuda::Result<cuda::Graph>) {
        self.is_open = false;
        let mut state = lock(&self.stream.0.state);
        let capture = state.capture.take().expect("begun with this value");
        let ended = self.on_card.end_capture();
        // None of the work is in the stream.
        state.last = capture.before;
        drop(state);
        self.stream.0.is_free.notify_all();
        (capture.work, capture.noted.take(), ended)
    }
}

impl Drop for Capturing<'_> {
    fn drop(&mut self) {
        if self.is_open {
            withdraw(self.end().0);
        }
    }
}

/// The work will not run.
fn withdraw(work: Vec<(Event, Signal)>) {
    work.into_iter().for_each(|(_, signal)| signal.withdraw());
}

impl Capture {
    pub(super) fn noted(&self) -> Noted {
        self.noted.clone()
    }
}

impl QueueState {
    /// Whether another thread captures, so that this one has to wait with its own work.
    pub(super) fn is_captured_elsewhere(&self) -> bool {
        self.capture.as_ref().is_some_and(|of| of.thread != std::thread::current().id())
    }

    /// Lets the driver note work of this thread.
    pub(super) fn capture(&mut self, body: Body, event: Event, signal: Signal) -> Result<Event> {
        match (body(), &mut self.capture) {
            (Ok(()), Some(capture)) => {
                capture.work.push((event.clone(), signal));
                self.last = Some(event.clone());
                Ok(event)
            }
            (outcome, _) => {
                signal.withdraw();
                let problem = outcome.err().unwrap_or_default();
                Err(MemoryError::NotCaptured(problem))
            }
        }
    }
}

/// Errors if this work cannot be captured.
pub(super) fn check(what: What, waits: &[Event]) -> Result<()> {
    let problem = match what {
        What::Copy(copy) if copy.uses_bus() => "a copy from or to memory of the host",
        _ if !waits.is_empty() => "a wait for another stream",
        _ => return Ok(()),
    };
    Err(MemoryError::NotCaptured(problem.to_owned()))
}

impl DeviceStream {
    /// Errors with what the host does if this thread captures.
    pub(super) fn refuse_in_capture(&self, what: &str) -> Result<()> {
        let state = lock(&self.0.state);
        if state.capture.is_some() && !state.is_captured_elsewhere() {
            Err(MemoryError::NotCaptured(what.to_owned()))
        } else {
            Ok(())
        }
    }

    /// Whether all work is in the stream of the card.
    fn is_up_to_date(&self) -> bool {
        !matches!(&self.0.runs, Runs::Card(feed) if !feed.is_up_to_date())
    }

    fn begin_capture<'a>(&'a self, on_card: &'a cuda::Stream, arena: u32) -> Result<Capturing<'a>> {
        self.refuse_in_capture("another graph")?;
        // What the stream waits for comes before the graph.
        self.launch::<MemoryError>("capture", Shapes::default(), |_| Ok(Box::new(|| Ok(()))))?;
        let mut state = lock(&self.0.state);
        // Work that another thread prepares goes into the stream, and is no part of the graph, nor is what waits for the host.
        loop {
            let is_behind = !self.is_up_to_date();
            state = match state.last.clone() {
                Some(last) if is_behind => {
                    drop(state);
                    last.block();
                    // The thread that keeps the work counts it a moment after it is done.
                    std::thread::yield_now();
                    lock(&self.0.state)
                }
                _ if state.preparing.is_some() || state.is_captured_elsewhere() => {
                    self.0.is_free.wait(state).unwrap_or_else(PoisonError::into_inner)
                }
                _ => break,
            };
        }
        on_card.begin_capture()?;
        let (thread, uses) = (std::thread::current().id(), Arc::default());
        let (noted, before) = (Noted { arena, uses }, state.last.clone());
        state.capture = Some(Capture { thread, noted, before, work: Vec::new() });
        Ok(Capturing { stream: self, on_card, is_open: true })
    }
}

impl Arena {
    /// An arena in the memory of a card, for work of the stream of this memory. Errors on other devices.
    pub fn new(memory: &Allocator) -> Result<Self> {
        let on_card = memory.home().filter(|stream| stream.card().is_some());
        let Some(stream) = on_card.cloned() else {
            let problem = format!("work of the device {}", memory.device());
            return Err(MemoryError::NotCaptured(problem));
        };
        let number = memory.0.heap().new_arena();
        Ok(Self(Arc::new(Inner { memory: memory.clone(), stream, number })))
    }

    /// Runs something whose memory comes from the arena. Errors if it leaves some in use.
    fn run<T, E: From<MemoryError>>(&self, run: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        /// Leaves the arena, also if something panics.
        struct Within<'a>(&'a Allocator, Option<u32>);
        impl Drop for Within<'_> {
            fn drop(&mut self) {
                self.0.0.heap().enter(self.1);
            }
        }
        let Inner { memory, number, .. } = &*self.0;
        let outside = memory.0.heap().enter(Some(*number));
        let within = Within(memory, outside);
        let made = run()?;
        drop(within);
        match memory.0.heap().arena_bytes(*number) {
            (0, _) => Ok(made),
            (bytes, _) => {
                let problem = format!("{bytes} bytes of memory that it leaves in use");
                Err(MemoryError::NotCaptured(problem).into())
            }
        }
    }

    /// Captures what `run` puts into the stream, and launches it.
    fn capture<T, E: From<MemoryError>>(
        &self,
        run: impl FnOnce() -> Result<T, E>,
    ) -> Result<(Graph, T), E> {
        let stream = &self.0.stream;
        let on_card = stream.card().expect("an arena is memory of a card").clone();
        let mut capturing = stream.begin_capture(&on_card, self.0.number)?;
        let made = self.run(run);
        let (work, uses, ended) = capturing.end();
        let launched = made.and_then(|made| {
            let graph = Arc::new(ended.map_err(MemoryError::from)?);
            let graph = Graph { graph, arena: self.clone(), uses: together(uses) };
            let launched = graph.launch()?;
            Ok((graph, made, launched))
        });
        match launched {
            Ok((graph, made, launched)) => {
                if launched.point().is_none() {
                    // It waits for the host.
                    launched.block();
                }
                if let Some(point) = launched.point() {
                    work.iter().for_each(|(event, _)| event.ask(point.clone()));
                }
                launched.has_parts(work.into_iter().map(|(_, signal)| signal).collect());
                Ok((graph, made))
            }
            Err(error) => {
                withdraw(work);
                Err(error)
            }
        }
    }
}

/// The uses of memory, each range once for each kind of access, as far as ranges touch.
fn together(mut uses: Vec<Use>) -> Vec<Use> {
    uses.retain(|of| !of.range.is_empty());
    let place = |of: &Use| (of.buffer.address(), of.access == Access::Read, of.range.start);
    uses.sort_by_key(place);
    uses.dedup_by(|next, of| {
        let touches = of.buffer.is_same(&next.buffer)
            && of.access == next.access
            && next.range.start <= of.range.end;
        if touches {
            of.range.end = of.range.end.max(next.range.end);
        }
        touches
    });
    uses
}

impl Graph {
    fn launch(&self) -> Result<Event> {
        let Inner { memory, stream, number } = &*self.arena.0;
        let launched = stream.launch(NAME, Shapes::default(), |event| {
            for Use { buffer, range, access, op } in &self.uses {
                buffer.queue(range.clone(), *access, op, event)?;
            }
            let on_card = stream.card().expect("an arena is memory of a card").clone();
            let graph = self.graph.clone();
            let body: Body = Box::new(move || {
                // SAFETY: the captured work had the right to its uses of memory. Outside of the arena, the same uses are
                // queued for this launch, of buffers that the graph holds. In the arena, nothing is in use between two
                // pieces of work of this stream, and no other work gets memory there. The stream puts one piece of work after
                // the other to the card, so no other thread uses the graph.
                unsafe { on_card.replay(&graph) }.map_err(|error| error.to_string())
            });
            Ok::<_, MemoryError>(body)
        })?;
        // Of the arena, the account knows only what is in use while work is told.
        let (_, bytes) = memory.0.heap().arena_bytes(*number);
        memory.0.account.add(Category::Activations, bytes, 0);
        memory.0.account.remove(Category::Activations, bytes, 0);
        Ok(launched)
    }
}

impl<T: Clone> Segment<T> {
    /// Work that was not made yet.
    pub fn new(arena: &Arena) -> Self {
        Self { arena: arena.clone(), state: State::New }
    }

    /// Makes the work. `run` tells it, and is called the first three times only: then it has to do the same each time, and what it
    /// returns the third time is returned from then on.
    ///
    /// Errors with what `run` does. From the second time on it must leave no memory in use that it takes, and the third time it must
    /// do nothing that a graph cannot have: waits of the host or for other streams, copies from or to memory of the host, or more
    /// memory than the second time.
    pub fn run<E: From<MemoryError>>(
        &mut self,
        run: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        match &self.state {
            State::New => {
                let made = run()?;
                self.state = State::Known;
                Ok(made)
            }
            State::Known => {
                let made = self.arena.run(run)?;
                self.state = State::Warm;
                Ok(made)
            }
            State::Warm => {
                let (graph, made) = self.arena.capture(run)?;
                self.state = State::Captured(graph, made.clone());
                Ok(made)
            }
            State::Captured(graph, made) => {
                graph.launch()?;
                Ok(made.clone())
            }
        }
    }
}
