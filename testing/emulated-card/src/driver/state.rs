//! Everything that the driver remembers: cards, streams, events, modules, and the handles that name them.
//!
//! One lock protects it all.

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::boundary::{Outcome, Status, stop_panics};
use crate::fault::Fault;
use crate::memory::DeviceMemory;
use crate::ptx::{self, PtxKernel};
use crate::random::Random;

use super::graph::{Graph, StreamCapture};
use super::pinned::PinnedMemory;
use super::settings::CardSettings;
use super::streams::EmulatedStream;
use super::work::WorkCounts;

/// Contexts are named by this number and the card's.
const CONTEXT: usize = 0xc0de_0000;
/// The stream 0 of each card.
const NULL_STREAM: usize = 0x100;

/// One card.
pub struct EmulatedCard {
    pub memory: DeviceMemory,
    /// The first fault. Every later call answers with its code.
    pub fault: Option<Fault>,
    pub retained: u32,
}

/// A loaded module.
pub struct Module {
    pub card: usize,
    pub functions: HashMap<String, usize>,
    pub variables: Arc<[u64]>,
}

/// A kernel that can be launched.
#[derive(Clone)]
pub struct LoadedKernel {
    pub kernel: Arc<PtxKernel>,
    pub variables: Arc<[u64]>,
    /// The most dynamic shared memory that a launch may ask for.
    pub dynamic_shared_limit: usize,
}

/// The stream or the capture on which an event was last recorded.
#[derive(Clone, Debug, Default)]
pub enum Recording {
    /// Nothing.
    #[default]
    Never,
    /// A stream, when it had so many pieces of work.
    Stream {
        stream: usize,
        /// Its pieces of work then.
        number: u64,
    },
    /// A capture, after these nodes.
    Capture {
        /// The capture's number.
        capture: usize,
        nodes: Vec<usize>,
    },
}

/// An event.
pub struct EmulatedEvent {
    pub card: usize,
    pub has_time: bool,
    pub recorded: Recording,
    /// When the record ran.
    pub at: Option<Instant>,
}

/// Everything that a handle names.
#[derive(Default)]
pub struct DriverObjects {
    /// Streams that exist, or still have work.
    pub streams: BTreeMap<usize, EmulatedStream>,
    pub events: HashMap<usize, EmulatedEvent>,
    /// Parsed modules, by their text. Each rank loads the same ones.
    pub parsed: HashMap<String, Arc<ptx::Module>>,
    pub modules: HashMap<usize, Module>,
    pub functions: HashMap<usize, LoadedKernel>,
    pub captures: BTreeMap<usize, StreamCapture>,
    pub graphs: HashMap<usize, Graph>,
    /// Graphs that can be launched.
    pub executables: HashMap<usize, Graph>,
    num_handles: usize,
}

impl DriverObjects {
    /// A handle that was never given out.
    pub fn handle(&mut self) -> usize {
        self.num_handles += 1;
        0x1000 + 16 * self.num_handles
    }
}

/// The driver.
pub struct Driver {
    /// From the environment.
    pub settings: CardSettings,
    pub initialized: bool,
    pub cards: Vec<EmulatedCard>,
    pub objects: DriverObjects,
    pub pinned: PinnedMemory,
    pub counts: WorkCounts,
    pub random: Random,
    /// Why the last call was refused.
    pub refusal: String,
}

impl Driver {
    fn new() -> Self {
        let settings = CardSettings::from_environment();
        let cards = (0..settings.cards).map(|card| EmulatedCard {
            memory: DeviceMemory::new(card, settings.memory_bytes),
            fault: None,
            retained: 0,
        });
        let stream = |card| (NULL_STREAM + card, EmulatedStream::new(card, true));
        let streams = (0..settings.cards).map(stream);
        Self {
            initialized: false,
            cards: cards.collect(),
            objects: DriverObjects { streams: streams.collect(), ..DriverObjects::default() },
            pinned: PinnedMemory::default(),
            counts: WorkCounts::default(),
            random: Random::new(settings.seed),
            refusal: String::new(),
            settings,
        }
    }

    /// Remembers why a call is refused.
    pub fn refuse(&mut self, status: Status, why: impl Into<String>) -> Status {
        self.refusal = why.into();
        status
    }

    /// The handle of a stream: 0 is the card's own stream.
    pub fn stream_handle(&self, card: usize, handle: usize) -> Result<usize, Status> {
        match handle {
            // 1 is its other name, CU_STREAM_LEGACY.
            0 | 1 => Ok(NULL_STREAM + card),
            _ => match self.objects.streams.get(&handle) {
                Some(stream) if !stream.destroyed => Ok(handle),
                _ => Err(Status::INVALID_HANDLE),
            },
        }
    }

    /// Whether this is the stream 0 of a card.
    pub fn is_null_stream(handle: usize) -> bool {
        (NULL_STREAM..0x1000).contains(&handle)
    }

    /// The sticky status of a card.
    pub fn healthy(&self, card: usize) -> Outcome {
        match self.cards.get(card).and_then(|card| card.fault.as_ref()) {
            Some(fault) => Err(Status(fault.kind.code())),
            None => Ok(()),
        }
    }

    /// Starts over as if the process had just begun, with the settings of the environment now.
    pub fn reset(&mut self) {
        *self = Self::new();
        CURRENT.set(0);
    }
}

static DRIVER: LazyLock<Mutex<Driver>> = LazyLock::new(|| Mutex::new(Driver::new()));

thread_local! {
    /// The thread's current context.
    static CURRENT: Cell<usize> = const { Cell::new(0) };
}

/// Locks the driver.
pub fn lock() -> MutexGuard<'static, Driver> {
    DRIVER.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The context of a card.
pub fn context_of(card: usize) -> usize {
    CONTEXT + 16 * card
}

/// The card of a context.
pub fn card_of(context: usize, cards: usize) -> Option<usize> {
    let card = context.checked_sub(CONTEXT)? / 16;
    (context_of(card) == context && card < cards).then_some(card)
}

/// The thread's current context, or 0.
pub fn current_context() -> usize {
    CURRENT.get()
}

/// Makes a context the thread's current one.
pub fn set_current_context(context: usize) {
    CURRENT.set(context);
}

/// Guards an exported function of the driver.
pub fn guard(body: impl FnOnce() -> Outcome) -> u32 {
    stop_panics(Status::UNKNOWN.0, body)
}

/// The driver and the card of the thread's context. An error if the thread has no context, or if the card has failed.
pub fn enter() -> Result<(MutexGuard<'static, Driver>, usize), Status> {
    let driver = lock();
    if !driver.initialized {
        return Err(Status::NOT_INITIALIZED);
    }
    let card = card_of(current_context(), driver.cards.len()).ok_or(Status::INVALID_CONTEXT)?;
    if driver.cards[card].retained == 0 {
        return Err(Status::INVALID_CONTEXT);
    }
    driver.healthy(card)?;
    Ok((driver, card))
}

/// As [`enter`], with the handle of a stream of the card.
pub fn enter_stream(stream: usize) -> Result<(MutexGuard<'static, Driver>, usize, usize), Status> {
    let (driver, card) = enter()?;
    let stream = driver.stream_handle(card, stream)?;
    Ok((driver, card, stream))
}
