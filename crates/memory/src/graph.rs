//! Work of a card that is captured once and replayed as one piece of work.
//!
//! A graph has the addresses of its memory, so a replay is right only if that memory is still in use as it was. Memory that the
//! work takes and gives back lies in a [`GraphPool`], which nothing else uses. All other memory that it has used is held by the
//! graph, and each launch queues these uses again, as the work itself would.
//!
//! Values that change from launch to launch have to be in the memory of the card before. No argument may be computed by the
//! host, and no copy may involve memory of the host.
//!
//! Input: work as it is put into a stream. Output: the same work, launched. This module does not know the kernels in it.

use std::sync::Arc;

use paceline_cuda as cuda;
use paceline_trace::Shapes;

use crate::queues::capture::withdraw;
use crate::queues::used_memory::CapturedUse;
use crate::{Access, Allocator, Body, Category, DeviceStream, Event, MemoryError, Result};

/// Memory for replayed work: blocks that nothing else takes, like a private pool of PyTorch's graphs. Clones are the same pool.
///
/// Graphs may share a pool if their work goes to one stream and leaves no memory of the pool in use.
#[derive(Clone, Debug)]
pub struct GraphPool(Arc<PoolMemory>);

#[derive(Debug)]
struct PoolMemory {
    memory: Allocator,
    stream: DeviceStream,
    on_card: cuda::Stream,
    number: u32,
}

impl Drop for PoolMemory {
    fn drop(&mut self) {
        self.memory.0.heap().dissolve(self.number);
    }
}

/// Work that is captured when it runs for the third time, and replayed from then on.
///
/// The first run prepares everything that is needed only once: compiled kernels, plans of products, tables. In the second run,
/// the pool gets as much memory as the work takes. A capture allows neither.
#[derive(Debug)]
pub struct GraphedWork<T> {
    pool: GraphPool,
    phase: GraphPhase<T>,
}

#[derive(Debug)]
enum GraphPhase<T> {
    New,
    /// The work ran once.
    Prepared,
    /// The work ran with memory of the pool.
    Warm,
    Captured(CapturedGraph, T),
}

#[derive(Debug)]
struct CapturedGraph {
    graph: Arc<cuda::Graph>,
    pool: GraphPool,
    /// Uses of memory outside of the pool.
    uses: Vec<CapturedUse>,
}

impl Allocator {
    /// Whether memory comes from a [`GraphPool`] now: from the second time that a [`GraphedWork`] runs.
    pub fn is_for_graph(&self) -> bool {
        self.0.heap().graph_pool.is_some()
    }
}

impl GraphPool {
    /// A pool in the memory of a card, for work of the stream of this memory. Errors on other devices.
    pub fn new(memory: &Allocator) -> Result<Self> {
        let streams =
            memory.home().and_then(|stream| Some((stream.clone(), stream.card()?.clone())));
        let Some((stream, on_card)) = streams else {
            let problem = format!("work of the device {}", memory.device());
            return Err(MemoryError::NotCaptured(problem));
        };
        let number = memory.0.heap().next_id();
        Ok(Self(Arc::new(PoolMemory { memory: memory.clone(), stream, on_card, number })))
    }

    /// Runs something whose memory comes from the pool. Errors if it leaves some in use.
    fn run<T, E: From<MemoryError>>(&self, run: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        /// Leaves the pool, also if something panics.
        struct Within<'a>(&'a Allocator, Option<u32>);
        impl Drop for Within<'_> {
            fn drop(&mut self) {
                self.0.0.heap().enter(self.1);
            }
        }
        let PoolMemory { memory, number, .. } = &*self.0;
        let outside = memory.0.heap().enter(Some(*number));
        let within = Within(memory, outside);
        let made = run()?;
        drop(within);
        match memory.0.heap().graph_pool_bytes(*number) {
            (0, _) => Ok(made),
            (bytes, _) => {
                let problem = format!("{bytes} bytes of memory that it leaves in use");
                Err(MemoryError::NotCaptured(problem).into())
            }
        }
    }

    /// Captures the work that `run` puts into the stream, and launches it.
    fn capture<T, E: From<MemoryError>>(
        &self,
        run: impl FnOnce() -> Result<T, E>,
    ) -> Result<(CapturedGraph, T), E> {
        let PoolMemory { stream, on_card, number, .. } = &*self.0;
        let mut capture = stream.begin_capture(on_card, *number)?;
        let made = self.run(run);
        let (work, ended) = capture.end();
        let launched = made.and_then(|made| {
            let graph = Arc::new(ended.map_err(MemoryError::from)?);
            let uses = work.iter().flat_map(|(event, _)| event.take_captured()).collect();
            let graph = CapturedGraph { graph, pool: self.clone(), uses: merge(uses) };
            let launched = graph.launch()?;
            Ok((graph, made, launched))
        });
        match launched {
            Ok((graph, made, launched)) => {
                if launched.runner().is_none() {
                    // It waits for the host.
                    launched.block();
                }
                if let Some(runner) = launched.runner() {
                    work.iter().for_each(|(event, _)| event.set_runner(runner.clone()));
                }
                launched.add_parts(work.into_iter().map(|(_, signal)| signal).collect());
                Ok((graph, made))
            }
            Err(error) => {
                withdraw(work);
                Err(error)
            }
        }
    }
}

