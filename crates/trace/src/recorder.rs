//! The recorder of one rank: events of several threads, in buffers of fixed size.
//!
//! Each source of events (a thread, the allocator, the group) has a track. To record an event, a thread
//! reserves a slot of the track with one atomic addition and fills it once, without a lock or an
//! allocation. Threads may share a track. Events that do not fit are counted. While the recorder is off,
//! an event costs one atomic load. The module `kineto` of `paceline-analysis` writes the events to a trace
//! file.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use crate::{Span, now_ns};

/// The work of an operation: its arithmetic, its bytes, and the sizes of the first three tensors that it reads, with up to four
/// dimensions each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shapes {
    dims: [[u32; Self::DIMS]; Self::TENSORS],
    num_dims: [u8; Self::TENSORS],
    len: u8,
    /// Its floating-point operations.
    pub flop: u64,
    /// The bytes that it reads and writes.
    pub bytes: u64,
}

impl Shapes {
    /// How many tensors it holds; the sizes of further ones are left out.
    pub const TENSORS: usize = 3;
    const DIMS: usize = 4;

    /// The sizes of these tensors.
    pub fn new<'a>(tensors: impl IntoIterator<Item = &'a [usize]>) -> Self {
        let mut shapes = Self::default();
        for (at, dims) in tensors.into_iter().take(Self::TENSORS).enumerate() {
            let kept = dims.len().min(Self::DIMS);
            for (to, from) in shapes.dims[at].iter_mut().zip(dims) {
                *to = u32::try_from(*from).unwrap_or(u32::MAX);
            }
            shapes.num_dims[at] = kept as u8;
            shapes.len = at as u8 + 1;
        }
        shapes
    }

    /// The sizes, tensor by tensor.
    pub fn iter(&self) -> impl Iterator<Item = &[u32]> {
        let count = usize::from(self.len);
        self.dims[..count].iter().zip(self.num_dims).map(|(dims, n)| &dims[..usize::from(n)])
    }
}

/// A collective operation or a message of this rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Operation {
    /// The number of the group on this rank; 0 for the group of all ranks.
    pub group: u32,
    /// `all_reduce`, `broadcast`, ...
    pub name: &'static str,
    /// `sum`, `max`, ...; empty if the operation does not reduce.
    pub reduction: &'static str,
    /// Element type.
    pub dtype: &'static str,
    /// Its number in the group's sequence, the same on every rank.
    pub seq: u32,
    /// Elements that this rank contributes.
    pub in_elems: u64,
    /// Elements that this rank receives.
    pub out_elems: u64,
    /// Its times.
    pub times: OperationTimes,
}

/// The four times of an operation, in nanoseconds of [`now_ns`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OperationTimes {
    /// When it was submitted to the group.
    pub submitted_ns: u64,
    /// When it started, after waiting in the queue.
    pub started_ns: u64,
    /// When the last rank had arrived.
    pub present_ns: u64,
    /// When the result was complete.
    pub finished_ns: u64,
}

/// A kind of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Memory of the host.
    Pageable,
    /// Memory of the host that a device can copy by itself.
    Pinned,
    /// Memory of a device.
    Device,
}

/// An event. Times are nanoseconds of [`now_ns`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Event {
    /// A thread did some named work.
    Span {
        /// The name of the work.
        name: &'static str,
        /// When the thread did it.
        span: Span,
    },
    /// A stage of a pipeline did something with a micro-batch.
    Pass {
        /// The stage.
        stage: usize,
        /// The action.
        letters: &'static str,
        /// The micro-batch.
        micro_batch: usize,
        /// When.
        span: Span,
    },
    /// A kernel ran.
    Kernel {
        /// The kernel's name.
        name: &'static str,
        /// When the host put it into its stream. It takes no time where the host itself computes.
        launched: Span,
        /// When it ran.
        span: Span,
        /// The sizes of its tensors.
        shapes: Shapes,
    },
    /// Bytes were copied.
    Copy {
        /// When the host put the copy into its stream, or was blocked by it.
        launched: Span,
        /// When they were copied.
        span: Span,
        /// The number of bytes.
        bytes: u64,
        /// Where they came from, and where they went.
        places: (Place, Place),
    },
    /// The host waited for all work of a device.
    Synchronized {
        /// For how long.
        span: Span,
    },
    /// Memory was allocated or freed.
    Memory {
        /// When this happened.
        at_ns: u64,
        /// The use of the memory.
        category: &'static str,
        /// The number of bytes allocated, or, if negative, freed.
        delta_bytes: i64,
        /// Allocated bytes after this event, in all categories.
        allocated_bytes: u64,
        /// Bytes reserved from the system so far.
        reserved_bytes: u64,
        /// The address of the memory.
        address: u64,
    },
    /// A communication operation.
    Operation(Operation),
    /// A quantity has this value from now on.
    Counter {
        /// The name of the quantity.
        name: &'static str,
        /// When it changed.
        at_ns: u64,
        /// Its value.
        value: f64,
    },
    /// Something happened to one of several things, such as a gradient.
    Mark {
        /// The kind of event.
        name: &'static str,
        /// When it happened.
        at_ns: u64,
        /// The number of the thing.
        id: usize,
    },
}

