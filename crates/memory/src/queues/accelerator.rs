//! Accelerators: devices with memory of their own. One is emulated on the processor ([`sim`](super::sim)); the others are cards
//! of NVIDIA's ([`card`](super::card)).
//!
//! Work that is put into a [`DeviceStream`](crate::DeviceStream) runs later. The host cannot reach the memory of the device;
//! copies bring data there and back. This module knows neither streams nor kernels.

use std::fmt;
use std::sync::{Arc, OnceLock};

use paceline_cuda::Card;
use paceline_trace::Track;

use super::sim::{SimSpec, Simulator};
use super::work::FirstFailure;
use crate::{Device, Result};

/// A device. Clones are the same device.
#[derive(Clone)]
pub struct Accelerator(pub(super) Arc<SharedAccelerator>);

pub(super) struct SharedAccelerator {
    pub(super) kind: DeviceKind,
    /// Traces of the work of a stream go to the track of its name.
    tracks: OnceLock<Vec<Arc<Track>>>,
    pub(super) failure: Arc<FirstFailure>,
}

pub(super) enum DeviceKind {
    Sim(Arc<Simulator>),
    Card(Card),
}

impl Accelerator {
    /// An emulated device.
    pub fn sim(spec: SimSpec) -> Self {
        Self::new(|failure| DeviceKind::Sim(Arc::new(Simulator::new(spec, failure))))
    }

    /// A card.
    pub fn cuda(card: Card) -> Self {
        Self::new(|_| DeviceKind::Card(card))
    }

    fn new(kind: impl FnOnce(Arc<FirstFailure>) -> DeviceKind) -> Self {
        let failure = Arc::<FirstFailure>::default();
        let (kind, tracks) = (kind(failure.clone()), OnceLock::new());
        Self(Arc::new(SharedAccelerator { kind, tracks, failure }))
    }

    /// The device that tensors in its memory name.
    pub fn device(&self) -> Device {
        match self.0.kind {
            DeviceKind::Sim(_) => Device::Sim,
            DeviceKind::Card(_) => Device::Cuda,
        }
    }

    /// The card; `None` on the emulated device.
    pub fn card(&self) -> Option<&Card> {
        match &self.0.kind {
            DeviceKind::Sim(_) => None,
            DeviceKind::Card(card) => Some(card),
        }
    }

    /// Whether its work runs on the processor.
    pub fn is_emulated(&self) -> bool {
        self.card().is_none_or(|card| card.name() == paceline_cuda::card::EMULATED)
    }

    /// Records the work of each stream on the track with the stream's name, while the recorder is on. Only the first call
    /// counts.
    pub fn record_on(&self, tracks: Vec<Arc<Track>>) {
        self.0.tracks.get_or_init(|| tracks);
    }

    pub(super) fn track(&self, name: &str) -> Option<&Arc<Track>> {
        self.0.tracks.get()?.iter().find(|track| track.name() == name)
    }

    /// Errors with the message of the first work that failed.
    pub fn check(&self) -> Result<()> {
        self.0.failure.check()
    }
}

impl fmt::Debug for Accelerator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0.kind {
            DeviceKind::Sim(simulator) => f.debug_tuple("Sim").field(&simulator.spec).finish(),
            DeviceKind::Card(card) => card.fmt(f),
        }
    }
}