/// Merges uses of touching ranges of the same memory with the same access.
fn merge(mut uses: Vec<CapturedUse>) -> Vec<CapturedUse> {
    uses.retain(|of| !of.range.is_empty());
    let address = |of: &CapturedUse| Arc::as_ptr(&of.memory).cast::<()>();
    uses.sort_by_key(|of| (address(of), of.access == Access::Read, of.range.start));
    uses.dedup_by(|next, of| {
        let touches = address(of) == address(next)
            && of.access == next.access
            && next.range.start <= of.range.end;
        if touches {
            of.range.end = of.range.end.max(next.range.end);
        }
        touches
    });
    uses
}

impl CapturedGraph {
    fn launch(&self) -> Result<Event> {
        let PoolMemory { memory, stream, on_card, number } = &*self.pool.0;
        let launched = stream.launch("graph", Shapes::default(), |event| {
            for CapturedUse { memory, range, access, op } in &self.uses {
                memory.clone().queue_use(range.clone(), *access, op, event)?;
            }
            let (on_card, graph) = (on_card.clone(), self.graph.clone());
            let body: Body = Box::new(move || {
                // SAFETY: the captured work had the right to its uses of memory. Outside of the pool, the same uses are
                // queued for this launch, of memory that the graph holds. In the pool, no memory is in use between two
                // pieces of work of this stream, and no other work gets memory there. The stream submits one piece of work
                // after the other to the card, so no other thread uses the graph.
                unsafe { on_card.replay(&graph) }.map_err(|error| error.to_string())
            });
            Ok::<_, MemoryError>(body)
        })?;
        // The account has counted memory of the pool only during the capture.
        let (_, bytes) = memory.0.heap().graph_pool_bytes(*number);
        memory.0.account.add(Category::Activations, bytes, 0);
        memory.0.account.remove(Category::Activations, bytes, 0);
        Ok(launched)
    }
}

impl<T: Clone> GraphedWork<T> {
    /// Work that has not run yet.
    pub fn new(pool: &GraphPool) -> Self {
        Self { pool: pool.clone(), phase: GraphPhase::New }
    }

    /// Runs the work. `run` submits it the first three times, and has to do the same each time; the third run is captured. Later
    /// calls replay the capture, and return the value of the third run.
    ///
    /// Errors if `run` does. From the second time on it must leave no memory in use that it takes. The third time it must not use
    /// anything that a graph cannot have: waits of the host, waits for other streams but by [`DeviceStream::wait_for`], copies from or to
    /// memory of the host, or more memory than the second time.
    pub fn run<E: From<MemoryError>>(
        &mut self,
        run: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        match &self.phase {
            GraphPhase::New => {
                let made = run()?;
                self.phase = GraphPhase::Prepared;
                Ok(made)
            }
            GraphPhase::Prepared => {
                let made = self.pool.run(run)?;
                self.phase = GraphPhase::Warm;
                Ok(made)
            }
            GraphPhase::Warm => {
                let (graph, made) = self.pool.capture(run)?;
                self.phase = GraphPhase::Captured(graph, made.clone());
                Ok(made)
            }
            GraphPhase::Captured(graph, made) => {
                graph.launch()?;
                Ok(made.clone())
            }
        }
    }
}