/// The events of one source.
#[derive(Debug)]
pub struct Track {
    name: String,
    is_on: Arc<AtomicBool>,
    events: Box<[OnceLock<Event>]>,
    taken: AtomicUsize,
}

impl Track {
    /// The memory of a track with room for `capacity` events, in bytes.
    pub const fn bytes_of(capacity: usize) -> usize {
        capacity * size_of::<OnceLock<Event>>()
    }

    /// The name given when the track was created.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether events are recorded at the moment.
    pub fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Relaxed)
    }

    /// Records an event, if the recorder is on and the track has room.
    pub fn record(&self, event: Event) {
        if !self.is_on() {
            return;
        }
        let at = self.taken.fetch_add(1, Ordering::Relaxed);
        if let Some(place) = self.events.get(at) {
            // Each slot is reserved by one thread only, so it cannot be set already.
            let _ = place.set(event);
        }
    }

    /// Runs `work` and records it as a span.
    pub fn span<R>(&self, name: &'static str, work: impl FnOnce() -> R) -> R {
        if !self.is_on() {
            return work();
        }
        let start_ns = now_ns();
        let result = work();
        self.record(Event::Span { name, span: Span { start_ns, end_ns: now_ns() } });
        result
    }

    /// The recorded events, in the order in which their slots were reserved, without those that are still being written.
    pub fn events(&self) -> impl Iterator<Item = &Event> {
        let taken = self.taken.load(Ordering::Relaxed).min(self.events.len());
        self.events[..taken].iter().filter_map(OnceLock::get)
    }

    /// The number of events that did not fit.
    pub fn dropped(&self) -> u64 {
        self.taken.load(Ordering::Relaxed).saturating_sub(self.events.len()) as u64
    }
}

/// The tracks of one rank, switched on and off together.
#[derive(Debug, Default)]
pub struct Recorder {
    is_on: Arc<AtomicBool>,
    tracks: Vec<Arc<Track>>,
}

impl Recorder {
    /// A recorder without tracks, which is off.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a track with room for `capacity` events. All of its memory is written here, to avoid page faults later.
    pub fn track(&mut self, name: impl Into<String>, capacity: usize) -> Arc<Track> {
        let events = std::iter::repeat_with(OnceLock::new).take(capacity).collect();
        let (name, is_on, taken) = (name.into(), self.is_on.clone(), AtomicUsize::new(0));
        let track = Arc::new(Track { name, is_on, events, taken });
        self.tracks.push(track.clone());
        track
    }

    /// Switches recording on or off.
    pub fn set_on(&self, is_on: bool) {
        self.is_on.store(is_on, Ordering::Relaxed);
    }

    /// Its tracks, in the order of their addition.
    pub fn tracks(&self) -> &[Arc<Track>] {
        &self.tracks
    }

    /// The number of events that did not fit, on all tracks.
    pub fn dropped(&self) -> u64 {
        self.tracks.iter().map(|track| track.dropped()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_happens_while_it_is_on_is_kept() {
        let mut recorder = Recorder::new();
        let track = recorder.track("main", 8);
        track.span("before", || ());
        recorder.set_on(true);
        assert_eq!(track.span("during", || 7), 7);
        recorder.set_on(false);
        track.span("after", || ());
        let names = track.events().map(|event| match event {
            Event::Span { name, .. } => *name,
            other => panic!("{other:?}"),
        });
        assert_eq!(names.collect::<Vec<_>>(), ["during"]);
    }

    #[test]
    fn threads_share_a_track_and_what_finds_no_room_is_counted() {
        let mut recorder = Recorder::new();
        let track = recorder.track("memory", 1000);
        recorder.set_on(true);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let track = &track;
                scope.spawn(move || {
                    for id in 0..300 {
                        track.record(Event::Mark { name: "mark", at_ns: thread, id });
                    }
                });
            }
        });
        assert_eq!((track.events().count(), recorder.dropped()), (1000, 200));
        // The events of one thread are in order.
        let of_first = track.events().filter_map(|event| match event {
            Event::Mark { at_ns: 0, id, .. } => Some(*id),
            _ => None,
        });
        assert!(of_first.is_sorted());
    }

    #[test]
    fn shapes_keep_what_fits() {
        let dims: [&[usize]; 4] = [&[64, 28, 28, 1], &[3], &[1, 2, 3, 4, 5], &[9]];
        let shapes = Shapes::new(dims);
        let kept: Vec<&[u32]> = shapes.iter().collect();
        assert_eq!(kept, [&[64, 28, 28, 1][..], &[3], &[1, 2, 3, 4]]);
        assert_eq!(Shapes::default().iter().count(), 0);
    }
}
